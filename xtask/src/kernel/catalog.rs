//! `kernels/catalog.toml`: the kernels that go by a bare name.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use super::error::{KernelError, io_error};
use super::spec::{self, Spec};

/// The catalogue, in the order of its names.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Catalog {
    kernel: BTreeMap<String, Entry>,
}

/// One named kernel.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// Specs to try, the preferred one first.
    specs: Vec<String>,
    /// What it is there for.
    why: String,
}

impl Catalog {
    /// Reads the catalogue.
    pub(crate) fn read(path: &Path) -> Result<Self, KernelError> {
        let text = std::fs::read_to_string(path).map_err(io_error("read", path))?;
        let catalog: Self = toml::from_str(&text)
            .map_err(|error| KernelError::Settings { path: path.to_owned(), why: error.to_string() })?;
        for name in catalog.kernel.keys() {
            catalog.specs(name).map_err(|error| KernelError::Settings {
                path: path.to_owned(),
                why: format!("kernel {name}: {error}"),
            })?;
        }
        Ok(catalog)
    }

    /// The names there are.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.kernel.keys().map(String::as_str)
    }

    /// What a named kernel is there for.
    pub(crate) fn why(&self, name: &str) -> &str {
        self.kernel.get(name).map_or("", |entry| &entry.why)
    }

    /// The specs to try for `name`.
    pub(crate) fn specs(&self, name: &str) -> Result<Vec<Spec>, KernelError> {
        let wrong = |why: String| KernelError::Spec { spec: name.to_owned(), why };
        let Some(entry) = self.kernel.get(name) else {
            let known: Vec<&str> = self.names().collect();
            return Err(wrong(format!("the catalogue has {}", known.join(", "))));
        };
        let specs: Vec<Spec> = entry
            .specs
            .iter()
            .map(|text| spec::parse(text)?.ok_or_else(|| wrong(format!("{text} is another bare name"))))
            .collect::<Result<_, _>>()?;
        if specs.is_empty() {
            return Err(wrong("it has no specs".to_owned()));
        }
        Ok(specs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_catalogue_is_sound_and_holds_the_promised_kernels() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/catalog.toml");
        let catalog = Catalog::read(&path).unwrap();
        for name in ["6.1", "6.12", "7.2", "7.3"] {
            assert!(!catalog.specs(name).unwrap().is_empty());
            assert!(!catalog.why(name).is_empty());
        }
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/catalog.toml");
        let error = Catalog::read(&path).unwrap().specs("5.4").unwrap_err().to_string();
        assert!(error.contains("6.1, 6.12, 7.2, 7.3"), "{error}");
    }
}
