//! The model families this crate can size, and what their configuration classes assume beside dimensions.

/// A family of decoders: one layer architecture with one set of configuration keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Family {
    /// `qwen3`: per-head RMS norm on queries and keys.
    Qwen3,
    /// `qwen2` (Qwen2 and Qwen2.5): biases on the query, key and value projections.
    Qwen2,
    /// `llama`.
    Llama,
    /// `mistral`.
    Mistral,
    /// `qwen3_moe`: Qwen3's attention, routed experts.
    Qwen3Moe,
    /// `mixtral`: Mistral's attention, routed experts.
    Mixtral,
    /// `gemma2`: norms around attention and MLP, every other layer with a window.
    Gemma2,
    /// `gemma3_text`: Gemma 2 with norms on queries and keys, windows in five of six layers.
    Gemma3,
    /// `phi3`: Llama's layer with fused projections.
    Phi3,
    /// `glm`: GLM-4's first layer form, two norms.
    Glm,
    /// `glm4`: `glm` with norms around attention and MLP.
    Glm4,
    /// `glm4_moe` (GLM-4.5 and later): shared and routed experts after a few dense layers.
    Glm4Moe,
    /// `deepseek_v3`: latent attention, shared and routed experts after a few dense layers.
    DeepSeekV3,
    /// `qwen3_next`: gated DeltaNet and gated full attention, shared and routed experts.
    Qwen3Next,
    /// `qwen3_5_text` (Qwen3.5 and Qwen3.6, dense).
    Qwen3_5,
    /// `qwen3_5_moe_text` (Qwen3.5 and Qwen3.6, shared and routed experts).
    Qwen3_5Moe,
}

impl Family {
    /// All supported families.
    pub const ALL: [Family; 16] = [
        Family::Qwen3,
        Family::Qwen2,
        Family::Llama,
        Family::Mistral,
        Family::Qwen3Moe,
        Family::Mixtral,
        Family::Gemma2,
        Family::Gemma3,
        Family::Phi3,
        Family::Glm,
        Family::Glm4,
        Family::Glm4Moe,
        Family::DeepSeekV3,
        Family::Qwen3Next,
        Family::Qwen3_5,
        Family::Qwen3_5Moe,
    ];

    /// The value of `model_type`.
    pub const fn model_type(self) -> &'static str {
        match self {
            Family::Qwen3 => "qwen3",
            Family::Qwen2 => "qwen2",
            Family::Llama => "llama",
            Family::Mistral => "mistral",
            Family::Qwen3Moe => "qwen3_moe",
            Family::Mixtral => "mixtral",
            Family::Gemma2 => "gemma2",
            Family::Gemma3 => "gemma3_text",
            Family::Phi3 => "phi3",
            Family::Glm => "glm",
            Family::Glm4 => "glm4",
            Family::Glm4Moe => "glm4_moe",
            Family::DeepSeekV3 => "deepseek_v3",
            Family::Qwen3Next => "qwen3_next",
            Family::Qwen3_5 => "qwen3_5_text",
            Family::Qwen3_5Moe => "qwen3_5_moe_text",
        }
    }

    /// Also knows the types that multi-modal wrappers of these families give their language model, or themselves.
    pub(super) fn from_model_type(name: &str) -> Option<Family> {
        Some(match name {
            "qwen3_vl_text" | "qwen3_vl" => Family::Qwen3,
            "qwen3_vl_moe_text" | "qwen3_vl_moe" | "qwen3_omni_moe_text" => Family::Qwen3Moe,
            "qwen2_5_vl_text" | "qwen2_5_vl" | "qwen2_vl_text" | "qwen2_vl" | "qwen2_5_omni_text" => {
                Family::Qwen2
            }
            "gemma3" => Family::Gemma3,
            // DeepSeek-V3's modelling code with other numbers.
            "kimi_k2" => Family::DeepSeekV3,
            "qwen3_5" => Family::Qwen3_5,
            "qwen3_5_moe" => Family::Qwen3_5Moe,
            _ => return Family::ALL.into_iter().find(|family| family.model_type() == name),
        })
    }

    /// Linear attention in most layers.
    pub(super) fn hybrid(self) -> bool {
        matches!(self, Family::Qwen3Next | Family::Qwen3_5 | Family::Qwen3_5Moe)
    }

    pub(super) fn gemma(self) -> bool {
        matches!(self, Family::Gemma2 | Family::Gemma3)
    }

    /// The configuration class's `tie_word_embeddings`.
    pub(super) fn tied_by_default(self) -> bool {
        self.gemma()
    }

    /// The configuration class's `rope_theta`.
    pub(super) fn rope_theta_by_default(self) -> f64 {
        match self {
            Family::Gemma3 | Family::Mixtral => 1e6,
            _ => 1e4,
        }
    }

    /// Whether only a part of each head may be rotated. That changes no size.
    pub(super) fn partial_rotary(self) -> bool {
        self.hybrid() || matches!(self, Family::Phi3 | Family::Glm | Family::Glm4 | Family::Glm4Moe)
    }
}
