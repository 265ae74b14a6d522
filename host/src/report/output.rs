//! Where results go: JSON, and files that are written whole or not at all.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde::Serialize;

/// Writes `value` as JSON, ended by a newline.
///
/// # Errors
/// Where `output` cannot be written.
pub fn json(value: &impl Serialize, mut output: impl Write) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut output, value)?;
    output.write_all(b"\n")?;
    output.flush()
}

/// Writes a file by `write`, whole or not at all. What is there and is no file, such as `/dev/null` or a pipe, is written to
/// and stays what it is.
///
/// # Errors
/// Where it cannot be written.
pub fn file(path: &Path, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> io::Result<()> {
    if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
        let mut output = BufWriter::new(fs::OpenOptions::new().write(true).open(path)?);
        write(&mut output)?;
        return output.flush();
    }
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // As any new file, less what the umask takes: a temporary one could be read by its owner alone.
    let permissions = fs::Permissions::from_mode(0o666);
    let mut file = tempfile::Builder::new().permissions(permissions).tempfile_in(folder)?;
    let mut output = BufWriter::new(&mut file);
    write(&mut output)?;
    output.flush()?;
    drop(output);
    file.persist(path).map(drop).map_err(|error| error.error)
}
