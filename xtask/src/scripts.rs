//! Scripts by name or by path.

use std::path::{Path, PathBuf};

use guest_agent::script::SCRIPT_MAX_BYTES;

/// There is no such script.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotFound {
    /// Neither a name nor a file.
    #[error(
        "failed to find the script {name:?}: it is no file, and the scripts that come with buddydiff are {known}"
    )]
    Unknown {
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// A file that cannot be read.
    #[error("failed to read the script {}: {why}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-agent/scripts")
}

/// Gives the file's name for messages, and the text.
///
/// # Errors
/// See [`NotFound`].
pub(crate) fn read(name: &str) -> Result<(String, String), NotFound> {
    let shipped = folder().join(format!("{name}.toml"));
    let (path, shown) = if !name.contains('/') && shipped.is_file() {
        (shipped, format!("{name}.toml"))
    } else {
        (PathBuf::from(name), name.to_owned())
    };
    let unreadable = |why: String| NotFound::Unreadable { path: path.clone(), why };
    match std::fs::metadata(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(NotFound::Unknown { name: name.to_owned(), known: known().join(", ") });
        }
        Err(error) => return Err(unreadable(error.to_string())),
        Ok(metadata) if !metadata.is_file() => return Err(unreadable("it is no file".into())),
        Ok(metadata) if metadata.len() > SCRIPT_MAX_BYTES as u64 => {
            return Err(unreadable(format!("it is larger than {SCRIPT_MAX_BYTES} bytes")));
        }
        Ok(_) => {}
    }
    let text = std::fs::read_to_string(&path).map_err(|error| unreadable(error.to_string()))?;
    Ok((shown, text))
}

fn known() -> Vec<String> {
    let entries = std::fs::read_dir(folder()).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".toml").map(str::to_owned))
        .collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_that_is_not_there_is_named_beside_those_that_are() {
        let error = read("no-such").unwrap_err().to_string();
        for name in ["\"no-such\"", "guard-delta", "quiet"] {
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn a_folder_is_no_script() {
        assert!(matches!(read("/"), Err(NotFound::Unreadable { .. })));
    }
}
