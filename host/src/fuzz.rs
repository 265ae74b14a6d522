//! Random batches on a real kernel, each predicted by the model page by page, and the state after it to the last link.
//!
//! The model starts anew from the frozen state before each batch, so one divergence does not make the next.

use guest_agent::script::Step;
use serde::Serialize;

use crate::batch::{self, Answer, Driver, Op, OpResult};
use crate::model::{Difference, Model, Rule, Semantics};
use crate::observe::frozen::{Kernel, Ram, State};
use crate::replay::{self, Generator, Slots};
use crate::run::{BatchBell, Bell, FrozenObserver, Phase, RunError};
use crate::vm::Machine;

/// Divergences that are kept; the rest is only counted.
const KEPT: usize = 5;
/// Operations before one that diverges that are shown with it.
const LED: usize = 5;

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
    /// Why the run could not go on, where it could not.
    pub no_verdict: Option<String>,
    /// Time that the host spent on predicting and comparing, in seconds.
    pub host_s: f64,
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

/// Makes batches or takes them from the script, predicts them, compares.
pub struct Fuzzer<'a> {
    kernel: &'a Kernel,
    semantics: Semantics,
    steps: &'a [Step],
    seed: u64,
    /// The step of the last batch.
    step: usize,
    /// Operations that may still be made.
    left: u64,
    generator: Option<Generator>,
    slots: Slots,
    driver: Option<Driver>,
    pending: Option<(Model, Vec<Op>)>,
    /// What came of it.
    pub result: Fuzzed,
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
            semantics,
            steps,
            step: 0,
            seed,
            left: operations,
            generator: None,
            slots: Slots::default(),
            driver: None,
            pending: None,
            result: Fuzzed::default(),
        }
    }

    /// Reads the state, makes a batch and the model that predicts it. None where the run cannot go on, or is done.
    fn prepare(&mut self, ram: &Ram, step: usize) -> Option<Vec<Op>> {
        if step != self.step {
            let before = self.steps.get(self.step);
            if matches!(before, Some(Step::Batches(before)) if before.free) {
                self.slots = Slots::default();
            }
            self.step = step;
        }
        let Some(Step::Batches(step)) = self.steps.get(step) else { return None };
        if self.result.no_verdict.is_some() || step.given.is_empty() && self.left == 0 {
            return None;
        }
        let model = State::read(self.kernel, ram).map_err(|error| error.to_string()).and_then(|state| {
            let free: u64 = state.zones.iter().map(|zone| zone.listed_pages(|_| true)).sum();
            let generator = || Generator::new(self.seed, batch::SLOTS, free);
            self.generator.get_or_insert_with(generator);
            Model::new(&state, self.semantics).map_err(|error| error.to_string())
        });
        let model = match model {
            Ok(model) => model,
            Err(why) => {
                self.result.no_verdict = Some(why);
                return None;
            }
        };
        let ops = if step.given.is_empty() {
            let count = self.left.min(step.size.get().into()) as usize;
            self.generator.as_mut()?.batch(&self.slots, count)
        } else {
            step.given.to_vec()
        };
        self.pending = Some((model, ops.clone()));
        Some(ops)
    }

    /// Replays the batch and compares.
    fn compare(&mut self, ram: &Ram, answer: Result<Answer, String>) {
        let Some((mut model, ops)) = self.pending.take() else { return };
        let results: Vec<OpResult> = match answer {
            Ok(Answer::Done(results)) => results,
            Ok(Answer::Refused { op, wrong }) => {
                self.result.no_verdict =
                    Some(format!("the driver refused operation {op}: {wrong}: {:?}", ops.get(op)));
                return;
            }
            Err(why) => {
                self.result.no_verdict = Some(why);
                return;
            }
        };
        self.left = self.left.saturating_sub(ops.len() as u64);
        let number = self.result.batches;
        self.result.batches += 1;
        let mut divergence = None;
        let mut start = (model.clone(), self.slots.clone());
        for (index, (op, result)) in ops.iter().zip(&results).enumerate() {
            let found = allocated(*op, result);
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
                    let from = index.saturating_sub(LED);
                    let (mut before, slots) = (start.0.clone(), &mut start.1);
                    for (op, result) in ops.iter().zip(&results).take(index) {
                        // It was done before, so it can be done again.
                        let _ = replay::apply(&mut before, slots, *op);
                        slots.note(*op, allocated(*op, result));
                    }
                    let pages: Vec<u64> = [expected, found].into_iter().flatten().collect();
                    divergence = Some(Divergence {
                        batch: number,
                        operation: Some(index),
                        operations: ops[from..=index].iter().map(|op| op.to_string()).collect(),
                        model: pfn(expected),
                        kernel: pfn(found),
                        rules: model.decided_since(&before.rules()),
                        before: before.around(&pages),
                        state: Vec::new(),
                    });
                } else if matches!(op, Op::Alloc { .. }) && found.is_none() {
                    self.result.failures += 1;
                }
            }
            // What is held is what the kernel says, whatever the model thinks of it.
            self.slots.note(*op, found);
        }
        let rules = Rule::ALL.into_iter().zip(model.rules());
        if self.result.rules.is_empty() {
            self.result.rules = rules.collect();
        } else {
            self.result.rules.iter_mut().zip(rules).for_each(|(sum, (_, count))| sum.1 += count);
        }
        if divergence.is_none() {
            match State::read(self.kernel, ram) {
                Ok(state) => {
                    let apart = model.differences(&state);
                    if !apart.is_empty() {
                        divergence = Some(Divergence {
                            batch: number,
                            operation: None,
                            operations: Vec::new(),
                            model: "the state afterwards".into(),
                            kernel: "another".into(),
                            rules: Vec::new(),
                            before: Vec::new(),
                            state: apart.iter().map(shown).collect(),
                        });
                    }
                }
                Err(error) => self.result.no_verdict = Some(error.to_string()),
            }
        }
        if let Some(divergence) = divergence {
            self.result.diverged += 1;
            if self.result.divergences.len() < KEPT {
                self.result.divergences.push(divergence);
            }
        }
    }
}

/// The page that an operation gave, if it allocates and succeeded.
fn allocated(op: Op, result: &OpResult) -> Option<u64> {
    result.value().ok().filter(|_| matches!(op, Op::Alloc { .. }))
}

fn pfn(page: Option<u64>) -> String {
    page.map_or_else(|| "no page".to_owned(), |pfn| format!("{pfn:#x}"))
}

fn shown(difference: &Difference) -> String {
    let Difference { zone, what, model, kernel } = difference;
    format!("{zone}, {what}: model {model}; kernel {kernel}")
}

impl FrozenObserver for Fuzzer<'_> {
    fn look(&mut self, _: &mut dyn Machine, _: Bell<'_>) -> Result<(), RunError> {
        Ok(())
    }

    fn batch(&mut self, machine: &mut dyn Machine, bell: BatchBell) -> Result<(), RunError> {
        let start = std::time::Instant::now();
        let (file, layout) = machine.ram();
        let ram =
            Ram::map(file, layout).map_err(|source| RunError::Io { doing: "map the guest's RAM", source })?;
        if self.driver.is_none() && self.result.no_verdict.is_none() {
            match Driver::find(self.kernel, &ram, file) {
                Ok(driver) => self.driver = Some(driver),
                Err(error) => self.result.no_verdict = Some(error.to_string()),
            }
        }
        if let Some(driver) = self.driver.clone() {
            match bell.phase {
                Phase::Before => {
                    if let Some(ops) = self.prepare(&ram, bell.step)
                        && let Err(error) = driver.write(file, &ops)
                    {
                        self.result.no_verdict = Some(error.to_string());
                        self.pending = None;
                    }
                }
                Phase::After => {
                    if let Some((_, ops)) = &self.pending {
                        let answer = driver.read(file, ops.len());
                        self.compare(&ram, answer.map_err(|error| error.to_string()));
                    }
                }
            }
        }
        self.result.host_s += start.elapsed().as_secs_f64();
        Ok(())
    }
}
