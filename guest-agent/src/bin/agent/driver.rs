//! The driver in the kernel under test: it runs batches that the host writes into the guest's memory.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};

use guest_agent::script::Batches;
use guest_agent::wire::{DRIVER_FREE, DRIVER_PATH, DRIVER_RUN, Message};

use crate::channel::Channel;
use crate::{Context, Failure};

/// The driver's file, open.
pub(crate) struct Driver {
    file: File,
}

impl Driver {
    /// Opens the file, and stays on this CPU: its per-CPU lists are what batches work on.
    pub(crate) fn open() -> Result<Self, Failure> {
        let file = match OpenOptions::new().write(true).open(DRIVER_PATH) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(format!(
                    "this kernel has no {DRIVER_PATH}: the script runs batches, for which it must be built with our \
                     driver (cargo xtask kernel build --driver)"
                ));
            }
            opened => opened.context(&format!("open {DRIVER_PATH}"))?,
        };
        let mut here = rustix::thread::CpuSet::new();
        here.set(0);
        rustix::thread::sched_setaffinity(None, &here).context("stay on the first CPU")?;
        Ok(Self { file })
    }

    /// Announces and runs each batch. The driver rings; between announcement and end nothing here allocates.
    pub(crate) fn run(&mut self, index: u32, step: &Batches, channel: &mut Channel) -> Result<(), Failure> {
        for batch in 0..step.count.get() {
            channel.send(&Message::Batch { index, batch })?;
            self.command(DRIVER_RUN).context("run a batch")?;
        }
        if step.free {
            self.command(DRIVER_FREE).context("free what batches hold")?;
        }
        Ok(())
    }

    fn command(&mut self, byte: u8) -> std::io::Result<()> {
        self.file.write_all(&[byte])
    }
}
