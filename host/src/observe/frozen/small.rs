//! Small images: of a guest's RAM only the pages that the reader looks at, with what it needs of the kernel. A guest of
//! 64 MiB comes down to about 3 MiB, and neither its vmlinux nor the rest of its RAM has to be kept.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use crate::vm::RamLayout;

use super::kernel::{Kernel, Parts, Symbol};
use super::memmap::MemMap;
use super::ram::Ram;
use super::{ImageError, PAGE_SHIFT, ReadError, State, space};

const PAGE_WORDS: usize = (1 << PAGE_SHIFT) / 8;

/// Why there is no small image.
#[derive(Debug, thiserror::Error)]
pub enum SmallError {
    /// The kernel it is of.
    #[error("failed to take the kernel: {0}")]
    Kernel(#[from] ImageError),
    /// The RAM it is of.
    #[error("failed to read the RAM: {0}")]
    Ram(#[from] ReadError),
    /// Its file does not hold one.
    #[error("it is no small image: {0}")]
    Format(String),
}

/// A small image. Its bytes are for this very program: there are no versions of them.
#[derive(Serialize, Deserialize)]
pub struct SmallImage {
    btf: Vec<u8>,
    symbols: Vec<(String, u64, u64)>,
    notes: Option<(u64, Vec<u8>)>,
    low_bytes: u64,
    all_bytes: u64,
    /// Pages that are not all zeros: number, bytes.
    pages: Vec<(u64, Vec<u8>)>,
}

impl SmallImage {
    /// Takes what [`State::read`] looks at in `ram`, in which the kernel `vmlinux` runs.
    ///
    /// # Errors
    /// Where it cannot be read in full.
    pub fn take(vmlinux: &Path, ram: &Ram) -> Result<Self, SmallError> {
        let parts = Parts::read(vmlinux, &[])?;
        let kernel = parts.kernel()?;
        let RamLayout { low_bytes, all_bytes } = ram.layout();
        let symbols = numbers(&parts.symbols);
        let (btf, notes) = (parts.btf, parts.notes);
        let image = Self { symbols, btf, notes, low_bytes, all_bytes, pages: Vec::new() };
        Ok(image.with_pages(&kernel, ram)?)
    }

    /// Of a kernel and RAM that come from no guest.
    #[cfg(any(test, feature = "test-support"))]
    pub(super) fn of(kernel: &Kernel, btf: Vec<u8>, ram: &Ram) -> Result<Self, ReadError> {
        let RamLayout { low_bytes, all_bytes } = ram.layout();
        let (symbols, notes) = (numbers(&kernel.symbols), kernel.notes.clone());
        Self { symbols, btf, notes, low_bytes, all_bytes, pages: Vec::new() }.with_pages(kernel, ram)
    }

    fn with_pages(self, kernel: &Kernel, ram: &Ram) -> Result<Self, ReadError> {
        let bytes = |page: u64| {
            let words = ram.words(page << PAGE_SHIFT, PAGE_WORDS)?;
            let words = words.iter().map(|word| word.load(Ordering::Relaxed));
            let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            bytes.iter().any(|byte| *byte != 0).then_some((page, bytes))
        };
        let pages = pages_read(kernel, ram)?.into_iter().filter_map(bytes).collect();
        Ok(Self { pages, ..self })
    }

    /// Its bytes, for a file.
    ///
    /// # Errors
    /// Where they cannot be made.
    pub fn to_bytes(&self) -> Result<Vec<u8>, SmallError> {
        postcard::to_stdvec(self).map_err(|error| SmallError::Format(error.to_string()))
    }

    /// From the bytes of a file.
    ///
    /// # Errors
    /// Where they hold none.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, SmallError> {
        postcard::from_bytes(bytes).map_err(|error| SmallError::Format(error.to_string()))
    }

    /// Type information of its kernel, as `.BTF` holds it.
    #[must_use]
    pub fn btf(&self) -> &[u8] {
        &self.btf
    }

    /// Numbers of the pages of RAM that it has.
    pub fn pages(&self) -> impl Iterator<Item = u64> {
        self.pages.iter().map(|(page, _)| *page)
    }

    /// Its kernel, by other type information where there is some.
    ///
    /// # Errors
    /// See [`ImageError`].
    pub fn kernel(&self, btf: Option<&[u8]>) -> Result<Kernel, ImageError> {
        let symbol = |(name, address, bytes): &(String, u64, u64)| {
            (name.clone(), Symbol { address: *address, bytes: *bytes })
        };
        let symbols = self.symbols.iter().map(symbol).collect();
        Kernel::from_parts(btf.unwrap_or(&self.btf), symbols, self.notes.clone())
    }

    /// Its RAM, in our own memory.
    ///
    /// # Errors
    /// Where it is not as it should be.
    pub fn ram(&self) -> Result<Ram, SmallError> {
        let format = |text: String| SmallError::Format(text);
        let layout = RamLayout { low_bytes: self.low_bytes, all_bytes: self.all_bytes };
        let ram = Ram::zeroed(layout).map_err(|error| format(error.to_string()))?;
        for (page, bytes) in &self.pages {
            let (words, _) = bytes.as_chunks();
            let at = |index: usize| (page << PAGE_SHIFT).checked_add(index as u64 * 8);
            let plant = |(index, word): (usize, &[u8; 8])| {
                at(index).is_some_and(|address| ram.plant(address, u64::from_le_bytes(*word)))
            };
            if !words.iter().enumerate().all(plant) {
                return Err(format(format!("page {page} is outside of RAM")));
            }
        }
        Ok(ram)
    }
}

fn numbers(symbols: &HashMap<String, Symbol>) -> Vec<(String, u64, u64)> {
    symbols.iter().map(|(name, at)| (name.clone(), at.address, at.bytes)).collect()
}

/// Numbers of the pages of RAM that reading takes.
fn pages_read(kernel: &Kernel, ram: &Ram) -> Result<BTreeSet<u64>, ReadError> {
    let space = space(kernel, ram)?;
    space.record();
    State::read_in(kernel, &space)?;
    // What shows that this is the right kernel was looked at before.
    for symbol in kernel.symbols.values() {
        space.u64(symbol.address & !7);
    }
    kernel.notes.as_ref().and_then(|(address, bytes)| space.bytes(*address, bytes.len()));
    let mut pages = space.recorded();
    pages.extend(MemMap::read(kernel, &space)?.frames());
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::super::fake;
    use super::*;

    #[test]
    fn a_small_image_reads_as_the_whole_one_does() {
        let kernel = fake::kernel();
        let ram = fake::ram(&kernel, 16);
        let small = fake::image(16);
        // Page tables; variables, node, sections, two per-CPU areas; struct pages. Nothing that the allocator gave away.
        assert_eq!(small.pages.len(), 6 + 7 + 64);
        let small = SmallImage::from_bytes(&small.to_bytes().expect("bytes")).expect("an image");
        let read = |kernel: &Kernel, ram: &Ram| State::read(kernel, ram).expect("it can be read");
        let (whole, small) =
            (read(&kernel, &ram), read(&small.kernel(None).expect("a kernel"), &small.ram().expect("RAM")));
        for (whole, small) in whole.zones.iter().zip(&small.zones) {
            assert!(
                whole.pages == small.pages
                    && whole.counters == small.counters
                    && whole.blocks == small.blocks
            );
        }
        assert_eq!(whole.zones.len(), small.zones.len());
    }

    #[test]
    fn bytes_that_are_no_image_are_refused() {
        assert!(SmallImage::from_bytes(&[0xff; 64]).is_err());
        let nowhere = SmallImage {
            btf: Vec::new(),
            symbols: Vec::new(),
            notes: None,
            low_bytes: 1 << 20,
            all_bytes: 1 << 20,
            pages: vec![(u64::MAX, vec![1; 4096])],
        };
        assert!(nowhere.ram().is_err() && nowhere.kernel(None).is_err());
    }
}
