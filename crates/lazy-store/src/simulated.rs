//! A device with streams that runs on the host, for tests: whoever waits runs its operations one at a time, and draws the
//! stream of the next one from a seed. An operation that a stream should have waited for shows as wrong bytes, never as a
//! race, since one thread runs everything.
//!
//! One of the few modules with `unsafe`: streams hold addresses, as a GPU's do.

use std::collections::{HashSet, VecDeque};
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lazy_model::{Bytes, Lane};

use crate::clock::{LANES, slot};
use crate::device::{Device, Mark, Pin, Stream};
use crate::error::{BoxError, StoreError};
use crate::memory::{Access, Mapping, StreamAccess, View};
use crate::random::Random;
use crate::store::{Event, Store, Submission};

/// What a stream does next.
enum Operation {
    Wait(usize),
    Mark(usize),
    Copy { from: View, to: View },
    Fill { at: View, value: u8 },
    Call(Box<dyn FnOnce() -> Result<(), BoxError> + Send>),
}

pub(crate) struct Simulated {
    hbm: Mapping,
    state: Mutex<State>,
}

struct State {
    streams: Vec<VecDeque<Operation>>,
    /// Marks made and not yet reached, by number.
    ahead: HashSet<usize>,
    last_mark: usize,
    failure: Option<BoxError>,
    random: Random,
}

impl Simulated {
    pub(crate) fn new(hbm: Bytes, seed: u64) -> Result<Self, StoreError> {
        let streams = std::iter::repeat_with(VecDeque::new).take(LANES).collect();
        let random = Random::new(seed ^ 0x5eed);
        let state = State { streams, ahead: HashSet::new(), last_mark: 0, failure: None, random };
        Ok(Simulated { hbm: Mapping::new("the hbm arena", hbm)?, state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, stream: Stream, operation: Operation) {
        // The handles count from 1.
        if let Some(queue) = self.lock().streams.get_mut(stream.0.addr().wrapping_sub(1)) {
            queue.push_back(operation);
        }
    }
}

impl State {
    fn ready(&self) -> Vec<usize> {
        let can_go = |queue: &VecDeque<Operation>| match queue.front() {
            None => false,
            Some(Operation::Wait(mark)) => !self.ahead.contains(mark),
            Some(_) => true,
        };
        (0..self.streams.len()).filter(|&i| can_go(&self.streams[i])).collect()
    }
}

impl Device for Simulated {
    fn bind(&self) -> Result<(), BoxError> {
        Ok(())
    }

    fn hbm(&self) -> *mut u8 {
        self.hbm.view(0, 0).map_or(std::ptr::null_mut(), View::start)
    }

    unsafe fn pin(self: Arc<Self>, _start: *mut u8, _len: usize) -> Result<Pin, BoxError> {
        Ok(Box::new(()))
    }

    fn stream(&self, lane: Lane) -> Stream {
        Stream(std::ptr::without_provenance_mut(slot(lane) + 1))
    }

    fn wait(&self, stream: Stream, mark: &Mark) -> Result<(), BoxError> {
        self.push(stream, Operation::Wait(mark.handle.addr()));
        Ok(())
    }

    fn mark(self: Arc<Self>, stream: Stream) -> Result<Mark, BoxError> {
        let number = {
            let mut state = self.lock();
            state.last_mark += 1;
            let number = state.last_mark;
            state.ahead.insert(number);
            number
        };
        self.push(stream, Operation::Mark(number));
        let handle = std::ptr::without_provenance_mut(number);
        Ok(Mark { device: Arc::clone(&self) as Arc<dyn Device>, handle })
    }

    fn now(self: Arc<Self>) -> Result<Mark, BoxError> {
        Err("a simulated device has no clock".into())
    }

    fn synchronize(&self, mark: &Mark) -> Result<(), BoxError> {
        while !self.is_reached(mark) {
            if !self.advance() {
                return Err("a stream waits for what never comes".into());
            }
        }
        self.lock().failure.take().map_or(Ok(()), Err)
    }

    fn drain(&self, stream: Stream) {
        let index = stream.0.addr().wrapping_sub(1);
        while self.lock().streams.get(index).is_some_and(|queue| !queue.is_empty()) && self.advance() {}
    }

    fn seconds(&self, _from: &Mark, _to: &Mark) -> Result<f64, BoxError> {
        Err("a simulated device has no clock".into())
    }

    unsafe fn copy(&self, stream: Stream, from: *const u8, to: *mut u8, len: usize) -> Result<(), BoxError> {
        let (from, to) = (View::new(from.cast_mut(), len), View::new(to, len));
        self.push(stream, Operation::Copy { from, to });
        Ok(())
    }

    unsafe fn fill(&self, stream: Stream, start: *mut u8, len: usize, value: u8) -> Result<(), BoxError> {
        self.push(stream, Operation::Fill { at: View::new(start, len), value });
        Ok(())
    }

    fn prepare_checksums(&self) -> Result<(), BoxError> {
        Ok(())
    }

    unsafe fn checksums(
        &self,
        _stream: Stream,
        start: *const u8,
        len: usize,
        piece: usize,
    ) -> Result<Vec<u32>, BoxError> {
        // SAFETY: memory of the arena, by this function's contract.
        let bytes = unsafe { std::slice::from_raw_parts(start, len) };
        Ok(bytes.chunks(piece).map(crc32c::crc32c).collect())
    }

    fn forget(&self, _handle: *mut c_void) {}

    fn is_reached(&self, mark: &Mark) -> bool {
        !self.lock().ahead.contains(&mark.handle.addr())
    }

    fn can_advance(&self) -> bool {
        !self.lock().ready().is_empty()
    }

    fn advance(&self) -> bool {
        let mut state = self.lock();
        let ready = state.ready();
        let Some(&which) = ready.get(state.random.below(ready.len() as u64) as usize) else { return false };
        let Some(operation) = state.streams[which].pop_front() else { return false };
        match operation {
            Operation::Wait(_) => {}
            Operation::Mark(mark) => {
                state.ahead.remove(&mark);
            }
            // SAFETY: by the contract of `copy`, both ranges are valid; one thread runs all operations. They may overlap where
            // a wait was left out.
            Operation::Copy { from, to } => unsafe { std::ptr::copy(from.start(), to.start(), from.len()) },
            // SAFETY: by the contract of `fill`.
            Operation::Fill { at, value } => unsafe { std::ptr::write_bytes(at.start(), value, at.len()) },
            Operation::Call(call) => {
                drop(state);
                if let Err(error) = call() {
                    self.lock().failure.get_or_insert(error);
                }
            }
        }
        true
    }
}

impl Store {
    /// Queues a task that does its work on the host device in the call, and on a simulated one as an operation of its stream.
    ///
    /// # Errors
    ///
    /// As for [`Store::submit`].
    pub fn compute(
        &self,
        task: Submission<'_>,
        run: impl FnOnce(&mut Access<'_>) -> Result<(), BoxError> + Send + 'static,
    ) -> Result<Event, StoreError> {
        let Some(simulated) = self.inner().simulated.clone() else { return self.submit(task, run) };
        self.launch(task, move |cx: &StreamAccess<'_>| {
            let (reads, writes) = (cx.reads.to_vec(), cx.writes.to_vec());
            let call = move || {
                // SAFETY: the arenas live until the store has run everything; the streams are ordered as `Access::new`
                // wants them, and one thread runs all operations.
                let mut access = unsafe { Access::new(&reads, &writes) };
                run(&mut access)
            };
            simulated.push(cx.stream(), Operation::Call(Box::new(call)));
            Ok(())
        })
    }
}
