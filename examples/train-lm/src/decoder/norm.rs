//! Root-mean-square normalisation, alone and followed by the rotary position embedding (as on queries and keys).

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::math::dot;
use super::ops::{ROWS, rows_of, slice, stored, tensor, with_slice};

/// `y = w * x / sqrt(mean(x^2) + eps)` over rows as wide as the weight, then the rotation if there is one.
///
/// The last dimension of `x` may hold several such rows (the heads of a projection).
pub(crate) struct RmsNorm {
    pub(crate) eps: f32,
    pub(crate) rotation: Option<Rotation>,
}

/// Which row is at which position: row `i` belongs to token `i / heads`, whose position is `i / heads % seq`.
pub(crate) struct Rotation {
    pub(crate) table: Arc<RotaryTable>,
    pub(crate) heads: usize,
    pub(crate) seq: usize,
}

/// Cosines and sines of the rotary embedding's angles, `position * theta^(-2 i / head_dim)` for `i` below half the
/// head (Su et al., "RoFormer", 2021), computed in single precision as transformers does.
pub(crate) struct RotaryTable {
    half: usize,
    positions: usize,
    cos_sin: Vec<(f32, f32)>,
}

impl RotaryTable {
    pub(crate) fn new(theta: f64, head_dim: usize, positions: usize) -> Self {
        let half = head_dim / 2;
        let frequency = |i: usize| theta.powf(-2.0 * i as f64 / head_dim as f64) as f32;
        let angle = |position: usize, i| f64::from(position as f32 * frequency(i));
        let at = |(p, i)| (angle(p, i).cos() as f32, angle(p, i).sin() as f32);
        let cos_sin = (0..positions).flat_map(|p| (0..half).map(move |i| (p, i))).map(at).collect();
        RotaryTable { half, positions, cos_sin }
    }

    pub(crate) fn positions(&self) -> usize {
        self.positions
    }

    /// Rotates `row` to `position`, or back where `sign` is -1.
    fn rotate(&self, position: usize, sign: f32, row: &mut [f32]) {
        let (low, high) = row.split_at_mut(self.half);
        let angles = &self.cos_sin[position * self.half..][..self.half];
        for ((low, high), (cos, sin)) in low.iter_mut().zip(high).zip(angles) {
            let sin = sin * sign;
            (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
        }
    }
}

impl Rotation {
    fn apply(&self, row_index: usize, sign: f32, row: &mut [f32]) {
        self.table.rotate(row_index / self.heads % self.seq, sign, row);
    }
}

/// `1 / sqrt(mean(x^2) + eps)`.
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}

impl RmsNorm {
    /// The forward over slices; the rows are as wide as `w`.
    pub(crate) fn forward(&self, x: &[f32], w: &[f32]) -> Vec<f32> {
        let width = w.len();
        let mut y = vec![0.0; x.len()];
        y.par_chunks_mut(ROWS * width).zip(x.par_chunks(ROWS * width)).enumerate().for_each(
            |(task, (y, x))| {
                for (row, (y, x)) in y.chunks_exact_mut(width).zip(x.chunks_exact(width)).enumerate() {
                    let r = inverse_rms(x, self.eps);
                    for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
                        *y = w * (x * r);
                    }
                    if let Some(rotation) = &self.rotation {
                        rotation.apply(task * ROWS + row, 1.0, y);
                    }
                }
            },
        );
        y
    }

    /// The gradients of `x` and `w` for the gradient `dy` of the result.
    pub(crate) fn backward(&self, x: &[f32], w: &[f32], dy: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let width = w.len();
        let mut dx = vec![0.0; x.len()];
        let tasks = dx.par_chunks_mut(ROWS * width).zip(x.par_chunks(ROWS * width));
        let parts: Vec<Vec<f32>> = tasks
            .zip(dy.par_chunks(ROWS * width))
            .enumerate()
            .map(|(task, ((dx, x), dy))| {
                let (mut dw, mut g) = (vec![0.0; width], vec![0.0; width]);
                let rows = x.chunks_exact(width).zip(dy.chunks_exact(width));
                for (row, (dx, (x, dy))) in dx.chunks_exact_mut(width).zip(rows).enumerate() {
                    g.copy_from_slice(dy);
                    if let Some(rotation) = &self.rotation {
                        rotation.apply(task * ROWS + row, -1.0, &mut g);
                    }
                    backward_row(x, w, &mut g, inverse_rms(x, self.eps), dx, &mut dw);
                }
                dw
            })
            .collect();
        let mut dw = vec![0.0; width];
        for part in parts {
            dw.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
        }
        (dx, dw)
    }
}

/// With `n = x r` and `g = w dy`: `dw += dy n`, `dx = r (g - n mean(g n))`. `g` enters as `dy`.
fn backward_row(x: &[f32], w: &[f32], g: &mut [f32], r: f32, dx: &mut [f32], dw: &mut [f32]) {
    for (((dw, g), x), w) in dw.iter_mut().zip(&mut *g).zip(x).zip(w) {
        *dw += *g * (x * r);
        *g *= w;
    }
    let mean = dot(g, x) * r / x.len() as f32;
    for ((dx, g), x) in dx.iter_mut().zip(&*g).zip(x) {
        *dx = r * (g - x * r * mean);
    }
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        w: &CpuStorage,
        w_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, w) = (slice(x, x_layout)?, slice(w, w_layout)?);
        let (_, width) = rows_of(x_layout.shape())?;
        if w.is_empty() || !width.is_multiple_of(w.len()) {
            bail!("a norm over {} elements got rows of {width}", w.len());
        }
        stored(self.forward(x, w), x_layout.shape())
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let backward = |x: &[f32]| with_slice(w, |w| with_slice(dy, |dy| self.backward(x, w, dy)));
        let (dx, dw) = with_slice(x, backward)???;
        Ok((Some(tensor(dx, x.shape())?), Some(tensor(dw, w.shape())?)))
    }
}
