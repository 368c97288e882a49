//! The decoder on the device that trains it.

use std::any::Any;
use std::sync::Arc;

use lazy_model::{Bytes, ModelSpec};
use lazy_runtime::{Executor, Model, RuntimeError};
use lazy_store::DeviceChoice;
use lazy_store::cuda::Gpu;

use crate::batch::Batch;
use crate::cuda::memory::DeviceParameters;
use crate::cuda::trial::bytes_of;
use crate::cuda::{CudaDecoder, Real};
use crate::error::Result;
use crate::homes;
use crate::model::HostModel;

/// A decoder for steps of one shape.
pub enum Backend {
    /// On the CPU, in float32; part of RAM stands for HBM.
    Host(HostModel),
    /// On a GPU.
    Cuda(CudaDecoder),
}

impl Backend {
    /// The model's shape.
    pub fn spec(&self) -> &ModelSpec {
        match self {
            Backend::Host(model) => model.decoder.spec(),
            Backend::Cuda(decoder) => decoder.spec(),
        }
    }

    /// The decoder as the executor takes it.
    ///
    /// # Errors
    /// When the step has no micro-batches.
    pub fn model(&self) -> std::result::Result<Model, RuntimeError> {
        match self {
            Backend::Host(model) => model.model(),
            Backend::Cuda(decoder) => decoder.model(),
        }
    }

    /// Weights and gradients that it keeps itself, outside the store.
    pub fn own_bytes(&self) -> Bytes {
        match self {
            Backend::Host(model) => model.own_bytes(),
            Backend::Cuda(_) => Bytes::ZERO,
        }
    }

    /// The GPU.
    pub fn gpu(&self) -> Option<&Gpu> {
        match self {
            Backend::Host(_) => None,
            Backend::Cuda(decoder) => Some(decoder.gpu()),
        }
    }

    /// The device, for a person.
    pub fn in_words(&self) -> String {
        match self.gpu() {
            None => {
                let threads = std::thread::available_parallelism().map_or(1, usize::from);
                format!("host, {threads} thread(s)")
            }
            Some(gpu) => gpu.context().name().unwrap_or_else(|_| "a GPU".into()),
        }
    }

    /// The device as store and optimizer take it.
    pub fn device(&self) -> DeviceChoice {
        match self.gpu() {
            None => DeviceChoice::Host,
            Some(gpu) => DeviceChoice::Cuda { ordinal: gpu.context().ordinal() },
        }
    }

    /// The decoder with its parameters where the executor's steps use them.
    pub(crate) fn attach(self, executor: &Executor) -> Result<Trained> {
        Ok(match self {
            Backend::Host(model) => Trained::Host(model),
            Backend::Cuda(decoder) => {
                let parameters = Arc::new(DeviceParameters::of(&decoder, executor)?);
                Trained::Cuda { decoder, parameters }
            }
        })
    }
}

/// A decoder under training. Its parameters are read and written between steps.
pub(crate) enum Trained {
    Host(HostModel),
    Cuda { decoder: CudaDecoder, parameters: Arc<DeviceParameters> },
}

impl Trained {
    pub(crate) fn spec(&self) -> &ModelSpec {
        match self {
            Trained::Host(model) => model.decoder.spec(),
            Trained::Cuda { decoder, .. } => decoder.spec(),
        }
    }

    /// What a step's calls find in their contexts, one entry a micro-batch.
    pub(crate) fn inputs(&self, batches: Vec<Batch>) -> Result<Vec<Arc<dyn Any + Send + Sync>>> {
        let one = |batch: Batch| -> Result<Arc<dyn Any + Send + Sync>> {
            Ok(match self {
                Trained::Host(_) => Arc::new(batch),
                Trained::Cuda { decoder, .. } => Arc::new(decoder.upload(&batch)?),
            })
        };
        batches.into_iter().map(one).collect()
    }

    /// Whether a parameter is at home in host RAM, where the executor of its steps keeps it.
    fn is_in_ram(&self, parameter: usize) -> bool {
        match self {
            Trained::Host(model) => model.decoder.parameters()[parameter].1.elem_count() == 0,
            Trained::Cuda { parameters, .. } => !parameters.has(parameter),
        }
    }

    /// Sets elements of a parameter from `first` on, rounded to the type that steps compute with.
    pub(crate) fn write(
        &self,
        executor: &Executor,
        parameter: usize,
        first: usize,
        values: &[f32],
    ) -> Result<()> {
        match self {
            _ if self.is_in_ram(parameter) => {
                let format = self.format();
                let bytes = bytes_of(format, values);
                Ok(homes::write(executor, parameter, first * format.bytes(), bytes)?)
            }
            Trained::Host(model) => Ok(model.decoder.write_parameter(parameter, first, values)?),
            Trained::Cuda { parameters, .. } => Ok(parameters.write(parameter, first, values)?),
        }
    }

    /// The bytes of a parameter, of the type that steps compute with.
    pub(crate) fn read(&self, executor: &Executor, parameter: usize) -> Result<Vec<u8>> {
        match self {
            _ if self.is_in_ram(parameter) => Ok(homes::read(executor, parameter)?),
            Trained::Host(model) => {
                let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect();
                Ok(model.decoder.read_parameter(parameter, bytes)?)
            }
            Trained::Cuda { parameters, .. } => Ok(parameters.read(parameter)?),
        }
    }

    /// The type that steps compute with.
    pub(crate) fn format(&self) -> Real {
        match self {
            Trained::Host(_) => Real::F32,
            Trained::Cuda { decoder, .. } => decoder.options().real,
        }
    }

    /// Sets all gradients to zero, where the executor does not.
    pub(crate) fn zero_gradients(&self) {
        if let Trained::Host(model) = self {
            model.gradients.zero();
        }
    }
}
