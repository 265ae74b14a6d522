//! `/proc/buddyinfo` (mm/vmstat.c, frag_show_print(), 6.1 to 7.3): the `nr_free` of each order of each populated zone.
//!
//! Counts free blocks of every migratetype, isolated ones too. Since 7.3 the zone lock is not held, so a row may be torn.

use super::{ORDERS_MAX, ParseError, ZoneId, check_new, lines, number, pages_of, zone_heading};

/// One zone's row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreeLists {
    /// Which zone.
    pub id: ZoneId,
    /// Free blocks of each order, order 0 first.
    pub blocks: Vec<u64>,
    /// The same in pages.
    pub pages: u64,
}

/// Parses the file.
///
/// # Errors
/// Where it is not what the kernel prints.
pub fn parse(bytes: &[u8]) -> Result<Vec<FreeLists>, ParseError> {
    let mut zones: Vec<FreeLists> = Vec::new();
    for (line, text) in lines(bytes)? {
        let (id, rest) = zone_heading(line, text)?;
        check_new(line, &id, zones.iter().map(|zone| &zone.id))?;
        let blocks = rest
            .split_whitespace()
            .take(ORDERS_MAX + 1)
            .map(|word| number(line, word))
            .collect::<Result<Vec<_>, _>>()?;
        if blocks.is_empty() || blocks.len() > ORDERS_MAX {
            return Err(ParseError::new(line, format!("1 to {ORDERS_MAX} counts"), rest));
        }
        if zones.first().is_some_and(|first| first.blocks.len() != blocks.len()) {
            return Err(ParseError::new(line, "as many orders as in the first row", rest));
        }
        let pages =
            pages_of(&blocks).ok_or_else(|| ParseError::new(line, "counts that memory can hold", rest))?;
        zones.push(FreeLists { id, blocks, pages });
    }
    if zones.is_empty() {
        return Err(ParseError::new(1, "a zone", ""));
    }
    Ok(zones)
}
