//! Kernel specs: what a user writes for a kernel.

use std::fmt;
use std::path::PathBuf;

use super::error::KernelError;

/// The forms there are, for messages.
pub(crate) const FORMS: &str = "A kernel is a catalogue entry such as 6.12, deb:PACKAGE[=VERSION][@SUITE], git:DIR@REV, dir:PATH, tar:FILE or vmlinux:FILE.";

/// Where a kernel comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Spec {
    /// A Debian source package.
    Deb(Deb),
    /// A commit of a local repository.
    Git { dir: PathBuf, rev: String },
    /// A source tree as it stands.
    Dir(PathBuf),
    /// A tarball.
    Tar(PathBuf),
    /// A kernel that is built already.
    Vmlinux(PathBuf),
}

/// A Debian package with what is known of its version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Deb {
    pub(crate) package: String,
    pub(crate) version: Option<String>,
    pub(crate) suite: Option<String>,
}

impl fmt::Display for Deb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "deb:{}", self.package)?;
        if let Some(version) = &self.version {
            write!(f, "={version}")?;
        }
        if let Some(suite) = &self.suite {
            write!(f, "@{suite}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deb(deb) => deb.fmt(f),
            Self::Git { dir, rev } => write!(f, "git:{}@{rev}", dir.display()),
            Self::Dir(path) => write!(f, "dir:{}", path.display()),
            Self::Tar(path) => write!(f, "tar:{}", path.display()),
            Self::Vmlinux(path) => write!(f, "vmlinux:{}", path.display()),
        }
    }
}

/// Reads a spec with a scheme; `None` for a bare name, which the catalogue must know.
pub(crate) fn parse(text: &str) -> Result<Option<Spec>, KernelError> {
    let Some((scheme, rest)) = text.split_once(':') else { return Ok(None) };
    let wrong = |why: &str| KernelError::Spec { spec: text.to_owned(), why: why.to_owned() };
    if rest.is_empty() {
        return Err(wrong("nothing follows the colon"));
    }
    let path = || {
        std::path::absolute(rest)
            .map_err(|error| wrong(&format!("its path cannot be made absolute: {error}")))
    };
    let spec = match scheme {
        "deb" => Spec::Deb(parse_deb(rest).map_err(wrong)?),
        "git" => {
            let (dir, rev) = rest.rsplit_once('@').ok_or_else(|| wrong("no @REV at its end"))?;
            if dir.is_empty() || rev.is_empty() || rev.starts_with('-') {
                return Err(wrong("it needs a folder and a revision, as in git:DIR@REV"));
            }
            let dir = std::path::absolute(dir)
                .map_err(|error| wrong(&format!("its path cannot be made absolute: {error}")))?;
            Spec::Git { dir, rev: rev.to_owned() }
        }
        "dir" => Spec::Dir(path()?),
        "tar" => Spec::Tar(path()?),
        "vmlinux" => Spec::Vmlinux(path()?),
        _ => return Err(wrong("there is no such kind of source")),
    };
    Ok(Some(spec))
}

fn parse_deb(text: &str) -> Result<Deb, &'static str> {
    let (text, suite) = match text.rsplit_once('@') {
        Some((text, suite)) => (text, Some(suite)),
        None => (text, None),
    };
    let (package, version) = match text.split_once('=') {
        Some((package, version)) => (package, Some(version)),
        None => (text, None),
    };
    // What Debian policy allows in each; it also keeps options and paths out of apt's command line.
    let made_of = |word: &str, more: &str| {
        word.starts_with(|c: char| c.is_ascii_alphanumeric())
            && word.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c))
    };
    if !made_of(package, "+-.") {
        return Err("its package name is not one");
    }
    if version.is_some_and(|version| !made_of(version, ".+-:~")) {
        return Err("its version is not a Debian version");
    }
    if suite.is_some_and(|suite| !made_of(suite, "-.")) {
        return Err("its suite is not one");
    }
    Ok(Deb {
        package: package.to_owned(),
        version: version.map(str::to_owned),
        suite: suite.map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn deb(package: &str, version: Option<&str>, suite: Option<&str>) -> Spec {
        Spec::Deb(Deb {
            package: package.to_owned(),
            version: version.map(str::to_owned),
            suite: suite.map(str::to_owned),
        })
    }

    #[test]
    fn every_form_is_read_and_written_back() {
        let cases = [
            ("deb:linux-source-6.12", deb("linux-source-6.12", None, None)),
            (
                "deb:linux-source-6.12=6.12.117-1~deb12u1",
                deb("linux-source-6.12", Some("6.12.117-1~deb12u1"), None),
            ),
            ("deb:linux-source-7.2=7.2.13-1@sid", deb("linux-source-7.2", Some("7.2.13-1"), Some("sid"))),
            ("deb:linux-source-7.2@sid", deb("linux-source-7.2", None, Some("sid"))),
            ("git:/src/linux@v6.12", Spec::Git { dir: "/src/linux".into(), rev: "v6.12".into() }),
            ("git:/a@b@HEAD~2", Spec::Git { dir: "/a@b".into(), rev: "HEAD~2".into() }),
            ("dir:/src/linux", Spec::Dir("/src/linux".into())),
            ("tar:/a/linux.tar.xz", Spec::Tar("/a/linux.tar.xz".into())),
            ("vmlinux:/boot/vmlinux", Spec::Vmlinux("/boot/vmlinux".into())),
        ];
        for (text, spec) in cases {
            assert_eq!(parse(text).unwrap().unwrap(), spec);
            assert_eq!(spec.to_string(), text);
        }
        assert_eq!(parse("6.12").unwrap(), None);
    }

    #[test]
    fn what_is_no_spec_says_why() {
        for text in [
            "deb:",
            "deb:=1",
            "deb:-o=1",
            "deb:a=-1",
            "deb:a@../b",
            "deb:a=1 2",
            "git:/src",
            "git:@v1",
            "git:/src@",
            "git:/src@--all",
            "ftp:/x",
            "dir:",
        ] {
            let error = parse(text).unwrap_err();
            assert!(matches!(error, KernelError::Spec { .. }), "{text}");
            assert!(error.to_string().contains(text));
        }
    }

    proptest! {
        #[test]
        fn any_text_is_answered(text in "\\PC{0,40}") {
            let _ = parse(&text);
        }
    }
}
