//! Runs scripts in a base and a patched kernel, for the verbs that compare kernels.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use guest_agent::script::Script;
use host::pair::{self, Event, Plan, Subject};
use host::report::{Kernel, Role, RunReport};
use host::vm::Backend;
use host::vm::choose;

use super::guest::{self, GuestError, GuestFlags};
use crate::agent;
use crate::kernel::Built;
use crate::progress::{Progress, Task};
use crate::scripts;

/// Scripts by the names that reports give them.
pub(crate) type Scripts = Vec<(String, Script)>;

/// Reads scripts, and sees that the guest has the memory for them.
///
/// # Errors
/// Where there is no such script, or it cannot be run.
pub(crate) fn read_scripts(names: &[String], flags: &GuestFlags) -> Result<Scripts, GuestError> {
    let mut read = Vec::new();
    for name in names {
        let (file, text) = scripts::read(name)?;
        let script = Script::parse(&file, &text)?;
        script.unroll(&file, flags.memory.unwrap_or(script.memory_mib))?;
        let short = file.rsplit('/').next().unwrap_or(&file).trim_end_matches(".toml").to_owned();
        read.push((short, script));
    }
    Ok(read)
}

/// All that is the same for every pair of kernels.
pub(crate) struct Runner<'a> {
    progress: &'a Progress,
    flags: &'a GuestFlags,
    agent: Vec<u8>,
    backend: Box<dyn Backend>,
    /// Seed for whatever a script draws at random.
    pub(crate) seed: u64,
    /// How often each script runs.
    pub(crate) repeat: u32,
}

impl<'a> Runner<'a> {
    /// Builds the agent, and chooses what runs the guests.
    ///
    /// # Errors
    /// Where the agent cannot be built.
    pub(crate) fn new(progress: &'a Progress, flags: &'a GuestFlags) -> Result<Self, GuestError> {
        let agent = agent::build(progress)?;
        let (backend, why) = choose::choose(flags.backend, flags.deterministic);
        progress.line(&format!("backend: {} ({why})", backend.name()));
        Ok(Self { progress, flags, agent, backend, seed: 1, repeat: 1 })
    }

    /// Runs every script in both kernels, base first in the result.
    ///
    /// # Errors
    /// Where a run could not be tried; whatever the guests do is in the reports.
    pub(crate) fn run(
        &self,
        scripts: &[(String, Script)],
        base: &Built,
        patched: &Built,
    ) -> Result<Vec<RunReport>, GuestError> {
        let plan = Plan {
            backend: self.backend.as_ref(),
            agent: &self.agent,
            scripts,
            memory_mib: self.flags.memory,
            cpus: self.flags.cpus,
            deterministic: self.flags.deterministic,
            seed: self.seed,
            boot_limit: Duration::from_secs(self.flags.boot_limit),
            repeat: self.repeat,
            keep: self.flags.keep.clone(),
        };
        let watcher = Watcher { progress: self.progress, tasks: Mutex::new(HashMap::new()) };
        let subjects = [subject(Role::Base, base), subject(Role::Patched, patched)];
        Ok(pair::run(&plan, subjects, &|event| watcher.event(event))?)
    }
}

fn subject(role: Role, built: &Built) -> Subject<'_> {
    let semantics = guest::semantics(built).map(|(semantics, _)| semantics);
    Subject { role, name: &built.release, vmlinux: &built.vmlinux, semantics }
}

/// A kernel as reports name it.
pub(crate) fn kernel(role: Role, built: &Built) -> Kernel {
    Kernel {
        role,
        spec: built.spec.clone(),
        release: built.release.clone(),
        flavour: built.flavour.to_string(),
        build_id: built.build_id.clone(),
        series: built.series.clone(),
    }
}

/// Shows each guest's line while it runs.
struct Watcher<'a> {
    progress: &'a Progress,
    tasks: Mutex<HashMap<String, Task<'a>>>,
}

impl<'a> Watcher<'a> {
    fn event(&self, event: Event<'_>) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Starts { command } => self.progress.command(command),
            Event::Does { guest, what } => {
                tasks.entry(guest.to_owned()).or_insert_with(|| self.progress.task(guest)).say(what);
            }
            Event::Ended { guest, how } => {
                if let Some(task) = tasks.remove(guest) {
                    task.done(how);
                }
            }
        }
    }
}
