//! `/proc/zoneinfo` (mm/vmstat.c, zoneinfo_show_print()): sizes, watermarks, counters and per-CPU lists of each zone.
//!
//! 6.1 prints no `promo`, `high_min` or `free_highatomic`; `boost`, `reserved_highatomic` and the rest come and go with
//! versions, so all `name value` pairs are taken as they are.

use std::collections::BTreeMap;

use super::{ParseError, ZoneId, check_new, counter, lines, name, number, zone_heading};

/// Counters of one zone or pageset.
const VALUES_MAX: usize = 128;
/// CPUs that a zone may list.
const CPUS_MAX: usize = 1024;

/// One zone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone {
    /// Which zone.
    pub id: ZoneId,
    /// Sizes and watermarks in pages, counters in their units: `free`, `min`, `managed`, `nr_free_pages`, `start_pfn`.
    /// `free` is NR_FREE_PAGES without the differences that CPUs have not yet folded in.
    pub values: BTreeMap<String, i64>,
    /// Its per-CPU lists.
    pub pagesets: Vec<Pageset>,
}

/// The per-CPU lists of one CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pageset {
    /// `count`, `high`, `batch`, and from 6.12 `high_min` and `high_max`, all in pages.
    pub values: BTreeMap<String, i64>,
    /// How far this CPU's counters may be off before they are folded in (`stat_threshold`); `up` kernels have none.
    pub threshold: Option<i64>,
}

impl Zone {
    /// A value, where the kernel prints it.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<i64> {
        self.values.get(name).copied()
    }

    /// Whether it has any memory.
    #[must_use]
    pub fn populated(&self) -> bool {
        self.get("present").is_some_and(|present| present > 0)
    }
}

/// Parses the file.
///
/// # Errors
/// Where it is not what the kernel prints.
pub fn parse(bytes: &[u8]) -> Result<Vec<Zone>, ParseError> {
    let mut zones: Vec<Zone> = Vec::new();
    let mut in_node_stats = false;
    for (line, text) in lines(bytes)? {
        if text.starts_with("Node ") {
            let (id, _) = zone_heading(line, text)?;
            check_new(line, &id, zones.iter().map(|zone| &zone.id))?;
            zones.push(Zone { id, values: BTreeMap::new(), pagesets: Vec::new() });
            in_node_stats = false;
            continue;
        }
        let zone = zones.last_mut().ok_or_else(|| ParseError::new(line, "`Node N, zone NAME`", text))?;
        let text = text.trim();
        if text == "per-node stats" {
            in_node_stats = true;
        } else if let Some(rest) = text.strip_prefix("pages free") {
            in_node_stats = false;
            insert(line, &mut zone.values, "free", rest)?;
        } else if text == "pagesets" || text.starts_with("protection:") || text.is_empty() {
            in_node_stats = false;
        } else if let Some(cpu) = text.strip_prefix("cpu:") {
            number(line, cpu.trim())?;
            if zone.pagesets.len() >= CPUS_MAX {
                return Err(ParseError::new(line, format!("at most {CPUS_MAX} CPUs"), text));
            }
            zone.pagesets.push(Pageset::default());
        } else if let Some(rest) = text.strip_prefix("vm stats threshold:") {
            let pageset = zone.pagesets.last_mut().ok_or_else(|| ParseError::new(line, "`cpu:`", text))?;
            pageset.threshold = Some(counter(line, rest.trim())?);
        } else if !in_node_stats {
            let (key, value) = text
                .split_once(char::is_whitespace)
                .ok_or_else(|| ParseError::new(line, "`name value`", text))?;
            let pageset_key = matches!(key, "count:" | "high:" | "batch:" | "high_min:" | "high_max:");
            let values = match zone.pagesets.last_mut() {
                Some(pageset) if pageset_key => &mut pageset.values,
                _ => &mut zone.values,
            };
            insert(line, values, key.trim_end_matches(':'), value)?;
        }
    }
    for zone in &zones {
        if zone.get("free").is_none() || zone.get("present").is_none() {
            return Err(ParseError::new(
                0,
                format!("`pages free` and `present` in zone {}", zone.id),
                "neither",
            ));
        }
    }
    if zones.is_empty() {
        return Err(ParseError::new(1, "a zone", ""));
    }
    Ok(zones)
}

fn insert(line: usize, values: &mut BTreeMap<String, i64>, key: &str, value: &str) -> Result<(), ParseError> {
    if values.len() >= VALUES_MAX {
        return Err(ParseError::new(line, format!("at most {VALUES_MAX} values"), key));
    }
    let value = counter(line, value.trim())?;
    if values.insert(name(line, key)?, value).is_some() {
        return Err(ParseError::new(line, "a value that was not yet given", key));
    }
    Ok(())
}
