//! Which back end and which cache mode work in a folder: settled by writing a file there and reading it back, because
//! neither an accepted `O_DIRECT` flag nor a reported alignment is a promise.

use std::fs::File;
#[cfg(target_os = "linux")]
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lazy_model::Bytes;
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags};

#[cfg(target_os = "linux")]
use super::cufile::Cufile;
use super::note::Watch;
use super::pool::{Pool, Positioned};
use super::slots::Slots;
use super::stripes::{OpenFile, Stripes};
use super::transfer::{Engine, Job, Memory};
use super::{Op, Queue, fs};
use crate::buffer::AlignedBuf;
use crate::error::{StoreError, advice};
use crate::options::{Backend, BackendChoice, DirectChoice, NvmeMode};

/// Least alignment of extents and durable transfers: the sector of most drives, and a page.
const LEAST_ALIGNMENT: usize = 4096;
/// Granularities tried where the file system states none, or states one that does not work.
const GRANULARITIES: [usize; 4] = [512, 4096, 16384, 65536];
// The buffers of durable transfers and of the probe suit them all.
const _: () = assert!(GRANULARITIES[3] <= crate::buffer::ADDRESS);

/// Makes a request queue of the given kind, or says why there is none.
pub(crate) fn queue(backend: Backend, depth: usize) -> Result<Box<dyn Queue>, String> {
    match backend {
        #[cfg(target_os = "linux")]
        Backend::Uring => Ok(Box::new(super::uring::Uring::new(depth)?)),
        #[cfg(not(target_os = "linux"))]
        Backend::Uring => Err("io_uring exists on Linux only".to_owned()),
        Backend::Posix => Ok(Box::new(Pool::new(Positioned, depth))),
        Backend::CufileDirect | Backend::CufileCompat => {
            Err("cuFile moves GPU memory and this is for host memory; choose io_uring or the thread pool"
                .to_owned())
        }
    }
}

/// Settles the mode for files in `dir`.
pub(crate) fn settle(
    dir: &Path,
    asked_backend: BackendChoice,
    asked_direct: DirectChoice,
) -> Result<NvmeMode, StoreError> {
    let mut fallbacks = Vec::new();
    let backend = settle_backend(dir, asked_backend, &mut fallbacks)?;
    // cuFile leaves host memory to the thread pool.
    let for_host = match backend {
        Backend::CufileDirect | Backend::CufileCompat => Backend::Posix,
        backend => backend,
    };
    let granularity = match asked_direct {
        DirectChoice::Off => None,
        DirectChoice::Required | DirectChoice::Auto => match direct_granularity(dir, for_host) {
            Ok(granularity) => Some(granularity),
            Err(reason) if asked_direct == DirectChoice::Required => {
                return Err(StoreError::DirectRefused { path: dir.to_owned(), reason });
            }
            Err(reason) => {
                fallbacks.push(format!("no O_DIRECT: {reason}"));
                None
            }
        },
    };
    let filesystem = fs::name(dir)?;
    if filesystem == "tmpfs" {
        fallbacks
            .push("tmpfs lies in RAM: what is moved there frees none; name a folder on a drive".to_owned());
    }
    Ok(NvmeMode {
        asked_backend,
        backend,
        asked_direct,
        direct: granularity.is_some(),
        alignment: granularity.unwrap_or(1).max(LEAST_ALIGNMENT),
        granularity: granularity.unwrap_or(1),
        registered_files: false,
        registered_buffers: false,
        filesystem,
        fallbacks,
    })
}

fn settle_backend(
    dir: &Path,
    asked: BackendChoice,
    fallbacks: &mut Vec<String>,
) -> Result<Backend, StoreError> {
    if asked == BackendChoice::Cufile {
        return settle_cufile(dir, fallbacks);
    }
    if asked != BackendChoice::Posix {
        // A sandbox may allow the ring's making and refuse its use, so a file is written through it, too.
        match try_file(dir, Backend::Uring, OFlags::empty(), 1, LEAST_ALIGNMENT) {
            Ok(()) => return Ok(Backend::Uring),
            Err(reason) if asked == BackendChoice::Uring => {
                return Err(StoreError::BackendRefused { asked: "io_uring", reason });
            }
            Err(reason) => fallbacks.push(reason),
        }
    }
    try_file(dir, Backend::Posix, OFlags::empty(), 1, LEAST_ALIGNMENT)
        .map_err(|reason| StoreError::file("write a probe file in", dir, std::io::Error::other(reason)))?;
    Ok(Backend::Posix)
}

#[cfg(target_os = "linux")]
fn settle_cufile(dir: &Path, fallbacks: &mut Vec<String>) -> Result<Backend, StoreError> {
    let refused = |reason| StoreError::BackendRefused { asked: "cuFile", reason };
    // With its name: cuFile opens the file a second time. Declared first, so that it is closed after cuFile has let go of it.
    let (file, _named) = named_probe_file(dir, OFlags::DIRECT).map_err(refused)?;
    let cufile = Cufile::open().map_err(refused)?;
    cufile.register_files(&[file.as_fd()]).map_err(refused)?;
    match &cufile.compatibility {
        None => Ok(Backend::CufileDirect),
        Some(why) => {
            fallbacks.push(format!("not direct: {why}"));
            Ok(Backend::CufileCompat)
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn settle_cufile(_dir: &Path, _fallbacks: &mut Vec<String>) -> Result<Backend, StoreError> {
    Err(StoreError::BackendRefused { asked: "cuFile", reason: "it exists on Linux only".to_owned() })
}

/// The smallest granularity with which a direct write and read back work.
fn direct_granularity(dir: &Path, backend: Backend) -> Result<usize, String> {
    let stated = {
        let file = probe_file(dir, OFlags::DIRECT)?;
        let stat = rustix::fs::statx(&file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
        // Kernels before 6.1 state nothing; zero says that direct I/O is not supported, which the trial checks.
        stat.map_or(0, |s| s.stx_dio_mem_align.max(s.stx_dio_offset_align) as usize)
    };
    let least = if stated.is_power_of_two() { stated.max(512) } else { 512 };
    let mut reason = String::new();
    for granularity in GRANULARITIES.into_iter().filter(|&g| g >= least) {
        match try_file(dir, backend, OFlags::DIRECT, granularity, granularity) {
            Ok(()) => return Ok(granularity),
            Err(e) => reason = e,
        }
    }
    Err(reason)
}

/// Writes `len` bytes at offset `len` from an address that is a multiple of `granularity` and of no more where it can
/// be, and reads them back.
fn try_file(
    dir: &Path,
    backend: Backend,
    flags: OFlags,
    granularity: usize,
    len: usize,
) -> Result<(), String> {
    let text = |e: StoreError| e.to_string();
    let file = OpenFile::new(probe_file(dir, flags)?, dir.to_owned(), granularity);
    let files = Arc::new(Stripes::one(file, granularity));
    let mut buffer = AlignedBuf::zeroed(Bytes(3 * len as u64)).map_err(text)?;
    let (written, read) = buffer.as_mut_slice()[len..].split_at_mut(len);
    for (i, byte) in written.iter_mut().enumerate() {
        *byte = (i * 7 + i / 251) as u8;
    }
    for (op, memory) in [(Op::Write, Memory::Write(written)), (Op::Read, Memory::Read(read))] {
        let job = Job { files: Arc::clone(&files), offset: len as u64, memory, watch: Watch::default() };
        Engine::new(queue(backend, 1)?, op, Slots::none()).one(job).map_err(text)?;
    }
    if written == read { Ok(()) } else { Err("a probe file did not read back as it was written".to_owned()) }
}

/// Opens a new file and removes its name at once, so that nothing is left behind whatever happens.
fn probe_file(dir: &Path, flags: OFlags) -> Result<File, String> {
    let (file, named) = named_probe_file(dir, flags)?;
    let removed = std::fs::remove_file(&named.0);
    removed.map_err(|e| format!("cannot remove {}: {e}", named.0.display()))?;
    Ok(file)
}

/// A file that is removed when this is dropped, if it is there still.
struct Named(PathBuf);

impl Drop for Named {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn named_probe_file(dir: &Path, flags: OFlags) -> Result<(File, Named), String> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let path = dir.join(format!(".lazy-probe-{}-{count}", std::process::id()));
    let flags = flags | OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
    let fd = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR)
        .map_err(|e| format!("cannot make {}: {e}{}", path.display(), advice(&e.into())))?;
    Ok((File::from(fd), Named(path)))
}
