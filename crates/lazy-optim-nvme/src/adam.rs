//! The update itself, element by element.
//!
//! The order of operations and the rounding of constants are those of PyTorch's Adam: bias corrections and step size in
//! float64, everything that meets an element rounded to float32 first. Two divisions by a constant of the step are
//! multiplications by its reciprocal, as in PyTorch's loss scaler. Nothing is contracted into fused multiply-adds, so
//! every instruction set, the GPU (`adam.cu`) and every cut of the data give the same bits.

use std::ops::Range;

use crate::GroupOptions;
use crate::bf16;
use crate::device::DeviceSlice;
use crate::moments::{Moment, Moments, pieces};
use crate::quant::QUANT_BLOCK;
use crate::simd::{Compiled, InstructionSet, prefetch};

/// The constants of one parameter in one step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rule {
    /// Gradients are multiplied by this (see [`unscale`]), then by the next.
    unscale: f32,
    /// The clip coefficient, negative to ascend.
    clip: f32,
    /// The weight is multiplied by this: `1 - lr * weight_decay`, or 1.
    shrink: f32,
    /// This times the weight is added to the gradient: `weight_decay`, or 0.
    l2: f32,
    /// A linear interpolation is anchored at its nearer end, as PyTorch's lerp is: `1 - beta1` from the old moment, or
    /// `-beta1` from the gradient.
    slope: f32,
    beta2: f32,
    /// `1 - beta2`.
    mix2: f32,
    /// `-lr / (1 - beta1^t)`.
    step: f32,
    /// `1 / sqrt(1 - beta2^t)`.
    correction: f32,
    eps: f32,
}

/// Elements of a cache line.
const LINE: usize = 16;
/// How far ahead memory is asked for, in elements: hardware looks no further than the end of a page.
const AHEAD: usize = 512;

/// What gradients are multiplied by instead of divided by `scale`.
pub(crate) fn unscale(scale: f64) -> f32 {
    (1.0 / f64::from(scale as f32)) as f32
}

impl Rule {
    /// The constants of step number `count` (from 1) of a parameter.
    pub(crate) fn new(options: &GroupOptions, count: u64, scale: f64, clip: f64) -> Rule {
        let GroupOptions { lr, betas: (beta1, beta2), eps, weight_decay, decoupled, maximize } = *options;
        let t = count as f64;
        let mix = (1.0 - beta1) as f32;
        Rule {
            unscale: unscale(scale),
            clip: if maximize { -(clip as f32) } else { clip as f32 },
            shrink: if decoupled { (1.0 - lr * weight_decay) as f32 } else { 1.0 },
            l2: if decoupled { 0.0 } else { weight_decay as f32 },
            slope: if mix < 0.5 { mix } else { -(1.0 - mix) },
            beta2: beta2 as f32,
            mix2: (1.0 - beta2) as f32,
            step: (-lr / (1.0 - beta1.powf(t))) as f32,
            correction: (1.0 / (1.0 - beta2.powf(t)).sqrt()) as f32,
            eps: eps as f32,
        }
    }

    /// The constants, in the order in which the kernels take them.
    pub(crate) fn constants(&self) -> [f32; 10] {
        let Rule { unscale, clip, shrink, l2, slope, beta2, mix2, step, correction, eps } = *self;
        [unscale, clip, shrink, l2, slope, beta2, mix2, step, correction, eps]
    }
    #[inline(always)]
    fn advance(&self, grad: &[f32], main: &mut [f32], avg: &mut [f32], sq: &mut [f32]) {
        let n = grad.len();
        let (main, avg, sq) = (&mut main[..n], &mut avg[..n], &mut sq[..n]);
        let (grads, grad) = grad.as_chunks::<LINE>();
        let (mains, main) = main.as_chunks_mut::<LINE>();
        let (avgs, avg) = avg.as_chunks_mut::<LINE>();
        let (sqs, sq) = sq.as_chunks_mut::<LINE>();
        for (((grad, main), avg), sq) in grads.iter().zip(mains).zip(avgs).zip(sqs) {
            for array in [grad, &*main, &*avg, &*sq] {
                prefetch(array, AHEAD);
            }
            self.advance_each(grad, main, avg, sq);
        }
        self.advance_each(grad, main, avg, sq);
    }

    #[inline(always)]
    fn advance_each(&self, grad: &[f32], main: &mut [f32], avg: &mut [f32], sq: &mut [f32]) {
        let Rule { unscale, clip, shrink, l2, slope, beta2, mix2, step, correction, eps } = *self;
        for (((grad, main), avg), sq) in grad.iter().zip(main).zip(avg).zip(sq) {
            let w = *main * shrink;
            let g = *grad * unscale * clip + l2 * *main;
            let m = (if slope > 0.0 { *avg } else { g }) + slope * (g - *avg);
            let v = *sq * beta2 + mix2 * g * g;
            let denominator = v.sqrt() * correction + eps;
            *main = w + step * m / denominator;
            *avg = m;
            *sq = v;
        }
    }
}

/// A parameter's gradient.
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    /// Float32, in RAM.
    F32(&'a [f32]),
    /// Bits of bfloat16, in RAM.
    Bf16(&'a [u16]),
    /// In the memory of the store's GPU.
    Device(DeviceSlice),
}

impl<'a> Gradient<'a> {
    /// Elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            Gradient::F32(grad) => grad.len(),
            Gradient::Bf16(grad) => grad.len(),
            Gradient::Device(grad) => grad.len(),
        }
    }

    /// A part of them.
    #[inline(always)]
    pub(crate) fn slice(self, range: Range<usize>) -> Gradient<'a> {
        match self {
            Gradient::F32(grad) => Gradient::F32(&grad[range]),
            Gradient::Bf16(grad) => Gradient::Bf16(&grad[range]),
            Gradient::Device(grad) => Gradient::Device(grad.slice(range)),
        }
    }

    /// Where it is in the memory of a GPU, if it is.
    pub(crate) fn on_device(self) -> Option<DeviceSlice> {
        if let Gradient::Device(slice) = self { Some(slice) } else { None }
    }
}

/// Where a parameter's updated weights go.
#[derive(Debug)]
pub enum WeightsOut<'a> {
    /// Float32, in RAM.
    F32(&'a mut [f32]),
    /// Bits of bfloat16, rounded to the nearest, in RAM.
    Bf16(&'a mut [u16]),
    /// In the memory of the store's GPU.
    Device(DeviceSlice),
}

impl<'a> WeightsOut<'a> {
    /// Elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            WeightsOut::F32(weights) => weights.len(),
            WeightsOut::Bf16(weights) => weights.len(),
            WeightsOut::Device(weights) => weights.len(),
        }
    }

    /// A part of it.
    pub(crate) fn part(&mut self, range: Range<usize>) -> WeightsOut<'_> {
        match self {
            WeightsOut::F32(weights) => WeightsOut::F32(&mut weights[range]),
            WeightsOut::Bf16(weights) => WeightsOut::Bf16(&mut weights[range]),
            WeightsOut::Device(weights) => WeightsOut::Device(weights.slice(range)),
        }
    }

    /// Takes the first `n` elements away; gives them.
    pub(crate) fn split_off(&mut self, n: usize) -> WeightsOut<'a> {
        match self {
            WeightsOut::F32(weights) => WeightsOut::F32(front(weights, n)),
            WeightsOut::Bf16(weights) => WeightsOut::Bf16(front(weights, n)),
            WeightsOut::Device(weights) => WeightsOut::Device(weights.split_off(n)),
        }
    }

    /// Puts weights into a part of the room, where that is in RAM.
    #[inline(always)]
    pub(crate) fn write(&mut self, range: Range<usize>, main: &[f32]) {
        match self {
            WeightsOut::F32(weights) => weights[range].copy_from_slice(main),
            WeightsOut::Bf16(weights) => bf16::round_all(main, &mut weights[range]),
            WeightsOut::Device(_) => debug_assert!(false, "room in a GPU's memory is written by way of RAM"),
        }
    }
}

fn front<'a, T>(rest: &mut &'a mut [T], n: usize) -> &'a mut [T] {
    let (front, back) = std::mem::take(rest).split_at_mut(n);
    *rest = back;
    front
}

/// One block of the state: at most [`BLOCK`](crate::slot::BLOCK) elements of main weights, and the sections' bytes of
/// their moments, [`Moments::block_bytes`] long or, in the float formats, as long as the weights need.
#[derive(Debug)]
pub(crate) struct BlockMut<'a> {
    pub(crate) moments: Moments,
    pub(crate) main: &'a mut [f32],
    pub(crate) avg: &'a mut [u8],
    pub(crate) sq: &'a mut [u8],
}

/// Updates elements `range` of a block, all of one parameter, and hands out their new weights while they are in the cache.
/// `grad` and `weights` are in RAM and have as many elements. Neither the range nor the block changes a result, with one condition: in the
/// 8-bit format a range has all elements of the parameter that share a scale.
pub(crate) fn update_block(
    rule: &Rule,
    block: BlockMut<'_>,
    range: Range<usize>,
    grad: Gradient<'_>,
    weights: Option<WeightsOut<'_>>,
) {
    InstructionSet::best().run(Update { rule, block, range, grad, weights });
}

/// Elements worked on at a time where a format is not float32: what is unpacked of them stays in the first cache.
const TILE: usize = 4 * QUANT_BLOCK;

/// An update of a part of a block.
struct Update<'a> {
    rule: &'a Rule,
    block: BlockMut<'a>,
    range: Range<usize>,
    grad: Gradient<'a>,
    weights: Option<WeightsOut<'a>>,
}

impl Compiled for Update<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Update { rule, block: BlockMut { moments, main, avg, sq }, range, grad, mut weights } = self;
        let (mut wide, mut first, mut second) = ([0.0; TILE], [0.0; TILE], [0.0; TILE]);
        for tile in pieces(range.clone(), TILE) {
            let given = tile.start - range.start..tile.end - range.start;
            let n = tile.len();
            let grad = match grad.slice(given.clone()) {
                Gradient::F32(grad) => grad,
                Gradient::Bf16(grad) => {
                    bf16::widen_all(grad, &mut wide[..n]);
                    &wide[..n]
                }
                Gradient::Device(_) => {
                    debug_assert!(false, "a gradient in a GPU's memory is brought to RAM first");
                    return;
                }
            };
            let main = &mut main[tile.clone()];
            if moments == Moments::F32 {
                let avg = &mut bytemuck::cast_slice_mut(avg)[tile.clone()];
                let sq = &mut bytemuck::cast_slice_mut(sq)[tile];
                rule.advance(grad, main, avg, sq);
            } else {
                let (first, second) = (&mut first[..n], &mut second[..n]);
                moments.decode(Moment::First, avg, tile.clone(), first);
                moments.decode(Moment::Second, sq, tile.clone(), second);
                rule.advance(grad, main, first, second);
                moments.encode(Moment::First, first, avg, tile.clone());
                moments.encode(Moment::Second, second, sq, tile);
            }
            if let Some(weights) = &mut weights {
                weights.write(given, main);
            }
        }
    }
}

#[cfg(test)]
mod tests;
