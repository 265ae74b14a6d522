//! Walks over free lists and per-CPU lists. A page is marked in the zone's classes as it is met, so no walk can be longer
//! than the zone has pages, whatever the links say.

use super::class::{Kind, PageClass, Part};
use super::kernel::Kernel;
use super::memmap::{MemMap, PageWords, word};
use super::scan::{Mark, Marks};
use super::space::Space;
use super::{Anomaly, Area, Cpu, Fault, FreeList, Pcp, PcpList, Place, ReadError, Zone};

/// Lists of orders up to this come by three types; then huge pages have theirs (include/linux/mmzone.h, NR_PCP_LISTS).
const COSTLY_ORDER: usize = 3;
const PCP_TYPES: usize = 3;
/// HPAGE_PMD_ORDER of x86-64.
const PMD_ORDER: u32 = 9;

/// What a walk needs.
pub(super) struct Walk<'a, 'm> {
    pub(super) kernel: &'a Kernel,
    pub(super) space: &'a Space<'a>,
    pub(super) map: &'a MemMap<'m>,
    pub(super) zone: &'a mut Zone,
    pub(super) marks: &'a Marks,
}

impl Walk<'_, '_> {
    /// Every free list of the zone at `zone`, a virtual address.
    pub(super) fn free_areas(&mut self, zone: u64) -> Result<Vec<Area>, ReadError> {
        let (areas, layout) = (zone.wrapping_add(self.kernel.zone.free_area as u64), &self.kernel.area);
        let mut result = Vec::new();
        for order in 0..self.kernel.zone.orders {
            let address = areas.wrapping_add((order * layout.bytes) as u64);
            let nr_free = self.space.u64(address.wrapping_add(layout.nr_free as u64));
            let nr_free = nr_free.ok_or(ReadError::Unreadable { what: "a free area", address })?;
            let mut lists = Vec::new();
            // Lists that grow by doubling take twice their size for a moment, and a guest may be free page by page.
            // What the guest counts is believed no further than the zone reaches.
            let mut left = nr_free.min(self.zone.spanned >> order) as usize;
            for number in 0..self.kernel.types.len() {
                let head = address.wrapping_add((layout.lists + number * 16) as u64);
                let class = PageClass::new(Kind::Free, Part::Head, order as u32).on_list(number);
                let (pfns, broken) = self.list(head, Place::Free(order as u32, number), class, left)?;
                left = left.saturating_sub(pfns.len());
                lists.push(FreeList { pfns, broken });
            }
            result.push(Area { nr_free, lists });
        }
        Ok(result)
    }

    /// One doubly linked list of pages, whose head is at `head`: first pfns, and whether the walk was given up.
    fn list(
        &mut self,
        head: u64,
        place: Place,
        class: PageClass,
        expected: usize,
    ) -> Result<(Vec<u32>, bool), ReadError> {
        let unreadable = ReadError::Unreadable { what: "the head of a list", address: head };
        let ends = self.space.u64(head).zip(self.space.u64(head.wrapping_add(8)));
        let (mut next, tail) = ends.ok_or(unreadable)?;
        let node = self.kernel.page.list as u64 * 8;
        let (mut previous, mut from) = (head, self.zone.start);
        if next == head && tail == head {
            return Ok((Vec::new(), false));
        }
        let mut pfns = Vec::with_capacity(expected);
        while next != head {
            let found =
                self.map.pfn(next.wrapping_sub(node)).and_then(|pfn| Some((pfn, self.map.page(pfn)?)));
            let Some((pfn, page)) = found else {
                self.fault(Fault::WildLink, from, place, head, next);
                return Ok((pfns, true));
            };
            let Some(slot) = pfn.checked_sub(self.zone.start).and_then(|at| self.zone.pages.get(at as usize))
            else {
                self.fault(Fault::OtherZone, pfn, place, self.zone.start, pfn);
                return Ok((pfns, true));
            };
            if *slot != PageClass::default() {
                self.fault(Fault::ListedTwice, pfn, place, 1, 2);
                return Ok((pfns, true));
            }
            let back = word(page, self.kernel.page.list + 1);
            if back != previous {
                self.fault(Fault::BackLink, pfn, place, previous, back);
                if !self.could_be_on(place, page) {
                    // The link is wrong, so nothing is to be said of the page.
                    return Ok((pfns, true));
                }
            }
            self.zone.pages[(pfn - self.zone.start) as usize] = class;
            // Below 2^32: a pfn is at most as large as RAM.
            pfns.push(pfn as u32);
            (previous, from) = (next, pfn);
            next = word(page, self.kernel.page.list);
        }
        if tail != previous {
            self.fault(Fault::BackLink, from, place, previous, tail);
        }
        pfns.shrink_to_fit();
        Ok((pfns, false))
    }

    /// Whether a page looks as those on such a list do.
    fn could_be_on(&self, place: Place, page: &PageWords) -> bool {
        let kind = word(page, self.kernel.page.kind);
        match place {
            Place::Free(..) => self.marks.of(kind as u32) == Mark::Buddy,
            Place::Pcp(..) | Place::Deferred => kind >> 32 == 0,
        }
    }

    /// What one CPU holds.
    pub(super) fn cpu(
        &mut self,
        number: usize,
        online: bool,
        pcp: u64,
        stats: u64,
    ) -> Result<Cpu, ReadError> {
        let (space, layout) = (self.space, &self.kernel.pcp);
        let unreadable = ReadError::Unreadable { what: "per-CPU pages", address: pcp };
        let at = |offset: usize| pcp.wrapping_add(offset as u64);
        let int = |offset: usize| Some(space.u32(at(offset))?.cast_signed());
        let maybe = |offset: Option<usize>| offset.and_then(int);
        let byte = |offset: Option<usize>| offset.and_then(|offset| space.u8(at(offset)));
        let short = |offset: Option<usize>| Some(space.u16(at(offset?))?.cast_signed());
        let heads = (int(layout.count), int(layout.high), int(layout.batch));
        let (Some(count), Some(high), Some(batch)) = heads else { return Err(unreadable) };
        let mut result = Pcp {
            count,
            high,
            high_range: maybe(layout.high_min).zip(maybe(layout.high_max)),
            batch,
            flags: byte(layout.flags),
            alloc_factor: byte(layout.alloc_factor),
            free_count: short(layout.free_count).or_else(|| short(layout.free_factor)),
            lists: Vec::new(),
        };
        for index in 0..layout.list_count {
            let order =
                if index < PCP_TYPES * (COSTLY_ORDER + 1) { (index / PCP_TYPES) as u32 } else { PMD_ORDER };
            let class = PageClass::new(Kind::Pcp, Part::Head, order).on_list(index % PCP_TYPES);
            let (pfns, broken) =
                self.list(at(layout.lists + index * 16), Place::Pcp(number, index), class, 0)?;
            let types = self.noted_types(&pfns);
            result.lists.push(PcpList { order, pfns, types, broken });
        }
        let stat = |offset: usize| Some(space.u8(stats.wrapping_add(offset as u64))?.cast_signed());
        let diffs = match layout.diffs {
            Some((offset, count)) => {
                let diffs: Option<Vec<i8>> = (0..count).map(|index| stat(offset + index)).collect();
                diffs.ok_or(ReadError::Unreadable { what: "per-CPU counters", address: stats })?
            }
            None => Vec::new(),
        };
        Ok(Cpu { number, online, pcp: result, diffs, threshold: layout.threshold.and_then(stat) })
    }

    /// The types that pages were put on a per-CPU list with (get_pcppage_migratetype()).
    fn noted_types(&self, pfns: &[u32]) -> Vec<u8> {
        let Some(index) = self.kernel.page.index else { return Vec::new() };
        let noted = |pfn: &u32| self.map.page((*pfn).into()).map_or(0, |page| word(page, index) as u8);
        pfns.iter().map(noted).collect()
    }

    /// The singly linked list of pages that wait for the zone's lock; each holds its order (mm/page_alloc.c,
    /// free_one_page()).
    pub(super) fn deferred(&mut self, first: u64) -> Vec<(u32, u32)> {
        let (node, mut next, mut from) = (self.kernel.page.list as u64 * 8, first, self.zone.start);
        let mut pages = Vec::new();
        while next != 0 {
            let found =
                self.map.pfn(next.wrapping_sub(node)).and_then(|pfn| Some((pfn, self.map.page(pfn)?)));
            let Some((pfn, page)) = found else {
                self.fault(Fault::WildLink, from, Place::Deferred, 0, next);
                break;
            };
            let order = word(page, self.kernel.page.private);
            let slot = pfn.checked_sub(self.zone.start).and_then(|at| self.zone.pages.get_mut(at as usize));
            let Some(slot) = slot.filter(|_| order < self.kernel.zone.orders as u64) else {
                self.fault(Fault::OtherZone, pfn, Place::Deferred, self.zone.start, pfn);
                break;
            };
            if *slot != PageClass::default() {
                self.fault(Fault::ListedTwice, pfn, Place::Deferred, 1, 2);
                break;
            }
            *slot = PageClass::new(Kind::Deferred, Part::Head, order as u32);
            pages.push((pfn as u32, order as u32));
            from = pfn;
            next = word(page, self.kernel.page.list);
        }
        pages
    }

    fn fault(&mut self, fault: Fault, pfn: u64, place: Place, expected: u64, found: u64) {
        self.zone.anomalies.add(fault, 0, Anomaly { pfn, count: 1, place: Some(place), expected, found });
    }
}
