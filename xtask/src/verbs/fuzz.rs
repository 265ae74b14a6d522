//! `cargo xtask fuzz`: random batches of allocator operations on a real kernel, each held to the model page by page.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use guest_agent::script::Script;
use host::batch::{OPS_MAX, Op};
use host::fuzz::{Found, Fuzzed, Fuzzer, UNPAUSED};
use host::model::{Canary, Rule, Semantics};
use host::observe::frozen::Kernel;
use host::run::{self, News, Outcome, RunConfig, RunError};
use host::shrink;
use host::vm::choose::{self, BackendChoice};
use host::vm::{Backend, VmError};
use serde::Serialize;

use super::guest::{self, GuestError};
use crate::agent;
use crate::kernel::{Built, Flavour, Kernels, Kind};
use crate::progress::{Progress, seconds};

/// What to run and how.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Fuzz {
    /// The kernel: 6.1, 6.12, 7.2 or 7.3, or a spec of one of these lines.
    #[arg(long, value_name = "SPEC", default_value = "7.2")]
    kernel: String,
    /// The patches on top.
    #[arg(long, value_name = "NAME|FILE|DIR")]
    series: Option<String>,
    /// up has no per-CPU lists on 7.2 and later.
    #[arg(long, value_enum, default_value_t = Flavour::Up)]
    flavour: Flavour,
    /// Operations in all.
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    ops: u64,
    /// Operations of one guest; the next has the next seed.
    #[arg(long, value_name = "N", default_value_t = 10_000_000, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    ops_a_guest: u64,
    /// Operations of one batch, after which everything is compared.
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(1..=16_384))]
    batch: u32,
    /// Seed of the first guest's operations.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Leave guard pages below this order (debug_guardpage_minorder).
    #[arg(long, value_name = "ORDER", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=5))]
    guard_order: u32,
    /// RAM of each guest in MiB.
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u32).range(64..=65536))]
    memory: u32,
    /// RAM below 4 GiB in MiB; the rest gives the guest a ZONE_NORMAL.
    #[arg(long, value_name = "MIB")]
    low_memory: Option<u32>,
    /// vCPUs of each guest. Batches run on the first; the others touch and unmap memory all the time, and the driver holds
    /// them while a batch runs, so that each batch is as exact as on one CPU.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    cpus: u32,
    /// Make two runs of one image equal to the byte.
    #[arg(long, conflicts_with = "cpus")]
    deterministic: bool,
    /// Where kernel and model part, try this often to show the same with fewer operations; 0 does not try.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    trials: u32,
    /// Write what is left of them here, as a script for test-kernel, instead of to stdout.
    #[arg(long, value_name = "FILE")]
    script: Option<PathBuf>,
    /// Make a rule of the model wrong, by its number: the fuzzer must find it.
    #[arg(long, hide = true, value_name = "N")]
    canary: Option<usize>,
    /// Write the figures as JSON to a file, or to stdout for `-`.
    #[arg(long, value_name = "-|FILE")]
    json: Option<PathBuf>,
    /// Install missing tools through apt.
    #[arg(long)]
    install_deps: bool,
}

/// One guest.
#[derive(Clone, Debug, Serialize)]
struct Guest {
    seed: u64,
    #[serde(flatten)]
    fuzzed: Fuzzed,
    /// How the guest failed.
    guest_failure: Option<String>,
    /// Wall time of the guest, in seconds.
    wall_s: f64,
    /// Operations a second of it.
    ops_a_second: f64,
    /// The share of it in which the guest stood still for comparing.
    compare_share: f64,
    /// The share of another CPU that predicting and comparing took meanwhile.
    judge_share: f64,
}

/// Runs guests until the operations are done; gives the exit code.
///
/// # Errors
/// See [`GuestError`].
pub(crate) fn run(progress: &Progress, flags: &Fuzz) -> Result<u8, GuestError> {
    guest::need_tools(progress, flags.install_deps)?;
    let built = Kernels::open(progress)?.one(&flags.kernel, flags.series.as_deref(), flags.flavour, true)?;
    let semantics = semantics(progress, flags, &built)?;
    let kernel = guest::load(&built.vmlinux, &[])?;
    let agent = agent::build(progress)?;
    let (backend, why) = choose::choose(BackendChoice::Auto, flags.deterministic);
    progress.line(&format!("backend: {} ({why})", backend.name()));

    let runner = Runner {
        progress,
        flags,
        built: &built,
        kernel: &kernel,
        semantics,
        agent: &agent,
        backend: backend.as_ref(),
    };
    let mut guests = Vec::new();
    let mut left = flags.ops;
    let mut seed = flags.seed;
    let mut repeat = None;
    while left > 0 {
        let ops = left.min(flags.ops_a_guest);
        left -= ops;
        let task = progress.task(&format!("{} {}, seed {seed}", built.release, built.flavour));
        let (guest, found) =
            runner.guest(&script(flags, &random(flags, ops)), seed, ops, &mut |what| task.say(what))?;
        task.done(&line(&guest));
        for text in findings(&guest) {
            progress.line(&text);
        }
        if let (Some(found), None, true) = (found, &repeat, flags.trials > 0) {
            repeat = Some(runner.shrink(&found, seed)?);
        }
        guests.push(guest);
        seed += 1;
    }
    let sum = |of: fn(&Guest) -> u64| guests.iter().map(of).sum::<u64>();
    let diverged = sum(|guest| guest.fuzzed.diverged);
    let wall_s = guests.iter().map(|guest| guest.wall_s).sum::<f64>();
    progress.line(&format!(
        "{} {}: {} operations in {} batches compared, {} refused as predicted, {diverged} batches diverge, {}; \
         {:.0} operations a second",
        built.release,
        built.flavour,
        sum(|guest| guest.fuzzed.operations),
        sum(|guest| guest.fuzzed.batches),
        sum(|guest| guest.fuzzed.failures),
        seconds(Duration::from_secs_f64(wall_s)),
        sum(|guest| guest.fuzzed.operations) as f64 / wall_s
    ));
    let mut rules: Vec<(Rule, u64)> = Rule::ALL.into_iter().map(|rule| (rule, 0)).collect();
    for guest in &guests {
        rules.iter_mut().zip(&guest.fuzzed.rules).for_each(|(sum, (_, count))| sum.1 += count);
    }
    let rules: Vec<String> = rules.iter().map(|(rule, count)| format!("{rule:?} {count}")).collect();
    progress.line(&format!("rules that decided: {}", rules.join(", ")));
    if let Some(path) = &flags.json {
        let json = serde_json::json!({
            "schema": 1, "release": built.release, "build_id": built.build_id, "guests": guests, "script": repeat
        });
        guest::write_json(path, &json)?;
    }
    if let Some(script) = &repeat {
        match &flags.script {
            Some(path) => {
                guest::write_file(path, script)?;
                progress.line(&format!("the script that shows it: {}", path.display()));
            }
            None if flags.json.as_deref().is_some_and(guest::is_stdout) => {}
            None => guest::print(script)?,
        }
    }
    Ok(exit_code(&guests))
}

/// A finding of any guest is one; without any, all must have come to their end.
fn exit_code(guests: &[Guest]) -> u8 {
    let found = guests.iter().any(|guest| guest.fuzzed.diverged > 0 || guest.guest_failure.is_some());
    let undecided = guests.iter().any(|guest| guest.fuzzed.no_verdict.is_some());
    match (found, undecided) {
        (true, _) => 1,
        (false, true) => Kind::NoVerdict.exit_code(),
        (false, false) => 0,
    }
}

/// How the guest failed, if it did. That a guest, or its machine, was lost is said of its seed, and the next one goes on.
///
/// # Errors
/// Where the next one would fare no better.
fn failure(ended: Result<Outcome, RunError>, fuzzed: &mut Fuzzed) -> Result<Option<String>, RunError> {
    let lost = match ended {
        Ok(Outcome::Complete { .. }) => return Ok(None),
        Ok(Outcome::GuestFailure(failure)) => return Ok(Some(failure.to_string())),
        Ok(Outcome::NoVerdict(why)) => why.to_string(),
        Err(error @ RunError::Vm(VmError::Disobeys { .. })) => error.to_string(),
        Err(error) => return Err(error),
    };
    fuzzed.no_verdict.get_or_insert(lost);
    Ok(None)
}

/// What the kernel does, as far as the model knows. A patch that it has no switch for is taken for one that changes nothing:
/// where it does, the kernel diverges, and that is what is to be seen.
fn semantics(progress: &Progress, flags: &Fuzz, built: &Built) -> Result<Semantics, GuestError> {
    let (mut semantics, unknown) = guest::semantics(built).ok_or_else(|| {
        GuestError::Usage(format!(
            "the model does not know {}: it knows 6.1.57 and later, 6.12.29 and later, 7.2 and 7.3",
            built.release
        ))
    })?;
    for title in unknown {
        progress.line(&format!("predicted as without it, so that what it changes diverges: {title}"));
    }
    if let Some(number) = flags.canary {
        let canary = Canary::ALL.get(number).copied();
        semantics.canary =
            Some(canary.ok_or_else(|| GuestError::Usage(format!("there is no canary {number}")))?);
    }
    Ok(semantics)
}

/// Runs guests of one kernel.
struct Runner<'a> {
    progress: &'a Progress,
    flags: &'a Fuzz,
    built: &'a Built,
    kernel: &'a Kernel,
    semantics: Semantics,
    agent: &'a [u8],
    backend: &'a dyn Backend,
}

impl Runner<'_> {
    /// One guest, and how its first divergence came about.
    fn guest(
        &self,
        text: &str,
        seed: u64,
        ops: u64,
        say: &mut dyn FnMut(&str),
    ) -> Result<(Guest, Option<Found>), GuestError> {
        let script = Script::parse(SCRIPT, text)?;
        let steps = script.unroll(SCRIPT, self.flags.memory)?;
        let mut fuzzer = Fuzzer::new(self.kernel, self.semantics, &steps, seed, ops);
        if self.flags.cpus == 1 {
            fuzzer = fuzzer.without_pauses();
        }
        let config = RunConfig {
            vmlinux: &self.built.vmlinux,
            agent: self.agent,
            script_name: "fuzz",
            script: &script,
            memory_mib: None,
            cpus: self.flags.cpus,
            deterministic: self.flags.deterministic,
            seed: 1,
            boot_limit: Duration::from_secs(120),
            keep: None,
        };
        let start = Instant::now();
        let run = run::run(self.backend, &config, Some(&mut fuzzer), &mut |news| match news {
            News::Command(command) => self.progress.command(command),
            News::Does(what) => say(what),
        });
        let wall_s = start.elapsed().as_secs_f64();
        let mut fuzzed = fuzzer.finish();
        let found = fuzzed.found.take();
        let guest_failure = failure(run.map(|run| run.outcome), &mut fuzzed)?;
        let guest = Guest {
            seed,
            ops_a_second: fuzzed.operations as f64 / wall_s,
            compare_share: fuzzed.compare_s / wall_s,
            judge_share: fuzzed.judge_s / wall_s,
            fuzzed,
            guest_failure,
            wall_s,
        };
        Ok((guest, found))
    }

    /// The smallest script that shows what was found, each time in a guest of its own: of the batch that diverged alone
    /// where that will do, of all before it otherwise.
    fn shrink(&self, found: &Found, seed: u64) -> Result<String, GuestError> {
        let task = self.progress.task("fewer operations");
        let mut smallest = found.ops.len();
        let mut shows = |ops: &[Op]| {
            task.say(&format!("trying {} of {smallest}", ops.len()));
            let shown = self.guest(&script(self.flags, &given(ops)), seed, 0, &mut |_| {})?.1;
            let same = shown.is_some_and(|shown| shown.what == found.what);
            if same {
                smallest = ops.len();
            }
            Ok::<bool, GuestError>(same)
        };
        let alone = shrink::whole(&found.ops[found.batch..]);
        let shrunk = if shows(&alone)? {
            shrink::shrink(alone, self.flags.trials, &mut shows)?
        } else {
            shrink::shrink(found.ops.clone(), self.flags.trials, &mut shows)?
        };
        let minimal = if shrunk.minimal { ", none can be left out" } else { "" };
        task.done(&format!(
            "{} operations are left after {} trials{minimal}",
            shrunk.ops.len(),
            shrunk.trials
        ));
        let head = format!(
            "# {} {}, build {}, seed {seed}: {}\n",
            self.built.release, self.built.flavour, self.built.build_id, found.what
        );
        Ok(head + &script(self.flags, &given(&shrunk.ops)))
    }
}

/// What the script that the flags make is called in errors.
const SCRIPT: &str = "the flags' script";

/// The step of batches at random.
fn random(flags: &Fuzz, ops: u64) -> String {
    // A batch may be short where there is nothing left to do, so some more.
    let unpaused = if flags.cpus == 1 { UNPAUSED } else { 1 };
    let batches = ops.div_ceil(unpaused.next_multiple_of(flags.batch.into())) + 2;
    let (count, size, busy) = (batches.min(100_000), flags.batch, flags.cpus > 1);
    format!("[[step]]\nbatches = {{ count = {count}, size = {size}, free = true, busy = {busy} }}\n")
}

/// Steps of batches of these operations.
fn given(ops: &[Op]) -> String {
    let batch = |ops: &[Op]| {
        let lines: Vec<String> = ops.iter().map(|op| format!("    {op},\n")).collect();
        format!("[[step]]\n[step.batches]\nops = [\n{}]\n", lines.concat())
    };
    ops.chunks(OPS_MAX).map(batch).collect()
}

/// The script that the flags make, with these steps of batches.
fn script(flags: &Fuzz, batches: &str) -> String {
    let mut text = format!("about = 'batches held to the model'\nmemory_mib = {}\n", flags.memory);
    if let Some(low) = flags.low_memory {
        text.push_str(&format!("low_memory_mib = {low}\n"));
    }
    if flags.guard_order > 0 {
        text.push_str(&format!(
            "command_line = ['debug_pagealloc=on', 'debug_guardpage_minorder={}']\n",
            flags.guard_order
        ));
    }
    // User pages with holes between them: what claims a block has to count them.
    let user = flags.memory / 8;
    text.push_str(&format!(
        "capture = []\n[[step]]\nanonymous = {{ name = 'user', mib = {user} }}\n\
         [[step]]\nfree = {{ name = 'user', part = 'odd-pages' }}\n\
         [[step]]\nwait_quiet = {{}}\n{batches}"
    ));
    text
}

fn line(guest: &Guest) -> String {
    let Guest { fuzzed, ops_a_second, compare_share, judge_share, .. } = guest;
    format!(
        "{} operations, {} batches diverge, {ops_a_second:.0} operations a second; the guest stood still for comparing \
         {:.0} % of the time (and another CPU worked {:.0} %), and ran operations in {:.0} % of its own",
        fuzzed.operations,
        fuzzed.diverged,
        compare_share * 100.0,
        judge_share * 100.0,
        fuzzed.operations_share * 100.0
    )
}

/// What was found in a guest, a line each.
fn findings(guest: &Guest) -> Vec<String> {
    let mut lines = Vec::new();
    for divergence in &guest.fuzzed.divergences {
        let text = divergence.lines();
        lines.extend(
            text.iter().enumerate().map(|(at, line)| {
                if at == 0 { format!("seed {}, {line}", guest.seed) } else { line.clone() }
            }),
        );
    }
    lines.extend(guest.guest_failure.iter().map(|failure| format!("seed {}: {failure}", guest.seed)));
    lines.extend(guest.fuzzed.no_verdict.iter().map(|why| format!("seed {}: no verdict: {why}", guest.seed)));
    lines
}

#[cfg(test)]
mod tests {
    use host::run::{GuestFailure, NoVerdict};

    use super::*;

    fn guest(ended: Result<Outcome, RunError>, no_verdict: Option<&str>, diverged: u64) -> Guest {
        let mut fuzzed = Fuzzed {
            operations: 7,
            diverged,
            no_verdict: no_verdict.map(str::to_owned),
            ..Fuzzed::default()
        };
        let guest_failure = failure(ended, &mut fuzzed).expect("the next seed goes on");
        Guest {
            seed: 1,
            fuzzed,
            guest_failure,
            wall_s: 1.0,
            ops_a_second: 7.0,
            compare_share: 0.0,
            judge_share: 0.0,
        }
    }

    fn died() -> Outcome {
        Outcome::GuestFailure(GuestFailure::Died { step: 4, doing: "run 3 batches".into() })
    }

    #[test]
    fn a_guest_that_is_lost_ends_its_seed_and_no_other() {
        let complete = guest(Ok(Outcome::Complete { tainted: 0 }), None, 0);
        assert_eq!((&complete.fuzzed.no_verdict, &complete.guest_failure), (&None, &None));
        let boot = guest(Ok(Outcome::NoVerdict(NoVerdict::DiedAtBoot)), None, 0);
        let gone = VmError::Disobeys { doing: "resume", why: "QEMU is gone".into() };
        let gone = guest(Err(gone.into()), None, 0);
        for lost in [&boot, &gone] {
            assert!(lost.fuzzed.no_verdict.is_some() && lost.guest_failure.is_none());
            assert_eq!(lost.fuzzed.operations, 7);
        }
        assert_eq!(exit_code(&[complete, boot, gone]), Kind::NoVerdict.exit_code());
        // Of a batch that it died in nothing is known, and that it died is found.
        let dead = guest(Ok(died()), Some("the guest ended within batch 3"), 0);
        assert!(dead.fuzzed.no_verdict.is_some() && dead.guest_failure.is_some());
        assert_eq!(exit_code(&[dead]), 1);
        assert_eq!(exit_code(&[guest(Ok(Outcome::Complete { tainted: 0 }), Some("refused"), 2)]), 1);
        assert_eq!(exit_code(&[guest(Ok(Outcome::Complete { tainted: 0 }), None, 0)]), 0);
    }

    #[test]
    fn a_host_that_fails_and_a_user_who_has_enough_end_all() {
        for error in [VmError::Interrupted, VmError::Io { doing: "map", source: std::io::Error::other("no") }]
        {
            assert!(failure(Err(error.into()), &mut Fuzzed::default()).is_err());
        }
    }
}
