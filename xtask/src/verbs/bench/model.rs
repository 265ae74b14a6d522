//! `cargo xtask bench model`: the model alone in a zone of 64 GiB, beside the frame allocator of a crate.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use host::model::{Fresh, FreshZone, Model, Semantics};
use host::process::{Group, shell_line};
use serde::{Deserialize, Serialize};

use crate::progress::Progress;
use crate::verbs::guest::{self, GuestError};

/// The release that is modelled.
const RELEASE: &str = "7.3.4";
/// Pages of the zone.
const PAGES: u64 = 64 << 30 >> 12;
/// Time for building and running the benches.
const LIMIT: Duration = Duration::from_secs(30 * 60);
/// The sequences of `host/benches/model.rs`.
const SEQUENCES: [&str; 3] = ["lifo", "stack", "random"];

/// See [`super::BenchVerb::Model`].
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ModelFlags {
    /// Write the figures as JSON to a file, or to stdout for `-`.
    #[arg(long, value_name = "-|FILE")]
    json: Option<PathBuf>,
}

/// The figures.
#[derive(Debug, Serialize)]
struct Figures {
    pages: u64,
    /// Making the model of a frozen state, checks of the state included, in milliseconds.
    build_ms: f64,
    /// Memory that the model takes, in bytes a page.
    bytes_a_page: f64,
    sequences: Vec<Sequence>,
}

/// Pages allocated and freed a second, in millions; medians.
#[derive(Debug, Serialize)]
struct Sequence {
    name: &'static str,
    model: f64,
    buddy_system_allocator: f64,
    /// The first by the second.
    ratio: f64,
}

/// Criterion's files.
#[derive(Deserialize)]
struct Estimates {
    median: Estimate,
}

#[derive(Deserialize)]
struct Estimate {
    /// Nanoseconds.
    point_estimate: f64,
}

#[derive(Deserialize)]
struct Benchmark {
    throughput: Throughput,
}

#[derive(Deserialize)]
struct Throughput {
    #[serde(rename = "Elements")]
    elements: f64,
}

/// Measures and prints a table on stderr, and the JSON where it is asked for.
///
/// # Errors
/// See [`GuestError`].
pub(crate) fn run(progress: &Progress, flags: &ModelFlags) -> Result<(), GuestError> {
    let (build_ms, bytes_a_page) = build()?;
    progress
        .line(&format!("a zone of {PAGES} pages: built in {build_ms:.0} ms, {bytes_a_page:.3} bytes a page"));
    let folder = tempfile::tempdir().map_err(|error| undecided("make a folder", &error))?;
    let task = progress.task("cargo bench of the model");
    criterion(progress, folder.path())?;
    task.done("measured");
    let mut sequences = Vec::new();
    progress.line("sequence  million pairs a second  buddy_system_allocator  ratio");
    for name in SEQUENCES {
        let [model, other] = ["model", "buddy_system_allocator"]
            .map(|who| millions(&folder.path().join("model").join(name).join(who)));
        let (model, other) = (model?, other?);
        let sequence = Sequence { name, model, buddy_system_allocator: other, ratio: model / other };
        progress.line(&format!("{name:<8}  {model:>22.1}  {other:>22.1}  {:>5.1}", sequence.ratio));
        sequences.push(sequence);
    }
    let figures = Figures { pages: PAGES, build_ms, bytes_a_page, sequences };
    flags.json.as_ref().map_or(Ok(()), |path| guest::write_json(path, &figures))
}

/// Milliseconds to make the model, and the bytes a page that it takes.
fn build() -> Result<(f64, f64), GuestError> {
    let zone = FreshZone { index: 2, start: 1 << 20, pages: PAGES, watermarks: [16_384, 32_768, 49_152] };
    let state = Fresh {
        zones: vec![zone],
        pageblock_order: 9,
        guard_minorder: 0,
        smp: true,
        per_cpu: (63, 252, 504),
    }
    .state();
    let semantics = Semantics::of(RELEASE, true).ok_or_else(|| undecided("model", &RELEASE))?;
    let before = crate::PEAK.current_usage();
    let start = Instant::now();
    let model = Model::new(&state, semantics).map_err(|error| undecided("make the model", &error))?;
    let took = start.elapsed();
    let bytes = crate::PEAK.current_usage().saturating_sub(before);
    drop(model);
    Ok((took.as_secs_f64() * 1e3, bytes as f64 / PAGES as f64))
}

/// Runs the criterion bench, which leaves its files in `folder`.
fn criterion(progress: &Progress, folder: &Path) -> Result<(), GuestError> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(["bench", "--quiet", "--package", "host", "--bench", "model", "--", "--noplot", "--quiet"])
        .env("CRITERION_HOME", folder)
        .current_dir(&root)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    progress.command(&shell_line(&command));
    let mut group = Group::spawn(&mut command).map_err(|error| undecided("start cargo", &error))?;
    match group.wait_until(Instant::now() + LIMIT) {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(GuestError::Undecided(format!("cargo bench failed: {status}"))),
        Err(error) => Err(undecided("wait for cargo bench", &error)),
    }
}

/// Millions of elements a second of one bench, by criterion's files.
fn millions(folder: &Path) -> Result<f64, GuestError> {
    let estimates: Estimates = read(&folder.join("new/estimates.json"))?;
    let benchmark: Benchmark = read(&folder.join("new/benchmark.json"))?;
    Ok(benchmark.throughput.elements / estimates.median.point_estimate * 1e3)
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, GuestError> {
    let text = std::fs::read(path).map_err(|source| GuestError::Read { path: path.to_owned(), source })?;
    serde_json::from_slice(&text).map_err(|error| undecided("read criterion's figures", &error))
}

fn undecided(doing: &str, why: &dyn std::fmt::Display) -> GuestError {
    GuestError::Undecided(format!("failed to {doing}: {why}"))
}
