//! What a layer holds for a moment while it runs.
//!
//! Both passes are walked operation by operation: what each reads and writes beside the tensors that the caller accounts for
//! (boundaries and their gradients, weights and theirs, what is saved) is added up, and the largest sum counts. One kernel an operation,
//! out of place, and a tensor is freed after its last use.

use super::Workload;
use super::sizer::{CHUNK, FP32, Sizer};
use crate::config::{Attention, DeltaNet, LatentAttention, LayerShape, Mixer, Mlp, ModelSpec, MoeMlp};
use crate::units::{Bytes, LayerIndex};

/// What a layer allocates while it runs and frees again, besides its input and output (or their gradients), its weights (or
/// theirs), and what [`ModelSpec::saved_tensors`] lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerWorkspace {
    /// Of a forward that saves nothing. A forward that saves holds the saved tensors in the place of most of this.
    pub forward: Bytes,
    /// Of a backward: gradients of what was saved, and what its kernels recompute. Gradients of weights are added in place.
    pub backward: Bytes,
}

impl ModelSpec {
    /// The transient memory of one layer whose forward saves the operands of its backward. See `docs/model.md` for the moments that are compared.
    ///
    /// # Panics
    /// Where the model has no such layer.
    pub fn layer_workspace(&self, layer: LayerIndex, work: &Workload) -> LayerWorkspace {
        let shape = self.layer(layer);
        let sizer = Sizer::new(work);
        LayerWorkspace {
            forward: forward(sizer, shape, self.hidden),
            backward: backward(sizer, shape, self.hidden),
        }
    }
}

/// The largest of several moments.
struct Peak {
    sizer: Sizer,
    bytes: Bytes,
}

impl Peak {
    /// A moment at which `width` elements a token exist, and `more`.
    fn with(&mut self, width: usize, more: Bytes) {
        self.bytes = self.bytes.max(self.sizer.wide(width) + more);
    }

    fn wide(&mut self, width: usize) {
        self.with(width, Bytes::ZERO);
    }
}

fn forward(sizer: Sizer, layer: &LayerShape, h: usize) -> Bytes {
    let mut peak = Peak { sizer, bytes: Bytes::ZERO };
    let mixed = match &layer.mixer {
        Mixer::Attention(attention) => attention_forward(&mut peak, attention, h),
        Mixer::Latent(mla) => latent_forward(&mut peak, mla, h),
        Mixer::Linear(net) => linear_forward(&mut peak, net, h),
    };
    peak.wide(mixed + h);
    if layer.norms.after() {
        peak.wide(2 * h);
    }
    // The residual is alive from here on.
    match &layer.mlp {
        Mlp::Dense(mlp) => {
            let m = mlp.intermediate;
            peak.wide(h + h + 2 * m);
            peak.wide(h + 3 * m);
            peak.wide(h + m + h);
        }
        Mlp::Moe(moe) => moe_forward(&mut peak, moe, h),
    }
    if layer.norms.after() {
        peak.wide(3 * h);
    }
    peak.bytes
}

/// Up to the mixer's result, whose width is returned.
fn attention_forward(peak: &mut Peak, a: &Attention, h: usize) -> usize {
    let (q, k) = (a.query_width(), a.kv_width());
    let gate = if a.output_gate { q } else { 0 };
    peak.wide(h + q + gate + 2 * k);
    // Norms and rotation of queries and keys.
    peak.wide(2 * q + 3 * k + gate);
    softmax_forward(peak, a.heads, [q, k, k, q], if a.kv_heads < a.heads { 2 * q } else { 0 }, gate);
    if a.output_gate {
        peak.wide(3 * q);
    }
    q
}

/// Attention over queries, keys, values of these widths into an output of the last; eager products repeat keys and values
/// to `repeated` elements a token.
fn softmax_forward(peak: &mut Peak, heads: usize, [q, k, v, out]: [usize; 4], repeated: usize, gate: usize) {
    let element = peak.sizer.element;
    if peak.sizer.eager() {
        // Scores and their softmax in fp32, or that softmax and itself in the element's type, or scores and the masked ones.
        let pairs = peak.sizer.scores(heads, (element + FP32).max(2 * element));
        peak.with(q + k + v + repeated + gate, pairs);
        peak.with(q + k + v + repeated + gate + out, peak.sizer.scores(heads, element));
    } else {
        peak.with(q + k + v + gate + out, peak.sizer.fp32(heads));
    }
}

fn latent_forward(peak: &mut Peak, a: &LatentAttention, h: usize) -> usize {
    let (q, v, latent) = (a.query_width(), a.value_width(), a.kv_lora_rank + a.rope_dim);
    let up = a.heads * (a.nope_dim + a.value_dim);
    match a.q_lora_rank {
        Some(rank) => {
            peak.wide(h + rank + latent);
            peak.wide(2 * (rank + latent));
            peak.wide(rank + q + latent);
        }
        None => peak.wide(h + q + latent),
    }
    peak.wide(q + latent + up);
    // Queries and keys are assembled from their parts, values cut out.
    peak.wide(q + up + 2 * q + v);
    softmax_forward(peak, a.heads, [q, q, v, v], 0, 0);
    v
}

fn linear_forward(peak: &mut Peak, net: &DeltaNet, h: usize) -> usize {
    let (conv, v, heads) = (net.conv_width(), net.value_width(), net.value_heads);
    peak.wide(h + conv + v + 2 * heads);
    peak.wide(2 * conv + v + 2 * heads);
    // Inverse, transformed keys and values, corrected values, output; states; decay and its sum.
    let inside = heads * (CHUNK + net.key_dim + 2 * net.value_dim) + v;
    let more = peak.sizer.states(net) + peak.sizer.fp32(2 * heads);
    peak.with(conv + v + heads + inside, more);
    peak.wide(3 * v);
    v
}

fn moe_forward(peak: &mut Peak, moe: &MoeMlp, h: usize) {
    let (rows, work) = (moe.top_k * h, moe.top_k * moe.intermediate);
    // Residual, normed residual, and what routes: scores, weights, indices.
    let routing = peak.sizer.fp32(moe.experts + moe.top_k) + peak.sizer.numbers(moe.top_k, 8);
    let base = 2 * h;
    peak.with(base + moe.experts, routing);
    peak.with(base + rows + 2 * work, routing);
    peak.with(base + 3 * work, routing);
    peak.with(base + work + rows, routing);
    peak.with(base + 2 * rows, routing);
    if moe.shared > 0 {
        peak.wide(base + h + 3 * moe.shared);
        peak.wide(base + h + moe.shared + 2 * h);
    }
}

fn backward(sizer: Sizer, layer: &LayerShape, h: usize) -> Bytes {
    let mut peak = Peak { sizer, bytes: Bytes::ZERO };
    let after = if layer.norms.after() { h } else { 0 };
    match &layer.mlp {
        Mlp::Dense(mlp) => {
            let m = mlp.intermediate;
            peak.wide(after + m);
            peak.wide(3 * m);
            // Gradients through gate and up come one after the other and are added.
            peak.wide(2 * m + 2 * h);
        }
        Mlp::Moe(moe) => moe_backward(&mut peak, moe, h, after),
    }
    peak.wide(2 * h);
    // The residual's gradient is alive from here on.
    match &layer.mixer {
        Mixer::Attention(attention) => attention_backward(&mut peak, attention, h, after),
        Mixer::Latent(mla) => latent_backward(&mut peak, mla, h, after),
        Mixer::Linear(net) => linear_backward(&mut peak, net, h, after),
    }
    peak.wide(3 * h);
    peak.bytes
}

fn moe_backward(peak: &mut Peak, moe: &MoeMlp, h: usize, after: usize) {
    let (rows, work) = (moe.top_k * h, moe.top_k * moe.intermediate);
    // The gradient of the normed residual gathers what comes back.
    let routing = peak.sizer.fp32(moe.experts + moe.top_k);
    peak.with(after + h + rows + work, routing);
    peak.with(after + h + 3 * work, routing);
    peak.with(after + h + 2 * work + 2 * rows, routing);
    peak.with(after + 2 * h + moe.experts, routing);
    if moe.shared > 0 {
        peak.wide(after + 2 * h + 3 * moe.shared);
        peak.wide(after + 3 * h + 2 * moe.shared);
    }
}

fn attention_backward(peak: &mut Peak, a: &Attention, h: usize, after: usize) {
    let (q, k) = (a.query_width(), a.kv_width());
    let gate = if a.output_gate { q } else { 0 };
    peak.wide(h + after + q);
    if a.output_gate {
        peak.wide(h + 3 * q);
    }
    let repeated = if a.kv_heads < a.heads { 2 * q } else { 0 };
    softmax_backward(peak, a.heads, [q, k, k, q], repeated, h + gate);
    peak.wide(h + gate + 2 * q + 3 * k);
    peak.wide(h + gate + q + 2 * k + 2 * h);
}

/// Gradients of queries, keys and values from that of the output, `base` elements a token being alive around them.
fn softmax_backward(peak: &mut Peak, heads: usize, [q, k, v, out]: [usize; 4], repeated: usize, base: usize) {
    let gradients = base + out + q + k + v;
    if peak.sizer.eager() {
        let pairs = peak.sizer.scores(heads, 2 * peak.sizer.element.max(FP32));
        peak.with(gradients + repeated, pairs);
    } else {
        // The kernel sums the queries' gradient in fp32, and needs a number for each row of the output.
        let more = peak.sizer.fp32(q + heads);
        peak.with(gradients, more);
    }
}

fn latent_backward(peak: &mut Peak, a: &LatentAttention, h: usize, after: usize) {
    let (q, v, latent) = (a.query_width(), a.value_width(), a.kv_lora_rank + a.rope_dim);
    let up = a.heads * (a.nope_dim + a.value_dim);
    peak.wide(h + after + v);
    softmax_backward(peak, a.heads, [q, q, v, v], 0, h);
    peak.wide(h + 2 * q + v + q + up);
    peak.wide(h + q + up + latent);
    let queries = match a.q_lora_rank {
        Some(rank) => {
            peak.wide(h + q + 2 * rank + 2 * latent);
            rank
        }
        None => q,
    };
    peak.wide(h + queries + latent + 2 * h);
}

fn linear_backward(peak: &mut Peak, net: &DeltaNet, h: usize, after: usize) {
    let (conv, v, heads) = (net.conv_width(), net.value_width(), net.value_heads);
    peak.wide(h + after + v);
    peak.wide(h + 3 * v);
    // Recomputed: transformed keys and values, corrected values, states. Gradients: of all of these, of queries, keys and values, of the
    // output and its gate; in fp32 those of the inverse, the decay and beta.
    let recomputed = heads * (net.key_dim + 2 * net.value_dim);
    let gradients = conv + heads * (net.key_dim + net.value_dim) + 2 * v;
    let more = peak.sizer.states(net) * 2 + peak.sizer.fp32(heads * (CHUNK + 2));
    peak.with(h + recomputed + gradients, more);
    peak.wide(h + v + 2 * conv + 2 * heads);
    peak.wide(h + conv + v + 2 * heads + 2 * h);
}
