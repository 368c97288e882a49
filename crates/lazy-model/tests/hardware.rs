//! The hardware profile: presets, round trip, and what is refused.
#![allow(clippy::unwrap_used)] // Helpers of tests may unwrap, as tests do.

use lazy_model::timeline::StepCosts;
use lazy_model::{
    Bytes, HardwareProfile, Marked, ModelSpec, Source, StepProblem, StepTimes, Tier, TierBytes, Training,
    Workload,
};
use serde_json::{Value, json};

fn with_times() -> HardwareProfile {
    let list = |ms: [f64; 2]| Marked::measured(ms.to_vec(), "probe", "2026-11-29T12:00:00Z");
    let one = |ms| Marked::measured(ms, "probe", "2026-11-29T12:00:00Z");
    let times = StepTimes {
        workload: "two layers, batch 1".into(),
        forward_ms: list([14.0, 20.1]),
        saving_forward_ms: list([15.0, 21.3]),
        internals_forward_ms: list([12.0, 17.5]),
        backward_ms: list([30.7, 41.0]),
        prologue_ms: one(0.3),
        prologue_backward_ms: one(0.2),
        epilogue_ms: one(7.7),
    };
    let preset = HardwareProfile::preset("reference").unwrap();
    HardwareProfile {
        times: Some(times),
        optimizer_elements_per_s: Some(Marked::assumed(4.5e8, "guess")),
        optimizer_commit_share: Some(Marked::assumed(0.125, "guess")),
        ..preset
    }
}

#[test]
fn presets_carry_the_published_rates_and_are_marked_assumed() {
    let reference = HardwareProfile::preset("reference").unwrap();
    let rates = reference.links.rates();
    // One boundary of the published run takes 62.9 ms to host, 225.4 to NVMe and 266.8 back.
    let boundary = Bytes(754_974_720);
    let ms = |time: lazy_model::Seconds| (time.as_ms() * 10.0).round() / 10.0;
    assert_eq!(
        [
            ms(rates.d2h.time(boundary)),
            ms(rates.nvme_write.time(boundary)),
            ms(rates.nvme_read.time(boundary))
        ],
        [62.9, 225.4, 266.8]
    );
    assert_eq!(reference.links.h2d.source, Source::Assumed);
    assert_eq!(reference.tiers.get(Tier::Host), None);
    for name in HardwareProfile::PRESETS {
        assert!(HardwareProfile::preset(name).is_some(), "{name}");
    }
    assert!(HardwareProfile::preset("abacus").is_none());
}

#[test]
fn a_profile_survives_its_json() {
    for profile in [with_times(), HardwareProfile::preset("h200").unwrap()] {
        assert_eq!(HardwareProfile::from_json(&profile.to_json()).unwrap(), profile);
    }
    let value: Value = serde_json::from_str(&with_times().to_json()).unwrap();
    assert_eq!(value["links"]["d2h_bytes_per_s"]["value"], 12e9);
    assert_eq!(value["times"]["forward_ms"]["source"], "measured");
}

/// Profiles from before forwards for internals had a time of their own.
#[test]
fn one_time_of_a_saving_forward_stands_for_both() {
    let mut value: Value = serde_json::from_str(&with_times().to_json()).unwrap();
    assert!(value["times"].as_object_mut().unwrap().remove("internals_forward_ms").is_some());
    let costs = HardwareProfile::from_json(&value.to_string()).unwrap().costs().unwrap();
    assert_eq!(costs.internals_forward, costs.saving_forward);
    let costs = with_times().costs().unwrap();
    assert_eq!(costs.internals_forward[1].as_ms(), 17.5);
    value["times"]["internals_forward_ms"] =
        json!({"value": [1], "source": "measured", "by": "probe", "when": "2026-11-30"});
    let refused = HardwareProfile::from_json(&value.to_string()).unwrap_err().to_string();
    assert!(refused.contains("`times.internals_forward_ms` has 1 layers, but forward_ms has 2"), "{refused}");
}

#[test]
fn version_1_is_read() {
    let text = r#"{"version": 1, "name": "old", "tiers": {}, "times": null, "optimizer_elements_per_s": null, "links": {
        "d2h_bytes_per_s": {"value": 12e9, "source": "assumed", "by": "x"},
        "h2d_bytes_per_s": {"value": 11e9, "source": "assumed", "by": "x"},
        "nvme_write_bytes_per_s": {"value": 3e9, "source": "assumed", "by": "x"},
        "nvme_read_bytes_per_s": {"value": 2e9, "source": "assumed", "by": "x"}}}"#;
    let profile = HardwareProfile::from_json(text).unwrap();
    assert_eq!(profile.links.rates().h2d.get(), 11e9);
    assert_eq!((profile.compute, profile.drives), (None, None));
}

#[test]
fn drives_give_the_rates_that_links_leave_out() {
    let profile = |striped: bool| {
        let mut value: Value =
            serde_json::from_str(&HardwareProfile::preset("h200").unwrap().to_json()).unwrap();
        let links = value["links"].as_object_mut().unwrap();
        assert!(
            links.remove("nvme_write_bytes_per_s").is_some()
                && links.remove("nvme_read_bytes_per_s").is_some()
        );
        let rate = |gb: f64| json!({"value": gb * 1e9, "source": "assumed", "by": "data sheet"});
        let drive = |write, read| json!({"name": "d", "write_bytes_per_s": rate(write), "read_bytes_per_s": rate(read)});
        value["drives"] = json!({"striped": striped, "list": [drive(5.0, 6.0), drive(4.0, 7.0)]});
        HardwareProfile::from_json(&value.to_string()).unwrap().links.rates()
    };
    // Equal stripes end with the slower drive.
    assert_eq!((profile(true).nvme_write.as_gb(), profile(true).nvme_read.as_gb()), (8.0, 12.0));
    assert_eq!((profile(false).nvme_write.as_gb(), profile(false).nvme_read.as_gb()), (5.0, 6.0));
}

/// A Qwen3-4B layer of 16 x 1024 tokens takes 7.9 ms forward and 14 ms backward on the H200, as measured with PyTorch.
#[test]
fn times_of_layers_that_were_never_measured_are_derived() {
    let model = ModelSpec::from_json(QWEN3_4B).unwrap();
    let work = Workload::new(16, 1024, 2).unwrap();
    let profile = HardwareProfile::preset("h200").unwrap();
    let (costs, source) = StepCosts::for_model(&model, &work, &profile).unwrap();
    assert_eq!((costs.forward.len(), source), (36, Source::Assumed));
    assert!((costs.forward[0].as_ms() / 7.9 - 1.0).abs() < 0.05, "{}", costs.forward[0]);
    assert!((costs.backward[0].as_ms() / 14.0 - 1.0).abs() < 0.06, "{}", costs.backward[0]);
    let reference = HardwareProfile::preset("reference").unwrap();
    let refused = StepCosts::for_model(&model, &work, &reference).unwrap_err().to_string();
    assert!(refused.contains("`probe`") && refused.contains("`compute`"), "{refused}");
}

#[test]
fn a_step_of_a_model_counts_what_it_holds() {
    let model = ModelSpec::from_json(QWEN3_4B).unwrap();
    let work = Workload::new(16, 1024, 2).unwrap();
    let profile = HardwareProfile::preset("h200").unwrap();
    let training = Training { loss_chunk_tokens: 1024, ..Training::default() };
    let step = |training: &Training| {
        StepProblem::for_model(&model, &work, &profile, TierBytes::default(), training).unwrap()
    };
    let problem = step(&training);
    // bf16 weights and gradients of 4,022,468,096 parameters; boundaries of 16 x 1024 x 2560.
    assert_eq!(problem.fixed.hbm, Bytes(4 * 4_022_468_096));
    assert_eq!(problem.boundary_bytes, vec![Bytes(16 * 1024 * 2560 * 2); 37]);
    // Logits of a chunk in bf16 and fp32, its normed input with a gradient, and a loss for each token.
    assert_eq!(problem.workspaces.loss, Bytes(1024 * (151_936 * 6 + 2560 * 4 + 4)));
    // Streamed, HBM holds what lies outside the layers: the (tied) embedding and the final norm.
    let streamed = step(&Training { stream_weights: true, stream_gradients: true, ..training });
    assert_eq!(streamed.fixed.hbm, Bytes(4 * (151_936 * 2560 + 2560)));
    let layers: Bytes = streamed.streamed.weights.iter().copied().sum();
    assert_eq!(layers + Bytes(2 * (151_936 * 2560 + 2560)), Bytes(2 * 4_022_468_096));
}

const QWEN3_4B: &str = r#"{"model_type": "qwen3", "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 9728, "num_hidden_layers": 36, "vocab_size": 151936, "tie_word_embeddings": true,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "hidden_act": "silu", "attention_bias": false}"#;

#[test]
fn costs_are_in_seconds() {
    let costs = with_times().costs().unwrap();
    assert_eq!(costs.forward[0].get(), 0.014);
    assert_eq!(costs.epilogue.get(), 0.0077);
    assert!(HardwareProfile::preset("h200").unwrap().costs().is_none());
}

#[test]
fn faults_name_their_key_path() {
    let cases = [
        ("/version", json!(3), "`version` must be 1 or 2"),
        ("/links/h2d_bytes_per_s", Value::Null, "`links.h2d_bytes_per_s` is absent"),
        ("/links/d2h_bytes_per_s", json!(12e9), "`links.d2h_bytes_per_s` must be an object"),
        ("/links/d2h_bytes_per_s/value", json!(-1), "`links.d2h_bytes_per_s.value` must be a number"),
        ("/links/d2h_bytes_per_s/source", json!("rumour"), "`links.d2h_bytes_per_s.source` is \"rumour\""),
        ("/links/d2h_bytes_per_s/by", Value::Null, "`links.d2h_bytes_per_s.by` is absent"),
        ("/tiers", json!({"hbm_gib": 70}), "`tiers.hbm_gib` is not a known key"),
        ("/tiers/hbm_bytes/value", json!(1.5), "`tiers.hbm_bytes.value` must be a whole number"),
        ("/times/backward_ms/value", json!([1]), "`times.backward_ms` has 1 layers, but forward_ms has 2"),
        ("/times/backward_ms/value", json!([1, "x"]), "`times.backward_ms.value` must be"),
        ("/optimizer_elements_per_s/value", json!(0), "must be a number above 0"),
        ("/times/epilogue_ms/when", Value::Null, "`times.epilogue_ms.when` is absent"),
    ];
    for (pointer, new, wanted) in cases {
        let mut value: Value = serde_json::from_str(&with_times().to_json()).unwrap();
        *value.pointer_mut(pointer).unwrap() = new;
        let found = HardwareProfile::from_json(&value.to_string()).unwrap_err().to_string();
        assert!(found.contains(wanted), "{found} lacks {wanted}");
    }
}
