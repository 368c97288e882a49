//! A model in burn, and the data it is trained on.

use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::activation::gelu;
use lazy_model::Bytes;
use lazy_runtime::{Context, LayerError, Loss, Output};

pub(crate) const ROWS: usize = 64;
pub(crate) const WIDTH: usize = 32;
const BLOCKS: usize = 6;

pub(crate) const BOUNDARY: Bytes = Bytes((4 * ROWS * WIDTH) as u64);
/// What a block's graph keeps: its input and output, and about five tensors of twice their width.
pub(crate) const GRAPH: Bytes = Bytes(12 * BOUNDARY.get());

/// y = x + W2 gelu(W1 x).
#[derive(Module, Debug)]
pub(crate) struct Block {
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(device: &Device) -> Block {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Block { up: linear(WIDTH, 2 * WIDTH), down: linear(2 * WIDTH, WIDTH) }
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.down.forward(gelu(self.up.forward(x)))
    }
}

/// The model's blocks, with their first weights.
pub(crate) fn blocks() -> Vec<Block> {
    let device = Device::default().autodiff();
    device.seed(7);
    (0..BLOCKS).map(|_| Block::new(&device)).collect()
}

/// What goes in and what shall come out: every row sorted.
pub(crate) fn batch(step: u64) -> (Vec<f32>, Vec<f32>) {
    let value = |i: usize| ((i * i) as f32 * 0.013 + (step % 4) as f32).sin();
    let x: Vec<f32> = (0..ROWS * WIDTH).map(value).collect();
    let mut y = x.clone();
    y.chunks_mut(WIDTH).for_each(|row| row.sort_by(f32::total_cmp));
    (x, y)
}

/// Where rows come in.
pub(crate) fn rows(cx: &Context<'_>, out: Output<'_>) -> Result<(), LayerError> {
    out.f32()?.copy_from_slice(&cx.inputs::<(Vec<f32>, Vec<f32>)>()?.0);
    Ok(())
}

/// The mean square of what is off at the end.
pub(crate) fn loss(cx: &Context<'_>, call: Loss<'_>) -> Result<(), LayerError> {
    let (x, wanted) = (call.x.f32()?, &cx.inputs::<(Vec<f32>, Vec<f32>)>()?.1);
    let count = x.len() as f32;
    call.loss.f32()?[0] = x.iter().zip(wanted).map(|(x, y)| (x - y) * (x - y) / count).sum();
    let Some(dx) = call.dx else { return Ok(()) };
    dx.f32()?.iter_mut().zip(x.iter().zip(wanted)).for_each(|(dx, (x, y))| *dx = 2.0 * (x - y) / count);
    Ok(())
}
