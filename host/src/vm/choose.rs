//! Which backend runs the guests, and why: measured, never guessed.

use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use super::qemu::Qemu;
use super::{Backend, probe};
use crate::process::Group;

/// What the user asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum BackendChoice {
    /// The fastest that works here.
    #[default]
    Auto,
    /// QEMU, with KVM where that is fast.
    Qemu,
}

/// Chooses, and gives the reason in words. The program that calls this must understand [`PROBE_VERB`].
#[must_use]
pub fn choose(choice: BackendChoice, deterministic: bool) -> (Box<dyn Backend>, String) {
    let (qemu, why) = match (choice, deterministic) {
        (_, true) => (Qemu::Tcg, "--deterministic counts instructions, which only emulation can".to_owned()),
        (BackendChoice::Auto | BackendChoice::Qemu, false) => by_speed(probe_in_child()),
    };
    (Box::new(qemu), why)
}

fn by_speed(probed: Result<f64, String>) -> (Qemu, String) {
    let enough = probe::ENOUGH_PER_S / 1e6;
    match probed {
        Err(why) => (Qemu::Tcg, format!("KVM cannot be used: {why}")),
        Ok(per_s) if per_s < probe::ENOUGH_PER_S => (
            Qemu::Tcg,
            format!(
                "KVM runs {:.1} million guest kernel instructions a second here; {enough} are needed",
                per_s / 1e6
            ),
        ),
        Ok(per_s) => {
            (Qemu::Kvm, format!("KVM runs {:.0} million guest kernel instructions a second", per_s / 1e6))
        }
    }
}

/// The verb, hidden from help, by which our programs measure KVM: see [`print_probe`].
pub const PROBE_VERB: &str = "probe-kvm";

/// What [`PROBE_VERB`] does: prints guest kernel instructions a second, or on stderr why there are none.
#[must_use]
pub fn print_probe() -> ExitCode {
    match probe::instructions_per_s() {
        Ok(per_s) => {
            println!("{per_s}");
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}

/// Probes in a process of its own: a KVM that never comes back must not take us along.
fn probe_in_child() -> Result<f64, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let mut command = Command::new(program);
    command.arg(PROBE_VERB).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut group = Group::spawn(&mut command).map_err(|error| error.to_string())?;
    let status = group
        .wait_until(Instant::now() + probe::LIMIT)
        .map_err(|error| format!("the probe did not come back: {error}"))?;
    let child = group.child();
    if !status.success() {
        return Err(child.stderr.take().map(read_line).unwrap_or_default());
    }
    let printed = child.stdout.take().map(read_line).unwrap_or_default();
    printed.parse().map_err(|_| format!("the probe printed {printed:?}"))
}

fn read_line(pipe: impl std::io::Read) -> String {
    use std::io::Read;
    let mut text = String::new();
    // Whatever was read is all there is to say.
    let _ = pipe.take(1000).read_to_string(&mut text);
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_is_used_only_where_it_is_fast() {
        assert_eq!(by_speed(Ok(1.8e6)).0, Qemu::Tcg);
        assert_eq!(by_speed(Ok(240e6)).0, Qemu::Kvm);
        assert_eq!(by_speed(Err("no /dev/kvm".into())).0, Qemu::Tcg);
    }
}
