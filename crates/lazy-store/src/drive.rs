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
use crate::lanes::{Finished, Issued, Kind, Started, Work};
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
    let Some(end) = state.lanes.oldest_in_flight(lane) else { return };
    let base = state.lanes.base();
    drop(state);
    let result = end.map_or(Ok(()), |end| device.synchronize(&end));
    let mut state = inner.lock();
    if let Some(issued) = state.lanes.take_in_flight(lane) {
        let finished = complete(device, issued, result, base);
        state.lanes.finish(finished);
    }
    drop(state);
    inner.changed.notify_all();
}

/// Puts one task on its stream, outside the lock.
fn issue(device: &Arc<dyn Device>, task: Started, timed: bool) -> Issued {
    let Started { token, marks, name, work, skip, ticket, .. } = task;
    let at = Instant::now();
    let mut issued =
        Issued { token, name, begin: None, end: None, at, result: Ok(()), skipped: skip, ticket };
    if skip {
        let _ = catch_unwind(AssertUnwindSafe(|| drop(work)));
        return issued;
    }
    let stream = device.stream(token.lane);
    let place = || Ok::<_, BoxError>(Arc::new(Arc::clone(device).mark(stream)?));
    let ordered = marks.iter().try_for_each(|mark| device.wait(stream, mark));
    issued.result = ordered
        .and_then(|()| {
            issued.begin = if timed { Some(place()?) } else { None };
            Ok(())
        })
        .map_err(|source| StoreError::Task { task: issued.name.clone(), lane: token.lane, source })
        .and_then(|()| call(&issued.name, token.lane, work));
    // Whatever the task put on the stream before it failed is waited for, too.
    match place() {
        Ok(end) => issued.end = Some(end),
        Err(source) if issued.result.is_ok() => {
            issued.result = Err(StoreError::Task { task: issued.name.clone(), lane: token.lane, source });
        }
        Err(_) => {}
    }
    issued
}

/// What is left of a stream task whose end was reached.
fn complete(
    device: &dyn Device,
    issued: Issued,
    reached: Result<(), BoxError>,
    base: Option<(Arc<Mark>, Instant)>,
) -> Finished {
    let Issued { token, name, begin, end, at, result, skipped, ticket } = issued;
    let result =
        result.and(reached.map_err(|source| StoreError::Task { task: name, lane: token.lane, source }));
    let now = Instant::now();
    let time = |mark: &Mark| {
        let (base, instant) = base.as_ref()?;
        let since = device.seconds(base, mark).ok()?;
        instant.checked_add(Duration::try_from_secs_f64(since).ok()?)
    };
    let timed = result.is_ok().then(|| Some((time(begin.as_deref()?)?, time(end.as_deref()?)?))).flatten();
    let (start, end) = timed.unwrap_or((at, now));
    Finished { token, start, end, result, skipped, ticket }
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
            end.is_some_and(|end| end.is_none_or(|end| device.is_reached(&end)))
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
        let result = call(&name, token.lane, work);
        slow_down(inner.limit(token.lane), bytes, start);
        result
    };
    Finished { token, start, end: Instant::now(), result, skipped: skip, ticket }
}

/// Calls a task; a panic is an error that names it.
fn call(name: &str, lane: Lane, work: Work) -> Result<(), StoreError> {
    let task = || name.to_owned();
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => Ok(()),
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
