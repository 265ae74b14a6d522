//! buddydiff's command line: parse the flags, match on the verb. One file a verb, in `verbs/`.

mod flags;
mod kernel;
mod progress;
mod tools;
mod verbs;

use std::process::ExitCode;

use clap::Parser;

use flags::{Flags, Verb};
use kernel::Kind;
use progress::Progress;

fn main() -> ExitCode {
    let flags = Flags::parse();
    let progress = Progress::new(flags.verbose);
    if let Err(error) = host::process::catch_interrupts() {
        progress.line(&format!("failed to catch interrupts: {error}"));
        return ExitCode::from(125);
    }
    let outcome = match &flags.verb {
        Verb::Kernel(verb) => verbs::kernel::run(&progress, verb),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            progress.line(&error.to_string());
            ExitCode::from(match error.kind() {
                Kind::Usage => 2,
                Kind::NoVerdict => 125,
                Kind::Interrupted => 130,
            })
        }
    }
}
