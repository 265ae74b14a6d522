//! `cargo xtask test-kernel`: build two kernels, run scripts in each, and say what is wrong with the patched one.

use std::time::Instant;

use host::report::{Report, Role, table};

use super::guest::{self, DEFAULT_KERNEL, GuestError, GuestFlags, OutputFlags};
use super::runner::{self, Runner};
use crate::kernel::{Kernels, Kind, PairRequest};
use crate::progress::{Progress, seconds};

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
    let names = if flags.script.is_empty() { vec![DEFAULT_SCRIPT.to_owned()] } else { flags.script.clone() };
    let scripts = runner::read_scripts(&names, &flags.guest)?;
    guest::need_tools(progress, flags.install_deps)?;

    let batches = scripts.iter().any(|(_, script)| script.has_batches());
    let pair = Kernels::open(progress)?.pair(&request(flags, batches))?;
    for title in &pair.present {
        progress.line(&format!("already in the source, so reversed for base: {title}"));
    }
    let mut runner = Runner::new(progress, &flags.guest)?;
    (runner.seed, runner.repeat) = (flags.seed, flags.repeat);
    let guests = Instant::now();
    let runs = runner.run(&scripts, &pair.base, &pair.patched)?;
    let (whole, outside) = (start.elapsed(), start.elapsed().saturating_sub(guests.elapsed()));
    progress.line(&format!("{} of wall time, {} of it outside the guests", seconds(whole), seconds(outside)));
    let kernels = vec![runner::kernel(Role::Base, &pair.base), runner::kernel(Role::Patched, &pair.patched)];
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
