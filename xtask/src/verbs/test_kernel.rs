//! `cargo xtask test-kernel`: build two kernels, run scripts in each, and say what is wrong with the patched one.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use guest_agent::script::{Script, ScriptError};
use host::pair::{self, Event, Plan, Subject};
use host::report::{Kernel, Report, Role, table};
use host::run::RunError;
use host::vm::VmError;
use host::vm::choose::{self, BackendChoice};

use crate::agent::{self, AgentError};
use crate::kernel::{Built, Flavour, KernelError, Kernels, Kind, PairRequest};
use crate::progress::{Progress, Task, seconds};
use crate::scripts;
use crate::tools::{self, Work};

/// The pair that `test-kernel` takes where nothing is said.
pub(crate) const DEFAULT_KERNEL: &str = "6.12";
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
    /// The patches on top: a name in kernels/patches, an mbox or a text with mails, or a folder of patches.
    #[arg(long, value_name = "NAME|FILE|DIR", conflicts_with_all = ["base", "patched"])]
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
    /// smp has per-CPU page lists; up has none on 7.2 and later and is the quietest kernel there is; numa is smp with
    /// nodes.
    #[arg(long, value_enum, default_value_t)]
    flavour: Flavour,
    /// What runs the guests; auto measures whether KVM is worth using.
    #[arg(long, value_enum, default_value_t)]
    backend: BackendChoice,
    /// Make two runs of one image equal to the byte: TCG, one vCPU, instruction counting. Three to ten times slower.
    #[arg(long)]
    deterministic: bool,
    /// RAM of each guest in MiB [default: the script's].
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(64..=65536))]
    memory: Option<u32>,
    /// vCPUs of each guest.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    cpus: u32,
    /// Run each script this often.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repeat: u32,
    /// Seed for whatever a script draws at random.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds from start to agent ready, after which a kernel counts as not booting.
    #[arg(long, value_name = "S", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86400))]
    boot_limit: u64,
    /// Write the report as JSON to a file, or to stdout for `-`.
    #[arg(long, value_name = "-|FILE")]
    json: Option<PathBuf>,
    /// Keep the files of each run (initramfs, channel, console) below this folder.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Install missing tools through apt.
    #[arg(long)]
    install_deps: bool,
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TestError {
    /// The kernels.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A script.
    #[error(transparent)]
    Script(#[from] ScriptError),
    /// A script that cannot be found.
    #[error(transparent)]
    NoScript(#[from] scripts::NotFound),
    /// The agent.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// A run that could not be tried.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The report cannot be written.
    #[error("failed to write the report to {}: {source}", path.display())]
    Write {
        /// Where to.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

impl TestError {
    /// What this failure means for the exit code.
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::Kernel(error) => error.kind(),
            Self::Script(_) | Self::NoScript(_) | Self::Run(RunError::Script(_)) => Kind::Usage,
            Self::Agent(AgentError::Interrupted) | Self::Run(RunError::Vm(VmError::Interrupted)) => {
                Kind::Interrupted
            }
            Self::Agent(_) | Self::Run(_) | Self::Write { .. } => Kind::NoVerdict,
        }
    }
}

/// Tests, prints the table on stderr and the JSON where it is asked for, and gives the exit code.
///
/// # Errors
/// Where the command makes no sense or the user stopped it, or nothing could be written. Whatever else prevents a verdict
/// is in the report.
pub(crate) fn run(progress: &Progress, flags: &TestKernel) -> Result<u8, TestError> {
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
    if let Some(path) = &flags.json {
        let written = match path.to_str() {
            Some("-") => report.write(io::stdout().lock()),
            _ => report.write_to(path),
        };
        written.map_err(|source| TestError::Write { path: path.clone(), source })?;
    }
    Ok(report.verdict.exit_code())
}

fn test(progress: &Progress, flags: &TestKernel) -> Result<Report, TestError> {
    let start = Instant::now();
    // What can be wrong with the command comes first: a build takes minutes.
    let scripts = read_scripts(flags)?;
    if flags.install_deps {
        let works = [Work::Source, Work::Packages, Work::Build, Work::Run];
        tools::install(progress, &works).map_err(KernelError::from)?;
    }
    tools::require(&[Work::Run]).map_err(KernelError::from)?;

    let pair = Kernels::open(progress)?.pair(&request(flags))?;
    for title in &pair.present {
        progress.line(&format!("already in the source, so reversed for base: {title}"));
    }
    let agent = agent::build(progress)?;
    let (backend, why) = choose::choose(flags.backend, flags.deterministic);
    progress.line(&format!("backend: {} ({why})", backend.name()));
    let plan = Plan {
        backend: backend.as_ref(),
        agent: &agent,
        scripts: &scripts,
        memory_mib: flags.memory,
        cpus: flags.cpus,
        deterministic: flags.deterministic,
        seed: flags.seed,
        boot_limit: Duration::from_secs(flags.boot_limit),
        repeat: flags.repeat,
        keep: flags.keep.clone(),
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

fn request(flags: &TestKernel) -> PairRequest {
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
        flavour: flags.flavour,
        driver: false,
    }
}

fn read_scripts(flags: &TestKernel) -> Result<Vec<(String, Script)>, TestError> {
    let names = if flags.script.is_empty() { vec![DEFAULT_SCRIPT.to_owned()] } else { flags.script.clone() };
    let mut read = Vec::new();
    for name in names {
        let (file, text) = scripts::read(&name)?;
        let script = Script::parse(&file, &text)?;
        script.unroll(&file, flags.memory.unwrap_or(script.memory_mib))?;
        let short = file.rsplit('/').next().unwrap_or(&file).trim_end_matches(".toml").to_owned();
        read.push((short, script));
    }
    Ok(read)
}

fn subject(role: Role, built: &Built) -> Subject<'_> {
    Subject { role, name: &built.release, vmlinux: &built.vmlinux }
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
