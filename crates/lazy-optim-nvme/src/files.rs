//! Small reads and writes of whole files, and how their failures are told.

use std::path::Path;

use lazy_model::Bytes;
use lazy_store::durable::{AlignedBuf, DurableDir, DurableFile};

use crate::error::Doing;
use crate::layout::{PAGE, StoreId};
use crate::slot::{self, SlotHead};
use crate::wire::Damage;
use crate::{AdamOptions, OptimError, ring};

/// What the store is: parameters and cut.
pub(crate) const LAYOUT_FILE: &str = "adam.layout";

/// The two record pages.
pub(crate) const RECORD_FILE: &str = "adam.record";

pub(crate) fn open_dir(path: &Path, options: &AdamOptions) -> Result<DurableDir, OptimError> {
    let dir =
        DurableDir::open(path, &options.io).doing(|| format!("opening the folder {}", path.display()))?;
    let alignment = dir.alignment();
    if !PAGE.is_multiple_of(alignment as u64) {
        let what = format!(
            "{} asks for transfers aligned to {alignment} bytes, the slot files offer {PAGE}; choose another folder",
            path.display()
        );
        return Err(OptimError::Option { what });
    }
    Ok(dir)
}

pub(crate) fn exists(dir: &DurableDir, folder: &Path, name: &str) -> Result<bool, OptimError> {
    dir.exists(name).doing(|| format!("looking for {}", folder.join(name).display()))
}

pub(crate) fn open_file(dir: &DurableDir, folder: &Path, name: &str) -> Result<DurableFile, OptimError> {
    dir.open_file(name).doing(|| format!("opening {}", folder.join(name).display()))
}

/// Writes a slot's head and flushes the file; returns the head's checksum.
pub(crate) fn write_head(folder: &Path, file: &DurableFile, head: &SlotHead) -> Result<u32, OptimError> {
    let (bytes, crc) = head.encode();
    write_bytes(folder, &slot::file_name(head.identity.bucket, head.slot), file, 0, &bytes)?;
    Ok(crc)
}

/// Writes `bytes`, padded with zeros to whole pages, and flushes the file.
pub(crate) fn write_bytes(
    folder: &Path,
    name: &str,
    file: &DurableFile,
    offset: u64,
    bytes: &[u8],
) -> Result<Bytes, OptimError> {
    let length = Bytes(bytes.len() as u64).align_up(PAGE);
    let mut buffer = ring::buffer(length)?;
    let (data, padding) = buffer.as_mut_slice().split_at_mut(bytes.len());
    data.copy_from_slice(bytes);
    padding.fill(0);
    file.write_at(offset, buffer).wait().1.doing(|| format!("writing {}", folder.join(name).display()))?;
    file.sync_data().doing(|| format!("flushing {}", folder.join(name).display()))?;
    Ok(length)
}

pub(crate) fn read_bytes(
    folder: &Path,
    name: &str,
    file: &DurableFile,
    offset: u64,
    length: Bytes,
) -> Result<AlignedBuf, OptimError> {
    let (buffer, result) = file.read_at(offset, ring::buffer(length)?).wait();
    result.doing(|| format!("reading {}", folder.join(name).display()))?;
    Ok(buffer)
}

pub(crate) fn damaged(folder: &Path, name: &str, damage: Damage) -> OptimError {
    OptimError::Damaged { path: folder.join(name), what: damage.to_string() }
}

pub(crate) fn wrong_file(
    folder: &Path,
    name: &str,
    field: &'static str,
    wanted: String,
    found: String,
) -> OptimError {
    OptimError::WrongFile { path: folder.join(name), field, wanted, found }
}

pub(crate) fn hex(id: &StoreId) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}
