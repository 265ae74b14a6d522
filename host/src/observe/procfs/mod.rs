//! Parsers of what the kernel prints about its page allocator, one file each.
//!
//! Counts are in pages unless they say otherwise. The kernel prints signed counters as unsigned words: a counter below
//! zero, which a broken kernel has (`up` kernels do not clamp it), reads as 2^64 less something and is taken as such.

pub mod buddyinfo;
pub mod kpageflags;
pub mod pagetypeinfo;
#[cfg(test)]
mod tests;
pub mod vmstat;
pub mod zoneinfo;

pub use buddyinfo::FreeLists;
pub use kpageflags::PageFlags;
pub use pagetypeinfo::Blocks;
pub use vmstat::Counters;
pub use zoneinfo::Zone;

/// Orders that a line may have. Kernels have 11 (`NR_PAGE_ORDERS`); a few configurations more.
const ORDERS_MAX: usize = 16;
/// Zones of all nodes together. We run at most a few nodes of at most five zones.
const ZONES_MAX: usize = 64;
/// Lines of a text.
const LINES_MAX: usize = 20_000;
/// Characters of a name: of a zone, a migratetype, a counter.
const NAME_MAX: usize = 64;

/// Names a zone across files: node number and zone name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ZoneId {
    /// NUMA node.
    pub node: u32,
    /// `DMA`, `DMA32`, `Normal`, `Movable`.
    pub name: String,
}

impl std::fmt::Display for ZoneId {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.node {
            // Most guests have one node, and the kernel's own messages do not name it then.
            0 => formatter.write_str(&self.name),
            node => write!(formatter, "node {node} {}", self.name),
        }
    }
}

/// Where a text is not what the kernel prints, and what was expected there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: expected {expected}, found {found:?}")]
pub struct ParseError {
    /// Line number, from 1. Binary files count words.
    pub line: usize,
    /// What should be there.
    pub expected: String,
    /// What is there, cut short.
    pub found: String,
}

impl ParseError {
    fn new(line: usize, expected: impl Into<String>, found: &str) -> Self {
        Self { line, expected: expected.into(), found: found.chars().take(60).collect() }
    }
}

/// The numbered lines of a text.
fn lines(bytes: &[u8]) -> Result<Vec<(usize, &str)>, ParseError> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let line = 1 + bytes[..error.valid_up_to()].iter().filter(|byte| **byte == b'\n').count();
        ParseError::new(line, "ASCII text", "other bytes")
    })?;
    if text.lines().count() > LINES_MAX {
        return Err(ParseError::new(LINES_MAX, "the end of the text", "more lines"));
    }
    Ok((1..).zip(text.lines()).collect())
}

fn number(line: usize, word: &str) -> Result<u64, ParseError> {
    word.parse().map_err(|_| ParseError::new(line, "a number", word))
}

/// A counter: a signed word printed as unsigned.
fn counter(line: usize, word: &str) -> Result<i64, ParseError> {
    word.parse()
        .or_else(|_| word.parse::<u64>().map(|unsigned| unsigned as i64))
        .map_err(|_| ParseError::new(line, "a counter", word))
}

fn name(line: usize, word: &str) -> Result<String, ParseError> {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if word.is_empty() || word.len() > NAME_MAX || !word.bytes().all(fits) {
        return Err(ParseError::new(line, "a name", word));
    }
    Ok(word.to_owned())
}

/// Parses `Node 0, zone    DMA32` and gives the rest of the line.
fn zone_heading(line: usize, text: &str) -> Result<(ZoneId, &str), ParseError> {
    let error = || ParseError::new(line, "`Node N, zone NAME`", text);
    let rest = text.strip_prefix("Node ").ok_or_else(error)?;
    let (node, rest) = rest.split_once(", zone").ok_or_else(error)?;
    let node = u32::try_from(number(line, node.trim())?).map_err(|_| error())?;
    let rest = rest.trim_start();
    let (zone, rest) = rest.split_once([' ', ',']).unwrap_or((rest, ""));
    Ok((ZoneId { node, name: name(line, zone)? }, rest))
}

/// Refuses the same zone twice and too many of them.
fn check_new<'a>(
    line: usize,
    id: &ZoneId,
    mut known: impl ExactSizeIterator<Item = &'a ZoneId>,
) -> Result<(), ParseError> {
    if known.len() >= ZONES_MAX {
        return Err(ParseError::new(line, format!("at most {ZONES_MAX} zones"), "more"));
    }
    if known.any(|other| other == id) {
        return Err(ParseError::new(line, "a zone that was not yet listed", &id.to_string()));
    }
    Ok(())
}

/// Pages in free blocks: the sum of `count << order`, counts of order 0 first. None where that is beyond any memory.
fn pages_of(counts: &[u64]) -> Option<u64> {
    (0..).zip(counts).try_fold(0_u64, |sum, (order, count)| sum.checked_add(count.checked_mul(1 << order)?))
}
