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

#[test]
fn where_pages_moved_while_they_were_read_one_refill_and_one_drain_are_allowed() {
    let mut checkpoint = checkpoint(ProcFile::Zoneinfo, "pages free     28", "pages free     12");
    checkpoint.still = false;
    // Two CPUs' worth: threshold 2 and twice batch 7.
    assert!(free_pages(&checkpoint).is_empty());
    checkpoint.still = true;
    assert_eq!(free_pages(&checkpoint).len(), 1);
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
