//! Predicts batches and compares, on a thread of its own while the guest goes on: what it needs is a copy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::Instant;

use super::{Divergence, Found, Fuzzed};
use crate::batch::{Op, OpResult};
use crate::model::{Difference, Model, Rule, Semantics};
use crate::observe::frozen::State;
use crate::replay::{self, Slots};

/// Divergences that are kept; the rest is only counted.
const KEPT: usize = 5;
/// Operations before one that diverges that are shown with it.
const LED: usize = 5;
/// Operations that are kept to repeat a divergence.
const HISTORY: usize = 1 << 20;
/// Batches that may wait for the judge. A guest is never far ahead of what is known of it.
const WAITING: usize = 1;

/// What the judge is told.
enum Job {
    /// The state before a batch, and whether all that batches held was freed since the last one.
    Before(State, bool),
    /// A batch that was run.
    After(Batch),
}

/// A batch that was run.
pub(super) struct Batch {
    /// Its operations.
    pub(super) ops: Vec<Op>,
    /// As many results.
    pub(super) results: Vec<OpResult>,
    /// The state after it.
    pub(super) state: State,
    /// Whether the next batch begins from that state.
    pub(super) again: bool,
}

/// The other end of the thread.
pub(super) struct Judge {
    jobs: SyncSender<Job>,
    thread: JoinHandle<Judging>,
    gave_up: Arc<AtomicBool>,
}

impl Judge {
    pub(super) fn new(semantics: Semantics) -> Self {
        let (jobs, received) = sync_channel(WAITING);
        let gave_up = Arc::<AtomicBool>::default();
        let flag = gave_up.clone();
        let thread = std::thread::spawn(move || Judging::new(semantics).judge(&received, &flag));
        Self { jobs, thread, gave_up }
    }

    /// Takes note of the state before a batch. May wait for the batch before.
    pub(super) fn before(&self, state: State, freed: bool) {
        self.send(Job::Before(state, freed));
    }

    /// Judges a batch, later. May wait for the batch before.
    pub(super) fn after(&self, batch: Batch) {
        self.send(Job::After(batch));
    }

    fn send(&self, job: Job) {
        // It ends before we do only by a panic, which `finish` passes on.
        let _ = self.jobs.send(job);
    }

    /// Whether the run cannot go on.
    pub(super) fn gave_up(&self) -> bool {
        self.gave_up.load(Ordering::Relaxed)
    }

    /// What came of all batches.
    pub(super) fn finish(self) -> Fuzzed {
        drop(self.jobs);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).result
    }
}

/// What the thread knows.
struct Judging {
    semantics: Semantics,
    /// The state that the next batch begins from, and the model of it.
    before: Option<(State, Model)>,
    slots: Slots,
    /// All operations up to the first divergence.
    history: Vec<Op>,
    result: Fuzzed,
}

impl Judging {
    fn new(semantics: Semantics) -> Self {
        Self {
            semantics,
            before: None,
            slots: Slots::default(),
            history: Vec::new(),
            result: Fuzzed::default(),
        }
    }

    fn judge(mut self, jobs: &Receiver<Job>, gave_up: &AtomicBool) -> Self {
        while let Ok(job) = jobs.recv() {
            if self.result.no_verdict.is_some() {
                continue;
            }
            let start = Instant::now();
            match job {
                Job::Before(state, freed) => {
                    if freed {
                        self.slots = Slots::default();
                    }
                    self.begin(state);
                }
                Job::After(batch) => self.compare(batch),
            }
            gave_up.store(self.result.no_verdict.is_some(), Ordering::Relaxed);
            self.result.judge_s += start.elapsed().as_secs_f64();
        }
        self
    }

    /// Makes the model anew.
    fn begin(&mut self, state: State) {
        self.before = match Model::new(&state, self.semantics) {
            Ok(model) => Some((state, model)),
            Err(why) => {
                self.result.no_verdict = Some(why.to_string());
                None
            }
        };
    }

    /// Replays the batch and compares.
    fn compare(&mut self, batch: Batch) {
        let Batch { ops, results, state, again } = batch;
        let Some((before, mut model)) = self.before.take() else { return };
        let number = self.result.batches;
        self.result.batches += 1;
        let slots_before = self.slots.clone();
        let mut divergence = None;
        for (index, (op, result)) in ops.iter().zip(&results).enumerate() {
            let found = replay::allocated(*op, result);
            if divergence.is_none() {
                let expected = match replay::apply(&mut model, &self.slots, *op) {
                    Ok(expected) => expected,
                    Err(error) => {
                        self.result.no_verdict = Some(error.to_string());
                        return;
                    }
                };
                self.result.operations += 1;
                if expected != found {
                    divergence = Some(self.explain(
                        number,
                        (&ops, &results),
                        index,
                        (&before, &slots_before),
                        &model,
                        expected,
                    ));
                } else if matches!(op, Op::Alloc { .. }) && found.is_none() {
                    self.result.failures += 1;
                }
            }
            // What is held is what the kernel says, whatever the model thinks of it.
            self.slots.note(*op, found);
        }
        let rules = Rule::ALL.into_iter().zip(model.take_rules());
        if self.result.rules.is_empty() {
            self.result.rules = rules.collect();
        } else {
            self.result.rules.iter_mut().zip(rules).for_each(|(sum, (_, count))| sum.1 += count);
        }
        let divergence = divergence.or_else(|| {
            let apart = model.differences(&state);
            (!apart.is_empty()).then(|| Divergence {
                batch: number,
                operation: None,
                operations: Vec::new(),
                model: "the state afterwards".into(),
                kernel: "another".into(),
                rules: Vec::new(),
                before: Vec::new(),
                state: apart.iter().map(shown).collect(),
            })
        });
        let agree = divergence.is_none();
        if self.result.found.is_none() {
            if self.history.len() > HISTORY {
                self.history.clear();
            }
            let batch = self.history.len();
            self.history.extend(&ops);
            self.result.found = divergence.as_ref().map(|divergence| Found {
                ops: std::mem::take(&mut self.history),
                batch,
                what: divergence.what(&ops),
            });
        }
        if let Some(divergence) = divergence {
            self.result.diverged += 1;
            if self.result.divergences.len() < KEPT {
                self.result.divergences.push(divergence);
            }
        }
        if again && agree {
            match Model::check(&state, self.semantics) {
                Ok(()) => self.before = Some((state, model)),
                Err(why) => self.result.no_verdict = Some(why.to_string()),
            }
        } else if again {
            // One divergence does not make the next.
            self.begin(state);
        }
    }

    /// The divergence of operation `index`, after which the model is `model`; `before` is what the batch began from.
    fn explain(
        &self,
        batch: u64,
        (ops, results): (&[Op], &[OpResult]),
        index: usize,
        before: (&State, &Slots),
        model: &Model,
        expected: Option<u64>,
    ) -> Divergence {
        let found = replay::allocated(ops[index], &results[index]);
        let pages: Vec<u64> = [expected, found].into_iter().flatten().collect();
        let from = index.saturating_sub(LED);
        let mut divergence = Divergence {
            batch,
            operation: Some(index),
            operations: ops[from..=index].iter().map(|op| op.to_string()).collect(),
            model: pfn(expected),
            kernel: pfn(found),
            rules: Vec::new(),
            before: Vec::new(),
            state: Vec::new(),
        };
        // It was done before, so it can be done again.
        if let Ok(mut again) = Model::new(before.0, self.semantics) {
            let mut slots = before.1.clone();
            for (op, result) in ops.iter().zip(results).take(index) {
                let _ = replay::apply(&mut again, &slots, *op);
                slots.note(*op, replay::allocated(*op, result));
            }
            divergence.rules = model.decided_since(&again.rules());
            divergence.before = again.around(&pages);
        }
        divergence
    }
}

fn pfn(page: Option<u64>) -> String {
    page.map_or_else(|| "no page".to_owned(), |pfn| format!("{pfn:#x}"))
}

fn shown(difference: &Difference) -> String {
    let Difference { zone, what, model, kernel } = difference;
    format!("{zone}, {what}: model {model}; kernel {kernel}")
}
