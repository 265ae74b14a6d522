//! The memory map: which struct page belongs to which pfn, and where it lies in RAM.
//!
//! Everything goes by `section_mem_map` of the sections, so that kernels with and without a virtual memory map are read
//! alike (include/linux/mmzone.h, __section_mem_map_addr()).

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use super::kernel::{Kernel, PAGE_STRUCT_BYTES};
use super::space::Space;
use super::{PAGE_SHIFT, ReadError};

/// SECTION_SIZE_BITS of x86-64 (arch/x86/include/asm/sparsemem.h), which is a macro and in no type information.
const SECTION_BITS: u32 = 27;
/// Pages of a section.
pub(super) const SECTION_PAGES: u64 = 1 << (SECTION_BITS - PAGE_SHIFT);
/// SECTION_HAS_MEM_MAP in the low bits of `section_mem_map`; the pointer itself is page aligned.
const HAS_MEM_MAP: u64 = 1 << 1;
const PAGE_BYTES: u64 = 1 << PAGE_SHIFT;
/// struct pages in a page.
const PER_FRAME: u64 = PAGE_BYTES / PAGE_STRUCT_BYTES;

/// A run of struct pages whose addresses are consecutive.
struct Extent {
    address: u64,
    pfn: u64,
    pages: u64,
}

/// The memory map of a guest.
pub(super) struct MemMap<'a> {
    space: &'a Space<'a>,
    /// For each 64 pfns the guest page frame that holds their struct pages, plus 1; 0 where there is none.
    frames: Vec<u32>,
    extents: Vec<Extent>,
    last: Cell<usize>,
    /// For each section the virtual address of its pageblock bits; 0 where there is none.
    usages: Vec<u64>,
}

/// The words of a struct page.
pub(super) type PageWords = [AtomicU64; (PAGE_STRUCT_BYTES / 8) as usize];

/// The struct pages of one frame.
pub(super) type FrameWords = [PageWords; PER_FRAME as usize];

impl<'a> MemMap<'a> {
    /// Reads the sections that RAM can have.
    pub(super) fn read(kernel: &Kernel, space: &'a Space<'a>) -> Result<Self, ReadError> {
        let root = kernel.symbol("mem_section").ok_or_else(|| ReadError::Symbol("mem_section".into()))?;
        let unreadable = |what: &'static str| ReadError::Unreadable { what, address: root.address };
        let sections = space.ram.end().div_ceil(1 << SECTION_BITS);
        let mut map = Self {
            space,
            frames: vec![0; (sections * (SECTION_PAGES / PER_FRAME)) as usize],
            extents: Vec::new(),
            last: Cell::new(0),
            usages: vec![0; sections as usize],
        };
        // With SPARSEMEM_EXTREME the symbol is a pointer to an array of pointers to pages full of sections.
        let per_root = PAGE_BYTES / kernel.section.bytes;
        let roots = (root.bytes == 8).then(|| space.u64(root.address)).flatten();
        for section in 0..sections {
            let entry = match roots {
                Some(roots) => {
                    let Some(page) = space.u64(roots.wrapping_add(section / per_root * 8)) else {
                        return Err(unreadable("the array of memory sections"));
                    };
                    if page == 0 {
                        continue;
                    }
                    page.wrapping_add(section % per_root * kernel.section.bytes)
                }
                None => root.address.wrapping_add(section * kernel.section.bytes),
            };
            let Some(coded) = space.u64(entry.wrapping_add(kernel.section.mem_map as u64)) else {
                return Err(unreadable("a memory section"));
            };
            if coded & HAS_MEM_MAP == 0 {
                continue;
            }
            let pfn = section * SECTION_PAGES;
            let address = (coded & !(PAGE_BYTES - 1)).wrapping_add(pfn * PAGE_STRUCT_BYTES);
            map.add(pfn, address);
            let usage = space.u64(entry.wrapping_add(kernel.section.usage as u64)).unwrap_or(0);
            map.usages[section as usize] = usage;
        }
        if map.extents.is_empty() {
            return Err(unreadable("the memory map: no section has one"));
        }
        map.extents.sort_by_key(|extent| extent.address);
        Ok(map)
    }

    fn add(&mut self, pfn: u64, address: u64) {
        for index in 0..SECTION_PAGES / PER_FRAME {
            let frame = self.space.translate(address.wrapping_add(index * PAGE_BYTES));
            let frame =
                frame.filter(|frame| *frame < self.space.ram.end()).map_or(0, |frame| frame / PAGE_BYTES + 1);
            self.frames[(pfn / PER_FRAME + index) as usize] = u32::try_from(frame).unwrap_or(0);
        }
        match self.extents.last_mut() {
            Some(last)
                if last.pfn + last.pages == pfn
                    && last.address.wrapping_add(last.pages * PAGE_STRUCT_BYTES) == address =>
            {
                last.pages += SECTION_PAGES;
            }
            _ => self.extents.push(Extent { address, pfn, pages: SECTION_PAGES }),
        }
    }

    /// Number of pfns that the map reaches to, holes included.
    pub(super) fn end(&self) -> u64 {
        self.frames.len() as u64 * PER_FRAME
    }

    /// The struct pages of the 64 pfns from `pfn`, a multiple of 64.
    #[inline]
    pub(super) fn frame(&self, pfn: u64) -> Option<&FrameWords> {
        let frame = u64::from(self.frames.get((pfn / PER_FRAME) as usize)?.checked_sub(1)?);
        let words = self.space.ram.words(frame * PAGE_BYTES, (PAGE_BYTES / 8) as usize)?;
        let (pages, _) = words.as_chunks::<{ (PAGE_STRUCT_BYTES / 8) as usize }>();
        pages.try_into().ok()
    }

    /// The struct page of `pfn`.
    #[inline]
    pub(super) fn page(&self, pfn: u64) -> Option<&PageWords> {
        Some(&self.frame(pfn & !(PER_FRAME - 1))?[(pfn % PER_FRAME) as usize])
    }

    /// The pfn whose struct page is at virtual `address`; none where there is no struct page.
    pub(super) fn pfn(&self, address: u64) -> Option<u64> {
        let within = |extent: &Extent| {
            let offset = address.wrapping_sub(extent.address);
            let index = offset / PAGE_STRUCT_BYTES;
            (offset.is_multiple_of(PAGE_STRUCT_BYTES) && index < extent.pages).then(|| extent.pfn + index)
        };
        if let Some(pfn) = self.extents.get(self.last.get()).and_then(within) {
            return Some(pfn);
        }
        let index = self.extents.partition_point(|extent| extent.address <= address).checked_sub(1)?;
        self.last.set(index);
        within(&self.extents[index])
    }

    /// pageblock_order by how far apart the bitmaps of two sections lie: they are allocated side by side, each as large as
    /// it has to be (mm/sparse.c, mem_section_usage_size()). None where there are too few sections.
    pub(super) fn block_order_by_distance(&self, kernel: &Kernel) -> Option<u32> {
        let mut usages: Vec<u64> = self.usages.iter().copied().filter(|usage| *usage != 0).collect();
        usages.sort_unstable();
        let gap = usages.windows(2).map(|pair| pair[1] - pair[0]).min()?;
        (1..=10).find(|order| {
            let bits = (SECTION_PAGES >> order) * u64::from(kernel.section.block_bits);
            kernel.section.pageblock_flags as u64 + bits.div_ceil(64) * 8 == gap
        })
    }

    /// The bits of the pageblock that `pfn` lies in, where blocks have `1 << order` pages.
    pub(super) fn block_bits(&self, kernel: &Kernel, pfn: u64, order: u32) -> Option<u8> {
        let (address, shift) = self.block_word(kernel, pfn, order)?;
        Some((self.space.u64(address)? >> shift) as u8 & ((1_u16 << kernel.section.block_bits) - 1) as u8)
    }

    /// Virtual address of the word in which these bits are, and how far they are shifted.
    pub(super) fn block_word(&self, kernel: &Kernel, pfn: u64, order: u32) -> Option<(u64, u64)> {
        let usage = *self.usages.get((pfn / SECTION_PAGES) as usize)?;
        if usage == 0 {
            return None;
        }
        let at = ((pfn % SECTION_PAGES) >> order) * u64::from(kernel.section.block_bits);
        let flags = usage.wrapping_add(kernel.section.pageblock_flags as u64);
        Some((flags.wrapping_add(at / 64 * 8), at % 64))
    }

    /// Numbers of the pages that hold struct pages.
    pub(super) fn frames(&self) -> impl Iterator<Item = u64> {
        self.frames.iter().filter_map(|frame| Some(frame.checked_sub(1)?.into()))
    }

    /// Virtual address of the struct page of `pfn`.
    #[cfg(any(test, feature = "test-support"))]
    pub(super) fn address(&self, pfn: u64) -> Option<u64> {
        let extent =
            self.extents.iter().find(|extent| (extent.pfn..extent.pfn + extent.pages).contains(&pfn))?;
        Some(extent.address.wrapping_add((pfn - extent.pfn) * PAGE_STRUCT_BYTES))
    }
}

/// A word of a struct page.
#[inline]
pub(super) fn word(page: &PageWords, index: usize) -> u64 {
    // Layouts keep indices below the number of words.
    page[index % page.len()].load(Ordering::Relaxed)
}
