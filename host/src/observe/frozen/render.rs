//! What the kernel's own files would print of a frozen state: `/proc/buddyinfo`, `/proc/pagetypeinfo`, and the words of
//! `/proc/kpageflags`. Tests hold them equal to what the kernel printed at that point, so that reader and kernel vouch for
//! each other.

use std::fmt::Write as _;
use std::ops::Range;

use super::class::Kind;
use super::kernel::{Kernel, PAGE_STRUCT_BYTES, TypeScheme};
use super::memmap::{MemMap, PageWords, word};
use super::scan::{Mark, Marks};
use super::{PAGE_SHIFT, Ram, ReadError, State, Zone};

/// Longer lists are not counted to their end (mm/vmstat.c, pagetypeinfo_showfree_print()).
const LIST_CAP: usize = 100_000;

/// `/proc/buddyinfo` (mm/vmstat.c, frag_show_print(); all kernels).
#[must_use]
pub fn buddyinfo(state: &State) -> String {
    let mut text = String::new();
    for zone in &state.zones {
        let _ = write!(text, "Node {}, zone {:>8} ", zone.node, zone.name);
        for area in &zone.areas {
            let _ = write!(text, "{:>6} ", area.nr_free);
        }
        text.push('\n');
    }
    text
}

/// `/proc/pagetypeinfo` without CONFIG_PAGE_OWNER (mm/vmstat.c, pagetypeinfo_show(); all kernels).
#[must_use]
pub fn pagetypeinfo(state: &State) -> String {
    let mut text = String::new();
    let mut nodes: Vec<u32> = state.zones.iter().map(|zone| zone.node).collect();
    nodes.dedup();
    for node in nodes {
        let zones = || state.zones.iter().filter(move |zone| zone.node == node);
        let _ = writeln!(text, "Page block order: {}", state.pageblock_order);
        let _ = writeln!(text, "Pages per block:  {}\n", state.pageblock_pages());
        let _ = write!(text, "{:<43} ", "Free pages count per migrate type at order");
        for order in 0..zones().next().map_or(0, |zone| zone.areas.len()) {
            let _ = write!(text, "{order:>6} ");
        }
        text.push('\n');
        for zone in zones() {
            for (number, kind) in state.types.iter().enumerate() {
                let _ = write!(text, "Node {node:>4}, zone {:>8}, type {:>12} ", zone.name, kind.name());
                for area in &zone.areas {
                    let count = area.lists.get(number).map_or(0, |list| list.pfns.len());
                    let over = if count >= LIST_CAP { ">" } else { "" };
                    let _ = write!(text, "{over}{:>6} ", count.min(LIST_CAP));
                }
                text.push('\n');
            }
        }
        let _ = write!(text, "\n{:<23}", "Number of blocks type ");
        for kind in &state.types {
            let _ = write!(text, "{:>12} ", kind.name());
        }
        text.push('\n');
        for zone in zones() {
            let _ = write!(text, "Node {node}, zone {:>8} ", zone.name);
            for count in block_counts(state, zone) {
                let _ = write!(text, "{count:>12} ");
            }
            text.push('\n');
        }
    }
    text
}

/// Pageblocks by type as the kernel counts them: it looks at one page each pageblock's size from the zone's first page on,
/// and leaves out pages of other zones (pagetypeinfo_showblockcount_print()).
fn block_counts(state: &State, zone: &Zone) -> Vec<u64> {
    let mut counts = vec![0; state.types.len()];
    let isolate = state.types.iter().position(|kind| *kind == super::MigrateType::Isolate);
    for index in (0..zone.pages.len()).step_by(1 << state.pageblock_order) {
        if matches!(zone.pages[index].kind(), Kind::Absent | Kind::Foreign) {
            continue;
        }
        let Some(block) = zone.block(zone.start + index as u64, state.pageblock_order) else { continue };
        let number = if block.isolated { isolate.unwrap_or(block.number) } else { block.number };
        if let Some(count) = counts.get_mut(number) {
            *count += 1;
        }
    }
    counts
}

/// Bits of kpageflags (include/uapi/linux/kernel-page-flags.h, include/linux/kernel-page-flags.h).
mod kpf {
    pub(super) const SLAB: u32 = 7;
    pub(super) const BUDDY: u32 = 10;
    pub(super) const MMAP: u32 = 11;
    pub(super) const ANON: u32 = 12;
    pub(super) const SWAPCACHE: u32 = 13;
    pub(super) const COMPOUND_HEAD: u32 = 15;
    pub(super) const COMPOUND_TAIL: u32 = 16;
    pub(super) const HUGE: u32 = 17;
    pub(super) const HWPOISON: u32 = 19;
    pub(super) const NOPAGE: u32 = 20;
    pub(super) const KSM: u32 = 21;
    pub(super) const THP: u32 = 22;
    pub(super) const OFFLINE: u32 = 23;
    pub(super) const ZERO_PAGE: u32 = 24;
    pub(super) const IDLE: u32 = 25;
    pub(super) const PGTABLE: u32 = 26;
}

/// Flags that are copied, by their name in enum pageflags, and the bit that they are copied to. The kernel copies each
/// under the same condition under which the enumeration has it; three are copied by some kernels alone.
const COPIED: [(&str, u32, Since); 22] = [
    ("PG_locked", 0, Since::Always),
    ("PG_error", 1, Since::Bits),
    ("PG_referenced", 2, Since::Always),
    ("PG_uptodate", 3, Since::Always),
    ("PG_dirty", 4, Since::Always),
    ("PG_lru", 5, Since::Always),
    ("PG_active", 6, Since::Always),
    ("PG_writeback", 8, Since::Always),
    ("PG_reclaim", 9, Since::Always),
    ("PG_swapbacked", 14, Since::Always),
    ("PG_unevictable", 18, Since::Always),
    ("PG_reserved", 32, Since::Always),
    ("PG_mlocked", 33, Since::Always),
    ("PG_mappedtodisk", 34, Since::Bits),
    ("PG_owner_2", 34, Since::Folios),
    ("PG_private", 35, Since::Always),
    ("PG_private_2", 36, Since::Always),
    ("PG_owner_priv_1", 37, Since::Always),
    ("PG_arch_1", 38, Since::Always),
    ("PG_uncached", 39, Since::Bits),
    ("PG_arch_2", 41, Since::Always),
    ("PG_arch_3", 42, Since::Folios),
];

/// Which kernels copy a flag.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Since {
    Always,
    /// Those that mark types by bits, and look at each page alone (6.1).
    Bits,
    /// Those that look at folios (6.12 and later).
    Folios,
}

/// The names that [`Kernel`] has to look up for [`kpageflags`].
pub(super) fn flag_names() -> impl Iterator<Item = &'static str> {
    /// Those that more than a copy is made of.
    const OTHERS: [&str; 4] = ["PG_swapcache", "PG_large_rmappable", "PG_hwpoison", "PG_idle"];
    COPIED.iter().map(|(name, ..)| *name).chain(OTHERS)
}

/// The words of `/proc/kpageflags` for a range of pfns (fs/proc/page.c, stable_page_flags()).
///
/// # Errors
/// See [`ReadError`].
pub fn kpageflags(
    kernel: &Kernel,
    ram: &Ram,
    state: &State,
    pfns: Range<u64>,
) -> Result<Vec<u64>, ReadError> {
    let space = super::space(kernel, ram)?;
    let map = MemMap::read(kernel, &space)?;
    let variable = |name: &str| {
        let symbol = kernel.symbol(name)?;
        space.u64(symbol.address)
    };
    let zero_image = kernel.symbol("empty_zero_page").and_then(|symbol| space.translate(symbol.address));
    let zero = variable("zero_page_pfn").or_else(|| variable("zero_pfn"));
    let zero = zero.or(zero_image.map(|address| address >> PAGE_SHIFT));
    let words = Words {
        kernel,
        map: &map,
        state,
        marks: Marks::new(kernel.page.scheme),
        zero,
        huge_zero: variable("huge_zero_pfn"),
    };
    let end = pfns.end.min(map.end());
    Ok((pfns.start.min(end)..end).map(|pfn| words.of(pfn)).collect())
}

struct Words<'a> {
    kernel: &'a Kernel,
    map: &'a MemMap<'a>,
    state: &'a State,
    marks: Marks,
    zero: Option<u64>,
    /// Kernels without CONFIG_TRANSPARENT_HUGEPAGE have none.
    huge_zero: Option<u64>,
}

/// The first page of a compound page.
#[derive(Clone, Copy)]
struct Head<'a> {
    pfn: u64,
    page: &'a PageWords,
}

impl<'a> Words<'a> {
    fn flag(&self, flags: u64, name: &str) -> bool {
        self.kernel.page_flags.get(name).is_some_and(|bit| flags >> bit & 1 == 1)
    }

    /// The first page of what a page is part of (include/linux/page-flags.h, compound_head()). A tail holds the head's
    /// address, or in 7.x with CONFIG_HUGETLB_PAGE_OPTIMIZE_VMEMMAP the mask that makes it of its own.
    fn head(&self, pfn: u64, page: &'a PageWords) -> Head<'a> {
        /// Of 2^24 pages: larger pages do not exist, and addresses are no such masks.
        const MASK_MAX: u64 = 1 << 30;
        let layout = &self.kernel.page;
        let mut info = word(page, layout.compound);
        // Until 6.x that option lets a tail look like a head where it begins a page full of tails: page_fixed_fake_head().
        let is_head = word(page, layout.flags) >> layout.head & 1 == 1;
        if info & 1 == 0 && is_head && pfn.is_multiple_of(64) && !layout.snapshots {
            info = self.map.page(pfn + 1).map_or(0, |second| word(second, layout.compound));
        }
        let (address, size) = (info & !1, (info & !1).wrapping_neg());
        let found = if info & 1 == 0 {
            None
        } else if layout.snapshots && size.is_power_of_two() && (PAGE_STRUCT_BYTES..=MASK_MAX).contains(&size)
        {
            Some(pfn & !(size / PAGE_STRUCT_BYTES - 1))
        } else {
            self.map.pfn(address)
        };
        let found = found.and_then(|pfn| Some(Head { pfn, page: self.map.page(pfn)? }));
        found.unwrap_or(Head { pfn, page })
    }

    /// The word of a page.
    fn of(&self, pfn: u64) -> u64 {
        let layout = &self.kernel.page;
        // kpage_read() of 7.x does not ask stable_page_flags() about holes.
        let Some(page) = self.map.page(pfn) else { return u64::from(!layout.snapshots) << kpf::NOPAGE };
        let folio = self.head(pfn, page);
        let tail = folio.pfn != pfn;
        let by_page = matches!(layout.scheme, TypeScheme::Bits);
        let (own, folio_flags) = (word(page, layout.flags), word(folio.page, layout.flags));
        let copied = if by_page { own } else { folio_flags };
        let large = folio_flags >> layout.head & 1 == 1;
        let second = if large { self.map.page(folio.pfn + 1) } else { None };
        let mark = self.mark(page);
        let folio_mark = self.mark(folio.page);
        // Where bits mark types, slab is a flag.
        let slab = match layout.slab {
            Some(bit) => folio_flags >> bit & 1 == 1,
            None => folio_mark == Mark::Other(Kind::Slab),
        };
        let hugetlb = match (layout.hugetlb, second) {
            (Some((index, shift, number)), Some(second)) => (word(second, index) >> shift) as u8 == number,
            _ => folio_mark == Mark::Other(Kind::Hugetlb),
        };

        let mut bits = 0_u64;
        let mut set = |bit: u32, on: bool| bits |= u64::from(on) << bit;
        let mapping = word(folio.page, layout.mapping);
        let anon = mapping & 1 == 1;
        set(kpf::MMAP, !(by_page && slab) && self.is_mapped(folio, second, hugetlb));
        set(kpf::ANON, anon);
        // PAGE_MAPPING_KSM has both bits; 6.12 tests for either.
        let ksm = if by_page || layout.snapshots { mapping & 3 == 3 } else { anon };
        set(kpf::KSM, ksm);
        set(kpf::COMPOUND_HEAD, !tail && large);
        set(kpf::COMPOUND_TAIL, tail);
        set(kpf::HUGE, hugetlb);
        let rmappable = if by_page {
            large && (folio_flags >> layout.lru & 1 == 1 || anon)
        } else {
            second.is_some_and(|second| self.flag(word(second, layout.flags), "PG_large_rmappable"))
        };
        let huge_zero = large && self.huge_zero == Some(folio.pfn);
        let rmappable = rmappable && self.huge_zero.is_some();
        set(kpf::THP, !hugetlb && (rmappable || huge_zero));
        let zero = !large && self.zero == Some(folio.pfn);
        set(kpf::ZERO_PAGE, !hugetlb && !rmappable && (huge_zero || zero));
        // page_count() is the head's.
        let references = (word(folio.page, layout.kind) >> 32) as u32;
        set(kpf::BUDDY, mark == Mark::Buddy || references == 0 && self.is_free(pfn));
        let typed = if layout.snapshots { folio_mark } else { mark };
        set(kpf::OFFLINE, typed == Mark::Other(Kind::Offline));
        set(kpf::PGTABLE, typed == Mark::Other(Kind::PageTable));
        set(kpf::SLAB, slab);
        let swap = self.flag(folio_flags, "PG_swapcache") && self.flag(folio_flags, "PG_swapbacked");
        set(kpf::SWAPCACHE, swap);
        set(kpf::IDLE, self.flag(folio_flags, "PG_idle"));
        // Each page's own, unless all of a hugetlb page is.
        let poisoned = if hugetlb { copied } else { own };
        set(kpf::HWPOISON, self.flag(poisoned, "PG_hwpoison"));
        for (name, bit, since) in COPIED {
            let wanted = match since {
                Since::Always => true,
                Since::Bits => by_page,
                Since::Folios => !by_page,
            };
            set(bit, wanted && self.flag(copied, name));
        }
        bits
    }

    fn mark(&self, page: &PageWords) -> Mark {
        self.marks.of(word(page, self.kernel.page.kind) as u32)
    }

    fn is_free(&self, pfn: u64) -> bool {
        self.state.zones.iter().any(|zone| zone.class(pfn).is_some_and(|class| class.kind() == Kind::Free))
    }

    /// page_mapped(): 6.1 counts a compound page as a whole and by page, later kernels as a whole.
    fn is_mapped(&self, folio: Head<'_>, second: Option<&PageWords>, hugetlb: bool) -> bool {
        let mapped = |page: &PageWords| (word(page, self.kernel.page.kind) as u32).cast_signed() >= 0;
        let Some(second) = second else { return mapped(folio.page) };
        let whole = self
            .kernel
            .page
            .mapcount
            .is_some_and(|(index, shift)| ((word(second, index) >> shift) as u32).cast_signed() >= 0);
        if whole || hugetlb || !matches!(self.kernel.page.scheme, TypeScheme::Bits) {
            return whole;
        }
        let (index, shift) = self.kernel.page.order;
        let order = (word(second, index) >> shift) as u8;
        (0..1_u64 << order.min(18)).any(|index| self.map.page(folio.pfn + index).is_some_and(mapped))
    }
}
