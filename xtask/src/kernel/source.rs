//! Sources into the store: whatever form a spec has, a tree id comes out.

use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::cache::{self, Cache};
use super::config::{self, Line};
use super::error::{KernelError, io_error};
use super::spec::{Deb, Spec};
use super::store::{Store, foreign_git};
use super::{apt, import, run};
use crate::progress::Progress;
use crate::tools::{self, Work};

/// A source that the store holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Source {
    /// A spec that gives the same tree again, where that is possible.
    pub(crate) spec: String,
    pub(crate) tree: String,
    pub(crate) line: Line,
    pub(crate) fetched_at_s: u64,
}

/// What an unversioned package was taken to be.
#[derive(Debug, Serialize, Deserialize)]
struct Resolved {
    asked: String,
    version: String,
}

/// Whether to look for newer versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// What was resolved once stays; no network where it is all there.
    Cached,
    /// Ask apt again.
    Again,
}

/// Files in a kernel source, to measure progress by.
const USUAL_FILES: u64 = 95_000;

/// Gets the source of `spec` into the store.
pub(crate) fn fetch(
    cache: &Cache,
    store: &Store<'_>,
    progress: &Progress,
    spec: &Spec,
    look: Look,
) -> Result<Source, KernelError> {
    match spec {
        Spec::Deb(deb) => fetch_deb(cache, store, progress, deb, look),
        Spec::Tar(path) => fetch_tar(cache, store, progress, spec, path),
        Spec::Git { dir, rev } => fetch_git(cache, store, spec, dir, rev),
        Spec::Dir(path) => fetch_dir(cache, store, progress, spec, path),
        Spec::Vmlinux(_) => Err(KernelError::Source {
            spec: spec.to_string(),
            why: "it is built already, and has no source".to_owned(),
        }),
    }
}

/// Whether a run on `spec` would start without the network.
pub(crate) fn is_here(cache: &Cache, spec: &Spec) -> bool {
    match spec {
        Spec::Deb(deb) => resolution(cache, deb)
            .is_some_and(|deb| record_path(cache, &source_key(&deb.to_string())).exists()),
        _ => true,
    }
}

fn resolution(cache: &Cache, deb: &Deb) -> Option<Deb> {
    if deb.version.is_some() {
        return Some(deb.clone());
    }
    let record: Resolved = cache::read_record(&resolution_path(cache, deb))?;
    Some(Deb { version: Some(record.version), ..deb.clone() })
}

fn resolution_path(cache: &Cache, deb: &Deb) -> std::path::PathBuf {
    cache.path("resolved", &format!("{}.json", cache::key(&[&deb.to_string()])))
}

fn source_key(spec: &str) -> String {
    cache::key(&["source", spec])
}

fn record_path(cache: &Cache, key: &str) -> std::path::PathBuf {
    cache.path("sources", &format!("{key}.json"))
}

/// The source under `key`, if both its record and its tree are there.
fn known(cache: &Cache, store: &Store<'_>, key: &str) -> Option<Source> {
    let path = record_path(cache, key);
    let source: Source = cache::read_record(&path)?;
    store.holds(key, &source.tree).then(|| {
        cache::touch(&path);
        source
    })
}

fn keep(
    cache: &Cache,
    store: &Store<'_>,
    key: &str,
    spec: &str,
    tree: String,
) -> Result<Source, KernelError> {
    let not_kernel = || KernelError::Source {
        spec: spec.to_owned(),
        why: "its top Makefile does not say VERSION and PATCHLEVEL, so it is no kernel tree".to_owned(),
    };
    let makefile = store.file(&tree, "Makefile").map_err(|_| not_kernel())?;
    let line = config::line_of_makefile(&makefile).ok_or_else(not_kernel)?;
    store.keep(key, &tree)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let source = Source { spec: spec.to_owned(), tree, line, fetched_at_s: now.as_secs() };
    cache::write_record(&record_path(cache, key), &source)?;
    Ok(source)
}

fn fetch_deb(
    cache: &Cache,
    store: &Store<'_>,
    progress: &Progress,
    deb: &Deb,
    look: Look,
) -> Result<Source, KernelError> {
    let known_version = match look {
        Look::Cached => resolution(cache, deb),
        Look::Again => None,
    };
    if let Some(source) =
        known_version.as_ref().and_then(|deb| known(cache, store, &source_key(&deb.to_string())))
    {
        return Ok(source);
    }
    tools::require(&[Work::Source, Work::Packages])?;
    let task = progress.task(&deb.to_string());
    let refresh = look == Look::Again;
    let resolved = apt::resolve(cache, progress, &task, known_version.as_ref().unwrap_or(deb), refresh)?;
    let spec = resolved.to_string();
    if deb.version.is_none()
        && let Some(version) = resolved.version.clone()
    {
        let record = Resolved { asked: deb.to_string(), version };
        cache::write_record(&resolution_path(cache, deb), &record)?;
    }
    let key = source_key(&spec);
    let _lock = cache.lock(progress, &format!("source-{key}"), &spec)?;
    if let Some(source) = known(cache, store, &key) {
        task.done(&format!("{spec} is here already"));
        return Ok(source);
    }
    let file = apt::download(cache, progress, &task, &resolved)?;
    task.say("importing the source");
    let command = {
        let mut command = Command::new("dpkg-deb");
        command.arg("--fsys-tarfile").arg(&file);
        command
    };
    let tree = import::through(store, "unpack the package", command, None, |package| {
        let mut archive = tar::Archive::new(package);
        let damaged = |error: io::Error| KernelError::Source { spec: spec.clone(), why: error.to_string() };
        for entry in archive.entries().map_err(damaged)? {
            let entry = entry.map_err(damaged)?;
            let path = entry.path().map_err(damaged)?.into_owned();
            if apt::is_source_tarball(&path) {
                return unpack(store, &task, &spec, &path, entry);
            }
        }
        Err(KernelError::Source {
            spec: spec.clone(),
            why: "the package holds no usr/src/linux-source-*.tar.*".to_owned(),
        })
    })?;
    let source = keep(cache, store, &key, &spec, tree)?;
    // The store has it now; apt would fetch it again if ever needed.
    if let Some(folder) = file.parent() {
        let _ = fs::remove_dir_all(folder);
    }
    task.done(&format!("fetched {spec}"));
    Ok(source)
}

/// Imports a tarball that comes out of another archive, by its name's compression.
fn unpack(
    store: &Store<'_>,
    task: &crate::progress::Task<'_>,
    spec: &str,
    name: &Path,
    mut stream: impl Read,
) -> Result<String, KernelError> {
    let mut start = [0; 6];
    let got = read_start(&mut stream, &mut start).map_err(|error| KernelError::Source {
        spec: spec.to_owned(),
        why: format!("{} cannot be read: {error}", name.display()),
    })?;
    let Some(mut command) = decompressor(&start[..got]) else {
        return import::tar(store, task, spec, (&start[..got]).chain(stream), USUAL_FILES);
    };
    // A pipe to the decompressor needs a thread of its own, which cannot borrow the stream: copy through a spool.
    let mut spool =
        tempfile::tempfile_in(store.git_dir()).map_err(io_error("write beside", store.git_dir()))?;
    io::copy(&mut (&start[..got]).chain(stream), &mut spool)
        .and_then(|_| spool.rewind())
        .map_err(io_error("write beside", store.git_dir()))?;
    decompress(store, task, spec, &mut command, spool)
}

fn decompress(
    store: &Store<'_>,
    task: &crate::progress::Task<'_>,
    spec: &str,
    command: &mut Command,
    mut file: File,
) -> Result<String, KernelError> {
    let command = std::mem::replace(command, Command::new("true"));
    let feed = move |mut pipe: std::process::ChildStdin| {
        // A decompressor that ends early says why itself.
        let _ = io::copy(&mut file, &mut pipe);
    };
    import::through(store, "decompress the source", command, Some(Box::new(feed)), |tar| {
        import::tar(store, task, spec, tar, USUAL_FILES)
    })
}

fn read_start(stream: &mut impl Read, start: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < start.len() {
        match stream.read(&mut start[got..])? {
            0 => break,
            length => got += length,
        }
    }
    Ok(got)
}

/// What decompresses a file that starts like this; `None` if it is not compressed.
fn decompressor(start: &[u8]) -> Option<Command> {
    const KNOWN: [(&[u8], &[&str]); 4] = [
        (b"\xfd7zXZ\0", &["xz", "-dc", "-T0"]),
        (b"\x1f\x8b", &["gzip", "-dc"]),
        (b"\x28\xb5\x2f\xfd", &["zstd", "-dc"]),
        (b"BZh", &["bzip2", "-dc"]),
    ];
    let (_, words) = KNOWN.iter().find(|(magic, _)| start.starts_with(magic))?;
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    Some(command)
}

fn fetch_tar(
    cache: &Cache,
    store: &Store<'_>,
    progress: &Progress,
    spec: &Spec,
    path: &Path,
) -> Result<Source, KernelError> {
    let data = fs::metadata(path).map_err(io_error("read", path))?;
    let text = spec.to_string();
    // The file may be replaced under its name.
    let modified = data.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    let version = format!("{} {:?}", data.len(), modified);
    let key = cache::key(&["tar", &text, &version]);
    if let Some(source) = known(cache, store, &key) {
        return Ok(source);
    }
    tools::require(&[Work::Source])?;
    let _lock = cache.lock(progress, &format!("source-{key}"), &text)?;
    if let Some(source) = known(cache, store, &key) {
        return Ok(source);
    }
    let task = progress.task(&text);
    task.say("importing the source");
    let mut file = File::open(path).map_err(io_error("read", path))?;
    let mut start = [0; 6];
    let got = read_start(&mut file, &mut start).map_err(io_error("read", path))?;
    file.rewind().map_err(io_error("read", path))?;
    let tree = match decompressor(&start[..got]) {
        Some(mut command) => decompress(store, &task, &text, &mut command, file)?,
        None => import::tar(store, &task, &text, io::BufReader::new(file), USUAL_FILES)?,
    };
    let source = keep(cache, store, &key, &text, tree)?;
    task.done("imported");
    Ok(source)
}

fn fetch_git(
    cache: &Cache,
    store: &Store<'_>,
    spec: &Spec,
    dir: &Path,
    rev: &str,
) -> Result<Source, KernelError> {
    let wrong = |why: String| KernelError::Source { spec: spec.to_string(), why };
    if !dir.is_dir() {
        return Err(wrong(format!("there is no folder {}", dir.display())));
    }
    let asked = format!("{rev}^{{commit}}");
    let mut both = foreign_git(dir, &["rev-parse", "--end-of-options"]);
    both.args([&asked, &format!("{rev}^{{tree}}")]);
    let output = run::output(store.progress(), "look up the revision", both, run::SHORT)?;
    let text = String::from_utf8_lossy(&output.stdout);
    let ids: Vec<&str> = text.lines().filter(|line| *line != "--end-of-options").collect();
    let (true, [commit, tree]) = (output.status.success(), &ids[..]) else {
        return Err(wrong(format!("there is no revision {rev} in it\n{}", run::tail(&output.stderr))));
    };
    let (commit, tree) = (*commit, *tree);
    let resolved = Spec::Git { dir: dir.to_owned(), rev: commit.to_owned() }.to_string();
    let key = cache::key(&["git", tree]);
    if let Some(source) = known(cache, store, &key) {
        return Ok(Source { spec: resolved, ..source });
    }
    tools::require(&[Work::Source])?;
    let _lock = cache.lock(store.progress(), &format!("source-{key}"), &resolved)?;
    // What the last copy from there brought need not come again.
    let last = cache.path("trees", &format!("{}.last", cache::key(&[&dir.to_string_lossy()])));
    let known_tree = fs::read_to_string(&last).ok().map(|text| text.trim().to_owned()).filter(|known| {
        let has = |mut command: Command| {
            command.args(["cat-file", "-e", &format!("{known}^{{tree}}")]);
            run::output(store.progress(), "look up a tree", command, run::SHORT)
                .is_ok_and(|output| output.status.success())
        };
        has(foreign_git(dir, &[])) && has(store.git(&[]))
    });
    let task = store.progress().task(&resolved);
    task.say("copying the tree");
    store.copy_tree(dir, tree, known_tree.as_deref())?;
    let source = keep(cache, store, &key, &resolved, tree.to_owned())?;
    cache::write_aside(&last, tree.as_bytes())?;
    task.done("copied");
    Ok(source)
}

fn fetch_dir(
    cache: &Cache,
    store: &Store<'_>,
    progress: &Progress,
    spec: &Spec,
    path: &Path,
) -> Result<Source, KernelError> {
    let text = spec.to_string();
    let wrong = |why: &str| KernelError::Source { spec: text.clone(), why: why.to_owned() };
    if !path.is_dir() {
        return Err(wrong("there is no such folder"));
    }
    if !path.join("Makefile").is_file() {
        return Err(wrong("it has no top Makefile, so it is no kernel tree"));
    }
    if cache.root().starts_with(path) {
        return Err(wrong("our own cache is in it: move the cache (BUDDYDIFF_CACHE) out of the tree"));
    }
    tools::require(&[Work::Source])?;
    let key = cache::key(&["dir", &text]);
    let _lock = cache.lock(progress, &format!("source-{key}"), &text)?;
    let index = cache.path("trees", &format!("{key}.index"));
    let task = progress.task(&text);
    task.say("reading the source tree");
    let tree = store.add_dir(path, &index)?;
    if let Some(source) = known(cache, store, &key).filter(|source| source.tree == tree) {
        return Ok(source);
    }
    let source = keep(cache, store, &key, &text, tree)?;
    task.done("read");
    Ok(source)
}
