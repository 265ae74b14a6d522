//! A doorbell that holds its ringer, for machines that must repeat to the byte.
//!
//! Under `-icount`, a vCPU that stops itself counts as idle until QEMU's main loop has stopped the machine. If the loop
//! looks at the clock in between, it moves the guest's clock on to the next timer, as it does when a guest sleeps
//! (softmmu/icount.c, icount_start_warp_timer()): a race, which is lost often enough to make every run different. So
//! these machines never stop. The port is a debug console, and the one vCPU is held within its `out` instruction, which
//! writes a byte twice: to the console's file, then to its log. Both are pipes of ours, the *outer* and the *inner*. The
//! inner one is full. So a byte in the outer one says that the vCPU waits for room in the inner one and can do nothing
//! else, and the main loop waits for the vCPU.
//!
//! To let it go without letting it ring again unheld: fill the outer pipe, so that the next ring waits there; make room
//! in the inner one; take the byte that this lets in, and fill it again; empty the outer one.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, fcntl_setpipe_size, pipe_with};

use super::VmError;
use crate::process::interrupted;

/// Size of the pipes in bytes: a page, the least that the kernel gives.
const PIPE_BYTES: usize = 4096;
/// How often a wait looks whether the user has had enough.
const LOOK: Duration = Duration::from_millis(50);

/// The two pipes.
pub(super) struct Gate {
    outer: Pipe,
    inner: Pipe,
    held: bool,
}

impl Gate {
    /// Makes a gate that is shut.
    pub(super) fn new() -> io::Result<Self> {
        let mut gate = Self { outer: Pipe::new()?, inner: Pipe::new()?, held: false };
        gate.inner.fill()?;
        Ok(gate)
    }

    /// The paths by which QEMU opens the console's file and its log.
    pub(super) fn paths(&self) -> [String; 2] {
        [self.outer.path(), self.inner.path()]
    }

    /// Whether the guest has rung since this was last asked, or since it was let go.
    pub(super) fn rang(&mut self) -> io::Result<bool> {
        let rang = self.outer.take(1)? == 1;
        self.held |= rang;
        Ok(rang)
    }

    /// Where there is something to read once the guest rings.
    pub(super) fn ear(&self) -> Option<BorrowedFd<'_>> {
        Some(self.outer.reader.as_fd())
    }

    /// Whether the vCPU is held.
    pub(super) fn is_held(&self) -> bool {
        self.held
    }

    /// Lets go the vCPU that is held, if one is, within `limit`. `alive` says whether QEMU still runs.
    pub(super) fn resume(
        &mut self,
        limit: Duration,
        mut alive: impl FnMut() -> io::Result<bool>,
    ) -> Result<(), VmError> {
        if !std::mem::take(&mut self.held) {
            return Ok(());
        }
        let io_error = |source| VmError::Io { doing: "let QEMU go on", source };
        let disobeys = |why: &str| VmError::Disobeys { doing: "resume", why: why.into() };
        let deadline = Instant::now() + limit;
        self.outer.fill().map_err(io_error)?;
        // What filled it, and the byte that waits for room.
        let mut left = PIPE_BYTES + 1;
        loop {
            left -= self.inner.take(left).map_err(io_error)?;
            if left == 0 {
                break;
            }
            if interrupted() {
                return Err(VmError::Interrupted);
            }
            if !alive().map_err(io_error)? {
                return Err(disobeys("QEMU is gone"));
            }
            if Instant::now() >= deadline {
                return Err(disobeys("it does not come back from its doorbell"));
            }
            let wait = Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.inner.reader, PollFlags::IN)], Some(&wait)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(io_error(errno.into())),
            }
        }
        self.inner.fill().map_err(io_error)?;
        self.outer.take(PIPE_BYTES).map_err(io_error)?;
        Ok(())
    }
}

/// A pipe of which QEMU opens the writing end for itself. Ours do not wait.
struct Pipe {
    reader: File,
    writer: File,
}

impl Pipe {
    fn new() -> io::Result<Self> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        let size = fcntl_setpipe_size(&writer, PIPE_BYTES)?;
        if size != PIPE_BYTES {
            return Err(io::Error::other(format!("a pipe has {size} bytes instead of {PIPE_BYTES}")));
        }
        Ok(Self { reader: reader.into(), writer: writer.into() })
    }

    fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.writer.as_raw_fd())
    }

    /// Fills an empty pipe.
    fn fill(&mut self) -> io::Result<()> {
        self.writer.write_all(&[0; PIPE_BYTES])
    }

    /// Takes what is there, at most `max` bytes, and gives the number.
    fn take(&mut self, max: usize) -> io::Result<usize> {
        let mut bytes = [0; PIPE_BYTES];
        let mut taken = 0;
        while taken < max {
            let room = bytes.len().min(max - taken);
            match self.reader.read(&mut bytes[..room]) {
                Ok(len) => taken += len,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::OpenOptions;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    /// Rings as QEMU does: a byte to the one, then to the other, and counts how often it came back.
    fn ringer(gate: &Gate, rings: u32) -> (Arc<AtomicU32>, thread::JoinHandle<()>) {
        let [mut outer, mut inner] =
            gate.paths().map(|path| OpenOptions::new().append(true).open(path).unwrap());
        let back = Arc::new(AtomicU32::new(0));
        let count = back.clone();
        let thread = thread::spawn(move || {
            for _ in 0..rings {
                outer.write_all(&[1]).unwrap();
                inner.write_all(&[1]).unwrap();
                count.fetch_add(1, Ordering::SeqCst);
            }
        });
        (back, thread)
    }

    fn wait_for_ring(gate: &mut Gate) {
        while !gate.rang().unwrap() {
            thread::yield_now();
        }
    }

    #[test]
    fn every_ring_is_held_until_it_is_let_go() {
        let mut gate = Gate::new().unwrap();
        let (back, thread) = ringer(&gate, 200);
        for ring in 0..200 {
            wait_for_ring(&mut gate);
            assert!(gate.is_held());
            if ring % 50 == 0 {
                thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(back.load(Ordering::SeqCst), ring);
            assert!(!gate.rang().unwrap());
            gate.resume(Duration::from_secs(10), || Ok(true)).unwrap();
            assert!(!gate.is_held());
        }
        thread.join().unwrap();
        assert!(!gate.rang().unwrap());
    }

    #[test]
    fn one_that_does_not_come_back_is_an_error_at_the_limit() {
        let mut gate = Gate::new().unwrap();
        let [outer, _] = gate.paths();
        OpenOptions::new().append(true).open(outer).unwrap().write_all(&[1]).unwrap();
        wait_for_ring(&mut gate);
        let error = gate.resume(Duration::from_millis(20), || Ok(true)).unwrap_err();
        assert!(matches!(error, VmError::Disobeys { .. }), "{error}");
        gate.resume(Duration::ZERO, || Ok(false)).expect("nobody is held any more");
    }
}
