//! The model alone, in a zone of 64 GiB: `cargo bench -p host --bench model`. One element is a page allocated and freed.
//! The frame allocator of the crate `buddy_system_allocator` does the same sequences.
//!
//! * `lifo`: each page is freed at once. Where all is free every block is split from the top and merges again.
//! * `stack`: 64 pages are taken and given back in reverse.
//! * `random`: of 16384 pages held, another one is taken, and one freed at random.

use std::hint::black_box;

use buddy_system_allocator::FrameAllocator;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use host::model::{Fresh, FreshZone, Model, Request, Reserve, Semantics};

const PAGES: u64 = 64 << 30 >> 12;
const START: u64 = 1 << 20;
const STACK: usize = 64;
const PLACES: usize = 32_768;
/// Steps of one iteration of `random`.
const STEPS: u64 = 2048;

/// What hands out single pages.
trait Pages {
    fn take(&mut self) -> u64;
    fn give(&mut self, pfn: u64);
}

impl Pages for Model {
    #[inline]
    fn take(&mut self) -> u64 {
        let request = Request { order: 0, list: 1, highest_zone: 2, reserve: Reserve::NonBlock };
        self.alloc(request).expect("a page: there are more than are held")
    }

    #[inline]
    fn give(&mut self, pfn: u64) {
        self.free(pfn, 0);
    }
}

impl Pages for FrameAllocator<33> {
    #[inline]
    fn take(&mut self) -> u64 {
        self.alloc(1).expect("a page: there are more than are held") as u64
    }

    #[inline]
    fn give(&mut self, pfn: u64) {
        self.dealloc(pfn as usize, 1);
    }
}

/// A model of a kernel without per-CPU lists.
fn model() -> Model {
    let zone = FreshZone { index: 2, start: START, pages: PAGES, watermarks: [16_384, 32_768, 49_152] };
    let fresh =
        Fresh { zones: vec![zone], pageblock_order: 9, guard_minorder: 0, smp: false, per_cpu: (63, 0, 0) };
    let semantics = Semantics::of("7.3.4", false).expect("a kernel that is known");
    Model::new(&fresh.state(), semantics).expect("a state that can be modelled")
}

fn frames() -> FrameAllocator<33> {
    let mut frames = FrameAllocator::new();
    frames.add_frame(START as usize, (START + PAGES) as usize);
    frames
}

/// A cheap sequence of numbers, the same for both (xorshift64).
struct Numbers(u64);

impl Numbers {
    #[inline]
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

fn sequences(criterion: &mut Criterion, name: &str, mut pages: impl Pages) {
    let mut group = criterion.benchmark_group("model");
    group.throughput(Throughput::Elements(1));
    group.bench_function(BenchmarkId::new("lifo", name), |bencher| {
        bencher.iter(|| {
            let pfn = black_box(pages.take());
            pages.give(pfn);
        });
    });
    group.throughput(Throughput::Elements(STACK as u64));
    group.bench_function(BenchmarkId::new("stack", name), |bencher| {
        let mut held = Vec::with_capacity(STACK);
        bencher.iter(|| {
            (0..STACK).for_each(|_| held.push(pages.take()));
            while let Some(pfn) = held.pop() {
                pages.give(pfn);
            }
        });
    });
    group.throughput(Throughput::Elements(STEPS / 2));
    group.bench_function(BenchmarkId::new("random", name), |bencher| {
        let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
        let mut places = vec![None; PLACES];
        let mut step = || {
            let place = &mut places[numbers.below(PLACES)];
            match place.take() {
                Some(pfn) => pages.give(pfn),
                None => *place = Some(pages.take()),
            }
        };
        (0..8 * PLACES).for_each(|_| step());
        bencher.iter(|| (0..STEPS).for_each(|_| step()));
        places.into_iter().flatten().for_each(|pfn| pages.give(pfn));
    });
    group.finish();
}

fn both(criterion: &mut Criterion) {
    sequences(criterion, "model", model());
    sequences(criterion, "buddy_system_allocator", frames());
}

criterion_group!(benches, both);
criterion_main!(benches);
