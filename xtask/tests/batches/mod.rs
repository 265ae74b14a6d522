//! Batches in kernels with the driver: what it says it did is what the frozen states before and after show.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use host::batch::{Answer, Driver, NotDone, OPS_MAX, Op, Record, Wrong, gfp};
use host::freeze::violations;
use host::observe::frozen::{Kernel, Kind, MigrateType, Ram, State};
use host::report::inspect;
use host::run::{BatchBell, Bell, FrozenObserver, Outcome, Phase, RunError};
use host::vm::Machine;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde_json::Value;

use super::subject::{self, Subject};

/// A batch, and what was seen of it.
struct Ran {
    records: Vec<Record>,
    before: State,
    after: State,
    answer: Answer,
    /// From the one stop to the other.
    took: Duration,
}

/// Runs batches as `next` makes them, knowing what came before and the state as it is.
struct Player<'a, F> {
    kernel: &'a Kernel,
    driver: Option<Driver>,
    next: F,
    written: Option<(Vec<Record>, State, Instant)>,
    ran: Vec<Ran>,
}

impl<F: FnMut(&[Ran], &State) -> Vec<Record>> FrozenObserver for Player<'_, F> {
    fn look(&mut self, _: &mut dyn Machine, _: Bell<'_>) -> Result<(), RunError> {
        panic!("the script has no frozen checkpoint");
    }

    fn batch(&mut self, machine: &mut dyn Machine, bell: BatchBell) -> Result<(), RunError> {
        let arrived = Instant::now();
        let (file, layout) = machine.ram();
        let ram = Ram::map(file, layout).expect("RAM can be mapped");
        let state = State::read(self.kernel, &ram).expect("RAM can be read");
        let driver = self
            .driver
            .get_or_insert_with(|| Driver::find(self.kernel, &ram, file).expect("there is a driver"));
        match bell.phase {
            Phase::Before => {
                let records = (self.next)(&self.ran, &state);
                driver.write_records(file, &records).expect("the batch can be written");
                self.written = Some((records, state, Instant::now()));
            }
            Phase::After => {
                let (records, before, went) = self.written.take().expect("a batch was written");
                let answer = driver.read(file, records.len()).expect("there is an answer");
                self.ran.push(Ran { records, before, after: state, answer, took: arrived - went });
            }
        }
        Ok(())
    }
}

/// The machine that batches run in.
#[derive(Clone, Copy)]
struct Setting {
    cpus: u32,
    busy: bool,
    guards: bool,
    two_nodes: bool,
    deterministic: bool,
}

const PLAIN: Setting =
    Setting { cpus: 1, busy: false, guards: false, two_nodes: false, deterministic: false };

/// Runs so many batches in each step, and says whether they may sleep.
fn batches(
    subject: &Subject,
    setting: Setting,
    steps: &[(usize, bool)],
    next: impl FnMut(&[Ran], &State) -> Vec<Record>,
) -> Vec<Ran> {
    let Setting { cpus, busy, guards, two_nodes, deterministic } = setting;
    let mut command_line =
        if guards { "'debug_pagealloc=on', 'debug_guardpage_minorder=1', " } else { "" }.to_owned();
    command_line.push_str(if two_nodes { "'numa=fake=2'" } else { "" });
    let mut script = format!(
        "about = 'batches'\nmemory_mib = 512\ncommand_line = [{command_line}]\n[[step]]\nwait_quiet = {{}}\n"
    );
    for (number, (count, may_sleep)) in steps.iter().enumerate() {
        let free = number + 1 == steps.len();
        let settings = format!("count = {count}, free = {free}, busy = {busy}, may_sleep = {may_sleep}");
        script.push_str(&format!("[[step]]\nbatches = {{ {settings} }}\n"));
    }
    script.push_str("[[step]]\ncheckpoint = 'after'\n");
    let mut player = Player { kernel: &subject.kernel, driver: None, next, written: None, ran: Vec::new() };
    let run = subject.run(&subject::parse(&script), cpus, deterministic, &mut player);
    assert_eq!(run.outcome, Outcome::Complete { tainted: 0 }, "{:?}", run.console_tail);
    assert_eq!(player.ran.len(), steps.iter().map(|(count, _)| count).sum::<usize>());
    player.ran
}

fn kind(state: &State, pfn: u64) -> Option<Kind> {
    let zone = state.zones.iter().find(|zone| (zone.start..zone.end()).contains(&pfn))?;
    zone.class(pfn).map(|class| class.kind())
}

/// Whether the allocator could give it out.
fn is_free(state: &State, pfn: u64) -> bool {
    matches!(kind(state, pfn), Some(Kind::Free | Kind::Pcp | Kind::Guard | Kind::Deferred))
}

fn free_pages(state: &State) -> u64 {
    let free = [Kind::Free, Kind::Pcp, Kind::Guard, Kind::Deferred];
    state.zones.iter().map(|zone| free.iter().map(|kind| zone.kinds().of(*kind)).sum::<u64>()).sum()
}

/// What slots hold, by what the driver said: first pfn, order, and which pieces are left of a split one.
type Held = BTreeMap<u32, (u64, u32, Option<Vec<bool>>)>;

/// Follows a batch by its results: each page that was given out was free, each that is held is not, each that was freed is.
fn follow(ran: &Ran, held: &mut Held, nolock: bool) {
    let Answer::Done(results) = &ran.answer else { panic!("{:?}", ran.answer) };
    assert_eq!(results.len(), ran.records.len());
    // Pages that changed hands: whether they are held now.
    let mut touched: BTreeMap<u64, bool> = BTreeMap::new();
    let mut last = 0;
    for (record, result) in ran.records.iter().zip(results) {
        assert!(result.tsc > last, "time does not go back");
        last = result.tsc;
        let mut free = |pfns: std::ops::Range<u64>| {
            pfns.for_each(|pfn| assert!(touched.insert(pfn, false).unwrap_or(true), "{pfn} is freed twice"))
        };
        match (record.op().expect("an operation"), result.value()) {
            (Op::NolockAlloc { .. } | Op::NolockFree { .. }, Err(NotDone::NoSuch)) if !nolock => {}
            (Op::Alloc { slot, order, .. } | Op::NolockAlloc { slot, order, .. }, Ok(pfn)) => {
                assert!(pfn % (1 << order) == 0, "{pfn} of order {order}");
                for pfn in pfn..pfn + (1 << order) {
                    let was_held = touched.insert(pfn, true).unwrap_or_else(|| !is_free(&ran.before, pfn));
                    assert!(!was_held, "{pfn} was not free: {:?}", kind(&ran.before, pfn));
                }
                assert!(held.insert(slot, (pfn, order, None)).is_none());
            }
            (Op::Alloc { .. } | Op::NolockAlloc { .. }, Err(NotDone::Failed)) => {}
            (Op::Free { slot } | Op::NolockFree { slot }, Ok(0)) => {
                let (pfn, order, _) = held.remove(&slot).expect("held");
                free(pfn..pfn + (1 << order));
            }
            (Op::Split { slot }, Ok(0)) => {
                let (_, order, pieces) = held.get_mut(&slot).expect("held");
                *pieces = Some(vec![true; 1 << *order]);
            }
            (Op::FreePiece { slot, piece }, Ok(0)) => {
                let (pfn, _, pieces) = held.get_mut(&slot).expect("held");
                let pieces = pieces.as_mut().expect("split");
                assert!(std::mem::take(&mut pieces[piece as usize]));
                free(*pfn + u64::from(piece)..*pfn + u64::from(piece) + 1);
                if !pieces.contains(&true) {
                    held.remove(&slot);
                }
            }
            (Op::Drain, Ok(0)) => {}
            // What builds on an allocation that failed.
            (op, Err(NotDone::Skipped)) => {
                let slot = record.slot;
                assert!(op != Op::Drain && !held.contains_key(&slot), "{op:?} was skipped");
            }
            (op, result) => panic!("{op:?} gave {result:?}"),
        }
    }
    for (pfn, held) in &touched {
        assert_eq!(is_free(&ran.after, *pfn), !held, "{pfn}: {:?}", kind(&ran.after, *pfn));
    }
    let changes = |to: bool| {
        touched.iter().filter(|(pfn, held)| **held == to && is_free(&ran.before, **pfn) == to).count() as u64
    };
    assert_eq!(free_pages(&ran.before) + changes(false), free_pages(&ran.after) + changes(true));
    assert_sound(&ran.after);
}

fn assert_sound(state: &State) {
    let broken: Vec<String> = violations("batch", state)
        .iter()
        .map(|broken| format!("{}: {}", broken.invariant, broken.text))
        .collect();
    assert!(broken.is_empty(), "{broken:?}");
}

fn shown(state: &State) -> Value {
    inspect::json(state, &[])
}

const KINDS: [u32; 3] = [0, gfp::MOVABLE, gfp::RECLAIMABLE];
const ZONES: [u32; 3] = [0, gfp::DMA32, gfp::DMA];

/// The order of each slot that is full after these batches, which leave none split.
fn full_after(ran: &[Ran]) -> BTreeMap<u32, u32> {
    let mut full = BTreeMap::new();
    for ran in ran {
        let Answer::Done(results) = &ran.answer else { continue };
        for (record, _) in ran.records.iter().zip(results).filter(|(_, result)| result.value().is_ok()) {
            match record.op() {
                Some(Op::Alloc { slot, order, .. }) => drop(full.insert(slot, order)),
                Some(Op::Free { slot } | Op::FreePiece { slot, .. }) => drop(full.remove(&slot)),
                _ => {}
            }
        }
    }
    full
}

/// A number below `limit`.
fn below(dice: &mut ChaCha8Rng, limit: u64) -> u64 {
    dice.next_u64() % limit
}

/// Operations where `full` is the order of each slot that is full. In the batch each counts as done.
fn mixed(dice: &mut ChaCha8Rng, mut full: BTreeMap<u32, u32>, count: usize, drain: bool) -> Vec<Record> {
    let mut ops = Vec::new();
    while ops.len() < count {
        let slot = below(dice, 400) as u32;
        match full.remove(&slot) {
            None => {
                // Small ones more often.
                let order = (below(dice, 11) * below(dice, 11) / 10) as u32;
                let flags = gfp::NOWARN | KINDS[below(dice, 3) as usize] | ZONES[below(dice, 3) as usize];
                full.insert(slot, order);
                ops.push(Op::Alloc { slot, order, gfp: flags, node: None });
            }
            Some(order) if order > 0 && below(dice, 4) == 0 => {
                ops.push(Op::Split { slot });
                // All of it, with something else in the middle.
                let pieces = 1 << order;
                ops.extend((0..pieces / 2).map(|piece| Op::FreePiece { slot, piece: 2 * piece + 1 }));
                ops.extend(drain.then_some(Op::Drain));
                ops.extend((0..pieces / 2).map(|piece| Op::FreePiece { slot, piece: 2 * piece }));
            }
            Some(_) => ops.push(Op::Free { slot }),
        }
        if drain && below(dice, 50) == 0 {
            ops.push(Op::Drain);
        }
    }
    ops.into_iter().map(Record::from).collect()
}

/// One of each that must be refused, where slot 0 is held at order 1 and slot 1 is split at order 1 with piece 0 freed; and
/// the operation that is wrong.
fn bad() -> Vec<(Vec<Record>, usize, Wrong)> {
    let alloc =
        |slot, order, flags| Record::from(Op::Alloc { slot, order, gfp: gfp::NOWARN | flags, node: None });
    let free = |slot| Record::from(Op::Free { slot });
    let split = |slot| Record::from(Op::Split { slot });
    let piece = |slot, piece| Record::from(Op::FreePiece { slot, piece });
    let good = alloc(9, 0, 0);
    let on_node = Op::Alloc { slot: 8, order: 0, gfp: gfp::NOWARN, node: Some(7) };
    let no_node = Record { a: u64::MAX - 1, ..alloc(8, 0, 0) };
    let many = |count: u32| -> Vec<Record> {
        (10..10 + count).flat_map(|slot| [alloc(slot, 0, 0), split(slot)]).collect()
    };
    vec![
        (vec![good, Record { kind: 0, ..good }], 1, Wrong::Kind),
        (vec![Record { kind: 15, ..good }], 0, Wrong::Kind),
        (vec![good, Op::DrainAll.into()], 1, Wrong::MustSleep),
        (vec![Op::ContigAlloc { slot: 8, pfn: 4096, pages: 1, gfp: 0 }.into()], 0, Wrong::MustSleep),
        (vec![alloc(8, 11, 0)], 0, Wrong::Order),
        (vec![alloc(65_536, 0, 0)], 0, Wrong::Slot),
        (vec![free(u32::MAX)], 0, Wrong::Slot),
        (vec![alloc(8, 0, gfp::DIRECT_RECLAIM)], 0, Wrong::Gfp),
        (vec![alloc(8, 0, gfp::MOVABLE | gfp::RECLAIMABLE)], 0, Wrong::Gfp),
        (vec![alloc(8, 0, gfp::DMA | gfp::DMA32)], 0, Wrong::Gfp),
        (vec![alloc(8, 0, 1 << 31)], 0, Wrong::Gfp),
        (vec![on_node.into()], 0, Wrong::Node),
        (vec![no_node], 0, Wrong::Node),
        (vec![good, alloc(0, 0, 0)], 1, Wrong::Full),
        (vec![good, good], 1, Wrong::Full),
        (vec![good, free(8)], 1, Wrong::Empty),
        (vec![good, free(9), free(9)], 2, Wrong::Empty),
        (vec![free(0), split(0)], 1, Wrong::Empty),
        (vec![good, free(1)], 1, Wrong::Split),
        (vec![split(0), free(0)], 1, Wrong::Split),
        (vec![piece(0, 0)], 0, Wrong::NotSplit),
        (vec![piece(1, 0)], 0, Wrong::Piece),
        (vec![piece(1, 2)], 0, Wrong::Piece),
        (vec![split(0), piece(0, 1), piece(0, 1)], 2, Wrong::Piece),
        (vec![piece(1, 1), piece(1, 1)], 1, Wrong::Empty),
        (vec![alloc(8, 1, gfp::COMP), split(8)], 1, Wrong::Compound),
        // One is split already.
        (many(1024), 2047, Wrong::TooMany),
    ]
}

/// All of it on one kernel.
fn assert_driver(kernel: &str, flavour: &str, setting: Setting) {
    let subject = Subject::new(kernel, flavour, true);
    let nolock = kernel.starts_with('7');
    let bad = bad();
    let mut dice = ChaCha8Rng::seed_from_u64(setting.cpus.into());
    let good = 12;
    let count = good + 2 + bad.len() + 1;
    let ran = batches(&subject, setting, &[(count, false)], |ran, _| match ran.len() {
        // Some without a drain, for kernels may drain on their own too.
        number if number < good => mixed(&mut dice, full_after(ran), 400, number % 2 == 0),
        // Whatever is left goes, and then what the bad batches need.
        number if number == good => {
            full_after(ran).keys().map(|slot| Op::Free { slot: *slot }.into()).collect()
        }
        number if number == good + 1 => {
            let alloc = |slot| Op::Alloc { slot, order: 1, gfp: gfp::NOWARN, node: Some(0) };
            let nolock_alloc = Op::NolockAlloc { slot: 5, order: 2, node: None };
            let ops = [
                alloc(0),
                alloc(1),
                Op::Split { slot: 1 },
                Op::FreePiece { slot: 1, piece: 0 },
                nolock_alloc,
                Op::NolockFree { slot: 5 },
                alloc(6),
                Op::NolockFree { slot: 6 },
            ];
            ops.map(Record::from).to_vec()
        }
        number if number < good + 2 + bad.len() => bad[number - good - 2].0.clone(),
        // As fast as it goes.
        _ => {
            let alloc = Op::Alloc { slot: 7, order: 0, gfp: gfp::NOWARN, node: None };
            [alloc, Op::Free { slot: 7 }].map(Record::from).repeat(OPS_MAX / 2)
        }
    });
    let mut held = Held::new();
    let (mut ops, mut failed) = (0, 0);
    for (number, ran) in ran.iter().enumerate() {
        if (good + 2..good + 2 + bad.len()).contains(&number) {
            let (_, op, wrong) = bad[number - good - 2];
            assert_eq!(ran.answer, Answer::Refused { op, wrong });
            assert_eq!(shown(&ran.before), shown(&ran.after), "nothing of a bad batch is run");
            continue;
        }
        follow(ran, &mut held, nolock);
        assert!(number != good || held.is_empty(), "{held:?}");
        ops += ran.records.len();
        let Answer::Done(results) = &ran.answer else { continue };
        failed += results.iter().filter(|result| result.raw < 0).count();
    }
    let last = ran.last().expect("a batch");
    let rate = last.records.len() as f64 / last.took.as_secs_f64();
    println!(
        "{kernel} {flavour}, {} CPUs{}{}: {ops} operations, {failed} not done; {:.2} million order-0 operations a second",
        setting.cpus,
        if setting.guards { ", guards" } else { "" },
        if setting.busy { ", busy" } else { "" },
        rate / 1e6
    );
}

#[test]
fn i01_what_the_driver_does_is_what_it_says() {
    assert_driver("7.2", "smp", PLAIN);
    assert_driver("6.12", "smp", Setting { cpus: 2, busy: true, ..PLAIN });
}

#[test]
fn i06_a_deterministic_machine_gives_the_same_pages_at_the_same_instants() {
    let subject = Subject::new("7.2", "smp", true);
    let play = || {
        let mut dice = ChaCha8Rng::seed_from_u64(6);
        let setting = Setting { deterministic: true, ..PLAIN };
        let ran =
            batches(&subject, setting, &[(3, false)], |ran, _| mixed(&mut dice, full_after(ran), 200, true));
        ran.into_iter().map(|ran| (ran.answer, shown(&ran.before), shown(&ran.after))).collect::<Vec<_>>()
    };
    let (first, second) = (play(), play());
    assert!(first == second, "two runs differ");
}

/// Ranges, isolation, and zones without per-CPU lists, on one kernel.
fn assert_sleeping(kernel: &str, flavour: &str, cpus: u32) {
    let subject = Subject::new(kernel, flavour, true);
    let block = |state: &State| {
        let zone = state.zones.iter().find(|zone| zone.name == "DMA32").expect("a zone");
        let pages = state.pageblock_pages();
        let whole = |pfn: &u64| (*pfn..pfn + pages).all(|pfn| kind(state, pfn) == Some(Kind::Free));
        let starts = (zone.start.next_multiple_of(pages)..zone.end() - pages).step_by(pages as usize);
        (starts.filter(whole).last().expect("a free pageblock"), pages, zone.index as u32)
    };
    let (contig, isolated, plain, killing) = (0, 1, 2, 3);
    let sleepy = gfp::NOWARN | gfp::DIRECT_RECLAIM;
    let alloc = |slot, gfp| Op::Alloc { slot, order: 3, gfp, node: None };
    let contig_free = Op::ContigFree { slot: contig };
    let next = |ran: &[Ran], state: &State| {
        let (pfn, pages, zone) = block(state);
        let contig_alloc =
            |pages| Op::ContigAlloc { slot: contig, pfn, pages, gfp: sleepy | gfp::RETRY_MAYFAIL };
        let isolate = Op::Isolate { slot: isolated, pfn, pages };
        let disable = Op::PcpDisable { node: 0, zone };
        let ops: &[Op] = match ran.len() {
            // One page less than a pageblock: what is cut off goes back.
            0 => &[contig_alloc(pages - 1), alloc(plain, sleepy | gfp::NORETRY), Op::Drain, Op::DrainAll],
            1 => &[contig_free, isolate],
            2 => &[Op::Unisolate { slot: isolated }, disable],
            // Wrong, one after the other; nothing of these is run.
            3 => &[disable],
            4 => &[Op::PcpEnable, Op::PcpEnable],
            5 => &[Op::PcpDisable { node: 0, zone: 7 }],
            6 => &[Op::Isolate { slot: isolated, pfn: 0, pages: 1 << 17 }],
            7 => &[Op::Isolate { slot: isolated, pfn: u64::MAX, pages: 1 }],
            8 => &[contig_alloc(0)],
            9 => &[isolate, Op::Free { slot: isolated }],
            10 => &[isolate, Op::ContigFree { slot: isolated }],
            11 => &[alloc(killing, sleepy)],
            12 => &[Op::Unisolate { slot: plain }],
            // That do not sleep, in a zone without per-CPU lists.
            13 => &[alloc(killing, gfp::NOWARN), Op::Free { slot: killing }, Op::Free { slot: plain }],
            // Taken back by the driver, with what is left.
            _ => &[Op::PcpEnable, disable, isolate],
        };
        ops.iter().copied().map(Record::from).collect()
    };
    let ran = batches(&subject, Setting { cpus, ..PLAIN }, &[(13, true), (1, false), (1, true)], next);
    let done = |number: usize| {
        let Answer::Done(results) = &ran[number].answer else { panic!("{number}: {:?}", ran[number].answer) };
        assert!(results.iter().all(|result| result.value().is_ok()), "{number}: {results:?}");
    };
    [0, 1, 2, 13, 14].into_iter().for_each(done);
    for (number, ran) in ran.iter().enumerate() {
        let broken = violations("batch", &ran.after);
        let mut names: Vec<&str> = broken.iter().map(|broken| broken.invariant).collect();
        names.dedup();
        // What we isolated is isolated between batches too, where nobody should.
        let expected: &[&str] = if [1, 14].contains(&number) { &["I11"] } else { &[] };
        assert_eq!(names, expected, "{number}: {broken:?}, {:?}", ran.answer);
    }
    let (before, after) = (&ran[0].before, &ran[0].after);
    let (pfn, pages, zone) = block(before);
    assert!((pfn..pfn + pages - 1).all(|pfn| kind(after, pfn) == Some(Kind::Other)));
    assert!(is_free(after, pfn + pages - 1));
    let taken = ran[1].records[1].a;
    let is_isolated = |state: &State| {
        let block =
            state.zones.iter().find_map(|zone| zone.block(taken, state.pageblock_order)).expect("a block");
        block.isolated || block.kind == MigrateType::Isolate
    };
    assert!(!is_isolated(&ran[1].before) && is_isolated(&ran[1].after) && !is_isolated(&ran[2].after));
    let lists = |state: &State| {
        let zone = state.zones.iter().find(|known| known.index as u32 == zone).expect("a zone");
        zone.cpus.iter().map(|cpu| (cpu.pcp.count, cpu.pcp.batch)).collect::<Vec<_>>()
    };
    assert_eq!(lists(&ran[2].after), vec![(0, 1); cpus as usize]);
    assert_eq!(lists(&ran[13].after), vec![(0, 1); cpus as usize]);
    let refused: Vec<(usize, Wrong)> = ran[3..13]
        .iter()
        .map(|ran| match ran.answer {
            Answer::Refused { op, wrong } => (op, wrong),
            Answer::Done(_) => panic!("{:?} was run", ran.records),
        })
        .collect();
    let expected = [
        (0, Wrong::PcpOff),
        (1, Wrong::PcpOn),
        (0, Wrong::Zone),
        (0, Wrong::Range),
        (0, Wrong::Range),
        (0, Wrong::Range),
        (1, Wrong::OtherSlot),
        (1, Wrong::OtherSlot),
        (0, Wrong::Gfp),
        (0, Wrong::OtherSlot),
    ];
    assert_eq!(refused, expected);
}

#[test]
fn i07_ranges_isolation_and_zones_without_per_cpu_lists() {
    assert_sleeping("7.2", "smp", 2);
    assert_sleeping("6.12", "smp", 1);
}

#[test]
fn i02_a_kernel_without_the_driver_says_what_to_do() {
    struct Nothing;
    impl FrozenObserver for Nothing {
        fn look(&mut self, _: &mut dyn Machine, _: Bell<'_>) -> Result<(), RunError> {
            panic!("nothing rings");
        }
    }
    let subject = Subject::new("7.2", "smp", false);
    let script = "about = 'a'\nmemory_mib = 128\n[[step]]\nbatches = { count = 1 }\n";
    let outcome = subject.run(&subject::parse(script), 1, false, &mut Nothing).outcome;
    let Outcome::NoVerdict(reason) = outcome else { panic!("{outcome:?}") };
    assert!(reason.to_string().contains("kernel build --driver"), "{reason}");
}

/// The state at a frozen checkpoint of a machine that does nothing.
fn idle(kernel: &str, flavour: &str, driver: bool) -> State {
    struct Once<'a>(&'a Kernel, Option<State>);
    impl FrozenObserver for Once<'_> {
        fn look(&mut self, machine: &mut dyn Machine, _: Bell<'_>) -> Result<(), RunError> {
            let (file, layout) = machine.ram();
            let ram = Ram::map(file, layout).expect("RAM can be mapped");
            self.1 = Some(State::read(self.0, &ram).expect("RAM can be read"));
            Ok(())
        }
    }
    let subject = Subject::new(kernel, flavour, driver);
    let mut once = Once(&subject.kernel, None);
    let script = subject::parse(&subject::script("boot"));
    let run = subject.run(&script, 1, true, &mut once);
    assert_eq!(run.outcome, Outcome::Complete { tainted: 0 });
    once.1.expect("it was looked at")
}

/// With the driver in it, a kernel that is idle differs from one without by the pages of its image.
fn assert_idle(kernel: &str, flavour: &str) {
    let [without, with] = [false, true].map(|driver| idle(kernel, flavour, driver));
    let managed = |state: &State| state.zones.iter().map(|zone| zone.managed).sum::<u64>();
    let count = |state: &State, kinds: &[Kind]| -> u64 {
        state.zones.iter().map(|zone| kinds.iter().map(|kind| zone.kinds().of(*kind)).sum::<u64>()).sum()
    };
    let allocated: Vec<Kind> = Kind::ALL.into_iter().filter(|kind| kind.is_allocated()).collect();
    println!(
        "{kernel} {flavour}: managed {} and {}, free {} and {}, allocated {} and {}",
        managed(&without),
        managed(&with),
        free_pages(&without),
        free_pages(&with),
        count(&without, &allocated),
        count(&with, &allocated),
    );
    for state in [&without, &with] {
        assert_sound(state);
    }
    let image = managed(&without) - managed(&with);
    assert!((300..600).contains(&image), "its tables have some 420 pages, and {image} are gone");
    // None was seen; a slab may fill up with the one file that it adds to /proc.
    let more = count(&with, &allocated).abs_diff(count(&without, &allocated));
    assert!(more <= 8, "{more} pages more are allocated");
    assert_eq!(free_pages(&without).abs_diff(free_pages(&with) + image), more);
}

#[test]
fn i03_a_driver_that_is_idle_takes_no_pages() {
    assert_idle("7.2", "smp");
}

#[cfg(feature = "full-matrix")]
mod full_matrix {
    use super::*;

    #[test]
    fn i04_the_driver_in_every_kernel() {
        for kernel in ["6.1", "6.12", "7.2", "7.3"] {
            for (flavour, cpus) in [("smp", 1), ("smp", 4), ("up", 1)] {
                let setting = Setting { cpus, ..PLAIN };
                assert_driver(kernel, flavour, setting);
                assert_sleeping(kernel, flavour, cpus);
                if cpus > 1 {
                    assert_driver(kernel, flavour, Setting { busy: true, ..setting });
                }
                // 7.2 does not count guards that merge.
                if kernel != "7.2" {
                    assert_driver(kernel, flavour, Setting { guards: true, ..setting });
                }
            }
        }
    }

    #[test]
    fn i08_the_node_that_is_asked_for() {
        let subject = Subject::new("7.2", "numa", true);
        let setting = Setting { two_nodes: true, ..PLAIN };
        let nodes = [Some(0), Some(1), None];
        let ran = batches(&subject, setting, &[(2, false)], |_, _| {
            let mut ops = Vec::new();
            for (slot, node) in (0..).zip(nodes) {
                let gfp = gfp::NOWARN | if node.is_some() { gfp::THISNODE } else { 0 };
                ops.extend([Op::Alloc { slot, order: 2, gfp, node }, Op::Free { slot }]);
                ops.extend([Op::NolockAlloc { slot, order: 0, node }, Op::NolockFree { slot }]);
            }
            ops.into_iter().map(Record::from).collect()
        });
        for ran in &ran {
            follow(ran, &mut Held::new(), true);
            let Answer::Done(results) = &ran.answer else { panic!("{:?}", ran.answer) };
            for (record, result) in
                ran.records.iter().zip(results).filter(|(record, _)| [1, 6].contains(&record.kind))
            {
                let pfn = result.value().expect("there is memory");
                let mut zones = ran.after.zones.iter();
                let zone = zones.find(|zone| (zone.start..zone.end()).contains(&pfn)).expect("a zone");
                let any = record.a == u64::MAX;
                assert!(
                    any || u64::from(zone.node) == record.a,
                    "{record:?} gave a page of node {}",
                    zone.node
                );
            }
        }
    }

    #[test]
    fn i05_idle_in_every_kernel() {
        for kernel in ["6.1", "6.12", "7.2", "7.3"] {
            for flavour in ["smp", "up"] {
                assert_idle(kernel, flavour);
            }
        }
    }
}
