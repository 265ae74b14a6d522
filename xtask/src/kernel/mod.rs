//! Kernels: from a spec to a built image in the cache.
//!
//! spec → [`source`] (a tree in the private git [`store`]) → [`patch`] (another tree) → [`driver`] where it is asked for
//! (another one) → [`config`] → [`build`] (a work tree, then a folder in the cache). Nothing here knows what a kernel is
//! booted for.

mod apt;
mod build;
mod cache;
mod catalog;
mod config;
mod driver;
mod error;
mod import;
mod list;
mod patch;
mod prune;
mod run;
mod series;
mod source;
mod spec;
mod store;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use crate::progress::Progress;
use build::{Builder, Job, Published};
use cache::{Cache, Lock};
use catalog::Catalog;
pub(crate) use error::{KernelError, Kind};
pub(crate) use list::Listed;
pub(crate) use prune::{Pruned, Rules};
use series::Series;
use source::{Look, Source};
use spec::Spec;
use store::Store;

/// Which configuration of a kernel.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Flavour {
    /// Per-CPU page lists, as users run.
    #[default]
    Smp,
    /// SMP=n: the quietest kernel there is.
    Up,
    /// smp with NUMA, whose nodes are emulated (`numa=fake=N`).
    Numa,
}

impl fmt::Display for Flavour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Smp => "smp",
            Self::Up => "up",
            Self::Numa => "numa",
        })
    }
}

/// Which two kernels are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PairRequest {
    /// One kernel, to be taken with and without `series`; without a series it is compared with itself.
    pub(crate) kernel: Option<String>,
    /// The patches in question.
    pub(crate) series: Option<String>,
    /// A whole kernel as base; goes with `patched`.
    pub(crate) base: Option<String>,
    /// A whole kernel as patched; goes with `base`.
    pub(crate) patched: Option<String>,
    /// How to configure both.
    pub(crate) flavour: Flavour,
    /// Whether both get the driver that runs batches of operations.
    pub(crate) driver: bool,
}

/// Two kernels to compare.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Pair {
    /// Without the series.
    pub(crate) base: Built,
    /// With the series.
    pub(crate) patched: Built,
    /// The two images are the same to the byte: no test can tell them apart.
    pub(crate) no_change: bool,
    /// Titles of the patches that the source held already; base is then the source with them reversed.
    pub(crate) present: Vec<String>,
}

/// A kernel that can be booted.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Built {
    /// Resolved, so that it gives the same kernel again.
    pub(crate) spec: String,
    /// What `uname -r` will say.
    pub(crate) release: String,
    /// How it is configured.
    pub(crate) flavour: Flavour,
    /// Names this build in the cache. A prebuilt image has the hash of its content.
    pub(crate) build_id: String,
    /// Titles of the patches of the series that it holds.
    pub(crate) series: Vec<String>,
    /// Titles of the patches that were reversed for it.
    pub(crate) reversed: Vec<String>,
    /// ELF with symbols and BTF, without debug information.
    pub(crate) vmlinux: PathBuf,
    /// Addresses of the symbols.
    pub(crate) system_map: Option<PathBuf>,
    /// How long building it took, whenever that was.
    pub(crate) build_s: f64,
    /// It was built just now.
    pub(crate) fresh: bool,
}

/// The kernels of this machine: catalogue, fragments, patches and cache.
#[derive(Debug)]
pub(crate) struct Kernels<'a> {
    progress: &'a Progress,
    cache: Cache,
    store: Store<'a>,
    catalog: Catalog,
    folder: PathBuf,
    toolchain: OnceLock<String>,
    check_tools: bool,
    /// Keeps pruning away from what this run uses.
    _in_use: Lock,
}

impl<'a> Kernels<'a> {
    /// Opens the user's cache and our own `kernels/`.
    ///
    /// # Errors
    /// Where the cache cannot be made or our own files cannot be read.
    pub(crate) fn open(progress: &'a Progress) -> Result<Self, KernelError> {
        // xtask is run by cargo inside its repository, and nowhere else.
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels");
        Self::open_at(progress, &Cache::default_root()?, &folder, true)
    }

    fn open_at(
        progress: &'a Progress,
        root: &Path,
        folder: &Path,
        check_tools: bool,
    ) -> Result<Self, KernelError> {
        let cache = Cache::open(root)?;
        let in_use = cache.use_shared(progress)?;
        let store = Store::open(&cache, progress)?;
        let catalog = Catalog::read(&folder.join("catalog.toml"))?;
        Ok(Self {
            progress,
            cache,
            store,
            catalog,
            folder: folder.to_owned(),
            toolchain: OnceLock::new(),
            check_tools,
            _in_use: in_use,
        })
    }

    /// The two kernels that `request` asks for, built.
    ///
    /// # Errors
    /// See [`KernelError`].
    pub(crate) fn pair(&self, request: &PairRequest) -> Result<Pair, KernelError> {
        let (flavour, driver) = (request.flavour, request.driver);
        match (&request.kernel, &request.series, &request.base, &request.patched) {
            (Some(kernel), Some(series), None, None) => self.pair_of_series(kernel, series, flavour, driver),
            (Some(kernel), None, None, None) => {
                let built = self.one(kernel, None, flavour, driver)?;
                let patched = Built { fresh: false, ..built.clone() };
                Ok(Pair { base: built, patched, no_change: true, present: Vec::new() })
            }
            (None, None, Some(base), Some(patched)) => {
                let base = self.published(base, flavour, driver)?;
                let patched = self.published(patched, flavour, driver)?;
                Ok(pair_of(base, patched, Vec::new()))
            }
            _ => Err(KernelError::Request(
                "failed to see which two kernels are meant: give --kernel with or without --series, or --base with --patched"
                    .to_owned(),
            )),
        }
    }

    /// One kernel, built, with `series` on top if given (what it holds already stays), and our driver in it where asked for.
    ///
    /// # Errors
    /// See [`KernelError`].
    pub(crate) fn one(
        &self,
        spec: &str,
        series: Option<&str>,
        flavour: Flavour,
        driver: bool,
    ) -> Result<Built, KernelError> {
        match series {
            None => Ok(self.published(spec, flavour, driver)?.built),
            Some(series) => {
                let (source, series) = (self.source_for_series(spec)?, self.series(series)?);
                let trees = patch::pair(&self.cache, &self.store, &source.spec, &source.tree, &series)?;
                let mut job = patched(&source, flavour, trees.patched, &series);
                if driver {
                    self.add_driver(&mut job)?;
                }
                Ok(self.build(&job)?.built)
            }
        }
    }

    /// Brings sources into the cache, looking for newer package versions; gives what each spec now stands for.
    ///
    /// # Errors
    /// See [`KernelError`].
    pub(crate) fn fetch(&self, spec: &str) -> Result<String, KernelError> {
        Ok(self.source(spec, Look::Again)?.spec)
    }

    /// The kernels of the catalogue and what the cache holds.
    ///
    /// # Errors
    /// Where the cache cannot be read.
    pub(crate) fn list(&self) -> Result<Listed, KernelError> {
        list::list(&self.cache, &self.catalog)
    }

    /// The names of the series in `kernels/patches/`.
    #[must_use]
    pub(crate) fn series_names(&self) -> Vec<String> {
        series::names(&self.folder.join("patches"))
    }

    fn pair_of_series(
        &self,
        kernel: &str,
        series: &str,
        flavour: Flavour,
        driver: bool,
    ) -> Result<Pair, KernelError> {
        // Read first: it takes no time, and a bad one should not cost a download.
        let series = self.series(series)?;
        let source = self.source_for_series(kernel)?;
        let trees = patch::pair(&self.cache, &self.store, &source.spec, &source.tree, &series)?;
        for offset in &trees.offsets {
            if self.progress.verbose() {
                self.progress.line(offset);
            }
        }
        if !series.options.is_empty() {
            let options: Vec<String> =
                series.options.iter().map(|option| format!("{}={}", option.name, option.value)).collect();
            self.progress
                .line(&format!("both kernels have what the series asks for: {}", options.join(", ")));
        }
        let mut with = patched(&source, flavour, trees.patched, &series);
        let mut without = Job { tree: trees.base, series: Vec::new(), ..with.clone() };
        if driver {
            self.add_driver(&mut without)?;
            self.add_driver(&mut with)?;
        }
        Ok(pair_of(self.build(&without)?, self.build(&with)?, trees.present))
    }

    fn series(&self, name: &str) -> Result<Series, KernelError> {
        series::read(name, &self.folder.join("patches"))
            .map_err(|source| KernelError::Series { name: name.to_owned(), source })
    }

    fn source_for_series(&self, spec: &str) -> Result<Source, KernelError> {
        if let Some(Spec::Vmlinux(_)) = spec::parse(spec)? {
            return Err(KernelError::Request(format!(
                "failed to put a series on {spec}: it is built already; use --base and --patched for two built kernels"
            )));
        }
        self.source(spec, Look::Cached)
    }

    fn source(&self, spec: &str, look: Look) -> Result<Source, KernelError> {
        let fetch = |spec: &Spec| source::fetch(&self.cache, &self.store, self.progress, spec, look);
        if let Some(spec) = spec::parse(spec)? {
            return fetch(&spec);
        }
        let specs = self.catalog.specs(spec)?;
        if look == Look::Cached
            && let Some(here) = specs.iter().find(|spec| source::is_here(&self.cache, spec))
        {
            return fetch(here);
        }
        let mut first_error = None;
        for (at, spec) in specs.iter().enumerate() {
            match fetch(spec) {
                Err(error @ (KernelError::NoSuchVersion { .. } | KernelError::Apt { .. })) => {
                    // Another version may be what the user gets then, so it must not go unsaid.
                    if let Some(next) = specs.get(at + 1) {
                        self.progress.line(&format!("{error}\n  looking for {next} instead"));
                    }
                    first_error.get_or_insert(error);
                }
                other => return other,
            }
        }
        Err(first_error.unwrap_or_else(|| KernelError::Request(format!("failed to find {spec}"))))
    }

    fn published(&self, spec: &str, flavour: Flavour, driver: bool) -> Result<Published, KernelError> {
        if let Some(Spec::Vmlinux(path)) = spec::parse(spec)? {
            // Whether it has the driver is seen when the driver is needed.
            return prebuilt(spec, &path, flavour);
        }
        let source = self.source(spec, Look::Cached)?;
        let mut job = Job::plain(&source, flavour);
        if driver {
            self.add_driver(&mut job)?;
        }
        self.build(&job)
    }

    fn add_driver(&self, job: &mut Job) -> Result<(), KernelError> {
        job.tree = driver::add(&self.cache, &self.store, &job.spec, &job.tree, &driver::folder())?;
        job.driver = true;
        Ok(())
    }

    fn build(&self, job: &Job) -> Result<Published, KernelError> {
        let toolchain = match self.toolchain.get() {
            Some(toolchain) => toolchain,
            None => {
                let toolchain = build::toolchain(self.progress)?;
                self.toolchain.get_or_init(|| toolchain)
            }
        };
        let builder = Builder {
            cache: &self.cache,
            store: &self.store,
            progress: self.progress,
            config_dir: &self.folder.join("config"),
            toolchain,
            check_tools: self.check_tools,
        };
        build::build(&builder, job)
    }
}

/// Removes what is old or too much from the user's cache. No other run may use it meanwhile.
///
/// # Errors
/// Where another run uses the cache for longer than we wait, or something cannot be removed.
pub(crate) fn prune(progress: &Progress, rules: &Rules) -> Result<Pruned, KernelError> {
    prune::prune(progress, &Cache::open(&Cache::default_root()?)?, rules)
}

fn titles(series: &Series) -> Vec<String> {
    series.patches.iter().map(|patch| patch.title.clone()).collect()
}

fn patched(source: &Source, flavour: Flavour, tree: String, series: &Series) -> Job {
    let options = series.options.clone();
    Job { tree, series: titles(series), options, ..Job::plain(source, flavour) }
}

fn pair_of(base: Published, patched: Published, present: Vec<String>) -> Pair {
    let no_change = base.image == patched.image;
    let base = Built { reversed: present.clone(), ..base.built };
    Pair { base, patched: patched.built, no_change, present }
}

/// A kernel that somebody else built. Its flavour is what the user says.
fn prebuilt(spec: &str, path: &Path, flavour: Flavour) -> Result<Published, KernelError> {
    let image = std::fs::read(path).map_err(error::io_error("read", path))?;
    let wrong = |why: &str| KernelError::Source { spec: spec.to_owned(), why: why.to_owned() };
    if !image.starts_with(b"\x7fELF") {
        return Err(wrong(
            "it is no ELF file; a bzImage is not a vmlinux (scripts/extract-vmlinux makes one of it)",
        ));
    }
    let hash = blake3::hash(&image).to_hex().to_string();
    let release = release_in(&image).ok_or_else(|| wrong("it holds no \"Linux version\" line"))?;
    let system_map = path.with_file_name("System.map");
    let built = Built {
        spec: spec.to_owned(),
        release,
        flavour,
        build_id: hash[..32].to_owned(),
        series: Vec::new(),
        reversed: Vec::new(),
        vmlinux: path.to_owned(),
        system_map: system_map.exists().then_some(system_map),
        build_s: 0.0,
        fresh: false,
    };
    Ok(Published { built, image: hash })
}

/// The release in the banner of a kernel image.
fn release_in(image: &[u8]) -> Option<String> {
    const BANNER: &[u8] = b"Linux version ";
    let mut from = 0;
    // A format string with the same start may come first.
    while let Some(at) = image[from..].windows(BANNER.len()).position(|window| window == BANNER) {
        from += at + BANNER.len();
        let word: Vec<u8> =
            image[from..].iter().take(80).take_while(|byte| byte.is_ascii_graphic()).copied().collect();
        if word.first().is_some_and(u8::is_ascii_digit) {
            return String::from_utf8(word).ok();
        }
    }
    None
}

/// How many kernels this machine builds side by side.
#[must_use]
pub(crate) fn builds_side_by_side() -> usize {
    cache::machine().0
}
