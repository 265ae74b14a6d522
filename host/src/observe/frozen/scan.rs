//! One pass over the struct pages of a zone: what each page is, and whether what it says fits the lists it was found on.
//!
//! This is where the time goes, so it runs frame by frame in the order of memory and keeps no more than two bytes a page.

use super::class::{Kind, PageClass, Part};
use super::kernel::{Kernel, TypeScheme};
use super::memmap::{MemMap, PageWords, word};
use super::{Anomaly, Fault, ReadError, Zone};

/// Bits of a page's flags that say which zone it belongs to, of which node.
#[derive(Clone, Copy, Debug)]
pub(super) struct ZoneBits {
    node_shift: u32,
    node_mask: u64,
    zone_shift: u32,
    zone_mask: u64,
}

impl ZoneBits {
    /// Where the bits lie depends on macros (include/linux/page-flags-layout.h): from the top section, node, zone. The
    /// section is there only without a virtual memory map. Derived, and held against the first pages of free lists.
    pub(super) fn derive(kernel: &Kernel, map: &MemMap<'_>, zones: &[Zone]) -> Result<Self, ReadError> {
        let zone_width = (kernel.zones as u64).next_power_of_two().trailing_zeros();
        let nodes = kernel.symbol("node_data").map_or(1, |data| (data.bytes / 8).clamp(1, 1024));
        let node_width = nodes.next_power_of_two().trailing_zeros();
        let candidates = [0_u32, 19, 25].map(|section_width| {
            let node_shift = 64 - section_width - node_width;
            let zone_shift = node_shift - zone_width;
            // A shift by 64 is none: there is then nothing to look at.
            Self {
                node_shift: node_shift % 64,
                node_mask: (1 << node_width) - 1,
                zone_shift: zone_shift % 64,
                zone_mask: (1 << zone_width) - 1,
            }
        });
        let samples = || {
            zones.iter().flat_map(|zone| {
                let lists = zone.areas.iter().flat_map(|area| &area.lists);
                lists.filter_map(|list| list.pfns.first()).map(move |pfn| (zone, u64::from(*pfn)))
            })
        };
        let fits = |bits: &Self| {
            let fit = |(zone, pfn): &(&Zone, u64)| {
                map.page(*pfn).is_some_and(|page| bits.is_of(word(page, kernel.page.flags), bits.value(zone)))
            };
            samples().filter(fit).count()
        };
        let seen = samples().count();
        // The first of equals: max_by_key gives the last one.
        let best =
            candidates.into_iter().rev().max_by_key(fits).filter(|best| fits(best) * 2 > seen || seen == 0);
        best.ok_or(ReadError::Derive("where page flags hold the zone"))
    }

    fn value(self, zone: &Zone) -> (u64, u64) {
        (u64::from(zone.node) & self.node_mask, zone.index as u64 & self.zone_mask)
    }

    /// These flags, with the number of another zone.
    #[cfg(any(test, feature = "test-support"))]
    pub(super) fn of_other_zone(self, flags: u64) -> u64 {
        flags ^ 1 << self.zone_shift
    }

    #[inline]
    fn is_of(self, flags: u64, (node, zone): (u64, u64)) -> bool {
        flags >> self.node_shift & self.node_mask == node && flags >> self.zone_shift & self.zone_mask == zone
    }
}

/// What page_type says.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Mark {
    None,
    Buddy,
    Guard,
    Other(Kind),
}

/// The marks of each value of the top byte, or the bits of 6.1.
pub(super) enum Marks {
    Byte(Box<[Mark; 256]>),
    Bits,
}

impl Marks {
    pub(super) fn new(scheme: TypeScheme) -> Self {
        let TypeScheme::Byte { buddy, offline, table, guard, hugetlb, slab, unaccepted } = scheme else {
            return Self::Bits;
        };
        let mut marks = Box::new([Mark::None; 256]);
        for (value, kind) in [
            (Some(offline), Kind::Offline),
            (Some(table), Kind::PageTable),
            (hugetlb, Kind::Hugetlb),
            (slab, Kind::Slab),
            (unaccepted, Kind::Unaccepted),
        ] {
            if let Some(value) = value {
                marks[usize::from(value)] = Mark::Other(kind);
            }
        }
        marks[usize::from(guard)] = Mark::Guard;
        marks[usize::from(buddy)] = Mark::Buddy;
        Self::Byte(marks)
    }

    #[inline]
    pub(super) fn of(&self, page_type: u32) -> Mark {
        // PAGE_TYPE_BASE and the bits of 6.1: include/linux/page-flags.h.
        const BASE: u32 = 0xf000_0000;
        const BITS: [(u32, Mark); 4] = [
            (0x80, Mark::Buddy),
            (0x400, Mark::Guard),
            (0x200, Mark::Other(Kind::PageTable)),
            (0x100, Mark::Other(Kind::Offline)),
        ];
        match self {
            Self::Byte(marks) => marks[(page_type >> 24) as usize],
            Self::Bits if page_type & BASE != BASE || page_type == u32::MAX => Mark::None,
            Self::Bits => {
                BITS.iter().find(|(bit, _)| page_type & bit == 0).map_or(Mark::None, |(_, mark)| *mark)
            }
        }
    }
}

/// A page as the scan finds it.
#[derive(Clone, Copy)]
struct Page<'a> {
    pfn: u64,
    words: &'a PageWords,
    mark: Mark,
    references: u32,
}

/// The block that the scan is inside of.
struct Inside {
    start: u64,
    end: u64,
    class: PageClass,
    /// Whether it is a block without users, not a compound page.
    free: bool,
}

/// Gives every page of `zone` its class, and notes what should not be.
pub(super) fn scan(
    kernel: &Kernel,
    map: &MemMap<'_>,
    bits: ZoneBits,
    block_order: u32,
    clears_private: bool,
    zone: &mut Zone,
) {
    let mut pages = std::mem::take(&mut zone.pages);
    let mut scan = Scan {
        kernel,
        map,
        bits,
        of_zone: bits.value(zone),
        marks: Marks::new(kernel.page.scheme),
        block_order,
        clears_private,
        lists_whole: !zone.has_broken_lists(),
        zone,
        inside: Inside { start: 0, end: 0, class: PageClass::default(), free: false },
    };
    let (start, end) = (scan.zone.start, scan.zone.end());
    let mut pfn = start;
    while pfn < end {
        let frame_end = ((pfn & !63) + 64).min(end);
        match map.frame(pfn & !63) {
            Some(frame) => {
                for pfn in pfn..frame_end {
                    let class = &mut pages[(pfn - start) as usize];
                    *class = scan.page(pfn, &frame[(pfn % 64) as usize], *class);
                }
            }
            None => pages[(pfn - start) as usize..(frame_end - start) as usize].fill(PageClass::default()),
        }
        pfn = frame_end;
    }
    zone.pages = pages;
}

struct Scan<'a, 'm> {
    kernel: &'a Kernel,
    map: &'a MemMap<'m>,
    bits: ZoneBits,
    of_zone: (u64, u64),
    marks: Marks,
    block_order: u32,
    clears_private: bool,
    lists_whole: bool,
    zone: &'a mut Zone,
    inside: Inside,
}

impl Scan<'_, '_> {
    /// The class of a page, given what the walks over the lists said of it.
    #[inline]
    fn page(&mut self, pfn: u64, page: &PageWords, listed: PageClass) -> PageClass {
        let kind = word(page, self.kernel.page.kind);
        let (mark, references) = (self.marks.of(kind as u32), (kind >> 32) as u32);
        if pfn < self.inside.end && listed == PageClass::default() && mark == Mark::None {
            let as_expected = if self.inside.free {
                references == 0 && self.left_private(page) == 0
            } else {
                word(page, self.kernel.page.compound) & 1 == 1
            };
            if as_expected {
                return self.inside.class;
            }
        }
        self.slow(Page { pfn, words: page, mark, references }, listed)
    }

    fn slow(&mut self, page: Page<'_>, listed: PageClass) -> PageClass {
        let Page { pfn, words, mark, references } = page;
        if pfn < self.inside.end {
            let kind = self.inside.class.kind();
            if self.inside.free {
                if listed != PageClass::default() || matches!(mark, Mark::Buddy | Mark::Guard) {
                    self.fault(Fault::Overlap, pfn, 0, 1);
                }
                // A block on a list inside another one is looked at itself; a mere mark is no block.
                if listed == PageClass::default() {
                    if references != 0 {
                        let fault = if kind == Kind::Pcp { Fault::PcpReferenced } else { Fault::Referenced };
                        self.fault(fault, pfn, 0, references.into());
                    }
                    self.private(pfn, words);
                    return self.inside.class;
                }
            } else if word(words, self.kernel.page.compound) & 1 == 1 && listed == PageClass::default() {
                // A tail that is marked itself, as each page of some compound pages is.
                return self.inside.class;
            }
        }
        match listed.kind() {
            Kind::Free => self.free(page, listed),
            Kind::Pcp | Kind::Deferred => self.per_cpu(page, listed),
            _ => self.unlisted(page),
        }
    }

    /// The head of a block that a walk found on a free list.
    fn free(&mut self, page: Page<'_>, listed: PageClass) -> PageClass {
        let Page { pfn, words, mark, references } = page;
        let order = listed.order();
        match mark {
            Mark::Buddy => {
                let held = word(words, self.kernel.page.private);
                if held != u64::from(order) {
                    self.fault(Fault::WrongOrder, pfn, order.into(), held);
                }
            }
            Mark::Guard => self.fault(Fault::GuardListed, pfn, 0, 1),
            Mark::None | Mark::Other(_) => self.fault(Fault::NotBuddy, pfn, 1, 0),
        }
        if references != 0 {
            self.fault(Fault::Referenced, pfn, 0, references.into());
        }
        if !self.bits.is_of(word(words, self.kernel.page.flags), self.of_zone) {
            self.fault(Fault::OtherZone, pfn, 0, 1);
        }
        self.enter(pfn, order, listed)
    }

    fn per_cpu(&mut self, page: Page<'_>, listed: PageClass) -> PageClass {
        let Page { pfn, words, mark, references } = page;
        if matches!(mark, Mark::Buddy | Mark::Guard) {
            self.fault(Fault::PcpMarked, pfn, 0, 1);
        }
        if references != 0 && listed.kind() == Kind::Pcp {
            self.fault(Fault::PcpReferenced, pfn, 0, references.into());
        }
        if listed.kind() == Kind::Pcp {
            self.private(pfn, words);
        }
        self.enter(pfn, listed.order(), listed)
    }

    /// What a free page holds in `private` and should not.
    #[inline]
    fn left_private(&self, page: &PageWords) -> u64 {
        if self.clears_private { word(page, self.kernel.page.private) } else { 0 }
    }

    fn private(&mut self, pfn: u64, page: &PageWords) {
        let left = self.left_private(page);
        if left != 0 {
            self.fault(Fault::StalePrivate, pfn, 0, left);
        }
    }

    /// Goes on inside the block of `1 << order` pages at `pfn`.
    fn enter(&mut self, pfn: u64, order: u32, class: PageClass) -> PageClass {
        let end = pfn + (1 << order);
        if !pfn.is_multiple_of(1 << order) || end > self.zone.end() {
            self.fault(Fault::Misplaced, pfn, 1 << order, pfn % (1 << order));
        }
        // Behind a block inside another one the outer one goes on.
        let end = if self.inside.free { end.max(self.inside.end) } else { end };
        self.inside =
            Inside { start: pfn, end, class: PageClass::new(class.kind(), Part::Tail, 0), free: true };
        class
    }

    fn unlisted(&mut self, page: Page<'_>) -> PageClass {
        let Page { pfn, words, mark, references } = page;
        let flags = word(words, self.kernel.page.flags);
        if !self.bits.is_of(flags, self.of_zone) {
            return PageClass::new(Kind::Foreign, Part::Single, 0);
        }
        let held = word(words, self.kernel.page.private);
        let possible = held < self.kernel.zone.orders as u64;
        let kind = match mark {
            Mark::Buddy => {
                // Where a list could not be walked to its end this says nothing.
                if self.lists_whole {
                    self.fault(Fault::NotListed, pfn, 1, 0);
                }
                if references != 0 {
                    self.fault(Fault::Referenced, pfn, 0, references.into());
                }
                let order = if possible { held as u32 } else { 0 };
                return self.enter(pfn, order, PageClass::new(Kind::Free, Part::Head, order));
            }
            Mark::Guard => {
                if !possible {
                    self.fault(Fault::GuardOrder, pfn, 0, held);
                    // No head: it has no order to be judged by.
                    return PageClass::new(Kind::Guard, Part::Single, 0);
                }
                return self.enter(pfn, held as u32, PageClass::new(Kind::Guard, Part::Head, held as u32));
            }
            Mark::Other(kind) => kind,
            Mark::None if flags >> self.kernel.page.reserved & 1 == 1 => Kind::Reserved,
            Mark::None if self.kernel.page.slab.is_some_and(|bit| flags >> bit & 1 == 1) => Kind::Slab,
            Mark::None if flags >> self.kernel.page.lru & 1 == 1 => Kind::Lru,
            Mark::None => Kind::Other,
        };
        if flags >> self.kernel.page.head & 1 == 0 {
            return PageClass::new(kind, Part::Single, 0);
        }
        let (kind, order) = self.compound(pfn, kind);
        self.inside = Inside {
            start: pfn,
            end: pfn + (1 << order),
            class: PageClass::new(kind, Part::Tail, 0),
            free: false,
        };
        PageClass::new(kind, Part::Head, order)
    }

    /// Kind and order of the compound page at `pfn`: its second page has the order, and in 6.1 whether it is hugetlb.
    fn compound(&self, pfn: u64, kind: Kind) -> (Kind, u32) {
        let Some(second) = self.map.page(pfn + 1) else { return (kind, 0) };
        let (index, shift) = self.kernel.page.order;
        // Larger than any page there is: then it is none.
        let order = Some((word(second, index) >> shift) as u8).filter(|order| (1..=30).contains(order));
        let kind = match self.kernel.page.hugetlb {
            Some((index, shift, number)) if (word(second, index) >> shift) as u8 == number => Kind::Hugetlb,
            _ => kind,
        };
        (kind, order.map_or(0, u32::from))
    }

    fn fault(&mut self, fault: Fault, pfn: u64, expected: u64, found: u64) {
        let anomaly = Anomaly { pfn, count: 1, place: None, expected, found };
        // A free block may be larger than a pageblock: what is wrong with all of it is one anomaly.
        let block = if pfn < self.inside.end { self.inside.start } else { pfn } >> self.block_order;
        self.zone.anomalies.add(fault, block, anomaly);
    }
}
