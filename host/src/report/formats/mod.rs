//! Results in the formats of other tools: JUnit XML, KTAP, and the list that `b4 review` takes from a check command.
//!
//! All three say the same [`Summary`]. None of them has a word for "could not decide": it becomes an error in JUnit, a skip
//! in KTAP and a warning for b4, the one value of each that counts neither as good nor as a finding.

mod b4;
mod junit;
mod ktap;

use super::table::findings;
use super::verdict::{self, Verdict};
use super::{Report, Role, RunReport};

pub use b4::b4;
pub use junit::junit;
pub use ktap::ktap;

/// What came of a command, as these formats can say it.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// The command: `test-kernel`.
    pub name: &'static str,
    /// Names and values of what was tested, such as the kernels.
    pub about: Vec<(String, String)>,
    /// What was tried, in groups.
    pub groups: Vec<Group>,
}

/// Cases that belong together: those of a script, or of a tree.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// Unique in its summary.
    pub name: String,
    /// At least one.
    pub cases: Vec<Case>,
}

/// One thing that was tried.
#[derive(Clone, Debug, PartialEq)]
pub struct Case {
    /// Its name.
    pub name: String,
    /// What came of it.
    pub result: CaseResult,
    /// What there is to say of it, in lines; may be empty.
    pub text: String,
    /// Wall time that it took, in seconds.
    pub wall_s: f64,
}

/// What came of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CaseResult {
    /// Nothing was found.
    Passed,
    /// Something was.
    Failed {
        /// Its kind in one word: `violation`.
        kind: &'static str,
        /// It in one line.
        message: String,
    },
    /// The case could not be decided.
    Undecided {
        /// Why.
        reason: String,
    },
}

impl Group {
    /// The worst of its cases: one that failed, else one that is undecided.
    fn worst(&self) -> &CaseResult {
        let is = |wanted: fn(&CaseResult) -> bool| {
            self.cases.iter().map(|case| &case.result).find(|result| wanted(result))
        };
        is(|result| matches!(result, CaseResult::Failed { .. }))
            .or_else(|| is(|result| matches!(result, CaseResult::Undecided { .. })))
            .unwrap_or(&CaseResult::Passed)
    }
}

impl Report {
    /// The report as these formats can say it: a group a script, a case a run. What is wrong with base fails nothing, as the
    /// verdict is about the patched kernel; it stands in the text.
    #[must_use]
    pub fn summary(&self) -> Summary {
        let mut groups: Vec<Group> = Vec::new();
        for run in &self.runs {
            match groups.iter_mut().find(|group| group.name == run.script) {
                Some(group) => group.cases.push(case(run)),
                None => groups.push(Group { name: run.script.clone(), cases: vec![case(run)] }),
            }
        }
        if groups.is_empty() {
            let reason = self.reason.clone().unwrap_or_else(|| "nothing was run".to_owned());
            let result = CaseResult::Undecided { reason };
            let case = Case { name: "kernels".to_owned(), result, text: String::new(), wall_s: 0.0 };
            groups.push(Group { name: "build".to_owned(), cases: vec![case] });
        }
        let about = self.kernels.iter().map(|kernel| {
            let series: String = kernel.series.iter().map(|title| format!(" + {title:?}")).collect();
            let value = format!("{} {} ({}){series}", kernel.release, kernel.flavour, kernel.spec);
            (kernel.role.name().to_owned(), value)
        });
        Summary { name: "test-kernel", about: about.collect(), groups }
    }
}

fn case(run: &RunReport) -> Case {
    let role = run.role.name();
    let name = if run.round > 1 { format!("{role} #{}", run.round) } else { role.to_owned() };
    let text = findings(role, run);
    let first = || text.lines().next().unwrap_or_default().to_owned();
    let undecided = || run.no_verdict.clone().map(|reason| CaseResult::Undecided { reason });
    let result = match (run.role, verdict::judge(std::slice::from_ref(run)).0) {
        (Role::Patched, Verdict::Consistent) => CaseResult::Passed,
        (Role::Patched, verdict) if verdict != Verdict::NoVerdict => {
            CaseResult::Failed { kind: verdict.name(), message: first() }
        }
        _ => undecided().unwrap_or(CaseResult::Passed),
    };
    Case { name, result, text, wall_s: run.wall_s }
}

/// Text of a guest or a patch in one line of printable characters.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect::<String>().trim().to_owned()
}

#[cfg(test)]
mod tests;
