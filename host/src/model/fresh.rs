//! Machines before anything was allocated: states to start from without a kernel.

use super::{MOVABLE, ORDERS, PCP_TYPES, TYPES};
use crate::observe::frozen::{
    self, Area, Block, Cpu, FreeList, Kind, MigrateType, PageClass, Part, Pcp, PcpList, Settings, State,
};

const NAMES: [&str; 4] = ["DMA", "DMA32", "Normal", "Movable"];
const COUNTERS: [&str; 3] = ["NR_FREE_PAGES", "NR_FREE_PAGES_BLOCKS", "NR_FREE_CMA_PAGES"];
/// Per-CPU lists: three of each order up to 3, two of huge pages.
const PCP_LISTS: u32 = 14;

/// A zone of such a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FreshZone {
    /// Its index in the kernel: 0 DMA, 1 DMA32, 2 NORMAL.
    pub index: usize,
    /// First pfn.
    pub start: u64,
    /// Pages, all of them free.
    pub pages: u64,
    /// Watermarks in pages: min, low, high.
    pub watermarks: [u64; 3],
}

/// What such a machine is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fresh {
    /// Its zones, lowest first.
    pub zones: Vec<FreshZone>,
    /// Order of a pageblock.
    pub pageblock_order: u32,
    /// Orders below this become guard pages.
    pub guard_minorder: u32,
    /// Whether its CPU, the only one, holds back counts.
    pub smp: bool,
    /// Pages that a per-CPU list takes and gives at a time, and the least and the most that one zone's hold.
    pub per_cpu: (i32, i32, i32),
}

impl Fresh {
    /// The state: everything is free, movable, and on the free lists in the order of pfns, in the largest blocks that fit.
    #[must_use]
    pub fn state(&self) -> State {
        State {
            pageblock_order: self.pageblock_order,
            guard_minorder: self.guard_minorder,
            types: MigrateType::ALL.into(),
            hygiene: true,
            isolation_keeps_type: true,
            zones: self.zones.iter().map(|zone| self.zone(zone)).collect(),
            settings: Settings::default(),
            ..State::default()
        }
    }

    fn zone(&self, zone: &FreshZone) -> frozen::Zone {
        let FreshZone { index, start, pages, watermarks } = *zone;
        let lists = || (0..MigrateType::ALL.len().min(TYPES)).map(|_| FreeList::default()).collect();
        let mut areas: Vec<Area> = (0..ORDERS).map(|_| Area { nr_free: 0, lists: lists() }).collect();
        let mut classes = vec![PageClass::new(Kind::Free, Part::Tail, 0); pages as usize];
        let (mut pfn, mut in_blocks) = (start, 0);
        while pfn < start + pages {
            let fits = (start + pages - pfn).ilog2();
            let order = pfn.trailing_zeros().min(fits).min(ORDERS as u32 - 1);
            areas[order as usize].nr_free += 1;
            areas[order as usize].lists[MOVABLE].pfns.push(pfn as u32);
            classes[(pfn - start) as usize] = PageClass::new(Kind::Free, Part::Head, order);
            in_blocks += if order >= self.pageblock_order { 1 << order } else { 0 };
            pfn += 1 << order;
        }
        let (first, last) = (start >> self.pageblock_order, (start + pages - 1) >> self.pageblock_order);
        let movable = Block { kind: MigrateType::Movable, number: MOVABLE, skip: false, isolated: false };
        frozen::Zone {
            index,
            name: NAMES[index].into(),
            start,
            spanned: pages,
            present: pages,
            managed: pages,
            watermarks: watermarks.into(),
            lowmem_reserve: vec![0; NAMES.len()],
            free_highatomic: Some(0),
            isolated_blocks: Some(0),
            areas,
            counters: vec![pages as i64, in_blocks, 0],
            counter_names: COUNTERS.map(String::from).into(),
            cpus: vec![self.cpu()],
            first_block: first,
            blocks: (first..=last).map(|_| Some(movable)).collect(),
            pages: classes,
            ..frozen::Zone::default()
        }
    }

    fn cpu(&self) -> Cpu {
        let (batch, high_min, high_max) = self.per_cpu;
        let huge = PCP_LISTS - 2;
        let lists = (0..PCP_LISTS).map(|index| PcpList {
            order: if index < huge { index / PCP_TYPES as u32 } else { 9 },
            ..PcpList::default()
        });
        let pcp = Pcp {
            batch,
            high: high_min,
            high_range: Some((high_min, high_max)),
            flags: Some(0),
            alloc_factor: Some(0),
            free_count: Some(0),
            lists: lists.collect(),
            ..Pcp::default()
        };
        Cpu {
            number: 0,
            online: true,
            pcp,
            diffs: if self.smp { vec![0; COUNTERS.len()] } else { Vec::new() },
            threshold: self.smp.then_some(6),
        }
    }
}
