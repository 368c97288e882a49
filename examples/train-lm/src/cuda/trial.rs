//! A decoder on a GPU under one plan, ready to run steps: what tests and benchmarks start from.

use std::path::Path;
use std::sync::Arc;

use half::bf16;
use lazy_model::{ModelSpec, Schedule};
use lazy_runtime::{Executor, Model, Parameter, ParameterId, Program, Step, StepReport};
use lazy_store::cuda::Gpu;
use lazy_store::{BoxError, DeviceChoice, StoreOptions};
use rayon::prelude::*;

use super::memory::DeviceParameters;
use super::{CudaDecoder, CudaOptions, Real};
use crate::batch::Batch;

/// An executor, its program, and the decoder both are of.
pub struct Trial {
    /// The decoder.
    pub decoder: CudaDecoder,
    /// The executor.
    pub executor: Executor,
    /// The plan it carries out.
    pub program: Program,
    gradients: Real,
}

impl Trial {
    /// Opens a store for the plan of a schedule, which `choose` makes for the model, and sets the weights by `init`, which is asked
    /// for the bytes of each parameter by Hugging Face name and shape. Spill files go to `dir`.
    ///
    /// # Errors
    /// When the model cannot be computed, the schedule cannot be carried out, or the machine has no room for it.
    pub fn open(
        gpu: &Gpu,
        spec: &ModelSpec,
        options: CudaOptions,
        dir: &Path,
        choose: impl FnOnce(&Model) -> Result<Schedule, BoxError>,
        mut init: impl FnMut(&str, &[usize]) -> Vec<u8>,
    ) -> Result<Trial, BoxError> {
        let decoder = CudaDecoder::new(gpu, spec.clone(), options)?;
        let model = decoder.model()?;
        let plan = model.plan(&choose(&model)?)?;
        let device = DeviceChoice::Cuda { ordinal: 0 };
        let poison = options.poison;
        let store = StoreOptions { device, poison, ..model.store_options(&plan, dir) };
        let (executor, program) = Executor::open(model, plan, store)?;
        let parameters: Vec<_> = executor.model().parameters().cloned().collect();
        let shapes = spec.parameters();
        if !options.model.stream_weights && !options.model.stream_gradients {
            let there = DeviceParameters::of(&decoder, &executor)?;
            for (parameter, p) in shapes.iter().enumerate() {
                there.write_bytes(parameter, 0, &init(&p.name, &p.shape))?;
            }
            return Ok(Trial { decoder, executor, program, gradients: options.gradients });
        }
        // Weights are streamed: what lies together is written together.
        for group in parameters.chunk_by(|a, b| layer_of(&a.name) == layer_of(&b.name)) {
            let bytes = |p: &Parameter| (p.id, init(&p.name, &shapes[p.id.0].shape));
            let all: Vec<_> = group.iter().map(bytes).collect();
            let views: Vec<(ParameterId, &[u8])> =
                all.iter().map(|(id, bytes)| (*id, bytes.as_slice())).collect();
            executor.set_weights(&views)?;
        }
        Ok(Trial { decoder, executor, program, gradients: options.gradients })
    }

    /// Runs a step on batches, one a micro-batch.
    ///
    /// # Errors
    /// When a batch does not fit the model, and when the step fails.
    pub fn step(&mut self, number: u64, batches: &[Vec<u32>]) -> Result<StepReport, BoxError> {
        let seq = self.decoder.shared.options.shape.seq;
        let batches = Batch::next_token(batches.iter().cloned(), seq);
        let uploaded: Result<Vec<_>, _> = batches.iter().map(|batch| self.decoder.upload(batch)).collect();
        let inputs = uploaded?.into_iter().map(|batch| Arc::new(batch) as _).collect();
        let step = Step { step: number, inputs, ..Step::default() };
        Ok(self.executor.run(&mut self.program, &step)?)
    }

    /// The gradients the last step left, by name.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn gradients(&self) -> Result<Vec<(String, Vec<f32>)>, BoxError> {
        let parameters = self.executor.model().parameters();
        parameters
            .map(|p| Ok((p.name.clone(), values_of(self.gradients, &self.executor.gradient(p.id)?))))
            .collect()
    }

    /// The bytes of all weights, one after the other.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn weights(&self) -> Result<Vec<u8>, BoxError> {
        let all: Result<Vec<_>, _> =
            self.executor.model().parameters().map(|p| self.executor.weights(p.id)).collect();
        Ok(all?.concat())
    }
}

/// A parameter's layer, by its name.
fn layer_of(name: &str) -> Option<&str> {
    name.strip_prefix("model.layers.")?.split('.').next()
}

/// Numbers as they lie in memory, rounded to the nearest.
pub fn bytes_of(real: Real, values: &[f32]) -> Vec<u8> {
    match real {
        Real::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        Real::Bf16 => {
            let mut bytes = vec![0; 2 * values.len()];
            let pairs = bytes.par_chunks_exact_mut(2).zip(values);
            pairs.for_each(|(to, v)| to.copy_from_slice(&bf16::from_f32(*v).to_le_bytes()));
            bytes
        }
    }
}

/// The numbers that lie in these bytes.
pub fn values_of(real: Real, bytes: &[u8]) -> Vec<f32> {
    match real {
        Real::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        Real::Bf16 => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
    }
}
