//! What is altered: a small image of a real kernel where `BUDDYDIFF_FUZZ_IMAGE` names one, else the fake kernel's.

use host::observe::frozen::{Ram, SmallImage, fake};

pub fn image() -> (SmallImage, Ram) {
    let image = match std::env::var_os("BUDDYDIFF_FUZZ_IMAGE") {
        Some(path) => {
            let bytes = std::fs::read(path).expect("the image can be read");
            SmallImage::from_bytes(&bytes).expect("it is an image")
        }
        None => fake::image(16),
    };
    let ram = image.ram().expect("the image's RAM");
    (image, ram)
}
