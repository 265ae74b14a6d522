//! What `/proc` alone lets us check. Invariants are numbered as in the reference on the allocator.

use super::Violation;
use crate::observe::Checkpoint;
use crate::observe::procfs::{Zone, ZoneId};

/// How many pages the counter NR_FREE_PAGES of a zone may be away from the zone's free lists without any fault.
///
/// * Each CPU may hold back up to `stat_threshold` (zoneinfo: `vm stats threshold`) before it folds its difference into
///   the zone's counter (mm/vmstat.c, __mod_zone_page_state()). `up` kernels hold nothing back and print no threshold.
/// * Counter and lists are read one after the other. Where buddyinfo was the same before and after, nothing moved
///   between them. Where it was not, a CPU may have refilled or drained its lists in between: `batch` pages each time
///   (mm/page_alloc.c, rmqueue_bulk() and free_pcppages_bulk()), for which one of each a CPU is allowed.
///
/// Pages on per-CPU lists are in neither figure.
pub(crate) fn allowance(checkpoint: &Checkpoint, zone: &Zone) -> i64 {
    let held_back: i64 = zone.pagesets.iter().filter_map(|pageset| pageset.threshold).map(small).sum();
    if checkpoint.still {
        return held_back;
    }
    let moved: i64 = zone
        .pagesets
        .iter()
        .map(|pageset| 2 * small(pageset.values.get("batch").copied().unwrap_or(1)))
        .sum();
    held_back + moved
}

/// Thresholds and batches are below 2^10 in every kernel: a guest that prints more does not get away with more.
fn small(value: i64) -> i64 {
    value.clamp(0, 1024)
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
                    text: format!("nr_free of order {order} is {nr_free}, its lists hold {length} blocks"),
                });
            }
        }
    }
    violations
}

/// In pageblocks: each pageblock of a zone has one of the known migratetypes.
///
/// pagetypeinfo looks at one pfn each `1 << pageblock_order` pages of the zone's span, so it counts at least the blocks that
/// its present pages fill and at most those that its span touches. A block of unknown type is not counted.
///
/// Kernels: all. Source: mm/vmstat.c, pagetypeinfo_showblockcount_print().
pub(super) fn pageblocks(checkpoint: &Checkpoint) -> Vec<Violation> {
    let Some(blocks) = &checkpoint.pagetypeinfo else { return Vec::new() };
    let size = 1_i64 << blocks.pageblock_order;
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
        text: format!("{} pages are marked as free, buddyinfo has {expected}", flags.buddy),
    }]
}

#[cfg(test)]
mod tests;
