//! What a decoder layer is made of: the geometry from which its parameters, sizes and work follow.

/// How the positions of a sequence meet in a layer. The names are those of `layer_types`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Causal softmax attention over all earlier positions.
    Full,
    /// Causal softmax attention over a window.
    Sliding,
    /// Causal softmax attention whose keys and values are projected from one narrow latent vector a position.
    Latent,
    /// A recurrent state instead of attention: the gated delta rule.
    Linear,
}

impl LayerKind {
    /// The name used in `layer_types` and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            LayerKind::Full => "full_attention",
            LayerKind::Sliding => "sliding_attention",
            LayerKind::Latent => "latent_attention",
            LayerKind::Linear => "linear_attention",
        }
    }
}

/// One decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerShape {
    /// What mixes positions.
    pub mixer: Mixer,
    /// What works on each position alone.
    pub mlp: Mlp,
    /// Norms before, or before and after, each of the two.
    pub norms: Norms,
}

/// The part of a layer in which positions meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mixer {
    /// Softmax attention with grouped queries.
    Attention(Attention),
    /// Softmax attention from a latent vector (MLA).
    Latent(LatentAttention),
    /// The gated delta rule (DeltaNet).
    Linear(DeltaNet),
}

/// Softmax attention: `heads` queries share `kv_heads` keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Attention {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head. Not always `hidden / heads`.
    pub head_dim: usize,
    /// Positions a query sees at most, its own included; none where it sees all earlier ones.
    pub window: Option<usize>,
    /// Query, key and value projections have biases.
    pub qkv_bias: bool,
    /// The output projection has a bias.
    pub output_bias: bool,
    /// Queries and keys pass a per-head RMS norm before the rotary embedding.
    pub qk_norm: bool,
    /// The query projection is twice as wide; its second half gates the attention's output through a sigmoid.
    pub output_gate: bool,
    /// Checkpoints hold query, key and value projection as one tensor, `qkv_proj`.
    pub fused_qkv: bool,
}

impl Attention {
    /// `heads * head_dim`: the width of the queries and of the attention's output.
    pub fn query_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// `kv_heads * head_dim`: the width of the keys, and of the values.
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

/// Multi-head latent attention. Each head's query and key have a part of `nope_dim` that carries no position and a part of
/// `rope_dim` that does; the keys' rotary part is one for all heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LatentAttention {
    /// Heads.
    pub heads: usize,
    /// Width of the latent the queries are projected from; none where one matrix projects them directly.
    pub q_lora_rank: Option<usize>,
    /// Width of the latent that keys and values are projected from.
    pub kv_lora_rank: usize,
    /// Width of a head's query and key without position.
    pub nope_dim: usize,
    /// Width of a head's query and key with rotary position.
    pub rope_dim: usize,
    /// Width of a head's value.
    pub value_dim: usize,
    /// The two projections down and the output projection have biases.
    pub bias: bool,
}

impl LatentAttention {
    /// Width of a head's query and key.
    pub fn qk_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }

    /// Width of all queries; the keys, once the heads share out the rotary part, are as wide.
    pub fn query_width(&self) -> usize {
        self.heads * self.qk_dim()
    }

    /// Width of all values and of the attention's output.
    pub fn value_width(&self) -> usize {
        self.heads * self.value_dim
    }
}

/// The gated delta rule: a causal convolution over queries, keys and values, then a state of `key_dim x value_dim` for each value
/// head that every position decays, corrects and reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DeltaNet {
    /// Query and key heads; divides `value_heads`.
    pub key_heads: usize,
    /// Value heads, each with a state of its own.
    pub value_heads: usize,
    /// Width of a query and of a key.
    pub key_dim: usize,
    /// Width of a value.
    pub value_dim: usize,
    /// Positions the convolution sees.
    pub conv_kernel: usize,
    /// Checkpoints hold the projections as `in_proj_qkvz` and `in_proj_ba`, not as four.
    pub fused_projections: bool,
}

impl DeltaNet {
    /// Width of all queries, and of all keys.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.key_dim
    }

    /// Width of all values, of their output gate, and of the output.
    pub fn value_width(&self) -> usize {
        self.value_heads * self.value_dim
    }

    /// Width of what the convolution runs over: queries, keys and values.
    pub fn conv_width(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }
}

/// The part of a layer that works on each position alone: gated linear units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mlp {
    /// One for all tokens.
    Dense(DenseMlp),
    /// A router sends each token to a few of many.
    Moe(MoeMlp),
}

/// A gated linear unit: `down(act(gate(x)) * up(x))`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct DenseMlp {
    /// Width between the up and the down projection.
    pub intermediate: usize,
    /// The projections have biases.
    pub bias: bool,
    /// Checkpoints hold gate and up projection as one tensor, `gate_up_proj`.
    pub fused_gate_up: bool,
}

/// Routed experts, and shared ones that every token passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MoeMlp {
    /// Routed experts of a layer.
    pub experts: usize,
    /// Experts a token is sent to.
    pub top_k: usize,
    /// Width of one routed expert.
    pub intermediate: usize,
    /// Width of all shared experts together; 0 where there are none.
    pub shared: usize,
    /// What the checkpoint calls the tensors.
    pub naming: MoeNaming,
}

impl MoeMlp {
    /// The shared expert's output passes a gate of its own: one number a token.
    pub fn shared_gate(&self) -> bool {
        self.naming == MoeNaming::SharedExpertGate
    }
}

/// How checkpoints name the tensors of a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MoeNaming {
    /// `mlp.gate`, `mlp.experts.*`, and `mlp.shared_experts` where there are any (DeepSeek, GLM, Qwen3).
    SharedExperts,
    /// As before, but `mlp.shared_expert` with a `mlp.shared_expert_gate` (Qwen3-Next, Qwen3.5).
    SharedExpertGate,
    /// `block_sparse_moe.gate` and `block_sparse_moe.experts.*.w1`, `w2`, `w3` (Mixtral).
    BlockSparse,
}

/// Where a layer's RMS norms stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Norms {
    /// One before the mixer, one before the MLP.
    Before,
    /// One more after each, before its result is added: Gemma's names.
    AroundGemma,
    /// The same with GLM-4's names.
    AroundGlm,
}

impl Norms {
    /// The results of mixer and MLP are normed before they are added.
    pub fn after(self) -> bool {
        self != Norms::Before
    }
}

impl LayerShape {
    /// How positions meet in this layer.
    pub fn kind(&self) -> LayerKind {
        match &self.mixer {
            Mixer::Attention(Attention { window: Some(_), .. }) => LayerKind::Sliding,
            Mixer::Attention(_) => LayerKind::Full,
            Mixer::Latent(_) => LayerKind::Latent,
            Mixer::Linear(_) => LayerKind::Linear,
        }
    }
}
