//! Every sequence of a few operations in zones of a few small pageblocks, and what holds in each state that one can come to.

use std::collections::HashSet;

use super::sequences::{broken, image, sound, state};
use super::{Fresh, FreshZone, Model, Request, Reserve, Semantics, TYPES};
use crate::observe::frozen::State;

/// Pages of a pageblock are 4: it is a block of the third order.
const BLOCK_ORDER: u32 = 2;
/// Orders that are asked for: below, at and above a pageblock.
const ASKED: std::ops::Range<u32> = 0..4;
const START: u64 = 0x1000;

#[derive(Clone, Copy, Debug)]
enum Step {
    Alloc {
        order: u32,
        list: usize,
    },
    /// What the allocation of this number gave, of those that succeeded and are not freed.
    Free(usize),
}

/// A model, and what was allocated from it.
#[derive(Clone)]
struct Machine {
    model: Model,
    held: Vec<(u64, u32)>,
}

impl Machine {
    fn step(&mut self, step: Step) {
        match step {
            Step::Alloc { order, list } => {
                let request = Request { order, list, highest_zone: 2, reserve: Reserve::NonBlock };
                self.held.extend(self.model.alloc(request).map(|pfn| (pfn, order)));
            }
            Step::Free(index) => {
                let (pfn, order) = self.held.remove(index);
                assert!(self.model.free(pfn, order), "{pfn:#x} of order {order} cannot be freed");
            }
        }
    }

    /// All that decides what happens next.
    fn image(&self) -> Vec<u64> {
        let mut held = self.held.clone();
        held.sort_unstable();
        let held = held.into_iter().flat_map(|(pfn, order)| [pfn, order.into()]);
        image(&self.model).into_iter().chain(held).collect()
    }
}

/// Free blocks of all types: order and first page. This is what freeing everything brings back. Types are not: a pageblock
/// that was claimed keeps the type of who claimed it until another one does. Nor is the order on lists, which is that of
/// freeing, nor a boost, which reclaim alone takes away.
fn blocks(model: &Model) -> Vec<(u32, u32)> {
    let zone = &model.zones[0];
    let orders = (0..super::ORDERS as u32).flat_map(|order| (0..TYPES).map(move |list| (order, list)));
    let mut blocks: Vec<(u32, u32)> = orders
        .flat_map(|(order, list)| zone.walk(zone.free_list(order, list)).map(move |at| (order, at)))
        .collect();
    blocks.sort_unstable();
    blocks
}

/// Goes through all sequences of `length` operations, each state once; gives the number of states.
fn explore(start: &State, semantics: Semantics, length: usize) -> usize {
    let fresh = Machine {
        model: Model::new(start, semantics).expect("a state that can be modelled"),
        held: Vec::new(),
    };
    let (all, managed) = (blocks(&fresh.model), start.zones[0].managed as i64);
    let mut seen = HashSet::from([fresh.image()]);
    let mut frontier: Vec<Vec<Step>> = vec![Vec::new()];
    for _ in 0..length {
        let mut next = Vec::new();
        for steps in frontier {
            let mut machine = fresh.clone();
            steps.iter().for_each(|step| machine.step(*step));
            let asked = ASKED.flat_map(|order| (0..3).map(move |list| Step::Alloc { order, list }));
            for step in asked.chain((0..machine.held.len()).map(Step::Free)) {
                let mut machine = machine.clone();
                machine.step(step);
                if !seen.insert(machine.image()) {
                    continue;
                }
                let steps: Vec<Step> = steps.iter().copied().chain([step]).collect();
                assert_eq!(broken(&machine.model, start), [""; 0], "after {steps:?}");
                let held: u64 = machine.held.iter().map(|(_, order)| 1 << order).sum();
                let guards = machine.model.zones[0].guard_pages();
                let zone = &machine.model.zones[0];
                let free = zone.free.value + zone.pcp.count;
                assert_eq!(free + (held + guards) as i64, managed, "after {steps:?}");
                while !machine.held.is_empty() {
                    machine.step(Step::Free(0));
                }
                machine.model.drain();
                assert_eq!(blocks(&machine.model), all, "after {steps:?} and freeing all");
                assert_eq!(machine.model.zones[0].free.value, managed, "after {steps:?} and freeing all");
                assert_eq!(broken(&machine.model, start), [""; 0], "after {steps:?} and freeing all");
                next.push(steps);
            }
        }
        frontier = next;
    }
    seen.len()
}

/// A zone of so many pages from a pfn on.
fn zone(semantics: Semantics, start: u64, pages: u64, guard_minorder: u32) -> State {
    let zone = FreshZone { index: 1, start, pages, watermarks: [0, 1, 2] };
    let per_cpu = (1, 0, 0);
    let fresh =
        Fresh { zones: vec![zone], pageblock_order: BLOCK_ORDER, guard_minorder, smp: false, per_cpu };
    state(&fresh, semantics)
}

#[test]
fn every_short_sequence_keeps_the_invariants_and_freeing_all_merges_back() {
    for guard_minorder in 0..2 {
        let semantics = sound("7.3.4", false);
        let states = explore(&zone(semantics, START, 16, guard_minorder), semantics, 5);
        assert!(states > 10_000, "only {states}");
    }
}

#[test]
fn the_same_where_the_zone_begins_and_ends_within_a_pageblock() {
    let semantics = sound("7.3.4", false);
    let states = explore(&zone(semantics, START + 2, 13, 0), semantics, 6);
    assert!(states > 10_000, "only {states}");
}

#[test]
fn the_same_where_lists_need_not_agree_with_pageblocks() {
    let semantics = sound("6.1.192", false);
    let states = explore(&zone(semantics, START + 2, 13, 1), semantics, 6);
    assert!(states > 10_000, "only {states}");
}
