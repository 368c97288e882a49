//! Small reads and writes of durable files, and how wrong contents are told.

use std::path::Path;

use lazy_model::Bytes;
use lazy_store::durable::{AlignedBuf, DurableDir, DurableFile};

use crate::layout::{PAGE, StoreId};
use crate::wire::Damage;
use crate::{AdamOptions, OptimError};

/// What the store is: parameters and cut.
pub(crate) const LAYOUT_FILE: &str = "adam.layout";

/// The two record pages.
pub(crate) const RECORD_FILE: &str = "adam.record";

/// Opens a folder for this store alone, and makes it if absent.
pub(crate) fn open_dir(path: &Path, options: &AdamOptions) -> Result<DurableDir, OptimError> {
    let dir = DurableDir::open(path, &options.io)?;
    // Two processes that step one state would overwrite each other's slots.
    dir.lock()?;
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

/// Writes `bytes` as [`put_bytes`] does and flushes the file.
pub(crate) fn write_bytes(file: &DurableFile, offset: u64, bytes: &[u8]) -> Result<Bytes, OptimError> {
    let length = put_bytes(file, offset, bytes)?;
    file.sync_data()?;
    Ok(length)
}

/// Writes `bytes`, padded with zeros to whole pages. Returns the bytes written.
pub(crate) fn put_bytes(file: &DurableFile, offset: u64, bytes: &[u8]) -> Result<Bytes, OptimError> {
    let length = Bytes(bytes.len() as u64).align_up(PAGE);
    let mut buffer = AlignedBuf::zeroed(length)?;
    buffer.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
    file.write_at(offset, buffer).wait().1?;
    Ok(length)
}

/// Reads `length` bytes, a multiple of the page.
pub(crate) fn read_bytes(file: &DurableFile, offset: u64, length: Bytes) -> Result<AlignedBuf, OptimError> {
    let (buffer, result) = file.read_at(offset, AlignedBuf::zeroed(length)?).wait();
    result?;
    Ok(buffer)
}

/// Refuses a file that is shorter than it was made.
pub(crate) fn check_length(file: &DurableFile, wanted: Bytes) -> Result<(), OptimError> {
    if file.len() < wanted {
        return Err(wrong_file(file, "length", wanted.0.to_string(), file.len().0.to_string()));
    }
    Ok(())
}

pub(crate) fn damaged(file: &DurableFile, damage: Damage) -> OptimError {
    OptimError::Damaged { path: file.path().to_path_buf(), what: damage.to_string() }
}

pub(crate) fn wrong_file(
    file: &DurableFile,
    field: &'static str,
    wanted: String,
    found: String,
) -> OptimError {
    OptimError::WrongFile { path: file.path().to_path_buf(), field, wanted, found }
}

pub(crate) fn hex(id: &StoreId) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}
