//! PID 1 of a guest under test: runs the plan in its initramfs, reports through the channel, restarts the machine.
//!
//! It knows nothing of models, invariants or reports. What it cannot do it says; it never guesses.

mod bell;
mod capture;
mod channel;
mod driver;
mod steps;

use std::fs;
use std::process::ExitCode;

use guest_agent::script::{Checkpoint, Step};
use guest_agent::wire::{Message, PLAN_PATH, PROTOCOL, Plan};
use rustix::mm::MlockAllFlags;
use rustix::mount::{MountFlags, mount};
use rustix::system::{RebootCommand, reboot, uname};
use rustix::time::{ClockId, clock_gettime};

use channel::Channel;

/// What went wrong, in words for the host.
pub(crate) type Failure = String;

/// Adds what was being done to an error.
pub(crate) trait Context<T> {
    /// `doing` continues "failed to …".
    fn context(self, doing: &str) -> Result<T, Failure>;
}

impl<T, E: std::fmt::Display> Context<T> for Result<T, E> {
    fn context(self, doing: &str) -> Result<T, Failure> {
        self.map_err(|error| format!("failed to {doing}: {error}"))
    }
}

fn main() -> ExitCode {
    if std::process::id() != 1 {
        return steps::process_main();
    }
    if let Err(failure) = serve() {
        // No channel to say it through: the console is all there is.
        eprintln!("buddydiff agent: {failure}");
    }
    // With `reboot=t` and QEMU's -no-reboot this ends the machine at once. Returning from PID 1 would be a panic.
    if let Err(error) = reboot(RebootCommand::Restart) {
        eprintln!("buddydiff agent: failed to restart the machine: {error}");
    }
    ExitCode::FAILURE
}

/// Nanoseconds since boot by the guest's clock.
pub(crate) fn uptime_ns() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Runs the plan. Fails only where the host cannot be told through the channel.
fn serve() -> Result<(), Failure> {
    mount_all()?;
    let plan = fs::read(PLAN_PATH).context("read the plan")?;
    let plan: Plan = postcard::from_bytes(&plan).context("understand the plan")?;
    if plan.protocol != PROTOCOL {
        return Err(format!("the host speaks protocol {}, this agent {PROTOCOL}", plan.protocol));
    }
    let mut channel = Channel::map(plan.channel_address, plan.channel_len)?;
    let release = uname().release().to_string_lossy().into_owned();
    channel.send(&Message::Hello { protocol: PROTOCOL, release })?;
    let mut index = None;
    if let Err(text) = run(&plan, &mut channel, &mut index) {
        channel.send(&Message::Failed { index, text })?;
    }
    Ok(())
}

fn mount_all() -> Result<(), Failure> {
    for (kind, target) in [("devtmpfs", "/dev"), ("proc", "/proc"), ("sysfs", "/sys"), ("tmpfs", "/tmp")] {
        fs::create_dir_all(target).context(&format!("create {target}"))?;
        // No limit on the tmpfs: how much a script may hold is checked before the guest starts.
        let options = if kind == "tmpfs" { Some(c"size=100%,nr_inodes=0") } else { None };
        mount(kind, target, kind, MountFlags::empty(), options).context(&format!("mount {target}"))?;
    }
    Ok(())
}

fn run(plan: &Plan, channel: &mut Channel, index: &mut Option<u32>) -> Result<(), Failure> {
    let mut capture = capture::Capture::open(&plan.capture)?;
    let mut holdings = steps::Holdings::new(plan.seed);
    let frozen = |step: &Step| matches!(step, Step::Checkpoint(Checkpoint { frozen: true, .. }));
    let bell = if plan.steps.iter().any(frozen) { Some(bell::Bell::new()?) } else { None };
    let batches = plan.steps.iter().any(|step| matches!(step, Step::Batches(_)));
    let driver = if batches { Some(driver::Driver::open()?) } else { None };
    // All that the agent needs from here on is touched now, and stays: from the first checkpoint on, what moves in the
    // allocator is the script.
    rustix::mm::mlockall(MlockAllFlags::CURRENT).context("lock the agent's memory")?;
    // On the console too: what the kernel reports from here on is a finding.
    println!("buddydiff agent: ready");
    channel.send(&Message::Ready { uptime_ns: uptime_ns() })?;
    for (number, step) in (0..).zip(&plan.steps) {
        *index = Some(number);
        channel.send(&Message::Step { index: number, uptime_ns: uptime_ns() })?;
        match step {
            Step::Checkpoint(checkpoint) => {
                capture.take(number, bell.as_ref().filter(|_| checkpoint.frozen), channel)?;
            }
            Step::Batches(step) => {
                driver.as_ref().ok_or("the driver is not open")?.run(number, step, channel)?;
            }
            step => holdings.run(step)?,
        }
    }
    let tainted = fs::read_to_string("/proc/sys/kernel/tainted").context("read the taint")?;
    let tainted = tainted.trim().parse().context("understand the taint")?;
    channel.send(&Message::End { steps: plan.steps.len() as u32, tainted, uptime_ns: uptime_ns() })
}
