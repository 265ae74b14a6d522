//! Messages from the agent to the host.

use serde::{Deserialize, Serialize};

/// A file under `/proc` that a checkpoint captures, sent as the raw bytes the kernel gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProcFile {
    /// `/proc/buddyinfo`: free blocks by zone and order.
    Buddyinfo,
    /// `/proc/zoneinfo`: zone sizes, watermarks, counters, per-CPU lists.
    Zoneinfo,
    /// `/proc/vmstat`: counters and events of the whole machine.
    Vmstat,
    /// `/proc/pagetypeinfo`: free blocks by zone, migratetype and order; pageblocks by type.
    Pagetypeinfo,
    /// `/proc/kpageflags`: one little-endian 64-bit word a pfn, from pfn 0.
    Kpageflags,
}
