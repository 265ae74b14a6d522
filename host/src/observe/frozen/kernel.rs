//! What a reader of guest RAM has to know of the very kernel that runs in it: offsets, enumerations, symbols.

use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

use object::read::elf::{ElfFile64, Sym};
use object::{Endianness, Object, ObjectSection, ReadCache};

use super::btf::{BTF_MAX_BYTES, Btf, string};
use super::{ImageError, Ram, ReadError, render};

/// A struct page in bytes. x86-64 kernels align it to 64; others only have another size under debugging options that
/// no fragment of ours sets.
pub(super) const PAGE_STRUCT_BYTES: u64 = 64;
/// An ELF file with more symbols than this is refused.
const SYMBOLS_MAX: usize = 4 << 20;
/// Free lists of more orders, or types, than this are no page allocator's.
const ORDERS_MAX: usize = 16;
const TYPES_MAX: usize = 8;
/// Counters of a zone that are kept; kernels have about a dozen.
const COUNTERS_MAX: usize = 64;

/// A kernel image, as far as its allocator can be read by it.
pub struct Kernel {
    pub(super) symbols: HashMap<String, Symbol>,
    /// Address and bytes of the notes, which hold the build id: RAM must show the same.
    pub(super) notes: Option<(u64, Vec<u8>)>,
    pub(super) page: PageLayout,
    pub(super) zone: ZoneLayout,
    pub(super) area: AreaLayout,
    pub(super) pcp: PcpLayout,
    pub(super) node: NodeLayout,
    pub(super) section: SectionLayout,
    /// Names of the migratetypes by number.
    pub(super) types: Vec<MigrateType>,
    /// Names of the counters of a zone by number.
    pub(super) counters: Vec<String>,
    /// Names of the zone flags by bit.
    pub(super) zone_flags: Vec<String>,
    /// Number of zones that a node may have.
    pub(super) zones: usize,
    /// Names of the events by number (enum vm_event_item); empty without CONFIG_VM_EVENT_COUNTERS.
    pub(super) events: Vec<String>,
    /// Bits of the page flags that `render` copies, as far as this kernel has them.
    pub(super) page_flags: HashMap<&'static str, u32>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Symbol {
    pub(super) address: u64,
    pub(super) bytes: u64,
}

/// A migratetype: what the allocator groups pages by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MigrateType {
    /// MIGRATE_UNMOVABLE.
    Unmovable,
    /// MIGRATE_MOVABLE.
    Movable,
    /// MIGRATE_RECLAIMABLE.
    Reclaimable,
    /// MIGRATE_HIGHATOMIC.
    HighAtomic,
    /// MIGRATE_CMA.
    Cma,
    /// MIGRATE_ISOLATE.
    Isolate,
    /// One that this program does not know.
    Unknown,
}

impl MigrateType {
    /// All that are known, as a kernel with CMA and isolation numbers them.
    pub const ALL: [Self; 6] =
        [Self::Unmovable, Self::Movable, Self::Reclaimable, Self::HighAtomic, Self::Cma, Self::Isolate];

    fn by_name(name: &str) -> Option<Self> {
        Some(match name {
            "MIGRATE_UNMOVABLE" => Self::Unmovable,
            "MIGRATE_MOVABLE" => Self::Movable,
            "MIGRATE_RECLAIMABLE" => Self::Reclaimable,
            // MIGRATE_PCPTYPES has the same number.
            "MIGRATE_HIGHATOMIC" => Self::HighAtomic,
            "MIGRATE_CMA" => Self::Cma,
            "MIGRATE_ISOLATE" => Self::Isolate,
            _ => return None,
        })
    }

    /// Its name as pagetypeinfo prints it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unmovable => "Unmovable",
            Self::Movable => "Movable",
            Self::Reclaimable => "Reclaimable",
            Self::HighAtomic => "HighAtomic",
            Self::Cma => "CMA",
            Self::Isolate => "Isolate",
            Self::Unknown => "unknown",
        }
    }
}

/// How a kernel marks what a page is.
#[derive(Clone, Copy, Debug)]
pub(super) enum TypeScheme {
    /// The top byte of `page_type` is a PGTY_* value (6.12 and later).
    Byte {
        buddy: u8,
        offline: u8,
        table: u8,
        guard: u8,
        hugetlb: Option<u8>,
        slab: Option<u8>,
        unaccepted: Option<u8>,
    },
    /// Bits of `page_type` that are clear where the type is set (6.1): PAGE_TYPE_BASE and PG_* of
    /// include/linux/page-flags.h, which are macros there and in no type information.
    Bits,
}

pub(super) struct PageLayout {
    /// Index of the word with the flags, of the two words of the list node, of the private word, and of the word with
    /// page_type (low half) and _refcount (high half).
    pub(super) flags: usize,
    pub(super) list: usize,
    pub(super) private: usize,
    pub(super) kind: usize,
    /// Index of the word in which a page on a per-CPU list keeps its type, where it does (get_pcppage_migratetype()).
    pub(super) index: Option<usize>,
    /// Index of the word whose lowest bit marks a tail page.
    pub(super) compound: usize,
    pub(super) scheme: TypeScheme,
    /// Where the second page of a compound page keeps the order: a bit offset into the word of this index.
    pub(super) order: (usize, u32),
    /// Where it keeps the destructor's number, and the number that means hugetlb (6.1).
    pub(super) hugetlb: Option<(usize, u32, u8)>,
    /// Whether kpageflags is rendered from snapshots of folios (7.x), by the type that holds one.
    pub(super) snapshots: bool,
    /// Index of the word with the mapping.
    pub(super) mapping: usize,
    /// Where the second page of a compound page counts mappings of the whole, from -1 on: a bit offset into a word.
    pub(super) mapcount: Option<(usize, u32)>,
    /// Bits of the flags word.
    pub(super) lru: u32,
    pub(super) head: u32,
    pub(super) reserved: u32,
    /// Slab pages were marked by a flag before they had a type.
    pub(super) slab: Option<u32>,
}

pub(super) struct ZoneLayout {
    pub(super) bytes: u64,
    pub(super) watermark: usize,
    pub(super) watermarks: usize,
    pub(super) boost: usize,
    pub(super) reserved_highatomic: usize,
    pub(super) free_highatomic: Option<usize>,
    pub(super) lowmem_reserve: usize,
    pub(super) pageset: usize,
    pub(super) zonestats: usize,
    pub(super) start_pfn: usize,
    pub(super) managed: usize,
    pub(super) spanned: usize,
    pub(super) present: usize,
    pub(super) cma: Option<usize>,
    pub(super) name: usize,
    pub(super) isolated: Option<usize>,
    pub(super) free_area: usize,
    pub(super) orders: usize,
    pub(super) flags: usize,
    /// The lock, where the kernel's locks have a state.
    pub(super) lock: Option<usize>,
    pub(super) deferred: Option<usize>,
    pub(super) vm_stat: usize,
}

pub(super) struct AreaLayout {
    pub(super) bytes: usize,
    pub(super) lists: usize,
    pub(super) nr_free: usize,
}

pub(super) struct PcpLayout {
    pub(super) lock: Option<usize>,
    pub(super) count: usize,
    pub(super) high: usize,
    pub(super) batch: usize,
    pub(super) high_min: Option<usize>,
    pub(super) high_max: Option<usize>,
    pub(super) flags: Option<usize>,
    pub(super) alloc_factor: Option<usize>,
    pub(super) free_count: Option<usize>,
    pub(super) free_factor: Option<usize>,
    pub(super) lists: usize,
    pub(super) list_count: usize,
    /// Differences of the counters, and the threshold, where the kernel keeps them (SMP).
    pub(super) diffs: Option<(usize, usize)>,
    pub(super) threshold: Option<usize>,
}

pub(super) struct NodeLayout {
    pub(super) zones: usize,
    pub(super) spanned: usize,
    pub(super) id: usize,
}

pub(super) struct SectionLayout {
    pub(super) bytes: u64,
    pub(super) mem_map: usize,
    pub(super) usage: usize,
    pub(super) pageblock_flags: usize,
    /// Bits that each pageblock has, and which of them say "skip" and "isolated".
    pub(super) block_bits: u32,
    pub(super) skip_bit: u32,
    pub(super) isolate_bit: Option<u32>,
}

/// Events that are known at most; kernels have about a hundred.
const EVENTS_MAX: usize = 512;
/// Words of a variable that are read at most.
const VARIABLE_MAX_WORDS: u64 = 4096;

/// Symbols that the reader uses; the second column says whether every kernel has it.
const SYMBOLS: [(&str, bool); 21] = [
    ("contig_page_data", false),
    ("node_data", false),
    ("mem_section", true),
    ("init_top_pgt", true),
    ("phys_base", true),
    ("__per_cpu_offset", false),
    ("__cpu_possible_mask", false),
    ("__cpu_online_mask", false),
    ("_debug_guardpage_minorder", false),
    ("_debug_guardpage_enabled", false),
    ("__pgtable_l5_enabled", false),
    ("empty_zero_page", false),
    ("zero_pfn", false),
    ("zero_page_pfn", false),
    ("huge_zero_pfn", false),
    ("vm_event_states", false),
    ("watermark_boost_factor", false),
    ("defrag_mode", false),
    ("page_group_by_mobility_disabled", false),
    ("linux_banner", false),
    // The memory of our driver (crate::batch).
    ("buddydiff_batch", false),
];

/// What is read of a vmlinux.
pub(super) struct Parts {
    pub(super) btf: Vec<u8>,
    pub(super) symbols: HashMap<String, Symbol>,
    pub(super) notes: Option<(u64, Vec<u8>)>,
}

impl Parts {
    /// Reads an ELF vmlinux: its symbols and type information, not its code.
    pub(super) fn read(vmlinux: &Path, variables: &[String]) -> Result<Self, ImageError> {
        let file = File::open(vmlinux).map_err(ImageError::Io)?;
        let cache = ReadCache::new(file);
        let elf =
            ElfFile64::<Endianness, _>::parse(&cache).map_err(|error| ImageError::Elf(error.to_string()))?;
        let section = elf.section_by_name(".BTF").ok_or(ImageError::NoBtf)?;
        if section.size() > BTF_MAX_BYTES as u64 {
            return Err(ImageError::Btf(format!(
                "it has {} bytes, at most {BTF_MAX_BYTES} are read",
                section.size()
            )));
        }
        let btf = section.data().map_err(|error| ImageError::Elf(error.to_string()))?;

        // Names are compared where they lie: reading tens of thousands of them one by one takes longer than all else.
        let elf_error = |error: object::Error| ImageError::Elf(error.to_string());
        let names = match elf.section_by_name(".strtab") {
            Some(section) => section.data().map_err(elf_error)?,
            None => &[],
        };
        let mut wanted: Vec<&str> = SYMBOLS.iter().map(|(name, _)| *name).collect();
        wanted.extend(variables.iter().map(String::as_str));
        let mut symbols = HashMap::new();
        for symbol in elf.elf_symbol_table().iter().take(SYMBOLS_MAX) {
            let name = string(names, symbol.st_name(elf.endian()));
            if let Some(name) = wanted.iter().find(|wanted| wanted.as_bytes() == name) {
                let (address, bytes) = (symbol.st_value(elf.endian()), symbol.st_size(elf.endian()));
                symbols.insert((*name).to_owned(), Symbol { address, bytes });
            }
        }
        let needed = SYMBOLS.iter().filter(|(_, always)| *always).map(|(name, _)| *name);
        if let Some(name) =
            needed.chain(variables.iter().map(String::as_str)).find(|name| !symbols.contains_key(*name))
        {
            return Err(ImageError::MissingSymbol(name.to_owned()));
        }
        // Notes are small; longer ones prove no more.
        let notes = elf.section_by_name(".notes").and_then(|section| {
            let bytes = section.data_range(section.address(), section.size().min(512)).ok()??;
            Some((section.address(), bytes.to_vec()))
        });
        Ok(Self { btf: btf.to_vec(), symbols, notes })
    }

    pub(super) fn kernel(&self) -> Result<Kernel, ImageError> {
        Kernel::from_parts(&self.btf, self.symbols.clone(), self.notes.clone())
    }
}

impl Kernel {
    /// Reads an ELF vmlinux.
    ///
    /// # Errors
    /// See [`ImageError`].
    pub fn load(vmlinux: &Path) -> Result<Self, ImageError> {
        Self::load_with(vmlinux, &[])
    }

    /// The same, and the places of these global variables for [`Kernel::variable`].
    ///
    /// # Errors
    /// See [`ImageError`].
    pub fn load_with(vmlinux: &Path, variables: &[String]) -> Result<Self, ImageError> {
        Parts::read(vmlinux, variables)?.kernel()
    }

    /// Builds the layouts from type information alone.
    pub(super) fn from_parts(
        btf: &[u8],
        symbols: HashMap<String, Symbol>,
        notes: Option<(u64, Vec<u8>)>,
    ) -> Result<Self, ImageError> {
        let btf = Btf::parse(btf)?;
        let types = migrate_types(&btf)?;
        let counters = names(&btf, "zone_stat_item", COUNTERS_MAX)?;
        let zones = Names::of(&btf, "zone_type")?.value("__MAX_NR_ZONES")?;
        let zones = usize::try_from(zones).ok().filter(|zones| (1..=8).contains(zones));
        let area = AreaLayout {
            bytes: btf.size("free_area")?,
            lists: btf.field("free_area", "free_list")?.offset,
            nr_free: btf.field("free_area", "nr_free")?.offset,
        };
        let flags = Names::of(&btf, "pageflags")?;
        let zone = zone_layout(&btf)?;
        let (lists, _) = array(&btf, "free_area", "free_list")?;
        if lists != types.len() || lists > TYPES_MAX || zone.orders > ORDERS_MAX {
            let text = format!("{lists} free lists in {} orders for {} types", zone.orders, types.len());
            return Err(ImageError::Unsupported(text));
        }
        Ok(Self {
            symbols,
            notes,
            page: page_layout(&btf)?,
            zone,
            area,
            pcp: pcp_layout(&btf)?,
            node: NodeLayout {
                zones: btf.field("pglist_data", "node_zones")?.offset,
                spanned: btf.field("pglist_data", "node_spanned_pages")?.offset,
                id: btf.field("pglist_data", "node_id")?.offset,
            },
            section: section_layout(&btf)?,
            types,
            counters,
            zone_flags: names(&btf, "zone_flags", 64)?,
            events: names(&btf, "vm_event_item", EVENTS_MAX).unwrap_or_default(),
            page_flags: render::flag_names().filter_map(|name| Some((name, flags.bit(name).ok()?))).collect(),
            zones: zones.ok_or_else(|| ImageError::MissingType("enum zone_type".into()))?,
        })
    }

    pub(super) fn symbol(&self, name: &str) -> Option<Symbol> {
        self.symbols.get(name).copied()
    }

    /// The words of eight bytes of a global variable that [`Kernel::load_with`] was told of; a smaller one is one word. At
    /// most 4096 words.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub fn variable(&self, ram: &Ram, name: &str) -> Result<Vec<u64>, ReadError> {
        let symbol = self.symbol(name).ok_or_else(|| ReadError::Symbol(name.to_owned()))?;
        let unreadable = || ReadError::Unreadable { what: "a variable", address: symbol.address };
        let space = super::space(self, ram)?;
        if symbol.bytes < 8 {
            let bytes = space.bytes(symbol.address, symbol.bytes as usize).ok_or_else(unreadable)?;
            return Ok(vec![bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))]);
        }
        let words = (symbol.bytes / 8).min(VARIABLE_MAX_WORDS);
        (0..words).map(|index| space.u64(symbol.address + index * 8).ok_or_else(unreadable)).collect()
    }

    /// Number of a migratetype.
    pub(super) fn type_number(&self, kind: MigrateType) -> Option<usize> {
        self.types.iter().position(|known| *known == kind)
    }
}

/// The values of an enumeration.
struct Names<'a> {
    name: &'a str,
    values: Vec<(String, i64)>,
}

impl<'a> Names<'a> {
    fn of(btf: &Btf, name: &'a str) -> Result<Self, ImageError> {
        let values = btf.enumeration(name).ok_or_else(|| ImageError::MissingType(format!("enum {name}")))?;
        Ok(Self { name, values })
    }

    fn get(&self, name: &str) -> Option<i64> {
        self.values.iter().find(|(known, _)| known == name).map(|(_, value)| *value)
    }

    fn value(&self, name: &str) -> Result<i64, ImageError> {
        self.get(name).ok_or_else(|| ImageError::MissingType(format!("{name} of enum {}", self.name)))
    }

    fn bit(&self, name: &str) -> Result<u32, ImageError> {
        let bit = u32::try_from(self.value(name)?).ok().filter(|bit| *bit < 64);
        bit.ok_or_else(|| ImageError::Unsupported(format!("{name} is no bit of a word")))
    }
}

/// The names of an enumeration that counts from 0; the first of two equal values has the name.
fn names(btf: &Btf, name: &str, max: usize) -> Result<Vec<String>, ImageError> {
    let mut names = Vec::new();
    for (text, value) in Names::of(btf, name)?.values {
        if usize::try_from(value).is_ok_and(|value| value == names.len() && value < max) {
            names.push(text);
        }
    }
    // The last one is the count.
    if names.last().is_some_and(|last| last.starts_with("NR_VM_")) {
        names.pop();
    }
    Ok(names)
}

fn migrate_types(btf: &Btf) -> Result<Vec<MigrateType>, ImageError> {
    let names = Names::of(btf, "migratetype")?;
    let count =
        usize::try_from(names.value("MIGRATE_TYPES")?).ok().filter(|count| (1..=TYPES_MAX).contains(count));
    let count = count.ok_or_else(|| ImageError::Unsupported("the number of migratetypes".into()))?;
    let mut types = vec![MigrateType::Unknown; count];
    for (name, value) in &names.values {
        let slot = usize::try_from(*value).ok().and_then(|value| types.get_mut(value));
        if let (Some(slot), Some(kind)) = (slot, MigrateType::by_name(name)) {
            *slot = kind;
        }
    }
    Ok(types)
}

/// Length and element size of a member that must be an array.
fn array(btf: &Btf, structure: &str, path: &str) -> Result<(usize, usize), ImageError> {
    let missing = || ImageError::MissingType(format!("{structure}.{path} as an array"));
    btf.array(btf.field(structure, path)?).ok_or_else(missing)
}

/// Offset of a lock, unless locks are empty in this kernel.
fn lock(btf: &Btf, structure: &str) -> Result<Option<usize>, ImageError> {
    let field = btf.field(structure, "lock")?;
    Ok((btf.size_of_field(field) != Some(0)).then_some(field.offset))
}

fn page_layout(btf: &Btf) -> Result<PageLayout, ImageError> {
    if btf.size("page")? as u64 != PAGE_STRUCT_BYTES {
        let text = format!("struct page has {} bytes, only 64 are supported", btf.size("page")?);
        return Err(ImageError::Unsupported(text));
    }
    let word = |path: &str| {
        let offset = btf.field("page", path)?.offset;
        let aligned = offset % 8 == 0 && offset < PAGE_STRUCT_BYTES as usize;
        aligned
            .then_some(offset / 8)
            .ok_or_else(|| ImageError::Unsupported(format!("page.{path} at {offset}")))
    };
    let kind = word("page_type")?;
    if btf.field("page", "_refcount")?.offset != kind * 8 + 4 {
        return Err(ImageError::Unsupported("page._refcount is not behind page.page_type".into()));
    }
    // Renamed in 7.x.
    let compound = word("compound_info").or_else(|_| word("compound_head"))?;
    let byte = |offset: usize| (offset / 8, 8 * (offset % 8) as u32);
    let flags = Names::of(btf, "pageflags")?;
    let types = btf.enumeration("pagetype").map(|values| Names { name: "pagetype", values });
    let scheme = match &types {
        Some(types) => {
            let value = |name: &str| types.get(name).and_then(|value| u8::try_from(value).ok());
            let need = |name: &str| {
                value(name).ok_or_else(|| ImageError::MissingType(format!("{name} of enum pagetype")))
            };
            TypeScheme::Byte {
                buddy: need("PGTY_buddy")?,
                offline: need("PGTY_offline")?,
                table: need("PGTY_table")?,
                guard: need("PGTY_guard")?,
                hugetlb: value("PGTY_hugetlb"),
                slab: value("PGTY_slab"),
                unaccepted: value("PGTY_unaccepted"),
            }
        }
        None => TypeScheme::Bits,
    };
    let order = match btf.find("page", "compound_order") {
        Some(field) => byte(field.offset),
        // The low byte of the second page's flags (include/linux/mm.h, compound_order()).
        None if btf.has("folio") => (word("flags")?, 0),
        None => return Err(ImageError::MissingType("page.compound_order".into())),
    };
    let hugetlb = match (btf.find("page", "compound_dtor"), btf.enumeration("compound_dtor_id")) {
        (Some(field), Some(values)) => {
            let number = Names { name: "compound_dtor_id", values }.get("HUGETLB_PAGE_DTOR");
            let (word, shift) = byte(field.offset);
            number.and_then(|number| Some((word, shift, u8::try_from(number).ok()?)))
        }
        _ => None,
    };
    // The folio's second page is its own second 64 bytes.
    let large = btf.find("folio", "_large_mapcount").and_then(|field| field.offset.checked_sub(64));
    let mapcount = btf.find("page", "compound_mapcount").map(|field| field.offset).or(large);
    let mapcount = mapcount.filter(|offset| *offset < 60).map(byte);
    Ok(PageLayout {
        flags: word("flags")?,
        list: word("lru")?,
        private: word("private")?,
        kind,
        // As long as free lists did not keep to the types of pageblocks.
        index: if btf.find("zone", "nr_free_highatomic").is_some() { None } else { Some(word("index")?) },
        compound,
        scheme,
        order,
        hugetlb,
        snapshots: btf.has("page_snapshot"),
        mapping: word("mapping")?,
        mapcount,
        lru: flags.bit("PG_lru")?,
        head: flags.bit("PG_head")?,
        reserved: flags.bit("PG_reserved")?,
        slab: matches!(scheme, TypeScheme::Bits).then(|| flags.bit("PG_slab")).transpose()?,
    })
}

fn zone_layout(btf: &Btf) -> Result<ZoneLayout, ImageError> {
    let at = |path: &str| btf.field("zone", path).map(|field| field.offset);
    let maybe = |path: &str| btf.find("zone", path).map(|field| field.offset);
    Ok(ZoneLayout {
        bytes: btf.size("zone")? as u64,
        watermark: at("_watermark")?,
        watermarks: array(btf, "zone", "_watermark")?.0.min(8),
        boost: at("watermark_boost")?,
        reserved_highatomic: at("nr_reserved_highatomic")?,
        free_highatomic: maybe("nr_free_highatomic"),
        lowmem_reserve: at("lowmem_reserve")?,
        pageset: at("per_cpu_pageset")?,
        zonestats: at("per_cpu_zonestats")?,
        start_pfn: at("zone_start_pfn")?,
        managed: at("managed_pages")?,
        spanned: at("spanned_pages")?,
        present: at("present_pages")?,
        cma: maybe("cma_pages"),
        name: at("name")?,
        isolated: maybe("nr_isolate_pageblock"),
        free_area: at("free_area")?,
        orders: array(btf, "zone", "free_area")?.0,
        flags: at("flags")?,
        lock: lock(btf, "zone")?,
        deferred: maybe("trylock_free_pages"),
        vm_stat: at("vm_stat")?,
    })
}

fn pcp_layout(btf: &Btf) -> Result<PcpLayout, ImageError> {
    let at = |path: &str| btf.field("per_cpu_pages", path).map(|field| field.offset);
    let maybe = |path: &str| btf.find("per_cpu_pages", path).map(|field| field.offset);
    let diffs = btf.find("per_cpu_zonestat", "vm_stat_diff");
    Ok(PcpLayout {
        lock: lock(btf, "per_cpu_pages")?,
        count: at("count")?,
        high: at("high")?,
        batch: at("batch")?,
        high_min: maybe("high_min"),
        high_max: maybe("high_max"),
        flags: maybe("flags"),
        alloc_factor: maybe("alloc_factor"),
        free_count: maybe("free_count"),
        free_factor: maybe("free_factor"),
        lists: at("lists")?,
        list_count: array(btf, "per_cpu_pages", "lists")?.0.min(64),
        diffs: diffs.and_then(|field| Some((field.offset, btf.array(field)?.0.min(COUNTERS_MAX)))),
        threshold: btf.find("per_cpu_zonestat", "stat_threshold").map(|field| field.offset),
    })
}

fn section_layout(btf: &Btf) -> Result<SectionLayout, ImageError> {
    let bits = Names::of(btf, "pageblock_bits")?;
    // 7.x has a bit for isolation, and rounds the number of bits up to a power of two.
    let count = bits.get("__NR_PAGEBLOCK_BITS").or_else(|| bits.get("NR_PAGEBLOCK_BITS"));
    let count = count.and_then(|count| u32::try_from(count).ok()?.checked_next_power_of_two());
    let block_bits = count.filter(|count| matches!(count, 4 | 8));
    let block_bits =
        block_bits.ok_or_else(|| ImageError::Unsupported("the number of bits of a pageblock".into()))?;
    let bit = |name: &str| match bits.bit(name) {
        Ok(bit) if bit >= block_bits => {
            Err(ImageError::Unsupported(format!("{name} is no bit of a pageblock")))
        }
        found => found,
    };
    let bytes = btf.size("mem_section")? as u64;
    if !bytes.is_power_of_two() || bytes > 4096 {
        return Err(ImageError::Unsupported(format!("struct mem_section has {bytes} bytes")));
    }
    Ok(SectionLayout {
        bytes,
        mem_map: btf.field("mem_section", "section_mem_map")?.offset,
        usage: btf.field("mem_section", "usage")?.offset,
        pageblock_flags: btf.field("mem_section_usage", "pageblock_flags")?.offset,
        block_bits,
        skip_bit: bit("PB_compact_skip").or_else(|_| bit("PB_migrate_skip"))?,
        isolate_bit: bit("PB_migrate_isolate").ok(),
    })
}
