//! Guest RAM, mapped. Reading it is sound whatever the guest does meanwhile: all of it is read by atomic loads.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapMut, MmapOptions, MmapRaw};

use crate::vm::RamLayout;

/// Guest RAM behind a mapping, or in our own memory.
pub struct Ram {
    map: MmapRaw,
    layout: RamLayout,
    /// Whether it is our own memory, which may be altered.
    ours: bool,
}

impl Ram {
    /// Maps a file that holds RAM as `layout` says. Only what is read is brought in.
    ///
    /// # Errors
    /// Where it cannot be mapped, or is shorter than the RAM it should hold.
    pub fn map(file: &File, layout: RamLayout) -> io::Result<Self> {
        let len = file.metadata()?.len();
        if len < layout.all_bytes {
            let text = format!("the image has {len} bytes, the guest's RAM {}", layout.all_bytes);
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, text));
        }
        let len = usize::try_from(layout.all_bytes).map_err(io::Error::other)?;
        let map = MmapOptions::new().len(len).map_raw_read_only(file)?;
        Ok(Self { map, layout, ours: false })
    }

    /// RAM in our own memory, full of zeros, for images of tests, benches and fuzzing. It takes memory where it is altered.
    ///
    /// # Errors
    /// Where the system has no room for it.
    pub fn zeroed(layout: RamLayout) -> io::Result<Self> {
        let len = usize::try_from(layout.all_bytes).map_err(io::Error::other)?;
        Ok(Self { map: MmapMut::map_anon(len)?.into(), layout, ours: true })
    }

    /// Where RAM lies.
    #[must_use]
    pub fn layout(&self) -> RamLayout {
        self.layout
    }

    /// Guest-physical address just above the last byte of RAM.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.layout.end()
    }

    /// Where the byte at guest-physical `address` is in the file.
    #[must_use]
    pub fn offset(&self, address: u64) -> Option<u64> {
        self.layout.offset(address)
    }

    /// `count` words of eight bytes at guest-physical `address`; none where that is not aligned or not all RAM.
    #[must_use]
    #[inline]
    pub fn words(&self, address: u64, count: usize) -> Option<&[AtomicU64]> {
        let offset = self.layout.offset(address)?;
        let last = (count as u64).checked_mul(8)?.checked_sub(1)?;
        // RAM below and above the hole is not one piece.
        let whole = self.layout.offset(address.checked_add(last)?)? - offset == last;
        if offset % 8 != 0 || !whole {
            return None;
        }
        let start = (offset / 8) as usize;
        self.all().get(start..start + count)
    }

    /// All RAM, in the order of the file.
    #[must_use]
    pub fn all(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page aligned, lives as long as `self`, and has `len()` bytes, which the file had when it
        // was mapped. Others may write to the file: atomics allow for that. Loads of eight bytes never write, and `plant`
        // stores only where the mapping allows it.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast::<AtomicU64>(), self.map.len() / 8) }
    }

    /// The word at guest-physical `address`.
    #[must_use]
    pub fn word(&self, address: u64) -> Option<u64> {
        Some(self.words(address, 1)?[0].load(Ordering::Relaxed))
    }

    /// Alters a word of RAM that is in our own memory; says whether it could. Faults are planted so.
    pub fn plant(&self, address: u64, value: u64) -> bool {
        let Some(word) = self.words(address, 1).filter(|_| self.ours) else { return false };
        word[0].store(value, Ordering::Relaxed);
        true
    }
}
