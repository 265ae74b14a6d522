//! buddydiff's host side as one program, for machines that have no kernel sources and no compilers: kernels, agent and
//! scripts are given as files.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use guest_agent::script::Script;
use host::pair::{self, Event, Plan, Subject};
use host::report::{Kernel, Report, Role, output, table};
use host::run::RunError;
use host::vm::VmError;
use host::vm::choose::{self, BackendChoice};

/// Run allocation scripts in prebuilt kernels.
#[derive(Debug, Parser)]
#[command(name = "buddydiff", disable_version_flag = true)]
struct Flags {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run scripts in two kernels and say what is wrong with the patched one.
    ///
    /// Exit codes: 0 the patched kernel is consistent, 1 it is not, 2 usage, 125 no verdict, 130 interrupted.
    Test(Box<Test>),
    /// Measure how fast KVM runs guest kernel code here.
    #[command(hide = true, name = choose::PROBE_VERB)]
    ProbeKvm,
}

#[derive(Debug, clap::Args)]
struct Test {
    /// Image of the base kernel: an ELF vmlinux with a PVH entry.
    #[arg(long, value_name = "VMLINUX")]
    base: PathBuf,
    /// Image of the patched kernel.
    #[arg(long, value_name = "VMLINUX")]
    patched: PathBuf,
    /// The guest agent's static binary.
    #[arg(long, value_name = "FILE")]
    agent: PathBuf,
    /// Scripts.
    #[arg(long, value_name = "FILE", required = true)]
    script: Vec<PathBuf>,
    /// What runs the guests.
    #[arg(long, value_enum, default_value_t)]
    backend: BackendChoice,
    /// Make two runs of one image equal to the byte.
    #[arg(long)]
    deterministic: bool,
    /// RAM of each guest in MiB [default: the script's].
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(64..=65536))]
    memory: Option<u32>,
    /// Keep the files of each run below this folder.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    if let Err(error) = host::process::catch_interrupts() {
        eprintln!("failed to catch interrupts: {error}");
        return ExitCode::from(125);
    }
    match flags.verb {
        Verb::ProbeKvm => choose::print_probe(),
        Verb::Test(flags) => test(&flags).unwrap_or_else(|(code, text)| {
            eprintln!("{text}");
            ExitCode::from(code)
        }),
    }
}

/// Prints the table on stderr and the report as JSON on stdout. An error is an exit code and its reason.
fn test(flags: &Test) -> Result<ExitCode, (u8, String)> {
    let mut scripts = Vec::new();
    for path in &flags.script {
        let name = path.display().to_string();
        let script = Script::parse(&name, &read_text(path)?).map_err(|error| (2, error.to_string()))?;
        let short = path.file_stem().map_or_else(|| name.clone(), |stem| stem.to_string_lossy().into_owned());
        scripts.push((short, script));
    }
    let agent = std::fs::read(&flags.agent).map_err(|error| unreadable(&flags.agent, &error))?;
    let (backend, why) = choose::choose(flags.backend, flags.deterministic);
    eprintln!("backend: {} ({why})", backend.name());
    let plan = Plan {
        backend: backend.as_ref(),
        agent: &agent,
        scripts: &scripts,
        memory_mib: flags.memory,
        cpus: 1,
        deterministic: flags.deterministic,
        seed: 1,
        boot_limit: Duration::from_secs(120),
        repeat: 1,
        keep: flags.keep.clone(),
    };
    let subject = |role, vmlinux| Subject { role, name: "kernel", vmlinux, semantics: None };
    let subjects = [subject(Role::Base, &flags.base), subject(Role::Patched, &flags.patched)];
    let runs = pair::run(&plan, subjects, &|event| match event {
        Event::Starts { command } => eprintln!("+ {command}"),
        Event::Does { guest, what } => eprintln!("{guest}: {what}"),
        Event::Ended { guest, how } => eprintln!("{guest}: {how}"),
    });
    let runs = runs.map_err(|error| match error {
        RunError::Script(_) => (2, error.to_string()),
        RunError::Vm(VmError::Interrupted) => (130, error.to_string()),
        _ => (125, error.to_string()),
    })?;
    let kernels = vec![kernel(Role::Base, &flags.base), kernel(Role::Patched, &flags.patched)];
    let report = Report::new(kernels, runs, false);
    eprint!("{}", table(&report));
    output::json(&report, std::io::stdout().lock())
        .map_err(|error| (125, format!("failed to write the report: {error}")))?;
    Ok(ExitCode::from(report.verdict.exit_code()))
}

fn kernel(role: Role, path: &Path) -> Kernel {
    Kernel {
        role,
        spec: format!("vmlinux:{}", path.display()),
        release: String::new(),
        flavour: String::new(),
        build_id: String::new(),
        series: Vec::new(),
    }
}

fn read_text(path: &Path) -> Result<String, (u8, String)> {
    std::fs::read_to_string(path).map_err(|error| unreadable(path, &error))
}

fn unreadable(path: &Path, error: &std::io::Error) -> (u8, String) {
    (2, format!("failed to read {}: {error}", path.display()))
}
