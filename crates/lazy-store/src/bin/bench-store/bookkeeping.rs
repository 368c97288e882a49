//! Reserving and releasing extents: bookkeeping that a step does hundreds of times, and that moves no byte.

use std::collections::VecDeque;
use std::sync::mpsc;
use std::time::Instant;

use lazy_store::{Bytes, Event, Extent, Lane, Store, StoreOptions, Submission, Tier};
use serde_json::Value;

use crate::Outcome;
use crate::rows::alone;
use crate::stats::Goal;

/// Extents that live at once: two for each layer of a large model, and more.
const LIVE: usize = 200;
/// Extents released, and then reserved again, in a row.
const BATCH: usize = 50;
/// Batches in a round.
const BATCHES: usize = 100;
/// Microseconds that each call may take.
const LIMIT: Goal = Goal::AtMost(2.0);

/// How extents get their places.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Places {
    FirstFit,
    Planned,
}

/// Extents of the sizes of a step's buffers, in the order of their release.
struct Extents {
    store: Store,
    live: VecDeque<Extent>,
    freed: Vec<(u64, Bytes)>,
}

impl Extents {
    fn new() -> Outcome<Extents> {
        // A few MiB each, no two neighbours alike: boundaries, internals, gradients.
        let sizes: Vec<Bytes> = (0..LIVE as u64).map(|i| Bytes((1 << 20) + (i * 37 % 64) * 98_304)).collect();
        let total: u64 = sizes.iter().map(|size| size.get()).sum();
        // Room to spare, as a first fit needs; no page of it is touched.
        let options = StoreOptions { hbm: Bytes(2 * total), ..StoreOptions::default() };
        let store = Store::open(options).map_err(|error| error.to_string())?;
        let live = sizes.iter().map(|&size| store.reserve(Tier::Hbm, size));
        let live = live.collect::<Result<_, _>>().map_err(|error| error.to_string())?;
        Ok(Extents { store, live, freed: Vec::new() })
    }

    /// Releases a batch of the oldest; microseconds each.
    fn release(&mut self) -> f64 {
        self.freed = self.live.iter().take(BATCH).map(|extent| (extent.offset(), extent.bytes())).collect();
        let start = Instant::now();
        for extent in self.live.drain(..BATCH) {
            self.store.release(extent);
        }
        start.elapsed().as_secs_f64() * 1e6 / BATCH as f64
    }

    /// Reserves as many of the same sizes; microseconds each.
    fn reserve(&mut self, places: Places) -> Outcome<f64> {
        let start = Instant::now();
        for (offset, bytes) in self.freed.drain(..) {
            let reserved = match places {
                Places::FirstFit => self.store.reserve(Tier::Hbm, bytes),
                Places::Planned => self.store.reserve_at(Tier::Hbm, offset, bytes),
            };
            self.live.push_back(reserved.map_err(|error| error.to_string())?);
        }
        Ok(start.elapsed().as_secs_f64() * 1e6 / BATCH as f64)
    }

    /// A round: mean microseconds of a release and of a reservation.
    fn round(&mut self, places: Places) -> Outcome<(f64, f64)> {
        let (mut releases, mut reservations) = (0.0, 0.0);
        for _ in 0..BATCHES {
            releases += self.release();
            reservations += self.reserve(places)?;
        }
        Ok((releases / BATCHES as f64, reservations / BATCHES as f64))
    }

    /// The same while every extent has a task that has not run yet, as where a whole step is submitted ahead.
    fn pending_round(&mut self) -> Outcome<(f64, f64)> {
        let (gate, opened) = mpsc::channel::<()>();
        let hold = Submission::new(Lane::Compute, "hold");
        let held = move |_: &mut lazy_store::Access<'_>| Ok(opened.recv()?);
        self.store.submit(hold, held).map_err(|error| error.to_string())?;
        let submit = |store: &Store, extent: &Extent| -> Outcome<Event> {
            let task = Submission { writes: &[extent], ..Submission::new(Lane::Compute, "use") };
            store.submit(task, |_| Ok(())).map_err(|error| error.to_string())
        };
        for extent in &self.live {
            submit(&self.store, extent)?;
        }
        let (mut releases, mut reservations) = (0.0, 0.0);
        let batches = LIVE / BATCH;
        for _ in 0..batches {
            releases += self.release();
            reservations += self.reserve(Places::Planned)?;
            for extent in self.live.iter().skip(LIVE - BATCH) {
                submit(&self.store, extent)?;
            }
        }
        gate.send(()).map_err(|error| error.to_string())?;
        self.store.synchronize().map_err(|error| error.to_string())?;
        Ok((releases / batches as f64, reservations / batches as f64))
    }
}

/// Rows of `rounds` rounds each.
pub(crate) fn rows(rounds: usize) -> Outcome<Vec<Value>> {
    let mut extents = Extents::new()?;
    let mut rows = Vec::new();
    let mut row = |name: &str, measured: &[(f64, f64)]| {
        let releases: Vec<f64> = measured.iter().map(|times| times.0).collect();
        let reservations: Vec<f64> = measured.iter().map(|times| times.1).collect();
        rows.extend(alone(&format!("reserve, {name}"), "us", &reservations, Some(LIMIT)));
        rows.extend(alone(&format!("release, {name}"), "us", &releases, Some(LIMIT)));
    };
    let all = |round: &mut dyn FnMut() -> Outcome<(f64, f64)>| -> Outcome<Vec<(f64, f64)>> {
        // The first one meets cold caches.
        round()?;
        (0..rounds).map(|_| round()).collect()
    };
    let planned = all(&mut || extents.round(Places::Planned))?;
    row(&format!("{LIVE} live, at planned offsets"), &planned);
    let pending = all(&mut || extents.pending_round())?;
    row(&format!("{LIVE} live, all with tasks to run"), &pending);
    // Last, for it moves extents from where the others expect them.
    let first_fit = all(&mut || extents.round(Places::FirstFit))?;
    row(&format!("{LIVE} live, first fit"), &first_fit);
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_leaves_as_many_extents_as_it_found() {
        let mut extents = Extents::new().unwrap();
        let live = extents.store.live(Tier::Hbm);
        extents.round(Places::Planned).unwrap();
        extents.pending_round().unwrap();
        extents.round(Places::FirstFit).unwrap();
        assert_eq!(extents.live.len(), LIVE);
        assert_eq!(extents.store.live(Tier::Hbm), live);
    }
}
