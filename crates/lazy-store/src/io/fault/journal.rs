//! What was written and changed but not flushed, with what it takes to undo it.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use lazy_model::Bytes;
use rustix::fs::{AtFlags, CWD};

use super::super::hooks::{At, Change};
use super::super::stripes::OpenFile;
use crate::buffer::AlignedBuf;
use crate::random::Random;

/// Folder, inside the outermost folder of durable files, for what a later undo has to bring back.
const STASH: &str = ".stash";
/// A power cut tears a write at multiples of this.
const SECTOR: usize = 512;

type Inode = (u64, u64);

#[derive(Default)]
pub(crate) struct Journal {
    files: HashMap<Inode, Unflushed>,
    /// Unflushed changes of folders, oldest first.
    folders: Vec<Unsynced>,
    stashed: u64,
}

struct Unsynced {
    of: Inode,
    /// By its handle, because a folder may have been renamed since.
    folder: File,
    path: PathBuf,
    root: PathBuf,
    undo: Undo,
}

/// Unflushed writes of one file, oldest first.
struct Unflushed {
    file: File,
    writes: Vec<Write>,
}

struct Write {
    offset: u64,
    old: Vec<u8>,
    new: Vec<u8>,
    /// A flush of it failed: the system holds it for written, and it never will be.
    lost: bool,
    /// It was flushed, and is only kept because an older write to the file was lost.
    flushed: bool,
}

/// How to undo a change of a folder.
pub(crate) enum Undo {
    Nothing,
    Remove(String),
    /// Remove a folder with all in it: what was flushed there is lost with the name.
    RemoveDir(String),
    /// The folder is gone, and what could be undone in it with it. A power cut that brings it back leaves what one during the
    /// removals before may leave.
    Forget(Inode),
    /// Rename the second back to the first, and bring back what the second was.
    Rename(String, String, Option<PathBuf>),
    Restore(String, PathBuf),
}

fn inode(file: &File) -> io::Result<Inode> {
    let metadata = file.metadata()?;
    Ok((metadata.dev(), metadata.ino()))
}

impl Journal {
    pub(crate) fn wrote(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        old: Vec<u8>,
        new: Vec<u8>,
    ) -> io::Result<()> {
        let file = File::from(file.try_clone_to_owned()?);
        let entry = self.files.entry(inode(&file)?);
        let unflushed = entry.or_insert_with(|| Unflushed { file, writes: Vec::new() });
        unflushed.writes.push(Write { offset, old, new, lost: false, flushed: false });
        Ok(())
    }

    /// A flush of the file failed.
    pub(crate) fn lose(&mut self, file: &OpenFile) -> io::Result<()> {
        if let Some(unflushed) = self.files.get_mut(&inode(&file.file)?) {
            unflushed.writes.iter_mut().filter(|w| !w.flushed).for_each(|w| w.lost = true);
        }
        Ok(())
    }

    /// Puts aside what a change is about to take away, and says how to undo it.
    pub(crate) fn prepare(&mut self, at: At<'_>, change: Change<'_>) -> io::Result<Undo> {
        Ok(match change {
            Change::Create { name } | Change::Link { name } => Undo::Remove(name.to_owned()),
            Change::CreateDir { name } => Undo::RemoveDir(name.to_owned()),
            Change::Rename { from, to } => {
                let replaced = self.stash(at, to)?;
                Undo::Rename(from.to_owned(), to.to_owned(), replaced)
            }
            Change::Remove { name } => match self.stash(at, name)? {
                Some(stashed) => Undo::Restore(name.to_owned(), stashed),
                None => Undo::Nothing,
            },
            Change::RemoveDir { name } => Undo::Forget(inode(&File::open(at.path.join(name))?)?),
            Change::SyncDir | Change::SyncData { .. } => Undo::Nothing,
        })
    }

    /// Notes a change that was made.
    pub(crate) fn made(&mut self, at: At<'_>, change: Change<'_>, undo: Undo) -> io::Result<()> {
        match (change, undo) {
            (Change::SyncData { file }, _) => {
                if let Some(unflushed) = self.files.get_mut(&inode(&file.file)?) {
                    if unflushed.writes.iter().any(|w| w.lost) {
                        // Undoing the lost writes must not undo what was flushed over them.
                        unflushed.writes.iter_mut().filter(|w| !w.lost).for_each(|w| w.flushed = true);
                    } else {
                        unflushed.writes.clear();
                    }
                }
                Ok(())
            }
            (Change::SyncDir, _) => self.forget(inode(at.folder)?),
            (_, Undo::Forget(folder)) => self.forget(folder),
            (_, undo) => {
                let of = inode(at.folder)?;
                let (path, root) = (at.path.to_owned(), at.root.to_owned());
                self.folders.push(Unsynced { of, folder: at.folder.try_clone()?, path, root, undo });
                Ok(())
            }
        }
    }

    /// Drops what is noted of a folder.
    fn forget(&mut self, folder: Inode) -> io::Result<()> {
        for dropped in self.folders.extract_if(.., |change| change.of == folder) {
            if let Undo::Rename(_, _, Some(stashed)) | Undo::Restore(_, stashed) = dropped.undo {
                std::fs::remove_file(stashed)?;
                // Until the last one is gone it is not empty.
                let _ = std::fs::remove_dir(dropped.root.join(STASH));
            }
        }
        Ok(())
    }

    fn stash(&mut self, at: At<'_>, name: &str) -> io::Result<Option<PathBuf>> {
        let stash = at.root.join(STASH);
        match std::fs::create_dir(&stash) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        self.stashed += 1;
        let path = stash.join(self.stashed.to_string());
        match rustix::fs::linkat(at.folder, name, CWD, &path, AtFlags::empty()) {
            Ok(()) => Ok(Some(path)),
            Err(rustix::io::Errno::NOENT) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Undoes what a power cut takes.
    pub(crate) fn settle(self, random: &mut Random) -> io::Result<()> {
        for unflushed in self.files.into_values() {
            unflushed.settle(random)?;
        }
        // Of each folder a first part is kept.
        let mut kept: Vec<(Inode, u64)> = Vec::new();
        for change in &self.folders {
            match kept.iter_mut().find(|(of, _)| *of == change.of) {
                Some((_, count)) => *count += 1,
                None => kept.push((change.of, 1)),
            }
        }
        let mut undone: HashMap<Inode, u64> =
            kept.into_iter().map(|(of, count)| (of, count - random.below(count + 1))).collect();
        let mut roots = Vec::new();
        for Unsynced { of, folder, path, root, undo } in self.folders.into_iter().rev() {
            if let Some(left @ 1..) = undone.get_mut(&of) {
                *left -= 1;
                match undo.apply(&folder, &path) {
                    // A folder that was made or renamed, and then removed for good.
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    done => done?,
                }
            }
            roots.push(root);
        }
        roots.sort();
        roots.dedup();
        roots.iter().try_for_each(|root| remove_stash(root))
    }
}

impl Unflushed {
    fn settle(self, random: &mut Random) -> io::Result<()> {
        for write in self.writes.iter().rev() {
            self.put(write.offset, &write.old)?;
        }
        for write in &self.writes {
            let sectors = write.new.len().div_ceil(SECTOR) as u64;
            let kept = match random.below(4) {
                _ if write.flushed => write.new.len(),
                0 | 1 => write.new.len(),
                2 => (random.below(sectors + 1) as usize * SECTOR).min(write.new.len()),
                _ => 0,
            };
            if write.lost || kept == 0 {
                continue;
            }
            let torn = [&write.new[..kept], &write.old[kept..]].concat();
            self.put(write.offset, &torn)?;
        }
        self.file.sync_all()
    }

    /// Writes through an aligned buffer, because the file may be a direct one. The range is that of a request, and so
    /// aligned.
    fn put(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut buffer = AlignedBuf::zeroed(Bytes(bytes.len() as u64)).map_err(io::Error::other)?;
        buffer.as_mut_slice().copy_from_slice(bytes);
        let written = rustix::io::pwrite(&self.file, buffer.as_slice(), offset)?;
        if written == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }
}

impl Undo {
    fn apply(self, folder: &File, path: &Path) -> io::Result<()> {
        let restore = |stashed: PathBuf, name: &str| rustix::fs::renameat(CWD, stashed, folder, name);
        match self {
            Undo::Nothing | Undo::Forget(_) => {}
            Undo::Remove(name) => rustix::fs::unlinkat(folder, name, AtFlags::empty())?,
            Undo::RemoveDir(name) => std::fs::remove_dir_all(path.join(name))?,
            Undo::Restore(name, stashed) => restore(stashed, &name)?,
            Undo::Rename(from, to, replaced) => {
                rustix::fs::renameat(folder, &to, folder, from)?;
                if let Some(stashed) = replaced {
                    restore(stashed, &to)?;
                }
            }
        }
        Ok(())
    }
}

fn remove_stash(folder: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(folder.join(STASH)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
