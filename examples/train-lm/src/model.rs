//! The decoder as the executor sees it: prologue, layers, epilogue.

use std::sync::Arc;

use candle_core::Tensor;
use lazy_model::Bytes;
use lazy_runtime::candle::{CandleLayer, Parameter, Weight, tensor, write};
use lazy_runtime::{
    Context, Epilogue, Gradients, Grads, Input, Layer, LayerError, LayerSizes, Loss, Model, Output, Phase,
    Prologue, RuntimeError, Weights,
};

use crate::batch::Batch;
use crate::decoder::{Decoder, StepContext, with_slice};
use crate::dropout::DropoutKey;
use crate::homes::WeightsHome;

/// Batch and sequence length of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Rows.
    pub batch: usize,
    /// Tokens in a row.
    pub seq: usize,
}

impl Shape {
    /// Tokens in a micro-batch.
    pub const fn tokens(&self) -> usize {
        self.batch * self.seq
    }
}

/// A decoder on the host device and its gradients, for steps of one shape. Weights and gradients of layers that the decoder does not have
/// are streamed from host RAM.
#[derive(Clone)]
pub struct HostModel {
    /// Weights and arithmetic.
    pub decoder: Arc<Decoder>,
    /// Gradients of the decoder's parameters, numbered as in [`Decoder::parameters`].
    pub gradients: Arc<Gradients>,
    shape: Shape,
    micro_batches: usize,
    dropout: f32,
}

impl HostModel {
    /// Wraps a decoder for micro-batches of one shape, so many in a step.
    pub fn new(decoder: Decoder, shape: Shape, micro_batches: usize, dropout: f32) -> Self {
        let elements: Vec<usize> = decoder.parameters().iter().map(|(_, v)| v.elem_count()).collect();
        HostModel {
            decoder: Arc::new(decoder),
            gradients: Arc::new(Gradients::new(&elements)),
            shape,
            micro_batches,
            dropout,
        }
    }

    /// The decoder as the executor takes it. A micro-batch's loss is its part of the mean over the tokens of all: their sum is the step's.
    ///
    /// # Errors
    /// When the step has no micro-batches.
    pub fn model(&self) -> Result<Model, RuntimeError> {
        let home = if self.decoder.has_layers() { WeightsHome::Hbm } else { WeightsHome::Host };
        let options = home.options(self.micro_batches);
        Model::new(self.prologue(), self.layers(), self.epilogue(), options)
    }

    /// Size of each boundary.
    pub fn boundary_bytes(&self) -> Bytes {
        Bytes((self.shape.tokens() * self.decoder.spec().hidden * size_of::<f32>()) as u64)
    }

    /// Weights and gradients that lie outside the store.
    pub fn own_bytes(&self) -> Bytes {
        let elements: usize = self.decoder.parameters().iter().map(|(_, var)| var.elem_count()).sum();
        Bytes(2 * (elements * size_of::<f32>()) as u64)
    }

    fn dims(&self) -> (usize, usize, usize) {
        (self.shape.batch, self.shape.seq, self.decoder.spec().hidden)
    }

    /// The embedding.
    pub fn prologue(&self) -> Arc<dyn Prologue> {
        Arc::new(Ends::of(self))
    }

    /// The layers.
    pub fn layers(&self) -> Vec<Arc<dyn Layer>> {
        // A kept graph also holds the layer's input and its output.
        let boundary = self.boundary_bytes();
        let declared = self.decoder.declared(self.shape.batch, self.shape.seq);
        let graph = declared.layer_internals_total() + boundary + boundary;
        // Of weights that come in with a call it holds a copy.
        let saved = graph + if self.decoder.has_layers() { Bytes::ZERO } else { self.layer_bytes() };
        let sizes = LayerSizes {
            output: boundary,
            saved,
            // A layer that is run for its output alone holds, one after the other, what its graph would keep.
            forward_workspace: saved + declared.layer_workspace,
            backward_workspace: declared.layer_gradients + declared.layer_workspace,
        };
        (0..self.decoder.spec().layers()).map(|layer| self.layer(layer, sizes)).collect()
    }

    /// Weights of a layer, which are all of one kind.
    fn layer_bytes(&self) -> Bytes {
        let layer = self.decoder.spec().parameters();
        let elements = |p: &lazy_model::Parameter| p.shape.iter().product::<usize>();
        let count: usize = layer[self.decoder.layer_parameters(0)].iter().map(elements).sum();
        Bytes((count * size_of::<f32>()) as u64)
    }

    fn layer(&self, layer: usize, sizes: LayerSizes) -> Arc<dyn Layer> {
        let (decoder, dropout) = (Arc::clone(&self.decoder), self.dropout);
        let context = move |cx: &Context<'_>| {
            let key = DropoutKey { seed: cx.seed, step: cx.step, micro_batch: cx.micro_batch as u64 };
            let dropout = if cx.phase == Phase::Evaluation { 0.0 } else { dropout };
            StepContext { dropout, key }
        };
        let numbers = self.decoder.layer_parameters(layer);
        if !self.decoder.has_layers() {
            let shapes = self.decoder.spec().parameters();
            let weights = numbers.map(|id| {
                let lazy_model::Parameter { name, shape } = &shapes[id];
                Weight { id, name: name.clone(), shape: shape.as_slice().into() }
            });
            let forward = move |cx: &Context<'_>, weights: &[Tensor], x: &Tensor| {
                Ok(decoder.layer_forward_with(layer, weights, x, &context(cx))?)
            };
            return Arc::new(CandleLayer::with_weights(self.dims(), forward, weights.collect(), sizes));
        }
        let named = self.decoder.parameters();
        let parameters = numbers.map(|number| Parameter {
            number,
            name: named[number].0.clone(),
            variable: named[number].1.clone(),
        });
        let forward =
            move |cx: &Context<'_>, x: &Tensor| Ok(decoder.layer_forward(layer, x, &context(cx))?);
        let gradients = Arc::clone(&self.gradients);
        Arc::new(CandleLayer::new(self.dims(), forward, parameters.collect(), gradients, sizes))
    }

    /// Final norm, head and loss.
    pub fn epilogue(&self) -> Arc<dyn Epilogue> {
        Arc::new(Ends::of(self))
    }
}

/// Embedding and loss, which share the embedding's weights where those are tied.
struct Ends {
    decoder: Arc<Decoder>,
    gradients: Arc<Gradients>,
    shape: Shape,
}

impl Ends {
    fn of(model: &HostModel) -> Ends {
        Ends {
            decoder: Arc::clone(&model.decoder),
            gradients: Arc::clone(&model.gradients),
            shape: model.shape,
        }
    }

    fn dims(&self) -> (usize, usize, usize) {
        (self.shape.batch, self.shape.seq, self.decoder.spec().hidden)
    }

    fn own(&self, number: usize) -> lazy_runtime::Parameter {
        lazy_runtime::Parameter::own(number, self.decoder.parameters()[number].0.as_str())
    }
}

impl Prologue for Ends {
    fn output_bytes(&self) -> Bytes {
        Bytes((self.shape.tokens() * self.decoder.spec().hidden * size_of::<f32>()) as u64)
    }

    fn parameters(&self) -> Vec<lazy_runtime::Parameter> {
        vec![self.own(0)]
    }

    fn forward(&self, cx: &Context<'_>, _: Weights<'_>, out: Output<'_>) -> Result<(), LayerError> {
        write(
            &self.decoder.embed(&cx.inputs::<Batch>()?.ids, self.shape.batch, self.shape.seq)?,
            out.bytes()?,
        )
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        _: Weights<'_>,
        dy: Input<'_>,
        _: Grads<'_>,
    ) -> Result<(), LayerError> {
        let dy = tensor(dy.bytes()?, &self.dims().into())?;
        let gradient = self.decoder.embed_backward(&cx.inputs::<Batch>()?.ids, &dy)?;
        with_slice(&gradient, |values| self.gradients.add(0, values))??;
        Ok(())
    }
}

impl Epilogue for Ends {
    fn parameters(&self) -> Vec<lazy_runtime::Parameter> {
        [self.decoder.norm_index(), self.decoder.head_index()].map(|number| self.own(number)).into()
    }

    fn workspace(&self) -> Bytes {
        self.decoder.declared(self.shape.batch, self.shape.seq).loss_workspace
    }

    fn run(&self, cx: &Context<'_>, call: Loss<'_>) -> Result<(), LayerError> {
        let batch = cx.inputs::<Batch>()?;
        let h = tensor(call.x.bytes()?, &self.dims().into())?;
        let Some(dx) = call.dx else {
            call.loss.f32()?[0] = self.decoder.evaluate(&h, &batch.targets, batch.tokens)?;
            return Ok(());
        };
        let result = self.decoder.loss(&h, &batch.targets, batch.tokens)?;
        call.loss.f32()?[0] = result.loss;
        write(&result.dh, dx.bytes()?)?;
        for (number, gradient) in &result.gradients {
            with_slice(gradient, |values| self.gradients.add(*number, values))??;
        }
        Ok(())
    }
}
