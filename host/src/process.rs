//! Child processes that cannot outlive us, and waits that always end.
//!
//! Each child leads a process group of its own, so that whatever it starts ends with it. A wait ends with the child,
//! at its deadline, or when the user interrupts (Ctrl-C, SIGTERM), whichever comes first.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// Why a wait ended before the child did.
#[derive(Debug, thiserror::Error)]
pub enum WaitError {
    /// The deadline passed.
    #[error("it did not end within its time limit")]
    TimedOut,
    /// The user asked us to stop.
    #[error("interrupted")]
    Interrupted,
    /// The system refused to let us wait.
    #[error("failed to wait for a child process: {0}")]
    Io(#[from] io::Error),
}

/// Becomes readable at the first SIGINT, SIGTERM or SIGHUP and stays so: it is never read from.
static INTERRUPT: OnceLock<UnixStream> = OnceLock::new();

/// Turns SIGINT, SIGTERM and SIGHUP from sudden death into [`WaitError::Interrupted`]. Call once, early in `main`.
///
/// # Errors
/// Where the handlers cannot be installed.
pub fn catch_interrupts() -> io::Result<()> {
    let (reader, writer) = UnixStream::pair()?;
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM, signal_hook::consts::SIGHUP] {
        signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
    }
    // A second call keeps the first pipe; both would be signalled alike.
    let _ = INTERRUPT.set(reader);
    Ok(())
}

/// Whether the user has asked us to stop.
#[must_use]
pub fn interrupted() -> bool {
    INTERRUPT.get().is_some_and(|pipe| {
        let mut fds = [PollFd::new(pipe, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(ready) if ready > 0)
    })
}

/// A child process and all its descendants that stay in its process group. Dropping it kills and reaps.
#[derive(Debug)]
pub struct Group {
    child: Child,
    pidfd: rustix::fd::OwnedFd,
    status: Option<ExitStatus>,
}

impl Group {
    /// Starts `command` as the leader of a new process group. Should we be killed outright, the kernel kills it too:
    /// when the *thread* that called this ends, so call it on one that waits for the child.
    ///
    /// # Errors
    /// As [`Command::spawn`], and where the system has no pidfds (before Linux 5.3).
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        command.process_group(0);
        // SAFETY: between fork and exec only async-signal-safe calls are allowed; prctl is a bare system call and
        // the closure neither allocates nor takes a lock.
        unsafe {
            command.pre_exec(|| {
                rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).map_err(io::Error::from)
            });
        }
        let child = command.spawn()?;
        let pidfd = pidfd_open(pid_of(&child), PidfdFlags::empty())?;
        Ok(Self { child, pidfd, status: None })
    }

    /// The child itself, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// The child's process id, which is also the group's.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The exit status if the child has ended.
    ///
    /// # Errors
    /// Where the system cannot say.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none() {
            self.status = self.child.try_wait()?;
        }
        Ok(self.status)
    }

    /// Waits for the child until `deadline`. The child goes on when this fails; drop it or call again.
    ///
    /// # Errors
    /// See [`WaitError`].
    pub fn wait_until(&mut self, deadline: Instant) -> Result<ExitStatus, WaitError> {
        self.wait_or_hear(deadline, None)
    }

    /// The same, and [`WaitError::TimedOut`] too once there is something to read from `other`.
    ///
    /// # Errors
    /// See [`WaitError`].
    pub fn wait_or_hear(
        &mut self,
        deadline: Instant,
        other: Option<BorrowedFd<'_>>,
    ) -> Result<ExitStatus, WaitError> {
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(WaitError::TimedOut);
            }
            let mut fds = vec![PollFd::from_borrowed_fd(self.pidfd.as_fd(), PollFlags::IN)];
            fds.extend(other.map(|other| PollFd::from_borrowed_fd(other, PollFlags::IN)));
            if let Some(pipe) = INTERRUPT.get() {
                fds.push(PollFd::new(pipe, PollFlags::IN));
            }
            match poll(&mut fds, Some(&timespec(left))) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(io::Error::from(errno).into()),
            }
            let ready = |index: usize| fds.get(index).is_some_and(|fd| !fd.revents().is_empty());
            let heard = other.is_some() && ready(1);
            if ready(1 + usize::from(other.is_some())) {
                return Err(WaitError::Interrupted);
            }
            if heard && !ready(0) {
                return Err(WaitError::TimedOut);
            }
        }
    }

    /// Kills the whole group and reaps the child.
    pub fn kill(&mut self) {
        // The group may already be gone, which is what we want.
        let _ = kill_process_group(pid_of(&self.child), Signal::KILL);
        if self.status.is_none() {
            self.status = self.child.wait().ok();
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Not once it is reaped: its id may belong to somebody else by then.
        if !matches!(self.try_wait(), Ok(Some(_))) {
            self.kill();
        }
    }
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_child(child)
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// The one shell line that does what `command` does.
#[must_use]
pub fn shell_line(command: &Command) -> String {
    let mut words = Vec::new();
    if let Some(dir) = command.get_current_dir() {
        words.push(format!("cd {} &&", quote(&dir.to_string_lossy())));
    }
    let mut sets = Vec::new();
    for (name, value) in command.get_envs() {
        let name = name.to_string_lossy();
        match value {
            Some(value) => sets.push(format!("{name}={}", quote(&value.to_string_lossy()))),
            None => sets.insert(0, format!("-u {name}")),
        }
    }
    if !sets.is_empty() {
        words.push("env".to_owned());
        words.append(&mut sets);
    }
    words.push(quote(&command.get_program().to_string_lossy()));
    words.extend(command.get_args().map(|arg| quote(&arg.to_string_lossy())));
    words.join(" ")
}

fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:+,@%^".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
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
    fn a_child_that_ends_gives_its_status() {
        let mut group = Group::spawn(&mut shell("exit 7")).unwrap();
        let status = group.wait_until(Instant::now() + Duration::from_secs(60)).unwrap();
        assert_eq!(status.code(), Some(7));
    }

    #[test]
    fn a_wait_ends_at_its_deadline() {
        let mut group = Group::spawn(&mut shell("sleep 600")).unwrap();
        let error = group.wait_until(Instant::now() + Duration::from_millis(20)).unwrap_err();
        assert!(matches!(error, WaitError::TimedOut));
    }

    #[test]
    fn dropping_a_group_ends_grandchildren_too() {
        use std::io::{BufRead, BufReader, Read};
        let mut command = shell("sleep 600 & echo started; wait");
        command.stdout(std::process::Stdio::piped());
        let mut group = Group::spawn(&mut command).unwrap();
        let mut stdout = BufReader::new(group.child().stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        assert_eq!(line, "started\n");
        drop(group);
        // Only the grandchild can still hold the pipe open: end of file proves that it is gone.
        assert_eq!(stdout.read_to_string(&mut line).unwrap(), 0);
    }

    #[test]
    fn a_failure_can_be_repeated_from_its_line() {
        let mut command = shell("echo \"$GREETING it's\"; pwd; exit 3");
        command.current_dir("/").env("GREETING", "two words").env_remove("LANG");
        let line = shell_line(&command);
        let repeated = shell(&line).output().unwrap();
        assert_eq!(repeated.status.code(), Some(3));
        assert_eq!(String::from_utf8(repeated.stdout).unwrap(), "two words it's\n/\n");
    }
}
