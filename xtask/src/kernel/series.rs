//! Reading a series: from a folder of patches, an mbox, or a text that holds several mails.
//!
//! A diff is taken out of its mail by the line counts of its hunk headers, so nothing that follows it can slip in. What
//! comes out is a plain git patch per mail, whatever wrote the original.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use mail_parser::{MessageParser, MimeHeaders};

use super::config::{self, Wanted};

/// A series in the order in which it applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Series {
    /// As the user named it.
    pub(crate) name: String,
    pub(crate) patches: Vec<Patch>,
    /// Options that both kernels are built with: the fragment `config` in the series' folder.
    pub(crate) options: Vec<Wanted>,
}

/// One patch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Patch {
    pub(crate) title: String,
    pub(crate) files: Vec<FilePatch>,
}

/// What a patch does to one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FilePatch {
    /// `None` where the patch creates the file.
    pub(crate) old: Option<String>,
    /// `None` where the patch deletes the file.
    pub(crate) new: Option<String>,
    /// git's extended header lines that say something (modes, renames).
    extended: Vec<String>,
    pub(crate) hunks: Vec<Hunk>,
}

/// One hunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hunk {
    pub(crate) old_start: u64,
    pub(crate) new_start: u64,
    old_count: u64,
    new_count: u64,
    /// What follows the second `@@`.
    pub(crate) heading: String,
    /// The lines with their marks.
    pub(crate) lines: Vec<String>,
}

/// Why a series cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SeriesError {
    /// The file or folder cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// There is no such thing.
    #[error("it is neither a file, nor a folder, nor one of {}", known.join(", "))]
    Unknown {
        /// The series in kernels/patches/.
        known: Vec<String>,
    },
    /// Nothing in it applies to anything.
    #[error("there is no patch in it (replies and cover letters do not count)")]
    NoPatch,
    /// More than anybody would send.
    #[error("it is larger than {0}")]
    TooLarge(&'static str),
    /// A patch of the series is not there.
    #[error("patch {number} of {total} is missing")]
    Missing {
        /// Its number.
        number: u64,
        /// How many there should be.
        total: u64,
    },
    /// A number occurs twice.
    #[error("patch {number} is there twice: {first:?} and {second:?}")]
    Doubled {
        /// Its number.
        number: u64,
        /// One title.
        first: String,
        /// The other.
        second: String,
    },
    /// Two series in one file.
    #[error("it holds patches of several series: one says {first} patches, another {second}")]
    Mixed {
        /// One total.
        first: u64,
        /// The other.
        second: u64,
    },
    /// A hunk does not hold the lines that its header promises.
    #[error("{title:?}: the hunk at line {line} is damaged: {why}")]
    Hunk {
        /// The patch.
        title: String,
        /// Line in the mail's text, from 1.
        line: usize,
        /// What is wrong.
        why: &'static str,
    },
    /// The fragment of a folder cannot be understood.
    #[error("{}: {why}", path.display())]
    Config {
        /// The fragment.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Patches that we cannot represent.
    #[error("{title:?}: {what}")]
    Unsupported {
        /// The patch.
        title: String,
        /// What it has.
        what: String,
    },
}

const MAX_BYTES: u64 = 32 << 20;
const MAX_PATCHES: usize = 2000;
/// Mails that come on standard input, as `b4 review` gives them to a check command.
const STDIN: &str = "-";
/// In a folder of patches: a fragment as in kernels/config.
const CONFIG: &str = "config";

/// Reads the series called `name`, looking in `patches` (kernels/patches) for names.
pub(crate) fn read(name: &str, patches: &Path) -> Result<Series, SeriesError> {
    if name == STDIN {
        let list = parse(&bounded(std::io::stdin().lock(), Path::new("stdin"))?)?;
        return Ok(Series { name: "stdin".to_owned(), patches: list, options: Vec::new() });
    }
    let path =
        if names(patches).iter().any(|ours| ours == name) { patches.join(name) } else { PathBuf::from(name) };
    let list = if path.is_dir() {
        read_dir(&path)?
    } else if path.is_file() {
        parse(&read_bounded(&path)?)?
    } else {
        return Err(SeriesError::Unknown { known: names(patches) });
    };
    if list.is_empty() {
        return Err(SeriesError::NoPatch);
    }
    let options = if path.is_dir() { read_options(&path.join(CONFIG))? } else { Vec::new() };
    Ok(Series { name: name.to_owned(), patches: list, options })
}

fn read_options(path: &Path) -> Result<Vec<Wanted>, SeriesError> {
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let wrong = |why: String| SeriesError::Config { path: path.to_owned(), why };
    let text = String::from_utf8(read_bounded(path)?).map_err(|error| wrong(error.to_string()))?;
    config::parse(&text).map_err(wrong)
}

/// The series in kernels/patches/: folders that hold patches, and those one level deeper, such as `faults/nr-free`.
pub(crate) fn names(patches: &Path) -> Vec<String> {
    let mut names = Vec::new();
    for folder in folders(patches) {
        let name = |path: &Path| path.strip_prefix(patches).unwrap_or(path).to_string_lossy().into_owned();
        if holds_patches(&folder) {
            names.push(name(&folder));
        }
        names.extend(folders(&folder).iter().filter(|below| holds_patches(below)).map(|below| name(below)));
    }
    names.sort();
    names
}

fn folders(path: &Path) -> Vec<PathBuf> {
    let listing = fs::read_dir(path).into_iter().flatten().filter_map(Result::ok);
    listing.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

fn is_patch(path: &Path) -> bool {
    path.extension().is_some_and(|ext| ext == "patch" || ext == "diff")
}

fn holds_patches(folder: &Path) -> bool {
    fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok).any(|entry| is_patch(&entry.path()))
}

/// A folder holds its patches in the order of their names, one or more mails in each.
fn read_dir(folder: &Path) -> Result<Vec<Patch>, SeriesError> {
    let io = |source| SeriesError::Io { path: folder.to_owned(), source };
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if is_patch(&path) {
            paths.push(path);
        }
    }
    paths.sort();
    let mut patches = Vec::new();
    for path in paths {
        let mails = mails_of(&read_bounded(&path)?);
        let fallback = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        for mail in mails.into_iter().filter(|mail| !mail.is_reply()) {
            let files = diffs(&mail)?;
            if !files.is_empty() {
                let title = mail.title();
                let title = if title.is_empty() { fallback.clone() } else { title };
                patches.push(Patch { title, files });
            }
        }
        if patches.len() > MAX_PATCHES {
            return Err(SeriesError::TooLarge("2000 patches"));
        }
    }
    Ok(patches)
}

fn read_bounded(path: &Path) -> Result<Vec<u8>, SeriesError> {
    let file = fs::File::open(path).map_err(|source| SeriesError::Io { path: path.to_owned(), source })?;
    bounded(file, path)
}

fn bounded(reader: impl Read, path: &Path) -> Result<Vec<u8>, SeriesError> {
    let mut bytes = Vec::new();
    let read = reader.take(MAX_BYTES + 1).read_to_end(&mut bytes);
    read.map_err(|source| SeriesError::Io { path: path.to_owned(), source })?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(SeriesError::TooLarge("32 MiB"));
    }
    Ok(bytes)
}

/// The patches in the bytes of one file, in the order of their `[n/m]`.
pub(crate) fn parse(bytes: &[u8]) -> Result<Vec<Patch>, SeriesError> {
    let mut found = Vec::new();
    for mail in mails_of(bytes).into_iter().filter(|mail| !mail.is_reply()) {
        let files = diffs(&mail)?;
        if !files.is_empty() {
            found.push((mail.number(), Patch { title: mail.title(), files }));
        }
        if found.len() > MAX_PATCHES {
            return Err(SeriesError::TooLarge("2000 patches"));
        }
    }
    in_order(found)
}

/// Sorts by number; each must be there once. One patch alone is taken whatever its number: it was picked on purpose.
fn in_order(mut found: Vec<(Option<(u64, u64)>, Patch)>) -> Result<Vec<Patch>, SeriesError> {
    if found.is_empty() {
        return Err(SeriesError::NoPatch);
    }
    let totals: Vec<u64> = found.iter().filter_map(|(number, _)| number.map(|(_, total)| total)).collect();
    if found.len() == 1 || totals.is_empty() {
        return Ok(found.into_iter().map(|(_, patch)| patch).collect());
    }
    let total = totals[0];
    if let Some(&second) = totals.iter().find(|&&other| other != total) {
        return Err(SeriesError::Mixed { first: total, second });
    }
    // A patch without a number among numbered ones has no place to go.
    if let Some((_, patch)) = found.iter().find(|(number, _)| number.is_none()) {
        return Err(SeriesError::Unsupported {
            title: patch.title.clone(),
            what: "it has no number, but others in the file have".to_owned(),
        });
    }
    found.sort_by_key(|(number, _)| number.map_or(0, |(number, _)| number));
    let mut next = 1;
    let mut patches: Vec<Patch> = Vec::new();
    for (number, patch) in found {
        let number = number.map_or(0, |(number, _)| number);
        if number + 1 == next {
            let first = patches.last().map(|patch| patch.title.clone()).unwrap_or_default();
            return Err(SeriesError::Doubled { number, first, second: patch.title });
        }
        if number != next {
            return Err(SeriesError::Missing { number: next, total });
        }
        next += 1;
        patches.push(patch);
    }
    if next <= total {
        return Err(SeriesError::Missing { number: next, total });
    }
    Ok(patches)
}

/// A mail, as far as patches go.
#[derive(Clone, Debug, Default)]
struct Mail {
    subject: String,
    body: String,
}

impl Mail {
    fn is_reply(&self) -> bool {
        let subject = self.subject.trim_start().to_ascii_lowercase();
        ["re:", "aw:", "fwd:", "fw:"].iter().any(|mark| subject.starts_with(mark))
    }

    /// The subject without `[PATCH …]`.
    fn title(&self) -> String {
        let mut rest = self.subject.trim();
        while let Some((_, after)) = rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            rest = after.trim_start();
        }
        rest.to_owned()
    }

    /// `n` and `m` of `[PATCH n/m]`.
    fn number(&self) -> Option<(u64, u64)> {
        let mut rest = self.subject.trim();
        while let Some((inside, after)) = rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            let words = inside.split([' ', ',']);
            let mut number = words.filter_map(|word| {
                let (number, total) = word.split_once('/')?;
                Some((number.parse().ok()?, total.parse().ok()?))
            });
            if let Some(number) = number.next_back() {
                return Some(number);
            }
            rest = after.trim_start();
        }
        None
    }
}

fn mails_of(bytes: &[u8]) -> Vec<Mail> {
    let chunks = mbox_chunks(bytes);
    if !chunks.is_empty() {
        return chunks.iter().map(|chunk| parse_mail(chunk)).collect();
    }
    if starts_with_headers(bytes) {
        return vec![parse_mail(bytes)];
    }
    text_mails(&String::from_utf8_lossy(bytes))
}

/// The mails of an mbox, unquoted; none if it is not one.
fn mbox_chunks(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut chunks: Vec<Vec<u8>> = Vec::new();
    let mut blank_before = true;
    for line in bytes.split_inclusive(|&byte| byte == b'\n') {
        // A text may well have a line that begins with "From"; only a separator has an address and a date.
        if blank_before && is_separator(line) {
            chunks.push(Vec::new());
        } else if let Some(chunk) = chunks.last_mut() {
            let quoted = line.iter().take_while(|&&byte| byte == b'>').count();
            let unquoted = if quoted > 0 && line[quoted..].starts_with(b"From ") { &line[1..] } else { line };
            chunk.extend_from_slice(unquoted);
        } else if !line.trim_ascii().is_empty() {
            return Vec::new();
        }
        blank_before = line.trim_ascii().is_empty();
    }
    chunks
}

/// `From ADDRESS Mon Sep 17 00:00:00 2001`, address or commit, with or without a zone after it.
fn is_separator(line: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(line) else { return false };
    let words: Vec<&str> = text.split_whitespace().collect();
    let is_clock =
        |word: &&str| word.split(':').count() >= 2 && word.bytes().all(|b| b.is_ascii_digit() || b == b':');
    line.starts_with(b"From ") && (6..=9).contains(&words.len()) && words.iter().any(is_clock)
}

fn starts_with_headers(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(&bytes[..bytes.len().min(64 << 10)]);
    let head = text.trim_start().split("\n\n").next().unwrap_or_default();
    let is_header = |line: &str| {
        line.starts_with([' ', '\t'])
            || line.split_once(':').is_some_and(|(name, _)| {
                !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
            })
    };
    head.lines().all(is_header) && head.lines().any(|line| line.to_ascii_lowercase().starts_with("subject:"))
}

fn parse_mail(bytes: &[u8]) -> Mail {
    let start = bytes.iter().position(|byte| !byte.is_ascii_whitespace()).unwrap_or(bytes.len());
    let Some(message) = MessageParser::default().parse(&bytes[start..]) else { return Mail::default() };
    let mut body = String::new();
    for part in &message.parts {
        // An attached patch counts as much as one in the text; HTML is a copy of the text.
        if let mail_parser::PartType::Text(text) = &part.body {
            body.push_str(text);
            body.push('\n');
        } else if let mail_parser::PartType::Binary(content) = &part.body {
            let name = part.attachment_name().unwrap_or_default();
            if name.ends_with(".patch") || name.ends_with(".diff") {
                body.push_str(&String::from_utf8_lossy(content));
                body.push('\n');
            }
        }
    }
    Mail { subject: message.subject().unwrap_or_default().replace('\n', " "), body }
}

/// Mails pasted one after the other, as a page or a digest gives them: each starts at its subject.
fn text_mails(text: &str) -> Vec<Mail> {
    let mut mails = vec![Mail::default()];
    for line in text.lines() {
        let subject = line.strip_prefix("Subject: ").or_else(|| is_bare_subject(line).then_some(line));
        match (subject, mails.last_mut()) {
            (Some(subject), _) => mails.push(Mail { subject: subject.to_owned(), body: String::new() }),
            (None, Some(mail)) => {
                mail.body.push_str(line);
                mail.body.push('\n');
            }
            (None, None) => {}
        }
    }
    mails
}

fn is_bare_subject(line: &str) -> bool {
    let inside = line.strip_prefix('[').and_then(|rest| rest.split_once("] "));
    inside.is_some_and(|(tags, title)| !title.is_empty() && tags.split([' ', ',']).any(|tag| tag == "PATCH"))
        || line.starts_with("Re: [") && line.contains("PATCH")
}

/// All diffs in a mail's text.
fn diffs(mail: &Mail) -> Result<Vec<FilePatch>, SeriesError> {
    let lines: Vec<&str> = mail.body.lines().map(|line| line.trim_end_matches('\r')).collect();
    let mut files: Vec<FilePatch> = Vec::new();
    let mut header = Header::default();
    let mut at = 0;
    while at < lines.len() {
        let line = lines[at];
        if let Some(paths) = line.strip_prefix("diff --git ") {
            header.finish(&mut files);
            header = Header::start(paths);
            at += 1;
        } else if header.active && is_extended(line) {
            header.extended.push(line.to_owned());
            at += 1;
        } else if line == "GIT binary patch" || line.starts_with("Binary files ") && header.active {
            return Err(SeriesError::Unsupported {
                title: mail.title(),
                what: "it changes a binary file".to_owned(),
            });
        } else if let Some((old, new)) = file_lines(&lines[at..]) {
            at += 2;
            let hunks = hunks(mail, &lines, &mut at)?;
            let extended = std::mem::take(&mut header).extended;
            files.push(FilePatch { old, new, extended, hunks });
        } else {
            if header.active && !line.starts_with("index ") {
                header.finish(&mut files);
                header = Header::default();
            }
            at += 1;
        }
    }
    header.finish(&mut files);
    if let Some(file) = files.iter().find(|file| file.old.is_none() && file.new.is_none()) {
        let what = format!("a diff of it names no file ({} hunks)", file.hunks.len());
        return Err(SeriesError::Unsupported { title: mail.title(), what });
    }
    Ok(files)
}

/// What stands between `diff --git` and the first hunk.
#[derive(Default)]
struct Header {
    active: bool,
    paths: Option<(String, String)>,
    extended: Vec<String>,
}

impl Header {
    fn start(paths: &str) -> Self {
        // Paths with spaces are ambiguous here, but renames and mode changes alone come this far with them.
        let paths = paths
            .split_once(" b/")
            .and_then(|(old, new)| Some((old.strip_prefix("a/")?.to_owned(), new.to_owned())));
        Self { active: true, paths, extended: Vec::new() }
    }

    /// A file that is only renamed, made executable, created or removed empty has no hunk.
    fn finish(&mut self, files: &mut Vec<FilePatch>) {
        if self.extended.is_empty() {
            return;
        }
        if let Some((old, new)) = self.paths.take() {
            let says = |what: &str| self.extended.iter().any(|line| line.starts_with(what));
            let old = (!says("new file mode")).then_some(old);
            let new = (!says("deleted file mode")).then_some(new);
            files.push(FilePatch {
                old,
                new,
                extended: std::mem::take(&mut self.extended),
                hunks: Vec::new(),
            });
        }
    }
}

fn is_extended(line: &str) -> bool {
    [
        "old mode ",
        "new mode ",
        "new file mode ",
        "deleted file mode ",
        "rename from ",
        "rename to ",
        "copy from ",
        "copy to ",
        "similarity index ",
    ]
    .iter()
    .any(|start| line.starts_with(start))
}

/// `--- a/FILE`, `+++ b/FILE` and a hunk header, or nothing.
fn file_lines(lines: &[&str]) -> Option<(Option<String>, Option<String>)> {
    let [old, new, hunk, ..] = lines else { return None };
    let (old, new) = (old.strip_prefix("--- ")?, new.strip_prefix("+++ ")?);
    hunk_header(hunk)?;
    Some((file_name(old), file_name(new)))
}

fn file_name(text: &str) -> Option<String> {
    // diff puts a date after a tab; quilt puts the patch's name after a tilde.
    let text = text.split('\t').next().unwrap_or(text).trim_end();
    if text == "/dev/null" {
        return None;
    }
    let path = text.split_once('/').map_or(text, |(_, path)| path);
    let path = match path.rsplit_once('~') {
        Some((path, name)) if !name.contains('/') => path,
        _ => path,
    };
    Some(path.to_owned())
}

fn hunk_header(line: &str) -> Option<Hunk> {
    let (ranges, heading) = line.strip_prefix("@@ -")?.split_once(" @@")?;
    let (old, new) = ranges.split_once(" +")?;
    let range = |text: &str| -> Option<(u64, u64)> {
        match text.split_once(',') {
            Some((start, count)) => Some((start.parse().ok()?, count.parse().ok()?)),
            None => Some((text.parse().ok()?, 1)),
        }
    };
    let ((old_start, old_count), (new_start, new_count)) = (range(old)?, range(new)?);
    let heading = heading.trim().to_owned();
    Some(Hunk { old_start, new_start, old_count, new_count, heading, lines: Vec::new() })
}

/// Reads hunks from `at` on, and leaves `at` behind the last.
fn hunks(mail: &Mail, lines: &[&str], at: &mut usize) -> Result<Vec<Hunk>, SeriesError> {
    let mut hunks = Vec::new();
    while let Some(mut hunk) = lines.get(*at).and_then(|line| hunk_header(line)) {
        let line = *at + 1;
        let damaged = |why| SeriesError::Hunk { title: mail.title(), line, why };
        *at += 1;
        let (mut old, mut new) = (hunk.old_count, hunk.new_count);
        while old > 0 || new > 0 {
            let Some(&text) = lines.get(*at) else { return Err(damaged("the text ends in it")) };
            let (takes_old, takes_new) = match text.as_bytes().first() {
                // Mailers and editors drop the one space of an empty context line.
                Some(b' ') | None => (1, 1),
                Some(b'-') => (1, 0),
                Some(b'+') => (0, 1),
                Some(b'\\') => (0, 0),
                Some(_) => return Err(damaged("a line in it is neither context, nor added, nor removed")),
            };
            if takes_old > old || takes_new > new {
                return Err(damaged("its lines do not add up to what its header says"));
            }
            old -= takes_old;
            new -= takes_new;
            hunk.lines.push(if text.is_empty() { " ".to_owned() } else { text.to_owned() });
            *at += 1;
        }
        if let Some(note) = lines.get(*at).filter(|line| line.starts_with("\\ ")) {
            hunk.lines.push((*note).to_owned());
            *at += 1;
        }
        hunks.push(hunk);
    }
    Ok(hunks)
}

impl Patch {
    /// The patch as `git apply` takes it.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for file in &self.files {
            file.write(&mut text);
        }
        text
    }
}

impl FilePatch {
    /// The file's path, before or after.
    pub(crate) fn path(&self) -> &str {
        self.new.as_deref().or(self.old.as_deref()).unwrap_or_default()
    }

    fn write(&self, out: &mut String) {
        let old = self.old.as_deref().unwrap_or(self.path());
        let new = self.new.as_deref().unwrap_or(self.path());
        out.push_str(&format!("diff --git a/{old} b/{new}\n"));
        let says = |what: &str| self.extended.iter().any(|line| line.starts_with(what));
        if self.old.is_none() && !says("new file mode") {
            out.push_str("new file mode 100644\n");
        }
        if self.new.is_none() && !says("deleted file mode") {
            out.push_str("deleted file mode 100644\n");
        }
        for line in &self.extended {
            out.push_str(&format!("{line}\n"));
        }
        if self.hunks.is_empty() {
            return;
        }
        let side = |mark: &str, path: &Option<String>| match path {
            Some(path) => format!("{mark}/{path}"),
            None => "/dev/null".to_owned(),
        };
        out.push_str(&format!("--- {}\n+++ {}\n", side("a", &self.old), side("b", &self.new)));
        for hunk in &self.hunks {
            let (old, old_count) = (hunk.old_start, hunk.old_count);
            let (new, new_count) = (hunk.new_start, hunk.new_count);
            // Without the heading: git would take it as it stands, but it is ours to check.
            out.push_str(&format!("@@ -{old},{old_count} +{new},{new_count} @@\n"));
            for line in &hunk.lines {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DIFF: &str = "---\n mm/a.c | 2 +-\n\ndiff --git a/mm/a.c b/mm/a.c\nindex 1..2 100644\n--- a/mm/a.c\n\
                        +++ b/mm/a.c\n@@ -3,4 +3,4 @@ int f(void)\n one\n\n-two\n+TWO\n three\n-- \n2.0\n";

    fn titles(patches: &[Patch]) -> Vec<&str> {
        patches.iter().map(|patch| patch.title.as_str()).collect()
    }

    fn mail(subject: &str, body: &str) -> String {
        format!(
            "From a@b.invalid Mon Sep 17 00:00:00 2001\nFrom: A <a@b.invalid>\nSubject: {subject}\n\n{body}\n\n"
        )
    }

    #[test]
    fn several_mails_in_one_text_are_a_series() {
        let text = format!(
            "[PATCH 0/2] both\n\n[PATCH 0/2] both\n\nwords\n\n[PATCH 2/2] second\n\n{DIFF}\n\
             [PATCH 1/2] first\n\n{DIFF}\nRe: [PATCH 1/2] first\n\n{DIFF}\n"
        );
        let patches = parse(text.as_bytes()).unwrap();
        assert_eq!(titles(&patches), ["first", "second"]);
        assert_eq!(
            patches[0].text(),
            "diff --git a/mm/a.c b/mm/a.c\n--- a/mm/a.c\n+++ b/mm/a.c\n@@ -3,4 +3,4 @@\n one\n \n-two\n+TWO\n three\n"
        );
        assert_eq!(patches[0].files[0].hunks[0].heading, "int f(void)");
    }

    #[test]
    fn an_mbox_is_a_series_whatever_its_order_and_encoding() {
        let quoted = DIFF.replace('=', "=3D").replace("-two", "-tw=\no");
        let second = format!(
            "From x@y.invalid Thu Jan  1 00:00:00 1970\nSubject: =?utf-8?q?=5BPATCH_v3_2/2=5D_second?=\nMIME-Version: 1.0\n\
             Content-Type: text/plain; charset=utf-8\nContent-Transfer-Encoding: quoted-printable\n\n{quoted}\n\n"
        );
        let cover = mail("[PATCH v3 0/2] cover", "words\n>From here on\nFrom that day on, nothing.");
        let reply = mail("Re: [PATCH v3 1/2] first", DIFF);
        let first = mail("[PATCH v3 1/2]\n first", DIFF);
        let patches = parse(format!("{cover}{second}{reply}{first}").as_bytes()).unwrap();
        assert_eq!(titles(&patches), ["first", "second"]);
        assert_eq!(patches[0].files, patches[1].files);
    }

    #[test]
    fn a_missing_or_doubled_number_is_named() {
        let numbered = |numbers: &[&str]| {
            let text: String = numbers.iter().map(|n| mail(&format!("[PATCH {n}] p{n}"), DIFF)).collect();
            parse(text.as_bytes())
        };
        assert!(matches!(numbered(&["1/3", "3/3"]), Err(SeriesError::Missing { number: 2, total: 3 })));
        assert!(matches!(numbered(&["1/3", "2/3"]), Err(SeriesError::Missing { number: 3, total: 3 })));
        assert!(matches!(numbered(&["2/3", "3/3"]), Err(SeriesError::Missing { number: 1, total: 3 })));
        assert!(matches!(numbered(&["1/2", "2/2", "2/2"]), Err(SeriesError::Doubled { number: 2, .. })));
        assert!(matches!(numbered(&["1/2", "2/3"]), Err(SeriesError::Mixed { .. })));
        assert_eq!(numbered(&["11/25"]).unwrap().len(), 1);
        assert_eq!(numbered(&["02/02", "01/02"]).unwrap().len(), 2);
    }

    #[test]
    fn a_text_without_a_patch_is_no_series() {
        let quoting = DIFF.replace('\n', "\n> ");
        for text in ["", "words\n", &mail("Re: [PATCH 1/1] x", DIFF), &mail("[PATCH 1/1] x", &quoting)] {
            assert!(matches!(parse(text.as_bytes()), Err(SeriesError::NoPatch)), "{text}");
        }
    }

    #[test]
    fn quilt_paths_lose_the_patch_name() {
        let text = "Subject: t\n\n--- a/mm/a.c~some-name\n+++ a/mm/a.c\n@@ -1 +1 @@\n-a\n+b\n_\nmore\n";
        let patches = parse(text.as_bytes()).unwrap();
        assert_eq!(patches[0].title, "t");
        assert!(patches[0].text().starts_with("diff --git a/mm/a.c b/mm/a.c\n--- a/mm/a.c\n+++ b/mm/a.c\n"));
    }

    #[test]
    fn new_deleted_and_renamed_files_keep_their_headers() {
        let text = "[PATCH] t\n\ndiff --git a/n b/n\nnew file mode 100755\nindex 0..1\n--- /dev/null\n+++ b/n\n\
                    @@ -0,0 +1 @@\n+x\ndiff --git a/o b/p\nsimilarity index 100%\nrename from o\nrename to p\n\
                    diff --git a/d b/d\ndeleted file mode 100644\n--- a/d\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n\
                    \\ No newline at end of file\n";
        let patches = parse(text.as_bytes()).unwrap();
        assert_eq!(
            patches[0].text(),
            "diff --git a/n b/n\nnew file mode 100755\n--- /dev/null\n+++ b/n\n@@ -0,0 +1,1 @@\n+x\n\
             diff --git a/o b/p\nsimilarity index 100%\nrename from o\nrename to p\n\
             diff --git a/d b/d\ndeleted file mode 100644\n--- a/d\n+++ /dev/null\n@@ -1,1 +0,0 @@\n-x\n\
             \\ No newline at end of file\n"
        );
    }

    #[test]
    fn a_hunk_that_does_not_add_up_is_refused() {
        for damaged in [
            DIFF.replace("-3,4", "-3,40"),
            DIFF.replace(" three\n", "three\n"),
            DIFF.replace("+3,4", "+3,3"),
            DIFF.split_once("+TWO").unwrap().0.to_owned(),
        ] {
            let error = parse(mail("[PATCH] x", &damaged).as_bytes()).unwrap_err();
            assert!(matches!(error, SeriesError::Hunk { .. }), "{damaged}: {error}");
        }
    }

    #[test]
    fn the_documents_this_project_comes_from_are_read() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/seeds");
        let read = |start: &str| {
            let listing = fs::read_dir(&folder).ok()?.filter_map(Result::ok);
            let mut paths = listing.map(|entry| entry.path());
            let path = paths.find(|path| path.file_name().unwrap().to_string_lossy().starts_with(start))?;
            Some(fs::read(path).unwrap())
        };
        // They are no part of the repository.
        let Some(series) = read("000") else { return };
        let patches = parse(&series).unwrap();
        let hunks: Vec<usize> =
            patches.iter().map(|patch| patch.files.iter().map(|file| file.hunks.len()).sum()).collect();
        assert_eq!(hunks.len(), 5);
        assert!(hunks.iter().all(|&count| count > 0), "{hunks:?}");
        assert!(matches!(parse(&read("001").unwrap()), Err(SeriesError::NoPatch)));
        assert_eq!(parse(&read("002").unwrap()).unwrap()[0].files.len(), 2);
        let single = parse(&read("003").unwrap()).unwrap();
        assert_eq!((single.len(), single[0].files[0].path()), (1, "mm/page_alloc.c"));
    }

    proptest! {
        #[test]
        fn mutilated_series_never_panic_and_never_grow(
            cuts in prop::collection::vec((any::<prop::sample::Index>(), "\\PC{0,4}|\n|@@ -1,9 \\+1 @@|\n--- a/x\n\\+\\+\\+ b/x\n"), 0..6),
            mbox in any::<bool>(),
        ) {
            let mut text = if mbox {
                format!("{}{}", mail("[PATCH 1/2] a", DIFF), mail("[PATCH 2/2] b", DIFF))
            } else {
                format!("[PATCH 1/2] a\n\n{DIFF}\n[PATCH 2/2] b\n\n{DIFF}\n")
            };
            for (index, insert) in &cuts {
                let mut at = index.index(text.len());
                while !text.is_char_boundary(at) { at -= 1; }
                text.replace_range(at..at, insert);
            }
            if let Ok(patches) = parse(text.as_bytes()) {
                // Every line of a hunk stands in the text: nothing is made up.
                for hunk in patches.iter().flat_map(|p| &p.files).flat_map(|f| &f.hunks) {
                    prop_assert_eq!(hunk.lines.iter().filter(|l| !l.starts_with(['+', '\\'])).count() as u64, hunk.old_count);
                    prop_assert!(hunk.lines.iter().all(|line| line == " " || text.contains(line.as_str())));
                }
            }
        }

        #[test]
        fn any_bytes_are_answered(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse(&bytes);
        }
    }
}
