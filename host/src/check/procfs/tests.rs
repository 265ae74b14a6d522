use super::*;
use crate::check::{Violation, check};
use crate::observe::RawCheckpoint;
use guest_agent::wire::ProcFile;

const BUDDYINFO: &str =
    "Node 0, zone      DMA      0      0      1\nNode 0, zone    DMA32     10      5      2\n";
const ZONEINFO: &str = "\
Node 0, zone      DMA
  pages free     4
        spanned  8
        present  8
  pagesets
    cpu: 0
              count:    0
              batch:    1
  vm stats threshold: 0
Node 0, zone    DMA32
  pages free     28
        spanned  32
        present  32
  pagesets
    cpu: 0
              count:    0
              batch:    7
  vm stats threshold: 2
";
const PAGETYPEINFO: &str = "\
Page block order: 3
Pages per block:  8

Free pages count per migrate type at order       0      1      2
Node    0, zone      DMA, type    Unmovable      0      0      1
Node    0, zone      DMA, type      Isolate      0      0      0
Node    0, zone    DMA32, type    Unmovable     10      5      2
Node    0, zone    DMA32, type      Isolate      0      0      0

Number of blocks type     Unmovable      Isolate
Node 0, zone      DMA            1            0
Node 0, zone    DMA32            4            0
";
const VMSTAT: &str = "nr_free_pages 32\n";

/// A sound checkpoint, with one thing replaced in one file.
fn checkpoint(file: ProcFile, from: &str, to: &str) -> Checkpoint {
    let mut raw =
        RawCheckpoint { name: "c".into(), still: true, still_after_flags: true, ..Default::default() };
    let texts = [
        (ProcFile::Buddyinfo, BUDDYINFO),
        (ProcFile::Zoneinfo, ZONEINFO),
        (ProcFile::Pagetypeinfo, PAGETYPEINFO),
        (ProcFile::Vmstat, VMSTAT),
    ];
    for (name, text) in texts {
        let text = if name == file {
            assert!(text.contains(from), "{from:?} is not in {name:?}");
            text.replacen(from, to, 1)
        } else {
            text.to_owned()
        };
        raw.files.insert(name, text.into_bytes());
    }
    // 32 free pages of 40.
    let words =
        (0..40).flat_map(|pfn| if pfn < 32 { (1_u64 << 10).to_le_bytes() } else { 0_u64.to_le_bytes() });
    raw.files.insert(ProcFile::Kpageflags, words.collect());
    Checkpoint::parse(&raw).unwrap()
}

fn sound() -> Checkpoint {
    checkpoint(ProcFile::Vmstat, "", "")
}

fn names(checkpoint: &Checkpoint) -> Vec<(&'static str, String)> {
    check(checkpoint).into_iter().map(|violation| (violation.invariant, violation.zone)).collect()
}

#[test]
fn a_sound_checkpoint_is_silent() {
    assert_eq!(check(&sound()), []);
}

#[test]
fn free_pages_that_are_missing_break_i2_in_their_zone_only() {
    let checkpoint = checkpoint(ProcFile::Zoneinfo, "pages free     28", "pages free     25");
    let found: Vec<Violation> = check(&checkpoint).into_iter().filter(|v| v.invariant == "I2").collect();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].zone.as_str(), found[0].expected, found[0].found), ("DMA32", 28, 25));
    assert!(found[0].text.contains("3 fewer"), "{}", found[0].text);
}

#[test]
fn what_a_cpu_holds_back_is_no_violation() {
    let checkpoint = checkpoint(ProcFile::Zoneinfo, "pages free     28", "pages free     26");
    assert_eq!(check(&checkpoint), []);
}

/// A CPU that gives back all that its lists may hold moves that much between the two readings.
#[test]
fn where_pages_moved_while_they_were_read_what_the_per_cpu_lists_may_hold_is_allowed() {
    let full = "pages free     13\n        spanned  32\n        present  32\n  pagesets\n    cpu: 0\n              high_max: 13";
    let bare = "pages free     28\n        spanned  32\n        present  32\n  pagesets\n    cpu: 0";
    let mut checkpoint = checkpoint(ProcFile::Zoneinfo, bare, full);
    checkpoint.still = false;
    // 15 pages off: threshold 2 and 13.
    assert!(free_pages(&checkpoint).is_empty());
    checkpoint.zoneinfo[1].pagesets[0].values.insert("high_max".into(), 12);
    assert_eq!(free_pages(&checkpoint).len(), 1);
    // More than the zone has cannot move, and a threshold is a byte.
    checkpoint.zoneinfo[1].pagesets[0].values.insert("high_max".into(), i64::MAX);
    checkpoint.zoneinfo[1].pagesets[0].threshold = Some(i64::MAX);
    assert_eq!(allowance(&checkpoint, &checkpoint.zoneinfo[1]), 127 + 32);
}

#[test]
fn a_negative_counter_is_read_as_such() {
    let checkpoint =
        checkpoint(ProcFile::Zoneinfo, "pages free     28", "pages free     18446744073709551611");
    assert_eq!(free_pages(&checkpoint)[0].found, -5);
}

#[test]
fn isolated_pages_are_on_the_lists_but_not_in_the_counter() {
    let mut checkpoint = checkpoint(ProcFile::Zoneinfo, "pages free     28", "pages free     8");
    assert_eq!(free_pages(&checkpoint).len(), 1);
    let zone = &mut checkpoint.pagetypeinfo.as_mut().unwrap().zones[1];
    zone.free = vec![vec![Some(0), Some(0), Some(2)], vec![Some(10), Some(5), Some(0)]];
    assert!(free_pages(&checkpoint).is_empty());
}

#[test]
fn a_block_too_many_in_nr_free_breaks_i1() {
    let checkpoint = checkpoint(
        ProcFile::Pagetypeinfo,
        "Unmovable     10      5      2",
        "Unmovable     10      4      2",
    );
    assert_eq!(names(&checkpoint), [("I1", "DMA32".to_owned())]);
}

#[test]
fn a_list_that_was_not_counted_to_its_end_says_nothing() {
    let checkpoint = checkpoint(
        ProcFile::Pagetypeinfo,
        "Unmovable     10      5      2",
        "Unmovable >100000      4      2",
    );
    assert!(list_lengths(&checkpoint).is_empty());
}

#[test]
fn a_pageblock_of_no_known_type_is_missed() {
    let checkpoint = checkpoint(ProcFile::Pagetypeinfo, "DMA32            4", "DMA32            3");
    assert_eq!(names(&checkpoint), [("pageblocks", "DMA32".to_owned())]);
}

#[test]
fn the_machine_has_what_its_zones_have() {
    let checkpoint = checkpoint(ProcFile::Vmstat, "32", "35");
    assert_eq!(names(&checkpoint), [("vmstat-sum", String::new())]);
}

#[test]
fn a_free_page_without_its_flag_is_found() {
    let mut checkpoint = sound();
    checkpoint.kpageflags.as_mut().unwrap().buddy -= 1;
    assert_eq!(names(&checkpoint), [("kpageflags-buddy", String::new())]);
    checkpoint.still_after_flags = false;
    assert_eq!(names(&checkpoint), []);
}

/// A zone of 7.2 or later with one free block of 4 pages that is CMA and one of 8 pages that is HIGHATOMIC: one pageblock
/// and two.
fn typed(counters: &str) -> Vec<(&'static str, String)> {
    let pagetypeinfo = "Page block order: 2\n\
        Node    0, zone      DMA, type   HighAtomic      0      0      0      1\n\
        Node    0, zone      DMA, type          CMA      0      0      1      0\n\
        Number of blocks type     HighAtomic      CMA\n\
        Node 0, zone      DMA            2            1\n";
    let mut raw = RawCheckpoint { name: "c".into(), still: true, ..Default::default() };
    let zoneinfo =
        format!("Node 0, zone      DMA\n  pages free     12\n  spanned  12\n  present  12\n{counters}");
    raw.files.insert(ProcFile::Buddyinfo, b"Node 0, zone      DMA      0      0      1      1\n".to_vec());
    raw.files.insert(ProcFile::Zoneinfo, zoneinfo.into_bytes());
    raw.files.insert(ProcFile::Pagetypeinfo, pagetypeinfo.into());
    names(&Checkpoint::parse(&raw).unwrap())
}

#[test]
fn counters_of_a_migratetype_are_held_to_its_lists() {
    let dma = |invariant| vec![(invariant, "DMA".to_owned())];
    assert_eq!(typed(""), [], "6.1 and 6.12 do not print them all");
    let sound = " nr_free_cma 4\n free_highatomic: 8\n reserved_highatomic: 8\n nr_free_pages_blocks 12\n";
    assert_eq!(typed(sound), []);
    assert_eq!(typed(&sound.replace("cma 4", "cma 8")), dma("I3"));
    assert_eq!(typed(&sound.replace("free_highatomic: 8", "free_highatomic: 7")), dma("I4"));
    assert_eq!(typed(&sound.replace("reserved_highatomic: 8", "reserved_highatomic: 4")), dma("I5"));
    assert_eq!(typed(&sound.replace("blocks 12", "blocks 8")), dma("I9"));
}

#[test]
fn free_pages_that_are_too_many_break_i2_too() {
    let checkpoint = checkpoint(ProcFile::Zoneinfo, "pages free     28", "pages free     31");
    let found = free_pages(&checkpoint);
    assert!(found.len() == 1 && found[0].text.contains("3 more"), "{found:?}");
}

/// `smp` kernels print a zone's counter below zero as 0: the sum over zones then says nothing.
#[test]
fn a_zone_that_shows_no_free_pages_leaves_the_sum_undecided() {
    assert!(vmstat_sum(&checkpoint(ProcFile::Zoneinfo, "pages free     28", "pages free     0")).is_empty());
    assert_eq!(vmstat_sum(&checkpoint(ProcFile::Zoneinfo, "pages free     28", "pages free     1")).len(), 1);
}

/// pagetypeinfo shows an isolated pageblock as isolated, whatever else it is.
#[test]
fn reserves_are_left_alone_while_a_pageblock_is_isolated() {
    let text = |isolated: u32| {
        format!(
            "Page block order: 3\n\
             Node    0, zone      DMA, type   HighAtomic      0      0      1\n\
             Node    0, zone      DMA, type      Isolate      0      0      0\n\
             Number of blocks type     HighAtomic      Isolate\n\
             Node 0, zone      DMA            0            {isolated}\n"
        )
    };
    let mut checkpoint =
        checkpoint(ProcFile::Zoneinfo, "pages free     4", "pages free     4\n reserved_highatomic: 8");
    for (isolated, violations) in [(0, 1), (1, 0)] {
        let parsed = crate::observe::procfs::pagetypeinfo::parse(text(isolated).as_bytes()).unwrap();
        checkpoint.pagetypeinfo = Some(parsed);
        assert_eq!(reserved_highatomic(&checkpoint).len(), violations);
    }
}
