//! The map of pageblocks as a picture: a square for each, which tells its figures when pointed at.

use std::fmt::Write as _;

use svg::Document;
use svg::node::element::{Element, Style, Title};
use svg::node::{Node, Text as Words};

use super::blocks::{BlockSummary, blocks};
use crate::observe::frozen::{Kind, MigrateType, State};

/// Distance of two squares, and their size.
const PITCH: u64 = 12;
const SIDE: u64 = 10;
/// Squares of a row.
const COLUMNS: u64 = 64;
const MARGIN: u64 = 90;
const HEADING: u64 = 28;

/// Classes and colours: the type by hue, how much is in use by strength.
const STYLE: &str = "text{font:12px sans-serif;fill:#222}.p{text-anchor:end;font-family:monospace}\
rect{stroke:#999;stroke-width:.5}.x{stroke:#d00;stroke-width:2}.i{stroke:#00d;stroke-width:2}\
.m{fill:#3a3}.u{fill:#c33}.r{fill:#cb2}.h{fill:#93c}.c{fill:#2aa}.s{fill:#66f}.q{fill:#888}.z{fill:#eee}.n{fill:none}\
.f0{fill-opacity:1}.f1{fill-opacity:.75}.f2{fill-opacity:.5}.f3{fill-opacity:.3}.f4{fill-opacity:.12}";

/// The square's classes in the legend and what they mean.
const LEGEND: [(&str, &str); 14] = [
    ("m", "movable"),
    ("u", "unmovable"),
    ("r", "reclaimable"),
    ("h", "highatomic"),
    ("c", "CMA"),
    ("m f1", "a quarter free"),
    ("m f2", "half free"),
    ("m f3", "three quarters free"),
    ("m f4", "all free"),
    ("m f2 x", "mixed"),
    ("m f2 i", "isolated"),
    ("q", "unknown type"),
    ("z", "reserved"),
    ("n", "no memory map"),
];

/// The picture. Equal states give equal bytes.
#[must_use]
pub fn svg(state: &State) -> String {
    let mut document = Document::new();
    document = document.add(Style::new(STYLE));
    let mut y = HEADING;
    let mut x = PITCH;
    for (index, (class, what)) in LEGEND.iter().enumerate() {
        if index % 7 == 0 {
            x = PITCH;
            y += if index == 0 { 0 } else { HEADING / 2 + 6 };
        }
        document.append(square(class, x, y - SIDE));
        document.append(words("", x + PITCH + 3, y, what));
        x += 118;
    }
    for zone in &state.zones {
        let blocks = blocks(state, zone);
        let mixed = blocks.iter().filter(|block| block.is_mixed()).count();
        y += HEADING;
        let heading = format!(
            "{}: {} pageblocks of {} pages, {mixed} mixed",
            zone.label(),
            blocks.len(),
            state.pageblock_pages()
        );
        document.append(words("", PITCH, y, &heading));
        y += PITCH;
        for row in blocks.chunks(COLUMNS as usize) {
            document.append(words("p", MARGIN - 6, y + SIDE, &format!("{:#x}", row[0].pfn)));
            for (column, block) in (0_u64..).zip(row) {
                let mut cell = square(&classes(block), MARGIN + column * PITCH, y);
                cell.append(Title::new(tip(block)));
                document.append(cell);
            }
            y += PITCH;
        }
    }
    let width = MARGIN + COLUMNS * PITCH + PITCH;
    let mut text = document.set("viewBox", (0, 0, width, y + PITCH)).to_string();
    text.push('\n');
    text
}

fn square(class: &str, x: u64, y: u64) -> Element {
    let mut square = Element::new("rect");
    for (name, value) in [("x", x), ("y", y), ("width", SIDE), ("height", SIDE)] {
        square.assign(name, value);
    }
    square.assign("class", class);
    square
}

fn words(class: &str, x: u64, y: u64, text: &str) -> Element {
    let mut words = Element::new("text");
    words.assign("x", x);
    words.assign("y", y);
    if !class.is_empty() {
        words.assign("class", class);
    }
    words.append(Words::new(text));
    words
}

fn classes(block: &BlockSummary) -> String {
    let Some(kind) = block.block.map(|block| block.kind) else { return "n".to_owned() };
    let usable = block.usable();
    let mut classes = match kind {
        _ if usable == 0 => "z",
        MigrateType::Movable => "m",
        MigrateType::Unmovable => "u",
        MigrateType::Reclaimable => "r",
        MigrateType::HighAtomic => "h",
        MigrateType::Cma => "c",
        MigrateType::Isolate => "s",
        MigrateType::Unknown => "q",
    }
    .to_owned();
    if let Some(quarters) = (block.unused() * 4).checked_div(usable) {
        let _ = write!(classes, " f{quarters}");
    }
    if block.is_isolated() {
        classes.push_str(" i");
    } else if block.is_mixed() {
        classes.push_str(" x");
    }
    classes
}

/// pfns, type, and its pages by kind.
fn tip(block: &BlockSummary) -> String {
    let mut tip = format!("{:#x}+{}", block.pfn, block.pages);
    if let Some(found) = block.block {
        let _ = write!(tip, " {}", found.kind.name());
        for (holds, word) in [(found.isolated, " isolated"), (found.skip, " skip")] {
            tip.push_str(if holds { word } else { "" });
        }
    }
    for kind in Kind::ALL.iter().filter(|kind| block.of(**kind) > 0) {
        let _ = write!(tip, ", {} {}", block.of(*kind), kind.name());
    }
    tip
}
