//! Durable files: preallocated, read and written at offsets through the store's I/O back ends, flushed, linked and
//! renamed. They lie in a caller's folder, which is never swept.

mod transfers;

use std::fmt;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use lazy_model::Bytes;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

pub use crate::buffer::AlignedBuf;
use crate::error::StoreError;
use crate::io::hooks::{Change, Hooks};
use crate::io::make::{create, make_private_dir};
use crate::io::stripes::{OpenFile, Stripes};
use crate::io::{Op, fs, probe};
pub use crate::options::IoOptions;
use crate::options::NvmeMode;
pub use transfers::Pending;
use transfers::Worker;

/// A folder of durable files. Cheap to clone.
#[derive(Clone)]
pub struct DurableDir {
    inner: Arc<Dir>,
}

/// A file of fixed length. Cheap to clone.
#[derive(Clone)]
pub struct DurableFile {
    file: Arc<Opened>,
    dir: Arc<Dir>,
}

struct Dir {
    path: PathBuf,
    mode: NvmeMode,
    hooks: Hooks,
    reader: Worker,
    writer: Worker,
    /// Holds the claim of [`DurableDir::lock`]. Dropped last: a transfer whose handle was leaked ends before somebody else may
    /// claim the folder.
    folder: File,
}

struct Opened {
    files: Arc<Stripes>,
    len: u64,
    /// Tells files apart, by whatever names and however often they were opened.
    inode: u64,
    /// A flush failed: what was written since the last good one may be gone. Locked while a flush runs, because the
    /// system reports a failure to one of several flushes at once.
    sync_failed: Mutex<bool>,
}

/// Makes a folder, private to the user, unless it is there already; what was made survives a power cut.
fn make_lasting_dir(path: &Path) -> Result<(), StoreError> {
    let named = |p: &&Path| !p.as_os_str().is_empty();
    let absent: Vec<&Path> = path.ancestors().filter(named).take_while(|p| !p.exists()).collect();
    make_private_dir(path)?;
    for made in absent {
        let parent = made.parent().filter(named).unwrap_or(Path::new("."));
        let flush = File::open(parent).and_then(|folder| folder.sync_all());
        flush.map_err(|e| StoreError::file("flush", parent, e))?;
    }
    Ok(())
}

impl DurableDir {
    /// Opens a folder, and makes it, private to the user, if absent.
    ///
    /// # Errors
    ///
    /// [`StoreError::BackendRefused`] and [`StoreError::DirectRefused`] where an explicit choice cannot be had, and what
    /// the system refuses besides.
    pub fn open(path: &Path, options: &IoOptions) -> Result<Self, StoreError> {
        Self::open_with(path, options, Hooks::default())
    }

    /// [`DurableDir::open`], with everything after the opening going through a fault double.
    ///
    /// # Errors
    ///
    /// As for [`DurableDir::open`].
    #[cfg(any(test, feature = "test-util"))]
    pub fn open_with_faults(
        path: &Path,
        options: &IoOptions,
        faults: &crate::fault::Faults,
    ) -> Result<Self, StoreError> {
        Self::open_with(path, options, Hooks { faults: Some(faults.clone()) })
    }

    fn open_with(path: &Path, options: &IoOptions, hooks: Hooks) -> Result<Self, StoreError> {
        make_lasting_dir(path)?;
        let mode = probe::settle(path, options.backend, options.direct)?;
        let queue = || {
            probe::queue(mode.backend, options.depth)
                .map(|queue| hooks.wrap(queue))
                .map_err(|reason| StoreError::BackendRefused { asked: "the probed back end", reason })
        };
        let reader = Worker::start(Op::Read, queue()?, options.depth)?;
        let writer = Worker::start(Op::Write, queue()?, options.depth)?;
        let folder = File::open(path).map_err(|e| StoreError::file("open", path, e))?;
        Ok(DurableDir { inner: Arc::new(Dir { path: path.to_owned(), mode, hooks, reader, writer, folder }) })
    }

    /// Claims the folder for this `DurableDir` and its clones until the last of them is dropped. The claim is a `flock` on
    /// the folder, so it ends with the process however that ends, and binds only those who ask for it.
    ///
    /// # Errors
    ///
    /// [`StoreError::InUse`] where another one, in this process or another, has claimed it.
    pub fn lock(&self) -> Result<(), StoreError> {
        match rustix::fs::flock(&self.inner.folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(()),
            Err(Errno::WOULDBLOCK) => Err(StoreError::InUse { path: self.inner.path.clone() }),
            Err(e) => Err(StoreError::file("lock", &self.inner.path, e)),
        }
    }

    /// Makes a file of `len` bytes (a multiple of the alignment), all of them allocated, that reads as zeros. Its name is
    /// durable after [`DurableDir::sync`].
    ///
    /// # Errors
    ///
    /// [`StoreError::Exists`]; [`StoreError::NoSpace`] with the bytes needed and free, and nothing left behind.
    pub fn create_file(&self, name: &str, len: Bytes) -> Result<DurableFile, StoreError> {
        let path = self.named(name)?;
        self.check_range(&path, 0, len.get(), len.get())?;
        let file = self.change(Change::Create { name }, || {
            let file = create(&path, len, self.inner.mode.direct)?;
            file.sync_all().map_err(|e| StoreError::file("flush", &path, e))?;
            Ok(file)
        })?;
        self.opened(file, path)
    }

    /// Opens a file for reading and writing. A symbolic link is refused.
    ///
    /// # Errors
    ///
    /// [`StoreError::File`] where there is none.
    pub fn open_file(&self, name: &str) -> Result<DurableFile, StoreError> {
        let path = self.named(name)?;
        let mut flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        if self.inner.mode.direct {
            flags |= OFlags::DIRECT;
        }
        let fd = rustix::fs::openat(&self.inner.folder, name, flags, Mode::empty())
            .map_err(|e| StoreError::file("open", &path, e))?;
        let file = File::from(fd);
        self.opened(file, path)
    }

    /// Whether something of that name exists.
    pub fn exists(&self, name: &str) -> Result<bool, StoreError> {
        let path = self.named(name)?;
        match rustix::fs::statat(&self.inner.folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(e) => Err(StoreError::file("look for", &path, e)),
        }
    }

    /// Names of the regular files in the folder, sorted.
    pub fn list(&self) -> Result<Vec<String>, StoreError> {
        let failed = |e| StoreError::file("list", &self.inner.path, e);
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.inner.path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if entry.file_type().map_err(failed)?.is_file()
                && let Ok(name) = entry.file_name().into_string()
            {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// Gives a file a second name, which must be new.
    pub fn link(&self, from: &str, to: &str) -> Result<(), StoreError> {
        let (path, target) = (self.named(from)?, self.named(to)?);
        let folder = &self.inner.folder;
        let link = || match rustix::fs::linkat(folder, from, folder, to, AtFlags::empty()) {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => Err(StoreError::Exists { path: target }),
            Err(e) => Err(StoreError::file("link", &path, e)),
        };
        self.change(Change::Link { from, to }, link)
    }

    /// Renames a file; one that has the new name already is replaced.
    pub fn rename(&self, from: &str, to: &str) -> Result<(), StoreError> {
        let path = self.named(from)?;
        self.named(to)?;
        let folder = &self.inner.folder;
        self.change(Change::Rename { from, to }, || {
            rustix::fs::renameat(folder, from, folder, to).map_err(|e| StoreError::file("rename", &path, e))
        })
    }

    /// Removes a name.
    pub fn remove(&self, name: &str) -> Result<(), StoreError> {
        let path = self.named(name)?;
        self.change(Change::Remove { name }, || {
            rustix::fs::unlinkat(&self.inner.folder, name, AtFlags::empty())
                .map_err(|e| StoreError::file("remove", &path, e))
        })
    }

    /// Flushes the folder: names made, linked, renamed and removed so far survive a power cut.
    pub fn sync(&self) -> Result<(), StoreError> {
        self.change(Change::SyncDir, || {
            rustix::fs::fsync(&self.inner.folder).map_err(|e| StoreError::file("flush", &self.inner.path, e))
        })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// How files are read and written here: what was asked for, what was obtained and why.
    pub fn mode(&self) -> &NvmeMode {
        &self.inner.mode
    }

    /// Offsets and lengths of transfers are multiples of this many bytes.
    pub fn alignment(&self) -> usize {
        self.inner.mode.alignment
    }

    /// Bytes free on the folder's file system.
    pub fn free_space(&self) -> Result<Bytes, StoreError> {
        fs::free_space(self.inner.folder.as_fd(), &self.inner.path)
    }

    fn change<T>(
        &self,
        change: Change<'_>,
        act: impl FnOnce() -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        self.inner.hooks.carry_out(&self.inner.path, change, act)
    }

    fn opened(&self, file: File, path: PathBuf) -> Result<DurableFile, StoreError> {
        let metadata = file.metadata().map_err(|e| StoreError::file("ask for the length of", &path, e))?;
        let (len, inode) = (metadata.len(), metadata.ino());
        let NvmeMode { granularity, alignment, .. } = self.inner.mode;
        let files = Arc::new(Stripes::one(OpenFile::new(file, path, granularity), alignment));
        let file = Opened { files, len, inode, sync_failed: Mutex::new(false) };
        Ok(DurableFile { file: Arc::new(file), dir: Arc::clone(&self.inner) })
    }

    fn named(&self, name: &str) -> Result<PathBuf, StoreError> {
        if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
            return Err(StoreError::BadName { name: name.to_owned() });
        }
        Ok(self.inner.path.join(name))
    }

    fn check_range(&self, path: &Path, offset: u64, bytes: u64, length: u64) -> Result<(), StoreError> {
        self.inner.check_range(path, offset, bytes, length)
    }
}

impl Dir {
    fn check_range(&self, path: &Path, offset: u64, bytes: u64, length: u64) -> Result<(), StoreError> {
        let alignment = self.mode.alignment;
        let aligned = |n: u64| n.is_multiple_of(alignment as u64);
        if aligned(offset) && aligned(bytes) && offset.checked_add(bytes).is_some_and(|end| end <= length) {
            return Ok(());
        }
        Err(StoreError::BadRange { path: path.to_owned(), offset, bytes, length, alignment })
    }
}

impl DurableFile {
    /// Starts to fill `buffer` from `offset`. Waits while too many reads are queued. Transfers are under way together, as far
    /// as [`IoOptions::depth`] goes; a read that has to see a write is started after that was waited for.
    pub fn read_at(&self, offset: u64, buffer: AlignedBuf) -> Pending {
        self.submit(&self.dir.reader, offset, buffer)
    }

    /// Starts to write `buffer` at `offset`. Waits while too many writes are queued. Of writes to the same bytes, the last one
    /// started is what stays.
    pub fn write_at(&self, offset: u64, buffer: AlignedBuf) -> Pending {
        self.submit(&self.dir.writer, offset, buffer)
    }

    fn submit(&self, worker: &Worker, offset: u64, buffer: AlignedBuf) -> Pending {
        let file = self.file.files.file(0);
        match self.dir.check_range(&file.path, offset, buffer.len() as u64, self.file.len) {
            Ok(()) => worker.submit(&self.file, offset, buffer),
            Err(error) => Pending::failed(buffer, error),
        }
    }

    /// Flushes the writes that were waited for before this call.
    ///
    /// # Errors
    ///
    /// [`StoreError::File`] where the flush fails, and [`StoreError::SyncFailed`] ever after: the system may have dropped
    /// the unflushed bytes, and a second flush that succeeds would hide it.
    pub fn sync_data(&self) -> Result<(), StoreError> {
        let file = self.file.files.file(0);
        let mut failed = self.file.sync_failed.lock().unwrap_or_else(PoisonError::into_inner);
        if *failed {
            return Err(StoreError::SyncFailed { path: file.path.clone() });
        }
        let flush =
            || rustix::fs::fdatasync(&file.file).map_err(|e| StoreError::file("flush", &file.path, e));
        let flushed = self.dir.hooks.carry_out(&self.dir.path, Change::SyncData { file }, flush);
        *failed = flushed.is_err();
        flushed
    }

    /// Its length.
    pub fn len(&self) -> Bytes {
        Bytes(self.file.len)
    }

    /// Whether its length is zero.
    pub fn is_empty(&self) -> bool {
        self.file.len == 0
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.file.files.file(0).path
    }
}

impl fmt::Debug for DurableDir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.inner.path.display(), self.inner.mode)
    }
}

impl fmt::Debug for DurableFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.path().display(), self.len())
    }
}
