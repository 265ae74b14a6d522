//! Machines by QEMU, emulated (TCG) or by KVM.
//!
//! The channel is a pc-dimm backed by a shared file. Without ACPI in the guest nothing tells the kernel of it: it is in
//! no memory map, so it is outside the guest's RAM and still at a known address.
//!
//! The doorbell is the port of a pvpanic device: a guest that says there that it panics is made to stand still. Where it
//! must repeat to the byte it is another device, see `gate.rs`. QEMU opens RAM by its path below our `/proc`, so
//! that no descriptor is inherited, and no disk and no /dev/shm limits it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use guest_agent::wire::BELL_PORT;
use rustix::fs::{MemfdFlags, SealFlags};

use super::gate::Gate;
use super::qmp::Qmp;
use super::{Backend, End, Machine, MachineConfig, RamLayout, VmError};
use crate::process::{Group, WaitError, shell_line};

/// The QEMU program of Debian's qemu-system-x86.
pub const PROGRAM: &str = "qemu-system-x86_64";
/// How guests count time that must repeat to the byte.
const ICOUNT: &str = "shift=1,sleep=off,rr=record,rrfile=/dev/null";
/// QEMU lets vCPUs go on at once, if at all; what takes time is a host that has none for it.
const RESUME_LIMIT: Duration = Duration::from_secs(30);

/// How QEMU runs guest code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Qemu {
    /// By translation, which every host can.
    Tcg,
    /// By KVM.
    Kvm,
}

impl Qemu {
    fn arguments(self, config: &MachineConfig) -> Vec<String> {
        let memory_mib = config.memory_mib;
        // Room for RAM, channel, and the GiB that aligning the latter may cost.
        let max_mib = u64::from(memory_mib) + (config.channel_len >> 20) + 3072;
        let mut arguments: Vec<String> = [
            "-nodefaults",
            "-no-user-config",
            "-no-reboot",
            "-display",
            "none",
            "-machine",
            &format!("pc,max-ram-below-4g={}M", config.low_mib()),
            "-m",
            &format!("{memory_mib}M,slots=1,maxmem={max_mib}M"),
            "-smp",
            // A socket each: without ACPI a kernel finds CPUs in the firmware's MP table, which lists one a socket.
            &format!("{0},sockets={0},cores=1,threads=1", config.cpus),
            "-object",
            &format!(
                "memory-backend-file,id=channel,share=on,size={},mem-path={}",
                config.channel_len,
                comma_escaped(&config.channel.display().to_string())
            ),
            "-device",
            &format!("pc-dimm,memdev=channel,addr={:#x}", config.channel_address()),
            "-chardev",
            &format!("file,id=console,path={}", comma_escaped(&config.console.display().to_string())),
            "-serial",
            "chardev:console",
            "-kernel",
            &config.kernel.display().to_string(),
            "-initrd",
            &config.initramfs.display().to_string(),
            "-append",
            &config.command_line,
        ]
        .map(str::to_owned)
        .to_vec();
        let (accel, cpu) = match self {
            Self::Tcg if config.deterministic => ("tcg,thread=single", "qemu64,+pdpe1gb"),
            Self::Tcg => ("tcg", "qemu64,+pdpe1gb"),
            Self::Kvm => ("kvm", "host"),
        };
        arguments.extend(["-accel", accel, "-cpu", cpu].map(str::to_owned));
        if config.deterministic {
            // Time is counted in instructions, nothing is seeded by the host, and the clock starts on a fixed day.
            // Recording is for its lock: without it, a main loop that is awake when the guest halts may move the clock
            // on from the last time that instructions were counted instead of from now (softmmu/icount.c,
            // icount_start_warp_timer()), and the guest wakes some nanoseconds late. Nobody wants the record.
            let fixed = ["-icount", ICOUNT, "-seed", "1", "-rtc", "base=2026-01-01,clock=vm"];
            arguments.extend(fixed.map(str::to_owned));
            let bell = format!("isa-debugcon,iobase={BELL_PORT:#x},chardev=bell");
            arguments.extend(["-device".to_owned(), bell]);
        } else {
            arguments.extend(["-device".to_owned(), format!("pvpanic,ioport={BELL_PORT:#x}")]);
        }
        arguments
    }

    /// What a machine needs besides that nobody looks at: no doorbell stops it. RAM is of the same kind, which is given
    /// page by page: a guest may have more of it than the host.
    fn left_alone(config: &MachineConfig) -> Vec<String> {
        let ram = format!("memory-backend-memfd,id=ram,size={}M", config.memory_mib);
        let bell =
            if config.deterministic { ["-chardev", "null,id=bell"] } else { ["-action", "panic=none"] };
        ["-object", &ram, "-machine", "memory-backend=ram"]
            .into_iter()
            .chain(bell)
            .map(str::to_owned)
            .collect()
    }

    /// What a machine needs besides whose RAM and doorbell are ours.
    fn looked_at(config: &MachineConfig, ram_path: &str, doorbell: &Doorbell) -> Vec<String> {
        let ram = format!(
            "memory-backend-file,id=ram,share=on,size={}M,mem-path={}",
            config.memory_mib,
            comma_escaped(ram_path)
        );
        let mut arguments = ["-object", &ram, "-machine", "memory-backend=ram"].map(str::to_owned).to_vec();
        match doorbell {
            Doorbell::Panic(_) => {
                let qmp = ["-chardev", "socket,id=qmp,fd=0", "-mon", "chardev=qmp,mode=control"];
                arguments.extend(["-action", "panic=pause"].into_iter().chain(qmp).map(str::to_owned));
            }
            Doorbell::Gate(gate) => {
                let [file, log] = gate.paths();
                let bell = format!("file,id=bell,append=on,path={file},logappend=on,logfile={log}");
                arguments.extend(["-chardev".to_owned(), bell]);
            }
        }
        arguments
    }
}

/// How a guest is heard that rings, and how it is made to stand still.
enum Doorbell {
    /// It says that it panics, and QEMU stops it.
    Panic(Qmp),
    /// It is held where it rings.
    Gate(Gate),
}

/// Makes the file that is RAM, and gives the path by which another process can open it.
fn make_ram(config: &MachineConfig) -> io::Result<(File, String)> {
    let all_bytes = config.ram_layout().all_bytes;
    if let Some(path) = &config.ram {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
        file.set_len(all_bytes)?;
        return Ok((file, path.display().to_string()));
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create(c"buddydiff-ram", flags)?);
    file.set_len(all_bytes)?;
    // Whoever maps it may rely on its length.
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    Ok((file, path))
}

/// QEMU's option syntax doubles commas inside values.
fn comma_escaped(value: &str) -> String {
    value.replace(',', ",,")
}

impl Backend for Qemu {
    fn name(&self) -> &'static str {
        match self {
            Self::Tcg => "qemu-tcg",
            Self::Kvm => "qemu-kvm",
        }
    }

    fn start(&self, config: &MachineConfig) -> Result<Box<dyn Machine>, VmError> {
        let (ram, ram_path) =
            make_ram(config).map_err(|source| VmError::Io { doing: "make the guest's RAM", source })?;
        let bell_error = |source| VmError::Io { doing: "make the doorbell", source };
        let (doorbell, stdin) = if config.deterministic {
            (Doorbell::Gate(Gate::new().map_err(bell_error)?), Stdio::null())
        } else {
            let (qmp, qemu) = Qmp::new().map_err(bell_error)?;
            (Doorbell::Panic(qmp), Stdio::from(qemu))
        };
        let mut command = Command::new(PROGRAM);
        command.args(self.arguments(config)).args(Self::looked_at(config, &ram_path, &doorbell));
        command.stdin(stdin).stdout(Stdio::null());
        // A file, not a pipe: nobody reads while the guest runs, and QEMU must never wait for us.
        let io_error = |source| VmError::Io { doing: "make a file for what QEMU says", source };
        let stderr = tempfile::tempfile().map_err(io_error)?;
        command.stderr(stderr.try_clone().map_err(io_error)?);
        let group = Group::spawn(&mut command).map_err(|source| VmError::Start {
            program: PROGRAM.into(),
            source,
            hint: " (Debian has it in qemu-system-x86; --install-deps installs it)",
        })?;
        Ok(Box::new(Running { group, stderr, doorbell, standing: false, ram, layout: config.ram_layout() }))
    }

    fn command(&self, config: &MachineConfig) -> String {
        let mut command = Command::new(PROGRAM);
        command.args(self.arguments(config)).args(Self::left_alone(config));
        shell_line(&command)
    }
}

struct Running {
    group: Group,
    stderr: File,
    doorbell: Doorbell,
    /// Whether the machine stands still and the host knows why.
    standing: bool,
    ram: File,
    layout: RamLayout,
}

impl Running {
    /// What QEMU printed last, a few lines at most.
    fn last_words(&self) -> String {
        let mut bytes = vec![0; 4096];
        let len = self.stderr.metadata().map_or(0, |metadata| metadata.len());
        let start = len.saturating_sub(bytes.len() as u64);
        let read = self.stderr.read_at(&mut bytes, start).unwrap_or(0);
        let text = String::from_utf8_lossy(&bytes[..read]);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(3)..].join("; ")
    }

    /// The end that something outside the guest brought about, with what QEMU says of it.
    fn lost(&self, what: String) -> End {
        let words = self.last_words();
        let colon = if words.is_empty() { "" } else { ": " };
        End::Lost(format!("{what}{colon}{words}"))
    }

    /// Whether QEMU stopped the machine for reasons of its own, such as a KVM that gave up. It does not go on then.
    fn stopped_itself(&mut self) -> Result<Option<End>, VmError> {
        let Doorbell::Panic(qmp) = &mut self.doorbell else { return Ok(None) };
        qmp.hear().map_err(|source| VmError::Io { doing: "hear what QEMU says", source })?;
        let stopped = qmp.stopped && !qmp.panicked && !self.standing;
        Ok(stopped.then(|| self.lost("QEMU stopped the machine".into())))
    }
}

impl Machine for Running {
    fn wait(&mut self, limit: Duration) -> Result<Option<End>, VmError> {
        let ear = match &self.doorbell {
            Doorbell::Panic(qmp) => qmp.ear(),
            Doorbell::Gate(gate) => gate.ear(),
        };
        let status = match self.group.wait_or_hear(Instant::now() + limit, ear) {
            Ok(status) => status,
            Err(WaitError::TimedOut) => return self.stopped_itself(),
            Err(WaitError::Interrupted) => return Err(VmError::Interrupted),
            Err(WaitError::Io(source)) => return Err(VmError::Io { doing: "wait for QEMU", source }),
        };
        if status.success() {
            return Ok(Some(End::Guest));
        }
        Ok(Some(self.lost(format!("QEMU ended with {status}"))))
    }

    fn starved(&self) -> Option<Duration> {
        // The second number of a thread's schedstat is the nanoseconds it was runnable and did not run
        // (Documentation/scheduler/sched-stats.rst).
        let mut worst = None;
        for task in fs::read_dir(format!("/proc/{}/task", self.group.id())).ok()? {
            let text = fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
            let waited = Duration::from_nanos(text.split_whitespace().nth(1)?.parse().ok()?);
            worst = worst.max(Some(waited));
        }
        worst
    }

    fn rang(&mut self) -> Result<bool, VmError> {
        let io_error = |source| VmError::Io { doing: "listen for the doorbell", source };
        match &mut self.doorbell {
            Doorbell::Panic(qmp) => {
                qmp.hear().map_err(io_error)?;
                let rang = qmp.stopped && std::mem::take(&mut qmp.panicked);
                self.standing |= rang;
                Ok(rang)
            }
            Doorbell::Gate(gate) => gate.rang().map_err(io_error),
        }
    }

    fn stop(&mut self, limit: Duration) -> Result<(), VmError> {
        match &mut self.doorbell {
            Doorbell::Panic(qmp) => {
                self.standing = true;
                qmp.execute("stop", "stop", limit)
            }
            Doorbell::Gate(gate) if gate.is_held() => Ok(()),
            Doorbell::Gate(_) => Err(VmError::Disobeys {
                doing: "stop",
                why: "a machine that repeats to the byte stands still by its doorbell only".into(),
            }),
        }
    }

    fn resume(&mut self) -> Result<(), VmError> {
        match &mut self.doorbell {
            Doorbell::Panic(qmp) => {
                self.standing = false;
                qmp.execute("cont", "resume", RESUME_LIMIT)
            }
            Doorbell::Gate(gate) => gate.resume(RESUME_LIMIT, || Ok(self.group.try_wait()?.is_none())),
        }
    }

    fn ram(&self) -> (&File, RamLayout) {
        (&self.ram, self.layout)
    }
}
