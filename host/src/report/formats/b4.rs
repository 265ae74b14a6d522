//! What `b4 review` takes from a check command (b4 0.16, src/b4/review/checks.py, `_run_external_cmd()`): a JSON list of
//! objects, each with a tool, a status, and text.

use serde::Serialize;

use super::{CaseResult, Group, Summary};

/// One entry of the list. b4 keeps one an entry's tool and mail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    tool: String,
    /// `pass`, `warn` or `fail`; b4 takes all else for `fail`.
    status: &'static str,
    summary: String,
    /// Empty: there is no page to look at.
    url: &'static str,
    details: String,
}

/// The list, an entry a group.
#[must_use]
pub fn b4(summary: &Summary) -> Vec<Check> {
    summary.groups.iter().map(|group| check(summary, group)).collect()
}

fn check(summary: &Summary, group: &Group) -> Check {
    let (status, text) = match group.worst() {
        CaseResult::Passed => ("pass", "nothing was found".to_owned()),
        CaseResult::Failed { kind, message } => ("fail", format!("{kind}: {message}")),
        CaseResult::Undecided { reason } => {
            ("warn", format!("no verdict: {}", reason.lines().next().unwrap_or_default()))
        }
    };
    let about = summary.about.iter().map(|(name, value)| format!("{name}: {value}\n"));
    let texts = group.cases.iter().map(|case| match &case.result {
        CaseResult::Undecided { reason } if case.text.is_empty() => format!("{}: {reason}\n", case.name),
        _ => case.text.clone(),
    });
    Check {
        tool: format!("buddydiff {}", group.name),
        status,
        summary: text,
        url: "",
        details: about.chain(texts).collect(),
    }
}
