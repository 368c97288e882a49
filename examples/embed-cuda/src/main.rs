//! Trains layers made of kernels on a GPU, and the same layers on the host device, under several plans: every bit agrees.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "tests"))]

mod model;

use std::sync::Arc;

use lazy_model::{Placement, Schedule};
use lazy_runtime::*;
use lazy_store::cuda::Gpu;
use lazy_store::{BoxError, DeviceChoice, NvmeOptions, Store, StoreOptions};
use model::{Ends, Kernels, LAYERS, Square, WIDTH};

const STEPS: u64 = 10;
const RATE: f32 = 0.02;

/// Trains under a plan of one letter a boundary, with kernels on a GPU or without on the host device. Losses, and all weights.
fn train(
    kernels: Option<&Arc<Kernels>>,
    letters: &str,
    options: ModelOptions,
) -> Result<(Vec<f32>, Vec<u8>), BoxError> {
    let kernels = kernels.cloned();
    let ends = Arc::new(Ends(kernels.clone()));
    let layers = (0..LAYERS).map(|l| Arc::new(Square(l, kernels.clone())) as Arc<dyn Layer>).collect();
    let model = Model::new(Arc::clone(&ends) as _, layers, ends, options)?;
    let mut schedule = Schedule::named("by hand", &model.sizes().boundary, false);
    schedule.placement = letters.chars().filter_map(Placement::from_letter).collect();
    let plan = model.plan(&schedule)?;
    let needs = model.needs(&plan);
    let store = Store::open(StoreOptions {
        device: if kernels.is_some() { DeviceChoice::Cuda { ordinal: 0 } } else { DeviceChoice::Host },
        hbm: needs.hbm,
        host: needs.host,
        nvme: Some(NvmeOptions::new(std::env::current_dir()?, needs.nvme)),
        ..StoreOptions::default()
    })?;
    let mut executor = Executor::new(store, model, ExecutorOptions::default())?;
    let first: Vec<u8> = std::iter::repeat_n(0.05f32.to_le_bytes(), WIDTH).flatten().collect();
    executor.set_weights(&(0..LAYERS).map(|l| (ParameterId(l), &first[..])).collect::<Vec<_>>())?;
    executor.update_in_backward(move |last| {
        let (Some(gradient), Some(weights)) = (last.gradient, last.weights) else {
            return Err("weights and gradients of this trainer are in memory".into());
        };
        match (&kernels, last.stream) {
            (Some(kernels), Some(stream)) => kernels.descend(stream, &weights, &gradient, RATE),
            // Streamed weights are at home in host RAM.
            _ => {
                weights.f32()?.iter_mut().zip(gradient.f32()?).for_each(|(w, g)| *w -= RATE * g);
                Ok(())
            }
        }
    });
    let mut program = executor.prepare(plan)?;
    let mut losses = Vec::new();
    for step in 0..STEPS {
        losses.extend(executor.run(&mut program, &Step { seed: 0, step, inputs: vec![] })?.losses);
    }
    let weights = (0..LAYERS).map(|l| executor.weights(ParameterId(l))).collect::<Result<Vec<_>, _>>()?;
    Ok((losses, weights.concat()))
}

#[expect(clippy::print_stdout, reason = "says what was compared")]
fn main() -> Result<(), BoxError> {
    let (losses, weights) = train(None, "GGGGGGG", ModelOptions::default())?;
    println!("host device: loss {:.3} -> {:.3}", losses[0], losses[losses.len() - 1]);
    let kernels = match Gpu::open(0) {
        Ok(gpu) => Some(Arc::new(Kernels::compile(&gpu)?)),
        Err(error) => {
            println!("no GPU ({error}): the same plans on the host device");
            None
        }
    };
    let streamed = ModelOptions { stream_weights: true, stream_gradients: true, ..ModelOptions::default() };
    for options in [ModelOptions::default(), streamed] {
        for letters in ["GGGGGGG", "CCCCCCG", "CN-G--G"] {
            let on_gpu = train(kernels.as_ref(), letters, options)?;
            if on_gpu != (losses.clone(), weights.clone()) {
                return Err(format!("{letters} {options:?}: other bits than on the host device").into());
            }
            println!("{letters}, weights streamed: {}: every bit agrees", options.stream_weights);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_trains() {
        super::main().unwrap();
    }
}
