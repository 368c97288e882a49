//! What the decoder's pieces hold in memory, declared before anything runs.

use lazy_model::{Bytes, LayerIndex, ModelSpec, Parameter};

use super::Decoder;
use super::attention::BLOCK;

/// A tensor, or a group of them, and its size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedBytes {
    /// What it is.
    pub name: &'static str,
    /// Its size.
    pub bytes: Bytes,
}

/// Bytes at one batch size and sequence length, float32.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeclaredSizes {
    /// One boundary: a layer's input, its output, or the gradient of either.
    pub boundary: Bytes,
    /// Every tensor the autograd graph of a layer keeps, except its input and its output, which are boundaries.
    pub layer_internals: Vec<NamedBytes>,
    /// Most that exists at one time during a layer's backward beside weights, boundaries, `dy` and the internals:
    /// gradients of intermediate tensors, the layer's weight gradients, and the gradient of its input.
    pub layer_gradients: Bytes,
    /// Scratch memory of a layer's operations.
    pub layer_workspace: Bytes,
    /// What [`Decoder::loss`] allocates: its results (the gradients of boundary N, norm and head) and the
    /// intermediate tensors of one group of rows.
    pub loss_workspace: Bytes,
    /// All weights.
    pub weights: Bytes,
    /// A gradient for every weight.
    pub gradients: Bytes,
}

impl DeclaredSizes {
    /// All tensors that the autograd graph of a layer keeps.
    pub fn layer_internals_total(&self) -> Bytes {
        self.layer_internals.iter().map(|part| part.bytes).sum()
    }
}

fn floats(count: usize) -> Bytes {
    Bytes(count as u64 * size_of::<f32>() as u64)
}

impl Decoder {
    /// What the pieces hold at a batch size and sequence length.
    pub fn declared(&self, batch: usize, seq: usize) -> DeclaredSizes {
        let c = &self.spec;
        let tokens = batch * seq;
        let all = floats(c.total_parameters() as usize);
        let rows = self.loss_rows.min(tokens);
        let loss = tokens * c.hidden + c.hidden + c.vocab * c.hidden + rows * (3 * c.hidden + c.vocab);
        DeclaredSizes {
            boundary: floats(tokens * c.hidden),
            layer_internals: layer_internals(c, tokens),
            layer_gradients: floats(layer_gradients(c, tokens)),
            layer_workspace: floats(layer_workspace(c, batch, seq)),
            loss_workspace: floats(loss),
            weights: all,
            gradients: all,
        }
    }
}

/// The operands of a layer's operations, each of which the graph holds once.
fn layer_internals(c: &ModelSpec, tokens: usize) -> Vec<NamedBytes> {
    let (h, q, kv, i) = (c.hidden, c.query_width(), c.kv_width(), c.intermediate);
    let part = |(name, width)| NamedBytes { name, bytes: floats(tokens * width) };
    let widths = [
        ("normed input of attention", h),
        ("query projection", q),
        ("key projection", kv),
        ("normed and rotated query", q),
        ("normed and rotated key", kv),
        ("value", kv),
        ("attention output", q),
        ("output projection", h),
        ("residual after attention", h),
        ("normed input of the feed-forward block", h),
        ("gate", i),
        ("up", i),
        ("gated", i),
        ("down projection", h),
    ];
    widths.map(part).to_vec()
}

/// Elements alive at the worst moment of backward. candle adds each gradient to a tensor of zeros, so one that
/// arrives exists three times for a moment: as it came, as zeros, and as the sum.
fn layer_gradients(c: &ModelSpec, tokens: usize) -> usize {
    let (h, q, kv, i) = (c.hidden, c.query_width(), c.kv_width(), c.intermediate);
    let shapes = c.layer_parameters(LayerIndex(0));
    let weights = c.parameters_per_layer() as usize;
    let feed_forward = 3 * h * i;
    let largest = shapes.iter().map(Parameter::elements).max().unwrap_or(0) as usize;
    // The gradient of the residual after attention is alive throughout the feed-forward block.
    let swiglu = tokens * (5 * i + h) + h * i;
    let gate_or_up = tokens * (2 * i + 4 * h) + feed_forward + 2 * largest;
    let attention = tokens * (h + 4 * q + 4 * kv) + feed_forward + h * q;
    let projections = tokens * (q + 2 * kv + 4 * h) + weights + 2 * largest;
    let first_norm = tokens * 5 * h + weights;
    [swiglu, gate_or_up, attention, projections, first_norm].into_iter().max().unwrap_or(0)
}

/// The scores of a block of queries and their gradients on each thread, and the heads' results before they are
/// put in their places.
fn layer_workspace(c: &ModelSpec, batch: usize, seq: usize) -> usize {
    let threads = rayon::current_num_threads().min(batch * c.kv_heads);
    let scores = 2 * threads * BLOCK.min(seq) * seq;
    scores + batch * seq * (c.query_width() + 2 * c.kv_width())
}
