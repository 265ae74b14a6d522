//! What the catalogue and the cache hold.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::build::Record;
use super::cache::{self, Cache};
use super::catalog::Catalog;
use super::error::{KernelError, io_error};
use super::source::{self, Source};

/// Everything there is to list.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Listed {
    /// Name, whether it is fetched, and what it is there for.
    pub(crate) catalog: Vec<(String, bool, String)>,
    /// Fetched sources: resolved spec and age.
    pub(crate) sources: Vec<(String, Duration)>,
    /// Built kernels.
    pub(crate) builds: Vec<ListedKernel>,
    /// Work trees: name and size in bytes.
    pub(crate) work: Vec<(String, u64)>,
    /// Size of the source store in bytes.
    pub(crate) store_bytes: u64,
}

/// A built kernel.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ListedKernel {
    /// Its build ID.
    pub(crate) build_id: String,
    /// Resolved spec.
    pub(crate) spec: String,
    /// How many patches are on top.
    pub(crate) patches: usize,
    /// `uname -r`, with the flavour.
    pub(crate) release: String,
    /// Size in bytes.
    pub(crate) bytes: u64,
    /// Since it was built.
    pub(crate) age: Duration,
    /// How long building it took.
    pub(crate) build_s: f64,
}

pub(crate) fn list(cache: &Cache, catalog: &Catalog) -> Result<Listed, KernelError> {
    let mut names = Vec::new();
    for name in catalog.names() {
        let here = catalog.specs(name)?.iter().any(|spec| source::is_here(cache, spec));
        names.push((name.to_owned(), here, catalog.why(name).to_owned()));
    }
    let mut sources: Vec<(String, Duration)> = entries(&cache.root().join("sources"))?
        .iter()
        .filter_map(|path| cache::read_record::<Source>(path))
        .map(|source| (source.spec, since(source.fetched_at_s)))
        .collect();
    sources.sort();
    let mut builds = Vec::new();
    for folder in entries(&cache.root().join("builds"))? {
        let Some(record) = cache::read_record::<Record>(&folder.join("build.json")) else { continue };
        builds.push(ListedKernel {
            build_id: folder.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            spec: record.spec,
            patches: record.series.len(),
            release: format!("{} {}", record.release, record.flavour),
            bytes: bytes_below(&folder),
            age: since(record.built_at_s),
            build_s: record.build_s,
        });
    }
    builds.sort_by(|one, other| (&one.release, one.patches).cmp(&(&other.release, other.patches)));
    let mut work: Vec<(String, u64)> = entries(&cache.root().join("work"))?
        .iter()
        .map(|path| (path.file_name().unwrap_or_default().to_string_lossy().into_owned(), bytes_below(path)))
        .collect();
    work.sort();
    Ok(Listed {
        catalog: names,
        sources,
        builds,
        work,
        store_bytes: bytes_below(&cache.root().join("store.git")),
    })
}

/// What a folder holds.
pub(crate) fn entries(folder: &Path) -> Result<Vec<std::path::PathBuf>, KernelError> {
    let listing = fs::read_dir(folder).map_err(io_error("read", folder))?;
    Ok(listing.filter_map(Result::ok).map(|entry| entry.path()).collect())
}

/// Room that a file or folder takes. What vanishes meanwhile counts nothing.
pub(crate) fn bytes_below(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let mut total = 0;
    let mut left = vec![path.to_owned()];
    while let Some(path) = left.pop() {
        let Ok(data) = fs::symlink_metadata(&path) else { continue };
        total += data.blocks() * 512;
        if data.is_dir() {
            left.extend(entries(&path).unwrap_or_default());
        }
    }
    total
}

fn since(unix_s: u64) -> Duration {
    let then = UNIX_EPOCH + Duration::from_secs(unix_s);
    SystemTime::now().duration_since(then).unwrap_or_default()
}
