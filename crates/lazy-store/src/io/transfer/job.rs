//! What the transfer loop is given to carry out, and how far it is with it.

use std::sync::Arc;

use lazy_model::Bytes;

use super::piece::Piece;
use crate::error::{BoxError, StoreError};
use crate::io::note::{Note, Watch};
use crate::io::stripes::{OpenFile, Place, Stripes, UNIT};
use crate::io::{Op, Window};

/// Copies between a device's memory and a slot in host memory, on a stream of its own. The slot belongs to the copy from
/// `start` until `wait` returns, and has at most one copy under way.
pub(crate) trait StagedCopy {
    /// Starts the copy of `staging.len()` bytes at position `at` of the extent: into the slot for a write to NVMe, out of it
    /// for a read.
    fn start(&mut self, slot: usize, at: u64, staging: &mut [u8]) -> Result<(), BoxError>;

    /// Waits for the copy that was started with that slot.
    fn wait(&mut self, slot: usize) -> Result<(), BoxError>;
}

/// What a job fills or writes.
pub(crate) enum Memory<'a> {
    /// Bytes to fill from the file.
    Read(&'a mut [u8]),
    /// Bytes to write to the file.
    Write(&'a [u8]),
    /// Host memory by its address, for a job that outlives no call. Nobody else uses it before the job has ended.
    Place(Window),
    /// So many bytes of a device, which it copies.
    Staged(u64, &'a mut dyn StagedCopy),
    /// Memory of a device that the queue can move where it lies, in requests of at most `longest` bytes. Nobody else uses it
    /// before the job has ended, and it is never looked at.
    Device { memory: Window, longest: u64 },
}

/// A transfer of all of its memory to or from one range of files.
pub(crate) struct Job<'a> {
    pub(crate) files: Arc<Stripes>,
    pub(crate) offset: u64,
    pub(crate) memory: Memory<'a>,
    pub(crate) watch: Watch,
}

/// A job under way.
pub(super) struct Running<'a> {
    pub(super) key: u64,
    pub(super) job: Job<'a>,
    /// Its memory; of a device's, only the length means something.
    pub(super) window: Window,
    /// Bytes from the start that need no padding: whoever moves device memory where it lies copes with any length.
    pub(super) whole: u64,
    pub(super) in_place: bool,
    /// Where the next piece begins.
    pub(super) next: u64,
    pub(super) notes: Vec<Note>,
    /// Pieces under way.
    pub(super) pieces: usize,
    pub(super) failure: Option<StoreError>,
}

impl<'a> Running<'a> {
    pub(super) fn new(key: u64, mut job: Job<'a>) -> Self {
        let (window, staged) = match &mut job.memory {
            Memory::Read(bytes) => (Window::of_mut(bytes), false),
            Memory::Write(bytes) => (Window::of(bytes), false),
            Memory::Staged(len, _) => (Window { start: std::ptr::null_mut(), len: *len as usize }, true),
            Memory::Place(window) | Memory::Device { memory: window, .. } => (*window, false),
        };
        let device = matches!(job.memory, Memory::Device { .. });
        let padded = if device { 0 } else { window.len % job.files.alignment };
        Running {
            key,
            window,
            whole: (window.len - padded) as u64,
            in_place: device || !staged && job.files.takes(window.start.addr()),
            next: 0,
            notes: Vec::new(),
            pieces: 0,
            failure: None,
            job,
        }
    }

    /// The next piece.
    pub(super) fn piece(&self, id: usize) -> Piece {
        let Place { file, offset, .. } = self.job.files.locate(self.job.offset + self.next);
        let longest = match self.job.memory {
            Memory::Device { longest, .. } => longest,
            _ => UNIT,
        };
        let all = self.window.len as u64;
        let len = self.job.files.piece_up_to(longest, self.job.offset, all, self.next) as usize;
        Piece {
            job: id,
            index: self.notes.len(),
            at: self.next,
            len,
            request: len,
            file,
            offset,
            holds: 1,
            ..Piece::default()
        }
    }

    pub(super) fn no_slot(&self, op: Op) -> StoreError {
        let Place { file, offset, .. } = self.job.files.locate(self.job.offset);
        let OpenFile { path, granularity, .. } = self.job.files.file(file);
        let bytes = Bytes(self.window.len as u64);
        StoreError::NoSlot { op: op.name(), path: path.clone(), offset, bytes, granularity: *granularity }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.pieces == 0 && (self.failure.is_some() || self.next >= self.window.len as u64)
    }
}
