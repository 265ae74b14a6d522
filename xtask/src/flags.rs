//! The command line.

use clap::{Parser, Subcommand};

use crate::verbs::kernel::KernelVerb;

/// Differential testing of the Linux page allocator against real kernels.
#[derive(Clone, Debug, Parser)]
#[command(name = "cargo xtask", disable_version_flag = true)]
pub(crate) struct Flags {
    /// Show each external command before it runs.
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
    /// What to do.
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// The verbs.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Verb {
    /// Fetch, build, list and prune kernels.
    #[command(subcommand)]
    Kernel(KernelVerb),
}
