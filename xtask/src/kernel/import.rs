//! A tarball into the store, as a stream: nothing is unpacked to disk.

use std::io::{self, BufWriter, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};
use std::process::{Child, ChildStdin, Stdio};
use std::time::{Duration, Instant};

use host::process::Group;

use super::error::KernelError;
use super::run;
use super::store::Store;
use crate::progress::Task;

const LIMIT: Duration = Duration::from_secs(30 * 60);
/// A kernel has about 90 000 files; more than this is not one.
const MAX_ENTRIES: u64 = 2_000_000;
const MAX_BYTES: u64 = 64 << 30;

/// Imports a tar stream and gives its tree id. A single top folder, as release tarballs have, is taken off.
/// `expected` is the number of files to measure progress by.
pub(crate) fn tar(
    store: &Store<'_>,
    task: &Task<'_>,
    spec: &str,
    stream: impl Read,
    expected: u64,
) -> Result<String, KernelError> {
    let name = format!("refs/imports/{}", super::cache::key(&[spec, &std::process::id().to_string()]));
    let what = "import the source";
    let _lock = store.import_lock()?;
    let mut command = store.git(&["fast-import", "--quiet", "--done", "--force", "--depth=0"]);
    let repeat = host::process::shell_line(&command);
    store.progress().command(&repeat);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut group = Group::spawn(&mut command).map_err(|error| run::not_started(what, &repeat, &error))?;
    let said = group.child().stderr.take().map(run::drain);
    let written = match group.child().stdin.take() {
        Some(stdin) => write_stream(stdin, &name, stream, task, expected),
        None => Ok(()),
    };
    if let Err(StreamError::Source(why)) = &written {
        return Err(KernelError::Source { spec: spec.to_owned(), why: why.clone() });
    }
    if let Err(StreamError::Interrupted) = written {
        return Err(KernelError::Interrupted);
    }
    // A broken pipe means that git ended first, and knows better why.
    let status =
        group.wait_until(Instant::now() + LIMIT).map_err(|error| run::ended(what, &repeat, &error))?;
    if !status.success() {
        let said = said.map(run::collect).unwrap_or_default();
        return Err(run::failed(what, &repeat, status, &String::from_utf8_lossy(&said)));
    }
    let tree = store.read(what, &["rev-parse", "--verify", &format!("{name}^{{tree}}")])?;
    let tree = without_top_folder(store, tree)?;
    store.read(what, &["update-ref", "-d", &name])?;
    Ok(tree)
}

enum StreamError {
    /// The tarball is at fault.
    Source(String),
    /// git went away.
    Pipe,
    Interrupted,
}

fn write_stream(
    pipe: ChildStdin,
    name: &str,
    stream: impl Read,
    task: &Task<'_>,
    expected: u64,
) -> Result<(), StreamError> {
    let source = |error: io::Error| StreamError::Source(format!("its tar stream is damaged: {error}"));
    let pipe_broke = |_| StreamError::Pipe;
    let mut out = BufWriter::with_capacity(1 << 20, pipe);
    write!(out, "commit {name}\ncommitter buddydiff <> 0 +0000\ndata 0\n").map_err(pipe_broke)?;
    let mut archive = tar::Archive::new(stream);
    let (mut entries, mut bytes) = (0, 0);
    for entry in archive.entries().map_err(source)? {
        let mut entry = entry.map_err(source)?;
        entries += 1;
        bytes += entry.size();
        if entries > MAX_ENTRIES || bytes > MAX_BYTES {
            return Err(StreamError::Source("it is larger than any kernel source".to_owned()));
        }
        if host::process::interrupted() {
            return Err(StreamError::Interrupted);
        }
        if entries % 256 == 0 {
            task.step(entries, expected);
        }
        let path = entry.path().map_err(source)?.into_owned();
        let Some(path) = plain_path(&path).map_err(StreamError::Source)? else { continue };
        let kind = entry.header().entry_type();
        if kind.is_file() {
            let executable = entry.header().mode().map_err(source)? & 0o100 != 0;
            let mode = if executable { "100755" } else { "100644" };
            let size = entry.size();
            write!(out, "M {mode} inline {}\ndata {size}\n", quoted(&path)).map_err(pipe_broke)?;
            copy_exactly(&mut entry, &mut out, size)?;
            out.write_all(b"\n").map_err(pipe_broke)?;
        } else if kind.is_symlink() {
            let target = link_target(&entry).map_err(StreamError::Source)?;
            write!(out, "M 120000 inline {}\ndata {}\n", quoted(&path), target.len()).map_err(pipe_broke)?;
            out.write_all(&target).and_then(|()| out.write_all(b"\n")).map_err(pipe_broke)?;
        } else if kind.is_hard_link() {
            let target = link_target(&entry).map_err(StreamError::Source)?;
            let target = Path::new(std::ffi::OsStr::from_bytes(&target)).to_owned();
            if let Some(target) = plain_path(&target).map_err(StreamError::Source)? {
                // Both are quoted: an unquoted source would end at its first space.
                writeln!(out, "C {} {}", always_quoted(&target), always_quoted(&path)).map_err(pipe_broke)?;
            }
        }
        // Folders come with their files; devices and pipes are no source.
    }
    if entries == 0 {
        return Err(StreamError::Source("the tar archive is empty".to_owned()));
    }
    out.write_all(b"done\n").and_then(|()| out.flush()).map_err(pipe_broke)
}

fn link_target(entry: &tar::Entry<'_, impl Read>) -> Result<Vec<u8>, String> {
    match entry.link_name_bytes() {
        Some(target) if !target.is_empty() => Ok(target.into_owned()),
        _ => Err("a link in it leads nowhere".to_owned()),
    }
}

/// Reading and writing fail for different reasons, which [`io::copy`] would mix up.
fn copy_exactly(from: &mut impl Read, to: &mut impl Write, size: u64) -> Result<(), StreamError> {
    let mut left = size;
    let mut buffer = [0; 64 << 10];
    while left > 0 {
        let room = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        let length = from
            .read(&mut buffer[..room])
            .map_err(|error| StreamError::Source(format!("its tar stream is damaged: {error}")))?;
        if length == 0 {
            return Err(StreamError::Source("its tar stream is cut short".to_owned()));
        }
        to.write_all(&buffer[..length]).map_err(|_| StreamError::Pipe)?;
        left -= length as u64;
    }
    Ok(())
}

/// The path inside the tree; `None` for the root itself.
fn plain_path(path: &Path) -> Result<Option<Vec<u8>>, String> {
    let mut plain = Vec::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::Normal(name) if name != ".git" => {
                if !plain.is_empty() {
                    plain.push(b'/');
                }
                plain.extend_from_slice(name.as_bytes());
            }
            Component::Normal(_) => return Ok(None),
            _ => return Err(format!("it holds the path {}, which leads out of the tree", path.display())),
        }
    }
    Ok((!plain.is_empty()).then_some(plain))
}

fn quoted(path: &[u8]) -> String {
    match std::str::from_utf8(path) {
        Ok(text) if !text.starts_with('"') && !text.contains(['\n', '\\']) => text.to_owned(),
        _ => always_quoted(path),
    }
}

fn always_quoted(path: &[u8]) -> String {
    let mut text = String::from("\"");
    for &byte in path {
        match byte {
            b'"' | b'\\' => text.extend(['\\', char::from(byte)]),
            b' '..=b'~' => text.push(char::from(byte)),
            _ => text.push_str(&format!("\\{byte:03o}")),
        }
    }
    text.push('"');
    text
}

fn without_top_folder(store: &Store<'_>, tree: String) -> Result<String, KernelError> {
    let listed = store.read("read the source", &["ls-tree", &tree])?;
    let mut lines = listed.lines();
    match (lines.next(), lines.next()) {
        (Some(only), None) if only.starts_with("040000 tree ") => {
            Ok(only.split_whitespace().nth(2).map_or(tree, str::to_owned))
        }
        _ => Ok(tree),
    }
}

/// Lets `command` unpack what `feed` writes into it, and hands its output to `take`.
pub(crate) fn through<T>(
    store: &Store<'_>,
    what: &str,
    mut command: std::process::Command,
    feed: Option<Box<dyn FnOnce(ChildStdin) + Send>>,
    take: impl FnOnce(&mut dyn Read) -> Result<T, KernelError>,
) -> Result<T, KernelError> {
    let repeat = host::process::shell_line(&command);
    store.progress().command(&repeat);
    let stdin = if feed.is_some() { Stdio::piped() } else { Stdio::null() };
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut group = Group::spawn(&mut command).map_err(|error| run::not_started(what, &repeat, &error))?;
    let said = group.child().stderr.take().map(run::drain);
    let Child { stdin, stdout, .. } = group.child();
    let feeder = match (feed, stdin.take()) {
        (Some(feed), Some(pipe)) => Some(std::thread::spawn(move || feed(pipe))),
        _ => None,
    };
    let mut stdout = stdout.take();
    let taken = match &mut stdout {
        Some(pipe) => take(pipe),
        None => take(&mut io::empty()),
    };
    // What is left unread after the end of the archive is padding; the child must be able to write it.
    if let (Ok(_), Some(pipe)) = (&taken, &mut stdout) {
        let _ = io::copy(pipe, &mut io::sink());
    }
    drop(stdout);
    if matches!(taken, Err(KernelError::Interrupted)) {
        return taken;
    }
    let status =
        group.wait_until(Instant::now() + run::SHORT).map_err(|error| run::ended(what, &repeat, &error))?;
    if let Some(feeder) = feeder {
        // It only copied; the statuses tell whether that went well.
        let _ = feeder.join();
    }
    let said = said.map(run::collect).unwrap_or_default();
    match taken {
        Ok(value) if status.success() => Ok(value),
        Ok(_) => Err(run::failed(what, &repeat, status, &String::from_utf8_lossy(&said))),
        // A stream that broke off is the unpacker's failure if it says so, else the taker's.
        Err(KernelError::Source { spec, why }) if !said.is_empty() => Err(KernelError::Source {
            spec,
            why: format!("{why}\n{}", run::tail(&String::from_utf8_lossy(&said))),
        }),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_lead_out_are_refused() {
        let plain = |path: &str| plain_path(Path::new(path));
        assert_eq!(plain("./linux/Makefile").unwrap().unwrap(), b"linux/Makefile");
        assert_eq!(plain("./").unwrap(), None);
        assert_eq!(plain("linux/.git/config").unwrap(), None);
        assert!(plain("/etc/passwd").is_err());
        assert!(plain("linux/../../x").is_err());
    }

    #[test]
    fn odd_names_are_quoted() {
        assert_eq!(quoted(b"a b/c"), "a b/c");
        assert_eq!(quoted(b"\"a"), "\"\\\"a\"");
        assert_eq!(quoted(b"a\nb"), "\"a\\012b\"");
        assert_eq!(quoted(b"\xff"), "\"\\377\"");
    }
}
