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
    /// Whether the kernel is built for several CPUs: counters that are read are then never below zero (include/linux/vmstat.h,
    /// zone_page_state()).
    pub smp: bool,
    /// A request that may use HIGHATOMIC reserves does not refill an empty per-CPU list: 7.x (__rmqueue_pcplist()).
    pub atomic_leaves_lists: bool,
    /// Such a request adds to the reserves wherever its page came from, a per-CPU list too: 6.1 and 6.12 (get_page_from_freelist()).
    /// In 7.x only what came from the free lists does (rmqueue_buddy()).
    pub reserves_after_lists: bool,
    /// Only __GFP_HIGH makes a request that cannot sleep one that may use HIGHATOMIC reserves: 6.1.157, 6.12.54 and later, 7.x
    /// (gfp_to_alloc_flags()).
    pub highatomic_needs_high: bool,
    /// A per-CPU list with too many pages gives them back in pieces of a batch: 7.x (free_frozen_page_commit()). The pages
    /// are the same, and where each piece begins is the list of the page that was freed.
    pub frees_in_batches: bool,
    /// Larger pages are held back from a per-CPU list from half of its least size on: 7.x (free_frozen_page_commit()).
    pub holds_larger_longer: bool,
    /// A request that is not movable claims a movable pageblock however little of it is free, a movable one claims another's
    /// only where nothing in it is unmovable, and no block that reaches out of its zone is claimed: patch 3 of that series
    /// (try_to_claim_block()).
    pub claims_any_movable_block: bool,
    /// A request that is not movable does not steal from a movable pageblock that lies in its zone: patch 4
    /// (__rmqueue_steal()).
    pub spares_movable_blocks: bool,
    /// A movable pageblock that direct compaction captures for a request that is not movable gets its type: patch 5
    /// (compaction_capture()).
    pub retypes_captured_blocks: bool,
    /// A free page is on the list of its pageblock's type: 6.10 and later ("freelist hygiene"). Before, it goes to the list of
    /// the type that was seen when it went to a per-CPU list, merging retypes nothing, whoever takes pages counts them, and
    /// falling back moves what is free of a pageblock before it is decided whose it is (`fallback.rs`).
    pub freelist_hygiene: bool,
    /// The size of per-CPU lists, and how many pages they take and give at a time, follows the load: 6.7 and later
    /// (nr_pcp_alloc(), nr_pcp_high(), ZONE_BELOW_HIGH). Before, only how many they give does.
    pub tunes_lists: bool,
    /// For a single page __GFP_HIGH makes the boost not count at the minimum: 6.2 and later (zone_watermark_fast()). Before, it
    /// took __GFP_ATOMIC, which no request here has.
    pub high_ignores_boost: bool,
    /// Each request that may not sleep is tried twice at the minimum, and not only one that may ignore cpusets: 6.1
    /// (__alloc_pages_slowpath()).
    pub tries_twice: bool,
    /// HIGHATOMIC reserves are a pageblock more than a hundredth of the zone, even where that is less than one: 6.1
    /// (reserve_highatomic_pageblock()).
    pub reserves_in_small_zones: bool,
    /// What is free of the reserves is counted, and only that does not count as free for others: 6.12 and later
    /// (__zone_watermark_unusable_free()). Before, all that is reserved does not.
    pub counts_free_highatomic: bool,
    /// A rule that is made wrong on purpose: comparing must find it. Only tests set it.
    pub canary: Option<Canary>,
}

/// A rule of the model, made wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Canary {
    /// What is freed beside a block that may merge soon goes to the head of its list, as all else (buddy_merge_likely()).
    Head,
    /// What is moved to another type goes to the head of its list (move_to_free_list()).
    MoveToHead,
    /// A block is claimed where a quarter of it is free or alike, not half (try_to_claim_block()).
    ClaimQuarter,
    /// Types fall back to one another in the other order (fallbacks).
    Fallbacks,
    /// Claiming raises no boost (boost_watermark()).
    NoBoost,
    /// Blocks that merge keep their types (__free_one_page()).
    KeepTypes,
    /// User pages are not counted as movable (prep_move_freepages_block()).
    NoneMovable,
    /// Per-CPU lists are drained from their heads (free_pcppages_bulk()).
    DrainHeads,
    /// A batch looks for each page anew (rmqueue_bulk(), enum rmqueue_mode).
    ForgetMode,
    /// Pages are freed to the tails of per-CPU lists (free_frozen_page_commit()).
    FreeToTails,
    /// HIGHATOMIC reserves count as free for all (__zone_watermark_unusable_free()).
    ReservesCount,
    /// Nothing is ever reserved (reserve_highatomic_pageblock()).
    NoReserve,
    /// The lower half is given back, and the upper one split on (expand()).
    ExpandLower,
    /// A block larger than a pageblock is freed as one (split_large_buddy()).
    FreeWhole,
}

impl Canary {
    /// All.
    pub const ALL: [Self; 14] = [
        Self::Head,
        Self::MoveToHead,
        Self::ClaimQuarter,
        Self::Fallbacks,
        Self::NoBoost,
        Self::KeepTypes,
        Self::NoneMovable,
        Self::DrainHeads,
        Self::ForgetMode,
        Self::FreeToTails,
        Self::ReservesCount,
        Self::NoReserve,
        Self::ExpandLower,
        Self::FreeWhole,
    ];
}

impl Semantics {
    /// Whether this rule is made wrong.
    #[inline]
    pub(crate) fn is(self, canary: Canary) -> bool {
        self.canary == Some(canary)
    }
}

impl Semantics {
    /// What a released kernel does: `7.2.13`, `7.3.4`. None for lines that the model does not know.
    #[must_use]
    pub fn of(release: &str, smp: bool) -> Option<Self> {
        let mut numbers = release.split(['.', '-', '+']).map(|part| part.parse::<u32>().ok());
        let (major, minor, patch) =
            (numbers.next()??, numbers.next()??, numbers.next().flatten().unwrap_or(0));
        let (counts_merged_guards, highatomic_at_once) = match (major, minor) {
            // Before, what had lain on a per-CPU list was freed by that list's type.
            (6, 1) if patch >= 57 => (true, false),
            // Before, falling back to other types went another way.
            (6, 12) if patch >= 29 => (patch >= 117, false),
            (7, 2) => (false, false),
            (7, 3) => (patch >= 4, true),
            _ => return None,
        };
        let (since_7, old) = (major >= 7, (major, minor) == (6, 1));
        Some(Self {
            counts_merged_guards,
            highatomic_at_once,
            per_cpu_lists: smp || !since_7,
            smp,
            atomic_leaves_lists: since_7,
            reserves_after_lists: !since_7,
            highatomic_needs_high: since_7 || patch >= if old { 157 } else { 54 },
            frees_in_batches: since_7,
            holds_larger_longer: since_7,
            claims_any_movable_block: false,
            spares_movable_blocks: false,
            retypes_captured_blocks: false,
            freelist_hygiene: !old,
            tunes_lists: !old,
            high_ignores_boost: !old,
            tries_twice: old,
            reserves_in_small_zones: old,
            counts_free_highatomic: !old,
            canary: None,
        })
    }

    /// What it is with these patches, or, where `on` is false, without them. Also those that it has no switch for, whose
    /// behaviour it cannot predict.
    #[must_use]
    pub fn with(mut self, titles: &[String], on: bool) -> (Self, Vec<String>) {
        let mut unknown = Vec::new();
        for title in titles {
            match Switch::of(title) {
                Some(switch) => switch.turn(&mut self, on),
                None => unknown.push(title.clone()),
            }
        }
        (self, unknown)
    }
}

/// A patch whose behaviour the model knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// Merged guard pages are counted ([`Semantics::counts_merged_guards`]).
    GuardAccounting,
    /// What a merged buddy is counted as: nothing that can be observed, so there is nothing to switch.
    MergedType,
    /// [`Semantics::claims_any_movable_block`].
    ClaimMovable,
    /// [`Semantics::spares_movable_blocks`].
    NoSteal,
    /// [`Semantics::retypes_captured_blocks`].
    CaptureClaims,
}

impl Switch {
    /// Every one with the titles that it goes by: that of the patch in `kernels/patches`, and that of the mail.
    pub const ALL: [(Self, [&str; 2]); 5] = [
        (
            Self::GuardAccounting,
            [
                "mm/page_alloc: give merged guard pages back to NR_FREE_PAGES",
                "mm/page_alloc: count guard pages as free again when their buddy merges",
            ],
        ),
        (
            Self::MergedType,
            [
                "mm/page_alloc: count a merged buddy under the type it merges into",
                "mm/page_alloc: count a merged buddy's pages under the merged type",
            ],
        ),
        (
            Self::ClaimMovable,
            [
                "mm/page_alloc: convert a movable block on any non-movable claim",
                "mm/page_alloc: convert any movable pageblock on a non-movable allocation",
            ],
        ),
        (
            Self::NoSteal,
            [
                "mm/page_alloc: keep non-movable steals out of movable blocks",
                "mm/page_alloc: skip movable blocks during non-movable steals",
            ],
        ),
        (
            Self::CaptureClaims,
            [
                "mm/page_alloc: claim a movable block captured for non-movable use",
                "mm/page_alloc: claim blocks captured for non-movable use",
            ],
        ),
    ];

    /// The one that a patch of this title is.
    #[must_use]
    pub fn of(title: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, titles)| titles.contains(&title)).map(|(switch, _)| *switch)
    }

    fn turn(self, semantics: &mut Semantics, on: bool) {
        match self {
            Self::GuardAccounting => semantics.counts_merged_guards = on,
            Self::MergedType => {}
            Self::ClaimMovable => semantics.claims_any_movable_block = on,
            Self::NoSteal => semantics.spares_movable_blocks = on,
            Self::CaptureClaims => semantics.retypes_captured_blocks = on,
        }
    }
}
