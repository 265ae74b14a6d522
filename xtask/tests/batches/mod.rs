//! Batches in kernels with the driver: what it says it did is what the frozen states before and after show.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guest_agent::script::Script;
use host::batch::{Answer, Driver, NotDone, OPS_MAX, Op, Record, Wrong, gfp};
use host::freeze::violations;
use host::observe::frozen::{Kernel, Kind, Ram, State};
use host::report::inspect;
use host::run::{BatchBell, Bell, FrozenObserver, Outcome, Phase, Run, RunConfig, RunError, run};
use host::vm::Machine;
use host::vm::qemu::Qemu;
use serde_json::Value;

use super::xtask;

/// A kernel, built, and the agent for it.
struct Subject {
    vmlinux: PathBuf,
    kernel: Kernel,
    agent: Vec<u8>,
}

impl Subject {
    fn new(kernel: &str, flavour: &str, driver: bool) -> Self {
        let mut arguments = vec!["kernel", "build", kernel, "--flavour", flavour];
        arguments.extend(driver.then_some("--driver"));
        let last_word = |arguments: &[&str]| {
            let printed = String::from_utf8(xtask(arguments).stdout).expect("UTF-8");
            PathBuf::from(printed.split_whitespace().last().expect("a path"))
        };
        let vmlinux = last_word(&arguments);
        let kernel = Kernel::load(&vmlinux).expect("a kernel of ours can be read");
        let agent = std::fs::read(last_word(&["agent"])).expect("the agent is built");
        Self { vmlinux, kernel, agent }
    }

    fn run(&self, script: &str, cpus: u32, deterministic: bool, observer: &mut dyn FrozenObserver) -> Run {
        let script = Script::parse("test", script).expect("a script");
        let config = RunConfig {
            vmlinux: &self.vmlinux,
            agent: &self.agent,
            script_name: "test",
            script: &script,
            memory_mib: None,
            cpus,
            deterministic,
            seed: 1,
            boot_limit: Duration::from_secs(120),
            keep: None,
        };
        run(&Qemu::Tcg, &config, Some(observer), &mut |_| {}).expect("it can be tried")
    }
}

/// A batch, and what was seen of it.
struct Ran {
    records: Vec<Record>,
    before: State,
    after: State,
    answer: Answer,
    /// From the one stop to the other.
    took: Duration,
}

/// Runs batches as `next` makes them: by number, and knowing what came before.
struct Player<'a, F> {
    kernel: &'a Kernel,
    driver: Option<Driver>,
    next: F,
    written: Option<(Vec<Record>, State, Instant)>,
    ran: Vec<Ran>,
}

impl<F: FnMut(&[Ran]) -> Vec<Record>> FrozenObserver for Player<'_, F> {
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
                let records = (self.next)(&self.ran);
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
    deterministic: bool,
}

const PLAIN: Setting = Setting { cpus: 1, busy: false, guards: false, deterministic: false };

fn batches(
    subject: &Subject,
    setting: Setting,
    count: usize,
    next: impl FnMut(&[Ran]) -> Vec<Record>,
) -> Vec<Ran> {
    let Setting { cpus, busy, guards, deterministic } = setting;
    let command_line = if guards { "'debug_pagealloc=on', 'debug_guardpage_minorder=1'" } else { "" };
    let script = format!(
        "about = 'batches'\nmemory_mib = 512\ncommand_line = [{command_line}]\n[[step]]\nwait_quiet = {{}}\n[[step]]\n\
         batches = {{ count = {count}, free = true, busy = {busy} }}\n[[step]]\ncheckpoint = 'after'\n"
    );
    let mut player = Player { kernel: &subject.kernel, driver: None, next, written: None, ran: Vec::new() };
    let run = subject.run(&script, cpus, deterministic, &mut player);
    assert_eq!(run.outcome, Outcome::Complete { tainted: 0 }, "{:?}", run.console_tail);
    assert_eq!(player.ran.len(), count);
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
    state.zones.iter().map(|zone| free.iter().map(|kind| zone.kinds()[*kind as usize]).sum::<u64>()).sum()
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

/// A few numbers that are the same every time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
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

/// Operations where `full` is the order of each slot that is full. In the batch each counts as done.
fn mixed(dice: &mut Dice, mut full: BTreeMap<u32, u32>, count: usize, drain: bool) -> Vec<Record> {
    let mut ops = Vec::new();
    while ops.len() < count {
        let slot = dice.below(400) as u32;
        match full.remove(&slot) {
            None => {
                // Small ones more often.
                let order = (dice.below(11) * dice.below(11) / 10) as u32;
                let flags = gfp::NOWARN | KINDS[dice.below(3) as usize] | ZONES[dice.below(3) as usize];
                full.insert(slot, order);
                ops.push(Op::Alloc { slot, order, gfp: flags, node: None });
            }
            Some(order) if order > 0 && dice.below(4) == 0 => {
                ops.push(Op::Split { slot });
                // All of it, with something else in the middle.
                let pieces = 1 << order;
                ops.extend((0..pieces / 2).map(|piece| Op::FreePiece { slot, piece: 2 * piece + 1 }));
                ops.extend(drain.then_some(Op::Drain));
                ops.extend((0..pieces / 2).map(|piece| Op::FreePiece { slot, piece: 2 * piece }));
            }
            Some(_) => ops.push(Op::Free { slot }),
        }
        if drain && dice.below(50) == 0 {
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
        (vec![Record { kind: 8, ..good }], 0, Wrong::Kind),
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
    let mut dice = Dice(setting.cpus.into());
    let good = 12;
    let count = good + 2 + bad.len() + 1;
    let ran = batches(&subject, setting, count, |ran| match ran.len() {
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
        let mut dice = Dice(6);
        let setting = Setting { deterministic: true, ..PLAIN };
        let ran = batches(&subject, setting, 3, |ran| mixed(&mut dice, full_after(ran), 200, true));
        ran.into_iter().map(|ran| (ran.answer, shown(&ran.before), shown(&ran.after))).collect::<Vec<_>>()
    };
    let (first, second) = (play(), play());
    assert!(first == second, "two runs differ");
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
    let outcome = subject.run(script, 1, false, &mut Nothing).outcome;
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
    let boot = Path::new(env!("CARGO_MANIFEST_DIR")).join("../guest-agent/scripts/boot.toml");
    let script = std::fs::read_to_string(boot).expect("a script");
    let run = subject.run(&script, 1, true, &mut once);
    assert_eq!(run.outcome, Outcome::Complete { tainted: 0 });
    once.1.expect("it was looked at")
}

/// With the driver in it, a kernel that is idle differs from one without by the pages of its image.
fn assert_idle(kernel: &str, flavour: &str) {
    let [without, with] = [false, true].map(|driver| idle(kernel, flavour, driver));
    let managed = |state: &State| state.zones.iter().map(|zone| zone.managed).sum::<u64>();
    let count = |state: &State, kinds: &[Kind]| -> u64 {
        state
            .zones
            .iter()
            .map(|zone| kinds.iter().map(|kind| zone.kinds()[*kind as usize]).sum::<u64>())
            .sum()
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
    fn i05_idle_in_every_kernel() {
        for kernel in ["6.1", "6.12", "7.2", "7.3"] {
            for flavour in ["smp", "up"] {
                assert_idle(kernel, flavour);
            }
        }
    }
}
