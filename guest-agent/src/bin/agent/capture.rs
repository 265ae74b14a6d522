//! Checkpoints: the files of `/proc` as they are, with as little disturbance as reading them allows.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;

use guest_agent::wire::{CHUNK_MAX, Message, ProcFile};

use crate::channel::Channel;
use crate::{Context, Failure};

/// Text files of `/proc` are read whole into memory kept for them; none comes near this.
const TEXT_MAX: usize = 1 << 20;

/// The open files and the buffers they are read into.
pub(crate) struct Capture {
    texts: Vec<(ProcFile, File, Vec<u8>)>,
    kpageflags: Option<File>,
    missing: Vec<ProcFile>,
    chunk: Vec<u8>,
}

impl Capture {
    /// Opens `files` and reads each once: seq_file then has its buffer, and ours are touched.
    pub(crate) fn open(files: &[ProcFile]) -> Result<Self, Failure> {
        let mut capture =
            Self { texts: Vec::new(), kpageflags: None, missing: Vec::new(), chunk: vec![0; CHUNK_MAX] };
        for &file in files {
            let opened = match File::open(file.path()) {
                Ok(opened) => opened,
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    capture.missing.push(file);
                    continue;
                }
                Err(error) => return Err(format!("failed to open {}: {error}", file.path())),
            };
            if file == ProcFile::Kpageflags {
                capture.kpageflags = Some(opened);
            } else {
                capture.texts.push((file, opened, vec![0; TEXT_MAX]));
            }
        }
        capture.read_texts()?;
        Ok(capture)
    }

    /// Reads all texts one right after the other, so that their figures are as close in time as they can be, and only
    /// then sends them.
    pub(crate) fn take(&mut self, index: u32, channel: &mut Channel) -> Result<(), Failure> {
        // Folds the per-CPU counter differences into the counters (mm/vmstat.c, vmstat_refresh()). An `up` kernel has
        // neither differences nor the file.
        match std::fs::read("/proc/sys/vm/stat_refresh") {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(format!("failed to refresh the counters: {error}"));
            }
            _ => {}
        }
        let lengths = self.read_texts()?;
        let mut chunk = std::mem::take(&mut self.chunk);
        for ((file, _, buffer), len) in self.texts.iter().zip(lengths) {
            let mut rest = &buffer[..len];
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
        channel.send(&Message::Checkpoint { index, missing: self.missing.clone() })
    }

    fn read_texts(&mut self) -> Result<Vec<usize>, Failure> {
        let mut lengths = Vec::with_capacity(self.texts.len());
        for (file, opened, buffer) in &mut self.texts {
            let mut len = 0;
            loop {
                let room = &mut buffer[len..];
                if room.is_empty() {
                    return Err(format!("{} is larger than {TEXT_MAX} bytes", file.path()));
                }
                match opened.read_at(room, len as u64).context(&format!("read {}", file.path()))? {
                    0 => break,
                    read => len += read,
                }
            }
            lengths.push(len);
        }
        Ok(lengths)
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
