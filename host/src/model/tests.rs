//! Single rules of the model, without any kernel.

use super::sequences::{self, broken, sound};
use super::*;
use crate::observe::frozen::Settings;

const BLOCK: u64 = 512;

/// A machine as it is before anything was allocated: one zone, ZONE_DMA32, all of it free and movable.
fn fresh(blocks: u64, minorder: u32, smp: bool) -> State {
    let zone = FreshZone { index: 1, start: 0x1000, pages: blocks * BLOCK, watermarks: [16, 20, 24] };
    let per_cpu = (31, 200, 4000);
    Fresh { zones: vec![zone], pageblock_order: 9, guard_minorder: minorder, smp, per_cpu }.state()
}

fn semantics(smp: bool) -> Semantics {
    sound("7.2.13", smp)
}

fn model(state: &State, smp: bool) -> Model {
    Model::new(state, semantics(smp)).expect("a state that can be modelled")
}

fn request(order: u32, list: usize) -> Request {
    Request { order, list, highest_zone: 2, reserve: Reserve::NonBlock }
}

#[test]
fn a_model_is_what_it_was_built_from() {
    for smp in [false, true] {
        let start = fresh(8, 0, smp);
        let model = model(&start, smp);
        assert_eq!(model.differences(&start), []);
        assert_eq!(broken(&model, &start), [""; 0]);
    }
}

#[test]
fn an_allocation_takes_the_lowest_page_and_leaves_the_upper_halves_at_the_heads() {
    let start = fresh(8, 0, false);
    let mut model = model(&start, false);
    assert_eq!(model.alloc(request(0, MOVABLE)), Some(0x1000));
    let zone = &model.zones[0];
    for order in 0..10 {
        assert_eq!(zone.walk(zone.free_list(order, MOVABLE)).next(), Some(1 << order));
    }
    assert_eq!(model.alloc(request(0, MOVABLE)), Some(0x1001));
}

#[test]
fn an_unmovable_page_claims_the_largest_block_of_another_type() {
    let start = fresh(8, 0, false);
    let mut model = model(&start, false);
    assert_eq!(model.alloc(request(0, UNMOVABLE)), Some(0x1000));
    let zone = &model.zones[0];
    assert_eq!((zone.block_type(0), zone.block_type(512), zone.block_type(1024)), (0, 0, 1));
}

#[test]
fn claiming_a_part_of_a_pageblock_boosts_the_watermarks_as_it_is_set() {
    for (boost_factor, boost) in [(15_000, 512), (0, 0)] {
        let settings = Settings { boost_factor, ..Settings::default() };
        let start = State { settings, ..fresh(8, 0, false) };
        let mut model = model(&start, false);
        // All but half a pageblock.
        for order in [10, 10, 10, 9, 8] {
            model.alloc(request(order, MOVABLE)).expect("a block");
        }
        assert_eq!(model.zones[0].boost, 0);
        model.alloc(request(0, UNMOVABLE)).expect("a page");
        assert_eq!(model.zones[0].boost, boost);
        assert_eq!(model.zones[0].rules[Rule::Claim as usize], 1);
    }
}

#[test]
fn merged_guards_are_counted_or_lost() {
    let start = fresh(8, 2, false);
    for counts in [true, false] {
        let semantics = Semantics { counts_merged_guards: counts, ..semantics(false) };
        let mut model = Model::new(&start, semantics).expect("a state that can be modelled");
        let pfn = model.alloc(request(0, MOVABLE)).expect("a page");
        // Two pages of order 1, one of order 0.
        assert_eq!(model.zones[0].free.value, 8 * 512 - 4);
        model.free(pfn, 0);
        assert_eq!(model.zones[0].free.value, 8 * 512 - if counts { 0 } else { 3 });
        assert_eq!(model.zones[0].nr_free[10], 4);
    }
}

#[test]
fn what_is_freed_beside_a_free_block_of_the_next_order_goes_to_the_tail() {
    let start = fresh(2, 0, false);
    let mut model = model(&start, false);
    let pages: Vec<u64> = (0..8).map(|_| model.alloc(request(0, MOVABLE)).expect("a page")).collect();
    for pfn in [pages[0], pages[4], pages[5]] {
        model.free(pfn, 0);
    }
    let zone = &model.zones[0];
    let order0: Vec<u64> = zone.walk(zone.free_list(0, MOVABLE)).map(|at| zone.pfn(at)).collect();
    assert_eq!(order0, [0x1000]);
    // 0x1006's parent has the free pair 0x1004 beside it, so it is expected to merge soon.
    model.free(pages[6], 0);
    let zone = &model.zones[0];
    let order0: Vec<u64> = zone.walk(zone.free_list(0, MOVABLE)).map(|at| zone.pfn(at)).collect();
    assert_eq!(order0, [0x1000, 0x1006]);
}

/// A machine whose lists need not agree with pageblocks.
fn older(blocks: u64) -> Model {
    let zone = FreshZone { index: 1, start: 0x1000, pages: blocks * BLOCK, watermarks: [0, 0, 0] };
    let fresh = Fresh {
        zones: vec![zone],
        pageblock_order: 9,
        guard_minorder: 0,
        smp: false,
        per_cpu: (31, 200, 200),
    };
    let semantics = sound("6.1.192", false);
    Model::new(&sequences::state(&fresh, semantics), semantics).expect("a state that can be modelled")
}

#[test]
fn older_kernels_move_what_is_free_of_a_pageblock_and_then_see_whose_it_is() {
    let mut model = older(8);
    // Of the last pageblock 32 pages are left: orders that per-CPU lists do not take.
    for order in [10, 10, 10, 8, 8, 8, 7, 6, 5] {
        model.alloc(request(order, MOVABLE)).expect("a block");
    }
    // Nothing else of it is free or, for what is on no LRU list, movable.
    model.alloc(request(5, UNMOVABLE));
    let last = 8 * BLOCK as u32 - 32;
    let zone = &model.zones[0];
    assert_eq!(zone.block_type(last), UNMOVABLE);
    assert_eq!(zone.rules[Rule::Claim as usize], 1);

    let mut model = older(8);
    for order in [10, 10, 10, 8, 8, 8, 7, 6, 5] {
        model.alloc(request(order, UNMOVABLE)).expect("a block");
    }
    model.alloc(request(4, MOVABLE)).expect("half of what is left");
    let zone = &model.zones[0];
    assert_eq!(zone.block_type(last), UNMOVABLE, "too little is movable");
    assert_eq!(zone.walk(zone.free_list(4, MOVABLE)).collect::<Vec<u32>>(), [last + 16], "but it moved");
}

#[test]
fn older_kernels_free_a_page_by_the_type_that_was_seen_when_it_went_to_a_per_cpu_list() {
    let mut model = older(8);
    let page = model.alloc(request(0, MOVABLE)).expect("a page");
    model.free(page, 0);
    let zone = &mut model.zones[0];
    let at = zone.at(page);
    zone.set_block_type(at, 9, RECLAIMABLE);
    zone.drain_all();
    assert!(zone.is_empty(zone.free_list(10, RECLAIMABLE)));
    assert_eq!(zone.walk(zone.free_list(10, MOVABLE)).count(), 4);
}

#[test]
fn a_request_is_its_gfp_word_and_no_other_word_is_taken_for_one() {
    for (order, list, highest_zone) in
        (0..11).flat_map(|order| (0..9).map(move |both| (order, both % 3, both / 3)))
    {
        for reserve in [Reserve::None, Reserve::NonBlock, Reserve::Atomic] {
            let request = Request { order, list, highest_zone, reserve };
            assert_eq!(Request::of_gfp(order, request.gfp()), Some(request));
            // __GFP_DIRECT_RECLAIM, __GFP_KSWAPD_RECLAIM, __GFP_ZERO
            for other in [0x400, 0x800, 0x100] {
                assert_eq!(Request::of_gfp(order, request.gfp() | other), None);
            }
        }
    }
    assert_eq!(Request::of_gfp(11, request(0, MOVABLE).gfp()), None);
}

#[test]
fn a_machine_that_the_model_does_not_know_is_refused() {
    let mut old = fresh(2, 0, true);
    old.hygiene = false;
    assert_eq!(Model::new(&old, semantics(true)).err(), Some(Unsupported::Kernel));
    for settings in [
        Settings { defrag_mode: true, ..Settings::default() },
        Settings { one_type: true, ..Settings::default() },
    ] {
        let state = State { settings, ..fresh(2, 0, true) };
        assert!(matches!(Model::new(&state, semantics(true)), Err(Unsupported::Machine(_))));
    }
    let mut broken = fresh(2, 0, true);
    broken.zones[0].areas[10].nr_free = 7;
    assert!(matches!(Model::new(&broken, semantics(true)), Err(Unsupported::Broken { invariant: "I1", .. })));
}
