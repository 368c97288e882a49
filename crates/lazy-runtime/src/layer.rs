use std::any::Any;

use lazy_model::{Bytes, LayerIndex};
use lazy_store::Stream;

use crate::notes::Notes;
use crate::view::{Grads, Input, Output, Weights};

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
    /// A forward that no backward follows.
    Evaluation,
}

/// Where in training a call belongs. Randomness must depend on nothing but [`Context::dropout_key`], so that a recomputed
/// forward repeats the first one.
#[derive(Clone, Copy)]
pub struct Context<'a> {
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
    pub(crate) inputs: Option<&'a (dyn Any + Send + Sync)>,
    pub(crate) stream: Option<Stream>,
    pub(crate) notes: Option<&'a Notes>,
}

impl<'a> Context<'a> {
    /// A context for a test of a layer: the first micro-batch of the first step, without side inputs.
    pub fn new(layer: Option<LayerIndex>, phase: Phase) -> Context<'a> {
        Context { seed: 0, step: 0, micro_batch: 0, layer, phase, inputs: None, stream: None, notes: None }
    }

    /// The same with side inputs.
    pub fn with_inputs(self, inputs: &'a (dyn Any + Send + Sync)) -> Context<'a> {
        Context { inputs: Some(inputs), ..self }
    }

    /// Key for a counter-based generator: the same for the forward and every recomputation of a layer, different for every
    /// layer, micro-batch and step.
    pub fn dropout_key(&self) -> [u64; 4] {
        let layer = self.layer.map_or(u64::MAX, |l| l.get() as u64);
        [self.seed, self.step, self.micro_batch as u64, layer]
    }

    /// What [`crate::Step`] brings along for this micro-batch: token ids, targets, positions, masks.
    ///
    /// # Errors
    /// When there is nothing, or something of another type.
    pub fn inputs<T: 'static>(&self) -> Result<&'a T, LayerError> {
        let inputs = self
            .inputs
            .ok_or("the step brings no side inputs: set `Step::inputs`, one for each micro-batch")?;
        let wanted = std::any::type_name::<T>();
        inputs.downcast_ref().ok_or_else(|| format!("the side inputs of this step are no {wanted}").into())
    }

    /// The stream to put work on.
    ///
    /// # Errors
    /// On the host device, which has none.
    pub fn stream(&self) -> Result<Stream, LayerError> {
        self.stream
            .ok_or_else(|| "the host device has no streams: read and write the bytes in the call".into())
    }

    /// Says what a tensor looks like that this forward makes: its output, or something it saves. What a recomputation says of the same
    /// name must be the same, or the step fails and names layer and tensor.
    ///
    /// # Errors
    /// When the forward said otherwise.
    pub fn describe(
        &self,
        tensor: &'static str,
        shape: &[usize],
        dtype: &'static str,
    ) -> Result<(), LayerError> {
        match self.notes {
            Some(notes) => Ok(notes.describe(self, tensor, shape, dtype)?),
            None => Ok(()),
        }
    }
}

/// What a layer's forward hands to its own backward besides the bytes it writes to [`Forward::save`]: a graph of a framework, for
/// example. It lives outside the store; the layer's declared sizes count it.
#[derive(Default)]
pub struct Saved(Option<Box<dyn Any + Send>>);

impl Saved {
    /// Nothing: all that backward needs is in [`Forward::save`], or there is nothing.
    pub fn none() -> Self {
        Saved(None)
    }

    /// Wraps a value.
    pub fn new<T: Send + 'static>(value: T) -> Self {
        Saved(Some(Box::new(value)))
    }

    /// Gives the value back.
    ///
    /// # Errors
    /// When nothing was saved, and when it was made as another type, that is, by another layer.
    pub fn take<T: 'static>(self) -> Result<T, LayerError> {
        let value = self.0.ok_or("the layer's forward was asked to save its internals and returned none")?;
        let other = "what was saved is of another type: forward and backward of this layer do not agree";
        value.downcast::<T>().map(|value| *value).map_err(|_| other.into())
    }
}

/// What a layer takes for the shapes it is run with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerSizes {
    /// Its output boundary.
    pub output: Bytes,
    /// What its backward needs of its forward besides its input: all of it, whether in [`Forward::save`] or in [`Saved`].
    pub saved: Bytes,
    /// What it needs while it runs forward for its output.
    pub forward_workspace: Bytes,
    /// What it needs while it runs backward, and while it runs forward for its internals just before. A forward for both, where internals
    /// are kept, is given the forward workspace.
    pub backward_workspace: Bytes,
}

impl LayerSizes {
    /// Those of a layer whose framework keeps a graph of `graph` bytes from forward to backward, outside the store: as much again is needed while
    /// it is built for the output alone, and while gradients pass through it.
    ///
    /// ```
    /// # use lazy_model::Bytes;
    /// # use lazy_runtime::LayerSizes;
    /// let sizes = LayerSizes::graph(Bytes(1024), Bytes(12 * 1024));
    /// assert_eq!((sizes.output, sizes.saved), (Bytes(1024), sizes.backward_workspace));
    /// ```
    pub fn graph(output: Bytes, graph: Bytes) -> LayerSizes {
        LayerSizes { output, saved: graph, forward_workspace: graph, backward_workspace: graph }
    }
}

/// Names a parameter. Two owners that declare the same id share one parameter, as tied embeddings do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ParameterId(pub usize);

/// A parameter, as each of its owners declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Which.
    pub id: ParameterId,
    /// For messages.
    pub name: String,
    /// Its weights, where the runtime keeps them; zero where the layer keeps them itself.
    pub weights: Bytes,
    /// Its gradient, where the runtime keeps it; zero where the layer keeps it itself.
    pub gradient: Bytes,
}

impl Parameter {
    /// A parameter of `elements` float32 values that the runtime keeps, with a gradient of as many.
    pub fn f32(id: usize, name: impl Into<String>, elements: usize) -> Parameter {
        let bytes = Bytes(4 * elements as u64);
        Parameter { id: ParameterId(id), name: name.into(), weights: bytes, gradient: bytes }
    }

    /// A parameter whose weights and gradient the layer keeps itself: the runtime says when the gradient is final.
    pub fn own(id: usize, name: impl Into<String>) -> Parameter {
        Parameter { id: ParameterId(id), name: name.into(), weights: Bytes::ZERO, gradient: Bytes::ZERO }
    }
}

/// A layer's forward.
pub struct Forward<'a> {
    /// Its weights.
    pub weights: Weights<'a>,
    /// Its input boundary.
    pub x: Input<'a>,
    /// Its output boundary; absent when only internals are wanted.
    pub out: Option<Output<'a>>,
    /// Present when internals are wanted: [`LayerSizes::saved`] bytes to put them in, for layers that do.
    pub save: Option<Output<'a>>,
    /// Bytes to work in: [`LayerSizes::forward_workspace`] where an output is wanted, else [`LayerSizes::backward_workspace`].
    pub workspace: Output<'a>,
}

/// A layer's backward.
pub struct Backward<'a> {
    /// Its weights.
    pub weights: Weights<'a>,
    /// Its input boundary.
    pub x: Input<'a>,
    /// What its forward wrote to [`Forward::save`].
    pub internals: Input<'a>,
    /// What its forward returned.
    pub saved: Saved,
    /// Gradient of its output.
    pub dy: Input<'a>,
    /// Gradient of its input.
    pub dx: Output<'a>,
    /// Gradients of its parameters, to be added to.
    pub grads: Grads<'a>,
    /// Bytes to work in: [`LayerSizes::backward_workspace`].
    pub workspace: Output<'a>,
}

/// The loss.
pub struct Loss<'a> {
    /// Its weights.
    pub weights: Weights<'a>,
    /// The last boundary.
    pub x: Input<'a>,
    /// Gradient of the loss with respect to `x`; absent in an evaluation.
    pub dx: Option<Output<'a>>,
    /// Gradients of its parameters, to be added to; not in an evaluation.
    pub grads: Grads<'a>,
    /// The loss of the micro-batch: one float32.
    pub loss: Output<'a>,
    /// Bytes to work in, as many as [`Epilogue::workspace`] says.
    pub workspace: Output<'a>,
}

/// One layer of a model: reads boundary `l`, writes boundary `l + 1`.
///
/// Boundaries are bytes, laid out as the layer's neighbours agree. On the host device a layer computes when it is called, on the thread it
/// is called on; on a GPU it puts its work on [`Context::stream`] and waits for nothing. It keeps nothing between calls but what it returns
/// as [`Saved`], and the same call gives the same bytes.
pub trait Layer: Send + Sync {
    /// What it takes.
    fn sizes(&self) -> LayerSizes;

    /// Its parameters.
    fn parameters(&self) -> Vec<Parameter> {
        Vec::new()
    }

    /// Computes the output from the input, and what backward needs besides the input where that is asked for.
    ///
    /// # Errors
    /// Whatever the layer fails with; the step is abandoned.
    fn forward(&self, cx: &Context<'_>, call: Forward<'_>) -> Result<Saved, LayerError>;

    /// From the gradient of the output to the gradient of the input and of the parameters.
    ///
    /// # Errors
    /// Whatever the layer fails with; the step is abandoned.
    fn backward(&self, cx: &Context<'_>, call: Backward<'_>) -> Result<(), LayerError>;
}

/// Makes boundary 0.
pub trait Prologue: Send + Sync {
    /// Size of boundary 0.
    fn output_bytes(&self) -> Bytes;

    /// Its parameters.
    fn parameters(&self) -> Vec<Parameter> {
        Vec::new()
    }

    /// Writes boundary 0 of the micro-batch that `cx` names.
    ///
    /// # Errors
    /// Whatever it fails with; the step is abandoned.
    fn forward(&self, cx: &Context<'_>, weights: Weights<'_>, out: Output<'_>) -> Result<(), LayerError>;

    /// Takes the gradient of boundary 0. Where there is nothing to train, there is nothing to write here.
    ///
    /// # Errors
    /// Whatever it fails with; the step is abandoned. As it stands, when there are parameters.
    fn backward(
        &self,
        _: &Context<'_>,
        _: Weights<'_>,
        _: Input<'_>,
        _: Grads<'_>,
    ) -> Result<(), LayerError> {
        match self.parameters().first() {
            None => Ok(()),
            Some(Parameter { name, .. }) => {
                Err(format!("the prologue declares {name} and has no backward: write `Prologue::backward`")
                    .into())
            }
        }
    }
}

/// Turns the last boundary into a loss.
pub trait Epilogue: Send + Sync {
    /// What it needs while it runs.
    fn workspace(&self) -> Bytes {
        Bytes::ZERO
    }

    /// Its parameters.
    fn parameters(&self) -> Vec<Parameter> {
        Vec::new()
    }

    /// Loss of the micro-batch that `cx` names, and its gradients.
    ///
    /// # Errors
    /// Whatever it fails with; the step is abandoned.
    fn run(&self, cx: &Context<'_>, call: Loss<'_>) -> Result<(), LayerError>;
}
