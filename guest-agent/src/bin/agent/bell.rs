//! The doorbell: the machine stands still right behind the instruction that rings.

use std::arch::asm;
use std::hint::spin_loop;
use std::io;
use std::time::{Duration, Instant};

use guest_agent::wire::{BELL_PORT, BELL_REST_MS, BELL_RING};

use crate::{Context, Failure};

/// Leave to ring.
pub(crate) struct Bell {
    /// How long to do nothing afterwards.
    rest: Duration,
}

impl Bell {
    /// Gets leave to write to I/O ports, which a kernel may not give.
    pub(crate) fn new() -> Result<Self, Failure> {
        // SAFETY: iopl takes an integer and changes nothing but what this thread may do with I/O ports.
        if unsafe { libc::syscall(libc::SYS_iopl, 3) } != 0 {
            return Err(io::Error::last_os_error())
                .context("get leave for the doorbell's I/O port (iopl, CONFIG_X86_IOPL_IOPERM)");
        }
        let cpus = rustix::thread::sched_getaffinity(None).context("count the CPUs")?.count();
        let rest = if cpus > 1 { Duration::from_millis(BELL_REST_MS) } else { Duration::ZERO };
        Ok(Self { rest })
    }

    /// Rings, and comes back when the host has looked. Allocates nothing and calls no kernel before it rings.
    pub(crate) fn ring(&self) {
        // The jump: an emulator may run the instructions up to the next one before it stops.
        //
        // SAFETY: a device of the host's listens at this port, and writes to no memory. The jump goes to the next
        // instruction; neither touches flags or stack.
        unsafe {
            asm!(
                "out dx, al",
                "jmp 2f",
                "2:",
                in("dx") BELL_PORT,
                in("al") BELL_RING,
                options(nostack, preserves_flags),
            );
        }
        // Awake, so that this CPU does not run what it does when idle, such as folding counters.
        let rung = Instant::now();
        while rung.elapsed() < self.rest {
            spin_loop();
        }
    }
}
