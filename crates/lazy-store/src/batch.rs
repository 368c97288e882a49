//! Several transfers of one NVMe lane at once: a drive is kept busy across extents, and small ones travel together.

use std::collections::BTreeMap;
use std::time::Instant;

use lazy_model::Lane;

use crate::drive;
use crate::error::StoreError;
use crate::io::Op;
use crate::lanes::{Finished, Started};
use crate::spill::{Spill, Transfer, Transfers};
use crate::store::{Inner, State};

/// What the head of a lane is, where that is transfers; nothing where they have to go one by one.
pub(crate) fn operation<'a>(inner: &'a Inner, state: &State, lane: Lane) -> Option<(&'a Spill, Op)> {
    let op = match lane {
        Lane::NvmeRead => Op::Read,
        Lane::NvmeWrite => Op::Write,
        _ => return None,
    };
    // A limited link is slowed down task by task, and a seed picks single tasks.
    let together =
        inner.limit(lane).is_none() && inner.seeded.is_none() && state.lanes.transfer_is_next(lane);
    Some((inner.spill.as_deref().filter(|_| together)?, op))
}

/// Carries out the transfers at the head of a lane.
pub(crate) fn run(inner: &Inner, lane: Lane, spill: &Spill, op: Op) {
    let mut batch = Batch { inner, lane, started: BTreeMap::new(), last_end: None };
    spill.carry_out(op, &mut batch);
}

/// The transfers of a lane that were started, oldest first.
struct Batch<'a> {
    inner: &'a Inner,
    lane: Lane,
    started: BTreeMap<u64, UnderWay>,
    last_end: Option<Instant>,
}

struct UnderWay {
    task: Started,
    at: Instant,
    result: Option<Result<(), StoreError>>,
}

impl Batch<'_> {
    /// Finishes what has ended, up to the first that has not: a lane completes in order.
    fn finish(&mut self) {
        while let Some(first) = self.started.first_entry()
            && first.get().result.is_some()
        {
            let UnderWay { task, at, result } = first.remove();
            let Started { token, name, job, skip, ticket, .. } = task;
            drop(job);
            let result = result.unwrap_or(Ok(())).map_err(|error| StoreError::Task {
                task: name.to_string(),
                lane: self.lane,
                source: error.into(),
            });
            // Spans of one lane do not overlap: the lane is a task's from when the one before it was done.
            let end = Instant::now();
            let start = self.last_end.map_or(at, |last| last.max(at));
            self.last_end = Some(end);
            let mut state = self.inner.lock();
            state.lanes.finish(Finished { token, start, end, result, skipped: skip, ticket });
            drive::announce(self.inner, state);
        }
    }
}

impl Transfers for Batch<'_> {
    fn next(&mut self) -> Option<(u64, Transfer)> {
        loop {
            let (task, transfer) = self.inner.lock().lanes.start_transfer(self.lane)?;
            let (key, skip) = (task.token.seq, task.skip);
            let result = skip.then_some(Ok(()));
            self.started.insert(key, UnderWay { task, at: Instant::now(), result });
            if !skip {
                return Some((key, transfer));
            }
            self.finish();
        }
    }

    fn ended(&mut self, key: u64, result: Result<(), StoreError>) {
        if let Some(transfer) = self.started.get_mut(&key) {
            transfer.result = Some(result);
        }
        self.finish();
    }
}
