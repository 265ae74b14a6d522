//! Each format, read by a reader that is not ours.

use std::io::Write;
use std::process::{Command, Stdio};

use junit_parser::{TestStatus, TestSuites};

use super::super::Report;
use super::super::tests::{report, reported, run, undecided, violated};
use super::*;
use crate::check::console::Kind;
use Role::{Base, Patched};

/// What a guest or a mail may hold, and what each format has to keep from being taken for its own.
const HOSTILE: &str = "a ]]> <b> & \"c\" \u{1}\u{7f}\u{1b}[31m # SKIP d\nok 9 e\nKTAP version 1\nnot ok 1\nBail out!\n\
                       reboot: System halted";

fn hostile() -> Report {
    let mut patched = undecided(Patched);
    patched.no_verdict = Some(HOSTILE.into());
    patched.console_tail = Some(HOSTILE.into());
    patched.script = "hostile # SKIP\nok 2 <script>".into();
    report(vec![patched, violated(Base), run(Patched)])
}

fn read_junit(report: &Report) -> TestSuites {
    junit_parser::from_reader(junit(&report.summary()).as_bytes()).expect("it is JUnit")
}

#[test]
fn junit_says_what_the_report_says() {
    let suites = read_junit(&report(vec![violated(Base), run(Patched)]));
    assert_eq!((suites.tests, suites.failures, suites.errors, suites.skipped), (2, 0, 0, 0));
    let suite = &suites.suites[0];
    assert_eq!((&*suite.name, suite.time), ("guard-delta", 32.5));
    assert!(suite.properties.vec.iter().any(|(name, value)| name == "base" && value.contains("6.12.117")));
    let base = &suite.cases[0];
    assert_eq!((&*base.original_name, base.time), ("base", 16.25));
    assert!(base.system_out.as_ref().is_some_and(|text| text.contains("I2 broken in DMA32")));

    let suites = read_junit(&report(vec![run(Base), violated(Patched)]));
    let TestStatus::Failure(failure) = &suites.suites[0].cases[1].status else { panic!("{suites:?}") };
    assert_eq!(failure.failure_type, "violation");
    assert!(failure.message.starts_with("patched: I2 broken in DMA32 at load-1"), "{}", failure.message);

    let suites = read_junit(&Report::no_verdict("nothing was built".into()));
    let TestStatus::Error(error) = &suites.suites[0].cases[0].status else { panic!("{suites:?}") };
    assert_eq!((&*error.error_type, &*error.message), ("no-verdict", "nothing was built"));
}

#[test]
fn junit_takes_any_text() {
    let suites = read_junit(&hostile());
    assert_eq!((suites.tests, suites.failures, suites.errors), (3, 0, 1));
    let TestStatus::Error(error) = &suites.suites[0].cases[0].status else { panic!("{suites:?}") };
    assert!(error.message.starts_with("a ]]> <b> & \"c\" "), "{}", error.message);
    assert!(!error.message.contains('\u{1}') && error.text.contains("Bail out!"), "{error:?}");
}

/// Number, whether it counts as passed, directive and description of each test that perl's own reader of TAP sees on the
/// top level; then whether it has something to complain of.
fn read_tap(text: &str) -> String {
    const READER: &str = r#"use TAP::Parser; local $/; my $p = TAP::Parser->new({ tap => scalar <STDIN> });
        while (my $r = $p->next) {
            printf "%d %s %s[%s]\n", $r->number, ($r->is_actual_ok ? "ok" : "not ok"), $r->directive, $r->description
                if $r->is_test;
        }
        print join("; ", $p->parse_errors), $p->is_good_plan ? "" : "plan";"#;
    let mut perl = Command::new("perl");
    let mut perl = perl
        .args(["-e", READER])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("git brings perl");
    perl.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("perl reads");
    let output = perl.wait_with_output().expect("perl ends");
    assert!(output.status.success());
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Its nested tests are read by the kernel's own reader, in `xtask/tests`.
#[test]
fn ktap_says_what_the_report_says() {
    let text = ktap(&report(vec![violated(Base), run(Patched)]).summary());
    assert_eq!(read_tap(&text), "1 ok [guard-delta]\n");
    assert!(text.contains("\n  ok 1 base\n  ok 2 patched\nok 1 guard-delta\n"), "{text}");

    let text = ktap(&report(vec![run(Base), reported(Patched, Kind::BadPage, true)]).summary());
    assert_eq!(read_tap(&text), "1 not ok [guard-delta]\n");
    assert!(text.contains("\n  ok 1 base\n"), "{text}");
    assert!(text.contains("\n  not ok 2 patched # patched: console line 90: BUG: Bad page state"), "{text}");

    let text = ktap(&report(vec![undecided(Base), run(Patched)]).summary());
    assert_eq!(read_tap(&text), "1 ok SKIP[guard-delta]\n");
    assert!(
        text.contains("\n  ok 1 base # SKIP no verdict: the kernel did not boot\n  ok 2 patched\n"),
        "{text}"
    );
}

#[test]
fn ktap_takes_any_text() {
    let text = ktap(&hostile().summary());
    assert_eq!(read_tap(&text), "1 ok SKIP[hostile no.  SKIP ok 2 <script>]\n2 ok [guard-delta]\n");
    assert!(!text.contains("System halted:") && !text.contains("reboot: "), "{text}");
}

/// b4 itself reads it in `xtask/tests`.
#[test]
fn b4_says_what_the_report_says() {
    let list = |report: &Report| serde_json::to_value(b4(&report.summary())).expect("JSON");
    let statuses = |report: &Report| -> Vec<String> {
        let list = list(report);
        list.as_array().expect("a list").iter().map(|check| check["status"].to_string()).collect()
    };
    assert_eq!(statuses(&report(vec![violated(Base), run(Patched)])), ["\"pass\""]);
    assert_eq!(statuses(&report(vec![undecided(Base), run(Patched)])), ["\"warn\""]);
    assert_eq!(statuses(&Report::no_verdict("nothing was built".into())), ["\"warn\""]);
    assert_eq!(statuses(&hostile()), ["\"warn\"", "\"pass\""]);

    let list = list(&report(vec![run(Base), violated(Patched)]));
    assert_eq!((&list[0]["tool"], &list[0]["status"]), (&"buddydiff guard-delta".into(), &"fail".into()));
    let summary = list[0]["summary"].as_str().expect("a string");
    assert!(summary.starts_with("violation: patched: I2 broken in DMA32"), "{summary}");
    let details = list[0]["details"].as_str().expect("a string");
    assert!(
        details.starts_with("base: 6.12.117 smp (deb:") && details.contains("count guard pages"),
        "{details}"
    );
}
