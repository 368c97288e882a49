//! What the decoder's pieces hold in memory, declared before anything runs.

use lazy_model::Bytes;

use super::Decoder;
use super::attention::BLOCK;
use super::config::Geometry;

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
    /// gradients of intermediate tensors, the layer's weight gradients, the gradient of its input, and scratch memory.
    pub layer_gradients: Bytes,
    /// Scratch memory of a layer's forward.
    pub layer_workspace: Bytes,
    /// What [`Decoder::loss`] allocates: its results (the gradients of boundary N, norm and head) and the
    /// intermediate tensors of one group of rows and the scratch memory of their products.
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
        let results = tokens * c.hidden + c.hidden + c.vocab * c.hidden;
        let packing = packed(rows, c.vocab, c.hidden);
        let loss = results + rows * (3 * c.hidden + c.vocab) + packing;
        DeclaredSizes {
            boundary: floats(tokens * c.hidden),
            layer_internals: layer_internals(&self.geometry, tokens),
            layer_gradients: floats(layer_gradients(&self.geometry, batch, seq)),
            layer_workspace: floats(layer_workspace(&self.geometry, batch, seq)),
            loss_workspace: floats(loss),
            weights: all,
            gradients: all,
        }
    }
}

/// What `gemm` allocates to pack the operands of a linear map's forward or of one of its two gradients: blocks of at
/// most 512 along the summed dimension, and all of the other two.
fn packed(rows: usize, outputs: usize, inputs: usize) -> usize {
    let one = |k: usize, m: usize, n: usize| k.min(512) * (m + n);
    one(inputs, rows, outputs).max(one(outputs, rows, inputs)).max(one(rows, outputs, inputs))
}

/// The operands of a layer's operations, each of which the graph holds once.
fn layer_internals(c: &Geometry, tokens: usize) -> Vec<NamedBytes> {
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

/// Elements alive at the worst moment of backward, which is one of those listed. candle adds each gradient to a tensor
/// of zeros, so one that arrives exists three times for a moment: as it came, as zeros, and as the sum.
fn layer_gradients(c: &Geometry, batch: usize, seq: usize) -> usize {
    let (t, h, q, kv, i) = (batch * seq, c.hidden, c.query_width(), c.kv_width(), c.intermediate);
    let weights = c.parameters;
    let (wide, square) = (h * i, h * q);
    // Throughout, the gradient of the residual that goes around the block is alive.
    let moments = [
        // The gated activation: its own gradient, those of gate and up, and one of them being added.
        t * (5 * i + h) + wide,
        // The first linear map of gate and up: its operands, then its results being added.
        t * (2 * i + 2 * h) + 2 * wide + packed(t, i, h),
        t * (2 * i + 4 * h) + 4 * wide,
        // The second.
        t * (i + 3 * h) + 3 * wide + packed(t, i, h),
        t * (i + 4 * h) + 5 * wide,
        // Attention: its own gradient and those of its operands, which are first computed head by head.
        t * (h + 4 * q + 4 * kv) + 3 * wide + square + attention_scores(c, batch, seq),
        // The last of the linear maps of query, key and value.
        t * (q + kv + 3 * h) + weights + packed(t, q, h),
        t * (q + kv + 4 * h) + weights + 2 * square,
        // The first norm: four gradients as wide as the input.
        t * 5 * h + weights,
    ];
    moments.into_iter().max().unwrap_or(0)
}

/// The scores of a block of queries and their gradients, on each thread that works on attention.
fn attention_scores(c: &Geometry, batch: usize, seq: usize) -> usize {
    2 * rayon::current_num_threads().min(batch * c.kv_heads) * BLOCK.min(seq) * seq
}

/// The larger of two that do not exist at once: in attention, scores, and the heads' results before they are put in
/// their places; in a linear map, the packed operands.
fn layer_workspace(c: &Geometry, batch: usize, seq: usize) -> usize {
    let attention = attention_scores(c, batch, seq) + batch * seq * c.query_width();
    attention.max(packed(batch * seq, c.intermediate, c.hidden))
}
