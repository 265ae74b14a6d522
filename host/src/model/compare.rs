//! The model against a frozen state: the first thing that differs of each kind, in words.

use super::pcp::LISTS;
use super::zone::{BELOW_HIGH, Is, List, Zone};
use super::{Model, ORDERS, TYPES};
use crate::observe::frozen::{self, Kind, Part, State};

/// Something that model and kernel do not agree on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The zone.
    pub zone: String,
    /// What it is about: a list, a counter, a pageblock.
    pub what: String,
    /// By the model.
    pub model: String,
    /// By the kernel.
    pub kernel: String,
}

/// Differences of one zone that are kept.
const ENOUGH: usize = 20;
/// Members of a list around the first that differs.
const AROUND: usize = 4;

impl Model {
    /// What differs from the state of the kernel; nothing where they agree to the last link.
    #[must_use]
    pub fn differences(&self, state: &State) -> Vec<Difference> {
        let mut found = Vec::new();
        for zone in &self.zones {
            match state.zones.iter().find(|other| other.label() == zone.label) {
                Some(other) => zone.differences(state, other, &mut found),
                None => found.push(Difference {
                    zone: zone.label.clone(),
                    what: "the zone".into(),
                    model: "there".into(),
                    kernel: "not there".into(),
                }),
            }
        }
        found
    }
}

/// All that a CPU holds, as text.
fn held(cpu: &frozen::Cpu) -> String {
    let lists = cpu.pcp.lists.iter().enumerate().filter(|(_, list)| !list.pfns.is_empty());
    let lists: Vec<String> = lists.map(|(index, list)| format!("list {index} {:x?}", list.pfns)).collect();
    format!("{} pages, {}, differences {:?}", cpu.pcp.count, lists.join(", "), cpu.diffs)
}

impl Zone {
    fn differences(&self, state: &State, other: &frozen::Zone, all: &mut Vec<Difference>) {
        let mut found = Vec::new();
        let mut compare = |what: String, model: String, kernel: String| {
            if model != kernel && found.len() < ENOUGH {
                found.push(Difference { zone: self.label.clone(), what, model, kernel });
            }
        };
        for (order, area) in other.areas.iter().enumerate().take(ORDERS) {
            compare(
                format!("nr_free of order {order}"),
                self.nr_free[order].to_string(),
                area.nr_free.to_string(),
            );
            for (list, kernel) in area.lists.iter().enumerate().take(TYPES) {
                let name = state.types.get(list).map_or("unknown", |kind| kind.name());
                let what = format!("free list of order {order}, {name}");
                let (model, kernel) = self.lists_apart(self.free_list(order as u32, list), &kernel.pfns);
                compare(what, model, kernel);
            }
        }
        for (name, model) in [
            ("NR_FREE_PAGES", self.free),
            ("NR_FREE_PAGES_BLOCKS", self.free_blocks),
            ("NR_FREE_CMA_PAGES", self.free_cma),
        ] {
            let Some(number) = other.counter_number(name) else { continue };
            let kernel = other.counters.get(number).copied().unwrap_or(0);
            compare(name.to_owned(), model.value.to_string(), kernel.to_string());
            let what = format!("difference of {name} that the CPU holds back");
            let held = other.cpus.first().map_or(0, |cpu| cpu.held_back(number));
            compare(what, model.held.to_string(), held.to_string());
        }
        let highatomic = other.free_highatomic.unwrap_or(0);
        compare("nr_free_highatomic".into(), self.free_highatomic.to_string(), highatomic.to_string());
        let (model, kernel) = (self.reserved_highatomic, other.reserved_highatomic);
        compare("nr_reserved_highatomic".into(), model.to_string(), kernel.to_string());
        compare("watermark_boost".into(), self.boost.to_string(), other.boost.to_string());
        let below = other.flag_names.iter().any(|name| name == BELOW_HIGH);
        compare(BELOW_HIGH.into(), self.below_high.to_string(), below.to_string());
        if let (true, Some(cpu)) = (self.semantics.per_cpu_lists, other.cpus.first()) {
            for (index, list) in cpu.pcp.lists.iter().enumerate().take(LISTS) {
                let (model, kernel) = self.lists_apart(self.pcp_list(index), &list.pfns);
                compare(format!("per-CPU list {index}"), model, kernel);
                let (model, kernel) = (self.noted_types(index), &list.types);
                compare(
                    format!("types of the pages on per-CPU list {index}"),
                    format!("{model:?}"),
                    format!("{kernel:?}"),
                );
            }
            for (name, model, kernel) in [
                ("count", self.pcp.count, i64::from(cpu.pcp.count)),
                ("high", self.pcp.high, cpu.pcp.high.into()),
                ("flags", self.pcp.flags.into(), cpu.pcp.flags.unwrap_or(0).into()),
                ("alloc_factor", self.pcp.alloc_factor.into(), cpu.pcp.alloc_factor.unwrap_or(0).into()),
                ("free_count", self.pcp.free_count, cpu.pcp.free_count.unwrap_or(0).into()),
            ] {
                compare(format!("per-CPU {name}"), model.to_string(), kernel.to_string());
            }
        }
        for (model, kernel) in self.others.iter().zip(other.cpus.get(1..).unwrap_or_default()) {
            compare(format!("CPU {}, which ran nothing", model.number), held(model), held(kernel));
        }
        for (index, kernel) in other.blocks.iter().enumerate() {
            let Some(kernel) = kernel else { continue };
            let pfn = (other.first_block + index as u64) << self.block_order;
            let number = (pfn >> self.block_order) - (self.pfn(0) >> self.block_order);
            let Some((list, isolated)) = self.block(number as usize) else { continue };
            let words = |list: usize, isolated: bool| {
                let name = state.types.get(list).map_or("unknown", |kind| kind.name());
                format!("{name}{}", if isolated { ", isolated" } else { "" })
            };
            compare(
                format!("type of the pageblock at pfn {pfn:#x}"),
                words(list, isolated),
                words(kernel.number, kernel.isolated),
            );
        }
        for (index, class) in other.pages.iter().enumerate() {
            let at = self.start + index as u32;
            let model = self.is(at);
            let guard = class.kind() == Kind::Guard && class.part() == Part::Head;
            if guard == (model.0 == Is::Guard) && (!guard || model.1 == class.order()) {
                continue;
            }
            let kernel =
                if guard { format!("guard of order {}", class.order()) } else { "no guard".to_owned() };
            let model = if model.0 == Is::Guard {
                format!("guard of order {}", model.1)
            } else {
                "no guard".to_owned()
            };
            compare(format!("the page at pfn {:#x}", self.pfn(at)), model, kernel);
        }
        all.append(&mut found);
    }

    /// Where two lists part, as text; equal texts where they are equal.
    fn lists_apart(&self, model: List, kernel: &[u32]) -> (String, String) {
        let same = self.walk(model).map(|at| self.pfn(at)).eq(kernel.iter().map(|pfn| u64::from(*pfn)));
        if same {
            return (String::new(), String::new());
        }
        let model: Vec<u64> = self.walk(model).map(|at| self.pfn(at)).collect();
        let kernel: Vec<u64> = kernel.iter().map(|pfn| u64::from(*pfn)).collect();
        let at = model.iter().zip(&kernel).take_while(|(one, other)| one == other).count();
        let shown = |list: &[u64]| {
            let part = list.get(at..(at + AROUND).min(list.len())).unwrap_or_default();
            let pfns: Vec<String> = part.iter().map(|pfn| format!("{pfn:#x}")).collect();
            format!("{} blocks, from number {at} on {}", list.len(), pfns.join(" "))
        };
        (shown(&model), shown(&kernel))
    }
}
