//! `cargo xtask ci`: everything that must hold before a change lands.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use host::process::{Group, WaitError, shell_line};

use crate::kernel::Kind;
use crate::progress::{Progress, seconds};
use crate::tools::{self, MissingTools, Work};

/// A part may take this long; all kernels of `--full` from an empty cache take most of it.
const LIMIT: Duration = Duration::from_secs(4 * 3600);

/// What to run.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Ci {
    /// Every kernel of the catalogue in both flavours, not only those that show each kind of result.
    #[arg(long)]
    full: bool,
    /// Only this part.
    #[arg(long, value_name = "PART", value_parser = PARTS)]
    only: Option<String>,
    /// Install missing tools through apt.
    #[arg(long)]
    install_deps: bool,
}

const PARTS: [&str; 6] = ["format", "lints", "documentation", "fast tests", "real kernels", "fuzzing"];

/// Why the suite did not pass.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CiError {
    /// Tools are missing.
    #[error(transparent)]
    Tools(#[from] MissingTools),
    /// A part failed.
    #[error("failed: {part}\n  repeat it with: {repeat}")]
    Failed {
        /// Which part.
        part: &'static str,
        /// The line that runs it alone.
        repeat: String,
    },
    /// A part could not be run.
    #[error("failed to run {part}: {why}")]
    NotRun {
        /// Which part.
        part: &'static str,
        /// Why.
        why: String,
    },
    /// The user stopped it.
    #[error("interrupted")]
    Interrupted,
}

impl CiError {
    /// What this failure means for the exit code: a failed suite is a finding.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Failed { .. } => 1,
            Self::Tools(_) | Self::NotRun { .. } => Kind::NoVerdict.exit_code(),
            Self::Interrupted => Kind::Interrupted.exit_code(),
        }
    }
}

/// Runs every part in turn and stops at the first that fails.
///
/// # Errors
/// See [`CiError`].
pub(crate) fn run(progress: &Progress, flags: &Ci) -> Result<(), CiError> {
    if flags.install_deps {
        tools::install(progress, &[Work::Source, Work::Packages, Work::Build, Work::Run, Work::Fuzz])?;
    }
    let real: &[&str] = if flags.full {
        &[
            "test",
            "--package",
            "xtask",
            "--features",
            "full-matrix",
            "--test",
            "real_kernels",
            "--",
            "--nocapture",
            "--test-threads=1",
        ]
    } else {
        &[
            "test",
            "--package",
            "xtask",
            "--features",
            "real-kernels",
            "--test",
            "real_kernels",
            "--",
            "--nocapture",
            "--test-threads=1",
        ]
    };
    let start = Instant::now();
    for part in PARTS.into_iter().filter(|part| flags.only.as_deref().is_none_or(|only| only == *part)) {
        let began = Instant::now();
        progress.line(&format!("ci: {part}"));
        match part {
            "format" => cargo(progress, part, &["fmt", "--all", "--check"]),
            "lints" => cargo(
                progress,
                part,
                &[
                    "clippy",
                    "--workspace",
                    "--all-targets",
                    "--features",
                    "full-matrix",
                    "--",
                    "-D",
                    "warnings",
                ],
            ),
            "documentation" => cargo(
                progress,
                part,
                &["doc", "--workspace", "--no-deps", "--document-private-items", "--quiet"],
            ),
            "fast tests" => cargo(progress, part, &["test", "--workspace"]),
            "real kernels" => cargo(progress, part, real),
            _ => fuzz(progress),
        }?;
        progress.line(&format!("ci: {part} passed in {}", seconds(began.elapsed())));
    }
    progress.line(&format!("ci: all passed in {}", seconds(start.elapsed())));
    Ok(())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn cargo_command() -> Command {
    Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

fn cargo(progress: &Progress, part: &'static str, arguments: &[&str]) -> Result<(), CiError> {
    let mut command = cargo_command();
    command.args(arguments).env("RUSTDOCFLAGS", "-D warnings");
    execute(progress, part, &mut command, format!("cargo {}", arguments.join(" ")))
}

/// What makes rustc instrument code for libFuzzer: a pass of LLVM's, so stable rustc has it. The address sanitizer would take a
/// nightly one, and our code has next to no `unsafe`.
const INSTRUMENT: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";
/// With a target named, flags do not reach build scripts and macros.
const FUZZ_TARGET: &str = "x86_64-unknown-linux-gnu";
/// Program, seconds that it runs, bytes of an input at most, whether it gets an image of a real kernel.
const FUZZERS: [(&str, u32, u32, bool); 3] =
    [("btf", 20, 8192, false), ("ram", 15, 1024, false), ("ram", 15, 1024, true)];

/// Builds the fuzzers of `host/fuzz` and runs each for a while: no panic, no input that takes ten seconds or a GiB.
fn fuzz(progress: &Progress) -> Result<(), CiError> {
    const PART: &str = "fuzzing";
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from);
    let folder = target.join("fuzz");
    let build =
        ["build", "--manifest-path", "host/fuzz/Cargo.toml", "--release", "--quiet", "--target", FUZZ_TARGET];
    let mut command = cargo_command();
    command.args(build).arg("--target-dir").arg(&folder).env("RUSTFLAGS", INSTRUMENT);
    command.env_remove("CARGO_ENCODED_RUSTFLAGS");
    let line = format!("RUSTFLAGS='{INSTRUMENT}' {}", shell_line(&command));
    execute(progress, PART, &mut command, line)?;
    // The test of planted faults leaves it there.
    let image = target.join("tmp/small-7.2.image");
    for (name, limit_s, max_bytes, real) in FUZZERS {
        if real && !image.is_file() {
            continue;
        }
        let corpus = tempfile::tempdir().and_then(|corpus| {
            // Changes to a whole image or section, of which there are none yet.
            std::fs::write(corpus.path().join("none"), [1])?;
            Ok(corpus)
        });
        let corpus = corpus.map_err(|error| CiError::NotRun { part: PART, why: error.to_string() })?;
        let mut command = Command::new(folder.join(FUZZ_TARGET).join("release").join(name));
        command.args(["-seed=1", "-timeout=10", "-rss_limit_mb=1024", "-len_control=0", "-verbosity=0"]);
        command.args([
            "-print_final_stats=1",
            &format!("-max_total_time={limit_s}"),
            &format!("-max_len={max_bytes}"),
        ]);
        command.arg(format!("-artifact_prefix={}/{name}-", folder.display())).arg(corpus.path());
        let mut line = shell_line(&command);
        if real {
            command.env("BUDDYDIFF_FUZZ_IMAGE", &image);
            line = format!("BUDDYDIFF_FUZZ_IMAGE={} {line}", image.display());
        }
        execute(progress, PART, &mut command, line)?;
    }
    Ok(())
}

fn execute(
    progress: &Progress,
    part: &'static str,
    command: &mut Command,
    repeat: String,
) -> Result<(), CiError> {
    command.current_dir(root());
    progress.command(&repeat);
    let not_run = |why: String| CiError::NotRun { part, why };
    let mut group = Group::spawn(command).map_err(|error| not_run(error.to_string()))?;
    match group.wait_until(Instant::now() + LIMIT) {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(CiError::Failed { part, repeat }),
        Err(WaitError::Interrupted) => Err(CiError::Interrupted),
        Err(error) => Err(not_run(error.to_string())),
    }
}
