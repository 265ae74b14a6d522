//! The state as JSON, schema 1 as the report's. Fields may be added, not changed.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::blocks::{BlockSummary, blocks};
use super::{WATERMARKS, type_name};
use crate::check::Violation;
use crate::observe::frozen::{Cpu, Kind, State, Zone};

const SCHEMA: u32 = 1;

/// A whole state; figures are in pages where nothing else is said.
#[derive(Clone, Debug, Serialize)]
pub struct Inspection<'a> {
    schema: u32,
    /// A pageblock has `1 << pageblock_order` pages.
    pub pageblock_order: u32,
    /// Orders below it may become guard pages (debug_guardpage_minorder).
    pub guard_minorder: u32,
    /// Names of the migratetypes by number.
    pub migratetypes: Vec<&'static str>,
    /// Populated zones.
    pub zones: Vec<ZoneInspection<'a>>,
    /// Broken invariants.
    pub violations: &'a [Violation],
}

/// A zone.
#[derive(Clone, Debug, Serialize)]
pub struct ZoneInspection<'a> {
    /// Its name, with its node where that is not 0.
    pub zone: String,
    /// Its node.
    pub node: u32,
    /// Its number in the node (enum zone_type).
    pub index: usize,
    /// First pfn of the span.
    pub first_pfn: u64,
    /// Pages of the span, holes included.
    pub spanned_pages: u64,
    /// Pages of the span that exist.
    pub present_pages: u64,
    /// Pages given to the allocator.
    pub managed_pages: u64,
    /// Pages of CMA areas; null in kernels without CMA.
    pub cma_pages: Option<u64>,
    /// Pages on all free lists, isolated ones too.
    pub buddy_pages: u64,
    /// Pages on the free lists that should be counted as free, less NR_FREE_PAGES with what CPUs hold back.
    pub delta: i64,
    /// Pages handed out and not given back.
    pub allocated_pages: u64,
    /// Watermarks by name, without the boost.
    pub watermarks: BTreeMap<&'static str, u64>,
    /// What every watermark is raised by for now.
    pub watermark_boost: u64,
    /// Zone flags that are set, by name.
    pub flags: &'a [String],
    /// Pages kept from requests that a higher zone could serve, by that zone's index.
    pub lowmem_reserve: &'a [i64],
    /// Pages of blocks reserved for HIGHATOMIC, as counted.
    pub reserved_highatomic: u64,
    /// Pages on HIGHATOMIC lists, as counted; null before 6.12.
    pub free_highatomic: Option<u64>,
    /// Isolated pageblocks, as counted; null where nothing can be isolated.
    pub nr_isolate_pageblock: Option<u64>,
    /// The zone's counters by name.
    pub counters: BTreeMap<&'a str, Counter>,
    /// Free areas, order 0 first.
    pub free_areas: Vec<FreeArea>,
    /// What each possible CPU holds.
    pub cpus: Vec<CpuInspection<'a>>,
    /// Pageblocks.
    pub pageblocks: Pageblocks,
    /// Pages of the span by kind; kinds that there are none of are left out.
    pub pages: BTreeMap<&'static str, u64>,
}

/// A counter.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Counter {
    /// What the zone holds.
    pub value: i64,
    /// What all CPUs together hold back: the counter is really `value + held_back`.
    pub held_back: i64,
}

/// The free area of an order.
#[derive(Clone, Debug, Serialize)]
pub struct FreeArea {
    /// The order.
    pub order: usize,
    /// Free blocks, as counted.
    pub nr_free: u64,
    /// Blocks found on the lists, by migratetype; empty lists are left out.
    pub blocks: BTreeMap<&'static str, u64>,
    /// Migratetypes whose list is damaged, so that not all of its blocks were found.
    pub broken: Vec<&'static str>,
}

/// What one CPU holds of a zone.
#[derive(Clone, Debug, Serialize)]
pub struct CpuInspection<'a> {
    /// Its number.
    pub cpu: usize,
    /// Whether it is online.
    pub online: bool,
    /// Pages on its lists, as counted.
    pub count: i32,
    /// From here on pages go back to the free lists.
    pub high: i32,
    /// Least `high`; null before 6.12.
    pub high_min: Option<i32>,
    /// Greatest `high`; null before 6.12.
    pub high_max: Option<i32>,
    /// Pages that go at a time.
    pub batch: i32,
    /// PCPF_*; null before 6.12.
    pub flags: Option<u8>,
    /// See mm/page_alloc.c, nr_pcp_alloc(); null before 6.12.
    pub alloc_factor: Option<u8>,
    /// Pages freed in a row, and before 6.12 `free_factor`.
    pub free_count: Option<i16>,
    /// Pages found on its lists, by order.
    pub pages_by_order: BTreeMap<u32, u64>,
    /// Differences from here on are folded into the counters; null without SMP.
    pub stat_threshold: Option<i8>,
    /// Differences of counters that it holds back, by name; zeros are left out.
    pub held_back: BTreeMap<&'a str, i8>,
}

/// Pageblocks of a zone.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Pageblocks {
    /// All, also where the zone has but a part of one or there is no memory map.
    pub count: usize,
    /// By migratetype.
    pub by_type: BTreeMap<&'static str, u64>,
    /// MOVABLE and CMA blocks that hold pages which cannot be moved.
    pub mixed: u64,
    /// Isolated ones, as marked.
    pub isolated: u64,
    /// Those that compaction skips.
    pub skipped: u64,
    /// Those that are free as a whole.
    pub free: u64,
}

/// The state and what is wrong with it, for serde.
#[must_use]
pub fn inspection<'a>(state: &'a State, violations: &'a [Violation]) -> Inspection<'a> {
    Inspection {
        schema: SCHEMA,
        pageblock_order: state.pageblock_order,
        guard_minorder: state.guard_minorder,
        migratetypes: state.types.iter().map(|kind| kind.name()).collect(),
        zones: state.zones.iter().map(|zone| ZoneInspection::new(state, zone)).collect(),
        violations,
    }
}

/// The same as a JSON value.
#[must_use]
pub fn json(state: &State, violations: &[Violation]) -> Value {
    // Numbers, texts, and maps with texts or numbers as keys: there is nothing that could fail.
    serde_json::to_value(inspection(state, violations)).unwrap_or_default()
}

impl<'a> ZoneInspection<'a> {
    fn new(state: &State, zone: &'a Zone) -> Self {
        let kinds = zone.kinds();
        let counters = zone.counter_names.iter().zip(&zone.counters).enumerate();
        let counters = counters.map(|(number, (name, value))| {
            (name.as_str(), Counter { value: *value, held_back: zone.held_back(number) })
        });
        let areas = zone.areas.iter().enumerate().map(|(order, area)| {
            let mut free =
                FreeArea { order, nr_free: area.nr_free, blocks: BTreeMap::new(), broken: Vec::new() };
            for (number, list) in area.lists.iter().enumerate() {
                if !list.pfns.is_empty() {
                    *free.blocks.entry(type_name(state, number)).or_default() += list.pfns.len() as u64;
                }
                if list.broken {
                    free.broken.push(type_name(state, number));
                }
            }
            free
        });
        let pages = kinds.iter().filter(|(_, pages)| *pages > 0);
        Self {
            zone: zone.label(),
            node: zone.node,
            index: zone.index,
            first_pfn: zone.start,
            spanned_pages: zone.spanned,
            present_pages: zone.present,
            managed_pages: zone.managed,
            cma_pages: zone.cma,
            buddy_pages: zone.listed_pages(|_| true),
            delta: state.delta(zone),
            allocated_pages: kinds.allocated(),
            watermarks: WATERMARKS.into_iter().zip(zone.watermarks.iter().copied()).collect(),
            watermark_boost: zone.boost,
            flags: &zone.flag_names,
            lowmem_reserve: &zone.lowmem_reserve,
            reserved_highatomic: zone.reserved_highatomic,
            free_highatomic: zone.free_highatomic,
            nr_isolate_pageblock: zone.isolated_blocks,
            counters: counters.collect(),
            free_areas: areas.collect(),
            cpus: zone.cpus.iter().map(|cpu| CpuInspection::new(zone, cpu)).collect(),
            pageblocks: Pageblocks::new(&blocks(state, zone)),
            pages: pages.map(|(kind, pages)| (kind.name(), pages)).collect(),
        }
    }
}

impl<'a> CpuInspection<'a> {
    fn new(zone: &'a Zone, cpu: &Cpu) -> Self {
        let pcp = &cpu.pcp;
        let mut pages_by_order = BTreeMap::new();
        for list in &pcp.lists {
            *pages_by_order.entry(list.order).or_default() += (list.pfns.len() as u64) << list.order;
        }
        let held_back = zone.counter_names.iter().zip(&cpu.diffs).filter(|(_, diff)| **diff != 0);
        Self {
            cpu: cpu.number,
            online: cpu.online,
            count: pcp.count,
            high: pcp.high,
            high_min: pcp.high_range.map(|(min, _)| min),
            high_max: pcp.high_range.map(|(_, max)| max),
            batch: pcp.batch,
            flags: pcp.flags,
            alloc_factor: pcp.alloc_factor,
            free_count: pcp.free_count,
            pages_by_order,
            stat_threshold: cpu.threshold,
            held_back: held_back.map(|(name, diff)| (name.as_str(), *diff)).collect(),
        }
    }
}

impl Pageblocks {
    fn new(blocks: &[BlockSummary]) -> Self {
        let mut sums = Self { count: blocks.len(), ..Self::default() };
        for summary in blocks {
            sums.mixed += u64::from(summary.is_mixed());
            sums.isolated += u64::from(summary.is_isolated());
            sums.free += u64::from(summary.pages > 0 && summary.of(Kind::Free) == summary.pages);
            if let Some(block) = summary.block {
                *sums.by_type.entry(block.kind.name()).or_default() += 1;
                sums.skipped += u64::from(block.skip);
            }
        }
        sums
    }
}
