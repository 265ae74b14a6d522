//! The verdict on a test, and its exit code.

use serde::Serialize;

use super::{Role, RunReport};

/// What a test says of the patched kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Nothing was found in the patched kernel.
    Consistent,
    /// It breaks an invariant.
    Violation,
    /// It does not do what the model says.
    Divergence,
    /// It died, hung, or reported a fault of its own after the agent was ready.
    GuestFailure,
    /// The test could not decide.
    NoVerdict,
}

impl Verdict {
    /// Its name, as in the JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Consistent => "consistent",
            Self::Violation => "violation",
            Self::Divergence => "divergence",
            Self::GuestFailure => "guest-failure",
            Self::NoVerdict => "no-verdict",
        }
    }

    /// The exit code: 0 consistent, 1 a finding, 125 no verdict, so that `git bisect run` understands it.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Consistent => 0,
            Self::Violation | Self::Divergence | Self::GuestFailure => 1,
            Self::NoVerdict => 125,
        }
    }
}

/// Judges a test by all its runs.
///
/// The verdict is about the patched kernel, so what is wrong with base never makes it bad. A finding in the patched kernel
/// stands whatever became of the other runs: it was seen. Without one, every run must have decided, those of base too:
/// they are the control that shows whether the test can see anything.
pub(super) fn judge(runs: &[RunReport]) -> (Verdict, Option<String>) {
    let patched = || runs.iter().filter(|run| run.role == Role::Patched);
    if patched().any(|run| failed(run).is_some()) {
        return (Verdict::GuestFailure, None);
    }
    if patched().any(|run| !run.violations.is_empty()) {
        return (Verdict::Violation, None);
    }
    if patched().any(|run| run.diverged > 0) {
        return (Verdict::Divergence, None);
    }
    let undecided = runs.iter().find_map(|run| run.no_verdict.as_ref().map(|reason| (run, reason)));
    if let Some((run, reason)) = undecided {
        return (Verdict::NoVerdict, Some(format!("{}, {}: {reason}", run.role.name(), run.script)));
    }
    if patched().next().is_none() {
        return (Verdict::NoVerdict, Some("the patched kernel was not run".into()));
    }
    (Verdict::Consistent, None)
}

/// How a guest failed, by its end, its console or its taint.
pub(super) fn failed(run: &RunReport) -> Option<String> {
    let reported = run.console.iter().find(|report| report.is_finding()).map(|report| report.text.clone());
    match (&run.guest_failure, reported) {
        (Some(failure), Some(reported)) => Some(format!("{failure}: {reported}")),
        (Some(failure), None) => Some(failure.clone()),
        (None, Some(reported)) => Some(reported),
        (None, None) if !run.taint.is_empty() && boot_reports(run) == 0 => {
            Some(format!("the kernel is tainted: {}", run.taint.join(", ")))
        }
        (None, None) => None,
    }
}

/// Reports from before the agent was ready: a taint may come from them, and then says nothing of the script.
fn boot_reports(run: &RunReport) -> usize {
    run.console.iter().filter(|report| !report.after_ready && report.kind.is_finding()).count()
}
