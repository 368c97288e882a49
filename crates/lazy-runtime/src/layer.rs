use std::any::Any;

use lazy_model::{Bytes, LayerIndex};

/// What a layer may fail with.
pub type LayerError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// Why a layer runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// The forward pass.
    Forward,
    /// A forward that repeats an earlier one, from the same input.
    Recompute,
    /// The backward pass.
    Backward,
}

/// Where in training a call belongs. Randomness must depend on nothing but [`Context::dropout_key`], so that a recomputed
/// forward repeats the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Context {
    /// Seed of the run.
    pub seed: u64,
    /// Optimizer step, from 0.
    pub step: u64,
    /// Micro-batch within the step, from 0.
    pub micro_batch: usize,
    /// The layer; `None` for prologue and epilogue.
    pub layer: Option<LayerIndex>,
    /// Why it runs.
    pub phase: Phase,
}

impl Context {
    /// Key for a counter-based generator: the same for the forward and every recomputation of a layer, different for every
    /// layer, micro-batch and step.
    pub fn dropout_key(&self) -> [u64; 4] {
        let layer = self.layer.map_or(u64::MAX, |l| l.get() as u64);
        [self.seed, self.step, self.micro_batch as u64, layer]
    }
}

/// What a layer's forward hands to its own backward.
pub struct Saved(Box<dyn Any + Send>);

impl Saved {
    /// Wraps a value.
    pub fn new<T: Send + 'static>(value: T) -> Self {
        Saved(Box::new(value))
    }

    /// Gives the value back.
    ///
    /// # Errors
    /// When it was made as another type, that is, by another layer.
    pub fn take<T: 'static>(self) -> Result<T, LayerError> {
        match self.0.downcast::<T>() {
            Ok(value) => Ok(*value),
            Err(_) => {
                Err("what was saved is of another type: forward and backward of this layer do not agree"
                    .into())
            }
        }
    }
}

/// One layer of a model: reads boundary `l`, writes boundary `l + 1`.
///
/// Boundaries are bytes, laid out as the layer's neighbours agree. A layer computes when it is called, on the thread it is called
/// on; it keeps nothing between calls but its parameters and what it returns as [`Saved`].
pub trait Layer: Send + Sync {
    /// Size of its output boundary.
    fn output_bytes(&self) -> Bytes;

    /// Size of what [`Layer::forward`] returns when it saves, as counted by the planner.
    fn saved_bytes(&self) -> Bytes;

    /// Computes the output from `x`. `out` is absent when only the internals are wanted. With `save` the layer returns what its
    /// backward needs besides `x`.
    ///
    /// # Errors
    /// Whatever the layer fails with; the step is abandoned.
    fn forward(
        &self,
        cx: &Context,
        x: &[u8],
        out: Option<&mut [u8]>,
        save: bool,
    ) -> Result<Option<Saved>, LayerError>;

    /// From the gradient `dy` of the output to the gradient `dx` of the input; gradients of parameters go where the layer keeps
    /// them, for example into [`crate::Gradients`].
    ///
    /// # Errors
    /// Whatever the layer fails with; the step is abandoned.
    fn backward(
        &self,
        cx: &Context,
        x: &[u8],
        saved: Saved,
        dy: &[u8],
        dx: &mut [u8],
    ) -> Result<(), LayerError>;
}

/// Makes boundary 0.
pub trait Prologue: Send + Sync {
    /// Size of boundary 0.
    fn output_bytes(&self) -> Bytes;

    /// Writes boundary 0 of the micro-batch that `cx` names.
    ///
    /// # Errors
    /// Whatever it fails with; the step is abandoned.
    fn forward(&self, cx: &Context, out: &mut [u8]) -> Result<(), LayerError>;

    /// Takes the gradient of boundary 0.
    ///
    /// # Errors
    /// Whatever it fails with; the step is abandoned.
    fn backward(&self, cx: &Context, dy: &[u8]) -> Result<(), LayerError>;
}

/// Turns the last boundary into a loss.
pub trait Epilogue: Send + Sync {
    /// Loss of the micro-batch that `cx` names, and its gradient with respect to the boundary `x`, written to `dx`.
    ///
    /// # Errors
    /// Whatever it fails with; the step is abandoned.
    fn run(&self, cx: &Context, x: &[u8], dx: &mut [u8]) -> Result<(), LayerError>;
}
