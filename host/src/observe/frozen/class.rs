//! What a page is, in two bytes.

use super::MigrateType;

/// What a page is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum Kind {
    /// There is no struct page, or it cannot be read.
    Absent,
    /// A page of another zone inside this zone's span.
    Foreign,
    /// On a free list, or part of such a block.
    Free,
    /// A guard page (debug_guardpage_minorder).
    Guard,
    /// On a per-CPU list.
    Pcp,
    /// On its way to the free lists (7.2 and later: `trylock_free_pages`).
    Deferred,
    /// On an LRU list: page cache, anonymous, shmem.
    Lru,
    /// Slab.
    Slab,
    /// A page table.
    PageTable,
    /// hugetlb.
    Hugetlb,
    /// Never given to the allocator.
    Reserved,
    /// Offline.
    Offline,
    /// Not yet accepted (confidential guests).
    Unaccepted,
    /// Allocated, for something that the struct page does not tell.
    Other,
}

impl Kind {
    /// All, in the order of their numbers.
    pub const ALL: [Self; 14] = [
        Self::Absent,
        Self::Foreign,
        Self::Free,
        Self::Guard,
        Self::Pcp,
        Self::Deferred,
        Self::Lru,
        Self::Slab,
        Self::PageTable,
        Self::Hugetlb,
        Self::Reserved,
        Self::Offline,
        Self::Unaccepted,
        Self::Other,
    ];

    /// Its name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Foreign => "foreign",
            Self::Free => "free",
            Self::Guard => "guard",
            Self::Pcp => "pcp",
            Self::Deferred => "deferred",
            Self::Lru => "lru",
            Self::Slab => "slab",
            Self::PageTable => "page-table",
            Self::Hugetlb => "hugetlb",
            Self::Reserved => "reserved",
            Self::Offline => "offline",
            Self::Unaccepted => "unaccepted",
            Self::Other => "other",
        }
    }

    /// Whether it was handed out by the allocator and not yet given back.
    #[must_use]
    pub fn is_allocated(self) -> bool {
        matches!(self, Self::Lru | Self::Slab | Self::PageTable | Self::Hugetlb | Self::Offline | Self::Other)
    }
}

/// Numbers of pages by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kinds(pub(super) [u64; Kind::ALL.len()]);

impl Kinds {
    /// Pages of one kind.
    #[must_use]
    pub fn of(&self, kind: Kind) -> u64 {
        self.0[kind as usize]
    }

    /// Pages that were handed out by the allocator and not yet given back.
    #[must_use]
    pub fn allocated(&self) -> u64 {
        Kind::ALL.iter().filter(|kind| kind.is_allocated()).map(|kind| self.of(*kind)).sum()
    }

    /// Every kind with its pages.
    pub fn iter(&self) -> impl Iterator<Item = (Kind, u64)> {
        Kind::ALL.into_iter().zip(self.0)
    }
}

/// Which part of a block of pages a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Part {
    /// A page of its own, or one of which that is not known.
    Single,
    /// The first page of a compound page, of a free block, of a guard.
    Head,
    /// Any other page of it.
    Tail,
}

/// What a page is: its kind, its part, and for heads the order; for pages on lists the list's migratetype.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PageClass(u16);

const PART_SHIFT: u32 = 4;
const ORDER_SHIFT: u32 = 6;
const TYPE_SHIFT: u32 = 10;

impl PageClass {
    /// A page of this kind. Orders above 15, which only gigantic pages have, are kept as 15.
    #[must_use]
    pub const fn new(kind: Kind, part: Part, order: u32) -> Self {
        Self(
            kind as u16
                | (part as u16) << PART_SHIFT
                | (if order > 15 { 15 } else { order as u16 }) << ORDER_SHIFT,
        )
    }

    /// The same on a list of migratetype number `list`, below 8.
    #[must_use]
    pub(super) const fn on_list(self, list: usize) -> Self {
        Self(self.0 | ((list & 7) as u16) << TYPE_SHIFT)
    }

    /// What the page is used for.
    #[must_use]
    pub fn kind(self) -> Kind {
        Kind::ALL.get(self.kind_number()).copied().unwrap_or(Kind::Absent)
    }

    /// The number of that, below 16.
    #[inline]
    pub(super) fn kind_number(self) -> usize {
        usize::from(self.0 & 15)
    }

    /// Whether it is the first page of a guard page.
    #[inline]
    #[must_use]
    pub fn is_guard_head(self) -> bool {
        const MASK: u16 = (1 << ORDER_SHIFT) - 1;
        self.0 & MASK == PageClass::new(Kind::Guard, Part::Head, 0).0
    }

    /// Which part of its block it is.
    #[must_use]
    pub fn part(self) -> Part {
        match self.0 >> PART_SHIFT & 3 {
            0 => Part::Single,
            1 => Part::Head,
            _ => Part::Tail,
        }
    }

    /// Order of the block that it is the head of.
    #[must_use]
    pub fn order(self) -> u32 {
        u32::from(self.0 >> ORDER_SHIFT & 15)
    }

    /// Number of the migratetype of the free list that it is the head of a block on.
    #[must_use]
    pub fn list(self) -> usize {
        usize::from(self.0 >> TYPE_SHIFT & 7)
    }
}

impl std::fmt::Debug for PageClass {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:?}/{:?}/{}", self.kind(), self.part(), self.order())
    }
}

/// The state of a pageblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its migratetype; [`MigrateType::Isolate`] only before 7.2, where isolation replaces the type.
    pub kind: MigrateType,
    /// Number of that type.
    pub number: usize,
    /// Whether compaction skips it.
    pub skip: bool,
    /// Whether it is isolated.
    pub isolated: bool,
}
