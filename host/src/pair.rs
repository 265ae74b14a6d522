//! Scripts in a base and a patched kernel: which guests run, when, and side by side or not.

use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_agent::script::{self, Script};

use crate::freeze::Freezer;
use crate::fuzz::Fuzzer;
use crate::model::Semantics;
use crate::observe::frozen::{ImageError, Kernel};
use crate::report::{Role, RunName, RunReport};
use crate::run::{self, BatchBell, Bell, FrozenObserver, News, Outcome, RunConfig, RunError};
use crate::vm::{Backend, Machine};

/// What a guest takes of the host besides its RAM, in MiB: QEMU itself and its translations.
const OVERHEAD_MIB: u64 = 400;

/// How to run every guest.
pub struct Plan<'a> {
    /// What makes the machines.
    pub backend: &'a dyn Backend,
    /// The agent's binary.
    pub agent: &'a [u8],
    /// Scripts with their names.
    pub scripts: &'a [(String, Script)],
    /// RAM in MiB where it is not the scripts'.
    pub memory_mib: Option<u32>,
    /// vCPUs of each guest. Deterministic ones have one.
    pub cpus: u32,
    /// Whether two runs must be equal to the byte.
    pub deterministic: bool,
    /// Seed for whatever a step draws at random.
    pub seed: u64,
    /// Time from start to agent ready.
    pub boot_limit: Duration,
    /// How often each script runs.
    pub repeat: u32,
    /// Where to keep the files of each run.
    pub keep: Option<PathBuf>,
}

/// One of the two kernels.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// Its part.
    pub role: Role,
    /// Its name for people.
    pub name: &'a str,
    /// The image.
    pub vmlinux: &'a Path,
    /// What the model predicts its batches by; none where the model does not know it.
    pub semantics: Option<Semantics>,
}

/// What there is to watch. The guest is named by role, kernel and script.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A machine is about to be started.
    Starts {
        /// The line that does it.
        command: &'a str,
    },
    /// A guest goes on to something else.
    Does {
        /// Which guest.
        guest: &'a str,
        /// What it does now.
        what: &'a str,
    },
    /// A guest has ended.
    Ended {
        /// Which guest.
        guest: &'a str,
        /// How, in words.
        how: &'a str,
    },
}

/// Runs every script in both kernels, base first in the result. `watch` is called from several threads.
///
/// # Errors
/// Where a run could not be tried; whatever the guests do is in the reports.
pub fn run(
    plan: &Plan<'_>,
    [base, patched]: [Subject<'_>; 2],
    watch: &(dyn Fn(Event<'_>) + Sync),
) -> Result<Vec<RunReport>, RunError> {
    let looks = plan.scripts.iter().any(|(_, script)| script.looks());
    let load = |subject: Subject<'_>| looks.then(|| Kernel::load(subject.vmlinux));
    let kernels = [load(base), load(patched)];
    let mut reports = Vec::new();
    for (name, script) in plan.scripts {
        for round in 1..=plan.repeat {
            let one = |subject: Subject<'_>| {
                let [of_base, of_patched] = &kernels;
                let kernel = if subject.role == Role::Base { of_base } else { of_patched };
                run_one(plan, (name, script), round, subject, kernel.as_ref(), watch)
            };
            if side_by_side(u64::from(plan.memory_mib.unwrap_or(script.memory_mib))) {
                let (of_base, of_patched) = std::thread::scope(|scope| {
                    let of_base = scope.spawn(|| one(base));
                    let of_patched = one(patched);
                    // A panic is a bug of ours; it goes on as one.
                    (of_base.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), of_patched)
                });
                reports.extend([of_base?, of_patched?]);
            } else {
                reports.extend([one(base)?, one(patched)?]);
            }
        }
    }
    Ok(reports)
}

fn run_one(
    plan: &Plan<'_>,
    (script_name, script): (&str, &Script),
    round: u32,
    subject: Subject<'_>,
    kernel: Option<&Result<Kernel, ImageError>>,
    watch: &(dyn Fn(Event<'_>) + Sync),
) -> Result<RunReport, RunError> {
    let role = subject.role.name();
    let keep = plan.keep.as_ref().map(|folder| folder.join(format!("{script_name}-{role}-{round}")));
    let config = RunConfig {
        vmlinux: subject.vmlinux,
        agent: plan.agent,
        script_name,
        script,
        memory_mib: plan.memory_mib,
        cpus: if plan.deterministic { 1 } else { plan.cpus },
        deterministic: plan.deterministic,
        seed: plan.seed,
        boot_limit: plan.boot_limit,
        keep: keep.as_deref(),
    };
    let guest = format!("{role} {}, {script_name}", subject.name);
    let steps = script.unroll(script_name, plan.memory_mib.unwrap_or(script.memory_mib))?;
    let batches = script::batches(&steps) > 0;
    let mut observer = match kernel {
        Some(Ok(kernel)) => Some(Observer {
            freezer: Freezer::new(kernel, None),
            fuzzer: subject
                .semantics
                .filter(|_| batches)
                .map(|semantics| Fuzzer::new(kernel, semantics, &steps, plan.seed, u64::MAX)),
        }),
        _ => None,
    };
    let looking = observer.as_mut().map(|observer| observer as &mut dyn FrozenObserver);
    let run = run::run(plan.backend, &config, looking, &mut |news| {
        watch(match news {
            News::Command(command) => Event::Starts { command },
            News::Does(what) => Event::Does { guest: &guest, what },
        });
    })?;
    let how = match run.outcome {
        Outcome::Complete { .. } => "ran to its end",
        Outcome::GuestFailure(_) => "failed",
        Outcome::NoVerdict(_) => "has no verdict",
    };
    watch(Event::Ended { guest: &guest, how });
    let name = RunName {
        role: subject.role,
        script: script_name,
        round,
        backend: plan.backend.name(),
        deterministic: plan.deterministic,
    };
    let (observations, predicted) = match observer {
        Some(Observer { freezer, fuzzer }) => (freezer.observations, fuzzer.map(Fuzzer::finish)),
        None => (Vec::new(), None),
    };
    let mut report = RunReport::new(name, run, &observations, predicted);
    if let (true, Some(Err(error))) = (script.looks(), kernel) {
        let why = format!("{} cannot serve to read the guest's memory: {error}", subject.vmlinux.display());
        report.no_verdict.get_or_insert(why);
    } else if batches && subject.semantics.is_none() {
        let why = format!("the model does not know {}, so it predicts no batches of it", subject.name);
        report.no_verdict.get_or_insert(why);
    }
    Ok(report)
}

/// Looks at frozen checkpoints, and predicts batches.
struct Observer<'a> {
    freezer: Freezer<'a>,
    fuzzer: Option<Fuzzer<'a>>,
}

impl FrozenObserver for Observer<'_> {
    fn look(&mut self, machine: &mut dyn Machine, bell: Bell<'_>) -> Result<(), RunError> {
        self.freezer.look(machine, bell)
    }

    fn batch(&mut self, machine: &mut dyn Machine, bell: BatchBell) -> Result<(), RunError> {
        self.fuzzer.as_mut().map_or(Ok(()), |fuzzer| fuzzer.batch(machine, bell))
    }
}

/// Whether the host has two cores, and memory for two guests of this size.
fn side_by_side(memory_mib: u64) -> bool {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    cores >= 2 && available_mib().is_none_or(|available| available > 2 * (memory_mib + OVERHEAD_MIB))
}

/// Memory of the host that can be had without swapping, in MiB.
fn available_mib() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib >> 10)
}
