//! The commit record: which slot of each bucket is the state, and everything that belongs to the same instant.

use lazy_model::Bytes;

use crate::layout::{Layout, PAGE, StoreId};
use crate::wire::{Damage, OVERHEAD, Reader, Writer};
use crate::{Durability, GroupOptions, MAX_BLOB_BYTES};

const MAGIC: &[u8; 8] = b"LZADCOMM";
const VERSION: u32 = 1;

const FIXED: usize = 48;
const BUCKET: usize = 16;
const GROUP: usize = 48;

/// The committed slot of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Committed {
    pub(crate) slot: usize,
    /// The sequence of the step that wrote it.
    pub(crate) generation: u64,
    /// Checksum of the slot's head, which in turn holds those of its blocks.
    pub(crate) head_crc: u32,
}

/// What a record says of the slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// They are the state, and steps write others.
    Committed,
    /// They are the state, until a step begins, which updates them in place.
    Saved,
    /// A step has begun since: they are of no one step.
    Begun,
}

impl Standing {
    /// That of slots which are the state.
    pub(crate) fn of(durability: Durability) -> Self {
        match durability {
            Durability::Step => Standing::Committed,
            Durability::Checkpoint => Standing::Saved,
        }
    }

    fn code(self) -> u32 {
        match self {
            Standing::Committed => 0,
            Standing::Saved => 1,
            Standing::Begun => 2,
        }
    }

    fn from_code(code: u32) -> Option<Self> {
        [Self::Committed, Self::Saved, Self::Begun].into_iter().find(|standing| standing.code() == code)
    }
}

/// One commit.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Record {
    pub(crate) id: StoreId,
    pub(crate) layout_crc: u32,
    pub(crate) standing: Standing,
    pub(crate) sequence: u64,
    pub(crate) buckets: Vec<Committed>,
    /// Steps taken, by parameter.
    pub(crate) step_counts: Vec<u64>,
    /// Hyper-parameters of the step, by group; empty before the first.
    pub(crate) groups: Vec<GroupOptions>,
    pub(crate) blob: Vec<u8>,
}

/// Size of one of the two record pages: room for the largest record of this layout.
pub(crate) fn page_bytes(layout: &Layout) -> Bytes {
    let variable = layout.bucket_count() * BUCKET + layout.params().len() * 8 + layout.group_count() * GROUP;
    Bytes((OVERHEAD + FIXED + variable + MAX_BLOB_BYTES) as u64).align_up(PAGE)
}

impl Record {
    /// Whether `other` was written after it.
    pub(crate) fn is_before(&self, other: &Record) -> bool {
        (self.sequence, self.standing == Standing::Begun)
            < (other.sequence, other.standing == Standing::Begun)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::new(MAGIC, VERSION);
        writer.bytes(&self.id).u64(self.sequence).u32(self.layout_crc).u32(self.standing.code());
        writer.u32(self.buckets.len() as u32).u32(self.step_counts.len() as u32);
        writer.u32(self.groups.len() as u32).u32(self.blob.len() as u32);
        for bucket in &self.buckets {
            writer.u64(bucket.generation).u32(bucket.slot as u32).u32(bucket.head_crc);
        }
        for count in &self.step_counts {
            writer.u64(*count);
        }
        for group in &self.groups {
            writer.f64(group.lr).f64(group.betas.0).f64(group.betas.1).f64(group.eps);
            writer.f64(group.weight_decay).u32(group.decoupled.into()).u32(group.maximize.into());
        }
        writer.bytes(&self.blob);
        writer.seal().0
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Record, Damage> {
        let mut reader = Reader::open(bytes, MAGIC, VERSION)?;
        let id = reader.id()?;
        let sequence = reader.u64()?;
        let layout_crc = reader.u32()?;
        let standing = Standing::from_code(reader.u32()?).ok_or(Damage::Field)?;
        let [buckets, params, groups, blob] = [reader.u32()?, reader.u32()?, reader.u32()?, reader.u32()?];
        let buckets = (0..buckets).map(|_| read_bucket(&mut reader)).collect::<Result<_, _>>()?;
        let step_counts = (0..params).map(|_| reader.u64()).collect::<Result<_, _>>()?;
        let groups = (0..groups).map(|_| read_group(&mut reader)).collect::<Result<_, _>>()?;
        let blob = reader.bytes(blob as usize)?.to_vec();
        reader.finish()?;
        Ok(Record { id, layout_crc, standing, sequence, buckets, step_counts, groups, blob })
    }
}

fn read_bucket(reader: &mut Reader<'_>) -> Result<Committed, Damage> {
    let generation = reader.u64()?;
    let slot = reader.u32()? as usize;
    if slot > 1 {
        return Err(Damage::Field);
    }
    Ok(Committed { slot, generation, head_crc: reader.u32()? })
}

fn read_group(reader: &mut Reader<'_>) -> Result<GroupOptions, Damage> {
    Ok(GroupOptions {
        lr: reader.f64()?,
        betas: (reader.f64()?, reader.f64()?),
        eps: reader.f64()?,
        weight_decay: reader.f64()?,
        decoupled: reader.u32()? != 0,
        maximize: reader.u32()? != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ParamSpec;

    #[test]
    fn the_largest_record_fits_its_page_and_comes_back() {
        let params: Vec<_> =
            (0..9).map(|i| ParamSpec::new(format!("p{i}"), &[100]).in_group(i % 2)).collect();
        let layout = Layout::new(&params, 70).unwrap();
        let bucket = Committed { slot: 1, generation: 77, head_crc: 5 };
        let record = Record {
            id: [3; 16],
            layout_crc: 8,
            standing: Standing::Begun,
            sequence: 77,
            buckets: vec![bucket; layout.bucket_count()],
            step_counts: (70..79).collect(),
            groups: vec![GroupOptions { maximize: true, ..GroupOptions::default() }; 2],
            blob: vec![0xa5; MAX_BLOB_BYTES],
        };
        let bytes = record.encode();
        assert!(bytes.len() as u64 <= page_bytes(&layout).0);
        assert_eq!(Record::decode(&bytes).unwrap(), record);
    }
}
