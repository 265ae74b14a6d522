//! What came of a test: schema 1 of the JSON report, the verdict, and the table for people.

pub mod formats;
pub mod inspect;
pub mod output;
mod table;
mod verdict;

use serde::Serialize;

use crate::check::console::{self, ConsoleReport};
use crate::check::{self, Violation};
use crate::freeze::{Frozen, Observation, ZoneFigures};
use crate::fuzz::{Divergence, Fuzzed};
use crate::observe::Checkpoint;
use crate::run::{Outcome, Run};

pub use table::{findings, table};
pub use verdict::Verdict;

/// Version of the JSON. Fields may be added, not changed.
const SCHEMA: u32 = 1;

/// A whole test.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    schema: u32,
    /// What the test says of the patched kernel.
    pub verdict: Verdict,
    /// Why, where there is no verdict.
    pub reason: Option<String>,
    /// Whether base and patched are the same image.
    pub no_change: bool,
    /// The kernels: base, then patched.
    pub kernels: Vec<Kernel>,
    /// The runs.
    pub runs: Vec<RunReport>,
}

/// A kernel's part in a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Without what is tested.
    Base,
    /// With it.
    Patched,
}

impl Role {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Base => "base",
            Self::Patched => "patched",
        }
    }
}

/// A kernel under test.
#[derive(Clone, Debug, Serialize)]
pub struct Kernel {
    /// Its part.
    pub role: Role,
    /// Resolved, so that it gives the same kernel again.
    pub spec: String,
    /// `uname -r`.
    pub release: String,
    /// `smp` or `up`.
    pub flavour: String,
    /// Names the build.
    pub build_id: String,
    /// Titles of the patches of the series that it holds.
    pub series: Vec<String>,
}

/// One guest's run.
#[derive(Clone, Debug, Serialize)]
pub struct RunReport {
    /// Which kernel.
    pub role: Role,
    /// Which script.
    pub script: String,
    /// Which repetition, from 1.
    pub round: u32,
    /// `qemu-tcg`, `qemu-kvm`.
    pub backend: String,
    /// Whether it repeats to the byte.
    pub deterministic: bool,
    /// Why the run has no verdict.
    pub no_verdict: Option<String>,
    /// How the guest failed.
    pub guest_failure: Option<String>,
    /// Wall time in which the machine existed, in seconds.
    pub wall_s: f64,
    /// Wall time from start to agent ready, in seconds.
    pub boot_s: Option<f64>,
    /// The guest's own clock at its last word, in seconds since its boot.
    pub guest_s: f64,
    /// What was observed.
    pub checkpoints: Vec<CheckpointReport>,
    /// Broken invariants.
    pub violations: Vec<Violation>,
    /// Batches of operations that were held to the model page by page; none where the script has none.
    pub batches: u64,
    /// Operations of them.
    pub operations: u64,
    /// Batches in which the kernel and the model disagree.
    pub diverged: u64,
    /// The first of them.
    pub divergences: Vec<Divergence>,
    /// What the kernel reported on its console.
    pub console: Vec<ConsoleReport>,
    /// What the kernel's taint says went wrong.
    pub taint: Vec<&'static str>,
    /// The console's last lines, where the run did not end well.
    pub console_tail: Option<String>,
    /// The line that starts the machine by hand.
    pub command: String,
}

/// One checkpoint.
#[derive(Clone, Debug, Serialize)]
pub struct CheckpointReport {
    /// Its name.
    pub name: String,
    /// Whether nothing moved while the texts were read.
    pub still: bool,
    /// Whether the machine stood still for a look into its memory.
    pub frozen: bool,
    /// Populated zones.
    pub zones: Vec<ZoneReport>,
}

/// One zone at a checkpoint; figures in pages, by `/proc` where nothing else is said.
#[derive(Clone, Debug, Serialize)]
pub struct ZoneReport {
    /// Its name, with its node where that is not 0.
    pub zone: String,
    /// `nr_free_pages`.
    pub free_pages: i64,
    /// Pages on the free lists, by buddyinfo.
    pub buddy_pages: u64,
    /// `buddy_pages` less `free_pages`.
    pub delta: i64,
    /// The size of a difference that has an innocent reason.
    pub allowance: i64,
    /// Guard pages: only a look into frozen memory can tell.
    pub guard_pages: Option<u64>,
    /// The same zone at one instant, where the checkpoint is frozen.
    pub frozen: Option<FrozenZoneReport>,
}

/// A zone at one instant, read out of frozen memory; figures in pages.
#[derive(Clone, Debug, Serialize)]
pub struct FrozenZoneReport {
    /// What was read.
    #[serde(flatten)]
    pub figures: ZoneFigures,
    /// By how much the delta of `/proc` is off for no other reason than that buddyinfo and nr_free_pages were read at two
    /// instants: what it is, less what it would have been at this one.
    pub reading_skew: i64,
}

impl ZoneReport {
    /// Pages on the free lists that are not counted as free: at one instant where the checkpoint is frozen.
    #[must_use]
    pub fn best_delta(&self) -> i64 {
        self.frozen.as_ref().map_or(self.delta, |frozen| frozen.figures.delta)
    }
}

impl Report {
    /// Puts together what came of a test, and judges it.
    #[must_use]
    pub fn new(kernels: Vec<Kernel>, runs: Vec<RunReport>, no_change: bool) -> Self {
        let (verdict, reason) = verdict::judge(&runs);
        Self { schema: SCHEMA, verdict, reason, no_change, kernels, runs }
    }

    /// A test that never came to a run.
    #[must_use]
    pub fn no_verdict(reason: String) -> Self {
        Self {
            schema: SCHEMA,
            verdict: Verdict::NoVerdict,
            reason: Some(reason),
            no_change: false,
            kernels: Vec::new(),
            runs: Vec::new(),
        }
    }

    /// The same without what differs between two equal runs: wall times, and paths in commands.
    #[must_use]
    pub fn redacted(&self) -> Self {
        let mut report = self.clone();
        for run in &mut report.runs {
            run.wall_s = 0.0;
            run.boot_s = None;
            run.command.clear();
        }
        report
    }

    fn kernel(&self, role: Role) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.role == role)
    }
}

/// What a run is called in a report.
#[derive(Clone, Copy, Debug)]
pub struct RunName<'a> {
    /// Which kernel.
    pub role: Role,
    /// Which script.
    pub script: &'a str,
    /// Which repetition, from 1.
    pub round: u32,
    /// Which backend.
    pub backend: &'a str,
    /// Whether it repeats to the byte.
    pub deterministic: bool,
}

impl RunReport {
    /// Checks all that a run gave; `frozen` is what its frozen checkpoints gave, in order, and `predicted` what came of
    /// its batches.
    #[must_use]
    pub fn new(name: RunName<'_>, run: Run, frozen: &[Observation], predicted: Option<Fuzzed>) -> Self {
        let predicted = predicted.unwrap_or_default();
        let mut report = Self {
            role: name.role,
            script: name.script.to_owned(),
            round: name.round,
            backend: name.backend.to_owned(),
            deterministic: name.deterministic,
            no_verdict: None,
            guest_failure: None,
            wall_s: run.wall_s,
            boot_s: run.boot_s,
            guest_s: run.guest_s,
            checkpoints: Vec::new(),
            violations: Vec::new(),
            batches: predicted.batches,
            operations: predicted.operations,
            diverged: predicted.diverged,
            divergences: predicted.divergences,
            console: console::scan(&run.console, run.boot_s.is_some()),
            taint: Vec::new(),
            console_tail: run.console_tail,
            command: run.command,
        };
        match run.outcome {
            Outcome::Complete { tainted } => report.taint = console::taint_findings(tainted),
            Outcome::GuestFailure(failure) => report.guest_failure = Some(failure.to_string()),
            Outcome::NoVerdict(reason) => report.no_verdict = Some(reason.to_string()),
        }
        if let Some(why) = predicted.no_verdict {
            report.no_verdict.get_or_insert(why);
        }
        // Also what was seen in a guest that then died before its texts came.
        for observation in frozen {
            match &observation.outcome {
                Ok(frozen) => report.violations.extend(frozen.violations.iter().cloned()),
                Err(why) => {
                    let text =
                        format!("checkpoint {}: failed to read frozen memory: {why}", observation.checkpoint);
                    report.no_verdict.get_or_insert(text);
                }
            }
        }
        for raw in &run.checkpoints {
            let frozen = frozen.iter().find(|observation| observation.checkpoint == raw.name);
            let frozen = frozen.and_then(|observation| observation.outcome.as_ref().ok());
            match Checkpoint::parse(raw) {
                Ok(checkpoint) => {
                    // What was judged exactly is not judged again by texts that cannot be exact.
                    let exact = |violation: &Violation| {
                        frozen.is_some()
                            && check::frozen::INVARIANTS.iter().any(|(name, _)| *name == violation.invariant)
                    };
                    report
                        .violations
                        .extend(check::check(&checkpoint).into_iter().filter(|found| !exact(found)));
                    report.checkpoints.push(CheckpointReport::new(&checkpoint, frozen));
                }
                Err(error) => report.no_verdict = Some(error.to_string()),
            }
        }
        report
    }
}

impl CheckpointReport {
    fn new(checkpoint: &Checkpoint, frozen: Option<&Frozen>) -> Self {
        let zones = checkpoint.buddyinfo.iter().filter_map(|lists| {
            let zone = checkpoint.zoneinfo.iter().find(|zone| zone.id == lists.id)?;
            let free_pages = zone.get("free")?;
            let label = lists.id.to_string();
            let delta = 0_i64.saturating_add_unsigned(lists.pages).saturating_sub(free_pages);
            let frozen = frozen.and_then(|frozen| frozen.zone(&label)).map(|figures| {
                // As /proc would have shown it then: without what CPUs hold back, and with isolated pages.
                let counted = figures.free_pages.saturating_sub(figures.held_back);
                let at_once = 0_i64.saturating_add_unsigned(figures.buddy_pages).saturating_sub(counted);
                FrozenZoneReport { figures: figures.clone(), reading_skew: delta.saturating_sub(at_once) }
            });
            Some(ZoneReport {
                zone: label,
                free_pages,
                buddy_pages: lists.pages,
                delta,
                allowance: check::free_pages_allowance(checkpoint, &lists.id),
                guard_pages: frozen.as_ref().map(|frozen| frozen.figures.guard_pages),
                frozen,
            })
        });
        let zones = zones.collect();
        Self { name: checkpoint.name.clone(), still: checkpoint.still, frozen: frozen.is_some(), zones }
    }
}

#[cfg(test)]
mod tests;
