//! Observation of a guest: what it sent, and what that says.
//!
//! Every byte comes from a guest that may be broken or hostile. Nothing here judges; `check` does.

pub mod frozen;
pub mod procfs;

use std::collections::BTreeMap;

use guest_agent::wire::ProcFile;

pub use procfs::ParseError;
use procfs::{
    Blocks, Counters, FreeLists, PageFlags, Zone, buddyinfo, kpageflags, pagetypeinfo, vmstat, zoneinfo,
};

/// What the agent sent for one checkpoint: bytes of the guest's, not yet looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RawCheckpoint {
    /// Its name in the script.
    pub name: String,
    /// Whether buddyinfo read before and after the other texts was the same: then no page entered or left the free
    /// lists between them, and their figures belong to one state.
    pub still: bool,
    /// Whether it was still the same after kpageflags, which takes long to read.
    pub still_after_flags: bool,
    /// Each file as the kernel gave it.
    pub files: BTreeMap<ProcFile, Vec<u8>>,
}

/// One checkpoint, parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its name in the script.
    pub name: String,
    /// See [`RawCheckpoint::still`].
    pub still: bool,
    /// See [`RawCheckpoint::still_after_flags`].
    pub still_after_flags: bool,
    /// `/proc/buddyinfo`: populated zones.
    pub buddyinfo: Vec<FreeLists>,
    /// `/proc/zoneinfo`: all zones that the kernel prints.
    pub zoneinfo: Vec<Zone>,
    /// `/proc/vmstat`, if captured.
    pub vmstat: Option<Counters>,
    /// `/proc/pagetypeinfo`, if captured.
    pub pagetypeinfo: Option<Blocks>,
    /// `/proc/kpageflags`, counted, if captured.
    pub kpageflags: Option<PageFlags>,
}

/// Why a checkpoint cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ObserveError {
    /// A file that every checkpoint needs did not come.
    #[error("checkpoint {checkpoint}: {} is missing", file.path())]
    Missing {
        /// The checkpoint.
        checkpoint: String,
        /// The file.
        file: ProcFile,
    },
    /// A file is not what the kernel prints.
    #[error("checkpoint {checkpoint}: {}: {error}", file.path())]
    Parse {
        /// The checkpoint.
        checkpoint: String,
        /// The file.
        file: ProcFile,
        /// Where and what.
        error: ParseError,
    },
}

impl Checkpoint {
    /// Parses what the agent sent.
    ///
    /// # Errors
    /// See [`ObserveError`]: such a checkpoint gives no verdict.
    pub fn parse(raw: &RawCheckpoint) -> Result<Self, ObserveError> {
        Ok(Self {
            name: raw.name.clone(),
            still: raw.still,
            still_after_flags: raw.still_after_flags,
            buddyinfo: need(raw, ProcFile::Buddyinfo, buddyinfo::parse)?,
            zoneinfo: need(raw, ProcFile::Zoneinfo, zoneinfo::parse)?,
            vmstat: read(raw, ProcFile::Vmstat, vmstat::parse)?,
            pagetypeinfo: read(raw, ProcFile::Pagetypeinfo, pagetypeinfo::parse)?,
            kpageflags: read(raw, ProcFile::Kpageflags, kpageflags::parse)?,
        })
    }
}

fn read<T>(
    raw: &RawCheckpoint,
    file: ProcFile,
    parse: impl Fn(&[u8]) -> Result<T, ParseError>,
) -> Result<Option<T>, ObserveError> {
    let Some(bytes) = raw.files.get(&file) else { return Ok(None) };
    parse(bytes).map(Some).map_err(|error| ObserveError::Parse { checkpoint: raw.name.clone(), file, error })
}

fn need<T>(
    raw: &RawCheckpoint,
    file: ProcFile,
    parse: impl Fn(&[u8]) -> Result<T, ParseError>,
) -> Result<T, ObserveError> {
    let missing = || ObserveError::Missing { checkpoint: raw.name.clone(), file };
    read(raw, file, parse)?.ok_or_else(missing)
}
