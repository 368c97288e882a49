//! The spill file of a store: the NVMe tier.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use lazy_model::Bytes;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use crate::buffer::AlignedBuf;
use crate::error::{BoxError, StoreError};
use crate::io::{Buffer, OpenFile, Queue, fs, probe, transfer};
use crate::options::{BoundaryRecord, Checksum, DriveReport, NvmeMode, NvmeOptions};
use crate::store::Store;

/// Requests in flight at once in each direction.
const DEPTH: usize = 16;
/// Length of the buffer through which bytes go that a direct request cannot take where they lie.
const BOUNCE: usize = 4 << 20;

/// Copies between a device's memory and a staging slot in host memory, on a stream of its own. The slot belongs to the copy
/// from `start` until `wait` returns; slots are numbered below [`Spill::staging_slots`], and each has at most one copy
/// under way.
pub(crate) trait StagedCopy {
    /// Starts the copy of `staging.len()` bytes at position `at` of the extent: into the slot for a write to NVMe, out of it
    /// for a read.
    fn start(&mut self, slot: usize, at: u64, staging: &mut [u8]) -> Result<(), BoxError>;

    /// Waits for the copy that was started with that slot.
    fn wait(&mut self, slot: usize) -> Result<(), BoxError>;
}

/// The copies of the host device, whose HBM is memory like any other.
pub(crate) enum HostCopy<'a> {
    /// Out of these bytes, into slots.
    Out(&'a [u8]),
    /// Out of slots, into these bytes.
    In(&'a mut [u8]),
}

impl StagedCopy for HostCopy<'_> {
    fn start(&mut self, _slot: usize, at: u64, staging: &mut [u8]) -> Result<(), BoxError> {
        let range = at as usize..at as usize + staging.len();
        match self {
            HostCopy::Out(bytes) => staging.copy_from_slice(bytes.get(range).ok_or(OUTSIDE)?),
            HostCopy::In(bytes) => bytes.get_mut(range).ok_or(OUTSIDE)?.copy_from_slice(staging),
        }
        Ok(())
    }

    fn wait(&mut self, _slot: usize) -> Result<(), BoxError> {
        Ok(())
    }
}

const OUTSIDE: &str = "a piece lies outside the extent";

/// A preallocated file, written by one lane and read by another.
pub(crate) struct Spill {
    file: OpenFile,
    mode: NvmeMode,
    writer: Mutex<Direction>,
    reader: Mutex<Direction>,
    removed: AtomicBool,
    staging: Bytes,
}

/// What one lane's worker needs.
struct Direction {
    queue: Box<dyn Queue>,
    bounce: AlignedBuf,
}

impl Spill {
    pub(crate) fn open(options: &NvmeOptions) -> Result<Self, StoreError> {
        Spill::open_with(options, |queue| queue)
    }

    /// Makes the spill file, to be used through what `wrap` makes of the queues.
    pub(crate) fn open_with(
        options: &NvmeOptions,
        wrap: impl Fn(Box<dyn Queue>) -> Box<dyn Queue>,
    ) -> Result<Self, StoreError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let dir = options.dirs.first().ok_or(StoreError::NoSpillDir)?;
        if options.dirs.len() > 1 || options.checksum != Checksum::Off || options.debug_boundaries {
            let (asked, reason) =
                ("several drives, checksums or records of boundaries", "not yet".to_owned());
            return Err(StoreError::BackendRefused { asked, reason });
        }
        make_private_dir(dir)?;
        let mode = probe::settle(dir, options.backend, options.direct)?;
        let direction = || {
            let queue = probe::queue(mode.backend, DEPTH)
                .map_err(|reason| StoreError::BackendRefused { asked: "the probed back end", reason })?;
            let bounce = AlignedBuf::zeroed(Bytes(BOUNCE as u64))?;
            Ok::<_, StoreError>(Mutex::new(Direction { queue: wrap(queue), bounce }))
        };
        let (writer, reader) = (direction()?, direction()?);
        let len = options.bytes.align_up(mode.alignment as u64);
        let (file, path) = loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = dir.join(format!("spill-{}-{count}", std::process::id()));
            match create(&path, len, mode.direct) {
                // Left by a killed process of our number.
                Err(StoreError::Exists { .. }) => {}
                Err(error) => return Err(error),
                Ok(file) => break (file, path),
            }
        };
        let file = OpenFile { file, path, granularity: mode.granularity };
        Ok(Spill { file, mode, writer, reader, removed: AtomicBool::new(false), staging: options.staging })
    }

    pub(crate) fn mode(&self) -> &NvmeMode {
        &self.mode
    }

    /// Removes the file's name. Its space is free once the store's last extent is gone.
    pub(crate) fn remove(&self) {
        if !self.removed.swap(true, Ordering::Relaxed) {
            // Nothing can be done about a failure here; the sweep of dead run folders takes what is left.
            let _ = std::fs::remove_file(&self.file.path);
        }
    }

    /// Writes `bytes` and zeros up to the next multiple of the alignment.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let mut lane = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let Direction { queue, bounce } = &mut *lane;
        let (direct, rest) = bytes.split_at(self.direct_part(bytes));
        transfer(queue.as_mut(), &self.file, offset, Buffer::Write(direct))?;
        let mut at = offset + direct.len() as u64;
        for part in rest.chunks(BOUNCE) {
            let padded = part.len().next_multiple_of(self.mode.alignment);
            let staged = &mut bounce.as_mut_slice()[..padded];
            staged[..part.len()].copy_from_slice(part);
            staged[part.len()..].fill(0);
            transfer(queue.as_mut(), &self.file, at, Buffer::Write(staged))?;
            at += padded as u64;
        }
        Ok(())
    }

    /// Reads `bytes.len()` bytes.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), StoreError> {
        let mut lane = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        let Direction { queue, bounce } = &mut *lane;
        let (direct, rest) = bytes.split_at_mut(self.direct_part(bytes));
        let mut at = offset + direct.len() as u64;
        transfer(queue.as_mut(), &self.file, offset, Buffer::Read(direct))?;
        for part in rest.chunks_mut(BOUNCE) {
            let padded = part.len().next_multiple_of(self.mode.alignment);
            let staged = &mut bounce.as_mut_slice()[..padded];
            transfer(queue.as_mut(), &self.file, at, Buffer::Read(staged))?;
            part.copy_from_slice(&staged[..part.len()]);
            at += padded as u64;
        }
        Ok(())
    }

    /// The staging memory that was asked for, to be charged to the host budget.
    pub(crate) fn staging(&self) -> Bytes {
        self.staging
    }

    #[allow(dead_code, reason = "for devices that pin it")]
    /// Slots of the staging memory, both directions together.
    pub(crate) fn staging_slots(&self) -> usize {
        2
    }

    /// Address and length of the staging memory, page-aligned, so that a device can pin it.
    pub(crate) fn staging_region(&self) -> (*mut u8, usize) {
        (std::ptr::null_mut(), 0)
    }

    /// Writes `len` bytes that `copy` brings into staging slots, piece by piece.
    pub(crate) fn write_staged(
        &self,
        offset: u64,
        len: u64,
        copy: &mut dyn StagedCopy,
    ) -> Result<(), StoreError> {
        let mut at = 0;
        let mut piece = vec![0; BOUNCE];
        while at < len {
            let n = (len - at).min(BOUNCE as u64) as usize;
            copy.start(0, at, &mut piece[..n]).and_then(|()| copy.wait(0)).map_err(StoreError::staged)?;
            self.write(offset + at, &piece[..n])?;
            at += n as u64;
        }
        Ok(())
    }

    /// Reads `len` bytes, which `copy` takes out of staging slots, piece by piece.
    pub(crate) fn read_staged(
        &self,
        offset: u64,
        len: u64,
        copy: &mut dyn StagedCopy,
    ) -> Result<(), StoreError> {
        let mut at = 0;
        let mut piece = vec![0; BOUNCE];
        while at < len {
            let n = (len - at).min(BOUNCE as u64) as usize;
            self.read(offset + at, &mut piece[..n])?;
            copy.start(1, at, &mut piece[..n]).and_then(|()| copy.wait(1)).map_err(StoreError::staged)?;
            at += n as u64;
        }
        Ok(())
    }

    /// Begins a step: the drives' figures of the step start at zero.
    pub(crate) fn start_step(&self) {}

    /// What each drive did.
    pub(crate) fn drives(&self) -> Vec<DriveReport> {
        Vec::new()
    }

    /// Takes the records of `debug_boundaries`.
    pub(crate) fn take_boundary_records(&self) -> Vec<BoundaryRecord> {
        Vec::new()
    }

    /// How many bytes from the start the system can take where they lie.
    fn direct_part(&self, bytes: &[u8]) -> usize {
        let aligned = bytes.as_ptr().addr().is_multiple_of(self.mode.granularity);
        if aligned { bytes.len() / self.mode.alignment * self.mode.alignment } else { 0 }
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        self.remove();
    }
}

/// Makes a folder that only this user can enter, unless it is there already.
pub(crate) fn make_private_dir(dir: &Path) -> Result<(), StoreError> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|e| StoreError::file("make the folder", dir, e))
}

/// Makes a file of `len` bytes, all of them allocated. Where that fails, nothing is left behind.
pub(crate) fn create(path: &Path, len: Bytes, direct: bool) -> Result<File, StoreError> {
    let mut flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    if direct {
        flags |= OFlags::DIRECT;
    }
    let file = match rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(fd) => File::from(fd),
        Err(Errno::EXIST) => return Err(StoreError::Exists { path: path.to_owned() }),
        Err(e) => return Err(StoreError::file("create", path, e)),
    };
    match allocate(&file, path, len) {
        Ok(()) => Ok(file),
        Err(error) => {
            let _ = std::fs::remove_file(path);
            Err(error)
        }
    }
}

fn allocate(file: &File, path: &Path, len: Bytes) -> Result<(), StoreError> {
    if len == Bytes::ZERO {
        return Ok(());
    }
    let full = |free| StoreError::NoSpace { path: path.to_owned(), needed: len, free };
    let free = fs::free_space(file.as_fd(), path)?;
    if free < len {
        return Err(full(free));
    }
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len.get()) {
        Ok(()) => Ok(()),
        Err(Errno::NOSPC | Errno::DQUOT) => Err(full(fs::free_space(file.as_fd(), path)?)),
        // Some file systems cannot allocate ahead; the free space was compared, and writes report what they meet.
        Err(Errno::OPNOTSUPP) => file.set_len(len.get()).map_err(|e| StoreError::file("size", path, e)),
        Err(e) => Err(StoreError::file("allocate", path, e)),
    }
}

impl Store {
    /// What each drive of the NVMe tier did in this step and this run, in the order of the folders.
    pub fn drives(&self) -> Vec<DriveReport> {
        self.inner().spill.as_ref().map_or_else(Vec::new, |spill| spill.drives())
    }

    /// Takes the records kept since the last call, oldest first: see [`NvmeOptions::debug_boundaries`].
    pub fn take_boundary_records(&self) -> Vec<BoundaryRecord> {
        self.inner().spill.as_ref().map_or_else(Vec::new, |spill| spill.take_boundary_records())
    }
}
