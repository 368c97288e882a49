//! Arithmetic operations. A multiply-add counts as two; norms, activations, softmax and biases are left out.

use super::sizer::CHUNK;
use super::{Saving, Workload};
use crate::config::{DeltaNet, LayerShape, Mixer, Mlp, ModelSpec};
use crate::units::{LayerIndex, Seconds};

/// Work.
impl ModelSpec {
    /// Forward of one layer: two operations for every weight a token meets (of routed experts, those it is sent to), and those of
    /// the mixer on pairs of positions:
    ///
    /// - softmax attention `2 P heads (d_qk + d_v)`, where `P` counts the (query, key) pairs that the mask lets through: `batch * S (S + 1) / 2`
    ///   for causal attention, fewer where a window is active. A kernel that computes masked scores too does up to twice that.
    /// - the gated delta rule in chunks of `c = 64` positions, a value head and token: `4 d_k d_v + 2 d_k d_v` for reading and writing the state,
    ///   `2 c (2 d_k)` for the products of keys with keys and queries, `2 c (d_k + d_v)` for applying the inverse, `2 c d_v` for the chunk's own
    ///   output, masked pairs included. Inverting the chunk's triangle and the element-wise decays are left out.
    ///
    /// # Panics
    /// Where the model has no such layer.
    pub fn layer_forward_flops(&self, layer: LayerIndex, work: &Workload) -> f64 {
        let shape = self.layer(layer);
        let weights = shape.weights_met(self.hidden) as f64;
        2.0 * work.tokens() as f64 * weights + mixing_flops(shape, work)
    }

    /// Backward of one layer, recompute not counted: every product of the forward has two, one for each operand.
    ///
    /// # Panics
    /// Where the model has no such layer.
    pub fn layer_backward_flops(&self, layer: LayerIndex, work: &Workload) -> f64 {
        2.0 * self.layer_forward_flops(layer, work)
    }

    /// What recomputing one layer for its backward costs: its forward once more; with [`Saving::Products`] of a dense MLP without the last
    /// product, which makes the layer's output and nothing that is saved.
    ///
    /// # Panics
    /// Where the model has no such layer.
    pub fn layer_recompute_flops(&self, layer: LayerIndex, work: &Workload) -> f64 {
        let shape = self.layer(layer);
        let last = match (&shape.mlp, work.saving()) {
            // A norm behind it saves what it makes.
            (Mlp::Dense(mlp), Saving::Products) if !shape.norms.after() => {
                (self.hidden * mlp.intermediate) as f64
            }
            _ => 0.0,
        };
        self.layer_forward_flops(layer, work) - 2.0 * work.tokens() as f64 * last
    }

    /// Forward of the head: `2 T h V`. The embedding's look-up multiplies nothing.
    pub fn head_forward_flops(&self, work: &Workload) -> f64 {
        2.0 * work.tokens() as f64 * self.hidden as f64 * self.vocab as f64
    }

    /// Training operations a token by the usual convention: `6 * total_parameters`, attention and recompute not
    /// counted, embedding counted.
    pub fn flops_per_token_6n(&self) -> f64 {
        6.0 * self.total_parameters() as f64
    }

    /// Training operations a token by exact counting: three times the forward of all layers and of the head (the
    /// backward of a product is two products), recompute not counted.
    pub fn flops_per_token_exact(&self, work: &Workload) -> f64 {
        let layers: f64 = (0..self.layers()).map(|l| self.layer_forward_flops(LayerIndex(l), work)).sum();
        3.0 * (layers + self.head_forward_flops(work)) / work.tokens() as f64
    }

    /// TFLOP/s of a step of that length by the 6 N convention. A published run of the model of 26,895,998,464 parameters reports 225.65 for
    /// 72 x 1024 tokens in 52.819 s, which is 26.94e9 parameters rounded; the exact number gives 225.3.
    pub fn tflops_6n(&self, work: &Workload, step: Seconds) -> f64 {
        self.flops_per_token_6n() * work.tokens() as f64 / step.get() / 1e12
    }

    /// TFLOP/s of a step of that length by exact counting.
    pub fn tflops_exact(&self, work: &Workload, step: Seconds) -> f64 {
        self.flops_per_token_exact(work) * work.tokens() as f64 / step.get() / 1e12
    }

    /// Model FLOPs utilisation by the 6 N convention: the share of `peak_tflops`, the device's dense peak, that
    /// [`tflops_6n`](Self::tflops_6n) is.
    pub fn mfu_6n(&self, work: &Workload, step: Seconds, peak_tflops: f64) -> f64 {
        self.tflops_6n(work, step) / peak_tflops
    }

    /// Model FLOPs utilisation by exact counting.
    pub fn mfu_exact(&self, work: &Workload, step: Seconds, peak_tflops: f64) -> f64 {
        self.tflops_exact(work, step) / peak_tflops
    }
}

impl LayerShape {
    /// Elements of the matrices that one token is multiplied with.
    fn weights_met(&self, hidden: usize) -> u64 {
        let h = hidden as u64;
        let mixer = match &self.mixer {
            Mixer::Attention(a) => {
                let (q, k) = (a.query_width() as u64, a.kv_width() as u64);
                h * (2 * q + 2 * k + if a.output_gate { q } else { 0 })
            }
            Mixer::Latent(a) => {
                let q = a.query_width() as u64;
                let queries = a.q_lora_rank.map_or(h * q, |rank| rank as u64 * (h + q));
                let down = (a.kv_lora_rank + a.rope_dim) as u64 * h;
                let up = a.kv_lora_rank as u64 * (a.heads * (a.nope_dim + a.value_dim)) as u64;
                queries + down + up + h * a.value_width() as u64
            }
            Mixer::Linear(net) => {
                let (conv, value) = (net.conv_width() as u64, net.value_width() as u64);
                h * (conv + 2 * value + 2 * net.value_heads as u64) + conv * net.conv_kernel as u64
            }
        };
        let mlp = match &self.mlp {
            Mlp::Dense(mlp) => 3 * h * mlp.intermediate as u64,
            Mlp::Moe(moe) => {
                let width = moe.top_k * moe.intermediate + moe.shared;
                h * (3 * width + moe.experts + usize::from(moe.shared_gate())) as u64
            }
        };
        mixer + mlp
    }
}

/// What positions do with each other.
fn mixing_flops(layer: &LayerShape, work: &Workload) -> f64 {
    let sequence = work.sequence();
    let softmax = |heads: usize, widths: usize, window: Option<usize>| {
        2.0 * (heads * widths) as f64 * work.batch() as f64 * attended_pairs(window, sequence)
    };
    match &layer.mixer {
        Mixer::Attention(a) => softmax(a.heads, 2 * a.head_dim, a.window),
        Mixer::Latent(a) => softmax(a.heads, a.qk_dim() + a.value_dim, None),
        Mixer::Linear(net) => work.tokens() as f64 * net.value_heads as f64 * delta_rule_flops(net),
    }
}

/// The chunked delta rule, a token and value head.
fn delta_rule_flops(net: &DeltaNet) -> f64 {
    let (k, v) = (net.key_dim as f64, net.value_dim as f64);
    let state = 6.0 * k * v;
    let chunk = 2.0 * CHUNK as f64 * (2.0 * k + (k + v) + v);
    state + chunk
}

/// Pairs of positions of one sequence that the mask lets through.
fn attended_pairs(window: Option<usize>, sequence: usize) -> f64 {
    let s = sequence as f64;
    let triangle = |n: f64| n * (n + 1.0) / 2.0;
    match window {
        Some(window) if window < sequence => {
            let w = window as f64;
            triangle(w) + (s - w) * w
        }
        _ => triangle(s),
    }
}
