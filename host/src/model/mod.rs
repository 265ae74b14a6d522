//! The reference model: what mm/page_alloc.c does, page by page. It predicts which page an allocation gets.
//!
//! No I/O, no clock, no randomness. A [`Model`] is built from a frozen [`State`], replays
//! operations, and is held against a later frozen state by [`Model::differences`]. What a kernel does differently from
//! another is in [`Semantics`], named after what changed.
//!
//! Modelled so far: 6.1, 6.12 from .29 on, 7.2 and 7.3, on one node, for requests of the first CPU that may not sleep, with and without per-CPU lists. See
//! [`Unsupported`] for what is refused.

mod alloc;
mod compare;
#[cfg(test)]
mod exhaustive;
mod explain;
mod fallback;
mod free;
mod freeze;
mod fresh;
mod pcp;
mod semantics;
#[cfg(test)]
mod sequences;
#[cfg(test)]
mod tests;
mod zone;

use crate::observe::frozen::{MigrateType, State};

pub use alloc::{Request, Reserve};
pub use compare::Difference;
pub use fresh::{Fresh, FreshZone};
pub use semantics::{Canary, Semantics, Switch};
pub use zone::{Rule, Zone};

/// Orders of free areas: MAX_PAGE_ORDER is one less.
pub(crate) const ORDERS: usize = 11;
/// MIGRATE_TYPES that are kept apart.
pub(crate) const TYPES: usize = 8;
/// MIGRATE_PCPTYPES: types with fallbacks, and with per-CPU lists.
pub(crate) const PCP_TYPES: usize = 3;
/// MIGRATE_UNMOVABLE, MIGRATE_MOVABLE, MIGRATE_RECLAIMABLE in every kernel.
pub(crate) const UNMOVABLE: usize = 0;
pub(crate) const MOVABLE: usize = 1;
pub(crate) const RECLAIMABLE: usize = 2;

/// Why a state cannot be modelled. All mean *no verdict*.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsupported {
    /// Whether free lists agree with pageblocks is seen in the kernel's types, and said by its release.
    #[error("the kernel's types are not those of its release")]
    Kernel,
    /// More than one node, or a setting.
    #[error("the model does not yet know {0}")]
    Machine(&'static str),
    /// The state breaks an invariant: what follows from it means nothing.
    #[error("the state to start from breaks {invariant} in {zone}: {text}")]
    Broken {
        /// The invariant.
        invariant: &'static str,
        /// The zone.
        zone: String,
        /// In words.
        text: String,
    },
    /// The zone is larger than links reach.
    #[error("zone {0} is too large: it spans 1 TiB or more")]
    Size(String),
}

/// The allocator of a machine.
#[derive(Clone)]
pub struct Model {
    pub(crate) semantics: Semantics,
    /// Numbers of the types that are not the same in every kernel.
    pub(crate) types: TypeNumbers,
    /// Populated zones of the node, lowest first.
    pub zones: Vec<Zone>,
}

/// Numbers of the migratetypes that depend on the configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TypeNumbers {
    pub(crate) highatomic: usize,
    pub(crate) cma: Option<usize>,
    pub(crate) isolate: Option<usize>,
}

impl Model {
    /// The model of a machine in this state.
    ///
    /// # Errors
    /// See [`Unsupported`].
    pub fn new(state: &State, semantics: Semantics) -> Result<Self, Unsupported> {
        Self::check(state, semantics)?;
        let types = TypeNumbers {
            highatomic: state.type_number(MigrateType::HighAtomic).ok_or(Unsupported::Kernel)?,
            cma: state.type_number(MigrateType::Cma),
            isolate: state.type_number(MigrateType::Isolate),
        };
        let zones: Result<Vec<Zone>, Unsupported> =
            state.zones.iter().map(|zone| Zone::new(state, zone, types, semantics)).collect();
        Ok(Self { semantics, types, zones: zones? })
    }

    /// Whether a state can be modelled, but for the size of its zones.
    ///
    /// # Errors
    /// See [`Unsupported`].
    pub fn check(state: &State, semantics: Semantics) -> Result<(), Unsupported> {
        if state.hygiene != semantics.freelist_hygiene {
            return Err(Unsupported::Kernel);
        }
        if state.zones.iter().any(|zone| zone.node != 0) {
            return Err(Unsupported::Machine("more than one node"));
        }
        if state.zones.iter().any(|zone| zone.cpus.is_empty()) {
            return Err(Unsupported::Machine("a machine without a CPU"));
        }
        if state.settings.defrag_mode {
            return Err(Unsupported::Machine("vm.defrag_mode"));
        }
        if state.settings.one_type {
            return Err(Unsupported::Machine("a guest too small to tell migratetypes apart"));
        }
        for zone in &state.zones {
            // A kernel that miscounts merged guards miscounts from boot on: the model goes on from what it counted.
            let known = |name: &str| name == "I2" && !semantics.counts_merged_guards;
            let mut broken = crate::check::frozen::check(state, zone).into_iter();
            if let Some(broken) = broken.find(|broken| !known(broken.invariant)) {
                let (invariant, text) = (broken.invariant, broken.text);
                return Err(Unsupported::Broken { invariant, zone: zone.label(), text });
            }
        }
        Ok(())
    }

    /// How often each rule decided so far, in all zones.
    #[must_use]
    pub fn rules(&self) -> [u64; Rule::ALL.len()] {
        let mut sum = [0; Rule::ALL.len()];
        for zone in &self.zones {
            sum.iter_mut().zip(&zone.rules).for_each(|(sum, count)| *sum += count);
        }
        sum
    }

    /// The same, and counts anew from here on.
    pub(crate) fn take_rules(&mut self) -> [u64; Rule::ALL.len()] {
        let rules = self.rules();
        self.zones.iter_mut().for_each(|zone| zone.rules = Default::default());
        rules
    }

    /// The zone that a pfn belongs to.
    pub(crate) fn zone_of(&mut self, pfn: u64) -> Option<&mut Zone> {
        self.zones.iter_mut().find(|zone| zone.contains(pfn))
    }
}
