//! Trains blocks of candle-transformers with boundaries in HBM, in host RAM, on NVMe and recomputed.

mod model;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use candle_core::Tensor;
use lazy_model::Bytes;
use lazy_runtime::candle::{CandleLayer, Parameter};
use lazy_runtime::*;
use model::{BOUNDARY, Blocks, SHAPE, batch, loss, picture};

/// What a block's graph keeps: about a dozen tensors of a boundary's size, and im2col's nine for each convolution.
const GRAPH: Bytes = Bytes(30 * BOUNDARY.get());
const RATE: f64 = 0.02;

/// A step of gradient descent on every variable.
fn descend(variables: &[Parameter], gradients: &Gradients) -> candle_core::Result<()> {
    for (parameter, gradient) in variables.iter().zip(gradients.read()) {
        let gradient = Tensor::from_slice(&gradient, parameter.variable.dims(), &candle_core::Device::Cpu)?;
        parameter.variable.set(&(parameter.variable.as_tensor() - (gradient * RATE)?)?)?;
    }
    gradients.zero();
    Ok(())
}

/// Trains for some steps under a plan of one letter a boundary: `G` HBM, `C` host, `N` NVMe, `-` recompute. Returns the losses.
fn train(blocks: Blocks, letters: &str, steps: u64) -> Result<Vec<f32>, Box<dyn std::error::Error>> {
    let variables = blocks.variables.concat();
    let elements: Vec<usize> = variables.iter().map(|p| p.variable.elem_count()).collect();
    let gradients = Arc::new(Gradients::new(&elements));
    let sizes = LayerSizes::graph(BOUNDARY, GRAPH);
    let layers = blocks.blocks.into_iter().zip(blocks.variables).map(|(block, own)| {
        let forward = move |_: &Context<'_>, x: &Tensor| Ok(block.forward(x, None)?);
        CandleLayer::new(SHAPE, forward, own, Arc::clone(&gradients), sizes)
    });
    let source = Source::new(BOUNDARY, picture);
    let model = Model::new(source, layers.collect(), loss, ModelOptions::default())?;
    let plan = model.plan(&model.schedule(letters)?)?;
    let options = model.store_options(&plan, std::env::temp_dir());
    let (mut executor, mut program) = Executor::open(model, plan, options)?;
    let mut losses = Vec::new();
    for step in 0..steps {
        losses.extend(executor.run(&mut program, &Step::with_inputs(step, [batch(step)?]))?.losses);
        descend(&variables, &gradients)?;
    }
    Ok(losses)
}

#[expect(clippy::print_stdout, reason = "shows that the loss falls")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let losses = train(Blocks::new()?, "CN-G--G", 30)?;
    println!("loss {:.4} -> {:.4}", losses[0], losses[29]);
    if losses[29] < 0.5 * losses[0] { Ok(()) } else { Err("the loss did not fall by half".into()) }
}
