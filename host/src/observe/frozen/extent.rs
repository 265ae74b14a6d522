//! Where a variable of the kernel lies in the file that holds its RAM: to read it, and to write it while nothing moves.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::{Kernel, Ram, ReadError};

/// A page in bytes: what is one piece for the kernel may be many for us.
const PAGE_BYTES: u64 = 1 << super::PAGE_SHIFT;
/// The largest variable that is looked up, in bytes.
const EXTENT_MAX_BYTES: u64 = 64 << 20;

/// The bytes of a variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Offset in the file and length of each piece, in the order of the variable.
    pieces: Vec<(u64, u64)>,
    bytes: u64,
}

impl Extent {
    /// Finds a variable that [`Kernel::load`] knows of. Where it is does not change while the guest runs.
    ///
    /// # Errors
    /// Where there is none, it is not in RAM, or it is larger than any that is written.
    pub fn find(kernel: &Kernel, ram: &Ram, name: &str) -> Result<Self, ReadError> {
        let symbol = kernel.symbol(name).ok_or_else(|| ReadError::Symbol(name.to_owned()))?;
        let unreadable = |address| ReadError::Unreadable { what: "a variable", address };
        if symbol.bytes > EXTENT_MAX_BYTES || symbol.address.checked_add(symbol.bytes).is_none() {
            return Err(unreadable(symbol.address));
        }
        let space = super::space(kernel, ram)?;
        let mut extent = Self { pieces: Vec::new(), bytes: 0 };
        while extent.bytes < symbol.bytes {
            let address = symbol.address + extent.bytes;
            let len = (PAGE_BYTES - address % PAGE_BYTES).min(symbol.bytes - extent.bytes);
            let offset = space.translate(address).and_then(|physical| ram.offset(physical));
            extent.add(offset.ok_or_else(|| unreadable(address))?, len);
        }
        Ok(extent)
    }

    fn add(&mut self, offset: u64, len: u64) {
        self.bytes += len;
        match self.pieces.last_mut() {
            Some((start, before)) if *start + *before == offset => *before += len,
            _ => self.pieces.push((offset, len)),
        }
    }

    /// Its size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads what begins `at` bytes into it.
    ///
    /// # Errors
    /// Where that is not all in it, or the file cannot be read.
    pub fn read(&self, file: &File, at: u64, into: &mut [u8]) -> io::Result<()> {
        for (offset, start, len) in self.parts(at, into.len())? {
            file.read_exact_at(&mut into[start..start + len], offset)?;
        }
        Ok(())
    }

    /// Writes to what begins `at` bytes into it. The machine must stand still.
    ///
    /// # Errors
    /// Where that is not all in it, or the file cannot be written.
    pub fn write(&self, file: &File, at: u64, from: &[u8]) -> io::Result<()> {
        for (offset, start, len) in self.parts(at, from.len())? {
            file.write_all_at(&from[start..start + len], offset)?;
        }
        Ok(())
    }

    /// Cuts a range into offset in the file, start in the range, and length.
    fn parts(&self, at: u64, len: usize) -> io::Result<Vec<(u64, usize, usize)>> {
        if at.checked_add(len as u64).is_none_or(|end| end > self.bytes) {
            let text = format!("{len} bytes at {at} are not all in a variable of {} bytes", self.bytes);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let (mut parts, mut skip, mut start) = (Vec::new(), at, 0);
        for (offset, bytes) in &self.pieces {
            if start == len {
                break;
            }
            if skip >= *bytes {
                skip -= *bytes;
                continue;
            }
            let here = ((*bytes - skip) as usize).min(len - start);
            parts.push((offset + skip, start, here));
            start += here;
            skip = 0;
        }
        Ok(parts)
    }

    /// One in memory that is played.
    #[cfg(test)]
    pub(crate) fn played(pieces: &[(u64, u64)]) -> Self {
        Self { pieces: pieces.to_vec(), bytes: pieces.iter().map(|(_, bytes)| bytes).sum() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pages_that_follow_each_other_are_one_piece() {
        let mut extent = Extent { pieces: Vec::new(), bytes: 0 };
        for offset in [8192 + 24, 12288, 4096] {
            extent.add(offset, PAGE_BYTES - offset % PAGE_BYTES);
        }
        assert_eq!(extent.pieces, [(8192 + 24, 2 * PAGE_BYTES - 24), (4096, PAGE_BYTES)]);
        assert_eq!(extent.bytes(), 3 * PAGE_BYTES - 24);
    }

    proptest! {
        /// Written in one cutting and read in another; nothing else in the file changes.
        #[test]
        fn what_is_written_is_read(at in 0_u64..90, bytes in prop::collection::vec(1_u8.., 0..90), gap in 0_u64..20) {
            let extent = Extent::played(&[(200, 30), (5, 20), (100 + gap, 40)]);
            let file = tempfile::tempfile().unwrap();
            file.set_len(400).unwrap();
            let fits = at + bytes.len() as u64 <= 90;
            prop_assert_eq!(extent.write(&file, at, &bytes).is_ok(), fits);
            let mut all = vec![0; 400];
            file.read_exact_at(&mut all, 0).unwrap();
            let written = all.iter().filter(|byte| **byte != 0).count();
            prop_assert_eq!(written, if fits { bytes.len() } else { 0 });
            if fits {
                let mut back = vec![0; bytes.len()];
                let (first, second) = back.split_at_mut(bytes.len() / 3);
                extent.read(&file, at, first).unwrap();
                extent.read(&file, at + first.len() as u64, second).unwrap();
                prop_assert_eq!(back, bytes);
            }
        }
    }
}
