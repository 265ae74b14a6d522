//! `cargo xtask ci`: everything that must hold before a change lands.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use host::process::{Group, WaitError};

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
    /// Install missing tools through apt.
    #[arg(long)]
    install_deps: bool,
}

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
        tools::install(progress, &[Work::Source, Work::Packages, Work::Build, Work::Run])?;
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
    let parts: [(&str, &[&str]); 5] = [
        ("format", &["fmt", "--all", "--check"]),
        (
            "lints",
            &["clippy", "--workspace", "--all-targets", "--features", "full-matrix", "--", "-D", "warnings"],
        ),
        ("documentation", &["doc", "--workspace", "--no-deps", "--document-private-items", "--quiet"]),
        ("fast tests", &["test", "--workspace"]),
        ("real kernels", real),
    ];
    let start = Instant::now();
    for (part, arguments) in parts {
        let began = Instant::now();
        progress.line(&format!("ci: {part}"));
        cargo(progress, part, arguments)?;
        progress.line(&format!("ci: {part} passed in {}", seconds(began.elapsed())));
    }
    progress.line(&format!("ci: all passed in {}", seconds(start.elapsed())));
    Ok(())
}

fn cargo(progress: &Progress, part: &'static str, arguments: &[&str]) -> Result<(), CiError> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments).current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    command.env("RUSTDOCFLAGS", "-D warnings");
    let repeat = format!("cargo {}", arguments.join(" "));
    progress.command(&repeat);
    let not_run = |why: String| CiError::NotRun { part, why };
    let mut group = Group::spawn(&mut command).map_err(|error| not_run(error.to_string()))?;
    match group.wait_until(Instant::now() + LIMIT) {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(CiError::Failed { part, repeat }),
        Err(WaitError::Interrupted) => Err(CiError::Interrupted),
        Err(error) => Err(not_run(error.to_string())),
    }
}
