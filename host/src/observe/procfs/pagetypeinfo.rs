//! `/proc/pagetypeinfo` (mm/vmstat.c, pagetypeinfo_show(), 6.1 to 7.3): free blocks by zone, migratetype and order, and
//! the number of pageblocks of each type.
//!
//! The zone lock is dropped after each order, so the lists of one zone may be of different moments. A list longer than
//! 100000 is printed as `>100000`.

use super::{NAME_MAX, ORDERS_MAX, ParseError, ZoneId, check_new, lines, name, number, zone_heading};

/// Migratetypes that a kernel may have; x86 kernels have at most six.
const TYPES_MAX: usize = 16;

/// The file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// `pageblock_order`.
    pub pageblock_order: u32,
    /// Migratetypes, in the order of the enum.
    pub types: Vec<String>,
    /// One row a populated zone.
    pub zones: Vec<ZoneBlocks>,
}

/// One zone's part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZoneBlocks {
    /// Which zone.
    pub id: ZoneId,
    /// Free blocks: a row a migratetype, a column an order. None where the kernel stopped counting.
    pub free: Vec<Vec<Option<u64>>>,
    /// Pageblocks of each migratetype.
    pub pageblocks: Vec<u64>,
}

impl ZoneBlocks {
    /// Free blocks of each order over all types, where all were counted.
    #[must_use]
    pub fn free_by_order(&self) -> Option<Vec<u64>> {
        let orders = self.free.first().map_or(0, Vec::len);
        let of_order =
            |order: usize| self.free.iter().try_fold(0_u64, |sum, row| sum.checked_add((*row.get(order)?)?));
        (0..orders).map(of_order).collect()
    }

    /// Pages in the free blocks of one type, where all were counted.
    #[must_use]
    pub fn free_pages(&self, of_type: usize) -> Option<u64> {
        let counts: Option<Vec<u64>> = self.free.get(of_type)?.iter().copied().collect();
        super::pages_of(&counts?)
    }
}

/// Which part of a node's text a line belongs to.
#[derive(Clone, Copy)]
enum Part {
    /// Free blocks of each type.
    Free,
    /// Pageblocks of each type.
    Counts,
    /// Pageblocks with pages of several types, only with page_owner. Not read.
    Mixed,
}

/// Parses the file.
///
/// # Errors
/// Where it is not what the kernel prints.
pub fn parse(bytes: &[u8]) -> Result<Blocks, ParseError> {
    let mut blocks = Blocks { pageblock_order: 0, types: Vec::new(), zones: Vec::new() };
    let mut part = Part::Free;
    let mut pageblock_order = None;
    for (line, text) in lines(bytes)? {
        if let Some(order) = text.strip_prefix("Page block order:") {
            // Each node prints all parts anew.
            part = Part::Free;
            let order = number(line, order.trim())?;
            let order = u32::try_from(order).ok().filter(|order| *order < ORDERS_MAX as u32);
            let order = order.ok_or_else(|| ParseError::new(line, "an order", text))?;
            if *pageblock_order.get_or_insert(order) != order {
                return Err(ParseError::new(line, "the same order for each node", text));
            }
        } else if text.starts_with("Number of blocks type") {
            part = Part::Counts;
        } else if text.starts_with("Number of mixed blocks") {
            part = Part::Mixed;
        } else if text.starts_with("Node ") {
            let (id, rest) = zone_heading(line, text)?;
            match part {
                Part::Free => free(line, &mut blocks, id, rest)?,
                Part::Counts => counts(line, &mut blocks, &id, rest)?,
                Part::Mixed => {}
            }
        } else if !(text.is_empty()
            || text.starts_with("Pages per block:")
            || text.starts_with("Free pages count"))
        {
            return Err(ParseError::new(line, "a line of pagetypeinfo", text));
        }
    }
    blocks.pageblock_order =
        pageblock_order.ok_or_else(|| ParseError::new(0, "`Page block order:`", "none"))?;
    let whole = |zone: &ZoneBlocks| {
        zone.free.len() == blocks.types.len() && zone.pageblocks.len() == blocks.types.len()
    };
    if let Some(zone) = blocks.zones.iter().find(|zone| !whole(zone)) {
        return Err(ParseError::new(
            0,
            format!("a count of pageblocks for each type in zone {}", zone.id),
            "none",
        ));
    }
    if blocks.zones.is_empty() {
        return Err(ParseError::new(1, "a zone", ""));
    }
    Ok(blocks)
}

/// `Node 0, zone DMA32, type Movable  1 2 3 …`
fn free(line: usize, blocks: &mut Blocks, id: ZoneId, rest: &str) -> Result<(), ParseError> {
    let rest = rest.trim_start().trim_start_matches(',').trim_start();
    let rest = rest.strip_prefix("type").ok_or_else(|| ParseError::new(line, "`type`", rest))?;
    let mut words = rest.split_whitespace();
    let kind = name(line, words.next().unwrap_or_default())?;
    let row = words
        .take(ORDERS_MAX + 1)
        .map(|word| if word.starts_with('>') { Ok(None) } else { number(line, word).map(Some) })
        .collect::<Result<Vec<_>, _>>()?;
    if row.is_empty() || row.len() > ORDERS_MAX {
        return Err(ParseError::new(line, format!("1 to {ORDERS_MAX} counts"), rest));
    }
    if blocks.zones.last().is_none_or(|zone| zone.id != id) {
        check_new(line, &id, blocks.zones.iter().map(|zone| &zone.id))?;
        blocks.zones.push(ZoneBlocks { id, free: Vec::new(), pageblocks: Vec::new() });
    }
    let first = blocks.zones.len() == 1;
    let Some(zone) = blocks.zones.last_mut() else { return Ok(()) };
    let position = zone.free.len();
    let known = blocks.types.get(position);
    match known {
        None if first && position < TYPES_MAX && kind.len() <= NAME_MAX => blocks.types.push(kind),
        Some(known) if *known == kind => {}
        _ => return Err(ParseError::new(line, "the migratetypes of the first zone, in their order", &kind)),
    }
    if zone.free.first().is_some_and(|first| first.len() != row.len()) {
        return Err(ParseError::new(line, "as many orders as in the first row", rest));
    }
    zone.free.push(row);
    Ok(())
}

/// `Node 0, zone DMA32  12 34 …`
fn counts(line: usize, blocks: &mut Blocks, id: &ZoneId, rest: &str) -> Result<(), ParseError> {
    let counts = rest
        .split_whitespace()
        .take(TYPES_MAX + 1)
        .map(|word| number(line, word))
        .collect::<Result<Vec<_>, _>>()?;
    let zone = blocks.zones.iter_mut().find(|zone| zone.id == *id);
    let zone = zone.ok_or_else(|| ParseError::new(line, "a zone that has free lists", &id.to_string()))?;
    if counts.len() != blocks.types.len() || !zone.pageblocks.is_empty() {
        return Err(ParseError::new(line, "one count for each type, once", rest));
    }
    zone.pageblocks = counts;
    Ok(())
}
