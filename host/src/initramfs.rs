//! The guest's initramfs: the agent as `/init`, the plan, and the console to speak to before `/dev` is mounted.

use std::io::{self, Write};

use cpio::newc::{Builder, ModeFileType, trailer};
use guest_agent::wire::{PLAN_PATH, Plan};

/// Writes an uncompressed cpio archive (the "newc" form, `Documentation/driver-api/early-userspace/buffer-format.rst`)
/// that depends on nothing but its arguments.
///
/// # Errors
/// Where `output` cannot be written.
pub fn write<W: Write>(agent: &[u8], plan: &Plan, output: W) -> io::Result<W> {
    let plan = postcard::to_stdvec(plan).map_err(io::Error::other)?;
    let len = |bytes: &[u8]| u32::try_from(bytes.len()).map_err(io::Error::other);

    let directory = Builder::new("dev").ino(1).mode(0o755).set_mode_file_type(ModeFileType::Directory);
    let output = directory.write(output, 0).finish()?;
    let console = Builder::new("dev/console")
        .ino(2)
        .mode(0o600)
        .set_mode_file_type(ModeFileType::Char)
        .rdev_major(5)
        .rdev_minor(1);
    let output = console.write(output, 0).finish()?;
    let mut init = Builder::new("init")
        .ino(3)
        .mode(0o755)
        .set_mode_file_type(ModeFileType::Regular)
        .write(output, len(agent)?);
    init.write_all(agent)?;
    let output = init.finish()?;
    let mut file = Builder::new(PLAN_PATH.trim_start_matches('/'))
        .ino(4)
        .mode(0o444)
        .set_mode_file_type(ModeFileType::Regular)
        .write(output, len(&plan)?);
    file.write_all(&plan)?;
    trailer(file.finish()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cpio::newc::Reader;
    use guest_agent::wire::PROTOCOL;
    use std::io::Read;

    #[test]
    fn the_archive_holds_agent_plan_and_console() {
        let plan = Plan {
            protocol: PROTOCOL,
            channel_address: 1 << 32,
            channel_len: 8192,
            seed: 1,
            capture: vec![],
            steps: vec![],
        };
        let archive = write(b"agent", &plan, Vec::new()).unwrap();
        let mut rest = &archive[..];
        let mut names = Vec::new();
        loop {
            let mut entry = Reader::new(rest).unwrap();
            if entry.entry().is_trailer() {
                break;
            }
            let (name, mode) = (entry.entry().name().to_owned(), entry.entry().mode());
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            match name.as_str() {
                "init" => assert_eq!((mode, content.as_slice()), (0o100_755, &b"agent"[..])),
                "plan" => assert_eq!(postcard::from_bytes::<Plan>(&content).unwrap(), plan),
                "dev/console" => assert_eq!((mode, entry.entry().rdev_major()), (0o020_600, 5)),
                _ => {}
            }
            names.push(name);
            rest = entry.finish().unwrap();
        }
        assert_eq!(names, ["dev", "dev/console", "init", "plan"]);
    }
}
