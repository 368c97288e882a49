//! What was written and changed but not flushed, with what it takes to undo it.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use lazy_model::Bytes;

use super::super::hooks::Change;
use super::super::stripes::OpenFile;
use crate::buffer::AlignedBuf;
use crate::random::Random;

/// Folder, inside the folder of durable files, for what a later undo has to bring back.
const STASH: &str = ".stash";
/// A power cut tears a write at multiples of this.
const SECTOR: usize = 512;

type Inode = (u64, u64);

#[derive(Default)]
pub(crate) struct Journal {
    files: HashMap<Inode, Unflushed>,
    folders: Vec<(PathBuf, Undo)>,
    stashed: u64,
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
    pub(crate) fn prepare(&mut self, folder: &Path, change: Change<'_>) -> io::Result<Undo> {
        Ok(match change {
            Change::Create { name } => Undo::Remove(name.to_owned()),
            Change::Link { to, .. } => Undo::Remove(to.to_owned()),
            Change::Rename { from, to } => {
                let replaced = self.stash(folder, to)?;
                Undo::Rename(from.to_owned(), to.to_owned(), replaced)
            }
            Change::Remove { name } => match self.stash(folder, name)? {
                Some(stashed) => Undo::Restore(name.to_owned(), stashed),
                None => Undo::Nothing,
            },
            Change::SyncDir | Change::SyncData { .. } => Undo::Nothing,
        })
    }

    /// Notes a change that was made.
    pub(crate) fn made(&mut self, folder: &Path, change: Change<'_>, undo: Undo) -> io::Result<()> {
        match change {
            Change::SyncData { file } => {
                if let Some(unflushed) = self.files.get_mut(&inode(&file.file)?) {
                    if unflushed.writes.iter().any(|w| w.lost) {
                        // Undoing the lost writes must not undo what was flushed over them.
                        unflushed.writes.iter_mut().filter(|w| !w.lost).for_each(|w| w.flushed = true);
                    } else {
                        unflushed.writes.clear();
                    }
                }
            }
            Change::SyncDir => {
                self.folders.retain(|(of, _)| of != folder);
                remove_stash(folder)?;
            }
            _ => self.folders.push((folder.to_owned(), undo)),
        }
        Ok(())
    }

    fn stash(&mut self, folder: &Path, name: &str) -> io::Result<Option<PathBuf>> {
        let stash = folder.join(STASH);
        match std::fs::create_dir(&stash) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
            _ => {}
        }
        self.stashed += 1;
        let path = stash.join(self.stashed.to_string());
        match std::fs::hard_link(folder.join(name), &path) {
            Ok(()) => Ok(Some(path)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Undoes what a power cut takes.
    pub(crate) fn settle(self, random: &mut Random) -> io::Result<()> {
        for unflushed in self.files.into_values() {
            unflushed.settle(random)?;
        }
        let kept = random.below(self.folders.len() as u64 + 1) as usize;
        let mut folders: Vec<PathBuf> = Vec::new();
        for (i, (folder, undo)) in self.folders.into_iter().enumerate().rev() {
            if i >= kept {
                undo.apply(&folder)?;
            }
            folders.push(folder);
        }
        folders.sort();
        folders.dedup();
        folders.iter().try_for_each(|folder| remove_stash(folder))
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
    fn apply(self, folder: &Path) -> io::Result<()> {
        match self {
            Undo::Nothing => Ok(()),
            Undo::Remove(name) => std::fs::remove_file(folder.join(name)),
            Undo::Restore(name, stashed) => std::fs::rename(stashed, folder.join(name)),
            Undo::Rename(from, to, replaced) => {
                std::fs::rename(folder.join(&to), folder.join(from))?;
                match replaced {
                    Some(stashed) => std::fs::rename(stashed, folder.join(to)),
                    None => Ok(()),
                }
            }
        }
    }
}

fn remove_stash(folder: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(folder.join(STASH)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}
