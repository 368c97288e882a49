//! Which tensors a model trains, and how many elements they have.

use crate::config::{
    Attention, DeltaNet, DenseMlp, LatentAttention, LayerShape, Mixer, Mlp, ModelSpec, MoeMlp, MoeNaming,
    Norms,
};
use crate::units::{Bytes, LayerIndex};

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

/// Stands in a tensor's name for the number of the expert: the experts of a layer are alike, so each of their tensors is described
/// once and counting them makes no name.
pub(crate) const EXPERT: char = '*';

/// Takes the tensors of a layer: name without and name of the last part (`weight`, `bias`, or nothing), and shape.
pub(crate) type Visit<'a> = &'a mut dyn FnMut(&str, &str, &[usize]);

fn weight(visit: Visit<'_>, name: &str, shape: &[usize]) {
    visit(name, ".weight", shape);
}

fn projection(visit: Visit<'_>, name: &str, out: usize, input: usize, bias: bool) {
    visit(name, ".weight", &[out, input]);
    if bias {
        visit(name, ".bias", &[out]);
    }
}

impl LayerShape {
    /// Every tensor of the layer in a fixed order: norm, mixer, norm, MLP, and further norms where the family has them.
    pub(crate) fn tensors(&self, hidden: usize, visit: Visit<'_>) {
        let norm = |visit: Visit<'_>, name: &str| weight(visit, name, &[hidden]);
        norm(visit, "input_layernorm");
        match &self.mixer {
            Mixer::Attention(attention) => attention.tensors(hidden, visit),
            Mixer::Latent(mla) => mla.tensors(hidden, visit),
            Mixer::Linear(net) => net.tensors(hidden, visit),
        }
        match self.norms {
            Norms::Before => norm(visit, "post_attention_layernorm"),
            Norms::AroundGemma => {
                norm(visit, "post_attention_layernorm");
                norm(visit, "pre_feedforward_layernorm");
            }
            Norms::AroundGlm => {
                norm(visit, "post_self_attn_layernorm");
                norm(visit, "post_attention_layernorm");
            }
        }
        match &self.mlp {
            Mlp::Dense(mlp) => mlp.tensors(hidden, visit),
            Mlp::Moe(moe) => moe.tensors(hidden, visit),
        }
        match self.norms {
            Norms::Before => {}
            Norms::AroundGemma => norm(visit, "post_feedforward_layernorm"),
            Norms::AroundGlm => norm(visit, "post_mlp_layernorm"),
        }
    }

    /// How many copies of a tensor the layer has.
    pub(crate) fn copies(&self, name: &str) -> usize {
        match &self.mlp {
            Mlp::Moe(moe) if name.contains(EXPERT) => moe.experts,
            _ => 1,
        }
    }

    /// The number of trainable elements of such a layer between boundaries of width `hidden`.
    pub fn parameter_count(&self, hidden: usize) -> u64 {
        let mut total = 0;
        self.tensors(hidden, &mut |name, _, shape| {
            total += shape.iter().map(|&n| n as u64).product::<u64>() * self.copies(name) as u64;
        });
        total
    }
}

impl Attention {
    fn tensors(&self, hidden: usize, visit: Visit<'_>) {
        let (q, k) = (self.query_width(), self.kv_width());
        if self.fused_qkv {
            projection(visit, "self_attn.qkv_proj", q + 2 * k, hidden, self.qkv_bias);
        } else {
            let gated = if self.output_gate { 2 * q } else { q };
            projection(visit, "self_attn.q_proj", gated, hidden, self.qkv_bias);
            projection(visit, "self_attn.k_proj", k, hidden, self.qkv_bias);
            projection(visit, "self_attn.v_proj", k, hidden, self.qkv_bias);
        }
        projection(visit, "self_attn.o_proj", hidden, q, self.output_bias);
        if self.qk_norm {
            weight(visit, "self_attn.q_norm", &[self.head_dim]);
            weight(visit, "self_attn.k_norm", &[self.head_dim]);
        }
    }
}

impl LatentAttention {
    fn tensors(&self, hidden: usize, visit: Visit<'_>) {
        match self.q_lora_rank {
            Some(rank) => {
                projection(visit, "self_attn.q_a_proj", rank, hidden, self.bias);
                weight(visit, "self_attn.q_a_layernorm", &[rank]);
                projection(visit, "self_attn.q_b_proj", self.query_width(), rank, false);
            }
            None => projection(visit, "self_attn.q_proj", self.query_width(), hidden, false),
        }
        let down = self.kv_lora_rank + self.rope_dim;
        projection(visit, "self_attn.kv_a_proj_with_mqa", down, hidden, self.bias);
        weight(visit, "self_attn.kv_a_layernorm", &[self.kv_lora_rank]);
        let up = self.heads * (self.nope_dim + self.value_dim);
        projection(visit, "self_attn.kv_b_proj", up, self.kv_lora_rank, false);
        projection(visit, "self_attn.o_proj", hidden, self.value_width(), self.bias);
    }
}

impl DeltaNet {
    fn tensors(&self, hidden: usize, visit: Visit<'_>) {
        let (conv, value, heads) = (self.conv_width(), self.value_width(), self.value_heads);
        visit("linear_attn.dt_bias", "", &[heads]);
        visit("linear_attn.A_log", "", &[heads]);
        weight(visit, "linear_attn.conv1d", &[conv, 1, self.conv_kernel]);
        if self.fused_projections {
            weight(visit, "linear_attn.in_proj_qkvz", &[conv + value, hidden]);
            weight(visit, "linear_attn.in_proj_ba", &[2 * heads, hidden]);
        } else {
            weight(visit, "linear_attn.in_proj_qkv", &[conv, hidden]);
            weight(visit, "linear_attn.in_proj_z", &[value, hidden]);
            weight(visit, "linear_attn.in_proj_b", &[heads, hidden]);
            weight(visit, "linear_attn.in_proj_a", &[heads, hidden]);
        }
        weight(visit, "linear_attn.norm", &[self.value_dim]);
        weight(visit, "linear_attn.out_proj", &[hidden, value]);
    }
}

/// Gate, up and down projection under `names`, without biases.
fn gated_unit(visit: Visit<'_>, names: [&str; 3], hidden: usize, intermediate: usize) {
    let [gate, up, down] = names;
    weight(visit, gate, &[intermediate, hidden]);
    weight(visit, up, &[intermediate, hidden]);
    weight(visit, down, &[hidden, intermediate]);
}

impl DenseMlp {
    fn tensors(&self, hidden: usize, visit: Visit<'_>) {
        let m = self.intermediate;
        if self.fused_gate_up {
            projection(visit, "mlp.gate_up_proj", 2 * m, hidden, self.bias);
        } else {
            projection(visit, "mlp.gate_proj", m, hidden, self.bias);
            projection(visit, "mlp.up_proj", m, hidden, self.bias);
        }
        projection(visit, "mlp.down_proj", hidden, m, self.bias);
    }
}

impl MoeMlp {
    /// The router's correction bias (DeepSeek, GLM) is a buffer that no gradient reaches, so it is no parameter.
    fn tensors(&self, hidden: usize, visit: Visit<'_>) {
        let router = [self.experts, hidden];
        match self.naming {
            MoeNaming::BlockSparse => {
                weight(visit, "block_sparse_moe.gate", &router);
                let names = [
                    "block_sparse_moe.experts.*.w1",
                    "block_sparse_moe.experts.*.w3",
                    "block_sparse_moe.experts.*.w2",
                ];
                gated_unit(visit, names, hidden, self.intermediate);
            }
            MoeNaming::SharedExperts | MoeNaming::SharedExpertGate => {
                weight(visit, "mlp.gate", &router);
                let names = ["mlp.experts.*.gate_proj", "mlp.experts.*.up_proj", "mlp.experts.*.down_proj"];
                gated_unit(visit, names, hidden, self.intermediate);
            }
        }
        if self.naming == MoeNaming::SharedExpertGate {
            let names =
                ["mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"];
            gated_unit(visit, names, hidden, self.shared);
            weight(visit, "mlp.shared_expert_gate", &[1, hidden]);
        } else if self.shared > 0 {
            let names = [
                "mlp.shared_experts.gate_proj",
                "mlp.shared_experts.up_proj",
                "mlp.shared_experts.down_proj",
            ];
            gated_unit(visit, names, hidden, self.shared);
        }
    }
}

/// Parameters.
impl ModelSpec {
    /// The embedding: `[vocab, hidden]`.
    pub fn embedding_parameter(&self) -> Parameter {
        Parameter { name: "model.embed_tokens.weight".into(), shape: vec![self.vocab, self.hidden] }
    }

    /// The parameters of one layer, in a fixed order: norm, mixer, norm, MLP, further norms. Experts appear one by one, though some
    /// checkpoints hold them fused.
    ///
    /// # Panics
    /// Where the model has no such layer.
    pub fn layer_parameters(&self, layer: LayerIndex) -> Vec<Parameter> {
        let shape = self.layer(layer);
        let mut list = Vec::new();
        shape.tensors(self.hidden, &mut |name, part, dimensions| {
            let copies = shape.copies(name);
            for copy in 0..copies {
                let name = format!("model.layers.{layer}.{}{part}", name.replace(EXPERT, &copy.to_string()));
                list.push(Parameter { name, shape: dimensions.to_vec() });
            }
        });
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

    /// All parameters in a fixed order: embedding, layers in order, final norm, head. A tied weight appears once. A large mixture of
    /// experts has tens of thousands; to count them, use [`total_parameters`](Self::total_parameters).
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
        let table = self.vocab as u64 * self.hidden as u64;
        let tables = if self.tied { table } else { 2 * table };
        let layers: u64 = self.layer_shapes.iter().map(|layer| layer.parameter_count(self.hidden)).sum();
        tables + layers + self.hidden as u64
    }

    /// The number of trainable elements of one layer.
    ///
    /// # Panics
    /// Where the model has no such layer.
    pub fn layer_parameter_count(&self, layer: LayerIndex) -> u64 {
        self.layer(layer).parameter_count(self.hidden)
    }

    /// The weight bytes of a layer as the published reference command counts them for its mandatory traffic:
    /// `e (2 h^2 + 2 h k + 3 h m + 2 h)` with `e` bytes an element, `k` the width of keys, `m` the width of a dense MLP. It is that
    /// command's approximation, one for all layers: it takes queries to be as wide as the residual stream, and linear attention
    /// for full attention. The exact count is [`layer_parameter_count`](Self::layer_parameter_count). None where no layer
    /// has grouped-query attention, or none has a dense MLP.
    pub fn reference_layer_weight_bytes(&self, element_bytes: u64) -> Option<Bytes> {
        let kv_width = self.layer_shapes.iter().find_map(|layer| match &layer.mixer {
            Mixer::Attention(attention) => Some(attention.kv_width() as u64),
            _ => None,
        })?;
        let intermediate = self.layer_shapes.iter().find_map(|layer| match &layer.mlp {
            Mlp::Dense(mlp) => Some(mlp.intermediate as u64),
            Mlp::Moe(_) => None,
        })?;
        let h = self.hidden as u64;
        Some(Bytes(2 * h * h + 2 * h * kv_width + 3 * h * intermediate + 2 * h) * element_bytes)
    }
}
