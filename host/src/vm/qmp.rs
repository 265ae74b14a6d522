//! QEMU's control socket: the few commands and events of QMP by which a machine is stopped and goes on.
//!
//! A client of our own, because every exchange must end at a limit and events must be looked for without waiting. The
//! `qapi` crate has neither: its reader gives up the part of a line that came before a timeout, and panics at the end of
//! the stream. What is needed of the protocol (docs/interop/qmp-spec.txt of QEMU) is one JSON object a line, each way.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Deserialize;

use super::VmError;
use crate::process::interrupted;

/// A line longer than this is no QMP. QEMU's longest, the greeting, has a few hundred bytes.
const LINE_MAX: usize = 1 << 20;
/// How often a wait for QEMU looks whether the user has had enough.
const LOOK: Duration = Duration::from_millis(50);

/// Our end of the socket, and what QEMU has said of the machine so far.
pub(super) struct Qmp {
    socket: UnixStream,
    /// What came and is no whole line yet.
    buffer: Vec<u8>,
    ended: bool,
    /// Number of the last command.
    command: u64,
    /// The answer to it: what QEMU complains of, if anything.
    answer: Option<Result<(), String>>,
    /// Whether all vCPUs stand still.
    pub(super) stopped: bool,
    /// Whether the guest has said that it panics since this was last taken.
    pub(super) panicked: bool,
}

/// A line of QEMU's. It has more fields, and the greeting has none of these.
#[derive(Deserialize)]
struct Line {
    event: Option<String>,
    error: Option<Complaint>,
    id: Option<u64>,
}

#[derive(Deserialize)]
struct Complaint {
    desc: String,
}

impl Qmp {
    /// Makes a connection and gives QEMU's end of it. The command that begins every session is on its way.
    pub(super) fn new() -> io::Result<(Self, OwnedFd)> {
        let (socket, qemu) = UnixStream::pair()?;
        socket.set_nonblocking(true)?;
        let mut qmp = Self {
            socket,
            buffer: Vec::new(),
            ended: false,
            command: 0,
            answer: None,
            stopped: false,
            panicked: false,
        };
        qmp.send("qmp_capabilities")?;
        Ok((qmp, qemu.into()))
    }

    /// Hears what QEMU has said, without waiting. That QEMU is gone is no error: whoever waits for it will know.
    pub(super) fn hear(&mut self) -> io::Result<()> {
        let mut chunk = [0; 4096];
        while !self.ended {
            match self.socket.read(&mut chunk) {
                Ok(0) => self.ended = true,
                Ok(len) => {
                    self.buffer.extend_from_slice(&chunk[..len]);
                    self.lines()?;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // QEMU went with something of ours unread.
                Err(error) if error.kind() == ErrorKind::ConnectionReset => self.ended = true,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Where there is something to read once QEMU says something; none once it is gone.
    pub(super) fn ear(&self) -> Option<BorrowedFd<'_>> {
        (!self.ended).then(|| self.socket.as_fd())
    }

    /// Gives a command and waits for the answer, at most for `limit`. `doing` is the command in words.
    pub(super) fn execute(
        &mut self,
        command: &str,
        doing: &'static str,
        limit: Duration,
    ) -> Result<(), VmError> {
        let deadline = Instant::now() + limit;
        let disobeys = |why: String| VmError::Disobeys { doing, why };
        let io_error = |source| VmError::Io { doing: "speak to QEMU", source };
        self.send(command).map_err(|error| disobeys(error.to_string()))?;
        loop {
            self.hear().map_err(io_error)?;
            if let Some(answer) = self.answer.take() {
                return answer.map_err(disobeys);
            }
            if self.ended {
                return Err(disobeys("QEMU is gone".into()));
            }
            if interrupted() {
                return Err(VmError::Interrupted);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(disobeys(format!("QEMU did not answer within {} s", limit.as_secs_f32())));
            }
            let wait = left.min(LOOK);
            let wait = Timespec { tv_sec: 0, tv_nsec: wait.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&wait)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(io_error(errno.into())),
            }
        }
    }

    fn send(&mut self, command: &str) -> io::Result<()> {
        self.command += 1;
        self.answer = None;
        // A few bytes now and then: the socket's buffer has room for them unless QEMU has stopped to read.
        self.socket.write_all(format!("{{\"execute\":\"{command}\",\"id\":{}}}\n", self.command).as_bytes())
    }

    /// Takes the whole lines from the buffer.
    fn lines(&mut self) -> io::Result<()> {
        while let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.buffer.drain(..=end).collect();
            self.line(serde_json::from_slice(&line)?);
        }
        if self.buffer.len() > LINE_MAX {
            return Err(io::Error::other(format!("QEMU said more than {LINE_MAX} bytes in a line")));
        }
        Ok(())
    }

    fn line(&mut self, line: Line) {
        match line.event.as_deref() {
            Some("STOP") => self.stopped = true,
            Some("RESUME") => self.stopped = false,
            Some("GUEST_PANICKED") => self.panicked = true,
            _ => {}
        }
        if line.id == Some(self.command) {
            self.answer = Some(line.error.map_or(Ok(()), |complaint| Err(complaint.desc)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn pair() -> (Qmp, UnixStream) {
        let (qmp, qemu) = Qmp::new().unwrap();
        (qmp, qemu.into())
    }

    fn say(qemu: &mut UnixStream, text: &str) {
        qemu.write_all(text.as_bytes()).unwrap();
    }

    #[test]
    fn a_ring_is_heard_once_the_machine_stands_still() {
        let (mut qmp, mut qemu) = pair();
        say(
            &mut qemu,
            "{\"QMP\": {\"version\": {}, \"capabilities\": [\"oob\"]}}\r\n{\"return\": {}, \"id\": 1}\r\n",
        );
        say(&mut qemu, "{\"timestamp\": {}, \"event\": \"GUEST_PANICKED\", \"data\": {}}\r\n{\"eve");
        qmp.hear().unwrap();
        assert!(qmp.panicked && !qmp.stopped);
        say(&mut qemu, "nt\": \"STOP\"}\r\n");
        qmp.hear().unwrap();
        assert!(qmp.panicked && qmp.stopped);
    }

    #[test]
    fn an_answer_is_for_the_command_that_has_its_number() {
        let (mut qmp, mut qemu) = pair();
        say(
            &mut qemu,
            "{\"return\": {}, \"id\": 1}\n{\"error\": {\"class\": \"X\", \"desc\": \"no\"}, \"id\": 2}\n",
        );
        let error = qmp.execute("cont", "resume", SECOND).unwrap_err();
        assert_eq!(error.to_string(), "failed to resume the machine: no");
        say(&mut qemu, "{\"event\": \"STOP\"}\n{\"return\": {}, \"id\": 3}\n");
        qmp.execute("stop", "stop", SECOND).unwrap();
        assert!(qmp.stopped);
        let mut sent = vec![0; 1000];
        let len = qemu.read(&mut sent).unwrap();
        let sent = String::from_utf8(sent[..len].to_vec()).unwrap();
        assert_eq!(
            sent,
            "{\"execute\":\"qmp_capabilities\",\"id\":1}\n{\"execute\":\"cont\",\"id\":2}\n{\"execute\":\"stop\",\"id\":3}\n"
        );
    }

    #[test]
    fn no_answer_is_an_error_at_the_limit() {
        let (mut qmp, _qemu) = pair();
        let error = qmp.execute("stop", "stop", Duration::from_millis(20)).unwrap_err();
        assert!(matches!(error, VmError::Disobeys { .. }), "{error}");
    }

    #[test]
    fn a_qemu_that_goes_is_no_error_until_it_is_told_something() {
        let (mut qmp, qemu) = pair();
        drop(qemu);
        qmp.hear().unwrap();
        assert!(matches!(qmp.execute("stop", "stop", SECOND), Err(VmError::Disobeys { .. })));
    }

    #[test]
    fn what_is_no_json_is_an_error() {
        let (mut qmp, mut qemu) = pair();
        say(&mut qemu, "hello\n");
        qmp.hear().unwrap_err();
    }
}
