//! Batches of allocator operations: made by machine, replayed by the model, compared with what a kernel did.
//!
//! A seed gives the same operations again, whatever the machine.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::batch::{Op, OpResult, SLOTS};
use crate::model::{Model, Request, Reserve};

/// What a slot holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// First pfn.
    pub pfn: u64,
    /// Order.
    pub order: u32,
    /// Of a block that was split: which pages are still there.
    pub pieces: Option<Vec<bool>>,
}

/// What every slot holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slots {
    held: Table,
}

/// By number of the slot: there are few, and each operation looks one up.
#[derive(Clone, Debug)]
struct Table {
    slots: Vec<Option<Holding>>,
    len: usize,
}

impl Default for Table {
    fn default() -> Self {
        Self { slots: vec![None; SLOTS as usize], len: 0 }
    }
}

impl PartialEq for Table {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.iter().eq(other.iter())
    }
}

impl Eq for Table {}

impl Table {
    fn get(&self, slot: &u32) -> Option<&Holding> {
        self.slots.get(*slot as usize)?.as_ref()
    }

    fn get_mut(&mut self, slot: &u32) -> Option<&mut Holding> {
        self.slots.get_mut(*slot as usize)?.as_mut()
    }

    /// What cannot be in a batch is not kept.
    fn insert(&mut self, slot: u32, holding: Holding) {
        let Some(place) = self.slots.get_mut(slot as usize) else { return };
        self.len += usize::from(place.replace(holding).is_none());
    }

    fn remove(&mut self, slot: &u32) -> Option<Holding> {
        let holding = self.slots.get_mut(*slot as usize)?.take();
        self.len -= usize::from(holding.is_some());
        holding
    }

    /// Those in use, by number.
    fn iter(&self) -> impl Iterator<Item = (u32, &Holding)> {
        (0..).zip(&self.slots).filter_map(|(slot, holding)| Some((slot, holding.as_ref()?)))
    }
}

impl Slots {
    /// Pages held in all.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.held.iter().map(|(_, holding)| 1 << holding.order).sum()
    }

    /// Number of slots in use.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len
    }

    /// Whether none is in use.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.len == 0
    }

    /// Takes note of what an operation did.
    pub fn note(&mut self, op: Op, result: Option<u64>) {
        match op {
            Op::Alloc { slot, order, .. } => {
                if let Some(pfn) = result {
                    self.held.insert(slot, Holding { pfn, order, pieces: None });
                }
            }
            Op::Free { slot } => drop(self.held.remove(&slot)),
            Op::Split { slot } => {
                if let Some(holding) = self.held.get_mut(&slot) {
                    holding.pieces = Some(vec![true; 1 << holding.order]);
                }
            }
            Op::FreePiece { slot, piece } => {
                let Some(holding) = self.held.get_mut(&slot) else { return };
                let Some(pieces) = &mut holding.pieces else { return };
                if let Some(piece) = pieces.get_mut(piece as usize) {
                    *piece = false;
                }
                if pieces.iter().all(|piece| !piece) {
                    self.held.remove(&slot);
                }
            }
            // What is never made here holds nothing that is followed.
            _ => {}
        }
    }
}

/// The page that an operation gave, if it allocates and succeeded.
#[must_use]
pub fn allocated(op: Op, result: &OpResult) -> Option<u64> {
    result.value().ok().filter(|_| matches!(op, Op::Alloc { .. }))
}

/// An operation that the model cannot do yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the model does not know {0}")]
pub struct NotModelled(Op);

/// Does an operation in the model; the pfn where it allocates and succeeds. `slots` is what is held before it: what rests
/// on an allocation that failed is not done.
///
/// # Errors
/// [`NotModelled`].
pub fn apply(model: &mut Model, slots: &Slots, op: Op) -> Result<Option<u64>, NotModelled> {
    match op {
        Op::Alloc { order, gfp, node: None, .. } => {
            let request = Request::of_gfp(order, gfp).ok_or(NotModelled(op))?;
            return Ok(model.alloc(request));
        }
        Op::Free { slot } => {
            if let Some(holding) = slots.held.get(&slot) {
                model.free(holding.pfn, holding.order);
            }
        }
        Op::FreePiece { slot, piece } => {
            if let Some(holding) = slots.held.get(&slot) {
                model.free(holding.pfn + u64::from(piece), 0);
            }
        }
        Op::Drain => model.drain(),
        Op::Split { .. } => {}
        _ => return Err(NotModelled(op)),
    }
    Ok(None)
}

/// Which operations a seed makes, and how often: each seed draws its own mix, so that rare ones come up together.
#[derive(Clone, Debug)]
pub struct Mix {
    /// Weights of orders 0 to 10.
    orders: [u32; 11],
    /// Weights of unmovable, movable, reclaimable.
    lists: [u32; 3],
    /// Weights of the highest zone: DMA, DMA32, NORMAL.
    zones: [u32; 3],
    /// Weights of the reserves.
    reserves: [u32; 3],
    /// Of 1000 operations, how many allocate while filling, and while emptying.
    allocate: [u32; 2],
    /// Of 1000 operations, how many split, and how many drain.
    split: u32,
    drain: u32,
    /// Operations until filling turns into emptying, and back.
    phase: u32,
    /// Whether each batch asks for more than there is, and gives all of it back at its end: nothing else runs meanwhile.
    tight: bool,
}

/// Of the free pages, how many may be held between batches, in percent: the guest has to live on.
const SHARE: u64 = 50;
/// Slots that may be split at a time.
const SPLITS: usize = 64;
const RESERVES: [Reserve; 3] = [Reserve::None, Reserve::NonBlock, Reserve::Atomic];

/// Makes batches.
pub struct Generator {
    random: ChaCha8Rng,
    mix: Mix,
    /// Slots that may be used, and pages that may be held; all that are free where a batch gives them back.
    slots: u32,
    pages: u64,
    free: u64,
    filling: bool,
    left: u32,
}

impl Generator {
    /// For a seed, with at most this many slots in use, where this many pages are free.
    #[must_use]
    pub fn new(seed: u64, slots: u32, free: u64) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mix = Mix::draw(&mut random);
        let left = mix.phase;
        Self { random, mix, slots, pages: free * SHARE / 100, free, filling: true, left }
    }

    /// The next `count` operations, where `slots` is what is held. They rest on one another as if every allocation
    /// succeeded; where one fails, what would have been done with it is not done.
    pub fn batch(&mut self, slots: &Slots, count: usize) -> Vec<Op> {
        let mut held: Vec<(u32, Holding)> =
            slots.held.iter().map(|(slot, holding)| (slot, holding.clone())).collect();
        let mut split = held.iter().filter(|(_, holding)| holding.pieces.is_some()).count();
        let mut empty: Vec<u32> =
            (0..self.slots).rev().filter(|slot| slots.held.get(slot).is_none()).collect();
        let mut pages = slots.pages();
        let mut ops = Vec::with_capacity(count);
        let tight = self.mix.tight;
        // Large requests soon fail and count all the same: only so do small ones get to the last pages.
        let most = if tight { self.free.saturating_mul(8) } else { self.pages };
        // What this batch has taken and has to give back.
        let before = |slot: u32| slots.held.get(&slot).is_some();
        let mut owed = 0;
        // An allocation that is owed takes two operations.
        while ops.len() + owed + usize::from(tight) < count {
            self.left = self.left.saturating_sub(1);
            if self.left == 0 {
                (self.filling, self.left) = (!self.filling, self.mix.phase);
            }
            let draw = self.below(1000);
            if draw < self.mix.drain {
                ops.push(Op::Drain);
                continue;
            }
            let allocate = self.mix.allocate[usize::from(!self.filling)];
            if self.below(1000) < allocate || held.is_empty() {
                let request = self.request();
                let size = 1 << request.order;
                match empty.pop() {
                    Some(slot) if pages + size <= most => {
                        pages += size;
                        owed += usize::from(tight);
                        held.push((slot, Holding { pfn: 0, order: request.order, pieces: None }));
                        let (order, gfp) = (request.order, request.gfp());
                        ops.push(Op::Alloc { slot, order, gfp, node: None });
                        continue;
                    }
                    Some(slot) => empty.push(slot),
                    None => {}
                }
                if held.is_empty() {
                    // Neither room nor anything to free: the batch is full.
                    break;
                }
            }
            let index = self.below(held.len() as u32) as usize;
            let (slot, holding) = &mut held[index];
            let slot = *slot;
            match &mut holding.pieces {
                Some(pieces) => {
                    let left = pieces.iter().filter(|piece| **piece).count();
                    let draw = self.random.next_u32() as usize % left.max(1);
                    let Some((piece, _)) = pieces.iter().enumerate().filter(|(_, left)| **left).nth(draw)
                    else {
                        held.swap_remove(index);
                        continue;
                    };
                    pieces[piece] = false;
                    let piece = piece as u32;
                    if left == 1 {
                        pages -= 1 << holding.order;
                        split -= 1;
                        held.swap_remove(index);
                        empty.push(slot);
                    }
                    ops.push(Op::FreePiece { slot, piece });
                }
                None if holding.order > 0
                    && !tight
                    && split < SPLITS
                    && draw < self.mix.drain + self.mix.split =>
                {
                    split += 1;
                    holding.pieces = Some(vec![true; 1 << holding.order]);
                    ops.push(Op::Split { slot });
                }
                None => {
                    pages -= 1 << holding.order;
                    held.swap_remove(index);
                    empty.push(slot);
                    owed -= usize::from(tight && !before(slot));
                    ops.push(Op::Free { slot });
                }
            }
        }
        if tight {
            let taken = held.iter().map(|(slot, _)| *slot).filter(|slot| !before(*slot));
            ops.extend(taken.map(|slot| Op::Free { slot }));
        }
        ops
    }

    fn request(&mut self) -> Request {
        let order = pick(&mut self.random, &self.mix.orders) as u32;
        Request {
            order,
            list: pick(&mut self.random, &self.mix.lists),
            highest_zone: pick(&mut self.random, &self.mix.zones),
            reserve: RESERVES[pick(&mut self.random, &self.mix.reserves)],
        }
    }

    fn below(&mut self, limit: u32) -> u32 {
        self.random.next_u32() % limit.max(1)
    }
}

impl Mix {
    fn draw(random: &mut ChaCha8Rng) -> Self {
        let mut weight = |choices: &[u32]| choices[random.next_u32() as usize % choices.len()];
        let mut orders = [0; 11];
        for order in &mut orders {
            *order = weight(&[0, 0, 1, 3, 10]);
        }
        // Single pages are what kernels ask for most.
        orders[0] = weight(&[1, 20, 60, 200]);
        let tight = weight(&[0, 0, 1]) == 1;
        if tight {
            orders = [20, 5, 5, 5, 2, 2, 2, 2, 2, 4, 4];
        }
        let mut three = |choices: &[u32]| [0; 3].map(|_: u32| weight(choices));
        let lists = three(&[1, 1, 4, 10]);
        let zones = three(&[1, 3, 10]);
        let reserves = three(&[1, 3, 10]);
        Self {
            orders,
            lists,
            zones,
            reserves,
            allocate: [weight(&[600, 700, 900]), weight(&[100, 300, 400])],
            split: weight(&[0, 20, 100]),
            drain: weight(&[0, 0, 1, 10]),
            phase: weight(&[50, 500, 3000, 20_000]),
            tight,
        }
    }
}

/// An index by weights; the last where all are 0.
fn pick(random: &mut ChaCha8Rng, weights: &[u32]) -> usize {
    let sum: u32 = weights.iter().sum();
    let mut draw = random.next_u32() % sum.max(1);
    for (index, weight) in weights.iter().enumerate() {
        match draw.checked_sub(*weight) {
            Some(left) => draw = left,
            None => return index,
        }
    }
    weights.len() - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_no_longer_than_asked_for_and_repeat() {
        for seed in 0..40 {
            let (mut one, mut other) = (Generator::new(seed, 1000, 5000), Generator::new(seed, 1000, 5000));
            let mut slots = Slots::default();
            for count in [1, 2, 100, 777] {
                let ops = one.batch(&slots, count);
                assert!(ops.len() <= count, "seed {seed}: {} of {count}", ops.len());
                assert_eq!(ops, other.batch(&slots, count));
                // As if each allocation were given the same page: what counts is what is held.
                ops.iter().for_each(|op| slots.note(*op, Some(1)));
                assert!(
                    slots.pages() <= 5000 * SHARE / 100 || one.mix.tight,
                    "seed {seed}: {}",
                    slots.pages()
                );
                assert!(slots.is_empty() || !one.mix.tight, "seed {seed}");
            }
        }
    }
}
