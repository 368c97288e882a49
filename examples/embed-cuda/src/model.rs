//! Layers y = w-weighted squares: as kernels on a GPU, and as loops on the host device, which give the same bits.

use std::sync::Arc;

use lazy_model::Bytes;
use lazy_runtime::*;
use lazy_store::cuda::Gpu;
use lazy_store::cuda::kernels::{Arg, Grid, Kernel, Module};
use lazy_store::{BoxError, Stream};

pub(crate) const WIDTH: usize = 1 << 16;
pub(crate) const LAYERS: usize = 6;
const BYTES: Bytes = Bytes(4 * WIDTH as u64);

/// The kernels, compiled for a GPU.
pub(crate) struct Kernels {
    input: Kernel,
    forward: Kernel,
    backward: Kernel,
    loss: Kernel,
    descend: Kernel,
}

impl Kernels {
    pub(crate) fn compile(gpu: &Gpu) -> Result<Kernels, BoxError> {
        // Without fused products, so that a GPU rounds as the loops below do.
        let module = Module::compile(gpu, "squares", include_str!("kernels.cu"), &["--fmad=false"])?;
        Ok(Kernels {
            input: module.kernel("input")?,
            forward: module.kernel("forward")?,
            backward: module.kernel("backward")?,
            loss: module.kernel("loss")?,
            descend: module.kernel("descend")?,
        })
    }

    pub(crate) fn descend(
        &self,
        stream: Stream,
        weights: &Output<'_>,
        g: &Input<'_>,
        rate: f32,
    ) -> Result<(), LayerError> {
        let args = [out(weights)?, at(g)?, Arg::F32(rate), Arg::U32(WIDTH as u32)];
        launch(&self.descend, stream, &args)
    }
}

fn at(input: &Input<'_>) -> Result<Arg, LayerError> {
    Ok(Arg::Address(input.range()?.address))
}

fn out(output: &Output<'_>) -> Result<Arg, LayerError> {
    Ok(Arg::Address(output.range()?.address))
}

fn launch(kernel: &Kernel, stream: Stream, args: &[Arg]) -> Result<(), LayerError> {
    // SAFETY: each caller gives a kernel its own parameters: addresses of `WIDTH` floats that the call holds, and that number.
    Ok(unsafe { kernel.launch(stream, Grid::linear(64, 256), args) }?)
}

/// One layer; on the host device without kernels.
pub(crate) struct Square(pub(crate) usize, pub(crate) Option<Arc<Kernels>>);

const N: Arg = Arg::U32(WIDTH as u32);

impl Layer for Square {
    fn sizes(&self) -> LayerSizes {
        LayerSizes { output: BYTES, ..LayerSizes::default() }
    }
    fn parameters(&self) -> Vec<Parameter> {
        vec![Parameter::f32(self.0, format!("w{}", self.0), WIDTH)]
    }
    fn forward(&self, cx: &Context<'_>, call: Forward<'_>) -> Result<Saved, LayerError> {
        let (w, x, Some(y)) = (call.weights.get(0), call.x, call.out) else { return Ok(Saved::none()) };
        if let Some(kernels) = &self.1 {
            launch(&kernels.forward, cx.stream()?, &[at(&w)?, at(&x)?, out(&y)?, N])?;
            return Ok(Saved::none());
        }
        let (w, x) = (w.f32()?, x.f32()?);
        y.f32()?.iter_mut().zip(w.iter().zip(x)).for_each(|(y, (w, x))| *y = x + w * x * x);
        Ok(Saved::none())
    }
    fn backward(&self, cx: &Context<'_>, mut call: Backward<'_>) -> Result<(), LayerError> {
        let (w, x, dy, dx, dw) = (call.weights.get(0), call.x, call.dy, call.dx, call.grads.get(0));
        if let Some(kernels) = &self.1 {
            let args = [at(&w)?, at(&x)?, at(&dy)?, out(&dx)?, out(&dw)?, N];
            return launch(&kernels.backward, cx.stream()?, &args);
        }
        let (w, x, dy, dx, dw) = (w.f32()?, x.f32()?, dy.f32()?, dx.f32()?, dw.f32()?);
        for i in 0..WIDTH {
            dw[i] += dy[i] * x[i] * x[i];
            dx[i] = dy[i] * (1.0 + 2.0 * w[i] * x[i]);
        }
        Ok(())
    }
}

/// Where data come in and where the loss is made.
pub(crate) struct Ends(pub(crate) Option<Arc<Kernels>>);

impl Prologue for Ends {
    fn output_bytes(&self) -> Bytes {
        BYTES
    }
    fn forward(&self, cx: &Context<'_>, _: Weights<'_>, x: Output<'_>) -> Result<(), LayerError> {
        if let Some(kernels) = &self.0 {
            return launch(&kernels.input, cx.stream()?, &[out(&x)?, N, Arg::U32(cx.step as u32)]);
        }
        let value = |i: usize| ((i * 37 + cx.step as usize * 13) % 97) as f32 / 97.0 - 0.4;
        x.f32()?.iter_mut().enumerate().for_each(|(i, x)| *x = value(i));
        Ok(())
    }
}

impl Epilogue for Ends {
    fn run(&self, cx: &Context<'_>, call: Loss<'_>) -> Result<(), LayerError> {
        let Some(dx) = call.dx else { return Err("this trainer does not evaluate".into()) };
        if let Some(kernels) = &self.0 {
            let args = [at(&call.x)?, out(&dx)?, out(&call.loss)?, N];
            // SAFETY: the kernel's parameters: `WIDTH` floats read and written, and the loss.
            return Ok(unsafe { kernels.loss.launch(cx.stream()?, Grid::linear(1, 1), &args) }?);
        }
        let x = call.x.f32()?;
        dx.f32()?.copy_from_slice(x);
        call.loss.f32()?[0] = x.iter().fold(0.0, |sum, x| sum + 0.5 * x * x);
        Ok(())
    }
}
