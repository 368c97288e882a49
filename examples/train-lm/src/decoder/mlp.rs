//! The gated activation of the feed-forward block, and the residual connection with dropout.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::math::sigmoid;
use super::ops::{ELEMENTS, slice, stored, tensor, with_slice};
use crate::dropout::Mask;

/// `silu(gate) * up` (Shazeer, "GLU variants improve transformer", 2020).
pub(crate) struct SwiGlu;

impl CustomOp2 for SwiGlu {
    fn name(&self) -> &'static str {
        "swiglu"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        gate_layout: &Layout,
        up: &CpuStorage,
        up_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        same_shape(self.name(), gate_layout, up_layout)?;
        let (gate, up) = (slice(gate, gate_layout)?, slice(up, up_layout)?);
        let mut y = vec![0.0; gate.len()];
        let inputs = gate.par_chunks(ELEMENTS).zip(up.par_chunks(ELEMENTS));
        y.par_chunks_mut(ELEMENTS).zip(inputs).for_each(|(y, (gate, up))| {
            for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
                *y = gate * sigmoid(*gate) * up;
            }
        });
        stored(y, gate_layout.shape())
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (mut dgate, mut dup) = (vec![0.0; gate.elem_count()], vec![0.0; gate.elem_count()]);
        let mut backward = |gate: &[f32], up: &[f32], dy: &[f32]| {
            let inputs = gate.par_chunks(ELEMENTS).zip(up.par_chunks(ELEMENTS)).zip(dy.par_chunks(ELEMENTS));
            let outputs = dgate.par_chunks_mut(ELEMENTS).zip(dup.par_chunks_mut(ELEMENTS));
            outputs.zip(inputs).for_each(|((dgate, dup), ((gate, up), dy))| {
                let inputs = gate.iter().zip(up).zip(dy);
                for ((dgate, dup), ((gate, up), dy)) in dgate.iter_mut().zip(dup).zip(inputs) {
                    let s = sigmoid(*gate);
                    *dup = dy * gate * s;
                    *dgate = dy * up * s * (1.0 + gate * (1.0 - s));
                }
            });
        };
        with_slice(gate, |gate| with_slice(up, |up| with_slice(dy, |dy| backward(gate, up, dy))))???;
        Ok((Some(tensor(dgate, gate.shape())?), Some(tensor(dup, gate.shape())?)))
    }
}

/// `x + dropout(branch)`. The mask is made again in backward, not kept.
pub(crate) struct Residual {
    pub(crate) mask: Option<Mask>,
}

impl Residual {
    fn drop(&self, task: usize, values: &mut [f32]) {
        if let Some(mask) = &self.mask {
            mask.apply(task * ELEMENTS, values);
        }
    }
}

impl CustomOp2 for Residual {
    fn name(&self) -> &'static str {
        "residual"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        branch: &CpuStorage,
        branch_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        same_shape(self.name(), x_layout, branch_layout)?;
        let mut y = slice(branch, branch_layout)?.to_vec();
        let x = slice(x, x_layout)?;
        y.par_chunks_mut(ELEMENTS).zip(x.par_chunks(ELEMENTS)).enumerate().for_each(|(task, (y, x))| {
            self.drop(task, y);
            y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
        });
        stored(y, x_layout.shape())
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        if self.mask.is_none() {
            return Ok((Some(dy.clone()), Some(dy.clone())));
        }
        let mut dbranch = with_slice(dy, <[f32]>::to_vec)?;
        dbranch.par_chunks_mut(ELEMENTS).enumerate().for_each(|(task, d)| self.drop(task, d));
        Ok((Some(dy.clone()), Some(tensor(dbranch, dy.shape())?)))
    }
}

fn same_shape(name: &str, a: &Layout, b: &Layout) -> Result<()> {
    if a.shape() != b.shape() {
        bail!("{name} wants two tensors of one shape, got {:?} and {:?}", a.shape(), b.shape());
    }
    Ok(())
}
