//! How a store or a folder of durable files is opened, and what was obtained.

use std::fmt;
use std::path::PathBuf;

use lazy_model::{Bytes, BytesPerSecond, Seconds};

use crate::io::fs::UNKNOWN;

/// How to open a store. Budgets are hard limits.
#[derive(Clone, Debug, Default)]
pub struct StoreOptions {
    /// The device whose memory the HBM tier is.
    pub device: DeviceChoice,
    /// Budget of the HBM tier, taken from the device when the store is opened. On the host device, an arena in RAM of its
    /// own.
    pub hbm: Bytes,
    /// Budget of the host tier. Beside a GPU, all of it is touched and pinned when the store is opened.
    pub host: Bytes,
    /// The NVMe tier, if there is to be one.
    pub nvme: Option<NvmeOptions>,
    /// Rates that transfers are slowed down to, on the host device.
    pub limits: LinkLimits,
    /// Fill every range with `0xFF` bytes (a NaN in `f32`, `bf16` and `f64`) before the first task that writes it under
    /// a new owner, so that what a task left unwritten, and whatever an earlier owner still reads, is seen.
    pub poison: bool,
    /// Who runs the queues.
    pub order: QueueOrder,
}

/// The device of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// RAM and the CPU: two arenas, and tasks that do their work on the store's threads.
    #[default]
    Host,
    /// A GPU through the CUDA driver, by number; its lanes are streams in its primary context, which frameworks share.
    Cuda {
        /// The driver's number of the GPU, from 0.
        ordinal: usize,
    },
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

/// The NVMe tier of a store: one spill file, or one a drive.
///
/// ```
/// use lazy_store::{Bytes, Checksum, NvmeOptions};
///
/// let options = NvmeOptions { checksum: Checksum::Crc32c, ..NvmeOptions::new("/mnt/nvme/scratch", Bytes::from_gib(100.0)) };
/// assert_eq!(options.dirs.len(), 1);
/// ```
///
/// Bytes from host RAM to NVMe and back. Nothing waits until `get` does: each task waits for those before it that use its extents.
///
/// ```
/// use lazy_store::{Bytes, NvmeOptions, Store, StoreOptions, Tier};
///
/// # let folder = tempfile::tempdir()?;
/// # let scratch = folder.path();
/// let nvme = NvmeOptions::new(scratch, Bytes::from_mib(8));
/// let store = Store::open(StoreOptions { host: Bytes::from_mib(2), nvme: Some(nvme), ..StoreOptions::default() })?;
/// let host = store.put("boundary 0", Tier::Host, vec![7; 1 << 20])?;
/// let spilled = store.prefetch("boundary 0 out", &host, Tier::Nvme)?;
/// store.release(host); // its next owner waits for the copy
/// let back = store.prefetch("boundary 0 in", &spilled, Tier::Host)?;
/// store.release(spilled);
/// assert_eq!(store.get(&back)?, vec![7; 1 << 20]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct NvmeOptions {
    /// Folders for the spill files of this run, one a drive and none twice; each is made, private to the user, if absent. Extents
    /// are striped over them, a request to each in turn.
    pub dirs: Vec<PathBuf>,
    /// Size of the tier, allocated at open: that of all spill files together.
    pub bytes: Bytes,
    /// The I/O back end.
    pub backend: BackendChoice,
    /// Whether to bypass the page cache.
    pub direct: DirectChoice,
    /// Whether what is read is compared with what was written.
    pub checksum: Checksum,
    /// What each drive's maker warrants to be written to it in its life (TBW), for the estimate in [`DriveReport`].
    pub tbw: Option<Bytes>,
    /// Memory for copies between HBM and NVMe that pass through no host extent, charged to the host budget; zero for no
    /// such copies. Half of it serves each direction, in slots of one request (1 MiB), two at least: so it is rounded down to a
    /// multiple of 2 MiB, and anything below 4 MiB is taken as 4 MiB.
    pub staging: Bytes,
    /// Longest request to cuFile, which several threads make at once: from 1 MiB to 1 GiB. Other back ends, and extents striped
    /// over several drives, take 1 MiB.
    pub cufile_request: Bytes,
    /// Keep a [`BoundaryRecord`] of every extent before it is written and after it was read back: much slower, and meant
    /// for finding out which copy changed a value. The latest 65,536 are kept until
    /// [`take_boundary_records`](crate::Store::take_boundary_records) takes them.
    pub debug_boundaries: bool,
}

impl NvmeOptions {
    /// One spill file of `bytes` in `dir`, with the best back end and cache mode to be had, no checksums and no staging.
    pub fn new(dir: impl Into<PathBuf>, bytes: Bytes) -> Self {
        NvmeOptions {
            dirs: vec![dir.into()],
            bytes,
            backend: BackendChoice::Auto,
            direct: DirectChoice::Auto,
            checksum: Checksum::Off,
            tbw: None,
            staging: Bytes::ZERO,
            cufile_request: Bytes::from_mib(4),
            debug_boundaries: false,
        }
    }
}

/// What protects extents on NVMe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checksum {
    /// Nothing but the drive's own means.
    #[default]
    Off,
    /// CRC32C of each request, computed while others are in flight, kept in memory, and compared after each read.
    Crc32c,
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
    /// A pool of threads with positioned reads and writes.
    Posix,
    /// cuFile (GPUDirect Storage), direct or in compatibility mode, or an error; the mode says which.
    Cufile,
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
    /// io_uring; [`NvmeMode`] says whether files and buffers are registered.
    Uring,
    /// A pool of threads with positioned reads and writes (`pread`, `pwrite`).
    Posix,
    /// cuFile, from the drive to the GPU without host memory in between.
    CufileDirect,
    /// cuFile in compatibility mode: through host memory of its own.
    CufileCompat,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Backend::Uring => "io_uring",
            Backend::Posix => "pread/pwrite",
            Backend::CufileDirect => "cuFile, direct",
            Backend::CufileCompat => "cuFile, compatibility mode",
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
    /// Whether the kernel holds the files open for its requests (io_uring's registered files).
    pub registered_files: bool,
    /// Whether the kernel holds the memory of transfers pinned: the host arena and the staging ring, or for cuFile the
    /// arena in HBM.
    pub registered_buffers: bool,
    /// Name of the file system; `unknown` where this crate has no name for it.
    pub filesystem: &'static str,
    /// Why something less than the best was taken, one entry each.
    pub fallbacks: Vec<String>,
}

impl fmt::Display for NvmeMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.backend, if self.direct { "O_DIRECT" } else { "buffered" })?;
        if self.filesystem != UNKNOWN {
            write!(f, " on {}", self.filesystem)?;
        }
        let registered = [(self.registered_files, "files"), (self.registered_buffers, "buffers")];
        let registered: Vec<&str> = registered.into_iter().filter(|r| r.0).map(|r| r.1).collect();
        if !registered.is_empty() {
            write!(f, ", registered {}", registered.join(" and "))?;
        }
        if !self.fallbacks.is_empty() {
            write!(f, " ({})", self.fallbacks.join("; "))?;
        }
        Ok(())
    }
}

/// Bytes moved to or from one drive, and the time it took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Traffic {
    /// Bytes of completed requests.
    pub bytes: Bytes,
    /// Time in which at least one request of this direction was in flight on this drive.
    pub busy: Seconds,
}

impl Traffic {
    /// Bytes a busy second, once there were any.
    pub fn rate(&self) -> Option<BytesPerSecond> {
        (self.bytes > Bytes::ZERO && self.busy.get() > 0.0)
            .then(|| BytesPerSecond(self.bytes.get() as f64 / self.busy.get()))
    }
}

/// What one drive of the NVMe tier did.
#[derive(Clone, Debug)]
pub struct DriveReport {
    /// The folder of its spill file.
    pub dir: PathBuf,
    /// How its file is read and written, and on which file system.
    pub mode: NvmeMode,
    /// Written since the step began.
    pub step_written: Traffic,
    /// Read since the step began.
    pub step_read: Traffic,
    /// Written since the store was opened.
    pub written: Traffic,
    /// Read since the store was opened.
    pub read: Traffic,
    /// In one direction at least, its rate in this run is less than half of that of the fastest drive.
    pub slow: bool,
    /// Estimate of the share of [`NvmeOptions::tbw`] that this run's writes used: bytes written over that figure. What
    /// the drive writes on its own account (its write amplification) comes on top.
    pub tbw_used: Option<f64>,
}

/// Which side of a copy a [`BoundaryRecord`] was taken on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoundarySide {
    /// Of the bytes about to be written to NVMe.
    BeforeWrite,
    /// Of the bytes just read back.
    AfterRead,
}

/// Values of an extent as numbers of one format. A trailing part of a number is left out.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ValueStats {
    /// How many there are.
    pub count: u64,
    /// How many of them are finite.
    pub finite: u64,
    /// Largest magnitude among the finite ones.
    pub abs_max: f64,
    /// Mean magnitude of the finite ones.
    pub abs_mean: f64,
}

/// What an extent held on one side of a copy to or from NVMe: see [`NvmeOptions::debug_boundaries`].
#[derive(Clone, Debug, PartialEq)]
pub struct BoundaryRecord {
    /// Which side.
    pub side: BoundarySide,
    /// Where the extent begins in the NVMe tier.
    pub offset: u64,
    /// Its length.
    pub bytes: Bytes,
    /// CRC32C of its bytes.
    pub checksum: u32,
    /// The bytes as `f32`.
    pub f32: ValueStats,
    /// The bytes as `bf16`.
    pub bf16: ValueStats,
}
