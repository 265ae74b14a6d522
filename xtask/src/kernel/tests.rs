//! The whole way from spec to image on a fake kernel tree: a Makefile of a few lines, built in milliseconds.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use tempfile::TempDir;

use super::*;

/// Its `vmlinux` is an ELF file that holds mm/a.c without comments. `built` counts what make did since the work tree
/// was last wiped.
const MAKEFILE: &str = r#"# SPDX-License-Identifier: GPL-2.0
VERSION = 9
PATCHLEVEL = 1
SUBLEVEL = 0

vmlinux: mm/a.c .config
	@if grep -n SYNTAX mm/a.c; then echo "mm/a.c:3:1: error: bad"; echo "    3 | SYNTAX"; exit 1; fi
	@if grep -q STALE mm/a.c && [ -e built ]; then echo "no rule to make this"; exit 1; fi
	@if grep -q FULL mm/a.c; then echo "ld: final link failed: No space left on device"; exit 1; fi
	@echo "  CC      mm/a.o"
	@sed 's,/\*.*\*/,,' mm/a.c > mm/a.o
	@echo ffff T start > System.map
	@objcopy --add-section .kernel=mm/a.o $(firstword $(wildcard /bin/true /usr/bin/true)) vmlinux
	@echo "$@" >> built

allnoconfig:
	@grep -v CONFIG_GONE $(KCONFIG_ALLCONFIG) > $(KCONFIG_CONFIG)

kernelrelease:
	@echo 9.1.0

.PHONY: allnoconfig kernelrelease
"#;

const SOURCE: &str = "int first(void)
{
\tint x = 0;

\tx += 1;
\tx += 2;
\tx += 3;

\treturn x;
}

int second(void)
{
\tint x = 0;

\tx += 10;
\tx += 20;
\tx += 30;

\treturn x;
}
";

struct World {
    folder: TempDir,
    progress: Progress,
}

impl World {
    /// A source folder, our own settings beside it, and an empty cache.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let world = Self { folder, progress: Progress::new(false) };
        world.write("src/Makefile", MAKEFILE);
        world.write("src/mm/a.c", SOURCE);
        world.write("src/.gitignore", "*.o\nvmlinux\n");
        world.write("kernels/catalog.toml", "[kernel.fake]\nspecs = [\"dir:/nowhere\"]\nwhy = \"a test\"\n");
        world.write("kernels/config/base.config", "CONFIG_A=y  # some reason\nCONFIG_B=n  # some reason\n");
        world.write("kernels/config/smp.config", "CONFIG_SMP=y  # some reason\n");
        world.write("kernels/config/up.config", "CONFIG_SMP=n  # some reason\n");
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn source(&self, text: &str) {
        self.write("src/mm/a.c", text);
    }

    fn kernels(&self) -> Kernels<'_> {
        Kernels::open_at(&self.progress, &self.path("cache"), &self.path("kernels"), false).unwrap()
    }

    fn spec(&self, kind: &str, name: &str) -> String {
        format!("{kind}:{}", self.path(name).display())
    }

    fn build(&self, spec: &str) -> Result<Built, KernelError> {
        self.kernels().one(spec, None, Flavour::Smp, false)
    }

    fn build_dir(&self) -> Result<Built, KernelError> {
        self.build(&self.spec("dir", "src"))
    }

    fn pair(&self, patch: &str) -> Result<Pair, KernelError> {
        self.write("kernels/patches/ours/0001.patch", patch);
        self.kernels().pair(&PairRequest {
            kernel: Some(self.spec("dir", "src")),
            series: Some("ours".to_owned()),
            ..PairRequest::default()
        })
    }

    fn run(&self, words: &[&str]) {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).current_dir(self.path("src"));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    }

    fn commit(&self) {
        self.run(&["git", "init", "-q"]);
        self.run(&["git", "add", "-A"]);
        self.run(&["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", "commit", "-q", "-m", "x"]);
    }

    /// How often make built something in the work tree since it was wiped.
    fn made(&self) -> usize {
        fs::read_to_string(self.path("cache/work/9.1-smp/src/built")).unwrap_or_default().lines().count()
    }
}

fn holds(built: &Built, text: &str) -> bool {
    let image = fs::read(&built.vmlinux).unwrap();
    image.windows(text.len()).any(|window| window == text.as_bytes())
}

/// A patch that replaces one line of mm/a.c.
fn patch(line: u32, heading: &str, before: [&str; 3], old: &str, new: &str, after: [&str; 3]) -> String {
    let context = |lines: [&str; 3]| lines.map(|line| format!(" {line}\n")).concat();
    format!(
        "Subject: [PATCH] change it\n\n---\n\n--- a/mm/a.c\n+++ b/mm/a.c\n@@ -{line},7 +{line},7 @@ {heading}\n{}-{old}\n+{new}\n{}",
        context(before),
        context(after)
    )
}

fn in_second(new: &str) -> String {
    patch(
        14,
        "int second(void)",
        ["\tint x = 0;", "", "\tx += 10;"],
        "\tx += 20;",
        new,
        ["\tx += 30;", "", "\treturn x;"],
    )
}

#[test]
fn a_built_kernel_is_found_again_and_an_edit_makes_another() {
    let world = World::new();
    let first = world.build_dir().unwrap();
    assert!(first.fresh && first.release == "9.1.0" && holds(&first, "x += 20"));
    assert_eq!(fs::read_to_string(first.system_map.as_ref().unwrap()).unwrap(), "ffff T start\n");
    let again = world.build_dir().unwrap();
    assert_eq!(again, Built { fresh: false, ..first.clone() });
    world.write("src/mm/a.o", "what .gitignore names is no source");
    assert!(!world.build_dir().unwrap().fresh);
    world.source(&SOURCE.replace("20", "21"));
    let edited = world.build_dir().unwrap();
    assert!(edited.fresh && edited.build_id != first.build_id && holds(&edited, "x += 21"));
    assert_eq!(world.made(), 2, "the work tree is kept between builds");
    world.source(SOURCE);
    assert_eq!(world.build_dir().unwrap(), Built { fresh: false, ..first });
}

#[test]
fn flavours_are_builds_of_their_own() {
    let world = World::new();
    let spec = world.spec("dir", "src");
    let smp = world.kernels().one(&spec, None, Flavour::Smp, false).unwrap();
    let up = world.kernels().one(&spec, None, Flavour::Up, false).unwrap();
    assert!(up.fresh && up.build_id != smp.build_id);
    let config = fs::read_to_string(up.vmlinux.with_file_name("config")).unwrap();
    assert!(config.contains("# CONFIG_SMP is not set"));
}

#[test]
fn the_driver_is_in_both_kernels_of_a_pair_that_asks_for_it_and_in_no_other() {
    let world = World::new();
    let request = PairRequest { kernel: Some(world.spec("dir", "src")), ..PairRequest::default() };
    let with = PairRequest { driver: true, ..request.clone() };
    let error = world.kernels().pair(&with).unwrap_err();
    assert!(error.to_string().contains("no mm/Makefile"), "{error}");

    world.write("src/mm/Makefile", "obj-y := a.o");
    let plain = world.kernels().pair(&request).unwrap().base;
    let driven = world.kernels().pair(&with).unwrap().base;
    assert!(driven.fresh && driven.build_id != plain.build_id);
    assert!(!world.kernels().pair(&with).unwrap().base.fresh, "it is found again");
    let laid_out = |name: &str| fs::read_to_string(world.path("cache/work/9.1-smp/src/mm").join(name));
    assert_eq!(laid_out("Makefile").unwrap(), "obj-y := a.o\nobj-y += buddydiff.o\n");
    assert!(laid_out("buddydiff.c").unwrap().contains("buddydiff-abi.h"));

    world.write("kernels/patches/ours/0001.patch", &in_second("\tx += 21;"));
    let pair = world.kernels().pair(&PairRequest { series: Some("ours".to_owned()), ..with }).unwrap();
    assert_eq!(pair.base.build_id, driven.build_id);
    assert!(pair.patched.fresh && holds(&pair.patched, "x += 21"));
    assert!(laid_out("buddydiff-compat.h").is_ok());
    assert_eq!(world.made(), 2, "all in one work tree, in which only mm/a.c is compiled");

    world.source(&SOURCE.replace("30", "31"));
    world.build_dir().unwrap();
    laid_out("buddydiff.c").unwrap_err();
}

#[test]
fn tarballs_of_every_kind_are_the_same_source() {
    let world = World::new();
    let plain = world.build_dir().unwrap();
    for (name, how) in [("a.tar", "--no-auto-compress"), ("a.tar.xz", "--xz"), ("a.tar.gz", "--gzip")] {
        let file = world.path(name).display().to_string();
        let mut words = vec!["tar", "-C", "..", "--exclude=*.o", "-cf", &file];
        if how != "--no-auto-compress" {
            words.push(how);
        }
        words.push("src");
        world.run(&words);
        let built = world.build(&format!("tar:{file}")).unwrap();
        assert_eq!(built.build_id, plain.build_id, "{name}");
        assert!(!built.fresh);
    }
}

#[test]
fn a_tarball_that_is_cut_short_leaves_nothing_behind() {
    let world = World::new();
    world.source(&"int many;\n".repeat(50_000));
    let file = world.path("a.tar").display().to_string();
    world.run(&["tar", "-C", "..", "-cf", &file, "src"]);
    let whole = fs::read(&file).unwrap();
    fs::write(&file, &whole[..whole.len() / 2]).unwrap();
    let error = world.build(&format!("tar:{file}")).unwrap_err();
    assert!(matches!(error, KernelError::Source { .. }), "{error}");
    fs::write(&file, &whole).unwrap();
    assert!(world.build(&format!("tar:{file}")).unwrap().fresh);
}

#[test]
fn links_and_modes_survive_the_import() {
    let world = World::new();
    world.write("src/tool.sh", "#!/bin/sh\n");
    world.run(&["chmod", "755", "tool.sh"]);
    world.run(&["ln", "-s", "mm/a.c", "soft link"]);
    world.run(&["ln", "mm/a.c", "hard link"]);
    let file = world.path("a.tar").display().to_string();
    world.run(&["tar", "-cf", &file, "."]);
    let from_tar = world.kernels().source(&format!("tar:{file}"), Look::Cached).unwrap();
    let from_dir = world.kernels().source(&world.spec("dir", "src"), Look::Cached).unwrap();
    assert_eq!(from_tar.tree, from_dir.tree);
}

#[test]
fn a_commit_is_taken_without_the_edits_on_top_and_the_checkout_is_left_alone() {
    let world = World::new();
    world.write("src/mm/tracked.o", "ignored by name, but part of the source\n");
    world.commit();
    world.run(&["git", "add", "-f", "mm/tracked.o"]);
    world.run(&["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", "commit", "-q", "-m", "y"]);
    let index = fs::read(world.path("src/.git/index")).unwrap();
    let from_dir = world.kernels().source(&world.spec("dir", "src"), Look::Cached).unwrap();
    world.source(&SOURCE.replace("20", "22"));
    let spec = format!("{}@HEAD", world.spec("git", "src"));
    let from_git = world.kernels().source(&spec, Look::Cached).unwrap();
    assert_eq!(from_git.tree, from_dir.tree);
    assert!(!from_git.spec.ends_with("HEAD"), "{} can be repeated", from_git.spec);
    let edited = world.kernels().source(&world.spec("dir", "src"), Look::Cached).unwrap();
    assert_ne!(edited.tree, from_dir.tree);
    assert_eq!(fs::read(world.path("src/.git/index")).unwrap(), index);
    // The second commit comes as what it adds to the first.
    world.run(&["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", "commit", "-qam", "z"]);
    assert_eq!(world.kernels().source(&spec, Look::Cached).unwrap().tree, edited.tree);
    let error = world.build(&format!("{}@nothing", world.spec("git", "src"))).unwrap_err();
    assert!(error.to_string().contains("no revision nothing"), "{error}");
}

#[test]
fn what_is_no_kernel_tree_is_refused() {
    let world = World::new();
    world.write("other/Makefile", "all:\n");
    for spec in [world.spec("dir", "other"), world.spec("dir", "nowhere"), world.spec("tar", "src/Makefile")]
    {
        let error = world.build(&spec).unwrap_err();
        assert!(matches!(error, KernelError::Source { .. }), "{spec}: {error}");
    }
}

#[test]
fn a_series_makes_a_pair() {
    let world = World::new();
    let pair = world.pair(&in_second("\tx += 99;")).unwrap();
    assert!(holds(&pair.base, "x += 20") && holds(&pair.patched, "x += 99"));
    assert_eq!((pair.patched.series.len(), pair.base.series.len()), (1, 0));
    assert!(!pair.no_change && pair.present.is_empty());
    let again = world.pair(&in_second("\tx += 99;")).unwrap();
    assert!(!again.base.fresh && !again.patched.fresh);
}

#[test]
fn a_series_that_the_tree_holds_gives_the_same_pair() {
    let world = World::new();
    let forward = world.pair(&in_second("\tx += 99;")).unwrap();
    world.source(&SOURCE.replace("x += 20", "x += 99"));
    let reverse = world.pair(&in_second("\tx += 99;")).unwrap();
    assert_eq!(reverse.present, ["change it"]);
    assert_eq!(reverse.base.build_id, forward.base.build_id);
    assert_eq!(reverse.patched.build_id, forward.patched.build_id);
}

#[test]
fn of_a_series_held_in_part_the_rest_is_added() {
    let world = World::new();
    let first = in_second("\tx += 99;").replace("[PATCH]", "[PATCH 1/2]");
    // The second changes the same line again: only the last-first order can take both off.
    let second =
        in_second("\tx += 100;").replace("-\tx += 20;", "-\tx += 99;").replace("[PATCH]", "[PATCH 2/2]");
    let mbox =
        format!("From a Mon Sep 17 00:00:00 2001\n{second}\n\nFrom b Mon Sep 17 00:00:00 2001\n{first}\n\n");
    world.write("series.mbox", &mbox);
    let request = PairRequest {
        kernel: Some(world.spec("dir", "src")),
        series: Some(world.path("series.mbox").display().to_string()),
        ..PairRequest::default()
    };
    for (held, present) in [("x += 20", 0), ("x += 99", 1), ("x += 100", 2)] {
        world.source(&SOURCE.replace("x += 20", held));
        let pair = world.kernels().pair(&request).unwrap();
        assert_eq!(pair.present.len(), present);
        assert!(holds(&pair.base, "x += 20;") && holds(&pair.patched, "x += 100;"), "{held}");
    }
}

#[test]
fn a_hunk_that_matches_in_another_function_is_refused_and_both_are_named() {
    let world = World::new();
    let meant_for_second = patch(
        14,
        "int second(void)",
        ["\tint x = 0;", "", "\tx += 1;"],
        "\tx += 2;",
        "\tx += 9;",
        ["\tx += 3;", "", "\treturn x;"],
    );
    let error = world.pair(&meant_for_second).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, KernelError::Patch { number: 1, .. }), "{text}");
    assert!(text.contains("second()") && text.contains("first()") && text.contains("mm/a.c"), "{text}");
    assert_eq!(error.kind(), Kind::NoVerdict);
}

#[test]
fn a_patch_that_does_not_apply_names_file_hunk_and_function() {
    let world = World::new();
    world.source(&SOURCE.replace("x += 30", "x += 31"));
    let text = world.pair(&in_second("\tx += 99;")).unwrap_err().to_string();
    assert!(text.contains("mm/a.c") && text.contains("hunk 1 of 1") && text.contains("second()"), "{text}");
    let elsewhere = in_second("\tx += 99;").replace("mm/a.c", "mm/b.c");
    let text = world.pair(&elsewhere).unwrap_err().to_string();
    assert!(text.contains("mm/b.c"), "{text}");
}

#[test]
fn an_offset_is_fine_but_fuzz_is_not() {
    let world = World::new();
    world.source(&format!("int zeroth;\n\n{SOURCE}"));
    assert!(holds(&world.pair(&in_second("\tx += 99;")).unwrap().patched, "x += 99"));
    let fuzzy = in_second("\tx += 98;").replace("\n \treturn x;", "\n \treturn y;");
    assert!(matches!(world.pair(&fuzzy), Err(KernelError::Patch { .. })));
}

#[test]
fn equal_images_are_no_change() {
    let world = World::new();
    let pair = world.pair(&in_second("\tx += 20;/* a comment */")).unwrap();
    assert!(pair.no_change && pair.base.build_id != pair.patched.build_id);
}

#[test]
fn one_kernel_is_paired_with_itself_and_two_with_each_other() {
    let world = World::new();
    let spec = Some(world.spec("dir", "src"));
    let request = PairRequest { kernel: spec.clone(), ..PairRequest::default() };
    let pair = world.kernels().pair(&request).unwrap();
    assert!(pair.no_change && pair.base.build_id == pair.patched.build_id);
    world.commit();
    world.source(&SOURCE.replace("20", "23"));
    let other = Some(format!("{}@HEAD", world.spec("git", "src")));
    let request = PairRequest { base: other, patched: spec, ..PairRequest::default() };
    let pair = world.kernels().pair(&request).unwrap();
    assert!(holds(&pair.base, "x += 20") && holds(&pair.patched, "x += 23"));
    for request in [PairRequest { kernel: None, ..request.clone() }, PairRequest::default()] {
        let request = PairRequest { patched: None, ..request };
        assert_eq!(world.kernels().pair(&request).unwrap_err().kind(), Kind::Usage);
    }
}

#[test]
fn an_option_that_does_not_survive_is_named() {
    let world = World::new();
    world.write(
        "kernels/config/base.config",
        "CONFIG_A=y  # some reason\nCONFIG_GONE=y  # some reason\nCONFIG_GONE_TOO=m  # some reason\n\
         CONFIG_GONE_LATER=y  # [9.2..] some reason\n",
    );
    let error = world.build_dir().unwrap_err();
    let KernelError::ConfigDropped { dropped, .. } = &error else { panic!("{error}") };
    assert_eq!(dropped, &["CONFIG_GONE (asked y, got n)", "CONFIG_GONE_TOO (asked m, got n)"]);
}

#[test]
fn options_that_come_with_a_series_are_in_both_kernels_and_in_no_other() {
    let world = World::new();
    let plain = world.pair(&in_second("\tx += 99;")).unwrap();
    // A series that says nothing of options gives the kernels that it gave before it could.
    assert_eq!(plain.base.build_id, world.build_dir().unwrap().build_id);
    let made = world.made();
    world.write(
        "kernels/patches/ours/config",
        "CONFIG_B=y  # some reason\nCONFIG_C=7  # [9.2..] some reason\n",
    );
    let pair = world.pair(&in_second("\tx += 99;")).unwrap();
    assert!(pair.base.fresh && pair.patched.fresh);
    assert_ne!(pair.base.build_id, plain.base.build_id);
    assert_ne!(pair.patched.build_id, plain.patched.build_id);
    // A work tree of their own leaves the other as it was.
    assert_eq!(world.made(), made);
    let of_series: Vec<PathBuf> =
        fs::read_dir(world.path("cache/work")).unwrap().map(|entry| entry.unwrap().path()).collect();
    let own = of_series.iter().find(|path| !path.ends_with("9.1-smp")).unwrap();
    assert_eq!(
        fs::read_to_string(own.join("src/.config")).unwrap(),
        "CONFIG_A=y\nCONFIG_B=y\nCONFIG_SMP=y\n"
    );

    // On this kernel the series asks for nothing, so it has the kernels that are there.
    world.write("kernels/patches/ours/config", "CONFIG_C=7  # [9.2..] some reason\n");
    let other = world.pair(&in_second("\tx += 99;")).unwrap();
    assert_eq!((other.base.build_id, other.base.fresh), (plain.base.build_id, false));

    for wrong in ["CONFIG_B=y\n", "B=y  # some reason\n"] {
        world.write("kernels/patches/ours/config", wrong);
        let error = world.pair(&in_second("\tx += 99;")).unwrap_err();
        assert_eq!(error.kind(), Kind::Usage);
        assert!(error.to_string().contains("ours/config: line 1: "), "{error}");
    }
}

#[test]
fn a_compile_error_is_shown_and_the_next_build_goes_on() {
    let world = World::new();
    world.build_dir().unwrap();
    world.source(&SOURCE.replace("20;", "24; SYNTAX"));
    let error = world.build_dir().unwrap_err();
    let KernelError::Compile { first_error, log, repeat, .. } = &error else { panic!("{error}") };
    assert!(first_error.contains("mm/a.c:3:1: error: bad"), "{first_error}");
    assert!(log.exists() && repeat.contains("make") && repeat.contains("vmlinux"), "{repeat}");
    assert_eq!(error.kind(), Kind::NoVerdict);
    world.source(&SOURCE.replace("20", "25"));
    assert!(holds(&world.build_dir().unwrap(), "x += 25"));
    assert_eq!(world.made(), 2, "the work tree was kept");
}

#[test]
fn what_an_earlier_build_left_is_wiped_before_a_failure_counts() {
    let world = World::new();
    world.build_dir().unwrap();
    world.source(&SOURCE.replace("20;", "26; STALE"));
    assert!(world.build_dir().unwrap().fresh);
    assert_eq!(world.made(), 1, "it was built in a clean work tree");
}

#[test]
fn a_full_disk_is_named_and_the_next_build_goes_on() {
    let world = World::new();
    world.source(&SOURCE.replace("20;", "20; FULL"));
    let error = world.build_dir().unwrap_err();
    assert!(matches!(error, KernelError::DiskFull { .. }), "{error}");
    world.source(SOURCE);
    assert!(world.build_dir().unwrap().fresh);
}

#[test]
fn a_work_tree_of_a_run_that_was_killed_is_not_trusted() {
    let world = World::new();
    world.build_dir().unwrap();
    let work = world.path("cache/work/9.1-smp");
    fs::remove_file(work.join("state.json")).unwrap();
    fs::write(work.join("index.lock"), "").unwrap();
    // Newer than its source, and wrong: make alone would take it.
    world.source(&SOURCE.replace("20", "27"));
    fs::write(work.join("src/vmlinux"), "half a kernel").unwrap();
    assert!(holds(&world.build_dir().unwrap(), "x += 27"));
    assert_eq!(world.made(), 1);
}

#[test]
fn a_published_kernel_that_was_damaged_is_built_again() {
    let world = World::new();
    let built = world.build_dir().unwrap();
    fs::write(&built.vmlinux, "half").unwrap();
    let again = world.build_dir().unwrap();
    assert!(again.fresh && holds(&again, "x += 20"));
}

#[test]
fn two_runs_on_one_cache_build_once() {
    let world = World::new();
    let spec = world.spec("dir", "src");
    let fresh = std::thread::scope(|scope| {
        let runs: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let progress = Progress::new(false);
                    let kernels =
                        Kernels::open_at(&progress, &world.path("cache"), &world.path("kernels"), false);
                    kernels.unwrap().one(&spec, None, Flavour::Smp, false).unwrap()
                })
            })
            .collect();
        let built: Vec<Built> = runs.into_iter().map(|run| run.join().unwrap()).collect();
        assert!(built.iter().all(|other| other.build_id == built[0].build_id));
        built.iter().filter(|built| built.fresh).count()
    });
    assert_eq!((fresh, world.made()), (1, 1));
}

#[test]
fn a_prebuilt_kernel_is_taken_as_it_is() {
    let world = World::new();
    world.source(&format!("Linux version %s\nLinux version 9.1.0-mine (a@b)\n{SOURCE}"));
    let built = world.build_dir().unwrap();
    fs::copy(&built.vmlinux, world.path("vmlinux")).unwrap();
    let spec = world.spec("vmlinux", "vmlinux");
    let prebuilt = world.build(&spec).unwrap();
    assert_eq!((&*prebuilt.release, prebuilt.vmlinux), ("9.1.0-mine", world.path("vmlinux")));
    let request =
        PairRequest { kernel: Some(spec), series: Some("ours".to_owned()), ..PairRequest::default() };
    world.write("kernels/patches/ours/0001.patch", &in_second("\tx += 99;"));
    assert_eq!(world.kernels().pair(&request).unwrap_err().kind(), Kind::Usage);
    assert!(matches!(world.build(&world.spec("vmlinux", "src/Makefile")), Err(KernelError::Source { .. })));
}

#[test]
fn names_are_looked_up_in_the_catalogue() {
    let world = World::new();
    let error = world.build("9.9").unwrap_err();
    assert!(error.to_string().contains("fake") && error.kind() == Kind::Usage, "{error}");
    world.write(
        "kernels/catalog.toml",
        &format!("[kernel.fake]\nspecs = [\"{}\"]\nwhy = \"a test\"\n", world.spec("dir", "src")),
    );
    assert!(world.build("fake").unwrap().fresh);
    let listed = world.kernels().list().unwrap();
    assert_eq!((listed.sources.len(), listed.builds.len(), listed.work.len()), (1, 1, 1));
}

#[test]
fn pruning_makes_room_and_what_is_gone_comes_back() {
    let world = World::new();
    let cache = Cache::open(&world.path("cache")).unwrap();
    let prune = |rules: Rules| super::prune::prune(&world.progress, &cache, &rules);
    world.pair(&in_second("\tx += 99;")).unwrap();
    let untouched = prune(Rules { older_than: Some(Duration::from_secs(3600)), max_bytes: Some(1 << 40) });
    assert_eq!(untouched.unwrap().removed, [""; 0]);
    let all = prune(Rules { older_than: None, max_bytes: Some(0) }).unwrap();
    assert!(all.removed.iter().filter(|name| name.starts_with("build ")).count() == 2, "{:?}", all.removed);
    let listed = world.kernels().list().unwrap();
    assert_eq!((listed.sources.len(), listed.builds.len(), listed.work.len()), (0, 0, 0));
    let pair = world.pair(&in_second("\tx += 99;")).unwrap();
    assert!(pair.base.fresh && holds(&pair.patched, "x += 99"));
    let old = prune(Rules { older_than: Some(Duration::ZERO), max_bytes: None }).unwrap();
    assert!(!old.removed.is_empty());
    assert!(world.pair(&in_second("\tx += 99;")).unwrap().patched.fresh);
}

#[test]
fn nothing_is_pruned_under_a_run() {
    let world = World::new();
    let kernels = world.kernels();
    let cache = Cache::open(&world.path("cache")).unwrap();
    assert!(matches!(cache.use_alone(&world.progress, Duration::ZERO), Err(KernelError::Locked { .. })));
    drop(kernels);
    // A process that another test is just starting may hold a copy of the lock until it executes its program.
    cache.use_alone(&world.progress, Duration::from_secs(60)).unwrap();
}

#[test]
fn a_tree_that_ignores_itself_is_taken_without_what_a_build_left() {
    let world = World::new();
    let spec = world.spec("dir", "src");
    let plain = world.kernels().source(&spec, Look::Cached).unwrap();
    // As Debian's linux-source has it.
    fs::write(world.path("src/.gitignore"), "/*\n!/debian/\n").unwrap();
    let ignoring = world.kernels().source(&spec, Look::Cached).unwrap();
    assert_ne!(ignoring.tree, plain.tree, "the .gitignore itself is a part of it");
    fs::write(world.path("src/left.o"), "an object").unwrap();
    assert_eq!(world.kernels().source(&spec, Look::Cached).unwrap().tree, ignoring.tree);
    fs::write(world.path("src/added.c"), "int added;\n").unwrap();
    assert_ne!(world.kernels().source(&spec, Look::Cached).unwrap().tree, ignoring.tree);
}

#[test]
fn the_users_git_settings_do_not_matter() {
    let world = World::new();
    let spec = world.spec("dir", "src");
    let plain = world.kernels().source(&spec, Look::Cached).unwrap();
    // As a repository with line ending rules of its own would have it.
    world.commit();
    world.run(&["git", "config", "core.autocrlf", "true"]);
    assert_eq!(world.kernels().source(&spec, Look::Cached).unwrap().tree, plain.tree);
    assert!(Path::new(&world.path("src/.git")).exists());
}

const CHILD: &str = "BUDDYDIFF_TEST_WORLD";

/// Not a test by itself: what the test below runs as a process of its own, to be interrupted.
#[test]
fn child_that_builds() {
    let Some(folder) = std::env::var_os(CHILD).map(PathBuf::from) else { return };
    host::process::catch_interrupts().unwrap();
    let progress = Progress::new(false);
    let kernels = Kernels::open_at(&progress, &folder.join("cache"), &folder.join("kernels"), false).unwrap();
    let outcome = kernels.one(&format!("dir:{}", folder.join("src").display()), None, Flavour::Smp, false);
    fs::write(folder.join("outcome"), format!("{:?}", outcome.map_err(|error| error.kind()).err())).unwrap();
}

#[test]
fn an_interrupt_ends_the_build_and_its_children_and_the_next_run_goes_on() {
    let world = World::new();
    let pipe = world.path("pipe").display().to_string();
    let held = world.path("held").display().to_string();
    world.run(&["mkfifo", &pipe]);
    world.write("held", "");
    // A first target is built before the compiler that hangs; it holds the pipe open as long as it lives.
    let hang = format!(
        "step: mm/a.c\n\t@echo step >> built; touch step\n\nvmlinux: step mm/a.c .config\n\t@if [ -e {held} ]; then exec 9> {pipe}; echo hanging >&9; sleep 600; fi\n"
    );
    world.write("src/Makefile", &MAKEFILE.replace("vmlinux: mm/a.c .config\n", &hang));
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kernel::tests::child_that_builds"])
        .env(CHILD, world.folder.path())
        .spawn()
        .unwrap();
    // Blocks until the compiler hangs, then until it and all that it started are gone.
    let mut said = String::new();
    let mut reader = fs::File::open(world.path("pipe")).unwrap();
    let mut line = [0; 8];
    std::io::Read::read_exact(&mut reader, &mut line).unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    std::io::Read::read_to_string(&mut reader, &mut said).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(fs::read_to_string(world.path("outcome")).unwrap(), "Some(Interrupted)");
    assert_eq!(world.kernels().list().unwrap().builds.len(), 0);
    fs::remove_file(world.path("held")).unwrap();
    assert!(world.build_dir().unwrap().fresh);
    let built = fs::read_to_string(world.path("cache/work/9.1-smp/src/built")).unwrap();
    assert_eq!(built, "step\nvmlinux\n", "what was built before the interrupt is not built again");
}
