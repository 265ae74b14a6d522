//! What the frozen state must satisfy, exactly: nothing moved while it was read. Invariants are numbered as in the reference
//! on the allocator; I14 and I15 are not in it.
//!
//! One cause gives one violation. Where a list could not be walked to its end I8 (or I10) says so, and what counts on that
//! list is not judged.

use std::collections::BTreeMap;

use crate::observe::frozen::{Anomaly, Events, Fault, Kind, MigrateType, Part, Place, State, Zone};

/// A broken invariant of one zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// The invariant: see [`INVARIANTS`].
    pub invariant: &'static str,
    /// What should be, in the invariant's unit.
    pub expected: i64,
    /// What is.
    pub found: i64,
    /// The first page that shows it, where it is about pages and not about counts.
    pub pfn: Option<u64>,
    /// How many pages are concerned.
    pub pages: u64,
    /// In words.
    pub text: String,
}

/// A check of one zone. What it gives lacks the name, which the table has.
type Check = fn(&State, &Zone) -> Vec<Broken>;

/// Every invariant of the frozen state, by the name it has in reports.
pub const INVARIANTS: [(&str, Check); 14] = [
    ("I1", list_lengths),
    ("I2", free_pages),
    ("I3", free_cma),
    ("I4", free_highatomic),
    ("I5", reserved_highatomic),
    ("I6", list_types),
    ("I7", unmerged),
    ("I8", free_lists),
    ("I9", free_pages_blocks),
    ("I10", per_cpu),
    ("I11", isolation),
    ("I12", guards),
    ("I13", conservation),
    ("I14", stale_private),
];

/// Runs every check on a zone.
#[must_use]
pub fn check(state: &State, zone: &Zone) -> Vec<Broken> {
    let named = |(name, check): &(&'static str, Check)| {
        let mut broken = check(state, zone);
        for one in &mut broken {
            one.invariant = name;
        }
        broken
    };
    INVARIANTS.iter().flat_map(named).collect()
}

/// What [`events`] remembers of a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Allocated {
    events: Events,
    /// Pages out of the allocator's hands: managed, and neither on lists nor guards.
    pages: u64,
    managed: u64,
    deferred: u64,
}

impl Allocated {
    /// Of a state, where the kernel counts events.
    #[must_use]
    pub fn of(state: &State) -> Option<Self> {
        if !state.hygiene {
            return None;
        }
        let (mut pages, mut managed, mut deferred) = (0_u64, 0_u64, 0_u64);
        for zone in &state.zones {
            let kinds = zone.kinds();
            let held = [Kind::Free, Kind::Pcp, Kind::Guard, Kind::Deferred].map(|kind| kinds.of(kind));
            pages = pages.wrapping_add(zone.managed.wrapping_sub(held.iter().sum()));
            managed = managed.wrapping_add(zone.managed);
            deferred += kinds.of(Kind::Deferred);
        }
        Some(Self { events: state.events?, pages, managed, deferred })
    }
}

/// I15, in pages, between two checkpoints: pages allocated less pages freed, as the events count them, is by how much more
/// is allocated.
///
/// Not decided where compaction or a contiguous range took pages off the lists in between: those are freed, and not
/// allocated, as events.
///
/// Kernels: 6.12 and later with CONFIG_VM_EVENT_COUNTERS; 6.1 does not count a page that it frees past the lock of the
/// per-CPU lists (free_unref_page()). Source: mm/page_alloc.c, rmqueue_buddy(), rmqueue_pcplist(),
/// free_frozen_page_commit(), free_one_page() (PGALLOC, PGFREE).
#[must_use]
pub fn events(before: &Allocated, after: &Allocated) -> Option<Broken> {
    let delta = |after: u64, before: u64| after.wrapping_sub(before).cast_signed();
    let decided = before.events.isolated == after.events.isolated
        && before.managed == after.managed
        && before.deferred == 0
        && after.deferred == 0;
    let expected = delta(after.pages, before.pages);
    let found = delta(after.events.allocated, before.events.allocated)
        .wrapping_sub(delta(after.events.freed, before.events.freed));
    (decided && expected != found).then(|| Broken {
        invariant: "I15",
        expected,
        found,
        pfn: None,
        pages: expected.abs_diff(found),
        text: format!(
            "since the checkpoint before, events count {found} more pages allocated than freed, and {expected} more pages \
             are allocated"
        ),
    })
}

/// A count that is not what it should be, in pages.
fn counted(what: &str, found: i64, expected: i64, where_from: &str) -> Vec<Broken> {
    if found == expected {
        return Vec::new();
    }
    let off = found.saturating_sub(expected);
    let direction = if off > 0 { "more" } else { "fewer" };
    vec![Broken {
        invariant: "",
        expected,
        found,
        pfn: None,
        pages: off.unsigned_abs(),
        text: format!(
            "{what} is {found}, {} {direction} than the {expected} {where_from}",
            off.unsigned_abs()
        ),
    }]
}

fn signed(pages: u64) -> i64 {
    i64::try_from(pages).unwrap_or(i64::MAX)
}

/// I1, in free blocks: `nr_free` of each order == blocks on its lists.
///
/// Kernels: all. Source: mm/page_alloc.c, __add_to_free_list() and __del_page_from_free_list().
fn list_lengths(_: &State, zone: &Zone) -> Vec<Broken> {
    let mut broken = Vec::new();
    for (order, area) in zone.areas.iter().enumerate() {
        if area.lists.iter().any(|list| list.broken) {
            continue;
        }
        let blocks: u64 = area.lists.iter().map(|list| list.pfns.len() as u64).sum();
        let what = format!("nr_free of order {order}");
        let mut found = counted(&what, area.nr_free.cast_signed(), signed(blocks), "blocks on its lists");
        for one in &mut found {
            one.pages = one.pages.saturating_mul(1 << order);
        }
        broken.extend(found);
    }
    broken
}

/// I2, in pages: NR_FREE_PAGES with what CPUs hold back == pages on all free lists but the isolated ones, and pages not yet
/// accepted.
///
/// Kernels: all. Source: mm/page_alloc.c, account_freepages() (6.12 and later), __mod_zone_freepage_state() (6.1).
fn free_pages(state: &State, zone: &Zone) -> Vec<Broken> {
    let Some(found) = zone.counter("NR_FREE_PAGES").filter(|_| !zone.has_broken_lists()) else {
        return Vec::new();
    };
    let expected = state.countable_pages(zone);
    counted("NR_FREE_PAGES with all CPUs' differences", found, expected, "pages on the free lists")
}

/// A counter of pages against the lists of one migratetype.
fn of_type(state: &State, zone: &Zone, kind: MigrateType, what: &str, found: Option<i64>) -> Vec<Broken> {
    let (Some(found), Some(number)) = (found, state.type_number(kind)) else { return Vec::new() };
    if zone.has_broken_lists() {
        return Vec::new();
    }
    let expected = signed(zone.listed_pages(|other| other == number));
    counted(what, found, expected, &format!("pages on the {} lists", kind.name()))
}

/// I3, in pages: NR_FREE_CMA_PAGES with what CPUs hold back == pages on the CMA lists.
///
/// Kernels: all, with CONFIG_CMA. Source: mm/page_alloc.c, account_freepages(), __mod_zone_freepage_state().
fn free_cma(state: &State, zone: &Zone) -> Vec<Broken> {
    let what = "NR_FREE_CMA_PAGES with all CPUs' differences";
    of_type(state, zone, MigrateType::Cma, what, zone.counter("NR_FREE_CMA_PAGES"))
}

/// I4, in pages: `nr_free_highatomic` == pages on the HIGHATOMIC lists.
///
/// Kernels: 6.12 and later. Source: mm/page_alloc.c, account_freepages().
fn free_highatomic(state: &State, zone: &Zone) -> Vec<Broken> {
    let found = zone.free_highatomic.map(u64::cast_signed);
    of_type(state, zone, MigrateType::HighAtomic, "nr_free_highatomic", found)
}

/// I5, in pages: `nr_reserved_highatomic` == pages of the HIGHATOMIC pageblocks. Before 7.2 it may be less, never more:
/// unreserving a part of a larger block takes too much off.
///
/// Kernels: all; exactly on 7.2 and later, which are known by their keeping the type of isolated blocks. Source:
/// mm/page_alloc.c, reserve_highatomic_pageblock() and unreserve_highatomic_pageblock().
fn reserved_highatomic(state: &State, zone: &Zone) -> Vec<Broken> {
    let blocks =
        zone.blocks.iter().flatten().filter(|block| block.kind == MigrateType::HighAtomic).count() as u64;
    let expected = signed(blocks.saturating_mul(state.pageblock_pages()));
    let found = zone.reserved_highatomic.cast_signed();
    if !state.isolation_keeps_type
        && (found < expected || zone.blocks.iter().flatten().any(|block| block.isolated))
    {
        return Vec::new();
    }
    counted("nr_reserved_highatomic", found, expected, "pages of HIGHATOMIC pageblocks")
}

/// I6, in pages: every pageblock of a free block has the type of the list that the block is on. Isolation is I11's.
///
/// Kernels: 6.12 and later ("freelist hygiene"); 6.1 lets types and lists differ. Source: mm/page_alloc.c,
/// __free_one_page(), account_freepages().
fn list_types(state: &State, zone: &Zone) -> Vec<Broken> {
    if !state.hygiene {
        return Vec::new();
    }
    // By list, type of the pageblock, and whether it is the block's first.
    let mut groups: BTreeMap<(usize, usize, bool), (u64, u64, usize)> = BTreeMap::new();
    let size = state.pageblock_pages();
    // Of these I8 has told: on the other list they may be right.
    let twice: Vec<u64> = zone.anomalies.of(Fault::ListedTwice).map(|anomaly| anomaly.pfn).collect();
    for (order, list, pfn) in free_blocks(zone).filter(|(.., pfn)| !twice.contains(pfn)) {
        let first = pfn >> state.pageblock_order;
        let last = (pfn + (1 << order) - 1) >> state.pageblock_order;
        for index in first..=last {
            let Some(block) = zone.block(index << state.pageblock_order, state.pageblock_order) else {
                continue;
            };
            if block.isolated || state.types.get(list) == Some(&MigrateType::Isolate) || block.number == list
            {
                continue;
            }
            let group = groups.entry((list, block.number, index == first)).or_insert((pfn, 0, order));
            group.1 += size.min(1 << order);
        }
    }
    let name = |number: usize| state.types.get(number).copied().unwrap_or(MigrateType::Unknown).name();
    let broken = groups.into_iter().map(|((list, kind, first), (pfn, pages, order))| {
        let which = if first { "pageblocks" } else { "later pageblocks of their free block, which are" };
        Broken {
            invariant: "",
            expected: list as i64,
            found: kind as i64,
            pfn: Some(pfn),
            pages,
            text: format!(
                "{pages} pages on {} lists are in {which} of type {}, first in the block of order {order} at pfn \
                 {pfn:#x}",
                name(list),
                name(kind)
            ),
        }
    });
    broken.collect()
}

/// Every block on a free list: order, number of the list's migratetype, first pfn.
fn free_blocks(zone: &Zone) -> impl Iterator<Item = (usize, usize, u64)> {
    zone.areas.iter().enumerate().flat_map(|(order, area)| {
        let lists = area.lists.iter().enumerate();
        lists
            .flat_map(move |(number, list)| list.pfns.iter().map(move |pfn| (order, number, u64::from(*pfn))))
    })
}

/// I7, in pages: below the order of a pageblock no two buddies are both free and of that order.
///
/// Kernels: all. Source: mm/page_alloc.c, __free_one_page(). From the order of a pageblock on, types that cannot be merged
/// keep buddies apart.
fn unmerged(state: &State, zone: &Zone) -> Vec<Broken> {
    let mut by_order: BTreeMap<usize, (u64, u64)> = BTreeMap::new();
    for (order, _, pfn) in free_blocks(zone).filter(|(order, ..)| (*order as u32) < state.pageblock_order) {
        let buddy = pfn ^ (1 << order);
        if buddy > pfn && is_free_head(zone, buddy, order as u32) {
            let group = by_order.entry(order).or_insert((pfn, 0));
            group.1 += 2 << order;
        }
    }
    let broken = by_order.into_iter().map(|(order, (pfn, pages))| Broken {
        invariant: "",
        expected: 0,
        found: signed(pages >> (order + 1)),
        pfn: Some(pfn),
        pages,
        text: format!(
            "{} pairs of free buddies of order {order} are not merged ({pages} pages), first at pfn {pfn:#x}",
            pages >> (order + 1)
        ),
    });
    broken.collect()
}

fn is_free_head(zone: &Zone, pfn: u64, order: u32) -> bool {
    zone.class(pfn).is_some_and(|class| {
        class.kind() == Kind::Free && class.part() == Part::Head && class.order() == order
    })
}

/// A violation for each anomaly of some faults that `wanted` lets through, those of one fault and list put together.
fn anomalies(zone: &Zone, faults: &[(Fault, &str)], wanted: impl Fn(&Anomaly) -> bool) -> Vec<Broken> {
    let mut broken = Vec::new();
    for (fault, words) in faults {
        for anomaly in zone.anomalies.of(*fault).filter(|anomaly| wanted(anomaly)) {
            let place = match anomaly.place {
                Some(Place::Free(order, number)) => format!(", free list of order {order}, type {number}"),
                Some(Place::Pcp(cpu, list)) => format!(", per-CPU list {list} of CPU {cpu}"),
                Some(Place::Deferred) => ", list of deferred pages".to_owned(),
                None => String::new(),
            };
            let more = if anomaly.count > 1 {
                format!(" and {} more there", anomaly.count - 1)
            } else {
                String::new()
            };
            broken.push(Broken {
                invariant: "",
                expected: anomaly.expected.cast_signed(),
                found: anomaly.found.cast_signed(),
                pfn: Some(anomaly.pfn),
                pages: anomaly.count,
                text: format!(
                    "{words}: pfn {:#x}{more}{place}; {:#x} expected, {:#x} found",
                    anomaly.pfn, anomaly.expected, anomaly.found
                ),
            });
        }
    }
    broken
}

/// I8: a page is marked as free (PageBuddy) if and only if it is the first of a block on exactly one free list; it holds
/// the list's order, is aligned to it, lies in the zone; no page of the block has references or is marked itself; links
/// lead there and back.
///
/// Kernels: all. Source: mm/page_alloc.c, __free_one_page(), set_buddy_order(); include/linux/list.h.
fn free_lists(_: &State, zone: &Zone) -> Vec<Broken> {
    const FAULTS: [(Fault, &str); 10] = [
        (Fault::WildLink, "a link leads to no page"),
        (Fault::BackLink, "a link does not lead back"),
        (Fault::ListedTwice, "a page is on more than one list, or twice on one"),
        (Fault::OtherZone, "a page of another zone is on a list"),
        (Fault::NotBuddy, "a page on a free list is not marked as free"),
        (Fault::NotListed, "a page marked as free is on no list"),
        (Fault::WrongOrder, "a free page does not hold its list's order"),
        (Fault::Misplaced, "a free block is not aligned, or reaches out of the zone"),
        (Fault::Referenced, "a free page has references"),
        (Fault::Overlap, "a page inside a free block is marked as free or on a list itself"),
    ];
    let mut broken = anomalies(zone, &FAULTS, |anomaly| !matches!(anomaly.place, Some(Place::Pcp(..))));
    if zone.anomalies.dropped > 0 {
        broken.push(Broken {
            invariant: "",
            expected: 0,
            found: signed(zone.anomalies.dropped),
            pfn: None,
            pages: zone.anomalies.dropped,
            text: format!("{} more faults in other places", zone.anomalies.dropped),
        });
    }
    broken
}

/// I9, in pages: NR_FREE_PAGES_BLOCKS with what CPUs hold back == pages in free blocks of at least a pageblock that are not
/// isolated.
///
/// Kernels: 7.2 and later. Source: mm/page_alloc.c, __add_to_free_list(), __del_page_from_free_list(),
/// move_to_free_list().
fn free_pages_blocks(state: &State, zone: &Zone) -> Vec<Broken> {
    let found = zone.counter("NR_FREE_PAGES_BLOCKS").filter(|_| !zone.has_broken_lists());
    let Some(found) = found else { return Vec::new() };
    let isolate = state.type_number(MigrateType::Isolate);
    let whole = |order: usize| order as u32 >= state.pageblock_order;
    let blocks = free_blocks(zone).filter(|(order, number, _)| whole(*order) && Some(*number) != isolate);
    let expected = signed(blocks.map(|(order, ..)| 1 << order).sum());
    counted(
        "NR_FREE_PAGES_BLOCKS with all CPUs' differences",
        found,
        expected,
        "pages in free blocks of a pageblock or more",
    )
}

/// I10, in pages: `count` of each CPU's lists == pages on them; those pages are not marked as free and have no references.
///
/// Kernels: all; on 7.2 and later with SMP=n the lists are always empty. Source: mm/page_alloc.c, free_pcppages_bulk(),
/// free_frozen_page_commit(), __rmqueue_pcplist().
fn per_cpu(_: &State, zone: &Zone) -> Vec<Broken> {
    let mut broken = Vec::new();
    for cpu in &zone.cpus {
        if cpu.pcp.lists.iter().any(|list| list.broken) {
            continue;
        }
        let pages = cpu.pcp.lists.iter().map(|list| (list.pfns.len() as u64) << list.order).sum();
        let what = format!("count of CPU {}'s lists", cpu.number);
        broken.extend(counted(&what, cpu.pcp.count.into(), signed(pages), "pages on them"));
    }
    const OWN: [(Fault, &str); 2] = [
        (Fault::PcpMarked, "a page on a per-CPU list is marked as free or as guard"),
        (Fault::PcpReferenced, "a page on a per-CPU list has references"),
    ];
    const LISTS: [(Fault, &str); 4] = [
        (Fault::WildLink, "a link leads to no page"),
        (Fault::BackLink, "a link does not lead back"),
        (Fault::ListedTwice, "a page is on more than one list, or twice on one"),
        (Fault::OtherZone, "a page of another zone is on a list"),
    ];
    broken.extend(anomalies(zone, &OWN, |_| true));
    broken.extend(anomalies(zone, &LISTS, |anomaly| matches!(anomaly.place, Some(Place::Pcp(..)))));
    broken
}

/// I11, in pageblocks: `nr_isolate_pageblock` == isolated pageblocks; at a checkpoint nothing isolates, so there is none; and
/// free pages are on an ISOLATE list if and only if their pageblock is isolated.
///
/// Kernels: all, with CONFIG_MEMORY_ISOLATION. Source: mm/page_isolation.c, set_migratetype_isolate(),
/// unset_migratetype_isolate(), undo_isolate_page_range().
fn isolation(state: &State, zone: &Zone) -> Vec<Broken> {
    let Some(counter) = zone.isolated_blocks else { return Vec::new() };
    let isolated = |(_, block): &(usize, &Option<crate::observe::frozen::Block>)| {
        block.is_some_and(|block| block.isolated)
    };
    let found: Vec<usize> = zone.blocks.iter().enumerate().filter(isolated).map(|(index, _)| index).collect();
    let first = found.first().map(|index| (zone.first_block + *index as u64) << state.pageblock_order);
    let blocks = found.len() as u64;
    let mut broken = counted(
        "nr_isolate_pageblock",
        counter.cast_signed(),
        signed(blocks),
        "pageblocks that are isolated",
    );
    if let (true, Some(first)) = (broken.is_empty(), first) {
        broken.push(Broken {
            invariant: "",
            expected: 0,
            found: signed(blocks),
            pfn: Some(first),
            pages: 0,
            text: format!(
                "{blocks} pageblocks stay isolated though nothing isolates them, first at pfn {first:#x}"
            ),
        });
    }
    for one in &mut broken {
        one.pfn = first;
        one.pages = one.pages.max(blocks).saturating_mul(state.pageblock_pages());
    }
    if !broken.is_empty() || !state.hygiene {
        return broken;
    }
    // No block is isolated, so nothing may be on the lists of isolated pages.
    let isolate = state.type_number(MigrateType::Isolate);
    let stray: Vec<(usize, u64)> = free_blocks(zone)
        .filter(|(_, number, _)| Some(*number) == isolate)
        .map(|(order, _, pfn)| (order, pfn))
        .collect();
    if let Some((_, pfn)) = stray.first() {
        let pages: u64 = stray.iter().map(|(order, _)| 1 << order).sum();
        broken.push(Broken {
            invariant: "",
            expected: 0,
            found: signed(pages),
            pfn: Some(*pfn),
            pages,
            text: format!(
                "{pages} free pages are on ISOLATE lists and in no isolated pageblock, first at pfn {pfn:#x}"
            ),
        });
    }
    broken
}

/// I12, in pages: a guard page has an order below debug_guardpage_minorder, is on no free list, and its buddy is neither
/// free nor a guard of the same order: the two would have merged.
///
/// Kernels: all, with CONFIG_DEBUG_PAGEALLOC. Source: mm/debug_page_alloc.c, __set_page_guard() (6.1: mm/page_alloc.c);
/// mm/page_alloc.c, expand() and __free_one_page().
fn guards(state: &State, zone: &Zone) -> Vec<Broken> {
    const FAULTS: [(Fault, &str); 2] = [
        (Fault::GuardListed, "a guard page is on a free list"),
        (Fault::GuardOrder, "a guard page holds an impossible order"),
    ];
    let mut broken = anomalies(zone, &FAULTS, |_| true);
    let (mut large, mut unmerged) = ((0_u64, 0_u64), (0_u64, 0_u64));
    for (index, class) in zone.pages.iter().enumerate() {
        if !class.is_guard_head() {
            continue;
        }
        let (pfn, order) = (zone.start + index as u64, class.order());
        let note = |group: &mut (u64, u64)| {
            if group.1 == 0 {
                group.0 = pfn;
            }
            group.1 += 1 << order;
        };
        if order >= state.guard_minorder {
            note(&mut large);
        }
        let buddy = pfn ^ (1 << order);
        let merges = zone.class(buddy).is_some_and(|class| {
            matches!(class.kind(), Kind::Free | Kind::Guard)
                && class.part() == Part::Head
                && class.order() == order
        });
        if merges {
            note(&mut unmerged);
        }
    }
    for ((pfn, pages), what) in [
        (large, "of guard pages have an order of debug_guardpage_minorder or more"),
        (unmerged, "of guard pages have a buddy that is free or a guard, of the same order"),
    ] {
        if pages > 0 {
            broken.push(Broken {
                invariant: "",
                expected: 0,
                found: signed(pages),
                pfn: Some(pfn),
                pages,
                text: format!("{pages} pages {what}, first at pfn {pfn:#x}"),
            });
        }
    }
    broken
}

/// I13, in pages: every managed page is free, on a per-CPU list, a guard, waiting for the lock, not yet accepted, or
/// allocated.
///
/// Kernels: all. Source: mm/page_alloc.c, __free_pages_core(), adjust_managed_page_count().
fn conservation(_: &State, zone: &Zone) -> Vec<Broken> {
    let kinds = zone.kinds();
    let ours = [Kind::Free, Kind::Pcp, Kind::Guard, Kind::Deferred, Kind::Unaccepted];
    let found = ours.map(|kind| kinds.of(kind)).iter().sum::<u64>() + kinds.allocated();
    counted(
        "the number of pages that are free, held by CPUs, guards or allocated",
        signed(found),
        zone.managed.cast_signed(),
        "managed pages",
    )
}

/// I14, in pages: `page->private` is 0 in pages behind the first of a free block or guard, and in all pages on per-CPU lists.
///
/// Kernels: 7.2, 6.12.93, 6.1.176 and later. Source: mm/page_alloc.c, free_pages_prepare().
fn stale_private(_: &State, zone: &Zone) -> Vec<Broken> {
    let mut blocks = zone.anomalies.of(Fault::StalePrivate);
    let Some(first) = blocks.next() else { return Vec::new() };
    let pages = first.count + blocks.map(|block| block.count).sum::<u64>();
    vec![Broken {
        invariant: "",
        expected: 0,
        found: first.found.cast_signed(),
        pfn: Some(first.pfn),
        pages,
        text: format!(
            "{pages} free pages hold what their last owner left in page->private, first pfn {:#x} with {:#x}",
            first.pfn, first.found
        ),
    }]
}
