//! A kernel of our own invention and the RAM in which it runs: the least that [`State::read`](super::State::read) takes.
//!
//! It is laid out as Linux 7.2 with two CPUs lays itself out, and nothing in it is broken. RAM, from the bottom:
//!
//! | page frames | what |
//! |---|---|
//! | 1 to 5 | page tables: all RAM behind `KERNEL_MAP` in pages of 2 MiB, the struct pages behind `VMEMMAP` in pages of 4 KiB |
//! | 8 | variables that have symbols |
//! | 9, 10 | the only node with its zones, DMA32 and Normal, half of RAM each |
//! | 11 to 13 | memory sections: array, sections, pageblock bits |
//! | 14, 15 | per-CPU areas |
//! | 16 … | struct pages, and the lowest page tables of them |
//! | the rest | what the allocator has: see `CYCLE` and `MIXED` |

use std::collections::HashMap;

use crate::batch::AREA_BYTES;
use crate::vm::RamLayout;

use super::class::Kind;
use super::kernel::{Kernel, Symbol};
use super::memmap::SECTION_PAGES;
use super::plant::Pen;
use super::ram::Ram;
use super::small::SmallImage;
use super::space::KERNEL_MAP;

/// Where struct pages are mapped.
const VMEMMAP: u64 = 0xffff_ea00_0000_0000;
const PAGE: u64 = 4096;
/// Page tables: the top one, then those of the kernel map, then those of the struct pages.
const TABLES: [u64; 5] = [PAGE, 2 * PAGE, 3 * PAGE, 4 * PAGE, 5 * PAGE];
const VARIABLES: u64 = 8 * PAGE;
const NODE: u64 = 9 * PAGE;
const SECTION_ARRAY: u64 = 11 * PAGE;
const SECTIONS: u64 = 12 * PAGE;
const USAGES: u64 = 13 * PAGE;
const CPU_AREAS: [u64; 2] = [14 * PAGE, 15 * PAGE];
const STRUCT_PAGES: u64 = 16 * PAGE;
/// The driver's memory, which begins as zeros: whose pages these are makes no difference.
const DRIVER: u64 = 8 << 20;
/// Where per-CPU variables lie in each CPU's area, by zone.
const PCP: [u64; 2] = [0x100, 0x300];
const ZONE_STATS: [u64; 2] = [0x500, 0x520];

const BLOCK_ORDER: u32 = 9;
const BLOCK: u64 = 1 << BLOCK_ORDER;
const ORDERS: u32 = 11;
/// Orders below this become guard pages.
const GUARD_MINORDER: u64 = 4;
const TYPES: [&str; 6] = ["UNMOVABLE", "MOVABLE", "RECLAIMABLE", "HIGHATOMIC", "CMA", "ISOLATE"];
const COUNTERS: [&str; 3] = ["NR_FREE_PAGES", "NR_FREE_PAGES_BLOCKS", "NR_FREE_CMA_PAGES"];

/// What the pageblocks are, over and over: number of the migratetype, and what is in them. What lies in the way is reserved.
const CYCLE: [(usize, &[(Use, u32)]); 8] = [
    (1, &MIXED),
    (1, &[(Use::Free, 9)]),
    (0, &MIXED),
    (3, &MIXED),
    (4, &[(Use::Free, 10)]),
    // The second half of it.
    (4, &[]),
    (1, &MIXED),
    (1, &[(Use::Free, 9)]),
];

/// A pageblock in which everything is, by order; no two free buddies are of one order. What is left is allocated.
const MIXED: [(Use, u32); 18] = [
    (Use::Free, 7),
    (Use::Page(Kind::Other), 7),
    (Use::Free, 6),
    (Use::Page(Kind::Slab), 6),
    (Use::Free, 4),
    (Use::Page(Kind::Hugetlb), 4),
    (Use::Guard, 3),
    (Use::Page(Kind::Lru), 3),
    (Use::Free, 3),
    (Use::Pcp(0), 3),
    (Use::Pcp(0), 0),
    (Use::Pcp(1), 0),
    (Use::Free, 0),
    (Use::Page(Kind::PageTable), 0),
    (Use::Page(Kind::Reserved), 0),
    (Use::Page(Kind::Other), 0),
    (Use::Deferred, 1),
    (Use::Free, 1),
];

#[derive(Clone, Copy)]
enum Use {
    /// On the free list of its pageblock's type.
    Free,
    Guard,
    /// On a list of this CPU.
    Pcp(usize),
    /// On its way to the free lists.
    Deferred,
    /// Not the allocator's: a compound page where the order is not 0.
    Page(Kind),
}

/// The fake kernel. Built from type information, as any other.
#[must_use]
pub fn kernel() -> Kernel {
    match Kernel::from_parts(&btf(), symbols(), Some((KERNEL_MAP + VARIABLES + 0x200, b"fake".to_vec()))) {
        Ok(kernel) => kernel,
        Err(error) => panic!("the fake kernel: {error}"),
    }
}

/// Its RAM, `mib` MiB of it: a multiple of 16, at most 1 GiB.
#[must_use]
pub fn ram(kernel: &Kernel, mib: u64) -> Ram {
    assert!(mib.is_multiple_of(16) && (16..=1024).contains(&mib), "{mib} MiB");
    let layout = RamLayout { low_bytes: mib << 20, all_bytes: mib << 20 };
    match Ram::zeroed(layout) {
        Ok(ram) => {
            Builder { kernel, pen: Pen::new(&ram), pages: (mib << 20) / PAGE }.write();
            ram
        }
        Err(error) => panic!("{mib} MiB of fake RAM: {error}"),
    }
}

/// Both, as a small image.
#[must_use]
pub fn image(mib: u64) -> SmallImage {
    let kernel = kernel();
    match SmallImage::of(&kernel, btf(), &ram(&kernel, mib)) {
        Ok(image) => image,
        Err(error) => panic!("the fake image: {error}"),
    }
}

fn symbols() -> HashMap<String, Symbol> {
    let symbol = |at: u64, bytes: u64| Symbol { address: KERNEL_MAP + at, bytes };
    let symbols = [
        ("init_top_pgt", symbol(TABLES[0], PAGE)),
        ("mem_section", symbol(VARIABLES, 8)),
        ("phys_base", symbol(VARIABLES + 8, 8)),
        ("_debug_guardpage_minorder", symbol(VARIABLES + 16, 4)),
        ("__cpu_possible_mask", symbol(VARIABLES + 24, 8)),
        ("__cpu_online_mask", symbol(VARIABLES + 32, 8)),
        ("__per_cpu_offset", symbol(VARIABLES + 40, 16)),
        ("linux_banner", symbol(VARIABLES + 0x180, 40)),
        ("contig_page_data", symbol(NODE, 2 * PAGE)),
        ("buddydiff_batch", symbol(DRIVER, AREA_BYTES as u64)),
    ];
    symbols.into_iter().map(|(name, at)| (name.to_owned(), at)).collect()
}

struct Builder<'a> {
    kernel: &'a Kernel,
    pen: Pen<'a>,
    pages: u64,
}

impl Builder<'_> {
    fn write(&self) {
        self.tables();
        self.variables();
        for zone in 0..2 {
            self.zone(zone);
        }
    }

    fn zone_pages(&self) -> u64 {
        self.pages / 2
    }

    /// Page frames that are taken before the allocator gets any.
    fn taken(&self) -> u64 {
        (STRUCT_PAGES / PAGE + self.struct_frames() + self.struct_frames().div_ceil(512))
            .next_multiple_of(BLOCK)
    }

    fn struct_frames(&self) -> u64 {
        self.pages * 64 / PAGE
    }

    fn tables(&self) {
        const PRESENT: u64 = 1;
        const LARGE: u64 = 1 << 7;
        let set = |table: u64, index: u64, entry: u64| self.pen.u64(table + index * 8, entry | PRESENT);
        let [top, kernel, kernel_large, map, map_middle] = TABLES;
        set(top, KERNEL_MAP >> 39 & 511, kernel);
        set(kernel, KERNEL_MAP >> 30 & 511, kernel_large);
        for index in 0..(self.pages / 512) {
            set(kernel_large, index, index << 21 | LARGE);
        }
        set(top, VMEMMAP >> 39 & 511, map);
        set(map, VMEMMAP >> 30 & 511, map_middle);
        let lowest = STRUCT_PAGES + self.struct_frames() * PAGE;
        for index in 0..self.struct_frames() {
            set(map_middle, index / 512, lowest + index / 512 * PAGE);
            set(lowest, index, STRUCT_PAGES + index * PAGE);
        }
    }

    fn variables(&self) {
        let put = |offset: u64, value: u64| self.pen.u64(VARIABLES + offset, value);
        put(0, KERNEL_MAP + SECTION_ARRAY);
        put(8, 0);
        put(16, GUARD_MINORDER);
        put(24, 3);
        put(32, 3);
        for (cpu, area) in CPU_AREAS.into_iter().enumerate() {
            put(40 + cpu as u64 * 8, KERNEL_MAP + area);
        }
        put(0x100, u64::from_le_bytes(*b"DMA32\0\0\0"));
        put(0x108, u64::from_le_bytes(*b"Normal\0\0"));
        for (index, word) in
            b"Linux version 7.2.0 (fake kernel)\0\0\0\0\0\0\0".as_chunks().0.iter().enumerate()
        {
            put(0x180 + index as u64 * 8, u64::from_le_bytes(*word));
        }
        put(0x200, u32::from_le_bytes(*b"fake").into());
        self.pen.u64(SECTION_ARRAY, KERNEL_MAP + SECTIONS);
        let layout = &self.kernel.section;
        let usage_bytes =
            layout.pageblock_flags as u64 + SECTION_PAGES / BLOCK * u64::from(layout.block_bits) / 8;
        for section in 0..self.pages.div_ceil(SECTION_PAGES) {
            let at = SECTIONS + section * layout.bytes;
            // Coded so that the pfn times the size of a struct page has to be added; present, with a memory map.
            self.pen.u64(at + layout.mem_map as u64, VMEMMAP | 3);
            self.pen.u64(at + layout.usage as u64, KERNEL_MAP + USAGES + section * usage_bytes);
        }
        for block in 0..self.pages / BLOCK {
            let section = block * BLOCK / SECTION_PAGES;
            let bits = block % (SECTION_PAGES / BLOCK) * u64::from(layout.block_bits);
            let at = USAGES + section * usage_bytes + layout.pageblock_flags as u64 + bits / 8;
            self.pen.u8(at, CYCLE[(block % 8) as usize].0 as u8);
        }
        self.pen.u32(NODE + self.kernel.node.id as u64, 0);
        self.pen.u64(NODE + self.kernel.node.spanned as u64, self.pages);
    }

    /// Guest-physical address of a zone.
    fn zone_at(&self, zone: usize) -> u64 {
        NODE + self.kernel.node.zones as u64 + zone as u64 * self.kernel.zone.bytes
    }

    fn zone(&self, zone: usize) {
        let (layout, at) = (&self.kernel.zone, self.zone_at(zone));
        let put = |offset: usize, value: u64| self.pen.u64(at + offset as u64, value);
        let start = zone as u64 * self.zone_pages();
        put(layout.start_pfn, start);
        put(layout.spanned, self.zone_pages());
        put(layout.present, self.zone_pages());
        put(layout.name, KERNEL_MAP + VARIABLES + 0x100 + zone as u64 * 8);
        put(layout.pageset, PCP[zone]);
        put(layout.zonestats, ZONE_STATS[zone]);
        for (index, mark) in [64, 80, 96, 112].into_iter().enumerate() {
            put(layout.watermark + index * 8, mark);
        }
        let empty = |head: u64| {
            self.pen.u64(head, KERNEL_MAP + head);
            self.pen.u64(head + 8, KERNEL_MAP + head);
        };
        for order in 0..ORDERS {
            (0..TYPES.len()).for_each(|number| empty(self.free_list(zone, order, number)));
        }
        for (cpu, area) in CPU_AREAS.into_iter().enumerate() {
            (0..self.kernel.pcp.list_count).for_each(|list| empty(self.pcp_list(zone, cpu, list)));
            let pcp = area + PCP[zone];
            self.pen.u32(pcp + self.kernel.pcp.high as u64, 128);
            self.pen.u32(pcp + self.kernel.pcp.batch as u64, 31);
        }
        let mut tally = Tally::default();
        let mut pfn = start;
        while pfn < start + self.zone_pages() {
            if pfn < self.taken() {
                self.put(zone, pfn, 0, 1, Use::Page(Kind::Reserved), &mut tally);
                pfn += 1;
                continue;
            }
            let (number, uses) = CYCLE[(pfn / BLOCK % 8) as usize];
            let end = pfn + uses.first().map_or(0, |(_, order)| 1 << order).max(BLOCK);
            for (what, order) in uses {
                self.put(zone, pfn, *order, number, *what, &mut tally);
                pfn += 1 << order;
            }
            while pfn < end {
                self.put(zone, pfn, 0, number, Use::Page(Kind::Other), &mut tally);
                pfn += 1;
            }
        }
        self.counts(zone, &tally);
    }

    fn counts(&self, zone: usize, tally: &Tally) {
        let (layout, at) = (&self.kernel.zone, self.zone_at(zone));
        let put = |offset: usize, value: u64| self.pen.u64(at + offset as u64, value);
        for (order, blocks) in tally.nr_free.iter().enumerate() {
            put(layout.free_area + order * self.kernel.area.bytes + self.kernel.area.nr_free, *blocks);
        }
        put(layout.managed, self.zone_pages() - tally.reserved);
        if let Some(offset) = layout.free_highatomic {
            put(offset, tally.free_of[3]);
        }
        let blocks =
            (zone as u64 * self.zone_pages()..(zone as u64 + 1) * self.zone_pages()).step_by(BLOCK as usize);
        put(
            layout.reserved_highatomic,
            blocks.filter(|pfn| CYCLE[(pfn / BLOCK % 8) as usize].0 == 3).count() as u64 * BLOCK,
        );
        // CPU 1 holds back three pages that were taken from the lists.
        let free: u64 = tally.free_of.iter().sum();
        put(layout.vm_stat, free + 3);
        put(layout.vm_stat + 8, tally.whole);
        put(layout.vm_stat + 16, tally.free_of[4]);
        let (diffs, _) = self.kernel.pcp.diffs.unwrap_or_default();
        self.pen.u8(CPU_AREAS[1] + ZONE_STATS[zone] + diffs as u64, -3_i8 as u8);
        for (cpu, area) in CPU_AREAS.into_iter().enumerate() {
            let count = area + PCP[zone] + self.kernel.pcp.count as u64;
            self.pen.u32(count, tally.pcp[cpu]);
        }
    }

    /// Guest-physical address of the head of a list.
    fn free_list(&self, zone: usize, order: u32, number: usize) -> u64 {
        let area = self.kernel.zone.free_area + order as usize * self.kernel.area.bytes;
        self.zone_at(zone) + (area + self.kernel.area.lists + number * 16) as u64
    }

    fn pcp_list(&self, zone: usize, cpu: usize, list: usize) -> u64 {
        CPU_AREAS[cpu] + PCP[zone] + (self.kernel.pcp.lists + list * 16) as u64
    }

    /// Adds a page to the tail of a list.
    fn list(&self, head: u64, pfn: u64) {
        let node = self.page(pfn) + self.kernel.page.list as u64 * 8;
        let address = VMEMMAP + (node - STRUCT_PAGES);
        let last = self.pen.read(head + 8);
        let last_node = if last >= KERNEL_MAP { last - KERNEL_MAP } else { last - VMEMMAP + STRUCT_PAGES };
        self.pen.u64(node, KERNEL_MAP + head);
        self.pen.u64(node + 8, last);
        self.pen.u64(last_node, address);
        self.pen.u64(head + 8, address);
    }

    /// Guest-physical address of a struct page.
    fn page(&self, pfn: u64) -> u64 {
        STRUCT_PAGES + pfn * 64
    }

    /// Writes the `1 << order` struct pages at `pfn`.
    fn put(&self, zone: usize, pfn: u64, order: u32, number: usize, what: Use, tally: &mut Tally) {
        let layout = &self.kernel.page;
        let at = |pfn: u64, word: usize| self.page(pfn) + word as u64 * 8;
        let flag = |bit: u32| 1_u64 << bit;
        let (page_type, flags, private) = match what {
            Use::Free => (0xf0, 0, order),
            Use::Guard => (0xf3, 0, order),
            Use::Pcp(_) => (0xff, 0, 0),
            Use::Deferred => (0xff, 0, order),
            Use::Page(Kind::Lru) => (0xff, flag(layout.lru), 0),
            Use::Page(Kind::Reserved) => (0xff, flag(layout.reserved), 0),
            Use::Page(Kind::PageTable) => (0xf2, 0, 0),
            Use::Page(Kind::Hugetlb) => (0xf4, 0, 0),
            Use::Page(Kind::Slab) => (0xf5, 0, 0),
            Use::Page(_) => (0xff, 0, 0),
        };
        let compound = order > 0 && matches!(what, Use::Page(_));
        for tail in pfn..pfn + (1 << order) {
            // The zone's number is in the top bit.
            self.pen.u64(at(tail, layout.flags), (zone as u64) << 63);
            self.pen.u64(at(tail, layout.kind), u32::MAX.into());
            if compound {
                self.pen.u64(at(tail, layout.compound), (VMEMMAP + pfn * 64) | 1);
            }
        }
        if compound {
            self.pen.u64(at(pfn, layout.compound), 0);
            self.pen.u64(at(pfn + 1, layout.order.0), (zone as u64) << 63 | u64::from(order));
        }
        let head = if compound { flag(layout.head) } else { 0 };
        self.pen.u64(at(pfn, layout.flags), (zone as u64) << 63 | flags | head);
        let references = u64::from(matches!(what, Use::Page(_)));
        self.pen.u64(at(pfn, layout.kind), references << 32 | page_type << 24 | 0xff_ffff);
        self.pen.u64(at(pfn, layout.private), private.into());
        match what {
            Use::Free => {
                self.list(self.free_list(zone, order, number), pfn);
                tally.nr_free[order as usize] += 1;
                tally.free_of[number] += 1 << order;
                if order >= BLOCK_ORDER {
                    tally.whole += 1 << order;
                }
            }
            Use::Pcp(cpu) => {
                self.list(self.pcp_list(zone, cpu, order as usize * 3 + number % 3), pfn);
                tally.pcp[cpu] += 1 << order;
            }
            Use::Deferred => {
                if let Some(offset) = self.kernel.zone.deferred {
                    let first = self.zone_at(zone) + offset as u64;
                    self.pen.u64(at(pfn, layout.list), self.pen.read(first));
                    self.pen.u64(first, VMEMMAP + pfn * 64 + layout.list as u64 * 8);
                }
            }
            Use::Page(Kind::Reserved) => tally.reserved += 1 << order,
            Use::Guard | Use::Page(_) => {}
        }
    }
}

/// What a zone has come to hold.
#[derive(Default)]
struct Tally {
    nr_free: [u64; ORDERS as usize],
    /// Free pages by migratetype, and those in free blocks of a pageblock or more.
    free_of: [u64; TYPES.len()],
    whole: u64,
    reserved: u64,
    pcp: [u32; 2],
}

/// Type information of the fake kernel, as `.BTF` holds it.
#[must_use]
pub fn btf() -> Vec<u8> {
    let mut types = Types::default();
    let [char, short, int, long] = [1, 2, 4, 8].map(|bytes| types.int(bytes));
    let list = types.structure("list_head", &[("next", long), ("prev", long)]);
    types.structure_at(
        "page",
        64,
        &[
            ("flags", long, 0),
            ("lru", list, 8),
            ("compound_info", long, 8),
            ("mapping", long, 24),
            ("private", long, 40),
            ("page_type", int, 48),
            ("_refcount", int, 52),
        ],
    );
    // Only by its being there it is known that the order is in the second page's flags.
    types.structure("folio", &[("flags", long)]);
    let lists = types.array(list, TYPES.len() as u32);
    let area = types.structure("free_area", &[("free_list", lists), ("nr_free", long)]);
    let (marks, reserves) = (types.array(long, 4), types.array(long, 2));
    let (areas, counters) = (types.array(area, ORDERS), types.array(long, COUNTERS.len() as u32));
    let zone = types.structure(
        "zone",
        &[
            ("_watermark", marks),
            ("watermark_boost", long),
            ("nr_reserved_highatomic", long),
            ("nr_free_highatomic", long),
            ("lowmem_reserve", reserves),
            ("per_cpu_pageset", long),
            ("per_cpu_zonestats", long),
            ("zone_start_pfn", long),
            ("managed_pages", long),
            ("spanned_pages", long),
            ("present_pages", long),
            ("cma_pages", long),
            ("name", long),
            ("nr_isolate_pageblock", long),
            ("free_area", areas),
            ("flags", long),
            ("lock", int),
            ("trylock_free_pages", long),
            ("vm_stat", counters),
        ],
    );
    let lists = types.array(list, 14);
    types.structure(
        "per_cpu_pages",
        &[
            ("lock", int),
            ("count", int),
            ("high", int),
            ("high_min", int),
            ("high_max", int),
            ("batch", int),
            ("flags", char),
            ("alloc_factor", char),
            ("free_count", short),
            ("lists", lists),
        ],
    );
    let diffs = types.array(char, COUNTERS.len() as u32);
    types.structure("per_cpu_zonestat", &[("vm_stat_diff", diffs), ("stat_threshold", char)]);
    let zones = types.array(zone, 2);
    types.structure("pglist_data", &[("node_zones", zones), ("node_spanned_pages", long), ("node_id", int)]);
    types.structure_at("mem_section", 16, &[("section_mem_map", long, 0), ("usage", long, 8)]);
    types.structure("mem_section_usage", &[("subsection_map", long), ("pageblock_flags", long)]);

    let names: Vec<String> = TYPES.iter().map(|name| format!("MIGRATE_{name}")).collect();
    let mut values: Vec<(&str, u32)> = names.iter().map(String::as_str).zip(0..).collect();
    values.push(("MIGRATE_TYPES", TYPES.len() as u32));
    types.enumeration("migratetype", &values);
    types.enumeration("zone_stat_item", &COUNTERS.into_iter().zip(0..).collect::<Vec<_>>());
    types.enumeration("zone_type", &[("ZONE_DMA32", 0), ("ZONE_NORMAL", 1), ("__MAX_NR_ZONES", 2)]);
    types.enumeration("zone_flags", &[("ZONE_BOOSTED_WATERMARK", 0)]);
    types.enumeration("pageflags", &[("PG_lru", 5), ("PG_head", 6), ("PG_reserved", 12)]);
    types.enumeration(
        "pagetype",
        &[
            ("PGTY_buddy", 0xf0),
            ("PGTY_offline", 0xf1),
            ("PGTY_table", 0xf2),
            ("PGTY_guard", 0xf3),
            ("PGTY_hugetlb", 0xf4),
            ("PGTY_slab", 0xf5),
        ],
    );
    types.enumeration(
        "pageblock_bits",
        &[("PB_compact_skip", 3), ("PB_migrate_isolate", 4), ("__NR_PAGEBLOCK_BITS", 5)],
    );
    types.finish()
}

/// Writes `.BTF` (Documentation/bpf/btf.rst).
#[derive(Default)]
struct Types {
    types: Vec<u8>,
    strings: Vec<u8>,
    /// Size and alignment of each type in bytes.
    sizes: Vec<(u32, u32)>,
}

impl Types {
    const INT: u32 = 1;
    const ARRAY: u32 = 3;
    const STRUCT: u32 = 4;
    const ENUM: u32 = 6;

    /// Offset of a name in the strings, of which the first is empty.
    fn name(&mut self, name: &str) -> u32 {
        let offset = self.strings.len() as u32 + 1;
        self.strings.extend(name.bytes().chain([0]));
        offset
    }

    fn put(&mut self, words: &[u32]) {
        self.types.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    }

    fn add(&mut self, size: (u32, u32), header: [u32; 3], rest: &[u32]) -> u32 {
        self.put(&header);
        self.put(rest);
        self.sizes.push(size);
        self.sizes.len() as u32
    }

    fn size(&self, id: u32) -> (u32, u32) {
        self.sizes[id as usize - 1]
    }

    fn int(&mut self, bytes: u32) -> u32 {
        let name = self.name("int");
        self.add((bytes, bytes), [name, Self::INT << 24, bytes], &[bytes * 8])
    }

    fn array(&mut self, element: u32, count: u32) -> u32 {
        let (size, align) = self.size(element);
        self.add((size * count, align), [0, Self::ARRAY << 24, 0], &[element, element, count])
    }

    /// A structure whose members follow each other.
    fn structure(&mut self, name: &str, members: &[(&str, u32)]) -> u32 {
        let (mut end, mut largest) = (0_u32, 1);
        let mut placed = Vec::new();
        for (name, id) in members {
            let (size, align) = self.size(*id);
            let offset = end.next_multiple_of(align);
            placed.push((*name, *id, offset));
            (end, largest) = (offset + size, largest.max(align));
        }
        self.structure_at(name, end.next_multiple_of(largest), &placed)
    }

    /// A structure whose members lie at the offsets given.
    fn structure_at(&mut self, name: &str, bytes: u32, members: &[(&str, u32, u32)]) -> u32 {
        let mut rest = Vec::new();
        for (name, id, offset) in members {
            rest.extend([self.name(name), *id, offset * 8]);
        }
        let name = self.name(name);
        self.add((bytes, 8), [name, Self::STRUCT << 24 | members.len() as u32, bytes], &rest)
    }

    fn enumeration(&mut self, name: &str, values: &[(&str, u32)]) {
        let mut rest = Vec::new();
        for (name, value) in values {
            rest.extend([self.name(name), *value]);
        }
        let name = self.name(name);
        self.add((4, 4), [name, Self::ENUM << 24 | values.len() as u32, 4], &rest);
    }

    fn finish(self) -> Vec<u8> {
        let (types, strings) = (self.types.len() as u32, self.strings.len() as u32 + 1);
        let mut section = Self::default();
        // Magic and version; length of the header; where types and strings lie behind it, and how long they are.
        section.put(&[0x1_eb9f, 24, 0, types, types, strings]);
        [section.types, self.types, vec![0], self.strings].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{MigrateType, ReadError, State, locks_held};
    use super::*;
    use crate::check::frozen::check;

    #[test]
    fn nothing_is_wrong_with_the_fake_kernel() {
        let kernel = kernel();
        for mib in [16, 256] {
            let state = State::read(&kernel, &ram(&kernel, mib)).expect("it can be read");
            assert_eq!((state.pageblock_order, state.zones.len()), (BLOCK_ORDER, 2));
            for zone in &state.zones {
                assert_eq!(check(&state, zone), [], "zone {}, {mib} MiB", zone.name);
            }
        }
    }

    #[test]
    fn all_that_it_holds_is_seen() {
        let kernel = kernel();
        let state = State::read(&kernel, &ram(&kernel, 16)).expect("it can be read");
        let normal = &state.zones[1];
        assert_eq!((normal.name.as_str(), normal.managed), ("Normal", 2048 - 1));
        let kinds = normal.kinds();
        let pages = |kind: Kind| kinds.of(kind);
        let free = 128 + 64 + 16 + 8 + 1 + 2;
        assert_eq!(pages(Kind::Free), free + 512 + 1024);
        assert_eq!([Kind::Guard, Kind::Pcp, Kind::Deferred, Kind::Lru].map(pages), [8, 10, 2, 8]);
        assert_eq!([Kind::Slab, Kind::PageTable, Kind::Hugetlb, Kind::Reserved].map(pages), [64, 1, 16, 1]);
        assert_eq!(pages(Kind::Other), 2048 - (free + 512 + 1024) - 8 - 10 - 2 - 8 - 64 - 1 - 16 - 1);
        assert_eq!(normal.counter("NR_FREE_PAGES"), Some((free + 512 + 1024).cast_signed()));
        let cma = state.type_number(MigrateType::Cma).expect("CMA");
        assert_eq!(normal.areas[10].lists[cma].pfns, [2048]);
        assert_eq!(normal.block(2048, BLOCK_ORDER).map(|block| block.kind), Some(MigrateType::Cma));
    }
    /// Each copy of a zone takes two bytes for each of its pages.
    #[test]
    fn a_node_that_is_there_many_times_is_refused() {
        let (mut kernel, ram) = (kernel(), image(16).ram().expect("RAM"));
        let array = 7 * PAGE;
        kernel.symbols.insert("node_data".into(), Symbol { address: KERNEL_MAP + array, bytes: 64 * 8 });
        (0..64).for_each(|index| Pen::new(&ram).u64(array + index * 8, KERNEL_MAP + NODE));
        let error = State::read(&kernel, &ram).err();
        assert!(
            matches!(error, Some(ReadError::Unreadable { what, .. }) if what.starts_with("zones")),
            "{error:?}"
        );
    }

    #[test]
    fn symbols_of_any_address_and_size_do_not_panic() {
        let ram = image(16).ram().expect("RAM");
        let names: Vec<String> = kernel().symbols.into_keys().chain(["node_data".into()]).collect();
        for name in &names {
            for (address, bytes) in [(u64::MAX, u64::MAX), (0, 0), (KERNEL_MAP, u64::MAX), (u64::MAX - 7, 8)]
            {
                let mut kernel = kernel();
                kernel.symbols.insert(name.clone(), Symbol { address, bytes });
                let _ = (State::read(&kernel, &ram), locks_held(&kernel, &ram));
            }
        }
    }
}
