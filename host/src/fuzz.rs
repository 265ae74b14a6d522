//! Random batches on a real kernel, each predicted by the model page by page, and the state after it to the last link.
//!
//! The model starts anew from the frozen state before a batch where anything came between it and the batch before, and
//! where that one diverged, so one divergence does not make the next.

mod judge;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::time::Instant;

use guest_agent::script::{Batches, Step};
use serde::Serialize;

use crate::batch::{self, Answer, Driver, Op, OpResult};
use crate::model::{Rule, Semantics};
use crate::observe::frozen::{Kernel, Ram, State};
use crate::replay::{self, Generator, Slots};
use crate::run::{BatchBell, Bell, FrozenObserver, Phase, RunError};
use crate::vm::Machine;
use judge::{Batch, Judge};

/// Operations that are run without a pause, if more than one batch: so many take seconds where each page is unmapped as it
/// is freed, with interrupts off all the time, and a kernel complains after 21 s (CONFIG_RCU_CPU_STALL_TIMEOUT).
pub const UNPAUSED: u64 = 65_536;

/// What a run of batches gave.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Fuzzed {
    /// Batches that were compared.
    pub batches: u64,
    /// Operations that were compared.
    pub operations: u64,
    /// Of those, allocations that the kernel refused, as predicted.
    pub failures: u64,
    /// How often each rule decided, by the model.
    pub rules: Vec<(Rule, u64)>,
    /// Batches that diverged.
    pub diverged: u64,
    /// The first of them.
    pub divergences: Vec<Divergence>,
    /// How the first of them came about.
    #[serde(skip)]
    pub found: Option<Found>,
    /// Why the run could not go on, where it could not.
    pub no_verdict: Option<String>,
    /// Time that the guest stood still while its state was read, or for the judgement of the batch before, in seconds.
    pub compare_s: f64,
    /// Time that it stood still while the next batch was made and written, in seconds.
    pub make_s: f64,
    /// Time that predicting and comparing took on a thread of their own, in seconds.
    pub judge_s: f64,
    /// Of the guest's own time from the first operation to the last, the share in which operations ran, by its time stamp
    /// counter. The rest is the driver's checks, what comes between batches, and stopping and going on.
    pub operations_share: f64,
}

/// The operations that led to the first divergence of a run, to repeat it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Every operation up to the end of the batch that diverged; fewer after very many.
    pub ops: Vec<Op>,
    /// Where that batch begins.
    pub batch: usize,
    /// What diverged, apart from pfns and numbers: another run shows the same if it says the same.
    pub what: String,
}

/// Where kernel and model part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Divergence {
    /// Number of the batch, from 0.
    pub batch: u64,
    /// Number of the operation in it, from 0; none where only the state afterwards differs.
    pub operation: Option<usize>,
    /// The operation and a few before it.
    pub operations: Vec<String>,
    /// What the model says.
    pub model: String,
    /// What the kernel did.
    pub kernel: String,
    /// Rules of the model that decided the operation.
    pub rules: Vec<Rule>,
    /// The state before the operation, by the model.
    pub before: Vec<String>,
    /// What differs in the state afterwards.
    pub state: Vec<String>,
}

impl Divergence {
    /// What diverged in the batch `ops`, apart from pfns and numbers.
    fn what(&self, ops: &[Op]) -> String {
        let without_numbers = |text: &str| {
            let words = text.split(' ').filter(|word| !word.contains(|char: char| char.is_ascii_digit()));
            words.collect::<Vec<&str>>().join(" ")
        };
        match self.operation.and_then(|operation| ops.get(operation)) {
            Some(op) => {
                let text = op.to_string();
                let kind =
                    text.trim_start_matches(['{', ' ', '"']).split([' ', '"']).next().unwrap_or_default();
                let page = |text: &str| if text.starts_with("0x") { "a page" } else { "none" };
                format!("{kind}: model {}, kernel {}", page(&self.model), page(&self.kernel))
            }
            None => without_numbers(
                self.state.first().and_then(|line| line.split(':').next()).unwrap_or_default(),
            ),
        }
    }

    /// In words, a line each.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let place = match self.operation {
            Some(operation) => format!("batch {}, operation {operation}", self.batch),
            None => format!("batch {}, the state afterwards", self.batch),
        };
        let mut lines = vec![format!("{place}: model {}, kernel {}", self.model, self.kernel)];
        let mut part = |title: &str, texts: &[String]| {
            if !texts.is_empty() {
                lines.push(format!("  {title}:"));
                lines.extend(texts.iter().map(|text| format!("    {text}")));
            }
        };
        part("the operation, and those before it", &self.operations);
        let rules: Vec<String> = self.rules.iter().map(|rule| format!("{rule:?}")).collect();
        part("rules of the model that decided it", &rules);
        part("the state before it, by the model", &self.before);
        part("what differs in the state after the batch", &self.state);
        lines
    }
}

/// The guest's memory.
struct Attached {
    ram: Ram,
    driver: Driver,
}

/// The guest's time stamp counter.
#[derive(Default)]
struct Ticks {
    first: Option<u64>,
    last: u64,
    /// From the first operation of each batch to its last.
    in_batches: u64,
}

impl Ticks {
    fn add(&mut self, results: &[OpResult]) {
        let (Some(first), Some(last)) = (results.first(), results.last()) else { return };
        self.first.get_or_insert(first.tsc);
        self.last = last.tsc;
        self.in_batches = self.in_batches.saturating_add(last.tsc.saturating_sub(first.tsc));
    }

    fn share(&self) -> f64 {
        let all = self.last.saturating_sub(self.first.unwrap_or(0));
        self.in_batches as f64 / all.max(1) as f64
    }
}

/// Makes batches or takes them from the script, and has them judged.
pub struct Fuzzer<'a> {
    kernel: &'a Kernel,
    steps: &'a [Step],
    seed: u64,
    /// The step of the last batch.
    step: usize,
    /// Operations that may still be made.
    left: u64,
    /// Operations that may still be made without a pause.
    unpaused: u64,
    pauses: bool,
    generator: Option<Generator>,
    slots: Slots,
    attached: Option<Attached>,
    /// The batch that is written.
    pending: Option<Vec<Op>>,
    judge: Judge,
    ticks: Ticks,
    no_verdict: Option<String>,
    compare_s: f64,
    make_s: f64,
}

impl<'a> Fuzzer<'a> {
    /// For one guest that does these steps (unrolled); at most `operations` in all are made at random.
    #[must_use]
    pub fn new(
        kernel: &'a Kernel,
        semantics: Semantics,
        steps: &'a [Step],
        seed: u64,
        operations: u64,
    ) -> Self {
        Self {
            kernel,
            steps,
            step: 0,
            seed,
            left: operations,
            unpaused: 0,
            pauses: true,
            generator: None,
            slots: Slots::default(),
            attached: None,
            pending: None,
            judge: Judge::new(semantics),
            ticks: Ticks::default(),
            no_verdict: None,
            compare_s: 0.0,
            make_s: 0.0,
        }
    }

    /// The same with batches that follow one another at once, up to [`UNPAUSED`] operations for each that the script has.
    #[must_use]
    pub fn without_pauses(self) -> Self {
        Self { pauses: false, ..self }
    }

    /// What came of it.
    #[must_use]
    pub fn finish(self) -> Fuzzed {
        let judged = self.judge.finish();
        let ended = self.pending.map(|ops| {
            format!("the guest ended within batch {}, of {} operations", judged.batches, ops.len())
        });
        Fuzzed {
            no_verdict: judged.no_verdict.or(self.no_verdict).or(ended),
            compare_s: self.compare_s,
            make_s: self.make_s,
            operations_share: self.ticks.share(),
            ..judged
        }
    }

    /// Makes a batch and writes it, if the run goes on.
    fn make(&mut self, file: &File, step: usize) {
        let Some(Step::Batches(step)) = self.steps.get(step) else { return };
        let (Some(attached), Some(generator)) = (&self.attached, &mut self.generator) else { return };
        let ops = if step.given.is_empty() {
            let count = self.left.min(step.size.get().into()) as usize;
            generator.batch(&self.slots, count)
        } else {
            step.given.to_vec()
        };
        // Where there is neither room nor anything to free it is time to let others run.
        self.unpaused = if ops.is_empty() { 0 } else { self.unpaused.saturating_sub(ops.len() as u64) };
        match attached.driver.write(file, &ops) {
            Ok(()) => self.pending = Some(ops),
            Err(error) => self.no_verdict = Some(error.to_string()),
        }
    }

    /// Whether there is a batch to run in this step.
    fn goes_on(&self, step: usize) -> bool {
        let Some(Step::Batches(step)) = self.steps.get(step) else { return false };
        self.no_verdict.is_none() && !self.judge.gave_up() && (!step.given.is_empty() || self.left > 0)
    }

    /// Reads the state before a batch.
    fn before(&mut self, step: usize) {
        let mut freed = false;
        if step != self.step {
            let before = self.steps.get(self.step);
            freed = matches!(before, Some(Step::Batches(before)) if before.free);
            if freed {
                self.slots = Slots::default();
            }
            self.step = step;
        }
        if !self.goes_on(step) {
            return;
        }
        let Some(state) = self.read() else { return };
        let free: u64 = state.zones.iter().map(|zone| zone.listed_pages(|_| true)).sum();
        self.generator.get_or_insert_with(|| Generator::new(self.seed, batch::SLOTS, free));
        self.unpaused = UNPAUSED;
        self.judge.before(state, freed);
    }

    /// Reads what came of a batch, and the state after it.
    fn after(&mut self, file: &File, step: usize) {
        let (Some(ops), Some(attached)) = (self.pending.take(), &self.attached) else { return };
        let results = match attached.driver.read(file, ops.len()) {
            Ok(Answer::Done(results)) => results,
            Ok(Answer::Refused { op, wrong }) => {
                let text = ops.get(op).map_or_else(String::new, Op::to_string);
                self.no_verdict = Some(format!("the driver refused operation {op}: {wrong}: {text}"));
                return;
            }
            Err(why) => {
                self.no_verdict = Some(why.to_string());
                return;
            }
        };
        let Some(state) = self.read() else { return };
        self.ticks.add(&results);
        self.left = self.left.saturating_sub(ops.len() as u64);
        for (op, result) in ops.iter().zip(&results) {
            self.slots.note(*op, replay::allocated(*op, result));
        }
        let random = |step: &Batches| step.given.is_empty() && !step.may_sleep;
        let random = matches!(self.steps.get(step), Some(Step::Batches(step)) if random(step));
        let again = random && !self.pauses && self.unpaused > 0 && self.left > 0;
        self.judge.after(Batch { ops, results, state, again });
        if !again {
            self.unpaused = 0;
        }
    }

    fn read(&mut self) -> Option<State> {
        let attached = self.attached.as_ref()?;
        match State::read(self.kernel, &attached.ram) {
            Ok(state) => Some(state),
            Err(error) => {
                self.no_verdict = Some(error.to_string());
                None
            }
        }
    }

    /// Finds the driver, once.
    fn attach(&mut self, machine: &dyn Machine) -> Result<(), RunError> {
        if self.attached.is_some() || self.no_verdict.is_some() {
            return Ok(());
        }
        let (file, layout) = machine.ram();
        let ram =
            Ram::map(file, layout).map_err(|source| RunError::Io { doing: "map the guest's RAM", source })?;
        match Driver::find(self.kernel, &ram, file) {
            Ok(driver) => self.attached = Some(Attached { ram, driver }),
            Err(error) => self.no_verdict = Some(error.to_string()),
        }
        Ok(())
    }
}

impl FrozenObserver for Fuzzer<'_> {
    fn look(&mut self, _: &mut dyn Machine, _: Bell<'_>) -> Result<(), RunError> {
        Ok(())
    }

    fn batch(&mut self, machine: &mut dyn Machine, bell: BatchBell) -> Result<(), RunError> {
        let start = Instant::now();
        self.attach(machine)?;
        let (file, _) = machine.ram();
        match bell.phase {
            Phase::Before => self.before(bell.step),
            Phase::After => self.after(file, bell.step),
        }
        let compared = Instant::now();
        if self.unpaused > 0 && self.goes_on(bell.step) {
            self.make(file, bell.step);
        }
        self.compare_s += (compared - start).as_secs_f64();
        self.make_s += compared.elapsed().as_secs_f64();
        Ok(())
    }

    fn again(&self) -> bool {
        self.pending.is_some()
    }
}
