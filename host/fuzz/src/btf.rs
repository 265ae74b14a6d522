//! Type information of any kind: it is refused, or gives layouts, and by these RAM can be read or not.
//!
//! The first byte says what the rest is: the section itself, or changes of eight bytes to a whole one.

#![no_main]

use std::sync::OnceLock;

use host::observe::frozen::{Ram, SmallImage, State};
use libfuzzer_sys::fuzz_target;

#[path = "seed.rs"]
mod seed;

fn image() -> &'static (SmallImage, Ram) {
    static IMAGE: OnceLock<(SmallImage, Ram)> = OnceLock::new();
    IMAGE.get_or_init(seed::image)
}

fuzz_target!(|data: &[u8]| {
    let Some((mode, rest)) = data.split_first() else { return };
    let (image, ram) = image();
    let mut btf = rest.to_vec();
    if mode % 4 != 0 {
        btf = image.btf().to_vec();
        for [a, b, c, d, value @ ..] in rest.as_chunks::<8>().0 {
            let at = u32::from_le_bytes([*a, *b, *c, *d]) as usize % (btf.len() - 3);
            // Types begin at multiples of four.
            let at = if mode % 4 == 1 { at } else { at & !3 };
            btf[at..at + 4].copy_from_slice(value);
        }
    }
    if let Ok(kernel) = image.kernel(Some(&btf)) {
        let _ = State::read(&kernel, ram);
    }
});
