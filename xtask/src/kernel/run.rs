//! Running external commands: each is shown on request, limited in time, ended with us, and on failure repeatable.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use host::process::{Group, WaitError, shell_line};

use super::error::{KernelError, io_error};
use crate::progress::Progress;

/// For commands that only look something up or change a few files.
pub(crate) const SHORT: Duration = Duration::from_secs(10 * 60);

/// What a build gets to tidy up when it is stopped.
const GRACE: Duration = Duration::from_secs(5);

/// Lines of output that a failure shows.
const TAIL_LINES: usize = 12;

/// What a finished command left.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

/// Runs `command` to its end and keeps what it said, whatever its status.
pub(crate) fn output(
    progress: &Progress,
    what: &str,
    mut command: Command,
    limit: Duration,
) -> Result<Output, KernelError> {
    let repeat = shell_line(&command);
    progress.command(&repeat);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut group = Group::spawn(&mut command).map_err(|source| not_started(what, &repeat, &source))?;
    let stdout = group.child().stdout.take().map(drain);
    let stderr = group.child().stderr.take().map(drain);
    let status = group.wait_until(Instant::now() + limit).map_err(|error| {
        group.kill();
        ended(what, &repeat, &error)
    })?;
    let stdout = stdout.map(collect).unwrap_or_default();
    let stderr = stderr.map(collect).unwrap_or_default();
    Ok(Output { status, stdout, stderr: String::from_utf8_lossy(&stderr).into_owned() })
}

/// Runs `command`, which must succeed, and gives its standard output without the final newline.
pub(crate) fn read(progress: &Progress, what: &str, command: Command) -> Result<String, KernelError> {
    let repeat = shell_line(&command);
    let output = output(progress, what, command, SHORT)?;
    if !output.status.success() {
        return Err(failed(what, &repeat, output.status, &output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

/// Runs a long `command` with all it says in the file `log`, and each line of it given to `on_line` as it comes.
/// The status is the caller's to judge.
pub(crate) fn logged(
    progress: &Progress,
    what: &str,
    mut command: Command,
    limit: Duration,
    log: &Path,
    on_line: impl FnMut(&str) + Send,
) -> Result<ExitStatus, KernelError> {
    let repeat = shell_line(&command);
    progress.command(&repeat);
    let file = File::create(log).map_err(io_error("write the log", log))?;
    let (reader, writer) = io::pipe().map_err(io_error("make a pipe for", log))?;
    let second = writer.try_clone().map_err(io_error("make a pipe for", log))?;
    command.stdin(Stdio::null()).stdout(writer).stderr(second);
    // The child's parent must be this thread, which waits for it; only the reading happens on another.
    let mut group = Group::spawn(&mut command).map_err(|source| not_started(what, &repeat, &source))?;
    // Our copies of the pipe's end live in the command; the reader sees the end only once they are closed.
    drop(command);
    thread::scope(|scope| {
        let copy = scope.spawn(move || copy_lines(reader, file, on_line));
        let waited = group.wait_until(Instant::now() + limit);
        if waited.is_err() {
            end_gently(&mut group);
        }
        // A log that could not be written is no reason to doubt the command.
        let _ = copy.join();
        waited.map_err(|error| ended(what, &repeat, &error))
    })
}

/// Lets compilers and make remove what they have half made, then kills what is left.
fn end_gently(group: &mut Group) {
    let pid = rustix::process::Pid::from_child(group.child());
    // It may be gone already, which is what we want.
    let _ = rustix::process::kill_process_group(pid, rustix::process::Signal::TERM);
    let deadline = Instant::now() + GRACE;
    while matches!(group.try_wait(), Ok(None)) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(20));
    }
    group.kill();
}

fn copy_lines(reader: impl Read, mut log: File, mut on_line: impl FnMut(&str)) {
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    // Reading goes on whatever happens to the log: a full pipe would stop the child.
    while matches!(reader.read_until(b'\n', &mut line), Ok(length) if length > 0) {
        let _ = log.write_all(&line);
        on_line(String::from_utf8_lossy(&line).trim_end());
        line.clear();
    }
}

pub(crate) fn drain(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut text = Vec::new();
        // What came before an error is still worth showing.
        let _ = pipe.read_to_end(&mut text);
        text
    })
}

pub(crate) fn collect(reader: JoinHandle<Vec<u8>>) -> Vec<u8> {
    reader.join().unwrap_or_default()
}

/// The error for a command that could not be started at all.
pub(crate) fn not_started(what: &str, repeat: &str, source: &io::Error) -> KernelError {
    KernelError::Command {
        what: what.to_owned(),
        status: format!("it could not be started: {source}"),
        tail: String::new(),
        repeat: repeat.to_owned(),
    }
}

/// The error for a command that did not end by itself.
pub(crate) fn ended(what: &str, repeat: &str, error: &WaitError) -> KernelError {
    match error {
        WaitError::Interrupted => KernelError::Interrupted,
        other => KernelError::Command {
            what: what.to_owned(),
            status: other.to_string(),
            tail: String::new(),
            repeat: repeat.to_owned(),
        },
    }
}

/// The error for a command that ended badly.
pub(crate) fn failed(what: &str, repeat: &str, status: ExitStatus, said: &str) -> KernelError {
    if says_disk_full(said) {
        return KernelError::DiskFull { what: what.to_owned() };
    }
    KernelError::Command {
        what: what.to_owned(),
        status: status.to_string(),
        tail: tail(said),
        repeat: repeat.to_owned(),
    }
}

/// Whether a program complains of a full disk, in the words that programs have for it.
pub(crate) fn says_disk_full(said: &str) -> bool {
    ["No space left on device", "Disk quota exceeded", "Out of diskspace"]
        .iter()
        .any(|words| said.contains(words))
}

/// The last lines of `text`, indented.
pub(crate) fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(TAIL_LINES);
    lines[from..].iter().map(|line| format!("  | {line}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_failed_command_says_what_it_said() {
        let error = read(&Progress::new(false), "try", shell("echo nothing works >&2; exit 4")).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("failed to try") && text.contains("nothing works"), "{text}");
    }

    #[test]
    fn a_log_gets_every_line_and_so_does_the_caller() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let mut lines = Vec::new();
        let script = shell("echo one; echo two >&2; printf three");
        let status =
            logged(&Progress::new(false), "try", script, SHORT, &log, |line| lines.push(line.to_owned()))
                .unwrap();
        assert!(status.success());
        assert_eq!(lines, ["one", "two", "three"]);
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "one\ntwo\nthree");
    }

    #[test]
    fn a_full_disk_is_named_as_such() {
        let status = shell("exit 1").status().unwrap();
        let error = failed("write", "make", status, "ld: final link failed: No space left on device");
        assert!(matches!(error, KernelError::DiskFull { .. }), "{error}");
    }
}
