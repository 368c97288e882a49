//! Aligned buffers that move into an I/O operation and come back with its result.
//!
//! One of the few modules with `unsafe`: a device pins memory by its address.

use std::fmt;
use std::sync::Arc;

use lazy_model::Bytes;
use memmap2::{Advice, MmapMut};

use crate::device::Pin;
use crate::error::StoreError;
use crate::store::Store;

/// Addresses are multiples of this: the coarsest granularity of direct files that is tried.
pub(crate) const ADDRESS: usize = 1 << 16;

/// Buffers of at least this length are asked to lie in large pages: a drive that is given its requests page by page can be
/// several times slower, and takes the more of the CPU. Shorter ones would take far more memory than they use.
const LARGE: usize = 1 << 20;

/// Length of a large page, on most systems. Buffers of at least this length start on one, so that none of their bytes but the
/// last ones lie in small pages.
const LARGE_PAGE: usize = 2 << 20;

/// Zeroed memory at an address that suits any file. Its length suits the files it was made for: a multiple of their
/// alignment.
pub struct AlignedBuf {
    /// Goes before the memory does.
    pin: Option<Pin>,
    /// Longer by its alignment. Absent where the length is zero.
    map: Option<MmapMut>,
    /// Where the bytes begin in it.
    start: usize,
    /// Length that it was made with.
    most: usize,
    len: usize,
}

impl AlignedBuf {
    /// `len` zero bytes.
    ///
    /// # Errors
    ///
    /// [`StoreError::Memory`] where the system has none.
    pub fn zeroed(len: Bytes) -> Result<Self, StoreError> {
        let refused = |source| StoreError::Memory { what: "an I/O buffer", bytes: len, source };
        let too_many = || refused(std::io::ErrorKind::OutOfMemory.into());
        let bytes = usize::try_from(len.get()).map_err(|_| too_many())?;
        if bytes == 0 {
            return Ok(AlignedBuf::none());
        }
        let alignment = if bytes >= LARGE_PAGE { LARGE_PAGE } else { ADDRESS };
        let mapped = bytes.checked_add(alignment).ok_or_else(too_many)?;
        let map = MmapMut::map_anon(mapped).map_err(refused)?;
        if bytes >= LARGE {
            // Without large pages everything works.
            let _ = map.advise(Advice::HugePage);
        }
        let start = map.as_ptr().addr().next_multiple_of(alignment) - map.as_ptr().addr();
        Ok(AlignedBuf { pin: None, map: Some(map), start, most: bytes, len: bytes })
    }

    /// No bytes.
    pub(crate) fn none() -> Self {
        AlignedBuf { pin: None, map: None, start: 0, most: 0, len: 0 }
    }

    /// Takes all its pages from the system and pins them for the copies of a store's device, for as long as the buffer lives. It
    /// is not charged to a budget. On the host device nothing is to be done.
    ///
    /// # Errors
    ///
    /// [`StoreError::Pin`] and [`StoreError::Memory`] where the system does not allow it.
    pub fn pin(&mut self, store: &Store) -> Result<(), StoreError> {
        let (Some(device), Some(map)) = (&store.inner().device, &mut self.map) else { return Ok(()) };
        let refused =
            |source| StoreError::Memory { what: "an I/O buffer", bytes: Bytes(self.most as u64), source };
        // Taken now: a lack of memory is an error here and not the end of the process later. Systems that do not know this
        // take the pages while they pin them.
        match map.advise(Advice::PopulateWrite) {
            Err(e) if e.kind() != std::io::ErrorKind::InvalidInput => return Err(refused(e)),
            _ => {}
        }
        device.bind().map_err(StoreError::of_device)?;
        let start = map.as_mut_ptr().wrapping_add(self.start);
        // SAFETY: the pin is dropped before the mapping, which never moves: fields are dropped in their order.
        let pin = unsafe { Arc::clone(device).pin(start, self.most) };
        self.pin = Some(pin.map_err(StoreError::of_device)?);
        Ok(())
    }

    /// Where its first byte lies, for copies of a device.
    pub fn address(&mut self) -> u64 {
        self.as_mut_slice().as_mut_ptr().expose_provenance() as u64
    }

    /// Shortens the buffer to its first `len` bytes, or lengthens it again, up to what it was made with: the last transfer
    /// of a file is shorter than the others. Bytes keep their values.
    pub fn set_len(&mut self, len: usize) {
        self.len = len.min(self.most);
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.map.as_deref().unwrap_or_default()[self.start..self.start + self.len]
    }

    /// The bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.map.as_deref_mut().unwrap_or_default()[self.start..self.start + self.len]
    }

    /// The bytes as `f32`, without a last part of less than four bytes.
    pub fn as_f32(&self) -> &[f32] {
        bytemuck::cast_slice(&self.as_slice()[..self.len / 4 * 4])
    }

    /// The bytes as `f32`, to be written, without a last part of less than four bytes.
    pub fn as_mut_f32(&mut self) -> &mut [f32] {
        let whole = self.len / 4 * 4;
        bytemuck::cast_slice_mut(&mut self.as_mut_slice()[..whole])
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuf of {}", Bytes(self.len as u64))
    }
}
