//! `y = x W^T`, with both gradients in the layouts they are wanted in.
//!
//! candle's own `matmul` gives the gradient of `W^T`, which then has to be transposed and copied.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};

use super::gemm::{Matrix, Store, Threads, product};
use super::ops::{rows_of, slice, stored, tensor, with_slice};

/// `x` is `[.., inputs]`, the weight `[outputs, inputs]`, the result `[.., outputs]`.
pub(crate) struct Linear;

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        w: &CpuStorage,
        w_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (outputs, inputs) = w_layout.shape().dims2()?;
        let (rows, width) = rows_of(x_layout.shape())?;
        if width != inputs {
            bail!("a linear map of {inputs} inputs got {width}");
        }
        let x = Matrix::new(slice(x, x_layout)?, rows, inputs);
        let w = Matrix::new(slice(w, w_layout)?, outputs, inputs);
        let mut y = vec![0.0; rows * outputs];
        product(&mut y, outputs, Store::Set, 1.0, x, w.transposed(), Threads::All);
        let mut shape = x_layout.dims().to_vec();
        shape.pop();
        shape.push(outputs);
        stored(y, shape)
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        _: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (outputs, inputs) = w.dims2()?;
        let (rows, _) = rows_of(x.shape())?;
        let (mut dx, mut dw) = (vec![0.0; rows * inputs], vec![0.0; outputs * inputs]);
        with_slice(dy, |dy| {
            let dy = Matrix::new(dy, rows, outputs);
            with_slice(w, |w| {
                let w = Matrix::new(w, outputs, inputs);
                product(&mut dx, inputs, Store::Set, 1.0, dy, w, Threads::All);
            })?;
            with_slice(x, |x| {
                let x = Matrix::new(x, rows, inputs);
                product(&mut dw, inputs, Store::Set, 1.0, dy.transposed(), x, Threads::All);
            })
        })??;
        Ok((Some(tensor(dx, x.shape())?), Some(tensor(dw, w.shape())?)))
    }
}
