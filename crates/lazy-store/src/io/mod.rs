//! Reading and writing files: one transfer loop over interchangeable request queues.
//!
//! A queue (`uring`, `pool` with `pread`/`pwrite` or cuFile under it, or the fault double) only carries out requests and
//! reports counts. Everything that has to be right for all of them is in [`transfer`]: the cut into bounded requests, the
//! comparison of every count, the continuation of short ones, and waiting for all that is in flight before memory is given
//! back.

pub(crate) mod available;
#[cfg(target_os = "linux")]
pub(crate) mod cufile;
#[cfg(any(test, feature = "test-util"))]
pub mod fault;
pub(crate) mod fs;
pub(crate) mod helper;
pub(crate) mod hooks;
pub(crate) mod make;
pub(crate) mod meter;
pub(crate) mod note;
pub(crate) mod pool;
pub(crate) mod probe;
pub(crate) mod slots;
pub(crate) mod stripes;
pub(crate) mod transfer;
#[cfg(target_os = "linux")]
pub(crate) mod uring;

use std::io;
use std::os::fd::BorrowedFd;

/// The longest single request. Linux moves at most `0x7ffff000` bytes in one, whatever is asked.
pub(crate) const MAX_REQUEST: usize = 1 << 20;
const _: () = assert!(MAX_REQUEST < 0x7fff_f000);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Read,
    Write,
}

impl Op {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Op::Read => "read",
            Op::Write => "write",
        }
    }
}

/// A range of memory as a place: it says nothing about who may touch it when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) start: *mut u8,
    pub(crate) len: usize,
}

// SAFETY: a window is an address and a length. Whoever turns it into a slice answers for that (`bytes`, `bytes_mut`).
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    pub(crate) fn of(bytes: &[u8]) -> Window {
        Window { start: bytes.as_ptr().cast_mut(), len: bytes.len() }
    }

    pub(crate) fn of_mut(bytes: &mut [u8]) -> Window {
        Window { start: bytes.as_mut_ptr(), len: bytes.len() }
    }

    /// The part of `len` bytes at `at`, cut to this window.
    pub(crate) fn part(self, at: usize, len: usize) -> Window {
        let at = at.min(self.len);
        Window { start: self.start.wrapping_add(at), len: len.min(self.len - at) }
    }

    /// # Safety
    ///
    /// For `'a` the memory is mapped, initialised, and changed by nobody.
    pub(crate) unsafe fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.cast_const(), self.len) }
    }

    /// # Safety
    ///
    /// For `'a` the memory is mapped, initialised, and touched by nobody else.
    pub(crate) unsafe fn bytes_mut<'a>(self) -> &'a mut [u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

/// One request to the system.
pub(crate) struct Request<'fd> {
    /// Comes back with the completion.
    pub(crate) tag: usize,
    pub(crate) file: BorrowedFd<'fd>,
    pub(crate) op: Op,
    pub(crate) memory: Window,
    pub(crate) offset: u64,
}

/// A completed request: the bytes moved, or the system's error.
pub(crate) struct Done {
    pub(crate) tag: usize,
    pub(crate) result: io::Result<usize>,
}

/// Carries out requests, several at once where it can.
pub(crate) trait Queue: Send {
    /// Requests that may be in flight at once.
    fn depth(&self) -> usize;

    /// Starts a request, at the latest with the next `poll` or `wait`. An error means that it did not start.
    ///
    /// # Safety
    ///
    /// Until `poll` or `wait` has reported the request's completion or failed, its file stays open and its memory mapped,
    /// and the memory is touched by nobody (for a write: changed by nobody).
    unsafe fn start(&mut self, request: Request<'_>) -> io::Result<()>;

    /// Hands to the system what was started, and appends what has completed, without waiting. Errors are those of `wait`.
    fn poll(&mut self, done: &mut Vec<Done>) -> io::Result<()>;

    /// As `poll`, and waits for at least one completion. On an error nothing is in flight any more, and the queue is of no
    /// more use.
    fn wait(&mut self, done: &mut Vec<Done>) -> io::Result<()>;

    /// Lets the system hold files open for the requests to come, or says why it does not.
    fn register_files(&mut self, _files: &[BorrowedFd<'_>]) -> Result<(), String> {
        Err("only io_uring registers files".to_owned())
    }

    /// Lets the system hold memory pinned for the requests to come, in place of what it held, or says why it does not and
    /// holds none.
    ///
    /// # Safety
    ///
    /// The memory stays mapped, at its address, for as long as requests are started.
    unsafe fn register_memory(&mut self, _regions: &[Window]) -> Result<(), String> {
        Err("only io_uring registers memory".to_owned())
    }
}
