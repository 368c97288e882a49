//! Where the extents of one tier lie. Pure bookkeeping: no memory is touched here, and none is taken once the lists have
//! grown to what is live at once. They are short: hundreds of ranges, whose shifting costs less than the nodes of a tree.

use std::ops::Range;

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
    /// Every live extent that is not empty, by where it starts.
    live: Vec<Range<u64>>,
    live_bytes: u64,
    peak: u64,
    /// End of the highest range that was live.
    high_water: u64,
    /// Disjoint, in no order.
    leftovers: Vec<Leftover>,
    /// Empty: the room of the list that the other one replaced.
    spare: Vec<Leftover>,
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
            live: Vec::new(),
            live_bytes: 0,
            peak: 0,
            high_water: 0,
            leftovers: Vec::new(),
            spare: Vec::new(),
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

    pub(crate) fn high_water(&self) -> Bytes {
        Bytes(self.high_water)
    }

    /// Measures peak and high water from what is live now.
    pub(crate) fn start_step(&mut self) {
        self.peak = self.live_bytes;
        // Live ranges do not overlap: the one that starts last ends last.
        self.high_water = self.live.last().map_or(0, |range| range.end);
    }

    /// Takes the lowest free range that is long enough.
    pub(crate) fn reserve(&mut self, bytes: Bytes, done: &Clock) -> Result<Reserved, StoreError> {
        let wanted = self.padded(bytes);
        let (mut start, mut longest) = (0, 0);
        let ends = self.live.iter().map(|range| (range.start, range.end)).chain([(self.budget, self.budget)]);
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
            staging: Bytes::ZERO,
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
        if let Some(other) = self.place(end).checked_sub(1).map(|last| &self.live[last])
            && wanted > 0
            && other.end > offset
        {
            let (wanted, other_offset, other) = (Bytes(wanted), other.start, Bytes(other.end - other.start));
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
        let place = self.place(offset);
        if self.live.get(place).is_some_and(|range| range.start == offset) {
            self.live.remove(place);
            self.live_bytes -= occupied;
        }
        if !clock.reached_by(done) {
            self.leftovers.push(Leftover { start: offset, end: offset + occupied, clock });
        }
    }

    /// The place of the first live range that does not start before `offset`.
    fn place(&self, offset: u64) -> usize {
        self.live.partition_point(|range| range.start < offset)
    }

    fn padded(&self, bytes: Bytes) -> u64 {
        // A length near 2^64 cannot be padded; as it is it fits no budget either.
        bytes.get().checked_next_multiple_of(self.padding).unwrap_or(bytes.get())
    }

    fn take(&mut self, offset: u64, occupied: u64, done: &Clock) -> Reserved {
        let mut inherited = Clock::default();
        if occupied > 0 {
            let place = self.place(offset);
            self.live.insert(place, offset..offset + occupied);
            self.live_bytes += occupied;
            self.peak = self.peak.max(self.live_bytes);
            self.high_water = self.high_water.max(offset + occupied);
            inherited = self.inherit(offset, offset + occupied, done);
        }
        Reserved { offset, occupied, inherited }
    }

    /// Hands the events of former owners over, and leaves them on the parts of their ranges outside ours.
    fn inherit(&mut self, start: u64, end: u64, done: &Clock) -> Clock {
        let mut inherited = Clock::default();
        let mut kept = std::mem::take(&mut self.spare);
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
        self.spare = std::mem::replace(&mut self.leftovers, kept);
        inherited
    }
}

#[cfg(test)]
mod tests {
    use lazy_model::Lane;
    use proptest::prelude::*;

    use super::*;
    use crate::clock::Token;

    /// One entry a byte: who holds it, and which tasks of former owners may still be using it.
    struct ByteMap {
        held: Vec<Option<usize>>,
        used: Vec<Clock>,
        alignment: usize,
        padding: usize,
    }

    impl ByteMap {
        fn new(budget: usize, alignment: usize, padding: usize) -> Self {
            ByteMap { held: vec![None; budget], used: vec![Clock::default(); budget], alignment, padding }
        }

        fn padded(&self, bytes: usize) -> usize {
            bytes.div_ceil(self.padding) * self.padding
        }

        fn is_free(&self, start: usize, len: usize) -> bool {
            start + len <= self.held.len() && self.held[start..start + len].iter().all(Option::is_none)
        }

        fn aligned(&self) -> impl Iterator<Item = usize> {
            (0..self.held.len()).step_by(self.alignment)
        }

        fn first_fit(&self, len: usize) -> Option<usize> {
            self.aligned().find(|&start| self.is_free(start, len))
        }

        /// Longest range that an extent could get.
        fn longest(&self) -> usize {
            let free = |start: &usize| self.held[*start..].iter().take_while(|h| h.is_none()).count();
            self.aligned().map(|start| free(&start)).max().unwrap_or(0)
        }

        fn take(&mut self, who: usize, start: usize, len: usize) -> Clock {
            let mut inherited = Clock::default();
            for byte in start..start + len {
                self.held[byte] = Some(who);
                inherited.join(&std::mem::take(&mut self.used[byte]));
            }
            inherited
        }

        fn release(&mut self, who: usize, clock: Clock) {
            for (held, used) in self.held.iter_mut().zip(&mut self.used) {
                if *held == Some(who) {
                    *held = None;
                    *used = clock;
                }
            }
        }

        fn live(&self) -> usize {
            self.held.iter().flatten().count()
        }

        fn end(&self) -> usize {
            self.held.iter().rposition(Option::is_some).map_or(0, |last| last + 1)
        }
    }

    /// What of `clock` is still to come after `done`.
    fn outstanding(clock: &Clock, done: &Clock) -> Clock {
        let mut left = Clock::default();
        for lane in Lane::ALL.into_iter().filter(|&lane| clock.get(lane) > done.get(lane)) {
            left.set(lane, clock.get(lane));
        }
        left
    }

    #[derive(Clone, Debug)]
    enum Step {
        Reserve {
            bytes: usize,
        },
        ReserveAt {
            offset: usize,
            bytes: usize,
        },
        /// Of one that is held, while the task that comes so much later on a lane may be using it.
        Release {
            which: usize,
            lane: usize,
            ahead: u64,
        },
        /// Tasks of a lane complete.
        Complete {
            lane: usize,
            tasks: u64,
        },
        /// What is measured is measured anew.
        Measure,
    }

    fn step() -> impl Strategy<Value = Step> {
        let bytes = || prop_oneof![0..300usize, Just(64), Just(65), 0..1200usize];
        // Mostly aligned to 64, to 16, or not at all.
        let offset = prop_oneof![3 => (0..20usize).prop_map(|i| 64 * i), 2 => (0..70usize).prop_map(|i| 16 * i), 1 => 0..1100usize];
        prop_oneof![
            4 => bytes().prop_map(|bytes| Step::Reserve { bytes }),
            4 => (offset, bytes()).prop_map(|(offset, bytes)| Step::ReserveAt { offset, bytes }),
            5 => (any::<usize>(), 0..Lane::ALL.len(), 0..4u64)
                .prop_map(|(which, lane, ahead)| Step::Release { which, lane, ahead }),
            1 => (0..Lane::ALL.len(), 1..4u64).prop_map(|(lane, tasks)| Step::Complete { lane, tasks }),
            1 => Just(Step::Measure),
        ]
    }

    fn agrees_with_the_map(steps: &[Step], budget: usize, alignment: usize, padding: usize) {
        let mut arena = Arena::new(Tier::Hbm, Bytes(budget as u64), alignment as u64, padding as u64);
        let mut map = ByteMap::new(budget, alignment, padding);
        // Number, place, and what the first writer has to wait for.
        let mut held: Vec<(usize, Reserved)> = Vec::new();
        let (mut done, mut peak, mut high_water) = (Clock::default(), 0, 0);
        for (who, step) in steps.iter().enumerate() {
            let reserved = match *step {
                Step::Reserve { bytes } => {
                    let place = map.first_fit(map.padded(bytes));
                    match arena.reserve(Bytes(bytes as u64), &done) {
                        // An empty extent lies nowhere in particular.
                        Ok(range) if bytes > 0 => {
                            assert_eq!(Some(range.offset as usize), place, "the lowest free range");
                            Some((range, bytes))
                        }
                        Ok(range) => {
                            assert_eq!(range.occupied, 0);
                            None
                        }
                        Err(StoreError::OutOfBudget { wanted, live, longest: told, .. }) => {
                            assert_eq!(place, None);
                            let told = [wanted, live, told].map(|b| b.get() as usize);
                            assert_eq!(told, [map.padded(bytes), map.live(), map.longest()]);
                            None
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                Step::ReserveAt { offset, bytes } => {
                    let len = map.padded(bytes);
                    match arena.reserve_at(offset as u64, Bytes(bytes as u64), &done) {
                        Ok(range) => {
                            assert!(offset % alignment == 0 && map.is_free(offset, len));
                            assert_eq!(range.offset as usize, offset);
                            (bytes > 0).then_some((range, bytes))
                        }
                        Err(StoreError::Misaligned { .. }) => {
                            assert_ne!(offset % alignment, 0);
                            None
                        }
                        Err(StoreError::OutsideBudget { .. }) => {
                            assert!(offset + len > budget);
                            None
                        }
                        Err(StoreError::Overlap { other_offset, .. }) => {
                            assert!(!map.is_free(offset, len) && map.held[other_offset as usize].is_some());
                            None
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                Step::Release { which, lane, ahead } if !held.is_empty() => {
                    let (who, range) = held.swap_remove(which % held.len());
                    // As the store does: users of this owner, and what it inherited and nobody waited for.
                    let mut clock = range.inherited;
                    let lane = Lane::ALL[lane];
                    clock.add(Token { lane, seq: done.get(lane) + ahead });
                    arena.release(range.offset, range.occupied, clock, &done);
                    map.release(who, clock);
                    None
                }
                Step::Complete { lane, tasks } => {
                    let lane = Lane::ALL[lane];
                    done.set(lane, done.get(lane) + tasks);
                    None
                }
                Step::Measure => {
                    arena.start_step();
                    (peak, high_water) = (0, 0);
                    None
                }
                Step::Release { .. } => None,
            };
            if let Some((range, bytes)) = reserved {
                assert_eq!(
                    range.occupied as usize,
                    map.padded(bytes),
                    "no more than asked for, and its padding"
                );
                let inherited = map.take(who, range.offset as usize, range.occupied as usize);
                assert_eq!(outstanding(&range.inherited, &done), outstanding(&inherited, &done));
                held.push((who, range));
            }
            (peak, high_water) = (peak.max(map.live()), high_water.max(map.end()));
            let measured = [arena.live_bytes(), arena.peak(), arena.high_water()];
            assert_eq!(measured, [map.live(), peak, high_water].map(|bytes| Bytes(bytes as u64)));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn t17_ranges_counts_and_waits_are_those_of_a_map_of_bytes(steps in prop::collection::vec(step(), 1..80)) {
            // Memory: offsets aligned, lengths exact. NVMe: both in blocks.
            agrees_with_the_map(&steps, 1000, 64, 1);
            agrees_with_the_map(&steps, 1024, 16, 16);
        }
    }

    #[test]
    fn t17_a_pool_of_equal_extents_is_filled_to_the_byte() {
        // 20 boundaries of 704 MiB: nothing is rounded up to a power of two.
        let each = Bytes::from_mib(704);
        let mut arena = Arena::new(Tier::Host, Bytes(20 * each.get()), 64, 1);
        for i in 0..20 {
            assert_eq!(arena.reserve(each, &Clock::default()).unwrap().offset, i * each.get());
        }
        assert_eq!(arena.live_bytes(), Bytes(20 * each.get()));
        assert!(matches!(arena.reserve(Bytes(1), &Clock::default()), Err(StoreError::OutOfBudget { .. })));
    }
}
