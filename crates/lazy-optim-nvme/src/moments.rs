//! How moments are held: float32, bfloat16, or 8 bits with a scale every 256 elements.

use std::ops::Range;

use crate::bf16;
use crate::quant::{Map, QUANT_BLOCK, SIGNED, UNSIGNED};
use crate::slot::BLOCK;

/// The format of both moments of a parameter. Main weights are float32 always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Moments {
    /// Float32: 8 bytes an element.
    #[default]
    F32,
    /// Bfloat16, rounded to the nearest: 4 bytes an element. A change of less than 1/512 of a moment is rounded away: with
    /// beta2 above 0.998, as it is by default, second moments grow but do not shrink. (8-bit ones do, all that share a
    /// scale together.)
    Bf16,
    /// Codes into the dynamic maps of bitsandbytes and a float32 scale every 256 elements: about 2 bytes an element.
    Int8,
}

/// Which moment a section holds: 8-bit codes of the two mean different values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moment {
    /// `exp_avg`.
    First,
    /// `exp_avg_sq`, never negative.
    Second,
}

impl Moment {
    #[inline(always)]
    fn map(self) -> &'static Map {
        match self {
            Moment::First => &SIGNED,
            Moment::Second => &UNSIGNED,
        }
    }
}

impl Moments {
    /// Bytes of [`BLOCK`] elements of a section. The 8-bit format has all codes first, then all scales; its last block is
    /// as long as the others, whatever it holds.
    pub(crate) const fn block_bytes(self) -> usize {
        match self {
            Moments::F32 => BLOCK * 4,
            Moments::Bf16 => BLOCK * 2,
            Moments::Int8 => BLOCK + BLOCK / QUANT_BLOCK * 4,
        }
    }

    /// Writes the bytes of zeros into one block.
    pub(crate) fn fill_zero(self, moment: Moment, block: &mut [u8]) {
        block.fill(0);
        if self == Moments::Int8 {
            let codes = block.len().min(BLOCK);
            block[..codes].fill(moment.map().zero());
        }
    }

    /// The values of elements `range` of a block, whose bytes are `block`; `values` has as many. Float32 and bfloat16
    /// blocks are aligned to their elements.
    #[inline(always)]
    pub(crate) fn decode(self, moment: Moment, block: &[u8], range: Range<usize>, values: &mut [f32]) {
        match self {
            Moments::F32 => values.copy_from_slice(&bytemuck::cast_slice(block)[range]),
            Moments::Bf16 => bf16::widen_all(&bytemuck::cast_slice(block)[range], values),
            Moments::Int8 => {
                let (codes, scales) = block.split_at(BLOCK);
                let (scales, start) = (scales.as_chunks().0, range.start);
                for piece in pieces(range, QUANT_BLOCK) {
                    let scale = f32::from_le_bytes(scales[piece.start / QUANT_BLOCK]);
                    let values = &mut values[piece.start - start..piece.end - start];
                    moment.map().decode(&codes[piece], scale, values);
                }
            }
        }
    }

    /// Copies elements `range` of one block into another of the same format, from element `at` on. Elements under one scale
    /// have to be under one in both.
    pub(crate) fn copy(self, from: &[u8], range: Range<usize>, to: &mut [u8], at: usize) {
        let end = at + range.len();
        let size = match self {
            Moments::F32 => 4,
            Moments::Bf16 => 2,
            Moments::Int8 => 1,
        };
        to[at * size..end * size].copy_from_slice(&from[range.start * size..range.end * size]);
        if self == Moments::Int8 {
            let (from, to) = (from[BLOCK..].as_chunks::<4>().0, to[BLOCK..].as_chunks_mut::<4>().0);
            for piece in pieces(at..end, QUANT_BLOCK) {
                to[piece.start / QUANT_BLOCK] = from[(piece.start - at + range.start) / QUANT_BLOCK];
            }
        }
    }

    /// Writes elements `range` of a block. A scale's elements are written together: `range` has all of them that are any
    /// parameter's.
    #[inline(always)]
    pub(crate) fn encode(self, moment: Moment, values: &[f32], block: &mut [u8], range: Range<usize>) {
        match self {
            Moments::F32 => bytemuck::cast_slice_mut(block)[range].copy_from_slice(values),
            Moments::Bf16 => bf16::round_all(values, &mut bytemuck::cast_slice_mut(block)[range]),
            Moments::Int8 => {
                let (codes, scales) = block.split_at_mut(BLOCK);
                let (scales, start) = (scales.as_chunks_mut().0, range.start);
                for piece in pieces(range, QUANT_BLOCK) {
                    let values = &values[piece.start - start..piece.end - start];
                    let scale = moment.map().encode(values, &mut codes[piece.clone()]);
                    scales[piece.start / QUANT_BLOCK] = scale.to_le_bytes();
                }
            }
        }
    }
}

/// A range, cut at the multiples of `len`.
#[inline(always)]
pub(crate) fn pieces(range: Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> {
    let first = range.start / len;
    (first..range.end.div_ceil(len)).map(move |i| range.start.max(i * len)..range.end.min((i + 1) * len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_takes_the_bytes_that_the_format_page_states() {
        let bytes = [Moments::F32, Moments::Bf16, Moments::Int8].map(Moments::block_bytes);
        assert_eq!(bytes, [65_536, 32_768, 16_640]);
    }

    #[test]
    fn any_range_of_a_block_comes_back_and_leaves_the_rest_alone() {
        let values: Vec<f32> = (0..BLOCK).map(|i| (i % 100) as f32 / 64.0 - 0.5).collect();
        for moments in [Moments::F32, Moments::Bf16] {
            for range in [0..BLOCK, 0..1, 255..257, 1000..1000, BLOCK - 3..BLOCK] {
                let mut words = vec![0u64; moments.block_bytes() / 8];
                let block = bytemuck::cast_slice_mut(&mut words);
                moments.encode(Moment::First, &values[range.clone()], block, range.clone());
                let mut back = vec![7.0; BLOCK];
                moments.decode(Moment::First, block, 0..BLOCK, &mut back);
                for (i, back) in back.iter().enumerate() {
                    assert_eq!(*back, if range.contains(&i) { values[i] } else { 0.0 });
                }
            }
        }
    }

    #[test]
    fn each_256_elements_have_a_scale_of_their_own() {
        // A block of quotients that the map holds exactly, times the number of the scale.
        let mut words = vec![0u64; Moments::Int8.block_bytes() / 8];
        let block = bytemuck::cast_slice_mut(&mut words);
        for moment in [Moment::First, Moment::Second] {
            Moments::Int8.fill_zero(moment, block);
            let mut back = vec![7.0; BLOCK];
            Moments::Int8.decode(moment, block, 0..BLOCK, &mut back);
            assert!(back.iter().all(|value| value.to_bits() == 0));
            let scale = |i: usize| (1 + i / QUANT_BLOCK) as f32;
            // The second block is held from its 100th element on, the last one up to its 7th.
            let range = 256 + 100..BLOCK - 249;
            let values: Vec<f32> =
                range.clone().map(|i| if i % 3 == 0 || i == 256 + 100 { scale(i) } else { 0.0 }).collect();
            Moments::Int8.encode(moment, &values, block, range.clone());
            for cut in [range.clone(), 356..357, 511..1025, BLOCK - 250..BLOCK - 249] {
                let mut back = vec![7.0; cut.len()];
                Moments::Int8.decode(moment, block, cut.clone(), &mut back);
                assert_eq!(back, values[cut.start - range.start..cut.end - range.start]);
            }
            let scales = block[BLOCK..].as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
            let wanted = (0..64).map(|i| if i == 0 { 0.0 } else { (i + 1) as f32 });
            assert!(scales.eq(wanted));
        }
    }

    #[test]
    fn pieces_cover_a_range_in_order() {
        let cut = |range| pieces(range, 10).map(|piece| (piece.start, piece.end)).collect::<Vec<_>>();
        assert_eq!(cut(3..25), [(3, 10), (10, 20), (20, 25)]);
        assert_eq!(cut(10..20), [(10, 20)]);
        assert_eq!(cut(12..13), [(12, 13)]);
        assert!(cut(5..5).iter().all(|(start, end)| start == end));
    }
}
