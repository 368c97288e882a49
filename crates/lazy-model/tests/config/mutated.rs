//! Damaged configs of every family: each is read or refused, and whatever was read can be sized.

use std::num::NonZeroU64;

use lazy_model::{AttentionKernel, LayerIndex, ModelSpec, MomentFormat, Sharding, StateFormat, Workload};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{GIVEN, json_of};

#[derive(Clone, Debug)]
enum Edit {
    Remove,
    Replace(Value),
    /// Multiplies a number.
    Scale(u64),
    /// Puts everything under a wrapper's key, that many times.
    Nest(usize, usize),
    /// Adds a key.
    Add(&'static str, Value),
}

fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (0u64..70).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        prop::sample::select(vec![
            1u64 << 12,
            1 << 16,
            1 << 20,
            1 << 24,
            1 << 30,
            1 << 31,
            1 << 53,
            u64::MAX
        ])
        .prop_map(Value::from),
        prop::sample::select(vec![-0.0, 1e-320, 0.5, 1e18, 1e300, f64::MAX, -1.0]).prop_map(Value::from),
        prop::sample::select(GIVEN.to_vec()).prop_map(Value::from),
        prop::sample::select(vec!["", "llama", "deepseek_v3", "qwen3_next", "mixtral", "gemma2", "silu"])
            .prop_map(Value::from),
        (0usize..200).prop_map(|n| json!(vec!["linear_attention"; n])),
        (1usize..120).prop_map(|depth| (0..depth).fold(json!(1), |inner, _| json!([inner]))),
        (1usize..120).prop_map(|depth| (0..depth).fold(json!(1), |inner, _| json!({"text_config": inner}))),
    ]
}

fn edit() -> impl Strategy<Value = Edit> {
    let keys = vec![
        "text_config",
        "model_type",
        "layer_types",
        "swa_num_attention_heads",
        "attention_other_setting",
        "mlp_only_layers",
        "moe_layer_freq",
        "num_local_experts",
        "full_attention_interval",
        "decoder_sparse_step",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "quantization_config",
    ];
    prop_oneof![
        Just(Edit::Remove),
        value().prop_map(Edit::Replace),
        (0u64..5000).prop_map(Edit::Scale),
        (0usize..4, 1usize..60).prop_map(|(key, times)| Edit::Nest(key, times)),
        (prop::sample::select(keys), value()).prop_map(|(key, value)| Edit::Add(key, value)),
    ]
}

fn apply(config: &mut Value, which: usize, edit: Edit) {
    if let Edit::Nest(key, times) = edit {
        const KEYS: [&str; 4] = ["text_config", "language_config", "llm_config", "thinker_config"];
        for _ in 0..times {
            *config = json!({ KEYS[key]: config.take() });
        }
        return;
    }
    let Some(map) = config.as_object_mut().filter(|map| !map.is_empty()) else { return };
    let key = map.keys().nth(which % map.len()).unwrap().clone();
    match edit {
        Edit::Remove => drop(map.remove(&key)),
        Edit::Replace(value) => drop(map.insert(key, value)),
        Edit::Scale(factor) => {
            if let Some(number) = map.get(&key).and_then(Value::as_u64) {
                map.insert(key, json!(number.saturating_mul(factor)));
            }
        }
        Edit::Add(key, value) => drop(map.insert(key.into(), value)),
        Edit::Nest(..) => {}
    }
}

/// All that follows from a config, for the smallest and the largest workload.
fn size(spec: &ModelSpec) {
    assert!(!spec.layer_shapes.is_empty() && spec.layers() <= 4096);
    let largest = Workload::new(1, 1 << 30, 8).unwrap().with_attention(AttentionKernel::Eager);
    for work in [Workload::new(1, 1, 1).unwrap(), largest] {
        for layer in [0, spec.layers() / 2, spec.layers() - 1].map(LayerIndex) {
            let saved = spec.saved_tensors(layer, &work);
            assert!(saved.len() < 64 && spec.internals_bytes(layer, &work) >= saved[0].bytes);
            let workspace = spec.layer_workspace(layer, &work);
            assert!(workspace.forward.get() > 0 && workspace.backward.get() > 0);
            assert!(spec.layer_forward_flops(layer, &work).is_finite());
            assert!(spec.layer_parameter_count(layer) < spec.total_parameters());
        }
        assert!(spec.boundary_bytes(&work).get() > 0 && spec.loss_bytes(&work, 7).workspace.get() > 0);
        assert!(spec.flops_per_token_exact(&work).is_finite());
    }
    let format =
        StateFormat { weight_bytes: 2, gradient_bytes: 4, master: true, moments: MomentFormat::EightBit };
    assert!(spec.state_bytes(format, Sharding::Weights, NonZeroU64::MAX).total().get() > 0);
    let _ = spec.reference_layer_weight_bytes(2);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(1000), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn configs_of_every_family(
        name in prop::sample::select(GIVEN.to_vec()),
        edits in prop::collection::vec((any::<usize>(), edit()), 0..5),
    ) {
        let mut config = json_of(name);
        for (which, edit) in edits {
            apply(&mut config, which, edit);
        }
        let text = config.to_string();
        match ModelSpec::from_json(&text) {
            Ok(spec) => {
                size(&spec);
                let notes: usize = spec.notes.iter().map(String::len).sum();
                prop_assert!(notes < 10_000 + 100 * text.len());
            }
            Err(error) => prop_assert!(error.to_string().len() < 2000 + 2 * text.len()),
        }
    }

    #[test]
    fn indexes(which in any::<usize>(), edit in edit(), text in value()) {
        let mut spec = super::spec(&json_of("qwen3-4b"));
        let mut index = json!({"metadata": {"total_size": 8_044_936_192_u64}, "weight_map": {"lm_head.weight": "a"}});
        apply(&mut index, which, edit);
        let _ = spec.with_safetensors_index(&index.to_string());
        let _ = spec.with_safetensors_index(&text.to_string());
        let _ = spec.with_safetensors_header(&json!({"a": text, "lm_head.weight": index}).to_string());
        size(&spec);
    }
}
