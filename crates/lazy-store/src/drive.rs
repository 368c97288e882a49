//! Who runs the queues: a thread for each lane, or whoever waits, in an order drawn from a seed.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lazy_model::{Bytes, BytesPerSecond, Lane};

use crate::error::StoreError;
use crate::lanes::{Finished, Started};
use crate::store::{Inner, State};

/// Starts the thread of one lane.
pub(crate) fn spawn(inner: &Arc<Inner>, lane: Lane) -> Result<JoinHandle<()>, StoreError> {
    let name = format!("lazy {lane}");
    let inner = Arc::clone(inner);
    std::thread::Builder::new()
        .name(name.clone())
        .spawn(move || serve(&inner, lane))
        .map_err(|e| StoreError::Worker { name, reason: e.to_string() })
}

fn serve(inner: &Inner, lane: Lane) {
    let mut state = inner.lock();
    loop {
        if let Some(task) = state.lanes.start(lane) {
            drop(state);
            let finished = run(inner, task);
            state = inner.lock();
            state.lanes.finish(finished);
            inner.changed.notify_all();
        } else if state.closing && state.lanes.lane_idle(lane) {
            return;
        } else {
            state = inner.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Waits until `reached` holds; in the seeded order, by running tasks.
pub(crate) fn wait_until<'a>(inner: &'a Inner, reached: impl Fn(&State) -> bool) -> MutexGuard<'a, State> {
    let Some(seeded) = &inner.seeded else {
        let state = inner.lock();
        return inner.changed.wait_while(state, |s| !reached(s)).unwrap_or_else(PoisonError::into_inner);
    };
    let mut random = seeded.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let mut state = inner.lock();
        let ready: Vec<Lane> = Lane::ALL.into_iter().filter(|&lane| state.lanes.ready(lane)).collect();
        // Waits point to earlier submissions only, so something is ready until everything is done.
        if reached(&state) || ready.is_empty() {
            return state;
        }
        let lane = ready[random.below(ready.len() as u64) as usize];
        let Some(task) = state.lanes.start(lane) else { continue };
        drop(state);
        let finished = run(inner, task);
        inner.lock().lanes.finish(finished);
    }
}

/// Runs one task, outside the lock.
fn run(inner: &Inner, task: Started) -> Finished {
    let Started { token, name, bytes, work, skip, ticket } = task;
    let start = Instant::now();
    let result = if skip {
        // What a closure owns may panic as it goes; the lane has to outlive that.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(work)));
        Ok(())
    } else {
        let result = match catch_unwind(AssertUnwindSafe(work)) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(source)) => Err(StoreError::Task { task: name, lane: token.lane, source }),
            Err(panic) => {
                Err(StoreError::Panicked { task: name, lane: token.lane, message: message(&*panic) })
            }
        };
        slow_down(inner.limit(token.lane), bytes, start);
        result
    };
    Finished { token, start, end: Instant::now(), result, skipped: skip, ticket }
}

/// Sleeps until `bytes` could have passed at the limit.
fn slow_down(limit: Option<BytesPerSecond>, bytes: Bytes, start: Instant) {
    let Some(limit) = limit else { return };
    if let Ok(least) = Duration::try_from_secs_f64(limit.time(bytes).get()) {
        std::thread::sleep(least.saturating_sub(start.elapsed()));
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    if let Some(text) = panic.downcast_ref::<&str>() {
        (*text).to_owned()
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text.clone()
    } else {
        "(no message)".to_owned()
    }
}
