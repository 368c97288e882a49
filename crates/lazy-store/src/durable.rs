//! Durable files: preallocated, read and written at offsets through the store's I/O back ends, flushed, linked and
//! renamed. They lie in a caller's folder and in folders inside it, none of which is ever swept.

mod transfers;

use std::fmt;
use std::fs::{File, FileType};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use lazy_model::Bytes;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

pub use crate::buffer::AlignedBuf;
use crate::error::StoreError;
use crate::io::hooks::{At, Change, Hooks};
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
    engine: Arc<Engine>,
    /// The folder that this one lies in, if it was made or opened through it: its claim lasts as long as this.
    parent: Option<Arc<Dir>>,
    /// Holds the claim of [`DurableDir::lock`]. Dropped last: a transfer whose handle was leaked ends before somebody else may
    /// claim the folder.
    folder: File,
}

/// What a folder shares with the folders inside it.
struct Engine {
    mode: NvmeMode,
    hooks: Hooks,
    reader: Worker,
    writer: Worker,
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
        let engine = Arc::new(Engine { mode, hooks, reader, writer });
        Ok(DurableDir { inner: Arc::new(Dir { path: path.to_owned(), engine, parent: None, folder }) })
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
            let file = create(&path, len, self.mode().direct)?;
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
        if self.mode().direct {
            flags |= OFlags::DIRECT;
        }
        let fd = rustix::fs::openat(&self.inner.folder, name, flags, Mode::empty())
            .map_err(|e| StoreError::file("open", &path, e))?;
        let file = File::from(fd);
        self.opened(file, path)
    }

    /// Makes a folder inside this one, private to the user. Its name is durable after [`DurableDir::sync`] of this folder.
    ///
    /// # Errors
    ///
    /// [`StoreError::Exists`].
    pub fn create_dir(&self, name: &str) -> Result<DurableDir, StoreError> {
        let path = self.named(name)?;
        self.change(Change::CreateDir { name }, || {
            match rustix::fs::mkdirat(&self.inner.folder, name, Mode::RWXU) {
                Ok(()) => Ok(()),
                Err(Errno::EXIST) => Err(StoreError::Exists { path: path.clone() }),
                Err(e) => Err(StoreError::file("make the folder", &path, e)),
            }
        })?;
        self.open_dir(name)
    }

    /// Opens a folder inside this one. A symbolic link is refused. It shares this one's queues, and a claim on this one lasts
    /// until it is dropped, too.
    ///
    /// # Errors
    ///
    /// [`StoreError::File`] where there is none.
    pub fn open_dir(&self, name: &str) -> Result<DurableDir, StoreError> {
        let path = self.named(name)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let folder = rustix::fs::openat(&self.inner.folder, name, flags, Mode::empty())
            .map_err(|e| StoreError::file("open", &path, e))?;
        let (engine, parent) = (Arc::clone(&self.inner.engine), Some(Arc::clone(&self.inner)));
        Ok(DurableDir { inner: Arc::new(Dir { path, engine, parent, folder: File::from(folder) }) })
    }

    /// Removes a folder inside this one, which must be empty.
    pub fn remove_dir(&self, name: &str) -> Result<(), StoreError> {
        let path = self.named(name)?;
        self.change(Change::RemoveDir { name }, || {
            rustix::fs::unlinkat(&self.inner.folder, name, AtFlags::REMOVEDIR)
                .map_err(|e| StoreError::file("remove", &path, e))
        })
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
        self.entries(|kind| kind.is_file())
    }

    /// Names of the folders in it, sorted.
    pub fn list_dirs(&self) -> Result<Vec<String>, StoreError> {
        self.entries(|kind| kind.is_dir())
    }

    fn entries(&self, wanted: impl Fn(FileType) -> bool) -> Result<Vec<String>, StoreError> {
        let failed = |e| StoreError::file("list", &self.inner.path, e);
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.inner.path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if wanted(entry.file_type().map_err(failed)?)
                && let Ok(name) = entry.file_name().into_string()
            {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// Gives a file, which may lie in another folder of the same file system, a further name in this folder, which must be new.
    ///
    /// # Errors
    ///
    /// [`StoreError::Exists`]; [`StoreError::File`] with [`CrossesDevices`](std::io::ErrorKind::CrossesDevices) where the
    /// file lies on another file system.
    pub fn link(&self, file: &Path, name: &str) -> Result<(), StoreError> {
        let path = self.named(name)?;
        self.change(Change::Link { name }, || {
            match rustix::fs::linkat(rustix::fs::CWD, file, &self.inner.folder, name, AtFlags::empty()) {
                Ok(()) => Ok(()),
                Err(Errno::EXIST) => Err(StoreError::Exists { path }),
                Err(e) => Err(StoreError::file("link", file, e)),
            }
        })
    }

    /// Renames a file or a folder. A file that has the new name already is replaced by a file.
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
        &self.inner.engine.mode
    }

    /// Offsets and lengths of transfers are multiples of this many bytes.
    pub fn alignment(&self) -> usize {
        self.mode().alignment
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
        self.inner.carry_out(change, act)
    }

    fn opened(&self, file: File, path: PathBuf) -> Result<DurableFile, StoreError> {
        let metadata = file.metadata().map_err(|e| StoreError::file("ask for the length of", &path, e))?;
        let (len, inode) = (metadata.len(), metadata.ino());
        let NvmeMode { granularity, alignment, .. } = *self.mode();
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
    /// Makes a change of the folder or a flush in it, in sight of the fault double.
    fn carry_out<T>(
        &self,
        change: Change<'_>,
        act: impl FnOnce() -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut root = self;
        while let Some(parent) = &root.parent {
            root = parent;
        }
        let at = At { folder: &self.folder, path: &self.path, root: &root.path };
        self.engine.hooks.carry_out(at, change, act)
    }

    fn check_range(&self, path: &Path, offset: u64, bytes: u64, length: u64) -> Result<(), StoreError> {
        let alignment = self.engine.mode.alignment;
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
        self.submit(&self.dir.engine.reader, offset, buffer)
    }

    /// Starts to write `buffer` at `offset`. Waits while too many writes are queued. Of writes to the same bytes, the last one
    /// started is what stays.
    pub fn write_at(&self, offset: u64, buffer: AlignedBuf) -> Pending {
        self.submit(&self.dir.engine.writer, offset, buffer)
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
        let flushed = self.dir.carry_out(Change::SyncData { file }, flush);
        *failed = flushed.is_err();
        flushed
    }

    /// How many names it has: more than one where it was [linked](DurableDir::link). 0 where none is left.
    pub fn names(&self) -> Result<u64, StoreError> {
        let file = self.file.files.file(0);
        let stat = rustix::fs::fstat(&file.file)
            .map_err(|e| StoreError::file("count the names of", &file.path, e))?;
        Ok(stat.st_nlink as u64)
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
        write!(f, "{} ({})", self.inner.path.display(), self.mode())
    }
}

impl fmt::Debug for DurableFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.path().display(), self.len())
    }
}
