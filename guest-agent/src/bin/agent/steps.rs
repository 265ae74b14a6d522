//! What each step of a script does, by the means that user space has.

use std::collections::HashMap;
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{ErrorKind, PipeReader, PipeWriter, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use guest_agent::script::{
    Anonymous, Atomic, Caches, Files, Free, Hugetlb, PAGE_BYTES, PMD_BYTES, PageCache, PageSize, PageTables,
    Part, Pipes, Processes, Step, WaitQuiet, Write,
};
use memmap2::{Advice, MmapMut, MmapOptions, UncheckedAdvice};

use crate::capture::{STAT_REFRESH, fold_counters, open_if_there};
use crate::{Context, Failure};

const THP: &str = "/sys/kernel/mm/transparent_hugepage";
/// Kept free of what a step may take: without it the kernel may kill PID 1, which ends the run as a panic.
const RESERVE_BYTES: u64 = 8 << 20;

/// What the steps so far have taken, by name.
pub(crate) struct Holdings {
    held: HashMap<String, Holding>,
    seed: u64,
}

/// Dropping a holding gives it back.
enum Holding {
    Memory(Memory),
    /// Held for its page tables only.
    PageTables {
        _memory: MmapMut,
    },
    Files {
        directory: PathBuf,
    },
    Pipes {
        _pipes: Vec<(PipeReader, PipeWriter)>,
    },
    Processes(Vec<Child>),
}

/// Anonymous memory whose used part starts at a multiple of its page size.
struct Memory {
    map: MmapMut,
    start: usize,
    len: usize,
}

impl Holdings {
    pub(crate) fn new(seed: u64) -> Self {
        Self { held: HashMap::with_capacity(64), seed }
    }

    pub(crate) fn run(&mut self, step: &Step) -> Result<(), Failure> {
        match step {
            Step::Anonymous(step) => {
                let memory = take_memory(step, self.seed)?;
                self.hold(step.name.as_str(), Holding::Memory(memory));
            }
            Step::PageTables(step) => {
                let memory = take_page_tables(step)?;
                self.hold(step.name.as_str(), Holding::PageTables { _memory: memory });
            }
            Step::Files(step) => {
                let directory = make_files(step)?;
                self.hold(step.name.as_str(), Holding::Files { directory });
            }
            Step::Pipes(step) => {
                let pipes = fill_pipes(step)?;
                self.hold(step.name.as_str(), Holding::Pipes { _pipes: pipes });
            }
            Step::Atomic(step) => {
                let pipes = take_slabs(step)?;
                self.hold(step.name.as_str(), Holding::Pipes { _pipes: pipes });
            }
            Step::Processes(step) => {
                let children = run_processes(step)?;
                if step.stay {
                    self.hold(step.name.as_str(), Holding::Processes(children));
                }
            }
            Step::PageCache(step) => read_page_cache(step)?,
            Step::Hugetlb(step) => set_pool(step)?,
            Step::Free(step) => self.free(step)?,
            Step::Write(step) => write_control(step)?,
            Step::Compact(_) => fs::write("/proc/sys/vm/compact_memory", "1").context("compact")?,
            Step::DropCaches(caches) => drop_caches(*caches)?,
            Step::WaitQuiet(step) => wait_quiet(step)?,
            Step::Batches(_) | Step::Checkpoint(_) | Step::Repeat(_) => {
                return Err(format!("a plan has no such step: {step}"));
            }
        }
        Ok(())
    }

    fn hold(&mut self, name: &str, holding: Holding) {
        self.held.insert(name.to_owned(), holding);
    }

    fn free(&mut self, step: &Free) -> Result<(), Failure> {
        let name = step.name.as_str();
        if let (Part::OddPages | Part::LowerHalves | Part::OddBlocks, Some(Holding::Memory(memory))) =
            (step.part, self.held.get_mut(name))
        {
            return memory.free_part(step.part);
        }
        match self.held.remove(name) {
            None => Err(format!("nothing is held as {name}")),
            Some(Holding::Files { directory }) => {
                fs::remove_dir_all(&directory).context(&format!("remove {}", directory.display()))
            }
            Some(Holding::Processes(children)) => end_processes(children),
            Some(_) => Ok(()),
        }
    }
}

/// Refuses what the guest has no memory for, so that running out is the script's failure and not a kernel's.
fn need(bytes: u64) -> Result<(), Failure> {
    let meminfo = fs::read_to_string("/proc/meminfo").context("read /proc/meminfo")?;
    let available_kib: u64 = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().strip_suffix(" kB"))
        .and_then(|number| number.trim().parse().ok())
        .ok_or("no MemAvailable in /proc/meminfo")?;
    if bytes + RESERVE_BYTES > available_kib << 10 {
        return Err(format!(
            "not enough memory in the guest: the step needs {} MiB, {} MiB are available",
            bytes >> 20,
            available_kib >> 10
        ));
    }
    Ok(())
}

fn take_memory(step: &Anonymous, seed: u64) -> Result<Memory, Failure> {
    need(step.mib.bytes())?;
    set_page_size(step.page)?;
    let (len, page) = (step.mib.bytes() as usize, step.page.bytes() as usize);
    let mut map = MmapMut::map_anon(len + page).context("map anonymous memory")?;
    let advice = if step.page == PageSize::default() { Advice::NoHugePage } else { Advice::HugePage };
    match map.advise(advice) {
        // Without CONFIG_TRANSPARENT_HUGEPAGE there are only small pages anyway.
        Err(error) if step.page == PageSize::default() && error.kind() == ErrorKind::InvalidInput => {}
        other => other.context("choose the page size")?,
    }
    let start = map.as_ptr().align_offset(page);
    for at in (start..start + len).step_by(PAGE_BYTES as usize) {
        // Any value but zero, which some kernels would merge or not store.
        map[at] = seed as u8 | 1;
    }
    if step.lock {
        map.lock().context("lock memory")?;
    }
    Ok(Memory { map, start, len })
}

/// Makes faults in memory with `MADV_HUGEPAGE` use pages of this size and no other.
fn set_page_size(size: PageSize) -> Result<(), Failure> {
    if size == PageSize::default() {
        return Ok(());
    }
    fs::write(format!("{THP}/enabled"), "madvise").context("allow huge pages")?;
    let own = format!("hugepages-{}kB", size.kib());
    let mut found = false;
    for entry in fs::read_dir(THP).context("list the huge page sizes")? {
        let entry = entry.context("list the huge page sizes")?;
        let name = entry.file_name();
        if !name.to_string_lossy().starts_with("hugepages-") {
            continue;
        }
        let wanted = name.to_string_lossy() == own;
        found |= wanted;
        let enabled = entry.path().join("enabled");
        if enabled.exists() {
            fs::write(&enabled, if wanted { "madvise" } else { "never" }).context("choose the page size")?;
        }
    }
    // Kernels before 6.8 know one size and have no folder for it.
    if found || size.bytes() == PMD_BYTES {
        return Ok(());
    }
    Err(format!("this kernel has no anonymous pages of {} KiB", size.kib()))
}

impl Memory {
    fn free_part(&mut self, part: Part) -> Result<(), Failure> {
        let (stride, len) = match part {
            Part::All => (self.len, self.len),
            Part::OddPages => (2 * PAGE_BYTES as usize, PAGE_BYTES as usize),
            Part::LowerHalves => (PMD_BYTES as usize, PMD_BYTES as usize / 2),
            Part::OddBlocks => (2 * PMD_BYTES as usize, PMD_BYTES as usize),
        };
        for at in (self.start..self.start + self.len).step_by(stride) {
            let len = len.min(self.start + self.len - at);
            // SAFETY: the range lies within the mapping, which is private and anonymous; no reference into it exists
            // while `self` is borrowed mutably, and reading zeros there later is what the caller asked for.
            unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, at, len) }
                .context("free memory")?;
        }
        Ok(())
    }
}

fn take_page_tables(step: &PageTables) -> Result<MmapMut, Failure> {
    need(u64::from(step.count.get()) * PAGE_BYTES)?;
    let len = (step.count.get() as usize + 1) * PMD_BYTES as usize;
    let map = MmapOptions::new().len(len).no_reserve_swap().map_anon().context("map anonymous memory")?;
    match map.advise(Advice::NoHugePage) {
        Err(error) if error.kind() == ErrorKind::InvalidInput => {}
        other => other.context("choose small pages")?,
    }
    let start = map.as_ptr().align_offset(PMD_BYTES as usize);
    for index in 0..step.count.get() as usize {
        black_box(map[start + index * PMD_BYTES as usize]);
    }
    Ok(map)
}

fn make_files(step: &Files) -> Result<PathBuf, Failure> {
    need(u64::from(step.count.get()) * u64::from(step.bytes).next_multiple_of(PAGE_BYTES))?;
    let directory = Path::new("/tmp").join(step.name.as_str());
    fs::create_dir(&directory).context("create a directory")?;
    let content = vec![b'x'; step.bytes as usize];
    let mut current = PathBuf::new();
    for number in 0..step.count.get() {
        if number % step.per_directory.get() == 0 {
            current = directory.join(format!("d{}", number / step.per_directory.get()));
            fs::create_dir(&current).context("create a directory")?;
        }
        fs::write(current.join(format!("f{number}")), &content).context("write a file")?;
    }
    Ok(directory)
}

fn read_page_cache(step: &PageCache) -> Result<(), Failure> {
    need(step.mib.bytes())?;
    const DISK: &str = "/dev/ram0";
    let mut disk = File::open(DISK).context("open /dev/ram0 (CONFIG_BLK_DEV_RAM)")?;
    let mut buffer = vec![0; 64 << 10];
    let mut left = step.mib.bytes();
    while left > 0 {
        let read = disk.read(&mut buffer).context("read /dev/ram0")?;
        if read == 0 {
            return Err(format!("{DISK} ends {} MiB too early (brd.rd_size)", left >> 20));
        }
        left = left.saturating_sub(read as u64);
    }
    Ok(())
}

fn fill_pipes(step: &Pipes) -> Result<Vec<(PipeReader, PipeWriter)>, Failure> {
    need(u64::from(step.count.get()) * step.kib.bytes())?;
    let bytes = step.kib.bytes() as usize;
    lift_limits()?;
    let content = vec![b'x'; PAGE_BYTES as usize];
    let mut pipes = Vec::with_capacity(step.count.get() as usize);
    for _ in 0..step.count.get() {
        let (reader, mut writer) = std::io::pipe().context("make a pipe")?;
        rustix::pipe::fcntl_setpipe_size(&writer, bytes).context("size a pipe")?;
        for _ in 0..bytes / content.len() {
            writer.write_all(&content).context("fill a pipe")?;
        }
        pipes.push((reader, writer));
    }
    Ok(pipes)
}

/// The limits count what one user holds in pipes and files; this one is root in an empty machine.
fn lift_limits() -> Result<(), Failure> {
    fs::write("/proc/sys/fs/pipe-max-size", "1048576").context("raise the size of pipes")?;
    let files = rustix::process::Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, files).context("raise the number of files")
}

/// A path through more than two symbolic links inside each other needs a stack, which its lookup takes from kmalloc-2k and,
/// under RCU, without sleeping (fs/namei.c, nd_alloc_stack()). It is given back at once, so pipes use the objects up: the
/// array of one that holds 32 pages has that size too (fs/pipe.c, pipe_resize_ring()). Whichever lookup finds no object left
/// takes a slab.
fn take_slabs(step: &Atomic) -> Result<Vec<(PipeReader, PipeWriter)>, Failure> {
    const OBJECTS: usize = 16;
    let links = Path::new("/tmp").join(format!("{}-links", step.name));
    let make = || -> std::io::Result<()> {
        fs::create_dir(&links)?;
        for number in 0..4 {
            std::os::unix::fs::symlink(format!("{}/.", number + 1), links.join(number.to_string()))?;
        }
        fs::create_dir(links.join("4"))
    };
    make().context("make symbolic links")?;
    lift_limits()?;
    let path = links.join("0/.");
    let count = step.slabs.get() as usize * OBJECTS;
    let mut pipes = Vec::with_capacity(count);
    for _ in 0..count {
        fs::metadata(&path).context("follow symbolic links")?;
        let (reader, writer) = std::io::pipe().context("make a pipe")?;
        rustix::pipe::fcntl_setpipe_size(&writer, 32 * PAGE_BYTES as usize).context("size a pipe")?;
        pipes.push((reader, writer));
    }
    fs::remove_dir_all(&links).context("remove the symbolic links")?;
    Ok(pipes)
}

/// How a process of ours is told what it is for.
const PROCESS_MIB: &str = "BUDDYDIFF_PROCESS_MIB";

fn run_processes(step: &Processes) -> Result<Vec<Child>, Failure> {
    let together = if step.stay { u64::from(step.count.get()) } else { 1 };
    need(together * (step.mib.bytes() + (1 << 20)))?;
    let mut staying = Vec::new();
    for _ in 0..step.count.get() {
        let mut child = Command::new("/proc/self/exe")
            .env(PROCESS_MIB, (step.mib.bytes() >> 20).to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start a process")?;
        // One byte says that the memory is touched.
        let mut stdout = child.stdout.take().ok_or("a process has no stdout")?;
        stdout.read_exact(&mut [0]).context("wait for a process to touch its memory")?;
        if step.stay {
            staying.push(child);
        } else {
            end_processes(vec![child])?;
        }
    }
    Ok(staying)
}

/// Closing its stdin tells a process to end.
fn end_processes(children: Vec<Child>) -> Result<(), Failure> {
    for mut child in children {
        drop(child.stdin.take());
        let status = child.wait().context("wait for a process")?;
        if !status.success() {
            return Err(format!("a process ended with {status}"));
        }
    }
    Ok(())
}

/// The whole life of a process that [`run_processes`] started.
pub(crate) fn process_main() -> ExitCode {
    let live = || -> Result<(), Failure> {
        let mib =
            std::env::var(PROCESS_MIB).context("learn how much to touch: only the agent may start this")?;
        let mib: usize = mib.parse().context("understand how much to touch")?;
        let mut map = MmapMut::map_anon(mib << 20).context("map anonymous memory")?;
        // The memory may have no huge pages at all, then there is nothing to ask for.
        let _ = map.advise(Advice::NoHugePage);
        for at in (0..map.len()).step_by(PAGE_BYTES as usize) {
            map[at] = 1;
        }
        std::io::stdout().write_all(b"x").context("say that the memory is touched")?;
        std::io::stdout().flush().context("say that the memory is touched")?;
        std::io::stdin().read_to_end(&mut Vec::new()).context("wait for the end")?;
        Ok(())
    };
    match live() {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("buddydiff process: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn set_pool(step: &Hugetlb) -> Result<(), Failure> {
    let path = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages", step.page.kib());
    fs::write(&path, step.pages.to_string()).context(&format!("write {path}"))
}

fn write_control(step: &Write) -> Result<(), Failure> {
    let path = step.path.as_str();
    if step.optional && !Path::new(path).exists() {
        return Ok(());
    }
    fs::write(path, &step.value).context(&format!("write {:?} to {path}", step.value))
}

fn drop_caches(caches: Caches) -> Result<(), Failure> {
    let value = match caches {
        Caches::PageCache => "1",
        Caches::Slab => "2",
        Caches::All => "3",
    };
    fs::write("/proc/sys/vm/drop_caches", value).context("drop caches")
}

/// Folding the counters also lets the per-CPU lists decay (mm/vmstat.c, refresh_cpu_vm_stats(), 6.12 and later), which
/// gives pages back for seconds after a load; so it is done here, until it moves nothing any more.
fn wait_quiet(step: &WaitQuiet) -> Result<(), Failure> {
    let start = Instant::now();
    let limit = Duration::from_secs(step.limit_s.into());
    let refresh = open_if_there(STAT_REFRESH)?;
    let read = || -> Result<Vec<u8>, Failure> {
        fold_counters(refresh.as_ref())?;
        fs::read("/proc/buddyinfo").context("read /proc/buddyinfo")
    };
    let mut before = read()?;
    loop {
        std::thread::sleep(Duration::from_millis(step.interval_ms.into()));
        let now = read()?;
        if now == before {
            return Ok(());
        }
        if start.elapsed() > limit {
            return Err(format!("the guest did not become quiet within {} s", step.limit_s));
        }
        before = now;
    }
}
