//! `cargo xtask inspect`: boot one kernel, stop it, and print the exact state of its page allocator.

use std::fs::File;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::Duration;

use guest_agent::script::{Script, Step};
use host::check::Violation;
use host::freeze::{self, Freezer, Seen};
use host::image::{self, About};
use host::observe::frozen::{Kernel, Ram, ReadError, State};
use host::report::{self, Report, Role, RunName, RunReport, Verdict, inspect};
use host::run::{self, News, RunConfig, RunError};
use host::vm::RamLayout;
use host::vm::choose;
use serde_json::{Value, json};

use super::guest::{self, DEFAULT_KERNEL, GuestError, GuestFlags};
use super::runner;
use crate::agent;
use crate::kernel::Kernels;
use crate::progress::Progress;
use crate::scripts;

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
    #[command(flatten)]
    guest: GuestFlags,
    /// Put the driver into the kernel that runs batches of allocator operations; by itself it does nothing.
    #[arg(long)]
    driver: bool,
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
pub(crate) fn run(progress: &Progress, flags: &Inspect) -> Result<u8, GuestError> {
    let result = match (&flags.ram, &flags.vmlinux) {
        (Some(ram), Some(vmlinux)) => saved(flags, ram, vmlinux)?,
        _ => booted(progress, flags)?,
    };
    let mut text = String::new();
    if let Some(shown) = &result.shown {
        text.push_str(&shown.text);
        if let Some(path) = &flags.svg {
            guest::write_file(path, &shown.svg)?;
        }
    }
    text.push_str(&result.findings);
    if result.verdict == Verdict::Consistent {
        text.push_str("no violation\n");
    }
    if flags.json.as_deref().is_some_and(guest::is_stdout) {
        progress.line(text.trim_end());
    } else {
        guest::print(&text)?;
    }
    if let Some(folder) = &flags.save {
        guest::write_json(&folder.join("report.json"), &result.json)?;
    }
    if let Some(path) = &flags.json {
        guest::write_json(path, &result.json)?;
    }
    Ok(result.verdict.exit_code())
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
fn saved(flags: &Inspect, path: &Path, vmlinux: &Path) -> Result<Looked, GuestError> {
    let unreadable = |source| GuestError::Read { path: path.to_owned(), source };
    let about = image::about(path).map_err(unreadable)?;
    let file = File::open(path).map_err(unreadable)?;
    let all_bytes = file.metadata().map_err(unreadable)?.len();
    let layout = match (&about, flags.low_memory) {
        (Some(about), None) => about.layout(),
        (_, low) => RamLayout { low_bytes: all_bytes.min(low.unwrap_or(LOW_MEMORY_MIB) << 20), all_bytes },
    };
    let kernel = guest::load(vmlinux, &flags.variable)?;
    let ram = Ram::map(&file, layout).map_err(unreadable)?;
    let read = State::read(&kernel, &ram);
    let of_ram = |source| GuestError::Ram { path: path.to_owned(), source };
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
fn script(flags: &Inspect) -> Result<(Script, String, String), GuestError> {
    let (file, text) = scripts::read(flags.script.as_deref().unwrap_or(DEFAULT_SCRIPT))?;
    let mut script = Script::parse(&file, &text)?;
    script.freeze();
    let steps = script.unroll(&file, flags.guest.memory.unwrap_or(script.memory_mib))?;
    let checkpoints = steps.iter().filter_map(|step| match step {
        Step::Checkpoint(checkpoint) => Some(checkpoint.name.to_string()),
        _ => None,
    });
    let known: Vec<String> = checkpoints.collect();
    let wanted = flags.checkpoint.clone().or_else(|| known.last().cloned()).unwrap_or_default();
    if !known.contains(&wanted) {
        let known = known.join(", ");
        return Err(GuestError::Usage(format!("script {file} has no checkpoint {wanted}; it has: {known}")));
    }
    let short = file.rsplit('/').next().unwrap_or(&file).trim_end_matches(".toml").to_owned();
    Ok((script, short, wanted))
}

/// Boots a kernel and looks at each checkpoint of a script.
fn booted(progress: &Progress, flags: &Inspect) -> Result<Looked, GuestError> {
    let (script, script_name, wanted) = script(flags)?;
    guest::need_tools(progress, flags.install_deps)?;
    let spec = flags.kernel.as_deref().unwrap_or(DEFAULT_KERNEL);
    let built =
        Kernels::open(progress)?.one(spec, flags.series.as_deref(), flags.guest.flavour, flags.driver)?;
    let kernel = guest::load(&built.vmlinux, &flags.variable)?;
    let agent = agent::build(progress)?;
    let (backend, why) = choose::choose(flags.guest.backend, flags.guest.deterministic);
    progress.line(&format!("backend: {} ({why})", backend.name()));

    let mut shown = None;
    let mut states = Vec::new();
    let mut sink = |seen: Seen<'_>| {
        let variables = variables(flags, &kernel, seen.ram)
            .map_err(|error| RunError::Io { doing: "read a variable", source: io::Error::other(error) })?;
        states.push(of_state(seen.checkpoint, seen.state, seen.violations, &variables));
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
        memory_mib: flags.guest.memory,
        cpus: if flags.guest.deterministic { 1 } else { flags.guest.cpus },
        deterministic: flags.guest.deterministic,
        seed: 1,
        boot_limit: Duration::from_secs(flags.guest.boot_limit),
        keep: flags.guest.keep.as_deref(),
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
        deterministic: flags.guest.deterministic,
    };
    let observations = freezer.observations;
    let run = RunReport::new(name, run, &observations, None);
    let findings = report::findings(&built.release, &run);
    let report = Report::new(vec![runner::kernel(Role::Patched, &built)], vec![run], false);
    let mut json = serde_json::to_value(&report).unwrap_or_default();
    json["states"] = states.into();
    Ok(Looked { verdict: report.verdict, json, shown, findings })
}
