//! The global gradient norm, independent of threads, buckets and chunks.

use rayon::prelude::*;

use crate::OptimError;
use crate::adam::{GradSlice, unscale};
use crate::bf16;
use crate::moments::pieces;
use crate::simd::{Compiled, InstructionSet};

/// Elements under one partial sum, counted from the start of each parameter. Part of what makes the norm
/// reproducible: shards cut at multiples of it give the same sums.
const NORM_BLOCK: usize = 65_536;

/// Accumulators of a partial sum: element `i` of a block goes to number `i % LANES`. Fixed, and few enough to stay in a
/// core's first cache, so that every instruction set and the GPU (`adam.cu`, four to a thread) add in the same order.
const LANES: usize = 1024;

/// Euclidean norm of all gradients after unscaling: float64 sums of squares over blocks of 65,536 elements of each
/// parameter, added in parameter order.
pub(crate) fn global_norm(grads: &[Option<&[f32]>], scale: f64) -> f64 {
    let blocks: Vec<GradSlice<'_>> =
        grads.iter().flatten().flat_map(|grad| blocks(GradSlice::F32(grad))).collect();
    let sums: Vec<f64> = blocks.par_iter().map(|block| sum_of_squares(*block, unscale(scale))).collect();
    sums.iter().fold(0.0, |total, sum| total + sum).sqrt()
}

/// The blocks of one parameter's gradient.
pub(crate) fn blocks(grad: GradSlice<'_>) -> impl Iterator<Item = GradSlice<'_>> {
    pieces(0..grad.len(), NORM_BLOCK).map(move |range| grad.slice(range))
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
pub(crate) fn sum_of_squares(block: GradSlice<'_>, unscale: f32) -> f64 {
    InstructionSet::best().run(Squares { block, unscale })
}

struct Squares<'a> {
    block: GradSlice<'a>,
    unscale: f32,
}

impl Compiled for Squares<'_> {
    type Output = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let mut lanes = [0.0; LANES];
        match self.block {
            GradSlice::F32(block) => add_squares(&mut lanes, block, self.unscale, |g| g),
            GradSlice::Bf16(block) => add_squares(&mut lanes, block, self.unscale, bf16::widen),
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
                assert_eq!(of(GradSlice::F32(&wide[..n])), stated(&|i| wide[i], n), "{set:?} {n}");
                let widened = |i| bf16::widen(narrow[i]);
                assert_eq!(of(GradSlice::Bf16(&narrow[..n])), stated(&widened, n), "{set:?} {n}");
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
