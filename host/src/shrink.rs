//! A batch that shows a divergence, made smaller: operations are left out as long as it still shows (delta debugging, as in
//! A. Zeller, R. Hildebrandt, "Simplifying and isolating failure-inducing input", 2002).

use std::collections::{HashMap, HashSet};

use crate::batch::Op;

/// What came of shrinking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shrunk {
    /// The operations that are left.
    pub ops: Vec<Op>,
    /// How often it was tried whether fewer still show it.
    pub trials: u32,
    /// Whether not one more operation can be left out; false where the trials were used up before that was known.
    pub minimal: bool,
}

/// Leaves out of `ops` what is not needed for `shows` to hold, by at most `trials` calls of it. `ops` is taken to show.
///
/// # Errors
/// Those of `shows`, at once.
pub fn shrink<E>(
    ops: Vec<Op>,
    trials: u32,
    mut shows: impl FnMut(&[Op]) -> Result<bool, E>,
) -> Result<Shrunk, E> {
    let mut shrunk = Shrunk { ops: whole(&ops), trials: 0, minimal: false };
    let mut parts = 2;
    while shrunk.ops.len() > 1 {
        let size = shrunk.ops.len().div_ceil(parts);
        let mut smaller = None;
        // The last part first: what comes after the operation that shows it is not needed.
        for part in (0..shrunk.ops.len().div_ceil(size)).rev() {
            if shrunk.trials == trials {
                return Ok(shrunk);
            }
            let left_out = part * size..((part + 1) * size).min(shrunk.ops.len());
            let rest: Vec<Op> = [&shrunk.ops[..left_out.start], &shrunk.ops[left_out.end..]].concat();
            let rest = whole(&rest);
            shrunk.trials += 1;
            if !rest.is_empty() && shows(&rest)? {
                smaller = Some(rest);
                break;
            }
        }
        match smaller {
            Some(rest) => {
                shrunk.ops = rest;
                parts = parts.saturating_sub(1).max(2);
            }
            None if size == 1 => break,
            None => parts = (parts * 2).min(shrunk.ops.len()),
        }
    }
    shrunk.minimal = true;
    Ok(shrunk)
}

/// What a slot holds, as far as the driver wants to know before it takes a batch.
enum Slot {
    Block { order: u32 },
    Split { freed: HashSet<u32>, order: u32 },
    Range,
}

/// The operations that the driver takes where nothing is held at first: those that work on what was left out are left out
/// too (guest-agent/driver/buddydiff.c, bd_check()).
#[must_use]
pub fn whole(ops: &[Op]) -> Vec<Op> {
    let mut slots: HashMap<u32, Slot> = HashMap::new();
    let mut disabled = false;
    let takes = |op: &&Op| -> bool {
        match **op {
            Op::Alloc { slot, order, .. } | Op::NolockAlloc { slot, order, .. } => {
                let empty = !slots.contains_key(&slot);
                if empty {
                    slots.insert(slot, Slot::Block { order });
                }
                empty
            }
            Op::Free { slot } | Op::NolockFree { slot } => {
                let block = matches!(slots.get(&slot), Some(Slot::Block { .. }));
                if block {
                    slots.remove(&slot);
                }
                block
            }
            Op::Split { slot } => match slots.get(&slot) {
                Some(Slot::Block { order }) => {
                    let order = *order;
                    slots.insert(slot, Slot::Split { freed: HashSet::new(), order });
                    true
                }
                _ => false,
            },
            Op::FreePiece { slot, piece } => {
                let Some(Slot::Split { freed, order }) = slots.get_mut(&slot) else { return false };
                let fresh = piece < 1 << *order && freed.insert(piece);
                if freed.len() == 1 << *order {
                    slots.remove(&slot);
                }
                fresh
            }
            Op::ContigAlloc { slot, .. } | Op::Isolate { slot, .. } => {
                let empty = !slots.contains_key(&slot);
                if empty {
                    slots.insert(slot, Slot::Range);
                }
                empty
            }
            Op::ContigFree { slot } | Op::Unisolate { slot } => {
                let range = matches!(slots.get(&slot), Some(Slot::Range));
                if range {
                    slots.remove(&slot);
                }
                range
            }
            Op::PcpDisable { .. } => !std::mem::replace(&mut disabled, true),
            Op::PcpEnable => std::mem::replace(&mut disabled, false),
            Op::Drain | Op::DrainAll => true,
        }
    };
    ops.iter().filter(takes).copied().collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn alloc(slot: u32) -> Op {
        Op::Alloc { slot, order: 1, gfp: 0, node: None }
    }

    #[test]
    fn what_works_on_what_was_left_out_is_left_out() {
        let ops = [
            Op::Free { slot: 1 },
            alloc(2),
            alloc(2),
            Op::Split { slot: 2 },
            Op::Free { slot: 2 },
            Op::FreePiece { slot: 2, piece: 0 },
            Op::FreePiece { slot: 2, piece: 0 },
            Op::FreePiece { slot: 2, piece: 2 },
            Op::FreePiece { slot: 2, piece: 1 },
            alloc(2),
            Op::PcpEnable,
        ];
        let expected = [ops[1], ops[3], ops[5], ops[8], ops[9]];
        assert_eq!(whole(&ops), expected);
    }

    proptest! {
        #[test]
        fn what_is_needed_is_what_is_left(needed in prop::collection::btree_set(0_u32..500, 1..6)) {
            let ops: Vec<Op> = (0..500).map(alloc).collect();
            let shows = |ops: &[Op]| Ok::<_, ()>(needed.iter().all(|slot| ops.contains(&alloc(*slot))));
            let shrunk = shrink(ops, 10_000, shows).unwrap();
            prop_assert!(shrunk.minimal);
            prop_assert_eq!(shrunk.ops, needed.iter().copied().map(alloc).collect::<Vec<_>>());
        }

        #[test]
        fn trials_are_bounded_and_what_is_left_shows(trials in 0_u32..40) {
            let ops: Vec<Op> = (0..500).map(alloc).collect();
            let mut calls = 0;
            let shows = |ops: &[Op]| {
                calls += 1;
                Ok::<_, ()>(ops.contains(&alloc(77)) && ops.contains(&alloc(400)))
            };
            let shrunk = shrink(ops, trials, shows).unwrap();
            prop_assert_eq!(calls, shrunk.trials);
            prop_assert!(calls <= trials);
            prop_assert!(shrunk.ops.contains(&alloc(77)) && shrunk.ops.contains(&alloc(400)));
        }
    }
}
