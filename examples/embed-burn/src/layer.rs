//! A burn module and its optimizer, for a layer of the runtime.

use burn::optim::{GradientsAccumulator, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use lazy_runtime::{Autograd, Context, LayerError};

use crate::model::{Block, ROWS, WIDTH};

/// A block with its optimizer, and its gradients of the step under way.
pub(crate) struct Trained {
    pub(crate) block: Block,
    pub(crate) optimizer: ModuleOptimizer,
    pub(crate) gradients: GradientsAccumulator<Block>,
}

fn tensor(values: &[f32]) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values.to_vec(), [ROWS, WIDTH]), &Device::default().autodiff())
}

impl Autograd for Trained {
    type Graph = (Tensor<2>, Tensor<2>);

    fn forward(&mut self, _: &Context<'_>, x: &[f32]) -> Result<(Vec<f32>, Self::Graph), LayerError> {
        let x = tensor(x).require_grad();
        let y = self.block.forward(x.clone());
        Ok((y.to_data().try_to_vec()?, (x, y)))
    }

    fn backward(&mut self, _: &Context<'_>, (x, y): Self::Graph, dy: &[f32]) -> Result<Vec<f32>, LayerError> {
        // The gradient of sum(y * dy) is what dy stands for.
        let mut gradients = (y * tensor(dy)).sum().backward();
        let dx = x.grad_remove(&mut gradients).ok_or("the input got no gradient")?;
        let gradients = GradientsParams::from_grads(gradients, &self.block);
        self.gradients.accumulate(&self.block, gradients);
        Ok(dx.into_data().try_into_vec()?)
    }
}

impl Trained {
    /// What the hook does once the gradients are final.
    pub(crate) fn update(&mut self) -> Result<(), LayerError> {
        self.block = self.optimizer.step(3e-3, self.block.clone(), self.gradients.grads());
        Ok(())
    }
}
