//! A request queue that fails as it is told, around one that works.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use lazy_model::Bytes;
use rustix::io::Errno;

use super::super::{Done, Op, Queue, Request, Window};
use super::{Fault, Faults};
use crate::buffer::AlignedBuf;

/// Direct requests can be cut at multiples of this on all file systems that tests run on.
const BLOCK: usize = 4096;

pub(crate) struct FaultQueue {
    inner: Box<dyn Queue>,
    faults: Faults,
    /// Whether unflushed writes are kept track of.
    journaled: bool,
    started: HashMap<usize, Started>,
    /// Completions not yet reported.
    held: Vec<Done>,
}

/// What has to be known of a request when it completes.
struct Started {
    op: Op,
    fault: Option<Fault>,
    memory: Window,
    offset: u64,
    /// The file and its old bytes, for the journal.
    before: Option<(OwnedFd, Vec<u8>)>,
}

impl FaultQueue {
    pub(crate) fn new(inner: Box<dyn Queue>, faults: Faults, journaled: bool) -> Self {
        FaultQueue { inner, faults, journaled, started: HashMap::new(), held: Vec::new() }
    }

    fn before(&self, request: &Request<'_>) -> io::Result<Option<(OwnedFd, Vec<u8>)>> {
        if !self.journaled || request.op == Op::Read {
            return Ok(None);
        }
        let mut old = AlignedBuf::zeroed(Bytes(request.memory.len as u64)).map_err(io::Error::other)?;
        rustix::io::pread(request.file, old.as_mut_slice(), request.offset)?;
        Ok(Some((request.file.try_clone_to_owned()?, old.as_slice().to_vec())))
    }

    /// Changes a completion as decided, and notes what was really written.
    fn complete(&mut self, done: Done) -> Done {
        let Done { tag, result } = done;
        let Some(Started { op, fault, memory, offset, before }) = self.started.remove(&tag) else {
            return Done { tag, result };
        };
        let Ok(count) = result else { return Done { tag, result } };
        // SAFETY: the request moved `count` bytes there, and its memory is the queue's until this is reported.
        let bytes = unsafe { memory.part(0, count).bytes_mut() };
        let mut state = self.faults.lock();
        if let Some((file, mut old)) = before {
            old.truncate(count);
            if state.journal.wrote(file.as_fd(), offset, old, bytes.to_vec()).is_err() {
                return Done { tag, result: Err(Errno::IO.into()) };
            }
        }
        let result = match fault {
            Some(Fault::Short(most)) => Ok(count.min(most)),
            Some(Fault::FlipBit) if op == Op::Read && count > 0 => {
                bytes[state.random.below(count as u64) as usize] ^= 1 << state.random.below(8);
                Ok(count)
            }
            _ => Ok(count),
        };
        Done { tag, result }
    }
}

impl FaultQueue {
    /// Appends completions to `done`: all, or some in another order where that was asked for.
    fn report(&mut self, completed: Vec<Done>, done: &mut Vec<Done>) {
        for one in completed {
            let one = self.complete(one);
            self.held.push(one);
        }
        let mut state = self.faults.lock();
        let mut reported = self.held.len();
        if state.reorder && reported > 1 {
            for i in (1..reported).rev() {
                self.held.swap(i, state.random.below(i as u64 + 1) as usize);
            }
            reported = 1 + state.random.below(reported as u64) as usize;
        }
        done.extend(self.held.drain(..reported));
    }
}

impl Queue for FaultQueue {
    fn depth(&self) -> usize {
        self.inner.depth()
    }

    unsafe fn start(&mut self, mut request: Request<'_>) -> io::Result<()> {
        let Request { tag, op, memory, offset, .. } = request;
        let fault = self.faults.lock().decide(op, offset, memory.len)?;
        let failed = match fault {
            Some(Fault::Interrupted) => Some(Errno::INTR),
            Some(Fault::Again) => Some(Errno::AGAIN),
            Some(Fault::Io) => Some(Errno::IO),
            Some(Fault::NoSpace) => Some(Errno::NOSPC),
            _ => None,
        };
        if let Some(error) = failed {
            self.held.push(Done { tag, result: Err(error.into()) });
            return Ok(());
        }
        if let Some(Fault::Short(most)) = fault {
            // What is not reported is not moved either, as far as a direct request can be cut.
            request.memory = memory.part(0, most.max(1).next_multiple_of(BLOCK));
        }
        let before = self.before(&request)?;
        // SAFETY: the caller's promise is passed on: `wait` reports the completion after the inner queue has.
        unsafe { self.inner.start(request) }?;
        self.started.insert(tag, Started { op, fault, memory, offset, before });
        let mut state = self.faults.lock();
        state.most_in_flight = state.most_in_flight.max(self.started.len());
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        let mut completed = Vec::new();
        self.inner.poll(&mut completed)?;
        self.report(completed, done);
        Ok(())
    }

    fn wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        let mut completed = Vec::new();
        if !self.started.is_empty() {
            self.inner.wait(&mut completed)?;
        }
        self.report(completed, done);
        Ok(())
    }

    fn register_files(&mut self, files: &[BorrowedFd<'_>]) -> Result<(), String> {
        self.inner.register_files(files)
    }

    unsafe fn register_memory(&mut self, regions: &[Window]) -> Result<(), String> {
        // SAFETY: the caller's promise is passed on.
        unsafe { self.inner.register_memory(regions) }
    }
}
