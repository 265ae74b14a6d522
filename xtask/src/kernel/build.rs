//! From a tree to a published kernel.
//!
//! A work tree per version line and flavour is kept, so that make only compiles what differs from the kernel built
//! there before. What is published is found again by its key alone.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use xshell::{Shell, cmd};

use super::cache::{self, Cache};
use super::config;
use super::error::{KernelError, io_error};
use super::run;
use super::source::Source;
use super::store::Store;
use super::{Built, Flavour};
use crate::progress::{Progress, Task};
use crate::tools::{self, Work};

/// To be changed whenever the way of building changes what comes out.
const RECIPE: &str = "build 1";
/// A slow machine with one core, and no ccache.
const LIMIT: Duration = Duration::from_secs(3 * 60 * 60);
/// Lines such as `CC mm/page_alloc.o` in a whole build, where none has been counted yet.
const USUAL_STEPS: u64 = 1350;

/// What to build.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// For messages and reports.
    pub(crate) spec: String,
    pub(crate) tree: String,
    pub(crate) line: config::Line,
    pub(crate) flavour: Flavour,
    /// Titles of the patches on top.
    pub(crate) series: Vec<String>,
    /// Options beyond those of the flavour.
    pub(crate) options: Vec<config::Wanted>,
    /// Whether the tree has our driver in it.
    pub(crate) driver: bool,
}

impl Job {
    pub(crate) fn plain(source: &Source, flavour: Flavour) -> Self {
        Self {
            spec: source.spec.clone(),
            tree: source.tree.clone(),
            line: source.line,
            flavour,
            series: Vec::new(),
            options: Vec::new(),
            driver: false,
        }
    }

    /// The work tree. Options get one of their own: an option can be in every file, and then each change costs a whole build.
    fn work_tree(&self) -> String {
        let (major, minor) = self.line;
        let name = format!("{major}.{minor}-{}", self.flavour);
        let options = self.options.iter().filter(|option| option.wanted_on(self.line));
        let options: Vec<String> =
            options.map(|option| format!("{}={}", option.name, option.value)).collect();
        if options.is_empty() {
            return name;
        }
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        format!("{name}-{}", &cache::key(&options)[..8])
    }

    fn name(&self) -> String {
        let patches = match self.series.len() {
            0 => String::new(),
            1 => " + 1 patch".to_owned(),
            count => format!(" + {count} patches"),
        };
        let driver = if self.driver { " with the driver" } else { "" };
        format!("{}{patches} {}{driver}", self.spec, self.flavour)
    }
}

/// What is written beside a published kernel.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) spec: String,
    pub(crate) series: Vec<String>,
    pub(crate) release: String,
    pub(crate) flavour: Flavour,
    tree: String,
    toolchain: String,
    /// Hash of what runs: of the stripped image without its build ID.
    pub(crate) image: String,
    pub(crate) build_s: f64,
    pub(crate) built_at_s: u64,
    pub(crate) bytes: u64,
}

/// What was last built in a work tree. Absent while something is going on there, or after sudden death.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct State {
    tree: String,
    /// Steps that a whole build took here.
    steps: u64,
}

/// A published kernel and the hash of its image.
#[derive(Clone, Debug)]
pub(crate) struct Published {
    pub(crate) built: Built,
    pub(crate) image: String,
}

/// What building needs from its surroundings.
#[derive(Debug)]
pub(crate) struct Builder<'a> {
    pub(crate) cache: &'a Cache,
    pub(crate) store: &'a Store<'a>,
    pub(crate) progress: &'a Progress,
    pub(crate) config_dir: &'a Path,
    pub(crate) toolchain: &'a str,
    pub(crate) check_tools: bool,
}

/// Finds or builds a kernel.
pub(crate) fn build(builder: &Builder<'_>, job: &Job) -> Result<Published, KernelError> {
    let request = config::request(builder.config_dir, job.flavour, job.line, &job.options)?;
    let flavour = job.flavour.to_string();
    let id = cache::key(&[RECIPE, &job.tree, &config::text(&request), builder.toolchain, &flavour]);
    if let Some(published) = published(builder.cache, &id, job, false) {
        return Ok(published);
    }
    if builder.check_tools {
        tools::require(&[Work::Source, Work::Build])?;
    }
    let name = job.work_tree();
    let _lock =
        builder.cache.lock(builder.progress, &format!("work-{name}"), &format!("work tree {name}"))?;
    // Another run may have built it while we waited.
    if let Some(published) = published(builder.cache, &id, job, false) {
        return Ok(published);
    }
    let slot = builder.cache.slot(builder.progress)?;
    let work = WorkTree { folder: builder.cache.path("work", &name) };
    let task = builder.progress.task(&job.name());
    let started = Instant::now();
    let mut make = Make { builder, job, work: &work, jobs: slot.jobs, id: &id, task: &task };
    if !make.all(&request)? {
        builder.progress.line(&format!("{}: starting over in a clean work tree", job.name()));
        work.wipe()?;
        make.all(&request)?;
    }
    task.say("publishing");
    let built = publish(&mut make, &id, started)?;
    task.done(&format!("built {}", built.built.release));
    Ok(built)
}

/// Looks a build up by its ID.
fn published(cache: &Cache, id: &str, job: &Job, fresh: bool) -> Option<Published> {
    let folder = cache.path("builds", id);
    let path = folder.join("build.json");
    let record: Record = cache::read_record(&path)?;
    let vmlinux = folder.join("vmlinux");
    if fs::metadata(&vmlinux).ok()?.len() != record.bytes {
        return None;
    }
    cache::touch(&path);
    let system_map = folder.join("System.map");
    let built = Built {
        spec: job.spec.clone(),
        release: record.release,
        flavour: job.flavour,
        build_id: id.to_owned(),
        series: job.series.clone(),
        reversed: Vec::new(),
        vmlinux,
        system_map: system_map.exists().then_some(system_map),
        build_s: record.build_s,
        fresh,
    };
    Some(Published { built, image: record.image })
}

struct WorkTree {
    folder: PathBuf,
}

impl WorkTree {
    fn source(&self) -> PathBuf {
        self.folder.join("src")
    }

    fn index(&self) -> PathBuf {
        self.folder.join("index")
    }

    fn state_path(&self) -> PathBuf {
        self.folder.join("state.json")
    }

    fn wipe(&self) -> Result<(), KernelError> {
        match fs::remove_dir_all(&self.folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(io_error("remove", &self.folder)(error))
            }
            _ => Ok(()),
        }
    }
}

struct Make<'a> {
    builder: &'a Builder<'a>,
    job: &'a Job,
    work: &'a WorkTree,
    jobs: usize,
    id: &'a str,
    task: &'a Task<'a>,
}

impl Make<'_> {
    /// Lays out, configures and compiles. False if that failed in a way that a clean work tree may mend.
    fn all(&mut self, request: &config::Request) -> Result<bool, KernelError> {
        let source = self.work.source();
        let state: Option<State> = cache::read_record(&self.work.state_path());
        if state.is_none() {
            // Whatever is there was cut off at an unknown point: no time stamp in it means anything.
            self.work.wipe()?;
        }
        fs::create_dir_all(&source).map_err(io_error("create", &source))?;
        let _ = fs::remove_file(self.work.state_path());
        self.task.say("laying out the source");
        self.builder.store.check_out(&self.job.tree, &source, &self.work.index())?;
        self.task.say("configuring");
        self.configure(request)?;
        let before = state.clone().unwrap_or_default();
        let outcome = self.compile(before.steps, state.is_some());
        // Compilers and make remove their half-made files when they end by themselves or are told to.
        let settled = matches!(
            outcome,
            Ok(_)
                | Err(KernelError::Compile { .. } | KernelError::DiskFull { .. } | KernelError::Interrupted)
        );
        if settled {
            let steps = match &outcome {
                Ok(steps) if state.is_none() => *steps,
                _ => before.steps,
            };
            let state = State { tree: self.job.tree.clone(), steps };
            // A full disk may keep it from being written; the next build is then a clean one.
            let _ = cache::write_record(&self.work.state_path(), &state);
        }
        match outcome {
            Ok(_) => Ok(true),
            // A compiler's message stands on its own; anything else may come from what an earlier build left.
            Err(KernelError::Compile { first_error, .. })
                if state.is_some()
                    && !first_error.contains(": error:")
                    && !first_error.contains("fatal error:") =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn configure(&self, request: &config::Request) -> Result<(), KernelError> {
        let wanted = self.work.folder.join("wanted.config");
        fs::write(&wanted, config::text(request)).map_err(io_error("write", &wanted))?;
        let path = self.work.source().join(".config");
        let before = fs::read(&path).ok();
        let made = self.work.folder.join("made.config");
        let _ = fs::remove_file(&made);
        let mut command = self.make(&["-s", "allnoconfig"])?;
        command.env("KCONFIG_ALLCONFIG", &wanted).env("KCONFIG_CONFIG", &made);
        run::read(self.builder.progress, "configure the kernel", command)?;
        let text = fs::read_to_string(&made).map_err(io_error("read", &made))?;
        let dropped = config::dropped(request, &text);
        if !dropped.is_empty() {
            return Err(KernelError::ConfigDropped { spec: self.job.spec.clone(), dropped });
        }
        // An untouched .config keeps make from looking at every file again.
        if before.as_deref() != Some(text.as_bytes()) {
            cache::write_aside(&path, text.as_bytes())?;
        }
        Ok(())
    }

    fn compile(&self, usual_steps: u64, incremental: bool) -> Result<u64, KernelError> {
        let log = self.builder.cache.path("logs", &format!("build-{}.log", self.id));
        let command = self.make(&[&format!("-j{}", self.jobs), "vmlinux"])?;
        let repeat = host::process::shell_line(&command);
        let usual_steps = if usual_steps == 0 { USUAL_STEPS } else { usual_steps };
        let (mut steps, mut errors) = (0, FirstError::default());
        let task = self.task;
        task.say(if incremental { "compiling what differs" } else { "compiling" });
        let status = run::logged(self.builder.progress, "build the kernel", command, LIMIT, &log, |line| {
            errors.see(line);
            if is_step(line) {
                steps += 1;
                if !incremental {
                    task.step(steps, usual_steps);
                }
            }
        })?;
        if status.success() {
            return Ok(steps);
        }
        if errors.disk_full {
            return Err(KernelError::DiskFull { what: format!("build in {}", self.work.folder.display()) });
        }
        let spec = self.job.name();
        Err(KernelError::Compile { spec, first_error: errors.text(), log, repeat })
    }

    /// A make command whose result depends on nothing but its arguments and the tree.
    fn make(&self, args: &[&str]) -> Result<Command, KernelError> {
        let source = self.work.source();
        let shell = Shell::new().map_err(|error| KernelError::Request(error.to_string()))?;
        shell.change_dir(&source);
        let kcflags = format!("-fdebug-prefix-map={}=.", source.display());
        let compiler = if tools::find("ccache").is_some() { "ccache gcc" } else { "gcc" };
        let base = source.clone();
        let ccache = self.builder.cache.root().join("ccache");
        let path = std::env::var_os("PATH").unwrap_or_default();
        let temporary = std::env::temp_dir();
        let command = cmd!(shell, "make ARCH=x86_64 LOCALVERSION= KCFLAGS={kcflags} CC={compiler} {args...}")
            // Variables of the user's shell (CROSS_COMPILE, KBUILD_OUTPUT, MAKEFLAGS, …) would change what is built.
            .env_clear()
            .env("PATH", path)
            .env("TMPDIR", temporary)
            .env("LC_ALL", "C")
            .env("KBUILD_BUILD_TIMESTAMP", "2026-01-01T00:00:00Z")
            .env("KBUILD_BUILD_USER", "buddydiff")
            .env("KBUILD_BUILD_HOST", "buddydiff")
            .env("KBUILD_BUILD_VERSION", "1")
            .env("CCACHE_DIR", ccache)
            .env("CCACHE_BASEDIR", base)
            .env("CCACHE_NOHASHDIR", "1")
            .env("CCACHE_COMPILERCHECK", "content")
            .env("CCACHE_MAXSIZE", "4G");
        let mut command = Command::from(command);
        // Where there is no home, make's children still look for one.
        command.env("HOME", self.builder.cache.root());
        Ok(command)
    }
}

fn is_step(line: &str) -> bool {
    let Some(rest) = line.strip_prefix("  ") else { return false };
    rest.starts_with(|c: char| c.is_ascii_uppercase())
}

/// Collects the first error of a build with the lines that belong to it.
#[derive(Default)]
struct FirstError {
    lines: Vec<String>,
    context: Vec<String>,
    disk_full: bool,
    from_compiler: bool,
}

impl FirstError {
    const AFTER: usize = 6;

    fn see(&mut self, line: &str) {
        self.disk_full |= run::says_disk_full(line);
        // A tool that is not there stops a build as surely as a syntax error, and says as much.
        let tool = line.contains("sh: ") && line.ends_with(": not found")
            || line.contains("/env: ") && line.ends_with(": No such file or directory");
        let compiler = tool || line.contains(": error:") || line.contains(": fatal error:");
        let linker = line.contains("undefined reference to") || line.starts_with("ERROR:");
        let maker = line.starts_with("make") && line.contains("***");
        if self.lines.is_empty() && (compiler || linker || maker) || compiler && !self.from_compiler {
            // What the compiler says beats what make says of it.
            self.from_compiler = compiler;
            self.lines = std::mem::take(&mut self.context);
            self.lines.push(line.to_owned());
        } else if !self.lines.is_empty() && self.lines.len() <= Self::AFTER && !is_step(line) {
            self.lines.push(line.to_owned());
        } else if line.contains("In function") || line.contains("included from") {
            self.context = vec![line.to_owned()];
        }
    }

    fn text(&self) -> String {
        if self.lines.is_empty() {
            return "  | make failed without a message".to_owned();
        }
        self.lines.iter().map(|line| format!("  | {line}")).collect::<Vec<_>>().join("\n")
    }
}

/// Copies what was built aside, and renames it into place.
fn publish(make: &mut Make<'_>, id: &str, started: Instant) -> Result<Published, KernelError> {
    let Make { builder, job, .. } = *make;
    let source = make.work.source();
    let tmp = builder.cache.root().join("tmp");
    let aside = tempfile::tempdir_in(&tmp).map_err(io_error("write in", &tmp))?;
    let release = run::read(builder.progress, "ask for the release", make.make(&["-s", "kernelrelease"])?)?;
    let vmlinux = aside.path().join("vmlinux");
    let mut strip = Command::new("strip");
    strip.args(["--strip-debug", "-o"]).arg(&vmlinux).arg(source.join("vmlinux"));
    run::read(builder.progress, "strip the kernel", strip)?;
    copy(&source.join(".config"), &aside.path().join("config"))?;
    let map = source.join("System.map");
    if map.exists() {
        copy(&map, &aside.path().join("System.map"))?;
    }
    let mut image = fs::read(&vmlinux).map_err(io_error("read", &vmlinux))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let bytes = image.len() as u64;
    blank_build_id(&mut image);
    let record = Record {
        spec: job.spec.clone(),
        series: job.series.clone(),
        release,
        flavour: job.flavour,
        tree: job.tree.clone(),
        toolchain: builder.toolchain.to_owned(),
        image: blake3::hash(&image).to_hex().to_string(),
        build_s: started.elapsed().as_secs_f64(),
        built_at_s: now.as_secs(),
        bytes,
    };
    cache::write_record(&aside.path().join("build.json"), &record)?;
    let place = builder.cache.path("builds", id);
    // A build that lost its files, by an unlucky prune or a hand, is in the way.
    if place.exists() {
        fs::remove_dir_all(&place).map_err(io_error("remove", &place))?;
    }
    fs::rename(aside.path(), &place).map_err(io_error("publish", &place))?;
    // It has moved: there is nothing left to clean up.
    let _ = aside.keep();
    published(builder.cache, id, job, true).ok_or_else(|| KernelError::Io {
        what: "read back",
        path: place,
        source: std::io::ErrorKind::InvalidData.into(),
    })
}

fn copy(from: &Path, to: &Path) -> Result<(), KernelError> {
    fs::copy(from, to).map(drop).map_err(io_error("copy", from))
}

/// The linker's build ID is a hash that covers the debug information too, which differs with every line number.
fn blank_build_id(image: &mut [u8]) {
    // An ELF note: name size 4, 20 bytes of description, type NT_GNU_BUILD_ID, name "GNU".
    const NOTE: &[u8] = b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0";
    let mut from = 0;
    while let Some(at) = image[from..].windows(NOTE.len()).position(|window| window == NOTE) {
        let start = from + at + NOTE.len();
        let end = (start + 20).min(image.len());
        image[start..end].fill(0);
        from = end;
    }
}

/// Versions of what makes the image; part of every build's key.
pub(crate) fn toolchain(progress: &Progress) -> Result<String, KernelError> {
    let mut versions = Vec::new();
    for tool in ["gcc", "ld", "pahole"] {
        // What is missing is reported when it is needed; a kernel that is built already needs none of them.
        let version = if tools::find(tool).is_some() {
            let mut command = Command::new(tool);
            command.arg("--version").env("LC_ALL", "C");
            run::read(progress, "ask for a version", command)?
        } else {
            String::new()
        };
        versions.push(format!("{tool} {}", version.lines().next().unwrap_or("none")));
    }
    Ok(versions.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_error_of_many_is_shown_with_its_lines() {
        let mut errors = FirstError::default();
        let log = "  CC      mm/page_alloc.o\nmm/page_alloc.c: In function 'f':\n\
                   mm/page_alloc.c:7:3: error: 'x' undeclared\n    7 |   x = 1;\n      |   ^\n\
                   mm/page_alloc.c:9:3: error: 'y' undeclared\nmake[3]: *** [mm/page_alloc.o] Error 1\n";
        log.lines().for_each(|line| errors.see(line));
        let text = errors.text();
        assert!(
            text.starts_with("  | mm/page_alloc.c: In function 'f':\n  | mm/page_alloc.c:7:3: error"),
            "{text}"
        );
        assert!(text.contains("x = 1;"));
    }

    #[test]
    fn a_compilers_error_beats_makes_own() {
        let mut errors = FirstError::default();
        for line in ["make[2]: *** waiting for unfinished jobs", "a.c:1:1: error: real"] {
            errors.see(line);
        }
        assert!(errors.text().contains("real"));
    }

    #[test]
    fn a_tool_that_is_not_there_beats_makes_own_too() {
        for missing in ["/usr/bin/env: 'python3': No such file or directory", "/bin/sh: 1: bc: not found"] {
            let mut errors = FirstError::default();
            for line in ["  GEN     x.h", missing, "make[3]: *** [Makefile:160: x.h] Error 127"] {
                errors.see(line);
            }
            assert!(errors.text().starts_with(&format!("  | {missing}")), "{}", errors.text());
        }
    }

    #[test]
    fn the_build_id_does_not_count() {
        let with_id = |byte: u8| {
            let mut image = b"code\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0".to_vec();
            image.extend([byte; 20]);
            image.extend(b"more");
            blank_build_id(&mut image);
            image
        };
        assert_eq!(with_id(1), with_id(2));
        assert!(with_id(1).ends_with(b"more"));
    }
}
