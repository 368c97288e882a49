//! Reading Hugging Face configs: totals, derived dimensions, and what is refused.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may, as tests do")]

use lazy_model::{Attention, LayerIndex, LayerKind, Mixer, ModelSpec, Workload};
use serde_json::{Value, json};

fn data(name: &str) -> String {
    let path = format!("{}/tests/data/configs/{name}.json", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

fn json_of(name: &str) -> Value {
    serde_json::from_str(&data(name)).unwrap()
}

fn spec(value: &Value) -> ModelSpec {
    ModelSpec::from_json(&value.to_string()).unwrap()
}

fn message(value: &Value) -> String {
    ModelSpec::from_json(&value.to_string()).unwrap_err().to_string()
}

/// `value` with `key` set, or removed where `new` is absent.
fn with(mut value: Value, key: &str, new: Option<Value>) -> Value {
    let map = value.as_object_mut().unwrap();
    match new {
        Some(new) => map.insert(key.into(), new),
        None => map.remove(key),
    };
    value
}

/// The attention of a layer that has softmax attention with grouped queries.
fn attention(spec: &ModelSpec, layer: usize) -> Attention {
    match spec.layer_shapes[layer].mixer {
        Mixer::Attention(attention) => attention,
        other => panic!("layer {layer} has {other:?}"),
    }
}

/// The window of each layer.
fn windows(spec: &ModelSpec) -> Vec<Option<usize>> {
    (0..spec.layers()).map(|l| attention(spec, l).window).collect()
}

#[test]
fn totals_equal_the_counts_of_the_built_models() {
    let totals = json_of("totals");
    for (name, total) in totals.as_object().unwrap() {
        let spec = ModelSpec::from_json(&data(name)).unwrap();
        assert_eq!(spec.total_parameters(), total.as_u64().unwrap(), "{name}");
        let listed: u64 = spec.parameters().iter().map(|p| p.elements()).sum();
        assert_eq!(listed, spec.total_parameters(), "{name}");
    }
}

#[test]
fn parameters_carry_checkpoint_names_in_order() {
    let names = |s: ModelSpec| s.parameters().into_iter().map(|p| p.name).collect::<Vec<_>>();
    let qwen3 = names(spec(&json_of("qwen3-8b")));
    assert_eq!(qwen3[0], "model.embed_tokens.weight");
    assert_eq!(
        qwen3[1..12],
        [
            "input_layernorm.weight",
            "self_attn.q_proj.weight",
            "self_attn.k_proj.weight",
            "self_attn.v_proj.weight",
            "self_attn.o_proj.weight",
            "self_attn.q_norm.weight",
            "self_attn.k_norm.weight",
            "post_attention_layernorm.weight",
            "mlp.gate_proj.weight",
            "mlp.up_proj.weight",
            "mlp.down_proj.weight",
        ]
        .map(|n| format!("model.layers.0.{n}"))
    );
    assert_eq!(qwen3[qwen3.len() - 2..], ["model.norm.weight", "lm_head.weight"]);
    assert_eq!(names(spec(&json_of("qwen3-4b"))).last().unwrap(), "model.norm.weight");
    let qwen2 = names(spec(&json_of("qwen2.5-7b")));
    assert!(qwen2.contains(&"model.layers.27.self_attn.v_proj.bias".to_owned()));
    assert!(!qwen2.contains(&"model.layers.27.self_attn.o_proj.bias".to_owned()));
}

#[test]
fn m1_nested_config_equals_the_flat_one() {
    let flat = json_of("qwen3-4b");
    let once = json!({"model_type": "some_wrapper", "text_config": flat});
    let twice = json!({"model_type": "omni", "thinker_config": {"text_config": flat}});
    assert_eq!(spec(&once), spec(&flat));
    assert_eq!(spec(&twice), spec(&flat));
}

#[test]
fn m1_nested_value_wins_over_the_top_and_leaves_a_note() {
    let text = with(json_of("qwen3-4b"), "num_hidden_layers", Some(json!(40)));
    let spec = spec(&json!({"model_type": "wrapper", "num_hidden_layers": 33, "text_config": text}));
    assert_eq!(spec.layers(), 40);
    assert!(spec.notes.iter().any(|n| n.contains("33") && n.contains("text_config.num_hidden_layers")));
}

#[test]
fn m1_absent_dimension_names_its_path_even_when_the_top_has_one() {
    let text = with(json_of("qwen3-4b"), "hidden_size", None);
    let found = message(&json!({"model_type": "wrapper", "hidden_size": 1024, "text_config": text}));
    assert!(found.contains("`text_config.hidden_size`"), "{found}");
    for key in ["hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads"]
    {
        let found = message(&with(json_of("llama-3.1-8b"), key, None));
        assert!(found.contains(&format!("`{key}` is absent")), "{found}");
    }
}

#[test]
fn m2_explicit_head_dim_wins_and_an_uneven_division_is_refused() {
    let four_b = attention(&spec(&json_of("qwen3-4b")), 0);
    assert_eq!((four_b.head_dim, four_b.query_width()), (128, 4096));
    let uneven = with(json_of("llama-3.1-8b"), "hidden_size", Some(json!(1792)));
    let uneven = with(uneven, "num_attention_heads", Some(json!(24)));
    assert!(message(&uneven).contains("`head_dim`"));
    assert_eq!(attention(&spec(&with(uneven, "head_dim", Some(json!(64)))), 0).query_width(), 1536);
    assert_eq!(attention(&spec(&json_of("llama-3.1-8b")), 0).head_dim, 128);
    // A Qwen3 head is no quotient: 2560 / 32 would be 80.
    assert!(message(&with(json_of("qwen3-4b"), "head_dim", None)).contains("`head_dim` is absent"));
}

#[test]
fn m4_layer_types_of_wrong_length_or_kind_are_refused() {
    let types = |list: Vec<&str>| with(json_of("qwen3-4b"), "layer_types", Some(json!(list)));
    assert!(message(&types(vec!["full_attention"; 35])).contains("lists 35 layers"));
    let mut list = vec!["full_attention"; 36];
    list[7] = "mamba2";
    let found = message(&types(list));
    assert!(found.contains("`layer_types[7]`") && found.contains("mamba2"), "{found}");
    assert!(message(&types(vec!["sliding_attention"; 36])).contains("no sliding window is active"));
}

#[test]
fn m5_tied_embeddings_follow_flag_level_and_default() {
    let untied = json_of("qwen3-8b");
    let tied = spec(&with(untied.clone(), "tie_word_embeddings", Some(json!(true))));
    assert_eq!(spec(&untied).total_parameters() - tied.total_parameters(), 151_936 * 4096);
    let silent = with(untied.clone(), "tie_word_embeddings", None);
    assert!(!spec(&silent).tied && spec(&silent).notes.iter().any(|n| n.contains("tie_word_embeddings")));
    let outer = spec(&json!({"model_type": "w", "tie_word_embeddings": true, "text_config": silent}));
    assert!(outer.tied);
    let both = spec(&json!({"model_type": "w", "tie_word_embeddings": true, "text_config": untied}));
    assert!(!both.tied && both.notes.iter().any(|n| n.contains("tie_word_embeddings")));
}

#[test]
fn windows_are_recorded_only_where_they_are_active() {
    let mistral = json_of("mistral-7b");
    assert_eq!(windows(&spec(&mistral)), vec![Some(4096); 32]);
    let off = with(mistral, "sliding_window", Some(Value::Null));
    assert_eq!(windows(&spec(&off)), vec![None; 32]);
    let qwen = json_of("qwen2.5-7b");
    assert_eq!(windows(&spec(&qwen)), vec![None; 28]);
    // A smaller number of full layers alone switches nothing on; the flag does.
    let qwen = with(qwen, "max_window_layers", Some(json!(21)));
    assert_eq!(windows(&spec(&qwen)), vec![None; 28]);
    let on = with(qwen, "use_sliding_window", Some(json!(true)));
    let on = spec(&on);
    assert_eq!(on.layer_kind(LayerIndex(20)), LayerKind::Full);
    assert_eq!(on.layer_kind(LayerIndex(21)), LayerKind::Sliding);
    assert_eq!(windows(&on)[20..22], [None, Some(131_072)]);
}

#[test]
fn rotary_base_is_read_from_both_places() {
    let old = json_of("qwen3-4b");
    let new =
        with(with(old.clone(), "rope_theta", None), "rope_parameters", Some(json!({"rope_theta": 5e5})));
    assert_eq!((spec(&old).rope_theta, spec(&new).rope_theta), (1e6, 5e5));
    let scaled = with(old, "rope_scaling", Some(json!({"rope_type": "yarn", "factor": 4.0})));
    assert_eq!(spec(&scaled).rope_scaling.as_deref(), Some("yarn"));
    assert_eq!(spec(&json_of("mistral-7b")).rope_theta, 1e4);
}

#[test]
fn unknown_families_and_malformed_values_are_refused_by_name() {
    let found = message(&with(json_of("qwen3-4b"), "model_type", Some(json!("gpt_bigcode"))));
    assert!(found.contains("gpt_bigcode") && found.contains("qwen3, qwen2, llama, mistral"), "{found}");
    let cases = [
        ("hidden_size", json!("2560")),
        ("hidden_size", json!(0)),
        ("hidden_size", json!(-1)),
        ("hidden_size", json!(2560.5)),
        ("hidden_size", json!(u64::MAX)),
        ("head_dim", json!(1 << 19)),
        ("num_key_value_heads", json!(5)),
        ("rms_norm_eps", json!(0)),
        ("layer_types", json!("full_attention")),
        ("rope_parameters", json!(3)),
        ("hidden_act", json!("gelu")),
        ("tie_word_embeddings", json!(1)),
        ("partial_rotary_factor", json!(0.5)),
    ];
    for (key, value) in cases {
        let found = message(&with(json_of("qwen3-4b"), key, Some(value)));
        assert!(found.contains(&format!("`{key}`")), "{found}");
    }
    assert!(ModelSpec::from_json("{\"hidden_size\": ").unwrap_err().to_string().contains("not valid JSON"));
    assert!(ModelSpec::from_json("[]").unwrap_err().to_string().contains("must be an object"));
}

#[test]
fn boundary_of_the_published_run() {
    // 72 x 1024 tokens of width 5120 in two bytes: 0.703125 GiB.
    let wide = with(json_of("llama-3.1-8b"), "hidden_size", Some(json!(5120)));
    let work = Workload::new(72, 1024, 2).unwrap();
    assert_eq!(spec(&wide).boundary_bytes(&work).get(), 754_974_720);
}

#[test]
fn work_of_a_small_decoder_by_brute_force() {
    let (h, heads, kv, d, m, v, s, b) = (6usize, 4usize, 2usize, 8usize, 10usize, 11usize, 5usize, 3usize);
    let config = json!({
        "model_type": "mistral", "hidden_size": h, "num_hidden_layers": 2, "intermediate_size": m,
        "vocab_size": v, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": d,
        "rms_norm_eps": 1e-6, "sliding_window": 3, "tie_word_embeddings": true,
    });
    // Count multiply-adds one output element at a time.
    let mut layer = 0usize;
    for _token in 0..b * s {
        layer += heads * d * h + 2 * kv * d * h + h * heads * d + 2 * m * h + h * m;
    }
    for _sequence in 0..b {
        for query in 0..s {
            let seen = (0..s).filter(|&key| key <= query && query - key < 3).count();
            layer += heads * seen * d * 2;
        }
    }
    let spec = spec(&config);
    let work = Workload::new(b, s, 4).unwrap();
    assert_eq!(spec.layer_forward_flops(LayerIndex(0), &work), 2.0 * layer as f64);
    let head = b * s * h * v;
    assert_eq!(spec.head_forward_flops(&work), 2.0 * head as f64);
    let per_token = 6.0 * (2 * layer + head) as f64 / (b * s) as f64;
    assert!((spec.flops_per_token_exact(&work) - per_token).abs() < 1e-9 * per_token);
    let layer_parameters = 2 * h + 2 * (heads * d * h) + 2 * (kv * d * h) + 3 * h * m;
    assert_eq!(spec.flops_per_token_6n(), 6.0 * (v * h + 2 * layer_parameters + h) as f64);
}

#[test]
fn internals_are_the_sum_of_the_documented_tensors() {
    // Qwen3-4B, 16 x 1024 tokens, bf16: widths 3 x 2560 (normed, residual, normed), 3 x 4096 (q twice, output),
    // 3 x 1024 (k twice, v), 3 x 9728; statistics of 2 + 2 x 32 + 8 numbers a token.
    let spec = spec(&json_of("qwen3-4b"));
    let work = Workload::new(16, 1024, 2).unwrap();
    let wide = 3 * (2560 + 4096 + 1024 + 9728) * 2;
    assert_eq!(spec.internals_bytes(LayerIndex(0), &work).get(), 16_384 * (wide + 74 * 4));
}

#[test]
fn impossible_workloads_are_refused() {
    assert!(Workload::new(0, 8, 2).is_err());
    assert!(Workload::new(1, 0, 2).is_err());
    assert!(Workload::new(1, 8, 3).is_err());
    assert!(Workload::new(usize::MAX, 2, 2).is_err());
    assert!(Workload::new(1 << 20, 1 << 11, 2).is_err());
}
