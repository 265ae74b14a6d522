//! What can go wrong between a kernel spec and a built kernel. Callers match on kinds, never on text.

use std::io;
use std::path::{Path, PathBuf};

use super::series::SeriesError;

/// What a failure means for the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The command or its input cannot be right: exit code 2.
    Usage,
    /// The run could not decide: exit code 125.
    NoVerdict,
    /// The user stopped it: exit code 130.
    Interrupted,
}

impl Kind {
    /// The exit code: `git bisect run` skips at 125 and stops at anything from 128 on.
    #[must_use]
    pub(crate) fn exit_code(self) -> u8 {
        match self {
            Self::Usage => 2,
            Self::NoVerdict => 125,
            Self::Interrupted => 130,
        }
    }
}

/// Why there is no built kernel.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KernelError {
    /// The kernel spec cannot be read.
    #[error("failed to read the kernel spec {spec:?}: {why}\n  {}", super::spec::FORMS)]
    Spec {
        /// The spec as given.
        spec: String,
        /// What is wrong with it.
        why: String,
    },
    /// The options contradict each other.
    #[error("{0}")]
    Request(String),
    /// A catalogue or fragment of ours cannot be read.
    #[error("failed to read {}: {why}", path.display())]
    Settings {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The series cannot be read.
    #[error("failed to read the series {name}: {source}")]
    Series {
        /// The series as given.
        name: String,
        /// What is wrong with it.
        source: SeriesError,
    },
    /// There is no such package version.
    #[error("failed to find {wanted}\n  apt knows {known}")]
    NoSuchVersion {
        /// The package and version as given.
        wanted: String,
        /// The versions there are.
        known: String,
    },
    /// Packages cannot be had.
    #[error("failed to fetch {what} through apt: {why}")]
    Apt {
        /// What was wanted.
        what: String,
        /// What apt said.
        why: String,
    },
    /// The source is not a kernel tree, or cannot be read.
    #[error("failed to take {spec} as a kernel source: {why}")]
    Source {
        /// The spec.
        spec: String,
        /// What is wrong with it.
        why: String,
    },
    /// A patch neither applies nor is already there.
    #[error("failed to apply patch {number} of {series}, \"{title}\", to {spec}: {why}")]
    Patch {
        /// Its place in the series, from 1.
        number: usize,
        /// The series.
        series: String,
        /// The patch's title.
        title: String,
        /// The kernel it was meant for.
        spec: String,
        /// File, hunk and function.
        why: String,
    },
    /// The kernel's Kconfig did not take options that our fragments ask for.
    #[error(
        "failed to configure {spec}: its Kconfig did not take {}\n  Give the option a version range in kernels/config/, or find what it depends on.",
        dropped.join(", ")
    )]
    ConfigDropped {
        /// The kernel.
        spec: String,
        /// The options, as `CONFIG_X (asked y, got n)`.
        dropped: Vec<String>,
    },
    /// The kernel does not compile.
    #[error("failed to build {spec}:\n{first_error}\n  full log: {}\n  repeat it with: {repeat}", log.display())]
    Compile {
        /// The kernel.
        spec: String,
        /// The first error with the lines around it.
        first_error: String,
        /// All that make said.
        log: PathBuf,
        /// The shell line that does it again.
        repeat: String,
    },
    /// Tools are missing.
    #[error("{0}")]
    Tools(#[from] crate::tools::MissingTools),
    /// An external command failed.
    #[error("failed to {what} ({status})\n{tail}\n  repeat it with: {repeat}")]
    Command {
        /// What it was for.
        what: String,
        /// How it ended.
        status: String,
        /// The last it said.
        tail: String,
        /// The shell line that does it again.
        repeat: String,
    },
    /// Another run holds what we need for longer than we wait.
    #[error(
        "failed to get hold of {what}: {holder} has had it for {waited_s} s\n  End that run, or wait for it."
    )]
    Locked {
        /// What is locked.
        what: String,
        /// Who holds it.
        holder: String,
        /// How long we waited.
        waited_s: u64,
    },
    /// The disk is full.
    #[error(
        "failed to {what}: the disk is full\n  Make room (`cargo xtask kernel prune --max-size 10`) and run the same command again: it goes on where it was."
    )]
    DiskFull {
        /// What was tried.
        what: String,
    },
    /// Reading or writing failed.
    #[error("failed to {what} {}: {source}", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// The user stopped it.
    #[error("interrupted; the next run goes on from here")]
    Interrupted,
}

impl KernelError {
    /// What this failure means for the exit code.
    #[must_use]
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::Spec { .. } | Self::Request(_) | Self::Settings { .. } | Self::Series { .. } => Kind::Usage,
            Self::NoSuchVersion { .. } => Kind::Usage,
            Self::Interrupted => Kind::Interrupted,
            _ => Kind::NoVerdict,
        }
    }
}

/// Turns an I/O error on `path` into ours, with a full disk as a case of its own.
pub(crate) fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> KernelError {
    let path = path.to_owned();
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            KernelError::DiskFull { what: format!("{what} {}", path.display()) }
        }
        _ => KernelError::Io { what, path, source },
    }
}
