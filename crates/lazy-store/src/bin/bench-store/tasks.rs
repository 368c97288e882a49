//! Submitting and running tasks that do nothing: what the store itself takes of a step.

use std::sync::Arc;
use std::time::Instant;

use lazy_store::{Access, BoxError, Bytes, Extent, Lane, Routine, Store, StoreOptions, Submission, Tier};
use serde_json::Value;

use crate::Outcome;
use crate::rows::alone;
use crate::stats::Goal;

/// Tasks of a round.
const TASKS: usize = 20_000;
/// Bytes of an extent.
const LEN: Bytes = Bytes(4096);
/// Microseconds that a task may take where none waits for another lane.
const LIMIT: Goal = Goal::AtMost(3.0);

struct Nothing;

impl Routine for Nothing {
    fn run(&self, _item: usize, _access: &mut Access<'_>) -> Result<(), BoxError> {
        Ok(())
    }
}

/// A store, and the work that it is given.
struct Tasks {
    store: Store,
    nothing: Arc<dyn Routine>,
    name: Arc<str>,
}

impl Tasks {
    fn new() -> Outcome<Tasks> {
        let options = StoreOptions { hbm: Bytes(1 << 20), host: Bytes(1 << 20), ..StoreOptions::default() };
        let store = Store::open(options).map_err(|error| error.to_string())?;
        Ok(Tasks { store, nothing: Arc::new(Nothing), name: "nothing".into() })
    }

    fn submit(&self, lane: Lane, reads: &[&Extent], writes: &[&Extent]) -> Outcome<()> {
        let task = Submission { reads, writes, ..Submission::new(lane, Arc::clone(&self.name)) };
        self.store.submit_routine(task, &self.nothing, 0).map_err(|error| error.to_string())?;
        Ok(())
    }

    fn reserve(&self, tier: Tier) -> Outcome<Extent> {
        self.store.reserve(tier, LEN).map_err(|error| error.to_string())
    }

    /// Every task writes an extent of its own, which is given back at once.
    fn one_lane(&self) -> Outcome<()> {
        for _ in 0..TASKS {
            let extent = self.reserve(Tier::Hbm)?;
            self.submit(Lane::Compute, &[], &[&extent])?;
        }
        Ok(())
    }

    /// Every task waits for the one before it, on the other lane.
    fn in_turn(&self) -> Outcome<()> {
        let (x, y) = (self.reserve(Tier::Hbm)?, self.reserve(Tier::Host)?);
        for _ in 0..TASKS / 2 {
            self.submit(Lane::Compute, &[], &[&x])?;
            self.submit(Lane::D2h, &[&x], &[&y])?;
        }
        Ok(())
    }

    /// Microseconds a task, from the first submission until all have run.
    fn round(&self, submit: impl Fn(&Tasks) -> Outcome<()>) -> Outcome<f64> {
        self.store.start_step();
        let start = Instant::now();
        submit(self)?;
        self.store.synchronize().map_err(|error| error.to_string())?;
        Ok(start.elapsed().as_secs_f64() * 1e6 / TASKS as f64)
    }
}

/// Rows of `rounds` rounds each.
pub(crate) fn rows(rounds: usize) -> Outcome<Vec<Value>> {
    let tasks = Tasks::new()?;
    let all = |submit: &dyn Fn(&Tasks) -> Outcome<()>| -> Outcome<Vec<f64>> {
        // The first one meets cold caches, and lists that have to grow.
        tasks.round(submit)?;
        (0..rounds).map(|_| tasks.round(submit)).collect()
    };
    let (one_lane, in_turn) = (all(&Tasks::one_lane)?, all(&Tasks::in_turn)?);
    let row = |name, times: &[f64], goal| alone(name, "us", times, goal);
    Ok([
        row("task with an extent of its own, one lane", &one_lane, Some(LIMIT)),
        row("task, two lanes that wait for each other", &in_turn, None),
    ]
    .into_iter()
    .flatten()
    .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_leaves_nothing_behind() {
        let tasks = Tasks::new().unwrap();
        tasks.one_lane().unwrap();
        tasks.round(Tasks::in_turn).unwrap();
        assert_eq!(tasks.store.live(Tier::Hbm), Bytes::ZERO);
        assert_eq!(tasks.store.take_spans().len(), TASKS);
    }
}
