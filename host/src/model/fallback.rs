//! Falling back to other types as kernels did it whose free lists need not agree with pageblocks (6.1, mm/page_alloc.c,
//! __rmqueue_fallback(), steal_suitable_fallback()): what is free of a pageblock is moved first, and whether the pageblock
//! gets the type is decided by what was moved. Later kernels claim or steal: `alloc.rs`.

use super::alloc::Flags;
use super::zone::{Is, Rule, Zone};
use super::{Canary, MOVABLE, ORDERS};

impl Zone {
    /// __rmqueue() from its label `retry` on. Falling back puts a page on the list that was empty.
    pub(super) fn smallest_or_fallback(&mut self, order: u32, list: usize, flags: Flags) -> Option<u32> {
        if let Some(page) = self.smallest(order, list) {
            return Some(page);
        }
        if let Some(cma) = self.types.cma.filter(|_| flags.cma)
            && let Some(page) = self.smallest(order, cma)
        {
            return Some(page);
        }
        self.fall_back(order, list, flags);
        self.smallest(order, list)
    }

    /// __rmqueue_fallback(): from the largest order down, but what is movable and gets no pageblock takes the smallest.
    fn fall_back(&mut self, order: u32, list: usize, flags: Flags) {
        let mut down = (self.least_claimed(order, flags)..ORDERS as u32).rev();
        let Some(high) = down.find(|high| self.fallback(*high, list).is_some()) else { return };
        let whole = self.should_claim(high, list);
        let mut up = order..=high;
        let high = if whole || list != MOVABLE {
            high
        } else {
            up.find(|high| self.fallback(*high, list).is_some()).unwrap_or(high)
        };
        if let Some((other, at)) = self.fallback(high, list) {
            self.steal_block(at, high, list, other, whole);
        }
    }

    /// steal_suitable_fallback(): at least the free block at `at` is on the list afterwards.
    fn steal_block(&mut self, at: u32, high: u32, list: usize, other: usize, whole: bool) {
        let old = self.block_type(at);
        if old == self.types.highatomic {
            self.decided(Rule::Steal);
            return self.move_free(at, high, other, list);
        }
        if high >= self.block_order {
            self.decided(Rule::ClaimWhole);
            self.set_block_type(at, high, list);
            return self.move_free(at, high, other, list);
        }
        self.raise_boost();
        if !whole {
            self.decided(Rule::Steal);
            return self.move_free(at, high, other, list);
        }
        let (free, movable) = self.move_free_pages(at, list);
        let size = 1 << self.block_order;
        let alike = match (list, old) {
            (MOVABLE, _) => movable,
            // What is neither free nor movable is taken to be like the request.
            (_, MOVABLE) => size - (free + movable),
            _ => 0,
        };
        if free == 0 {
            self.decided(Rule::Steal);
            return self.move_free(at, high, other, list);
        }
        let half = if self.semantics.is(Canary::ClaimQuarter) { size / 4 } else { size / 2 };
        if free + alike >= half {
            self.decided(Rule::Claim);
            self.set_block_type(at, self.block_order, list);
        } else {
            self.decided(Rule::ClaimDenied);
        }
    }

    /// move_freepages_block(), whatever lists the free blocks are on: from `at` on where the pageblock begins before the
    /// zone, and nothing where it ends behind it. Gives the pages that were moved, and those that are movable.
    pub(super) fn move_free_pages(&mut self, at: u32, to: usize) -> (u32, u32) {
        let size = 1_u32 << self.block_order;
        let first = at & !(size - 1);
        let (mut page, end) = (if first < self.start { at } else { first }, first + size);
        let (mut free, mut movable) = (0, 0);
        if end > self.end {
            return (0, 0);
        }
        while page < end {
            match self.is(page) {
                (Is::Buddy, order) => {
                    // Nothing is counted, so it does not matter which list it leaves.
                    self.move_free(page, order, to, to);
                    free += 1 << order;
                    page += 1 << order;
                    continue;
                }
                (Is::Movable, _) if !self.semantics.is(Canary::NoneMovable) => movable += 1,
                _ => {}
            }
            page += 1;
        }
        (free, movable)
    }
}
