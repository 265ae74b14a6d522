//! What the verbs that run guests share: flags, failures, tools, and where results go.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use guest_agent::script::ScriptError;
use host::model::Semantics;
use host::observe::frozen::{ImageError, Kernel, ReadError};
use host::report::formats::{self, Summary};
use host::report::output;
use host::run::RunError;
use host::vm::VmError;
use host::vm::choose::BackendChoice;
use serde::Serialize;

use crate::agent::AgentError;
use crate::kernel::{Built, Flavour, KernelError, Kind};
use crate::progress::Progress;
use crate::scripts;
use crate::tools::{self, Work};

/// The kernel where none is named.
pub(crate) const DEFAULT_KERNEL: &str = "6.12";

/// How guests are run.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct GuestFlags {
    /// smp has per-CPU page lists; up has none on 7.2 and later and is the quietest kernel there is; numa is smp with
    /// nodes.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) flavour: Flavour,
    /// What runs the guests; auto measures whether KVM is worth using.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) backend: BackendChoice,
    /// Make two runs of one image equal to the byte: TCG, one vCPU, instruction counting. Three to ten times slower.
    #[arg(long)]
    pub(crate) deterministic: bool,
    /// RAM of each guest in MiB [default: the script's].
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(64..=65536))]
    pub(crate) memory: Option<u32>,
    /// vCPUs of each guest.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub(crate) cpus: u32,
    /// Seconds from start to agent ready, after which a kernel counts as not booting.
    #[arg(long, value_name = "S", default_value_t = 120, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub(crate) boot_limit: u64,
    /// Keep the files of each run (initramfs, channel, console, RAM) below this folder.
    #[arg(long, value_name = "DIR")]
    pub(crate) keep: Option<PathBuf>,
}

/// Where the result of a verb goes, besides the table on stderr.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct OutputFlags {
    /// Write the report as JSON to a file, or to stdout for `-`.
    #[arg(long, value_name = "-|FILE")]
    json: Option<PathBuf>,
    /// Write it as JUnit XML.
    #[arg(long, value_name = "-|FILE")]
    junit: Option<PathBuf>,
    /// Write it as KTAP.
    #[arg(long, value_name = "-|FILE")]
    ktap: Option<PathBuf>,
    /// Write it as the JSON list that `b4 review` takes from a check command.
    #[arg(long, value_name = "-|FILE")]
    b4: Option<PathBuf>,
}

impl OutputFlags {
    /// Stdout takes one document.
    ///
    /// # Errors
    /// [`GuestError::Usage`].
    pub(crate) fn check(&self) -> Result<(), GuestError> {
        let outputs = [&self.json, &self.junit, &self.ktap, &self.b4];
        if outputs.into_iter().flatten().filter(|path| is_stdout(path)).count() > 1 {
            return Err(GuestError::Usage("only one of the outputs can go to stdout".to_owned()));
        }
        Ok(())
    }

    /// Writes what is asked for.
    ///
    /// # Errors
    /// [`GuestError::Write`].
    pub(crate) fn write(
        &self,
        report: &impl Serialize,
        summary: impl FnOnce() -> Summary,
    ) -> Result<(), GuestError> {
        if let Some(path) = &self.json {
            write_json(path, report)?;
        }
        let summary = summary();
        if let Some(path) = &self.junit {
            write_text(path, &formats::junit(&summary))?;
        }
        if let Some(path) = &self.ktap {
            write_text(path, &formats::ktap(&summary))?;
        }
        if let Some(path) = &self.b4 {
            write_json(path, &formats::b4(&summary))?;
        }
        Ok(())
    }
}

/// Why a verb that runs guests has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GuestError {
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
    /// A vmlinux does not serve.
    #[error("{} cannot serve to read a guest's memory: {source}", path.display())]
    Vmlinux {
        /// The file.
        path: PathBuf,
        /// Why.
        source: ImageError,
    },
    /// A guest's RAM cannot be read.
    #[error("failed to read the RAM in {}: {source}", path.display())]
    Ram {
        /// The file.
        path: PathBuf,
        /// Why.
        source: ReadError,
    },
    /// The flags ask for what there is not.
    #[error("{0}")]
    Usage(String),
    /// The run did not come to what is asked of it.
    #[error("{0}")]
    Undecided(String),
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

impl GuestError {
    /// What this failure means for the exit code.
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::Kernel(error) => error.kind(),
            Self::Script(_)
            | Self::NoScript(_)
            | Self::Run(RunError::Script(_))
            | Self::Usage(_)
            | Self::Read { .. } => Kind::Usage,
            Self::Agent(AgentError::Interrupted) | Self::Run(RunError::Vm(VmError::Interrupted)) => {
                Kind::Interrupted
            }
            Self::Agent(_)
            | Self::Run(_)
            | Self::Vmlinux { .. }
            | Self::Ram { .. }
            | Self::Undecided(_)
            | Self::Write { .. } => Kind::NoVerdict,
        }
    }
}

/// Makes sure that there is what running guests takes, and installs what building kernels takes where that is wanted.
///
/// # Errors
/// Names what is missing.
pub(crate) fn need_tools(progress: &Progress, install: bool) -> Result<(), GuestError> {
    if install {
        let works = [Work::Source, Work::Packages, Work::Build, Work::Run];
        tools::install(progress, &works).map_err(KernelError::from)?;
    }
    tools::require(&[Work::Run]).map_err(KernelError::from)?;
    Ok(())
}

/// What the model predicts a kernel by, and the patches of it that the model cannot predict. None where it does not know the
/// kernel at all.
pub(crate) fn semantics(built: &Built) -> Option<(Semantics, Vec<String>)> {
    let known = Semantics::of(&built.release, built.flavour != Flavour::Up)?;
    let (known, _) = known.with(&built.reversed, false);
    Some(known.with(&built.series, true))
}

/// Loads a vmlinux, to read guests by it, and the places of these variables.
///
/// # Errors
/// [`GuestError::Vmlinux`].
pub(crate) fn load(vmlinux: &Path, variables: &[String]) -> Result<Kernel, GuestError> {
    Kernel::load_with(vmlinux, variables)
        .map_err(|source| GuestError::Vmlinux { path: vmlinux.to_owned(), source })
}

/// Whether a path stands for stdout.
pub(crate) fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Writes JSON to a file, whole or not at all, or to stdout for `-`.
///
/// # Errors
/// [`GuestError::Write`].
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), GuestError> {
    let written = if is_stdout(path) {
        output::json(value, io::stdout().lock())
    } else {
        output::file(path, |file| output::json(value, file))
    };
    or_enough(written).map_err(|source| GuestError::Write { path: path.to_owned(), source })
}

/// Writes text to a file, whole or not at all.
///
/// # Errors
/// [`GuestError::Write`].
pub(crate) fn write_file(path: &Path, text: &str) -> Result<(), GuestError> {
    output::file(path, |file| file.write_all(text.as_bytes()))
        .map_err(|source| GuestError::Write { path: path.to_owned(), source })
}

/// Writes text to a file, whole or not at all, or to stdout for `-`.
fn write_text(path: &Path, text: &str) -> Result<(), GuestError> {
    if is_stdout(path) { print(text) } else { write_file(path, text) }
}

/// Prints text for people who may pipe it.
///
/// # Errors
/// [`GuestError::Write`].
pub(crate) fn print(text: &str) -> Result<(), GuestError> {
    let written = io::stdout().lock().write_all(text.as_bytes());
    or_enough(written).map_err(|source| GuestError::Write { path: "stdout".into(), source })
}

/// A reader that has seen enough, such as `head`, is no failure.
fn or_enough(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}
