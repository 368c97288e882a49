//! The decoder on a GPU: its own kernels, matrix products by cuBLASLt, in the order and with the names of [`crate::decoder`].
//!
//! Activations and weights are bfloat16 or float32 ([`Real`]), sums are float32, gradients of weights are either. Every sum has one
//! order, so the same call gives the same bits. What a layer saves for its backward is the least that spares it a matrix product: all
//! that is made element by element is made again.

mod attention;
mod blas;
pub mod check;
mod ends;
mod kernels;
mod layer;
pub(crate) mod memory;
pub(crate) mod nvml;
mod places;
pub mod probe;
pub mod trial;

use std::sync::Arc;

use cudarc::driver::{CudaSlice, DevicePtr};
use lazy_model::{Bytes, ModelSpec};
use lazy_runtime::{LayerError, Model, ModelOptions, Parameter, ParameterId};
use lazy_store::cuda::Gpu;
use lazy_store::{DeviceRange, StoreError};
use serde::{Deserialize, Serialize};

use crate::batch::Batch;
use crate::decoder::{Geometry, IGNORED, check_spec};
use crate::model::Shape;

use blas::Blas;
use ends::Ends;
use kernels::Kernels;
use layer::CudaLayer;
use places::Places;

/// What can go wrong on the GPU before anything runs there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// The store's part of CUDA failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// cuBLASLt failed.
    #[error("cuBLASLt could not {what}: {reason}")]
    Blas {
        /// What it was asked for.
        what: String,
        /// What it said.
        reason: String,
    },
    /// The model cannot be computed here.
    #[error("this model cannot be trained on a GPU: {0}")]
    Config(String),
    /// A batch does not fit the model.
    #[error("{0}")]
    Batch(String),
    /// A buffer is shorter than what is put into it.
    #[error("{what} takes {wanted} bytes and was given {got}")]
    Short {
        /// The buffer.
        what: &'static str,
        /// Bytes it takes.
        wanted: u64,
        /// Bytes there are.
        got: u64,
    },
}

type Result<T> = std::result::Result<T, CudaError>;

/// Type of the numbers in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Real {
    /// float32
    #[default]
    F32,
    /// bfloat16
    Bf16,
}

impl Real {
    /// Bytes of a number.
    pub const fn bytes(self) -> usize {
        match self {
            Real::F32 => 4,
            Real::Bf16 => 2,
        }
    }
}

/// What a decoder is made for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CudaOptions {
    /// Rows and tokens of a micro-batch.
    pub shape: Shape,
    /// Type of activations and weights.
    pub real: Real,
    /// Type of the gradients of weights.
    pub gradients: Real,
    /// Probability with which an element of a residual branch is dropped, in `0.0..1.0`.
    pub dropout: f32,
    /// How the executor runs the model.
    pub model: ModelOptions,
    /// Fill every buffer with poison before it is written.
    pub poison: bool,
}

/// What prologue, layers and epilogue share.
struct Shared {
    spec: ModelSpec,
    geometry: Geometry,
    options: CudaOptions,
    kernels: Kernels,
    blas: Blas,
    places: Places,
}

/// A decoder on a GPU, for micro-batches of one shape.
#[derive(Clone)]
pub struct CudaDecoder {
    gpu: Gpu,
    shared: Arc<Shared>,
}

/// Token ids of a micro-batch and their targets, in the memory of the GPU: the side inputs of a step.
pub struct DeviceBatch {
    ids: DeviceRange,
    targets: DeviceRange,
    /// What the loss is divided by.
    count: usize,
    /// Held for the two ranges.
    _memory: [CudaSlice<u32>; 2],
}

impl CudaDecoder {
    /// Compiles the kernels for a model and loads cuBLASLt.
    ///
    /// # Errors
    /// When the model is none that is computed here, and when a library is missing or fails.
    pub fn new(gpu: &Gpu, spec: ModelSpec, options: CudaOptions) -> Result<CudaDecoder> {
        let geometry = check_spec(&spec).map_err(|e| CudaError::Config(e.to_string()))?;
        let vector = 16 / options.real.bytes();
        for (name, width) in [("hidden_size", geometry.hidden), ("intermediate_size", geometry.intermediate)]
        {
            if !width.is_multiple_of(vector) {
                return Err(CudaError::Config(format!(
                    "its {name} is {width}: make it a multiple of {vector}, the numbers of one access to memory"
                )));
            }
        }
        if geometry.head_dim > 256 {
            let problem =
                format!("its head_dim is {}, and heads of up to 256 are computed here", geometry.head_dim);
            return Err(CudaError::Config(problem));
        }
        if !(0.0..1.0).contains(&options.dropout) {
            let problem = format!("dropout is a probability below 1, got {}", options.dropout);
            return Err(CudaError::Batch(problem));
        }
        let kernels = Kernels::compile(gpu, options.real, options.gradients, geometry.head_dim)?;
        let places = Places::new(&geometry, spec.vocab, &options);
        let shared =
            Shared { kernels, blas: Blas::load(gpu, options.real)?, places, spec, geometry, options };
        Ok(CudaDecoder { gpu: gpu.clone(), shared: Arc::new(shared) })
    }

    /// The model's shape.
    pub fn spec(&self) -> &ModelSpec {
        &self.shared.spec
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// What it was made for.
    pub fn options(&self) -> &CudaOptions {
        &self.shared.options
    }

    /// The decoder as the executor takes it. A micro-batch's loss is its part of the mean over the tokens of all: their sum is the
    /// step's.
    ///
    /// # Errors
    /// When the step has no micro-batches.
    pub fn model(&self) -> std::result::Result<Model, lazy_runtime::RuntimeError> {
        let layers = (0..self.shared.spec.layers()).map(|l| CudaLayer::new(&self.shared, l)).collect();
        let ends = || Ends(Arc::clone(&self.shared));
        Model::new(ends(), layers, ends(), self.shared.options.model)
    }

    /// Puts a micro-batch into the memory of the GPU.
    ///
    /// # Errors
    /// When there are not as many ids and targets as the shape says, one lies outside the vocabulary, and when the GPU has no room.
    pub fn upload(&self, batch: &Batch) -> Result<DeviceBatch> {
        let (tokens, vocab) = (self.shared.tokens(), self.shared.spec.vocab);
        let Batch { ids, targets, tokens: count } = batch;
        for (what, given) in [("token ids", ids), ("targets", targets)] {
            if given.len() != tokens {
                return Err(CudaError::Batch(format!(
                    "{} {what} were given for {tokens} tokens",
                    given.len()
                )));
            }
        }
        let mut named = ids.iter().chain(targets.iter().filter(|&&target| target != IGNORED));
        if let Some(id) = named.find(|&&id| id as usize >= vocab) {
            return Err(CudaError::Batch(format!(
                "token id {id} is outside the vocabulary, which ends at {vocab}"
            )));
        }
        let stream = self.gpu.context().default_stream();
        let failed =
            |what| move |e: cudarc::driver::DriverError| StoreError::Cuda { what, reason: e.to_string() };
        let put = |values: &[u32]| stream.clone_htod(values).map_err(failed("put token ids into GPU memory"));
        let memory = [put(ids)?, put(targets)?];
        // The lanes' streams do not wait for this one.
        stream.synchronize().map_err(failed("wait for token ids"))?;
        let range = |slice: &CudaSlice<u32>| {
            let (address, _) = slice.device_ptr(&stream);
            DeviceRange { address, bytes: Bytes(4 * tokens as u64) }
        };
        let [ids, targets] = [range(&memory[0]), range(&memory[1])];
        Ok(DeviceBatch { ids, targets, count: *count, _memory: memory })
    }
}

impl Shared {
    fn tokens(&self) -> usize {
        self.options.shape.tokens()
    }

    /// Parameters by their numbers in [`ModelSpec::parameters`].
    fn parameters(&self, numbers: impl IntoIterator<Item = usize>) -> Vec<Parameter> {
        let all = self.spec.parameters();
        let parameter = |number: usize| {
            let lazy_model::Parameter { name, shape } = &all[number];
            let elements: u64 = shape.iter().map(|&n| n as u64).product();
            Parameter {
                id: ParameterId(number),
                name: name.clone(),
                weights: Bytes(elements * self.options.real.bytes() as u64),
                gradient: Bytes(elements * self.options.gradients.bytes() as u64),
            }
        };
        numbers.into_iter().map(parameter).collect()
    }
}

/// The side inputs of a call.
fn batch<'a>(cx: &lazy_runtime::Context<'a>) -> std::result::Result<&'a DeviceBatch, LayerError> {
    cx.inputs::<DeviceBatch>()
}
