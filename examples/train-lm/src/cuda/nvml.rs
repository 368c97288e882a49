//! Memory that is taken of a GPU, as its monitor sees it from outside.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use lazy_model::Bytes;
use lazy_store::cuda::Gpu;
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

/// Time between two samples.
const INTERVAL: Duration = Duration::from_millis(10);

/// Samples the memory that is taken of a GPU until it is asked for the most there was.
pub(crate) struct Watch {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Option<u64>>>,
}

impl Watch {
    /// Begins. What is taken now, the context among it, does not count. Others' use of the GPU does, from now on.
    pub(crate) fn start(gpu: &Gpu) -> Watch {
        let stop = Arc::new(AtomicBool::new(false));
        let (seen, name) = (Arc::clone(&stop), name_of(gpu));
        let (send, begun) = std::sync::mpsc::channel();
        let run = move || {
            // Without the monitor's library there is no answer.
            let nvml = Nvml::init().ok()?;
            let taken =
                || -> Result<u64, NvmlError> { Ok(nvml.device_by_uuid(name.as_str())?.memory_info()?.used) };
            let base = taken().ok()?;
            drop(send);
            let mut most = base;
            while !seen.load(Ordering::Relaxed) {
                most = most.max(taken().ok()?);
                std::thread::sleep(INTERVAL);
            }
            Some(most - base)
        };
        let thread = std::thread::Builder::new().name("nvml".into()).spawn(run).ok();
        // Ends when the first sample has been taken, or never will be.
        let _: Result<(), _> = begun.recv();
        Watch { stop, thread }
    }

    /// The most that was taken since the start; nothing where it could not be seen.
    pub(crate) fn most(&mut self) -> Option<Bytes> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take()?.join().ok()?.map(Bytes)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.most();
    }
}

/// The monitor's name of a GPU, whatever number it has.
fn name_of(gpu: &Gpu) -> String {
    let Ok(uuid) = gpu.context().uuid() else { return String::new() };
    let mut name = String::from("GPU");
    for (at, byte) in uuid.bytes.iter().enumerate() {
        let dash = if [0, 4, 6, 8, 10].contains(&at) { "-" } else { "" };
        // A string takes whatever is written to it.
        let _ = write!(name, "{dash}{:02x}", byte.cast_unsigned());
    }
    name
}
