//! Machines that run a kernel under test: one trait, one file a backend.

pub mod choose;
pub mod probe;
pub mod qemu;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Guest-physical address where RAM above the hole for devices begins.
const HIGH_RAM: u64 = 4 << 30;
/// RAM below 4 GiB where a script does not say otherwise, in MiB. A kernel of ours needs no larger hole.
const LOW_MEMORY_MIB: u32 = 3072;
const GIB: u64 = 1 << 30;

/// All that a machine is made from.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// The kernel: an ELF vmlinux with a PVH entry.
    pub kernel: PathBuf,
    /// The initramfs, an uncompressed cpio archive.
    pub initramfs: PathBuf,
    /// The kernel command line.
    pub command_line: String,
    /// RAM in MiB.
    pub memory_mib: u32,
    /// RAM below 4 GiB in MiB; the rest lies above. None leaves it to the backend.
    pub low_memory_mib: Option<u32>,
    /// Number of vCPUs.
    pub cpus: u32,
    /// Whether two runs must be equal to the byte.
    pub deterministic: bool,
    /// The file that is the channel: `guest_agent::wire` says what is in it.
    pub channel: PathBuf,
    /// Size of that file in bytes.
    pub channel_len: u64,
    /// The file that takes what the guest prints on its console.
    pub console: PathBuf,
}

impl MachineConfig {
    /// RAM below 4 GiB in MiB.
    fn low_mib(&self) -> u32 {
        self.low_memory_mib.unwrap_or(LOW_MEMORY_MIB).min(self.memory_mib)
    }

    /// Guest-physical address just above the last byte of RAM.
    #[must_use]
    pub fn ram_end(&self) -> u64 {
        let (low, all) = (u64::from(self.low_mib()) << 20, u64::from(self.memory_mib) << 20);
        if all > low { HIGH_RAM + (all - low) } else { low }
    }

    /// Guest-physical address of the channel in bytes: the first GiB boundary above all RAM and above 4 GiB, which is
    /// where QEMU's `pc` machine begins its area for devices with memory.
    #[must_use]
    pub fn channel_address(&self) -> u64 {
        self.ram_end().max(HIGH_RAM).next_multiple_of(GIB)
    }
}

/// How a machine came to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest ended it: a restart, by whoever in the guest.
    Guest,
    /// Something outside the guest did. The text says what is known.
    Lost(String),
}

/// A backend failed, whatever the guest did.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// The program that is the machine cannot be started.
    #[error("failed to start {program}: {source}{hint}")]
    Start {
        /// The program.
        program: String,
        /// The system's reason.
        source: io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// The user asked us to stop.
    #[error("interrupted")]
    Interrupted,
    /// The system refused something that a run needs.
    #[error("failed to {doing}: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

/// A running machine. Dropping it ends it.
pub trait Machine {
    /// Waits for its end, at most for `limit`.
    ///
    /// # Errors
    /// [`VmError::Interrupted`] and [`VmError::Io`].
    fn wait(&mut self, limit: Duration) -> Result<Option<End>, VmError>;

    /// How long the machine has waited for a CPU of the host, where that can be known. A guest that seems hung while
    /// the host does not run it is no finding.
    fn starved(&self) -> Option<Duration>;
}

/// Something that can make machines.
pub trait Backend: Sync {
    /// Its name in reports: `qemu-tcg`, `qemu-kvm`.
    fn name(&self) -> &'static str;

    /// Makes a machine and starts it.
    ///
    /// # Errors
    /// See [`VmError`].
    fn start(&self, config: &MachineConfig) -> Result<Box<dyn Machine>, VmError>;

    /// One shell line that starts the same machine by hand.
    fn command(&self, config: &MachineConfig) -> String;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(memory_mib: u32, low_memory_mib: Option<u32>) -> MachineConfig {
        MachineConfig {
            kernel: PathBuf::new(),
            initramfs: PathBuf::new(),
            command_line: String::new(),
            memory_mib,
            low_memory_mib,
            cpus: 1,
            deterministic: false,
            channel: PathBuf::new(),
            channel_len: 0,
            console: PathBuf::new(),
        }
    }

    #[test]
    fn the_channel_lies_above_all_ram_at_a_gib_boundary() {
        assert_eq!(config(512, None).channel_address(), 4 * GIB);
        assert_eq!(config(1024, Some(128)).channel_address(), 5 * GIB);
        assert_eq!(config(8192, None).channel_address(), 9 * GIB);
        assert_eq!(config(8192, None).ram_end(), 9 * GIB);
        assert_eq!(config(512, None).ram_end(), 512 << 20);
    }
}
