//! The parts of a look into frozen memory, on a made-up guest of 256 MiB: `cargo bench -p host --features test-support`.
//! `sum` reads the same struct pages once and is what the others are measured against.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use host::check::frozen::check;
use host::observe::frozen::{State, fake, locks_held, struct_pages_sum};

fn frozen(criterion: &mut Criterion) {
    let kernel = fake::kernel();
    let ram = fake::ram(&kernel, 256);
    let state = State::read(&kernel, &ram).expect("a state");
    let mut group = criterion.benchmark_group("frozen");
    group.throughput(Throughput::Elements(256 << 20 >> 12));
    group.bench_function("sum", |bencher| bencher.iter(|| struct_pages_sum(&kernel, black_box(&ram))));
    group.bench_function("locks", |bencher| bencher.iter(|| locks_held(&kernel, black_box(&ram))));
    group.bench_function("read", |bencher| bencher.iter(|| State::read(&kernel, black_box(&ram))));
    group.bench_function("check", |bencher| {
        bencher.iter(|| state.zones.iter().map(|zone| check(black_box(&state), zone).len()).sum::<usize>());
    });
    group.finish();
}

criterion_group!(benches, frozen);
criterion_main!(benches);
