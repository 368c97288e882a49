//! A model in burn, and the data it is trained on.

use burn::nn::{Linear, LinearConfig};
use burn::prelude::*;
use burn::tensor::activation::gelu;

pub(crate) const ROWS: usize = 64;
pub(crate) const WIDTH: usize = 32;
pub(crate) const BLOCKS: usize = 6;

/// y = x + W2 gelu(W1 x).
#[derive(Module, Debug)]
pub(crate) struct Block {
    up: Linear,
    down: Linear,
}

impl Block {
    pub(crate) fn new(device: &Device) -> Block {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Block { up: linear(WIDTH, 2 * WIDTH), down: linear(2 * WIDTH, WIDTH) }
    }

    pub(crate) fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.down.forward(gelu(self.up.forward(x)))
    }
}

/// What goes in and what shall come out: every row sorted.
pub(crate) fn batch(step: u64) -> (Vec<f32>, Vec<f32>) {
    let value = |i: usize| ((i * i) as f32 * 0.013 + (step % 4) as f32).sin();
    let x: Vec<f32> = (0..ROWS * WIDTH).map(value).collect();
    let mut y = x.clone();
    y.chunks_mut(WIDTH).for_each(|row| row.sort_by(f32::total_cmp));
    (x, y)
}
