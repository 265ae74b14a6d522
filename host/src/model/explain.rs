//! Why the model gives the page that it gives: the state around an operation, in words, for whoever has to tell whether
//! kernel or model is wrong.

use super::zone::{Is, Zone};
use super::{Model, ORDERS, Rule, TYPES};

/// Blocks of a list that are named.
const FIRST: usize = 3;

impl Model {
    /// Rules that decided since `before` was counted ([`Model::rules`]).
    #[must_use]
    pub fn decided_since(&self, before: &[u64; Rule::ALL.len()]) -> Vec<Rule> {
        let rules = Rule::ALL.into_iter().zip(self.rules()).zip(before);
        rules.filter(|((_, now), before)| now > before).map(|((rule, _), _)| rule).collect()
    }

    /// The zones of these pages, all if there are none: counters, the first blocks of each list, and what the pages are.
    #[must_use]
    pub fn around(&self, pfns: &[u64]) -> Vec<String> {
        let concerned = |zone: &&Zone| pfns.is_empty() || pfns.iter().any(|pfn| zone.contains(*pfn));
        let mut lines = Vec::new();
        for zone in self.zones.iter().filter(concerned) {
            zone.describe(&mut lines);
            for pfn in pfns.iter().filter(|pfn| zone.contains(**pfn)) {
                lines.push(zone.describe_page(*pfn));
            }
        }
        lines
    }
}

impl Zone {
    fn type_name(&self, list: usize) -> &'static str {
        self.kinds.get(list).map_or("unknown", |kind| kind.name())
    }

    fn describe(&self, lines: &mut Vec<String>) {
        let [min, low, high] = self.watermarks;
        lines.push(format!(
            "{}: free {} (held back {}), HIGHATOMIC free {}, min {min}, low {low}, high {high}, boost {}",
            self.label, self.free.value, self.free.held, self.free_highatomic, self.boost
        ));
        for order in 0..ORDERS as u32 {
            for list in 0..TYPES {
                let blocks: Vec<u32> = self.walk(self.free_list(order, list)).collect();
                if blocks.is_empty() {
                    continue;
                }
                let first: Vec<String> =
                    blocks.iter().take(FIRST).map(|at| format!("{:#x}", self.pfn(*at))).collect();
                let more = if blocks.len() > FIRST { " …" } else { "" };
                let (name, count, first) = (self.type_name(list), blocks.len(), first.join(" "));
                lines.push(format!("  order {order:2} {name:<11} {count:5} blocks: {first}{more}"));
            }
        }
    }

    fn describe_page(&self, pfn: u64) -> String {
        let at = self.at(pfn);
        let what = match self.is(at) {
            (Is::Buddy, order) => format!("the head of a free block of order {order}"),
            (Is::Guard, order) => format!("a guard of order {order}"),
            (Is::Pcp, order) => format!("on a per-CPU list, order {order}"),
            (Is::Movable, _) => "a page on the LRU".to_owned(),
            (Is::Other, _) => "allocated, or within a block".to_owned(),
            (Is::Absent, _) => "no page of the zone".to_owned(),
        };
        let (list, isolated) = self.block((at >> self.block_order) as usize).unwrap_or_default();
        let isolated = if isolated { ", isolated" } else { "" };
        format!("  pfn {pfn:#x}: {what}, in a pageblock of type {}{isolated}", self.type_name(list))
    }
}
