//! Making folders and files.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;

use lazy_model::Bytes;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;

use super::fs;
use crate::error::StoreError;

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
