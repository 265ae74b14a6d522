//! `cargo xtask test-kernel`: build two kernels, run scripts in each, and say what is wrong with the patched one.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use guest_agent::script::Script;
use host::pair::{self, Event, Plan, Subject};
use host::report::{Kernel, Report, Role, table};
use host::vm::choose;

use super::guest::{self, DEFAULT_KERNEL, GuestError, GuestFlags, OutputFlags};
use crate::agent;
use crate::kernel::{Built, Kernels, Kind, PairRequest};
use crate::progress::{Progress, Task, seconds};
use crate::scripts;

/// What `test-kernel` takes where nothing is said.
const DEFAULT_SERIES: &str = "guard-accounting";
const DEFAULT_SCRIPT: &str = "guard-delta";

/// What to test and how.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TestKernel {
    // Not a doc comment: rustdoc would take the brackets for a link.
    #[arg(
        long,
        value_name = "SPEC",
        conflicts_with_all = ["base", "patched"],
        help = "The kernel, with and without the series: a catalogue name, deb:PKG[=VERSION][@SUITE], git:DIR@REV, \
                dir:PATH, tar:FILE or vmlinux:FILE [default: 6.12 with guard-accounting]"
    )]
    kernel: Option<String>,
    /// The patches on top: a name in kernels/patches, an mbox or a text with mails, a folder of patches, or `-` for mails
    /// on stdin.
    #[arg(long, value_name = "NAME|FILE|DIR|-", conflicts_with_all = ["base", "patched"])]
    series: Option<String>,
    /// A whole kernel as base.
    #[arg(long, value_name = "SPEC", requires = "patched")]
    base: Option<String>,
    /// A whole kernel as patched.
    #[arg(long, value_name = "SPEC", requires = "base")]
    patched: Option<String>,
    /// Scripts to run: names in guest-agent/scripts, or files [default: guard-delta].
    #[arg(long, value_name = "NAME|FILE")]
    script: Vec<String>,
    #[command(flatten)]
    guest: GuestFlags,
    /// Run each script this often.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,
    /// Seed for whatever a script draws at random.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    outputs: OutputFlags,
    /// Install missing tools through apt.
    #[arg(long)]
    install_deps: bool,
}

/// Tests, prints the table on stderr and the JSON where it is asked for, and gives the exit code.
///
/// # Errors
/// Where the command makes no sense or the user stopped it, or nothing could be written. Whatever else prevents a verdict
/// is in the report.
pub(crate) fn run(progress: &Progress, flags: &TestKernel) -> Result<u8, GuestError> {
    flags.outputs.check()?;
    let report = match test(progress, flags) {
        Ok(report) => {
            progress.line(table(&report).trim_end());
            report
        }
        Err(error) if error.kind() == Kind::NoVerdict => {
            progress.line(&error.to_string());
            Report::no_verdict(error.to_string())
        }
        Err(error) => return Err(error),
    };
    flags.outputs.write(&report, || report.summary())?;
    Ok(report.verdict.exit_code())
}

fn test(progress: &Progress, flags: &TestKernel) -> Result<Report, GuestError> {
    let start = Instant::now();
    // What can be wrong with the command comes first: a build takes minutes.
    let scripts = read_scripts(flags)?;
    guest::need_tools(progress, flags.install_deps)?;

    let batches = scripts.iter().any(|(_, script)| script.has_batches());
    let pair = Kernels::open(progress)?.pair(&request(flags, batches))?;
    for title in &pair.present {
        progress.line(&format!("already in the source, so reversed for base: {title}"));
    }
    let agent = agent::build(progress)?;
    let (backend, why) = choose::choose(flags.guest.backend, flags.guest.deterministic);
    progress.line(&format!("backend: {} ({why})", backend.name()));
    let plan = Plan {
        backend: backend.as_ref(),
        agent: &agent,
        scripts: &scripts,
        memory_mib: flags.guest.memory,
        cpus: flags.guest.cpus,
        deterministic: flags.guest.deterministic,
        seed: flags.seed,
        boot_limit: Duration::from_secs(flags.guest.boot_limit),
        repeat: flags.repeat,
        keep: flags.guest.keep.clone(),
    };
    let guests = Instant::now();
    let watcher = Watcher::new(progress);
    let subjects = [subject(Role::Base, &pair.base), subject(Role::Patched, &pair.patched)];
    let runs = pair::run(&plan, subjects, &|event| watcher.event(event))?;
    let (whole, outside) = (start.elapsed(), start.elapsed().saturating_sub(guests.elapsed()));
    progress.line(&format!("{} of wall time, {} of it outside the guests", seconds(whole), seconds(outside)));
    let kernels = vec![kernel(Role::Base, &pair.base), kernel(Role::Patched, &pair.patched)];
    Ok(Report::new(kernels, runs, pair.no_change))
}

/// With the driver where a script runs batches.
fn request(flags: &TestKernel, driver: bool) -> PairRequest {
    let (mut kernel, mut series) = (flags.kernel.clone(), flags.series.clone());
    if flags.base.is_none() && kernel.is_none() {
        kernel = Some(DEFAULT_KERNEL.to_owned());
        series = series.or_else(|| Some(DEFAULT_SERIES.to_owned()));
    }
    PairRequest {
        kernel,
        series,
        base: flags.base.clone(),
        patched: flags.patched.clone(),
        flavour: flags.guest.flavour,
        driver,
    }
}

fn read_scripts(flags: &TestKernel) -> Result<Vec<(String, Script)>, GuestError> {
    let names = if flags.script.is_empty() { vec![DEFAULT_SCRIPT.to_owned()] } else { flags.script.clone() };
    let mut read = Vec::new();
    for name in names {
        let (file, text) = scripts::read(&name)?;
        let script = Script::parse(&file, &text)?;
        script.unroll(&file, flags.guest.memory.unwrap_or(script.memory_mib))?;
        let short = file.rsplit('/').next().unwrap_or(&file).trim_end_matches(".toml").to_owned();
        read.push((short, script));
    }
    Ok(read)
}

fn subject(role: Role, built: &Built) -> Subject<'_> {
    let semantics = guest::semantics(built).map(|(semantics, _)| semantics);
    Subject { role, name: &built.release, vmlinux: &built.vmlinux, semantics }
}

pub(crate) fn kernel(role: Role, built: &Built) -> Kernel {
    Kernel {
        role,
        spec: built.spec.clone(),
        release: built.release.clone(),
        flavour: built.flavour.to_string(),
        build_id: built.build_id.clone(),
        series: built.series.clone(),
    }
}

/// Shows each guest's line while it runs.
struct Watcher<'a> {
    progress: &'a Progress,
    tasks: Mutex<HashMap<String, Task<'a>>>,
}

impl<'a> Watcher<'a> {
    fn new(progress: &'a Progress) -> Self {
        Self { progress, tasks: Mutex::new(HashMap::new()) }
    }

    fn event(&self, event: Event<'_>) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Starts { command } => self.progress.command(command),
            Event::Does { guest, what } => {
                tasks.entry(guest.to_owned()).or_insert_with(|| self.progress.task(guest)).say(what);
            }
            Event::Ended { guest, how } => {
                if let Some(task) = tasks.remove(guest) {
                    task.done(how);
                }
            }
        }
    }
}
