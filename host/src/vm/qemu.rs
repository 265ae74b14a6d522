//! Machines by QEMU, emulated (TCG) or by KVM.
//!
//! The channel is a pc-dimm backed by a shared file. Without ACPI in the guest nothing tells the kernel of it: it is in
//! no memory map, so it is outside the guest's RAM and still at a known address.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::{Backend, End, Machine, MachineConfig, VmError};
use crate::process::{Group, WaitError, shell_line};

/// The QEMU program of Debian's qemu-system-x86.
pub const PROGRAM: &str = "qemu-system-x86_64";

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
            let fixed = ["-icount", "shift=1,sleep=off", "-seed", "1", "-rtc", "base=2026-01-01,clock=vm"];
            arguments.extend(fixed.map(str::to_owned));
        }
        arguments
    }
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
        let mut command = Command::new(PROGRAM);
        command.args(self.arguments(config)).stdin(Stdio::null()).stdout(Stdio::null());
        // A file, not a pipe: nobody reads while the guest runs, and QEMU must never wait for us.
        let io_error = |source| VmError::Io { doing: "make a file for what QEMU says", source };
        let stderr = tempfile::tempfile().map_err(io_error)?;
        command.stderr(stderr.try_clone().map_err(io_error)?);
        let group = Group::spawn(&mut command).map_err(|source| VmError::Start {
            program: PROGRAM.into(),
            source,
            hint: " (Debian has it in qemu-system-x86; --install-deps installs it)",
        })?;
        Ok(Box::new(Running { group, stderr }))
    }

    fn command(&self, config: &MachineConfig) -> String {
        let mut command = Command::new(PROGRAM);
        command.args(self.arguments(config));
        shell_line(&command)
    }
}

struct Running {
    group: Group,
    stderr: File,
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
}

impl Machine for Running {
    fn wait(&mut self, limit: Duration) -> Result<Option<End>, VmError> {
        let status = match self.group.wait_until(Instant::now() + limit) {
            Ok(status) => status,
            Err(WaitError::TimedOut) => return Ok(None),
            Err(WaitError::Interrupted) => return Err(VmError::Interrupted),
            Err(WaitError::Io(source)) => return Err(VmError::Io { doing: "wait for QEMU", source }),
        };
        if status.success() {
            return Ok(Some(End::Guest));
        }
        let words = self.last_words();
        let colon = if words.is_empty() { "" } else { ": " };
        Ok(Some(End::Lost(format!("QEMU ended with {status}{colon}{words}"))))
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
}
