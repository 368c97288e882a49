//! The one error type of this crate.

use std::io;
use std::path::{Path, PathBuf};

use lazy_model::{Bytes, Lane, Tier};

/// Any error a task may return.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// What went wrong in the store, its spill file or a durable file, and what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// No free range of a tier is long enough. Nothing was moved elsewhere to make room.
    #[error(
        "{tier} has no free range of {wanted}: {live} of {budget}{} are in use and the longest free range is \
         {longest}; raise the {tier} budget or place less there",
        beside_staging(*.staging)
    )]
    OutOfBudget {
        /// The tier asked for.
        tier: Tier,
        /// Bytes asked for, padding included.
        wanted: Bytes,
        /// Bytes in use.
        live: Bytes,
        /// The tier's budget, less the staging.
        budget: Bytes,
        /// What staging for NVMe takes of the tier besides.
        staging: Bytes,
        /// The longest free range.
        longest: Bytes,
    },
    /// A folder of durable files has an owner.
    #[error("{} is in use by another store, here or in another process; stop that one or name another folder", path.display())]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// A range of a schedule lies outside the tier's budget.
    #[error(
        "range {offset}+{wanted} lies outside the {tier} budget of {budget}; the schedule was made for a larger \
         budget: raise it or plan again"
    )]
    OutsideBudget {
        /// The tier asked for.
        tier: Tier,
        /// Offset asked for.
        offset: u64,
        /// Bytes asked for, padding included.
        wanted: Bytes,
        /// The tier's budget.
        budget: Bytes,
    },
    /// A range of a schedule overlaps an extent that is still held.
    #[error(
        "range {offset}+{wanted} of {tier} overlaps the live extent {other_offset}+{other}; release that extent \
         first, or plan again: the schedule's layout is wrong"
    )]
    Overlap {
        /// The tier asked for.
        tier: Tier,
        /// Offset asked for.
        offset: u64,
        /// Bytes asked for, padding included.
        wanted: Bytes,
        /// Offset of the live extent.
        other_offset: u64,
        /// Length of the live extent.
        other: Bytes,
    },
    /// An offset is not a multiple of the tier's alignment.
    #[error(
        "offset {offset} in {tier} is not a multiple of {alignment}; lay the schedule out at that alignment"
    )]
    Misaligned {
        /// The tier asked for.
        tier: Tier,
        /// Offset asked for.
        offset: u64,
        /// What it has to be a multiple of.
        alignment: u64,
    },
    /// NVMe was asked for and the store was opened without it.
    #[error("the store has no nvme tier; open it with a spill folder and a budget")]
    NoNvme,
    /// A task reads an extent that no task was submitted to write, or whose writer failed.
    #[error("task `{task}` reads {tier} extent {offset}+{bytes} before anything was submitted to write it")]
    NotWritten {
        /// The task's name.
        task: String,
        /// The extent's tier.
        tier: Tier,
        /// The extent's offset.
        offset: u64,
        /// The extent's length.
        bytes: Bytes,
    },
    /// An extent or event belongs to another store.
    #[error("task `{task}` names an {what} of another store")]
    Foreign {
        /// The task's name.
        task: String,
        /// `extent` or `event`.
        what: &'static str,
    },
    /// One extent is listed twice among the writes of a task.
    #[error("task `{task}` lists {tier} extent {offset}+{bytes} twice among its writes; list it once")]
    WrittenTwice {
        /// The task's name.
        task: String,
        /// The extent's tier.
        tier: Tier,
        /// The extent's offset.
        offset: u64,
        /// The extent's length.
        bytes: Bytes,
    },
    /// A task asks for bytes that it cannot address: those of an NVMe extent or, on the CPU beside a GPU, of one in HBM.
    #[error(
        "task `{task}` names an extent in {tier}, which it cannot address; copy it to host first, or launch the task on a stream if it is in hbm"
    )]
    NotInMemory {
        /// The task's name.
        task: String,
        /// Where the extent is.
        tier: Tier,
    },
    /// No link connects the two tiers of a copy.
    #[error("no link takes copy `{task}` from {from} to {to}; copy by way of another tier")]
    NoLink {
        /// The task's name.
        task: String,
        /// Source tier.
        from: Tier,
        /// Destination tier.
        to: Tier,
    },
    /// The two extents of a copy differ in length.
    #[error("copy `{task}` goes from an extent of {from} to one of {to}; they must be equally long")]
    CopyLength {
        /// The task's name.
        task: String,
        /// Source length.
        from: Bytes,
        /// Destination length.
        to: Bytes,
    },
    /// A task returned an error.
    #[error("task `{task}` on lane {lane} failed: {source}")]
    Task {
        /// The task's name.
        task: String,
        /// Its lane.
        lane: Lane,
        /// What it returned.
        source: BoxError,
    },
    /// A task panicked.
    #[error("task `{task}` on lane {lane} panicked: {message}")]
    Panicked {
        /// The task's name.
        task: String,
        /// Its lane.
        lane: Lane,
        /// The panic's message.
        message: String,
    },
    /// The operating system refused a transfer.
    #[error("cannot {op} {bytes} at offset {offset} of {path}: {source}", path = path.display())]
    Io {
        /// `read` or `write`.
        op: &'static str,
        /// The file.
        path: PathBuf,
        /// Where the refused request began.
        offset: u64,
        /// How long it was.
        bytes: Bytes,
        /// The reason.
        source: io::Error,
    },
    /// A transfer ended before its last byte: the end of the file, or a device that makes no progress.
    #[error(
        "short {op} at offset {offset} of {path}: wanted {wanted} bytes, got {got}; the file is shorter than it \
         should be or the device makes no progress",
        path = path.display()
    )]
    Short {
        /// `read` or `write`.
        op: &'static str,
        /// The file.
        path: PathBuf,
        /// Where the request began.
        offset: u64,
        /// Bytes asked for.
        wanted: u64,
        /// Bytes moved.
        got: u64,
    },
    /// A transfer's memory cannot be moved where it lies, and there is no slot to copy it through.
    #[error(
        "cannot {op} {bytes} at offset {offset} of {path}: the memory does not suit the file, which takes multiples of \
         {granularity} bytes, and there is nothing to copy it through; use an `AlignedBuf`",
        path = path.display()
    )]
    NoSlot {
        /// `read` or `write`.
        op: &'static str,
        /// The file.
        path: PathBuf,
        /// Where the transfer begins.
        offset: u64,
        /// Its length.
        bytes: Bytes,
        /// Addresses and lengths of requests are multiples of this.
        granularity: usize,
    },
    /// The file system cannot hold a file.
    #[error(
        "no space for {path}: {needed} needed, {free} free; free some space, choose another folder or a smaller \
         budget",
        path = path.display()
    )]
    NoSpace {
        /// The file that was to be made or written.
        path: PathBuf,
        /// Bytes needed: the file's, or what was left of a write request.
        needed: Bytes,
        /// Bytes free on its file system.
        free: Bytes,
    },
    /// The operating system refused something other than a transfer.
    #[error("cannot {op} {path}: {source}{advice}", path = shown(path), advice = advice(source))]
    File {
        /// What was tried, as a verb.
        op: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A name that must be new is taken.
    #[error("{path} exists already; it is never overwritten", path = path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A durable file's name is not a plain file name.
    #[error("`{name}` is not a plain file name")]
    BadName {
        /// The name.
        name: String,
    },
    /// An offset or length does not suit the file.
    #[error(
        "range {offset}+{bytes} does not suit {path} (length {length}): offsets and lengths are multiples of \
         {alignment} and end within the file",
        path = path.display()
    )]
    BadRange {
        /// The file.
        path: PathBuf,
        /// Offset asked for.
        offset: u64,
        /// Length asked for, in bytes.
        bytes: u64,
        /// The file's length in bytes.
        length: u64,
        /// The alignment.
        alignment: usize,
    },
    /// The asked-for I/O back end cannot be had.
    #[error("{asked} was asked for and cannot be had: {reason}")]
    BackendRefused {
        /// What was asked for.
        asked: &'static str,
        /// Why it cannot be had, and the remedy.
        reason: String,
    },
    /// Bytes came back from NVMe other than they were written.
    #[error(
        "{path} gave back other bytes than were written to it: checksum {wanted:08x} expected, {got:08x} found at offset {offset} \
         ({bytes}), in the extent at {extent} of the nvme tier; the drive, its cable or the memory is failing: check \
         them before the run goes on",
        path = path.display()
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Where in the file the piece begins.
        offset: u64,
        /// Length of the piece.
        bytes: Bytes,
        /// Where its extent begins in the NVMe tier.
        extent: u64,
        /// CRC32C of what was written.
        wanted: u32,
        /// CRC32C of what was read.
        got: u32,
    },
    /// The host budget does not hold the staging memory.
    #[error(
        "the host budget of {budget} does not hold {staging} of staging for NVMe; raise the budget or lower the staging"
    )]
    StagingOverBudget {
        /// Staging memory asked for.
        staging: Bytes,
        /// The host tier's budget.
        budget: Bytes,
    },
    /// A copy between HBM and NVMe in a store that was opened without staging.
    #[error(
        "the store was opened without staging for NVMe, so hbm and nvme are not connected; ask for some (`NvmeOptions::staging`)"
    )]
    NoStaging,
    /// A device could not copy to or from the staging memory.
    #[error("the device's copy to or from the staging memory for NVMe failed: {source}")]
    Staged {
        /// What the device said.
        source: BoxError,
    },
    /// One folder was given twice for the spill files: two files on one drive would pass for two drives.
    #[error("{} is named twice in `NvmeOptions::dirs`; name each drive's folder once", path.display())]
    SameDir {
        /// The folder.
        path: PathBuf,
    },
    /// No folder was given for the spill files.
    #[error("the nvme tier has no folder for its spill file; name at least one in `NvmeOptions::dirs`")]
    NoSpillDir,
    /// `O_DIRECT` was required and cannot be had.
    #[error(
        "O_DIRECT was required and cannot be had in {path}: {reason}; choose a folder on a local disk, or allow \
         buffered files",
        path = path.display()
    )]
    DirectRefused {
        /// The folder.
        path: PathBuf,
        /// Why it cannot be had.
        reason: String,
    },
    /// Flushing a file failed once, so what it holds since the last good flush may be gone for good.
    #[error(
        "an earlier flush of {path} failed, so its unflushed bytes may be lost and a second try would hide it; \
         go back to the last committed state",
        path = path.display()
    )]
    SyncFailed {
        /// The file.
        path: PathBuf,
    },
    /// Memory for an arena or a buffer cannot be had.
    #[error("cannot map {bytes} of memory for {what}: {source}")]
    Memory {
        /// What it was for.
        what: &'static str,
        /// How much.
        bytes: Bytes,
        /// The reason.
        source: io::Error,
    },
    /// A worker thread could not be started, or ended early.
    #[error("worker thread `{name}`: {reason}")]
    Worker {
        /// The thread.
        name: String,
        /// What happened.
        reason: String,
    },
    /// A native library cannot be loaded.
    #[error("{what} is not on this machine: none of {names} can be loaded ({reason}); {}", missing(names))]
    LibraryMissing {
        /// What the library is.
        what: &'static str,
        /// File names tried.
        names: String,
        /// The loader's reason.
        reason: String,
    },
    /// The CUDA driver refused something.
    #[error("cannot {what}: {reason}")]
    Cuda {
        /// What was tried.
        what: &'static str,
        /// The driver's reason.
        reason: String,
    },
    /// A kernel does not compile, or is not where it should be.
    #[error("kernel {name}: {log}")]
    Kernel {
        /// The module, and the kernel.
        name: String,
        /// What the compiler or the driver says.
        log: String,
    },
    /// The GPU has no room for the HBM tier.
    #[error(
        "cannot take {wanted} of GPU memory for the hbm tier, {free} are free: {reason}; plan with a smaller hbm budget or free some"
    )]
    DeviceMemory {
        /// The budget.
        wanted: Bytes,
        /// What the driver says is free.
        free: Bytes,
        /// The driver's reason.
        reason: String,
    },
    /// The driver refused to pin host memory.
    #[error(
        "cannot pin {bytes} of host memory: {reason}; lower the host budget, or raise the container's memory limit or `ulimit -l`"
    )]
    Pin {
        /// How much.
        bytes: Bytes,
        /// The driver's reason.
        reason: String,
    },
    /// A task did not run.
    #[error(
        "task `{task}` did not run: an earlier one had failed, and another caller was told of that; submit it again"
    )]
    Skipped {
        /// The task's name.
        task: String,
    },
    /// The device in use cannot do what was asked.
    #[error("{device} cannot {what}: {instead}")]
    Device {
        /// The device.
        device: &'static str,
        /// What was asked.
        what: &'static str,
        /// What to do instead.
        instead: &'static str,
    },
}

fn beside_staging(staging: Bytes) -> String {
    if staging == Bytes::ZERO {
        return String::new();
    }
    format!(" (staging for NVMe takes {staging} of the budget besides)")
}

/// A path for people, who see nothing where there is nothing.
fn shown(path: &Path) -> std::path::Display<'_> {
    let path = if path.as_os_str().is_empty() { Path::new("'' (an empty path)") } else { path };
    path.display()
}

/// What to do about a folder that takes no files, or a process that may open no more.
pub(crate) fn advice(source: &io::Error) -> &'static str {
    match source.kind() {
        _ if source.raw_os_error() == Some(rustix::io::Errno::MFILE.raw_os_error()) => {
            "; raise the limit on open files (ulimit -n)"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; choose a folder that this user may write to"
        }
        _ => "",
    }
}

/// The driver comes with the GPU, and no toolkit has it.
fn missing(names: &str) -> &'static str {
    if names.contains("libcuda.so") {
        "install the NVIDIA driver (in a container: start it with its GPUs), or take the host device"
    } else {
        "install it, or set CUDA_HOME or LD_LIBRARY_PATH to where it is"
    }
}

impl StoreError {
    pub(crate) fn staged(source: BoxError) -> Self {
        StoreError::Staged { source }
    }

    /// What a device reports: one of these, boxed.
    pub(crate) fn of_device(error: BoxError) -> Self {
        match error.downcast::<StoreError>() {
            Ok(error) => *error,
            Err(other) => StoreError::Cuda { what: "use the device", reason: other.to_string() },
        }
    }

    /// Wraps an error of a call on a file or folder.
    pub(crate) fn file(op: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        StoreError::File { op, path: path.to_owned(), source: source.into() }
    }
}
