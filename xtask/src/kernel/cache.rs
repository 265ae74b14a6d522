//! Where everything is kept, small records as JSON, and locks between runs.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::error::{KernelError, io_error};
use crate::progress::Progress;

/// A whole build by another run fits into this on a slow machine.
const LOCK_WAIT: Duration = Duration::from_secs(90 * 60);
const LOCK_POLL: Duration = Duration::from_millis(100);

/// The folders of the cache.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    root: PathBuf,
}

impl Cache {
    /// The user's cache: `$BUDDYDIFF_CACHE`, else below `$XDG_CACHE_HOME`, else below `~/.cache`.
    pub(crate) fn default_root() -> Result<PathBuf, KernelError> {
        let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = var("BUDDYDIFF_CACHE")
            .or_else(|| var("XDG_CACHE_HOME").map(|path| path.join("buddydiff")))
            .or_else(|| var("HOME").map(|path| path.join(".cache/buddydiff")))
            .ok_or_else(|| {
                KernelError::Request(
                    "failed to find a place for the cache: set BUDDYDIFF_CACHE or HOME".into(),
                )
            })?;
        std::path::absolute(&root).map_err(io_error("find", &root))
    }

    /// Opens the cache at `root`, making what is missing.
    pub(crate) fn open(root: &Path) -> Result<Self, KernelError> {
        let cache = Self { root: root.to_owned() };
        for name in ["sources", "resolved", "pairs", "builds", "work", "trees", "logs", "locks", "apt", "tmp"]
        {
            let path = cache.root.join(name);
            fs::create_dir_all(&path).map_err(io_error("create", &path))?;
        }
        Ok(cache)
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// A path below the root; `folder` is one of those made by [`Cache::open`].
    pub(crate) fn path(&self, folder: &str, name: &str) -> PathBuf {
        self.root.join(folder).join(name)
    }

    /// Takes the lock `name`, waiting for whoever has it.
    pub(crate) fn lock(&self, progress: &Progress, name: &str, what: &str) -> Result<Lock, KernelError> {
        lock(progress, &self.path("locks", name), what, Mode::Exclusive, LOCK_WAIT)
    }

    /// Declares this run a user of the cache: nothing is pruned meanwhile.
    pub(crate) fn use_shared(&self, progress: &Progress) -> Result<Lock, KernelError> {
        lock(progress, &self.path("locks", "cache"), "the cache", Mode::Shared, LOCK_WAIT)
    }

    /// Keeps every other run out.
    pub(crate) fn use_alone(&self, progress: &Progress, wait: Duration) -> Result<Lock, KernelError> {
        lock(progress, &self.path("locks", "cache"), "the whole cache", Mode::Exclusive, wait)
    }
}

/// A key for anything: 32 hexadecimal digits of BLAKE3 over the parts, which cannot run into each other.
pub(crate) fn key(parts: &[&str]) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.finalize().to_hex()[..32].to_owned()
}

/// Reads a record, if it is there and sound. A damaged one counts as absent: all of them can be made again.
pub(crate) fn read_record<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Writes a record aside and renames it into place, so that readers see all of it or nothing.
pub(crate) fn write_record<T: Serialize>(path: &Path, record: &T) -> Result<(), KernelError> {
    let text = serde_json::to_vec_pretty(record)
        .map_err(|error| std::io::Error::new(std::io::ErrorKind::InvalidData, error))
        .map_err(io_error("write", path))?;
    write_aside(path, &text)
}

/// Writes a file aside and renames it into place.
pub(crate) fn write_aside(path: &Path, content: &[u8]) -> Result<(), KernelError> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(io_error("write", path))?;
    file.write_all(content).map_err(io_error("write", path))?;
    file.persist(path).map_err(|error| io_error("write", path)(error.error))?;
    Ok(())
}

/// Marks a file or folder as used now, for [`mod@super::prune`].
pub(crate) fn touch(path: &Path) {
    // Only the order of pruning suffers if this fails.
    let _ = File::open(path).and_then(|file| file.set_modified(std::time::SystemTime::now()));
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Shared,
    Exclusive,
}

/// A lock between runs. It ends with this value, and with the process however that ends.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

fn lock(
    progress: &Progress,
    path: &Path,
    what: &str,
    mode: Mode,
    wait: Duration,
) -> Result<Lock, KernelError> {
    let mut file = File::options()
        .read(true)
        .append(true)
        .create(true)
        .open(path)
        .map_err(io_error("open the lock", path))?;
    let started = Instant::now();
    let mut told = false;
    loop {
        let tried = match mode {
            Mode::Shared => file.try_lock_shared(),
            Mode::Exclusive => file.try_lock(),
        };
        match tried {
            Ok(()) => break,
            Err(TryLockError::Error(source)) => return Err(io_error("lock", path)(source)),
            Err(TryLockError::WouldBlock) => {}
        }
        if host::process::interrupted() {
            return Err(KernelError::Interrupted);
        }
        if started.elapsed() >= wait {
            let waited_s = started.elapsed().as_secs();
            return Err(KernelError::Locked { what: what.to_owned(), holder: holder(path), waited_s });
        }
        if !told {
            told = true;
            progress.line(&format!("waiting for {what}: {} has it", holder(path)));
        }
        std::thread::sleep(LOCK_POLL);
    }
    if mode == Mode::Exclusive {
        // Only for the message above; a lock without a name is still a lock.
        let _ = file.set_len(0).and_then(|()| writeln!(file, "process {}", std::process::id()));
    }
    Ok(Lock { _file: file })
}

fn holder(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let text = text.trim();
    if text.is_empty() { "another run".to_owned() } else { text.to_owned() }
}

/// One of the machine's places for a build: how many there are depends on its cores and memory.
#[derive(Debug)]
pub(crate) struct Slot {
    _lock: Lock,
    /// How many compilers to run in it.
    pub(crate) jobs: usize,
}

/// A kernel build with BTF wants about this much (pahole and the final link), and gains little beyond this many cores.
const CORES_PER_BUILD: usize = 8;
const MEMORY_PER_BUILD_KIB: u64 = 6 << 20;

/// How many kernels to build side by side, and with how many jobs each.
pub(crate) fn side_by_side(cores: usize, memory_kib: u64) -> (usize, usize) {
    let by_memory = usize::try_from(memory_kib / MEMORY_PER_BUILD_KIB).unwrap_or(usize::MAX);
    let builds = (cores / CORES_PER_BUILD).min(by_memory).max(1);
    (builds, (cores / builds).max(1))
}

/// How many kernels this machine builds side by side, and with how many jobs each.
pub(crate) fn machine() -> (usize, usize) {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    side_by_side(cores, memory_kib().unwrap_or(0))
}

fn memory_kib() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    line.split_whitespace().next()?.parse().ok()
}

impl Cache {
    /// Waits for a place to build in.
    pub(crate) fn slot(&self, progress: &Progress) -> Result<Slot, KernelError> {
        let (builds, jobs) = machine();
        for number in 1..builds {
            let path = self.path("locks", &format!("slot-{number}"));
            match lock(progress, &path, "a place to build in", Mode::Exclusive, Duration::ZERO) {
                Ok(lock) => return Ok(Slot { _lock: lock, jobs }),
                Err(KernelError::Locked { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let path = self.path("locks", "slot-0");
        let lock = lock(progress, &path, "a place to build in", Mode::Exclusive, LOCK_WAIT)?;
        Ok(Slot { _lock: lock, jobs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_keep_their_parts_apart() {
        assert_ne!(key(&["ab", "c"]), key(&["a", "bc"]));
        assert_eq!(key(&["ab", "c"]), key(&["ab", "c"]));
    }

    #[test]
    fn a_lock_that_is_held_names_its_holder() {
        let folder = tempfile::tempdir().unwrap();
        let progress = Progress::new(false);
        let path = folder.path().join("lock");
        let take = |mode| lock(&progress, &path, "the test", mode, Duration::ZERO);
        let held = take(Mode::Exclusive).unwrap();
        for mode in [Mode::Exclusive, Mode::Shared] {
            let error = take(mode).unwrap_err().to_string();
            assert!(error.contains(&format!("process {}", std::process::id())), "{error}");
        }
        drop(held);
        let first = take(Mode::Shared).unwrap();
        let second = take(Mode::Shared).unwrap();
        assert!(take(Mode::Exclusive).is_err());
        drop((first, second));
        take(Mode::Exclusive).unwrap();
    }

    #[test]
    fn small_machines_build_one_kernel_at_a_time() {
        assert_eq!(side_by_side(2, 24 << 20), (1, 2));
        assert_eq!(side_by_side(32, 64 << 20), (4, 8));
        assert_eq!(side_by_side(32, 8 << 20), (1, 32));
        assert_eq!(side_by_side(1, 0), (1, 1));
    }

    #[test]
    fn a_damaged_record_counts_as_absent() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record.json");
        write_record(&path, &vec![1, 2]).unwrap();
        assert_eq!(read_record::<Vec<u32>>(&path), Some(vec![1, 2]));
        fs::write(&path, "[1, ").unwrap();
        assert_eq!(read_record::<Vec<u32>>(&path), None);
    }
}
