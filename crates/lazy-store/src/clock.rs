//! How far each lane has come. Lanes complete in order, so one number a lane says which tasks are done, and a set of
//! events to wait for folds into the latest one on each lane.

use lazy_model::Lane;

pub(crate) const LANES: usize = Lane::ALL.len();

/// The place of a lane in arrays: its place in [`Lane::ALL`].
pub(crate) const fn slot(lane: Lane) -> usize {
    lane as usize
}

/// One task: the `seq`-th ever submitted to `lane`, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Token {
    pub(crate) lane: Lane,
    pub(crate) seq: u64,
}

/// For each lane, the number of tasks that are (or have to be) done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock([u64; LANES]);

impl Clock {
    pub(crate) fn get(&self, lane: Lane) -> u64 {
        self.0[slot(lane)]
    }

    pub(crate) fn set(&mut self, lane: Lane, seq: u64) {
        self.0[slot(lane)] = seq;
    }

    pub(crate) fn add(&mut self, token: Token) {
        let seq = &mut self.0[slot(token.lane)];
        *seq = token.seq.max(*seq);
    }

    pub(crate) fn join(&mut self, other: &Clock) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine = theirs.max(*mine);
        }
    }

    /// Whether everything in `self` is done once `done` is.
    pub(crate) fn reached_by(&self, done: &Clock) -> bool {
        self.0.iter().zip(done.0).all(|(wanted, done)| *wanted <= done)
    }
}
