use std::os::unix::fs::OpenOptionsExt;

use super::*;
use crate::check::console::Kind;

fn zone(name: &str, buddy_pages: u64, free_pages: i64) -> ZoneReport {
    ZoneReport {
        zone: name.into(),
        free_pages,
        buddy_pages,
        delta: buddy_pages as i64 - free_pages,
        allowance: 10,
        guard_pages: None,
        frozen: None,
    }
}

pub(super) fn run(role: Role) -> RunReport {
    RunReport {
        role,
        script: "guard-delta".into(),
        round: 1,
        backend: "qemu-tcg".into(),
        deterministic: false,
        no_verdict: None,
        guest_failure: None,
        wall_s: 16.25,
        boot_s: Some(1.5),
        guest_s: 15.5,
        checkpoints: vec![
            CheckpointReport {
                name: "idle".into(),
                still: true,
                frozen: false,
                zones: vec![zone("DMA", 3840, 3840), zone("DMA32", 500_628, 500_628)],
            },
            CheckpointReport {
                name: "load-1".into(),
                still: true,
                frozen: false,
                zones: vec![zone("DMA", 3840, 3840), zone("DMA32", 407_848, 407_842)],
            },
        ],
        violations: Vec::new(),
        batches: 0,
        operations: 0,
        diverged: 0,
        divergences: Vec::new(),
        console: Vec::new(),
        taint: Vec::new(),
        console_tail: None,
        command: "qemu-system-x86_64 -kernel vmlinux".into(),
    }
}

pub(super) fn violated(role: Role) -> RunReport {
    let mut run = run(role);
    run.checkpoints[1].zones[1] = zone("DMA32", 407_848, 361_499);
    run.violations.push(Violation {
        checkpoint: "load-1".into(),
        zone: "DMA32".into(),
        invariant: "I2",
        expected: 407_848,
        found: 361_499,
        pfn: None,
        pages: None,
        text: "nr_free_pages is 361499, 46349 fewer than the 407848 pages on the free lists".into(),
    });
    run
}

pub(super) fn reported(role: Role, kind: Kind, after_ready: bool) -> RunReport {
    let mut run = run(role);
    run.console.push(ConsoleReport {
        kind,
        line: 90,
        after_ready,
        text: "BUG: Bad page state in process init".into(),
    });
    run
}

pub(super) fn undecided(role: Role) -> RunReport {
    let mut run = run(role);
    run.no_verdict = Some("the kernel did not boot".into());
    run.checkpoints.clear();
    run.console_tail = Some("[    0.1] Kernel panic - not syncing: no memory\n".into());
    run
}

fn kernel(role: Role) -> Kernel {
    Kernel {
        role,
        spec: "deb:linux-source-6.12=6.12.117-1~deb12u1".into(),
        release: "6.12.117".into(),
        flavour: "smp".into(),
        build_id: format!("{role:?}").to_lowercase(),
        series: if role == Role::Patched { vec!["count guard pages".into()] } else { vec![] },
    }
}

pub(super) fn report(runs: Vec<RunReport>) -> Report {
    Report::new(vec![kernel(Role::Base), kernel(Role::Patched)], runs, false)
}

fn verdict(base: RunReport, patched: RunReport) -> Verdict {
    report(vec![base, patched]).verdict
}

use Role::{Base, Patched};

#[test]
fn the_verdict_is_about_the_patched_kernel() {
    assert_eq!(verdict(run(Base), run(Patched)), Verdict::Consistent);
    assert_eq!(verdict(violated(Base), run(Patched)), Verdict::Consistent);
    assert_eq!(verdict(run(Base), violated(Patched)), Verdict::Violation);
    assert_eq!(verdict(violated(Base), violated(Patched)), Verdict::Violation);
    assert_eq!(verdict(reported(Base, Kind::BadPage, true), run(Patched)), Verdict::Consistent);
    assert_eq!(verdict(run(Base), reported(Patched, Kind::BadPage, true)), Verdict::GuestFailure);
}

#[test]
fn what_was_not_decided_has_no_verdict() {
    assert_eq!(verdict(run(Base), undecided(Patched)), Verdict::NoVerdict);
    assert_eq!(verdict(undecided(Base), run(Patched)), Verdict::NoVerdict);
    assert_eq!(report(vec![run(Base)]).verdict, Verdict::NoVerdict);
}

#[test]
fn a_finding_in_the_patched_kernel_stands_whatever_became_of_base() {
    assert_eq!(verdict(undecided(Base), violated(Patched)), Verdict::Violation);
}

#[test]
fn reports_from_before_the_agent_was_ready_do_not_count() {
    assert_eq!(verdict(run(Base), reported(Patched, Kind::Warning, false)), Verdict::Consistent);
    let mut tainted = reported(Patched, Kind::Warning, false);
    tainted.taint.push("W: a warning");
    assert_eq!(verdict(run(Base), tainted), Verdict::Consistent);
}

#[test]
fn a_taint_that_no_report_explains_is_a_finding() {
    let mut tainted = run(Patched);
    tainted.taint.push("B: a bad page or page table");
    assert_eq!(verdict(run(Base), tainted), Verdict::GuestFailure);
}

#[test]
fn a_script_that_runs_out_of_memory_is_no_finding() {
    assert_eq!(verdict(run(Base), reported(Patched, Kind::OutOfMemory, true)), Verdict::Consistent);
}

#[test]
fn exit_codes_are_what_git_bisect_run_expects() {
    let codes = [
        Verdict::Consistent,
        Verdict::Violation,
        Verdict::Divergence,
        Verdict::GuestFailure,
        Verdict::NoVerdict,
    ]
    .map(Verdict::exit_code);
    assert_eq!(codes, [0, 1, 1, 1, 125]);
}

fn snapshot(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(concat!(env!("CARGO_MANIFEST_DIR"), "/../snapshots"));
    settings.set_prepend_module_to_snapshot(false);
    settings.bind(|| insta::assert_snapshot!(name, text));
}

#[test]
fn the_table() {
    snapshot("report-table", &table(&report(vec![violated(Base), run(Patched)])));
}

#[test]
fn the_table_of_a_kernel_that_did_not_boot() {
    snapshot("report-table-no-boot", &table(&report(vec![run(Base), undecided(Patched)])));
}

#[test]
fn the_json() {
    let mut json = Vec::new();
    output::json(&report(vec![violated(Base), run(Patched)]).redacted(), &mut json).unwrap();
    snapshot("report-json", &String::from_utf8(json).unwrap());
}

fn write_to(report: &Report, path: &std::path::Path) {
    output::file(path, |file| output::json(report, file)).unwrap();
}

#[test]
fn a_file_is_written_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report.json");
    std::fs::write(&path, "old").unwrap();
    write_to(&Report::no_verdict("nothing was built".into()), &path);
    let value: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(value["verdict"], "no-verdict");
    assert_eq!(value["reason"], "nothing was built");
}

/// A script that asks for more memory than there is, and an agent that dies, end in a panic too; it is not the kernel's.
#[test]
fn a_panic_that_the_script_or_the_agent_brought_about_is_no_finding() {
    for panic in ["System is deadlocked on memory", "Attempted to kill init! exitcode=0x00000100"] {
        let log = format!("buddydiff agent: ready\n[    1.0] Kernel panic - not syncing: {panic}\n");
        let mut patched = undecided(Patched);
        patched.console = crate::check::console::scan(log.as_bytes(), true);
        assert_eq!(patched.console.len(), 1);
        assert_eq!(report(vec![run(Base), patched]).verdict, Verdict::NoVerdict, "{panic}");
    }
}

#[test]
fn a_report_replaces_a_file_but_not_a_pipe() {
    let folder = tempfile::tempdir().unwrap();
    let report = report(vec![run(Base), run(Patched)]);
    let mut json = Vec::new();
    output::json(&report, &mut json).unwrap();

    let file = folder.path().join("report.json");
    std::fs::write(&file, "an old one, longer than nothing").unwrap();
    write_to(&report, &file);
    assert_eq!(std::fs::read(&file).unwrap(), json);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside it");

    let pipe = folder.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::from_raw_mode(0o600)).unwrap();
    // Holding both ends lets the writer open it; the report fits into the pipe.
    let mut open = std::fs::OpenOptions::new();
    let nonblock = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
    let mut both = open.read(true).write(true).custom_flags(nonblock).open(&pipe).unwrap();
    write_to(&report, &pipe);
    let mut read = vec![0; json.len()];
    std::io::Read::read_exact(&mut both, &mut read).unwrap();
    assert_eq!(read, json);
}
