//! Formats of other tools, read by those tools: `kunit.py` of a kernel tree that was built from, and b4.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::{image, xtask};

/// The reader of KTAP in a kernel tree that the tests before this one built from.
fn kunit() -> Option<PathBuf> {
    let home = |below: &str| std::env::var_os("HOME").map(|home| PathBuf::from(home).join(below));
    let cache = std::env::var_os("BUDDYDIFF_CACHE").map(PathBuf::from);
    let cache = cache
        .or_else(|| std::env::var_os("XDG_CACHE_HOME").map(|cache| PathBuf::from(cache).join("buddydiff")));
    let work = cache.or_else(|| home(".cache/buddydiff"))?.join("work");
    let trees = std::fs::read_dir(work).ok()?.filter_map(Result::ok);
    let mut readers = trees.map(|tree| tree.path().join("src/tools/testing/kunit/kunit.py"));
    readers.find(|reader| reader.is_file())
}

/// What the kernel's reader counts in a file.
fn count(kunit: &Path, file: &Path) -> String {
    let output = Command::new("python3")
        .args(["-B".as_ref(), kunit.as_os_str(), "parse".as_ref(), file.as_os_str()])
        .stderr(Stdio::inherit())
        .output()
        .expect("building a kernel takes python3");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    println!("{said}");
    let counts = said.rsplit("Testing complete. ").next().unwrap_or_default();
    counts.lines().next().unwrap_or_default().to_owned()
}

#[test]
fn k01_the_kernels_own_reader_reads_our_ktap() {
    let Some(kunit) = kunit() else {
        println!("skipped: the cache holds no work tree, so there is no kunit.py");
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("result.ktap");
    let ktap = file.to_str().expect("a path in UTF-8");
    let broken = ["--kernel", "6.12", "--series", "faults/nr-free", "--script", "quiet"];
    assert_eq!(xtask(&[&["test-kernel", "--ktap", ktap], &broken[..]].concat()).status.code(), Some(1));
    assert_eq!(count(&kunit, &file), "Ran 2 tests: passed: 1, failed: 1");

    // It halts with interrupts off.
    let hangs = image(folder.path(), &[0xfa, 0xf4, 0xeb, 0xfd]);
    let hangs = ["--kernel", &hangs, "--script", "quiet", "--boot-limit", "1"];
    assert_eq!(xtask(&[&["test-kernel", "--ktap", ktap], &hangs[..]].concat()).status.code(), Some(125));
    assert_eq!(count(&kunit, &file), "Ran 2 tests: skipped: 2");
}

/// A Python with b4 in it, which is fetched once.
fn b4() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("b4");
    let python = folder.join("bin/python");
    let run = |command: &mut Command| command.status().is_ok_and(|status| status.success());
    let ready = || run(Command::new(&python).args(["-c", "import b4.review.checks"]));
    let made = ready()
        || run(Command::new("python3").args(["-m", "venv"]).arg(&folder))
            && run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "b4==0.16.0"]))
            && ready();
    made.then_some(python)
}

/// b4 runs us as it runs any check command, with a mail on our standard input.
#[test]
fn k02_b4_runs_a_test_and_takes_its_result() {
    let Some(python) = b4() else {
        println!("skipped: b4 cannot be had here");
        return;
    };
    const CHECK: &str = "import email, json, sys, b4.review.checks as checks\n\
        message = email.message_from_binary_file(open(sys.argv[1], 'rb'), policy=email.policy.EmailPolicy())\n\
        print(json.dumps(checks.run_perpatch_checks([('id', message)], [sys.argv[2]], '.')['id']))";
    let mail = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../kernels/patches/guard-accounting/0001-guard-accounting.patch"
    );
    let command =
        format!("{} test-kernel --kernel 6.12 --script quiet --series - --b4 -", env!("CARGO_BIN_EXE_xtask"));
    let output = Command::new(python)
        .args(["-c", CHECK, mail, &command])
        .stderr(Stdio::inherit())
        .output()
        .expect("python starts");
    let checks: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(checks.as_array().map(Vec::len), Some(1), "{checks:#}");
    let check = &checks[0];
    assert_eq!((&check["tool"], &check["status"]), (&"buddydiff quiet".into(), &"pass".into()), "{checks:#}");
    let details = check["details"].as_str().expect("a string");
    assert!(details.contains("give merged guard pages back to NR_FREE_PAGES"), "{details}");
}
