//! Scalar building blocks of the kernels, written so that the compiler can use vector instructions.

/// Independent sums that a vector register can hold.
const LANES: usize = 8;

/// `e^x` to within two units in the last place, for `x <= 88`; zero below -87.
///
/// `x = n ln 2 + r` with `|r| <= ln(2) / 2`, and a polynomial for `e^r` (the coefficients of the Cephes library's
/// `expf`). Plain arithmetic on purpose: the standard library's `exp` is a call that prevents vectorisation.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// Adding and taking away 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    /// The high part of ln 2 has few enough bits that its product with `n` is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.0, 88.0);
    let n = (clamped * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = (clamped - n * LN_2_HIGH) - n * LN_2_LOW;
    let mut p = 1.987_569_1e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5e-1] {
        p = p * r + coefficient;
    }
    let p = p * (r * r) + (r + 1.0);
    // 2^n, made from its exponent bits.
    let power = f32::from_bits(((n as i32 + 127) << 23) as u32);
    if x < -87.0 { 0.0 } else { p * power }
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp((-x).min(88.0)))
}

/// The sum of `f(a_i, b_i)`, in an order that depends on the length alone.
#[inline(always)]
pub(crate) fn sum_of(a: &[f32], b: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut sums = [0.0; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = a_chunks.remainder().iter().zip(b_chunks.remainder()).map(|(&a, &b)| f(a, b)).sum();
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            sums[lane] += f(a[lane], b[lane]);
        }
    }
    sums.iter().sum::<f32>() + tail
}

/// The scalar product of two slices of one length.
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    sum_of(a, b, |a, b| a * b)
}

fn largest(row: &[f32]) -> f32 {
    // A comparison is one vector instruction, `f32::max` is several.
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let chunks = row.chunks_exact(LANES);
    let tail = chunks.remainder().iter().copied().fold(f32::NEG_INFINITY, larger);
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(chunk[lane], lanes[lane]);
        }
    }
    lanes.into_iter().fold(tail, larger)
}

/// Replaces `row` by its softmax and returns the logarithm of the sum of exponentials of what it was.
#[inline]
pub(crate) fn softmax(row: &mut [f32]) -> f32 {
    let max = largest(row);
    row.iter_mut().for_each(|x| *x = exp(*x - max));
    let sum = sum_of(row, row, |x, _| x);
    let inverse = 1.0 / sum;
    row.iter_mut().for_each(|x| *x *= inverse);
    max + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        for i in -870_000..=880_000 {
            let x = i as f32 * 1e-4;
            let exact = f64::from(x).exp();
            let error = (f64::from(exp(x)) - exact).abs();
            assert!(error <= 2.0 * exact * f64::from(f32::EPSILON), "exp({x}) is {} not {exact}", exp(x));
        }
        assert_eq!([exp(0.0), exp(-88.0), exp(f32::NEG_INFINITY)], [1.0, 0.0, 0.0]);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn sigmoid_has_its_limits() {
        assert_eq!([sigmoid(0.0), sigmoid(200.0)], [0.5, 1.0]);
        assert!(sigmoid(-200.0) >= 0.0 && sigmoid(-200.0) < 1e-38);
    }

    #[test]
    fn softmax_of_large_values_is_finite() {
        let mut row = [1000.0, 1000.0, -1000.0];
        let log_sum = softmax(&mut row);
        assert_eq!(row, [0.5, 0.5, 0.0]);
        assert!((log_sum - 1_000.693_1).abs() < 1e-3);
        // The largest is found wherever it stands.
        for at in 0..21 {
            let mut row = [-500.0; 21];
            row[at] = 0.0;
            softmax(&mut row);
            assert_eq!((row[at], row.iter().sum::<f32>()), (1.0, 1.0));
        }
    }

    #[test]
    fn dot_counts_the_tail() {
        let values: Vec<f32> = (1..=19).map(|i| i as f32).collect();
        assert_eq!(dot(&values, &values), 2470.0);
    }
}
