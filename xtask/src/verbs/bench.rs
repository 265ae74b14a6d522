//! `cargo xtask bench`: how long our own work takes, as ratios within one run.

mod model;

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use guest_agent::script::Script;
use host::freeze;
use host::observe::frozen::{Kernel, Ram, ReadError, State, struct_pages_sum};
use host::run::{self, Bell, FrozenObserver, Outcome, RunConfig, RunError};
use host::vm::Machine;
use host::vm::choose::{self, BackendChoice};
use serde::Serialize;

use super::guest::{self, GuestError};
use crate::agent;
use crate::kernel::{Flavour, Kernels};
use crate::progress::Progress;
use crate::scripts;

/// What to measure.
#[derive(Clone, Debug, clap::Subcommand)]
pub(crate) enum BenchVerb {
    /// Freeze, read and check guests of several sizes, against reading their struct pages once.
    Frozen(Frozen),
    /// Pages allocated and freed a second by the model alone, against the crate buddy_system_allocator; building it; memory.
    Model(model::ModelFlags),
}

/// See [`BenchVerb::Frozen`].
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Frozen {
    /// The kernel.
    #[arg(long, value_name = "SPEC", default_value = "7.2")]
    kernel: String,
    /// Sizes of the guests in GiB.
    #[arg(long, value_name = "GIB", value_delimiter = ',', default_value = "1,4,16,64")]
    gib: Vec<u32>,
    /// Rounds of which the median is taken.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Write the figures as JSON to a file, or to stdout for `-`.
    #[arg(long, value_name = "-|FILE")]
    json: Option<PathBuf>,
}

/// The figures of one guest.
#[derive(Clone, Debug, Serialize)]
struct Figures {
    gib: u32,
    struct_pages: u64,
    /// Reading every word of the struct pages once, through a fresh mapping, in milliseconds.
    sum_ms: f64,
    /// Reading the state and checking it, through a fresh mapping, in milliseconds.
    read_and_check_ms: f64,
    /// The second by the first.
    ratio: f64,
    /// Nanoseconds a page of the second.
    ns_a_page: f64,
    /// Most memory that the second took at a time, in bytes a page of the guest.
    peak_bytes_a_page: f64,
    /// Violations that it found.
    violations: usize,
}

/// Measures at the first checkpoint.
struct Measure<'a> {
    kernel: &'a Kernel,
    gib: u32,
    rounds: u32,
    figures: Option<Result<Figures, ReadError>>,
}

impl Measure<'_> {
    fn measure(&self, machine: &dyn Machine) -> io::Result<Result<Figures, ReadError>> {
        let (file, layout) = machine.ram();
        let pages = layout.all_bytes / 4096;
        let (mut sums, mut reads, mut struct_pages, mut peak, mut violations) =
            (Vec::new(), Vec::new(), 0, 0, 0);
        for _ in 0..self.rounds {
            let start = Instant::now();
            let ram = Ram::map(file, layout)?;
            match struct_pages_sum(self.kernel, &ram) {
                // The sum is used, so it is made.
                Ok((count, sum)) => struct_pages = std::hint::black_box((count, sum)).0,
                Err(error) => return Ok(Err(error)),
            }
            sums.push(start.elapsed());
            drop(ram);

            crate::PEAK.reset_peak_usage();
            let before = crate::PEAK.current_usage();
            let start = Instant::now();
            let ram = Ram::map(file, layout)?;
            match State::read(self.kernel, &ram) {
                Ok(state) => violations = freeze::violations("bench", &state).len(),
                Err(error) => return Ok(Err(error)),
            }
            reads.push(start.elapsed());
            peak = peak.max(crate::PEAK.peak_usage().saturating_sub(before));
        }
        let (sum, read) = (median(&mut sums), median(&mut reads));
        Ok(Ok(Figures {
            gib: self.gib,
            struct_pages,
            sum_ms: sum.as_secs_f64() * 1e3,
            read_and_check_ms: read.as_secs_f64() * 1e3,
            ratio: read.as_secs_f64() / sum.as_secs_f64(),
            ns_a_page: read.as_secs_f64() * 1e9 / struct_pages.max(1) as f64,
            peak_bytes_a_page: peak as f64 / pages.max(1) as f64,
            violations,
        }))
    }
}

impl FrozenObserver for Measure<'_> {
    fn look(&mut self, machine: &mut dyn Machine, _: Bell<'_>) -> Result<(), RunError> {
        let figures =
            self.measure(machine).map_err(|source| RunError::Io { doing: "map the guest's RAM", source })?;
        self.figures = Some(figures);
        Ok(())
    }
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

/// Measures what the verb says.
///
/// # Errors
/// See [`GuestError`].
pub(crate) fn run(progress: &Progress, verb: &BenchVerb) -> Result<(), GuestError> {
    match verb {
        BenchVerb::Frozen(flags) => frozen(progress, flags),
        BenchVerb::Model(flags) => model::run(progress, flags),
    }
}

/// Measures and prints a table on stderr, and the JSON where it is asked for.
fn frozen(progress: &Progress, flags: &Frozen) -> Result<(), GuestError> {
    guest::need_tools(progress, false)?;
    let (file, text) = scripts::read("boot")?;
    let script = Script { capture: Vec::new(), ..Script::parse(&file, &text)? };
    let built = Kernels::open(progress)?.one(&flags.kernel, None, Flavour::Smp, false)?;
    let kernel = guest::load(&built.vmlinux, &[])?;
    let agent = agent::build(progress)?;
    let (backend, _) = choose::choose(BackendChoice::Auto, false);
    let mut all = Vec::new();
    progress.line("  GiB  struct pages    sum ms  read and check ms  ratio  ns a page  peak bytes a page");
    for &gib in &flags.gib {
        let mut measure = Measure { kernel: &kernel, gib, rounds: flags.rounds, figures: None };
        let config = RunConfig {
            vmlinux: &built.vmlinux,
            agent: &agent,
            script_name: "boot",
            script: &script,
            memory_mib: Some(gib.saturating_mul(1024)),
            cpus: 1,
            deterministic: false,
            seed: 1,
            boot_limit: Duration::from_secs(300),
            keep: None,
        };
        let task = progress.task(&format!("{} of {gib} GiB", built.release));
        let run = run::run(backend.as_ref(), &config, Some(&mut measure), &mut |_| ())?;
        task.done("measured");
        let unmeasured =
            |why: String| GuestError::Undecided(format!("the guest of {gib} GiB was not measured: {why}"));
        let figures = match (measure.figures, run.outcome) {
            (Some(Ok(figures)), _) => figures,
            (Some(Err(error)), _) => return Err(unmeasured(error.to_string())),
            (None, Outcome::NoVerdict(why)) => return Err(unmeasured(why.to_string())),
            (None, Outcome::GuestFailure(why)) => return Err(unmeasured(why.to_string())),
            (None, Outcome::Complete { .. }) => return Err(unmeasured("it did not ring".into())),
        };
        progress.line(&format!(
            "{:>5} {:>13} {:>9.1} {:>18.1} {:>6.2} {:>10.1} {:>18.2}",
            figures.gib,
            figures.struct_pages,
            figures.sum_ms,
            figures.read_and_check_ms,
            figures.ratio,
            figures.ns_a_page,
            figures.peak_bytes_a_page
        ));
        all.push(figures);
    }
    if let Some(path) = &flags.json {
        guest::write_json(path, &all)?;
    }
    Ok(())
}
