//! The allocator's exact state, read out of the RAM of a guest that stands still.
//!
//! Start with [`State::read`]. What cannot be read at all is a [`ReadError`]; what can be read and is impossible is an
//! [`Anomaly`] of its zone, and never stops the reading. Every walk is bounded by the pages of the zone.

mod btf;
mod class;
mod extent;
#[cfg(any(test, feature = "test-support"))]
pub mod fake;

mod kernel;
mod lists;
mod memmap;
#[cfg(any(test, feature = "test-support"))]
pub mod plant;
mod ram;
pub mod render;
mod scan;
mod small;
mod space;

use std::collections::BTreeMap;
use std::io;

pub use class::{Block, Kind, Kinds, PageClass, Part};
pub use extent::Extent;
pub use kernel::{Kernel, MigrateType};
pub use ram::Ram;
pub use small::{SmallError, SmallImage};

use lists::Walk;
use memmap::MemMap;
use space::{KERNEL_MAP, Space};

/// PAGE_SHIFT of x86-64.
const PAGE_SHIFT: u32 = 12;
/// CPUs that are read at most; kernels of ours have at most 64.
const CPUS_MAX: usize = 512;
/// Nodes that are read at most.
const NODES_MAX: usize = 64;
/// All zones together span at most this many times RAM.
const SPANS_MAX: u64 = 4;
/// Kinds and places of anomalies that one zone keeps; the rest is only counted.
const ANOMALIES_MAX: usize = 4096;

/// Why a vmlinux cannot serve to read a guest's RAM. All mean *no verdict*.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The file.
    #[error("failed to read it: {0}")]
    Io(io::Error),
    /// It is no ELF file that can be read.
    #[error("it is no ELF image of a 64-bit kernel: {0}")]
    Elf(String),
    /// Built without type information.
    #[error(
        "it has no type information (.BTF): build the kernel with CONFIG_DEBUG_INFO_BTF=y, and strip it no further than `strip --strip-debug`"
    )]
    NoBtf,
    /// The type information is damaged.
    #[error("its type information (.BTF) cannot be read: {0}")]
    Btf(String),
    /// A type, or a member of one, that every allocator should have.
    #[error("its type information has no {0}: not a kernel this program knows")]
    MissingType(String),
    /// A symbol that every allocator should have.
    #[error("it has no symbol {0}: was the symbol table stripped?")]
    MissingSymbol(String),
    /// Something is not as in the kernels that this program knows.
    #[error("not supported: {0}")]
    Unsupported(String),
}

/// Why a guest's RAM cannot be read. All mean *no verdict*.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// RAM does not hold this kernel.
    #[error(
        "the RAM does not hold this kernel where it was linked to: another vmlinux, or KASLR (boot with nokaslr)"
    )]
    OtherKernel,
    /// A symbol is missing in this configuration.
    #[error("the kernel has no symbol {0}")]
    Symbol(String),
    /// A structure is not where it should be.
    #[error("failed to read {what} at {address:#x}")]
    Unreadable {
        /// What.
        what: &'static str,
        /// Virtual address.
        address: u64,
    },
    /// What type information does not tell could not be derived from the image.
    #[error("failed to derive {0} from the image")]
    Derive(&'static str),
}

/// The state of a whole guest's allocator.
#[derive(Clone, Default)]
pub struct State {
    /// Order of a pageblock: it has `1 << pageblock_order` pages.
    pub pageblock_order: u32,
    /// `debug_guardpage_minorder`: orders below it become guard pages.
    pub guard_minorder: u32,
    /// The migratetypes by number.
    pub types: Vec<MigrateType>,
    /// Whether free pages keep to lists of their block's type ("freelist hygiene", 6.10 and later).
    pub hygiene: bool,
    /// Whether an isolated pageblock keeps its type (7.2 and later).
    pub isolation_keeps_type: bool,
    /// Populated zones, by node and then by index.
    pub zones: Vec<Zone>,
    /// Events of all CPUs since boot, where the kernel counts them.
    pub events: Option<Events>,
    /// What an administrator may have set.
    pub settings: Settings,
}

/// Settings that decide what the allocator does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// vm.watermark_boost_factor, in ten thousandths of the high watermark.
    pub boost_factor: u32,
    /// Whether vm.defrag_mode is on (7.2 and later).
    pub defrag_mode: bool,
    /// Whether the guest is too small to tell migratetypes apart (page_group_by_mobility_disabled).
    pub one_type: bool,
}

impl Default for Settings {
    /// What a kernel starts with.
    fn default() -> Self {
        Self { boost_factor: 15_000, defrag_mode: false, one_type: false }
    }
}

/// Events of the allocator since boot, summed over all CPUs, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Pages allocated (PGALLOC_* of all zones).
    pub allocated: u64,
    /// Pages freed (PGFREE).
    pub freed: u64,
    /// Pages isolated by compaction and for contiguous ranges (COMPACTISOLATED).
    pub isolated: u64,
}

/// The state of one zone. Figures are in pages where nothing else is said.
#[derive(Clone, Default)]
pub struct Zone {
    /// Its node.
    pub node: u32,
    /// Its number in the node (enum zone_type).
    pub index: usize,
    /// Its name: `DMA32`.
    pub name: String,
    /// First pfn of the span.
    pub start: u64,
    /// Pages of the span, holes included.
    pub spanned: u64,
    /// Pages of the span that exist.
    pub present: u64,
    /// Pages that were given to the allocator.
    pub managed: u64,
    /// Pages of CMA areas, where the kernel has CMA.
    pub cma: Option<u64>,
    /// Watermarks: min, low, high, and promo where there is one; without the boost.
    pub watermarks: Vec<u64>,
    /// What every watermark is raised by for now.
    pub boost: u64,
    /// The zone's flags.
    pub flags: u64,
    /// Names of the flags that are set.
    pub flag_names: Vec<String>,
    /// Pages kept from requests that could be served by a higher zone, by that zone's index.
    pub lowmem_reserve: Vec<i64>,
    /// Pages of blocks reserved for HIGHATOMIC, as counted.
    pub reserved_highatomic: u64,
    /// Pages on HIGHATOMIC lists, as counted (6.12 and later).
    pub free_highatomic: Option<u64>,
    /// Isolated pageblocks, as counted.
    pub isolated_blocks: Option<u64>,
    /// Free areas by order.
    pub areas: Vec<Area>,
    /// Counters by number, without the differences that CPUs hold back; signed, for some kernels go below zero.
    pub counters: Vec<i64>,
    /// Names of the counters.
    pub counter_names: Vec<String>,
    /// What each possible CPU holds.
    pub cpus: Vec<Cpu>,
    /// Pages on their way to the free lists, first pfn and order (7.2 and later).
    pub deferred: Vec<(u32, u32)>,
    /// Number of the zone's first pageblock.
    pub first_block: u64,
    /// Its pageblocks in order; none where there is no memory map.
    pub blocks: Vec<Option<Block>>,
    /// Each page of the span.
    pub pages: Vec<PageClass>,
    /// What should not be.
    pub anomalies: Anomalies,
}

/// The free area of one order.
#[derive(Clone)]
pub struct Area {
    /// Free blocks, as counted.
    pub nr_free: u64,
    /// Free lists by number of the migratetype.
    pub lists: Vec<FreeList>,
}

/// A free list.
#[derive(Clone, Default)]
pub struct FreeList {
    /// First pfns of its blocks, head first.
    pub pfns: Vec<u32>,
    /// Whether the walk had to be given up: there are more blocks than are listed here.
    pub broken: bool,
}

/// What one CPU holds of a zone.
#[derive(Clone, Default)]
pub struct Cpu {
    /// Its number.
    pub number: usize,
    /// Whether it is online.
    pub online: bool,
    /// Its per-CPU pages.
    pub pcp: Pcp,
    /// Differences of the zone's counters that are not yet folded in, by number; none on SMP=n.
    pub diffs: Vec<i8>,
    /// Size from which a difference is folded in; none on SMP=n.
    pub threshold: Option<i8>,
}

impl Cpu {
    /// What it holds back of a counter.
    #[must_use]
    pub fn held_back(&self, number: usize) -> i64 {
        self.diffs.get(number).copied().unwrap_or(0).into()
    }
}

/// The per-CPU pages of a zone (struct per_cpu_pages).
#[derive(Clone, Default)]
pub struct Pcp {
    /// Pages on the lists, as counted.
    pub count: i32,
    /// From here on pages go back to the free lists.
    pub high: i32,
    /// Least and greatest `high` (6.12 and later).
    pub high_range: Option<(i32, i32)>,
    /// Pages that go at a time.
    pub batch: i32,
    /// PCPF_* (6.12 and later).
    pub flags: Option<u8>,
    /// See nr_pcp_alloc() (6.12 and later).
    pub alloc_factor: Option<u8>,
    /// See free_frozen_page_commit() (6.12 and later), and before that `free_factor`.
    pub free_count: Option<i16>,
    /// The lists by number: 3 a order up to 3, and then those of huge pages.
    pub lists: Vec<PcpList>,
}

/// A per-CPU list.
#[derive(Clone, Default)]
pub struct PcpList {
    /// Order of its pages.
    pub order: u32,
    /// First pfns, head first.
    pub pfns: Vec<u32>,
    /// Numbers of the types that the pages were put there with, which need no longer be those of their pageblocks: where
    /// free lists do not keep to them, and nothing elsewhere.
    pub types: Vec<u8>,
    /// Whether the walk had to be given up.
    pub broken: bool,
}

/// Something that is on a list, or marked, and should not be so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// A link leads to no struct page.
    WildLink,
    /// The link back does not lead to where the walk came from.
    BackLink,
    /// A page is on a list and was already found on a list.
    ListedTwice,
    /// A page of another zone is on a list of this one.
    OtherZone,
    /// A page on a free list is not marked as free (PageBuddy).
    NotBuddy,
    /// A guard page is on a free list.
    GuardListed,
    /// A page marked as free is on no list.
    NotListed,
    /// The order that a free page holds is not its list's.
    WrongOrder,
    /// A free block does not begin at a multiple of its size, or reaches out of the zone.
    Misplaced,
    /// A free page, or a part of a free block, has references.
    Referenced,
    /// A page inside a free block is marked as free, or as guard, or is on a list itself.
    Overlap,
    /// A page on a per-CPU list is marked as free, or as guard.
    PcpMarked,
    /// A page on a per-CPU list has references.
    PcpReferenced,
    /// A guard page holds an impossible order.
    GuardOrder,
    /// A page inside a free block, or on a per-CPU list, still holds what its last owner left in `private`.
    StalePrivate,
}

/// A fault of one kind in one pageblock, or of one list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Anomaly {
    /// The first pfn that shows it.
    pub pfn: u64,
    /// How many pages, or blocks, show it.
    pub count: u64,
    /// The list, for faults of lists.
    pub place: Option<Place>,
    /// What should be found at the first one: an order, an address, a number of references.
    pub expected: u64,
    /// What was.
    pub found: u64,
}

/// A list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// A free list: order, number of the migratetype.
    Free(u32, usize),
    /// A per-CPU list: CPU, number of the list.
    Pcp(usize, usize),
    /// `trylock_free_pages`.
    Deferred,
}

/// The anomalies of a zone, by what they are and where: a thousand bad pages in one block are one.
#[derive(Clone, Default)]
pub struct Anomalies {
    found: BTreeMap<(Fault, Option<Place>, u64), Anomaly>,
    /// Anomalies that were not kept, since there were too many.
    pub dropped: u64,
}

impl Anomalies {
    fn add(&mut self, fault: Fault, block: u64, anomaly: Anomaly) {
        let full = self.found.len() >= ANOMALIES_MAX;
        match self.found.get_mut(&(fault, anomaly.place, block)) {
            Some(known) => known.count += 1,
            None if full => self.dropped += 1,
            None => drop(self.found.insert((fault, anomaly.place, block), anomaly)),
        }
    }

    /// All of one kind.
    pub fn of(&self, fault: Fault) -> impl Iterator<Item = &Anomaly> {
        self.found.iter().filter(move |((kind, ..), _)| *kind == fault).map(|(_, anomaly)| anomaly)
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.found.is_empty() && self.dropped == 0
    }
}

/// Whether a kernel clears `page->private` of every page that it frees: free_pages_prepare() in mm/page_alloc.c does from 7.2,
/// 6.12.93 and 6.1.176 on. Nothing else in a kernel tells, so of lines that got it later than their first release only those
/// are known that were looked at.
fn clears_private(banner: &str) -> bool {
    let Some(release) = banner.strip_prefix("Linux version ") else { return false };
    let mut numbers =
        release.split(|char: char| !char.is_ascii_digit()).map(|part| part.parse::<u32>().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    match (next(), next(), next()) {
        (6, 1, stable) => stable >= 176,
        (6, 12, stable) => stable >= 93,
        (major, minor, _) => (major, minor) >= (7, 2),
    }
}

impl State {
    /// Reads the allocator's state out of `ram`, in which `kernel` runs and nothing moves.
    ///
    /// # Errors
    /// See [`ReadError`]. Damage that the guest did to its own lists is no error: see [`Zone::anomalies`].
    pub fn read(kernel: &Kernel, ram: &Ram) -> Result<Self, ReadError> {
        Self::read_in(kernel, &space(kernel, ram)?)
    }

    fn read_in(kernel: &Kernel, space: &Space<'_>) -> Result<Self, ReadError> {
        let map = MemMap::read(kernel, space)?;
        let nodes = nodes(kernel, space)?;
        let cpus = Cpus::read(kernel, space)?;
        let (mut zones, mut spanned) = (Vec::new(), 0);
        for node in nodes {
            for index in 0..kernel.zones {
                let address = zone_at(kernel, node, index);
                let zone = Zone::read(kernel, space, &map, &cpus, node, index, address)?;
                spanned += zone.as_ref().map_or(0, |zone| zone.spanned);
                // Zones of several nodes may overlap, but a guest could make hundreds out of one.
                if spanned > SPANS_MAX * map.end() {
                    return Err(ReadError::Unreadable { what: "zones: they span more than RAM", address });
                }
                zones.extend(zone);
            }
        }
        let events = Events::read(kernel, space, &cpus);
        let hygiene = kernel.zone.free_highatomic.is_some();
        let pageblock_order = pageblock_order(kernel, &map, &zones)?;
        let guard_minorder = match kernel.symbol("_debug_guardpage_minorder") {
            Some(symbol) => space.u32(symbol.address).unwrap_or(0),
            None => 0,
        };
        let marks = scan::ZoneBits::derive(kernel, &map, &zones)?;
        let banner = kernel.symbol("linux_banner").and_then(|symbol| space.bytes(symbol.address, 40));
        let clears = banner.is_some_and(|banner| clears_private(&String::from_utf8_lossy(&banner)));
        for zone in &mut zones {
            zone.read_blocks(kernel, &map, pageblock_order);
            scan::scan(kernel, &map, marks, pageblock_order, clears, zone);
        }
        Ok(Self {
            pageblock_order,
            guard_minorder,
            types: kernel.types.clone(),
            hygiene,
            isolation_keeps_type: kernel.section.isolate_bit.is_some(),
            zones,
            events,
            settings: Settings::read(kernel, space),
        })
    }

    /// Number of a migratetype in this kernel.
    #[must_use]
    pub fn type_number(&self, kind: MigrateType) -> Option<usize> {
        self.types.iter().position(|known| *known == kind)
    }

    /// What NR_FREE_PAGES of a zone should be: the pages on its free lists but the isolated ones, and pages not yet accepted.
    #[must_use]
    pub fn countable_pages(&self, zone: &Zone) -> i64 {
        let isolate = self.type_number(MigrateType::Isolate);
        let listed = zone.listed_pages(|number| Some(number) != isolate);
        0_i64.saturating_add_unsigned(listed).saturating_add(zone.counter("NR_UNACCEPTED").unwrap_or(0))
    }

    /// What is missing from NR_FREE_PAGES of a zone, with what CPUs hold back of it.
    #[must_use]
    pub fn delta(&self, zone: &Zone) -> i64 {
        self.countable_pages(zone).saturating_sub(zone.counter("NR_FREE_PAGES").unwrap_or(0))
    }

    /// Pages of a pageblock.
    #[must_use]
    pub fn pageblock_pages(&self) -> u64 {
        1 << self.pageblock_order
    }
}

/// The locks of the allocator that are held: `DMA32`'s, or that of its per-CPU lists. Lists under a held lock may be in the
/// middle of a change; a guest must then run on a little. Kernels without SMP have no locks to look at.
///
/// # Errors
/// See [`ReadError`].
pub fn locks_held(kernel: &Kernel, ram: &Ram) -> Result<Vec<String>, ReadError> {
    let space = space(kernel, ram)?;
    let cpus = Cpus::read(kernel, &space)?;
    let mut held = Vec::new();
    for node in nodes(kernel, &space)? {
        for index in 0..kernel.zones {
            let zone = zone_at(kernel, node, index);
            let at = |offset: usize| zone.wrapping_add(offset as u64);
            if space.u64(at(kernel.zone.present)).unwrap_or(0) == 0 {
                continue;
            }
            let name =
                space.u64(at(kernel.zone.name)).and_then(|name| space.string(name, 16)).unwrap_or_default();
            if kernel.zone.lock.and_then(|lock| space.u32(at(lock))).is_some_and(|lock| lock != 0) {
                held.push(format!("zone {name}"));
            }
            let Some(pageset) = space.u64(at(kernel.zone.pageset)) else { continue };
            for (number, _, offset) in &cpus.list {
                let pcp = pageset.wrapping_add(*offset);
                let lock = kernel.pcp.lock.and_then(|lock| space.u32(pcp.wrapping_add(lock as u64)));
                if lock.is_some_and(|lock| lock != 0) {
                    held.push(format!("per-CPU lists of zone {name}, CPU {number}"));
                }
            }
        }
    }
    Ok(held)
}

/// Reads every word of every struct page once: how many struct pages there are, and the sum of their words. What reading a
/// state is measured against.
///
/// # Errors
/// See [`ReadError`].
pub fn struct_pages_sum(kernel: &Kernel, ram: &Ram) -> Result<(u64, u64), ReadError> {
    use std::sync::atomic::Ordering;
    let space = space(kernel, ram)?;
    let map = MemMap::read(kernel, &space)?;
    let (mut count, mut sum) = (0, 0_u64);
    for pfn in (0..map.end()).step_by(64) {
        let Some(frame) = map.frame(pfn) else { continue };
        count += 64;
        for word in frame.iter().flatten() {
            sum = sum.wrapping_add(word.load(Ordering::Relaxed));
        }
    }
    Ok((count, sum))
}

/// The kernel's address space, once it is certain that this kernel runs there.
fn space<'a>(kernel: &Kernel, ram: &'a Ram) -> Result<Space<'a>, ReadError> {
    let symbol = |name: &str| kernel.symbol(name).ok_or_else(|| ReadError::Symbol(name.to_owned()));
    let root = symbol("init_top_pgt")?.address.wrapping_sub(KERNEL_MAP);
    let levels = match kernel.symbol("__pgtable_l5_enabled") {
        // Physical, since there is no space to look in yet.
        Some(flag) => {
            let at = flag.address.wrapping_sub(KERNEL_MAP);
            let word = ram.word(at & !7).ok_or(ReadError::OtherKernel)?;
            if (word >> (8 * (at & 4))) as u32 == 0 { 4 } else { 5 }
        }
        None => 4,
    };
    let space = Space::new(ram, root, levels);
    let phys_base = symbol("phys_base")?;
    // Zero where the kernel runs at the address it was linked to.
    if space.u64(phys_base.address) != Some(0) {
        return Err(ReadError::OtherKernel);
    }
    if let Some((address, bytes)) = &kernel.notes
        && space.bytes(*address, bytes.len()).as_deref() != Some(bytes)
    {
        return Err(ReadError::OtherKernel);
    }
    Ok(space)
}

/// Virtual addresses of the nodes' struct pglist_data.
fn nodes(kernel: &Kernel, space: &Space<'_>) -> Result<Vec<u64>, ReadError> {
    if let Some(data) = kernel.symbol("node_data") {
        let mut nodes = Vec::new();
        for index in 0..(data.bytes / 8).min(NODES_MAX as u64) {
            let unreadable = ReadError::Unreadable { what: "node_data", address: data.address };
            let node = space.u64(data.address.wrapping_add(index * 8)).ok_or(unreadable)?;
            // Nodes without memory may have an entry.
            if node != 0 && space.u64(node.wrapping_add(kernel.node.spanned as u64)).unwrap_or(0) != 0 {
                nodes.push(node);
            }
        }
        if !nodes.is_empty() {
            return Ok(nodes);
        }
    }
    Ok(vec![
        kernel
            .symbol("contig_page_data")
            .ok_or_else(|| ReadError::Symbol("contig_page_data".into()))?
            .address,
    ])
}

/// Virtual address of a node's struct zone.
fn zone_at(kernel: &Kernel, node: u64, index: usize) -> u64 {
    // The address of the node is the guest's word.
    node.wrapping_add(kernel.node.zones as u64 + index as u64 * kernel.zone.bytes)
}

/// The possible CPUs: number, whether online, and what is added to a per-CPU address.
struct Cpus {
    list: Vec<(usize, bool, u64)>,
}

impl Cpus {
    fn read(kernel: &Kernel, space: &Space<'_>) -> Result<Self, ReadError> {
        let Some(offsets) = kernel.symbol("__per_cpu_offset") else {
            // SMP=n: per-CPU variables are plain ones.
            return Ok(Self { list: vec![(0, true, 0)] });
        };
        let mask = |name: &str| {
            let symbol = kernel.symbol(name).ok_or_else(|| ReadError::Symbol(name.to_owned()))?;
            let words = (symbol.bytes / 8).clamp(1, (CPUS_MAX / 64) as u64) as usize;
            let unreadable = ReadError::Unreadable { what: "a CPU mask", address: symbol.address };
            space.words(symbol.address, words).ok_or(unreadable)
        };
        let (possible, online) = (mask("__cpu_possible_mask")?, mask("__cpu_online_mask")?);
        let has =
            |mask: &[u64], cpu: usize| mask.get(cpu / 64).is_some_and(|word| word >> (cpu % 64) & 1 == 1);
        let mut list = Vec::new();
        for cpu in (0..CPUS_MAX.min((offsets.bytes / 8) as usize)).filter(|cpu| has(&possible, *cpu)) {
            let address = offsets.address.wrapping_add(cpu as u64 * 8);
            let unreadable = ReadError::Unreadable { what: "__per_cpu_offset", address };
            list.push((cpu, has(&online, cpu), space.u64(address).ok_or(unreadable)?));
        }
        Ok(Self { list })
    }
}

impl Settings {
    /// A kernel that has no such setting, or whose symbols do not tell, does as one that nobody has set.
    fn read(kernel: &Kernel, space: &Space<'_>) -> Self {
        let int = |name: &str| space.u32(kernel.symbol(name)?.address);
        let default = Self::default();
        Self {
            boost_factor: int("watermark_boost_factor").unwrap_or(default.boost_factor),
            defrag_mode: int("defrag_mode").is_some_and(|mode| mode != 0),
            one_type: int("page_group_by_mobility_disabled").is_some_and(|disabled| disabled != 0),
        }
    }
}

impl Events {
    fn read(kernel: &Kernel, space: &Space<'_>, cpus: &Cpus) -> Option<Self> {
        let states = kernel.symbol("vm_event_states")?;
        let mut events = Self::default();
        for (_, _, offset) in &cpus.list {
            for (number, name) in kernel.events.iter().enumerate() {
                let sum = match name.as_str() {
                    "PGFREE" => &mut events.freed,
                    "COMPACTISOLATED" => &mut events.isolated,
                    name if name.starts_with("PGALLOC_") => &mut events.allocated,
                    _ => continue,
                };
                let at = states.address.wrapping_add(*offset).wrapping_add(number as u64 * 8);
                *sum = sum.wrapping_add(space.u64(at)?);
            }
        }
        Some(events)
    }
}

impl Zone {
    /// Reads all but pages and blocks; none where the zone has no memory.
    fn read(
        kernel: &Kernel,
        space: &Space<'_>,
        map: &MemMap<'_>,
        cpus: &Cpus,
        node: u64,
        index: usize,
        address: u64,
    ) -> Result<Option<Self>, ReadError> {
        let layout = &kernel.zone;
        let unreadable = |what| ReadError::Unreadable { what, address };
        let long = |offset: usize| space.u64(address.wrapping_add(offset as u64)).ok_or(unreadable("a zone"));
        let present = long(layout.present)?;
        if present == 0 {
            return Ok(None);
        }
        let (start, spanned) = (long(layout.start_pfn)?, long(layout.spanned)?);
        if start.checked_add(spanned).is_none_or(|end| end > map.end()) {
            return Err(unreadable("a zone: its span is larger than RAM"));
        }
        let name = space.string(long(layout.name)?, 16).ok_or_else(|| unreadable("a zone's name"))?;
        let longs = |offset: usize, count: usize| -> Result<Vec<u64>, ReadError> {
            (0..count).map(|index| long(offset + index * 8)).collect()
        };
        let flags = long(layout.flags)?;
        let flag_names = kernel.zone_flags.iter().enumerate();
        let flag_names = flag_names.filter(|(bit, _)| flags >> bit & 1 == 1).map(|(_, name)| name.clone());
        let node_id = node.wrapping_add(kernel.node.id as u64);
        let mut zone = Self {
            node: space.u32(node_id).ok_or_else(|| unreadable("a node's number"))?,
            index,
            name,
            start,
            spanned,
            present,
            managed: long(layout.managed)?,
            cma: layout.cma.map(long).transpose()?,
            watermarks: longs(layout.watermark, layout.watermarks)?,
            boost: long(layout.boost)?,
            flags,
            flag_names: flag_names.collect(),
            lowmem_reserve: longs(layout.lowmem_reserve, kernel.zones)?
                .into_iter()
                .map(u64::cast_signed)
                .collect(),
            reserved_highatomic: long(layout.reserved_highatomic)?,
            free_highatomic: layout.free_highatomic.map(long).transpose()?,
            isolated_blocks: layout.isolated.map(long).transpose()?,
            areas: Vec::new(),
            counters: longs(layout.vm_stat, kernel.counters.len())?
                .into_iter()
                .map(u64::cast_signed)
                .collect(),
            counter_names: kernel.counters.clone(),
            cpus: Vec::new(),
            deferred: Vec::new(),
            first_block: 0,
            blocks: Vec::new(),
            pages: vec![PageClass::default(); spanned as usize],
            anomalies: Anomalies::default(),
        };
        let marks = scan::Marks::new(kernel.page.scheme);
        let mut walk = Walk { kernel, space, map, zone: &mut zone, marks: &marks };
        let areas = walk.free_areas(address)?;
        let (pageset, stats) = (long(layout.pageset)?, long(layout.zonestats)?);
        let mut held = Vec::new();
        for (number, online, offset) in &cpus.list {
            held.push(walk.cpu(
                *number,
                *online,
                pageset.wrapping_add(*offset),
                stats.wrapping_add(*offset),
            )?);
        }
        let deferred = match layout.deferred {
            Some(offset) => walk.deferred(long(offset)?),
            None => Vec::new(),
        };
        zone.areas = areas;
        zone.cpus = held;
        zone.deferred = deferred;
        Ok(Some(zone))
    }

    fn read_blocks(&mut self, kernel: &Kernel, map: &MemMap<'_>, order: u32) {
        if self.spanned == 0 {
            return;
        }
        self.first_block = self.start >> order;
        let last = (self.start + self.spanned - 1) >> order;
        self.blocks =
            (self.first_block..=last).map(|block| block_at(kernel, map, block << order, order)).collect();
    }

    /// First pfn behind the span.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start + self.spanned
    }

    /// The class of a pfn; none outside the span.
    #[must_use]
    pub fn class(&self, pfn: u64) -> Option<PageClass> {
        self.pages.get(usize::try_from(pfn.checked_sub(self.start)?).ok()?).copied()
    }

    /// The pageblock that a pfn lies in.
    #[must_use]
    pub fn block(&self, pfn: u64, pageblock_order: u32) -> Option<Block> {
        let index = (pfn >> pageblock_order).checked_sub(self.first_block)?;
        *self.blocks.get(usize::try_from(index).ok()?)?
    }

    /// Its name in reports, with its node where that is not 0.
    #[must_use]
    pub fn label(&self) -> String {
        if self.node == 0 { self.name.clone() } else { format!("node {} {}", self.node, self.name) }
    }

    /// Number of the counter of this name.
    #[must_use]
    pub fn counter_number(&self, name: &str) -> Option<usize> {
        self.counter_names.iter().position(|known| known == name)
    }

    /// A counter with what every CPU holds back of it.
    #[must_use]
    pub fn counter(&self, name: &str) -> Option<i64> {
        let number = self.counter_number(name)?;
        Some(self.counters.get(number)?.saturating_add(self.held_back(number)))
    }

    /// What all CPUs together hold back of a counter.
    #[must_use]
    pub fn held_back(&self, number: usize) -> i64 {
        self.cpus.iter().map(|cpu| cpu.held_back(number)).sum()
    }

    /// Pages on the free lists of the migratetypes for which `wanted` holds, isolated ones apart only if it says so.
    #[must_use]
    pub fn listed_pages(&self, wanted: impl Fn(usize) -> bool) -> u64 {
        let mut pages = 0;
        for (order, area) in self.areas.iter().enumerate() {
            for (_, list) in area.lists.iter().enumerate().filter(|(number, _)| wanted(*number)) {
                pages += (list.pfns.len() as u64) << order;
            }
        }
        pages
    }

    /// Pages of each kind.
    #[must_use]
    pub fn kinds(&self) -> Kinds {
        // Several tables, for neighbours are of one kind as a rule, and would wait for each other's count.
        let mut tables = [[0_u64; 16]; 4];
        let (fours, rest) = self.pages.as_chunks::<4>();
        for four in fours {
            for (table, class) in tables.iter_mut().zip(four) {
                table[class.kind_number()] += 1;
            }
        }
        for class in rest {
            tables[0][class.kind_number()] += 1;
        }
        Kinds(std::array::from_fn(|kind| tables.iter().map(|table| table[kind]).sum()))
    }

    /// Whether any walk over its free lists had to be given up: counts of them then mean nothing.
    #[must_use]
    pub fn has_broken_lists(&self) -> bool {
        self.areas.iter().any(|area| area.lists.iter().any(|list| list.broken))
    }
}

/// The pageblock that `pfn` lies in.
fn block_at(kernel: &Kernel, map: &MemMap<'_>, pfn: u64, order: u32) -> Option<Block> {
    let bits = map.block_bits(kernel, pfn, order)?;
    let number = usize::from(bits & 7);
    let kind = kernel.types.get(number).copied().unwrap_or(MigrateType::Unknown);
    let isolated = match kernel.section.isolate_bit {
        Some(bit) => bits >> bit & 1 == 1,
        None => kind == MigrateType::Isolate,
    };
    Some(Block { kind, number, skip: bits >> kernel.section.skip_bit & 1 == 1, isolated })
}

/// pageblock_order is a macro: it is derived from how far apart the bitmaps of sections lie, or else by trying which order
/// makes the types of the blocks fit the free lists; either way it is held against the lists.
fn pageblock_order(kernel: &Kernel, map: &MemMap<'_>, zones: &[Zone]) -> Result<u32, ReadError> {
    /// Blocks that are looked at for each order.
    const ENOUGH: usize = 4096;
    let isolate = kernel.type_number(MigrateType::Isolate);
    let misfits = |order: u32| {
        let (mut seen, mut wrong) = (0_usize, 0_usize);
        for zone in zones {
            for (number, list) in zone.areas.iter().flat_map(|area| area.lists.iter().enumerate()) {
                for pfn in list.pfns.iter().take(ENOUGH) {
                    let block = block_at(kernel, map, u64::from(*pfn), order);
                    let fits = block.is_some_and(|block| {
                        if block.isolated { Some(number) == isolate } else { block.number == number }
                    });
                    seen += 1;
                    wrong += usize::from(!fits);
                }
            }
        }
        (seen, wrong)
    };
    let order = match map.block_order_by_distance(kernel) {
        Some(order) => order,
        // What it is with huge pages, then what it is without; other orders have to be asked for.
        None => {
            let orders = [9, 10, 8, 7, 6, 5, 4, 3, 2, 1];
            orders
                .into_iter()
                .min_by_key(|order| misfits(*order).1)
                .ok_or(ReadError::Derive("the pageblock order"))?
        }
    };
    let (seen, wrong) = misfits(order);
    if wrong > seen / 2 {
        return Err(ReadError::Derive("the pageblock order"));
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::clears_private;

    #[test]
    fn a_banner_tells_whether_private_is_cleared() {
        for release in ["7.2.13 (a@b) #1", "8.0.0-rc1", "6.12.93", "6.12.117+", "6.1.192"] {
            assert!(clears_private(&format!("Linux version {release}")), "{release}");
        }
        for release in ["7.1.9 (a@b) #1", "6.18.3", "6.12.92", "6.12-rc1", "6.1.175", "5.10.200", ""] {
            assert!(!clears_private(&format!("Linux version {release}")), "{release}");
        }
        assert!(!clears_private("something else 7.2"));
    }
}
