//! Slot files: a head that seals the contents, then main weights, first and second moments.

use lazy_model::Bytes;

use crate::layout::{FORMAT_F32, PAGE, StoreId};
use crate::wire::{Damage, OVERHEAD, Reader, Writer};

const MAGIC: &[u8; 8] = b"LZADSLOT";
const VERSION: u32 = 1;

/// Elements under one checksum: 64 KiB a section, so that a block's three sections stay in a core's own cache
/// between checking, updating and sealing. Part of the format.
pub(crate) const BLOCK: usize = 16_384;

/// The sections, in file order.
pub(crate) const SECTIONS: [&str; 3] = ["main", "exp_avg", "exp_avg_sq"];

/// The checksums of one block's three sections.
pub(crate) type BlockSums = [u32; 3];

/// Fixed fields of the head before the table.
const HEAD_FIELDS: usize = 48;

/// File name of a slot.
pub(crate) fn file_name(bucket: usize, slot: usize) -> String {
    format!("bucket-{bucket:05}.slot-{slot}")
}

/// Where things stand in the slot files of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotShape {
    pub(crate) elements: usize,
}

impl SlotShape {
    pub(crate) fn blocks(self) -> usize {
        self.elements.div_ceil(BLOCK)
    }

    pub(crate) fn head_bytes(self) -> Bytes {
        Bytes((OVERHEAD + HEAD_FIELDS + self.blocks() * size_of::<BlockSums>()) as u64).align_up(PAGE)
    }

    fn section_bytes(self) -> Bytes {
        Bytes(self.elements as u64 * 4).align_up(PAGE)
    }

    /// File offset of an element of a section.
    pub(crate) fn offset(self, section: usize, element: usize) -> u64 {
        (self.head_bytes() + self.section_bytes() * section as u64).0 + element as u64 * 4
    }

    pub(crate) fn file_bytes(self) -> Bytes {
        self.head_bytes() + self.section_bytes() * SECTIONS.len() as u64
    }
}

/// What a block's checksum covers besides its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) id: StoreId,
    pub(crate) bucket: usize,
    pub(crate) generation: u64,
}

impl Identity {
    /// CRC32C over store id, bucket, generation, block, section and the section's bytes.
    pub(crate) fn sum(&self, block: usize, section: usize, data: &[u8]) -> u32 {
        let mut prefix = [0u8; 40];
        prefix[..16].copy_from_slice(&self.id);
        prefix[16..24].copy_from_slice(&(self.bucket as u64).to_le_bytes());
        prefix[24..32].copy_from_slice(&self.generation.to_le_bytes());
        prefix[32..36].copy_from_slice(&(block as u32).to_le_bytes());
        prefix[36..].copy_from_slice(&(section as u32).to_le_bytes());
        crc32c::crc32c_append(crc32c::crc32c(&prefix), data)
    }

    /// The checksums of one block's sections.
    pub(crate) fn sums(&self, block: usize, sections: [&[f32]; 3]) -> BlockSums {
        let mut section = 0;
        sections.map(|data| {
            section += 1;
            self.sum(block, section - 1, bytemuck::cast_slice(data))
        })
    }
}

/// The head of a slot file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlotHead {
    pub(crate) identity: Identity,
    pub(crate) slot: usize,
    pub(crate) elements: usize,
    pub(crate) table: Vec<BlockSums>,
}

impl SlotHead {
    /// The head's bytes and its checksum, by which the record names this content.
    pub(crate) fn encode(&self) -> (Vec<u8>, u32) {
        let mut writer = Writer::new(MAGIC, VERSION);
        writer.bytes(&self.identity.id).u32(self.identity.bucket as u32).u32(self.slot as u32);
        writer.u64(self.identity.generation).u64(self.elements as u64).u32(BLOCK as u32).u32(FORMAT_F32);
        for sum in self.table.as_flattened() {
            writer.u32(*sum);
        }
        writer.seal()
    }

    /// Reads a head and its checksum.
    pub(crate) fn decode(bytes: &[u8]) -> Result<(SlotHead, u32), Damage> {
        let mut reader = Reader::open(bytes, MAGIC, VERSION)?;
        let crc = reader.crc;
        let id = reader.id()?;
        let bucket = reader.u32()? as usize;
        let slot = reader.u32()? as usize;
        let generation = reader.u64()?;
        let elements = reader.usize()?;
        if reader.u32()? as usize != BLOCK || reader.u32()? != FORMAT_F32 {
            return Err(Damage::Field);
        }
        let table = (0..SlotShape { elements }.blocks())
            .map(|_| Ok([reader.u32()?, reader.u32()?, reader.u32()?]))
            .collect::<Result<_, Damage>>()?;
        reader.finish()?;
        Ok((SlotHead { identity: Identity { id, bucket, generation }, slot, elements, table }, crc))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_default_bucket_needs_offsets_beyond_two_gib() {
        let shape = SlotShape { elements: 200_000_000 };
        assert_eq!(shape.blocks(), 12_208);
        assert_eq!(shape.head_bytes(), Bytes(147_456));
        assert_eq!(shape.offset(2, 199_999_999), 147_456 + 2 * 800_002_048 + 799_999_996);
        assert_eq!(shape.file_bytes(), Bytes(147_456 + 3 * 800_002_048));
        assert!(shape.file_bytes().0 > 0x7fff_f000);
    }

    #[test]
    fn sections_start_on_pages_whatever_the_count() {
        for elements in [1, 2, 127, 128, 129, 1023, 1025, 7_206_000] {
            let shape = SlotShape { elements };
            for section in 0..3 {
                assert_eq!(shape.offset(section, 0) % PAGE, 0);
            }
            assert!(shape.offset(2, elements) <= shape.file_bytes().0);
        }
    }

    #[test]
    fn a_sum_changes_with_everything_it_covers() {
        let base = Identity { id: [1; 16], bucket: 2, generation: 3 };
        let mut seen = vec![base.sum(4, 0, b"data")];
        seen.push(Identity { id: [9; 16], ..base }.sum(4, 0, b"data"));
        seen.push(Identity { bucket: 3, ..base }.sum(4, 0, b"data"));
        seen.push(Identity { generation: 4, ..base }.sum(4, 0, b"data"));
        seen.push(base.sum(5, 0, b"data"));
        seen.push(base.sum(4, 1, b"data"));
        seen.push(base.sum(4, 0, b"dat4"));
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 7);
    }

    #[test]
    fn the_head_comes_back() {
        let identity = Identity { id: [1; 16], bucket: 2, generation: 3 };
        let head = SlotHead { identity, slot: 1, elements: BLOCK + 1, table: vec![[1, 2, 3], [4, 5, 6]] };
        let (bytes, crc) = head.encode();
        assert!(bytes.len() as u64 <= SlotShape { elements: BLOCK + 1 }.head_bytes().0);
        assert_eq!(SlotHead::decode(&bytes).unwrap(), (head, crc));
    }
}
