//! Parameters, sizes and work of a [`ModelSpec`].
//!
//! Symbols used below: `T = batch * sequence` tokens, `h` hidden, `q = heads * head_dim`, `k = kv_heads * head_dim`,
//! `m` intermediate, `V` vocabulary, `e` bytes of an activation element, `N` layers.

use crate::config::{LayerKind, ModelSpec};
use crate::error::Error;
use crate::units::{Bytes, LayerIndex};

/// Bytes of the statistics (reciprocal RMS, log-sum-exp) that kernels keep in fp32 whatever the activations are.
const STATISTIC_BYTES: u64 = 4;

/// A trainable tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Parameter {
    /// The name in Hugging Face checkpoints, for example `model.layers.3.mlp.up_proj.weight`.
    pub name: String,
    /// The shape in those checkpoints; a projection's is `[out, in]`.
    pub shape: Vec<usize>,
}

impl Parameter {
    /// The number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product()
    }
}

/// A tensor that the backward of a layer needs besides the layer's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedTensor {
    /// What it holds.
    pub name: &'static str,
    /// Its size.
    pub bytes: Bytes,
}

/// What one step trains on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    batch: usize,
    sequence: usize,
    element_bytes: usize,
}

impl Workload {
    /// `batch` sequences of `sequence` tokens with activations of `element_bytes` bytes an element.
    ///
    /// # Errors
    /// Where a value is zero, an element is wider than 8 bytes, or there are more than 2^30 tokens.
    pub fn new(batch: usize, sequence: usize, element_bytes: usize) -> Result<Self, Error> {
        let fail = |problem: String| Err(Error::Workload { problem });
        match batch.checked_mul(sequence) {
            Some(0) => fail(format!("batch {batch} and sequence {sequence} must both be at least 1")),
            Some(tokens) if tokens <= 1 << 30 => match element_bytes {
                1 | 2 | 4 | 8 => Ok(Self { batch, sequence, element_bytes }),
                other => fail(format!("{other} bytes an element; it must be 1, 2, 4 or 8")),
            },
            _ => fail(format!("batch {batch} x sequence {sequence} is more than 2^30 tokens; lower one")),
        }
    }

    /// Sequences a step.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Tokens a sequence.
    pub fn sequence(&self) -> usize {
        self.sequence
    }

    /// Bytes of one activation element.
    pub fn element_bytes(&self) -> usize {
        self.element_bytes
    }

    /// `T = batch * sequence`.
    pub fn tokens(&self) -> u64 {
        self.batch as u64 * self.sequence as u64
    }
}

/// Parameters.
impl ModelSpec {
    /// `heads * head_dim`: the width of the queries and of the attention's output.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// `kv_heads * head_dim`: the width of the keys, and of the values.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The embedding: `[vocab, hidden]`.
    pub fn embedding_parameter(&self) -> Parameter {
        Parameter { name: "model.embed_tokens.weight".into(), shape: vec![self.vocab, self.hidden] }
    }

    /// The parameters of one layer, in a fixed order: norm, attention, norm, MLP.
    pub fn layer_parameters(&self, layer: LayerIndex) -> Vec<Parameter> {
        let mut list = Vec::with_capacity(18);
        let mut push = |name: &str, shape: &[usize]| {
            list.push(Parameter { name: format!("model.layers.{layer}.{name}"), shape: shape.to_vec() });
        };
        let (h, q, k, m) = (self.hidden, self.query_width(), self.kv_width(), self.intermediate);
        push("input_layernorm.weight", &[h]);
        let projections = [
            ("self_attn.q_proj", q, h, self.qkv_bias),
            ("self_attn.k_proj", k, h, self.qkv_bias),
            ("self_attn.v_proj", k, h, self.qkv_bias),
            ("self_attn.o_proj", h, q, self.output_bias),
        ];
        for (name, out, input, bias) in projections {
            push(&format!("{name}.weight"), &[out, input]);
            if bias {
                push(&format!("{name}.bias"), &[out]);
            }
        }
        if self.qk_norm {
            push("self_attn.q_norm.weight", &[self.head_dim]);
            push("self_attn.k_norm.weight", &[self.head_dim]);
        }
        push("post_attention_layernorm.weight", &[h]);
        for (name, out, input) in [("mlp.gate_proj", m, h), ("mlp.up_proj", m, h), ("mlp.down_proj", h, m)] {
            push(&format!("{name}.weight"), &[out, input]);
            if self.mlp_bias {
                push(&format!("{name}.bias"), &[out]);
            }
        }
        list
    }

    /// The final norm.
    pub fn final_norm_parameter(&self) -> Parameter {
        Parameter { name: "model.norm.weight".into(), shape: vec![self.hidden] }
    }

    /// The head: `[vocab, hidden]`; none where it is tied to the embedding.
    pub fn head_parameter(&self) -> Option<Parameter> {
        (!self.tied)
            .then(|| Parameter { name: "lm_head.weight".into(), shape: vec![self.vocab, self.hidden] })
    }

    /// All parameters in a fixed order: embedding, layers in order, final norm, head. A tied weight appears once.
    pub fn parameters(&self) -> Vec<Parameter> {
        let layers = (0..self.layers()).flat_map(|l| self.layer_parameters(LayerIndex(l)));
        let mut all = vec![self.embedding_parameter()];
        all.extend(layers);
        all.push(self.final_norm_parameter());
        all.extend(self.head_parameter());
        all
    }

    /// The number of trainable elements; a tied weight counts once.
    pub fn total_parameters(&self) -> u64 {
        let outside =
            [Some(self.embedding_parameter()), Some(self.final_norm_parameter()), self.head_parameter()];
        let outside: u64 = outside.iter().flatten().map(Parameter::elements).sum();
        outside + self.layers() as u64 * self.parameters_per_layer()
    }

    /// The number of trainable elements of one layer. All layers of these families are alike in that.
    pub fn parameters_per_layer(&self) -> u64 {
        self.layer_parameters(LayerIndex(0)).iter().map(Parameter::elements).sum()
    }
}

/// Sizes.
impl ModelSpec {
    /// The activation at a layer boundary: `T h e`.
    pub fn boundary_bytes(&self, work: &Workload) -> Bytes {
        Bytes(work.tokens() * (self.hidden * work.element_bytes) as u64)
    }

    /// What the backward of one layer needs besides the layer's input, for fused attention (the score matrix never
    /// exists; its log-sum-exp does) and otherwise one kernel an operation:
    ///
    /// | tensor | bytes | needed by |
    /// | --- | --- | --- |
    /// | input norm: reciprocal RMS | `4 T` | the norm |
    /// | normed input | `T h e` | weight gradients of q, k, v |
    /// | q, k before their norm (`qk_norm` only) | `T (q + k) e` | that norm |
    /// | q, k norm: reciprocal RMS (`qk_norm` only) | `4 T (heads + kv_heads)` | that norm |
    /// | rotated q; rotated k; v | `T q e`; `T k e`; `T k e` | attention |
    /// | attention output | `T q e` | attention, and the output projection's weight gradient |
    /// | log-sum-exp | `4 T heads` | attention |
    /// | residual after attention | `T h e` | the second norm |
    /// | second norm: reciprocal RMS | `4 T` | the norm |
    /// | normed residual | `T h e` | weight gradients of gate and up |
    /// | gate; up | `T m e` each | the gated activation |
    /// | gated product | `T m e` | the down projection's weight gradient |
    ///
    /// The rotary tables are side inputs shared by all layers and are not counted, and neither is the layer's input,
    /// which is the boundary. A window changes none of these sizes.
    pub fn saved_tensors(&self, work: &Workload) -> Vec<SavedTensor> {
        let t = work.tokens();
        let wide =
            |name, width: usize| SavedTensor { name, bytes: Bytes(t * (width * work.element_bytes) as u64) };
        let statistic =
            |name, width: usize| SavedTensor { name, bytes: Bytes(t * width as u64 * STATISTIC_BYTES) };
        let (h, q, k, m) = (self.hidden, self.query_width(), self.kv_width(), self.intermediate);
        let mut list = vec![statistic("input norm rrms", 1), wide("normed input", h)];
        if self.qk_norm {
            list.extend([
                wide("q before norm", q),
                wide("k before norm", k),
                statistic("q norm rrms", self.heads),
                statistic("k norm rrms", self.kv_heads),
            ]);
        }
        list.extend([
            wide("rotated q", q),
            wide("rotated k", k),
            wide("v", k),
            wide("attention output", q),
            statistic("log-sum-exp", self.heads),
            wide("residual after attention", h),
            statistic("second norm rrms", 1),
            wide("normed residual", h),
            wide("gate", m),
            wide("up", m),
            wide("gated product", m),
        ]);
        list
    }

    /// The sum of [`saved_tensors`](Self::saved_tensors).
    pub fn internals_bytes(&self, work: &Workload) -> Bytes {
        self.saved_tensors(work).iter().map(|tensor| tensor.bytes).sum()
    }
}

/// Work. A multiply-add counts as two operations; norms, activations, softmax and biases are left out.
impl ModelSpec {
    /// Forward of one layer: projections `2 T (h q + 2 h k + q h + 3 h m)` and attention `4 q P`, where `P` counts the
    /// (query, key) pairs that the mask lets through: `batch * S (S + 1) / 2` for causal attention over `S` positions,
    /// fewer where a window is active. A kernel that computes masked scores too does up to twice the second term.
    pub fn layer_forward_flops(&self, layer: LayerIndex, work: &Workload) -> f64 {
        let kind = self.layer_kinds.get(layer.get()).copied().unwrap_or(LayerKind::Full);
        let (h, q, k, m) =
            (self.hidden as f64, self.query_width() as f64, self.kv_width() as f64, self.intermediate as f64);
        let projections = 2.0 * work.tokens() as f64 * h * (2.0 * q + 2.0 * k + 3.0 * m);
        projections + 4.0 * q * work.batch as f64 * attended_pairs(kind, work.sequence)
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
}

/// Pairs of positions of one sequence that the mask lets through.
fn attended_pairs(kind: LayerKind, sequence: usize) -> f64 {
    let s = sequence as f64;
    let triangle = |n: f64| n * (n + 1.0) / 2.0;
    match kind {
        LayerKind::Sliding { window } if window < sequence => {
            let w = window as f64;
            triangle(w) + (s - w) * w
        }
        _ => triangle(s),
    }
}
