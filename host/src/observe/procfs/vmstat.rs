//! `/proc/vmstat` (mm/vmstat.c, vmstat_show()): counters and events of the whole machine, `name value` a line.

use std::collections::BTreeMap;

use super::{ParseError, counter, lines, name};

/// Lines that the file may have; kernels print about 200.
const COUNTERS_MAX: usize = 2048;

/// Counters by name. Units are the counters' own, pages for `nr_*_pages`.
pub type Counters = BTreeMap<String, i64>;

/// Parses the file.
///
/// # Errors
/// Where it is not what the kernel prints.
pub fn parse(bytes: &[u8]) -> Result<Counters, ParseError> {
    let mut counters = Counters::new();
    for (line, text) in lines(bytes)? {
        let (key, value) = text.split_once(' ').ok_or_else(|| ParseError::new(line, "`name value`", text))?;
        if counters.len() >= COUNTERS_MAX {
            return Err(ParseError::new(line, format!("at most {COUNTERS_MAX} counters"), text));
        }
        if counters.insert(name(line, key)?, counter(line, value)?).is_some() {
            return Err(ParseError::new(line, "a counter that was not yet given", key));
        }
    }
    Ok(counters)
}
