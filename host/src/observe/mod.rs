//! Observation of a guest.

use std::collections::BTreeMap;

use guest_agent::wire::ProcFile;

/// What the agent sent for one checkpoint: bytes of the guest's, not yet looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RawCheckpoint {
    /// Its name in the script.
    pub name: String,
    /// Each file as the kernel gave it.
    pub files: BTreeMap<ProcFile, Vec<u8>>,
}
