//! Operations of the allocator that a batch may have: what a script writes, the host predicts, and the driver in the guest's
//! kernel does (`guest-agent/driver/buddydiff-abi.h`).
//!
//! In TOML: `{ alloc = { slot = 7, order = 2, gfp = "MOVABLE|NOWARN" } }`, `{ free = { slot = 7 } }`, `"drain"`.

use serde::{Deserialize, Serialize};

/// Operations that a batch has at most.
pub const OPS_MAX: usize = 16_384;
/// Slots: handles for what is allocated.
pub const SLOTS: u32 = 65_536;
/// Slots that are split at once, at most.
pub const SPLITS_MAX: usize = 1024;
/// Pages that a range has at most.
pub const RANGE_PAGES_MAX: u64 = 262_144;
/// The largest order.
pub const ORDER_MAX: u32 = 10;

/// Bits of `gfp_t` that the driver takes. They are the same in every kernel that it is built into, which it makes sure of.
pub mod gfp {
    use serde::{Deserialize, Deserializer, Serializer, de};

    /// `__GFP_DMA`: of the zone bits at most one.
    pub const DMA: u32 = 0x1;
    /// `__GFP_HIGHMEM`.
    pub const HIGHMEM: u32 = 0x2;
    /// `__GFP_DMA32`.
    pub const DMA32: u32 = 0x4;
    /// `__GFP_MOVABLE`: not with `RECLAIMABLE`.
    pub const MOVABLE: u32 = 0x8;
    /// `__GFP_RECLAIMABLE`.
    pub const RECLAIMABLE: u32 = 0x10;
    /// `__GFP_HIGH`.
    pub const HIGH: u32 = 0x20;
    /// `__GFP_ZERO`.
    pub const ZERO: u32 = 0x100;
    /// `__GFP_DIRECT_RECLAIM`: only in a batch that may sleep, and with `NORETRY` or `RETRY_MAYFAIL`, so that nobody is killed.
    pub const DIRECT_RECLAIM: u32 = 0x400;
    /// `__GFP_KSWAPD_RECLAIM`.
    pub const KSWAPD_RECLAIM: u32 = 0x800;
    /// `__GFP_NOWARN`: without it a failure is a warning on the console.
    pub const NOWARN: u32 = 0x2000;
    /// `__GFP_RETRY_MAYFAIL`.
    pub const RETRY_MAYFAIL: u32 = 0x4000;
    /// `__GFP_NORETRY`.
    pub const NORETRY: u32 = 0x1_0000;
    /// `__GFP_MEMALLOC`.
    pub const MEMALLOC: u32 = 0x2_0000;
    /// `__GFP_COMP`: such a page cannot be split.
    pub const COMP: u32 = 0x4_0000;
    /// `__GFP_NOMEMALLOC`.
    pub const NOMEMALLOC: u32 = 0x8_0000;
    /// `__GFP_THISNODE`.
    pub const THISNODE: u32 = 0x20_0000;

    /// Each with its name, as the kernel has it without `__GFP_`.
    pub const NAMES: [(&str, u32); 16] = [
        ("DMA", DMA),
        ("HIGHMEM", HIGHMEM),
        ("DMA32", DMA32),
        ("MOVABLE", MOVABLE),
        ("RECLAIMABLE", RECLAIMABLE),
        ("HIGH", HIGH),
        ("ZERO", ZERO),
        ("DIRECT_RECLAIM", DIRECT_RECLAIM),
        ("KSWAPD_RECLAIM", KSWAPD_RECLAIM),
        ("NOWARN", NOWARN),
        ("RETRY_MAYFAIL", RETRY_MAYFAIL),
        ("NORETRY", NORETRY),
        ("MEMALLOC", MEMALLOC),
        ("COMP", COMP),
        ("NOMEMALLOC", NOMEMALLOC),
        ("THISNODE", THISNODE),
    ];

    /// A word in names: `MOVABLE|NOWARN`, and `0` where no bit is set. Bits without a name stay a number.
    #[must_use]
    pub fn words(word: u32) -> String {
        let named = NAMES.iter().filter(|(_, bit)| word & bit != 0);
        let rest = named.clone().fold(word, |rest, (_, bit)| rest & !bit);
        let mut words: Vec<String> = named.map(|(name, _)| (*name).to_owned()).collect();
        if rest != 0 || words.is_empty() {
            words.push(if rest == 0 { "0".to_owned() } else { format!("{rest:#x}") });
        }
        words.join("|")
    }

    /// The same read back.
    ///
    /// # Errors
    /// The part that is no name of [`NAMES`], with what is allowed.
    pub fn parse(words: &str) -> Result<u32, String> {
        let one = |word: &str| {
            let named = NAMES.iter().find(|(name, _)| *name == word).map(|(_, bit)| *bit);
            let number = || match word.strip_prefix("0x") {
                Some(digits) => u32::from_str_radix(digits, 16).ok(),
                None => word.parse().ok(),
            };
            named.or_else(number).ok_or_else(|| {
                let all: Vec<&str> = NAMES.iter().map(|(name, _)| *name).collect();
                format!("{word:?} is no GFP flag: allowed are numbers and {}, joined by |", all.join(", "))
            })
        };
        words.split('|').try_fold(0, |sum, word| Ok(sum | one(word.trim())?))
    }

    pub(super) fn serialize<S: Serializer>(word: &u32, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&words(*word))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u32, D::Error> {
        parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

/// An operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Op {
    /// Allocates into an empty slot: `alloc_pages()`. Gives the pfn.
    Alloc {
        /// The slot.
        slot: u32,
        /// The order.
        order: u32,
        /// See [`gfp`].
        #[serde(with = "gfp")]
        gfp: u32,
        /// The node; any, as the kernel chooses, if none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        node: Option<u32>,
    },
    /// Frees a slot by the order of its allocation: `__free_pages()`.
    Free {
        /// The slot.
        slot: u32,
    },
    /// Makes pages of order 0 of a slot: `split_page()`.
    Split {
        /// The slot.
        slot: u32,
    },
    /// Frees a page of a slot that is split. With the last of them the slot is empty.
    FreePiece {
        /// The slot.
        slot: u32,
        /// Number of the page in it.
        piece: u32,
    },
    /// Empties the lists of this CPU in all zones: `drain_local_pages()`.
    Drain,
    /// Allocates into an empty slot without waiting for a lock: `alloc_pages_nolock()`, in 7.x. Gives the pfn.
    NolockAlloc {
        /// The slot.
        slot: u32,
        /// The order.
        order: u32,
        /// The node; this CPU's if none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        node: Option<u32>,
    },
    /// Frees a slot without waiting for a lock: `free_pages_nolock()`, in 7.x.
    NolockFree {
        /// The slot.
        slot: u32,
    },
    /// Allocates these very pages into an empty slot: `alloc_contig_range()`, in a batch that may sleep. Gives the pfn.
    ContigAlloc {
        /// The slot.
        slot: u32,
        /// The first pfn.
        pfn: u64,
        /// How many.
        pages: u64,
        /// See [`gfp`].
        #[serde(with = "gfp")]
        gfp: u32,
    },
    /// Frees such a slot: `free_contig_range()`.
    ContigFree {
        /// The slot.
        slot: u32,
    },
    /// Isolates the pageblocks of this range, which the slot stands for: `start_isolate_page_range()`, in a batch that may
    /// sleep. Gives the pfn.
    Isolate {
        /// The slot.
        slot: u32,
        /// The first pfn.
        pfn: u64,
        /// How many.
        pages: u64,
    },
    /// Undoes that: `undo_isolate_page_range()`.
    Unisolate {
        /// The slot.
        slot: u32,
    },
    /// Empties the lists of all CPUs in all zones: `drain_all_pages()`, in a batch that may sleep.
    DrainAll,
    /// Disables the per-CPU lists of a zone until they are enabled: `zone_pcp_disable()`, in a batch that may sleep. One zone
    /// at a time, and sysctls that change the lists' sizes hang meanwhile.
    PcpDisable {
        /// The node.
        node: u32,
        /// Number of the zone in it.
        zone: u32,
    },
    /// Enables them again: `zone_pcp_enable()`.
    PcpEnable,
}

impl Op {
    /// The slot that it works on, if it does.
    #[must_use]
    pub fn slot(self) -> Option<u32> {
        match self {
            Self::Alloc { slot, .. }
            | Self::Free { slot }
            | Self::Split { slot }
            | Self::FreePiece { slot, .. }
            | Self::NolockAlloc { slot, .. }
            | Self::NolockFree { slot }
            | Self::ContigAlloc { slot, .. }
            | Self::ContigFree { slot }
            | Self::Isolate { slot, .. }
            | Self::Unisolate { slot } => Some(slot),
            Self::Drain | Self::DrainAll | Self::PcpDisable { .. } | Self::PcpEnable => None,
        }
    }

    /// Whether the driver takes it in a batch that may sleep only.
    #[must_use]
    pub fn must_sleep(self) -> bool {
        match self {
            Self::ContigAlloc { .. }
            | Self::ContigFree { .. }
            | Self::Isolate { .. }
            | Self::Unisolate { .. }
            | Self::DrainAll
            | Self::PcpDisable { .. }
            | Self::PcpEnable => true,
            Self::Alloc { gfp, .. } => gfp & gfp::DIRECT_RECLAIM != 0,
            Self::Free { .. }
            | Self::Split { .. }
            | Self::FreePiece { .. }
            | Self::Drain
            | Self::NolockAlloc { .. }
            | Self::NolockFree { .. } => false,
        }
    }
}

impl std::fmt::Display for Op {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // As a script has it: what is shown can be put into one.
        match toml::Value::try_from(self) {
            Ok(value) => write!(formatter, "{value}"),
            Err(_) => write!(formatter, "{self:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Ops {
        ops: Vec<Op>,
    }

    #[test]
    fn operations_are_written_as_they_are_read() {
        let every = [
            Op::Alloc { slot: 7, order: 2, gfp: gfp::MOVABLE | gfp::NOWARN, node: None },
            Op::Alloc { slot: 8, order: 0, gfp: 0, node: Some(1) },
            Op::Free { slot: 7 },
            Op::Split { slot: 8 },
            Op::FreePiece { slot: 8, piece: 3 },
            Op::Drain,
            Op::NolockAlloc { slot: 1, order: 1, node: None },
            Op::NolockFree { slot: 1 },
            Op::ContigAlloc { slot: 2, pfn: 512, pages: 100, gfp: gfp::DIRECT_RECLAIM | 0x4000_0000 },
            Op::ContigFree { slot: 2 },
            Op::Isolate { slot: 3, pfn: 0, pages: 1 },
            Op::Unisolate { slot: 3 },
            Op::DrainAll,
            Op::PcpDisable { node: 0, zone: 1 },
            Op::PcpEnable,
        ];
        let lines: Vec<String> = every.iter().map(Op::to_string).collect();
        assert_eq!(lines[0], r#"{ alloc = { slot = 7, order = 2, gfp = "MOVABLE|NOWARN" } }"#);
        assert_eq!(lines[5], r#""drain""#);
        let text = format!("ops = [\n{}\n]", lines.join(",\n"));
        let read: Ops = toml::from_str(&text).unwrap();
        assert_eq!(read.ops, every);
    }

    #[test]
    fn a_flag_that_there_is_not_is_named() {
        let error = gfp::parse("MOVABLE|KERNEL").unwrap_err();
        assert!(error.starts_with("\"KERNEL\" is no GFP flag"), "{error}");
        assert_eq!(gfp::parse("0x10|8"), Ok(gfp::RECLAIMABLE | gfp::MOVABLE));
        assert_eq!(gfp::words(0), "0");
    }
}
