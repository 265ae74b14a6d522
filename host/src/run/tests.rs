//! Every way a run can end, on a machine that is played: it writes to channel and console what a guest would.

use std::fs::OpenOptions;
use std::sync::{Arc, Mutex};

use guest_agent::wire::{HEADER_LEN, Message, PAYLOAD_MAX, encode};

use super::*;
use crate::vm::RamLayout;

/// What the played guest does, one act a look of the host's.
type Act = Box<dyn FnMut(&mut Stage) + Send>;

/// Where it acts.
struct Stage {
    channel: File,
    console: File,
    written: u64,
    seq: u32,
    end: Option<End>,
    /// Whether the doorbell rings at the next look.
    ring: bool,
    /// What the host did with the machine: `resume`, `stop`.
    done: Arc<Mutex<Vec<&'static str>>>,
}

impl Stage {
    fn send(&mut self, message: &Message) {
        let mut frame = vec![0; HEADER_LEN + PAYLOAD_MAX];
        let len = encode(self.seq, message, &mut frame).unwrap();
        self.put(&frame[..len]);
        self.seq += 1;
    }

    fn put(&mut self, bytes: &[u8]) {
        self.channel.write_all_at(bytes, FRAMES_OFFSET as u64 + self.written).unwrap();
        self.written += bytes.len() as u64;
        self.mark(self.written);
    }

    fn mark(&mut self, written: u64) {
        self.channel.write_all_at(&written.to_le_bytes(), WRITTEN_OFFSET as u64).unwrap();
    }

    fn print(&mut self, text: &str) {
        self.console.write_all(text.as_bytes()).unwrap();
    }

    fn boot(&mut self) {
        self.send(&Message::Hello { protocol: PROTOCOL, release: "7.2.13".into() });
        self.send(&Message::Ready { uptime_ns: 1 });
        self.send(&Message::Step { index: 0, uptime_ns: 2 });
    }

    fn ring(&mut self) {
        self.send(&Message::Bell { index: 0 });
        self.ring = true;
    }

    fn finish(&mut self) {
        self.send(&Message::Checkpoint { index: 0, still: true, still_after_flags: true, missing: vec![] });
        self.send(&Message::End { steps: 1, tainted: 0, uptime_ns: 2_500_000_000 });
    }
}

struct Played {
    stage: Stage,
    act: Act,
    starved: Duration,
    ram: File,
}

impl Machine for Played {
    fn wait(&mut self, _limit: Duration) -> Result<Option<End>, VmError> {
        (self.act)(&mut self.stage);
        Ok(self.stage.end.clone())
    }

    fn starved(&self) -> Option<Duration> {
        Some(self.starved)
    }

    fn rang(&mut self) -> Result<bool, VmError> {
        Ok(std::mem::take(&mut self.stage.ring))
    }

    fn stop(&mut self, _limit: Duration) -> Result<(), VmError> {
        self.stage.done.lock().unwrap().push("stop");
        Ok(())
    }

    fn resume(&mut self) -> Result<(), VmError> {
        self.stage.done.lock().unwrap().push("resume");
        Ok(())
    }

    fn ram(&self) -> (&File, RamLayout) {
        (&self.ram, RamLayout { low_bytes: 64 << 20, all_bytes: 64 << 20 })
    }
}

struct Theatre {
    act: Mutex<Option<Act>>,
    starved: Duration,
    done: Arc<Mutex<Vec<&'static str>>>,
}

impl Backend for Theatre {
    fn name(&self) -> &'static str {
        "played"
    }

    fn start(&self, config: &MachineConfig) -> Result<Box<dyn Machine>, VmError> {
        let open = |path| OpenOptions::new().read(true).write(true).open(path).unwrap();
        let stage = Stage {
            channel: open(&config.channel),
            console: open(&config.console),
            written: 0,
            seq: 0,
            end: None,
            ring: false,
            done: self.done.clone(),
        };
        let act = self.act.lock().unwrap().take().unwrap();
        let ram = tempfile::tempfile().unwrap();
        Ok(Box::new(Played { stage, act, starved: self.starved, ram }))
    }

    fn command(&self, _config: &MachineConfig) -> String {
        "play it again".into()
    }
}

/// Runs a script of one checkpoint. A limit of zero has passed at the first look.
fn play_with(step_limit_s: u32, boot_limit: Duration, act: impl FnMut(&mut Stage) + Send + 'static) -> Run {
    play_script("'c'", step_limit_s, boot_limit, None, act).0
}

/// Gives what came of it, and what the host did with the machine.
fn play_script(
    checkpoint: &str,
    step_limit_s: u32,
    boot_limit: Duration,
    observer: Option<&mut dyn FrozenObserver>,
    act: impl FnMut(&mut Stage) + Send + 'static,
) -> (Run, Vec<&'static str>) {
    play_step(&format!("checkpoint = {checkpoint}"), step_limit_s, boot_limit, observer, act)
}

/// The same for a script of one step.
fn play_step(
    step: &str,
    step_limit_s: u32,
    boot_limit: Duration,
    observer: Option<&mut dyn FrozenObserver>,
    act: impl FnMut(&mut Stage) + Send + 'static,
) -> (Run, Vec<&'static str>) {
    let text = format!("about = 'a'\n[[step]]\n{step}\n");
    let mut script = Script::parse("t", &text).unwrap();
    script.step_limit_s = step_limit_s;
    let config = RunConfig {
        vmlinux: Path::new("vmlinux"),
        agent: b"agent",
        script_name: "t",
        script: &script,
        memory_mib: Some(64),
        cpus: 1,
        deterministic: false,
        seed: 1,
        boot_limit,
        keep: None,
    };
    let done = Arc::<Mutex<Vec<_>>>::default();
    let theatre =
        Theatre { act: Mutex::new(Some(Box::new(act))), starved: Duration::ZERO, done: done.clone() };
    let run = run(&theatre, &config, observer, &mut |_| {}).unwrap();
    let done = std::mem::take(&mut *done.lock().unwrap());
    (run, done)
}

const FROZEN: &str = "{ name = 'c', frozen = true }";

/// A frozen checkpoint.
fn play_frozen(
    observer: Option<&mut dyn FrozenObserver>,
    act: impl FnMut(&mut Stage) + Send + 'static,
) -> (Run, Vec<&'static str>) {
    play_script(FROZEN, 3600, LONG, observer, act)
}

/// Remembers what it was called with, and does with the machine what it is told.
struct Observer<F> {
    bells: Vec<(usize, String, u32)>,
    does: F,
}

impl<F: FnMut(&mut dyn Machine) -> Result<(), VmError>> Observer<F> {
    fn new(does: F) -> Self {
        Self { bells: Vec::new(), does }
    }
}

impl<F: FnMut(&mut dyn Machine) -> Result<(), VmError>> FrozenObserver for Observer<F> {
    fn look(&mut self, machine: &mut dyn Machine, bell: Bell<'_>) -> Result<(), RunError> {
        self.bells.push((bell.step, bell.checkpoint.to_owned(), bell.cpus));
        Ok((self.does)(machine)?)
    }
}

const LONG: Duration = Duration::from_secs(3600);

fn play(act: impl FnMut(&mut Stage) + Send + 'static) -> Run {
    play_with(3600, LONG, act)
}

#[test]
fn a_run_to_its_end_is_complete() {
    let run = play(|stage| {
        stage.boot();
        stage.finish();
        stage.end = Some(End::Guest);
    });
    assert_eq!(run.outcome, Outcome::Complete { tainted: 0 });
    assert_eq!(run.checkpoints.len(), 1);
    assert_eq!(run.release.as_deref(), Some("7.2.13"));
    assert_eq!((run.guest_s, run.console_tail), (2.5, None));
    assert!(run.boot_s.is_some());
}

#[test]
fn a_kernel_that_panics_at_boot_has_no_verdict_and_shows_its_console() {
    let run = play(|stage| {
        stage.print("[    0.1] Kernel panic - not syncing: no memory\n");
        stage.end = Some(End::Guest);
    });
    assert_eq!(run.outcome, Outcome::NoVerdict(NoVerdict::DiedAtBoot));
    assert!(run.console_tail.unwrap().contains("not syncing"));
}

#[test]
fn a_kernel_that_hangs_at_boot_has_no_verdict() {
    let run = play_with(3600, Duration::ZERO, |_| {});
    assert_eq!(run.outcome, Outcome::NoVerdict(NoVerdict::HungAtBoot { limit_s: 0 }));
}

#[test]
fn a_kernel_that_dies_in_a_step_has_failed() {
    let run = play(|stage| {
        stage.boot();
        stage.print("BUG: Bad page state\nKernel panic - not syncing: Fatal exception\n");
        stage.end = Some(End::Guest);
    });
    let died = GuestFailure::Died { step: 1, doing: "checkpoint c".into() };
    assert_eq!(run.outcome, Outcome::GuestFailure(died));
}

#[test]
fn an_agent_that_dies_by_itself_is_no_finding() {
    let run = play(|stage| {
        stage.boot();
        stage.print("Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000006\n");
        stage.end = Some(End::Guest);
    });
    let died = NoVerdict::AgentDied { step: 1, doing: "checkpoint c".into() };
    assert_eq!(run.outcome, Outcome::NoVerdict(died));
}

#[test]
fn an_agent_that_dies_of_a_kernel_fault_is_a_finding() {
    let run = play(|stage| {
        stage.boot();
        stage.print(
            "BUG: Bad page map in process init\nKernel panic - not syncing: Attempted to kill init!\n",
        );
        stage.end = Some(End::Guest);
    });
    assert!(matches!(run.outcome, Outcome::GuestFailure(GuestFailure::Died { .. })), "{:?}", run.outcome);
}

#[test]
fn a_guest_that_runs_out_of_memory_was_asked_for_too_much() {
    let run = play(|stage| {
        stage.boot();
        stage.print("Kernel panic - not syncing: System is deadlocked on memory\n");
        stage.end = Some(End::Guest);
    });
    assert!(matches!(run.outcome, Outcome::NoVerdict(NoVerdict::ScriptFailed(_))), "{:?}", run.outcome);
}

#[test]
fn a_step_that_takes_too_long_is_a_hang() {
    let run = play_with(0, LONG, |stage| {
        if stage.seq == 0 {
            stage.boot();
        }
    });
    let hung = GuestFailure::Hung { step: 1, doing: "checkpoint c".into(), limit_s: 0 };
    assert_eq!(run.outcome, Outcome::GuestFailure(hung));
}

#[test]
fn a_script_that_cannot_run_has_no_verdict() {
    let run = play(|stage| {
        stage.boot();
        stage.send(&Message::Failed { index: Some(0), text: "no such page size".into() });
        stage.end = Some(End::Guest);
    });
    assert_eq!(run.outcome, Outcome::NoVerdict(NoVerdict::ScriptFailed("no such page size".into())));
}

#[test]
fn a_machine_ended_from_outside_has_no_verdict_even_after_the_last_word() {
    let run = play(|stage| {
        stage.boot();
        stage.finish();
        stage.end = Some(End::Lost("QEMU ended with signal: 9".into()));
    });
    assert_eq!(run.outcome, Outcome::NoVerdict(NoVerdict::MachineLost("QEMU ended with signal: 9".into())));
}

fn broken_channel(act: impl FnMut(&mut Stage) + Send + 'static) {
    let run = play(act);
    assert!(matches!(run.outcome, Outcome::NoVerdict(NoVerdict::Channel(_))), "{:?}", run.outcome);
}

#[test]
fn a_channel_that_is_cut_altered_or_lies_has_no_verdict() {
    broken_channel(|stage| stage.put(b"no frame at all, not even one"));
    broken_channel(|stage| stage.mark(u64::MAX));
    broken_channel(|stage| {
        stage.boot();
        stage.seq += 1;
        stage.finish();
    });
    broken_channel(|stage| match stage.seq {
        0 => stage.boot(),
        _ => stage.mark(3),
    });
    broken_channel(|stage| {
        stage.boot();
        stage.put(b"rfdb"[..2].as_ref());
        stage.end = Some(End::Guest);
    });
}

#[test]
fn a_flood_on_the_console_ends_the_run() {
    let run = play(|stage| stage.console.set_len(CONSOLE_MAX + 1).unwrap());
    assert_eq!(run.outcome, Outcome::NoVerdict(NoVerdict::ConsoleFlood));
}

/// Boots and rings at the first look, goes on once it is let, and ends.
fn rings_once(stage: &mut Stage) {
    if stage.seq == 0 {
        stage.boot();
        stage.ring();
    } else {
        assert_eq!(stage.done.lock().unwrap().last(), Some(&"resume"));
        stage.finish();
        stage.end = Some(End::Guest);
    }
}

#[test]
fn an_observer_is_called_once_for_a_frozen_checkpoint_and_sees_its_memory() {
    let mut observer = Observer::new(|machine| {
        let (ram, layout) = machine.ram();
        assert!(ram.metadata().is_ok() && layout.all_bytes == 64 << 20);
        Ok(())
    });
    let (run, done) = play_frozen(Some(&mut observer), rings_once);
    assert_eq!(run.outcome, Outcome::Complete { tainted: 0 });
    assert_eq!(observer.bells, [(0, "c".to_owned(), 1)]);
    assert_eq!(done, ["resume"]);
    assert_eq!(run.checkpoints.len(), 1);
}

#[test]
fn without_an_observer_a_machine_that_rings_goes_on() {
    let (run, done) = play_frozen(None, rings_once);
    assert_eq!(run.outcome, Outcome::Complete { tainted: 0 });
    assert_eq!(done, ["resume"]);
}

#[test]
fn an_observer_may_let_the_machine_go_on_a_little() {
    let mut observer = Observer::new(|machine| {
        for _ in 0..3 {
            machine.resume()?;
            machine.stop(Duration::from_secs(1))?;
        }
        Ok(())
    });
    let (run, done) = play_frozen(Some(&mut observer), rings_once);
    assert_eq!(run.outcome, Outcome::Complete { tainted: 0 });
    assert_eq!(done, ["resume", "stop", "resume", "stop", "resume", "stop", "resume"]);
}

/// The step's limit is less than what the observer takes.
#[test]
fn the_time_of_the_host_is_not_the_guests() {
    let mut observer = Observer::new(|_| {
        std::thread::sleep(Duration::from_millis(1100));
        Ok(())
    });
    let (run, _) = play_script(FROZEN, 1, LONG, Some(&mut observer), rings_once);
    assert_eq!(run.outcome, Outcome::Complete { tainted: 0 });
}

#[test]
fn an_observer_that_fails_ends_the_run_unless_the_machine_is_gone() {
    let disobeys = || VmError::Disobeys { doing: "stop", why: "QEMU is gone".into() };
    let mut observer = Observer::new(|_| Err(disobeys()));
    let act = |stage: &mut Stage| {
        if stage.seq == 0 {
            stage.boot();
            stage.ring();
        } else {
            stage.end = Some(End::Lost("killed".into()));
        }
    };
    let (run, _) = play_frozen(Some(&mut observer), act);
    assert_eq!(run.outcome, Outcome::NoVerdict(NoVerdict::MachineLost("killed".into())));
}

#[test]
fn a_guest_that_stops_itself_unannounced_has_failed() {
    let stopped = |doing: &str| {
        let doing = doing.to_owned();
        Outcome::GuestFailure(GuestFailure::Stopped { step: 1, doing })
    };
    let (run, done) = play_frozen(None, |stage| {
        stage.boot();
        stage.ring = true;
    });
    assert_eq!(run.outcome, stopped("checkpoint c, frozen"));
    assert!(done.is_empty(), "{done:?}");
    let run = play(|stage| {
        stage.boot();
        stage.ring = true;
    });
    assert_eq!(run.outcome, stopped("checkpoint c"));
    // The console moves the blame as it does for a guest that ends.
    let run = play(|stage| {
        stage.boot();
        stage.print("Kernel panic - not syncing: Attempted to kill init! exitcode=0x00000006\n");
        stage.ring = true;
    });
    assert!(matches!(run.outcome, Outcome::NoVerdict(NoVerdict::AgentDied { step: 1, .. })));
    let run = play(|stage| stage.ring = true);
    assert_eq!(run.outcome, Outcome::NoVerdict(NoVerdict::DiedAtBoot));
}

#[test]
fn a_ring_that_is_announced_and_never_comes_has_no_verdict() {
    let (run, _) = play_script(FROZEN, 0, LONG, None, |stage| {
        stage.boot();
        stage.send(&Message::Bell { index: 0 });
    });
    assert!(matches!(run.outcome, Outcome::NoVerdict(NoVerdict::Doorbell(_))), "{:?}", run.outcome);
}

#[test]
fn a_guest_that_goes_on_without_ringing_has_a_broken_channel() {
    let (run, _) = play_frozen(None, |stage| {
        stage.boot();
        stage.send(&Message::Bell { index: 0 });
        stage.finish();
        stage.end = Some(End::Guest);
    });
    assert!(matches!(run.outcome, Outcome::NoVerdict(NoVerdict::Channel(_))), "{:?}", run.outcome);
}

#[test]
fn a_guest_that_rings_again_has_no_verdict() {
    let boot_and_ring = |stage: &mut Stage| {
        stage.boot();
        stage.ring();
    };
    // While it is let go on a little.
    struct Again;
    impl FrozenObserver for Again {
        fn look(&mut self, machine: &mut dyn Machine, _: Bell<'_>) -> Result<(), RunError> {
            machine.resume()?;
            machine.wait(Duration::ZERO)?;
            Ok(())
        }
    }
    let act = move |stage: &mut Stage| match stage.seq {
        0 => boot_and_ring(stage),
        _ => stage.ring = true,
    };
    let (run, _) = play_frozen(Some(&mut Again), act);
    assert!(matches!(run.outcome, Outcome::NoVerdict(NoVerdict::Doorbell(_))), "{:?}", run.outcome);
    // Afterwards: it is not announced, and no different from a panic.
    let (run, _) = play_frozen(None, act);
    assert!(matches!(run.outcome, Outcome::GuestFailure(GuestFailure::Stopped { .. })), "{:?}", run.outcome);
}

/// Remembers the rings of batches.
#[derive(Default)]
struct Batches(Vec<(u32, Phase)>);

impl FrozenObserver for Batches {
    fn look(&mut self, _: &mut dyn Machine, bell: Bell<'_>) -> Result<(), RunError> {
        panic!("{bell:?} is no batch");
    }

    fn batch(&mut self, _: &mut dyn Machine, bell: BatchBell) -> Result<(), RunError> {
        self.0.push((bell.batch, bell.phase));
        Ok(())
    }
}

const BATCHES: &str = "batches = { count = 2 }";

/// Announces two batches, each of which rings twice, and ends.
fn runs_batches(stage: &mut Stage) {
    let resumed = stage.done.lock().unwrap().len();
    match resumed {
        _ if stage.seq == 0 => stage.boot(),
        0 | 2 => stage.send(&Message::Batch { index: 0, batch: resumed as u32 / 2 }),
        4 => {
            stage.send(&Message::End { steps: 1, tainted: 0, uptime_ns: 3 });
            stage.end = Some(End::Guest);
            return;
        }
        _ => {}
    }
    stage.ring = stage.seq > 3;
}

#[test]
fn an_observer_sees_each_batch_before_and_after() {
    let mut observer = Batches::default();
    let (run, done) = play_step(BATCHES, 3600, LONG, Some(&mut observer), runs_batches);
    assert_eq!(run.outcome, Outcome::Complete { tainted: 0 });
    let (before, after) = (Phase::Before, Phase::After);
    assert_eq!(observer.0, [(0, before), (0, after), (1, before), (1, after)]);
    assert_eq!(done, ["resume"; 4]);
    let (run, done) = play_step(BATCHES, 3600, LONG, None, runs_batches);
    assert_eq!((run.outcome, done.len()), (Outcome::Complete { tainted: 0 }, 4));
}

#[test]
fn another_batch_may_follow_at_once() {
    /// Writes two more after the first.
    #[derive(Default)]
    struct Twice(Batches);
    impl FrozenObserver for Twice {
        fn look(&mut self, machine: &mut dyn Machine, bell: Bell<'_>) -> Result<(), RunError> {
            self.0.look(machine, bell)
        }

        fn batch(&mut self, machine: &mut dyn Machine, bell: BatchBell) -> Result<(), RunError> {
            self.0.batch(machine, bell)
        }

        fn again(&self) -> bool {
            self.0.0.len() < 4
        }
    }
    let mut observer = Twice::default();
    let (run, done) = play_step("batches = { count = 1 }", 3600, LONG, Some(&mut observer), |stage| {
        let resumed = stage.done.lock().unwrap().len();
        match resumed {
            _ if stage.seq == 0 => stage.boot(),
            0 => stage.send(&Message::Batch { index: 0, batch: 0 }),
            4 => {
                stage.send(&Message::End { steps: 1, tainted: 0, uptime_ns: 3 });
                stage.end = Some(End::Guest);
                return;
            }
            _ => {}
        }
        stage.ring = stage.seq > 3;
    });
    assert_eq!(run.outcome, Outcome::Complete { tainted: 0 });
    let after = (0, Phase::After);
    assert_eq!(observer.0.0, [(0, Phase::Before), after, after, after]);
    assert_eq!(done, ["resume"; 4]);
}

#[test]
fn a_driver_that_is_not_there_has_no_verdict() {
    let (run, _) = play_step(BATCHES, 3600, LONG, None, |stage| {
        stage.send(&Message::Hello { protocol: PROTOCOL, release: "7.2.13".into() });
        stage.send(&Message::Failed { index: None, text: "this kernel has no /proc/buddydiff".into() });
        stage.end = Some(End::Guest);
    });
    assert!(matches!(run.outcome, Outcome::NoVerdict(NoVerdict::ScriptFailed(_))), "{:?}", run.outcome);
}

#[test]
fn a_batch_that_never_begins_has_no_verdict_and_one_that_never_ends_is_a_hang() {
    let play = |ring| {
        let act = move |stage: &mut Stage| {
            if stage.seq == 0 {
                stage.boot();
                stage.send(&Message::Batch { index: 0, batch: 0 });
                stage.ring = ring;
            }
        };
        play_step(BATCHES, 0, LONG, None, act).0.outcome
    };
    assert!(matches!(play(false), Outcome::NoVerdict(NoVerdict::Doorbell(_))));
    let hung = GuestFailure::Hung { step: 1, doing: "run 2 batches".into(), limit_s: 0 };
    assert_eq!(play(true), Outcome::GuestFailure(hung));
}
