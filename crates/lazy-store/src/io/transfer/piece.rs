//! A part of a job that one request can move: what the counts of its requests mean.

use std::io;
use std::time::Duration;

use lazy_model::Bytes;
use rustix::io::Errno;

use crate::error::StoreError;
use crate::io::stripes::OpenFile;
use crate::io::{Op, fs};

/// Tries in a row without progress before a transfer is given up.
const MAX_STALLS: u32 = 200;
/// Tries without progress that are not yet slowed down.
const FREE_STALLS: u32 = 20;

/// A part of a job that one request can move.
#[derive(Default)]
pub(super) struct Piece {
    pub(super) job: usize,
    /// Its number in the job.
    pub(super) index: usize,
    /// Where it begins in the job.
    pub(super) at: u64,
    pub(super) len: usize,
    pub(super) file: usize,
    pub(super) offset: u64,
    /// Length of the request: that of the piece, or padded.
    pub(super) request: usize,
    pub(super) slot: Option<usize>,
    /// Bytes moved so far, a multiple of the file's granularity.
    pub(super) got: usize,
    /// Bytes moved by the last try, which may not have been.
    pub(super) reached: usize,
    /// Tries in a row without progress.
    pub(super) stalls: u32,
    /// Whether the queue has it.
    pub(super) queued: bool,
    /// Whether its bytes were looked at, or are about to be.
    pub(super) looked_at: bool,
    /// What is still to happen before its slot is free: its way to or from the file, and for a write a look at its bytes.
    pub(super) holds: u32,
}

impl Piece {
    /// Takes the result of a request into account: `true` when the piece is complete, `false` when it has to go on.
    pub(super) fn take(
        &mut self,
        op: Op,
        file: &OpenFile,
        result: io::Result<usize>,
    ) -> Result<bool, StoreError> {
        let error = match result {
            Ok(0) => return Err(self.short(op, file)),
            Ok(count) => {
                self.reached = (self.got + count).min(self.request);
                if self.reached == self.request {
                    return Ok(true);
                }
                // A direct request has to begin at a multiple, so a count in between is moved again from the last one.
                let aligned = self.reached / file.granularity * file.granularity;
                self.stalls = if aligned > self.got { 0 } else { self.stalls + 1 };
                self.got = aligned;
                None
            }
            Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::INTR | Errno::AGAIN)) => {
                self.stalls += 1;
                Some(error)
            }
            Err(error) => return Err(self.refused(op, file, error)),
        };
        if self.stalls > MAX_STALLS {
            return Err(match error {
                None => self.short(op, file),
                Some(error) => self.refused(op, file, error),
            });
        }
        if self.stalls > FREE_STALLS {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(false)
    }

    fn short(&self, op: Op, file: &OpenFile) -> StoreError {
        StoreError::Short {
            op: op.name(),
            path: file.path.clone(),
            offset: self.offset,
            wanted: self.request as u64,
            got: self.reached as u64,
        }
    }

    pub(super) fn refused(&self, op: Op, file: &OpenFile, source: io::Error) -> StoreError {
        let needed = Bytes((self.request - self.got) as u64);
        let full = matches!(Errno::from_io_error(&source), Some(Errno::NOSPC | Errno::DQUOT));
        if full && let Ok(free) = fs::free_space(&file.file, &file.path) {
            return StoreError::NoSpace { path: file.path.clone(), needed, free };
        }
        StoreError::Io {
            op: op.name(),
            path: file.path.clone(),
            offset: self.offset + self.got as u64,
            bytes: needed,
            source,
        }
    }
}
