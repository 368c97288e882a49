//! What the store asks of a device that has memory and streams of its own.
//!
//! The host device has neither: its HBM is RAM, and its tasks do their work in the call. A device here (CUDA, and the
//! simulated one of the tests) gives every lane a stream: an ordered queue that runs beside the others.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use lazy_model::Lane;

use crate::error::BoxError;
use crate::memory::View;
use crate::spill::StagedCopy;

/// A device with streams. A thread that calls anything but `bind` has called that first.
pub(crate) trait Device: Send + Sync {
    /// Makes the device current on the calling thread.
    fn bind(&self) -> Result<(), BoxError>;

    /// Address of the first byte of its HBM arena.
    fn hbm(&self) -> *mut u8;

    /// Pins `len` bytes of host memory at `start` for its copies, until what is returned is dropped.
    ///
    /// # Safety
    ///
    /// The memory stays mapped until then.
    unsafe fn pin(self: Arc<Self>, start: *mut u8, len: usize) -> Result<Pin, BoxError>;

    /// The stream of a lane.
    fn stream(&self, lane: Lane) -> Stream;

    /// Makes what is put on a stream from now on wait until `mark` is reached.
    fn wait(&self, stream: Stream, mark: &Mark) -> Result<(), BoxError>;

    /// Marks the end of what is on a stream now.
    fn mark(self: Arc<Self>, stream: Stream) -> Result<Mark, BoxError>;

    /// A mark that has been reached: the time by its clock.
    fn now(self: Arc<Self>) -> Result<Mark, BoxError>;

    /// Waits until `mark` is reached. An error says that work before it failed.
    fn synchronize(&self, mark: &Mark) -> Result<(), BoxError>;

    /// Waits for everything on a stream, where no mark could be made to wait for.
    fn drain(&self, stream: Stream);

    /// Refuses a caller's stream that cannot be ordered against others.
    fn check_stream(&self, _stream: Stream) -> Result<(), BoxError> {
        Ok(())
    }

    /// Seconds from one mark to another, both reached.
    fn seconds(&self, from: &Mark, to: &Mark) -> Result<f64, BoxError>;

    /// Puts a copy between host memory and its own, or within its own, on a stream. With host memory that it did not pin,
    /// the call may wait for the copy.
    ///
    /// # Safety
    ///
    /// Both ranges stay valid, and used by nobody else against the order of the streams, until the copy is done.
    unsafe fn copy(&self, stream: Stream, from: *const u8, to: *mut u8, len: usize) -> Result<(), BoxError>;

    /// Puts a fill of its own memory or of host memory that it pinned on a stream.
    ///
    /// # Safety
    ///
    /// As for `copy`.
    unsafe fn fill(&self, stream: Stream, start: *mut u8, len: usize, value: u8) -> Result<(), BoxError>;

    /// Gets ready to make checksums of its memory; an error says why it cannot.
    fn prepare_checksums(&self) -> Result<(), BoxError> {
        Err("the device makes no checksums".into())
    }

    /// CRC-32C of the pieces of `piece` bytes, a multiple of 16, of its own memory, the last one maybe shorter. Waits for
    /// them.
    ///
    /// # Safety
    ///
    /// The memory is aligned to 16 bytes, and nobody writes it meanwhile.
    unsafe fn checksums(
        &self,
        _stream: Stream,
        _start: *const u8,
        _len: usize,
        _piece: usize,
    ) -> Result<Vec<u32>, BoxError> {
        Err("the device makes no checksums".into())
    }

    /// Gives the handle of a mark back.
    fn forget(&self, handle: *mut c_void);

    /// Whether `mark` is reached. Asked in seeded order only, where there are no threads that wait for marks.
    fn is_reached(&self, _mark: &Mark) -> bool {
        true
    }

    /// Whether a simulated device has an operation that can run.
    fn can_advance(&self) -> bool {
        false
    }

    /// Runs one operation of a simulated device, if one can run.
    fn advance(&self) -> bool {
        false
    }
}

/// The staged copies of a device: from and to its memory, on a stream.
pub(crate) struct DeviceCopy {
    device: Arc<dyn Device>,
    stream: Stream,
    /// The extent.
    view: View,
    /// Out of the device, into slots.
    out: bool,
    /// Ends of the copies under way, by slot.
    marks: Vec<Option<Mark>>,
}

impl DeviceCopy {
    /// Copies of the extent at `view`, which nobody else uses against the order of the store while this lives.
    pub(crate) fn new(device: Arc<dyn Device>, stream: Stream, view: View, out: bool) -> Self {
        DeviceCopy { device, stream, view, out, marks: Vec::new() }
    }
}

impl StagedCopy for DeviceCopy {
    fn start(&mut self, slot: usize, at: u64, staging: &mut [u8]) -> Result<(), BoxError> {
        let at = at as usize;
        if at.checked_add(staging.len()).is_none_or(|end| end > self.view.len()) {
            return Err("a piece lies outside the extent".into());
        }
        let (inside, slot_start) = (self.view.start().wrapping_add(at), staging.as_mut_ptr());
        let (from, to) = if self.out { (inside, slot_start) } else { (slot_start, inside) };
        // SAFETY: the extent is held by the task that this belongs to, the slot belongs to the copy until `wait`, and both
        // are waited for in `drop`.
        unsafe { self.device.copy(self.stream, from, to, staging.len()) }?;
        let mark =
            Arc::clone(&self.device).mark(self.stream).inspect_err(|_| self.device.drain(self.stream))?;
        if self.marks.len() <= slot {
            self.marks.resize_with(slot + 1, || None);
        }
        self.marks[slot] = Some(mark);
        Ok(())
    }

    fn wait(&mut self, slot: usize) -> Result<(), BoxError> {
        match self.marks.get_mut(slot).and_then(Option::take) {
            Some(mark) => self.device.synchronize(&mark),
            None => Ok(()),
        }
    }
}

impl Drop for DeviceCopy {
    fn drop(&mut self) {
        for mark in self.marks.drain(..).flatten() {
            // What failed is reported by the copy that was waited for.
            let _ = self.device.synchronize(&mark);
        }
    }
}

/// Keeps host memory pinned.
pub(crate) type Pin = Box<dyn Any + Send + Sync>;

/// A stream of a device, the store's or a caller's own: a `CUstream` of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub(crate) *mut c_void);

impl Stream {
    /// Names a stream of the caller's.
    ///
    /// # Safety
    ///
    /// It belongs to the primary context of the store's GPU and lives for as long as it is used under this name.
    pub unsafe fn from_raw(stream: *mut c_void) -> Stream {
        Stream(stream)
    }

    /// The stream as the device's own interface takes it.
    pub fn as_raw(self) -> *mut c_void {
        self.0
    }
}

// SAFETY: a name, which devices accept from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// A place on a stream.
pub(crate) struct Mark {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) handle: *mut c_void,
}

// SAFETY: the handle is a name, which devices accept from any thread.
unsafe impl Send for Mark {}
// SAFETY: as above.
unsafe impl Sync for Mark {}

impl Drop for Mark {
    fn drop(&mut self) {
        self.device.forget(self.handle);
    }
}

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "mark {:p}", self.handle)
    }
}
