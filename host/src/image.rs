//! Images of guests for a later look: RAM, the kernel that runs in it, and what both are.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::SeekFrom;
use serde::{Deserialize, Serialize};

use crate::vm::RamLayout;

/// The files of an image in its folder.
const RAM: &str = "ram";
const VMLINUX: &str = "vmlinux";
const ABOUT: &str = "image.json";
/// What is copied at a time.
const CHUNK: usize = 1 << 20;
/// An `image.json` larger than this is none of ours.
const ABOUT_MAX: u64 = 1 << 16;

/// What an image is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Bytes of RAM below 4 GiB.
    pub low_bytes: u64,
    /// All bytes of RAM.
    pub all_bytes: u64,
    /// The kernel's spec.
    pub spec: String,
    /// `uname -r`.
    pub release: String,
    /// The script that ran.
    pub script: String,
    /// The checkpoint at which the image was taken.
    pub checkpoint: String,
}

impl About {
    /// Where RAM lies in the file.
    #[must_use]
    pub fn layout(&self) -> RamLayout {
        RamLayout { low_bytes: self.low_bytes, all_bytes: self.all_bytes }
    }
}

/// Saves RAM and kernel into `folder`, whole or not at all under their names. Holes of RAM stay holes.
///
/// # Errors
/// Where a file cannot be written.
pub fn save(folder: &Path, ram: &File, vmlinux: &Path, about: &About) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let aside = tempfile::NamedTempFile::new_in(folder)?;
    copy_sparse(ram, aside.as_file(), about.all_bytes)?;
    let kernel = tempfile::NamedTempFile::new_in(folder)?;
    fs::copy(vmlinux, kernel.path())?;
    let text = tempfile::NamedTempFile::new_in(folder)?;
    serde_json::to_writer_pretty(text.as_file(), about)?;
    aside.persist(folder.join(RAM)).map_err(|error| error.error)?;
    kernel.persist(folder.join(VMLINUX)).map_err(|error| error.error)?;
    text.persist(folder.join(ABOUT)).map_err(|error| error.error)?;
    Ok(())
}

/// What the image that `ram` belongs to is, where that was saved beside it.
///
/// # Errors
/// Where there is such a file and it cannot be read.
pub fn about(ram: &Path) -> io::Result<Option<About>> {
    let path: PathBuf = ram.with_file_name(ABOUT);
    match fs::metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
        Ok(metadata) if metadata.len() > ABOUT_MAX => Err(io::Error::other("it is too large to be ours")),
        Ok(_) => Ok(Some(serde_json::from_str(&fs::read_to_string(&path)?)?)),
    }
}

/// Copies the first `len` bytes but for holes and pages of zeros.
fn copy_sparse(from: &File, to: &File, len: u64) -> io::Result<()> {
    to.set_len(len)?;
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while at < len {
        at = match rustix::fs::seek(from.as_fd(), SeekFrom::Data(at)) {
            Ok(at) => at,
            // Nothing but a hole up to the end.
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = rustix::fs::seek(from.as_fd(), SeekFrom::Hole(at))?.min(len);
        while at < end {
            let part = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            from.read_exact_at(&mut buffer[..part], at)?;
            for (index, page) in buffer[..part].chunks(4096).enumerate() {
                if page.iter().any(|byte| *byte != 0) {
                    to.write_all_at(page, at + index as u64 * 4096)?;
                }
            }
            at += part as u64;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_saved_image_has_the_same_bytes_and_holes() {
        let folder = tempfile::tempdir().unwrap();
        let ram = tempfile::tempfile().unwrap();
        ram.set_len(64 << 20).unwrap();
        ram.write_all_at(b"low", 5000).unwrap();
        // Pages that are there and hold nothing need not be.
        ram.write_all_at(&vec![0; 8 << 20], 16 << 20).unwrap();
        ram.write_all_at(b"high", (40 << 20) - 2).unwrap();
        let vmlinux = folder.path().join("kernel");
        fs::write(&vmlinux, "a kernel").unwrap();
        let about = About {
            low_bytes: 64 << 20,
            all_bytes: 64 << 20,
            spec: "vmlinux:kernel".into(),
            release: "7.2.13".into(),
            script: "quiet".into(),
            checkpoint: "idle-1".into(),
        };
        let saved = folder.path().join("saved");
        save(&saved, &ram, &vmlinux, &about).unwrap();
        let copy = fs::read(saved.join(RAM)).unwrap();
        assert_eq!(copy.len(), 64 << 20);
        assert_eq!(&copy[5000..5003], b"low");
        assert_eq!(&copy[(40 << 20) - 2..(40 << 20) + 2], b"high");
        assert_eq!(copy.iter().filter(|byte| **byte != 0).count(), 7);
        assert!(fs::metadata(saved.join(RAM)).unwrap().blocks() * 512 < 1 << 20);
        assert_eq!(super::about(&saved.join(RAM)).unwrap(), Some(about));
        assert_eq!(super::about(&folder.path().join("ram")).unwrap(), None);
    }
}
