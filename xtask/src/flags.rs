//! The command line.

use clap::{Parser, Subcommand};

use crate::verbs::bench::BenchVerb;
use crate::verbs::ci::Ci;
use crate::verbs::fuzz::Fuzz;
use crate::verbs::inspect::Inspect;
use crate::verbs::kernel::KernelVerb;
use crate::verbs::test_kernel::TestKernel;

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
    /// Build a base and a patched kernel, run scripts in both, and say what is wrong with the patched one.
    ///
    /// Exit codes: 0 the patched kernel is consistent, 1 it is not, 2 usage, 125 no verdict, 130 interrupted.
    TestKernel(Box<TestKernel>),
    /// Boot one kernel, stop it, and print the exact state of its page allocator and what is wrong with it.
    ///
    /// Exit codes: 0 no violation, 1 a violation or a failed guest, 2 usage, 125 no verdict, 130 interrupted.
    Inspect(Box<Inspect>),
    /// Fetch, build, list and prune kernels.
    #[command(subcommand)]
    Kernel(KernelVerb),
    /// Run random batches of allocator operations on a real kernel, and hold each to the model page by page.
    ///
    /// Exit codes: 0 model and kernel agree, 1 they do not or the guest failed, 2 usage, 125 no verdict, 130 interrupted.
    Fuzz(Box<Fuzz>),
    /// Measure how long our own work takes, as ratios within one run.
    #[command(subcommand)]
    Bench(BenchVerb),
    /// Run the whole test suite, real kernels included.
    Ci(Ci),
    /// Build the guest agent and print where it is.
    #[command(hide = true)]
    Agent,
    /// Measure how fast KVM runs guest kernel code here.
    #[command(hide = true, name = host::vm::choose::PROBE_VERB)]
    ProbeKvm,
}
