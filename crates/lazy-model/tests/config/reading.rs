//! What is read, derived and refused.

use lazy_model::{LayerIndex, LayerKind, ModelSpec};
use serde_json::{Value, json};

use super::{GIVEN, attention, data, json_of, message, spec, windows, with};

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
fn m1_two_language_models_or_two_values_of_one_key_are_refused() {
    let flat = json_of("qwen3-4b");
    let other = with(flat.clone(), "num_hidden_layers", Some(2.into()));
    let both = |second: &Value| json!({"model_type": "wrapper", "text_config": flat, "llm_config": second});
    assert_eq!(spec(&both(&flat)).layer_shapes, spec(&flat).layer_shapes);
    let refused = message(&both(&other));
    assert!(refused.contains("`llm_config`") && refused.contains("`text_config`"), "{refused}");
    let text = data("qwen3-4b").replacen('{', "{\"num_hidden_layers\": 2,", 1);
    let refused = ModelSpec::from_json(&text).unwrap_err().to_string();
    assert!(refused.contains("`num_hidden_layers` is there twice"), "{refused}");
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
fn m4_layers_of_a_hybrid_differ_in_kind_parameters_and_work() {
    let hybrid = spec(&json_of("qwen3.6-27b-text"));
    let kinds: Vec<_> = (0..64).map(|l| hybrid.layer_kind(LayerIndex(l))).collect();
    let expected = |l| if l % 4 == 3 { LayerKind::Full } else { LayerKind::Linear };
    assert_eq!(kinds, (0..64).map(expected).collect::<Vec<_>>());
    let work = lazy_model::Workload::new(72, 1024, 2).unwrap();
    let recompute = |l| hybrid.layer_recompute_flops(LayerIndex(l), &work);
    assert_ne!(recompute(0), recompute(3));
    assert_ne!(hybrid.internals_bytes(LayerIndex(0), &work), hybrid.internals_bytes(LayerIndex(3), &work));
    // The interval says the same where the list is absent; without both nothing is assumed.
    let by_interval = with(json_of("qwen3.6-27b-text"), "layer_types", None);
    assert!(message(&by_interval).contains("`layer_types`"));
    let by_interval = with(by_interval, "full_attention_interval", Some(json!(4)));
    assert_eq!(spec(&by_interval).layer_shapes, hybrid.layer_shapes);
    let eight = with(by_interval, "full_attention_interval", Some(json!(8)));
    assert_eq!(spec(&eight).layer_kind(LayerIndex(3)), LayerKind::Linear);
}

#[test]
fn m4_layers_with_a_window_may_have_heads_of_their_own() {
    let plain = json_of("gemma-3-1b");
    let one = spec(&plain);
    let more = with(plain.clone(), "swa_num_attention_heads", Some(json!(6)));
    let other = json!({"attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 1,
        "head_dim": 256});
    let same = with(plain.clone(), "attention_other_setting", Some(other));
    for config in [more, same] {
        let six = spec(&config);
        assert_eq!((attention(&six, 0).heads, attention(&six, 5).heads), (6, 4));
        assert!(six.notes.iter().any(|note| note.contains("6 query heads")), "{:?}", six.notes);
        // Two more heads of width 256 in 22 layers: their rows of the query and columns of the output projection.
        assert_eq!(six.total_parameters() - one.total_parameters(), 22 * 2 * 2 * 256 * 1152);
        let work = lazy_model::Workload::new(1, 1024, 2).unwrap();
        let flops = |spec: &ModelSpec, l| spec.layer_recompute_flops(LayerIndex(l), &work);
        assert!(flops(&six, 0) > flops(&one, 0));
        assert_eq!(flops(&six, 5), flops(&one, 5));
    }
    // An override in words that are not known is refused, not passed over.
    for key in ["num_attention_heads_per_layer", "global_head_dim", "dense_intermediate_size"] {
        assert!(message(&with(plain.clone(), key, Some(json!(6)))).contains(&format!("`{key}`")));
        spec(&with(plain.clone(), key, Some(Value::Null)));
    }
}

#[test]
fn m4_patterns_of_gemma_follow_list_pattern_and_architecture() {
    let gemma2 = spec(&json_of("gemma-2-2b"));
    assert_eq!(windows(&gemma2)[..3], [Some(4096), None, Some(4096)]);
    let gemma3 = json_of("gemma-3-1b");
    let listed = spec(&gemma3);
    assert_eq!(windows(&listed)[4..7], [Some(512), None, Some(512)]);
    let by_pattern = with(gemma3, "layer_types", None);
    assert_eq!(spec(&by_pattern).layer_shapes, listed.layer_shapes);
    let silent = with(by_pattern, "_sliding_window_pattern", None);
    let read = spec(&silent);
    assert_eq!(read.layer_shapes, listed.layer_shapes);
    assert!(read.notes.iter().any(|note| note.contains("pattern of 6")));
}

#[test]
fn every_dimension_is_required() {
    // Keys whose absence leaves something to assume, by file; everything else a config holds is no dimension there.
    let everywhere = ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"];
    let dense = ["intermediate_size"];
    let moe = ["moe_intermediate_size", "num_experts", "num_experts_per_tok"];
    let linear = [
        "linear_conv_kernel_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
    ];
    let latent = [
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "first_k_dense_replace",
        "n_shared_experts",
    ];
    let files: [(&str, Vec<&str>); 10] = [
        ("qwen3-8b", [&dense[..], &["head_dim", "num_key_value_heads"]].concat()),
        ("qwen3-30b-a3b", [&moe[..], &["num_key_value_heads"]].concat()),
        (
            "mixtral-8x7b",
            vec!["intermediate_size", "num_local_experts", "num_experts_per_tok", "num_key_value_heads"],
        ),
        ("gemma-2-2b", [&dense[..], &["head_dim", "num_key_value_heads"]].concat()),
        ("gemma-3-1b", [&dense[..], &["head_dim", "num_key_value_heads"]].concat()),
        ("phi-3-mini", dense.to_vec()),
        ("glm-4-9b", [&dense[..], &["head_dim", "num_key_value_heads"]].concat()),
        ("deepseek-v3", [&latent[..], &dense, &["moe_intermediate_size", "n_routed_experts"]].concat()),
        ("qwen3-next-80b", [&linear[..], &moe, &["head_dim", "shared_expert_intermediate_size"]].concat()),
        ("qwen3.6-27b-text", [&linear[..], &dense, &["head_dim"]].concat()),
    ];
    for (file, keys) in files {
        for key in keys.into_iter().chain(everywhere) {
            let found = message(&with(json_of(file), key, None));
            assert!(found.contains(&format!("`{key}` is absent")), "{file}, {key}: {found}");
            let nested =
                serde_json::json!({"model_type": "wrapper", "llm_config": with(json_of(file), key, None)});
            let found = message(&nested);
            assert!(found.contains(&format!("`llm_config.{key}` is absent")), "{file}, {key}: {found}");
        }
    }
}

#[test]
fn parts_that_are_not_counted_are_named() {
    let deepseek = spec(&json_of("deepseek-v3"));
    assert!(deepseek.notes.iter().any(|note| note.contains("`num_nextn_predict_layers` is 1")));
    let text = json_of("gemma-3-1b");
    let seen =
        spec(&json!({"model_type": "gemma3", "vision_config": {"hidden_size": 1152}, "text_config": text}));
    assert!(seen.notes.iter().any(|note| note.contains("`vision_config`")));
    assert_eq!(seen.total_parameters(), spec(&text).total_parameters());
}

#[test]
fn contradictions_between_dimensions_are_refused() {
    let cases = [
        ("deepseek-v3", "qk_head_dim", json!(200)),
        ("deepseek-v3", "moe_layer_freq", json!(2)),
        ("deepseek-v3", "n_routed_experts", json!(0)),
        ("qwen3-8b", "rope_parameters", json!({"partial_rotary_factor": 0.5})),
        ("deepseek-v3", "num_experts_per_tok", json!(257)),
        ("qwen3-30b-a3b", "num_local_experts", json!(64)),
        ("qwen3-30b-a3b", "mlp_only_layers", json!([48])),
        ("qwen3.6-27b-text", "linear_num_key_heads", json!(17)),
        ("qwen3.6-27b-text", "attn_output_gate", json!(false)),
        ("gemma-3-1b", "hidden_activation", json!("relu")),
        ("mixtral-8x7b", "hidden_size", json!(1 << 21)),
    ];
    for (file, key, value) in cases {
        let found = message(&with(json_of(file), key, Some(value)));
        assert!(found.contains(&format!("`{key}")), "{found}");
    }
}

#[test]
fn the_list_of_given_configs_is_whole() {
    let totals = json_of("totals");
    let mut names: Vec<&str> = totals.as_object().unwrap().keys().map(String::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, GIVEN);
}
