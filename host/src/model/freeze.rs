//! From the model back to a frozen state: what a look into a kernel's memory would show if the model is right. Checks and
//! texts then work on the model as they do on a kernel.

use super::pcp::LISTS;
use super::zone::{BELOW_HIGH, Is, List, Zone};
use super::{Model, ORDERS, TYPES};
use crate::observe::frozen::{self, Kind, PageClass, Part, State};

impl Model {
    /// The state of the model; what it does not change, such as spans and watermarks, is taken from the state that it was
    /// built from.
    #[must_use]
    pub fn state(&self, start: &State) -> State {
        let mut state = start.clone();
        for zone in &mut state.zones {
            if let Some(model) = self.zones.iter().find(|model| model.label == zone.label()) {
                model.freeze(zone);
            }
        }
        state
    }
}

impl Zone {
    fn pfns(&self, list: List) -> Vec<u32> {
        self.walk(list).map(|at| self.pfn(at) as u32).collect()
    }

    /// The types that the pages of a per-CPU list were put there with, where the kernel keeps them.
    pub(super) fn noted_types(&self, index: usize) -> Vec<u8> {
        if self.semantics.freelist_hygiene {
            return Vec::new();
        }
        self.walk(self.pcp_list(index)).map(|at| self.noted_type(at) as u8).collect()
    }

    fn freeze(&self, zone: &mut frozen::Zone) {
        for (order, area) in zone.areas.iter_mut().enumerate().take(ORDERS) {
            area.nr_free = self.nr_free[order];
            for (list, free) in area.lists.iter_mut().enumerate().take(TYPES) {
                free.pfns = self.pfns(self.free_list(order as u32, list));
            }
        }
        for (name, counter) in [
            ("NR_FREE_PAGES", self.free),
            ("NR_FREE_PAGES_BLOCKS", self.free_blocks),
            ("NR_FREE_CMA_PAGES", self.free_cma),
        ] {
            let Some(number) = zone.counter_number(name) else { continue };
            zone.counters[number] = counter.value;
            if let Some(diff) = zone.cpus.first_mut().and_then(|cpu| cpu.diffs.get_mut(number)) {
                *diff = counter.held as i8;
            }
        }
        zone.free_highatomic = zone.free_highatomic.map(|_| self.free_highatomic);
        zone.reserved_highatomic = self.reserved_highatomic;
        zone.boost = self.boost;
        zone.flag_names.retain(|name| name != BELOW_HIGH);
        zone.flag_names.extend(self.below_high.then(|| BELOW_HIGH.to_owned()));
        if let Some(cpu) = zone.cpus.first_mut() {
            cpu.pcp.count = self.pcp.count as i32;
            cpu.pcp.high = self.pcp.high as i32;
            cpu.pcp.flags = cpu.pcp.flags.map(|_| self.pcp.flags);
            cpu.pcp.alloc_factor = cpu.pcp.alloc_factor.map(|_| self.pcp.alloc_factor);
            cpu.pcp.free_count = cpu.pcp.free_count.map(|_| self.pcp.free_count as i16);
            for (index, list) in cpu.pcp.lists.iter_mut().enumerate().take(LISTS) {
                list.pfns = self.pfns(self.pcp_list(index));
                list.types = self.noted_types(index);
            }
        }
        for (index, block) in zone.blocks.iter_mut().enumerate() {
            let pfn = (zone.first_block + index as u64) << self.block_order;
            let number = (pfn >> self.block_order) - (self.pfn(0) >> self.block_order);
            if let (Some(block), Some((list, isolated))) = (block, self.block(number as usize)) {
                block.number = list;
                block.kind = self.kinds.get(list).copied().unwrap_or(block.kind);
                block.isolated = isolated;
            }
        }
        let mut index = 0;
        while index < zone.pages.len() {
            let at = self.start + index as u32;
            let (is, order) = self.is(at);
            let kind = match is {
                Is::Buddy => Kind::Free,
                Is::Guard => Kind::Guard,
                Is::Pcp => Kind::Pcp,
                Is::Movable | Is::Absent | Is::Other => {
                    let before = zone.pages[index].kind();
                    if matches!(before, Kind::Free | Kind::Guard | Kind::Pcp) {
                        zone.pages[index] = PageClass::new(Kind::Other, Part::Single, 0);
                    }
                    index += 1;
                    continue;
                }
            };
            let end = (index + (1 << order)).min(zone.pages.len());
            zone.pages[index] = PageClass::new(kind, Part::Head, order);
            zone.pages[index + 1..end].fill(PageClass::new(kind, Part::Tail, 0));
            index = end;
        }
    }
}
