//! The arenas of HBM (on the host device) and host RAM: anonymous mappings that tasks view in parts.
//!
//! One of the few modules with `unsafe`: views are made from raw pointers, because tasks of several threads hold
//! disjoint parts of one mapping at once. That the parts are disjoint, or only read, is what the hazards kept by
//! `store.rs` see to.

use std::marker::PhantomData;
use std::sync::Arc;

use lazy_model::Bytes;
use memmap2::{Advice, MmapOptions, MmapRaw};

use crate::device::{Device, Pin, Stream};
use crate::error::{BoxError, StoreError};
use crate::io::Window;

/// Page-aligned anonymous memory. Pages are taken from the system as they are touched.
pub(crate) struct Mapping {
    /// Goes before the memory does.
    pin: Option<Pin>,
    map: MmapRaw,
    len: u64,
}

/// The memory of the HBM tier.
pub(crate) enum Hbm {
    /// RAM: the host device.
    Host(Mapping),
    /// A device's, from this address on.
    Device(View),
}

impl Hbm {
    /// As [`Mapping::view`].
    pub(crate) fn view(&self, offset: u64, len: u64) -> Option<View> {
        match self {
            Hbm::Host(mapping) => mapping.view(offset, len),
            Hbm::Device(all) => {
                let end = offset.checked_add(len)?;
                let start = all.start.wrapping_add(offset as usize);
                (end <= all.len as u64).then_some(View { start, len: len as usize })
            }
        }
    }
}

impl Mapping {
    /// Memory whose pages are taken as they are touched, large ones where there are any.
    pub(crate) fn new(what: &'static str, bytes: Bytes) -> Result<Self, StoreError> {
        let refused = |source| StoreError::Memory { what, bytes, source };
        let len =
            usize::try_from(bytes.get()).map_err(|_| refused(std::io::ErrorKind::OutOfMemory.into()))?.max(1);
        let map = MmapOptions::new().len(len).no_reserve_swap().map_anon().map_err(refused)?;
        // Without large pages everything works, but a drive that is given its requests page by page can be four times slower.
        let _ = map.advise(Advice::HugePage);
        Ok(Mapping { pin: None, map: map.into(), len: bytes.get() })
    }

    /// Takes all pages from the system and pins them for a device.
    pub(crate) fn pin(&mut self, what: &'static str, device: &Arc<dyn Device>) -> Result<(), StoreError> {
        let refused = |source| StoreError::Memory { what, bytes: Bytes(self.len), source };
        if self.len == 0 {
            return Ok(());
        }
        // Taken now: a lack of memory is an error here and not the end of the process in the middle of a step. Systems
        // that do not know this take the pages while they pin them.
        match self.map.advise(Advice::PopulateWrite) {
            Err(e) if e.kind() != std::io::ErrorKind::InvalidInput => return Err(refused(e)),
            _ => {}
        }
        // SAFETY: the pin is dropped before the mapping: fields are dropped in their order.
        let pin = unsafe { Arc::clone(device).pin(self.map.as_mut_ptr(), self.len as usize) };
        self.pin = Some(pin.map_err(StoreError::of_device)?);
        Ok(())
    }

    /// All of it, as a place.
    pub(crate) fn window(&self) -> Window {
        Window { start: self.map.as_mut_ptr(), len: self.len as usize }
    }

    /// A view of `len` bytes at `offset`, or `None` outside the mapping.
    pub(crate) fn view(&self, offset: u64, len: u64) -> Option<View> {
        let end = offset.checked_add(len)?;
        if end > self.len {
            return None;
        }
        // SAFETY: `offset <= end <= self.len`, the length of the mapping, so the pointer stays within it (or one past
        // its end), and the offset fits an isize because the mapping's length does.
        let start = unsafe { self.map.as_mut_ptr().add(offset as usize) };
        Some(View { start, len: len as usize })
    }
}

/// A part of a [`Mapping`]. Only a place: it says nothing about who may touch it when.
#[derive(Clone, Copy)]
pub(crate) struct View {
    start: *mut u8,
    len: usize,
}

// SAFETY: a view is an address and a length. What may be done with it from which thread is the contract of
// `Access::new`, the only place where a view becomes a slice.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

/// The bytes of a task's extents, in the order in which its submission listed them.
///
/// Indices out of range panic, like those of a slice; the store turns a panic of a task into an error that names it.
/// Views as `f32` exist where the length is a multiple of four bytes, and panic elsewhere; extents are aligned to 64
/// bytes, so other element types can be viewed with `bytemuck` too.
pub struct Access<'a> {
    reads: &'a [View],
    writes: &'a [View],
    task: PhantomData<&'a mut [u8]>,
}

impl<'a> Access<'a> {
    /// # Safety
    ///
    /// For the lifetime `'a`, the memory under `reads` and `writes` stays mapped, nobody else writes what `reads` covers
    /// or touches what `writes` covers, the views in `writes` are disjoint, and a view in `reads` is disjoint from all in
    /// `writes` or empty.
    pub(crate) unsafe fn new(reads: &'a [View], writes: &'a [View]) -> Self {
        Access { reads, writes, task: PhantomData }
    }

    /// The `i`-th extent among the reads. Empty where the task also writes that extent: such a task updates in place, and
    /// finds the bytes in its write view.
    pub fn read(&self, i: usize) -> &[u8] {
        let view = self.reads[i];
        // SAFETY: by the contract of `new` the memory is mapped and only read meanwhile; it is initialised because
        // anonymous mappings start as zeros.
        unsafe { std::slice::from_raw_parts(view.start, view.len) }
    }

    /// The `i`-th extent among the writes.
    pub fn write(&mut self, i: usize) -> &mut [u8] {
        let view = self.writes[i];
        // SAFETY: by the contract of `new` nobody else touches this memory, and `&mut self` keeps other views of this
        // task away; it is initialised because anonymous mappings start as zeros.
        unsafe { std::slice::from_raw_parts_mut(view.start, view.len) }
    }

    /// [`Access::read`] as `f32`.
    pub fn read_f32(&self, i: usize) -> &[f32] {
        bytemuck::cast_slice(self.read(i))
    }

    /// [`Access::write`] as `f32`.
    pub fn write_f32(&mut self, i: usize) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.write(i))
    }

    /// All reads and all writes, in order, borrowed at once.
    pub fn split(
        &mut self,
    ) -> (impl ExactSizeIterator<Item = &[u8]>, impl ExactSizeIterator<Item = &mut [u8]>) {
        // SAFETY: as in `read`; by the contract of `new` no read view overlaps a write view.
        let reads = self.reads.iter().map(|v| unsafe { std::slice::from_raw_parts(v.start, v.len) });
        // SAFETY: as in `write`; by the contract of `new` the write views are disjoint from each other, and each is given
        // out once.
        let writes = self.writes.iter().map(|v| unsafe { std::slice::from_raw_parts_mut(v.start, v.len) });
        (reads, writes)
    }

    /// [`Access::split`] as `f32`.
    pub fn split_f32(
        &mut self,
    ) -> (impl ExactSizeIterator<Item = &[f32]>, impl ExactSizeIterator<Item = &mut [f32]>) {
        let (reads, writes) = self.split();
        (reads.map(bytemuck::cast_slice), writes.map(bytemuck::cast_slice_mut))
    }
}

/// What a task puts work on a stream with: the stream, and the addresses of the task's extents.
///
/// Indices out of range panic, like those of a slice; the store turns a panic of a task into an error that names it.
pub struct StreamAccess<'a> {
    pub(crate) device: &'a dyn Device,
    pub(crate) stream: Stream,
    pub(crate) reads: &'a [View],
    pub(crate) writes: &'a [View],
}

/// Where an extent lies, as the device addresses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRange {
    /// Address of the first byte: a `CUdeviceptr` of CUDA.
    pub address: u64,
    /// Length.
    pub bytes: Bytes,
}

impl StreamAccess<'_> {
    /// The stream to put the work on. Work put elsewhere is not ordered by the store.
    pub fn stream(&self) -> Stream {
        self.stream
    }

    /// Puts a copy on the stream, between addresses of the device, of host memory, or of one each. With host memory that is not
    /// [pinned](crate::durable::AlignedBuf::pin) the call may wait for it.
    ///
    /// # Errors
    ///
    /// The driver's.
    ///
    /// # Safety
    ///
    /// Both ranges stay valid until the task has completed, and nobody uses them meanwhile against the order of the store.
    pub unsafe fn copy(&self, from: u64, to: u64, bytes: Bytes) -> Result<(), BoxError> {
        let pointer = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        // SAFETY: by this function's contract.
        unsafe { self.device.copy(self.stream, pointer(from), pointer(to), bytes.get() as usize) }
    }

    /// The extents among the reads, in their order. Empty where the task also writes that extent.
    pub fn reads(&self) -> impl ExactSizeIterator<Item = DeviceRange> {
        self.reads.iter().map(|view| view.range())
    }

    /// The extents among the writes, in their order.
    pub fn writes(&self) -> impl ExactSizeIterator<Item = DeviceRange> {
        self.writes.iter().map(|view| view.range())
    }

    /// The `i`-th extent among the reads. Empty where the task also writes that extent.
    pub fn read(&self, i: usize) -> DeviceRange {
        self.reads[i].range()
    }

    /// The `i`-th extent among the writes.
    pub fn write(&self, i: usize) -> DeviceRange {
        self.writes[i].range()
    }
}

impl View {
    pub(crate) fn new(start: *mut u8, len: usize) -> View {
        View { start, len }
    }

    pub(crate) fn window(self) -> Window {
        Window { start: self.start, len: self.len }
    }

    pub(crate) fn start(self) -> *mut u8 {
        self.start
    }

    pub(crate) fn len(self) -> usize {
        self.len
    }

    fn range(self) -> DeviceRange {
        DeviceRange { address: self.start.expose_provenance() as u64, bytes: Bytes(self.len as u64) }
    }

    pub(crate) fn empty(self) -> View {
        View { len: 0, ..self }
    }
}
