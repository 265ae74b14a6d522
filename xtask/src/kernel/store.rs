//! The private git store: every source, patched or not, is a tree in it, so that its identity is a tree id.
//!
//! Nothing of the user's git configuration applies here, and no repository of the user is ever written to.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use host::process::Group;

use super::cache::{Cache, Lock};
use super::error::{KernelError, io_error};
use super::run;
use crate::progress::Progress;

/// The store, and how to report what happens in it.
#[derive(Clone, Debug)]
pub(crate) struct Store<'a> {
    cache: Cache,
    git_dir: PathBuf,
    progress: &'a Progress,
}

/// Trees are written once and read a few times: little compression, no syncing (a lost object is fetched again),
/// no surprise repacking while a build waits.
const SETTINGS: &str = "[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = true
\tcompression = 1
\tlooseCompression = 1
\tautocrlf = false
\tfsync = none
[pack]
\tcompression = 1
[gc]
\tauto = 0
[checkout]
\tworkers = 0
[advice]
\taddEmbeddedRepo = false
";

/// git then names functions in hunk headers as it does in the kernel's own repository.
const ATTRIBUTES: &str = "*.c diff=cpp\n*.h diff=cpp\n";

/// What a build leaves in a kernel tree, for trees whose own .gitignore does not tell.
const ARTEFACTS: [&str; 16] = [
    "**/*.o",
    "**/*.a",
    "**/*.ko",
    "**/*.mod",
    "**/*.mod.c",
    "**/.*.cmd",
    "**/.*.d",
    "**/modules.order",
    "**/.tmp_*",
    "vmlinux*",
    "System.map",
    "Module.symvers",
    ".config*",
    "include/generated/**",
    "include/config/**",
    "arch/*/include/generated/**",
];

impl<'a> Store<'a> {
    /// Opens the store of `cache`, making it if needed.
    pub(crate) fn open(cache: &Cache, progress: &'a Progress) -> Result<Self, KernelError> {
        let git_dir = cache.root().join("store.git");
        let store = Self { cache: cache.clone(), git_dir, progress };
        let ready = store.git_dir.join("ready");
        if ready.exists() {
            return Ok(store);
        }
        let _lock = cache.lock(progress, "store", "the source store")?;
        // Another run may have made it while we waited, and use it by now: rewriting its files would pull it away.
        if !ready.exists() {
            for folder in ["objects", "refs", "info"] {
                let path = store.git_dir.join(folder);
                fs::create_dir_all(&path).map_err(io_error("create", &path))?;
            }
            let files = [
                ("HEAD", "ref: refs/heads/none\n"),
                ("config", SETTINGS),
                ("info/attributes", ATTRIBUTES),
                ("ready", ""),
            ];
            for (name, text) in files {
                let path = store.git_dir.join(name);
                fs::write(&path, text).map_err(io_error("write", &path))?;
            }
        }
        Ok(store)
    }

    pub(crate) fn git_dir(&self) -> &Path {
        &self.git_dir
    }

    /// Lets one import write at a time, and clears away what an earlier one left when it was killed or ran out of room.
    pub(crate) fn import_lock(&self) -> Result<Lock, KernelError> {
        let lock = self.cache.lock(self.progress, "import", "the source store")?;
        for (folder, start) in [("objects/pack", "tmp_"), ("", "fast_import_crash_")] {
            let Ok(listing) = fs::read_dir(self.git_dir.join(folder)) else { continue };
            for entry in listing.filter_map(Result::ok) {
                if entry.file_name().as_encoded_bytes().starts_with(start.as_bytes()) {
                    fs::remove_file(entry.path()).map_err(io_error("remove", &entry.path()))?;
                }
            }
        }
        Ok(lock)
    }

    pub(crate) fn progress(&self) -> &'a Progress {
        self.progress
    }

    /// A git command on the store.
    pub(crate) fn git(&self, args: &[&str]) -> Command {
        let mut command = bare_git();
        command.env("GIT_DIR", &self.git_dir).args(args);
        command
    }

    /// A git command on the store with an index of its own.
    pub(crate) fn git_with_index(&self, index: &Path, args: &[&str]) -> Command {
        let mut command = self.git(args);
        command.env("GIT_INDEX_FILE", index);
        command
    }

    /// Runs a git command that must succeed; gives what it printed.
    pub(crate) fn read(&self, what: &str, args: &[&str]) -> Result<String, KernelError> {
        run::read(self.progress, what, self.git(args))
    }

    /// Whether the store has `tree` under a name, that is, for good and complete.
    pub(crate) fn holds(&self, key: &str, tree: &str) -> bool {
        // A loose reference is a file; asking git would cost a process on each warm run.
        match fs::read_to_string(self.git_dir.join("refs/sources").join(key)) {
            Ok(text) => text.trim() == tree,
            Err(_) => self
                .read("look up a source", &["rev-parse", "--verify", "--quiet", &source_ref(key)])
                .is_ok_and(|found| found == tree),
        }
    }

    /// Keeps `tree` alive under `key`.
    pub(crate) fn keep(&self, key: &str, tree: &str) -> Result<(), KernelError> {
        self.read("keep a source", &["update-ref", &source_ref(key), tree]).map(drop)
    }

    /// Lets go of what `key` keeps alive.
    pub(crate) fn forget(&self, key: &str) -> Result<(), KernelError> {
        self.read("drop a source", &["update-ref", "-d", &source_ref(key)]).map(drop)
    }

    /// Removes what nothing keeps alive.
    pub(crate) fn collect_garbage(&self) -> Result<(), KernelError> {
        self.read("clean the source store", &["gc", "--quiet", "--prune=now"]).map(drop)
    }

    /// A file of a tree.
    pub(crate) fn file(&self, tree: &str, path: &str) -> Result<String, KernelError> {
        self.read("read a source file", &["cat-file", "blob", &format!("{tree}:{path}")])
    }

    /// The tree of `dir` as it stands, edits included; what its .gitignore names stays out. `index` keeps what is
    /// known of its files, so that the next call only looks for changes.
    pub(crate) fn add_dir(&self, dir: &Path, index: &Path) -> Result<String, KernelError> {
        let command = |args: &[&str]| {
            let mut command = self.git_with_index(index, args);
            command.env("GIT_WORK_TREE", dir).current_dir(dir);
            command
        };
        remove_stale_lock(index)?;
        let asked = run::output(
            self.progress,
            "look for what is ignored",
            // By the patterns alone: the index of an earlier run has the file.
            command(&["check-ignore", "-q", "--no-index", "Makefile"]),
            run::SHORT,
        )?;
        let mut add = command(&["add", "-A"]);
        if asked.status.success() {
            // Debian's linux-source ignores its whole top level, as its packagers keep only debian/ in git.
            add.args(["-f", "."]).args(ARTEFACTS.map(|pattern| format!(":(exclude,glob){pattern}")));
        } else {
            add.arg(".");
        }
        run::read(self.progress, "read the source tree", add)?;
        if dir.join(".git").exists() {
            // A repository may track files that its own .gitignore names; they belong to the source.
            let mut list = bare_git();
            list.current_dir(dir).args([
                "-c",
                "safe.directory=*",
                "ls-files",
                "-z",
                "-i",
                "-c",
                "--exclude-standard",
            ]);
            let listed = run::read(self.progress, "list the source tree", list)?;
            let there = |name: &&str| !name.is_empty() && dir.join(name).symlink_metadata().is_ok();
            let names: Vec<&str> = listed.split('\0').filter(there).collect();
            for some in names.chunks(500) {
                let mut add = command(&["--literal-pathspecs", "add", "-f", "--"]);
                add.args(some);
                run::read(self.progress, "read the source tree", add)?;
            }
        }
        run::read(self.progress, "read the source tree", command(&["write-tree"]))
    }

    /// Copies `tree` with all below it from the repository `from`, leaving out what `known` shares with it.
    pub(crate) fn copy_tree(&self, from: &Path, tree: &str, known: Option<&str>) -> Result<(), KernelError> {
        let what = "copy a tree from the repository";
        let _lock = self.import_lock()?;
        let mut pack = foreign_git(from, &["pack-objects", "--revs", "--stdout", "--window=0", "-q"]);
        let mut index = self.git(&["index-pack", "--stdin", "--fix-thin"]);
        let repeat = format!(
            "echo {tree} | {} | {}",
            host::process::shell_line(&pack),
            host::process::shell_line(&index)
        );
        self.progress.command(&repeat);
        let wanted = match known {
            Some(known) => format!("{tree}\n^{known}\n"),
            None => format!("{tree}\n"),
        };
        let not_started = |error| run::not_started(what, &repeat, &error);
        pack.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut packer = Group::spawn(&mut pack).map_err(not_started)?;
        if let Some(mut stdin) = packer.child().stdin.take() {
            // Two lines fit the pipe; should the child be dead already, its status says so below.
            let _ = std::io::Write::write_all(&mut stdin, wanted.as_bytes());
        }
        let pipe = packer.child().stdout.take().map_or_else(Stdio::null, Stdio::from);
        index.stdin(pipe).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut indexer = Group::spawn(&mut index).map_err(not_started)?;
        drop(index);
        for group in [&mut packer, &mut indexer] {
            let said = group.child().stderr.take().map(run::drain);
            let status = group
                .wait_until(Instant::now() + run::SHORT)
                .map_err(|error| run::ended(what, &repeat, &error))?;
            let said = said.map(run::collect).unwrap_or_default();
            if !status.success() {
                return Err(run::failed(what, &repeat, status, &String::from_utf8_lossy(&said)));
            }
        }
        Ok(())
    }

    /// Makes the files in `work` those of `tree`, touching only what differs.
    pub(crate) fn check_out(&self, tree: &str, work: &Path, index: &Path) -> Result<(), KernelError> {
        remove_stale_lock(index)?;
        let mut command = self.git_with_index(index, &["read-tree", "-u", "--reset", tree]);
        command.env("GIT_WORK_TREE", work).current_dir(work);
        run::read(self.progress, "lay out the source tree", command).map(drop)
    }
}

/// A git command on a repository of the user's, to read only.
pub(crate) fn foreign_git(dir: &Path, args: &[&str]) -> Command {
    let mut command = bare_git();
    // We only read, and the path was named by the user: whose it is does not matter.
    command.current_dir(dir).args(["-c", "safe.directory=*"]).args(args);
    command
}

fn bare_git() -> Command {
    let mut command = Command::new("git");
    command
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_ATTR_NOSYSTEM", "1")
        .env("LC_ALL", "C");
    // A hook or an alias that runs us must not redirect us to its repository.
    for name in std::env::vars_os().map(|(name, _)| name) {
        let ours = ["GIT_CONFIG_NOSYSTEM", "GIT_CONFIG_GLOBAL", "GIT_ATTR_NOSYSTEM"];
        if name.as_encoded_bytes().starts_with(b"GIT_") && !ours.iter().any(|kept| name == OsStr::new(kept)) {
            command.env_remove(name);
        }
    }
    command
}

/// An index lock left by a run that was killed; the caller holds our own lock, so nobody uses it.
fn remove_stale_lock(index: &Path) -> Result<(), KernelError> {
    let mut name = index.as_os_str().to_owned();
    name.push(".lock");
    match fs::remove_file(&name) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(io_error("remove", Path::new(&name))(error))
        }
        _ => Ok(()),
    }
}

fn source_ref(key: &str) -> String {
    format!("refs/sources/{key}")
}
