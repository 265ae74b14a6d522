//! Batches that go wrong, on the fake kernel: the driver in it is played.

use std::io::Write;
use std::time::Duration;

use guest_agent::script::Script;

use super::*;
use crate::batch::tests::{DONE, REFUSED, magic, play};
use crate::observe::frozen::fake;
use crate::vm::{End, RamLayout, VmError};

const MIB: u64 = 16;
const LAYOUT: RamLayout = RamLayout { low_bytes: MIB << 20, all_bytes: MIB << 20 };
const SKIPPED: i64 = -3;
const FAILED: i64 = -1;

/// A machine that stands still all the time.
struct Standing(File);

impl Machine for Standing {
    fn wait(&mut self, _: Duration) -> Result<Option<End>, VmError> {
        unreachable!("nobody waits for it")
    }

    fn starved(&self) -> Option<Duration> {
        None
    }

    fn rang(&mut self) -> Result<bool, VmError> {
        unreachable!("nobody listens")
    }

    fn stop(&mut self, _: Duration) -> Result<(), VmError> {
        unreachable!("it stands still")
    }

    fn resume(&mut self) -> Result<(), VmError> {
        unreachable!("it stands still")
    }

    fn ram(&self) -> (&File, RamLayout) {
        (&self.0, LAYOUT)
    }
}

/// The fake kernel with a driver that has started.
fn machine(kernel: &Kernel) -> (Standing, Driver) {
    let ram = fake::ram(kernel, MIB);
    let mut file = tempfile::tempfile().expect("a file");
    let words = ram.all().iter().map(|word| word.load(std::sync::atomic::Ordering::Relaxed));
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    file.write_all(&bytes).expect("room for RAM");
    magic(kernel, &Ram::map(&file, LAYOUT).expect("RAM"), &file);
    let driver = Driver::find(kernel, &Ram::map(&file, LAYOUT).expect("RAM"), &file).expect("a driver");
    (Standing(file), driver)
}

fn batches(flags: &str) -> Batches {
    let text = format!("about = 'a'\n[[step]]\nbatches = {{ {flags} }}\n");
    let steps = Script::parse("t", &text).and_then(|script| script.unroll("t", 64)).expect("a script");
    let Some(Step::Batches(batches)) = steps.into_iter().next() else { panic!("{flags} are no batches") };
    batches
}

fn given(ops: &[Op], count: u32) -> Step {
    Step::Batches(Batches { given: ops.into(), ..batches(&format!("count = {count}")) })
}

fn semantics() -> Semantics {
    Semantics::of("7.2.13", true).expect("a kernel that is known")
}

fn bell(batch: u32, phase: Phase) -> BatchBell {
    BatchBell { step: 0, batch, phase }
}

/// Answers of the driver to batches of a script, one batch after the other; none is no ring after the batch.
fn run(steps: &[Step], answers: &[Option<(u32, u32, Vec<i64>)>]) -> Fuzzed {
    let kernel = fake::kernel();
    let (mut machine, driver) = machine(&kernel);
    let mut fuzzer = Fuzzer::new(&kernel, semantics(), steps, 1, 1000);
    for (batch, answer) in (0..).zip(answers) {
        fuzzer.batch(&mut machine, bell(batch, Phase::Before)).expect("RAM");
        if let Some((state, error, values)) = answer {
            let results: Vec<(i64, u64)> = values.iter().map(|value| (*value, 1)).collect();
            if fuzzer.pending.is_some() {
                play(&driver, &machine.0, *state, *error, &results);
            }
            fuzzer.batch(&mut machine, bell(batch, Phase::After)).expect("RAM");
        }
    }
    fuzzer.finish()
}

/// The one thing that can be done to a kernel that is played: nothing.
const NOTHING: Op = Op::Free { slot: 0 };
const TAKE: Op = Op::Alloc { slot: 1, order: 0, gfp: 0x2008, node: None };

fn done(values: &[i64]) -> Option<(u32, u32, Vec<i64>)> {
    Some((DONE, 0, values.to_vec()))
}

#[test]
fn what_was_done_before_a_refusal_counts_and_nothing_is_run_after_it() {
    let fuzzed = run(
        &[given(&[NOTHING, NOTHING], 3)],
        &[done(&[SKIPPED; 2]), Some((REFUSED, 1, vec![0, 7])), done(&[SKIPPED; 2])],
    );
    assert_eq!((fuzzed.batches, fuzzed.operations, fuzzed.diverged), (1, 2, 0));
    let why = fuzzed.no_verdict.expect("a reason");
    assert!(why.contains("refused operation 1: the slot is empty"), "{why}");
}

#[test]
fn a_guest_that_dies_in_a_batch_leaves_that_batch_without_verdict() {
    let fuzzed = run(&[given(&[NOTHING], 2)], &[done(&[SKIPPED]), None]);
    assert_eq!((fuzzed.batches, fuzzed.operations), (1, 1));
    assert_eq!(fuzzed.no_verdict.as_deref(), Some("the guest ended within batch 1, of 1 operations"));
}

#[test]
fn a_batch_that_is_cut_short_has_no_verdict() {
    const READY: u32 = 1;
    for state in [READY, 0, 99] {
        let fuzzed = run(&[given(&[NOTHING], 2)], &[done(&[SKIPPED]), Some((state, 0, vec![SKIPPED]))]);
        assert_eq!((fuzzed.batches, fuzzed.diverged), (1, 0));
        assert!(fuzzed.no_verdict.is_some(), "state {state}");
    }
}

#[test]
fn a_page_that_there_is_not_diverges_and_can_be_freed_without_harm() {
    for pfn in [0, 1, 511, 4095, 4096, u64::from(u32::MAX), u64::MAX >> 1] {
        let steps = [given(&[TAKE, Op::Free { slot: 1 }, Op::Split { slot: 1 }], 2)];
        let values = [pfn.cast_signed(), 0, 0];
        let fuzzed = run(&steps, &[done(&values), done(&[FAILED, SKIPPED, SKIPPED])]);
        assert_eq!(fuzzed.no_verdict, None, "{pfn:#x}");
        assert_eq!((fuzzed.batches, fuzzed.diverged), (2, 2), "{pfn:#x}");
        assert_eq!(fuzzed.divergences[0].operation, Some(0));
        assert_eq!(fuzzed.divergences[0].kernel, format!("{pfn:#x}"));
    }
}

#[test]
fn a_page_of_an_earlier_batch_that_there_is_not_is_freed_without_harm() {
    let steps = [given(&[TAKE], 1), given(&[Op::Free { slot: 1 }], 1)];
    let kernel = fake::kernel();
    let (mut machine, driver) = machine(&kernel);
    let mut fuzzer = Fuzzer::new(&kernel, semantics(), &steps, 1, 1000);
    for (step, value) in [(0, i64::MAX), (1, 0)] {
        let bell = |phase| BatchBell { step, batch: 0, phase };
        fuzzer.batch(&mut machine, bell(Phase::Before)).expect("RAM");
        play(&driver, &machine.0, DONE, 0, &[(value, 1)]);
        fuzzer.batch(&mut machine, bell(Phase::After)).expect("RAM");
    }
    let fuzzed = fuzzer.finish();
    assert_eq!((fuzzed.batches, fuzzed.diverged, fuzzed.no_verdict), (2, 1, None));
}

#[test]
fn a_state_that_is_broken_after_a_batch_ends_the_run() {
    let kernel = fake::kernel();
    let (mut machine, driver) = machine(&kernel);
    let steps = [given(&[NOTHING], 3)];
    let mut fuzzer = Fuzzer::new(&kernel, semantics(), &steps, 1, 1000);
    fuzzer.batch(&mut machine, bell(0, Phase::Before)).expect("RAM");
    play(&driver, &machine.0, DONE, 0, &[(SKIPPED, 1)]);
    // Everything that the kernel has is gone.
    machine.0.set_len(0).and_then(|()| machine.0.set_len(MIB << 20)).expect("a file");
    fuzzer.batch(&mut machine, bell(0, Phase::After)).expect("RAM");
    let fuzzed = fuzzer.finish();
    assert_eq!(fuzzed.batches, 0);
    assert!(fuzzed.no_verdict.is_some());
}

#[test]
fn batches_without_a_pause_follow_one_another_up_to_a_limit() {
    let kernel = fake::kernel();
    let (mut machine, driver) = machine(&kernel);
    let steps = [Step::Batches(batches("size = 16384"))];
    let mut fuzzer = Fuzzer::new(&kernel, semantics(), &steps, 1, u64::MAX).without_pauses();
    fuzzer.batch(&mut machine, bell(0, Phase::Before)).expect("RAM");
    let mut operations = 0;
    while let Some(ops) = &fuzzer.pending {
        operations += ops.len() as u64;
        assert!(operations <= 2 * UNPAUSED, "there is no limit");
        // All fail, which is not as predicted, so each batch begins anew.
        let results: Vec<(i64, u64)> = ops
            .iter()
            .map(|op| if matches!(op, Op::Alloc { .. }) { (FAILED, 1) } else { (SKIPPED, 1) })
            .collect();
        play(&driver, &machine.0, DONE, 0, &results);
        fuzzer.batch(&mut machine, bell(0, Phase::After)).expect("RAM");
    }
    let fuzzed = fuzzer.finish();
    assert!(fuzzed.batches > 1, "{}", fuzzed.batches);
    assert_eq!((fuzzed.batches, fuzzed.no_verdict), (fuzzed.diverged, None));
}
