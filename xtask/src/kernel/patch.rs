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
    let work = Applier {
        store,
        index: cache.path("tmp", &format!("apply-{key}-{}", std::process::id())),
        loaded: RefCell::new(None),
    };
    let pair = work.pair(spec, tree, series, &texts);
    // Made anew each time, with what git and an interrupt leave beside it.
    for left in [work.index.clone(), work.index.with_extension("lock"), work.index.with_extension("patch")] {
        let _ = fs::remove_file(left);
    }
    let pair = pair?;
    store.keep(&format!("base-{key}"), &pair.base)?;
    store.keep(&format!("patched-{key}"), &pair.patched)?;
    cache::write_record(&record, &pair)?;
    Ok(pair)
}

/// To be changed with the rules by which patches are applied.
const RECIPE: &str = "pair 1";

struct Applier<'a> {
    store: &'a Store<'a>,
    index: PathBuf,
    /// The tree that the index holds. A patch that is refused leaves it as it was.
    loaded: RefCell<Option<String>>,
}

/// What came of trying to apply one patch.
enum Tried {
    Done {
        tree: String,
        offsets: Vec<String>,
    },
    /// It does not apply, or not where it says.
    Refused(String),
}

impl Applier<'_> {
    fn pair(
        &self,
        spec: &str,
        tree: &str,
        series: &Series,
        texts: &[String],
    ) -> Result<PairTrees, KernelError> {
        let refuse = |at: usize, why: String| KernelError::Patch {
            number: at + 1,
            series: series.name.clone(),
            title: series.patches[at].title.clone(),
            spec: spec.to_owned(),
            why,
        };
        // Last first: a later patch may change what an earlier one brought.
        let mut base = tree.to_owned();
        let mut present = vec![false; texts.len()];
        let mut offsets = Vec::new();
        for at in (0..texts.len()).rev() {
            let patch = &series.patches[at];
            let Tried::Done { tree: without, offsets: moved } =
                self.apply(&base, patch, &texts[at], Direction::Reverse)?
            else {
                continue;
            };
            if without == base {
                return Err(refuse(at, "it changes nothing".to_owned()));
            }
            if let Tried::Done { .. } = self.apply(&base, patch, &texts[at], Direction::Forward)? {
                let why = "it applies both forward and in reverse, so whether the tree holds it is ambiguous";
                return Err(refuse(at, why.to_owned()));
            }
            present[at] = true;
            base = without;
            offsets.splice(0..0, moved);
        }
        let mut patched = tree.to_owned();
        for at in 0..texts.len() {
            if present[at] {
                continue;
            }
            match self.apply(&patched, &series.patches[at], &texts[at], Direction::Forward)? {
                Tried::Done { tree: with, offsets: moved } => {
                    patched = with;
                    offsets.extend(moved);
                }
                Tried::Refused(why) => return Err(refuse(at, why)),
            }
        }
        let titles = series.patches.iter().zip(&present).filter(|(_, present)| **present);
        let present = titles.map(|(patch, _)| patch.title.clone()).collect();
        Ok(PairTrees { base, patched, present, offsets })
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
        let offsets = offsets(&output.stderr).map(|line| format!("{}: {line}", patch.title)).collect();
        Ok(Tried::Done { tree: result, offsets })
    }

    /// Says which hunk, if any, lies in another function than its header names.
    fn strayed(&self, patch: &Patch, without: &str, with: &str) -> Result<Option<String>, KernelError> {
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
                return Ok(Some(format!(
                    "in {path}, the hunk at line {} is meant for {meant}(), but its context matches in {landed_in}() at line {}",
                    hunk.old_start, found.old_start
                )));
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
fn refusal(said: &str, patch: &Patch, direction: Direction) -> String {
    // "error: patch failed: mm/page_alloc.c:988"
    let failed = said.lines().find_map(|line| line.strip_prefix("error: patch failed: "));
    let place = failed.and_then(|place| place.rsplit_once(':'));
    let Some((path, line)) = place.and_then(|(path, line)| Some((path, line.parse::<u64>().ok()?))) else {
        let error = said.lines().find_map(|line| line.strip_prefix("error: ")).unwrap_or("git apply failed");
        return error.to_owned();
    };
    let in_file: Vec<&Hunk> =
        hunks(patch).filter(|(there, _)| *there == path).map(|(_, hunk)| hunk).collect();
    let start = |hunk: &Hunk| if direction == Direction::Forward { hunk.old_start } else { hunk.new_start };
    let at = in_file.iter().position(|hunk| start(hunk) == line);
    match at {
        Some(at) => {
            let function = function_of(&in_file[at].heading);
            let meant = function.map_or(String::new(), |name| format!(", meant for {name}(),"));
            format!("in {path}, hunk {} of {} (line {line}){meant} does not match", at + 1, in_file.len())
        }
        None => format!("in {path}, the hunk at line {line} does not match"),
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
