//! `cargo xtask kernel …`: sources and builds, on their own.

use std::io::Write;
use std::sync::Mutex;
use std::time::Duration;

use crate::kernel::{self, Flavour, KernelError, Kernels, Kind, Rules};
use crate::progress::{Progress, bytes, seconds};
use crate::tools::{self, Work};

/// What to do with kernels.
#[derive(Clone, Debug, clap::Subcommand)]
pub(crate) enum KernelVerb {
    /// Show the catalogue, what is fetched and what is built.
    List,
    /// Fetch sources, looking for newer package versions.
    Fetch {
        /// Kernel specs; the whole catalogue if there is none.
        specs: Vec<String>,
        /// Install missing tools through apt.
        #[arg(long)]
        install_deps: bool,
    },
    /// Build kernels.
    Build {
        /// Kernel specs.
        #[arg(required = true)]
        specs: Vec<String>,
        /// Patches on top; builds both the kernel without them and with them.
        #[arg(long, value_name = "NAME|FILE|DIR")]
        series: Option<String>,
        /// Configurations to build.
        #[arg(long, value_enum, default_values = ["smp"])]
        flavour: Vec<Flavour>,
        /// Put the driver into them that runs batches of allocator operations.
        #[arg(long)]
        driver: bool,
        /// Install missing tools through apt.
        #[arg(long)]
        install_deps: bool,
    },
    /// Remove what was not used for long, or the oldest until the rest fits.
    Prune {
        /// Remove what was not used for this many days.
        #[arg(long, value_name = "DAYS")]
        older_than: Option<u64>,
        /// Remove what was used longest ago until the cache takes no more than this.
        #[arg(long, value_name = "GIB")]
        max_size: Option<u64>,
    },
}

/// Runs the verb.
///
/// # Errors
/// See [`KernelError`].
pub(crate) fn run(progress: &Progress, verb: &KernelVerb) -> Result<(), KernelError> {
    match verb {
        KernelVerb::List => list(progress),
        KernelVerb::Fetch { specs, install_deps } => {
            if *install_deps {
                tools::install(progress, &[Work::Source, Work::Packages])?;
            }
            fetch(progress, specs)
        }
        KernelVerb::Build { specs, series, flavour, driver, install_deps } => {
            if *install_deps {
                tools::install(progress, &[Work::Source, Work::Packages, Work::Build])?;
            }
            build(progress, specs, series.as_deref(), flavour, *driver)
        }
        KernelVerb::Prune { older_than, max_size } => prune(progress, *older_than, *max_size),
    }
}

fn list(progress: &Progress) -> Result<(), KernelError> {
    let kernels = Kernels::open(progress)?;
    let listed = kernels.list()?;
    let mut text = String::from("catalogue:\n");
    for (name, here, why) in &listed.catalog {
        let state = if *here { "fetched" } else { "" };
        text.push_str(&format!("  {name:6} {state:8} {why}\n"));
    }
    text.push_str(&format!("series: {}\n", kernels.series_names().join(", ")));
    text.push_str(&format!("sources ({}):\n", bytes(listed.store_bytes)));
    for (spec, age) in &listed.sources {
        text.push_str(&format!("  {spec}  {} ago\n", age_text(*age)));
    }
    text.push_str("builds:\n");
    for build in &listed.builds {
        let patches =
            if build.patches == 0 { String::new() } else { format!(" + {} patches", build.patches) };
        text.push_str(&format!(
            "  {}  {:14} {:>9}  {} ago, took {}  {}{patches}\n",
            &build.build_id[..12.min(build.build_id.len())],
            build.release,
            bytes(build.bytes),
            age_text(build.age),
            seconds(Duration::from_secs_f64(build.build_s.max(0.0))),
            build.spec,
        ));
    }
    text.push_str("work trees:\n");
    for (name, size) in &listed.work {
        text.push_str(&format!("  {name:10} {:>9}\n", bytes(*size)));
    }
    print(&text);
    Ok(())
}

fn fetch(progress: &Progress, specs: &[String]) -> Result<(), KernelError> {
    let kernels = Kernels::open(progress)?;
    let all: Vec<String>;
    let specs = if specs.is_empty() {
        all = kernels.list()?.catalog.into_iter().map(|(name, ..)| name).collect();
        &all
    } else {
        specs
    };
    for spec in specs {
        print(&format!("{spec} {}\n", kernels.fetch(spec)?));
    }
    Ok(())
}

/// One kernel to build, as a line of the command has it.
type Order<'a> = (&'a str, Flavour);

fn build(
    progress: &Progress,
    specs: &[String],
    series: Option<&str>,
    flavours: &[Flavour],
    driver: bool,
) -> Result<(), KernelError> {
    let kernels = Kernels::open(progress)?;
    let orders: Vec<Order<'_>> =
        flavours.iter().flat_map(|flavour| specs.iter().map(|spec| (spec.as_str(), *flavour))).collect();
    let queue = Mutex::new(orders.into_iter());
    let failed: Mutex<Vec<KernelError>> = Mutex::new(Vec::new());
    // Builds themselves wait for one of the machine's places; more threads than places would only wait.
    let side_by_side = kernel::builds_side_by_side();
    std::thread::scope(|scope| {
        for _ in 0..side_by_side {
            scope.spawn(|| {
                while let Some((spec, flavour)) = lock(&queue).next() {
                    if let Err(error) = build_one(&kernels, spec, series, flavour, driver) {
                        let stop = error.kind() == Kind::Interrupted;
                        lock(&failed).push(error);
                        if stop {
                            return;
                        }
                    }
                }
            });
        }
    });
    let mut failed = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    // The others are told at once; the last is the command's own.
    let last = failed.pop();
    for error in &failed {
        progress.line(&error.to_string());
    }
    last.map_or(Ok(()), Err)
}

fn build_one(
    kernels: &Kernels<'_>,
    spec: &str,
    series: Option<&str>,
    flavour: Flavour,
    driver: bool,
) -> Result<(), KernelError> {
    let request = kernel::PairRequest {
        kernel: Some(spec.to_owned()),
        series: series.map(str::to_owned),
        flavour,
        driver,
        ..kernel::PairRequest::default()
    };
    let pair = kernels.pair(&request)?;
    let show = |role: &str, built: &kernel::Built| {
        print(&format!("{spec}{role} {} {} {}\n", built.release, built.flavour, built.vmlinux.display()));
    };
    if series.is_none() {
        show("", &pair.base);
        return Ok(());
    }
    show(" base", &pair.base);
    show(" patched", &pair.patched);
    if pair.no_change {
        print(&format!("{spec}: no change, the two images are equal\n"));
    }
    for title in &pair.present {
        print(&format!("{spec}: held already: {title}\n"));
    }
    Ok(())
}

fn prune(progress: &Progress, older_than: Option<u64>, max_size: Option<u64>) -> Result<(), KernelError> {
    if older_than.is_none() && max_size.is_none() {
        return Err(KernelError::Request(
            "failed to see what to prune: give --older-than DAYS, --max-size GIB, or both".to_owned(),
        ));
    }
    let rules = Rules {
        older_than: older_than.map(|days| Duration::from_secs(days.saturating_mul(24 * 60 * 60))),
        max_bytes: max_size.map(|gib| gib.saturating_mul(1 << 30)),
    };
    let pruned = kernel::prune(progress, &rules)?;
    for name in &pruned.removed {
        print(&format!("removed {name}\n"));
    }
    print(&format!("the cache takes {}\n", bytes(pruned.bytes_left)));
    Ok(())
}

fn age_text(age: Duration) -> String {
    match age.as_secs() {
        secs @ 0..=7199 => format!("{} min", secs / 60),
        secs @ 7200..=172_799 => format!("{} h", secs / 3600),
        secs => format!("{} days", secs / 86_400),
    }
}

fn print(text: &str) {
    // A reader that went away (`| head`) is no failure of ours.
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
