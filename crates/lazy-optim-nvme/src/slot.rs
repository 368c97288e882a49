//! Slot files: a head that seals the contents, then main weights, first and second moments.

use lazy_model::Bytes;

use crate::Moments;
use crate::layout::{PAGE, StoreId};
use crate::wire::{Damage, OVERHEAD, Reader, Writer};

const MAGIC: &[u8; 8] = b"LZADSLOT";
const VERSION: u32 = 2;

/// Elements under one checksum: 64 KiB of float32, so that a block's three sections stay in a core's own cache between
/// checking, updating and sealing. Part of the format.
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

/// Whether a file is called as slots are.
pub(crate) fn is_file_name(name: &str) -> bool {
    let parts = name.strip_prefix("bucket-").and_then(|rest| rest.split_once(".slot-"));
    parts.is_some_and(|(bucket, slot)| {
        bucket.parse().is_ok_and(|bucket: usize| {
            slot.parse().is_ok_and(|slot: usize| slot < 2 && name == file_name(bucket, slot))
        })
    })
}

/// Where things stand in the slot files of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotShape {
    pub(crate) elements: usize,
    pub(crate) moments: Moments,
}

impl SlotShape {
    pub(crate) fn blocks(self) -> usize {
        self.elements.div_ceil(BLOCK)
    }

    pub(crate) fn head_bytes(self) -> Bytes {
        Bytes((OVERHEAD + HEAD_FIELDS + self.blocks() * size_of::<BlockSums>()) as u64).align_up(PAGE)
    }

    /// Bytes of `elements` of a section, from the start of a block on.
    pub(crate) fn bytes(self, section: usize, elements: usize) -> usize {
        if section == 0 { elements * 4 } else { self.moments.bytes(elements) }
    }

    /// Bytes moved for them: the padding of the last page included, which is zero on disk.
    pub(crate) fn padded(self, section: usize, elements: usize) -> Bytes {
        Bytes(self.bytes(section, elements) as u64).align_up(PAGE)
    }

    /// File offset of the element `first` of a section, which starts a block.
    pub(crate) fn offset(self, section: usize, first: usize) -> u64 {
        let before: Bytes = (0..section).map(|section| self.padded(section, self.elements)).sum();
        (self.head_bytes() + before).0 + self.bytes(section, first) as u64
    }

    pub(crate) fn file_bytes(self) -> Bytes {
        Bytes(self.offset(SECTIONS.len(), 0))
    }

    /// Sections of whole blocks and a last one, block by block.
    pub(crate) fn blocks_of(self, [main, avg, sq]: [&[u8]; 3]) -> impl Iterator<Item = [&[u8]; 3]> {
        let bytes = self.moments.block_bytes();
        let blocks = main.chunks(BLOCK * 4).zip(avg.chunks(bytes)).zip(sq.chunks(bytes));
        blocks.map(|((main, avg), sq)| [main, avg, sq])
    }
}

impl Moments {
    /// In the order in which they lie in a store.
    pub const ALL: [Moments; 3] = [Moments::F32, Moments::Bf16, Moments::Int8];

    /// Bytes of `elements` of one moment, from the start of a block on.
    fn bytes(self, elements: usize) -> usize {
        match self {
            Moments::F32 => elements * 4,
            Moments::Bf16 => elements * 2,
            // The scales of the last block follow the room for all its codes.
            Moments::Int8 => elements.div_ceil(BLOCK) * self.block_bytes(),
        }
    }

    /// Blocks that whole pages hold: chunks are cut at multiples of them.
    pub(crate) const fn blocks_in_pages(self) -> usize {
        match self {
            Moments::F32 | Moments::Bf16 => 1,
            // Of 16,640 bytes each.
            Moments::Int8 => 16,
        }
    }

    /// The number that stands for the format in files.
    pub(crate) fn code(self) -> u32 {
        match self {
            Moments::F32 => 0,
            Moments::Bf16 => 1,
            Moments::Int8 => 2,
        }
    }

    pub(crate) fn from_code(code: u32) -> Option<Moments> {
        Self::ALL.into_iter().find(|moments| moments.code() == code)
    }

    /// State of one element on disk or in memory, the float32 weight included, without padding and checksums: 12, 8 and
    /// 6.03 bytes.
    pub fn bytes_per_element(self) -> f64 {
        4.0 + 2.0 * self.block_bytes() as f64 / BLOCK as f64
    }
}

const _: () =
    assert!((Moments::Int8.block_bytes() * Moments::Int8.blocks_in_pages()).is_multiple_of(PAGE as usize));

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
    pub(crate) fn sums(&self, block: usize, sections: [&[u8]; 3]) -> BlockSums {
        [0, 1, 2].map(|section| self.sum(block, section, sections[section]))
    }
}

/// The head of a slot file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlotHead {
    pub(crate) identity: Identity,
    pub(crate) slot: usize,
    pub(crate) shape: SlotShape,
    pub(crate) table: Vec<BlockSums>,
}

impl SlotHead {
    /// The head's bytes and its checksum, by which the record names this content.
    pub(crate) fn encode(&self) -> (Vec<u8>, u32) {
        let mut writer = Writer::new(MAGIC, VERSION);
        writer.bytes(&self.identity.id).u32(self.identity.bucket as u32).u32(self.slot as u32);
        writer.u64(self.identity.generation).u64(self.shape.elements as u64);
        writer.u32(BLOCK as u32).u32(self.shape.moments.code());
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
        if reader.u32()? as usize != BLOCK {
            return Err(Damage::Field);
        }
        let moments = Moments::from_code(reader.u32()?).ok_or(Damage::Field)?;
        let shape = SlotShape { elements, moments };
        let table = (0..shape.blocks())
            .map(|_| Ok([reader.u32()?, reader.u32()?, reader.u32()?]))
            .collect::<Result<_, Damage>>()?;
        reader.finish()?;
        Ok((SlotHead { identity: Identity { id, bucket, generation }, slot, shape, table }, crc))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn f32s(elements: usize) -> SlotShape {
        SlotShape { elements, moments: Moments::F32 }
    }

    #[test]
    fn a_default_bucket_needs_offsets_beyond_two_gib() {
        let shape = f32s(200_000_000);
        assert_eq!(shape.blocks(), 12_208);
        assert_eq!(shape.head_bytes(), Bytes(147_456));
        assert_eq!(shape.offset(2, 199_999_488), 147_456 + 2 * 800_002_048 + 799_997_952);
        assert_eq!(shape.file_bytes(), Bytes(147_456 + 3 * 800_002_048));
        assert!(shape.file_bytes().0 > 0x7fff_f000);
    }

    #[test]
    fn sections_start_on_pages_whatever_the_count() {
        for elements in [1, 2, 127, 128, 129, 1023, 1025, 7_206_000] {
            for moments in Moments::ALL {
                let shape = SlotShape { elements, moments };
                for section in 0..3 {
                    assert_eq!(shape.offset(section, 0) % PAGE, 0);
                    let chunk = moments.blocks_in_pages() * BLOCK;
                    assert_eq!(shape.offset(section, chunk) % PAGE, 0);
                }
                assert!(shape.offset(2, elements) <= shape.file_bytes().0);
            }
        }
    }

    #[test]
    fn fewer_bytes_a_moment_are_fewer_bytes_on_disk() {
        // 2^24 elements, 1024 blocks: the weights, then two moments and, of 8-bit ones, a scale for 256.
        let head = 68 + 12 * 1024;
        let head = (head as u64).next_multiple_of(PAGE);
        for (moments, bytes) in
            [(Moments::F32, 12 << 24), (Moments::Bf16, 8 << 24), (Moments::Int8, (6 << 24) + 2 * (4 << 16))]
        {
            let shape = SlotShape { elements: 1 << 24, moments };
            assert_eq!(shape.file_bytes().0, head + bytes);
            assert_eq!(moments.bytes_per_element(), bytes as f64 / f64::from(1 << 24));
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
        let shape = SlotShape { elements: BLOCK + 1, moments: Moments::Int8 };
        let head = SlotHead { identity, slot: 1, shape, table: vec![[1, 2, 3], [4, 5, 6]] };
        let (bytes, crc) = head.encode();
        assert!(bytes.len() as u64 <= shape.head_bytes().0);
        assert_eq!(SlotHead::decode(&bytes).unwrap(), (head, crc));
    }
}
