//! Every way a run can end, on a machine that is played: it writes to channel and console what a guest would.

use std::fs::OpenOptions;
use std::sync::Mutex;

use guest_agent::wire::{HEADER_LEN, Message, PAYLOAD_MAX, encode};

use super::*;

/// What the played guest does, one act a look of the host's.
type Act = Box<dyn FnMut(&mut Stage) + Send>;

/// Where it acts.
struct Stage {
    channel: File,
    console: File,
    written: u64,
    seq: u32,
    end: Option<End>,
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

    fn finish(&mut self) {
        self.send(&Message::Checkpoint { index: 0, still: true, still_after_flags: true, missing: vec![] });
        self.send(&Message::End { steps: 1, tainted: 0, uptime_ns: 2_500_000_000 });
    }
}

struct Played {
    stage: Stage,
    act: Act,
    starved: Duration,
}

impl Machine for Played {
    fn wait(&mut self, _limit: Duration) -> Result<Option<End>, VmError> {
        (self.act)(&mut self.stage);
        Ok(self.stage.end.clone())
    }

    fn starved(&self) -> Option<Duration> {
        Some(self.starved)
    }
}

struct Theatre {
    act: Mutex<Option<Act>>,
    starved: Duration,
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
        };
        let act = self.act.lock().unwrap().take().unwrap();
        Ok(Box::new(Played { stage, act, starved: self.starved }))
    }

    fn command(&self, _config: &MachineConfig) -> String {
        "play it again".into()
    }
}

/// Runs a script of one checkpoint. A limit of zero has passed at the first look.
fn play_with(step_limit_s: u32, boot_limit: Duration, act: impl FnMut(&mut Stage) + Send + 'static) -> Run {
    let mut script = Script::parse("t", "about = 'a'\n[[step]]\ncheckpoint = 'c'\n").unwrap();
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
    let theatre = Theatre { act: Mutex::new(Some(Box::new(act))), starved: Duration::ZERO };
    run(&theatre, &config, &mut |_| {}).unwrap()
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
