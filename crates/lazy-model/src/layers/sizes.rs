//! Bytes of activations: boundaries, what a layer's backward needs, what a layer needs while it runs, and the loss.

use super::sizer::{CHUNK, FP32, Sizer};
use super::{Saving, Workload};
use crate::config::{Attention, DeltaNet, LatentAttention, LayerShape, Mixer, Mlp, ModelSpec, MoeMlp};
use crate::units::{Bytes, LayerIndex};

/// Bytes of the index of an expert.
const INDEX: u64 = 8;

const Q_BEFORE_NORM: &str = "q before norm";

/// A tensor that the backward of a layer needs besides the layer's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedTensor {
    /// What it holds.
    pub name: &'static str,
    /// Its size.
    pub bytes: Bytes,
    /// Made element by element, norms and rotation included, from others that are saved and the layer's input: a backward may make
    /// it again instead ([`Saving::Products`](super::Saving::Products)).
    pub remade: bool,
}

/// Bytes of final norm, head and loss when the logits of only some tokens exist at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LossBytes {
    /// Tokens whose logits exist at a time.
    pub chunk_tokens: u64,
    /// Their logits.
    pub logits: Bytes,
    /// All that exists while a chunk is worked on: normed input and its gradient, logits (which become their gradient), their softmax
    /// in fp32, and the loss of each token.
    pub workspace: Bytes,
    /// What the chunks leave behind: the gradient of the last boundary.
    pub gradient: Bytes,
}

/// Collects the saved tensors of a layer.
struct Saved {
    sizer: Sizer,
    list: Vec<SavedTensor>,
}

impl Saved {
    fn put(&mut self, name: &'static str, bytes: Bytes) {
        self.list.push(SavedTensor { name, bytes, remade: false });
    }

    fn wide(&mut self, name: &'static str, width: usize) {
        self.put(name, self.sizer.wide(width));
    }

    fn fp32(&mut self, name: &'static str, width: usize) {
        self.put(name, self.sizer.fp32(width));
    }

    /// A tensor that can be made again.
    fn remade(&mut self, name: &'static str, width: usize) {
        self.list.push(SavedTensor { name, bytes: self.sizer.wide(width), remade: true });
    }

    /// A norm's reciprocal RMS of so many rows a token.
    fn rrms(&mut self, name: &'static str, rows: usize) {
        self.list.push(SavedTensor { name, bytes: self.sizer.fp32(rows), remade: true });
    }

    fn attention(&mut self, a: &Attention) {
        let (q, k) = (a.query_width(), a.kv_width());
        if a.qk_norm {
            self.wide(Q_BEFORE_NORM, q);
            self.wide("k before norm", k);
            self.rrms("q norm rrms", a.heads);
            self.rrms("k norm rrms", a.kv_heads);
        }
        self.softmax(a.heads, [q, k, k], [q, q], a.kv_heads < a.heads);
        self.wide("attention output", q);
        if a.output_gate {
            self.wide("output gate", q);
            self.remade("gated attention output", q);
        }
    }

    /// Queries, keys and values as attention takes them, and what the kernel keeps. `shared` heads are repeated by eager products.
    fn softmax(&mut self, heads: usize, [q, k, v]: [usize; 3], repeated: [usize; 2], shared: bool) {
        // Where a norm comes before the rotation, what goes into it is saved.
        let raw = self.list.iter().any(|tensor| tensor.name == Q_BEFORE_NORM);
        let rotated = if raw { Saved::remade } else { Saved::wide };
        rotated(self, "rotated q", q);
        if !self.sizer.eager() {
            rotated(self, "rotated k", k);
            self.wide("v", v);
            self.fp32("log-sum-exp", heads);
            return;
        }
        let [k, v] = if shared { repeated } else { [k, v] };
        self.wide("rotated k, repeated for its queries", k);
        self.wide("v, repeated for its queries", v);
        self.put("softmax in fp32", self.sizer.scores(heads, FP32));
        if self.sizer.element != FP32 {
            self.put("softmax", self.sizer.scores(heads, self.sizer.element));
        }
    }

    fn latent(&mut self, a: &LatentAttention) {
        if let Some(rank) = a.q_lora_rank {
            self.wide("q latent", rank);
            self.rrms("q latent norm rrms", 1);
            self.remade("normed q latent", rank);
        }
        self.wide("kv latent", a.kv_lora_rank);
        self.rrms("kv latent norm rrms", 1);
        self.remade("normed kv latent", a.kv_lora_rank);
        let (q, v) = (a.query_width(), a.value_width());
        self.softmax(a.heads, [q, q, v], [q, v], false);
        self.wide("attention output", v);
    }

    fn linear(&mut self, net: &DeltaNet) {
        let heads = net.value_heads;
        self.wide("convolution input", net.conv_width());
        self.wide("normed q", net.key_width());
        self.wide("normed k", net.key_width());
        self.fp32("q, k norm", 2 * net.key_heads);
        self.wide("v", net.value_width());
        self.fp32("decay before softplus", heads);
        self.fp32("softplus", heads);
        self.fp32("decay, summed up", heads);
        self.wide("beta", heads);
        self.wide("chunk inverse", heads * CHUNK);
        self.wide("delta rule output", net.value_width());
        self.wide("output gate", net.value_width());
        self.rrms("output norm rrms", heads);
        self.remade("gated output", net.value_width());
    }

    fn moe(&mut self, moe: &MoeMlp, hidden: usize) {
        let (k, m) = (moe.top_k, moe.intermediate);
        self.fp32("router scores", moe.experts);
        self.fp32("weights of chosen experts", k);
        self.put("chosen experts", self.sizer.numbers(k, INDEX));
        self.remade("dispatched tokens", k * hidden);
        self.wide("expert gate", k * m);
        self.wide("expert up", k * m);
        self.remade("expert gated product", k * m);
        self.wide("expert output", k * hidden);
        if moe.shared > 0 {
            self.wide("shared gate", moe.shared);
            self.wide("shared up", moe.shared);
            self.remade("shared gated product", moe.shared);
        }
        if moe.shared_gate() {
            self.wide("shared expert output", hidden);
            self.wide("shared expert's gate", 1);
        }
    }

    fn layer(&mut self, layer: &LayerShape, hidden: usize) {
        self.rrms("input norm rrms", 1);
        self.remade("normed input", hidden);
        match &layer.mixer {
            Mixer::Attention(attention) => self.attention(attention),
            Mixer::Latent(mla) => self.latent(mla),
            Mixer::Linear(net) => self.linear(net),
        }
        if layer.norms.after() {
            self.wide("mixer output", hidden);
            self.rrms("mixer output norm rrms", 1);
        }
        self.wide("residual after mixer", hidden);
        self.rrms("second norm rrms", 1);
        self.remade("normed residual", hidden);
        match &layer.mlp {
            Mlp::Dense(mlp) => {
                self.wide("gate", mlp.intermediate);
                self.wide("up", mlp.intermediate);
                self.remade("gated product", mlp.intermediate);
            }
            Mlp::Moe(moe) => self.moe(moe, hidden),
        }
        if layer.norms.after() {
            self.wide("MLP output", hidden);
            self.rrms("MLP output norm rrms", 1);
        }
    }
}

/// Sizes.
impl ModelSpec {
    /// The activation at a layer boundary: `T h e`.
    pub fn boundary_bytes(&self, work: &Workload) -> Bytes {
        Sizer::new(work).wide(self.hidden)
    }

    /// What the backward of one layer needs besides the layer's input, with one kernel an operation; or of that, what cannot be made again
    /// element by element ([`Saving`]). See `docs/model.md` for the table of tensors by kind of layer.
    ///
    /// # Panics
    /// Where the model has no such layer.
    pub fn saved_tensors(&self, layer: LayerIndex, work: &Workload) -> Vec<SavedTensor> {
        let mut saved = Saved { sizer: Sizer::new(work), list: Vec::with_capacity(32) };
        saved.layer(self.layer(layer), self.hidden);
        if work.saving() == Saving::Products {
            saved.list.retain(|tensor| !tensor.remade);
        }
        saved.list
    }

    /// The sum of [`saved_tensors`](Self::saved_tensors).
    ///
    /// # Panics
    /// Where the model has no such layer.
    pub fn internals_bytes(&self, layer: LayerIndex, work: &Workload) -> Bytes {
        self.saved_tensors(layer, work).iter().map(|tensor| tensor.bytes).sum()
    }

    /// Final norm, head and loss over `chunk_tokens` tokens at a time (at least one, at most all).
    pub fn loss_bytes(&self, work: &Workload, chunk_tokens: u64) -> LossBytes {
        let chunk = chunk_tokens.clamp(1, work.tokens());
        let element = work.element_bytes() as u64;
        let table = Bytes(chunk) * self.vocab as u64;
        let normed = Bytes(chunk) * self.hidden as u64 * element;
        LossBytes {
            chunk_tokens: chunk,
            logits: table * element,
            workspace: table * (element + FP32) + normed * 2 + Bytes(chunk) * FP32,
            gradient: self.boundary_bytes(work),
        }
    }
}
