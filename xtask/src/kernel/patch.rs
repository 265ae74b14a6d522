//! Putting a series onto a tree: without fuzz, and only where each hunk says it belongs.

use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::cache::{self, Cache};
use super::error::{KernelError, io_error};
use super::run;
use super::series::{Hunk, Patch, Series};
use super::store::Store;

/// A pair of trees that differ by exactly the series.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PairTrees {
    pub(crate) base: String,
    pub(crate) patched: String,
    /// Titles of the patches that the tree held already.
    pub(crate) present: Vec<String>,
    /// Hunks that went in at another line than their header says, for the user to know.
    pub(crate) offsets: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Forward,
    Reverse,
}

/// Makes the pair for `series` on `tree`. A patch that applies in reverse is there already; base is the tree without
/// any of them, patched the tree with all of them.
pub(crate) fn pair(
    cache: &Cache,
    store: &Store<'_>,
    spec: &str,
    tree: &str,
    series: &Series,
) -> Result<PairTrees, KernelError> {
    let texts: Vec<String> = series.patches.iter().map(Patch::text).collect();
    let mut parts = vec![RECIPE, tree];
    parts.extend(texts.iter().map(String::as_str));
    // What a hunk's heading says decides too.
    let headings: Vec<&str> = series.patches.iter().flat_map(hunks).map(|(_, hunk)| &*hunk.heading).collect();
    parts.extend(headings);
    parts.extend(series.patches.iter().map(|patch| &*patch.title));
    let key = cache::key(&parts);
    let record = cache.path("pairs", &format!("{key}.json"));
    if let Some(pair) = cache::read_record::<PairTrees>(&record)
        && store.holds(&format!("base-{key}"), &pair.base)
        && store.holds(&format!("patched-{key}"), &pair.patched)
    {
        cache::touch(&record);
        return Ok(pair);
    }
    let pair = whole(fit(cache, store, tree, series)?, spec, series)?;
    store.keep(&format!("base-{key}"), &pair.base)?;
    store.keep(&format!("patched-{key}"), &pair.patched)?;
    cache::write_record(&record, &pair)?;
    Ok(pair)
}

/// The pair where every patch went in, else the first that did not.
fn whole(fit: Fit, spec: &str, series: &Series) -> Result<PairTrees, KernelError> {
    let mut pair =
        PairTrees { patched: fit.base.clone(), base: fit.base, present: Vec::new(), offsets: Vec::new() };
    for (at, (fate, patch)) in fit.fates.into_iter().zip(&series.patches).enumerate() {
        match fate.tried {
            Tried::Done { tree, offsets } => {
                pair.patched = tree;
                pair.offsets.extend(offsets.into_iter().map(|offset| format!("{}: {offset}", patch.title)));
            }
            Tried::Refused(refusal) => {
                return Err(KernelError::Patch {
                    number: at + 1,
                    series: series.name.clone(),
                    title: patch.title.clone(),
                    spec: spec.to_owned(),
                    why: refusal.to_string(),
                });
            }
        }
        pair.present.extend(fate.present.then(|| patch.title.clone()));
    }
    Ok(pair)
}

/// To be changed with the rules by which patches are applied.
const RECIPE: &str = "pair 1";

/// What came of a series on a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fit {
    /// The tree without the patches that it held already.
    pub(crate) base: String,
    /// What came of each patch, on top of base and of those before it that went in.
    pub(crate) fates: Vec<Fate>,
}

/// What came of a patch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fate {
    /// The tree held it already.
    pub(crate) present: bool,
    pub(crate) tried: Tried,
}

/// What came of trying to apply one patch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Tried {
    /// It is in.
    Done {
        /// The tree with it.
        tree: String,
        /// Hunks that went in at another line than their header says.
        offsets: Vec<String>,
    },
    /// It does not apply, or not where it says.
    Refused(Refusal),
}

/// Why a patch does not go in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// What a hunk changes is not there.
    #[error("in {path}, hunk {hunk} of {hunks} (line {line}){} does not match", meant_for(function.as_deref()))]
    NoMatch {
        /// The file.
        path: String,
        /// Which of the file's hunks, from 1.
        hunk: usize,
        /// How many there are.
        hunks: usize,
        /// The line that the hunk's header names.
        line: u64,
        /// The function that it names.
        function: Option<String>,
    },
    /// It would change another function than it means to.
    #[error(
        "in {path}, the hunk at line {line} is meant for {meant}(), but its context matches in {landed}() at line {landed_line}"
    )]
    OtherFunction {
        /// The file.
        path: String,
        /// The line that the hunk's header names.
        line: u64,
        /// The function that it names.
        meant: String,
        /// Where it would go.
        landed: String,
        /// And at which line.
        landed_line: u64,
    },
    /// The tree is the same with it as without it.
    #[error("it changes nothing")]
    Nothing,
    /// Whether the tree holds it cannot be told.
    #[error("it applies both forward and in reverse, so whether the tree holds it is ambiguous")]
    Ambiguous,
    /// What git says where it names no hunk: a file that is not there.
    #[error("{0}")]
    Other(String),
}

fn meant_for(function: Option<&str>) -> String {
    function.map_or(String::new(), |name| format!(", meant for {name}(),"))
}

/// Tries `series` on `tree`, patch by patch.
pub(crate) fn fit(cache: &Cache, store: &Store<'_>, tree: &str, series: &Series) -> Result<Fit, KernelError> {
    let texts: Vec<String> = series.patches.iter().map(Patch::text).collect();
    let parts: Vec<&str> = [tree].into_iter().chain(texts.iter().map(String::as_str)).collect();
    let index = format!("apply-{}-{}", cache::key(&parts), std::process::id());
    let work = Applier { store, index: cache.path("tmp", &index), loaded: RefCell::new(None) };
    let fit = work.fit(tree, series, &texts);
    // Made anew each time, with what git and an interrupt leave beside it.
    for left in [work.index.clone(), work.index.with_extension("lock"), work.index.with_extension("patch")] {
        let _ = fs::remove_file(left);
    }
    fit
}

struct Applier<'a> {
    store: &'a Store<'a>,
    index: PathBuf,
    /// The tree that the index holds. A patch that is refused leaves it as it was.
    loaded: RefCell<Option<String>>,
}

impl Applier<'_> {
    fn fit(&self, tree: &str, series: &Series, texts: &[String]) -> Result<Fit, KernelError> {
        let patches = || series.patches.iter().zip(texts);
        let mut base = tree.to_owned();
        // Whether the tree holds it, or why that cannot be told.
        let mut held = Vec::new();
        // Last first: a later patch may change what an earlier one brought.
        for (patch, text) in patches().rev() {
            held.push(match self.apply(&base, patch, text, Direction::Reverse)? {
                Tried::Refused(_) => Ok(false),
                Tried::Done { tree: without, .. } if without == base => Err(Refusal::Nothing),
                Tried::Done { tree: without, .. } => {
                    match self.apply(&base, patch, text, Direction::Forward)? {
                        Tried::Done { .. } => Err(Refusal::Ambiguous),
                        Tried::Refused(_) => {
                            base = without;
                            Ok(true)
                        }
                    }
                }
            });
        }
        let mut with = base.clone();
        let mut fates = Vec::new();
        for ((patch, text), held) in patches().zip(held.into_iter().rev()) {
            let fate = match held {
                Ok(present) => Fate { present, tried: self.apply(&with, patch, text, Direction::Forward)? },
                Err(refusal) => Fate { present: false, tried: Tried::Refused(refusal) },
            };
            if let Tried::Done { tree, .. } = &fate.tried {
                tree.clone_into(&mut with);
            }
            fates.push(fate);
        }
        Ok(Fit { base, fates })
    }

    fn apply(
        &self,
        tree: &str,
        patch: &Patch,
        text: &str,
        direction: Direction,
    ) -> Result<Tried, KernelError> {
        let file = self.index.with_extension("patch");
        fs::write(&file, text).map_err(io_error("write", &file))?;
        let progress = self.store.progress();
        if self.loaded.borrow().as_deref() != Some(tree) {
            let read_tree = self.store.git_with_index(&self.index, &["read-tree", tree]);
            run::read(progress, "read the tree", read_tree)?;
            self.loaded.replace(Some(tree.to_owned()));
        }
        let mut command = self
            .store
            .git_with_index(&self.index, &["apply", "--cached", "--verbose", "--whitespace=nowarn"]);
        if direction == Direction::Reverse {
            command.arg("--reverse");
        }
        command.arg(&file);
        let output = run::output(progress, "apply a patch", command, run::SHORT)?;
        // Of use to nobody once it is applied.
        let _ = fs::remove_file(&file);
        if !output.status.success() {
            return Ok(Tried::Refused(refusal(&output.stderr, patch, direction)));
        }
        self.loaded.replace(None);
        let write = self.store.git_with_index(&self.index, &["write-tree"]);
        let result = run::read(progress, "write the tree", write)?;
        self.loaded.replace(Some(result.clone()));
        // Looked at in the direction of the patch, whichever way it was applied.
        let (without, with) = match direction {
            Direction::Forward => (tree, result.as_str()),
            Direction::Reverse => (result.as_str(), tree),
        };
        if let Some(why) = self.strayed(patch, without, with)? {
            return Ok(Tried::Refused(why));
        }
        let offsets = offsets(&output.stderr).collect();
        Ok(Tried::Done { tree: result, offsets })
    }

    /// Says which hunk, if any, lies in another function than its header names.
    fn strayed(&self, patch: &Patch, without: &str, with: &str) -> Result<Option<Refusal>, KernelError> {
        let context = hunks(patch).map(|(_, hunk)| leading_context(hunk).count()).max().unwrap_or(0);
        let context = format!("-U{context}");
        let args =
            ["diff-tree", "-p", "--no-color", "--no-ext-diff", "--full-index", &context, without, with];
        let diff = self.store.read("compare the trees", &args)?;
        // Our own reader takes the answer apart; the subject only makes it a mail.
        let landed = super::series::parse(format!("[PATCH] x\n\n{diff}\n").as_bytes())
            .map_err(|source| KernelError::Series { name: "git's own answer".to_owned(), source })?;
        let landed: Vec<(&str, &Hunk)> = landed.iter().flat_map(hunks).collect();
        for (path, hunk) in hunks(patch) {
            let Some(meant) = function_of(&hunk.heading) else { continue };
            // Where the context itself holds the start of a function, the place is certain.
            if leading_context(hunk).any(starts_definition) {
                continue;
            }
            let found = landed.iter().find(|(there, other)| *there == path && same_change(hunk, other));
            let Some((_, found)) = found else { continue };
            let landed_in = function_of(&found.heading).unwrap_or("no function");
            if landed_in != meant {
                return Ok(Some(Refusal::OtherFunction {
                    path: path.to_owned(),
                    line: hunk.old_start,
                    meant: meant.to_owned(),
                    landed: landed_in.to_owned(),
                    landed_line: found.old_start,
                }));
            }
        }
        Ok(None)
    }
}

fn hunks(patch: &Patch) -> impl Iterator<Item = (&str, &Hunk)> {
    patch.files.iter().flat_map(|file| file.hunks.iter().map(|hunk| (file.path(), hunk)))
}

fn leading_context(hunk: &Hunk) -> impl Iterator<Item = &str> {
    hunk.lines.iter().map_while(|line| line.strip_prefix(' '))
}

/// Whether both remove and add the same lines.
fn same_change(one: &Hunk, other: &Hunk) -> bool {
    let changed = |hunk: &Hunk| -> Vec<String> {
        hunk.lines.iter().filter(|line| line.starts_with(['+', '-'])).cloned().collect()
    };
    changed(one) == changed(other)
}

/// Whether a source line starts a definition, as hunk headings quote them.
fn starts_definition(line: &str) -> bool {
    let label = line.trim_end().ends_with(':');
    line.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && !label
}

/// The function that a hunk heading names; `None` if it names none (a struct, a label, nothing).
fn function_of(heading: &str) -> Option<&str> {
    let (before, _) = heading.split_once('(')?;
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let name = before.trim_end();
    let start = name.rfind(|c| !is_part(c)).map_or(0, |at| at + 1);
    let name = &name[start..];
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_').then_some(name)
}

/// Offsets in what `git apply --verbose` says.
fn offsets(said: &str) -> impl Iterator<Item = String> {
    said.lines()
        .filter(|line| line.starts_with("Hunk #") && line.contains("offset"))
        .map(|line| line.trim_end_matches('.').to_owned())
}

/// Why a patch does not apply: file, hunk and function, from what git says.
fn refusal(said: &str, patch: &Patch, direction: Direction) -> Refusal {
    // "error: patch failed: mm/page_alloc.c:988"
    let failed = said.lines().find_map(|line| line.strip_prefix("error: patch failed: "));
    let place = failed.and_then(|place| place.rsplit_once(':'));
    let Some((path, line)) = place.and_then(|(path, line)| Some((path, line.parse::<u64>().ok()?))) else {
        let error = said.lines().find_map(|line| line.strip_prefix("error: ")).unwrap_or("git apply failed");
        return Refusal::Other(error.to_owned());
    };
    let in_file: Vec<&Hunk> =
        hunks(patch).filter(|(there, _)| *there == path).map(|(_, hunk)| hunk).collect();
    let start = |hunk: &Hunk| if direction == Direction::Forward { hunk.old_start } else { hunk.new_start };
    match in_file.iter().position(|hunk| start(hunk) == line) {
        Some(at) => Refusal::NoMatch {
            path: path.to_owned(),
            hunk: at + 1,
            hunks: in_file.len(),
            line,
            function: function_of(&in_file[at].heading).map(str::to_owned),
        },
        None => Refusal::Other(format!("in {path}, the hunk at line {line} does not match")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_name_functions() {
        assert_eq!(
            function_of("static inline void __free_one_page(struct page *page,"),
            Some("__free_one_page")
        );
        assert_eq!(function_of("int f (void)"), Some("f"));
        assert_eq!(function_of("struct zone {"), None);
        assert_eq!(function_of(""), None);
        assert_eq!(function_of("("), None);
    }

    #[test]
    fn a_label_is_no_definition() {
        assert!(starts_definition("static int f(void)"));
        assert!(!starts_definition("out:"));
        assert!(!starts_definition("\treturn 0;"));
        assert!(!starts_definition("#ifdef X"));
    }
}
