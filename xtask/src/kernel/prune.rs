//! Making room: by age, then by size, what was used longest ago first.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::cache::Cache;
use super::error::{KernelError, io_error};
use super::list::{bytes_below, entries};
use super::store::Store;
use crate::progress::Progress;

/// Another run that uses the cache may take hours; saying so at once serves better than waiting.
const WAIT: Duration = Duration::from_secs(5);

/// What may stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rules {
    /// Remove what was not used for this long.
    pub(crate) older_than: Option<Duration>,
    /// Then remove what was used longest ago until the whole cache takes no more than this.
    pub(crate) max_bytes: Option<u64>,
}

/// What went.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pruned {
    /// Its names.
    pub(crate) removed: Vec<String>,
    /// Room the cache takes now.
    pub(crate) bytes_left: u64,
}

struct Item {
    name: String,
    path: PathBuf,
    used: SystemTime,
    bytes: u64,
    /// The name under which the source store keeps its tree, if it does.
    key: Option<String>,
}

pub(crate) fn prune(progress: &Progress, cache: &Cache, rules: &Rules) -> Result<Pruned, KernelError> {
    let _alone = cache.use_alone(progress, WAIT)?;
    let store = Store::open(cache, progress)?;
    let mut pruned = Pruned::default();
    // Left by runs that were killed; nobody else is here.
    for path in entries(&cache.root().join("tmp"))? {
        remove(&path)?;
    }
    let mut items = items(cache)?;
    items.sort_by_key(|item| item.used);
    let now = SystemTime::now();
    let mut dropped_sources = false;
    let mut keep = Vec::new();
    for item in items {
        let age = now.duration_since(item.used).unwrap_or_default();
        if rules.older_than.is_some_and(|limit| age > limit) {
            dropped_sources |= drop_item(&store, &item, &mut pruned)?;
        } else {
            keep.push(item);
        }
    }
    if dropped_sources {
        collect_garbage(cache, &store)?;
    }
    if let Some(max) = rules.max_bytes {
        let mut total = bytes_below(cache.root());
        for item in keep {
            if total <= max {
                break;
            }
            let is_source = drop_item(&store, &item, &mut pruned)?;
            total = total.saturating_sub(item.bytes);
            if is_source {
                // Trees share most of their files: only the store knows what one of them took.
                collect_garbage(cache, &store)?;
                total = bytes_below(cache.root());
            }
        }
        if total > max {
            // Compilers' and logs' leftovers go last; they cost least to lose but are of most use.
            for name in ["ccache", "logs", "apt"] {
                remove(&cache.root().join(name))?;
                pruned.removed.push(name.to_owned());
            }
            Cache::open(cache.root())?;
        }
    }
    pruned.bytes_left = bytes_below(cache.root());
    Ok(pruned)
}

/// Lets the store drop what nothing keeps alive, and forgets what we noted about its content before.
fn collect_garbage(cache: &Cache, store: &Store<'_>) -> Result<(), KernelError> {
    // An index says of unchanged files that the store has them.
    for note in entries(&cache.root().join("trees"))? {
        remove(&note)?;
    }
    store.collect_garbage()
}

/// Removes an item; says whether the source store has something to collect now.
fn drop_item(store: &Store<'_>, item: &Item, pruned: &mut Pruned) -> Result<bool, KernelError> {
    remove(&item.path)?;
    pruned.removed.push(item.name.clone());
    let Some(key) = &item.key else { return Ok(false) };
    store.forget(key)?;
    Ok(true)
}

fn items(cache: &Cache) -> Result<Vec<Item>, KernelError> {
    let mut items = Vec::new();
    for folder in entries(&cache.root().join("builds"))? {
        items.push(item("build", &folder, &folder.join("build.json"), None));
    }
    for folder in entries(&cache.root().join("work"))? {
        items.push(item("work tree", &folder, &folder.join("state.json"), None));
    }
    for record in entries(&cache.root().join("sources"))? {
        let key = record.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        items.push(item("source", &record, &record, key));
    }
    for record in entries(&cache.root().join("pairs"))? {
        let key = record.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        items.push(item("base of pair", &record, &record, Some(format!("base-{key}"))));
        items.push(item("patched of pair", &record, &record, Some(format!("patched-{key}"))));
    }
    Ok(items)
}

fn item(kind: &str, path: &Path, used: &Path, key: Option<String>) -> Item {
    // Without its mark it is unfinished, and the first to go.
    let modified = fs::metadata(used).and_then(|data| data.modified());
    Item {
        name: format!("{kind} {}", path.file_stem().unwrap_or_default().to_string_lossy()),
        path: path.to_owned(),
        used: modified.unwrap_or(SystemTime::UNIX_EPOCH),
        bytes: bytes_below(path),
        key,
    }
}

fn remove(path: &Path) -> Result<(), KernelError> {
    let removed = match fs::symlink_metadata(path) {
        Ok(data) if data.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(io_error("remove", path)(error)),
        _ => Ok(()),
    }
}
