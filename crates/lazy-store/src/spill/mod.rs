//! The spill files of a store: the NVMe tier.

mod device;
mod host;
mod seals;

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lazy_model::Bytes;

pub(crate) use crate::io::transfer::StagedCopy;
pub(crate) use host::HostCopy;

use crate::device::{Device, Stream};
use crate::error::StoreError;
#[cfg(target_os = "linux")]
use crate::io::cufile::Cufile;
use crate::io::make::{create, make_private_dir};
use crate::io::note::{Note, Watch};
#[cfg(target_os = "linux")]
use crate::io::pool::Pool;
use crate::io::slots::Region;
use crate::io::stripes::{OpenFile, Stripes, lengths};
use crate::io::transfer::{Engine, Feed, Job, Memory};
use crate::io::{Op, Queue, Window, available, probe};
use crate::options::{
    Backend, BoundaryRecord, BoundarySide, Checksum, DriveReport, NvmeMode, NvmeOptions, Traffic,
};
use crate::store::Store;
use seals::Seals;

/// Requests in flight at once in each direction: enough that the drive has work while this process makes checksums.
const DEPTH: usize = 32;
/// Slots of each direction where no staging is asked for: for tails, and for extents whose address does not suit.
const BOUNCE_SLOTS: usize = 4;
/// With fewer slots, copy and drive would take turns.
const LEAST_STAGING_SLOTS: usize = 2;
/// Records of boundaries kept at most.
const MOST_RECORDS: usize = 1 << 16;
/// A drive slower than this share of the fastest one is called slow.
const SLOW: f64 = 0.5;

/// Preallocated files, written by one lane and read by another.
pub(crate) struct Spill {
    options: NvmeOptions,
    /// That of all drives together.
    mode: NvmeMode,
    /// That of each drive.
    modes: Vec<NvmeMode>,
    // The queues come before what their requests use.
    writer: Mutex<Engine>,
    reader: Mutex<Engine>,
    #[cfg(target_os = "linux")]
    cufile: Option<Arc<Cufile>>,
    /// Makes the checksums of its own memory.
    sums: Option<(Arc<dyn Device>, [Stream; 2])>,
    files: Arc<Stripes>,
    region: Region,
    seals: Mutex<Seals>,
    /// The latest ones that nobody took.
    records: Mutex<VecDeque<BoundaryRecord>>,
    removed: AtomicBool,
}

/// A transfer of all of some memory, by its address: nobody else uses it before the transfer has ended.
#[derive(Clone, Copy)]
pub(crate) struct Transfer {
    pub(crate) op: Op,
    pub(crate) offset: u64,
    pub(crate) memory: Window,
    /// It is memory of a device, which the queue moves where it lies.
    pub(crate) device: bool,
}

/// Where the transfers of one direction come from, and where their results go.
pub(crate) trait Transfers {
    /// The next transfer, if there is one now.
    fn next(&mut self) -> Option<(u64, Transfer)>;

    /// A transfer ended. Not always in the order in which they came.
    fn ended(&mut self, key: u64, result: Result<(), StoreError>);
}

/// Transfers as jobs.
struct Jobs<'s> {
    spill: &'s Spill,
    transfers: &'s mut dyn Transfers,
    under_way: HashMap<u64, Transfer>,
}

impl<'a> Feed<'a> for Jobs<'_> {
    fn next(&mut self) -> Option<(u64, Job<'a>)> {
        let (key, transfer) = self.transfers.next()?;
        let Transfer { op, offset, memory, device } = transfer;
        self.under_way.insert(key, transfer);
        let (len, place) = (memory.len as u64, Memory::Place(memory));
        let memory = if device { self.spill.in_device(memory) } else { place };
        Some((key, self.spill.job(op, offset, len, memory)))
    }

    fn ended(&mut self, key: u64, result: Result<Vec<Note>, StoreError>) {
        let result = result.map(|notes| {
            if let Some(Transfer { op, offset, memory, .. }) = self.under_way.remove(&key) {
                self.spill.noted(op, offset, memory.len as u64, &notes);
            }
        });
        self.transfers.ended(key, result);
    }
}

impl Spill {
    pub(crate) fn open(options: &NvmeOptions) -> Result<Self, StoreError> {
        Spill::open_with(options, |queue| queue)
    }

    /// Makes the spill files, to be used through what `wrap` makes of the queues.
    pub(crate) fn open_with(
        options: &NvmeOptions,
        wrap: impl Fn(Box<dyn Queue>) -> Box<dyn Queue>,
    ) -> Result<Self, StoreError> {
        let mut modes = Vec::with_capacity(options.dirs.len());
        let mut places = Vec::with_capacity(options.dirs.len());
        for dir in &options.dirs {
            make_private_dir(dir)?;
            let place = dir.canonicalize().map_err(|e| StoreError::file("find the folder", dir, e))?;
            if places.contains(&place) {
                return Err(StoreError::SameDir { path: dir.clone() });
            }
            places.push(place);
            modes.push(probe::settle(dir, options.backend, options.direct)?);
        }
        let mode = together(options, &modes).ok_or(StoreError::NoSpillDir)?;
        let least = if options.staging == Bytes::ZERO { BOUNCE_SLOTS } else { LEAST_STAGING_SLOTS };
        let region = Region::new(options.staging, least)?;
        let refused = |reason| StoreError::BackendRefused { asked: "the probed back end", reason };
        #[cfg(target_os = "linux")]
        let cufile = match mode.backend {
            Backend::CufileDirect | Backend::CufileCompat => Some(Cufile::open().map_err(refused)?),
            Backend::Uring | Backend::Posix => None,
        };
        let queue = || {
            #[cfg(target_os = "linux")]
            if let Some(cufile) = &cufile {
                return Ok(wrap(Box::new(Pool::new(Arc::clone(cufile), DEPTH))));
            }
            probe::queue(mode.backend, DEPTH).map(&wrap).map_err(refused)
        };
        let [write_slots, read_slots] = region.halves();
        let writer = Mutex::new(Engine::new(queue()?, Op::Write, write_slots));
        let reader = Mutex::new(Engine::new(queue()?, Op::Read, read_slots));
        let mut spill = Spill {
            files: Arc::new(spill_files(options, &mode, &modes)?),
            options: options.clone(),
            mode,
            modes,
            writer,
            reader,
            #[cfg(target_os = "linux")]
            cufile,
            sums: None,
            region,
            seals: Mutex::default(),
            records: Mutex::default(),
            removed: AtomicBool::new(false),
        };
        spill.register_files()?;
        Ok(spill)
    }

    pub(crate) fn mode(&self) -> &NvmeMode {
        &self.mode
    }

    /// Lets the kernel hold the files open for the requests of both directions.
    fn register_files(&mut self) -> Result<(), StoreError> {
        let files: Vec<BorrowedFd<'_>> = self.files.files().map(|f| f.file.as_fd()).collect();
        #[cfg(target_os = "linux")]
        if let Some(cufile) = &self.cufile {
            let refused = |reason| StoreError::BackendRefused { asked: "cuFile", reason };
            cufile.register_files(&files).map_err(refused)?;
            self.mode.registered_files = true;
        }
        if self.mode.backend != Backend::Uring {
            return Ok(());
        }
        let mut registered = Ok(());
        for engine in [&mut self.writer, &mut self.reader] {
            let engine = engine.get_mut().unwrap_or_else(PoisonError::into_inner);
            registered = registered.and_then(|()| engine.queue.register_files(&files));
        }
        self.mode.registered_files = registered.is_ok();
        self.mode.fallbacks.extend(registered.err());
        Ok(())
    }

    /// Lets the kernel hold the store's host arena and the staging memory pinned for the requests of both directions, where
    /// the back end and the limit on locked memory allow it. That takes the arena's pages from the system, if they are not
    /// `resident`.
    ///
    /// # Safety
    ///
    /// The arena stays mapped, at its address, for as long as the spill files are read or written.
    pub(crate) unsafe fn register_memory(&mut self, arena: Window, resident: bool) {
        if self.mode.backend != Backend::Uring {
            return;
        }
        let most = available::memory().map(|bytes| bytes.get() / 2);
        let registered = if !resident && most.is_some_and(|most| arena.len as u64 > most) {
            Err(format!(
                "buffers are not registered: the host arena of {} would take more than half of the memory available",
                Bytes(arena.len as u64)
            ))
        } else {
            // The slots of a store without staging see tails only.
            let (start, len) = self.staging_region();
            let regions: Vec<Window> =
                [arena, Window { start, len }].into_iter().filter(|region| region.len > 0).collect();
            let [writer, reader] = [&mut self.writer, &mut self.reader]
                .map(|engine| engine.get_mut().unwrap_or_else(PoisonError::into_inner));
            // SAFETY: the arena by the caller's promise; the staging memory lives as long as the engines.
            let registered = unsafe { writer.register_memory(&regions) };
            // SAFETY: as above.
            let registered = registered.and_then(|()| unsafe { reader.register_memory(&regions) });
            if registered.is_err() {
                // SAFETY: no memory at all.
                let _ = unsafe { writer.register_memory(&[]) };
            }
            registered
        };
        self.mode.registered_buffers = registered.is_ok() && arena.len > 0;
        self.mode.fallbacks.extend(registered.err());
    }

    /// Removes the files' names. Their space is free once the store's last extent is gone.
    pub(crate) fn remove(&self) {
        if !self.removed.swap(true, Ordering::Relaxed) {
            for file in self.files.files() {
                // Nothing can be done about a failure here; the sweep of dead run folders takes what is left.
                let _ = std::fs::remove_file(&file.path);
            }
        }
    }

    /// Writes `bytes` and zeros up to the next multiple of the alignment.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        self.transfer(Op::Write, offset, bytes.len() as u64, Memory::Write(bytes))
    }

    /// Reads `bytes.len()` bytes.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), StoreError> {
        self.transfer(Op::Read, offset, bytes.len() as u64, Memory::Read(bytes))
    }

    /// Writes `len` bytes that `copy` brings into staging slots, piece by piece.
    pub(crate) fn write_staged(
        &self,
        offset: u64,
        len: u64,
        copy: &mut dyn StagedCopy,
    ) -> Result<(), StoreError> {
        self.transfer(Op::Write, offset, len, Memory::Staged(len, copy))
    }

    /// Reads `len` bytes, which `copy` takes out of staging slots, piece by piece.
    pub(crate) fn read_staged(
        &self,
        offset: u64,
        len: u64,
        copy: &mut dyn StagedCopy,
    ) -> Result<(), StoreError> {
        self.transfer(Op::Read, offset, len, Memory::Staged(len, copy))
    }

    /// Carries out transfers of one direction, several at once, until there are none.
    pub(crate) fn carry_out(&self, op: Op, transfers: &mut dyn Transfers) {
        let mut jobs = Jobs { spill: self, transfers, under_way: HashMap::new() };
        self.engine(op).run(&mut jobs);
    }

    fn transfer(&self, op: Op, offset: u64, len: u64, memory: Memory<'_>) -> Result<(), StoreError> {
        let job = self.job(op, offset, len, memory);
        let notes = self.engine(op).one(job)?;
        self.noted(op, offset, len, &notes);
        Ok(())
    }

    fn engine(&self, op: Op) -> MutexGuard<'_, Engine> {
        let engine = match op {
            Op::Read => &self.reader,
            Op::Write => &self.writer,
        };
        engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn job<'a>(&self, op: Op, offset: u64, len: u64, memory: Memory<'a>) -> Job<'a> {
        let sealed = self.options.checksum == Checksum::Crc32c;
        // Device memory has its checksums made on the device.
        let checksum = sealed && !matches!(memory, Memory::Device { .. });
        let mut watch = Watch { checksum, values: self.options.debug_boundaries, wanted: None };
        match op {
            Op::Write if sealed => lock(&self.seals).open(offset, len),
            Op::Read if checksum => watch.wanted = lock(&self.seals).wanted(offset, len),
            _ => {}
        }
        Job { files: Arc::clone(&self.files), offset, memory, watch }
    }

    /// Keeps what was noted of an extent that was written or read.
    fn noted(&self, op: Op, offset: u64, len: u64, notes: &[Note]) {
        if self.options.debug_boundaries {
            let whole = notes.iter().fold(Note::default(), Note::join);
            let [f32, bf16] = whole.values.map(|values| values.stats());
            let side = match op {
                Op::Write => BoundarySide::BeforeWrite,
                Op::Read => BoundarySide::AfterRead,
            };
            let record =
                BoundaryRecord { side, offset, bytes: Bytes(len), checksum: whole.checksum, f32, bf16 };
            let mut records = lock(&self.records);
            if records.len() >= MOST_RECORDS {
                records.pop_front();
            }
            records.push_back(record);
        }
        if self.options.checksum == Checksum::Crc32c && op == Op::Write && !notes.is_empty() {
            let checksums = notes.iter().map(|note| note.checksum).collect();
            lock(&self.seals).seal(offset, len, checksums);
        }
    }

    /// The staging memory, to be charged to the host budget; zero where none was asked for.
    pub(crate) fn staging(&self) -> Bytes {
        if self.options.staging == Bytes::ZERO { Bytes::ZERO } else { self.region.bytes() }
    }

    /// Address and length of the staging memory, page-aligned, so that a device can pin it.
    pub(crate) fn staging_region(&self) -> (*mut u8, usize) {
        let Window { start, len } = self.region.window().part(0, self.staging().get() as usize);
        (start, len)
    }

    /// Begins a step: the drives' figures of the step start at zero.
    pub(crate) fn start_step(&self) {
        for file in self.files.files() {
            file.read.start_step();
            file.written.start_step();
        }
    }

    /// What each drive did.
    pub(crate) fn drives(&self) -> Vec<DriveReport> {
        let mut drives: Vec<DriveReport> = Vec::with_capacity(self.modes.len());
        for ((dir, mode), file) in self.options.dirs.iter().zip(&self.modes).zip(self.files.files()) {
            let ((step_read, read), (step_written, written)) = (file.read.traffic(), file.written.traffic());
            let share = |tbw: Bytes| written.bytes.get() as f64 / tbw.get().max(1) as f64;
            drives.push(DriveReport {
                dir: dir.clone(),
                mode: NvmeMode {
                    registered_files: self.mode.registered_files,
                    registered_buffers: self.mode.registered_buffers,
                    ..mode.clone()
                },
                step_written,
                step_read,
                written,
                read,
                slow: false,
                tbw_used: self.options.tbw.map(share),
            });
        }
        for side in [|d: &DriveReport| d.read, |d: &DriveReport| d.written] {
            let rate = |traffic: Traffic| traffic.rate().map(|rate| rate.get());
            let fastest = drives.iter().filter_map(|d| rate(side(d))).fold(0.0, f64::max);
            for drive in &mut drives {
                drive.slow |= rate(side(drive)).is_some_and(|rate| rate < SLOW * fastest);
            }
        }
        drives
    }

    /// Takes the records of `debug_boundaries`.
    pub(crate) fn take_boundary_records(&self) -> Vec<BoundaryRecord> {
        std::mem::take(&mut *lock(&self.records)).into()
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        self.remove();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is left half-done where the lock is held.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The mode of all drives together: the strictest alignment, direct only where all are. `None` of none.
fn together(options: &NvmeOptions, modes: &[NvmeMode]) -> Option<NvmeMode> {
    let mut mode = modes.first()?.clone();
    if modes.len() > 1 {
        mode.fallbacks.clear();
        for (one, dir) in modes.iter().zip(&options.dirs) {
            mode.fallbacks.extend(one.fallbacks.iter().map(|why| format!("{}: {why}", dir.display())));
            mode.direct &= one.direct;
            mode.alignment = mode.alignment.max(one.alignment);
            mode.granularity = mode.granularity.max(one.granularity);
            // One queue serves all drives; where io_uring serves some only, the thread pool serves them all.
            if one.backend != mode.backend {
                mode.backend = Backend::Posix;
            }
        }
    }
    Some(mode)
}

/// Makes a spill file in each folder, or none.
fn spill_files(options: &NvmeOptions, mode: &NvmeMode, modes: &[NvmeMode]) -> Result<Stripes, StoreError> {
    let alignment = mode.alignment;
    let lengths = lengths(options.bytes.align_up(alignment as u64).get(), options.dirs.len());
    let mut files: Vec<OpenFile> = Vec::with_capacity(lengths.len());
    for ((dir, own), len) in options.dirs.iter().zip(modes).zip(lengths) {
        match spill_file(dir, Bytes(len), own) {
            Ok(file) => files.push(file),
            Err(error) => {
                for made in files {
                    let _ = std::fs::remove_file(made.path);
                }
                return Err(error);
            }
        }
    }
    Stripes::over(files, alignment).ok_or(StoreError::NoSpillDir)
}

fn spill_file(dir: &Path, len: Bytes, mode: &NvmeMode) -> Result<OpenFile, StoreError> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    loop {
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!("spill-{}-{count}", std::process::id()));
        match create(&path, len, mode.direct) {
            // Left by a killed process of our number.
            Err(StoreError::Exists { .. }) => {}
            Err(error) => return Err(error),
            Ok(file) => return Ok(OpenFile::new(file, path, mode.granularity)),
        }
    }
}

impl Store {
    /// What each drive of the NVMe tier did in this step and this run, in the order of the folders.
    pub fn drives(&self) -> Vec<DriveReport> {
        self.inner().spill.as_ref().map_or_else(Vec::new, |spill| spill.drives())
    }

    /// Takes the records kept since the last call, oldest first: see [`NvmeOptions::debug_boundaries`]. Of those that nobody
    /// takes, the latest 65,536 are kept.
    pub fn take_boundary_records(&self) -> Vec<BoundaryRecord> {
        self.inner().spill.as_ref().map_or_else(Vec::new, |spill| spill.take_boundary_records())
    }
}

#[cfg(test)]
mod tests;
