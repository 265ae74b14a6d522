//! What `inspect` shows of an allocator's frozen state: tables and a map for people, a picture, JSON for programs.
//!
//! Figures are in pages where nothing else is said. All of it is bounded by the size of the guest, and equal states give
//! equal bytes.

mod blocks;
mod json;
mod map;
mod svg;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;

use crate::observe::frozen::{Kind, State};

pub use blocks::{BlockSummary, blocks};
pub use json::{Inspection, inspection, json};
pub use map::block_map;
pub use svg::svg;

/// Name of a migratetype by its number, as pagetypeinfo prints it.
fn type_name(state: &State, number: usize) -> &'static str {
    state.types.get(number).map_or("unknown", |kind| kind.name())
}

/// Watermarks by their names in the kernel (enum zone_watermarks).
const WATERMARKS: [&str; 4] = ["min", "low", "high", "promo"];

/// A table of the zones, and a second one of what decides when they count as full.
#[must_use]
pub fn zones(state: &State) -> String {
    let mut text = String::new();
    let _ = writeln!(
        text,
        "{:<13} {:<19} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8}",
        "pages", "span", "present", "managed", "free", "per-CPU", "guard", "allocated", "delta"
    );
    for zone in &state.zones {
        let kinds = zone.kinds();
        let span = match zone.spanned {
            0 => "empty".to_owned(),
            _ => format!("{:#x}-{:#x}", zone.start, zone.end() - 1),
        };
        let _ = writeln!(
            text,
            "{:<13} {span:<19} {:>8} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8}",
            zone.label(),
            zone.present,
            zone.managed,
            zone.listed_pages(|_| true),
            kinds.of(Kind::Pcp),
            kinds.of(Kind::Guard),
            kinds.allocated(),
            state.delta(zone),
        );
    }
    text.push('\n');
    let _ = write!(text, "{:<13}", "watermarks");
    for name in WATERMARKS.iter().chain(&["boost"]) {
        let _ = write!(text, " {name:>7}");
    }
    let _ = writeln!(text, " {:>8} {:>8} {:>8}", "reserved", "highfree", "isolated");
    let or_dash = |figure: Option<u64>| figure.map_or_else(|| "-".to_owned(), |figure| figure.to_string());
    for zone in &state.zones {
        let _ = write!(text, "{:<13}", zone.label());
        for index in 0..WATERMARKS.len() {
            let raised = zone.watermarks.get(index).map(|mark| mark.saturating_add(zone.boost));
            let _ = write!(text, " {:>7}", or_dash(raised));
        }
        let _ = writeln!(
            text,
            " {:>7} {:>8} {:>8} {:>8}",
            zone.boost,
            zone.reserved_highatomic,
            or_dash(zone.free_highatomic),
            or_dash(zone.isolated_blocks),
        );
    }
    for zone in state.zones.iter().filter(|zone| !zone.flag_names.is_empty()) {
        let flags: Vec<&str> =
            zone.flag_names.iter().map(|name| name.strip_prefix("ZONE_").unwrap_or(name)).collect();
        let _ = writeln!(text, "flags of {}: {}", zone.label(), flags.join(", ").to_lowercase());
    }
    text.push_str(
        "delta: pages on the free lists less NR_FREE_PAGES with what CPUs hold back; isolated pages are free\n\
         and not counted. Watermarks include the boost. reserved, highfree: pages of HIGHATOMIC blocks, and\n\
         those of them that are free, as counted. isolated: pageblocks, as counted.\n",
    );
    text
}

/// The free lists by order and migratetype, types that have nothing left out, and what CPUs hold.
#[must_use]
pub fn free_lists(state: &State) -> String {
    let mut text = String::new();
    let orders = state.zones.iter().map(|zone| zone.areas.len()).max().unwrap_or(0);
    let _ = write!(text, "{:<13} {:<11}", "free blocks", "order");
    for order in 0..orders {
        let _ = write!(text, " {order:>5}");
    }
    let _ = writeln!(text, " {:>8}", "pages");
    for zone in &state.zones {
        let mut label = zone.label();
        let mut row = |name: &str, counts: &[String], pages: u64| {
            let _ = write!(text, "{label:<13} {name:<11}");
            label.clear();
            for count in counts {
                let _ = write!(text, " {count:>5}");
            }
            let _ = writeln!(text, " {pages:>8}");
        };
        for number in 0..state.types.len() {
            let pages = zone.listed_pages(|other| other == number);
            let broken = zone.areas.iter().any(|area| area.lists.get(number).is_some_and(|list| list.broken));
            if pages == 0 && !broken {
                continue;
            }
            let count = |order: usize| {
                let list = zone.areas.get(order).and_then(|area| area.lists.get(number));
                // A walk that was given up found so many, or more.
                list.map_or_else(String::new, |list| match list.broken {
                    true => format!(">{}", list.pfns.len()),
                    false => list.pfns.len().to_string(),
                })
            };
            row(type_name(state, number), &(0..orders).map(count).collect::<Vec<_>>(), pages);
        }
        let nr_free =
            |order: usize| zone.areas.get(order).map_or_else(String::new, |area| area.nr_free.to_string());
        row("nr_free", &(0..orders).map(nr_free).collect::<Vec<_>>(), zone.listed_pages(|_| true));
    }
    text.push('\n');
    cpus(&mut text, state);
    text
}

/// Per-CPU lists, one row a zone and CPU; CPUs that are offline and hold nothing are left out.
fn cpus(text: &mut String, state: &State) {
    let mut orders: Vec<u32> = state
        .zones
        .iter()
        .flat_map(|zone| &zone.cpus)
        .flat_map(|cpu| cpu.pcp.lists.iter().map(|list| list.order))
        .collect();
    orders.sort_unstable();
    orders.dedup();
    let _ = write!(text, "{:<13} {:>4} {:>6} {:>6} {:>6}", "per-CPU lists", "CPU", "count", "high", "batch");
    for order in &orders {
        let _ = write!(text, " {:>7}", format!("order {order}"));
    }
    let _ = writeln!(text, "  holds back");
    for zone in &state.zones {
        let mut label = zone.label();
        for cpu in &zone.cpus {
            let empty = cpu.pcp.count == 0 && cpu.pcp.lists.iter().all(|list| list.pfns.is_empty());
            if !cpu.online && empty && cpu.diffs.iter().all(|diff| *diff == 0) {
                continue;
            }
            let pcp = &cpu.pcp;
            let _ = write!(
                text,
                "{label:<13} {:>4} {:>6} {:>6} {:>6}",
                cpu.number, pcp.count, pcp.high, pcp.batch
            );
            label.clear();
            for order in &orders {
                let lists = pcp.lists.iter().filter(|list| list.order == *order);
                let pages: u64 = lists.map(|list| (list.pfns.len() as u64) << list.order).sum();
                let _ = write!(text, " {pages:>7}");
            }
            // One that says enough: the rest is in the JSON.
            let held = zone.counter_number("NR_FREE_PAGES").and_then(|number| cpu.diffs.get(number));
            let others = zone.counter_names.iter().zip(&cpu.diffs).filter(|(_, diff)| **diff != 0).count();
            let others = others - usize::from(held.is_some_and(|held| *held != 0));
            let _ = match held {
                Some(held) => writeln!(text, "  {held} free, {others} others"),
                None => writeln!(text, "  -"),
            };
        }
    }
    text.push_str(
        "order N: pages on the lists of that order. holds back: of NR_FREE_PAGES, and how many other counters\n",
    );
}
