//! The free path: merging, retyping, head or tail (mm/page_alloc.c, __free_one_page() and its callers).

use super::zone::{Is, Rule, Zone};
use super::{Canary, Model, ORDERS};

const MAX_ORDER: u32 = ORDERS as u32 - 1;

impl Zone {
    /// find_buddy_page_pfn(): the buddy, where it is free or a guard and of this order.
    #[inline]
    fn buddy(&self, at: u32, order: u32) -> (u32, Option<Is>) {
        let buddy = at ^ (1 << order);
        match self.is(buddy) {
            (is @ (Is::Buddy | Is::Guard), held) if held == order => (buddy, Some(is)),
            _ => (buddy, None),
        }
    }

    /// __free_one_page(): `list` is the type of the block that the page lies in.
    pub(crate) fn free_one(&mut self, mut at: u32, mut order: u32, list: usize) {
        self.account(1 << order, list);
        let mut last_buddy = 0;
        while order < MAX_ORDER {
            let (buddy, is) = self.buddy(at, order);
            last_buddy = buddy;
            let Some(is) = is else { break };
            let mut buddy_list = list;
            if order >= self.block_order {
                buddy_list = self.block_type(buddy);
                if buddy_list != list && !(Self::is_mergeable(list) && Self::is_mergeable(buddy_list)) {
                    self.decided(Rule::KeptApart);
                    break;
                }
            }
            if is == Is::Guard {
                self.set(buddy, Is::Other, 0);
                self.decided(Rule::GuardMerged);
                if self.semantics.counts_merged_guards {
                    self.account(1 << order, list);
                }
            } else {
                self.del_free(buddy, order, buddy_list);
            }
            let retypes = self.semantics.freelist_hygiene && !self.semantics.is(Canary::KeepTypes);
            if buddy_list != list && retypes {
                self.decided(Rule::Retype);
                self.set_block_type(buddy, order, list);
            }
            at &= buddy;
            order += 1;
        }
        // buddy_merge_likely()
        let likely = order < MAX_ORDER - 1 && self.buddy(last_buddy & at, order + 1).1.is_some();
        let tail = likely && !self.semantics.is(Canary::Head);
        if tail {
            self.decided(Rule::Tail);
        }
        self.add_free(at, order, list, tail);
    }

    /// free_one_page() and split_large_buddy(): what is larger than a pageblock goes one pageblock after the other, each
    /// with its own type. Before free lists agreed with pageblocks it went as one (__free_pages_ok()).
    pub(crate) fn free_split(&mut self, at: u32, order: u32) {
        let whole = !self.semantics.freelist_hygiene || self.semantics.is(Canary::FreeWhole);
        let part = if whole { order } else { order.min(self.block_order) };
        for index in 0..1 << (order - part) {
            let at = at + (index << part);
            self.free_one(at, part, self.block_type(at));
        }
    }
}

impl Model {
    /// `__free_pages()` of a block that was allocated with this order. False, and nothing is done, where none can be: what a
    /// kernel says that it gave need not be a page.
    pub fn free(&mut self, pfn: u64, order: u32) -> bool {
        let per_cpu = self.semantics.per_cpu_lists;
        let Some(zone) = self.zone_of(pfn).filter(|zone| zone.could_hold(pfn, order)) else { return false };
        let at = zone.at(pfn);
        if per_cpu && super::pcp::takes(order) {
            zone.free_per_cpu(at, order);
        } else {
            zone.free_split(at, order);
        }
        true
    }

    /// `drain_local_pages()`: everything that the CPU's lists hold, zone by zone.
    pub fn drain(&mut self) {
        for zone in &mut self.zones {
            zone.drain_all();
        }
    }
}
