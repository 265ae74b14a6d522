//! What is in each pageblock, in one pass over the pages of a zone: shared by the map, the picture and the JSON.

use crate::observe::frozen::{Block, Kind, MigrateType, State, Zone};

/// A pageblock as far as it lies in one zone; figures in pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockSummary {
    /// First pfn of the whole block; the zone may begin later.
    pub pfn: u64,
    /// Its pages in the zone's span.
    pub pages: u32,
    /// Type and state; none where there is no memory map.
    pub block: Option<Block>,
    /// Its pages of each kind, in the order of [`Kind::ALL`].
    pub kinds: [u32; Kind::ALL.len()],
}

impl BlockSummary {
    /// Pages of one kind.
    #[must_use]
    pub fn of(&self, kind: Kind) -> u32 {
        self.kinds[kind as usize]
    }

    /// Allocated pages that cannot be moved: neither on an LRU list nor hugetlb. Pages that wait for their LRU list, some
    /// tens a CPU (mm/swap.c, folio_batch_add_and_move()), are among them: the struct page does not tell them apart.
    #[must_use]
    pub fn unmovable(&self) -> u32 {
        let fixed = |kind: &&Kind| kind.is_allocated() && !matches!(kind, Kind::Lru | Kind::Hugetlb);
        Kind::ALL.iter().filter(fixed).map(|kind| self.of(*kind)).sum()
    }

    /// Whether it holds pages that do not fit its type: unmovable ones in a MOVABLE or CMA block. What the allocator's
    /// grouping by mobility is there to avoid.
    #[must_use]
    pub fn is_mixed(&self) -> bool {
        let movable =
            self.block.is_some_and(|block| matches!(block.kind, MigrateType::Movable | MigrateType::Cma));
        movable && self.unmovable() > 0
    }

    /// Whether it is isolated.
    #[must_use]
    pub fn is_isolated(&self) -> bool {
        self.block.is_some_and(|block| block.isolated)
    }

    /// Pages that the allocator has or had: all but those that are absent, of another zone or reserved.
    #[must_use]
    pub fn usable(&self) -> u32 {
        let none = [Kind::Absent, Kind::Foreign, Kind::Reserved].map(|kind| self.of(kind));
        self.pages.saturating_sub(none.iter().sum())
    }

    /// Pages that are free in whatever way: on free lists, with CPUs, as guards or on their way.
    #[must_use]
    pub fn unused(&self) -> u32 {
        [Kind::Free, Kind::Pcp, Kind::Guard, Kind::Deferred].map(|kind| self.of(kind)).iter().sum()
    }
}

/// The pageblocks of a zone in order.
#[must_use]
pub fn blocks(state: &State, zone: &Zone) -> Vec<BlockSummary> {
    let size = state.pageblock_pages();
    let summary = |(index, block): (usize, &Option<Block>)| {
        let pfn = (zone.first_block + index as u64) << state.pageblock_order;
        let at = |pfn: u64| (pfn.saturating_sub(zone.start) as usize).min(zone.pages.len());
        let pages = &zone.pages[at(pfn)..at(pfn + size)];
        let mut kinds = [0; Kind::ALL.len()];
        for class in pages {
            kinds[class.kind() as usize] += 1;
        }
        BlockSummary { pfn, pages: pages.len() as u32, block: *block, kinds }
    };
    zone.blocks.iter().enumerate().map(summary).collect()
}
