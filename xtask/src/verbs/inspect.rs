//! `cargo xtask inspect`: boot one kernel, stop it, and print the exact state of its page allocator.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_agent::script::{Script, ScriptError, Step};
use host::check::Violation;
use host::freeze::{self, Freezer, Seen};
use host::image::{self, About};
use host::observe::frozen::{ImageError, Kernel, Ram, ReadError, State};
use host::report::inspect;
use host::report::{self, Report, Role, RunName, RunReport, Verdict};
use host::run::{self, News, RunConfig, RunError};
use host::vm::choose::{self, BackendChoice};
use host::vm::{RamLayout, VmError};
use serde_json::{Value, json};

use super::test_kernel::{self, DEFAULT_KERNEL};
use crate::agent::{self, AgentError};
use crate::kernel::{Flavour, KernelError, Kernels, Kind};
use crate::progress::Progress;
use crate::scripts;
use crate::tools::{self, Work};

/// The script where none is named.
const DEFAULT_SCRIPT: &str = "boot";
/// RAM below 4 GiB of an image that does not say it.
const LOW_MEMORY_MIB: u64 = 3072;

/// What to look at and how.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Inspect {
    // Not a doc comment: rustdoc would take the brackets for a link.
    #[arg(
        long,
        value_name = "SPEC",
        help = "The kernel: a catalogue name, deb:PKG[=VERSION][@SUITE], git:DIR@REV, dir:PATH, tar:FILE or \
                vmlinux:FILE [default: 6.12]"
    )]
    kernel: Option<String>,
    /// The patches on top: a name in kernels/patches, an mbox or a text with mails, or a folder of patches.
    #[arg(long, value_name = "NAME|FILE|DIR")]
    series: Option<String>,
    /// A script to run first; all its checkpoints are frozen [default: boot, which only boots].
    #[arg(long, value_name = "NAME|FILE")]
    script: Option<String>,
    /// The checkpoint to print and to save [default: the script's last].
    #[arg(long, value_name = "NAME")]
    checkpoint: Option<String>,
    /// smp has per-CPU page lists; up has none on 7.2 and later and is the quietest kernel there is.
    #[arg(long, value_enum, default_value_t)]
    flavour: Flavour,
    /// Put the driver into the kernel that runs batches of allocator operations; by itself it does nothing.
    #[arg(long)]
    driver: bool,
    /// What runs the guest; auto measures whether KVM is worth using.
    #[arg(long, value_enum, default_value_t)]
    backend: BackendChoice,
    /// Make two runs of one image equal to the byte.
    #[arg(long)]
    deterministic: bool,
    /// RAM of the guest in MiB [default: the script's].
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(64..=65536))]
    memory: Option<u32>,
    /// vCPUs of the guest.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    cpus: u32,
    /// Seconds from start to agent ready, after which the kernel counts as not booting.
    #[arg(long, value_name = "S", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86400))]
    boot_limit: u64,
    /// Look at RAM saved earlier instead of running a guest.
    #[arg(
        long,
        value_name = "FILE",
        requires = "vmlinux",
        conflicts_with_all = ["kernel", "series", "script", "checkpoint", "memory", "cpus", "deterministic", "keep", "save"]
    )]
    ram: Option<PathBuf>,
    /// The kernel that runs in the saved RAM.
    #[arg(long, value_name = "FILE", requires = "ram")]
    vmlinux: Option<PathBuf>,
    /// RAM below 4 GiB in MiB of saved RAM that has no image.json beside it [default: 3072, or all where there is less].
    #[arg(long, value_name = "MIB", requires = "ram")]
    low_memory: Option<u64>,
    /// Also read this global variable of the kernel at each checkpoint; may be given more than once.
    #[arg(long, value_name = "NAME")]
    variable: Vec<String>,
    /// Keep initramfs, channel, console and RAM of the run in this folder.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    /// Save RAM, kernel and report to this folder, so that a finding can be looked at again.
    #[arg(long, value_name = "DIR")]
    save: Option<PathBuf>,
    /// Draw the map of pageblocks as SVG to this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write everything as JSON to a file, or to stdout for `-`; the tables then go to stderr.
    #[arg(long, value_name = "-|FILE")]
    json: Option<PathBuf>,
    /// Install missing tools through apt.
    #[arg(long)]
    install_deps: bool,
}

/// Why there is nothing to print.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InspectError {
    /// The kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// The script.
    #[error(transparent)]
    Script(#[from] ScriptError),
    /// A script that cannot be found.
    #[error(transparent)]
    NoScript(#[from] scripts::NotFound),
    /// The script has no such checkpoint, or none at all.
    #[error("script {script} has no checkpoint {wanted}; it has: {}", known.join(", "))]
    NoCheckpoint {
        /// The script.
        script: String,
        /// What was asked for.
        wanted: String,
        /// What there is.
        known: Vec<String>,
    },
    /// The agent.
    #[error(transparent)]
    Agent(#[from] AgentError),
    /// The run could not be tried.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The vmlinux does not serve.
    #[error("{} cannot serve to read a guest's memory: {source}", path.display())]
    Vmlinux {
        /// The file.
        path: PathBuf,
        /// Why.
        source: ImageError,
    },
    /// The saved RAM cannot be read.
    #[error("failed to read the RAM in {}: {source}", path.display())]
    Ram {
        /// The file.
        path: PathBuf,
        /// Why.
        source: ReadError,
    },
    /// A file of the user's.
    #[error("failed to read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A result cannot be written.
    #[error("failed to write {}: {source}", path.display())]
    Write {
        /// Where to.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

impl InspectError {
    /// What this failure means for the exit code.
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::Kernel(error) => error.kind(),
            Self::Script(_) | Self::NoScript(_) | Self::NoCheckpoint { .. } | Self::Read { .. } => {
                Kind::Usage
            }
            Self::Run(RunError::Script(_)) => Kind::Usage,
            Self::Agent(AgentError::Interrupted) | Self::Run(RunError::Vm(VmError::Interrupted)) => {
                Kind::Interrupted
            }
            Self::Agent(_) | Self::Run(_) | Self::Vmlinux { .. } | Self::Ram { .. } | Self::Write { .. } => {
                Kind::NoVerdict
            }
        }
    }
}

/// What is shown of one state.
struct Shown {
    text: String,
    svg: String,
}

/// What is written: the report of the run, if there was one, and each state.
struct Looked {
    verdict: Verdict,
    json: Value,
    shown: Option<Shown>,
    findings: String,
}

/// Looks, prints tables and writes what was asked for; gives the exit code.
///
/// # Errors
/// Where the command makes no sense, the user stopped it, or there is nothing to look at.
pub(crate) fn run(progress: &Progress, flags: &Inspect) -> Result<u8, InspectError> {
    let result = match (&flags.ram, &flags.vmlinux) {
        (Some(ram), Some(vmlinux)) => saved(flags, ram, vmlinux)?,
        _ => booted(progress, flags)?,
    };
    let mut text = String::new();
    if let Some(shown) = &result.shown {
        text.push_str(&shown.text);
        if let Some(path) = &flags.svg {
            write(path, |file| file.write_all(shown.svg.as_bytes()))?;
        }
    }
    text.push_str(&result.findings);
    if result.verdict == Verdict::Consistent {
        text.push_str("no violation\n");
    }
    let to_stdout = flags.json.as_ref().is_some_and(|path| path.as_os_str() == "-");
    if to_stdout {
        progress.line(text.trim_end());
    } else {
        print(&text)?;
    }
    let mut json = serde_json::to_string_pretty(&result.json).unwrap_or_default();
    json.push('\n');
    if let Some(folder) = &flags.save {
        write(&folder.join("report.json"), |file| file.write_all(json.as_bytes()))?;
    }
    match &flags.json {
        Some(_) if to_stdout => print(&json)?,
        Some(path) => write(path, |file| file.write_all(json.as_bytes()))?,
        None => {}
    }
    Ok(result.verdict.exit_code())
}

fn print(text: &str) -> Result<(), InspectError> {
    match io::stdout().lock().write_all(text.as_bytes()) {
        // A reader that has seen enough, such as `head`.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(InspectError::Write { path: "stdout".into(), source: error })
        }
        _ => Ok(()),
    }
}

fn write(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> Result<(), InspectError> {
    let failed = |source| InspectError::Write { path: path.to_owned(), source };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    File::create(path).and_then(|mut file| write(&mut file)).map_err(failed)
}

fn show(state: &State, variables: &[(String, Vec<u64>)]) -> Shown {
    let colour = io::stdout().is_terminal();
    let text = format!(
        "{}\n{}\n{}\n{}",
        inspect::zones(state),
        inspect::free_lists(state),
        inspect::block_map(state, 64, colour),
        variable_lines(variables)
    );
    Shown { text, svg: inspect::svg(state) }
}

/// Findings one a line.
fn lines(violations: &[Violation]) -> String {
    let line = |violation: &Violation| {
        format!("{} broken in {}: {}\n", violation.invariant, violation.zone, violation.text)
    };
    violations.iter().map(line).collect()
}

/// Looks at an image that was saved earlier.
fn saved(flags: &Inspect, path: &Path, vmlinux: &Path) -> Result<Looked, InspectError> {
    let unreadable = |source| InspectError::Read { path: path.to_owned(), source };
    let about = image::about(path).map_err(unreadable)?;
    let file = File::open(path).map_err(unreadable)?;
    let all_bytes = file.metadata().map_err(unreadable)?.len();
    let layout = match (&about, flags.low_memory) {
        (Some(about), None) => about.layout(),
        (_, low) => RamLayout { low_bytes: all_bytes.min(low.unwrap_or(LOW_MEMORY_MIB) << 20), all_bytes },
    };
    let kernel = load(flags, vmlinux)?;
    let ram = Ram::map(&file, layout).map_err(unreadable)?;
    let read = State::read(&kernel, &ram);
    let of_ram = |source| InspectError::Ram { path: path.to_owned(), source };
    let state = read.map_err(of_ram)?;
    let variables = variables(flags, &kernel, &ram).map_err(of_ram)?;
    let checkpoint = about.as_ref().map_or("saved", |about| about.checkpoint.as_str());
    let violations = freeze::violations(checkpoint, &state);
    let verdict = if violations.is_empty() { Verdict::Consistent } else { Verdict::Violation };
    let json = json!({
        "schema": 1,
        "verdict": verdict,
        "image": about,
        "states": [of_state(checkpoint, &state, &violations, &variables)],
    });
    Ok(Looked { verdict, json, shown: Some(show(&state, &variables)), findings: lines(&violations) })
}

fn load(flags: &Inspect, vmlinux: &Path) -> Result<Kernel, InspectError> {
    Kernel::load_with(vmlinux, &flags.variable)
        .map_err(|source| InspectError::Vmlinux { path: vmlinux.to_owned(), source })
}

fn of_state(
    checkpoint: &str,
    state: &State,
    violations: &[Violation],
    variables: &[(String, Vec<u64>)],
) -> Value {
    let mut value = inspect::json(state, violations);
    value["checkpoint"] = checkpoint.into();
    value["variables"] = variables.iter().cloned().map(|(name, words)| (name, Value::from(words))).collect();
    value
}

/// The variables asked for.
fn variables(flags: &Inspect, kernel: &Kernel, ram: &Ram) -> Result<Vec<(String, Vec<u64>)>, ReadError> {
    flags.variable.iter().map(|name| Ok((name.clone(), kernel.variable(ram, name)?))).collect()
}

/// A line for each.
fn variable_lines(variables: &[(String, Vec<u64>)]) -> String {
    variables.iter().map(|(name, words)| format!("{name}: {words:?}\n")).collect()
}

/// The script with every checkpoint frozen, its short name, and the checkpoint to show.
fn script(flags: &Inspect) -> Result<(Script, String, String), InspectError> {
    let (file, text) = scripts::read(flags.script.as_deref().unwrap_or(DEFAULT_SCRIPT))?;
    let mut script = Script::parse(&file, &text)?;
    script.freeze();
    let steps = script.unroll(&file, flags.memory.unwrap_or(script.memory_mib))?;
    let checkpoints = steps.iter().filter_map(|step| match step {
        Step::Checkpoint(checkpoint) => Some(checkpoint.name.to_string()),
        _ => None,
    });
    let known: Vec<String> = checkpoints.collect();
    let wanted = flags.checkpoint.clone().or_else(|| known.last().cloned()).unwrap_or_default();
    if !known.contains(&wanted) {
        return Err(InspectError::NoCheckpoint { script: file, wanted, known });
    }
    let short = file.rsplit('/').next().unwrap_or(&file).trim_end_matches(".toml").to_owned();
    Ok((script, short, wanted))
}

/// Boots a kernel and looks at each checkpoint of a script.
fn booted(progress: &Progress, flags: &Inspect) -> Result<Looked, InspectError> {
    let (script, script_name, wanted) = script(flags)?;
    if flags.install_deps {
        let works = [Work::Source, Work::Packages, Work::Build, Work::Run];
        tools::install(progress, &works).map_err(KernelError::from)?;
    }
    tools::require(&[Work::Run]).map_err(KernelError::from)?;
    let spec = flags.kernel.as_deref().unwrap_or(DEFAULT_KERNEL);
    let built = Kernels::open(progress)?.one(spec, flags.series.as_deref(), flags.flavour, flags.driver)?;
    let kernel = load(flags, &built.vmlinux)?;
    let agent = agent::build(progress)?;
    let (backend, why) = choose::choose(flags.backend, flags.deterministic);
    progress.line(&format!("backend: {} ({why})", backend.name()));

    let mut shown = None;
    let mut states = Vec::new();
    let mut sink = |seen: Seen<'_>| {
        let violations = freeze::violations(seen.checkpoint, seen.state);
        let variables = variables(flags, &kernel, seen.ram).unwrap_or_default();
        states.push(of_state(seen.checkpoint, seen.state, &violations, &variables));
        if seen.checkpoint != wanted {
            return Ok(());
        }
        shown = Some(show(seen.state, &variables));
        let Some(folder) = &flags.save else { return Ok(()) };
        let about = About {
            low_bytes: seen.layout.low_bytes,
            all_bytes: seen.layout.all_bytes,
            spec: built.spec.clone(),
            release: built.release.clone(),
            script: script_name.clone(),
            checkpoint: seen.checkpoint.to_owned(),
        };
        image::save(folder, seen.file, &built.vmlinux, &about)
            .map_err(|source| RunError::Io { doing: "save the image", source })
    };
    let mut freezer = Freezer::new(&kernel, Some(&mut sink));
    let config = RunConfig {
        vmlinux: &built.vmlinux,
        agent: &agent,
        script_name: &script_name,
        script: &script,
        memory_mib: flags.memory,
        cpus: if flags.deterministic { 1 } else { flags.cpus },
        deterministic: flags.deterministic,
        seed: 1,
        boot_limit: Duration::from_secs(flags.boot_limit),
        keep: flags.keep.as_deref(),
    };
    let task = progress.task(&format!("{} {}, {script_name}", built.release, built.flavour));
    let run = run::run(backend.as_ref(), &config, Some(&mut freezer), &mut |news| match news {
        News::Command(command) => progress.command(command),
        News::Does(what) => task.say(what),
    })?;
    task.done("done");
    let name = RunName {
        role: Role::Patched,
        script: &script_name,
        round: 1,
        backend: backend.name(),
        deterministic: flags.deterministic,
    };
    let observations = freezer.observations;
    let run = RunReport::new(name, run, &observations);
    let findings = report::findings(&built.release, &run);
    let report = Report::new(vec![test_kernel::kernel(Role::Patched, &built)], vec![run], false);
    let mut json = serde_json::to_value(&report).unwrap_or_default();
    json["states"] = states.into();
    Ok(Looked { verdict: report.verdict, json, shown, findings })
}
