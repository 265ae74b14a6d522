//! A zone: ordered free lists, pageblocks, counters.
//!
//! Eight bytes a page, and one a pageblock. Lists are rings: their heads stand behind the pages in the same array, so that
//! adding and taking off are the same at the ends of a list as within it.

use super::{Canary, ORDERS, RECLAIMABLE, Semantics, TYPES, TypeNumbers, Unsupported};
use crate::model::pcp::{self, Pcp};
use crate::observe::frozen::{self, Kind, MigrateType, Part, State};

/// Bits of a link: a pfn relative to the zone, or the head of a list.
const LINK_BITS: u32 = 28;
const LINK: u32 = (1 << LINK_BITS) - 1;
/// The flag of a zone that has fewer free pages than its high watermark.
pub(crate) const BELOW_HIGH: &str = "ZONE_BELOW_HIGH";
/// Heads of lists.
const HEADS: usize = ORDERS * TYPES + pcp::LISTS;

/// What a page is to the allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Is {
    /// Allocated, or a part of a block.
    Other = 0,
    /// The head of a free block (PageBuddy).
    Buddy = 1,
    /// The head of a guard.
    Guard = 2,
    /// The head of a block on a per-CPU list.
    Pcp = 3,
    /// Allocated and on an LRU list, so movable.
    Movable = 4,
    /// No page of this zone.
    Absent = 5,
}

/// A page, or the head of a list. Links of what is on no list mean nothing. All blocks of a list are the same, and of one
/// order, so a link can be copied from one to another with what is above it; above the links of a head is the same.
#[derive(Clone, Copy)]
struct Entry {
    /// Link to the next block of the list, and above it the order.
    next: u32,
    /// Link to the previous one, and above it what the page is.
    prev: u32,
}

impl Entry {
    #[inline]
    fn new(next: u32, prev: u32, is: Is, order: u32) -> Self {
        Self { next: next | order << LINK_BITS, prev: prev | (is as u32) << LINK_BITS }
    }
}

/// A list of blocks: where its head is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct List(u32);

/// A counter of a zone with what the CPU holds back of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counter {
    pub(crate) value: i64,
    pub(crate) held: i64,
}

/// A zone.
#[derive(Clone)]
pub struct Zone {
    pub(crate) index: usize,
    pub(crate) label: String,
    /// The pfn that index 0 stands for: a multiple of the largest block.
    base: u64,
    /// First and last pfn behind, relative.
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// The pages from `base` on, then the heads of lists.
    entries: Vec<Entry>,
    /// Number of pages, and of the first head.
    pages: u32,
    pub(crate) nr_free: [u64; ORDERS],
    pub(crate) block_order: u32,
    /// Type number of each block from `base` on; ISOLATED added where it is isolated.
    blocks: Vec<u8>,
    /// Of kernels whose free lists need not agree with pageblocks: the type that a page was last taken from a free list or put
    /// on a per-CPU list with (get_pcppage_migratetype()); of all others empty.
    noted: Vec<u8>,
    pub(crate) minorder: u32,
    /// The migratetypes by number.
    pub(crate) kinds: Vec<MigrateType>,
    pub(crate) types: TypeNumbers,
    pub(crate) semantics: Semantics,
    /// Differences larger than this are folded into the counter; none are held back on SMP=n.
    threshold: i64,
    pub(crate) free: Counter,
    pub(crate) free_blocks: Counter,
    pub(crate) free_cma: Counter,
    pub(crate) free_highatomic: u64,
    pub(crate) reserved_highatomic: u64,
    pub(crate) managed: u64,
    pub(crate) watermarks: [u64; 3],
    pub(crate) lowmem_reserve: Vec<i64>,
    pub(crate) boost: u64,
    pub(crate) boost_factor: u64,
    pub(crate) below_high: bool,
    /// The per-CPU lists of the CPU that runs the operations: the first one.
    pub(crate) pcp: Pcp,
    /// What the other CPUs hold, which stays as it is.
    pub(crate) others: Vec<frozen::Cpu>,
    /// How often each rule decided.
    pub(crate) rules: [u64; Rule::ALL.len()],
}

/// A rule of the allocator that not every operation comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// A block of a pageblock or more is claimed whole.
    ClaimWhole,
    /// A pageblock is claimed, and what is free of it moved.
    Claim,
    /// A pageblock is not claimed: too little of it is free or alike, or it reaches out of the zone.
    ClaimDenied,
    /// A page is taken from another type's block, which keeps its type.
    Steal,
    /// A page is not taken from a movable block.
    StealDenied,
    /// Two blocks of different types merge, and one is retyped.
    Retype,
    /// Blocks stay apart for their types.
    KeptApart,
    /// A guard page merges.
    GuardMerged,
    /// A pageblock is reserved for HIGHATOMIC.
    Reserve,
    /// A page is taken from the HIGHATOMIC reserve.
    FromReserve,
    /// A zone is passed over for its watermark.
    Watermark,
    /// A per-CPU list is refilled.
    Refill,
    /// Per-CPU lists are drained for having too many pages.
    Drain,
    /// What is freed goes to the tail, for it is expected to merge.
    Tail,
}

impl Rule {
    /// All, in the order of their numbers.
    pub const ALL: [Self; 14] = [
        Self::ClaimWhole,
        Self::Claim,
        Self::ClaimDenied,
        Self::Steal,
        Self::StealDenied,
        Self::Retype,
        Self::KeptApart,
        Self::GuardMerged,
        Self::Reserve,
        Self::FromReserve,
        Self::Watermark,
        Self::Refill,
        Self::Drain,
        Self::Tail,
    ];
}

impl Zone {
    pub(crate) fn new(
        state: &State,
        zone: &frozen::Zone,
        types: TypeNumbers,
        semantics: Semantics,
    ) -> Result<Self, Unsupported> {
        let align = 1_u64 << (ORDERS - 1);
        let base = zone.start & !(align - 1);
        let size = zone.end().next_multiple_of(align) - base;
        if size + HEADS as u64 > LINK.into() {
            return Err(Unsupported::Size(zone.label()));
        }
        let pages = size as u32;
        let mut entries = vec![Entry::new(0, 0, Is::Absent, 0); size as usize + HEADS];
        for (head, entry) in (pages..).zip(&mut entries[size as usize..]) {
            *entry = Entry::new(head, head, Is::Absent, 0);
        }
        let counter = |name: &str| {
            let number = zone.counter_number(name);
            let value = number.and_then(|number| zone.counters.get(number)).copied().unwrap_or(0);
            Counter { value, held: number.map_or(0, |number| zone.cpus[0].held_back(number)) }
        };
        let mut model = Self {
            index: zone.index,
            label: zone.label(),
            base,
            start: (zone.start - base) as u32,
            end: (zone.end() - base) as u32,
            entries,
            pages,
            nr_free: [0; ORDERS],
            block_order: state.pageblock_order,
            blocks: vec![0; (size >> state.pageblock_order) as usize],
            noted: if semantics.freelist_hygiene { Vec::new() } else { vec![0; size as usize] },
            minorder: state.guard_minorder,
            kinds: state.types.clone(),
            types,
            semantics,
            threshold: zone.cpus[0].threshold.map_or(0, i64::from),
            free: counter("NR_FREE_PAGES"),
            free_blocks: counter("NR_FREE_PAGES_BLOCKS"),
            free_cma: counter("NR_FREE_CMA_PAGES"),
            free_highatomic: zone.free_highatomic.unwrap_or(0),
            reserved_highatomic: zone.reserved_highatomic,
            managed: zone.managed,
            watermarks: [0, 1, 2].map(|index| zone.watermarks.get(index).copied().unwrap_or(0)),
            lowmem_reserve: zone.lowmem_reserve.clone(),
            boost: zone.boost,
            boost_factor: state.settings.boost_factor.into(),
            below_high: zone.flag_names.iter().any(|name| name == BELOW_HIGH),
            pcp: Pcp::new(&zone.cpus[0].pcp),
            others: zone.cpus[1..].to_vec(),
            rules: [0; Rule::ALL.len()],
        };
        for (index, class) in zone.pages.iter().enumerate() {
            let at = model.start + index as u32;
            let is = match (class.kind(), class.part()) {
                (Kind::Absent | Kind::Foreign, _) => Is::Absent,
                (Kind::Guard, Part::Head) => Is::Guard,
                (Kind::Lru, _) => Is::Movable,
                // Lists are filled below.
                _ => Is::Other,
            };
            let order = if is == Is::Guard { class.order() } else { 0 };
            model.set(at, is, order);
        }
        for block in 0..model.blocks.len() {
            if let Some(found) =
                zone.block(base + ((block as u64) << state.pageblock_order), state.pageblock_order)
            {
                model.blocks[block] = found.number as u8 | if found.isolated { ISOLATED } else { 0 };
            }
        }
        for (order, area) in zone.areas.iter().enumerate().take(ORDERS) {
            model.nr_free[order] = area.nr_free;
            for (list, found) in area.lists.iter().enumerate().take(TYPES) {
                for pfn in &found.pfns {
                    let at = (u64::from(*pfn) - base) as u32;
                    model.push_back(model.free_list(order as u32, list), at, Is::Buddy, order as u32);
                }
            }
        }
        for (index, list) in zone.cpus[0].pcp.lists.iter().enumerate().take(pcp::LISTS) {
            for pfn in &list.pfns {
                let at = (u64::from(*pfn) - base) as u32;
                model.push_back(model.pcp_list(index), at, Is::Pcp, list.order);
            }
            for (pfn, noted) in list.pfns.iter().zip(&list.types) {
                model.note_type((u64::from(*pfn) - base) as u32, usize::from(*noted) % TYPES);
            }
        }
        Ok(model)
    }

    #[inline]
    pub(crate) fn decided(&mut self, rule: Rule) {
        self.rules[rule as usize] += 1;
    }

    /// Whether the pageblock of this page lies wholly in the zone.
    pub(crate) fn spans_block(&self, at: u32) -> bool {
        let size = 1_u32 << self.block_order;
        let first = at & !(size - 1);
        first >= self.start && first + size <= self.end
    }

    pub(crate) fn contains(&self, pfn: u64) -> bool {
        pfn >= self.base + u64::from(self.start) && pfn < self.base + u64::from(self.end)
    }

    /// Whether an allocated block of this order may begin at a page of this zone.
    pub(crate) fn could_hold(&self, pfn: u64, order: u32) -> bool {
        let at = self.at(pfn);
        let aligned = at & ((1 << order) - 1) == 0;
        (order as usize) < ORDERS && aligned && matches!(self.is(at).0, Is::Other | Is::Movable)
    }

    /// The relative pfn; the page must be of this zone.
    pub(crate) fn at(&self, pfn: u64) -> u32 {
        (pfn - self.base) as u32
    }

    pub(crate) fn pfn(&self, at: u32) -> u64 {
        self.base + u64::from(at)
    }

    /// What a page is, and its order.
    #[inline]
    pub(crate) fn is(&self, at: u32) -> (Is, u32) {
        let Some(entry) = self.entries.get(at as usize) else { return (Is::Absent, 0) };
        let is = match entry.prev >> LINK_BITS {
            0 => Is::Other,
            1 => Is::Buddy,
            2 => Is::Guard,
            3 => Is::Pcp,
            4 => Is::Movable,
            _ => Is::Absent,
        };
        (is, entry.next >> LINK_BITS)
    }

    /// Says what a page is that is on no list.
    #[inline]
    pub(crate) fn set(&mut self, at: u32, is: Is, order: u32) {
        self.entries[at as usize] = Entry::new(0, 0, is, order);
    }

    /// The free list of an order and a type: those of a type lie one after the other.
    #[inline]
    pub(crate) fn free_list(&self, order: u32, list: usize) -> List {
        List(self.pages + (list * ORDERS) as u32 + order)
    }

    /// A per-CPU list.
    #[inline]
    pub(crate) fn pcp_list(&self, index: usize) -> List {
        List(self.pages + (ORDERS * TYPES + index) as u32)
    }

    #[inline]
    pub(crate) fn first(&self, list: List) -> Option<u32> {
        let first = self.entries[list.0 as usize].next & LINK;
        (first != list.0).then_some(first)
    }

    #[inline]
    pub(crate) fn last(&self, list: List) -> Option<u32> {
        let last = self.entries[list.0 as usize].prev & LINK;
        (last != list.0).then_some(last)
    }

    #[inline]
    pub(crate) fn is_empty(&self, list: List) -> bool {
        self.first(list).is_none()
    }

    /// Puts a block on a list between two that follow one another, either of which may be the head.
    #[inline]
    fn insert(&mut self, prev: u32, next: u32, at: u32, is: Is, order: u32) {
        let link = Entry::new(at, at, is, order);
        self.entries[at as usize] = Entry::new(next, prev, is, order);
        self.entries[next as usize].prev = link.prev;
        self.entries[prev as usize].next = link.next;
    }

    /// Puts a block on a list as its first one (list_add()).
    #[inline]
    pub(crate) fn push_front(&mut self, list: List, at: u32, is: Is, order: u32) {
        let next = self.entries[list.0 as usize].next & LINK;
        self.insert(list.0, next, at, is, order);
    }

    /// Puts a block on a list as its last one (list_add_tail()).
    #[inline]
    pub(crate) fn push_back(&mut self, list: List, at: u32, is: Is, order: u32) {
        let prev = self.entries[list.0 as usize].prev & LINK;
        self.insert(prev, list.0, at, is, order);
    }

    /// Takes a block off the list that it is on: it is allocated then (list_del()).
    #[inline]
    pub(crate) fn unlink(&mut self, at: u32) {
        let Entry { next, prev } = self.entries[at as usize];
        self.entries[(prev & LINK) as usize].next = next;
        self.entries[(next & LINK) as usize].prev = prev;
        self.set(at, Is::Other, 0);
    }

    /// Relative pfns of a list, head first.
    pub(crate) fn walk(&self, list: List) -> impl Iterator<Item = u32> + '_ {
        let step =
            move |at: &u32| Some(self.entries[*at as usize].next & LINK).filter(|next| *next != list.0);
        std::iter::successors(self.first(list), step).take(self.pages as usize)
    }

    /// Type number of the block that a page lies in (get_pfnblock_migratetype()): ISOLATE where it is isolated.
    #[inline]
    pub(crate) fn block_type(&self, at: u32) -> usize {
        let block = self.blocks[(at >> self.block_order) as usize];
        match self.types.isolate {
            Some(isolate) if block & ISOLATED != 0 => isolate,
            _ => usize::from(block & 7),
        }
    }

    /// set_pcppage_migratetype(), where there is such a thing.
    #[inline]
    pub(crate) fn note_type(&mut self, at: u32, list: usize) {
        if let Some(noted) = self.noted.get_mut(at as usize) {
            *noted = list as u8;
        }
    }

    /// get_pcppage_migratetype(), or the type of the block of a page where lists agree with pageblocks.
    #[inline]
    pub(crate) fn noted_type(&self, at: u32) -> usize {
        self.noted.get(at as usize).map_or_else(|| self.block_type(at), |noted| usize::from(*noted))
    }

    /// The stored type number of a block by its number, and whether it is isolated.
    pub(crate) fn block(&self, number: usize) -> Option<(usize, bool)> {
        self.blocks.get(number).map(|block| (usize::from(block & 7), block & ISOLATED != 0))
    }

    /// Types every block of a range of `1 << order` pages (change_pageblock_range(), set_pageblock_migratetype()).
    pub(crate) fn set_block_type(&mut self, at: u32, order: u32, list: usize) {
        let first = at >> self.block_order;
        let count = 1 << order.saturating_sub(self.block_order);
        for block in first..first + count {
            let slot = &mut self.blocks[block as usize];
            *slot = *slot & ISOLATED | list as u8;
        }
    }

    /// migratetype_is_mergeable().
    pub(crate) fn is_mergeable(list: usize) -> bool {
        list <= RECLAIMABLE
    }

    fn add(counter: &mut Counter, threshold: i64, delta: i64) {
        let sum = counter.held + delta;
        if sum.abs() > threshold {
            counter.value += sum;
            counter.held = 0;
        } else {
            counter.held = sum;
        }
    }

    /// account_freepages().
    #[inline]
    pub(crate) fn account(&mut self, pages: i64, list: usize) {
        if Some(list) == self.types.isolate {
            return;
        }
        Self::add(&mut self.free, self.threshold, pages);
        if Some(list) == self.types.cma {
            Self::add(&mut self.free_cma, self.threshold, pages);
        } else if list == self.types.highatomic && self.semantics.counts_free_highatomic {
            self.free_highatomic = self.free_highatomic.wrapping_add_signed(pages);
        }
    }

    /// rmqueue_bulk() where free lists need not agree with pageblocks: a page of CMA, and all that were taken.
    pub(crate) fn account_bulk_cma(&mut self, at: u32, order: u32) {
        if Some(self.noted_type(at)) == self.types.cma {
            Self::add(&mut self.free_cma, self.threshold, -(1 << order));
        }
    }

    /// The rest of it.
    pub(crate) fn account_bulk(&mut self, pages: i64) {
        Self::add(&mut self.free, self.threshold, -pages);
    }

    #[inline]
    fn account_blocks(&mut self, order: u32, list: usize, sign: i64) {
        if order >= self.block_order && Some(list) != self.types.isolate {
            Self::add(&mut self.free_blocks, self.threshold, sign << order);
        }
    }

    /// __add_to_free_list(), and set_buddy_order().
    #[inline(always)] // A call costs as much as what it does.
    pub(crate) fn add_free(&mut self, at: u32, order: u32, list: usize, tail: bool) {
        let free = self.free_list(order, list);
        if tail {
            self.push_back(free, at, Is::Buddy, order);
        } else {
            self.push_front(free, at, Is::Buddy, order);
        }
        self.nr_free[order as usize] += 1;
        self.account_blocks(order, list, 1);
    }

    /// __del_page_from_free_list().
    #[inline(always)] // A call costs as much as what it does.
    pub(crate) fn del_free(&mut self, at: u32, order: u32, list: usize) {
        self.unlink(at);
        // What a kernel said that it gave may have been free already: then nothing counts right any more.
        self.nr_free[order as usize] = self.nr_free[order as usize].wrapping_sub(1);
        self.account_blocks(order, list, -1);
    }

    /// move_to_free_list(): to the tail. Where lists need not agree with pageblocks nothing is counted.
    pub(crate) fn move_free(&mut self, at: u32, order: u32, from: usize, to: usize) {
        self.unlink(at);
        let list = self.free_list(order, to);
        if self.semantics.is(Canary::MoveToHead) {
            self.push_front(list, at, Is::Buddy, order);
        } else {
            self.push_back(list, at, Is::Buddy, order);
        }
        if !self.semantics.freelist_hygiene {
            return;
        }
        self.account(-(1 << order), from);
        self.account(1 << order, to);
        let isolate = |list: usize| Some(list) == self.types.isolate;
        if isolate(from) != isolate(to) {
            let (list, sign) = if isolate(from) { (to, 1) } else { (from, -1) };
            self.account_blocks(order, list, sign);
        }
    }
}

#[cfg(test)]
impl Zone {
    /// Pages that are guards.
    pub(crate) fn guard_pages(&self) -> u64 {
        let guards = (self.start..self.end).map(|at| self.is(at)).filter(|(is, _)| *is == Is::Guard);
        guards.map(|(_, order)| 1 << order).sum()
    }

    /// What is on per-CPU lists.
    fn walk_held(&self) -> impl Iterator<Item = u32> + '_ {
        (0..pcp::LISTS).flat_map(|index| self.walk(self.pcp_list(index)))
    }

    /// All that decides what happens next in it, as numbers.
    pub(crate) fn image(&self) -> Vec<u64> {
        let what = (self.start..self.end).map(|at| {
            let (is, order) = self.is(at);
            is as u64 | u64::from(order) << 8
        });
        let lists = (self.pages..self.pages + HEADS as u32).map(List);
        let lists = lists.flat_map(|list| self.walk(list).chain([u32::MAX])).map(u64::from);
        let counters =
            [self.free, self.free_blocks, self.free_cma].map(|counter| [counter.value, counter.held]);
        let pcp = &self.pcp;
        let signed = counters.into_iter().flatten().chain([pcp.count, pcp.high, pcp.free_count]);
        let rest = [
            self.free_highatomic,
            self.reserved_highatomic,
            self.boost,
            self.below_high.into(),
            pcp.flags.into(),
            pcp.alloc_factor.into(),
        ];
        let noted = self.walk_held().map(|at| self.noted_type(at) as u64);
        let blocks = self.blocks.iter().map(|block| u64::from(*block)).chain(noted);
        let whole = what.chain(lists).chain(signed.map(i64::cast_unsigned)).chain(rest);
        whole.chain(blocks).chain(self.nr_free).collect()
    }
}

/// Beside a block's type.
const ISOLATED: u8 = 8;
