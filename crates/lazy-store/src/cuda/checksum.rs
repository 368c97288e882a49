//! CRC-32C of device memory, where it lies.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::result;

use super::failed;
use super::gpu::Gpu;
use super::kernels::{Arg, Grid, Kernel, Module};
use crate::device::Stream;
use crate::error::StoreError;

/// Checksums made in one launch.
const MOST: usize = 4096;
const THREADS: u32 = 256;

/// The kernel, and pinned memory for what it finds.
pub(crate) struct Checksums {
    gpu: Gpu,
    kernel: Kernel,
    found: Mutex<Found>,
}

struct Found(*mut u32);

// SAFETY: memory of the driver's, used by whoever holds the lock around it.
unsafe impl Send for Found {}

impl Checksums {
    pub(crate) fn new(gpu: &Gpu) -> Result<Self, StoreError> {
        let module = Module::compile(gpu, "crc32c", include_str!("crc32c.cu"), &[])?;
        let kernel = module.kernel("crc32c")?;
        gpu.bind()?;
        // SAFETY: pinned memory of this length, given back in `drop`.
        let found = unsafe { result::malloc_host(MOST * size_of::<u32>(), 0) };
        let found = found.map_err(|e| failed("allocate memory for checksums", e))?;
        Ok(Checksums { gpu: gpu.clone(), kernel, found: Mutex::new(Found(found.cast())) })
    }

    /// The checksums of the pieces of `piece` bytes (a multiple of 16) that `len` bytes at `start` consist of, the last one
    /// maybe shorter. Waits for them.
    ///
    /// # Safety
    ///
    /// The memory is the GPU's, 16-byte aligned, and nobody writes it meanwhile.
    pub(crate) unsafe fn of(
        &self,
        stream: Stream,
        start: *const u8,
        len: usize,
        piece: usize,
    ) -> Result<Vec<u32>, StoreError> {
        self.gpu.bind()?;
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = Vec::with_capacity(len.div_ceil(piece));
        let address = start.expose_provenance() as u64;
        for at in (0..len).step_by(MOST * piece) {
            let bytes = (len - at).min(MOST * piece);
            let count = bytes.div_ceil(piece);
            let args = [
                Arg::Address(address + at as u64),
                Arg::U64(bytes as u64),
                Arg::U32(piece as u32),
                Arg::Address(found.0.expose_provenance() as u64),
            ];
            // SAFETY: the kernel's parameters; it reads the range, which is this function's contract, and writes `count`
            // numbers, at most `MOST`, which this waits for.
            unsafe {
                self.kernel.launch(stream, Grid::linear(count as u32, THREADS), &args)?;
                result::stream::synchronize(stream.0.cast()).map_err(|e| failed("make checksums", e))?;
            }
            // SAFETY: `count` numbers were written, and the lock keeps others away.
            all.extend_from_slice(unsafe { std::slice::from_raw_parts(found.0, count) });
        }
        Ok(all)
    }
}

impl Drop for Checksums {
    fn drop(&mut self) {
        if self.gpu.bind().is_ok() {
            let found = self.found.get_mut().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: allocated in `new`; no launch is under way, since each is waited for.
            let _ = unsafe { result::free_host(found.0.cast()) };
        }
    }
}
