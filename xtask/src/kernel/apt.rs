//! Debian packages through the machine's own apt configuration, with a private state folder.
//!
//! The system is never changed. Where a package is in a suite that the system does not list, the suite is looked up in
//! the Debian archive that the system does list: no mirror is named here.

use std::cell::RefCell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use super::cache::Cache;
use super::error::{KernelError, io_error};
use super::run;
use super::spec::Deb;
use crate::progress::{Progress, Task};

/// Lists older than this are refreshed before a version is chosen.
const FRESH: Duration = Duration::from_secs(24 * 60 * 60);
const LIMIT: Duration = Duration::from_secs(30 * 60);

/// One private state of apt: the system's sources, or one suite of the Debian archive.
struct Area<'a> {
    progress: &'a Progress,
    folder: PathBuf,
    logs: PathBuf,
    /// What was asked for, for messages.
    wanted: String,
    /// Why the lists may not be whole. Of no interest if they hold what is wanted: some other archive is down then.
    trouble: RefCell<Option<KernelError>>,
}

/// Finds the version to take: the one named, or the newest there is. Gives a deb with its version.
pub(crate) fn resolve(
    cache: &Cache,
    progress: &Progress,
    task: &Task<'_>,
    deb: &Deb,
    refresh: bool,
) -> Result<Deb, KernelError> {
    let _lock = cache.lock(progress, "apt", "the private apt state")?;
    let area = area(cache, progress, task, deb, refresh)?;
    let mut versions = area.versions(&deb.package)?;
    let lacking = |versions: &[String]| match &deb.version {
        Some(version) => !versions.contains(version),
        None => versions.is_empty(),
    };
    if lacking(&versions) && area.older_than(Duration::from_secs(60)) {
        area.update(task)?;
        versions = area.versions(&deb.package)?;
    }
    if lacking(&versions) {
        if let Some(trouble) = area.trouble.take() {
            return Err(trouble);
        }
        return Err(KernelError::NoSuchVersion {
            wanted: deb.to_string(),
            known: area.known(&deb.package, &versions)?,
        });
    }
    let version = deb.version.clone().unwrap_or_else(|| versions[0].clone());
    Ok(Deb { version: Some(version), ..deb.clone() })
}

/// Mirrors behind one name may be out of step: one in a few answers with lists that have expired.
const UPDATE_TRIES: usize = 3;

/// Downloads a resolved package and gives the file.
pub(crate) fn download(
    cache: &Cache,
    progress: &Progress,
    task: &Task<'_>,
    deb: &Deb,
) -> Result<PathBuf, KernelError> {
    let _lock = cache.lock(progress, "apt", "the private apt state")?;
    let area = area(cache, progress, task, deb, false)?;
    let folder = cache.path("apt", "debs").join(super::cache::key(&[&deb.to_string()]));
    fs::create_dir_all(&folder).map_err(io_error("create", &folder))?;
    task.say(&format!("downloading {deb}"));
    let name = match &deb.version {
        Some(version) => format!("{}={version}", deb.package),
        None => deb.package.clone(),
    };
    let mut command = area.apt("apt-get");
    command.current_dir(&folder).args(["download", &name]);
    area.run(command, |line| {
        if let Some(percent) = line.strip_prefix("dlstatus:").and_then(|rest| rest.split(':').nth(1)) {
            // apt counts in percent with decimals.
            if let Ok(percent) = percent.parse::<f64>() {
                task.step((percent * 10.0) as u64, 1000);
            }
        }
    })?;
    let listing = fs::read_dir(&folder).map_err(io_error("read", &folder))?;
    let debs = listing.filter_map(Result::ok).map(|entry| entry.path());
    debs.into_iter().find(|path| path.extension().is_some_and(|ext| ext == "deb")).ok_or_else(|| {
        KernelError::Apt { what: deb.to_string(), why: "apt downloaded no package".to_owned() }
    })
}

fn area<'a>(
    cache: &Cache,
    progress: &'a Progress,
    task: &Task<'_>,
    deb: &Deb,
    refresh: bool,
) -> Result<Area<'a>, KernelError> {
    let make = |name: &str| Area {
        progress,
        folder: cache.path("apt", name),
        logs: cache.root().join("logs"),
        wanted: deb.to_string(),
        trouble: RefCell::new(None),
    };
    let system = make("system");
    system.prepare()?;
    let sources = system_sources(progress)?;
    system.write_sources(&sources)?;
    let Some(suite) = &deb.suite else {
        if refresh || system.older_than(FRESH) {
            system.update(task)?;
        }
        return Ok(system);
    };
    let area = make(&format!("suite-{suite}"));
    area.prepare()?;
    if refresh || area.older_than(FRESH) {
        // Where the archive is changes less often than what is in it.
        let base = match system.debian_archive()? {
            Some(base) => base,
            None => {
                system.update(task)?;
                let archive = system.debian_archive()?;
                archive.ok_or_else(|| system.trouble.take().unwrap_or_else(|| KernelError::Apt {
                    what: deb.to_string(),
                    why: "apt's sources name no Debian archive to look for the suite in; unpack the source yourself \
                          and use tar: or dir:"
                        .to_owned(),
                }))?
            }
        };
        let file = area.folder.join("sources.d/suite.list");
        fs::write(&file, format!("deb {base} {suite} main\n")).map_err(io_error("write", &file))?;
        area.update(task)?;
    }
    Ok(area)
}

impl Area<'_> {
    fn prepare(&self) -> Result<(), KernelError> {
        for name in ["state/lists/partial", "cache/archives/partial", "sources.d"] {
            let path = self.folder.join(name);
            fs::create_dir_all(&path).map_err(io_error("create", &path))?;
        }
        Ok(())
    }

    /// Copies of the system's own lists. Copies, since apt reads a folder and we must not write to the system's.
    fn write_sources(&self, sources: &[PathBuf]) -> Result<(), KernelError> {
        let folder = self.folder.join("sources.d");
        for entry in fs::read_dir(&folder).map_err(io_error("read", &folder))?.filter_map(Result::ok) {
            fs::remove_file(entry.path()).map_err(io_error("remove", &entry.path()))?;
        }
        for source in sources {
            let Some(name) = source.file_name() else { continue };
            fs::copy(source, folder.join(name)).map_err(io_error("read", source))?;
        }
        Ok(())
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let folder = self.folder.display();
        for option in [
            format!("Dir::State={folder}/state"),
            "Dir::State::status=/var/lib/dpkg/status".to_owned(),
            format!("Dir::Cache={folder}/cache"),
            "Dir::Etc::sourcelist=/dev/null".to_owned(),
            format!("Dir::Etc::sourceparts={folder}/sources.d"),
            // Root may not let apt's own user into the cache.
            "APT::Sandbox::User=root".to_owned(),
            "APT::Update::Error-Mode=any".to_owned(),
            "Acquire::Retries=3".to_owned(),
            // Package lists alone: what else a system fetches along with them is of no use here.
            "Acquire::Languages=none".to_owned(),
            "DPkg::Post-Invoke::=".to_owned(),
            "APT::Update::Post-Invoke::=".to_owned(),
            "APT::Update::Post-Invoke-Success::=".to_owned(),
            "APT::Status-Fd=1".to_owned(),
        ] {
            command.arg("-o").arg(option);
        }
        command.env("LC_ALL", "C").env("DEBIAN_FRONTEND", "noninteractive");
        command
    }

    fn run(&self, command: Command, mut on_line: impl FnMut(&str) + Send) -> Result<(), KernelError> {
        let mut complaints = Vec::new();
        let log = self.logs.join(format!("apt-{}.log", std::process::id()));
        let repeat = host::process::shell_line(&command);
        let status = run::logged(self.progress, "run apt", command, LIMIT, &log, |line| {
            if line.starts_with("E:") || line.starts_with("W:") || line.starts_with("Err:") {
                complaints.push(line.to_owned());
            }
            on_line(line);
        })?;
        if status.success() {
            // It tells nothing that anybody asks for later.
            let _ = fs::remove_file(&log);
            return Ok(());
        }
        if complaints.iter().any(|line| run::says_disk_full(line)) {
            return Err(KernelError::DiskFull { what: format!("run apt in {}", self.folder.display()) });
        }
        complaints.dedup();
        complaints.truncate(4);
        Err(KernelError::Apt {
            what: self.wanted.clone(),
            why: format!("{}\n  repeat it with: {repeat}", complaints.join("\n  ")),
        })
    }

    fn stamp(&self) -> PathBuf {
        self.folder.join("updated")
    }

    fn older_than(&self, limit: Duration) -> bool {
        let modified = fs::metadata(self.stamp()).and_then(|data| data.modified()).ok();
        let age = modified.and_then(|time| SystemTime::now().duration_since(time).ok());
        age.is_none_or(|age| age > limit)
    }

    fn update(&self, task: &Task<'_>) -> Result<(), KernelError> {
        task.say("reading apt's package lists");
        let update = || {
            let mut command = self.apt("apt-get");
            command.arg("update");
            self.run(command, |_| {})
        };
        let mut updated = update();
        for _ in 1..UPDATE_TRIES {
            if !matches!(updated, Err(KernelError::Apt { .. })) {
                break;
            }
            updated = update();
        }
        match updated {
            Err(error @ KernelError::Apt { .. }) => {
                self.trouble.replace(Some(error));
                return Ok(());
            }
            other => other?,
        }
        let stamp = self.stamp();
        fs::write(&stamp, "").map_err(io_error("write", &stamp))
    }

    /// The versions of `package`, newest first.
    fn versions(&self, package: &str) -> Result<Vec<String>, KernelError> {
        let mut command = self.apt("apt-cache");
        command.args(["madison", package]);
        let text = run::read(self.progress, "ask apt for versions", command)?;
        Ok(versions_of(&text))
    }

    /// What there is instead of what was wanted.
    fn known(&self, package: &str, versions: &[String]) -> Result<String, KernelError> {
        if !versions.is_empty() {
            return Ok(format!("{package} {}", versions.join(", ")));
        }
        let mut command = self.apt("apt-cache");
        command.args(["pkgnames", "linux-source"]);
        let text = run::read(self.progress, "ask apt for packages", command)?;
        let mut names: Vec<&str> = text.lines().collect();
        names.sort_unstable();
        Ok(if names.is_empty() { "no kernel source package at all".to_owned() } else { names.join(", ") })
    }

    /// Where the Debian archive is, as the system's sources have it.
    fn debian_archive(&self) -> Result<Option<String>, KernelError> {
        let mut command = self.apt("apt-get");
        command.args(["indextargets", "--format", "$(REPO_URI) $(ORIGIN) $(LABEL)"]);
        let text = run::read(self.progress, "ask apt for its archives", command)?;
        // Security updates and backports are archives of their own, with labels of their own.
        Ok(text.lines().find_map(|line| line.strip_suffix(" Debian Debian")).map(str::to_owned))
    }
}

/// The versions in what `apt-cache madison` prints: `package | version | source`.
fn versions_of(madison: &str) -> Vec<String> {
    let mut versions: Vec<String> = Vec::new();
    for line in madison.lines() {
        let mut fields = line.split('|').map(str::trim);
        let (Some(_), Some(version), Some(source)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        if source.ends_with("Packages") && !versions.iter().any(|known| known == version) {
            versions.push(version.to_owned());
        }
    }
    versions
}

/// The files that make up the system's apt sources.
fn system_sources(progress: &Progress) -> Result<Vec<PathBuf>, KernelError> {
    let mut command = Command::new("apt-config");
    command.args(["shell", "LIST", "Dir::Etc::sourcelist/f", "PARTS", "Dir::Etc::sourceparts/d"]);
    let text = run::read(progress, "ask apt for its sources", command)?;
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
        Some(PathBuf::from(line.trim_matches('\'')))
    };
    let mut files: Vec<PathBuf> = value("LIST").filter(|path| path.is_file()).into_iter().collect();
    let parts = value("PARTS").and_then(|folder| fs::read_dir(folder).ok());
    let is_source = |path: &PathBuf| {
        path.extension().is_some_and(|ext| ext == "list" || ext == "sources") && path.is_file()
    };
    files.extend(
        parts.into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path()).filter(is_source),
    );
    Ok(files)
}

/// The one file of the package that matters, relative to its root.
pub(crate) fn is_source_tarball(path: &Path) -> bool {
    let text = path.to_string_lossy();
    let name = text.trim_start_matches("./");
    name.starts_with("usr/src/linux-source-") && name.contains(".tar.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_madison_once_each() {
        let text = "linux-source-9.9 | 9.9.3-1 | http://archive.invalid/debian x/main amd64 Packages\n\
                    linux-source-9.9 | 9.9.1-1 | http://archive.invalid/debian y/main amd64 Packages\n\
                    linux-source-9.9 | 9.9.1-1 | http://archive.invalid/debian z/main amd64 Packages\n\
                    linux-source-9.9 | 9.9.0-1 | http://archive.invalid/debian z/main Sources\nnoise\n";
        assert_eq!(versions_of(text), ["9.9.3-1", "9.9.1-1"]);
    }

    #[test]
    fn only_the_tarball_of_the_package_is_taken() {
        assert!(is_source_tarball(Path::new("./usr/src/linux-source-6.12.tar.xz")));
        assert!(!is_source_tarball(Path::new("./usr/src/linux-patch-6.12-rt.patch.xz")));
        assert!(!is_source_tarball(Path::new("./usr/share/doc/linux-source-6.12/copyright")));
    }
}
