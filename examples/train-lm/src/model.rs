//! The decoder as the executor sees it: prologue, layers, epilogue.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lazy_model::Bytes;
use lazy_runtime::candle::{CandleLayer, Parameter, tensor, write};
use lazy_runtime::{Context, Epilogue, Gradients, Layer, LayerError, Prologue};

use crate::decoder::{Decoder, IGNORED, StepContext, shifted_targets, with_slice};
use crate::dropout::DropoutKey;

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

/// A decoder, its gradients, and the data it is fed.
pub struct TrainedModel {
    /// Weights and arithmetic.
    pub decoder: Arc<Decoder>,
    /// Gradients of all parameters, numbered as in [`Decoder::parameters`].
    pub gradients: Arc<Gradients>,
    feed: Arc<Feed>,
    shape: Shape,
    dropout: f32,
}

/// What the prologue and the epilogue of a step work on, by micro-batch.
#[derive(Default)]
struct Feed {
    step: Mutex<StepFeed>,
}

#[derive(Default)]
struct StepFeed {
    ids: Vec<Arc<Vec<u32>>>,
    losses: Vec<f32>,
}

impl Feed {
    fn lock(&self) -> MutexGuard<'_, StepFeed> {
        self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ids(&self, cx: &Context) -> Result<Arc<Vec<u32>>, LayerError> {
        let ids = self.lock().ids.get(cx.micro_batch).cloned();
        ids.ok_or_else(|| format!("micro-batch {} was not fed", cx.micro_batch).into())
    }
}

impl TrainedModel {
    /// Wraps a decoder for micro-batches of one shape.
    pub fn new(decoder: Decoder, shape: Shape, dropout: f32) -> Self {
        let elements: Vec<usize> = decoder.parameters().iter().map(|(_, v)| v.elem_count()).collect();
        TrainedModel {
            decoder: Arc::new(decoder),
            gradients: Arc::new(Gradients::new(&elements)),
            feed: Arc::default(),
            shape,
            dropout,
        }
    }

    /// Sets the token ids of all micro-batches of the coming step.
    pub fn feed(&self, micro_batches: Vec<Vec<u32>>) {
        let mut feed = self.feed.lock();
        feed.losses = vec![0.0; micro_batches.len()];
        feed.ids = micro_batches.into_iter().map(Arc::new).collect();
    }

    /// Mean loss over all tokens of the last step, in nats.
    pub fn loss(&self) -> f32 {
        // In a fixed order: the same sum for every schedule.
        self.feed.lock().losses.iter().sum()
    }

    /// Size of each boundary.
    pub fn boundary_bytes(&self) -> Bytes {
        Bytes((self.shape.tokens() * self.decoder.spec().hidden * size_of::<f32>()) as u64)
    }

    fn dims(&self) -> (usize, usize, usize) {
        (self.shape.batch, self.shape.seq, self.decoder.spec().hidden)
    }

    /// The embedding.
    pub fn prologue(&self) -> Arc<dyn Prologue> {
        Arc::new(Embedding {
            decoder: Arc::clone(&self.decoder),
            gradients: Arc::clone(&self.gradients),
            feed: Arc::clone(&self.feed),
            shape: self.shape,
        })
    }

    /// The layers.
    pub fn layers(&self) -> Vec<Arc<dyn Layer>> {
        // A kept graph also holds the layer's input and its output.
        let boundary = self.boundary_bytes();
        let declared = self.decoder.declared(self.shape.batch, self.shape.seq);
        let saved = declared.layer_internals_total() + boundary + boundary;
        (0..self.decoder.spec().layers()).map(|layer| self.layer(layer, saved)).collect()
    }

    fn layer(&self, layer: usize, saved: Bytes) -> Arc<dyn Layer> {
        let named = self.decoder.parameters();
        let parameters = self.decoder.layer_parameters(layer).map(|number| Parameter {
            number,
            name: named[number].0.clone(),
            variable: named[number].1.clone(),
        });
        let (decoder, dropout) = (Arc::clone(&self.decoder), self.dropout);
        let forward = move |cx: &Context, x: &candle_core::Tensor| {
            let key = DropoutKey { seed: cx.seed, step: cx.step, micro_batch: cx.micro_batch as u64 };
            Ok(decoder.layer_forward(layer, x, &StepContext { dropout, key })?)
        };
        let gradients = Arc::clone(&self.gradients);
        Arc::new(CandleLayer::new(self.dims(), forward, parameters.collect(), gradients, saved))
    }

    /// Final norm, head and loss.
    pub fn epilogue(&self) -> Arc<dyn Epilogue> {
        Arc::new(Loss {
            decoder: Arc::clone(&self.decoder),
            gradients: Arc::clone(&self.gradients),
            feed: Arc::clone(&self.feed),
            shape: self.shape,
        })
    }
}

struct Embedding {
    decoder: Arc<Decoder>,
    gradients: Arc<Gradients>,
    feed: Arc<Feed>,
    shape: Shape,
}

impl Prologue for Embedding {
    fn output_bytes(&self) -> Bytes {
        Bytes((self.shape.tokens() * self.decoder.spec().hidden * size_of::<f32>()) as u64)
    }

    fn forward(&self, cx: &Context, out: &mut [u8]) -> Result<(), LayerError> {
        write(&self.decoder.embed(&self.feed.ids(cx)?, self.shape.batch, self.shape.seq)?, out)
    }

    fn backward(&self, cx: &Context, dy: &[u8]) -> Result<(), LayerError> {
        let dims = (self.shape.batch, self.shape.seq, self.decoder.spec().hidden);
        let gradient = self.decoder.embed_backward(&self.feed.ids(cx)?, &tensor(dy, &dims.into())?)?;
        with_slice(&gradient, |values| self.gradients.add(0, values))??;
        Ok(())
    }
}

struct Loss {
    decoder: Arc<Decoder>,
    gradients: Arc<Gradients>,
    feed: Arc<Feed>,
    shape: Shape,
}

impl Epilogue for Loss {
    fn run(&self, cx: &Context, x: &[u8], dx: &mut [u8]) -> Result<(), LayerError> {
        let dims = (self.shape.batch, self.shape.seq, self.decoder.spec().hidden);
        let targets = shifted_targets(&self.feed.ids(cx)?, self.shape.seq);
        let counted = targets.iter().filter(|&&t| t != IGNORED).count();
        let micro_batches = self.feed.lock().ids.len();
        // The mean runs over the tokens of all micro-batches, so their gradients simply add up.
        let result = self.decoder.loss(&tensor(x, &dims.into())?, &targets, counted * micro_batches)?;
        write(&result.dh, dx)?;
        for (number, gradient) in &result.gradients {
            with_slice(gradient, |values| self.gradients.add(*number, values))??;
        }
        if let Some(loss) = self.feed.lock().losses.get_mut(cx.micro_batch) {
            *loss = result.loss;
        }
        Ok(())
    }
}
