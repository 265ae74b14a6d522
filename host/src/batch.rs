//! Batches of allocator operations as the driver in the guest's kernel takes them: its memory, in Rust.
//!
//! `guest-agent/driver/buddydiff-abi.h` is the same in C, and this is the one place on the host's side that knows it. An
//! observer finds the [`Driver`] once, writes a batch at [`Phase::Before`](crate::run::Phase::Before), and reads what came
//! of it at [`Phase::After`](crate::run::Phase::After).

use std::fs::File;
use std::io;

pub use guest_agent::op::{OPS_MAX, ORDER_MAX, Op, RANGE_PAGES_MAX, SLOTS, SPLITS_MAX, gfp};

use crate::observe::frozen::{Extent, Kernel, Ram, ReadError};

const SYMBOL: &str = "buddydiff_batch";
const MAGIC: u64 = u64::from_le_bytes(*b"bdbatch1");
const ABI: u32 = 2;
const HEADER_BYTES: usize = 24;
const OP_BYTES: usize = 32;
const RESULT_BYTES: usize = 16;
const RESULTS_AT: usize = HEADER_BYTES + OPS_MAX * OP_BYTES;
pub(crate) const AREA_BYTES: usize = RESULTS_AT + OPS_MAX * RESULT_BYTES;
/// Where `state` is; it is written last.
const COUNT_AT: usize = 12;
const BAD_COUNT: u32 = u32::MAX;

/// `bd_batch.state`.
const READY: u32 = 1;
pub(crate) const DONE: u32 = 2;
pub(crate) const REFUSED: u32 = 3;

/// An operation as it is in memory: `struct bd_op`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Its number.
    pub kind: u32,
    /// For allocations.
    pub order: u32,
    /// For allocations.
    pub gfp: u32,
    /// The slot.
    pub slot: u32,
    /// The node, -1 for any; the number of the piece; the first pfn of a range.
    pub a: u64,
    /// Pages of a range; number of a zone.
    pub b: u64,
}

impl From<Op> for Record {
    fn from(op: Op) -> Self {
        let any = |node: Option<u32>| node.map_or(u64::MAX, u64::from);
        match op {
            Op::Alloc { slot, order, gfp, node } => Self { kind: 1, order, gfp, slot, a: any(node), b: 0 },
            Op::Free { slot } => Self { kind: 2, slot, ..Self::default() },
            Op::Split { slot } => Self { kind: 3, slot, ..Self::default() },
            Op::FreePiece { slot, piece } => Self { kind: 4, slot, a: piece.into(), ..Self::default() },
            Op::Drain => Self { kind: 5, ..Self::default() },
            Op::NolockAlloc { slot, order, node } => {
                Self { kind: 6, order, slot, a: any(node), ..Self::default() }
            }
            Op::NolockFree { slot } => Self { kind: 7, slot, ..Self::default() },
            Op::ContigAlloc { slot, pfn, pages, gfp } => {
                Self { kind: 8, gfp, slot, a: pfn, b: pages, ..Self::default() }
            }
            Op::ContigFree { slot } => Self { kind: 9, slot, ..Self::default() },
            Op::Isolate { slot, pfn, pages } => Self { kind: 10, slot, a: pfn, b: pages, ..Self::default() },
            Op::Unisolate { slot } => Self { kind: 11, slot, ..Self::default() },
            Op::DrainAll => Self { kind: 12, ..Self::default() },
            Op::PcpDisable { node, zone } => {
                Self { kind: 13, a: node.into(), b: zone.into(), ..Self::default() }
            }
            Op::PcpEnable => Self { kind: 14, ..Self::default() },
        }
    }
}

impl Record {
    /// The operation, if it is one.
    #[must_use]
    pub fn op(self) -> Option<Op> {
        let Self { slot, order, gfp, .. } = self;
        let node = || if self.a == u64::MAX { Some(None) } else { u32::try_from(self.a).ok().map(Some) };
        Some(match self.kind {
            1 => Op::Alloc { slot, order, gfp, node: node()? },
            2 => Op::Free { slot },
            3 => Op::Split { slot },
            4 => Op::FreePiece { slot, piece: u32::try_from(self.a).ok()? },
            5 => Op::Drain,
            6 => Op::NolockAlloc { slot, order, node: node()? },
            7 => Op::NolockFree { slot },
            8 => Op::ContigAlloc { slot, pfn: self.a, pages: self.b, gfp },
            9 => Op::ContigFree { slot },
            10 => Op::Isolate { slot, pfn: self.a, pages: self.b },
            11 => Op::Unisolate { slot },
            12 => Op::DrainAll,
            13 => Op::PcpDisable { node: u32::try_from(self.a).ok()?, zone: u32::try_from(self.b).ok()? },
            14 => Op::PcpEnable,
            _ => return None,
        })
    }

    /// The bytes in memory.
    #[must_use]
    pub fn encode(self) -> [u8; OP_BYTES] {
        let mut bytes = [0; OP_BYTES];
        for (at, word) in [self.kind, self.order, self.gfp, self.slot].into_iter().enumerate() {
            bytes[4 * at..4 * at + 4].copy_from_slice(&word.to_le_bytes());
        }
        bytes[16..24].copy_from_slice(&self.a.to_le_bytes());
        bytes[24..].copy_from_slice(&self.b.to_le_bytes());
        bytes
    }

    /// From the bytes in memory.
    #[must_use]
    pub fn decode(bytes: &[u8; OP_BYTES]) -> Self {
        let [kind, order, gfp, slot] = [0, 4, 8, 12].map(|at| u32_at(bytes, at));
        Self { kind, order, gfp, slot, a: u64_at(bytes, 16), b: u64_at(bytes, 24) }
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..at + 8].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

/// What came of an operation: `struct bd_result`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpResult {
    /// The pfn of an allocation or a range, 0 of anything else; below zero if it was not done, see [`OpResult::value`].
    pub raw: i64,
    /// The guest's time stamp counter after it.
    pub tsc: u64,
}

/// Why an operation was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotDone {
    /// There was no page for it.
    #[error("no page")]
    Failed,
    /// This kernel has no such operation.
    #[error("not in this kernel")]
    NoSuch,
    /// An operation of the batch that it builds on was not done.
    #[error("skipped")]
    Skipped,
    /// What it gave means nothing.
    #[error("result {0}")]
    Unknown(i64),
}

impl OpResult {
    /// The pfn of an allocation, 0 of anything else.
    ///
    /// # Errors
    /// Where it was not done.
    pub fn value(self) -> Result<u64, NotDone> {
        u64::try_from(self.raw).map_err(|_| match self.raw {
            -1 => NotDone::Failed,
            -2 => NotDone::NoSuch,
            -3 => NotDone::Skipped,
            raw => NotDone::Unknown(raw),
        })
    }

    /// From the bytes in memory.
    #[must_use]
    pub fn decode(bytes: &[u8; RESULT_BYTES]) -> Self {
        Self { raw: u64_at(bytes, 0).cast_signed(), tsc: u64_at(bytes, 8) }
    }
}

/// What the driver says is wrong with an operation: `enum bd_wrong`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Wrong {
    /// There is no such kind of operation.
    #[error("no such kind of operation")]
    Kind,
    /// The order is above [`ORDER_MAX`].
    #[error("the order is above {ORDER_MAX}")]
    Order,
    /// There is no such slot.
    #[error("no such slot")]
    Slot,
    /// The GFP flags may sleep, or are not one request.
    #[error("flags that may sleep, or are not one request")]
    Gfp,
    /// The node has no memory.
    #[error("a node without memory")]
    Node,
    /// The slot is full.
    #[error("the slot is full")]
    Full,
    /// The slot is empty.
    #[error("the slot is empty")]
    Empty,
    /// The slot is split.
    #[error("the slot is split")]
    Split,
    /// The slot is not split.
    #[error("the slot is not split")]
    NotSplit,
    /// There is no such piece, or it is free already.
    #[error("no such piece, or a free one")]
    Piece,
    /// A compound page cannot be split.
    #[error("a compound page cannot be split")]
    Compound,
    /// More than [`SPLITS_MAX`] slots would be split.
    #[error("more than {SPLITS_MAX} split slots")]
    TooMany,
    /// It may sleep, and the batch may not.
    #[error("only in a batch that may sleep")]
    MustSleep,
    /// The slot holds a range, or a range of another kind.
    #[error("the slot holds something else")]
    OtherSlot,
    /// Some of the range is no memory, or of another zone.
    #[error("a range that is not all in one zone, or too large")]
    Range,
    /// The zone has no memory.
    #[error("a zone without memory")]
    Zone,
    /// Per-CPU lists are disabled already.
    #[error("per-CPU lists are disabled already")]
    PcpOff,
    /// No per-CPU lists are disabled.
    #[error("no per-CPU lists are disabled")]
    PcpOn,
    /// A number that means nothing.
    #[error("reason {0}")]
    Unknown(i64),
}

impl Wrong {
    fn of(number: i64) -> Self {
        const ALL: [Wrong; 18] = [
            Wrong::Kind,
            Wrong::Order,
            Wrong::Slot,
            Wrong::Gfp,
            Wrong::Node,
            Wrong::Full,
            Wrong::Empty,
            Wrong::Split,
            Wrong::NotSplit,
            Wrong::Piece,
            Wrong::Compound,
            Wrong::TooMany,
            Wrong::MustSleep,
            Wrong::OtherSlot,
            Wrong::Range,
            Wrong::Zone,
            Wrong::PcpOff,
            Wrong::PcpOn,
        ];
        let index = number.checked_sub(1).and_then(|index| usize::try_from(index).ok());
        index.and_then(|index| ALL.get(index)).copied().unwrap_or(Self::Unknown(number))
    }
}

/// What came of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It was run: a result for each operation.
    Done(Vec<OpResult>),
    /// Nothing of it was run.
    Refused {
        /// Number of the operation that is wrong.
        op: usize,
        /// What is wrong with it.
        wrong: Wrong,
    },
}

/// Why no batch can be run. All mean *no verdict*.
#[derive(Debug, thiserror::Error)]
pub enum BatchError {
    /// The kernel was built without the driver.
    #[error("the kernel has no driver: build it with one (cargo xtask kernel build --driver)")]
    NoDriver,
    /// The driver is of another version than this program.
    #[error("the driver's memory is not what this program knows: {0}")]
    OtherDriver(String),
    /// The guest's RAM cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The file that holds it cannot be.
    #[error("failed to {doing} the driver's memory: {source}")]
    Io {
        /// What was being done.
        doing: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// More operations than a batch may have.
    #[error("a batch of {0} operations, at most {OPS_MAX} are allowed")]
    TooLong(usize),
    /// The driver did not take the batch that was written, or none was.
    #[error("the driver did not run the batch: its state is {0}")]
    NotRun(u32),
}

/// The driver's memory.
#[derive(Clone, Debug)]
pub struct Driver {
    memory: Extent,
}

impl Driver {
    /// Finds it in `ram`, in which `kernel` runs. It stays there.
    ///
    /// # Errors
    /// See [`BatchError`].
    pub fn find(kernel: &Kernel, ram: &Ram, file: &File) -> Result<Self, BatchError> {
        let memory = match Extent::find(kernel, ram, SYMBOL) {
            Err(ReadError::Symbol(name)) if name == SYMBOL => return Err(BatchError::NoDriver),
            found => found?,
        };
        let driver = Self { memory };
        if driver.memory.bytes() != AREA_BYTES as u64 {
            let text = format!("{} bytes instead of {AREA_BYTES}", driver.memory.bytes());
            return Err(BatchError::OtherDriver(text));
        }
        driver.header(file)?;
        Ok(driver)
    }

    /// Reads `count`, `state` and `error`.
    fn header(&self, file: &File) -> Result<[u32; 3], BatchError> {
        let mut bytes = [0; HEADER_BYTES];
        self.read_at(file, 0, &mut bytes)?;
        let (magic, abi) = (u64_at(&bytes, 0), u32_at(&bytes, 8));
        if (magic, abi) != (MAGIC, ABI) {
            return Err(BatchError::OtherDriver(format!("magic {magic:#x}, version {abi}")));
        }
        Ok([COUNT_AT, 16, 20].map(|at| u32_at(&bytes, at)))
    }

    /// Writes a batch, which the driver runs once the machine goes on.
    ///
    /// # Errors
    /// See [`BatchError`].
    pub fn write(&self, file: &File, ops: &[Op]) -> Result<(), BatchError> {
        let records: Vec<Record> = ops.iter().copied().map(Record::from).collect();
        self.write_records(file, &records)
    }

    /// The same for operations that may be none.
    ///
    /// # Errors
    /// See [`BatchError`].
    pub fn write_records(&self, file: &File, records: &[Record]) -> Result<(), BatchError> {
        if records.len() > OPS_MAX {
            return Err(BatchError::TooLong(records.len()));
        }
        // Count, state, error; then the operations.
        let mut bytes = Vec::with_capacity(12 + records.len() * OP_BYTES);
        for word in [records.len() as u32, READY, 0] {
            bytes.extend(word.to_le_bytes());
        }
        records.iter().for_each(|record| bytes.extend(record.encode()));
        self.memory
            .write(file, COUNT_AT as u64, &bytes)
            .map_err(|source| BatchError::Io { doing: "write", source })
    }

    /// Reads what came of the batch that was written last, of `count` operations.
    ///
    /// # Errors
    /// See [`BatchError`].
    pub fn read(&self, file: &File, count: usize) -> Result<Answer, BatchError> {
        let [found, state, error] = self.header(file)?;
        if found as usize != count {
            return Err(BatchError::OtherDriver(format!("{found} operations instead of {count}")));
        }
        match state {
            DONE => Ok(Answer::Done(self.results(file, 0, count)?)),
            REFUSED if error == BAD_COUNT => Err(BatchError::TooLong(count)),
            REFUSED if (error as usize) < count => {
                let op = error as usize;
                let raw = self.results(file, op, 1)?.first().map_or(0, |result| result.raw);
                Ok(Answer::Refused { op, wrong: Wrong::of(raw) })
            }
            REFUSED => Err(BatchError::OtherDriver(format!("operation {error} of {count} is wrong"))),
            state => Err(BatchError::NotRun(state)),
        }
    }

    fn results(&self, file: &File, from: usize, count: usize) -> Result<Vec<OpResult>, BatchError> {
        let mut bytes = vec![0; count.min(OPS_MAX) * RESULT_BYTES];
        self.read_at(file, RESULTS_AT + from * RESULT_BYTES, &mut bytes)?;
        let (results, _) = bytes.as_chunks::<RESULT_BYTES>();
        Ok(results.iter().map(OpResult::decode).collect())
    }

    fn read_at(&self, file: &File, at: usize, into: &mut [u8]) -> Result<(), BatchError> {
        self.memory.read(file, at as u64, into).map_err(|source| BatchError::Io { doing: "read", source })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::FileExt;

    use proptest::prelude::*;

    use super::*;
    pub(crate) use super::{DONE, REFUSED};

    /// Does what the driver in this RAM does when its kernel boots.
    pub(crate) fn magic(kernel: &Kernel, ram: &Ram, file: &File) {
        let memory = Extent::find(kernel, ram, SYMBOL).unwrap();
        memory.write(file, 0, &MAGIC.to_le_bytes()).unwrap();
        memory.write(file, 8, &ABI.to_le_bytes()).unwrap();
    }

    /// A driver whose memory is in two pieces, and the file that it is in, as the driver has it after boot.
    fn driver() -> (Driver, File) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(2 << 20).unwrap();
        let (first, second) = (0x1_2000, 0x10_0000);
        let split = 300_000;
        let memory = Extent::played(&[(first, split), (second, AREA_BYTES as u64 - split)]);
        file.write_all_at(&MAGIC.to_le_bytes(), first).unwrap();
        file.write_all_at(&ABI.to_le_bytes(), first + 8).unwrap();
        (Driver { memory }, file)
    }

    /// Plays the driver: what it finds, and what it answers.
    pub(crate) fn play(
        driver: &Driver,
        file: &File,
        state: u32,
        error: u32,
        results: &[(i64, u64)],
    ) -> Vec<Record> {
        let [count, ready, _] = driver.header(file).unwrap();
        assert_eq!(ready, READY);
        let mut bytes = vec![0; count as usize * OP_BYTES];
        driver.memory.read(file, HEADER_BYTES as u64, &mut bytes).unwrap();
        for (at, (value, tsc)) in results.iter().enumerate() {
            let bytes = [value.to_le_bytes(), tsc.to_le_bytes()].concat();
            driver.memory.write(file, (RESULTS_AT + at * RESULT_BYTES) as u64, &bytes).unwrap();
        }
        driver.memory.write(file, 16, &[state.to_le_bytes(), error.to_le_bytes()].concat()).unwrap();
        bytes.as_chunks::<OP_BYTES>().0.iter().map(Record::decode).collect()
    }

    fn any_op() -> impl Strategy<Value = Op> {
        (1_u32..15, 0..SLOTS, 0..=ORDER_MAX, any::<u32>(), prop::option::of(0_u32..4), 0_u32..1024).prop_map(
            |(kind, slot, order, gfp, node, piece)| match kind {
                8 => Op::ContigAlloc { slot, pfn: piece.into(), pages: slot.into(), gfp },
                9 => Op::ContigFree { slot },
                10 => Op::Isolate { slot, pfn: slot.into(), pages: piece.into() },
                11 => Op::Unisolate { slot },
                12 => Op::DrainAll,
                13 => Op::PcpDisable { node: node.unwrap_or(0), zone: order },
                14 => Op::PcpEnable,
                1 => Op::Alloc { slot, order, gfp, node },
                2 => Op::Free { slot },
                3 => Op::Split { slot },
                4 => Op::FreePiece { slot, piece },
                5 => Op::Drain,
                6 => Op::NolockAlloc { slot, order, node },
                _ => Op::NolockFree { slot },
            },
        )
    }

    proptest! {
        #[test]
        fn what_the_host_writes_the_driver_finds(ops in prop::collection::vec(any_op(), 0..300)) {
            let (driver, file) = driver();
            driver.write(&file, &ops).unwrap();
            let results: Vec<(i64, u64)> = (0..ops.len()).map(|at| (at as i64 - 3, at as u64)).collect();
            let found = play(&driver, &file, DONE, 0, &results);
            prop_assert_eq!(found.iter().map(|record| record.op()).collect::<Option<Vec<_>>>(), Some(ops.clone()));
            let Answer::Done(read) = driver.read(&file, ops.len()).unwrap() else { panic!("it is done") };
            let read: Vec<(i64, u64)> = read.iter().map(|result| (result.raw, result.tsc)).collect();
            prop_assert_eq!(read, results);
        }

        #[test]
        fn any_bytes_are_a_record(bytes in any::<[u8; OP_BYTES]>()) {
            let record = Record::decode(&bytes);
            prop_assert_eq!(record.encode(), bytes);
            if let Some(op) = record.op() {
                prop_assert_eq!(Record::from(op).op(), Some(op));
            }
        }

        #[test]
        fn any_memory_is_an_answer_or_an_error(header in any::<[u32; 3]>(), count in 0..=OPS_MAX, same: bool) {
            let (driver, file) = driver();
            let header = if same { [count as u32, header[1] % 5, header[2]] } else { header };
            driver.memory.write(&file, COUNT_AT as u64, &header.map(u32::to_le_bytes).concat()).unwrap();
            let _ = driver.read(&file, count);
        }
    }

    #[test]
    fn a_refusal_names_operation_and_reason() {
        let (driver, file) = driver();
        driver.write(&file, &[Op::Drain, Op::Free { slot: 3 }]).unwrap();
        play(&driver, &file, REFUSED, 1, &[(0, 0), (7, 0)]);
        assert_eq!(driver.read(&file, 2).unwrap(), Answer::Refused { op: 1, wrong: Wrong::Empty });
        let wrong = [0, 1, 18, 19, i64::MIN].map(Wrong::of);
        let unknown = Wrong::Unknown;
        assert_eq!(wrong, [unknown(0), Wrong::Kind, Wrong::PcpOn, unknown(19), unknown(i64::MIN)]);
    }

    #[test]
    fn what_was_not_run_is_an_error() {
        let (driver, file) = driver();
        assert!(matches!(driver.read(&file, 0), Err(BatchError::NotRun(0))));
        driver.write(&file, &[Op::Drain]).unwrap();
        assert!(matches!(driver.read(&file, 1), Err(BatchError::NotRun(READY))));
        assert!(matches!(driver.read(&file, 2), Err(BatchError::OtherDriver(_))));
        let long = vec![Op::Drain; OPS_MAX + 1];
        assert!(matches!(driver.write(&file, &long), Err(BatchError::TooLong(_))));
        driver.write(&file, &long[1..]).unwrap();
        driver.memory.write(&file, 8, &[9]).unwrap();
        assert!(matches!(driver.read(&file, OPS_MAX), Err(BatchError::OtherDriver(_))));
    }

    #[test]
    fn a_result_is_a_number_or_why_there_is_none() {
        let values = [7, 0, -1, -2, -3, -4].map(|raw| OpResult { raw, tsc: 0 }.value());
        let (failed, no_such, skipped) = (NotDone::Failed, NotDone::NoSuch, NotDone::Skipped);
        let bad = [failed, no_such, skipped, NotDone::Unknown(-4)].map(Err);
        assert_eq!(values, [Ok(7), Ok(0), bad[0], bad[1], bad[2], bad[3]]);
    }

    /// The driver's own text says the same.
    #[test]
    fn the_driver_has_the_same_numbers() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../guest-agent/driver/");
        let text = std::fs::read_to_string(format!("{folder}buddydiff-abi.h")).unwrap();
        let number = |name: &str| {
            let line = text.lines().find(|line| {
                let mut words = line.split_whitespace().filter(|word| *word != "#define");
                words.next() == Some(name)
            });
            let mut words = line.unwrap().split_whitespace().filter(|word| !["#define", "="].contains(word));
            let word = words.nth(1).unwrap().trim_matches(|char: char| "(),".contains(char));
            let word = word.trim_end_matches(['U', 'L']);
            match word.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16).unwrap().cast_signed(),
                None => word.parse().unwrap(),
            }
        };
        assert_eq!(number("BD_MAGIC"), MAGIC.cast_signed());
        assert_eq!((number("BD_ABI"), number("BD_OPS")), (ABI.into(), OPS_MAX as i64));
        assert_eq!(number("BD_RANGE_PAGES"), RANGE_PAGES_MAX.cast_signed());
        assert_eq!((number("BD_SLOTS"), number("BD_SPLITS")), (SLOTS.into(), SPLITS_MAX as i64));
        assert_eq!((number("BD_MAX_ORDER"), number("BD_BAD_COUNT")), (ORDER_MAX.into(), BAD_COUNT.into()));
        assert_eq!(["BD_READY", "BD_DONE", "BD_REFUSED"].map(number), [READY, DONE, REFUSED].map(i64::from));
        let wrong = [
            ("BD_BAD_KIND", Wrong::Kind),
            ("BD_BAD_ORDER", Wrong::Order),
            ("BD_BAD_SLOT", Wrong::Slot),
            ("BD_BAD_GFP", Wrong::Gfp),
            ("BD_BAD_NODE", Wrong::Node),
            ("BD_SLOT_FULL", Wrong::Full),
            ("BD_SLOT_EMPTY", Wrong::Empty),
            ("BD_SLOT_SPLIT", Wrong::Split),
            ("BD_NOT_SPLIT", Wrong::NotSplit),
            ("BD_BAD_PIECE", Wrong::Piece),
            ("BD_COMPOUND", Wrong::Compound),
            ("BD_TOO_MANY", Wrong::TooMany),
            ("BD_MUST_SLEEP", Wrong::MustSleep),
            ("BD_OTHER_SLOT", Wrong::OtherSlot),
            ("BD_BAD_RANGE", Wrong::Range),
            ("BD_BAD_ZONE", Wrong::Zone),
            ("BD_PCP_OFF", Wrong::PcpOff),
            ("BD_PCP_ON", Wrong::PcpOn),
        ];
        for (name, wrong) in wrong {
            assert_eq!(Wrong::of(number(name)), wrong, "{name}");
        }
        let slot = 0;
        let kinds = [
            ("BD_ALLOC", Op::Alloc { slot, order: 0, gfp: 0, node: None }),
            ("BD_FREE", Op::Free { slot }),
            ("BD_SPLIT", Op::Split { slot }),
            ("BD_FREE_PIECE", Op::FreePiece { slot, piece: 0 }),
            ("BD_DRAIN", Op::Drain),
            ("BD_NOLOCK_ALLOC", Op::NolockAlloc { slot, order: 0, node: None }),
            ("BD_NOLOCK_FREE", Op::NolockFree { slot }),
            ("BD_CONTIG_ALLOC", Op::ContigAlloc { slot, pfn: 0, pages: 0, gfp: 0 }),
            ("BD_CONTIG_FREE", Op::ContigFree { slot }),
            ("BD_ISOLATE", Op::Isolate { slot, pfn: 0, pages: 0 }),
            ("BD_UNISOLATE", Op::Unisolate { slot }),
            ("BD_DRAIN_ALL", Op::DrainAll),
            ("BD_PCP_DISABLE", Op::PcpDisable { node: 0, zone: 0 }),
            ("BD_PCP_ENABLE", Op::PcpEnable),
        ];
        for (name, op) in kinds {
            assert_eq!(number(name), i64::from(Record::from(op).kind), "{name}");
        }
        for (name, value) in [("BD_FAILED", -1), ("BD_NO_SUCH", -2), ("BD_SKIPPED", -3)] {
            assert_eq!(number(name), value, "{name}");
        }
        let text = std::fs::read_to_string(format!("{folder}buddydiff.c")).unwrap();
        assert!(text.contains(&format!("BD_BELL_PORT\t{:#x}\n", guest_agent::wire::BELL_PORT)));
        assert!(text.contains(&format!("BD_BELL_RING\t{}\n", guest_agent::wire::BELL_RING)));
        use guest_agent::wire::{DRIVER_FREE, DRIVER_RUN, DRIVER_RUN_SLEEPING};
        for command in [DRIVER_RUN, DRIVER_RUN_SLEEPING, DRIVER_FREE] {
            assert!(text.contains(&format!("case '{}':", char::from(command))));
        }
    }
}
