//! The allocation path: zonelist and watermarks, the free lists of a type, claim, steal (mm/page_alloc.c,
//! __alloc_frozen_pages_noprof(), get_page_from_freelist(), rmqueue(), __rmqueue()).

use super::zone::{Is, Rule, Zone};
use super::{Canary, MOVABLE, Model, ORDERS, PCP_TYPES, RECLAIMABLE, UNMOVABLE};
use crate::batch::gfp;

/// Types that a type falls back to, in this order (`fallbacks`).
const FALLBACKS: [[usize; PCP_TYPES - 1]; PCP_TYPES] =
    [[RECLAIMABLE, MOVABLE], [RECLAIMABLE, UNMOVABLE], [UNMOVABLE, MOVABLE]];
const MIN: usize = 0;
const LOW: usize = 1;
const HIGH: usize = 2;
/// ZONE_NORMAL: the zone for which fragmentation is avoided.
const ZONE_NORMAL: usize = 2;

/// How far a request may go into the reserves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reserve {
    /// __GFP_NOMEMALLOC: not at all.
    None,
    /// A request that cannot sleep: HIGHATOMIC blocks for single pages.
    NonBlock,
    /// __GFP_HIGH on top: half of the minimum, and HIGHATOMIC blocks for larger ones.
    Atomic,
}

/// A request for pages that may not sleep and wakes nobody: neither __GFP_DIRECT_RECLAIM nor __GFP_KSWAPD_RECLAIM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The block has `1 << order` pages; below 11.
    pub order: u32,
    /// 0 unmovable, 1 movable, 2 reclaimable (gfp_migratetype()).
    pub list: usize,
    /// The highest zone that will do, by its index in the kernel (gfp_zone()).
    pub highest_zone: usize,
    /// The reserves.
    pub reserve: Reserve,
}

impl Request {
    /// Of a GFP word; none where it may sleep, wakes a reclaimer, or says what the model does not know (gfp_migratetype(),
    /// gfp_zone(), __GFP_HIGH, __GFP_NOMEMALLOC).
    #[must_use]
    pub fn of_gfp(order: u32, word: u32) -> Option<Self> {
        let has = |flag: u32| word & flag != 0;
        let list = match (has(gfp::MOVABLE), has(gfp::RECLAIMABLE)) {
            (false, false) => UNMOVABLE,
            (true, false) => MOVABLE,
            (false, true) => RECLAIMABLE,
            (true, true) => return None,
        };
        let highest_zone = match (has(gfp::DMA), has(gfp::DMA32)) {
            (true, false) => 0,
            (false, true) => 1,
            (false, false) => ZONE_NORMAL,
            (true, true) => return None,
        };
        let reserve = match (has(gfp::NOMEMALLOC), has(gfp::HIGH)) {
            (true, false) => Reserve::None,
            (false, false) => Reserve::NonBlock,
            (false, true) => Reserve::Atomic,
            (true, true) => return None,
        };
        let request = Self { order, list, highest_zone, reserve };
        (word == request.gfp() && (order as usize) < ORDERS).then_some(request)
    }

    /// The GFP word that asks for it, without a warning where it fails.
    #[must_use]
    pub fn gfp(self) -> u32 {
        let zone = [gfp::DMA, gfp::DMA32].get(self.highest_zone).copied().unwrap_or(0);
        let list = [0, gfp::MOVABLE, gfp::RECLAIMABLE].get(self.list).copied().unwrap_or(0);
        let reserve = match self.reserve {
            Reserve::None => gfp::NOMEMALLOC,
            Reserve::NonBlock => 0,
            Reserve::Atomic => gfp::HIGH,
        };
        gfp::NOWARN | zone | list | reserve
    }
}

/// ALLOC_* of one attempt.
#[derive(Clone, Copy)]
pub(crate) struct Flags {
    mark: usize,
    min_reserve: bool,
    non_block: bool,
    pub(crate) highatomic: bool,
    pub(super) cma: bool,
    no_fragment: bool,
}

impl Flags {
    /// ALLOC_RESERVES.
    fn reserves(self) -> bool {
        self.min_reserve || self.non_block || self.highatomic
    }
}

/// enum rmqueue_mode: where a batch found pages last.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Mode {
    Normal,
    Cma,
    Claim,
    Steal,
}

impl Zone {
    /// zone_page_state(): what is folded in, and never below zero with SMP.
    fn free_pages(&self) -> i64 {
        if self.semantics.smp { self.free.value.max(0) } else { self.free.value }
    }

    fn free_cma_pages(&self) -> i64 {
        if self.semantics.smp { self.free_cma.value.max(0) } else { self.free_cma.value }
    }

    /// A watermark with the boost (wmark_pages()).
    fn watermark(&self, mark: usize) -> i64 {
        self.watermarks[mark].saturating_add(self.boost).cast_signed()
    }

    /// __zone_watermark_unusable_free().
    fn unusable(&self, order: u32, flags: Flags) -> i64 {
        let mut pages = (1 << order) - 1;
        if !flags.reserves() && !self.semantics.is(Canary::ReservesCount) {
            let exact = self.semantics.counts_free_highatomic;
            pages += if exact { self.free_highatomic } else { self.reserved_highatomic }.cast_signed();
        }
        if self.types.cma.is_some() && !flags.cma {
            pages += self.free_cma_pages();
        }
        pages
    }

    /// zone_watermark_fast().
    fn watermark_fast(&self, order: u32, mark: i64, highest: usize, flags: Flags) -> bool {
        let free = self.free_pages();
        let reserve = self.lowmem_reserve.get(highest).copied().unwrap_or(0);
        if order == 0 {
            let usable = free - free.min(self.unusable(0, flags));
            if usable > mark + reserve {
                return true;
            }
        }
        if self.watermark_ok(order, mark, highest, flags, free) {
            return true;
        }
        // The boost does not count for a single page at the minimum.
        if order == 0
            && self.semantics.high_ignores_boost
            && flags.min_reserve
            && self.boost > 0
            && flags.mark == MIN
        {
            let mark = self.watermarks[MIN].cast_signed();
            return self.watermark_ok(order, mark, highest, flags, free);
        }
        false
    }

    /// __zone_watermark_ok().
    fn watermark_ok(&self, order: u32, mark: i64, highest: usize, flags: Flags, free: i64) -> bool {
        let mut min = mark;
        if flags.reserves() && flags.min_reserve {
            min -= min / 2;
            if flags.non_block {
                min -= min / 4;
            }
        }
        let reserve = self.lowmem_reserve.get(highest).copied().unwrap_or(0);
        if free - self.unusable(order, flags) <= min + reserve {
            return false;
        }
        if order == 0 {
            return true;
        }
        (order as usize..ORDERS).any(|order| {
            let has = |list: usize| !self.is_empty(self.free_list(order as u32, list));
            self.nr_free[order] > 0
                && ((0..PCP_TYPES).any(has)
                    || flags.cma && self.types.cma.is_some_and(has)
                    || flags.highatomic && has(self.types.highatomic))
        })
    }

    /// zone_watermark_ok(zone, 0, high_wmark_pages(zone), ZONE_MOVABLE, 0), by which freeing sees that there is enough.
    pub(crate) fn is_above_high(&self) -> bool {
        let highest = self.lowmem_reserve.len().saturating_sub(1);
        let flags = Flags {
            mark: MIN,
            min_reserve: false,
            non_block: false,
            highatomic: false,
            cma: false,
            no_fragment: false,
        };
        self.watermark_ok(0, self.watermark(HIGH), highest, flags, self.free_pages())
    }

    /// expand(): gives the upper halves back, as guards below the minimum order. Returns what is left, and the pages that
    /// are on lists.
    #[inline]
    fn expand(&mut self, mut at: u32, low: u32, high: u32, list: usize) -> (u32, i64) {
        let lower = self.semantics.is(Canary::ExpandLower);
        let mut upper = |order: u32| {
            let half = at + (1 << order);
            if lower { std::mem::replace(&mut at, half) } else { half }
        };
        let least = self.minorder.clamp(low, high);
        for order in (least..high).rev() {
            self.add_free(upper(order), order, list, false);
        }
        for order in (low..least).rev() {
            self.set(upper(order), Is::Guard, order);
            if !self.semantics.freelist_hygiene {
                self.account(-(1 << order), list);
            }
        }
        (at, (1 << high) - (1 << least))
    }

    /// page_del_and_expand().
    #[inline]
    fn take(&mut self, at: u32, low: u32, high: u32, list: usize) -> u32 {
        self.del_free(at, high, list);
        let (at, added) = self.expand(at, low, high, list);
        if self.semantics.freelist_hygiene {
            self.account(added - (1 << high), list);
        } else {
            self.note_type(at, list);
        }
        at
    }

    /// __rmqueue_smallest().
    pub(super) fn smallest(&mut self, order: u32, list: usize) -> Option<u32> {
        let (high, first) =
            (order..ORDERS as u32).find_map(|high| Some((high, self.first(self.free_list(high, list))?)))?;
        Some(self.take(first, order, high, list))
    }

    /// __rmqueue(), with the mode that a batch keeps.
    pub(crate) fn rmqueue(&mut self, order: u32, list: usize, flags: Flags, mode: &mut Mode) -> Option<u32> {
        let cma = self.types.cma.filter(|_| flags.cma);
        if let Some(cma) = cma
            && self.free_cma_pages() > self.free_pages() / 2
            && let Some(page) = self.smallest(order, cma)
        {
            return Some(page);
        }
        if !self.semantics.freelist_hygiene {
            return self.smallest_or_fallback(order, list, flags);
        }
        if *mode == Mode::Normal
            && let Some(page) = self.smallest(order, list)
        {
            return Some(page);
        }
        if *mode <= Mode::Cma
            && let Some(cma) = cma
            && let Some(page) = self.smallest(order, cma)
        {
            *mode = Mode::Cma;
            return Some(page);
        }
        if *mode <= Mode::Claim
            && let Some(page) = self.claim(order, list, flags)
        {
            *mode = Mode::Normal;
            return Some(page);
        }
        if !flags.no_fragment
            && let Some(page) = self.steal(order, list)
        {
            *mode = Mode::Steal;
            return Some(page);
        }
        None
    }

    /// The first type to fall back to that has a block of this order, and its first block (find_suitable_fallback()).
    pub(super) fn fallback(&self, order: u32, list: usize) -> Option<(usize, u32)> {
        if self.nr_free[order as usize] == 0 {
            return None;
        }
        let mut others = FALLBACKS[list];
        if self.semantics.is(Canary::Fallbacks) {
            others.reverse();
        }
        others.into_iter().find_map(|other| Some((other, self.first(self.free_list(order, other))?)))
    }

    /// should_try_claim_block().
    pub(super) fn should_claim(&self, order: u32, list: usize) -> bool {
        order >= self.block_order / 2 || list != MOVABLE
    }

    /// The smallest order of another type's block that a request may be served from.
    pub(super) fn least_claimed(&self, order: u32, flags: Flags) -> u32 {
        if flags.no_fragment { order.max(self.block_order) } else { order }
    }

    /// __rmqueue_claim(): from the largest order down.
    fn claim(&mut self, order: u32, list: usize, flags: Flags) -> Option<u32> {
        for high in (self.least_claimed(order, flags)..ORDERS as u32).rev() {
            if !self.should_claim(high, list) {
                break;
            }
            let Some((other, at)) = self.fallback(high, list) else { continue };
            if let Some(page) = self.claim_block(at, high, order, list, other) {
                return Some(page);
            }
        }
        None
    }

    /// try_to_claim_block().
    fn claim_block(&mut self, at: u32, high: u32, order: u32, list: usize, other: usize) -> Option<u32> {
        if high >= self.block_order {
            self.decided(Rule::ClaimWhole);
            self.del_free(at, high, other);
            self.account(-(1 << high), other);
            self.set_block_type(at, high, list);
            let (at, added) = self.expand(at, order, high, list);
            self.account(added, list);
            return Some(at);
        }
        // Even where the claim then fails.
        self.raise_boost();
        if !self.spans_block(at) {
            self.decided(Rule::ClaimDenied);
            return None;
        }
        let size = 1_u32 << self.block_order;
        let first = at & !(size - 1);
        let (mut free, mut movable, mut page) = (0, 0, first);
        while page < first + size {
            match self.is(page) {
                (Is::Buddy, order) => {
                    free += 1 << order;
                    page += 1 << order;
                    continue;
                }
                (Is::Movable, _) if !self.semantics.is(Canary::NoneMovable) => movable += 1,
                _ => {}
            }
            page += 1;
        }
        let half = if self.semantics.is(Canary::ClaimQuarter) { size / 4 } else { size / 2 };
        let enough = match (list, other) {
            (MOVABLE, _) if self.semantics.claims_any_movable_block => free + movable == size,
            (_, MOVABLE) if self.semantics.claims_any_movable_block => true,
            (MOVABLE, _) => free + movable >= half,
            // What is neither free nor movable is taken to be like the request.
            (_, MOVABLE) => size - movable >= half,
            _ => free >= half,
        };
        if !enough {
            self.decided(Rule::ClaimDenied);
            return None;
        }
        self.decided(Rule::Claim);
        self.move_block(first, other, list);
        self.smallest(order, list)
    }

    /// move_freepages_block() of a block that lies in the zone: its free blocks, in the order of pfns, and its type.
    fn move_block(&mut self, first: u32, from: usize, to: usize) {
        let mut page = first;
        while page < first + (1 << self.block_order) {
            match self.is(page) {
                (Is::Buddy, order) => {
                    self.move_free(page, order, from, to);
                    page += 1 << order;
                }
                _ => page += 1,
            }
        }
        self.set_block_type(first, self.block_order, to);
    }

    /// boost_watermark().
    pub(super) fn raise_boost(&mut self) {
        let size = 1_u64 << self.block_order;
        if self.boost_factor == 0 || size * 4 > self.managed || self.semantics.is(Canary::NoBoost) {
            return;
        }
        // mult_frac()
        let (high, factor) = (self.watermarks[HIGH], self.boost_factor);
        let most = high / 10_000 * factor + high % 10_000 * factor / 10_000;
        if most > 0 {
            self.boost = (self.boost + size).min(most.max(size));
        }
    }

    /// __rmqueue_steal(): from the smallest order up, the block keeps its type.
    fn steal(&mut self, order: u32, list: usize) -> Option<u32> {
        for high in order..ORDERS as u32 {
            let Some((other, at)) = self.fallback(high, list) else { continue };
            if self.semantics.spares_movable_blocks
                && list != MOVABLE
                && other == MOVABLE
                && self.spans_block(at)
            {
                self.decided(Rule::StealDenied);
                continue;
            }
            self.decided(Rule::Steal);
            return Some(self.take(at, order, high, other));
        }
        None
    }

    /// rmqueue_buddy().
    fn rmqueue_buddy(&mut self, order: u32, list: usize, flags: Flags) -> Option<u32> {
        let highatomic = self.types.highatomic;
        let mut page = None;
        if flags.highatomic {
            page = self.smallest(order, highatomic);
        }
        if page.is_none() {
            page = self.rmqueue(order, list, flags, &mut Mode::Normal);
        } else {
            self.decided(Rule::FromReserve);
        }
        // Failing now is worse than failing a larger atomic request later.
        if page.is_none() && flags.non_block {
            page = self.smallest(order, highatomic);
            if page.is_some() {
                self.decided(Rule::FromReserve);
            }
        }
        let page = page?;
        if !self.semantics.freelist_hygiene {
            self.account(-(1 << order), self.noted_type(page));
        }
        let here = !self.semantics.reserves_after_lists;
        if here && flags.highatomic && (!self.semantics.highatomic_at_once || flags.mark == MIN) {
            self.reserve(page, order);
        }
        Some(page)
    }

    /// reserve_highatomic_pageblock().
    fn reserve(&mut self, at: u32, order: u32) {
        let size = 1_u64 << self.block_order;
        let share = self.managed / 100;
        let most = match self.semantics.reserves_in_small_zones {
            true => share + size,
            false if share < size => 0,
            false => share.next_multiple_of(size),
        };
        if self.semantics.is(Canary::NoReserve) || self.reserved_highatomic >= most {
            return;
        }
        let list = self.block_type(at);
        if !Self::is_mergeable(list) {
            return;
        }
        self.decided(Rule::Reserve);
        if !self.semantics.freelist_hygiene {
            self.reserved_highatomic += size;
            self.set_block_type(at, self.block_order, self.types.highatomic);
            self.move_free_pages(at, self.types.highatomic);
            return;
        }
        if order >= self.block_order {
            self.set_block_type(at, order, self.types.highatomic);
            self.reserved_highatomic += 1 << order;
            return;
        }
        let first = at & !(size as u32 - 1);
        if first >= self.start && first + size as u32 <= self.end {
            self.move_block(first, list, self.types.highatomic);
            self.reserved_highatomic += size;
        }
    }
}

impl Model {
    /// `alloc_pages()`: the pfn, or none where the request fails.
    pub fn alloc(&mut self, request: Request) -> Option<u64> {
        let Request { order, list, reserve, .. } = request;
        let cma = list == MOVABLE && self.types.cma.is_some();
        let atomic = reserve == Reserve::Atomic;
        // alloc_flags_nofragment(): the preferred zone is the highest one that will do.
        let preferred =
            self.zones.iter().rev().find(|zone| zone.index <= request.highest_zone && zone.managed > 0)?;
        let fast = Flags {
            mark: LOW,
            min_reserve: false,
            non_block: false,
            highatomic: self.semantics.highatomic_at_once && atomic && order > 0,
            cma,
            no_fragment: preferred.index == ZONE_NORMAL,
        };
        if let Some(pfn) = self.get_page(request, fast) {
            return Some(pfn);
        }
        let slow = Flags {
            mark: MIN,
            min_reserve: atomic,
            non_block: reserve != Reserve::None,
            highatomic: order > 0
                && (atomic || reserve != Reserve::None && !self.semantics.highatomic_needs_high),
            cma,
            no_fragment: false,
        };
        debug_assert!(list < PCP_TYPES);
        // A request that may ignore cpusets tries once more (__alloc_pages_slowpath(), can_retry_reserves).
        let tries = if atomic || self.semantics.tries_twice { 2 } else { 1 };
        (0..tries).find_map(|_| self.get_page(request, slow))
    }

    /// get_page_from_freelist().
    fn get_page(&mut self, request: Request, mut flags: Flags) -> Option<u64> {
        loop {
            for zone in self.zones.iter_mut().rev() {
                if zone.index > request.highest_zone || zone.managed == 0 {
                    continue;
                }
                let ok = |zone: &Zone, mark: usize| {
                    zone.watermark_fast(request.order, zone.watermark(mark), request.highest_zone, flags)
                };
                if !zone.semantics.tunes_lists || zone.below_high || !ok(zone, HIGH) {
                    zone.below_high = zone.semantics.tunes_lists;
                    if !ok(zone, flags.mark) {
                        zone.decided(Rule::Watermark);
                        continue;
                    }
                }
                let mut page = None;
                if zone.semantics.per_cpu_lists && super::pcp::takes(request.order) {
                    page = zone.alloc_per_cpu(request.order, request.list, flags);
                }
                let page = page.or_else(|| zone.rmqueue_buddy(request.order, request.list, flags));
                if let Some(page) = page {
                    if zone.semantics.reserves_after_lists && flags.highatomic {
                        zone.reserve(page, request.order);
                    }
                    return Some(zone.pfn(page));
                }
            }
            if !flags.no_fragment {
                return None;
            }
            flags.no_fragment = false;
        }
    }
}
