//! The update itself, element by element.
//!
//! The order of operations and the rounding of constants are those of PyTorch's CPU Adam: bias corrections and step
//! size in float64, everything that meets an element rounded to float32 first. Nothing is contracted into fused
//! multiply-adds, so every instruction set and every cut of the data gives the same bits.

use crate::GroupOptions;

/// The constants of one parameter in one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rule {
    /// Gradients are divided by this, then multiplied by the next two.
    scale: f32,
    clip: f32,
    sign: f32,
    /// The weight is multiplied by this: `1 - lr * weight_decay`, or 1.
    shrink: f32,
    /// This times the weight is added to the gradient: `weight_decay`, or 0.
    l2: f32,
    /// `1 - beta1`.
    mix: f32,
    beta2: f32,
    /// `1 - beta2`.
    mix2: f32,
    /// `-lr / (1 - beta1^t)`.
    step: f32,
    /// `sqrt(1 - beta2^t)`.
    root: f32,
    eps: f32,
}

impl Rule {
    /// The constants of step number `count` (from 1) of a parameter.
    pub(crate) fn new(options: &GroupOptions, count: u64, scale: f64, clip: f64) -> Rule {
        let GroupOptions { lr, betas: (beta1, beta2), eps, weight_decay, decoupled, maximize } = *options;
        let t = count as f64;
        Rule {
            scale: scale as f32,
            clip: clip as f32,
            sign: if maximize { -1.0 } else { 1.0 },
            shrink: if decoupled { (1.0 - lr * weight_decay) as f32 } else { 1.0 },
            l2: if decoupled { 0.0 } else { weight_decay as f32 },
            mix: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            mix2: (1.0 - beta2) as f32,
            step: (-lr / (1.0 - beta1.powf(t))) as f32,
            root: (1.0 - beta2.powf(t)).sqrt() as f32,
            eps: eps as f32,
        }
    }

    /// Updates weights and moments in place. All four slices have one length.
    pub(crate) fn apply(&self, grad: &[f32], main: &mut [f32], avg: &mut [f32], sq: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2, which is all that the function asks for.
            return unsafe { self.apply_avx2(grad, main, avg, sq) };
        }
        self.apply_any(grad, main, avg, sq);
    }

    /// The same code compiled for eight lanes.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn apply_avx2(&self, grad: &[f32], main: &mut [f32], avg: &mut [f32], sq: &mut [f32]) {
        self.apply_any(grad, main, avg, sq);
    }

    #[inline(always)]
    fn apply_any(&self, grad: &[f32], main: &mut [f32], avg: &mut [f32], sq: &mut [f32]) {
        let n = grad.len();
        let (main, avg, sq) = (&mut main[..n], &mut avg[..n], &mut sq[..n]);
        // A linear interpolation is anchored at its nearer end, as PyTorch's lerp is.
        let near = self.mix < 0.5;
        let slope = if near { self.mix } else { -(1.0 - self.mix) };
        for i in 0..n {
            let w = main[i] * self.shrink;
            let g = (grad[i] / self.scale * self.clip) * self.sign + self.l2 * main[i];
            let m = (if near { avg[i] } else { g }) + slope * (g - avg[i]);
            let v = sq[i] * self.beta2 + self.mix2 * g * g;
            let denominator = v.sqrt() / self.root + self.eps;
            main[i] = w + self.step * m / denominator;
            avg[i] = m;
            sq[i] = v;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Awkward values of both signs and many magnitudes.
    fn data(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..n).map(|i| next() * 10f32.powi(i as i32 % 9 - 4)).collect()
    }

    #[test]
    fn every_path_and_every_cut_gives_the_same_bits() {
        let options = GroupOptions { weight_decay: 0.1, decoupled: false, ..GroupOptions::default() };
        let rule = Rule::new(&options, 3, 2.0, 0.7);
        let n = 1003;
        let (grad, main, avg) = (data(n, 1), data(n, 2), data(n, 3));
        let sq: Vec<f32> = data(n, 4).iter().map(|x| x * x).collect();
        let mut whole = (main.clone(), avg.clone(), sq.clone());
        rule.apply_any(&grad, &mut whole.0, &mut whole.1, &mut whole.2);
        for cut in [0, 1, 5, 500, n] {
            let mut parts = (main.clone(), avg.clone(), sq.clone());
            for range in [0..cut, cut..n] {
                let r = || range.clone();
                rule.apply(&grad[r()], &mut parts.0[r()], &mut parts.1[r()], &mut parts.2[r()]);
            }
            assert_eq!(whole, parts, "cut at {cut}");
        }
    }

    #[test]
    fn a_beta_below_one_half_interpolates_from_the_gradient() {
        // beta1 = 0 forgets the past entirely, whatever its size.
        let options = GroupOptions { betas: (0.0, 0.9), ..GroupOptions::default() };
        let (mut main, mut avg, mut sq) = ([1.0], [1e30], [0.0]);
        Rule::new(&options, 1, 1.0, 1.0).apply(&[0.25], &mut main, &mut avg, &mut sq);
        assert_eq!(avg, [0.25]);
    }
}
