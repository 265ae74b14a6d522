//! Allocation scripts: what a guest does to its allocator, and when it is looked at.
//!
//! A script is a TOML file. Each `[[step]]` is a table with one key, the step's kind:
//!
//! ```toml
//! about = "touch and free 64 MiB"
//! memory_mib = 512
//!
//! [[step]]
//! anonymous = { name = "load", mib = 64 }
//! [[step]]
//! free = { name = "load" }
//! [[step]]
//! wait_quiet = {}
//! [[step]]
//! checkpoint = "after"
//! ```
//!
//! A checkpoint can also be written `{ name = "after", frozen = true }`. The machine then stands still once the texts of
//! `/proc` are read, for the host to look at the allocator's own structures, and goes on with the rest.
//!
//! In a kernel with our driver, `batches = { count = 100 }` lets the host run batches of allocator operations there, and
//! look before and after each. It makes them at random, or takes those that `ops` lists (see [`crate::op`]).
//!
//! What a step takes it takes under a name; `free` gives it back. Unknown fields and impossible values are errors
//! that name file, line and what is allowed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::op::{OPS_MAX, ORDER_MAX, Op, SLOTS};
use crate::wire::ProcFile;

/// A page of x86-64 in bytes.
pub const PAGE_BYTES: u64 = 4096;
/// A PMD-sized page of x86-64 in bytes.
pub const PMD_BYTES: u64 = 2 << 20;
/// A script file larger than this is refused unread.
pub const SCRIPT_MAX_BYTES: usize = 8 << 20;
/// Steps after unrolling every `repeat`.
pub const STEPS_MAX: usize = 10_000;
/// Batches in all steps together: each takes a few bytes of the channel.
pub const BATCHES_MAX: u64 = 1_000_000;
/// `repeat` may hold `repeat` this deep.
const REPEAT_DEPTH_MAX: usize = 4;

/// A script as written.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Script {
    /// What the script is for, in a line or two.
    pub about: String,
    /// RAM of the guest in MiB, 64 to 65536, where the command line does not say otherwise.
    #[serde(default = "Script::default_memory_mib")]
    pub memory_mib: u32,
    /// RAM below 4 GiB in MiB; the rest lies above, which gives a small guest a `ZONE_NORMAL`.
    #[serde(default)]
    pub low_memory_mib: Option<u32>,
    /// Kernel parameters, for example `debug_pagealloc=on`.
    #[serde(default)]
    pub command_line: Vec<String>,
    /// Files that each checkpoint captures; all where not said.
    #[serde(default = "Script::default_capture")]
    pub capture: Vec<ProcFile>,
    /// Seconds of wall time that one step may take before the guest counts as hung.
    #[serde(default = "Script::default_step_limit_s")]
    pub step_limit_s: u32,
    /// The steps in order.
    #[serde(rename = "step")]
    pub steps: Vec<Step>,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Step {
    /// Maps private anonymous memory and writes to each page of it.
    Anonymous(Anonymous),
    /// Makes the kernel allocate page tables: reads one byte in each 2 MiB of an untouched mapping. The zero page
    /// is mapped, so each read costs exactly one unmovable order-0 page.
    PageTables(PageTables),
    /// Creates files on a tmpfs: inodes and dentries are reclaimable slab, their bytes movable pages.
    Files(Files),
    /// Reads an empty block device through the page cache; `drop_caches` lets go of it.
    PageCache(PageCache),
    /// Fills pipes: unmovable order-0 pages.
    Pipes(Pipes),
    /// Makes the kernel allocate slabs of kmalloc-2k without sleeping (`GFP_ATOMIC`): unmovable pages of order 2 or 3. Where
    /// free memory is below the low watermark, 6.1 and 6.12 reserve their pageblocks as HIGHATOMIC; 7.2 does not for slabs.
    Atomic(Atomic),
    /// Starts processes that touch memory, and end at once or stay.
    Processes(Processes),
    /// Sets the size of a hugetlb pool. Getting fewer pages is no error: that may be what the script measures.
    Hugetlb(Hugetlb),
    /// Gives back what an earlier step took.
    Free(Free),
    /// Writes to a file below `/proc/sys` or `/sys`.
    Write(Write),
    /// Compacts all zones (`vm.compact_memory`).
    Compact(Empty),
    /// Drops clean caches (`vm.drop_caches`).
    DropCaches(Caches),
    /// Waits until two readings of buddyinfo, some time apart, are equal.
    WaitQuiet(WaitQuiet),
    /// Runs batches of allocator operations in a kernel that has our driver (`guest-agent/driver/`). The machine stands
    /// still before and after each, for the host to write the batch and to read what came of it.
    Batches(Batches),
    /// Captures the state of the allocator under a name.
    #[serde(deserialize_with = "Checkpoint::name_or_table")]
    Checkpoint(Checkpoint),
    /// Runs steps several times; checkpoints inside get the round appended: `load-1`, `load-2`. A plan has none.
    Repeat(Repeat),
}

/// See [`Step::Anonymous`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Anonymous {
    /// Under which name it is held.
    pub name: Name,
    /// How much, in MiB.
    pub mib: Mib,
    /// Page size to ask for: 4KiB, an mTHP size (6.8 and later), or 2MiB.
    #[serde(default)]
    pub page: PageSize,
    /// Whether to lock it (`mlock`).
    #[serde(default)]
    pub lock: bool,
}

/// See [`Step::PageTables`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PageTables {
    /// Under which name they are held.
    pub name: Name,
    /// How many page-table pages of the lowest level.
    pub count: Count,
}

/// See [`Step::Files`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Files {
    /// Under which name they are held.
    pub name: Name,
    /// How many files.
    pub count: Count,
    /// Bytes written to each.
    #[serde(default)]
    pub bytes: u32,
    /// Files in one directory.
    #[serde(default = "Files::default_per_directory")]
    pub per_directory: Count,
}

/// See [`Step::PageCache`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PageCache {
    /// How much to read, in MiB.
    pub mib: Mib,
}

/// See [`Step::Pipes`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pipes {
    /// Under which name they are held.
    pub name: Name,
    /// How many pipes.
    pub count: Count,
    /// KiB that each holds, at most 1024.
    pub kib: Kib,
}

/// See [`Step::Atomic`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Atomic {
    /// Under which name they are held.
    pub name: Name,
    /// How many slabs, about: what is left of those that are there is used up first.
    pub slabs: Count,
}

/// See [`Step::Processes`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Processes {
    /// Under which name those that stay are held.
    pub name: Name,
    /// How many; they run one after another, and then, if they stay, all together.
    pub count: Count,
    /// Anonymous memory that each touches in pages of 4 KiB, in MiB.
    pub mib: Mib,
    /// Whether they stay until freed.
    #[serde(default)]
    pub stay: bool,
}

/// See [`Step::Hugetlb`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hugetlb {
    /// 2MiB or 1GiB.
    pub page: PageSize,
    /// Pages that the pool shall have.
    pub pages: u32,
}

/// See [`Step::Free`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Free {
    /// What to give back.
    pub name: Name,
    /// How much of it.
    #[serde(default)]
    pub part: Part,
}

/// How much of a holding `free` gives back. Only anonymous memory can be given back in part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// Everything.
    #[default]
    All,
    /// Every other page of 4 KiB: no free block grows beyond order 0.
    OddPages,
    /// The lower half of each 2 MiB: no pageblock becomes free.
    LowerHalves,
    /// Every other 2 MiB: with pages of 2MiB whole pageblocks become free, and no two that are buddies.
    OddBlocks,
}

/// See [`Step::Write`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Write {
    /// An absolute path below `/proc/sys` or `/sys`.
    pub path: ControlPath,
    /// The text to write.
    pub value: String,
    /// Whether a kernel without this file is fine.
    #[serde(default)]
    pub optional: bool,
}

/// See [`Step::DropCaches`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Caches {
    /// Clean page cache.
    PageCache,
    /// Reclaimable slab: dentries and inodes.
    Slab,
    /// Both.
    All,
}

/// See [`Step::WaitQuiet`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WaitQuiet {
    /// Milliseconds of guest time between two readings.
    #[serde(default = "WaitQuiet::default_interval_ms")]
    pub interval_ms: u32,
    /// Seconds of guest time after which a guest that does not settle has no verdict.
    #[serde(default = "WaitQuiet::default_limit_s")]
    pub limit_s: u32,
}

/// See [`Step::Batches`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batches {
    /// How many.
    #[serde(default)]
    pub count: BatchCount,
    /// The operations of each; where there are none, the host makes some at random from the run's seed.
    #[serde(default, rename = "ops")]
    pub given: Arc<[Op]>,
    /// Operations of a batch that the host makes, at most.
    #[serde(default)]
    pub size: BatchSize,
    /// Whether what batches have allocated and not freed is freed afterwards. It is held for later batches otherwise.
    #[serde(default)]
    pub free: bool,
    /// Whether every other CPU touches and unmaps memory meanwhile. The driver holds them while a batch runs.
    #[serde(default)]
    pub busy: bool,
    /// Whether their operations may sleep. Interrupts and other CPUs then go on while a batch runs, and what moves in the
    /// allocator is not the batch alone.
    #[serde(default)]
    pub may_sleep: bool,
}

/// See [`Step::Checkpoint`]. Written as its name alone, or as a table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    /// Under which name what is captured is reported.
    pub name: Name,
    /// Whether the machine also stands still for the host to look into its memory.
    #[serde(default)]
    pub frozen: bool,
}

impl Checkpoint {
    /// Reads either form from a script. A plan has only the table, and its format cannot tell one from the other.
    fn name_or_table<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Checkpoint;
            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a name, or { name = \"...\", frozen = true }")
            }
            fn visit_str<E: de::Error>(self, name: &str) -> Result<Checkpoint, E> {
                let name = Name::try_from(name.to_owned()).map_err(E::custom)?;
                Ok(Checkpoint { name, frozen: false })
            }
            fn visit_map<A: MapAccess<'de>>(self, table: A) -> Result<Checkpoint, A::Error> {
                Checkpoint::deserialize(MapAccessDeserializer::new(table))
            }
        }
        if deserializer.is_human_readable() {
            deserializer.deserialize_any(Either)
        } else {
            Self::deserialize(deserializer)
        }
    }
}

/// See [`Step::Repeat`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Repeat {
    /// How often.
    pub times: Count,
    /// What.
    #[serde(rename = "step")]
    pub steps: Vec<Step>,
}

/// A step without settings, written `{}`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Empty {}

/// Declares a checked value: how TOML spells it, and the test it must pass.
macro_rules! checked {
    ($(#[$doc:meta])* $name:ident($inner:ident, $spelled:literal), $value:ident => $test:expr, $allowed:literal) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = $spelled, into = $spelled)]
        pub struct $name($inner);

        impl TryFrom<$inner> for $name {
            type Error = String;
            fn try_from($value: $inner) -> Result<Self, String> {
                if $test { Ok(Self($value)) } else { Err(format!("{:?}: allowed is {}", $value, $allowed)) }
            }
        }
        impl From<$name> for $inner {
            fn from(checked: $name) -> Self {
                checked.0
            }
        }
    };
}

checked!(
    /// The name of a holding or of a checkpoint.
    Name(String, "String"),
    name => !name.is_empty() && name.len() <= 32 && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-')),
    "1 to 32 of a-z, 0-9 and -"
);
checked!(
    /// A size in MiB.
    Mib(u32, "u32"), mib => (1..=1 << 20).contains(&mib), "1 to 1048576"
);
checked!(
    /// A size in KiB that one pipe can hold.
    Kib(u32, "u32"), kib => (4..=1024).contains(&kib) && kib.is_power_of_two(), "a power of two from 4 to 1024"
);
checked!(
    /// A number of things to make.
    Count(u32, "u32"), count => (1..=10_000_000).contains(&count), "1 to 10000000"
);
checked!(
    /// A number of batches.
    BatchCount(u32, "u32"), count => (1..=100_000).contains(&count), "1 to 100000"
);
checked!(
    /// A number of operations of a batch.
    BatchSize(u32, "u32"), size => (1..=OPS_MAX as u32).contains(&size), "1 to 16384"
);
checked!(
    /// A path that `write` may write to.
    ControlPath(String, "String"),
    path => (path.starts_with("/proc/sys/") || path.starts_with("/sys/")) && !path.split('/').any(|part| part == ".."),
    "a path below /proc/sys/ or /sys/, without .."
);

impl fmt::Display for Name {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl Name {
    /// The name itself.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Mib {
    /// In bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(self.0) << 20
    }
}

impl Kib {
    /// In bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(self.0) << 10
    }
}

impl Count {
    /// The number.
    #[must_use]
    pub fn get(&self) -> u32 {
        self.0
    }
}

impl BatchCount {
    /// The number.
    #[must_use]
    pub fn get(&self) -> u32 {
        self.0
    }
}

impl Default for BatchCount {
    fn default() -> Self {
        Self(1)
    }
}

impl BatchSize {
    /// The number.
    #[must_use]
    pub fn get(&self) -> u32 {
        self.0
    }
}

impl Default for BatchSize {
    fn default() -> Self {
        Self(4096)
    }
}

impl ControlPath {
    /// The path itself.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A page size that x86-64 and the kernel know: 4KiB to 2MiB in powers of two (8KiB is no mTHP size), and 1GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PageSize {
    kib: u32,
}

impl PageSize {
    /// In bytes.
    #[must_use]
    pub fn bytes(self) -> u64 {
        u64::from(self.kib) << 10
    }

    /// In KiB, as sysfs spells it.
    #[must_use]
    pub fn kib(self) -> u32 {
        self.kib
    }
}

impl Default for PageSize {
    fn default() -> Self {
        Self { kib: 4 }
    }
}

impl TryFrom<String> for PageSize {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let kib = match text.as_str() {
            "4KiB" => 4,
            "16KiB" => 16,
            "32KiB" => 32,
            "64KiB" => 64,
            "128KiB" => 128,
            "256KiB" => 256,
            "512KiB" => 512,
            "1MiB" => 1024,
            "2MiB" => 2048,
            "1GiB" => 1 << 20,
            _ => {
                return Err(format!(
                    "{text:?}: allowed is 4KiB, 16KiB, 32KiB, 64KiB, 128KiB, 256KiB, 512KiB, 1MiB, 2MiB, 1GiB"
                ));
            }
        };
        Ok(Self { kib })
    }
}

impl From<PageSize> for String {
    fn from(size: PageSize) -> Self {
        match size.kib {
            kib if kib >= 1 << 20 => format!("{}GiB", kib >> 20),
            kib if kib >= 1024 => format!("{}MiB", kib >> 10),
            kib => format!("{kib}KiB"),
        }
    }
}

impl Files {
    fn default_per_directory() -> Count {
        Count(1000)
    }
}

impl WaitQuiet {
    fn default_interval_ms() -> u32 {
        200
    }

    fn default_limit_s() -> u32 {
        30
    }
}

/// What is wrong with a script.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScriptError {
    /// Not the TOML of a script: the message holds line, column and what is allowed.
    #[error("{file}: {message}")]
    Syntax {
        /// The file's name.
        file: String,
        /// The parser's message.
        message: String,
    },
    /// Each step is well formed, but not the script as a whole.
    #[error("{file}: {message}")]
    Meaning {
        /// The file's name.
        file: String,
        /// What does not fit.
        message: String,
    },
    /// The steps hold more at once than the guest has.
    #[error(
        "{file}: step {step} would hold {needed_mib} MiB at once; the guest has {memory_mib} MiB, of which \
         {usable_mib} can be used (use --memory, or memory_mib in the script)"
    )]
    TooMuchMemory {
        /// The file's name.
        file: String,
        /// Number of the step in the unrolled script, from 1.
        step: usize,
        /// What the steps hold then, in MiB.
        needed_mib: u64,
        /// RAM of the guest in MiB.
        memory_mib: u32,
        /// RAM less what kernel and agent need, in MiB.
        usable_mib: u64,
    },
}

impl Script {
    fn default_memory_mib() -> u32 {
        1024
    }

    fn default_capture() -> Vec<ProcFile> {
        ProcFile::ALL.to_vec()
    }

    fn default_step_limit_s() -> u32 {
        120
    }

    /// Reads a script. `file` is its name in messages.
    ///
    /// # Errors
    /// See [`ScriptError`]. Memory is checked by [`Script::unroll`], which knows the guest's size.
    pub fn parse(file: &str, text: &str) -> Result<Self, ScriptError> {
        let meaning = |message: String| ScriptError::Meaning { file: file.into(), message };
        if text.len() > SCRIPT_MAX_BYTES {
            return Err(meaning(format!("{} bytes, at most {SCRIPT_MAX_BYTES} are allowed", text.len())));
        }
        let script: Self = toml::from_str(text)
            .map_err(|error| ScriptError::Syntax { file: file.into(), message: error.to_string() })?;
        if !(64..=65_536).contains(&script.memory_mib) {
            return Err(meaning(format!("memory_mib = {}: allowed is 64 to 65536", script.memory_mib)));
        }
        if let Some(low) = script.low_memory_mib
            && !(32..=3072).contains(&low)
        {
            return Err(meaning(format!("low_memory_mib = {low}: allowed is 32 to 3072")));
        }
        if let Some(bad) = script.command_line.iter().find(|word| !is_kernel_parameter(word)) {
            return Err(meaning(format!("command_line: {bad:?}: allowed is printable ASCII without spaces")));
        }
        if !(1..=86_400).contains(&script.step_limit_s) {
            return Err(meaning(format!("step_limit_s = {}: allowed is 1 to 86400", script.step_limit_s)));
        }
        Ok(script)
    }

    /// Makes every checkpoint a frozen one.
    pub fn freeze(&mut self) {
        fn all(steps: &mut [Step]) {
            for step in steps {
                match step {
                    Step::Checkpoint(checkpoint) => checkpoint.frozen = true,
                    Step::Repeat(repeat) => all(&mut repeat.steps),
                    _ => {}
                }
            }
        }
        all(&mut self.steps);
    }

    /// Whether the host looks into the guest's memory: at frozen checkpoints, and around batches.
    #[must_use]
    pub fn looks(&self) -> bool {
        any(&self.steps, |step| match step {
            Step::Checkpoint(checkpoint) => checkpoint.frozen,
            step => matches!(step, Step::Batches(_)),
        })
    }

    /// Whether it runs batches, for which the kernel must have our driver.
    #[must_use]
    pub fn has_batches(&self) -> bool {
        any(&self.steps, |step| matches!(step, Step::Batches(_)))
    }

    /// The steps with every `repeat` written out, checked to be possible in a guest of `memory_mib` MiB.
    ///
    /// # Errors
    /// [`ScriptError::Meaning`] where names do not fit together or there are too many steps, and
    /// [`ScriptError::TooMuchMemory`].
    pub fn unroll(&self, file: &str, memory_mib: u32) -> Result<Vec<Step>, ScriptError> {
        let meaning = |message: String| ScriptError::Meaning { file: file.into(), message };
        let mut steps = Vec::new();
        unroll_into(&self.steps, "", 0, &mut steps).map_err(meaning)?;
        check_names(&steps).map_err(meaning)?;
        check_sizes(&steps).map_err(meaning)?;
        check_memory(file, &steps, memory_mib)?;
        Ok(steps)
    }
}

/// Whether a step is of a kind, those in a `repeat` too.
fn any(steps: &[Step], is: fn(&Step) -> bool) -> bool {
    steps.iter().any(|step| match step {
        Step::Repeat(repeat) => any(&repeat.steps, is),
        step => is(step),
    })
}

fn is_kernel_parameter(word: &str) -> bool {
    !word.is_empty() && word.len() <= 256 && word.bytes().all(|byte| byte.is_ascii_graphic())
}

fn unroll_into(steps: &[Step], suffix: &str, depth: usize, into: &mut Vec<Step>) -> Result<(), String> {
    if depth > REPEAT_DEPTH_MAX {
        return Err(format!("repeat inside repeat, at most {REPEAT_DEPTH_MAX} deep is allowed"));
    }
    for step in steps {
        match step {
            Step::Repeat(repeat) => {
                for round in 1..=repeat.times.get() {
                    unroll_into(&repeat.steps, &format!("{suffix}-{round}"), depth + 1, into)?;
                    if repeat.steps.is_empty() {
                        break;
                    }
                }
            }
            Step::Checkpoint(Checkpoint { name, frozen }) => {
                let name = Name::try_from(format!("{name}{suffix}"))?;
                into.push(Step::Checkpoint(Checkpoint { name, frozen: *frozen }));
            }
            step => into.push(step.clone()),
        }
        if into.len() > STEPS_MAX {
            return Err(format!("more than {STEPS_MAX} steps"));
        }
    }
    Ok(())
}

impl Step {
    /// The step as an agent needs it: operations go from the host to the driver, past the agent.
    #[must_use]
    pub fn for_agent(&self) -> Self {
        match self {
            Self::Batches(step) => Self::Batches(Batches { given: Arc::default(), ..step.clone() }),
            step => step.clone(),
        }
    }
}

/// The name under which a step takes something that `free` gives back.
fn takes(step: &Step) -> Option<&Name> {
    match step {
        Step::Anonymous(step) => Some(&step.name),
        Step::PageTables(step) => Some(&step.name),
        Step::Files(step) => Some(&step.name),
        Step::Pipes(step) => Some(&step.name),
        Step::Atomic(step) => Some(&step.name),
        Step::Processes(step) if step.stay => Some(&step.name),
        _ => None,
    }
}

fn check_names(steps: &[Step]) -> Result<(), String> {
    let mut held: BTreeMap<&Name, &Step> = BTreeMap::new();
    let mut checkpoints = BTreeSet::new();
    for step in steps {
        if let Some(name) = takes(step)
            && held.insert(name, step).is_some()
        {
            return Err(format!(
                "{name:?} is taken while it is still held: free it first",
                name = name.as_str()
            ));
        }
        match step {
            Step::Checkpoint(checkpoint) if !checkpoints.insert(&checkpoint.name) => {
                return Err(format!("two checkpoints are named {:?}", checkpoint.name.as_str()));
            }
            Step::Free(free) => {
                let name = free.name.as_str();
                let what = held.get(&free.name).ok_or_else(|| {
                    let all: Vec<&str> = held.keys().map(|name| name.as_str()).collect();
                    format!("free: nothing is held as {name:?}; held is {all:?}")
                })?;
                match free.part {
                    Part::All => {
                        held.remove(&free.name);
                    }
                    _ if matches!(what, Step::Anonymous(_)) => {}
                    _ => {
                        return Err(format!(
                            "free: {name:?} is no anonymous memory: only part = \"all\" fits"
                        ));
                    }
                }
            }
            _ => {}
        }
    }
    if checkpoints.is_empty() && batches(steps) == 0 {
        return Err("no checkpoint and no batch: such a script could find nothing".into());
    }
    Ok(())
}

/// How many batches the steps run in all.
#[must_use]
pub fn batches(steps: &[Step]) -> u64 {
    let of = |step: &Step| if let Step::Batches(step) = step { u64::from(step.count.get()) } else { 0 };
    steps.iter().map(of).sum()
}

fn check_sizes(steps: &[Step]) -> Result<(), String> {
    if batches(steps) > BATCHES_MAX {
        return Err(format!("batches: {} in all, at most {BATCHES_MAX} are allowed", batches(steps)));
    }
    for step in steps {
        match step {
            Step::Anonymous(step) if step.page.bytes() > PMD_BYTES => {
                return Err("anonymous: a page of 1GiB can only come from the hugetlb pool".into());
            }
            Step::Batches(step) => check_batch(step)?,
            Step::Hugetlb(step) if ![PMD_BYTES, 1 << 30].contains(&step.page.bytes()) => {
                return Err("hugetlb: allowed is page = \"2MiB\" or \"1GiB\"".into());
            }
            _ => {}
        }
    }
    Ok(())
}

/// What the driver would refuse and can be seen without it.
fn check_batch(step: &Batches) -> Result<(), String> {
    if step.given.len() > OPS_MAX {
        return Err(format!("batches: {} operations, at most {OPS_MAX} are allowed", step.given.len()));
    }
    for op in step.given.iter().copied() {
        match op {
            Op::Alloc { order, .. } | Op::NolockAlloc { order, .. } if order > ORDER_MAX => {
                return Err(format!("batches: {op}: the largest order is {ORDER_MAX}"));
            }
            op if op.slot().is_some_and(|slot| slot >= SLOTS) => {
                return Err(format!("batches: {op}: slots go up to {}", SLOTS - 1));
            }
            op if op.must_sleep() && !step.may_sleep => {
                return Err(format!("batches: {op}: only in a batch with may_sleep = true"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Bytes that a step holds while its name is held. Slab costs are left out: they are the kernel's affair.
fn held_bytes(step: &Step) -> u64 {
    match step {
        Step::Anonymous(step) => step.mib.bytes(),
        Step::PageTables(step) => u64::from(step.count.get()) * PAGE_BYTES,
        Step::Files(step) => u64::from(step.count.get()) * u64::from(step.bytes).next_multiple_of(PAGE_BYTES),
        Step::Pipes(step) => u64::from(step.count.get()) * step.kib.bytes(),
        Step::Atomic(step) => u64::from(step.slabs.get()) * 8 * PAGE_BYTES,
        Step::Processes(step) if step.stay => u64::from(step.count.get()) * step.mib.bytes(),
        Step::Processes(step) => step.mib.bytes(),
        _ => 0,
    }
}

fn check_memory(file: &str, steps: &[Step], memory_mib: u32) -> Result<(), ScriptError> {
    // The kernel's own share grows with RAM: struct pages are 64 bytes a page, a 64th; twice that, and room for image
    // and agent.
    let usable_mib = u64::from(memory_mib - memory_mib / 32).saturating_sub(40);
    let mut held: BTreeMap<&Name, u64> = BTreeMap::new();
    for (index, step) in steps.iter().enumerate() {
        let bytes = held_bytes(step);
        let needed = held.values().sum::<u64>() + bytes;
        if needed > usable_mib << 20 {
            return Err(ScriptError::TooMuchMemory {
                file: file.into(),
                step: index + 1,
                needed_mib: needed >> 20,
                memory_mib,
                usable_mib,
            });
        }
        if let Some(name) = takes(step) {
            held.insert(name, bytes);
        }
        match step {
            Step::Free(Free { name, part: Part::All }) => {
                held.remove(name);
            }
            Step::Free(free) => {
                if let Some(bytes) = held.get_mut(&free.name) {
                    *bytes /= 2;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

impl fmt::Display for Step {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anonymous(step) => write!(
                formatter,
                "touch {} MiB of anonymous memory ({}) as {}",
                step.mib.0,
                String::from(step.page),
                step.name
            ),
            Self::PageTables(step) => write!(formatter, "take {} page tables as {}", step.count.0, step.name),
            Self::Files(step) => write!(formatter, "create {} files as {}", step.count.0, step.name),
            Self::PageCache(step) => write!(formatter, "read {} MiB into the page cache", step.mib.0),
            Self::Pipes(step) => write!(formatter, "fill {} pipes as {}", step.count.0, step.name),
            Self::Atomic(step) => {
                write!(formatter, "take {} slabs without sleeping as {}", step.slabs.0, step.name)
            }
            Self::Processes(step) => {
                write!(formatter, "run {} processes of {} MiB as {}", step.count.0, step.mib.0, step.name)
            }
            Self::Hugetlb(step) => {
                write!(formatter, "set the pool of {} pages to {}", String::from(step.page), step.pages)
            }
            Self::Free(step) => write!(formatter, "free {} ({:?})", step.name, step.part),
            Self::Write(step) => write!(formatter, "write {:?} to {}", step.value, step.path.0),
            Self::Compact(Empty {}) => formatter.write_str("compact all zones"),
            Self::DropCaches(caches) => write!(formatter, "drop caches ({caches:?})"),
            Self::WaitQuiet(_) => formatter.write_str("wait until quiet"),
            Self::Batches(step) => write!(formatter, "run {} batches", step.count.0),
            Self::Checkpoint(Checkpoint { name, frozen: false }) => write!(formatter, "checkpoint {name}"),
            Self::Checkpoint(Checkpoint { name, frozen: true }) => {
                write!(formatter, "checkpoint {name}, frozen")
            }
            Self::Repeat(repeat) => write!(formatter, "repeat {} times", repeat.times.0),
        }
    }
}

#[cfg(test)]
mod tests;
