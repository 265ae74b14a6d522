//! KTAP version 1 (Documentation/dev-tools/ktap.rst), as kselftest and KUnit print it and `kunit.py parse` reads it.

use std::fmt::Write as _;

use super::{CaseResult, Group, Summary, one_line};

/// What ends a test's output for `kunit.py` (tools/testing/kunit/kunit_parser.py, KTAP_END): a guest's console may hold it.
const ENDS: [&str; 3] =
    ["List of all partitions:", "Kernel panic - not syncing: VFS:", "reboot: System halted"];

/// The whole document: a test a group, its cases as subtests, all there is to say of them as diagnostics.
#[must_use]
pub fn ktap(summary: &Summary) -> String {
    let mut text = format!("KTAP version 1\n1..{}\n", summary.groups.len());
    for (name, value) in &summary.about {
        let _ = writeln!(text, "# {}", inert(&format!("{name}: {value}")));
    }
    for (index, group) in summary.groups.iter().enumerate() {
        subtests(&mut text, group);
        result(&mut text, "", index + 1, &group.name, group.worst(), false);
    }
    text
}

fn subtests(text: &mut String, group: &Group) {
    let _ =
        writeln!(text, "  KTAP version 1\n  # Subtest: {}\n  1..{}", name(&group.name), group.cases.len());
    for (index, case) in group.cases.iter().enumerate() {
        for line in case.text.lines() {
            let _ = writeln!(text, "  # {}", inert(line));
        }
        result(text, "  ", index + 1, &case.name, &case.result, true);
    }
}

fn result(text: &mut String, indent: &str, number: usize, title: &str, result: &CaseResult, reasons: bool) {
    let title = name(title);
    let _ = match result {
        CaseResult::Passed => writeln!(text, "{indent}ok {number} {title}"),
        CaseResult::Failed { message, .. } if reasons => {
            writeln!(text, "{indent}not ok {number} {title} # {}", inert(message))
        }
        CaseResult::Failed { .. } => writeln!(text, "{indent}not ok {number} {title}"),
        CaseResult::Undecided { reason } => {
            writeln!(text, "{indent}ok {number} {title} # SKIP no verdict: {}", inert(reason))
        }
    };
}

/// A description holds neither `#` nor a line's end.
fn name(text: &str) -> String {
    one_line(text).replace('#', "no. ")
}

/// Text in which no reader finds anything but text.
fn inert(text: &str) -> String {
    let mut line = one_line(text).replace(" # ", " - ");
    for end in ENDS {
        line = line.replace(end, &end.replace(':', ";"));
    }
    line
}
