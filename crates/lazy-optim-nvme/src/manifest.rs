//! The manifest of a generation: layout and record of the state that was saved, sealed together.

use std::path::Path;

use crate::OptimError;
use crate::layout::{Layout, StoreId};
use crate::record::Record;
use crate::wire::{Damage, Reader, Writer};

/// Its file. A folder without one is no generation.
pub(crate) const MANIFEST_FILE: &str = "adam.manifest";

const MAGIC: &[u8; 8] = b"LZADMANI";
const VERSION: u32 = 2;

/// What was saved, without the slots themselves.
#[derive(Debug, PartialEq)]
pub(crate) struct Manifest {
    pub(crate) id: StoreId,
    pub(crate) layout: Layout,
    pub(crate) record: Record,
}

/// The manifest file's bytes.
pub(crate) fn encode(id: &StoreId, layout: &Layout, record: &Record) -> Vec<u8> {
    let (layout, record) = (layout.encode(id).0, record.encode());
    let mut writer = Writer::new(MAGIC, VERSION);
    writer.u32(layout.len() as u32).u32(record.len() as u32).bytes(&layout).bytes(&record);
    writer.seal().0
}

impl Manifest {
    pub(crate) fn decode(bytes: &[u8]) -> Result<Manifest, Damage> {
        let mut reader = Reader::open(bytes, MAGIC, VERSION)?;
        let (layout, record) = (reader.u32()? as usize, reader.u32()? as usize);
        let (layout, record) = (whole(reader.bytes(layout)?)?, whole(reader.bytes(record)?)?);
        reader.finish()?;
        let (id, layout, crc) = Layout::decode(layout)?;
        let record = Record::decode(record)?;
        let counts = (record.buckets.len(), record.step_counts.len());
        if record.id != id
            || record.layout_crc != crc
            || counts != (layout.bucket_count(), layout.params().len())
        {
            return Err(Damage::Field);
        }
        Ok(Manifest { id, layout, record })
    }

    /// Reads the manifest of the generation in `folder`.
    pub(crate) fn read(folder: &Path) -> Result<Manifest, OptimError> {
        let path = folder.join(MANIFEST_FILE);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(e)
                if matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory) =>
            {
                return Err(OptimError::NoStore { dir: folder.to_path_buf() });
            }
            Err(source) => return Err(OptimError::file("read", &path)(source)),
        };
        Manifest::decode(&bytes).map_err(|damage| OptimError::Damaged { path, what: damage.to_string() })
    }
}

/// Refuses an envelope followed by something that is not its own.
fn whole(envelope: &[u8]) -> Result<&[u8], Damage> {
    let length = envelope.get(12..16).ok_or(Damage::Length)?;
    if length == (envelope.len() as u32).to_le_bytes() { Ok(envelope) } else { Err(Damage::Length) }
}
