//! The external tools that each kind of work needs, and the Debian packages that hold them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use host::process::{Group, WaitError, shell_line};

use crate::progress::Progress;

/// A kind of work, as far as tools go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Keeping sources: unpacking, patching.
    Source,
    /// `deb:` specs.
    Packages,
    /// Building kernels.
    Build,
    /// Running guests.
    Run,
    /// Fuzzing our own parsers.
    Fuzz,
}

struct Tool {
    /// A command, or a header where it has a slash.
    name: &'static str,
    package: &'static str,
    work: Work,
    needed: bool,
}

const fn tool(name: &'static str, package: &'static str, work: Work) -> Tool {
    Tool { name, package, work, needed: true }
}

const TOOLS: &[Tool] = &[
    tool("git", "git", Work::Source),
    tool("tar", "tar", Work::Source),
    tool("xz", "xz-utils", Work::Source),
    tool("apt-get", "apt", Work::Packages),
    tool("dpkg-deb", "dpkg", Work::Packages),
    tool("make", "make", Work::Build),
    tool("gcc", "gcc", Work::Build),
    tool("ld", "binutils", Work::Build),
    tool("flex", "flex", Work::Build),
    tool("bison", "bison", Work::Build),
    tool("bc", "bc", Work::Build),
    tool("perl", "perl", Work::Build),
    tool("pahole", "pahole", Work::Build),
    // The kernel's own libbpf generates a header with it.
    tool("python3", "python3", Work::Build),
    // resolve_btfids and objtool are built along with the kernel, and read ELF files.
    tool("usr/include/gelf.h", "libelf-dev", Work::Build),
    tool("usr/include/zlib.h", "zlib1g-dev", Work::Build),
    tool("usr/include/stdlib.h", "libc6-dev", Work::Build),
    // Second builds after a wiped work tree take a fraction of the time with it; nothing else depends on it.
    Tool { name: "ccache", package: "ccache", work: Work::Build, needed: false },
    tool("qemu-system-x86_64", "qemu-system-x86", Work::Run),
    // libFuzzer is C++.
    tool("g++", "g++", Work::Fuzz),
];

/// Tools that are not there.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MissingTools {
    /// Not installed.
    #[error("{}", missing_text(tools, install.as_deref()))]
    Missing {
        /// Their names.
        tools: Vec<String>,
        /// The line that installs them, on a system with apt.
        install: Option<String>,
    },
    /// Installing them failed.
    #[error("failed to install {}: {why}\n  repeat it with: {repeat}", tools.join(", "))]
    NotInstalled {
        /// Their names.
        tools: Vec<String>,
        /// What happened.
        why: String,
        /// The shell line that does it again.
        repeat: String,
    },
}

fn missing_text(tools: &[String], install: Option<&str>) -> String {
    let names = tools.join(", ");
    match install {
        Some(line) => format!(
            "failed to find {names}\n  Install what is missing with: {line}\n  or add --install-deps to this command."
        ),
        None => format!(
            "failed to find {names}\n  Install them; this system has no apt, so the packages are yours to name."
        ),
    }
}

/// Fails with all the needed tools that are missing for any of `works`.
///
/// # Errors
/// Where a tool that is needed is missing.
pub(crate) fn require(works: &[Work]) -> Result<(), MissingTools> {
    let missing = missing(works, Path::new("/"), &search_path(), true);
    if missing.is_empty() {
        return Ok(());
    }
    let install = has_apt().then(|| install_line(&missing));
    Err(MissingTools::Missing { tools: missing.iter().map(|tool| tool.name.to_owned()).collect(), install })
}

/// Installs what is missing for `works`, optional tools included, if anything is.
///
/// # Errors
/// Where apt is not there or fails.
pub(crate) fn install(progress: &Progress, works: &[Work]) -> Result<(), MissingTools> {
    let missing = missing(works, Path::new("/"), &search_path(), false);
    if missing.is_empty() {
        return Ok(());
    }
    if !has_apt() {
        return require(works);
    }
    let tools: Vec<String> = missing.iter().map(|tool| tool.name.to_owned()).collect();
    let repeat = install_line(&missing);
    let task = progress.task("tools");
    task.say(&format!("installing {}", tools.join(", ")));
    let mut update = apt(["update"].iter());
    run_apt(progress, &mut update, "update")
        .and_then(|()| {
            let packages = packages(&missing);
            let fixed = ["install", "--yes", "--no-install-recommends"];
            run_apt(progress, &mut apt(fixed.iter().chain(&packages)), "install")
        })
        .map_err(|why| MissingTools::NotInstalled { tools: tools.clone(), why, repeat })?;
    task.done(&format!("installed {}", tools.join(", ")));
    require(works)
}

fn apt<'a>(args: impl Iterator<Item = &'a &'a str>) -> Command {
    let mut command = Command::new("apt-get");
    command.args(args).env("DEBIAN_FRONTEND", "noninteractive").stdin(std::process::Stdio::null());
    command
}

fn run_apt(progress: &Progress, command: &mut Command, verb: &str) -> Result<(), String> {
    progress.command(&shell_line(command));
    let log = std::env::temp_dir().join(format!("buddydiff-apt-{verb}-{}.log", std::process::id()));
    let file = std::fs::File::create(&log).map_err(|error| error.to_string())?;
    let second = file.try_clone().map_err(|error| error.to_string())?;
    command.stdout(file).stderr(second);
    let mut group = Group::spawn(command).map_err(|error| error.to_string())?;
    let status =
        group.wait_until(Instant::now() + Duration::from_secs(30 * 60)).map_err(|error| match error {
            WaitError::Interrupted => "interrupted".to_owned(),
            other => other.to_string(),
        })?;
    let said = std::fs::read_to_string(&log).unwrap_or_default();
    if !status.success() {
        let last: Vec<&str> = said.lines().rev().take(5).collect();
        return Err(format!(
            "apt-get {verb}: {status}\n  {}",
            last.into_iter().rev().collect::<Vec<_>>().join("\n  ")
        ));
    }
    // Kept only on failure, for the user to read.
    let _ = std::fs::remove_file(&log);
    Ok(())
}

fn missing(works: &[Work], root: &Path, path: &[PathBuf], needed_only: bool) -> Vec<&'static Tool> {
    let there = |tool: &&Tool| match tool.name.contains('/') {
        true => root.join(tool.name).exists(),
        false => path.iter().any(|folder| folder.join(tool.name).is_file()),
    };
    let wanted = |tool: &&Tool| works.contains(&tool.work) && (tool.needed || !needed_only);
    TOOLS.iter().filter(wanted).filter(|tool| !there(tool)).collect()
}

fn packages(missing: &[&Tool]) -> Vec<&'static str> {
    let mut packages: Vec<&str> = missing.iter().map(|tool| tool.package).collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

fn install_line(missing: &[&Tool]) -> String {
    format!("apt-get install --yes --no-install-recommends {}", packages(missing).join(" "))
}

fn has_apt() -> bool {
    find("apt-get").is_some()
}

/// Where a command is, if it is anywhere in `PATH`.
#[must_use]
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    search_path().into_iter().map(|folder| folder.join(name)).find(|path| path.is_file())
}

fn search_path() -> Vec<PathBuf> {
    std::env::var_os("PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_tools_are_named_with_the_one_line_that_installs_them() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["make", "gcc", "ld", "flex", "bison", "perl", "python3"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let found = missing(&[Work::Build], folder.path(), &[folder.path().to_owned()], true);
        let names: Vec<&str> = found.iter().map(|tool| tool.name).collect();
        assert_eq!(
            names,
            ["bc", "pahole", "usr/include/gelf.h", "usr/include/zlib.h", "usr/include/stdlib.h"]
        );
        assert_eq!(
            install_line(&found),
            "apt-get install --yes --no-install-recommends bc libc6-dev libelf-dev pahole zlib1g-dev"
        );
    }

    #[test]
    fn ccache_is_installed_but_never_demanded() {
        let folder = tempfile::tempdir().unwrap();
        let all = |needed| missing(&[Work::Build], folder.path(), &[], needed);
        assert!(all(false).iter().any(|tool| tool.name == "ccache"));
        assert!(!all(true).iter().any(|tool| tool.name == "ccache"));
    }

    #[test]
    fn only_the_work_at_hand_counts() {
        let folder = tempfile::tempdir().unwrap();
        let names: Vec<&str> =
            missing(&[Work::Run], folder.path(), &[], true).iter().map(|tool| tool.name).collect();
        assert_eq!(names, ["qemu-system-x86_64"]);
    }
}
