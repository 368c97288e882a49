//! Finding and opening GPUs.

use std::fmt;
use std::sync::{Arc, Once};

use cudarc::driver::sys::{self, CUdevice_attribute};
use cudarc::driver::{CudaContext, result};
use lazy_model::Bytes;

use super::{failed, library};
use crate::error::StoreError;

/// The oldest driver interface that has all that is used here, CUDA 12.8: events are timed by a function that is new there.
const OLDEST_DRIVER: i32 = 12_080;

/// The primary context of one GPU, which frameworks share. Cheap to clone.
#[derive(Clone)]
pub struct Gpu {
    context: Arc<CudaContext>,
    name: Arc<str>,
    capability: (u32, u32),
}

/// Whether there is a driver to talk to, and how many GPUs it has.
///
/// # Errors
///
/// [`StoreError::LibraryMissing`] without a driver library, [`StoreError::Cuda`] where it has no working GPU or is too old.
pub fn device_count() -> Result<usize, StoreError> {
    static LOADED: Once = Once::new();
    if !LOADED.is_completed() {
        // cudarc ends the thread where the library is missing, so that is found out first.
        library::load("the CUDA driver", &["libcuda.so.1", "libcuda.so"])?;
        LOADED.call_once(|| ());
    }
    let asked = |what| move |e| failed(what, e);
    let mut version = 0;
    // SAFETY: the driver is there, and fills the number it is given.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }
        .result()
        .map_err(asked("ask the driver's version"))?;
    if version < OLDEST_DRIVER {
        let reason = format!(
            "the driver knows CUDA {}.{} and this needs {}.{}; install a newer driver",
            version / 1000,
            version % 1000 / 10,
            OLDEST_DRIVER / 1000,
            OLDEST_DRIVER % 1000 / 10
        );
        return Err(StoreError::Cuda { what: "use the driver", reason });
    }
    result::init().map_err(asked("start the driver"))?;
    let count = result::device::get_count().map_err(asked("count the GPUs"))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

impl Gpu {
    /// Opens a GPU by the driver's number, from 0.
    ///
    /// # Errors
    ///
    /// Those of [`device_count`], and [`StoreError::Cuda`] where there is no such GPU or it cannot be used.
    pub fn open(ordinal: usize) -> Result<Self, StoreError> {
        let count = device_count()?;
        if ordinal >= count {
            let reason = format!("there are {count}, numbered from 0; name one of them");
            return Err(StoreError::Cuda { what: "open that GPU", reason });
        }
        let context = CudaContext::new(ordinal).map_err(|e| failed("open the GPU", e))?;
        let asked = |e| failed("ask what the GPU is", e);
        let attribute = |a| context.attribute(a).map(i32::unsigned_abs).map_err(asked);
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let name = context.name().map_err(asked)?.into();
        Ok(Gpu { context, name, capability: (major, minor) })
    }

    /// The driver's name of it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Compute capability, major and minor.
    pub fn capability(&self) -> (u32, u32) {
        self.capability
    }

    /// Multiprocessors, over which the blocks of a grid are spread.
    ///
    /// # Errors
    ///
    /// [`StoreError::Cuda`].
    pub fn multiprocessors(&self) -> Result<u32, StoreError> {
        let count = self.context.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        count.map(i32::unsigned_abs).map_err(|e| failed("ask how many multiprocessors there are", e))
    }

    /// The context, for callers that use cudarc themselves.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Free and total memory.
    ///
    /// # Errors
    ///
    /// [`StoreError::Cuda`].
    pub fn memory(&self) -> Result<(Bytes, Bytes), StoreError> {
        let (free, total) = self.context.mem_get_info().map_err(|e| failed("ask for free memory", e))?;
        Ok((Bytes(free as u64), Bytes(total as u64)))
    }

    /// Makes the GPU current on the calling thread, as the driver's calls need it.
    ///
    /// # Errors
    ///
    /// [`StoreError::Cuda`].
    pub fn bind(&self) -> Result<(), StoreError> {
        // Not the context's own method: that reports what ailed others who use the same object.
        // SAFETY: the context is retained for as long as this lives.
        unsafe { result::ctx::set_current(self.context.cu_ctx()) }
            .map_err(|e| failed("make the GPU current", e))
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({})", self.context.ordinal(), self.name)
    }
}
