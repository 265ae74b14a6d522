//! What `/proc` alone lets us check. Invariants are numbered as in the reference on the allocator.

use super::Violation;
use crate::observe::Checkpoint;
use crate::observe::procfs::zoneinfo::Pageset;
use crate::observe::procfs::{Blocks, Zone, ZoneId};

/// How many pages the counter NR_FREE_PAGES of a zone may be away from the zone's free lists without any fault.
///
/// * Each CPU may hold back up to `stat_threshold` (zoneinfo: `vm stats threshold`) before it folds its difference into
///   the zone's counter (mm/vmstat.c, __mod_zone_page_state()). `up` kernels hold nothing back and print no threshold.
/// * Counter and lists are read one after the other. Where buddyinfo was the same before and after, nothing moved
///   between them. Where it was not, the per-CPU lists may have been filled or drained in between, which a quiet guest
///   does all by itself: the vmstat worker gives back what is above a list's falling `high` in one go (6.12 and later,
///   mm/page_alloc.c, decay_pcp_high()); 1634 pages were seen to go so, with a `batch` of 31. So all that the lists may
///   hold is allowed then: `high_max`, before 6.12 `high`.
///
/// Pages on per-CPU lists are in neither figure.
pub(crate) fn allowance(checkpoint: &Checkpoint, zone: &Zone) -> i64 {
    let held_back: i64 = zone.pagesets.iter().filter_map(|pageset| pageset.threshold).map(small).sum();
    if checkpoint.still {
        return held_back;
    }
    let capacity = |pageset: &Pageset| {
        let values = ["high_max", "high", "count", "batch"].map(|name| pageset.values.get(name).copied());
        values.into_iter().flatten().max().unwrap_or(1)
    };
    let moved = zone.pagesets.iter().map(capacity).fold(0, i64::saturating_add);
    // Whatever a guest prints, more than the zone has cannot move.
    held_back + moved.clamp(0, zone.get("present").unwrap_or(0).max(0))
}

/// Thresholds are a signed byte in every kernel: a guest that prints more does not get away with more.
fn small(value: i64) -> i64 {
    value.clamp(0, 127)
}

fn zone<'a>(checkpoint: &'a Checkpoint, id: &ZoneId) -> Option<&'a Zone> {
    checkpoint.zoneinfo.iter().find(|zone| zone.id == *id)
}

/// Pages of free blocks on the ISOLATE lists, which buddyinfo counts and NR_FREE_PAGES does not. None where pagetypeinfo
/// does not tell.
fn isolated_pages(checkpoint: &Checkpoint, id: &ZoneId) -> Option<u64> {
    let blocks = checkpoint.pagetypeinfo.as_ref()?;
    let Some(of_type) = blocks.types.iter().position(|kind| kind == "Isolate") else { return Some(0) };
    blocks.zones.iter().find(|zone| zone.id == *id)?.free_pages(of_type)
}

/// I2, in pages: `nr_free_pages` == pages on all free lists but the isolated ones (+ NR_UNACCEPTED), within
/// [`allowance`].
///
/// Kernels: all. Source: mm/page_alloc.c, account_freepages() (6.12 and later), __mod_zone_freepage_state() (6.1).
pub(super) fn free_pages(checkpoint: &Checkpoint) -> Vec<Violation> {
    let mut violations = Vec::new();
    for lists in &checkpoint.buddyinfo {
        let Some(zone) = zone(checkpoint, &lists.id) else { continue };
        let Some(found) = zone.get("free") else { continue };
        let isolated = isolated_pages(checkpoint, &lists.id).unwrap_or(0);
        let unaccepted = zone.get("nr_unaccepted").unwrap_or(0);
        let Some(expected) =
            lists.pages.checked_sub(isolated).and_then(|pages| unaccepted.checked_add_unsigned(pages))
        else {
            continue;
        };
        let allowed = allowance(checkpoint, zone);
        let off = expected.saturating_sub(found);
        if off.saturating_abs() > allowed {
            let direction = if off > 0 { "fewer" } else { "more" };
            violations.push(Violation {
                checkpoint: checkpoint.name.clone(),
                zone: lists.id.to_string(),
                invariant: "I2",
                expected,
                found,
                pfn: None,
                pages: None,
                text: format!(
                    "nr_free_pages is {found}, {} {direction} than the {expected} pages on the free lists; \
                     {allowed} pages of difference have an innocent reason",
                    off.saturating_abs()
                ),
            });
        }
    }
    violations
}

/// I1, in free blocks of one order: `nr_free` (buddyinfo) == length of the lists (pagetypeinfo), where nothing moved while
/// they were read and no list was too long to be counted.
///
/// Kernels: all. Source: mm/page_alloc.c, __add_to_free_list() and __del_page_from_free_list().
pub(super) fn list_lengths(checkpoint: &Checkpoint) -> Vec<Violation> {
    let (true, Some(blocks)) = (checkpoint.still, &checkpoint.pagetypeinfo) else { return Vec::new() };
    let mut violations = Vec::new();
    for lists in &checkpoint.buddyinfo {
        let zone = blocks.zones.iter().find(|zone| zone.id == lists.id);
        let Some(lengths) = zone.and_then(|zone| zone.free_by_order()) else { continue };
        for (order, (&nr_free, &length)) in lists.blocks.iter().zip(&lengths).enumerate() {
            if nr_free != length {
                violations.push(Violation {
                    checkpoint: checkpoint.name.clone(),
                    zone: lists.id.to_string(),
                    invariant: "I1",
                    expected: length as i64,
                    found: nr_free as i64,
                    pfn: None,
                    pages: None,
                    text: format!("nr_free of order {order} is {nr_free}, its lists hold {length} blocks"),
                });
            }
        }
    }
    violations
}

/// Pages on the lists of one migratetype and pageblocks of it, where pagetypeinfo tells and nothing moved meanwhile.
fn of_type(checkpoint: &Checkpoint, id: &ZoneId, kind: &str) -> Option<(i64, i64)> {
    let blocks = checkpoint.pagetypeinfo.as_ref().filter(|_| checkpoint.still)?;
    let position = blocks.types.iter().position(|known| known == kind)?;
    let zone = blocks.zones.iter().find(|zone| zone.id == *id)?;
    let pages = i64::try_from(zone.free_pages(position)?).ok()?;
    let pageblocks = i64::try_from(*zone.pageblocks.get(position)?).ok()?;
    Some((pages, pageblocks))
}

/// A violation for each zone where `figures` gives what should be, what is, and what may lie between.
fn by_zone(
    checkpoint: &Checkpoint,
    invariant: &'static str,
    counter: &str,
    what: &str,
    figures: impl Fn(&Zone) -> Option<(i64, i64, i64)>,
) -> Vec<Violation> {
    let differs = |zone: &Zone| {
        let (expected, found, allowed) = figures(zone)?;
        (expected.saturating_sub(found).saturating_abs() > allowed).then(|| Violation {
            checkpoint: checkpoint.name.clone(),
            zone: zone.id.to_string(),
            invariant,
            expected,
            found,
            pfn: None,
            pages: None,
            text: format!("{counter} is {found}, {what} {expected} pages"),
        })
    };
    checkpoint.zoneinfo.iter().filter_map(differs).collect()
}

/// I3, in pages: `nr_free_cma` == pages on the CMA lists, within [`allowance`].
///
/// Kernels: all, with CONFIG_CMA. Source: mm/page_alloc.c, account_freepages(), __mod_zone_freepage_state().
pub(super) fn free_cma(checkpoint: &Checkpoint) -> Vec<Violation> {
    by_zone(checkpoint, "I3", "nr_free_cma", "the CMA lists hold", |zone| {
        let (pages, _) = of_type(checkpoint, &zone.id, "CMA")?;
        Some((pages, zone.get("nr_free_cma")?, allowance(checkpoint, zone)))
    })
}

/// I4, in pages: `free_highatomic` == pages on the HIGHATOMIC lists. No CPU holds anything of it back.
///
/// Kernels: 7.2 and later print it (mm/vmstat.c, zoneinfo_show_print()). Source: mm/page_alloc.c, account_freepages().
pub(super) fn free_highatomic(checkpoint: &Checkpoint) -> Vec<Violation> {
    by_zone(checkpoint, "I4", "free_highatomic", "the HIGHATOMIC lists hold", |zone| {
        let (pages, _) = of_type(checkpoint, &zone.id, "HighAtomic")?;
        Some((pages, zone.get("free_highatomic")?, 0))
    })
}

/// I5, in pages: `reserved_highatomic` == pages of the HIGHATOMIC pageblocks. Not decided while a pageblock is isolated:
/// pagetypeinfo then shows it as such, whatever else it is.
///
/// Kernels: 7.2 and later print it. Source: mm/page_alloc.c, reserve_highatomic_pageblock() and
/// unreserve_highatomic_pageblock().
pub(super) fn reserved_highatomic(checkpoint: &Checkpoint) -> Vec<Violation> {
    by_zone(checkpoint, "I5", "reserved_highatomic", "the HIGHATOMIC pageblocks have", |zone| {
        let (_, pageblocks) = of_type(checkpoint, &zone.id, "HighAtomic")?;
        let isolated = of_type(checkpoint, &zone.id, "Isolate").is_some_and(|(_, pageblocks)| pageblocks > 0);
        let size = pageblock_pages(checkpoint.pagetypeinfo.as_ref()?);
        let found = zone.get("reserved_highatomic")?;
        (!isolated).then(|| (pageblocks.saturating_mul(size), found, 0))
    })
}

/// I9, in pages: `nr_free_pages_blocks` == pages in free blocks of at least a pageblock that are not isolated. It moves
/// in steps larger than any threshold, so that no CPU holds anything of it back.
///
/// Kernels: 7.2 and later. Source: mm/page_alloc.c, __add_to_free_list(), __del_page_from_free_list(),
/// move_to_free_list().
pub(super) fn free_pages_blocks(checkpoint: &Checkpoint) -> Vec<Violation> {
    by_zone(checkpoint, "I9", "nr_free_pages_blocks", "the lists of whole pageblocks hold", |zone| {
        let blocks = checkpoint.pagetypeinfo.as_ref().filter(|_| checkpoint.still)?;
        let row = blocks.zones.iter().find(|row| row.id == zone.id)?;
        let mut pages = 0_i64;
        for (_, free) in blocks.types.iter().zip(&row.free).filter(|(kind, _)| *kind != "Isolate") {
            for (order, count) in free.iter().enumerate().skip(blocks.pageblock_order as usize) {
                let count = i64::try_from((*count)?).ok()?;
                pages = pages.checked_add(count.checked_mul(1 << order)?)?;
            }
        }
        Some((pages, zone.get("nr_free_pages_blocks")?, 0))
    })
}

fn pageblock_pages(blocks: &Blocks) -> i64 {
    1 << blocks.pageblock_order
}

/// In pageblocks: each pageblock of a zone has one of the known migratetypes.
///
/// pagetypeinfo looks at one pfn each `1 << pageblock_order` pages of the zone's span, so it counts at least the blocks that
/// its present pages fill and at most those that its span touches. A block of unknown type is not counted.
///
/// Kernels: all. Source: mm/vmstat.c, pagetypeinfo_showblockcount_print().
pub(super) fn pageblocks(checkpoint: &Checkpoint) -> Vec<Violation> {
    let Some(blocks) = &checkpoint.pagetypeinfo else { return Vec::new() };
    let size = pageblock_pages(blocks);
    let mut violations = Vec::new();
    for row in &blocks.zones {
        let Some(zone) = zone(checkpoint, &row.id) else { continue };
        let (Some(spanned), Some(present)) = (zone.get("spanned"), zone.get("present")) else { continue };
        if spanned < 0 || present < 0 {
            continue;
        }
        let (least, most) = (present / size, spanned / size + i64::from(spanned % size > 0));
        let found = row.pageblocks.iter().fold(0_u64, |sum, count| sum.saturating_add(*count));
        let found = i64::try_from(found).unwrap_or(i64::MAX);
        if !(least..=most).contains(&found) {
            violations.push(Violation {
                checkpoint: checkpoint.name.clone(),
                zone: row.id.to_string(),
                invariant: "pageblocks",
                expected: if found < least { least } else { most },
                found,
                pfn: None,
                pages: None,
                text: format!("{found} pageblocks have a known type; the zone has {least} to {most}"),
            });
        }
    }
    violations
}

/// In pages: the machine's `nr_free_pages` (vmstat) == the sum over its zones (zoneinfo), within what CPUs may fold in
/// between the two readings.
///
/// Kernels: all. Source: mm/vmstat.c, zone_page_state_add(). Not decided where a zone shows 0: `smp` kernels print a zone's
/// counter below zero as 0, and the machine's as it is.
pub(super) fn vmstat_sum(checkpoint: &Checkpoint) -> Vec<Violation> {
    let Some(found) = checkpoint.vmstat.as_ref().and_then(|vmstat| vmstat.get("nr_free_pages").copied())
    else {
        return Vec::new();
    };
    let populated: Vec<&Zone> = checkpoint.zoneinfo.iter().filter(|zone| zone.populated()).collect();
    let free: Option<Vec<i64>> =
        populated.iter().map(|zone| zone.get("free").filter(|free| *free != 0)).collect();
    let Some(free) = free else { return Vec::new() };
    let expected = free.iter().fold(0_i64, |sum, free| sum.saturating_add(*free));
    let allowed: i64 = populated.iter().map(|zone| allowance(checkpoint, zone)).sum();
    if expected.saturating_sub(found).saturating_abs() <= allowed {
        return Vec::new();
    }
    vec![Violation {
        checkpoint: checkpoint.name.clone(),
        zone: String::new(),
        invariant: "vmstat-sum",
        expected,
        found,
        pfn: None,
        pages: None,
        text: format!("nr_free_pages of the machine is {found}, its zones have {expected}"),
    }]
}

/// In pages: every page of every free block, and no other, is marked KPF_BUDDY (a part of I8), where nothing moved while
/// the words were read.
///
/// Kernels: all. Source: fs/proc/page.c, stable_page_flags().
pub(super) fn kpageflags_buddy(checkpoint: &Checkpoint) -> Vec<Violation> {
    let (true, Some(flags)) = (checkpoint.still_after_flags, &checkpoint.kpageflags) else {
        return Vec::new();
    };
    let expected = checkpoint.buddyinfo.iter().fold(0_u64, |sum, lists| sum.saturating_add(lists.pages));
    if flags.buddy == expected {
        return Vec::new();
    }
    vec![Violation {
        checkpoint: checkpoint.name.clone(),
        zone: String::new(),
        invariant: "kpageflags-buddy",
        expected: expected as i64,
        found: flags.buddy as i64,
        pfn: None,
        pages: None,
        text: format!("{} pages are marked as free, buddyinfo has {expected}", flags.buddy),
    }]
}

#[cfg(test)]
mod tests;
