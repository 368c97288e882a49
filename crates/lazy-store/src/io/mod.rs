//! Reading and writing files: one transfer loop over interchangeable request queues.
//!
//! A queue (`uring`, `posix`, or the fault double) only carries out requests and reports counts. Everything that has to
//! be right for all of them is in [`transfer`]: the cut into bounded requests, the comparison of every count, the
//! continuation of short ones, and waiting for all that is in flight before a buffer is given back.

#[cfg(any(test, feature = "test-util"))]
pub mod fault;
pub(crate) mod fs;
pub(crate) mod hooks;
pub(crate) mod posix;
pub(crate) mod probe;
#[cfg(target_os = "linux")]
pub(crate) mod uring;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::time::Duration;

use lazy_model::Bytes;
use rustix::io::Errno;

use crate::error::StoreError;

/// The longest single request. Linux moves at most `0x7ffff000` bytes in one, whatever is asked.
pub(crate) const MAX_REQUEST: usize = 1 << 20;
const _: () = assert!(MAX_REQUEST < 0x7fff_f000);

/// Tries in a row without progress before a transfer is given up.
const MAX_STALLS: u32 = 200;
/// Tries without progress that are not yet slowed down.
const FREE_STALLS: u32 = 20;

/// An open file and what errors and alignment need to know of it.
pub(crate) struct OpenFile {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
    /// Offsets, lengths and addresses of requests are multiples of this.
    pub(crate) granularity: usize,
}

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

/// One request to the system.
pub(crate) struct Request<'fd> {
    /// Comes back with the completion.
    pub(crate) tag: usize,
    pub(crate) file: BorrowedFd<'fd>,
    pub(crate) op: Op,
    pub(crate) start: *mut u8,
    pub(crate) len: usize,
    pub(crate) offset: u64,
}

/// A completed request: the bytes moved, or the system's error.
pub(crate) struct Done {
    pub(crate) tag: usize,
    pub(crate) result: Result<usize, Errno>,
}

/// Carries out requests, several at once where it can.
pub(crate) trait Queue: Send {
    /// Requests that may be in flight at once.
    fn depth(&self) -> usize;

    /// Starts a request. An error means that it did not start.
    ///
    /// # Safety
    ///
    /// Until `wait` has reported the request's completion or failed, its file stays open and its memory mapped, and the
    /// memory is touched by nobody (for a write: changed by nobody).
    unsafe fn start(&mut self, request: Request<'_>) -> io::Result<()>;

    /// Waits for at least one completion, and appends what completed. On an error nothing is in flight any more, and the
    /// queue is of no more use.
    fn wait(&mut self, done: &mut Vec<Done>) -> io::Result<()>;
}

/// The memory of a transfer.
pub(crate) enum Buffer<'a> {
    /// Bytes to fill from the file.
    Read(&'a mut [u8]),
    /// Bytes to write to the file.
    Write(&'a [u8]),
}

/// A part of a transfer that one request can move.
struct Piece {
    /// Where it begins in the buffer.
    start: usize,
    len: usize,
    /// Bytes moved so far, a multiple of the file's granularity.
    got: usize,
    /// Bytes moved by the last try, which may not have been.
    reached: usize,
    /// Tries in a row without progress.
    stalls: u32,
}

/// Moves the whole buffer, or says why not. Returns only when nothing of it is in flight.
pub(crate) fn transfer(
    queue: &mut dyn Queue,
    file: &OpenFile,
    offset: u64,
    buffer: Buffer<'_>,
) -> Result<(), StoreError> {
    let (op, start, len) = match buffer {
        Buffer::Read(bytes) => (Op::Read, bytes.as_mut_ptr(), bytes.len()),
        Buffer::Write(bytes) => (Op::Write, bytes.as_ptr().cast_mut(), bytes.len()),
    };
    Transfer {
        queue,
        file,
        op,
        offset,
        start,
        len,
        pieces: Vec::new(),
        free: Vec::new(),
        next: 0,
        in_flight: 0,
    }
    .run()
}

/// A transfer under way. However it ends, it ends with nothing in flight.
struct Transfer<'a> {
    queue: &'a mut dyn Queue,
    file: &'a OpenFile,
    op: Op,
    offset: u64,
    start: *mut u8,
    len: usize,
    /// Pieces in flight, by tag.
    pieces: Vec<Piece>,
    /// Tags that can be used again.
    free: Vec<usize>,
    /// Where the next piece begins.
    next: usize,
    in_flight: usize,
}

impl Transfer<'_> {
    fn run(mut self) -> Result<(), StoreError> {
        let mut failure = None;
        let mut done = Vec::new();
        loop {
            while failure.is_none() && self.next < self.len && self.in_flight < self.queue.depth().max(1) {
                failure = self.start_next().err();
            }
            if self.in_flight == 0 {
                return failure.map_or(Ok(()), Err);
            }
            done.clear();
            if let Err(source) = self.queue.wait(&mut done) {
                self.in_flight = 0;
                return Err(failure.unwrap_or_else(|| self.refused(0, self.len, source)));
            }
            for Done { tag, result } in done.drain(..) {
                self.in_flight -= 1;
                match self.complete(tag, result) {
                    Ok(true) => self.free.push(tag),
                    // After a failure the rest is only waited for.
                    Ok(false) if failure.is_some() => {}
                    Ok(false) => failure = self.start(tag).err(),
                    Err(error) => {
                        failure.get_or_insert(error);
                    }
                }
            }
        }
    }

    fn start_next(&mut self) -> Result<(), StoreError> {
        let len = MAX_REQUEST.min(self.len - self.next);
        let piece = Piece { start: self.next, len, got: 0, reached: 0, stalls: 0 };
        self.next += len;
        let tag = match self.free.pop() {
            Some(tag) => {
                self.pieces[tag] = piece;
                tag
            }
            None => {
                self.pieces.push(piece);
                self.pieces.len() - 1
            }
        };
        self.start(tag)
    }

    /// Starts what is left of a piece.
    fn start(&mut self, tag: usize) -> Result<(), StoreError> {
        let piece = &self.pieces[tag];
        let (start, len) = (piece.start + piece.got, piece.len - piece.got);
        let request = Request {
            tag,
            file: self.file.file.as_fd(),
            op: self.op,
            // SAFETY: `start < self.len`, so the pointer stays within the buffer.
            start: unsafe { self.start.add(start) },
            len,
            offset: self.offset + start as u64,
        };
        // SAFETY: `run` waits for all completions before it returns, and until then the buffer is borrowed by `transfer`'s
        // caller, exclusively for a read and shared for a write; pieces do not overlap. The file is borrowed too.
        match unsafe { self.queue.start(request) } {
            Ok(()) => {
                self.in_flight += 1;
                Ok(())
            }
            Err(source) => Err(self.refused(start, len, source)),
        }
    }

    /// Takes one completion into account: `true` when the piece is complete, `false` when it has to go on.
    fn complete(&mut self, tag: usize, result: Result<usize, Errno>) -> Result<bool, StoreError> {
        let granularity = self.file.granularity;
        let piece = &mut self.pieces[tag];
        match result {
            Ok(0) => return Err(self.short(tag)),
            Ok(count) => {
                piece.reached = (piece.got + count).min(piece.len);
                if piece.got + count == piece.len {
                    return Ok(true);
                }
                // A direct request has to begin at a multiple, so a count in between is moved again from the last one.
                let aligned = piece.reached / granularity * granularity;
                piece.stalls = if aligned > piece.got { 0 } else { piece.stalls + 1 };
                piece.got = aligned;
            }
            Err(Errno::INTR | Errno::AGAIN) => piece.stalls += 1,
            Err(error) => {
                let (start, len) = (piece.start + piece.got, piece.len - piece.got);
                return Err(self.refused(start, len, error.into()));
            }
        }
        if piece.stalls > MAX_STALLS {
            return Err(match result {
                Ok(_) => self.short(tag),
                Err(error) => {
                    let (start, len) = (piece.start + piece.got, piece.len - piece.got);
                    self.refused(start, len, error.into())
                }
            });
        }
        if piece.stalls > FREE_STALLS {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(false)
    }

    fn short(&self, tag: usize) -> StoreError {
        let piece = &self.pieces[tag];
        StoreError::Short {
            op: self.op.name(),
            path: self.file.path.clone(),
            offset: self.offset + piece.start as u64,
            wanted: piece.len as u64,
            got: piece.reached as u64,
        }
    }

    fn refused(&self, start: usize, len: usize, source: io::Error) -> StoreError {
        let full = matches!(Errno::from_io_error(&source), Some(Errno::NOSPC | Errno::DQUOT));
        if full && let Ok(free) = fs::free_space(&self.file.file, &self.file.path) {
            let needed = Bytes((self.len - start) as u64);
            return StoreError::NoSpace { path: self.file.path.clone(), needed, free };
        }
        StoreError::Io {
            op: self.op.name(),
            path: self.file.path.clone(),
            offset: self.offset + start as u64,
            bytes: Bytes(len as u64),
            source,
        }
    }
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight > 0 && self.queue.wait(&mut done).is_ok() {
            self.in_flight = self.in_flight.saturating_sub(done.len());
            done.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::AlignedBuf;

    /// Completes requests, last first, without moving anything; at a given one, fails as a whole.
    #[derive(Default)]
    struct Pretend {
        in_flight: Vec<Done>,
        requests: Vec<(u64, usize)>,
        breaks_at: Option<usize>,
    }

    impl Queue for Pretend {
        fn depth(&self) -> usize {
            8
        }

        unsafe fn start(&mut self, request: Request<'_>) -> io::Result<()> {
            self.requests.push((request.offset, request.len));
            self.in_flight.push(Done { tag: request.tag, result: Ok(request.len) });
            assert!(self.in_flight.len() <= 8);
            Ok(())
        }

        fn wait(&mut self, done: &mut Vec<Done>) -> io::Result<()> {
            if self.breaks_at.is_some_and(|at| self.requests.len() >= at) {
                self.in_flight.clear();
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            done.extend(self.in_flight.pop());
            Ok(())
        }
    }

    fn file() -> OpenFile {
        OpenFile { file: tempfile::tempfile().unwrap(), path: PathBuf::from("spill"), granularity: 512 }
    }

    #[test]
    fn t2_more_than_one_request_can_hold_is_cut_and_moved_whole() {
        // 200 million elements of 12 bytes: more than the 0x7ffff000 bytes that Linux moves in one call. No page of it is
        // touched.
        const LEN: u64 = 2_400_000_000;
        let mut buffer = AlignedBuf::zeroed(Bytes(LEN)).unwrap();
        let mut queue = Pretend::default();
        transfer(&mut queue, &file(), 4096, Buffer::Read(buffer.as_mut_slice())).unwrap();
        queue.requests.sort();
        let mut next = 4096;
        for (offset, len) in queue.requests {
            assert_eq!(offset, next);
            assert!(len <= 1 << 20);
            next += len as u64;
        }
        assert_eq!(next, 4096 + LEN);
    }

    #[test]
    fn t5_a_queue_that_breaks_ends_the_transfer_with_nothing_in_flight() {
        let bytes = vec![0; 20 << 20];
        let mut queue = Pretend { breaks_at: Some(12), ..Pretend::default() };
        let error = transfer(&mut queue, &file(), 0, Buffer::Write(&bytes)).unwrap_err();
        assert!(matches!(error, StoreError::Io { op: "write", .. }), "{error}");
        assert!(queue.in_flight.is_empty());
    }
}
