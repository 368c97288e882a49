//! Device memory of the caller's: copied from and to without going through the store's own.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::AnyBitPattern;
use cudarc::driver::{CudaSlice, DevicePtr, DevicePtrMut, DeviceRepr};
use lazy_model::{Bytes, Lane, Tier};

use crate::device::{Device, Stream};
use crate::drive::{self, Target};
use crate::error::StoreError;
use crate::lanes::Kind;
use crate::store::{Event, Extent, Store, Submission};
use crate::work::{Kept, Views, Work};

/// Device memory that is not the store's, and the stream on which its owner uses it.
#[derive(Clone, Copy, Debug)]
pub struct DeviceMemory {
    address: u64,
    bytes: Bytes,
    stream: Stream,
}

impl DeviceMemory {
    /// Names `bytes` of memory at `address`.
    ///
    /// # Safety
    ///
    /// From a copy's submission until its event is done, or until [`Store::order`] made what comes next wait for it, the
    /// memory stays allocated and its owner does not write it, nor touch it at all while it is being filled; the stream
    /// lives until the copy is done. Uses before the submission need no care where they are on `stream`, which the copy
    /// waits for.
    pub unsafe fn new(address: u64, bytes: Bytes, stream: Stream) -> Self {
        DeviceMemory { address, bytes, stream }
    }

    fn pointer(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.address as usize)
    }
}

/// A slice that a copy is filling. Dropping it waits for the copy.
pub struct PendingSlice<T> {
    /// Goes first: the memory outlives the copy.
    copy: Copying,
    slice: CudaSlice<T>,
}

/// A copy in flight; dropping it waits for its end.
struct Copying {
    store: Store,
    event: Event,
    /// Whether somebody else waits for it.
    ordered: bool,
}

impl Drop for Copying {
    fn drop(&mut self) {
        if !self.ordered {
            self.event.wait();
        }
    }
}

/// Why a slice was not taken, and the slice.
pub struct Refused<T> {
    /// The reason.
    pub error: StoreError,
    /// What was to be copied or filled, untouched.
    pub slice: Option<CudaSlice<T>>,
}

impl Store {
    /// Queues a copy of the caller's memory to `dst`, in the HBM or the host tier, which begins when what is on its stream
    /// now is done.
    ///
    /// # Errors
    ///
    /// [`StoreError::Device`] without a GPU, [`StoreError::CopyLength`], [`StoreError::NoLink`] for NVMe, and those of
    /// [`Store::submit`].
    pub fn put_memory(
        &self,
        name: impl Into<Arc<str>>,
        memory: &DeviceMemory,
        dst: &Extent,
    ) -> Result<Event, StoreError> {
        self.copy_memory(name.into(), memory, dst, true, || Kept::Nothing)
    }

    /// Queues a copy of `src`, in the HBM or the host tier, to the caller's memory, which begins when what is on its stream
    /// now is done. [`Store::order`] makes the caller's next work on that memory wait for it.
    ///
    /// # Errors
    ///
    /// As for [`Store::put_memory`].
    pub fn get_memory(
        &self,
        name: impl Into<Arc<str>>,
        src: &Extent,
        memory: &DeviceMemory,
    ) -> Result<Event, StoreError> {
        self.copy_memory(name.into(), memory, src, false, || Kept::Nothing)
    }

    /// Makes what is put on `stream` from now on wait for a task. Waits here only until the task is on its own stream: for
    /// what it depends on that is done on the CPU, such as a read from NVMe.
    ///
    /// # Errors
    ///
    /// [`StoreError::Device`] without a GPU and for a stream that cannot be ordered, [`StoreError::Foreign`],
    /// [`StoreError::Cuda`].
    pub fn order(&self, event: &Event, stream: Stream) -> Result<(), StoreError> {
        let device = self.device("order a stream")?;
        let token = event.token_in(self)?;
        let state = drive::wait_until(self.inner(), Target::Issued(token));
        let mark = state.lanes.mark(token.lane, token.seq);
        drop(state);
        device.bind().and_then(|()| device.check_stream(stream)).map_err(StoreError::of_device)?;
        mark.map_or(Ok(()), |mark| device.wait(stream, &mark)).map_err(StoreError::of_device)
    }

    /// Waits until what is on a caller's stream now is done.
    ///
    /// # Errors
    ///
    /// [`StoreError::Device`] without a GPU and for a stream that cannot be waited for, [`StoreError::Cuda`], also where work on
    /// the stream failed.
    pub fn wait_for(&self, stream: Stream) -> Result<(), StoreError> {
        let device = self.device("wait for a stream")?;
        let waited = || {
            device.bind()?;
            device.check_stream(stream)?;
            if self.inner().cuda.as_ref().is_some_and(|cuda| cuda.is_done(stream)) {
                return Ok(());
            }
            device.synchronize(&Arc::clone(device).mark(stream)?)
        };
        waited().map_err(StoreError::of_device)
    }

    /// Queues a copy of a slice to `dst`. Its memory is given back once the copy is done.
    ///
    /// # Errors
    ///
    /// As for [`Store::put_memory`], with the slice.
    pub fn put_slice<T: DeviceRepr + Send + 'static>(
        &self,
        name: impl Into<Arc<str>>,
        slice: CudaSlice<T>,
        dst: &Extent,
    ) -> Result<Event, Box<Refused<T>>> {
        let memory = match self.memory_of(&slice) {
            Ok(memory) => memory,
            Err(error) => return Err(Box::new(Refused { error, slice: Some(slice) })),
        };
        let kept = Arc::new(Mutex::new(Some(slice)));
        let in_task = Arc::clone(&kept);
        let take =
            |kept: &Mutex<Option<CudaSlice<T>>>| kept.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.copy_memory(name.into(), &memory, dst, true, move || Kept::Owned(Box::new(take(&in_task))))
            .map_err(|error| Box::new(Refused { error, slice: take(&kept) }))
    }

    /// Queues a copy of `src` into a slice of the same length in bytes, of a type that every pattern of bits is a value of.
    ///
    /// # Errors
    ///
    /// As for [`Store::put_memory`], with the slice.
    pub fn get_slice<T: DeviceRepr + AnyBitPattern>(
        &self,
        name: impl Into<Arc<str>>,
        src: &Extent,
        mut slice: CudaSlice<T>,
    ) -> Result<PendingSlice<T>, Box<Refused<T>>> {
        let memory = self.memory_of_mut(&mut slice);
        match memory.and_then(|memory| self.get_memory(name, src, &memory)) {
            Ok(event) => {
                Ok(PendingSlice { copy: Copying { store: self.clone(), event, ordered: false }, slice })
            }
            Err(error) => Err(Box::new(Refused { error, slice: Some(slice) })),
        }
    }

    fn device(&self, what: &'static str) -> Result<&Arc<dyn Device>, StoreError> {
        let instead = "open the store with a GPU";
        self.inner().device.as_ref().ok_or(StoreError::Device { device: "the host device", what, instead })
    }

    fn memory_of<T: DeviceRepr>(&self, slice: &CudaSlice<T>) -> Result<DeviceMemory, StoreError> {
        self.check_context(slice)?;
        let (address, _used) = slice.device_ptr(slice.stream());
        // SAFETY: callers keep the slice untouched until the copy is done.
        Ok(unsafe { DeviceMemory::new(address, size_of_slice(slice), stream_of(slice)) })
    }

    fn memory_of_mut<T: DeviceRepr>(&self, slice: &mut CudaSlice<T>) -> Result<DeviceMemory, StoreError> {
        self.check_context(slice)?;
        let (owner, stream, bytes) = (Arc::clone(slice.stream()), stream_of(slice), size_of_slice(slice));
        let (address, _used) = slice.device_ptr_mut(&owner);
        // SAFETY: callers keep the slice untouched until the copy is done.
        Ok(unsafe { DeviceMemory::new(address, bytes, stream) })
    }

    fn check_context<T>(&self, slice: &CudaSlice<T>) -> Result<(), StoreError> {
        self.device("copy from or to device memory")?;
        let ours = self.inner().cuda.as_ref().map(|cuda| cuda.gpu().context().cu_ctx());
        if ours == Some(slice.context().cu_ctx()) {
            return Ok(());
        }
        let what = "copy a slice of another context";
        let instead = "make it in the primary context of the store's GPU";
        Err(StoreError::Device { device: "the CUDA device", what, instead })
    }

    /// Queues a copy between the caller's memory and an extent. What `keep` gives once the copy is on its stream is dropped
    /// when it has completed.
    fn copy_memory(
        &self,
        name: Arc<str>,
        memory: &DeviceMemory,
        extent: &Extent,
        put: bool,
        keep: impl FnOnce() -> Kept + Send + 'static,
    ) -> Result<Event, StoreError> {
        let device = Arc::clone(self.device("copy from or to device memory")?);
        let (from, to) = if put { (Tier::Hbm, extent.tier()) } else { (extent.tier(), Tier::Hbm) };
        if extent.tier() == Tier::Nvme {
            return Err(StoreError::NoLink { task: name.to_string(), from, to });
        }
        if extent.bytes() != memory.bytes {
            let (from, to) =
                if put { (memory.bytes, extent.bytes()) } else { (extent.bytes(), memory.bytes) };
            return Err(StoreError::CopyLength { task: name.to_string(), from, to });
        }
        device.bind().and_then(|()| device.check_stream(memory.stream)).map_err(StoreError::of_device)?;
        let used = Arc::clone(&device).mark(memory.stream).map_err(StoreError::of_device)?;
        let extents = [extent];
        let (reads, writes): (&[&Extent], &[&Extent]) = if put { (&[], &extents) } else { (&extents, &[]) };
        let lane = if put { Lane::D2h } else { Lane::H2d };
        let task = Submission { reads, writes, bytes: memory.bytes, ..Submission::new(lane, name) };
        let memory = *memory;
        let copy = move |views: &Views| {
            let stream = device.stream(lane);
            device.wait(stream, &used)?;
            let (from, to) = if put {
                (memory.pointer(), views.writes[0].start())
            } else {
                (views.reads[0].start(), memory.pointer())
            };
            // SAFETY: the extent lies in the store's arenas, ordered by its hazards; the caller's memory is as
            // `DeviceMemory::new` says, and what its stream did before is waited for.
            unsafe { device.copy(stream, from, to, memory.bytes.get() as usize) }?;
            Ok(keep())
        };
        self.enqueue(task, Kind::Stream, Work::once(copy))
    }
}

fn stream_of<T>(slice: &CudaSlice<T>) -> Stream {
    Stream(slice.stream().cu_stream().cast())
}

fn size_of_slice<T>(slice: &CudaSlice<T>) -> Bytes {
    Bytes((slice.len() * size_of::<T>()) as u64)
}

impl<T> PendingSlice<T> {
    /// Waits until the copy is done. Whether it failed is what [`Store::synchronize`] says.
    pub fn wait(self) -> CudaSlice<T> {
        let PendingSlice { copy, slice } = self;
        drop(copy);
        slice
    }

    /// Hands the slice out before it is filled: what its own stream does from now on comes after the copy, and so does what
    /// cudarc orders after that stream. Waits as [`Store::order`] does.
    ///
    /// # Errors
    ///
    /// [`StoreError::Cuda`]; the copy was waited for then.
    pub fn ordered(self) -> Result<CudaSlice<T>, StoreError>
    where
        T: DeviceRepr,
    {
        let PendingSlice { mut copy, mut slice } = self;
        if let Err(error) = copy.store.order(&copy.event, stream_of(&slice)) {
            // The memory outlives the copy.
            drop(copy);
            return Err(error);
        }
        copy.ordered = true;
        // Notes the write where cudarc looks for it, behind the wait.
        let owner = Arc::clone(slice.stream());
        drop(slice.device_ptr_mut(&owner));
        Ok(slice)
    }
}

impl<T> fmt::Debug for PendingSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slice being filled by {:?}", self.copy.event)
    }
}

impl<T> fmt::Debug for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.error, f)
    }
}

impl<T> fmt::Display for Refused<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl<T> std::error::Error for Refused<T> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

impl<T> From<Box<Refused<T>>> for StoreError {
    fn from(refused: Box<Refused<T>>) -> Self {
        refused.error
    }
}
