//! Checkpoints: the files of `/proc` as they are, with as little disturbance as reading them allows.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;

use guest_agent::wire::{CHUNK_MAX, Message, ProcFile};

use crate::bell::Bell;
use crate::channel::Channel;
use crate::{Context, Failure};

/// How often a checkpoint is taken anew because the allocator moved meanwhile. After that it is sent as it is, and marked.
const TRIES: usize = 10;
/// Text files of `/proc` are read whole into memory kept for them; none comes near this.
const TEXT_MAX: usize = 1 << 20;

/// Reading it folds the per-CPU counter differences. An `up` kernel has neither.
pub(crate) const STAT_REFRESH: &str = "/proc/sys/vm/stat_refresh";

/// The open files and the buffers they are read into.
pub(crate) struct Capture {
    texts: Vec<(ProcFile, File, Vec<u8>)>,
    kpageflags: Option<File>,
    missing: Vec<ProcFile>,
    chunk: Vec<u8>,
    /// buddyinfo once more, to see whether anything moved.
    again: Option<(File, Vec<u8>)>,
    /// [`STAT_REFRESH`].
    refresh: Option<File>,
}

impl Capture {
    /// Opens `files` and reads each once: seq_file then has its buffer, and ours are touched.
    pub(crate) fn open(files: &[ProcFile]) -> Result<Self, Failure> {
        let mut capture = Self {
            texts: Vec::new(),
            kpageflags: None,
            missing: Vec::new(),
            chunk: vec![0; CHUNK_MAX],
            again: None,
            refresh: open_if_there(STAT_REFRESH)?,
        };
        for &file in files {
            let Some(opened) = open_if_there(file.path())? else {
                capture.missing.push(file);
                continue;
            };
            if file == ProcFile::Buddyinfo {
                let again = File::open(file.path()).context("open /proc/buddyinfo")?;
                capture.again = Some((again, vec![0; TEXT_MAX]));
            }
            if file == ProcFile::Kpageflags {
                capture.kpageflags = Some(opened);
            } else {
                capture.texts.push((file, opened, vec![0; TEXT_MAX]));
            }
        }
        let lengths = capture.read_texts()?;
        capture.is_still(&lengths)?;
        Ok(capture)
    }

    /// Reads all texts one right after the other, so that their figures are as close in time as they can be, and only
    /// then sends them. The bell of a frozen checkpoint rings in between: nothing that allocates may come before it.
    pub(crate) fn take(
        &mut self,
        index: u32,
        bell: Option<&Bell>,
        channel: &mut Channel,
    ) -> Result<(), Failure> {
        let mut lengths = self.read_texts()?;
        let mut still = self.is_still(&lengths)?;
        for _ in 1..TRIES {
            if still {
                break;
            }
            lengths = self.read_texts()?;
            still = self.is_still(&lengths)?;
        }
        if let Some(bell) = bell {
            channel.send(&Message::Bell { index })?;
            bell.ring();
        }
        let mut chunk = std::mem::take(&mut self.chunk);
        for ((file, _, buffer), len) in self.texts.iter().zip(&lengths) {
            let mut rest = &buffer[..*len];
            loop {
                let (part, left) = rest.split_at(rest.len().min(CHUNK_MAX));
                chunk.clear();
                chunk.extend_from_slice(part);
                rest = left;
                chunk = send_part(channel, index, *file, rest.is_empty(), chunk)?;
                if rest.is_empty() {
                    break;
                }
            }
        }
        if let Some(file) = &self.kpageflags {
            let mut offset = 0;
            loop {
                chunk.resize(CHUNK_MAX, 0);
                let len = file.read_at(&mut chunk, offset).context("read /proc/kpageflags")?;
                chunk.truncate(len);
                offset += len as u64;
                chunk = send_part(channel, index, ProcFile::Kpageflags, len == 0, chunk)?;
                if len == 0 {
                    break;
                }
            }
        }
        self.chunk = chunk;
        let still_after_flags = still && self.is_still(&lengths)?;
        channel.send(&Message::Checkpoint { index, still, still_after_flags, missing: self.missing.clone() })
    }

    /// Whether buddyinfo is what it was when the texts were read.
    fn is_still(&mut self, lengths: &[usize]) -> Result<bool, Failure> {
        let Some((file, buffer)) = &mut self.again else { return Ok(false) };
        let len = read_whole(ProcFile::Buddyinfo, file, buffer)?;
        let before = self.texts.iter().zip(lengths).find(|((file, ..), _)| *file == ProcFile::Buddyinfo);
        Ok(before.is_some_and(|((_, _, before), before_len)| before[..*before_len] == buffer[..len]))
    }

    /// buddyinfo first, then the counters are folded, then the rest: if buddyinfo is the same afterwards, whatever moved
    /// before is in the counters that were read.
    fn read_texts(&mut self) -> Result<Vec<usize>, Failure> {
        let mut lengths = Vec::with_capacity(self.texts.len());
        for (file, opened, buffer) in &mut self.texts {
            if *file != ProcFile::Buddyinfo && lengths.len() <= 1 {
                fold_counters(self.refresh.as_ref())?;
            }
            lengths.push(read_whole(*file, opened, buffer)?);
        }
        Ok(lengths)
    }
}

/// Folds the per-CPU differences into the counters (mm/vmstat.c, vmstat_refresh()).
pub(crate) fn fold_counters(refresh: Option<&File>) -> Result<(), Failure> {
    let Some(refresh) = refresh else { return Ok(()) };
    match refresh.read_at(&mut [0], 0) {
        // A counter below zero, as some kernels say it: they have folded all the same, and judging is the host's.
        Err(error) if error.kind() != ErrorKind::InvalidInput => {
            Err(format!("failed to fold the counters: {error}"))
        }
        _ => Ok(()),
    }
}

pub(crate) fn open_if_there(path: &str) -> Result<Option<File>, Failure> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(format!("failed to open {path}: {error}")),
    }
}

/// Reads a text from its start and gives its length.
fn read_whole(file: ProcFile, opened: &File, buffer: &mut [u8]) -> Result<usize, Failure> {
    let mut len = 0;
    loop {
        let room = &mut buffer[len..];
        if room.is_empty() {
            return Err(format!("{} is larger than {TEXT_MAX} bytes", file.path()));
        }
        match opened.read_at(room, len as u64).context(&format!("read {}", file.path()))? {
            0 => return Ok(len),
            read => len += read,
        }
    }
}

/// Sends `chunk` and gives it back, so that no checkpoint allocates.
fn send_part(
    channel: &mut Channel,
    index: u32,
    file: ProcFile,
    last: bool,
    chunk: Vec<u8>,
) -> Result<Vec<u8>, Failure> {
    let message = Message::Proc { index, file, last, bytes: chunk };
    channel.send(&message)?;
    match message {
        Message::Proc { bytes, .. } => Ok(bytes),
        _ => Ok(Vec::new()),
    }
}
