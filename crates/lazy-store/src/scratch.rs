//! Run folders: where the spill files of one run live, and how those of dead runs are found.
//!
//! A run folder is private to its user and holds a lock file, locked (`flock`) for as long as the run lives, that says
//! who made it: the kernel's boot id, the host's name, and the process by number and start time. [`sweep`] removes a
//! folder only when the lock is free *and* what the file says agrees that the run is dead; whenever it cannot be sure it
//! leaves the folder and reports it. Process numbers alone prove nothing: containers use the same small ones over and
//! over, and those of another host mean nothing here. Nothing depends on the clock.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::error::StoreError;
use crate::io::fs::is_local;
use crate::io::make::make_private_dir;

const PREFIX: &str = "lazy-run-";
/// A folder on its way to becoming a run folder. A sweep removes it where nobody is at work on it; its maker then begins again.
const NEW_PREFIX: &str = ".lazy-new-";
const LOCK: &str = "owner.lock";
/// First line of the lock file.
const HEADER: &str = "lazy run folder 1";
/// An owner's lines are far shorter than this; whatever is longer is not one.
const LONGEST_OWNER: u64 = 4096;

/// The folder of this run. Dropping it removes it with everything in it.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    /// Holds the lock.
    _lock: File,
}

/// What a sweep did with each run folder under its root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SweepReport {
    /// Folders of dead runs, removed.
    pub removed: Vec<PathBuf>,
    /// Folders of live runs, left alone.
    pub alive: Vec<PathBuf>,
    /// Folders left alone because it was not certain that their run is dead, each with the reason.
    pub unsure: Vec<(PathBuf, String)>,
}

/// Who made a run folder.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Owner {
    boot: String,
    host: String,
    /// The namespace that `pid` counts in.
    pids: String,
    pid: u32,
    /// Start of the process, in clock ticks since boot.
    started: u64,
}

impl RunDir {
    /// Makes a folder with a name of its own under `root`, which is made, private to the user, if absent.
    ///
    /// # Errors
    ///
    /// [`StoreError::File`] with what the system refuses.
    pub fn create(root: &Path) -> Result<RunDir, StoreError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        make_private_dir(root)?;
        let root = std::fs::canonicalize(root).map_err(|e| StoreError::file("find", root, e))?;
        let owner = Owner::this_process()?;
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            // Boot and start time keep apart what the same process number made earlier, or makes elsewhere.
            let boot: String = owner.boot.chars().filter(char::is_ascii_hexdigit).take(8).collect();
            let name = format!("{boot}-{}-{}-{count}", owner.pid, owner.started);
            match RunDir::create_named(&root, &name, &owner) {
                Err(StoreError::Exists { .. }) => {}
                done => return done,
            }
        }
    }

    /// Locks the folder under a passing name, and only then gives it its own: so there is no moment at which a sweep could take a
    /// run folder for a dead run's. [`StoreError::Exists`] where the name is taken or a sweep has removed the folder meanwhile.
    fn create_named(root: &Path, name: &str, owner: &Owner) -> Result<RunDir, StoreError> {
        let new = root.join(format!("{NEW_PREFIX}{name}"));
        let path = root.join(format!("{PREFIX}{name}"));
        match std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&new) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                return Err(StoreError::Exists { path: new });
            }
            Err(e) => return Err(StoreError::file("make the folder", &new, e)),
        }
        let locked = lock_file(&new, owner).and_then(|lock| {
            // Two runs of one name would have to share boot, process and count; a folder that is there is never replaced.
            rustix::fs::renameat_with(
                rustix::fs::CWD,
                &new,
                rustix::fs::CWD,
                &path,
                rustix::fs::RenameFlags::NOREPLACE,
            )
            .map_err(|e| match e {
                Errno::EXIST | Errno::NOENT => StoreError::Exists { path: path.clone() },
                e => StoreError::file("name the folder", &path, e),
            })?;
            Ok(lock)
        });
        match locked {
            Ok(lock) => Ok(RunDir { path, _lock: lock }),
            Err(error) => {
                let _ = std::fs::remove_dir_all(&new);
                Err(error)
            }
        }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for RunDir {
    fn drop(&mut self) {
        // Under the lock. What cannot be removed now, a sweep removes once the lock is gone.
        let _ = remove_run(&self.path);
    }
}

/// Removes a run folder, its lock file last: so what is left if this is cut short can still be told for a dead run's.
fn remove_run(path: &Path) -> io::Result<()> {
    // A link in its place leads to somebody else's files.
    if !std::fs::symlink_metadata(path)?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            std::fs::remove_dir_all(entry.path())?;
        } else if entry.file_name() != LOCK {
            std::fs::remove_file(entry.path())?;
        }
    }
    std::fs::remove_dir_all(path)
}

fn lock_file(dir: &Path, owner: &Owner) -> Result<File, StoreError> {
    let path = dir.join(LOCK);
    // Gone or locked: by a sweep that came in between.
    let taken = || StoreError::Exists { path: dir.to_owned() };
    let mut file = File::options().write(true).create_new(true).open(&path).map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => taken(),
        _ => StoreError::file("make", &path, e),
    })?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).map_err(|e| match e {
        Errno::WOULDBLOCK => taken(),
        e => StoreError::file("lock", &path, e),
    })?;
    file.write_all(owner.to_string().as_bytes()).map_err(|e| StoreError::file("write", &path, e))?;
    Ok(file)
}

/// Removes what somebody who was making a run folder left when he died: an empty folder, or one with a lock file that nobody
/// holds. Whoever is still at it finds his folder or his lock taken, and begins again.
fn remove_unfinished(path: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if folder.metadata()?.uid() != rustix::process::geteuid().as_raw() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    if std::fs::remove_dir(path).is_ok() {
        return Ok(());
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let lock = File::from(rustix::fs::openat(&folder, LOCK, flags, Mode::empty())?);
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    if lock.metadata()?.is_file() && still_there(path, &folder, &lock.metadata()?) {
        rustix::fs::unlinkat(&folder, LOCK, AtFlags::empty())?;
        std::fs::remove_dir(path)?;
    }
    Ok(())
}

/// Removes the folders that dead runs left under `root`, and says what it did with each; also what was left of folders that were
/// never finished. Looks only at folders that [`RunDir::create`] names; follows no symbolic link, and touches nothing outside `root`.
///
/// # Errors
///
/// [`StoreError::File`] where `root` cannot be listed. A root that does not exist is swept already.
pub fn sweep(root: &Path) -> Result<SweepReport, StoreError> {
    let mut report = SweepReport::default();
    let root = match std::fs::canonicalize(root) {
        Ok(root) => root,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(report),
        Err(e) => return Err(StoreError::file("find", root, e)),
    };
    let local = is_local(&root)?;
    let this = Owner::this_process()?;
    let failed = |e| StoreError::file("list", &root, e);
    for entry in std::fs::read_dir(&root).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if local && name.to_str().is_some_and(|n| n.starts_with(NEW_PREFIX)) {
            // Not a run's folder yet, so no part of the report.
            let _ = remove_unfinished(&root.join(name));
            continue;
        }
        if !name.to_str().is_some_and(|n| n.starts_with(PREFIX)) {
            continue;
        }
        let path = root.join(name);
        match examine(&path, local, &this) {
            Ok(Verdict::Dead(lock)) => match remove_run(&path) {
                Ok(()) => {
                    drop(lock);
                    report.removed.push(path);
                }
                Err(e) => report.unsure.push((path, format!("cannot be removed: {e}"))),
            },
            Ok(Verdict::Alive) => report.alive.push(path),
            Ok(Verdict::Gone) => {}
            Err(reason) => report.unsure.push((path, reason)),
        }
    }
    Ok(report)
}

enum Verdict {
    /// Dead; whoever holds the lock may remove it.
    Dead(File),
    Alive,
    /// Somebody else removed it meanwhile.
    Gone,
}

/// Whether a run folder's owner is dead; an error where that is not certain.
fn examine(path: &Path, local: bool, this: &Owner) -> Result<Verdict, String> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let folder = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(fd) => File::from(fd),
        Err(Errno::NOENT) => return Ok(Verdict::Gone),
        Err(e) => return Err(format!("not a folder that can be opened: {e}")),
    };
    let metadata = folder.metadata().map_err(|e| e.to_string())?;
    if metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err("it belongs to another user".to_owned());
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let lock = match rustix::fs::openat(&folder, LOCK, flags, Mode::empty()) {
        Ok(fd) => File::from(fd),
        Err(Errno::NOENT) if !path.exists() => return Ok(Verdict::Gone),
        Err(e) => return Err(format!("its lock file cannot be opened: {e}")),
    };
    let held = lock.metadata().map_err(|e| e.to_string())?;
    if !held.is_file() {
        return Err("its lock file is not a plain file".to_owned());
    }
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(Verdict::Alive),
        Err(e) => return Err(format!("its lock cannot be tried: {e}")),
    }
    if !still_there(path, &folder, &held) {
        return Ok(Verdict::Gone);
    }
    let mut text = String::new();
    (&lock).take(LONGEST_OWNER).read_to_string(&mut text).map_err(|e| format!("its lock file: {e}"))?;
    let owner = Owner::parse(&text).ok_or("its lock file does not say who made it")?;
    owner.is_dead(local, this)?;
    Ok(Verdict::Dead(lock))
}

/// Whether the lock that was taken is still the one under that name: another sweep may have removed the folder between
/// the opening and the locking.
fn still_there(path: &Path, folder: &File, lock: &std::fs::Metadata) -> bool {
    let linked = rustix::fs::statat(folder, LOCK, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|s| s.st_ino == lock.ino() && FileType::from_raw_mode(s.st_mode) == FileType::RegularFile);
    let same = |a: std::fs::Metadata, b: std::fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    let in_place =
        std::fs::symlink_metadata(path).ok().zip(folder.metadata().ok()).is_some_and(|(a, b)| same(a, b));
    linked && in_place
}

impl Owner {
    fn this_process() -> Result<Owner, StoreError> {
        let pid = std::process::id();
        let read = |path: &str| {
            std::fs::read_to_string(path).map_err(|e| StoreError::file("read", Path::new(path), e))
        };
        let stat = read("/proc/self/stat")?;
        let started = start_time(&stat).ok_or_else(|| {
            StoreError::file("understand", Path::new("/proc/self/stat"), io::Error::other("no start time"))
        })?;
        Ok(Owner {
            boot: read("/proc/sys/kernel/random/boot_id")?.trim().to_owned(),
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            pids: pid_namespace(),
            pid,
            started,
        })
    }

    fn parse(text: &str) -> Option<Owner> {
        let mut lines = text.lines();
        if lines.next()? != HEADER {
            return None;
        }
        let mut field = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ').map(str::to_owned);
        let owner = Owner {
            boot: field("boot").filter(|b| !b.is_empty())?,
            host: field("host")?,
            pids: field("pids")?,
            pid: field("pid")?.parse().ok()?,
            started: field("started")?.parse().ok()?,
        };
        // A file that was cut short or added to may name somebody else: trusted is what was written as a whole.
        (owner.to_string() == text).then_some(owner)
    }

    /// Whether this owner, whose lock is free, is dead; the reason where it may not be.
    fn is_dead(&self, local: bool, this: &Owner) -> Result<(), String> {
        if !local {
            return Err("its file system may be shared, so a free lock proves nothing".to_owned());
        }
        if self.boot != this.boot {
            // A local file system is mounted by one kernel at a time, so the other boot is over, if it was of this host.
            let other = format!("it was made on host {}, this is {}", self.host, this.host);
            return if self.host == this.host { Ok(()) } else { Err(other) };
        }
        if self.pids != this.pids {
            // A process of another container cannot be looked up, but the lock is kept by the one kernel of both.
            return Ok(());
        }
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid));
        match stat {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            // Another process by the same number, later.
            Ok(stat) if start_time(&stat).is_some_and(|started| started != self.started) => Ok(()),
            Ok(_) => Err(format!("process {} that made it is running, though it holds no lock", self.pid)),
            Err(e) => Err(format!("process {} cannot be looked up: {e}", self.pid)),
        }
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Owner { boot, host, pids, pid, started } = self;
        write!(f, "{HEADER}\nboot {boot}\nhost {host}\npids {pids}\npid {pid}\nstarted {started}\n")
    }
}

fn pid_namespace() -> String {
    let link = std::fs::read_link("/proc/self/ns/pid");
    link.map_or_else(|_| "unknown".to_owned(), |link| link.to_string_lossy().into_owned())
}

/// Field 22 of `/proc/PID/stat`. Field 2 is the program's name in parentheses, and may hold anything.
fn start_time(stat: &str) -> Option<u64> {
    stat.get(stat.rfind(')')? + 1..)?.split_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod mutated;
