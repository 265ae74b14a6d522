//! Checks on what was observed. Each is a function of its own that states what must hold, where, and by which source.
//!
//! What a check cannot decide it leaves alone: a violation is always the kernel's.

pub mod console;
pub mod frozen;
mod procfs;

use serde::Serialize;

use crate::observe::Checkpoint;

/// A broken invariant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Violation {
    /// The checkpoint at which it showed.
    pub checkpoint: String,
    /// The zone, or empty for the whole machine.
    pub zone: String,
    /// The invariant's name: see [`INVARIANTS`].
    pub invariant: &'static str,
    /// What should be, in the invariant's unit.
    pub expected: i64,
    /// What is.
    pub found: i64,
    /// The first page that shows it, where pages do and one was seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pfn: Option<u64>,
    /// How many pages are concerned, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages: Option<u64>,
    /// In words.
    pub text: String,
}

/// A check that needs nothing but one checkpoint.
type Check = fn(&Checkpoint) -> Vec<Violation>;

/// Every invariant that `/proc` alone can show, by the name it has in reports.
pub const INVARIANTS: [(&str, Check); 9] = [
    ("I1", procfs::list_lengths),
    ("I2", procfs::free_pages),
    ("I3", procfs::free_cma),
    ("I4", procfs::free_highatomic),
    ("I5", procfs::reserved_highatomic),
    ("I9", procfs::free_pages_blocks),
    ("pageblocks", procfs::pageblocks),
    ("vmstat-sum", procfs::vmstat_sum),
    ("kpageflags-buddy", procfs::kpageflags_buddy),
];

/// Runs every check on a checkpoint.
#[must_use]
pub fn check(checkpoint: &Checkpoint) -> Vec<Violation> {
    INVARIANTS.iter().flat_map(|(_, check)| check(checkpoint)).collect()
}

/// How many pages `nr_free_pages` of a zone may differ from the free lists without any fault: see
/// `allowance` in `procfs.rs`.
#[must_use]
pub fn free_pages_allowance(checkpoint: &Checkpoint, zone: &crate::observe::procfs::ZoneId) -> i64 {
    checkpoint
        .zoneinfo
        .iter()
        .find(|candidate| candidate.id == *zone)
        .map_or(0, |zone| procfs::allowance(checkpoint, zone))
}
