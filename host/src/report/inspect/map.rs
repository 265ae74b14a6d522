//! The map of pageblocks for a terminal: a character for each.

use std::fmt::Write as _;

use anstyle::{AnsiColor, Color, Style};

use super::blocks::{BlockSummary, blocks};
use crate::observe::frozen::{MigrateType, State, Zone};

/// Characters of one zone's map at most; beyond, several blocks share one.
const CELLS_MAX: usize = 4096;
/// Characters of a row.
const WIDTHS: std::ops::RangeInclusive<usize> = 8..=256;

/// What a character of the map says.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cell {
    /// No memory map.
    Absent,
    /// Nothing that the allocator ever had.
    Reserved,
    /// Isolated.
    Isolated(Fill),
    /// MOVABLE or CMA with pages that cannot be moved.
    Mixed(Fill),
    /// As its type.
    Of(MigrateType, Fill),
}

/// How much of what the allocator has there is unused.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fill {
    All,
    Half,
    Less,
}

impl Cell {
    /// Several blocks show the worst of them: isolated, then mixed, then the type that most of them have.
    fn new(blocks: &[BlockSummary]) -> Self {
        let usable: u64 = blocks.iter().map(|block| u64::from(block.usable())).sum();
        let unused: u64 = blocks.iter().map(|block| u64::from(block.unused())).sum();
        let fill = match unused {
            _ if unused == usable => Fill::All,
            _ if unused * 2 >= usable => Fill::Half,
            _ => Fill::Less,
        };
        if blocks.iter().all(|block| block.block.is_none()) {
            return Self::Absent;
        }
        if blocks.iter().any(BlockSummary::is_isolated) {
            return Self::Isolated(fill);
        }
        if usable == 0 {
            return Self::Reserved;
        }
        if blocks.iter().any(BlockSummary::is_mixed) {
            return Self::Mixed(fill);
        }
        let mut counts: Vec<(MigrateType, usize)> = Vec::new();
        for block in blocks.iter().filter_map(|block| block.block) {
            match counts.iter_mut().find(|(kind, _)| *kind == block.kind) {
                Some((_, count)) => *count += 1,
                None => counts.push((block.kind, 1)),
            }
        }
        // The first of equals.
        let most = counts.iter().rev().max_by_key(|(_, count)| *count);
        Self::Of(most.map_or(MigrateType::Unknown, |(kind, _)| *kind), fill)
    }

    fn character(self) -> char {
        let (letter, fill) = match self {
            Self::Absent => return ' ',
            Self::Reserved => return '-',
            Self::Of(MigrateType::Movable, Fill::All) => return '.',
            Self::Of(_, Fill::All) => return ':',
            Self::Isolated(fill) => ('I', fill),
            Self::Mixed(fill) => ('X', fill),
            Self::Of(kind, fill) => (letter(kind), fill),
        };
        if fill == Fill::Less { letter } else { letter.to_ascii_lowercase() }
    }

    fn style(self) -> Style {
        let colour = |colour: AnsiColor| Style::new().fg_color(Some(Color::Ansi(colour)));
        match self {
            Self::Absent => Style::new(),
            Self::Reserved => Style::new().dimmed(),
            Self::Isolated(_) => colour(AnsiColor::BrightWhite).bg_color(Some(Color::Ansi(AnsiColor::Blue))),
            Self::Mixed(_) => colour(AnsiColor::BrightWhite).bg_color(Some(Color::Ansi(AnsiColor::Red))),
            Self::Of(kind, fill) => {
                let style = colour(match kind {
                    MigrateType::Movable => AnsiColor::Green,
                    MigrateType::Unmovable => AnsiColor::Red,
                    MigrateType::Reclaimable => AnsiColor::Yellow,
                    MigrateType::HighAtomic => AnsiColor::Magenta,
                    MigrateType::Cma => AnsiColor::Cyan,
                    MigrateType::Isolate | MigrateType::Unknown => AnsiColor::White,
                });
                if fill == Fill::All { style.dimmed() } else { style }
            }
        }
    }
}

fn letter(kind: MigrateType) -> char {
    match kind {
        MigrateType::Unmovable => 'U',
        MigrateType::Movable => 'M',
        MigrateType::Reclaimable => 'R',
        MigrateType::HighAtomic => 'H',
        MigrateType::Cma => 'C',
        MigrateType::Isolate => 'I',
        MigrateType::Unknown => '?',
    }
}

/// A character a pageblock, `width` of them a row (8 to 256); in large zones several pageblocks a character, as the zone's
/// heading says. `colour` adds ANSI colours.
#[must_use]
pub fn block_map(state: &State, width: usize, colour: bool) -> String {
    let width = width.clamp(*WIDTHS.start(), *WIDTHS.end());
    let mut text = String::new();
    for zone in &state.zones {
        zone_map(&mut text, state, zone, width, colour);
    }
    text.push_str(
        "M movable, U unmovable, R reclaimable, H highatomic, C CMA: less than half is free; small: half or\n\
         more is. X mixed: movable or CMA with pages that cannot be moved. I isolated.\n\
         . all free, movable  : all free, another type  - nothing for the allocator  (blank) no memory map\n",
    );
    text
}

fn zone_map(text: &mut String, state: &State, zone: &Zone, width: usize, colour: bool) {
    let blocks = blocks(state, zone);
    let each = blocks.len().div_ceil(CELLS_MAX).next_power_of_two();
    let count = |wanted: fn(&BlockSummary) -> bool| blocks.iter().filter(|block| wanted(block)).count();
    let shared = if each > 1 { format!(", {each} a character") } else { String::new() };
    let _ = writeln!(
        text,
        "{}: {} pageblocks of {} pages{shared}; {} mixed, {} isolated",
        zone.label(),
        blocks.len(),
        state.pageblock_pages(),
        count(BlockSummary::is_mixed),
        count(BlockSummary::is_isolated),
    );
    for row in blocks.chunks(width * each) {
        let _ = write!(text, "{:>#11x} ", row[0].pfn);
        let mut last = Style::new();
        for cell in row.chunks(each).map(Cell::new) {
            if colour && cell.style() != last {
                let _ = write!(text, "{last:#}{}", cell.style());
                last = cell.style();
            }
            text.push(cell.character());
        }
        if colour {
            let _ = write!(text, "{last:#}");
        }
        text.push('\n');
    }
    text.push('\n');
}
