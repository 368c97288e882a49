//! The global gradient norm, independent of threads, buckets and chunks.

use rayon::prelude::*;

use crate::OptimError;

/// Elements under one partial sum, counted from the start of each parameter. Part of what makes the norm
/// reproducible: shards cut at multiples of it give the same sums.
const NORM_BLOCK: usize = 65_536;

/// Accumulators of a partial sum, fixed so that every instruction set adds in the same order.
const ACCUMULATORS: usize = 16;

/// Euclidean norm of all gradients after division by `scale`: float64 sums of squares over blocks of 65,536
/// elements of each parameter, added in parameter order.
pub(crate) fn global_norm(grads: &[Option<&[f32]>], scale: f64) -> f64 {
    let blocks: Vec<&[f32]> = grads.iter().flatten().flat_map(|grad| grad.chunks(NORM_BLOCK)).collect();
    let sums: Vec<f64> = blocks.par_iter().map(|block| sum_of_squares(block, scale as f32)).collect();
    sums.iter().fold(0.0, |total, sum| total + sum).sqrt()
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

fn sum_of_squares(block: &[f32], scale: f32) -> f64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2, which is all that the function asks for.
        return unsafe { sum_of_squares_avx2(block, scale) };
    }
    sum_of_squares_any(block, scale)
}

/// The same code compiled for wider registers.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_of_squares_avx2(block: &[f32], scale: f32) -> f64 {
    sum_of_squares_any(block, scale)
}

#[inline(always)]
fn sum_of_squares_any(block: &[f32], scale: f32) -> f64 {
    let mut sums = [0f64; ACCUMULATORS];
    let (rows, rest) = block.as_chunks::<ACCUMULATORS>();
    for row in rows {
        for (sum, g) in sums.iter_mut().zip(row) {
            // The quotient is rounded to float32 as the update will see it, so an overflow there shows here.
            let g = f64::from(g / scale);
            *sum += g * g;
        }
    }
    for (sum, g) in sums.iter_mut().zip(rest) {
        let g = f64::from(g / scale);
        *sum += g * g;
    }
    sums.iter().sum()
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
    fn paths_add_in_the_same_order() {
        let grad: Vec<f32> = (0..65_537).map(|i| (i as f32 * 0.37).sin() * 1e3).collect();
        assert_eq!(sum_of_squares(&grad, 3.0), sum_of_squares_any(&grad, 3.0));
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
