//! What one kernel does differently from another.

/// The behaviour of a kernel where kernels differ. Named after what changed, not after a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Semantics {
    /// A guard page that merges is given back to NR_FREE_PAGES. Not in 6.10 to 6.12.116, 7.2 to 7.3.3: patch 1 of the
    /// series on pageblocks for THP (mm/page_alloc.c, __free_one_page()).
    pub counts_merged_guards: bool,
    /// A request that may use HIGHATOMIC reserves does so in its first attempt already, and only a later attempt adds to
    /// them: 7.3 (mm/page_alloc.c, __alloc_frozen_pages_noprof(), rmqueue_buddy()).
    pub highatomic_at_once: bool,
    /// Whether there are per-CPU lists: 7.x has none without SMP.
    pub per_cpu_lists: bool,
}

impl Semantics {
    /// What a released kernel does: `7.2.13`, `7.3.4`. None for lines that the model does not know.
    #[must_use]
    pub fn of(release: &str, smp: bool) -> Option<Self> {
        let mut numbers = release.split(['.', '-', '+']).map(|part| part.parse::<u32>().ok());
        let (major, minor, patch) =
            (numbers.next()??, numbers.next()??, numbers.next().flatten().unwrap_or(0));
        let (counts_merged_guards, highatomic_at_once) = match (major, minor) {
            (7, 2) => (false, false),
            (7, 3) => (patch >= 4, true),
            _ => return None,
        };
        Some(Self { counts_merged_guards, highatomic_at_once, per_cpu_lists: smp })
    }
}
