//! End to end on real kernels: fetched, built, booted. Run by `cargo xtask ci`.
//!
//! The default set takes four builds from nothing and three small ones on top; everything else is in `full-matrix`.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn xtask(arguments: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(arguments)
        // Progress goes to the log of whoever runs the tests: builds take minutes.
        .stderr(Stdio::inherit())
        .output()
        .expect("xtask starts");
    println!("xtask {} -> {}", arguments.join(" "), output.status);
    output
}

/// Runs `test-kernel --json -` and gives exit code and report.
fn test_kernel(arguments: &[&str]) -> (i32, Value) {
    let mut all = vec!["test-kernel", "--json", "-"];
    all.extend(arguments);
    let output = xtask(&all);
    let report =
        serde_json::from_slice(&output.stdout).expect("stdout is one JSON document and nothing else");
    (output.status.code().expect("xtask ends by itself"), report)
}

fn runs<'a>(report: &'a Value, role: &str) -> Vec<&'a Value> {
    let all = report["runs"].as_array().expect("runs");
    all.iter().filter(|run| run["role"] == role).collect()
}

/// Names of the broken invariants of one kernel.
fn broken(report: &Value, role: &str) -> Vec<String> {
    let violations =
        runs(report, role).into_iter().flat_map(|run| run["violations"].as_array().expect("violations"));
    let mut names: Vec<String> =
        violations.map(|violation| violation["invariant"].as_str().expect("a name").to_owned()).collect();
    names.sort();
    names.dedup();
    names
}

/// The largest delta over all zones at each checkpoint of one kernel's first run, in pages.
fn deltas(report: &Value, role: &str) -> Vec<i64> {
    let checkpoints = runs(report, role)[0]["checkpoints"].as_array().expect("checkpoints");
    let largest = |checkpoint: &Value| {
        let zones = checkpoint["zones"].as_array().expect("zones");
        zones.iter().map(|zone| zone["delta"].as_i64().expect("a number")).max().expect("a zone")
    };
    checkpoints.iter().map(largest).collect()
}

/// The seeds' table: base drifts by thousands and grows, patched stays.
fn assert_guard_table(code: i32, report: &Value) {
    assert_eq!((code, &report["schema"], &report["verdict"]), (0, &1.into(), &"consistent".into()));
    assert_eq!(broken(report, "base"), ["I2"]);
    assert!(broken(report, "patched").is_empty());
    let base = deltas(report, "base");
    assert!(base[0] < 1000 && base[1] > 10_000 && base[2] > base[1] + 10_000, "{base:?}");
    let patched = deltas(report, "patched");
    assert!(patched.iter().all(|delta| delta.abs() < 100), "{patched:?}");
}

#[test]
fn a01_the_default_pair_gives_the_table_of_the_seeds() {
    let (code, report) = test_kernel(&[]);
    assert_guard_table(code, &report);
}

#[test]
fn a02_the_control_finds_nothing_in_either_kernel() {
    let (code, report) = test_kernel(&["--script", "quiet"]);
    assert_eq!((code, &report["verdict"]), (0, &"consistent".into()));
    assert!(broken(&report, "base").is_empty() && broken(&report, "patched").is_empty());
    assert_eq!(deltas(&report, "base"), [0, 0, 0]);
    assert_eq!(deltas(&report, "patched"), [0, 0, 0]);
}

#[test]
fn a03_a_deterministic_run_repeats() {
    let redacted = || {
        let (code, mut report) = test_kernel(&["--deterministic"]);
        assert_guard_table(code, &report);
        for run in report["runs"].as_array_mut().expect("runs") {
            for field in ["wall_s", "boot_s", "command"] {
                run[field].take();
            }
        }
        report
    };
    // Everything else is equal, the guests' clocks to the nanosecond.
    assert_eq!(redacted(), redacted());
}

/// The console, kernel timestamps included, is equal to the byte too.
#[test]
fn a04_a_deterministic_console_repeats_to_the_byte() {
    let console = || {
        let folder = tempfile::tempdir().expect("a folder");
        let keep = folder.path().to_str().expect("a path in UTF-8");
        let (code, _) = test_kernel(&["--deterministic", "--script", "quiet", "--keep", keep]);
        assert_eq!(code, 0);
        std::fs::read(folder.path().join("quiet-patched-1/console.log")).expect("the console is kept")
    };
    let (first, second) = (console(), console());
    assert!(first.len() > 1000, "only {} bytes on the console", first.len());
    assert!(first == second, "two consoles differ");
}

/// One check in the suite must fail, to prove that failing works.
#[test]
fn a05_a_kernel_that_is_broken_in_another_way_is_found_out() {
    let fault = concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels/patches/faults/nr-free");
    let (code, report) = test_kernel(&["--kernel", "6.12", "--series", fault]);
    assert_eq!((code, &report["verdict"]), (1, &"violation".into()));
    assert!(broken(&report, "patched").contains(&"I1".to_owned()), "{:?}", broken(&report, "patched"));
    assert!(broken(&report, "base").is_empty());
}

#[test]
fn b01_five_patches_on_7_2() {
    let (code, report) = test_kernel(&["--kernel", "7.2", "--series", "movable-pageblocks"]);
    assert_guard_table(code, &report);
    assert_eq!(report["kernels"][1]["series"].as_array().map(Vec::len), Some(5));
}

/// The mail that the project started from is no part of the repository.
#[test]
fn b02_the_mails_themselves_are_a_series() {
    let mail = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/seeds/000_6e9cebeeb5b40b55.txt");
    if !Path::new(mail).exists() {
        println!("skipped: {mail} is not here");
        return;
    }
    let (code, report) = test_kernel(&["--kernel", "7.2", "--series", mail]);
    assert_guard_table(code, &report);
    assert_eq!(report["kernels"][1]["series"].as_array().map(Vec::len), Some(5));
}

/// 7.3 holds the first patch: base has it reversed, so the pair is the same as on 7.2.
#[test]
fn b03_a_series_that_is_held_in_part_on_7_3_without_smp() {
    let (code, report) =
        test_kernel(&["--kernel", "7.3", "--series", "movable-pageblocks", "--flavour", "up"]);
    assert_guard_table(code, &report);
    // No per-CPU lists, no differences held back: not a page of noise.
    assert_eq!(deltas(&report, "patched"), [0, 0, 0]);
}

#[test]
fn b04_the_oldest_kernel_is_quiet() {
    let (code, report) = test_kernel(&["--kernel", "6.1", "--script", "quiet"]);
    assert_eq!((code, &report["verdict"], &report["no_change"]), (0, &"consistent".into(), &true.into()));
}

#[cfg(feature = "full-matrix")]
mod full_matrix {
    use super::*;

    #[test]
    fn c01_every_kernel_is_quiet_in_both_flavours() {
        for kernel in ["6.1", "6.12", "7.2", "7.3"] {
            for flavour in ["smp", "up"] {
                let (code, report) =
                    test_kernel(&["--kernel", kernel, "--flavour", flavour, "--script", "quiet"]);
                assert_eq!((code, &report["verdict"]), (0, &"consistent".into()), "{kernel} {flavour}");
            }
        }
    }

    #[test]
    fn c02_four_cpus() {
        for kernel in ["6.1", "6.12", "7.2", "7.3"] {
            let (code, report) = test_kernel(&["--kernel", kernel, "--cpus", "4", "--script", "quiet"]);
            assert_eq!((code, &report["verdict"]), (0, &"consistent".into()), "{kernel}");
        }
    }

    #[test]
    fn c03_two_released_kernels() {
        let (code, report) = test_kernel(&[
            "--base",
            "deb:linux-source-6.12=6.12.115-2~deb12u1",
            "--patched",
            "deb:linux-source-6.12=6.12.117-1~deb12u1",
        ]);
        assert_guard_table(code, &report);
    }

    #[test]
    fn c04_both_series_on_7_2_and_7_3_in_both_flavours() {
        for kernel in ["7.2", "7.3"] {
            for series in ["guard-accounting", "movable-pageblocks"] {
                for flavour in ["smp", "up"] {
                    let (code, report) =
                        test_kernel(&["--kernel", kernel, "--series", series, "--flavour", flavour]);
                    println!("{kernel} {series} {flavour}");
                    assert_guard_table(code, &report);
                }
            }
        }
    }
}
