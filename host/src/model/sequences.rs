//! The model against itself on random sequences: zones of every kind, with and without per-CPU lists, guards, reserves.

use proptest::prelude::*;

use super::*;
use crate::check;

/// Pages of the largest zone.
const PAGES_MAX: u64 = 2048;
/// Of releases that are modelled.
pub(super) const RELEASES: [&str; 4] = ["6.1.192", "6.12.118", "7.2.13", "7.3.4"];

/// What a release does, without its miscounting of guards, which breaks I2.
pub(super) fn sound(release: &str, smp: bool) -> Semantics {
    let semantics = Semantics::of(release, smp).expect("a kernel that is known");
    Semantics { counts_merged_guards: true, ..semantics }
}

/// The state of a machine with a kernel of these semantics.
pub(super) fn state(fresh: &Fresh, semantics: Semantics) -> State {
    let mut state = fresh.state();
    if !semantics.freelist_hygiene {
        state.hygiene = false;
        state.isolation_keeps_type = false;
        state.zones.iter_mut().for_each(|zone| zone.free_highatomic = None);
    }
    state
}

/// Invariants that the state of a model breaks.
pub(super) fn broken(model: &Model, start: &State) -> Vec<String> {
    let state = model.state(start);
    let broken = state.zones.iter().flat_map(|zone| check::frozen::check(&state, zone));
    broken.map(|broken| format!("{}: {}", broken.invariant, broken.text)).collect()
}

/// All of a model that decides what it does next, as numbers.
pub(super) fn image(model: &Model) -> Vec<u64> {
    model.zones.iter().flat_map(Zone::image).collect()
}

/// A machine, and what its kernel does.
fn machine() -> impl Strategy<Value = (Fresh, Semantics)> {
    let zones = prop::collection::btree_map(0_usize..3, (8_u64..PAGES_MAX, 0_u64..1024), 1..4);
    let kernel = (prop::sample::select(RELEASES.to_vec()), any::<bool>());
    let lists = prop::sample::select(vec![(1, 0, 0), (1, 4, 4), (15, 60, 60), (31, 124, 900), (63, 0, 2000)]);
    (zones, kernel, prop::sample::select(vec![2_u32, 3, 5, 9, 10]), 0_u32..4, lists).prop_map(
        |(zones, (release, smp), pageblock_order, guard_minorder, per_cpu)| {
            let zones = zones.into_iter().map(|(index, (pages, offset))| {
                // Zones of a kernel do not overlap.
                let start = (index as u64 + 1) * 4 * PAGES_MAX + offset;
                let min = pages / 100;
                FreshZone { index, start, pages, watermarks: [min, min * 5 / 4, min * 3 / 2] }
            });
            let fresh = Fresh { zones: zones.collect(), pageblock_order, guard_minorder, smp, per_cpu };
            (fresh, sound(release, smp))
        },
    )
}

#[derive(Clone, Debug)]
enum Step {
    Alloc(Request),
    Free(prop::sample::Index),
    Drain,
}

fn step() -> impl Strategy<Value = Step> {
    let reserve = prop::sample::select(vec![Reserve::None, Reserve::NonBlock, Reserve::Atomic]);
    let order = prop_oneof![4 => Just(0_u32), 4 => 1_u32..5, 1 => 5_u32..11];
    let alloc = (order, 0_usize..3, 0_usize..3, reserve).prop_map(|(order, list, highest_zone, reserve)| {
        Step::Alloc(Request { order, list, highest_zone, reserve })
    });
    prop_oneof![
        6 => alloc,
        5 => any::<prop::sample::Index>().prop_map(Step::Free),
        1 => Just(Step::Drain),
    ]
}

/// Pages of a zone that are on free lists, on per-CPU lists, and guards.
fn kept(model: &Model) -> u64 {
    let zone =
        |zone: &Zone| (zone.free.value + zone.free.held) as u64 + zone.pcp.count as u64 + zone.guard_pages();
    model.zones.iter().map(zone).sum()
}

/// Free blocks that have a free buddy of the same order and, where types keep blocks apart, of a type that merges.
fn unmerged(zone: &Zone) -> usize {
    let mergeable = 0..PCP_TYPES;
    let blocks = (0..ORDERS as u32 - 1).flat_map(|order| mergeable.clone().map(move |list| (order, list)));
    let pairs = blocks.flat_map(|(order, list)| {
        zone.walk(zone.free_list(order, list)).filter(move |at| {
            let buddy = at ^ (1 << order);
            zone.is(buddy) == (zone::Is::Buddy, order) && Zone::is_mergeable(zone.block_type(buddy))
        })
    });
    pairs.count()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn invariants_hold_after_each_step_and_freeing_all_merges_all(
        (fresh, semantics) in machine(),
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let start = state(&fresh, semantics);
        let mut model = Model::new(&start, semantics).expect("a state that can be modelled");
        let managed: u64 = start.zones.iter().map(|zone| zone.managed).sum();
        let mut held: Vec<(u64, u32)> = Vec::new();
        for step in steps {
            match step {
                Step::Alloc(request) => held.extend(model.alloc(request).map(|pfn| (pfn, request.order))),
                Step::Free(index) if !held.is_empty() => {
                    let (pfn, order) = held.swap_remove(index.index(held.len()));
                    prop_assert!(model.free(pfn, order));
                }
                Step::Free(_) => {}
                Step::Drain => model.drain(),
            }
            prop_assert_eq!(broken(&model, &start), Vec::<String>::new());
            let out: u64 = held.iter().map(|(_, order)| 1 << order).sum();
            prop_assert_eq!(kept(&model) + out, managed);
        }
        // What can be read of it is all there is.
        let again = Model::new(&model.state(&start), semantics).expect("a state that can be modelled");
        prop_assert_eq!(image(&again), image(&model));

        for (pfn, order) in held {
            prop_assert!(model.free(pfn, order));
        }
        model.drain();
        prop_assert_eq!(broken(&model, &start), Vec::<String>::new());
        for zone in &model.zones {
            prop_assert_eq!((zone.free.value + zone.free.held) as u64, zone.managed);
            prop_assert_eq!((unmerged(zone), zone.guard_pages()), (0, 0));
        }
    }

    /// What a kernel says it gave need not be a page, nor one that it may free.
    #[test]
    fn no_free_of_anything_is_more_than_refused(
        (fresh, semantics) in machine(),
        frees in prop::collection::vec((any::<u64>(), 0_u32..12), 1..40),
        near in prop::collection::vec((0_u64..16 * PAGES_MAX, 0_u32..12), 1..200),
    ) {
        let start = state(&fresh, semantics);
        let mut model = Model::new(&start, semantics).expect("a state that can be modelled");
        (0..8).for_each(|order| {
            model.alloc(Request { order, list: MOVABLE, highest_zone: 2, reserve: Reserve::Atomic });
        });
        for (pfn, order) in frees.into_iter().chain(near) {
            model.free(pfn, order);
            model.alloc(Request { order: order % 11, list: UNMOVABLE, highest_zone: 2, reserve: Reserve::Atomic });
        }
        model.drain();
    }
}

#[test]
fn a_state_that_breaks_an_invariant_is_refused_by_its_name() {
    use crate::observe::frozen::{fake, plant};
    let kernel = fake::kernel();
    let ram = fake::ram(&kernel, 16);
    let semantics = sound("7.2.13", true);
    let mut planted = 0;
    plant::each(&kernel, &ram, |plant, state| {
        let (plant::Expect::One(name) | plant::Expect::Some(name), Some(Ok(state))) = (plant.expect, state)
        else {
            return;
        };
        let refused = Model::new(&state, semantics).err();
        assert!(
            matches!(&refused, Some(Unsupported::Broken { invariant, .. }) if *invariant == name),
            "{}: {refused:?} instead of {name}",
            plant.name
        );
        planted += 1;
    })
    .expect("it can be read");
    assert!(planted > 40, "only {planted}");
}
