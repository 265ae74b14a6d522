//! Messages from the agent to the host, and the channel that carries them.
//!
//! The channel is memory that belongs to the host and lies outside the guest's RAM: the guest kernel does not know it
//! as memory, so observing costs the allocator nothing. The agent appends frames and then advances [`WRITTEN_OFFSET`];
//! the host reads what lies below that mark. Nothing flows back, so the host cannot disturb a deterministic guest.
//!
//! The *doorbell* is an I/O port. The agent announces by [`Message::Bell`] that it rings next; the machine then stands
//! still right behind the instruction that rang, the host reads the guest's RAM, and the machine goes on. After a
//! [`Message::Batch`] it is the driver in the kernel that rings, twice: before the batch, which the host then writes into
//! the guest's RAM, and after it.
//!
//! Each frame carries a sequence number and a CRC-32 over number, length and payload. A frame that is lost, cut or
//! altered ends the stream with an error; what it would have said is never guessed.

use serde::{Deserialize, Serialize};

use crate::script::Step;

/// Version of everything in this file; host and agent are built from one tree, so a mismatch is a stale agent.
pub const PROTOCOL: u16 = 4;

/// First eight bytes of a channel, little endian, written by the host: an agent that maps anything else stops.
pub const CHANNEL_MAGIC: u64 = u64::from_le_bytes(*b"buddych1");
/// Byte offset in the channel of a little-endian `u64`: bytes of frames written so far. Kept on a cache line apart.
pub const WRITTEN_OFFSET: usize = 64;
/// Byte offset in the channel of the first frame.
pub const FRAMES_OFFSET: usize = 4096;
/// Largest payload of one frame in bytes. Files longer than a chunk are sent as several messages.
pub const PAYLOAD_MAX: usize = 256 * 1024;
/// Bytes of one file that a single [`Message::Proc`] carries at most.
pub const CHUNK_MAX: usize = 128 * 1024;
/// Bytes before each payload: magic, sequence number, payload length, CRC-32, all little-endian `u32`.
pub const HEADER_LEN: usize = 16;

/// The doorbell, on every backend: a byte of [`BELL_RING`] written to this I/O port makes the machine stand still. It is
/// the port of QEMU's pvpanic device, and the value by which a guest says there that it panics
/// (docs/specs/pvpanic.txt): a kernel that really does so has not announced it.
pub const BELL_PORT: u16 = 0x505;
/// See [`BELL_PORT`].
pub const BELL_RING: u8 = 1;
/// Milliseconds of its own clock in which an agent on several CPUs does nothing after it rang: so long in all the host
/// may let the machine go on, for another CPU to let go of a lock, before what it sees is no longer what was announced.
pub const BELL_REST_MS: u64 = 200;

const FRAME_MAGIC: u32 = u32::from_le_bytes(*b"bdfr");

/// The driver's file in the guest, and the bytes that are commands to it.
pub const DRIVER_PATH: &str = "/proc/buddydiff";
/// See [`DRIVER_PATH`]: run a batch.
pub const DRIVER_RUN: u8 = b'r';
/// See [`DRIVER_PATH`]: run a batch that may sleep.
pub const DRIVER_RUN_SLEEPING: u8 = b's';
/// See [`DRIVER_PATH`]: free all that batches hold.
pub const DRIVER_FREE: u8 = b'q';

/// Where the plan lies in the guest's initramfs.
pub const PLAN_PATH: &str = "/plan";

/// All that an agent has to know, put into its initramfs by the host: nothing reaches a guest while it runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// [`PROTOCOL`] of the host.
    pub protocol: u16,
    /// Guest-physical address of the channel in bytes, page aligned.
    pub channel_address: u64,
    /// Size of the channel in bytes.
    pub channel_len: u64,
    /// Seed for whatever a step draws at random.
    pub seed: u64,
    /// Files that each checkpoint captures, in this order.
    pub capture: Vec<ProcFile>,
    /// Steps of the script, repeats already unrolled.
    pub steps: Vec<Step>,
}

/// A file under `/proc` that a checkpoint captures, sent as the raw bytes the kernel gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProcFile {
    /// `/proc/buddyinfo`: free blocks by zone and order.
    Buddyinfo,
    /// `/proc/zoneinfo`: zone sizes, watermarks, counters, per-CPU lists.
    Zoneinfo,
    /// `/proc/vmstat`: counters and events of the whole machine.
    Vmstat,
    /// `/proc/pagetypeinfo`: free blocks by zone, migratetype and order; pageblocks by type.
    Pagetypeinfo,
    /// `/proc/kpageflags`: one little-endian 64-bit word a pfn, from pfn 0.
    Kpageflags,
}

impl ProcFile {
    /// Every file, in the order of capture: first the two whose difference matters most, read back to back.
    pub const ALL: [Self; 5] =
        [Self::Buddyinfo, Self::Zoneinfo, Self::Vmstat, Self::Pagetypeinfo, Self::Kpageflags];

    /// Its path in the guest.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::Buddyinfo => "/proc/buddyinfo",
            Self::Zoneinfo => "/proc/zoneinfo",
            Self::Vmstat => "/proc/vmstat",
            Self::Pagetypeinfo => "/proc/pagetypeinfo",
            Self::Kpageflags => "/proc/kpageflags",
        }
    }
}

/// What the agent says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// First word: who speaks.
    Hello {
        /// [`PROTOCOL`] of the agent.
        protocol: u16,
        /// `uname -r`.
        release: String,
    },
    /// The agent has all the memory that it needs for itself; the first step follows.
    Ready {
        /// Nanoseconds since boot by the guest's clock.
        uptime_ns: u64,
    },
    /// A step begins. Also the sign of life that the host's time limits watch.
    Step {
        /// Its index in [`Plan::steps`].
        index: u32,
        /// Nanoseconds since boot by the guest's clock.
        uptime_ns: u64,
    },
    /// Part of a file of the checkpoint that step `index` takes; parts come in order.
    Proc {
        /// Index in [`Plan::steps`] of the checkpoint.
        index: u32,
        /// Which file.
        file: ProcFile,
        /// Whether this is its last part.
        last: bool,
        /// The bytes as read.
        #[serde(with = "bytes")]
        bytes: Vec<u8>,
    },
    /// The texts of a frozen checkpoint are read, and the agent rings the doorbell next. They are sent afterwards.
    Bell {
        /// Index in [`Plan::steps`].
        index: u32,
    },
    /// The agent makes the driver run a batch next: it rings before and after it, and nothing is said in between.
    Batch {
        /// Index in [`Plan::steps`].
        index: u32,
        /// Number of the batch in its step, from 0.
        batch: u32,
    },
    /// All files of the checkpoint are sent.
    Checkpoint {
        /// Index in [`Plan::steps`].
        index: u32,
        /// Whether buddyinfo was the same before and after the other texts were read.
        still: bool,
        /// Whether it was the same again after kpageflags was read.
        still_after_flags: bool,
        /// Files that this kernel does not have.
        missing: Vec<ProcFile>,
    },
    /// A step could not do what the script asks: the run has no verdict.
    Failed {
        /// Index in [`Plan::steps`], or none before the first.
        index: Option<u32>,
        /// What failed, in words.
        text: String,
    },
    /// Last word.
    End {
        /// Steps that were run.
        steps: u32,
        /// Value of `/proc/sys/kernel/tainted`.
        tainted: u64,
        /// Nanoseconds since boot by the guest's clock.
        uptime_ns: u64,
    },
}

/// serde handles `Vec<u8>` element by element; a checkpoint has megabytes of them.
mod bytes {
    use serde::{Deserializer, Serializer, de::Visitor};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(bytes)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        struct Bytes;
        impl Visitor<'_> for Bytes {
            type Value = Vec<u8>;
            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("bytes")
            }
            fn visit_bytes<E>(self, bytes: &[u8]) -> Result<Self::Value, E> {
                Ok(bytes.to_vec())
            }
        }
        deserializer.deserialize_bytes(Bytes)
    }
}

/// Why a message cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum EncodeError {
    /// The message is larger than [`PAYLOAD_MAX`] or than the room left.
    #[error("a message does not fit: {0}")]
    DoesNotFit(postcard::Error),
}

/// Writes `message` as frame number `seq` at the start of `room` and returns the frame's length in bytes.
///
/// # Errors
/// Where the frame does not fit; `room` then holds garbage that was never announced.
pub fn encode(seq: u32, message: &Message, room: &mut [u8]) -> Result<usize, EncodeError> {
    let (header, rest) = room
        .split_at_mut_checked(HEADER_LEN)
        .ok_or(EncodeError::DoesNotFit(postcard::Error::SerializeBufferFull))?;
    let limit = rest.len().min(PAYLOAD_MAX);
    let payload = postcard::to_slice(message, &mut rest[..limit]).map_err(EncodeError::DoesNotFit)?;
    let len = payload.len() as u32;
    header[0..4].copy_from_slice(&FRAME_MAGIC.to_le_bytes());
    header[4..8].copy_from_slice(&seq.to_le_bytes());
    header[8..12].copy_from_slice(&len.to_le_bytes());
    header[12..16].copy_from_slice(&checksum(seq, payload).to_le_bytes());
    Ok(HEADER_LEN + payload.len())
}

fn checksum(seq: u32, payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&seq.to_le_bytes());
    hasher.update(&(payload.len() as u32).to_le_bytes());
    hasher.update(payload);
    hasher.finalize()
}

/// Why a stream of frames cannot be read on. All mean *no verdict*.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Not a frame where one should begin.
    #[error("frame {seq}: no frame begins where one should")]
    NoFrame {
        /// Number of the frame that was due.
        seq: u32,
    },
    /// A frame is missing or came twice.
    #[error("frame {due} was due, frame {found} came")]
    OutOfOrder {
        /// The number that was due.
        due: u32,
        /// The number that came.
        found: u32,
    },
    /// A length beyond [`PAYLOAD_MAX`].
    #[error("frame {seq}: a payload of {len} bytes, at most {PAYLOAD_MAX} are allowed")]
    TooLong {
        /// Number of the frame.
        seq: u32,
        /// Its length in bytes.
        len: u32,
    },
    /// The checksum does not match.
    #[error("frame {seq}: the checksum does not match")]
    Altered {
        /// Number of the frame.
        seq: u32,
    },
    /// The payload is no message.
    #[error("frame {seq}: not a message: {why}")]
    NotAMessage {
        /// Number of the frame.
        seq: u32,
        /// The decoder's reason.
        why: String,
    },
}

/// Turns bytes, in pieces of any size, into messages. After an error it stays in that error.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    seq: u32,
    failed: Option<DecodeError>,
}

impl Decoder {
    /// Adds bytes as they arrive. Holds at most what the caller pushed and did not yet take as messages.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next message, or none where more bytes are needed.
    ///
    /// # Errors
    /// See [`DecodeError`]; every later call gives the same error.
    pub fn next_message(&mut self) -> Result<Option<Message>, DecodeError> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let (message, used) = match decode(&self.buffer, self.seq) {
            Ok(Some(decoded)) => decoded,
            Ok(None) => return Ok(None),
            Err(error) => {
                self.failed = Some(error.clone());
                return Err(error);
            }
        };
        self.buffer.drain(..used);
        self.seq += 1;
        Ok(Some(message))
    }

    /// Bytes that are no whole frame yet. At the end of a run there must be none.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.buffer.len()
    }
}

/// Decodes frame number `due` at the start of `bytes`; gives it with its length, or none where it is not all there.
fn decode(bytes: &[u8], due: u32) -> Result<Option<(Message, usize)>, DecodeError> {
    let Some((header, rest)) = bytes.split_at_checked(HEADER_LEN) else { return Ok(None) };
    let field = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let (magic, found, len, crc) = (field(0), field(4), field(8), field(12));
    if magic != FRAME_MAGIC {
        return Err(DecodeError::NoFrame { seq: due });
    }
    if found != due {
        return Err(DecodeError::OutOfOrder { due, found });
    }
    if len as usize > PAYLOAD_MAX {
        return Err(DecodeError::TooLong { seq: due, len });
    }
    let Some(payload) = rest.get(..len as usize) else { return Ok(None) };
    if checksum(due, payload) != crc {
        return Err(DecodeError::Altered { seq: due });
    }
    let (message, left) = postcard::take_from_bytes(payload)
        .map_err(|error| DecodeError::NotAMessage { seq: due, why: error.to_string() })?;
    if !left.is_empty() {
        return Err(DecodeError::NotAMessage { seq: due, why: format!("{} bytes left over", left.len()) });
    }
    Ok(Some((message, HEADER_LEN + payload.len())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stream(messages: &[Message]) -> Vec<u8> {
        let mut bytes = vec![0; messages.len() * (HEADER_LEN + PAYLOAD_MAX)];
        let mut at = 0;
        for (seq, message) in messages.iter().enumerate() {
            at += encode(seq as u32, message, &mut bytes[at..]).unwrap();
        }
        bytes.truncate(at);
        bytes
    }

    fn sample() -> Vec<Message> {
        vec![
            Message::Hello { protocol: PROTOCOL, release: "7.2.13".into() },
            Message::Ready { uptime_ns: 7 },
            Message::Bell { index: 0 },
            Message::Batch { index: 0, batch: 1 },
            Message::Proc { index: 0, file: ProcFile::Buddyinfo, last: true, bytes: b"Node 0".to_vec() },
            Message::Checkpoint {
                index: 0,
                still: true,
                still_after_flags: true,
                missing: vec![ProcFile::Kpageflags],
            },
            Message::End { steps: 1, tainted: 0, uptime_ns: 9 },
        ]
    }

    fn read_all(decoder: &mut Decoder) -> Result<Vec<Message>, DecodeError> {
        let mut messages = Vec::new();
        while let Some(message) = decoder.next_message()? {
            messages.push(message);
        }
        Ok(messages)
    }

    #[test]
    fn a_lost_frame_is_noticed() {
        let messages = sample();
        let first = stream(&messages[..1]).len();
        let second = stream(&messages[..2]).len();
        let mut bytes = stream(&messages);
        bytes.drain(first..second);
        let mut decoder = Decoder::default();
        decoder.push(&bytes);
        assert_eq!(read_all(&mut decoder), Err(DecodeError::OutOfOrder { due: 1, found: 2 }));
    }

    #[test]
    fn a_message_too_large_for_a_frame_is_refused() {
        let message =
            Message::Proc { index: 0, file: ProcFile::Kpageflags, last: true, bytes: vec![0; PAYLOAD_MAX] };
        assert!(encode(0, &message, &mut vec![0; 2 * PAYLOAD_MAX]).is_err());
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting(sizes in prop::collection::vec(1_usize..40, 1..60)) {
            let bytes = stream(&sample());
            let mut decoder = Decoder::default();
            let mut messages = Vec::new();
            let mut rest = &bytes[..];
            for size in sizes.into_iter().cycle() {
                if rest.is_empty() { break; }
                let (piece, left) = rest.split_at(size.min(rest.len()));
                decoder.push(piece);
                rest = left;
                messages.extend(read_all(&mut decoder).unwrap());
            }
            prop_assert_eq!(messages, sample());
            prop_assert_eq!(decoder.pending(), 0);
        }

        #[test]
        fn any_altered_byte_is_noticed(at in any::<prop::sample::Index>(), flip in 1_u8..) {
            let mut bytes = stream(&sample());
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            // A longer length leaves the frame incomplete; that, too, is noticed by what stays pending.
            let whole = read_all(&mut decoder).is_ok_and(|messages| messages.len() == sample().len());
            prop_assert!(!whole || decoder.pending() > 0);
        }

        #[test]
        fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            let _ = read_all(&mut decoder);
        }
    }
}
