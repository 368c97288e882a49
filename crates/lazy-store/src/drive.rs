//! Who runs the queues: a thread for each lane, or whoever waits, in an order drawn from a seed. Beside a device with
//! streams, a lane's thread puts work on its stream, and a second one waits for it to complete.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lazy_model::{Bytes, BytesPerSecond, Lane};

use crate::batch;
use crate::device::{Device, Mark};
use crate::error::{BoxError, StoreError};
use crate::lanes::{Finished, Issued, Kept, Kind, Started, Work};
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

/// Starts the thread that sees the stream tasks of one lane complete.
pub(crate) fn spawn_completer(
    inner: &Arc<Inner>,
    device: Arc<dyn Device>,
    lane: Lane,
) -> Result<JoinHandle<()>, StoreError> {
    let name = format!("lazy {lane} done");
    let inner = Arc::clone(inner);
    std::thread::Builder::new()
        .name(name.clone())
        .spawn(move || complete_all(&inner, &*device, lane))
        .map_err(|e| StoreError::Worker { name, reason: e.to_string() })
}

fn serve(inner: &Inner, lane: Lane) {
    // A thread that cannot use the device finds that out with its first task, which reports it.
    let _ = inner.device.as_ref().map(|device| device.bind());
    while wait_for(inner, lane, |state| state.lanes.ready(lane)) {
        if !batch::run(inner, lane) {
            start_next(inner, lane);
        }
    }
}

fn complete_all(inner: &Inner, device: &dyn Device, lane: Lane) {
    let _ = device.bind();
    while wait_for(inner, lane, |state| state.lanes.oldest_in_flight(lane).is_some()) {
        complete_next(inner, device, lane);
    }
}

/// Waits until there is something to do on a lane; `false` where there never will be.
fn wait_for(inner: &Inner, lane: Lane, something: impl Fn(&State) -> bool) -> bool {
    let idle = |state: &mut State| !(something(state) || state.closing && state.lanes.lane_idle(lane));
    let state = inner.changed.wait_while(inner.lock(), idle).unwrap_or_else(PoisonError::into_inner);
    something(&state)
}

/// Takes the next task of a lane, if it can be started, and runs it or puts it on its stream.
fn start_next(inner: &Inner, lane: Lane) {
    let mut state = inner.lock();
    let Some(task) = state.lanes.start(lane) else { return };
    let timed = state.lanes.base().is_some();
    drop(state);
    match (task.kind, &inner.device) {
        (Kind::Stream, Some(device)) => {
            let issued = issue(device, task, timed);
            inner.lock().lanes.issue(issued);
        }
        _ => {
            let finished = run(inner, task);
            inner.lock().lanes.finish(finished);
        }
    }
    inner.changed.notify_all();
}

/// Waits for the oldest task in flight on a lane's stream, if there is one.
fn complete_next(inner: &Inner, device: &dyn Device, lane: Lane) {
    let state = inner.lock();
    let Some((begin, end)) = state.lanes.oldest_in_flight(lane) else { return };
    let base = state.lanes.base();
    drop(state);
    let (result, times) = completion(device, base, begin.as_deref(), end.as_deref());
    let now = Instant::now();
    let mut state = inner.lock();
    let Some(Issued { token, name, at, skipped, ticket, kept, .. }) = state.lanes.take_in_flight(lane) else {
        return;
    };
    let result = result.map_err(|source| StoreError::Task { task: name, lane, source });
    let (start, end) = times.unwrap_or((at, now));
    state.lanes.finish(Finished { token, start, end, result, skipped, ticket });
    drop(state);
    inner.changed.notify_all();
    let _ = catch_unwind(AssertUnwindSafe(|| drop(kept)));
}

/// Waits for the end of a task, and says when it ran.
fn completion(
    device: &dyn Device,
    base: Option<(Arc<Mark>, Instant)>,
    begin: Option<&Mark>,
    end: Option<&Mark>,
) -> (Result<(), BoxError>, Option<(Instant, Instant)>) {
    let wait_and_time = || {
        let Some(end) = end else { return Ok(None) };
        device.synchronize(end)?;
        let time = |mark: &Mark| {
            let (base, instant) = base.as_ref()?;
            let since = device.seconds(base, mark).ok()?;
            instant.checked_add(Duration::try_from_secs_f64(since).ok()?)
        };
        Ok(begin.and_then(|begin| Some((time(begin)?, time(end)?))))
    };
    // A thread that ended here would leave everybody waiting.
    match catch_unwind(AssertUnwindSafe(wait_and_time)) {
        Ok(Ok(times)) => (Ok(()), times),
        Ok(Err(error)) => (Err(error), None),
        Err(panic) => (Err(message(&*panic).into()), None),
    }
}

/// Puts one task on its stream, outside the lock.
fn issue(device: &Arc<dyn Device>, task: Started, timed: bool) -> Issued {
    let Started { token, marks, name, work, skip, ticket, .. } = task;
    let at = Instant::now();
    let mut issued =
        Issued { token, name, begin: None, end: None, at, result: Ok(()), skipped: skip, ticket, kept: None };
    if skip {
        let _ = catch_unwind(AssertUnwindSafe(|| drop(work)));
        return issued;
    }
    let stream = device.stream(token.lane);
    let failed = |source| StoreError::Task { task: issued.name.clone(), lane: token.lane, source };
    let place = || Ok::<_, BoxError>(Arc::new(Arc::clone(device).mark(stream)?));
    let begun = device
        .bind()
        .and_then(|()| marks.iter().try_for_each(|mark| device.wait(stream, mark)))
        .and_then(|()| if timed { place().map(Some) } else { Ok(None) });
    let result = match begun {
        Ok(begin) => {
            issued.begin = begin;
            call(&issued.name, token.lane, work).map(|kept| issued.kept = kept)
        }
        Err(source) => {
            let error = failed(source);
            let _ = catch_unwind(AssertUnwindSafe(|| drop(work)));
            Err(error)
        }
    };
    // Whatever the task put on the stream before it failed is waited for, too. It may have made another device current.
    let end = device.bind().and_then(|()| place()).inspect_err(|_| device.drain(stream));
    issued.result = result.and_then(|()| {
        issued.end = Some(end.map_err(|source| StoreError::Task {
            task: issued.name.clone(),
            lane: token.lane,
            source,
        })?);
        Ok(())
    });
    issued
}

/// Waits until `reached` holds; in the seeded order, by running tasks.
pub(crate) fn wait_until<'a>(inner: &'a Inner, reached: impl Fn(&State) -> bool) -> MutexGuard<'a, State> {
    let Some(seeded) = &inner.seeded else {
        let state = inner.lock();
        return inner.changed.wait_while(state, |s| !reached(s)).unwrap_or_else(PoisonError::into_inner);
    };
    let mut random = seeded.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let state = inner.lock();
        let ready = choices(inner, &state);
        // Waits point to earlier submissions only, so something is ready until everything is done.
        if reached(&state) || ready.is_empty() {
            return state;
        }
        drop(state);
        match (ready[random.below(ready.len() as u64) as usize], &inner.device) {
            (Choice::Complete(lane), Some(device)) => complete_next(inner, &**device, lane),
            (Choice::Advance, Some(device)) => {
                device.advance();
            }
            (Choice::Start(lane), _) => start_next(inner, lane),
            (_, None) => {}
        }
    }
}

/// What whoever waits in the seeded order can do next.
#[derive(Clone, Copy)]
enum Choice {
    /// Start the next task of a lane.
    Start(Lane),
    /// See the oldest task in flight on a lane's stream completed.
    Complete(Lane),
    /// Run an operation of a simulated device.
    Advance,
}

fn choices(inner: &Inner, state: &State) -> Vec<Choice> {
    let ready = Lane::ALL.into_iter().filter(|&lane| state.lanes.ready(lane));
    let mut choices: Vec<Choice> = ready.map(Choice::Start).collect();
    if let Some(device) = &inner.device {
        let done = |lane: &Lane| {
            let end = state.lanes.oldest_in_flight(*lane);
            end.is_some_and(|(_, end)| end.is_none_or(|end| device.is_reached(&end)))
        };
        choices.extend(Lane::ALL.into_iter().filter(done).map(Choice::Complete));
        choices.extend(device.can_advance().then_some(Choice::Advance));
    }
    choices
}

/// Runs one task, outside the lock.
fn run(inner: &Inner, task: Started) -> Finished {
    let Started { token, name, bytes, work, skip, ticket, .. } = task;
    let start = Instant::now();
    let result = if skip {
        // What a closure owns may panic as it goes; the lane has to outlive that.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(work)));
        Ok(())
    } else {
        let result = call(&name, token.lane, work).map(drop);
        slow_down(inner.limit(token.lane), bytes, start);
        result
    };
    Finished { token, start, end: Instant::now(), result, skipped: skip, ticket }
}

/// Calls a task; a panic is an error that names it.
fn call(name: &str, lane: Lane, work: Work) -> Result<Kept, StoreError> {
    let task = || name.to_owned();
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(kept)) => Ok(kept),
        Ok(Err(source)) => Err(StoreError::Task { task: task(), lane, source }),
        Err(panic) => Err(StoreError::Panicked { task: task(), lane, message: message(&*panic) }),
    }
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
