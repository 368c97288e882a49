//! How parameters become buckets: flattened, those of one moment format after the other, and cut at every `bucket_elements`.

use std::collections::HashMap;
use std::ops::Range;

use lazy_model::Bytes;

use crate::moments::Moments;
use crate::options::{Part, Shard};
use crate::quant::QUANT_BLOCK;
use crate::slot::SlotShape;
use crate::wire::{Damage, Reader, Writer};
use crate::{OptimError, ParamSpec};

const MAGIC: &[u8; 8] = b"LZADLAYO";
const VERSION: u32 = 2;

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

/// The parameters of one moment format: a run of the flat element space, cut into buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Class {
    moments: Moments,
    range: Range<usize>,
    /// Elements of its buckets, but for the last.
    step: usize,
    /// Index of its first bucket.
    first: usize,
}

/// The flat element space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    params: Vec<ParamSpec>,
    /// Elements of each parameter.
    elements: Vec<usize>,
    /// Where each parameter starts and which it is, in the order in which they lie.
    placed: Vec<(usize, usize)>,
    /// Those that have elements.
    classes: Vec<Class>,
    bucket_elements: usize,
}

impl Layout {
    pub(crate) fn new(params: &[ParamSpec], bucket_elements: usize) -> Result<Self, OptimError> {
        if bucket_elements == 0 {
            return Err(OptimError::Option { what: "bucket_elements is 0; give at least 1".into() });
        }
        let mut names = HashMap::new();
        let mut counts = Vec::with_capacity(params.len());
        for (index, param) in params.iter().enumerate() {
            if let Some(first) = names.insert(param.name.as_str(), index) {
                let name = param.name.clone();
                return Err(OptimError::DuplicateName { name, first, second: index });
            }
            counts.push(check(param)?);
        }
        let mut layout = Layout {
            params: params.to_vec(),
            elements: counts,
            placed: Vec::with_capacity(params.len()),
            classes: Vec::new(),
            bucket_elements,
        };
        let mut end = 0;
        for moments in Moments::ALL {
            end = layout.place(moments, end)?;
        }
        Ok(layout)
    }

    /// Places the parameters of one format from `start` on, and cuts them into buckets. Returns where they end.
    fn place(&mut self, moments: Moments, start: usize) -> Result<usize, OptimError> {
        let unit = if moments == Moments::Int8 { QUANT_BLOCK } else { 1 };
        let start = start.next_multiple_of(unit);
        let mut end = start;
        for (index, param) in self.params.iter().enumerate().filter(|(_, p)| p.moments == moments) {
            // Elements under one scale are those of the whole parameter, however it is cut into shards.
            let at = end.next_multiple_of(unit) + first_of(param) % unit;
            end = at
                .checked_add(self.elements[index])
                .filter(|end| *end < 1 << 56)
                .ok_or_else(|| too_large(param))?;
            self.placed.push((at, index));
        }
        let step = self.bucket_elements.checked_next_multiple_of(unit).unwrap_or(usize::MAX);
        let first = self.bucket_count();
        if first + (end - start).div_ceil(step) > u32::MAX as usize {
            let (elements, bucket) = (end - start, self.bucket_elements);
            let what = format!("bucket_elements = {bucket} makes too many buckets for {elements} elements");
            return Err(OptimError::Option { what });
        }
        if start < end {
            self.classes.push(Class { moments, range: start..end, step, first });
        }
        Ok(end)
    }

    pub(crate) fn params(&self) -> &[ParamSpec] {
        &self.params
    }

    /// Elements of one parameter.
    pub(crate) fn elements(&self, param: usize) -> usize {
        self.elements[param]
    }

    /// Where what is held of a parameter begins in the whole of it, flattened; 0 for a box.
    pub(crate) fn first(&self, param: usize) -> usize {
        first_of(&self.params[param])
    }

    /// Groups the parameters name: the highest index plus one.
    pub(crate) fn group_count(&self) -> usize {
        self.params.iter().map(|p| p.group + 1).max().unwrap_or(0)
    }

    pub(crate) fn bucket_count(&self) -> usize {
        self.classes.last().map_or(0, |class| class.first + class.range.len().div_ceil(class.step))
    }

    fn class(&self, bucket: usize) -> &Class {
        &self.classes[self.classes.partition_point(|class| class.first <= bucket) - 1]
    }

    /// The bucket that holds an element of the flat space which is a parameter's.
    pub(crate) fn bucket_at(&self, flat: usize) -> usize {
        let Class { range, step, first, .. } =
            &self.classes[self.classes.partition_point(|class| class.range.start <= flat) - 1];
        first + (flat - range.start) / step
    }

    /// Where each parameter starts in the flat space.
    pub(crate) fn starts(&self) -> Vec<usize> {
        let mut starts = vec![0; self.params.len()];
        self.placed.iter().for_each(|&(start, param)| starts[param] = start);
        starts
    }

    /// The elements of one bucket, in the flat space.
    pub(crate) fn bucket(&self, bucket: usize) -> Range<usize> {
        let Class { range, step, first, .. } = self.class(bucket);
        let start = range.start + (bucket - first) * step;
        start..start.saturating_add(*step).min(range.end)
    }

    /// What the slots of a bucket look like.
    pub(crate) fn slot(&self, bucket: usize) -> SlotShape {
        SlotShape { elements: self.bucket(bucket).len(), moments: self.class(bucket).moments }
    }

    /// What the slots of every bucket look like.
    pub(crate) fn slots(&self) -> impl Iterator<Item = SlotShape> {
        (0..self.bucket_count()).map(|bucket| self.slot(bucket))
    }

    /// The pieces of parameters in `range`, in order, none of them empty. What lies between two parameters belongs to none.
    pub(crate) fn segments(&self, range: Range<usize>) -> impl Iterator<Item = Segment> {
        let first = self.placed.partition_point(|(start, _)| *start <= range.start).saturating_sub(1);
        let end = range.end;
        self.placed[first..].iter().take_while(move |(start, _)| *start < end).filter_map(
            move |&(at, param)| {
                let start = at.max(range.start);
                let end = (at + self.elements[param]).min(range.end);
                let segment =
                    || Segment { param, first: start - at, local: start - range.start..end - range.start };
                (start < end).then(segment)
            },
        )
    }

    /// The layout file, and its checksum, by which the record names it.
    pub(crate) fn encode(&self, id: &StoreId) -> (Vec<u8>, u32) {
        let mut writer = Writer::new(MAGIC, VERSION);
        writer.bytes(id).u64(self.bucket_elements as u64).u32(self.params.len() as u32);
        for param in &self.params {
            writer.u32(param.group as u32).u32(param.moments.code());
            writer.u32(param.name.len() as u32).bytes(param.name.as_bytes());
            write_dimensions(&mut writer, &param.shape);
            match &param.shard {
                None => writer.u32(WHOLE),
                Some(Shard { global_shape, part: Part::Range { first } }) => {
                    write_dimensions(writer.u32(RANGE), global_shape);
                    writer.u64(*first as u64)
                }
                Some(Shard { global_shape, part: Part::Box { offsets } }) => {
                    write_dimensions(writer.u32(BOX), global_shape);
                    write_dimensions(&mut writer, offsets);
                    &mut writer
                }
            };
        }
        writer.seal()
    }

    /// Reads a layout file: the store's id, the layout, the checksum.
    pub(crate) fn decode(bytes: &[u8]) -> Result<(StoreId, Layout, u32), Damage> {
        let mut reader = Reader::open(bytes, MAGIC, VERSION)?;
        let crc = reader.crc;
        let id = reader.id()?;
        let bucket_elements = reader.usize()?;
        let count = reader.u32()?;
        let params = (0..count).map(|_| read_param(&mut reader)).collect::<Result<Vec<_>, _>>()?;
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
            let name = &on_disk.name;
            if on_disk.shape != asked.shape {
                let (on_disk, asked) = (&on_disk.shape, &asked.shape);
                return Some(format!("parameter {name} has shape {on_disk:?} on disk, {asked:?} asked for"));
            }
            if on_disk.group != asked.group {
                let (on_disk, asked) = (on_disk.group, asked.group);
                return Some(format!("parameter {name} is in group {on_disk} on disk, {asked} asked for"));
            }
            if on_disk.moments != asked.moments {
                let (on_disk, asked) = (on_disk.moments, asked.moments);
                return Some(format!("the moments of {name} are {on_disk:?} on disk, {asked:?} asked for"));
            }
            if on_disk.shard != asked.shard {
                let [on_disk, asked] =
                    [on_disk, asked].map(|p| p.shard.as_ref().map_or("all".into(), |s| format!("{s:?}")));
                return Some(format!("{on_disk} of parameter {name} is on disk, {asked} asked for"));
            }
        }
        let (on_disk, asked) = (self.params.len(), asked.params.len());
        (on_disk != asked).then(|| format!("{on_disk} parameters on disk, {asked} asked for"))
    }
}

const WHOLE: u32 = 0;
const RANGE: u32 = 1;
const BOX: u32 = 2;

fn write_dimensions(writer: &mut Writer, dimensions: &[usize]) {
    writer.u32(dimensions.len() as u32);
    for dimension in dimensions {
        writer.u64(*dimension as u64);
    }
}

fn read_dimensions(reader: &mut Reader<'_>) -> Result<Vec<usize>, Damage> {
    let rank = reader.u32()?;
    (0..rank).map(|_| reader.usize()).collect()
}

fn read_param(reader: &mut Reader<'_>) -> Result<ParamSpec, Damage> {
    let group = reader.u32()? as usize;
    let moments = Moments::from_code(reader.u32()?).ok_or(Damage::Field)?;
    let name_length = reader.u32()? as usize;
    let name = String::from_utf8(reader.bytes(name_length)?.to_vec()).map_err(|_| Damage::Field)?;
    let shape = read_dimensions(reader)?;
    let shard = match reader.u32()? {
        WHOLE => None,
        RANGE => {
            let global_shape = read_dimensions(reader)?;
            Some(Shard { global_shape, part: Part::Range { first: reader.usize()? } })
        }
        BOX => {
            let global_shape = read_dimensions(reader)?;
            Some(Shard { global_shape, part: Part::Box { offsets: read_dimensions(reader)? } })
        }
        _ => return Err(Damage::Field),
    };
    Ok(ParamSpec { name, shape, group, moments, shard })
}

/// Where a shard's run of the flattened parameter begins.
fn first_of(param: &ParamSpec) -> usize {
    match &param.shard {
        Some(Shard { part: Part::Range { first }, .. }) => *first,
        _ => 0,
    }
}

/// Refuses what cannot be; gives the number of elements.
fn check(param: &ParamSpec) -> Result<usize, OptimError> {
    if param.group > MAX_GROUP {
        let (name, group) = (&param.name, param.group);
        let what = format!("{name} is in group {group}; number the groups from 0, at most {MAX_GROUP}");
        return Err(OptimError::Option { what });
    }
    let count = |shape: &[usize]| elements(shape).filter(|n| *n < 1 << 56).ok_or_else(|| too_large(param));
    let held = count(&param.shape)?;
    let Some(Shard { global_shape, part }) = &param.shard else { return Ok(held) };
    let whole = count(global_shape)?;
    let fits = match part {
        Part::Range { first } => {
            param.shape.len() == 1 && first.checked_add(held).is_some_and(|end| end <= whole)
        }
        Part::Box { offsets } => {
            let ends = offsets.iter().zip(&param.shape).map(|(offset, n)| offset.checked_add(*n));
            [offsets.len(), param.shape.len()] == [global_shape.len(); 2]
                && ends.zip(global_shape).all(|(end, n)| end.is_some_and(|end| end <= *n))
        }
    };
    if !fits {
        let (name, shape) = (&param.name, &param.shape);
        let what = format!(
            "the shard of {name}, {part:?} of shape {shape:?}, does not lie in its parameter of shape {global_shape:?}"
        );
        return Err(OptimError::Option { what });
    }
    Ok(held)
}

fn too_large(param: &ParamSpec) -> OptimError {
    let (name, shape) = (&param.name, &param.shape);
    OptimError::Option { what: format!("the shape of {name} ({shape:?}) overflows the element count") }
}

/// Product of the dimensions, where it fits.
pub(crate) fn elements(shape: &[usize]) -> Option<usize> {
    // A zero anywhere makes the tensor empty, even where the other dimensions alone would overflow.
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1usize, |product, n| product.checked_mul(*n))
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
                    assert_eq!(layout.placed[s.param].0 + s.first, flat);
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
        let buckets: Vec<_> = (0..layout.bucket_count()).map(|b| layout.bucket(b)).collect();
        assert_eq!(buckets, [0..50, 50..100, 100..150, 150..169]);
        assert_eq!(self::layout(&[], 50).bucket_count(), 0);
    }

    #[test]
    fn formats_have_buckets_of_their_own_and_scales_do_not_straddle_parameters() {
        let params = [
            ParamSpec::new("a", &[300]).with_moments(Moments::Int8),
            ParamSpec::new("b", &[10]),
            ParamSpec::new("c", &[1000]).range(700, 300).with_moments(Moments::Int8),
            ParamSpec::new("d", &[20]).with_moments(Moments::Bf16),
            ParamSpec::new("e", &[10]),
        ];
        let layout = Layout::new(&params, 400).unwrap();
        // 20 float32, 20 bfloat16, then from 256 on: 300, and from 768 + 700 % 256 on: 300.
        let buckets: Vec<_> =
            (0..layout.bucket_count()).map(|b| (layout.bucket(b), layout.slot(b).moments)).collect();
        let int8 = Moments::Int8;
        assert_eq!(
            buckets,
            [(0..20, Moments::F32), (20..40, Moments::Bf16), (256..768, int8), (768..1256, int8)]
        );
        let segment = |param, first, local| Segment { param, first, local };
        assert_eq!(layout.segments(0..20).collect::<Vec<_>>(), [segment(1, 0, 0..10), segment(4, 0, 10..20)]);
        assert_eq!(layout.segments(256..768).collect::<Vec<_>>(), [segment(0, 0, 0..300)]);
        assert_eq!(layout.segments(768..1256).collect::<Vec<_>>(), [segment(2, 0, 188..488)]);
        assert_eq!(layout.segments(600..800).collect::<Vec<_>>(), []);
    }

    #[test]
    fn shards_outside_their_parameter_are_refused() {
        let whole = || ParamSpec::new("a", &[4, 6]);
        assert!(Layout::new(&[whole().range(20, 4)], 9).is_ok());
        assert!(Layout::new(&[whole().boxed(&[1, 0], &[3, 6])], 9).is_ok());
        let wrong = [
            whole().range(21, 4),
            whole().range(usize::MAX, 4),
            whole().boxed(&[2, 0], &[3, 6]),
            whole().boxed(&[0], &[24]),
            whole().boxed(&[0, usize::MAX], &[1, 2]),
        ];
        for param in wrong {
            assert!(Layout::new(std::slice::from_ref(&param), 9).is_err(), "{param:?}");
        }
    }

    #[test]
    fn the_file_gives_the_layout_back() {
        let params = [
            ParamSpec::new("embed.weight", &[3, 5]),
            ParamSpec::new("größe", &[]).in_group(2).with_moments(Moments::Int8),
            ParamSpec::new("rows", &[8, 2]).boxed(&[4, 0], &[2, 2]),
            ParamSpec::new("run", &[8, 2]).range(3, 9).with_moments(Moments::Bf16),
        ];
        let layout = Layout::new(&params, 4).unwrap();
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
