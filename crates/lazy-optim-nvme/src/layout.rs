//! How parameters become buckets: flattened in order, then cut at every `bucket_elements`.

use std::collections::HashMap;
use std::ops::Range;

use lazy_model::Bytes;

use crate::wire::{Damage, Reader, Writer};
use crate::{OptimError, ParamSpec};

const MAGIC: &[u8; 8] = b"LZADLAYO";
const VERSION: u32 = 1;

/// The only state format so far: three float32 sections.
pub(crate) const FORMAT_F32: u32 = 0;

/// File and section alignment, in bytes: a multiple of what any direct-I/O device asks for.
pub(crate) const PAGE: u64 = 4096;

/// Highest group index: a record holds hyper-parameters for every group up to the highest named.
const MAX_GROUP: usize = u16::MAX as usize;

/// Identifies one store, so that files of another cannot be mistaken for its own.
pub(crate) type StoreId = [u8; 16];

/// A piece of one parameter inside a range of the flat element space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) param: usize,
    /// First element, counted inside the parameter.
    pub(crate) first: usize,
    /// Elements, counted from the start of the range asked for.
    pub(crate) local: Range<usize>,
}

/// The flat element space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    params: Vec<ParamSpec>,
    /// Where each parameter starts, and the total as the last entry.
    starts: Vec<usize>,
    bucket_elements: usize,
}

impl Layout {
    pub(crate) fn new(params: &[ParamSpec], bucket_elements: usize) -> Result<Self, OptimError> {
        if bucket_elements == 0 {
            return Err(OptimError::Option { what: "bucket_elements is 0; give at least 1".into() });
        }
        let mut names = HashMap::new();
        let mut starts = vec![0usize];
        let mut total = 0usize;
        for (index, param) in params.iter().enumerate() {
            if let Some(first) = names.insert(param.name.as_str(), index) {
                let name = param.name.clone();
                return Err(OptimError::DuplicateName { name, first, second: index });
            }
            if param.group > MAX_GROUP {
                let (name, group) = (&param.name, param.group);
                let what =
                    format!("{name} is in group {group}; number the groups from 0, at most {MAX_GROUP}");
                return Err(OptimError::Option { what });
            }
            let end = elements(param).and_then(|n| total.checked_add(n)).filter(|n| *n < 1 << 56);
            total = end.ok_or_else(|| OptimError::Option {
                what: format!("the shape of {} ({:?}) overflows the element count", param.name, param.shape),
            })?;
            starts.push(total);
        }
        if total.div_ceil(bucket_elements) > u32::MAX as usize {
            let what =
                format!("bucket_elements = {bucket_elements} makes too many buckets for {total} elements");
            return Err(OptimError::Option { what });
        }
        Ok(Layout { params: params.to_vec(), starts, bucket_elements })
    }

    pub(crate) fn params(&self) -> &[ParamSpec] {
        &self.params
    }

    /// Elements of one parameter.
    pub(crate) fn elements(&self, param: usize) -> usize {
        self.starts[param + 1] - self.starts[param]
    }

    pub(crate) fn total(&self) -> usize {
        self.starts[self.params.len()]
    }

    /// Groups the parameters name: the highest index plus one.
    pub(crate) fn group_count(&self) -> usize {
        self.params.iter().map(|p| p.group + 1).max().unwrap_or(0)
    }

    pub(crate) fn bucket_count(&self) -> usize {
        self.total().div_ceil(self.bucket_elements)
    }

    /// The elements of one bucket, in the flat space.
    pub(crate) fn bucket(&self, bucket: usize) -> Range<usize> {
        let start = bucket * self.bucket_elements;
        start..(start + self.bucket_elements).min(self.total())
    }

    pub(crate) fn buckets(&self) -> impl Iterator<Item = Range<usize>> {
        (0..self.bucket_count()).map(|b| self.bucket(b))
    }

    /// The pieces of parameters in `range`, in order, none of them empty.
    pub(crate) fn segments(&self, range: Range<usize>) -> impl Iterator<Item = Segment> {
        let first = self.starts.partition_point(|start| *start <= range.start).saturating_sub(1);
        (first..self.params.len())
            .take_while({
                let end = range.end;
                move |param| self.starts[*param] < end
            })
            .map(move |param| {
                let start = self.starts[param].max(range.start);
                let end = self.starts[param + 1].min(range.end).max(start);
                let local = start - range.start..end - range.start;
                Segment { param, first: start - self.starts[param], local }
            })
            .filter(|segment| !segment.local.is_empty())
    }

    /// The layout file, and its checksum, by which the record names it.
    pub(crate) fn encode(&self, id: &StoreId) -> (Vec<u8>, u32) {
        let mut writer = Writer::new(MAGIC, VERSION);
        writer.bytes(id).u64(self.bucket_elements as u64).u32(FORMAT_F32).u32(self.params.len() as u32);
        for param in &self.params {
            writer.u32(param.group as u32).u32(param.name.len() as u32).u32(param.shape.len() as u32);
            for dimension in &param.shape {
                writer.u64(*dimension as u64);
            }
            writer.bytes(param.name.as_bytes());
        }
        writer.seal()
    }

    /// Reads a layout file: the store's id, the layout, the checksum.
    pub(crate) fn decode(bytes: &[u8]) -> Result<(StoreId, Layout, u32), Damage> {
        let mut reader = Reader::open(bytes, MAGIC, VERSION)?;
        let crc = reader.crc;
        let id = reader.id()?;
        let bucket_elements = reader.usize()?;
        if reader.u32()? != FORMAT_F32 {
            return Err(Damage::Field);
        }
        let count = reader.u32()?;
        let mut params = Vec::new();
        for _ in 0..count {
            let group = reader.u32()? as usize;
            let name_length = reader.u32()? as usize;
            let rank = reader.u32()?;
            let shape = (0..rank).map(|_| reader.usize()).collect::<Result<_, _>>()?;
            let name = String::from_utf8(reader.bytes(name_length)?.to_vec()).map_err(|_| Damage::Field)?;
            params.push(ParamSpec { name, shape, group });
        }
        reader.finish()?;
        Ok((id, Layout::new(&params, bucket_elements).map_err(|_| Damage::Field)?, crc))
    }

    /// The first thing in which `asked` differs from this, the layout on disk.
    pub(crate) fn first_difference(&self, asked: &Layout) -> Option<String> {
        if self.bucket_elements != asked.bucket_elements {
            let (on_disk, asked) = (self.bucket_elements, asked.bucket_elements);
            return Some(format!("bucket_elements is {on_disk} on disk, {asked} asked for"));
        }
        for (index, (on_disk, asked)) in self.params.iter().zip(&asked.params).enumerate() {
            if on_disk.name != asked.name {
                let (on_disk, asked) = (&on_disk.name, &asked.name);
                return Some(format!("parameter {index} is named {on_disk} on disk, {asked} asked for"));
            }
            if on_disk.shape != asked.shape {
                let (name, on_disk, asked) = (&on_disk.name, &on_disk.shape, &asked.shape);
                return Some(format!("parameter {name} has shape {on_disk:?} on disk, {asked:?} asked for"));
            }
            if on_disk.group != asked.group {
                let (name, on_disk, asked) = (&on_disk.name, on_disk.group, asked.group);
                return Some(format!("parameter {name} is in group {on_disk} on disk, {asked} asked for"));
            }
        }
        let (on_disk, asked) = (self.params.len(), asked.params.len());
        (on_disk != asked).then(|| format!("{on_disk} parameters on disk, {asked} asked for"))
    }
}

/// Product of the dimensions, where it fits.
fn elements(param: &ParamSpec) -> Option<usize> {
    // A zero anywhere makes the tensor empty, even where the other dimensions alone would overflow.
    if param.shape.contains(&0) {
        return Some(0);
    }
    param.shape.iter().try_fold(1usize, |product, n| product.checked_mul(*n))
}

/// The checked layout file's size on disk.
pub(crate) fn layout_file_bytes(encoded: usize) -> Bytes {
    Bytes(encoded as u64).align_up(PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(sizes: &[usize], bucket: usize) -> Layout {
        let params: Vec<_> =
            sizes.iter().enumerate().map(|(i, n)| ParamSpec::new(format!("p{i}"), &[*n])).collect();
        Layout::new(&params, bucket).unwrap()
    }

    #[test]
    fn segments_cover_a_range_once_and_in_order() {
        let layout = layout(&[7, 0, 33, 128, 1], 50);
        for start in 0..=169 {
            for end in start..=169 {
                let mut flat = start;
                for s in layout.segments(start..end) {
                    assert_eq!(s.local.start, flat - start);
                    assert_eq!(layout.starts[s.param] + s.first, flat);
                    assert!(s.first + s.local.len() <= layout.elements(s.param));
                    flat += s.local.len();
                }
                assert_eq!(flat, end);
            }
        }
    }

    #[test]
    fn the_last_bucket_is_short() {
        let layout = layout(&[7, 0, 33, 128, 1], 50);
        assert_eq!(layout.buckets().collect::<Vec<_>>(), [0..50, 50..100, 100..150, 150..169]);
        assert_eq!(self::layout(&[], 50).bucket_count(), 0);
    }

    #[test]
    fn the_file_gives_the_layout_back() {
        let layout = Layout::new(
            &[ParamSpec::new("embed.weight", &[3, 5]), ParamSpec::new("größe", &[]).in_group(2)],
            4,
        )
        .unwrap();
        let (bytes, crc) = layout.encode(&[9; 16]);
        assert_eq!(Layout::decode(&bytes).unwrap(), ([9; 16], layout, crc));
    }

    #[test]
    fn impossible_shapes_are_refused() {
        assert!(Layout::new(&[ParamSpec::new("a", &[usize::MAX, 2])], 1).is_err());
        assert!(Layout::new(&[ParamSpec::new("a", &[1 << 40])], 1).is_err());
        assert!(Layout::new(&[ParamSpec::new("a", &[usize::MAX, 2, 0])], 1).is_ok());
        assert!(Layout::new(&[ParamSpec::new("a", &[1]).in_group(usize::MAX)], 1).is_err());
    }
}
