//! Machines that run a kernel under test: one trait, one file a backend.

pub mod choose;
mod gate;
pub mod probe;
pub mod qemu;
mod qmp;

use std::fs::File;
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
    /// The file that is made to be the guest's RAM, for a look at it later. None takes memory without a name.
    pub ram: Option<PathBuf>,
}

/// Where the guest's RAM lies in the file that holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RamLayout {
    /// Bytes of RAM below 4 GiB. They are the first of the file, at their guest-physical addresses.
    pub low_bytes: u64,
    /// All bytes of RAM, and of the file. What is not low begins at 4 GiB, and in the file behind what is low.
    pub all_bytes: u64,
}

impl RamLayout {
    /// Guest-physical address just above the last byte of RAM.
    #[must_use]
    pub fn end(self) -> u64 {
        let Self { low_bytes: low, all_bytes: all } = self;
        if all > low { HIGH_RAM + (all - low) } else { low }
    }

    /// Where in the file the byte at this guest-physical address is; none where there is no RAM.
    #[must_use]
    pub fn offset(self, address: u64) -> Option<u64> {
        if address < HIGH_RAM {
            return (address < self.low_bytes).then_some(address);
        }
        let offset = (address - HIGH_RAM).checked_add(self.low_bytes)?;
        (offset < self.all_bytes).then_some(offset)
    }
}

impl MachineConfig {
    /// RAM below 4 GiB in MiB.
    fn low_mib(&self) -> u32 {
        self.low_memory_mib.unwrap_or(LOW_MEMORY_MIB).min(self.memory_mib)
    }

    /// Where RAM lies in the file that holds it.
    #[must_use]
    pub fn ram_layout(&self) -> RamLayout {
        RamLayout { low_bytes: u64::from(self.low_mib()) << 20, all_bytes: u64::from(self.memory_mib) << 20 }
    }

    /// Guest-physical address just above the last byte of RAM.
    #[must_use]
    pub fn ram_end(&self) -> u64 {
        self.ram_layout().end()
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
    /// The program that is the machine does not do what it is told, or has gone.
    #[error("failed to {doing} the machine: {why}")]
    Disobeys {
        /// What it was told: stop, resume.
        doing: &'static str,
        /// What it answered, if anything.
        why: String,
    },
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
    /// Waits for its end, at most for `limit`, and no longer than until it may have rung.
    ///
    /// # Errors
    /// [`VmError::Interrupted`] and [`VmError::Io`].
    fn wait(&mut self, limit: Duration) -> Result<Option<End>, VmError>;

    /// How long the machine has waited for a CPU of the host, where that can be known. A guest that seems hung while
    /// the host does not run it is no finding.
    fn starved(&self) -> Option<Duration>;

    /// Whether the guest has rung its doorbell: true once for each ring. All vCPUs then stand still, the one that rang
    /// right behind the instruction that did it, until [`Machine::resume`]. Does not wait.
    ///
    /// # Errors
    /// [`VmError::Io`] and [`VmError::Disobeys`].
    fn rang(&mut self) -> Result<bool, VmError>;

    /// Makes all vCPUs stand still, wherever they are, and the guest's clock with them.
    ///
    /// # Errors
    /// [`VmError::Disobeys`] where they do not within `limit`, or the machine must repeat to the byte, which one that is
    /// stopped at any time cannot: it stands still by its doorbell only; [`VmError::Interrupted`] and [`VmError::Io`].
    fn stop(&mut self, limit: Duration) -> Result<(), VmError>;

    /// Lets all vCPUs go on after a ring or a stop; the guest does not notice that time has passed.
    ///
    /// # Errors
    /// [`VmError::Disobeys`] where they do not within seconds; [`VmError::Interrupted`] and [`VmError::Io`].
    fn resume(&mut self) -> Result<(), VmError>;

    /// The guest's RAM, as a file to map, and what is where in it. It belongs to the guest, which changes it whenever
    /// its vCPUs do not stand still. The file is sparse: reading a hole of it through a mapping may fill the hole.
    fn ram(&self) -> (&File, RamLayout);
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
            ram: None,
        }
    }

    #[test]
    fn ram_above_the_hole_for_devices_follows_in_the_file() {
        let layout = config(1024, Some(128)).ram_layout();
        assert_eq!(layout, RamLayout { low_bytes: 128 << 20, all_bytes: 1 << 30 });
        assert_eq!(layout.offset((128 << 20) - 1), Some((128 << 20) - 1));
        assert_eq!(layout.offset(128 << 20), None);
        assert_eq!(layout.offset(4 * GIB), Some(128 << 20));
        assert_eq!(layout.offset(4 * GIB + (896 << 20) - 1), Some((1 << 30) - 1));
        assert_eq!(layout.offset(4 * GIB + (896 << 20)), None);
        assert_eq!(layout.offset(u64::MAX), None);
        assert_eq!(config(512, None).ram_layout().offset(4 * GIB), None);
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
