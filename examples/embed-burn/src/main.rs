//! Trains a model written in burn with boundaries in HBM, in host RAM, on NVMe and recomputed.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "tests"))]

mod model;

use std::sync::{Arc, Mutex, PoisonError};

use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use lazy_model::{Bytes, Placement, Schedule};
use lazy_runtime::*;
use lazy_store::{NvmeOptions, Store, StoreOptions};
use model::{BLOCKS, BOUNDARY, Block, Ends, ROWS, WIDTH, batch};

/// What a block's graph keeps: its input and output, and about five tensors of twice their width.
const GRAPH: Bytes = Bytes(12 * BOUNDARY.get());

/// A block with its optimizer, and the gradients of the step under way.
struct BurnLayer(usize, Mutex<Trained>);

struct Trained {
    block: Block,
    optimizer: ModuleOptimizer,
    gradients: Option<GradientsParams>,
}

impl BurnLayer {
    fn lock(&self) -> std::sync::MutexGuard<'_, Trained> {
        self.1.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the hook does once the gradients are final.
    fn update(&self) {
        let mut trained = self.lock();
        if let Some(gradients) = trained.gradients.take() {
            let block = trained.block.clone();
            trained.block = trained.optimizer.step(3e-3, block, gradients);
        }
    }
}

fn tensor(values: &[f32], device: &Device) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values.to_vec(), [ROWS, WIDTH]), device)
}

fn write(tensor: Tensor<2>, out: &mut [f32]) -> Result<(), LayerError> {
    out.copy_from_slice(tensor.into_data().as_slice().map_err(|e| format!("no float32: {e:?}"))?);
    Ok(())
}

impl Layer for BurnLayer {
    fn sizes(&self) -> LayerSizes {
        LayerSizes { output: BOUNDARY, saved: GRAPH, forward_workspace: GRAPH, backward_workspace: GRAPH }
    }
    fn parameters(&self) -> Vec<Parameter> {
        vec![Parameter::own(self.0, format!("block {}", self.0))]
    }
    fn forward(&self, _: &Context<'_>, call: Forward<'_>) -> Result<Saved, LayerError> {
        let (x, block) = (call.x.f32()?, self.lock().block.clone());
        let x = tensor(x, &Device::default().autodiff()).require_grad();
        let y = block.forward(x.clone());
        call.out.map_or(Ok(()), |out| write(y.clone(), out.f32()?))?;
        Ok(if call.save.is_some() { Saved::new((x, y)) } else { Saved::none() })
    }
    fn backward(&self, _: &Context<'_>, call: Backward<'_>) -> Result<(), LayerError> {
        let (x, y): (Tensor<2>, Tensor<2>) = call.saved.take()?;
        // The gradient of sum(y * dy) is what dy stands for.
        let mut gradients = (y * tensor(call.dy.f32()?, &Device::default().autodiff())).sum().backward();
        write(x.grad_remove(&mut gradients).ok_or("the input got no gradient")?, call.dx.f32()?)?;
        let mut trained = self.lock();
        trained.gradients = Some(GradientsParams::from_grads(gradients, &trained.block));
        Ok(())
    }
}

#[expect(clippy::print_stdout, reason = "shows that the loss falls")]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::default().autodiff();
    device.seed(7);
    let trained =
        || Trained { block: Block::new(&device), optimizer: AdamConfig::new().init(), gradients: None };
    let blocks: Vec<Arc<BurnLayer>> =
        (0..BLOCKS).map(|l| Arc::new(BurnLayer(l, Mutex::new(trained())))).collect();
    let layers = blocks.iter().map(|b| Arc::clone(b) as Arc<dyn Layer>).collect();
    let model = Model::new(Arc::new(Ends), layers, Arc::new(Ends), ModelOptions::default())?;
    let mut schedule = Schedule::named("by hand", &model.sizes().boundary, false);
    schedule.placement = "CN-G--G".chars().filter_map(Placement::from_letter).collect();
    let plan = model.plan(&schedule)?;
    let needs = model.needs(&plan);
    let nvme = Some(NvmeOptions::new(std::env::temp_dir(), needs.nvme));
    let store =
        Store::open(StoreOptions { hbm: needs.hbm, host: needs.host, nvme, ..StoreOptions::default() })?;
    let mut executor = Executor::new(store, model, ExecutorOptions::default())?;
    executor.on_final_gradient(move |last| {
        blocks[last.parameter.id.0].update();
        Ok(())
    });
    let mut program = executor.prepare(plan)?;
    let mut losses = Vec::new();
    for step in 0..60 {
        let inputs = vec![Arc::new(batch(step)) as _];
        losses.extend(executor.run(&mut program, &Step { seed: 0, step, inputs })?.losses);
    }
    println!("loss {:.4} -> {:.4}", losses[0], losses[59]);
    if losses[59] < 0.5 * losses[0] { Ok(()) } else { Err("the loss did not fall by half".into()) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_trains() {
        super::main().unwrap();
    }
}
