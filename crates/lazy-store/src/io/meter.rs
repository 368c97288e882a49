//! What moved to or from one file in one direction, and how long that took.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lazy_model::{Bytes, Seconds};

use crate::options::Traffic;

/// Counts requests of one direction of one file.
#[derive(Default)]
pub(crate) struct Meter(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    in_flight: usize,
    /// When the first of the requests in flight started.
    since: Option<Instant>,
    bytes: u64,
    busy: Duration,
    /// `bytes` and `busy` when the step began.
    before_step: (u64, Duration),
}

impl Meter {
    pub(crate) fn started(&self) {
        let mut counts = self.lock();
        counts.in_flight += 1;
        counts.since.get_or_insert_with(Instant::now);
    }

    /// A request ended, with that many bytes moved.
    pub(crate) fn ended(&self, bytes: usize) {
        let mut counts = self.lock();
        counts.bytes += bytes as u64;
        counts.in_flight = counts.in_flight.saturating_sub(1);
        if counts.in_flight == 0 {
            counts.busy = counts.busy_so_far();
            counts.since = None;
        }
    }

    pub(crate) fn start_step(&self) {
        let mut counts = self.lock();
        counts.before_step = (counts.bytes, counts.busy_so_far());
    }

    /// Since the step began, and since the file was made.
    pub(crate) fn traffic(&self) -> (Traffic, Traffic) {
        let counts = self.lock();
        let traffic =
            |bytes, busy: Duration| Traffic { bytes: Bytes(bytes), busy: Seconds(busy.as_secs_f64()) };
        let (bytes, busy) = (counts.bytes, counts.busy_so_far());
        let (bytes_before, busy_before) = counts.before_step;
        (traffic(bytes - bytes_before, busy.saturating_sub(busy_before)), traffic(bytes, busy))
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counts {
    fn busy_so_far(&self) -> Duration {
        self.busy + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}
