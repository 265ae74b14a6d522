//! A guest that wrote anything into its memory: it is read, checked and rendered, or refused.
//!
//! Thirteen bytes are a change: how, which page, which word of it, and a value.

#![no_main]

use std::sync::OnceLock;

use host::check::frozen::check;
use host::observe::frozen::plant::Pen;
use host::observe::frozen::{Kernel, Ram, SmallImage, State, locks_held, render};
use libfuzzer_sys::fuzz_target;

#[path = "seed.rs"]
mod seed;

struct Seed {
    kernel: Kernel,
    ram: Ram,
    pages: Vec<u64>,
}

fn seed() -> &'static Seed {
    static SEED: OnceLock<Seed> = OnceLock::new();
    SEED.get_or_init(|| {
        let (image, ram): (SmallImage, Ram) = seed::image();
        Seed { kernel: image.kernel(None).expect("the seed's kernel"), ram, pages: image.pages().collect() }
    })
}

fuzz_target!(|data: &[u8]| {
    let Seed { kernel, ram, pages } = seed();
    let pen = Pen::new(ram);
    let address =
        |page: u16, word: u16| (pages[usize::from(page) % pages.len()] << 12) + u64::from(word % 512) * 8;
    for [how, p, q, w, x, value @ ..] in data.as_chunks::<13>().0 {
        let at = address(u16::from_le_bytes([*p, *q]), u16::from_le_bytes([*w, *x]));
        let number = u64::from_le_bytes(*value);
        let [a, b, c, d, ..] = *value;
        pen.u64(
            at,
            match how % 4 {
                0 => number,
                1 => pen.read(at) ^ number,
                2 => pen.read(at).wrapping_add_signed(i64::from(number.cast_signed() as i16)),
                // What is somewhere else: a link to another page, as a rule.
                _ => pen.read(address(u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]))),
            },
        );
    }
    let _ = locks_held(kernel, ram);
    if let Ok(state) = State::read(kernel, ram) {
        for zone in &state.zones {
            let _ = check(&state, zone);
        }
        let _ = (render::buddyinfo(&state), render::pagetypeinfo(&state));
        // Some pages: to render one takes longer than to read it.
        let first = data.first().map_or(0, |byte| u64::from(*byte) * 64);
        let _ = render::kpageflags(kernel, ram, &state, first..first + 256);
    }
    pen.undo();
});
