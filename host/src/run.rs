//! One guest from start to end: boot a kernel with the agent, follow the channel, enforce every limit, say how it ended.
//!
//! Knows nothing of what the checkpoints mean; it only makes sure that they are whole.

mod follow;

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guest_agent::script::{Script, ScriptError, Step};
use guest_agent::wire::{CHANNEL_MAGIC, FRAMES_OFFSET, HEADER_LEN, PROTOCOL, Plan, ProcFile, WRITTEN_OFFSET};

use crate::check::console::{self, ConsoleReport, Kind};
use crate::initramfs;
use crate::observe::RawCheckpoint;
use crate::vm::{Backend, End, Machine, MachineConfig, VmError};

use follow::{Announced, Follower, Progress};

/// How often the channel is looked at while the guest runs and does not ring. The guest does not notice.
const LOOK: Duration = Duration::from_millis(10);
/// Time to end the machine after the agent's last word.
const SHUTDOWN_LIMIT: Duration = Duration::from_secs(30);
/// A guest that prints more than this is stopped: it would fill the disk.
const CONSOLE_MAX: u64 = 64 << 20;
/// Time from the message that the doorbell is about to ring to the ring, a few instructions later.
const RING_LIMIT: Duration = Duration::from_secs(30);
/// Lines of the console that a failure shows.
const TAIL_LINES: usize = 20;
/// What is always on the command line: the console; a panic or restart ends the machine at once; nothing random. An
/// emulated timer on a busy host loses ticks, and a kernel that counts some to check it (arch/x86/kernel/apic/io_apic.c,
/// timer_irq_works()) panics for want of them.
const COMMAND_LINE: &str = "console=ttyS0 panic=-1 reboot=t nokaslr norandmaps no_timer_check \
                            transparent_hugepage=madvise brd.rd_nr=1 brd.rd_size=16777216";

/// What to run and how.
pub struct RunConfig<'a> {
    /// The kernel.
    pub vmlinux: &'a Path,
    /// The agent's binary.
    pub agent: &'a [u8],
    /// The script's name.
    pub script_name: &'a str,
    /// The script.
    pub script: &'a Script,
    /// RAM in MiB where it is not the script's.
    pub memory_mib: Option<u32>,
    /// Number of vCPUs.
    pub cpus: u32,
    /// Whether two runs must be equal to the byte.
    pub deterministic: bool,
    /// Seed for whatever a step draws at random.
    pub seed: u64,
    /// Time from start to agent ready.
    pub boot_limit: Duration,
    /// Where to keep the files of the run; a temporary folder, removed afterwards, if none.
    pub keep: Option<&'a Path>,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The script ran to its end and every message arrived whole.
    Complete {
        /// `/proc/sys/kernel/tainted` at the end.
        tainted: u64,
    },
    /// The guest failed after the agent was ready: that is a finding.
    GuestFailure(GuestFailure),
    /// The run cannot say anything about the kernel.
    NoVerdict(NoVerdict),
}

/// How a guest failed after its agent was ready.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GuestFailure {
    /// It ended before the script did. The console says why, if anything does.
    #[error("the guest ended during step {step}: {doing}")]
    Died {
        /// Number of the step, from 1.
        step: usize,
        /// What the step does.
        doing: String,
    },
    /// A step took longer than the script allows.
    #[error("the guest hung: step {step} did not end within {limit_s} s: {doing}")]
    Hung {
        /// Number of the step, from 1.
        step: usize,
        /// What the step does.
        doing: String,
        /// The limit in seconds.
        limit_s: u64,
    },
    /// It made itself stand still where no ring of the agent's was due: its kernel says by the same port that it panics.
    #[error("the guest stopped itself during step {step}: {doing}")]
    Stopped {
        /// Number of the step, from 1.
        step: usize,
        /// What the step does.
        doing: String,
    },
    /// The script ended, the machine did not.
    #[error("the guest hung after the script: it did not restart within {limit_s} s")]
    HungAtEnd {
        /// The limit in seconds.
        limit_s: u64,
    },
}

/// Why a run cannot say anything about the kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoVerdict {
    /// The guest ended before the agent was ready.
    #[error("the kernel did not boot: the guest ended before the agent was ready")]
    DiedAtBoot,
    /// The agent was not ready in time.
    #[error("the kernel did not boot: the agent was not ready within {limit_s} s")]
    HungAtBoot {
        /// The limit in seconds.
        limit_s: u64,
    },
    /// The agent could not do what the script asks.
    #[error("the script cannot run on this kernel: {0}")]
    ScriptFailed(String),
    /// The agent died, and nothing on the console says that the kernel is to blame.
    #[error("the agent died during step {step}: {doing}")]
    AgentDied {
        /// Number of the step, from 1.
        step: usize,
        /// What the step does.
        doing: String,
    },
    /// A message was lost, cut or altered.
    #[error("the channel is broken: {0}")]
    Channel(String),
    /// The agent and its doorbell do not agree.
    #[error("the doorbell is broken: {0}")]
    Doorbell(String),
    /// The machine ended from outside.
    #[error("the machine was lost: {0}")]
    MachineLost(String),
    /// The host had no time for the guest, which then seemed to hang.
    #[error(
        "the host is overloaded: the guest waited {waited_s} s for a CPU in a step limited to {limit_s} s"
    )]
    HostOverloaded {
        /// How long it waited, in seconds.
        waited_s: u64,
        /// The limit in seconds.
        limit_s: u64,
    },
    /// The guest printed without end.
    #[error("the guest printed more than {} MiB on its console", CONSOLE_MAX >> 20)]
    ConsoleFlood,
}

/// All that a run gave.
#[derive(Debug)]
pub struct Run {
    /// How it ended.
    pub outcome: Outcome,
    /// `uname -r` in the guest, where it came so far.
    pub release: Option<String>,
    /// Checkpoints that arrived whole.
    pub checkpoints: Vec<RawCheckpoint>,
    /// What the guest printed, at most 64 MiB.
    pub console: Vec<u8>,
    /// The console's last lines, where the run did not end well.
    pub console_tail: Option<String>,
    /// Wall time from start to agent ready, in seconds.
    pub boot_s: Option<f64>,
    /// Wall time in which the machine existed, in seconds.
    pub wall_s: f64,
    /// The guest's own clock at its last word, in seconds.
    pub guest_s: f64,
    /// The line that starts the machine by hand.
    pub command: String,
}

/// A run could not even be tried.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The script does not fit the guest.
    #[error(transparent)]
    Script(#[from] ScriptError),
    /// The machine.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The host's files.
    #[error("failed to {doing}: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

/// Gives an I/O error its sentence.
fn io_error(doing: &'static str) -> impl FnOnce(io::Error) -> RunError {
    move |source| RunError::Io { doing, source }
}

/// What a run has to say while it goes on, for people to watch.
#[derive(Clone, Copy, Debug)]
pub enum News<'a> {
    /// The machine is about to be started by this line.
    Command(&'a str),
    /// The guest goes on to this.
    Does(&'a str),
}

/// A machine that stands still because its agent rang.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bell<'a> {
    /// The step, from 0.
    pub step: usize,
    /// The name of the checkpoint.
    pub checkpoint: &'a str,
    /// Number of vCPUs. With more than one, one that did not ring may stand anywhere in the kernel, with locks held.
    pub cpus: u32,
}

/// A machine that stands still because the driver in its kernel rang. Its CPUs are held, none with a lock of the
/// allocator, so there is no need to let it go on a little.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchBell {
    /// The step, from 0.
    pub step: usize,
    /// Number of the batch in its step, from 0.
    pub batch: u32,
    /// What comes next.
    pub phase: Phase,
}

/// Which of a batch's two rings it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The driver takes the batch from memory next: see [`crate::batch`].
    Before,
    /// What came of it is in memory, if there was one.
    After,
}

/// Looks at machines that stand still, and keeps what it sees. One observer belongs to one run.
pub trait FrozenObserver {
    /// Looks at [`Machine::ram`]. The texts of the checkpoint are read and not yet sent.
    ///
    /// It may let the machine go on a little by [`Machine::resume`] and [`Machine::stop`] it again, in all for no longer
    /// than [`guest_agent::wire::BELL_REST_MS`] and a bounded number of times: so long the agent does nothing, while
    /// another vCPU may let go of what it holds. It leaves the machine standing. The time that this takes is not the
    /// guest's, so what it does with what it sees must have an end of its own.
    ///
    /// # Errors
    /// Where the host fails, which ends the run. What is wrong in the guest's memory is something seen.
    fn look(&mut self, machine: &mut dyn Machine, bell: Bell<'_>) -> Result<(), RunError>;

    /// Looks before and after a batch, and writes the batch. Where nothing is written nothing is run.
    ///
    /// It leaves the machine standing all the time.
    ///
    /// # Errors
    /// As [`FrozenObserver::look`].
    fn batch(&mut self, machine: &mut dyn Machine, bell: BatchBell) -> Result<(), RunError> {
        let (_, _) = (machine, bell);
        Ok(())
    }

    /// Whether it has written another batch at the last [`Phase::After`]: the driver runs that at once, and rings after it.
    /// Not for batches that may sleep, and a bounded number of times: the guest does nothing else meanwhile.
    fn again(&self) -> bool {
        false
    }
}

/// Boots, runs the script, and gives what came of it. `observer` sees each frozen checkpoint; without one they are as
/// any other. `say` hears of each change.
///
/// # Errors
/// Where the run could not be tried; whatever the guest does is an [`Outcome`].
pub fn run(
    backend: &dyn Backend,
    config: &RunConfig<'_>,
    observer: Option<&mut dyn FrozenObserver>,
    say: &mut dyn FnMut(News<'_>),
) -> Result<Run, RunError> {
    let memory_mib = config.memory_mib.unwrap_or(config.script.memory_mib);
    let steps = config.script.unroll(config.script_name, memory_mib)?;
    let folder = RunFolder::new(config.keep)?;
    let machine_config = prepare(&folder.path, config, memory_mib, &steps)?;

    let command = backend.command(&machine_config);
    let mut guest = Guest {
        channel: File::open(&machine_config.channel).map_err(io_error("open the channel"))?,
        channel_len: machine_config.channel_len,
        console: machine_config.console.clone(),
        follower: Follower::new(&steps),
    };
    say(News::Command(&command));
    let start = Instant::now();
    let mut machine = backend.start(&machine_config)?;
    say(News::Does("booting"));
    let (outcome, boot) = guest.watch(machine.as_mut(), config, &steps, observer, start, say)?;
    drop(machine);
    let wall = start.elapsed();

    let console = read_console(&machine_config.console).map_err(io_error("read the console"))?;
    let outcome = blame(outcome, &console);
    let console_tail = (!matches!(outcome, Outcome::Complete { .. })).then(|| tail(&console));
    Ok(Run {
        outcome,
        release: guest.follower.release.take(),
        checkpoints: std::mem::take(&mut guest.follower.checkpoints),
        console,
        console_tail,
        boot_s: boot.map(|boot| boot.as_secs_f64()),
        wall_s: wall.as_secs_f64(),
        guest_s: guest.follower.uptime_ns as f64 / 1e9,
        command,
    })
}

/// The files of a run: a folder of the user's choice, or one that goes when the run ends.
struct RunFolder {
    path: PathBuf,
    _temporary: Option<tempfile::TempDir>,
}

impl RunFolder {
    fn new(keep: Option<&Path>) -> Result<Self, RunError> {
        let error = io_error("make a folder for the run");
        match keep {
            Some(path) => {
                fs::create_dir_all(path).map_err(error)?;
                Ok(Self { path: path.to_owned(), _temporary: None })
            }
            None => {
                let temporary = tempfile::Builder::new().prefix("buddydiff-").tempdir().map_err(error)?;
                Ok(Self { path: temporary.path().to_owned(), _temporary: Some(temporary) })
            }
        }
    }
}

/// Writes channel and initramfs, and says what the machine is.
fn prepare(
    folder: &Path,
    config: &RunConfig<'_>,
    memory_mib: u32,
    steps: &[Step],
) -> Result<MachineConfig, RunError> {
    let mut command_line = COMMAND_LINE.to_owned();
    for word in &config.script.command_line {
        command_line.push(' ');
        command_line.push_str(word);
    }
    let mut machine = MachineConfig {
        kernel: config.vmlinux.to_owned(),
        initramfs: folder.join("initramfs.cpio"),
        command_line,
        memory_mib,
        low_memory_mib: config.script.low_memory_mib,
        cpus: config.cpus,
        deterministic: config.deterministic,
        channel: folder.join("channel"),
        channel_len: 0,
        console: folder.join("console.log"),
        ram: config.keep.is_some().then(|| folder.join("ram")),
    };
    machine.channel_len = channel_len(&machine, &config.script.capture, steps);

    let channel = File::create(&machine.channel).map_err(io_error("create the channel"))?;
    // Sparse: only what the guest sends takes room.
    channel.set_len(machine.channel_len).map_err(io_error("create the channel"))?;
    channel.write_all_at(&CHANNEL_MAGIC.to_le_bytes(), 0).map_err(io_error("create the channel"))?;
    File::create(&machine.console).map_err(io_error("create the console"))?;

    let plan = Plan {
        protocol: PROTOCOL,
        channel_address: machine.channel_address(),
        channel_len: machine.channel_len,
        seed: config.seed,
        capture: config.script.capture.clone(),
        steps: steps.iter().map(Step::for_agent).collect(),
    };
    let file = File::create(&machine.initramfs).map_err(io_error("create the initramfs"))?;
    initramfs::write(config.agent, &plan, BufWriter::new(file))
        .and_then(|mut writer| writer.flush())
        .map_err(io_error("write the initramfs"))?;
    Ok(machine)
}

/// A frame that announces a batch has no more bytes than this: a header and three numbers.
const BATCH_BYTES: u64 = HEADER_LEN as u64 + 16;

/// Bytes that all checkpoints may need: the channel is never emptied, so nothing has to flow back to the guest.
fn channel_len(machine: &MachineConfig, capture: &[ProcFile], steps: &[Step]) -> u64 {
    const MIB: u64 = 1 << 20;
    let checkpoints = steps.iter().filter(|step| matches!(step, Step::Checkpoint(_))).count() as u64;
    let kpageflags = if capture.contains(&ProcFile::Kpageflags) {
        // One word a pfn up to the end of RAM, and headers.
        let words = machine.ram_end() / guest_agent::script::PAGE_BYTES * 8;
        words + words / 64
    } else {
        0
    };
    let batches = guest_agent::script::batches(steps) * BATCH_BYTES;
    (4 * MIB + checkpoints * (MIB + kpageflags) + batches).next_multiple_of(2 * MIB)
}

/// A guest seen from outside: its channel, its console, and how far it has come.
struct Guest {
    channel: File,
    channel_len: u64,
    console: PathBuf,
    follower: Follower,
}

impl Guest {
    /// Follows the guest to its end. Gives the outcome as far as the channel tells, and the time to agent ready.
    fn watch(
        &mut self,
        machine: &mut dyn Machine,
        config: &RunConfig<'_>,
        steps: &[Step],
        mut observer: Option<&mut dyn FrozenObserver>,
        start: Instant,
        say: &mut dyn FnMut(News<'_>),
    ) -> Result<(Outcome, Option<Duration>), RunError> {
        // Instruction counting without sleeping slows a guest by three to ten.
        let slowdown = if config.deterministic { 10 } else { 1 };
        let boot_limit = config.boot_limit * slowdown;
        let step_limit = Duration::from_secs(config.script.step_limit_s.into()) * slowdown;
        let ring_limit = step_limit.min(RING_LIMIT * slowdown);
        let mut boot = None;
        let (mut since, mut starved) = (start, Duration::ZERO);
        let mut announced = None;
        loop {
            let end = machine.wait(LOOK)?;
            // Before the channel is read: a ring's announcement is then in it.
            let rang = machine.rang()?;
            let before = self.follower.progress();
            if let Err(reason) = self.read_channel()? {
                return Ok((Outcome::NoVerdict(NoVerdict::Channel(reason)), boot));
            }
            let progress = self.follower.progress();
            if progress != before {
                since = Instant::now();
                starved = machine.starved().unwrap_or_default();
                if progress != Progress::Booting {
                    boot.get_or_insert_with(|| start.elapsed());
                }
                match progress {
                    Progress::Booting | Progress::Ready => {}
                    Progress::Running(step) => {
                        let step = format!("step {} of {}: {}", step + 1, steps.len(), steps[step]);
                        say(News::Does(&step));
                    }
                    Progress::Ended => say(News::Does("ending")),
                }
            }
            if let Some(end) = end {
                return Ok((self.ended(end, steps), boot));
            }
            if fs::metadata(&self.console).map_err(io_error("look at the console"))?.len() > CONSOLE_MAX {
                return Ok((Outcome::NoVerdict(NoVerdict::ConsoleFlood), boot));
            }
            if rang {
                let began = Instant::now();
                let answered = self.answer(machine, observer.as_deref_mut(), config.cpus, steps);
                match answered {
                    Ok(None) => {}
                    Ok(Some(outcome)) => return Ok((outcome, boot)),
                    // It may have refused because it has ended meanwhile.
                    Err(error @ RunError::Vm(VmError::Disobeys { .. })) => match machine.wait(LOOK)? {
                        Some(end) => return Ok((self.ended(end, steps), boot)),
                        None => return Err(error),
                    },
                    Err(error) => return Err(error),
                }
                // The guest stood still. A batch is a sign of life, and there is a limit to their number.
                since = if self.follower.in_batches() { Instant::now() } else { since + began.elapsed() };
                announced = None;
            } else if self.follower.announced().is_some_and(|announced| announced.is_next())
                && announced.get_or_insert_with(Instant::now).elapsed() >= ring_limit
            {
                let text = format!("it did not ring within {} s", ring_limit.as_secs());
                return Ok((Outcome::NoVerdict(NoVerdict::Doorbell(text)), boot));
            }
            let limit = match progress {
                Progress::Booting => boot_limit,
                Progress::Ready | Progress::Running(_) => step_limit,
                Progress::Ended => SHUTDOWN_LIMIT * slowdown,
            };
            if since.elapsed() < limit {
                continue;
            }
            let limit_s = limit.as_secs();
            let waited = machine.starved().unwrap_or_default().saturating_sub(starved);
            let outcome = match progress {
                Progress::Booting => Outcome::NoVerdict(NoVerdict::HungAtBoot { limit_s }),
                _ if waited > limit / 2 => {
                    Outcome::NoVerdict(NoVerdict::HostOverloaded { waited_s: waited.as_secs(), limit_s })
                }
                Progress::Ready => hung(0, steps, limit_s),
                Progress::Running(step) => hung(step, steps, limit_s),
                Progress::Ended => Outcome::GuestFailure(GuestFailure::HungAtEnd { limit_s }),
            };
            return Ok((outcome, boot));
        }
    }

    /// Deals with a machine that stands still, and lets it go on. Gives the outcome where that is the end of the run.
    fn answer(
        &mut self,
        machine: &mut dyn Machine,
        observer: Option<&mut (dyn FrozenObserver + '_)>,
        cpus: u32,
        steps: &[Step],
    ) -> Result<Option<Outcome>, RunError> {
        let Some(announced) = self.follower.announced() else {
            return Ok(Some(self.stopped(steps)));
        };
        let mut again = false;
        match (announced, observer) {
            (Announced::Checkpoint { step, name }, Some(observer)) => {
                observer.look(machine, Bell { step, checkpoint: name, cpus })?;
            }
            (Announced::Batch(bell), Some(observer)) => {
                observer.batch(machine, bell)?;
                again = bell.phase == Phase::After && observer.again();
            }
            (_, None) => {}
        }
        if machine.rang()? {
            let text = format!("it rang twice for {announced}");
            return Ok(Some(Outcome::NoVerdict(NoVerdict::Doorbell(text))));
        }
        self.follower.answered(again);
        machine.resume()?;
        Ok(None)
    }

    /// What it means that the guest stopped itself unannounced.
    fn stopped(&self, steps: &[Step]) -> Outcome {
        let stopped = |step, doing| Outcome::GuestFailure(GuestFailure::Stopped { step, doing });
        match (self.follower.progress(), &self.follower.failed) {
            (Progress::Booting, _) => Outcome::NoVerdict(NoVerdict::DiedAtBoot),
            (_, Some(text)) => Outcome::NoVerdict(NoVerdict::ScriptFailed(text.clone())),
            (Progress::Ready, None) => stopped(1, steps[0].to_string()),
            (Progress::Running(step), None) => stopped(step + 1, steps[step].to_string()),
            (Progress::Ended, None) => stopped(steps.len() + 1, "restart".into()),
        }
    }

    /// What the end of the machine means, given how far the guest had come.
    fn ended(&self, end: End, steps: &[Step]) -> Outcome {
        if let End::Lost(text) = end {
            return Outcome::NoVerdict(NoVerdict::MachineLost(text));
        }
        if self.follower.pending() > 0 {
            return Outcome::NoVerdict(NoVerdict::Channel("it ends within a frame".into()));
        }
        if let Some(text) = &self.follower.failed {
            return Outcome::NoVerdict(NoVerdict::ScriptFailed(text.clone()));
        }
        match (self.follower.progress(), self.follower.tainted) {
            (Progress::Booting, _) => Outcome::NoVerdict(NoVerdict::DiedAtBoot),
            (Progress::Ended, Some(tainted)) => Outcome::Complete { tainted },
            (Progress::Ready, _) => died(0, steps),
            (Progress::Running(step), _) => died(step, steps),
            (Progress::Ended, None) => Outcome::NoVerdict(NoVerdict::Channel("no last word".into())),
        }
    }

    /// Reads what is new. The inner error is a broken channel.
    fn read_channel(&mut self) -> Result<Result<(), String>, RunError> {
        let mut mark = [0; 8];
        self.channel.read_exact_at(&mut mark, WRITTEN_OFFSET as u64).map_err(io_error("read the channel"))?;
        let written = u64::from_le_bytes(mark);
        let room = self.channel_len - FRAMES_OFFSET as u64;
        if written > room || written < self.follower.taken() {
            return Ok(Err(format!(
                "{written} bytes are said to be written, after {}",
                self.follower.taken()
            )));
        }
        let mut buffer = vec![0; 1 << 20];
        while self.follower.taken() < written {
            let len = (written - self.follower.taken()).min(buffer.len() as u64) as usize;
            let at = FRAMES_OFFSET as u64 + self.follower.taken();
            self.channel.read_exact_at(&mut buffer[..len], at).map_err(io_error("read the channel"))?;
            if let Err(reason) = self.follower.take(&buffer[..len]) {
                return Ok(Err(reason));
            }
        }
        Ok(Ok(()))
    }
}

fn hung(step: usize, steps: &[Step], limit_s: u64) -> Outcome {
    Outcome::GuestFailure(GuestFailure::Hung { step: step + 1, doing: steps[step].to_string(), limit_s })
}

fn died(step: usize, steps: &[Step]) -> Outcome {
    Outcome::GuestFailure(GuestFailure::Died { step: step + 1, doing: steps[step].to_string() })
}

/// Moves the blame for a death where the console says that it belongs.
///
/// What the kernel reported of itself stands. Without that, a guest that ran out of memory was asked for too much, which
/// is the script's doing, and a panic because PID 1 ended is the agent's death.
fn blame(outcome: Outcome, console: &[u8]) -> Outcome {
    let Outcome::GuestFailure(GuestFailure::Died { step, doing } | GuestFailure::Stopped { step, doing }) =
        &outcome
    else {
        return outcome;
    };
    let reports = console::scan(console, true);
    let has = |kind| reports.iter().any(|report| report.kind == kind);
    if reports.iter().any(ConsoleReport::is_finding) {
        outcome
    } else if has(Kind::OutOfMemory) {
        let text = format!("the guest ran out of memory in step {step}: {doing}");
        Outcome::NoVerdict(NoVerdict::ScriptFailed(text))
    } else if has(Kind::AgentEnded) {
        Outcome::NoVerdict(NoVerdict::AgentDied { step: *step, doing: doing.clone() })
    } else {
        outcome
    }
}

fn read_console(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(0))?;
    let mut bytes = Vec::new();
    file.take(CONSOLE_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The last lines, made printable.
fn tail(console: &[u8]) -> String {
    let start = console.len().saturating_sub(TAIL_LINES * 500);
    let text = String::from_utf8_lossy(&console[start..]);
    let lines: Vec<&str> = text.lines().collect();
    let mut tail = String::new();
    for line in &lines[lines.len().saturating_sub(TAIL_LINES)..] {
        let printable = line.chars().filter(|c| !c.is_control() || *c == '\t').take(500);
        tail.extend(printable);
        tail.push('\n');
    }
    tail
}

#[cfg(test)]
mod tests;
