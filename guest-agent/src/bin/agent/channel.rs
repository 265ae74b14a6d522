//! The agent's end of the channel: memory of the host's, mapped through `/dev/mem`.

use std::fs::OpenOptions;
use std::sync::atomic::{AtomicU64, Ordering};

use guest_agent::wire::{CHANNEL_MAGIC, FRAMES_OFFSET, Message, WRITTEN_OFFSET, encode};
use memmap2::{MmapMut, MmapOptions};

use crate::{Context, Failure};

/// The mapped channel, written from front to back.
pub(crate) struct Channel {
    memory: MmapMut,
    written: usize,
    seq: u32,
}

impl Channel {
    /// Maps `len` bytes at guest-physical `address` and makes sure that a channel is there.
    pub(crate) fn map(address: u64, len: u64) -> Result<Self, Failure> {
        let len = usize::try_from(len).context("map the channel")?;
        if len <= FRAMES_OFFSET {
            return Err(format!("a channel of {len} bytes has no room for frames"));
        }
        let file = OpenOptions::new().read(true).write(true).open("/dev/mem").context("open /dev/mem")?;
        // SAFETY: the range is no memory of this kernel (the host put a device there and says so in the plan), so no
        // Rust object lives in it, and nobody but this process writes to it.
        let memory = unsafe { MmapOptions::new().offset(address).len(len).map_mut(&file) };
        let memory = memory.context("map the channel")?;
        if memory[..8] != CHANNEL_MAGIC.to_le_bytes() {
            return Err(format!("there is no channel at guest-physical {address:#x}"));
        }
        Ok(Self { memory, written: 0, seq: 0 })
    }

    /// Appends `message`, then announces it.
    pub(crate) fn send(&mut self, message: &Message) -> Result<(), Failure> {
        let room = self.memory.get_mut(FRAMES_OFFSET + self.written..).unwrap_or_default();
        let len = encode(self.seq, message, room).context("send to the host: the channel is full")?;
        self.written += len;
        self.seq += 1;
        let mark = &mut self.memory[WRITTEN_OFFSET..WRITTEN_OFFSET + 8];
        // SAFETY: the mapping is page aligned and WRITTEN_OFFSET a multiple of 8, so the pointer is aligned; the eight
        // bytes belong to `mark`, which is borrowed for as long as the atomic is used.
        let mark = unsafe { AtomicU64::from_ptr(mark.as_mut_ptr().cast()) };
        // Release: the host must not see the mark before the frame.
        mark.store(self.written as u64, Ordering::Release);
        Ok(())
    }
}
