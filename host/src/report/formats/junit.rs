//! JUnit XML, as CI servers read it.

use std::time::Duration;

use quick_junit::{NonSuccessKind, Property, Report, TestCase, TestCaseStatus, TestSuite};

use super::{Case, CaseResult, Summary};

/// The document. Characters that XML cannot hold are left out.
///
/// Wall times are in it; nothing else differs between two equal runs.
#[must_use]
pub fn junit(summary: &Summary) -> String {
    let mut report = Report::new(format!("buddydiff {}", summary.name));
    for group in &summary.groups {
        let mut suite = TestSuite::new(&group.name);
        suite.add_properties(summary.about.iter().map(|(name, value)| Property::new(name, value)));
        for case in &group.cases {
            suite.add_test_case(test_case(case, &format!("{}.{}", summary.name, group.name)));
        }
        suite.set_time(seconds(group.cases.iter().map(|case| case.wall_s).sum()));
        report.add_test_suite(suite);
    }
    // It fails only where the writer does, and a string does not.
    report.to_string().unwrap_or_default()
}

fn test_case(case: &Case, class: &str) -> TestCase {
    let said = |mut status: TestCaseStatus, kind: &str, message: &str| {
        status.set_type(kind).set_message(message).set_description(&case.text);
        status
    };
    let status = match &case.result {
        CaseResult::Passed => TestCaseStatus::success(),
        CaseResult::Failed { kind, message } => {
            said(TestCaseStatus::non_success(NonSuccessKind::Failure), kind, message)
        }
        CaseResult::Undecided { reason } => {
            said(TestCaseStatus::non_success(NonSuccessKind::Error), "no-verdict", reason)
        }
    };
    let passed = case.result == CaseResult::Passed;
    let mut test_case = TestCase::new(&case.name, status);
    test_case.set_classname(class).set_time(seconds(case.wall_s));
    if passed && !case.text.is_empty() {
        test_case.set_system_out(&case.text);
    }
    test_case
}

fn seconds(wall_s: f64) -> Duration {
    Duration::try_from_secs_f64(wall_s).unwrap_or_default()
}
