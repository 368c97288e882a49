//! Other members of the families, with totals published for their checkpoints or counted by hand from the modelling code.

use serde_json::{Value, json};

use super::spec;

/// What all of them share.
fn common(model_type: &str, sizes: [usize; 6], others: Value) -> Value {
    let [hidden, layers, intermediate, heads, kv_heads, vocab] = sizes;
    let mut config = json!({
        "model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab, "rms_norm_eps": 1e-6,
    });
    let map = config.as_object_mut().unwrap();
    map.extend(others.as_object().unwrap().clone());
    config
}

fn total(model_type: &str, sizes: [usize; 6], others: Value) -> u64 {
    spec(&common(model_type, sizes, others)).total_parameters()
}

#[test]
fn dense_llamas_and_qwens() {
    let tied = |head_dim| json!({"tie_word_embeddings": true, "head_dim": head_dim});
    assert_eq!(total("qwen3", [1024, 28, 3072, 16, 8, 151_936], tied(128)), 596_049_920);
    assert_eq!(total("llama", [2048, 16, 8192, 32, 8, 128_256], tied(64)), 1_235_814_400);
    assert_eq!(total("llama", [3072, 28, 8192, 24, 8, 128_256], tied(128)), 3_212_749_824);
    assert_eq!(total("llama", [8192, 80, 28_672, 64, 8, 128_256], json!({})), 70_553_706_496);
    assert_eq!(total("qwen2", [8192, 80, 29_568, 64, 8, 152_064], json!({})), 72_706_203_648);
    assert_eq!(total("phi3", [5120, 40, 17_920, 40, 10, 32_064], json!({})), 13_960_238_080);
}

#[test]
fn gemmas() {
    let heads = |head_dim| json!({"head_dim": head_dim, "sliding_window": 4096});
    assert_eq!(total("gemma2", [3584, 42, 14_336, 16, 8, 256_000], heads(256)), 9_241_705_984);
    assert_eq!(total("gemma2", [4608, 46, 36_864, 32, 16, 256_000], heads(128)), 27_227_128_320);
    // The published counts include the vision tower (416,866,032) and the projector (1152 h + 1152).
    let wrapped = |sizes, head_dim| {
        let text = common("gemma3_text", sizes, json!({"head_dim": head_dim, "sliding_window": 1024}));
        spec(&json!({"model_type": "gemma3", "text_config": text, "vision_config": {}})).total_parameters()
    };
    let seen = |hidden: u64| 416_866_032 + 1152 * hidden + 1152;
    assert_eq!(wrapped([2560, 34, 10_240, 8, 4, 262_208], 256) + seen(2560), 4_300_079_472);
    assert_eq!(wrapped([3840, 48, 15_360, 16, 8, 262_208], 256) + seen(3840), 12_187_325_040);
    assert_eq!(wrapped([5376, 62, 21_504, 32, 16, 262_208], 128) + seen(5376), 27_432_406_640);
}

#[test]
fn mixtures_of_experts() {
    let mixtral = json!({"num_local_experts": 8, "num_experts_per_tok": 2});
    assert_eq!(total("mixtral", [6144, 56, 16_384, 48, 8, 32_000], mixtral), 140_620_634_112);
    let qwen =
        json!({"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536});
    assert_eq!(total("qwen3_moe", [4096, 94, 12_288, 64, 4, 151_936], qwen), 235_093_634_560);
    // GLM-4.5-Air as transformers builds it; the checkpoint's 110,468,824,832 include a layer for multi-token prediction.
    let glm = json!({
        "head_dim": 128, "attention_bias": true, "use_qk_norm": false, "n_routed_experts": 128, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5,
    });
    assert_eq!(total("glm4_moe", [4096, 46, 10_944, 96, 8, 151_552], glm), 106_852_245_504);
}

/// Newer files spell the number of experts as another family does.
#[test]
fn names_of_the_number_of_experts_are_interchangeable() {
    let count = |key: &str| {
        let mut others = json!({"head_dim": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 24});
        others.as_object_mut().unwrap().insert(key.into(), json!(4));
        total("qwen3_moe", [64, 2, 96, 4, 2, 128], others)
    };
    assert_eq!(count("num_experts"), count("num_local_experts"));
    assert_eq!(count("num_experts"), count("n_routed_experts"));
}

#[test]
fn dense_layers_among_experts() {
    let others =
        json!({"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24});
    let plain = total("qwen3_moe", [64, 6, 96, 4, 2, 128], others.clone());
    let (experts, dense) = (4 * 3 * 64 * 24 + 4 * 64, 3 * 64 * 96);
    let with = |key: &str, value: Value| {
        let mut others = others.clone();
        others.as_object_mut().unwrap().insert(key.into(), value);
        plain - total("qwen3_moe", [64, 6, 96, 4, 2, 128], others)
    };
    assert_eq!(with("mlp_only_layers", json!([0, 3])), 2 * (experts - dense));
    // Every second layer keeps its experts: the second, the fourth, the sixth.
    assert_eq!(with("decoder_sparse_step", json!(2)), 3 * (experts - dense));
    assert_eq!(with("num_experts", json!(0)), 6 * (experts - dense));
}

#[test]
fn latent_attention_without_a_query_rank() {
    let (h, heads, nope, rope, v, kv) = (48u64, 4u64, 8u64, 4u64, 6u64, 10u64);
    let others = json!({
        "q_lora_rank": null, "kv_lora_rank": kv, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": v,
        "first_k_dense_replace": 1, "n_routed_experts": 3, "n_shared_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 7, "attention_bias": true,
    });
    let q = heads * (nope + rope) * h;
    let down = h * (kv + rope) + (kv + rope) + kv;
    let up = kv * heads * (nope + v);
    let out = heads * v * h + h;
    let attention = q + down + up + out + 2 * h;
    let moe = 3 * h + 3 * (3 * 7 * h) + 3 * (2 * 7) * h;
    let layers = 2 * attention + 3 * h * 20 + moe;
    assert_eq!(total("deepseek_v3", [48, 2, 20, 4, 4, 100], others), 2 * 100 * h + layers + h);
}

#[test]
fn hybrids_with_experts_and_biases() {
    let (h, vocab) = (64u64, 100u64);
    let others = json!({
        "head_dim": 16, "attention_bias": true, "full_attention_interval": 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 14,
    });
    let (q, k) = (4 * 16u64, 2 * 16u64);
    let full = (2 * q + 2 * k) * (h + 1) + h * (q + 1) + 2 * 16;
    let (conv, value) = (2 * 16 + 24u64, 24u64);
    let linear = h * (conv + value + 8) + 4 * conv + 4 + 4 + 6 + value * h;
    let moe = 5 * h + 5 * 3 * 12 * h + 3 * 14 * h + h;
    let layers = full + linear + 2 * (moe + 2 * h);
    for model_type in ["qwen3_5_moe_text", "qwen3_next"] {
        let sizes = [64, 2, 1, 4, 2, 100];
        assert_eq!(total(model_type, sizes, others.clone()), 2 * vocab * h + layers + h, "{model_type}");
    }
}

#[test]
fn glm_has_two_norms_and_glm4_four() {
    let others = json!({"head_dim": 16, "attention_bias": true});
    let (two, four) =
        (total("glm", [64, 3, 96, 4, 2, 128], others.clone()), total("glm4", [64, 3, 96, 4, 2, 128], others));
    assert_eq!(four - two, 3 * 2 * 64);
    // Both classes have biases on queries, keys and values unless told otherwise, and say so.
    let silent = spec(&common("glm4", [64, 3, 96, 4, 2, 128], json!({"head_dim": 16})));
    assert_eq!(silent.total_parameters(), four);
    assert!(silent.notes.iter().any(|note| note.contains("attention_bias")));
}
