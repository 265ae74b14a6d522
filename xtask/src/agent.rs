//! The guest agent's binary: built here, static, by the very cargo that runs us.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use host::process::{Group, WaitError, shell_line};

use crate::progress::Progress;

/// The GNU target links statically too; no other target has to be installed.
const TARGET: &str = "x86_64-unknown-linux-gnu";
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Why there is no agent.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AgentError {
    /// cargo failed.
    #[error("failed to build the guest agent: {why}\n{said}")]
    Build {
        /// How it ended.
        why: String,
        /// What it said.
        said: String,
    },
    /// The user stopped it.
    #[error("interrupted")]
    Interrupted,
    /// The binary cannot be read.
    #[error("failed to read the guest agent {}: {source}", path.display())]
    Read {
        /// Where it should be.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
}

/// Builds the agent if anything of it changed, and reads it.
///
/// # Errors
/// See [`AgentError`].
pub(crate) fn build(progress: &Progress) -> Result<Vec<u8>, AgentError> {
    let path = build_file(progress)?;
    std::fs::read(&path).map_err(|source| AgentError::Read { path, source })
}

/// Builds the agent if anything of it changed, and gives where it is.
///
/// # Errors
/// See [`AgentError`].
pub(crate) fn build_file(progress: &Progress) -> Result<PathBuf, AgentError> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root.join("target"), PathBuf::from);
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(["build", "--quiet", "--package", "guest-agent", "--bin", "guest-agent", "--profile", "agent"])
        .args(["--target", TARGET, "--target-dir"])
        .arg(&target)
        // With --target these flags do not reach build scripts and macros, which must not be static.
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .current_dir(&root)
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null());
    progress.command(&shell_line(&command));
    let mut log = tempfile::tempfile().map_err(|error| failed(&error))?;
    command.stderr(log.try_clone().map_err(|error| failed(&error))?);
    let mut group = Group::spawn(&mut command).map_err(|error| failed(&error))?;
    match group.wait_until(Instant::now() + LIMIT) {
        Ok(status) if status.success() => {}
        Ok(status) => return Err(AgentError::Build { why: status.to_string(), said: read_back(&mut log) }),
        Err(WaitError::Interrupted) => return Err(AgentError::Interrupted),
        Err(error) => return Err(AgentError::Build { why: error.to_string(), said: read_back(&mut log) }),
    }
    Ok(target.join(TARGET).join("agent/guest-agent"))
}

fn failed(error: &io::Error) -> AgentError {
    AgentError::Build { why: error.to_string(), said: String::new() }
}

fn read_back(log: &mut std::fs::File) -> String {
    use std::io::{Read, Seek};
    let mut text = String::new();
    // Without the log the exit status has to do.
    let _ = log.rewind().and_then(|()| log.read_to_string(&mut text));
    text
}
