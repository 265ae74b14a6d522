//! The driver in the kernel under test: it runs batches that the host writes into the guest's memory.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use guest_agent::script::{Batches, PAGE_BYTES};
use guest_agent::wire::{DRIVER_FREE, DRIVER_PATH, DRIVER_RUN, DRIVER_RUN_SLEEPING, Message};
use memmap2::MmapMut;
use rustix::thread::CpuSet;

use crate::channel::Channel;
use crate::{Context, Failure};

/// What a busy CPU touches at a time, in bytes.
const BUSY_BYTES: usize = 1 << 20;

/// The driver's file, open.
pub(crate) struct Driver {
    file: File,
    /// The CPUs that batches do not run on.
    others: Vec<usize>,
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
        let all = rustix::thread::sched_getaffinity(None).context("count the CPUs")?;
        let others = (1..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect();
        stay_on(0)?;
        Ok(Self { file, others })
    }

    /// Announces and runs each batch. The driver rings; between announcement and end nothing here allocates.
    pub(crate) fn run(&self, index: u32, step: &Batches, channel: &mut Channel) -> Result<(), Failure> {
        let others = if step.busy { self.others.as_slice() } else { &[] };
        if step.busy && others.is_empty() {
            return Err("batches with busy = true need a guest with more than one CPU".into());
        }
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let threads: Vec<_> = others.iter().map(|cpu| scope.spawn(|| keep_busy(*cpu, &done))).collect();
            let ran = self.run_all(index, step, channel);
            done.store(true, Ordering::Relaxed);
            let busy = threads
                .into_iter()
                .map(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?);
            busy.chain([ran]).collect::<Result<(), Failure>>()
        })?;
        if step.free {
            self.command(DRIVER_FREE).context("free what batches hold")?;
        }
        Ok(())
    }

    fn run_all(&self, index: u32, step: &Batches, channel: &mut Channel) -> Result<(), Failure> {
        for batch in 0..step.count.get() {
            channel.send(&Message::Batch { index, batch })?;
            self.command(if step.may_sleep { DRIVER_RUN_SLEEPING } else { DRIVER_RUN })
                .context("run a batch")?;
        }
        Ok(())
    }

    fn command(&self, byte: u8) -> std::io::Result<()> {
        (&self.file).write_all(&[byte])
    }
}

/// Keeps the thread that calls it on one CPU.
fn stay_on(cpu: usize) -> Result<(), Failure> {
    let mut only = CpuSet::new();
    only.set(cpu);
    rustix::thread::sched_setaffinity(None, &only).context("stay on a CPU")
}

/// Takes pages and gives them back until it is enough.
fn keep_busy(cpu: usize, done: &AtomicBool) -> Result<(), Failure> {
    stay_on(cpu)?;
    while !done.load(Ordering::Relaxed) {
        let mut map = MmapMut::map_anon(BUSY_BYTES).context("map anonymous memory")?;
        for at in (0..BUSY_BYTES).step_by(PAGE_BYTES as usize) {
            map[at] = 1;
        }
    }
    Ok(())
}
