//! Facts about file systems.

use std::os::fd::AsFd;
use std::path::Path;

use lazy_model::Bytes;

use crate::error::StoreError;

/// File systems by the number that `statfs` gives, and whether their locks are kept by this kernel alone.
const KNOWN: &[(u64, &str, bool)] = &[
    (0xef53, "ext4", true),
    (0x5846_5342, "xfs", true),
    (0x9123_683e, "btrfs", true),
    (0x0102_1994, "tmpfs", true),
    (0xf2f5_2010, "f2fs", true),
    (0x794c_7630, "overlayfs", true),
    (0x2fc1_2fc1, "zfs", true),
    (0xca45_1a4e, "bcachefs", true),
    (0x6969, "nfs", false),
    (0x6573_5546, "fuse", false),
    (0xff53_4d42, "cifs", false),
    (0xfe53_4d42, "smb2", false),
    (0x0bd0_0bd0, "lustre", false),
    (0x0102_1997, "9p", false),
];

/// The name of the others.
pub(crate) const UNKNOWN: &str = "unknown";

fn known(number: u64) -> Option<(&'static str, bool)> {
    KNOWN.iter().find(|(magic, ..)| *magic == number).map(|&(_, name, local)| (name, local))
}

fn number(path: &Path) -> Result<u64, StoreError> {
    let stat =
        rustix::fs::statfs(path).map_err(|e| StoreError::file("ask for the file system of", path, e))?;
    // The numbers have 32 bits; some architectures hand them out sign-extended.
    Ok((stat.f_type as u64) & 0xffff_ffff)
}

/// Name of the file system that `path` lies on; [`UNKNOWN`] where this crate has no name for it.
pub(crate) fn name(path: &Path) -> Result<&'static str, StoreError> {
    Ok(known(number(path)?).map_or(UNKNOWN, |(name, _)| name))
}

/// Whether `path` lies on a file system whose locks are known to be kept by this kernel alone.
pub(crate) fn is_local(path: &Path) -> Result<bool, StoreError> {
    Ok(known(number(path)?).is_some_and(|(_, local)| local))
}

/// Whether `path` lies on tmpfs: a spill file there takes the RAM that it was meant to spare.
///
/// # Errors
///
/// [`StoreError::File`] where the path does not exist.
pub fn is_tmpfs(path: &Path) -> Result<bool, StoreError> {
    Ok(name(path)? == "tmpfs")
}

/// Bytes that an unprivileged user may still take on the file system of an open folder or file.
pub(crate) fn free_space(fd: impl AsFd, path: &Path) -> Result<Bytes, StoreError> {
    let stat =
        rustix::fs::fstatvfs(fd).map_err(|e| StoreError::file("ask for the free space of", path, e))?;
    Ok(Bytes(stat.f_bavail.saturating_mul(stat.f_frsize)))
}
