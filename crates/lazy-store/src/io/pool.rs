//! Blocking calls on a pool of threads: positioned reads and writes, also where io_uring is refused, and cuFile's.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::{Done, Op, Queue, Request, Window};

/// Threads of one queue at most: with more, a drive gains little and a small machine loses.
const MOST_THREADS: usize = 16;

/// A call that moves bytes and returns when it has.
pub(crate) trait Blocking: Send + Sync + 'static {
    /// Called first on each thread.
    fn prepare(&self) {}

    /// Moves up to all of the memory, and says how much.
    ///
    /// # Safety
    ///
    /// Until it returns the memory is mapped and touched by nobody else (for a write: changed by nobody).
    unsafe fn call(&self, file: BorrowedFd<'_>, op: Op, memory: Window, offset: u64) -> io::Result<usize>;
}

/// `pread` and `pwrite`.
pub(crate) struct Positioned;

impl Blocking for Positioned {
    unsafe fn call(&self, file: BorrowedFd<'_>, op: Op, memory: Window, offset: u64) -> io::Result<usize> {
        Ok(match op {
            // SAFETY: the caller promises that the memory is mapped and touched by nobody else; the borrow ends with this
            // call.
            Op::Read => rustix::io::pread(file, unsafe { memory.bytes_mut() }, offset)?,
            // SAFETY: as above, and nobody changes the memory.
            Op::Write => rustix::io::pwrite(file, unsafe { memory.bytes() }, offset)?,
        })
    }
}

/// A bounded queue in front of threads, which are started as they are needed.
pub(crate) struct Pool<B: Blocking> {
    shared: Arc<Shared<B>>,
    threads: Vec<JoinHandle<()>>,
    depth: usize,
}

struct Shared<B> {
    blocking: B,
    state: Mutex<State>,
    /// Told of errands.
    work: Condvar,
    /// Told of completions.
    finished: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Errand>,
    running: usize,
    /// Threads that wait for an errand.
    idle: usize,
    done: Vec<Done>,
    closing: bool,
}

struct Errand {
    tag: usize,
    file: RawFd,
    op: Op,
    memory: Window,
    offset: u64,
}

impl<B: Blocking> Pool<B> {
    pub(crate) fn new(blocking: B, depth: usize) -> Self {
        let (state, work, finished) = (Mutex::new(State::default()), Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { blocking, state, work, finished });
        Pool { shared, threads: Vec::new(), depth: depth.clamp(1, MOST_THREADS) }
    }

    /// Another thread, where the system gives one.
    fn spawn(&mut self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("lazy i/o".to_owned()).spawn(move || shared.serve())?;
        self.threads.push(thread);
        Ok(())
    }
}

impl<B: Blocking> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No call is made under the lock, so a poisoned one still guards a consistent state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self) {
        self.blocking.prepare();
        let mut state = self.lock();
        loop {
            if let Some(Errand { tag, file, op, memory, offset }) = state.waiting.pop_front() {
                state.running += 1;
                drop(state);
                // SAFETY: `start`'s caller keeps the file open and leaves the memory alone until the completion is reported,
                // which happens below.
                let result = unsafe { self.blocking.call(BorrowedFd::borrow_raw(file), op, memory, offset) };
                state = self.lock();
                state.running -= 1;
                state.done.push(Done { tag, result });
                self.finished.notify_one();
            } else if state.closing {
                return;
            } else {
                state.idle += 1;
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
            }
        }
    }
}

impl<B: Blocking> Queue for Pool<B> {
    fn depth(&self) -> usize {
        self.depth
    }

    unsafe fn start(&mut self, request: Request<'_>) -> io::Result<()> {
        let busy = {
            let state = self.shared.lock();
            state.waiting.len() >= state.idle
        };
        if busy && self.threads.len() < self.depth {
            match self.spawn() {
                // Those there are will do.
                Err(_) if !self.threads.is_empty() => {}
                started => started?,
            }
        }
        let Request { tag, file, op, memory, offset } = request;
        self.shared.lock().waiting.push_back(Errand { tag, file: file.as_raw_fd(), op, memory, offset });
        self.shared.work.notify_one();
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        done.append(&mut self.shared.lock().done);
        Ok(())
    }

    fn wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
        let mut state = self.shared.lock();
        while state.done.is_empty() && state.running + state.waiting.len() > 0 {
            state = self.shared.finished.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        done.append(&mut state.done);
        Ok(())
    }
}

impl<B: Blocking> Drop for Pool<B> {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // It catches nothing and panics nowhere; a panic would have been told on standard error.
            let _ = thread.join();
        }
    }
}
