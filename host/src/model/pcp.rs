//! Per-CPU lists: of 7.2 and later with SMP, of older kernels always (mm/page_alloc.c, __rmqueue_pcplist(),
//! free_frozen_page_commit()).

use super::alloc::{Flags, Mode};
use super::zone::{Is, Rule, Zone};
use super::{Canary, MOVABLE, PCP_TYPES};
use crate::observe::frozen;

/// PAGE_ALLOC_COSTLY_ORDER: lists up to this order, and of huge pages.
const COSTLY_ORDER: u32 = 3;
/// HPAGE_PMD_ORDER.
const PMD_ORDER: u32 = 9;
/// The first of the two lists of huge pages.
const PMD_LIST: usize = PCP_TYPES * (COSTLY_ORDER as usize + 1);
/// Lists in all.
pub(crate) const LISTS: usize = PMD_LIST + 2;
/// CONFIG_PCP_BATCH_SCALE_MAX.
const BATCH_SCALE_MAX: u32 = 5;
/// PCPF_PREV_FREE_HIGH_ORDER and PCPF_FREE_HIGH_BATCH.
const PREV_FREE_HIGH_ORDER: u8 = 1;
const FREE_HIGH_BATCH: u8 = 2;

/// pcp_allowed_order().
pub(crate) fn takes(order: u32) -> bool {
    order <= COSTLY_ORDER || order == PMD_ORDER
}

/// The state of struct per_cpu_pages, without its lists.
#[derive(Clone)]
pub(crate) struct Pcp {
    pub(crate) count: i64,
    pub(crate) high: i64,
    high_min: i64,
    high_max: i64,
    batch: i64,
    pub(crate) flags: u8,
    pub(crate) alloc_factor: u8,
    /// What the kernel calls `free_factor` where it does not tune its lists.
    pub(crate) free_count: i64,
}

impl Pcp {
    pub(crate) fn new(pcp: &frozen::Pcp) -> Self {
        let (high_min, high_max) = pcp.high_range.unwrap_or((pcp.high, pcp.high));
        Self {
            count: pcp.count.into(),
            high: pcp.high.into(),
            high_min: high_min.into(),
            high_max: high_max.into(),
            batch: pcp.batch.into(),
            flags: pcp.flags.unwrap_or(0),
            alloc_factor: pcp.alloc_factor.unwrap_or(0),
            free_count: pcp.free_count.unwrap_or(0).into(),
        }
    }
}

/// order_to_pindex().
fn list_of(order: u32, list: usize) -> usize {
    if order > COSTLY_ORDER {
        PMD_LIST + usize::from(list == MOVABLE)
    } else {
        order as usize * PCP_TYPES + list
    }
}

/// pindex_to_order().
fn order_of(index: usize) -> u32 {
    if index >= PMD_LIST { PMD_ORDER } else { (index / PCP_TYPES) as u32 }
}

impl Zone {
    /// rmqueue_pcplist().
    pub(crate) fn alloc_per_cpu(&mut self, order: u32, list: usize, flags: Flags) -> Option<u32> {
        self.pcp.free_count >>= 1;
        let held = self.pcp_list(list_of(order, list));
        if self.is_empty(held) {
            self.decided(Rule::Refill);
            let batch = self.refill_size(order);
            // The reserves are used, and built, by the free lists alone.
            if flags.highatomic && self.semantics.atomic_leaves_lists {
                return None;
            }
            let (mut mode, mut taken) = (Mode::Normal, 0);
            for _ in 0..batch {
                if self.semantics.is(Canary::ForgetMode) {
                    mode = Mode::Normal;
                }
                let Some(page) = self.rmqueue(order, list, flags, &mut mode) else { break };
                self.push_back(held, page, Is::Pcp, order);
                self.pcp.count += 1 << order;
                taken += 1 << order;
                if !self.semantics.freelist_hygiene {
                    self.account_bulk_cma(page, order);
                }
            }
            // The free path counts each page, and this one all at once.
            if !self.semantics.freelist_hygiene {
                self.account_bulk(taken);
            }
        }
        let page = self.first(held)?;
        self.unlink(page);
        self.pcp.count -= 1 << order;
        Some(page)
    }

    /// nr_pcp_alloc().
    fn refill_size(&mut self, order: u32) -> i64 {
        let below_high = self.below_high;
        if !self.semantics.tunes_lists {
            let batch = self.pcp.batch;
            return if batch > 1 { (batch >> order).max(2) } else { batch };
        }
        let pcp = &mut self.pcp;
        pcp.high = pcp.high.max(pcp.high_min).min(pcp.high_max);
        let mut high = pcp.high;
        if high < pcp.batch {
            return 1;
        }
        let mut batch = if order > 0 { pcp.batch } else { pcp.batch << pcp.alloc_factor };
        if pcp.high_min != pcp.high_max && !below_high {
            pcp.high = (high + batch).min(pcp.high_max);
            high = pcp.high;
        }
        if order == 0 {
            let most = (high - pcp.count - pcp.batch).max(pcp.batch);
            if batch <= most && u32::from(pcp.alloc_factor) < BATCH_SCALE_MAX {
                pcp.alloc_factor += 1;
            }
            batch = batch.min(most);
        }
        if batch > 1 { (batch >> order).max(2) } else { batch }
    }

    /// __free_frozen_pages() of an order that the lists take.
    pub(crate) fn free_per_cpu(&mut self, at: u32, order: u32) {
        let kind = self.block_type(at);
        self.note_type(at, kind);
        let list = match kind {
            list if list < PCP_TYPES => list,
            list if Some(list) == self.types.isolate => return self.free_split(at, order),
            _ => MOVABLE,
        };
        let index = list_of(order, list);
        if self.semantics.is(Canary::FreeToTails) {
            self.push_back(self.pcp_list(index), at, Is::Pcp, order);
        } else {
            self.push_front(self.pcp_list(index), at, Is::Pcp, order);
        }
        let semantics = self.semantics;
        let pcp = &mut self.pcp;
        pcp.count += 1 << order;
        if !semantics.tunes_lists {
            return self.freed_untuned(index, order);
        }
        pcp.alloc_factor >>= 1;
        let batch = pcp.batch;
        let mut free_high = false;
        if order > 0 && order <= COSTLY_ORDER {
            let margin = if semantics.holds_larger_longer { pcp.high_min / 2 } else { 0 };
            free_high = pcp.free_count >= batch + margin
                && pcp.flags & PREV_FREE_HIGH_ORDER != 0
                && (pcp.flags & FREE_HIGH_BATCH == 0 || pcp.count >= batch);
            pcp.flags |= PREV_FREE_HIGH_ORDER;
        } else {
            pcp.flags &= !PREV_FREE_HIGH_ORDER;
        }
        if pcp.free_count < batch << BATCH_SCALE_MAX {
            pcp.free_count += 1 << order;
        }
        let high = self.high_now(free_high);
        let pcp = &self.pcp;
        if pcp.count < high {
            return;
        }
        // nr_pcp_free()
        let rules = &mut self.rules[Rule::Drain as usize];
        *rules += 1;
        let mut left = if free_high {
            pcp.count.min(batch << BATCH_SCALE_MAX)
        } else if high < batch {
            1
        } else {
            pcp.free_count.max(batch).min(high - batch)
        };
        while left > 0 && self.pcp.count > 0 {
            let now = if semantics.frees_in_batches { left.min(batch) } else { left };
            self.drain(now, index);
            left -= now;
        }
        if self.below_high && self.is_above_high() {
            self.below_high = false;
        }
    }

    /// free_unref_page_commit(), nr_pcp_high() and nr_pcp_free() of 6.1, after a page was put on a list.
    fn freed_untuned(&mut self, index: usize, order: u32) {
        let pcp = &mut self.pcp;
        let free_high = pcp.free_count > 0 && order > 0 && order <= COSTLY_ORDER;
        let high = if free_high { 0 } else { pcp.high };
        if pcp.count < high {
            return;
        }
        let (least, most) = (pcp.batch, high - pcp.batch);
        let count = if free_high {
            pcp.count
        } else if most < 0 {
            1
        } else {
            let batch = pcp.batch << pcp.free_count;
            if batch < most && pcp.free_count < BATCH_SCALE_MAX.into() {
                pcp.free_count += 1;
            }
            // clamp(), which lets the greater end win where there is none between them.
            batch.max(least).min(most)
        };
        self.decided(Rule::Drain);
        self.drain(count, index);
    }

    /// nr_pcp_high(). Reclaim is never active while a batch runs.
    fn high_now(&mut self, free_high: bool) -> i64 {
        let below_high = self.below_high;
        let pcp = &mut self.pcp;
        pcp.high = pcp.high.max(pcp.high_min).min(pcp.high_max);
        let high = pcp.high;
        if high == 0 {
            return 0;
        }
        if free_high {
            pcp.high = (high - (pcp.batch << BATCH_SCALE_MAX)).max(pcp.high_min);
            return 0;
        }
        if pcp.high_min == pcp.high_max {
            return high;
        }
        if below_high {
            pcp.high = (high - pcp.free_count.max(pcp.batch)).max(pcp.high_min);
            return pcp.count.max(pcp.high_min);
        }
        if pcp.count >= high {
            let need = pcp.free_count + pcp.batch;
            if pcp.high < need {
                pcp.high = need.max(pcp.high_min).min(pcp.high_max);
            }
        }
        high
    }

    /// free_pcppages_bulk(): from list `index` on, each emptied from its tail before the next one's turn.
    fn drain(&mut self, count: i64, index: usize) {
        let mut left = count.min(self.pcp.count);
        let mut index = index;
        while left > 0 {
            let (list, order) = (self.pcp_list(index), order_of(index));
            let heads = self.semantics.is(Canary::DrainHeads);
            while left > 0
                && let Some(page) = if heads { self.first(list) } else { self.last(list) }
            {
                self.unlink(page);
                left -= 1 << order;
                self.pcp.count -= 1 << order;
                self.free_one(page, order, self.noted_type(page));
            }
            index = (index + 1) % LISTS;
        }
    }

    /// drain_local_pages() (mm/page_alloc.c, drain_pages_zone()): all, in batches.
    pub(crate) fn drain_all(&mut self) {
        while self.pcp.count > 0 {
            let count = self.pcp.count.min(self.pcp.batch << BATCH_SCALE_MAX);
            self.drain(count, 0);
        }
    }
}
