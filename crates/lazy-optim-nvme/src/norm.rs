//! The global gradient norm, independent of threads, buckets and chunks.

use std::ops::Range;

use rayon::prelude::*;

use crate::OptimError;
use crate::adam::{Gradient, unscale};
use crate::bf16;
use crate::moments::pieces;
use crate::simd::{Compiled, InstructionSet};

/// Elements under one partial sum, counted from the start of each parameter. Part of what makes the norm
/// reproducible: shards cut at multiples of it give the same sums.
pub(crate) const NORM_BLOCK: usize = 65_536;

/// Accumulators of a partial sum: element `i` of a block goes to number `i % LANES`. Fixed, and few enough to stay in a
/// core's first cache, so that every instruction set and the GPU (`adam.cu`, four to a thread) add in the same order.
const LANES: usize = 1024;

/// The sum of squares of a block of one parameter's gradient, for a norm over several ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormPart {
    /// Index of the parameter, which is the same on every rank.
    pub param: usize,
    /// Index of the block of 65,536 elements, counted in the whole parameter.
    pub block: usize,
    /// Its sum of squares, after division by the scale.
    pub sum: f64,
}

/// The Euclidean norm of all gradients of which these are the parts, those of several ranks one after the other.
///
/// Parts are added in the order of parameters and blocks. So shards that are cut at multiples of 65,536 elements give the same bits for
/// any number of them; other cuts agree to about 1e-12.
pub fn combine_norm(parts: impl IntoIterator<Item = NormPart>) -> f64 {
    let mut parts: Vec<NormPart> = parts.into_iter().collect();
    parts.sort_by_key(|part| (part.param, part.block));
    parts.iter().fold(0.0, |total, part| total + part.sum).sqrt()
}

/// The parts of gradients in RAM, of the parameters given, whose first elements there are given too.
pub(crate) fn parts<'a>(
    grads: impl IntoIterator<Item = (usize, Gradient<'a>, usize)>,
    scale: f64,
) -> Vec<NormPart> {
    let blocks: Vec<(usize, usize, Gradient<'_>)> = grads
        .into_iter()
        .flat_map(|(param, grad, first)| {
            blocks(first, grad.len()).map(move |range| {
                (param, range.start / NORM_BLOCK, grad.slice(range.start - first..range.end - first))
            })
        })
        .collect();
    let sum =
        |&(param, block, grad): &_| NormPart { param, block, sum: sum_of_squares(grad, unscale(scale)) };
    blocks.par_iter().map(sum).collect()
}

/// Which elements of a parameter are in each block, of the `n` from `first` on.
pub(crate) fn blocks(first: usize, n: usize) -> impl Iterator<Item = Range<usize>> {
    pieces(first..first + n, NORM_BLOCK).filter(|range| !range.is_empty())
}

/// `min(1, max_norm / (norm + 1e-6))`, the coefficient of `torch.nn.utils.clip_grad_norm_`.
pub(crate) fn clip_coefficient(norm: f64, max_norm: Option<f64>) -> f64 {
    max_norm.map_or(1.0, |max| (max / (norm + 1e-6)).min(1.0))
}

/// Refuses what would freeze, negate or poison every weight.
pub(crate) fn check_max_norm(max_norm: Option<f64>) -> Result<(), OptimError> {
    match max_norm {
        Some(max) if !(max.is_finite() && max > 0.0) => Err(OptimError::MaxNorm { max_norm: max }),
        _ => Ok(()),
    }
}

/// The partial sum of one block.
pub(crate) fn sum_of_squares(block: Gradient<'_>, unscale: f32) -> f64 {
    InstructionSet::best().run(Squares { block, unscale })
}

struct Squares<'a> {
    block: Gradient<'a>,
    unscale: f32,
}

impl Compiled for Squares<'_> {
    type Output = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let mut lanes = [0.0; LANES];
        match self.block {
            Gradient::F32(block) => add_squares(&mut lanes, block, self.unscale, |g| g),
            Gradient::Bf16(block) => add_squares(&mut lanes, block, self.unscale, bf16::widen),
            // The GPU does that.
            Gradient::Device(_) => return f64::NAN,
        }
        // Halves are added until one is left.
        let mut width = LANES / 2;
        while width > 0 {
            let (left, right) = lanes.split_at_mut(width);
            for (left, right) in left.iter_mut().zip(right) {
                *left += *right;
            }
            width /= 2;
        }
        lanes[0]
    }
}

#[inline(always)]
fn add_squares<T: Copy>(lanes: &mut [f64; LANES], block: &[T], unscale: f32, widen: impl Fn(T) -> f32) {
    for row in block.chunks(LANES) {
        for (sum, g) in lanes.iter_mut().zip(row) {
            // The product is rounded to float32 as the update will see it, so an overflow there shows here. Its square
            // is exact in float64.
            let g = f64::from(widen(*g) * unscale);
            *sum += g * g;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn global_norm(grads: &[Option<&[f32]>], scale: f64) -> f64 {
        let grads = grads.iter().enumerate();
        combine_norm(parts(
            grads.filter_map(|(param, grad)| Some((param, Gradient::F32((*grad)?), 0))),
            scale,
        ))
    }

    #[test]
    fn shards_give_the_norm_of_the_whole() {
        let grad: Vec<f32> = (0..300_000).map(|i| (i as f32 * 0.37).sin() * 1e3).collect();
        let other = [3.0f32; 10];
        let whole = parts([(0, Gradient::F32(&grad), 0), (1, Gradient::F32(&other), 0)], 3.0);
        let norm = combine_norm(whole);
        let cut = |marks: &[usize]| {
            let ranks = marks.windows(2).map(|m| {
                let other = (m[0] == 0).then_some((1, Gradient::F32(&other), 0));
                parts([(0, Gradient::F32(&grad[m[0]..m[1]]), m[0])].into_iter().chain(other), 3.0)
            });
            // In any order of the ranks.
            combine_norm(ranks.collect::<Vec<_>>().into_iter().rev().flatten())
        };
        for marks in [vec![0, 131_072, 300_000], vec![0, 65_536, 65_536, 196_608, 262_144, 300_000]] {
            assert_eq!(cut(&marks), norm, "{marks:?}");
        }
        let elsewhere = cut(&[0, 1, 77_777, 300_000]);
        assert!((elsewhere / norm - 1.0).abs() < 1e-12, "{elsewhere} {norm}");
    }

    #[test]
    fn squares_beyond_float32_stay_finite() {
        let grad = [1e20f32, -1e20];
        assert_eq!(global_norm(&[None, Some(&grad)], 1.0), (2.0f64 * (1e20f32 as f64).powi(2)).sqrt());
        assert_eq!(global_norm(&[Some(&[3.0]), Some(&[-4.0])], 1.0), 5.0);
        assert_eq!(global_norm(&[Some(&[3.0]), Some(&[-4.0])], 0.5), 10.0);
        assert_eq!(global_norm(&[Some(&[]), None], 1.0), 0.0);
    }

    #[test]
    fn one_bad_element_anywhere_shows() {
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            for at in [0, 15, 16, 65_535, 65_536, 70_000] {
                let mut grad = vec![1.0f32; 70_001];
                grad[at] = bad;
                assert!(!global_norm(&[Some(&grad)], 1.0).is_finite());
            }
        }
        // Finite as given, infinite as the update would see it.
        assert!(!global_norm(&[Some(&[1e38])], 1e-5).is_finite());
    }

    #[test]
    fn every_instruction_set_adds_in_the_order_stated() {
        let wide: Vec<f32> = (0..NORM_BLOCK).map(|i| (i as f32 * 0.37).sin() * 1e3).collect();
        let narrow: Vec<u16> = wide.iter().map(|g| bf16::round(*g)).collect();
        let unscale = unscale(3.0);
        let stated = |value: &dyn Fn(usize) -> f32, n: usize| {
            let mut lanes = vec![0.0; LANES];
            for i in 0..n {
                lanes[i % LANES] += f64::from(value(i) * unscale).powi(2);
            }
            while lanes.len() > 1 {
                let right = lanes.split_off(lanes.len() / 2);
                lanes = lanes.iter().zip(right).map(|(left, right)| left + right).collect();
            }
            lanes[0]
        };
        for n in [0, 1, 15, 1024, 1025, 40_000, NORM_BLOCK] {
            for set in InstructionSet::ALL {
                let of = |block| set.run(Squares { block, unscale });
                assert_eq!(of(Gradient::F32(&wide[..n])), stated(&|i| wide[i], n), "{set:?} {n}");
                let widened = |i| bf16::widen(narrow[i]);
                assert_eq!(of(Gradient::Bf16(&narrow[..n])), stated(&widened, n), "{set:?} {n}");
            }
        }
    }

    #[test]
    fn clipping_follows_pytorch() {
        assert_eq!(clip_coefficient(2.0, Some(1.0)), 1.0 / (2.0 + 1e-6));
        assert_eq!(clip_coefficient(0.5, Some(1.0)), 1.0);
        assert_eq!(clip_coefficient(0.0, Some(1.0)), 1.0);
        assert_eq!(clip_coefficient(9.0, None), 1.0);
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert!(check_max_norm(Some(bad)).is_err());
        }
    }
}
