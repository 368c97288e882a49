//! Trains layers made of kernels on a GPU, and the same layers on the host device, under several plans: every bit agrees.

mod model;

use std::sync::Arc;

use lazy_runtime::*;
use lazy_store::cuda::Gpu;
use lazy_store::{BoxError, DeviceChoice, StoreOptions};
use model::{Ends, Kernels, LAYERS, Square};

const STEPS: u64 = 10;
const RATE: f32 = 0.02;

/// Trains under a plan of one letter a boundary, with kernels on a GPU or without on the host device. Losses, and all weights.
fn train(
    kernels: Option<&Arc<Kernels>>,
    letters: &str,
    options: ModelOptions,
) -> Result<(Vec<f32>, Vec<u8>), BoxError> {
    let kernels = kernels.cloned();
    let layers = (0..LAYERS).map(|l| Square(l, kernels.clone())).collect();
    let model = Model::new(Ends(kernels.clone()), layers, Ends(kernels.clone()), options)?;
    let plan = model.plan(&model.schedule(letters)?)?;
    let device = if kernels.is_some() { DeviceChoice::Cuda { ordinal: 0 } } else { DeviceChoice::Host };
    let store = StoreOptions { device, ..model.store_options(&plan, std::env::current_dir()?) };
    let (mut executor, mut program) = Executor::open(model, plan, store)?;
    executor.initialize(|_, weights| weights.fill(0.05))?;
    executor.update_in_backward(move |last| {
        let stream = last.stream;
        let (weights, gradient) = last.in_memory()?;
        if let (Some(kernels), Some(stream)) = (&kernels, stream) {
            return kernels.descend(stream, &weights, &gradient, RATE);
        }
        // Streamed weights are at home in host RAM.
        weights.f32()?.iter_mut().zip(gradient.f32()?).for_each(|(w, g)| *w -= RATE * g);
        Ok(())
    });
    let steps = (0..STEPS).map(|step| Step { step, ..Step::default() });
    let losses = executor.run_all(&mut program, steps)?;
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
    fn it_trains() -> Result<(), super::BoxError> {
        super::main()
    }
}
