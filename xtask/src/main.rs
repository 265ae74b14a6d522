//! buddydiff's command line: parse the flags, match on the verb. One file a verb, in `verbs/`.

mod agent;
mod flags;
mod kernel;
mod progress;
mod scripts;
mod tools;
mod verbs;

use std::process::ExitCode;

use clap::Parser;

use flags::{Flags, Verb};
use kernel::Kind;
use progress::Progress;

/// Counts what is allocated, for `bench`; it costs a few instructions each time.
#[global_allocator]
static PEAK: peak_alloc::PeakAlloc = peak_alloc::PeakAlloc;

fn main() -> ExitCode {
    let flags = Flags::parse();
    let progress = Progress::new(flags.verbose);
    if let Err(error) = host::process::catch_interrupts() {
        progress.line(&format!("failed to catch interrupts: {error}"));
        return ExitCode::from(Kind::NoVerdict.exit_code());
    }
    let failed = |text: String, kind: Kind| {
        progress.line(&text);
        kind.exit_code()
    };
    let code = match &flags.verb {
        Verb::TestKernel(flags) => verbs::test_kernel::run(&progress, flags)
            .unwrap_or_else(|error| failed(error.to_string(), error.kind())),
        Verb::Inspect(flags) => verbs::inspect::run(&progress, flags)
            .unwrap_or_else(|error| failed(error.to_string(), error.kind())),
        Verb::Kernel(verb) => match verbs::kernel::run(&progress, verb) {
            Ok(()) => 0,
            Err(error) => failed(error.to_string(), error.kind()),
        },
        Verb::Fuzz(flags) => {
            verbs::fuzz::run(&progress, flags).unwrap_or_else(|error| failed(error.to_string(), error.kind()))
        }
        Verb::Bench(verb) => match verbs::bench::run(&progress, verb) {
            Ok(()) => 0,
            Err(error) => failed(error.to_string(), error.kind()),
        },
        Verb::Ci(flags) => match verbs::ci::run(&progress, flags) {
            Ok(()) => 0,
            Err(error) => {
                progress.line(&error.to_string());
                error.exit_code()
            }
        },
        Verb::Agent => match agent::build_file(&progress) {
            Ok(path) => {
                println!("{}", path.display());
                0
            }
            Err(error) => failed(error.to_string(), Kind::NoVerdict),
        },
        Verb::ProbeKvm => return host::vm::choose::print_probe(),
    };
    ExitCode::from(code)
}
