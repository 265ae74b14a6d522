//! The driver that runs batches of allocator operations, put into a tree: its files, and a line in mm/Makefile.
//!
//! What comes out is another tree in the store, so the identity of a kernel with it covers its text.

use std::fs;
use std::path::{Path, PathBuf};

use super::cache::{self, Cache};
use super::error::{KernelError, io_error};
use super::patch::PairTrees;
use super::run;
use super::store::Store;

/// Its files, which keep their names below mm/.
const FILES: [&str; 3] = ["buddydiff.c", "buddydiff-abi.h", "buddydiff-compat.h"];
const MAKEFILE: &str = "mm/Makefile";
const LINE: &str = "obj-y += buddydiff.o\n";
/// To be changed with the way in which it is put into a tree.
const RECIPE: &str = "driver 1";

/// Where its files are. They are read when they are needed, for they are not under the licence of this program.
pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-agent/driver")
}

/// Gives `tree` with the driver in it.
pub(crate) fn add(
    cache: &Cache,
    store: &Store<'_>,
    spec: &str,
    tree: &str,
    folder: &Path,
) -> Result<String, KernelError> {
    let paths = FILES.map(|name| folder.join(name));
    let mut parts = vec![RECIPE.to_owned(), tree.to_owned()];
    for path in &paths {
        parts.push(fs::read_to_string(path).map_err(io_error("read", path))?);
    }
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    let key = cache::key(&parts);
    // A tree without and a tree with it are a pair as any other, and are kept and pruned as one.
    let record = cache.path("pairs", &format!("{key}.json"));
    if let Some(pair) = cache::read_record::<PairTrees>(&record)
        && store.holds(&format!("base-{key}"), &pair.base)
        && store.holds(&format!("patched-{key}"), &pair.patched)
    {
        cache::touch(&record);
        return Ok(pair.patched);
    }
    let makefile = store.file(tree, MAKEFILE).map_err(|_| KernelError::Source {
        spec: spec.to_owned(),
        why: format!("it has no {MAKEFILE}, so there is no place for the driver"),
    })?;
    let made = cache.path("tmp", &format!("driver-{key}-{}", std::process::id()));
    let index = made.with_extension("index");
    let put = || -> Result<String, KernelError> {
        // The newline ends a last line that has none, as the store gives it.
        fs::write(&made, format!("{makefile}\n{LINE}")).map_err(io_error("write", &made))?;
        let git =
            |what: &str, args: &[&str]| run::read(store.progress(), what, store.git_with_index(&index, args));
        git("read the tree", &["read-tree", tree])?;
        let files = paths.iter().zip(FILES).map(|(path, name)| (path.as_path(), format!("mm/{name}")));
        for (from, to) in files.chain([(made.as_path(), MAKEFILE.to_owned())]) {
            let from = from.to_string_lossy();
            let blob = git("store a file of the driver", &["hash-object", "-w", "--no-filters", &from])?;
            let entry = format!("100644,{blob},{to}");
            git("put the driver into the tree", &["update-index", "--add", "--cacheinfo", &entry])?;
        }
        git("write the tree", &["write-tree"])
    };
    let with = put();
    for left in [made.clone(), index.clone(), made.with_extension("index.lock")] {
        let _ = fs::remove_file(left);
    }
    let with = with?;
    store.keep(&format!("base-{key}"), tree)?;
    store.keep(&format!("patched-{key}"), &with)?;
    let pair = PairTrees { base: tree.to_owned(), patched: with, present: Vec::new(), offsets: Vec::new() };
    cache::write_record(&record, &pair)?;
    Ok(pair.patched)
}
