//! Texts of real guests, taken after a load by `debug_pagealloc=on debug_guardpage_minorder=1` kernels with one CPU, and
//! what remains of them when they are cut, altered or blown up.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use guest_agent::wire::ProcFile;
use proptest::prelude::*;

use super::*;
use crate::check::check;
use crate::observe::{Checkpoint, ObserveError, RawCheckpoint};

fn testdata() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/procfs")
}

fn snapshot(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(concat!(env!("CARGO_MANIFEST_DIR"), "/../snapshots"));
    settings.set_prepend_module_to_snapshot(false);
    settings.bind(|| insta::assert_snapshot!(name, text));
}

/// The guests whose texts are kept: a folder each.
fn guests() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(testdata())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    for version in ["6.1.", "6.12.", "7.2.", "7.3."] {
        assert!(names.iter().any(|name| name.starts_with(version)), "no guest of {version}x in {names:?}");
    }
    names
}

/// The words of kpageflags are kept as `value count`: the parser does not mind their order.
fn kpageflags_words(counts: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for line in counts.lines() {
        let (word, count) = line.split_once(' ').unwrap();
        let word = u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap();
        for _ in 0..count.parse::<usize>().unwrap() {
            bytes.extend(word.to_le_bytes());
        }
    }
    bytes
}

fn raw(guest: &str) -> RawCheckpoint {
    let read = |name: &str| std::fs::read(testdata().join(guest).join(name)).unwrap();
    let counts = String::from_utf8(read("kpageflags.counts")).unwrap();
    let files = BTreeMap::from([
        (ProcFile::Buddyinfo, read("buddyinfo")),
        (ProcFile::Zoneinfo, read("zoneinfo")),
        (ProcFile::Vmstat, read("vmstat")),
        (ProcFile::Pagetypeinfo, read("pagetypeinfo")),
        (ProcFile::Kpageflags, kpageflags_words(&counts)),
    ]);
    RawCheckpoint { name: guest.to_owned(), still: true, still_after_flags: true, files }
}

fn pairs(values: &BTreeMap<String, i64>) -> String {
    values.iter().map(|(name, value)| format!(" {name}={value}")).collect()
}

/// All that was read, a line a thing.
fn describe(checkpoint: &Checkpoint) -> String {
    let mut text = String::new();
    for lists in &checkpoint.buddyinfo {
        let _ = writeln!(text, "buddyinfo {}: {} pages in {:?}", lists.id, lists.pages, lists.blocks);
    }
    for zone in &checkpoint.zoneinfo {
        let _ = writeln!(text, "zoneinfo {}:{}", zone.id, pairs(&zone.values));
        for (cpu, pageset) in zone.pagesets.iter().enumerate() {
            let _ =
                writeln!(text, "  cpu {cpu}:{} threshold={:?}", pairs(&pageset.values), pageset.threshold);
        }
    }
    let blocks = checkpoint.pagetypeinfo.as_ref().unwrap();
    let _ = writeln!(text, "pagetypeinfo: pageblock_order={}", blocks.pageblock_order);
    for zone in &blocks.zones {
        for ((kind, free), pageblocks) in blocks.types.iter().zip(&zone.free).zip(&zone.pageblocks) {
            let free: Option<Vec<u64>> = free.iter().copied().collect();
            let _ = writeln!(text, "  {} {kind}: pageblocks={pageblocks} free={:?}", zone.id, free.unwrap());
        }
    }
    let _ = writeln!(text, "kpageflags: {:?}", checkpoint.kpageflags.as_ref().unwrap());
    let vmstat = checkpoint.vmstat.as_ref().unwrap();
    let _ = writeln!(text, "vmstat: {} counters,", vmstat.len());
    for name in ["nr_free_pages", "nr_slab_unreclaimable", "pgalloc_dma32", "pgfree", "nr_unstable"] {
        let _ = writeln!(text, "  {name}={:?}", vmstat.get(name));
    }
    text
}

#[test]
fn real_guests() {
    for guest in guests() {
        snapshot(&format!("procfs-{guest}"), &describe(&Checkpoint::parse(&raw(&guest)).unwrap()));
    }
}

/// The checks on the same texts: kernels that do not count guard pages break I2, and nothing else; the others break nothing.
#[test]
fn real_guests_checked() {
    let broken = ["6.12.117-without-fix", "7.2.13", "7.2.13-up"];
    for guest in guests() {
        let violations = check(&Checkpoint::parse(&raw(&guest)).unwrap());
        let found: Vec<&str> = violations.iter().map(|violation| violation.invariant).collect();
        let expected: &[&str] = if broken.contains(&guest.as_str()) { &["I2"] } else { &[] };
        assert_eq!(found, expected, "{guest}: {violations:#?}");
    }
}

fn error(file: ProcFile, from: &str, to: &str) -> String {
    let mut raw = raw("7.2.13");
    let text = String::from_utf8(raw.files.remove(&file).unwrap()).unwrap();
    assert!(text.contains(from), "{from:?} is not in {}", file.path());
    raw.files.insert(file, text.replacen(from, to, 1).into_bytes());
    match Checkpoint::parse(&raw) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("{} with {to:?} for {from:?} was taken", file.path()),
    }
}

/// What is refused, and in which words: file, line, what was expected.
#[test]
fn refusals() {
    use ProcFile::{Buddyinfo, Pagetypeinfo, Vmstat, Zoneinfo};
    let too_many_orders = " 1".repeat(17);
    let too_many_zones: String = (1..70).fold(String::new(), |mut text, node| {
        let _ = writeln!(text, "Node {node}, zone DMA 0 0 0 0 0 0 0 0 0 0 0");
        text
    });
    let cases = [
        (Buddyinfo, "Node 0, zone      DMA", "Node 0; zone      DMA"),
        (Buddyinfo, "Node 0, zone      DMA", "Node 0, zone      \u{1b}[31m"),
        (Buddyinfo, "DMA32", "DMA"),
        (Buddyinfo, "      3 \n", "      x \n"),
        (Buddyinfo, "      3 \n", "     -3 \n"),
        (Buddyinfo, "      3 \n", " 18446744073709551615 \n"),
        (Buddyinfo, "      3 \n", " 99999999999999999999 \n"),
        (Buddyinfo, "      3 \n", " \n"),
        (Buddyinfo, "      3 \n", &too_many_orders),
        (Buddyinfo, "Node 0, zone    DMA32", &too_many_zones),
        (Zoneinfo, "Node 0, zone      DMA\n", ""),
        (Zoneinfo, "  pages free  ", "  pages fee  "),
        (Zoneinfo, "        managed", "        present"),
        (Zoneinfo, "    cpu: 0", "    cpu: x"),
        (Zoneinfo, "  vm stats threshold: 2", "  vm stats threshold: two"),
        (Vmstat, "nr_free_pages ", "nr_free_pages"),
        (Vmstat, "nr_free_pages ", "nr free pages "),
        (Vmstat, "nr_unstable", "nr_free_pages"),
        (Pagetypeinfo, "Page block order: 9", "Page block order: 64"),
        (Pagetypeinfo, "type      Movable", "type    Immovable"),
        (Pagetypeinfo, "Number of blocks", "Some other number"),
        (Pagetypeinfo, "Page block order: 9", ""),
        (Pagetypeinfo, "      3 \n", "\n"),
        (Pagetypeinfo, "      3 \n", "      3 \nNode 0, zone DMA, type Fresh 1 2 3 4 5 6 7 8 9 10 11\n"),
    ];
    let mut text = String::new();
    for (file, from, to) in cases {
        let to_short: String = to.chars().take(30).collect();
        let _ = writeln!(text, "{from:?} -> {to_short:?}\n    {}", error(file, from, to));
    }
    snapshot("procfs-refusals", &text);
}

#[test]
fn files_that_a_checkpoint_needs() {
    for file in ProcFile::ALL {
        let mut raw = raw("7.2.13");
        raw.files.remove(&file);
        let needed = matches!(file, ProcFile::Buddyinfo | ProcFile::Zoneinfo);
        match Checkpoint::parse(&raw) {
            Ok(_) => assert!(!needed),
            Err(ObserveError::Missing { file: named, .. }) => assert!(needed && named == file),
            Err(error) => panic!("{error}"),
        }
    }
}

/// `up` kernels do not clamp a counter below zero, and print it as an unsigned word.
#[test]
fn a_counter_below_zero() {
    let text = "Node 0, zone DMA\n  pages free     18446744073709544476\n        present  3998\n";
    assert_eq!(zoneinfo::parse(text.as_bytes()).unwrap()[0].get("free"), Some(-7140));
}

/// Lists above the kernel's limit are not counted, so no sum over them is given.
#[test]
fn a_list_too_long_to_count() {
    let mut raw = raw("7.2.13");
    let text = String::from_utf8(raw.files.remove(&ProcFile::Pagetypeinfo).unwrap()).unwrap();
    let row = text.lines().find(|line| line.contains("DMA32, type      Movable")).unwrap();
    let capped = {
        let (heading, counts) = row.split_at(row.find("Movable").unwrap() + 7);
        let (_, rest) = counts.trim_start().split_once(' ').unwrap();
        format!("{heading} >100000 {rest}")
    };
    let blocks = pagetypeinfo::parse(text.replacen(row, &capped, 1).as_bytes()).unwrap();
    let movable = blocks.types.iter().position(|kind| kind == "Movable").unwrap();
    assert_eq!(blocks.zones[1].free[movable][0], None);
    assert_eq!(blocks.zones[1].free_pages(movable), None);
    assert_eq!(blocks.zones[1].free_by_order(), None);
    assert!(blocks.zones[0].free_by_order().is_some(), "the other zone is not concerned");
}

#[test]
fn several_nodes() {
    let buddyinfo = "Node 0, zone   Normal 1 2\nNode 1, zone   Normal 3 4\n";
    let ids: Vec<String> =
        buddyinfo::parse(buddyinfo.as_bytes()).unwrap().iter().map(|lists| lists.id.to_string()).collect();
    assert_eq!(ids, ["Normal", "node 1 Normal"]);

    // Each node prints every part of pagetypeinfo.
    let part = |node: u32| {
        format!(
            "Page block order: 9\nPages per block:  512\n\nFree pages count per migrate type at order 0 1\n\
             Node    {node}, zone   Normal, type    Unmovable 1 2\n\nNumber of blocks type     Unmovable\n\
             Node {node}, zone   Normal            7\n\nNumber of mixed blocks     Unmovable\n\
             Node {node}, zone   Normal            3\n"
        )
    };
    let blocks = pagetypeinfo::parse((part(0) + &part(1)).as_bytes()).unwrap();
    assert_eq!(blocks.zones.len(), 2);
    assert_eq!(blocks.zones[1].pageblocks, [7]);
}

/// One thing done to a text.
#[derive(Clone, Debug)]
enum Damage {
    Flip(usize, u8),
    Cut(usize),
    Repeat(usize),
    Drop(usize),
    Number(usize, String),
}

fn damage() -> impl Strategy<Value = Damage> {
    let number = prop_oneof![
        Just("18446744073709551615".to_owned()),
        Just("18446744073709551616".to_owned()),
        Just("9223372036854775808".to_owned()),
        Just("-1".to_owned()),
        Just(">100000".to_owned()),
        Just("9".repeat(5000)),
        any::<u64>().prop_map(|number| number.to_string()),
    ];
    prop_oneof![
        (any::<usize>(), any::<u8>()).prop_map(|(at, mask)| Damage::Flip(at, mask)),
        any::<usize>().prop_map(Damage::Cut),
        any::<usize>().prop_map(Damage::Repeat),
        any::<usize>().prop_map(Damage::Drop),
        (any::<usize>(), number).prop_map(|(at, number)| Damage::Number(at, number)),
    ]
}

fn damaged(mut bytes: Vec<u8>, damage: &Damage) -> Vec<u8> {
    if bytes.is_empty() {
        return bytes;
    }
    let lines =
        |bytes: &[u8]| bytes.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect::<Vec<_>>();
    match damage {
        Damage::Flip(at, mask) => {
            let at = at % bytes.len();
            bytes[at] ^= mask;
            bytes
        }
        Damage::Cut(at) => {
            bytes.truncate(at % bytes.len());
            bytes
        }
        Damage::Repeat(at) => {
            let mut lines = lines(&bytes);
            let at = at % lines.len();
            lines.insert(at, lines[at].clone());
            lines.concat()
        }
        Damage::Drop(at) => {
            let mut lines = lines(&bytes);
            lines.remove(at % lines.len());
            lines.concat()
        }
        Damage::Number(at, number) => {
            let runs: Vec<(usize, usize)> = digit_runs(&bytes);
            let Some(&(start, end)) = runs.get(at % runs.len().max(1)) else { return bytes };
            bytes.splice(start..end, number.bytes());
            bytes
        }
    }
}

fn digit_runs(bytes: &[u8]) -> Vec<(usize, usize)> {
    let mut runs = Vec::new();
    let mut start = None;
    for (at, byte) in bytes.iter().enumerate() {
        match (byte.is_ascii_digit(), start) {
            (true, None) => start = Some(at),
            (false, Some(from)) => {
                runs.push((from, at));
                start = None;
            }
            _ => {}
        }
    }
    runs
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// A damaged text is refused in few words or read within the limits, and the checks bear whatever was read.
    #[test]
    fn damaged_texts(
        guest in 0..guests().len(),
        file in 0..4_usize,
        damages in prop::collection::vec(damage(), 1..5),
    ) {
        let mut raw = raw_texts(&guests()[guest]);
        let bytes = raw.files.get_mut(&ProcFile::ALL[file]).unwrap();
        for damage in &damages {
            *bytes = damaged(std::mem::take(bytes), damage);
        }
        match Checkpoint::parse(&raw) {
            Err(error) => prop_assert!(error.to_string().len() < 600, "{error}"),
            Ok(checkpoint) => {
                prop_assert!(checkpoint.buddyinfo.iter().all(|lists| lists.blocks.len() <= ORDERS_MAX));
                prop_assert!(checkpoint.buddyinfo.len() <= ZONES_MAX && checkpoint.zoneinfo.len() <= ZONES_MAX);
                for violation in check(&checkpoint) {
                    prop_assert!(violation.text.len() < 600, "{}", violation.text);
                }
            }
        }
    }

    #[test]
    fn words_of_any_value(words in prop::collection::vec(any::<u64>(), 0..50), cut in 0..8_usize) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).chain(vec![0; cut]).collect();
        let parsed = kpageflags::parse(&bytes);
        prop_assert_eq!(parsed.is_ok(), cut == 0);
        if let Ok(flags) = parsed {
            let buddy = words.iter().filter(|word| *word >> 10 & 1 == 1).count() as u64;
            prop_assert_eq!((flags.pfns, flags.buddy), (words.len() as u64, buddy));
        }
    }
}

/// [`raw`] without the megabyte of kpageflags.
fn raw_texts(guest: &str) -> RawCheckpoint {
    let mut raw = RawCheckpoint { name: guest.to_owned(), still: true, ..Default::default() };
    for (file, name) in ProcFile::ALL.into_iter().zip(["buddyinfo", "zoneinfo", "vmstat", "pagetypeinfo"]) {
        raw.files.insert(file, std::fs::read(testdata().join(guest).join(name)).unwrap());
    }
    raw
}
