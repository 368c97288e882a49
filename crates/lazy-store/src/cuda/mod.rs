//! CUDA: a device whose lanes are streams. The driver is loaded at run time; where there is none, opening the device is
//! an error and everything else works.
//!
//! One of the few modules with `unsafe`: the driver's interface takes addresses and handles.

mod checksum;
mod gpu;
pub mod kernels;
pub(crate) mod library;
mod memory;

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUdeviceptr, CUevent_flags};
use cudarc::driver::{DriverError, result};
use lazy_model::{Bytes, Lane};

use self::checksum::Checksums;
use crate::clock::{LANES, slot};
use crate::device::{Device, Mark, Pin, Stream};
use crate::error::{BoxError, StoreError};

pub use gpu::{Gpu, device_count};
pub use library::load_library;
pub use memory::{DeviceMemory, PendingSlice, Refused};

/// The driver's name for the default stream of the calling thread.
const PER_THREAD_STREAM: usize = 2;
/// Host memory is pinned in parts of at most this many bytes: drivers refuse very large ones.
const PIN_PART: usize = 32 << 30;

pub(crate) fn failed(what: &'static str, error: DriverError) -> StoreError {
    StoreError::Cuda { what, reason: describe(error) }
}

fn describe(error: DriverError) -> String {
    let name = error.error_name().map(|s| s.to_string_lossy().into_owned());
    let text = error.error_string().map(|s| s.to_string_lossy().into_owned());
    match (name, text) {
        (Ok(name), Ok(text)) => format!("{text} ({name})"),
        _ => format!("CUDA error {}", error.0 as u32),
    }
}

/// One GPU, with an arena in its memory and a stream for each lane.
pub(crate) struct Cuda {
    gpu: Gpu,
    hbm: CUdeviceptr,
    streams: [Stream; LANES],
    /// Always idle: tells the time.
    clock: Stream,
    /// Events that no mark holds.
    events: Mutex<Vec<Stream>>,
    /// Addresses where one pinned part ends and the next begins: the driver takes no copy across them.
    seams: Mutex<BTreeSet<usize>>,
    checksums: OnceLock<Checksums>,
}

impl Cuda {
    /// Opens a GPU and takes `hbm` of its memory.
    pub(crate) fn open(ordinal: usize, hbm: Bytes) -> Result<Self, StoreError> {
        let gpu = Gpu::open(ordinal)?;
        let mut cuda = Cuda {
            gpu,
            hbm: 0,
            streams: [Stream(std::ptr::null_mut()); LANES],
            clock: Stream(std::ptr::null_mut()),
            events: Mutex::new(Vec::new()),
            seams: Mutex::default(),
            checksums: OnceLock::new(),
        };
        for stream in cuda.streams.iter_mut().chain([&mut cuda.clock]) {
            let made = result::stream::create(result::stream::StreamKind::NonBlocking);
            *stream = Stream(made.map_err(|e| failed("make a stream", e))?.cast());
        }
        if hbm > Bytes::ZERO {
            let bytes = usize::try_from(hbm.get()).unwrap_or(usize::MAX);
            // SAFETY: memory of this length, given back in `drop`.
            let allocated = unsafe { result::malloc_sync(bytes) };
            cuda.hbm = allocated.map_err(|e| {
                let free = result::mem_get_info().map_or(0, |(free, _)| free as u64);
                StoreError::DeviceMemory { wanted: hbm, free: Bytes(free), reason: describe(e) }
            })?;
        }
        Ok(cuda)
    }

    pub(crate) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Whether everything on a stream is done, without failure. It is known to be none that is captured.
    fn is_done(&self, stream: Stream) -> bool {
        // SAFETY: the stream is alive, by the promise of whoever named it.
        unsafe { sys::cuStreamQuery(stream.0.cast()) }.result().is_ok()
    }

    fn event(&self) -> Result<Stream, BoxError> {
        let free = lock(&self.events).pop();
        match free {
            Some(event) => Ok(event),
            // Blocking: whoever waits gives its core away.
            None => Ok(Stream(
                result::event::create(CUevent_flags::CU_EVENT_BLOCKING_SYNC)
                    .map_err(|e| failed("make an event", e))?
                    .cast(),
            )),
        }
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Nothing can be done about failures here: the process keeps what the driver does not take back.
        let _ = self.gpu.bind();
        let events = std::mem::take(self.events.get_mut().unwrap_or_else(PoisonError::into_inner));
        for event in events {
            // SAFETY: made by `event`; no mark holds it, since marks hold this device.
            let _ = unsafe { result::event::destroy(event.0.cast()) };
        }
        for stream in self.streams.iter().chain([&self.clock]).filter(|s| !s.0.is_null()) {
            // SAFETY: made in `open` and used through this device only. The driver finishes what is on it.
            let _ = unsafe { result::stream::destroy(stream.0.cast()) };
        }
        if self.hbm != 0 {
            // SAFETY: allocated in `open`; this waits for all work on the GPU.
            let _ = unsafe { result::free_sync(self.hbm) };
        }
    }
}

/// Memory registered with the driver.
struct Pinned {
    device: Arc<Cuda>,
    parts: Vec<*mut u8>,
}

// SAFETY: addresses, given back to the driver from whichever thread drops this.
unsafe impl Send for Pinned {}
// SAFETY: nothing is read through it.
unsafe impl Sync for Pinned {}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.device.gpu.bind();
        let mut seams = lock(&self.device.seams);
        for part in self.parts.drain(..) {
            seams.remove(&part.addr());
            // SAFETY: registered in `pin`, and still mapped, by its contract.
            let _ = unsafe { sys::cuMemHostUnregister(part.cast()) };
        }
    }
}

impl Device for Cuda {
    fn bind(&self) -> Result<(), BoxError> {
        Ok(self.gpu.bind()?)
    }

    fn hbm(&self) -> *mut u8 {
        std::ptr::without_provenance_mut(self.hbm as usize)
    }

    unsafe fn pin(self: Arc<Self>, start: *mut u8, len: usize) -> Result<Pin, BoxError> {
        let mut pinned = Pinned { device: Arc::clone(&self), parts: Vec::new() };
        let mut at = 0;
        while at < len {
            let part = PIN_PART.min(len - at);
            let address = start.wrapping_add(at);
            // SAFETY: mapped, by this function's contract.
            let registered =
                unsafe { sys::cuMemHostRegister_v2(address.cast(), part, sys::CU_MEMHOSTREGISTER_PORTABLE) };
            registered
                .result()
                .map_err(|e| StoreError::Pin { bytes: Bytes(len as u64), reason: describe(e) })?;
            pinned.parts.push(address);
            if at > 0 {
                lock(&self.seams).insert(address.addr());
            }
            at += part;
        }
        Ok(Box::new(pinned))
    }

    fn stream(&self, lane: Lane) -> Stream {
        self.streams[slot(lane)]
    }

    fn wait(&self, stream: Stream, mark: &Mark) -> Result<(), BoxError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are alive: the mark is held, and so is whoever has the stream.
        let waits = unsafe { result::stream::wait_event(stream.0.cast(), mark.handle.cast(), flags) };
        Ok(waits.map_err(|e| failed("order two streams", e))?)
    }

    fn mark(self: Arc<Self>, stream: Stream) -> Result<Mark, BoxError> {
        let event = self.event()?;
        // Held by a mark from here on, so that it goes back whatever happens.
        let mark = Mark { device: Arc::clone(&self) as Arc<dyn Device>, handle: event.0 };
        // SAFETY: the event belongs to this mark alone and the stream is alive.
        let recorded = unsafe { result::event::record(event.0.cast(), stream.0.cast()) };
        recorded.map_err(|e| failed("mark a place on a stream", e))?;
        Ok(mark)
    }

    fn now(self: Arc<Self>) -> Result<Mark, BoxError> {
        let mark = Arc::clone(&self).mark(self.clock)?;
        self.synchronize(&mark)?;
        Ok(mark)
    }

    fn synchronize(&self, mark: &Mark) -> Result<(), BoxError> {
        // SAFETY: the event is alive: the mark holds it.
        let reached = unsafe { result::event::synchronize(mark.handle.cast()) };
        Ok(reached.map_err(|e| failed("finish work on the GPU", e))?)
    }

    fn drain(&self, stream: Stream) {
        // What cannot be waited for belongs to a context that is lost, which touches no memory any more.
        // SAFETY: the stream is alive.
        let _ = unsafe { result::stream::synchronize(stream.0.cast()) };
    }

    fn check_stream(&self, stream: Stream) -> Result<(), BoxError> {
        let refused =
            |what, instead| Err(StoreError::Device { device: "the CUDA device", what, instead }.into());
        if stream.0.addr() == PER_THREAD_STREAM {
            let what = "order the per-thread default stream, which is another one on every thread";
            return refused(what, "use the memory on a stream made for it");
        }
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive, by the promise of whoever named it; the driver fills what it is given.
        let asked = unsafe { sys::cuStreamIsCapturing(stream.0.cast(), &raw mut status) };
        asked.result().map_err(|e| failed("ask what a stream is doing", e))?;
        if status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Ok(());
        }
        refused("order a stream that is being captured into a graph", "copy before or after the capture")
    }

    fn seconds(&self, from: &Mark, to: &Mark) -> Result<f64, BoxError> {
        // SAFETY: both events are alive and were recorded.
        let elapsed = unsafe { result::event::elapsed(from.handle.cast(), to.handle.cast()) };
        Ok(f64::from(elapsed.map_err(|e| failed("time work on the GPU", e))?) / 1e3)
    }

    unsafe fn copy(&self, stream: Stream, from: *const u8, to: *mut u8, len: usize) -> Result<(), BoxError> {
        if len == 0 {
            return Ok(());
        }
        let seam = {
            let seams = lock(&self.seams);
            first_seam(&seams, from.addr(), len).into_iter().chain(first_seam(&seams, to.addr(), len)).min()
        };
        let first = seam.unwrap_or(len);
        // SAFETY: by this function's contract; with unified addresses the driver tells host memory from its own.
        let copied = unsafe { sys::cuMemcpyAsync(address(to), address(from), first, stream.0.cast()) };
        copied.result().map_err(|e| failed("start a copy", e))?;
        // SAFETY: the rest of the same ranges.
        unsafe { self.copy(stream, from.wrapping_add(first), to.wrapping_add(first), len - first) }
    }

    unsafe fn fill(&self, stream: Stream, start: *mut u8, len: usize, value: u8) -> Result<(), BoxError> {
        if len == 0 {
            return Ok(());
        }
        // SAFETY: by this function's contract.
        let filled = unsafe { result::memset_d8_async(address(start), value, len, stream.0.cast()) };
        Ok(filled.map_err(|e| failed("start a fill", e))?)
    }

    fn prepare_checksums(&self) -> Result<(), BoxError> {
        if self.checksums.get().is_none() {
            // Only whoever opens a store gets here; a second one's would be dropped.
            let _ = self.checksums.set(Checksums::new(&self.gpu)?);
        }
        Ok(())
    }

    unsafe fn checksums(
        &self,
        stream: Stream,
        start: *const u8,
        len: usize,
        piece: usize,
    ) -> Result<Vec<u32>, BoxError> {
        let checksums = self.checksums.get().ok_or("checksums were not prepared")?;
        // SAFETY: by this function's contract.
        Ok(unsafe { checksums.of(stream, start, len, piece) }?)
    }

    fn forget(&self, handle: *mut c_void) {
        lock(&self.events).push(Stream(handle));
    }
}

/// Where the first seam within `len` bytes at `start` lies, counted from there.
fn first_seam(seams: &BTreeSet<usize>, start: usize, len: usize) -> Option<usize> {
    seams.range(start + 1..start.saturating_add(len)).next().map(|seam| seam - start)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half-done where a lock is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An address as the driver takes it. Its memory may be touched by the GPU from now on.
fn address(pointer: *const u8) -> CUdeviceptr {
    pointer.expose_provenance() as CUdeviceptr
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_cut_where_pinned_parts_meet() {
        let seams = BTreeSet::from([100, 200]);
        assert_eq!(first_seam(&seams, 50, 50), None);
        assert_eq!(first_seam(&seams, 50, 51), Some(50));
        assert_eq!(first_seam(&seams, 100, 100), None);
        assert_eq!(first_seam(&seams, 101, 500), Some(99));
        assert_eq!(first_seam(&seams, 200, usize::MAX), None);
    }
}
