//! Frozen checkpoints: reads the allocator out of a machine that stands still, and checks it.

use std::fs::File;
use std::time::Duration;

use serde::Serialize;

use crate::check::frozen::{Allocated, Broken};
use crate::check::{self, Violation};
use crate::observe::frozen::{self, Kernel, Kind, MigrateType, Ram, State, Zone};
use crate::run::{Bell, FrozenObserver, RunError};
use crate::vm::{Machine, RamLayout};

/// How often a machine is let go on for a little because a vCPU stands in the middle of the allocator.
const TRIES: u32 = 20;
/// How long it goes on each time. All of it is far less than the agent waits.
const LITTLE: Duration = Duration::from_millis(2);
/// Time for a machine to stop.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// What a frozen checkpoint gave.
#[derive(Clone, Debug)]
pub struct Observation {
    /// The checkpoint.
    pub checkpoint: String,
    /// What was read, or why nothing could be.
    pub outcome: Result<Frozen, String>,
}

/// What was read at one instant.
#[derive(Clone, Debug)]
pub struct Frozen {
    /// Populated zones.
    pub zones: Vec<ZoneFigures>,
    /// Broken invariants.
    pub violations: Vec<Violation>,
    /// How often the machine had to go on for a little because a lock was held.
    pub retries: u32,
}

/// A zone at one instant; figures in pages.
#[derive(Clone, Debug, Serialize)]
pub struct ZoneFigures {
    /// Its name, with its node where that is not 0.
    #[serde(skip)]
    pub zone: String,
    /// Pages given to the allocator.
    pub managed_pages: u64,
    /// NR_FREE_PAGES with what every CPU holds back.
    pub free_pages: i64,
    /// What the CPUs hold back of it.
    pub held_back: i64,
    /// Pages on all free lists, isolated ones too.
    pub buddy_pages: u64,
    /// Pages on the free lists that should be counted as free, less `free_pages`.
    pub delta: i64,
    /// Guard pages.
    pub guard_pages: u64,
    /// Pages on per-CPU lists.
    pub pcp_pages: u64,
    /// Pages on their way to the free lists.
    pub deferred_pages: u64,
    /// Pages allocated.
    pub allocated_pages: u64,
    /// Free pages on ISOLATE lists.
    pub isolated_pages: u64,
}

/// Reads and checks each frozen checkpoint of one run.
pub struct Freezer<'a> {
    kernel: &'a Kernel,
    sink: Option<&'a mut Sink<'a>>,
    before: Option<Allocated>,
    /// What was seen, in order.
    pub observations: Vec<Observation>,
}

/// Takes what was read at a checkpoint.
pub type Sink<'a> = dyn FnMut(Seen<'_>) -> Result<(), RunError> + 'a;

/// What a [`Sink`] takes.
#[derive(Clone, Copy)]
pub struct Seen<'a> {
    /// The checkpoint.
    pub checkpoint: &'a str,
    /// What was read.
    pub state: &'a State,
    /// What is wrong with it.
    pub violations: &'a [Violation],
    /// The RAM that it was read from, as long as the machine stands still.
    pub ram: &'a Ram,
    /// The same as a file.
    pub file: &'a File,
    /// Where RAM lies in that file.
    pub layout: RamLayout,
}

impl<'a> Freezer<'a> {
    /// For a run of `kernel`. `sink` gets each state as it is read.
    #[must_use]
    pub fn new(kernel: &'a Kernel, sink: Option<&'a mut Sink<'a>>) -> Self {
        Self { kernel, sink, before: None, observations: Vec::new() }
    }
}

impl FrozenObserver for Freezer<'_> {
    fn look(&mut self, machine: &mut dyn Machine, bell: Bell<'_>) -> Result<(), RunError> {
        let (file, layout) = machine.ram();
        let ram =
            Ram::map(file, layout).map_err(|source| RunError::Io { doing: "map the guest's RAM", source })?;
        let mut retries = 0;
        let held = loop {
            let held = match frozen::locks_held(self.kernel, &ram) {
                Ok(held) => held,
                Err(error) => break Err(error),
            };
            // A vCPU that rang holds no lock, so with one there is nothing to wait for.
            if held.is_empty() || bell.cpus == 1 || retries == TRIES {
                break Ok(held);
            }
            retries += 1;
            machine.resume()?;
            std::thread::sleep(LITTLE);
            machine.stop(STOP_LIMIT)?;
        };
        let outcome = match held {
            Err(error) => Err(error.to_string()),
            Ok(held) if held.is_empty() => match State::read(self.kernel, &ram) {
                Ok(state) => {
                    let mut frozen = Frozen::new(bell.checkpoint, &state, retries);
                    let now = Allocated::of(&state);
                    if let (Some(before), Some(now)) = (self.before, now) {
                        let broken = check::frozen::events(&before, &now);
                        frozen.violations.extend(broken.map(|broken| violation(bell.checkpoint, "", broken)));
                    }
                    self.before = now;
                    if let Some(sink) = &mut self.sink {
                        let (file, layout) = machine.ram();
                        let (checkpoint, violations) = (bell.checkpoint, &frozen.violations[..]);
                        sink(Seen { checkpoint, state: &state, violations, ram: &ram, file, layout })?;
                    }
                    Ok(frozen)
                }
                Err(error) => Err(error.to_string()),
            },
            Ok(held) => Err(format!("locks are held, still after {retries} tries: {}", held.join(", "))),
        };
        self.observations.push(Observation { checkpoint: bell.checkpoint.to_owned(), outcome });
        Ok(())
    }
}

impl Frozen {
    /// Figures and findings of a state.
    #[must_use]
    pub fn new(checkpoint: &str, state: &State, retries: u32) -> Self {
        let zones = state.zones.iter().map(|zone| ZoneFigures::new(state, zone)).collect();
        Self { zones, violations: violations(checkpoint, state), retries }
    }

    /// The figures of a zone.
    #[must_use]
    pub fn zone(&self, label: &str) -> Option<&ZoneFigures> {
        self.zones.iter().find(|zone| zone.zone == label)
    }
}

fn violation(checkpoint: &str, zone: &str, broken: Broken) -> Violation {
    Violation {
        checkpoint: checkpoint.to_owned(),
        zone: zone.to_owned(),
        invariant: broken.invariant,
        expected: broken.expected,
        found: broken.found,
        pfn: broken.pfn,
        pages: Some(broken.pages),
        text: broken.text,
    }
}

/// Every broken invariant of a state.
#[must_use]
pub fn violations(checkpoint: &str, state: &State) -> Vec<Violation> {
    let of_zone = |zone: &Zone| {
        let label = zone.label();
        let broken = check::frozen::check(state, zone).into_iter();
        let violations: Vec<Violation> = broken.map(|broken| violation(checkpoint, &label, broken)).collect();
        violations
    };
    state.zones.iter().flat_map(of_zone).collect()
}

impl ZoneFigures {
    fn new(state: &State, zone: &Zone) -> Self {
        let kinds = zone.kinds();
        let isolate = state.type_number(MigrateType::Isolate);
        let isolated_pages = zone.listed_pages(|number| Some(number) == isolate);
        let buddy_pages = zone.listed_pages(|_| true);
        let free_pages = zone.counter("NR_FREE_PAGES").unwrap_or(0);
        Self {
            zone: zone.label(),
            managed_pages: zone.managed,
            free_pages,
            held_back: zone.counter_number("NR_FREE_PAGES").map_or(0, |number| zone.held_back(number)),
            buddy_pages,
            delta: state.delta(zone),
            guard_pages: kinds.of(Kind::Guard),
            pcp_pages: kinds.of(Kind::Pcp),
            deferred_pages: kinds.of(Kind::Deferred),
            allocated_pages: kinds.allocated(),
            isolated_pages,
        }
    }
}
