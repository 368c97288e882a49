//! Who runs the queues: a thread for each lane, or whoever waits, in an order drawn from a seed. Beside a device with
//! streams, a lane's thread puts work on its stream, and a second one waits for it to complete.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lazy_model::{Bytes, BytesPerSecond, Lane};
use smallvec::SmallVec;

use crate::batch;
use crate::clock::{LANES, Token, slot};
use crate::device::{Device, Mark};
use crate::error::{BoxError, StoreError};
use crate::lanes::{Finished, Issued, Kind, Started};
use crate::store::{Inner, State};
use crate::work::{Job, Kept};

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
    let mut state = inner.lock();
    while let Some(ready) = wait_for(inner, state, lane, Role::Starter) {
        state = match batch::operation(inner, &ready, lane) {
            Some((spill, op)) => {
                drop(ready);
                batch::run(inner, lane, spill, op);
                inner.lock()
            }
            None => start_next(inner, ready, lane),
        };
    }
}

fn complete_all(inner: &Inner, device: &dyn Device, lane: Lane) {
    let _ = device.bind();
    let mut state = inner.lock();
    while let Some(ready) = wait_for(inner, state, lane, Role::Completer) {
        state = complete_next(inner, ready, device, lane);
    }
}

/// The two threads of a lane.
#[derive(Clone, Copy)]
enum Role {
    Starter,
    Completer,
}

impl Role {
    fn has_work(self, state: &State, lane: Lane) -> bool {
        match self {
            Role::Starter => state.lanes.ready(lane),
            Role::Completer => state.lanes.has_in_flight(lane),
        }
    }
}

/// What somebody waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Target {
    /// Everything submitted has completed.
    Idle,
    /// A task has completed.
    Done(Token),
    /// A task is on its stream; a host task, that it has completed.
    Issued(Token),
}

impl Target {
    fn reached(self, state: &State) -> bool {
        match self {
            Target::Idle => state.lanes.idle(),
            Target::Done(token) => state.lanes.is_done(token),
            Target::Issued(token) => state.lanes.is_issued(token),
        }
    }
}

/// Where the threads of a store sleep. Each is woken for what concerns it alone: with thousands of small tasks a second,
/// waking everybody for everything is what would take the time.
#[derive(Default)]
pub(crate) struct Signals {
    starters: [Condvar; LANES],
    completers: [Condvar; LANES],
    waiters: Condvar,
}

/// Who sleeps.
#[derive(Default)]
pub(crate) struct Sleepers {
    starters: [bool; LANES],
    completers: [bool; LANES],
    waiters: SmallVec<[Target; 4]>,
}

impl Sleepers {
    fn thread(&mut self, role: Role, lane: Lane) -> &mut bool {
        match role {
            Role::Starter => &mut self.starters[slot(lane)],
            Role::Completer => &mut self.completers[slot(lane)],
        }
    }
}

impl Signals {
    fn thread(&self, role: Role, lane: Lane) -> &Condvar {
        match role {
            Role::Starter => &self.starters[slot(lane)],
            Role::Completer => &self.completers[slot(lane)],
        }
    }
}

/// Who is to be woken, once the state is given back.
#[derive(Default)]
struct Wakes {
    threads: [Option<(Role, Lane)>; 2 * LANES],
    waiters: bool,
}

impl Wakes {
    /// Those who have something to do now.
    fn of(state: &mut State) -> Wakes {
        let mut wakes = Wakes::default();
        let threads =
            Lane::ALL.into_iter().flat_map(|lane| [Role::Starter, Role::Completer].map(|role| (role, lane)));
        for (wake, (role, lane)) in wakes.threads.iter_mut().zip(threads) {
            if *state.sleepers.thread(role, lane) && (state.closing || role.has_work(state, lane)) {
                // Said once: it is awake from here on, though it may not have the lock yet.
                *state.sleepers.thread(role, lane) = false;
                *wake = Some((role, lane));
            }
        }
        wakes.waiters = state.sleepers.waiters.iter().any(|target| target.reached(state));
        wakes
    }

    fn is_empty(&self) -> bool {
        !self.waiters && self.threads.iter().all(Option::is_none)
    }

    fn notify(self, signals: &Signals) {
        for (role, lane) in self.threads.into_iter().flatten() {
            signals.thread(role, lane).notify_one();
        }
        if self.waiters {
            signals.waiters.notify_all();
        }
    }
}

/// Gives the state back, then wakes those who have something to do now.
pub(crate) fn announce(inner: &Inner, mut state: MutexGuard<'_, State>) {
    let wakes = Wakes::of(&mut state);
    drop(state);
    wakes.notify(&inner.signals);
}

/// [`announce`], and takes the state again; where there is nobody to wake, without giving it back.
fn announce_and_go_on<'a>(inner: &'a Inner, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
    let wakes = Wakes::of(&mut state);
    if wakes.is_empty() {
        return state;
    }
    drop(state);
    wakes.notify(&inner.signals);
    inner.lock()
}

/// Waits until there is something to do on a lane; nothing where there never will be.
fn wait_for<'a>(
    inner: &'a Inner,
    mut state: MutexGuard<'a, State>,
    lane: Lane,
    role: Role,
) -> Option<MutexGuard<'a, State>> {
    loop {
        if role.has_work(&state, lane) {
            return Some(state);
        }
        if state.closing && state.lanes.lane_idle(lane) {
            return None;
        }
        *state.sleepers.thread(role, lane) = true;
        let woken = inner.signals.thread(role, lane).wait(state);
        state = woken.unwrap_or_else(PoisonError::into_inner);
        *state.sleepers.thread(role, lane) = false;
    }
}

/// Sleeps until `target` is reached.
fn sleep_until<'a>(inner: &'a Inner, target: Target) -> MutexGuard<'a, State> {
    let mut state = inner.lock();
    while !target.reached(&state) {
        state.sleepers.waiters.push(target);
        state = inner.signals.waiters.wait(state).unwrap_or_else(PoisonError::into_inner);
        // Any entry like ours will do: they are the same to whoever looks.
        if let Some(ours) = state.sleepers.waiters.iter().position(|other| *other == target) {
            state.sleepers.waiters.swap_remove(ours);
        }
    }
    state
}

/// Takes the next task of a lane, if it can be started, and runs it or puts it on its stream.
fn start_next<'a>(inner: &'a Inner, mut state: MutexGuard<'a, State>, lane: Lane) -> MutexGuard<'a, State> {
    let Some(task) = state.lanes.start(lane) else { return state };
    let timed = state.lanes.base().is_some();
    drop(state);
    let state = match (task.kind, &inner.device) {
        (Kind::Stream, Some(device)) => {
            let issued = issue(inner, device, task, timed);
            let mut state = inner.lock();
            state.lanes.issue(issued);
            state
        }
        _ => {
            let finished = run(inner, task);
            let mut state = inner.lock();
            state.lanes.finish(finished);
            state
        }
    };
    announce_and_go_on(inner, state)
}

/// Waits for the oldest task in flight on a lane's stream, if there is one.
fn complete_next<'a>(
    inner: &'a Inner,
    state: MutexGuard<'a, State>,
    device: &dyn Device,
    lane: Lane,
) -> MutexGuard<'a, State> {
    let Some((begin, end)) = state.lanes.oldest_in_flight(lane) else { return state };
    let base = state.lanes.base();
    drop(state);
    let (result, times) = completion(device, base, begin.as_deref(), end.as_deref());
    let now = Instant::now();
    drop((begin, end));
    let mut state = inner.lock();
    let Some(Issued { token, name, at, skipped, ticket, kept, .. }) = state.lanes.take_in_flight(lane) else {
        return state;
    };
    let result = result.map_err(|source| StoreError::Task { task: name.to_string(), lane, source });
    let (start, end) = times.unwrap_or((at, now));
    state.lanes.finish(Finished { token, start, end, result, skipped, ticket });
    announce(inner, state);
    let _ = catch_unwind(AssertUnwindSafe(|| drop(kept)));
    inner.lock()
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
fn issue(inner: &Inner, device: &Arc<dyn Device>, task: Started, timed: bool) -> Issued {
    let Started { token, marks, spare: [spare_begin, spare_end], name, job, skip, ticket, .. } = task;
    let at = Instant::now();
    let kept = Kept::Nothing;
    let mut issued =
        Issued { token, name, begin: None, end: None, at, result: Ok(()), skipped: skip, ticket, kept };
    if skip {
        let _ = catch_unwind(AssertUnwindSafe(|| drop(job)));
        return issued;
    }
    let stream = device.stream(token.lane);
    let failed = |source| StoreError::Task { task: issued.name.to_string(), lane: token.lane, source };
    let place = |spare: Option<Arc<Mark>>| {
        let mark = Arc::clone(device).mark(stream)?;
        // One that somebody still waits for stays as it is.
        if let Some(mut spare) = spare
            && let Some(room) = Arc::get_mut(&mut spare)
        {
            *room = mark;
            return Ok::<_, BoxError>(spare);
        }
        Ok(Arc::new(mark))
    };
    let begun = device
        .bind()
        .and_then(|()| marks.iter().try_for_each(|mark| device.wait(stream, mark)))
        .and_then(|()| if timed { place(spare_begin).map(Some) } else { Ok(None) });
    let result = match begun {
        Ok(begin) => {
            issued.begin = begin;
            call(inner, &issued.name, token.lane, job).map(|kept| issued.kept = kept)
        }
        Err(source) => {
            let error = failed(source);
            let _ = catch_unwind(AssertUnwindSafe(|| drop(job)));
            Err(error)
        }
    };
    // Whatever the task put on the stream before it failed is waited for, too. It may have made another device current.
    let end = device.bind().and_then(|()| place(spare_end)).inspect_err(|_| device.drain(stream));
    issued.result = result.and_then(|()| {
        issued.end = Some(end.map_err(|source| StoreError::Task {
            task: issued.name.to_string(),
            lane: token.lane,
            source,
        })?);
        Ok(())
    });
    issued
}

/// Waits until `target` is reached; in the seeded order, by running tasks.
pub(crate) fn wait_until(inner: &Inner, target: Target) -> MutexGuard<'_, State> {
    let Some(seeded) = &inner.seeded else { return sleep_until(inner, target) };
    let mut random = seeded.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let state = inner.lock();
        let ready = choices(inner, &state);
        // Waits point to earlier submissions only, so something is ready until everything is done.
        if target.reached(&state) || ready.is_empty() {
            return state;
        }
        match (ready[random.below(ready.len() as u64) as usize], &inner.device) {
            (Choice::Complete(lane), Some(device)) => drop(complete_next(inner, state, &**device, lane)),
            (Choice::Advance, Some(device)) => {
                drop(state);
                device.advance();
            }
            (Choice::Start(lane), _) => drop(start_next(inner, state, lane)),
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
    let Started { token, name, bytes, job, skip, ticket, .. } = task;
    let start = Instant::now();
    let result = if skip {
        // What a closure owns may panic as it goes; the lane has to outlive that.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(job)));
        Ok(())
    } else {
        let result = call(inner, &name, token.lane, job).map(drop);
        slow_down(inner.limit(token.lane), bytes, start);
        result
    };
    Finished { token, start, end: Instant::now(), result, skipped: skip, ticket }
}

/// Calls a task; a panic is an error that names it.
fn call(inner: &Inner, name: &str, lane: Lane, job: Job) -> Result<Kept, StoreError> {
    let task = || name.to_owned();
    match catch_unwind(AssertUnwindSafe(|| job.run(inner, lane))) {
        Ok(Ok(kept)) => Ok(kept),
        Ok(Err(source)) => Err(StoreError::Task { task: task(), lane, source }),
        Err(panic) => Err(StoreError::Panicked { task: task(), lane, message: message(&*panic) }),
    }
}

/// How much later than asked a sleep ends, commonly.
const LATE: Duration = Duration::from_micros(150);

/// Waits until `bytes` could have passed at the limit: asleep, but for the end, which would come late.
fn slow_down(limit: Option<BytesPerSecond>, bytes: Bytes, start: Instant) {
    let Some(limit) = limit else { return };
    let Ok(least) = Duration::try_from_secs_f64(limit.time(bytes).get()) else { return };
    if let Some(asleep) = least.checked_sub(start.elapsed() + LATE) {
        std::thread::sleep(asleep);
    }
    while start.elapsed() < least {
        // Where all cores are busy, to yield is to be late by whatever time the others are given.
        std::hint::spin_loop();
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
