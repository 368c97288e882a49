//! How a store or a folder of durable files is opened, and what was obtained.

use std::fmt;
use std::path::PathBuf;

use lazy_model::{Bytes, BytesPerSecond};

/// How to open a store. Budgets are hard limits.
#[derive(Clone, Debug, Default)]
pub struct StoreOptions {
    /// Budget of the HBM tier. On the host device, an arena in RAM of its own.
    pub hbm: Bytes,
    /// Budget of the host tier.
    pub host: Bytes,
    /// The NVMe tier, if there is to be one.
    pub nvme: Option<NvmeOptions>,
    /// Rates that transfers are slowed down to.
    pub limits: LinkLimits,
    /// Fill every range with `0xFF` bytes (a NaN in `f32`, `bf16` and `f64`) before the first task that writes it under
    /// a new owner, so that what a task left unwritten, and whatever an earlier owner still reads, is seen.
    pub poison: bool,
    /// Who runs the queues.
    pub order: QueueOrder,
}

/// Who runs the queues, and in which order tasks of different lanes run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QueueOrder {
    /// One thread a lane.
    #[default]
    Threads,
    /// No threads: whoever waits (for an event, or for everything) runs the tasks, one at a time, and draws the lane of
    /// the next one among those that can run from this seed. The same submissions run in the same order every time.
    Seeded(u64),
}

/// The spill file of a store.
#[derive(Clone, Debug)]
pub struct NvmeOptions {
    /// Folder for the spill file of this run; made, private to the user, if absent.
    pub dir: PathBuf,
    /// Size of the spill file, allocated at open.
    pub bytes: Bytes,
    /// The I/O back end.
    pub backend: BackendChoice,
    /// Whether to bypass the page cache.
    pub direct: DirectChoice,
}

/// Rates of the host device's links. A transfer takes at least its bytes divided by the rate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkLimits {
    /// Host to device.
    pub h2d: Option<BytesPerSecond>,
    /// Device to host.
    pub d2h: Option<BytesPerSecond>,
    /// Writes to NVMe.
    pub nvme_write: Option<BytesPerSecond>,
    /// Reads from NVMe.
    pub nvme_read: Option<BytesPerSecond>,
}

/// The I/O back end asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendChoice {
    /// io_uring where the kernel allows it, else positioned reads and writes; the mode says which and why.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// Positioned reads and writes.
    Posix,
}

/// Whether files bypass the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirectChoice {
    /// `O_DIRECT` where a real write and read back works, else buffered; the mode says which and why.
    #[default]
    Auto,
    /// `O_DIRECT` or an error.
    Required,
    /// Buffered.
    Off,
}

/// How durable files are read and written.
#[derive(Clone, Copy, Debug)]
pub struct IoOptions {
    /// The I/O back end.
    pub backend: BackendChoice,
    /// Whether to bypass the page cache.
    pub direct: DirectChoice,
    /// Requests in flight at once in each direction, and transfers queued before `read_at` and `write_at` block.
    pub depth: usize,
}

impl Default for IoOptions {
    fn default() -> Self {
        IoOptions { backend: BackendChoice::Auto, direct: DirectChoice::Auto, depth: 32 }
    }
}

/// The I/O back end obtained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// io_uring, without registered buffers.
    Uring,
    /// Positioned reads and writes (`pread`, `pwrite`).
    Posix,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backend::Uring => "io_uring",
            Backend::Posix => "pread/pwrite",
        })
    }
}

/// What was asked for and what was obtained for files in one folder, settled by writing and reading back a probe file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeMode {
    /// The back end asked for.
    pub asked_backend: BackendChoice,
    /// The back end in use.
    pub backend: Backend,
    /// The cache mode asked for.
    pub asked_direct: DirectChoice,
    /// Whether files bypass the page cache (`O_DIRECT`).
    pub direct: bool,
    /// Offsets and lengths of extents and durable transfers are multiples of this: what the probe found to work, and at
    /// least 4096 bytes, so that files suit drives with 4 KiB sectors too.
    pub alignment: usize,
    /// Smallest multiple for offsets, lengths and addresses that the file system takes; 1 for buffered files.
    pub granularity: usize,
    /// Name of the file system, where known.
    pub filesystem: &'static str,
    /// Why something less than the best was taken, one entry for each fall back of an `Auto` choice.
    pub fallbacks: Vec<String>,
}

impl fmt::Display for NvmeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.backend, if self.direct { "O_DIRECT" } else { "buffered" })?;
        if !self.fallbacks.is_empty() {
            write!(f, " ({})", self.fallbacks.join("; "))?;
        }
        Ok(())
    }
}
