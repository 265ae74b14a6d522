//! Kernel virtual addresses of a guest, translated by walking its page tables as the processor does.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use super::PAGE_SHIFT;
use super::ram::Ram;

/// Where the kernel image is mapped (arch/x86/include/asm/page_64_types.h, __START_KERNEL_map).
pub(super) const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
const PRESENT: u64 = 1;
/// In an entry above the lowest level: it maps a large page.
const LARGE: u64 = 1 << 7;
/// Bits of an entry that are a physical address.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// The kernel's address space.
pub(super) struct Space<'a> {
    pub(super) ram: &'a Ram,
    root: u64,
    levels: u32,
    /// The last translation: virtual start, physical start, size in bytes.
    last: Cell<(u64, u64, u64)>,
    /// Numbers of the pages that were read, page tables too, where that is recorded.
    seen: RefCell<Option<BTreeSet<u64>>>,
}

impl<'a> Space<'a> {
    /// The space whose top page table is at guest-physical `root`; `levels` is 4 or 5.
    pub(super) fn new(ram: &'a Ram, root: u64, levels: u32) -> Self {
        Self { ram, root, levels, last: Cell::new((0, 0, 0)), seen: RefCell::new(None) }
    }

    /// From now on keeps which pages are read.
    pub(super) fn record(&self) {
        self.last.set((0, 0, 0));
        *self.seen.borrow_mut() = Some(BTreeSet::new());
    }

    /// Numbers of the pages read since [`Space::record`].
    pub(super) fn recorded(&self) -> BTreeSet<u64> {
        self.seen.take().unwrap_or_default()
    }

    fn see(&self, physical: u64) {
        if let Some(seen) = self.seen.borrow_mut().as_mut() {
            seen.insert(physical >> PAGE_SHIFT);
        }
    }

    /// Guest-physical address of virtual `address`; none where it is not mapped to RAM.
    pub(super) fn translate(&self, address: u64) -> Option<u64> {
        let physical = self.walk(address)?;
        self.see(physical);
        Some(physical)
    }

    fn walk(&self, address: u64) -> Option<u64> {
        let (start, physical, size) = self.last.get();
        if address.wrapping_sub(start) < size {
            return Some(physical + (address - start));
        }
        let mut table = self.root;
        for level in (1..=self.levels).rev() {
            let shift = 12 + 9 * (level - 1);
            let index = (address >> shift) & 511;
            let entry = self.ram.word(table.wrapping_add(index * 8))?;
            self.see(table);
            if entry & PRESENT == 0 {
                return None;
            }
            let leaf = level == 1 || (level <= 3 && entry & LARGE != 0);
            if leaf {
                let size = 1_u64 << shift;
                let physical = entry & ADDRESS & !(size - 1);
                self.last.set((address & !(size - 1), physical, size));
                return Some(physical + (address & (size - 1)));
            }
            table = entry & ADDRESS;
        }
        None
    }

    /// Eight bytes at an address that is a multiple of eight.
    pub(super) fn u64(&self, address: u64) -> Option<u64> {
        self.ram.word(self.translate(address)?)
    }

    /// Four bytes at an address that is a multiple of four.
    pub(super) fn u32(&self, address: u64) -> Option<u32> {
        let word = self.u64(address & !7)?;
        (address & 3 == 0).then(|| (word >> (8 * (address & 4))) as u32)
    }

    /// One byte.
    pub(super) fn u8(&self, address: u64) -> Option<u8> {
        Some((self.u64(address & !7)? >> (8 * (address & 7))) as u8)
    }

    /// Two bytes at an even address.
    pub(super) fn u16(&self, address: u64) -> Option<u16> {
        let word = self.u64(address & !7)?;
        (address & 1 == 0).then(|| (word >> (8 * (address & 6))) as u16)
    }

    /// A C string of at most `max` bytes, printable characters only.
    pub(super) fn string(&self, address: u64, max: usize) -> Option<String> {
        let mut text = String::new();
        for offset in 0..max as u64 {
            match self.u8(address.checked_add(offset)?)? {
                0 => return Some(text),
                byte if byte.is_ascii_graphic() => text.push(char::from(byte)),
                _ => return None,
            }
        }
        None
    }

    /// `count` bytes at any address, for comparisons.
    pub(super) fn bytes(&self, address: u64, count: usize) -> Option<Vec<u8>> {
        (0..count as u64).map(|offset| self.u8(address.checked_add(offset)?)).collect()
    }

    /// `count` words at an address that is a multiple of eight, all in one page of 4 KiB.
    pub(super) fn words(&self, address: u64, count: usize) -> Option<Vec<u64>> {
        let words = self.ram.words(self.translate(address)?, count)?;
        Some(words.iter().map(|word| word.load(Ordering::Relaxed)).collect())
    }
}
