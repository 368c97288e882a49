//! A Qwen3 decoder in float32 on the CPU, cut at its layer boundaries.
//!
//! An executor calls the pieces one at a time: [`Decoder::embed`] gives boundary 0, [`Decoder::layer_forward`] leads
//! from boundary `l` to `l + 1`, [`Decoder::loss`] ends at boundary N and starts the way back, which
//! goes on through the layers' graphs and ends in [`Decoder::embed_backward`]. Each layer is a candle autograd graph of
//! its own, cut off from the others because its input is a variable; what lies between the layers is the caller's to
//! keep, move or drop. Running a layer twice on the same input gives the same bits, dropout included.

mod attention;
mod config;
mod gemm;
mod layer;
mod linear;
mod loss;
mod math;
mod mlp;
mod norm;
mod ops;
mod sizes;

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Tensor, Var};
use lazy_model::{ModelSpec, Parameter};

pub use loss::{IGNORED, Loss, shifted_targets};
pub use ops::with_slice;
pub use sizes::{DeclaredSizes, NamedBytes};

pub(crate) use config::{Geometry, check as check_spec};
pub(crate) use layer::PARAMETERS as LAYER_PARAMETERS;

use crate::dropout::DropoutKey;
use norm::RotaryTable;

/// What can go wrong in the decoder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DecoderError {
    /// The configuration asks for something that is not computed here.
    #[error("this model cannot be trained: {problem}")]
    Config {
        /// What, and what to change.
        problem: String,
    },
    /// A call does not fit the model.
    #[error("{problem}")]
    Input {
        /// What was given and what is wanted.
        problem: String,
    },
    /// candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

type Result<T> = std::result::Result<T, DecoderError>;

pub(crate) fn input_error<T>(problem: String) -> Result<T> {
    Err(DecoderError::Input { problem })
}

/// What a layer's result depends on beside its input and its weights. Positions are implied: each row of a batch
/// starts at 0.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepContext {
    /// Probability with which an element of a residual branch is dropped, in `0.0..1.0`; 0 in evaluation.
    pub dropout: f32,
    /// Which masks are used; first forward and recompute pass the same.
    pub key: DropoutKey,
}

/// The decoder's weights and the functions that lead through it.
pub struct Decoder {
    spec: ModelSpec,
    geometry: Geometry,
    /// Whether the weights of layers are among the parameters.
    layers: bool,
    parameters: Vec<(String, Var)>,
    rotary: Mutex<Option<Arc<RotaryTable>>>,
    loss_rows: usize,
}

impl Decoder {
    /// Makes a decoder whose weights come from `init`, which is asked for each parameter by Hugging Face name and
    /// shape, in the order of [`ModelSpec::parameters`], and returns its elements in row-major order.
    ///
    /// # Errors
    ///
    /// When the specification asks for something that is not computed here, or `init` returns another number of elements.
    pub fn new(spec: ModelSpec, init: &mut dyn FnMut(&str, &[usize]) -> Vec<f32>) -> Result<Self> {
        Decoder::of(spec, true, init)
    }

    /// The same without the weights of its layers, which [`Decoder::layer_forward_with`] is given with each call; their parameters have no
    /// elements here.
    ///
    /// # Errors
    ///
    /// As for [`Decoder::new`].
    pub fn without_layers(spec: ModelSpec, init: &mut dyn FnMut(&str, &[usize]) -> Vec<f32>) -> Result<Self> {
        Decoder::of(spec, false, init)
    }

    fn of(spec: ModelSpec, layers: bool, init: &mut dyn FnMut(&str, &[usize]) -> Vec<f32>) -> Result<Self> {
        let geometry = config::check(&spec)?;
        let of_layers = 1..1 + spec.layers() * layer::PARAMETERS;
        let make = |(index, Parameter { name, shape })| {
            if !layers && of_layers.contains(&index) {
                return Ok((name, Var::zeros(0, DType::F32, &Device::Cpu)?));
            }
            let values = init(&name, &shape);
            let (got, wanted) = (values.len(), shape.iter().product::<usize>());
            if got != wanted {
                return input_error(format!("{name} has {wanted} elements, but {got} were given"));
            }
            Ok((name, Var::from_vec(values, shape, &Device::Cpu)?))
        };
        let parameters = spec.parameters().into_iter().enumerate().map(make).collect::<Result<Vec<_>>>()?;
        Ok(Decoder { spec, geometry, layers, parameters, rotary: Mutex::new(None), loss_rows: loss::ROWS })
    }

    /// Sets how many tokens' logits exist at a time in [`Decoder::loss`] (default 128, at least 1).
    pub fn with_loss_rows(mut self, rows: usize) -> Self {
        self.loss_rows = rows.max(1);
        self
    }

    /// The model's shape.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Names and weights, in the order of [`ModelSpec::parameters`]. Gradients name parameters by their index
    /// here.
    pub fn parameters(&self) -> &[(String, Var)] {
        &self.parameters
    }

    /// Whether it has the weights of its layers.
    pub fn has_layers(&self) -> bool {
        self.layers
    }

    /// Indices of a layer's parameters.
    pub fn layer_parameters(&self, layer: usize) -> Range<usize> {
        let count = layer::PARAMETERS;
        1 + layer * count..1 + (layer + 1) * count
    }

    pub(crate) fn norm_index(&self) -> usize {
        1 + self.spec.layers() * layer::PARAMETERS
    }

    pub(crate) fn head_index(&self) -> usize {
        if self.spec.tied { 0 } else { self.norm_index() + 1 }
    }

    fn parameter(&self, index: usize) -> Result<&(String, Var)> {
        let count = self.parameters.len();
        self.parameters.get(index).ok_or_else(|| DecoderError::Input {
            problem: format!("there is no parameter {index}: the model has {count}"),
        })
    }

    /// Overwrites elements `first_element..` of a parameter in place. Not to be called between a layer's forward and
    /// its backward, which would then see two sets of weights.
    ///
    /// # Errors
    ///
    /// When there is no such parameter or no such elements; then nothing is written.
    pub fn write_parameter(&self, index: usize, first_element: usize, values: &[f32]) -> Result<()> {
        let (name, var) = self.parameter(index)?;
        let count = var.elem_count();
        if first_element.checked_add(values.len()).is_none_or(|end| end > count) {
            let end = first_element.saturating_add(values.len());
            return input_error(format!("{name} has {count} elements: {first_element}..{end} is outside"));
        }
        Ok(var.inplace_op1(&Overwrite { first_element, values })?)
    }

    /// Calls `f` with the elements of a parameter. No copy is made.
    ///
    /// # Errors
    ///
    /// When there is no such parameter.
    pub fn read_parameter<R>(&self, index: usize, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
        Ok(with_slice(&self.parameter(index)?.1, f)?)
    }

    fn check_ids(&self, ids: &[u32], tokens: usize) -> Result<()> {
        let vocab = self.spec.vocab;
        if ids.len() != tokens {
            return input_error(format!("{} token ids were given for {tokens} tokens", ids.len()));
        }
        match ids.iter().position(|&id| id as usize >= vocab) {
            Some(at) => {
                let last = vocab.saturating_sub(1);
                input_error(format!("token {at} has id {}, but the vocabulary's last is {last}", ids[at]))
            }
            None => Ok(()),
        }
    }

    /// The embedding: boundary 0, `[batch, seq, hidden]`, of the row-major `ids`.
    ///
    /// # Errors
    ///
    /// When there are not `batch * seq` ids, or one lies outside the vocabulary.
    pub fn embed(&self, ids: &[u32], batch: usize, seq: usize) -> Result<Tensor> {
        self.check_ids(ids, batch * seq)?;
        let hidden = self.spec.hidden;
        let mut values = Vec::with_capacity(ids.len() * hidden);
        self.read_parameter(0, |weight| {
            for &id in ids {
                values.extend_from_slice(&weight[id as usize * hidden..][..hidden]);
            }
        })?;
        Ok(ops::tensor(values, (batch, seq, hidden))?)
    }

    /// The gradient of parameter 0, the embedding, for the gradient `dy` of boundary 0. Where several tokens share a
    /// row their gradients are added in the order of the tokens. With tied weights this is one of two parts: the
    /// other comes from [`Decoder::loss`].
    ///
    /// # Errors
    ///
    /// When ids and gradient do not fit together.
    pub fn embed_backward(&self, ids: &[u32], dy: &Tensor) -> Result<Tensor> {
        let (hidden, vocab) = (self.spec.hidden, self.spec.vocab);
        self.check_ids(ids, dy.elem_count() / hidden)?;
        let mut gradient = vec![0.0; vocab * hidden];
        with_slice(dy, |dy| {
            for (&id, dy) in ids.iter().zip(dy.chunks_exact(hidden)) {
                let row = &mut gradient[id as usize * hidden..][..hidden];
                row.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
            }
        })?;
        Ok(ops::tensor(gradient, (vocab, hidden))?)
    }

    /// The rotary table for at least `seq` positions.
    fn rotary(&self, seq: usize) -> Arc<RotaryTable> {
        // The table is only ever replaced whole, so a panic elsewhere leaves it usable.
        let mut held = self.rotary.lock().unwrap_or_else(PoisonError::into_inner);
        match &*held {
            Some(table) if table.positions() >= seq => table.clone(),
            _ => {
                let table = Arc::new(RotaryTable::new(self.spec.rope_theta, self.geometry.head_dim, seq));
                *held = Some(table.clone());
                table
            }
        }
    }
}

/// Copies values over part of a tensor, inside its own storage.
struct Overwrite<'a> {
    first_element: usize,
    values: &'a [f32],
}

impl InplaceOp1 for Overwrite<'_> {
    fn name(&self) -> &'static str {
        "overwrite"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (Some((first, _)), CpuStorage::F32(all)) = (layout.contiguous_offsets(), storage) else {
            candle_core::bail!("a parameter is a contiguous float32 tensor")
        };
        all[first + self.first_element..][..self.values.len()].copy_from_slice(self.values);
        Ok(())
    }
}
