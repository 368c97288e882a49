//! Where the extents of one tier lie. Pure bookkeeping: no memory is touched here.

use std::collections::BTreeMap;

use lazy_model::{Bytes, Tier};

use crate::clock::Clock;
use crate::error::StoreError;
use crate::mutants::{Mutant, Side, Wait};

/// A free range whose former owner still has tasks in flight on it.
struct Leftover {
    start: u64,
    end: u64,
    clock: Clock,
}

/// The ranges of one tier.
pub(crate) struct Arena {
    tier: Tier,
    budget: u64,
    /// Offsets are multiples of this.
    alignment: u64,
    /// Lengths are padded to a multiple of this.
    padding: u64,
    /// Start to end of every live extent that is not empty.
    live: BTreeMap<u64, u64>,
    live_bytes: u64,
    peak: u64,
    leftovers: Vec<Leftover>,
    mutant: Mutant,
}

/// A range just reserved, and what its first writer has to wait for.
pub(crate) struct Reserved {
    pub(crate) offset: u64,
    pub(crate) occupied: u64,
    pub(crate) inherited: Clock,
}

impl Arena {
    pub(crate) fn new(tier: Tier, budget: Bytes, alignment: u64, padding: u64) -> Self {
        Arena {
            tier,
            budget: budget.get(),
            alignment,
            padding,
            live: BTreeMap::new(),
            live_bytes: 0,
            peak: 0,
            leftovers: Vec::new(),
            mutant: Mutant::default(),
        }
    }

    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn set_mutant(&mut self, mutant: &Mutant) {
        self.mutant = mutant.clone();
    }

    pub(crate) fn budget(&self) -> Bytes {
        Bytes(self.budget)
    }

    pub(crate) fn live_bytes(&self) -> Bytes {
        Bytes(self.live_bytes)
    }

    pub(crate) fn peak(&self) -> Bytes {
        Bytes(self.peak)
    }

    pub(crate) fn reset_peak(&mut self) {
        self.peak = self.live_bytes;
    }

    /// Takes the lowest free range that is long enough.
    pub(crate) fn reserve(&mut self, bytes: Bytes, done: &Clock) -> Result<Reserved, StoreError> {
        let wanted = self.padded(bytes);
        let (mut start, mut longest) = (0, 0);
        let ends = self.live.iter().map(|(s, e)| (*s, *e)).chain([(self.budget, self.budget)]);
        for (next_start, next_end) in ends {
            let free = next_start.saturating_sub(start);
            if wanted <= free {
                return Ok(self.take(start, wanted, done));
            }
            longest = free.max(longest);
            start = next_end.checked_next_multiple_of(self.alignment).unwrap_or(u64::MAX);
        }
        Err(StoreError::OutOfBudget {
            tier: self.tier,
            wanted: Bytes(wanted),
            live: Bytes(self.live_bytes),
            budget: Bytes(self.budget),
            longest: Bytes(longest),
        })
    }

    /// Takes the range at `offset`.
    pub(crate) fn reserve_at(
        &mut self,
        offset: u64,
        bytes: Bytes,
        done: &Clock,
    ) -> Result<Reserved, StoreError> {
        let (tier, wanted) = (self.tier, self.padded(bytes));
        if !offset.is_multiple_of(self.alignment) {
            return Err(StoreError::Misaligned { tier, offset, alignment: self.alignment });
        }
        let end = match offset.checked_add(wanted) {
            Some(end) if end <= self.budget => end,
            _ => {
                let (wanted, budget) = (Bytes(wanted), Bytes(self.budget));
                return Err(StoreError::OutsideBudget { tier, offset, wanted, budget });
            }
        };
        // Live ranges do not overlap, so the last one that starts before our end is the only one to look at.
        if let Some((&other_offset, &other_end)) = self.live.range(..end).next_back()
            && wanted > 0
            && other_end > offset
        {
            let (wanted, other) = (Bytes(wanted), Bytes(other_end - other_offset));
            return Err(StoreError::Overlap { tier, offset, wanted, other_offset, other });
        }
        Ok(self.take(offset, wanted, done))
    }

    /// Gives a range back while the tasks in `clock` may still be using it.
    pub(crate) fn release(&mut self, offset: u64, occupied: u64, clock: Clock, done: &Clock) {
        self.leftovers.retain(|l| !l.clock.reached_by(done));
        if occupied == 0 {
            return;
        }
        self.live.remove(&offset);
        self.live_bytes -= occupied;
        if !clock.reached_by(done) {
            self.leftovers.push(Leftover { start: offset, end: offset + occupied, clock });
        }
    }

    fn padded(&self, bytes: Bytes) -> u64 {
        // A length near 2^64 cannot be padded; as it is it fits no budget either.
        bytes.get().checked_next_multiple_of(self.padding).unwrap_or(bytes.get())
    }

    fn take(&mut self, offset: u64, occupied: u64, done: &Clock) -> Reserved {
        let mut inherited = Clock::default();
        if occupied > 0 {
            self.live.insert(offset, offset + occupied);
            self.live_bytes += occupied;
            self.peak = self.peak.max(self.live_bytes);
            inherited = self.inherit(offset, offset + occupied, done);
        }
        Reserved { offset, occupied, inherited }
    }

    /// Hands the events of former owners over, and leaves them on the parts of their ranges outside ours.
    fn inherit(&mut self, start: u64, end: u64, done: &Clock) -> Clock {
        let mut inherited = Clock::default();
        let mut kept = Vec::with_capacity(self.leftovers.len() + 1);
        for left in self.leftovers.drain(..) {
            if left.clock.reached_by(done) {
                continue;
            }
            if left.end <= start || end <= left.start {
                kept.push(left);
                continue;
            }
            inherited.join(&left.clock);
            let clock = left.clock;
            if left.start < start && self.mutant.keeps(Wait::Remainder(Side::Before, self.tier)) {
                kept.push(Leftover { start: left.start, end: start, clock });
            }
            if end < left.end && self.mutant.keeps(Wait::Remainder(Side::After, self.tier)) {
                kept.push(Leftover { start: end, end: left.end, clock });
            }
        }
        self.leftovers = kept;
        inherited
    }
}
