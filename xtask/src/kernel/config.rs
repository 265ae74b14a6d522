//! Kernel configuration: our fragments, merged for a version, and what Kconfig made of them.
//!
//! A line reads `CONFIG_X=y  # reason`, or `CONFIG_X=y  # [7.3..] reason` where only some versions have the option.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use super::Flavour;
use super::error::{KernelError, io_error};

/// The options asked for, by name.
pub(crate) type Request = BTreeMap<String, String>;

/// A version as far as fragments tell versions apart: 6.12, not 6.12.117.
pub(crate) type Line = (u32, u32);

/// The options for a flavour on a kernel of version `line`: base.config, then the flavour's, then those that come with a
/// series; later ones override.
pub(crate) fn request(
    folder: &Path,
    flavour: Flavour,
    line: Line,
    of_series: &[Wanted],
) -> Result<Request, KernelError> {
    let mut request = Request::new();
    for name in ["base.config".to_owned(), format!("{flavour}.config")] {
        let path = folder.join(name);
        let text = std::fs::read_to_string(&path).map_err(io_error("read", &path))?;
        for option in parse(&text).map_err(|why| KernelError::Settings { path, why })? {
            if option.wanted_on(line) {
                request.insert(option.name, option.value);
            }
        }
    }
    for option in of_series.iter().filter(|option| option.wanted_on(line)) {
        request.insert(option.name.clone(), option.value.clone());
    }
    Ok(request)
}

/// The request as `KCONFIG_ALLCONFIG` takes it.
pub(crate) fn text(request: &Request) -> String {
    let line = |(name, value): (&String, &String)| match value.as_str() {
        "n" => format!("# {name} is not set\n"),
        value => format!("{name}={value}\n"),
    };
    request.iter().map(line).collect()
}

/// The options that did not survive, as `CONFIG_X (asked y, got n)`.
pub(crate) fn dropped(request: &Request, dot_config: &str) -> Vec<String> {
    let got: HashMap<&str, &str> = dot_config.lines().filter_map(|line| line.split_once('=')).collect();
    let differs = |(name, asked): (&String, &String)| {
        let got = got.get(name.as_str()).copied().unwrap_or("n");
        (got != asked).then(|| format!("{name} (asked {asked}, got {got})"))
    };
    request.iter().filter_map(differs).collect()
}

/// One line of a fragment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) name: String,
    pub(crate) value: String,
    from: Option<Line>,
    to: Option<Line>,
    reason: String,
}

impl Wanted {
    pub(crate) fn wanted_on(&self, line: Line) -> bool {
        self.from.is_none_or(|from| from <= line) && self.to.is_none_or(|to| line <= to)
    }
}

/// Reads a fragment.
pub(crate) fn parse(text: &str) -> Result<Vec<Wanted>, String> {
    let mut options = Vec::new();
    for (at, line) in text.lines().enumerate() {
        if line.trim().is_empty() || line.starts_with('#') {
            continue;
        }
        let option = parse_line(line).map_err(|why| format!("line {}: {why}: {line}", at + 1))?;
        options.push(option);
    }
    Ok(options)
}

fn parse_line(line: &str) -> Result<Wanted, &'static str> {
    let (setting, comment) = line.split_once('#').ok_or("the option has no reason beside it")?;
    let (name, value) = setting.trim().split_once('=').ok_or("it is not CONFIG_X=value")?;
    if !name.starts_with("CONFIG_") || value.is_empty() {
        return Err("it is not CONFIG_X=value");
    }
    let comment = comment.trim();
    let (range, reason) = match comment.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((range, reason)) => (Some(range), reason.trim()),
        None => (None, comment),
    };
    if reason.is_empty() {
        return Err("the option has no reason beside it");
    }
    let (mut from, mut to) = (None, None);
    if let Some(range) = range {
        let (first, last) = range.split_once("..").ok_or("a version range is [FROM..TO]")?;
        let bound = |text: &str| -> Result<Option<Line>, &'static str> {
            if text.is_empty() {
                return Ok(None);
            }
            line_of(text).map(Some).ok_or("a version in its range is not MAJOR.MINOR")
        };
        (from, to) = (bound(first)?, bound(last)?);
    }
    Ok(Wanted { name: name.to_owned(), value: value.to_owned(), from, to, reason: reason.to_owned() })
}

/// `6.12` as numbers.
pub(crate) fn line_of(text: &str) -> Option<Line> {
    let (major, minor) = text.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The version in a kernel's top Makefile: 6.12 as numbers.
pub(crate) fn line_of_makefile(text: &str) -> Option<Line> {
    let number = |name: &str| -> Option<u32> {
        let line =
            text.lines().take(20).find_map(|line| line.strip_prefix(name)?.trim().strip_prefix('='))?;
        line.trim().parse().ok()
    };
    Some((number("VERSION")?, number("PATCHLEVEL")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/config")
    }

    #[test]
    fn every_option_of_ours_has_a_reason() {
        for entry in std::fs::read_dir(folder()).unwrap() {
            let path = entry.unwrap().path();
            let options = parse(&std::fs::read_to_string(&path).unwrap()).unwrap();
            assert!(!options.is_empty(), "{}", path.display());
            for option in options {
                // One word repeats the option's name; it takes a few to say why.
                assert!(option.reason.split_whitespace().count() >= 2, "{}: {}", path.display(), option.name);
            }
        }
    }

    #[test]
    fn flavours_differ_and_versions_too() {
        let get = |flavour, line| request(&folder(), flavour, line, &[]).unwrap();
        assert_eq!(get(Flavour::Smp, (6, 12)).get("CONFIG_SMP").unwrap(), "y");
        assert_eq!(get(Flavour::Up, (6, 12)).get("CONFIG_SMP").unwrap(), "n");
        assert_eq!(get(Flavour::Smp, (6, 12)).get("CONFIG_NUMA").unwrap(), "n");
        assert_eq!(get(Flavour::Numa, (6, 12)).get("CONFIG_NUMA").unwrap(), "y");
        assert!(get(Flavour::Smp, (7, 3)).contains_key("CONFIG_SYSCTL"));
        assert!(get(Flavour::Smp, (6, 1)).contains_key("CONFIG_PROC_SYSCTL"));
    }

    #[test]
    fn an_option_without_a_reason_is_refused() {
        for line in
            ["CONFIG_X=y", "CONFIG_X=y  #", "CONFIG_X=y # [6.1..]", "CONFIG_X # why", "X=y # some reason"]
        {
            assert!(parse(line).is_err(), "{line}");
        }
        let option = parse_line("CONFIG_X=\"a\"  # [6.1..7.2] some reason").unwrap();
        assert_eq!((option.from, option.to, &*option.value), (Some((6, 1)), Some((7, 2)), "\"a\""));
        assert!(option.wanted_on((6, 12)) && !option.wanted_on((5, 19)) && !option.wanted_on((7, 3)));
    }

    #[test]
    fn what_kconfig_dropped_is_named() {
        let asked = |pairs: &[(&str, &str)]| {
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect::<Request>()
        };
        let request = asked(&[("CONFIG_A", "y"), ("CONFIG_B", "n"), ("CONFIG_C", "y"), ("CONFIG_D", "n")]);
        let lost = dropped(&request, "CONFIG_A=y\nCONFIG_B=y\n# CONFIG_C is not set\n");
        assert_eq!(lost, ["CONFIG_B (asked n, got y)", "CONFIG_C (asked y, got n)"]);
        assert_eq!(text(&request), "CONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=y\n# CONFIG_D is not set\n");
    }

    #[test]
    fn the_makefile_tells_the_version() {
        let text = "# SPDX-License-Identifier: GPL-2.0\nVERSION = 6\nPATCHLEVEL = 12\nSUBLEVEL = 117\n";
        assert_eq!(line_of_makefile(text), Some((6, 12)));
        assert_eq!(line_of_makefile("all:\n"), None);
    }
}
