//! Waits left out on purpose, to see that tests notice each (feature `test-util`; in ordinary builds nothing is ever left
//! out, and the questions asked here compile to `true`).
//!
//! Only a store in seeded order takes a mutant: there one thread runs one task at a time, so a task that runs too early
//! reads wrong bytes, but never bytes that another thread is writing.

#![cfg_attr(
    not(any(test, feature = "test-util")),
    allow(
        unreachable_pub,
        dead_code,
        reason = "the module is public, and its mutants are made, with `test-util` alone"
    )
)]

#[cfg(any(test, feature = "test-util"))]
use std::sync::{Arc, Mutex, PoisonError};

use lazy_model::{Lane, Tier};

use crate::work::Job;
#[cfg(any(test, feature = "test-util"))]
use crate::work::{Kept, Views, Work};

/// A wait, by the place that derives it and whom it concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Wait {
    /// A task of the lane reads an extent: for its last write.
    Read(Lane),
    /// A task of the lane overwrites an extent: for what used it before.
    Overwrite(Source, Lane),
    /// An extent of the tier is released: what its next owner is told to wait for.
    Release(Source, Tier),
    /// A range of the tier goes to a new owner: what is kept for the owners of the rest of the former owner's range.
    Remainder(Side, Tier),
    /// Events that a task of the lane names in `after`.
    After(Lane),
    /// For the end of a task of the lane, which counts as done while its bytes have yet to move.
    Completion(Lane),
}

/// Who used an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Its last writer.
    Write,
    /// Its readers since.
    Reads,
    /// Earlier owners of its range.
    Inherited,
}

/// A part of a former owner's range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// In front of the new owner's.
    Before,
    /// Behind it.
    After,
}

/// What is left out.
#[derive(Clone, Default)]
pub(crate) struct Mutant {
    #[cfg(any(test, feature = "test-util"))]
    left_out: Option<Wait>,
    /// Work of tasks that count as done already.
    #[cfg(any(test, feature = "test-util"))]
    late: Arc<Mutex<Vec<Job>>>,
}

impl Mutant {
    /// Whether a wait is to be kept: always, in ordinary builds.
    pub(crate) fn keeps(&self, wait: Wait) -> bool {
        #[cfg(any(test, feature = "test-util"))]
        return self.left_out != Some(wait);
        #[cfg(not(any(test, feature = "test-util")))]
        {
            let _ = wait;
            true
        }
    }

    /// The work of a task: in ordinary builds, as it is given.
    pub(crate) fn delayed(&self, lane: Lane, job: Job) -> Job {
        #[cfg(any(test, feature = "test-util"))]
        if let Some(Wait::Completion(late_lane)) = self.left_out {
            let late = Arc::clone(&self.late);
            let work = Work::Once(Box::new(move |inner, _| {
                let earlier = late.lock().unwrap_or_else(PoisonError::into_inner).pop();
                if lane == late_lane {
                    late.lock().unwrap_or_else(PoisonError::into_inner).push(job);
                } else {
                    job.run(inner, lane)?;
                }
                earlier.map_or(Ok(Kept::Nothing), |job| job.run(inner, late_lane))
            }));
            return Job { views: Views::default(), work };
        }
        let _ = lane;
        job
    }
}

#[cfg(any(test, feature = "test-util"))]
impl crate::Store {
    /// Leaves a wait out from now on, or none. Says whether it did: a store that runs on threads takes no mutant, since
    /// its tasks would race.
    #[must_use]
    pub fn leave_out(&self, wait: Option<Wait>) -> bool {
        let seeded = self.inner().seeded.is_some();
        if seeded {
            let mutant = Mutant { left_out: wait, late: Arc::default() };
            self.inner().lock().set_mutant(&mutant);
        }
        seeded
    }

    /// Lets the streams of a device run without waiting for each other, or no longer. What races then is memory of the device
    /// and what it copies; tasks on the host wait as ever.
    pub fn leave_out_stream_waits(&self, leave_out: bool) {
        self.inner().lock().lanes.without_stream_waits = leave_out;
    }

    /// Draws the order of what is run from now on from another seed, as a new store would. Nothing on threads.
    pub fn reseed(&self, seed: u64) {
        if let Some(random) = &self.inner().seeded {
            *random.lock().unwrap_or_else(PoisonError::into_inner) = crate::random::Random::new(seed);
        }
    }
}
