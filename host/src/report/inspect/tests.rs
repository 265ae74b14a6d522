//! A state made by hand, small and with one of each thing, and what is shown of it.

use super::*;
use crate::check::Violation;
use crate::observe::frozen::{Area, Block, Cpu, FreeList, PageClass, Part, Pcp, PcpList};
use crate::observe::frozen::{MigrateType, Zone};

const ORDER: u32 = 3;

fn block(kind: MigrateType, isolated: bool) -> Option<Block> {
    let number = MigrateType::ALL.iter().position(|known| *known == kind).unwrap();
    Some(Block { kind, number, skip: false, isolated })
}

/// A zone whose pages and blocks are spelled: a word a block, its type's letter (small if isolated, `_` for no map) and
/// then its pages' kinds.
fn zone(name: &str, start: u64, map: &str) -> Zone {
    let mut zone = Zone { name: name.into(), start, first_block: start >> ORDER, ..Zone::default() };
    for word in map.split_whitespace() {
        let (letter, pages) = word.split_at(1);
        let kind = match letter.to_ascii_uppercase().as_str() {
            "U" => MigrateType::Unmovable,
            "M" => MigrateType::Movable,
            "R" => MigrateType::Reclaimable,
            "H" => MigrateType::HighAtomic,
            "C" => MigrateType::Cma,
            _ => MigrateType::Isolate,
        };
        zone.blocks.push(if letter == "_" {
            None
        } else {
            block(kind, letter.chars().all(char::is_lowercase))
        });
        zone.pages.extend(pages.chars().map(|page| {
            let kind = match page {
                'f' => Kind::Free,
                'p' => Kind::Pcp,
                'g' => Kind::Guard,
                'l' => Kind::Lru,
                's' => Kind::Slab,
                'h' => Kind::Hugetlb,
                'r' => Kind::Reserved,
                'o' => Kind::Other,
                _ => Kind::Absent,
            };
            PageClass::new(kind, Part::Single, 0)
        }));
    }
    zone.spanned = zone.pages.len() as u64;
    zone.present = zone.spanned;
    zone.managed = zone.pages.iter().filter(|class| class.kind() != Kind::Reserved).count() as u64;
    zone.counter_names = vec!["NR_FREE_PAGES".into(), "NR_MLOCK".into()];
    zone.counters = vec![0; 2];
    zone.watermarks = vec![2, 3, 4, 5];
    zone.lowmem_reserve = vec![0, 12, 12];
    zone.areas = (0..4)
        .map(|_| Area { nr_free: 0, lists: MigrateType::ALL.iter().map(|_| FreeList::default()).collect() })
        .collect();
    zone
}

fn list(zone: &mut Zone, order: usize, kind: MigrateType, pfns: &[u32]) {
    let number = MigrateType::ALL.iter().position(|known| *known == kind).unwrap();
    zone.areas[order].lists[number].pfns.extend(pfns);
    zone.areas[order].nr_free += pfns.len() as u64;
}

fn state() -> State {
    // The first block of a zone that starts at pfn 1 lacks its first page.
    let mut dma = zone("DMA", 1, "Urrrrrrr Mffffffff");
    dma.isolated_blocks = Some(0);
    list(&mut dma, 3, MigrateType::Movable, &[8]);
    dma.counters[0] = 8;

    let mut dma32 = zone(
        "DMA32",
        16,
        "Mffffffff Mllllllll Mffffllll Mlllllsll Mfffffsfo Ussssffff Uooosssss Rssssssff Hffffffff Cllllllll \
         Cllllloll iffffffff mllllllll Mgfppffff Mhhhhhhhh Mrrrrrrrr _--------",
    );
    dma32.index = 1;
    (dma32.boost, dma32.reserved_highatomic, dma32.free_highatomic) = (1, 8, Some(8));
    (dma32.cma, dma32.isolated_blocks) = (Some(16), Some(2));
    dma32.flag_names = vec!["ZONE_BOOSTED_WATERMARK".into(), "ZONE_BELOW_HIGH".into()];
    list(&mut dma32, 3, MigrateType::Movable, &[16]);
    list(&mut dma32, 2, MigrateType::Movable, &[32, 48, 124]);
    list(&mut dma32, 0, MigrateType::Movable, &[52, 54, 121]);
    list(&mut dma32, 2, MigrateType::Unmovable, &[60]);
    list(&mut dma32, 1, MigrateType::Reclaimable, &[78]);
    list(&mut dma32, 3, MigrateType::HighAtomic, &[80]);
    list(&mut dma32, 3, MigrateType::Isolate, &[104]);
    dma32.areas[3].lists[0].broken = true;
    dma32.counters = vec![35, 4];
    let cpu = |number, online, pfns: &[u32], diffs| Cpu {
        number,
        online,
        pcp: Pcp {
            count: pfns.len() as i32,
            high: 14,
            high_range: Some((14, 30)),
            batch: 7,
            flags: Some(0),
            alloc_factor: Some(1),
            free_count: Some(3),
            lists: vec![
                PcpList { order: 0, pfns: pfns.to_vec(), ..PcpList::default() },
                PcpList { order: 9, ..PcpList::default() },
            ],
        },
        diffs,
        threshold: Some(12),
    };
    dma32.cpus = vec![cpu(0, true, &[122, 123], vec![-2, 1]), cpu(1, false, &[], vec![0, 0])];

    State {
        pageblock_order: ORDER,
        guard_minorder: 1,
        types: MigrateType::ALL.to_vec(),
        hygiene: true,
        isolation_keeps_type: true,
        zones: vec![dma, dma32],
        ..State::default()
    }
}

fn violation() -> Violation {
    Violation {
        checkpoint: "idle".into(),
        zone: "DMA32".into(),
        invariant: "I2",
        expected: 36,
        found: 33,
        pfn: None,
        pages: Some(3),
        text: "3 pages on the free lists are not counted as free".into(),
    }
}

fn snapshot(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(concat!(env!("CARGO_MANIFEST_DIR"), "/../snapshots"));
    settings.set_prepend_module_to_snapshot(false);
    settings.bind(|| insta::assert_snapshot!(name, text));
}

#[test]
fn the_tables() {
    let state = state();
    let text = format!("{}\n{}", zones(&state), free_lists(&state));
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    snapshot("inspect-tables", &text);
}

#[test]
fn the_map() {
    let state = state();
    let plain = block_map(&state, 8, false);
    assert!(plain.lines().all(|line| line.chars().count() <= 100), "{plain}");
    snapshot("inspect-map", &plain);
    let coloured = block_map(&state, 8, true);
    // Without the escapes it is the same.
    let mut stripped = String::new();
    let mut rest = coloured.as_str();
    while let Some((before, after)) = rest.split_once('\x1b') {
        stripped.push_str(before);
        rest = after.split_once('m').unwrap().1;
    }
    stripped.push_str(rest);
    assert_eq!(stripped, plain);
    assert_ne!(coloured, plain);
}

#[test]
fn the_picture() {
    let state = state();
    let picture = svg(&state);
    snapshot("inspect-svg", &picture);
    assert_eq!(picture, svg(&state), "equal states give equal bytes");
}

#[test]
fn the_json() {
    let value = json(&state(), &[violation()]);
    snapshot("inspect-json", &serde_json::to_string_pretty(&value).unwrap());
}

/// 64 GiB: 32768 pageblocks. The map stays readable, the picture has a square for each and stays small.
#[test]
fn a_large_guest_is_shown_in_bounds() {
    let mut large = zone("Normal", 0, "");
    large.pages = vec![PageClass::new(Kind::Free, Part::Single, 0); 32768 << ORDER];
    large.pages[5] = PageClass::new(Kind::Slab, Part::Single, 0);
    large.blocks = vec![block(MigrateType::Movable, false); 32768];
    large.spanned = large.pages.len() as u64;
    let state = State { zones: vec![large], ..state() };
    let map = block_map(&state, 64, false);
    assert!(map.starts_with("Normal: 32768 pageblocks of 8 pages, 8 a character; 1 mixed, 0 isolated\n"));
    assert!(map.lines().count() < 72, "{map}");
    assert!(map.contains("        0x0 x......."), "{map}");
    let picture = svg(&state);
    assert!(picture.len() < 32768 * 200, "{} bytes", picture.len());
}

/// What a damaged guest may say must not bring the host down.
#[test]
fn nothing_at_all_is_shown_too() {
    let empty = State { zones: vec![Zone::default()], ..State::default() };
    for state in [State::default(), empty] {
        let _ =
            (zones(&state), free_lists(&state), block_map(&state, 0, true), svg(&state), json(&state, &[]));
    }
}
