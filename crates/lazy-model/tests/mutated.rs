//! Readers of foreign JSON meet damaged files: each is read or refused, and nothing that was read breaks what uses it.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "common/steps.rs"]
mod steps;

use lazy_model::step::StepPlan;
use lazy_model::{
    Bytes, CostChain, HardwareProfile, LayerIndex, ModelSpec, Schedule, StepProblem, TierBytes, Workload,
};
use proptest::prelude::*;
use serde_json::{Value, json};

const CONFIG: &str = r#"{
  "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": false,
  "vocab_size": 256, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
  "head_dim": 16, "intermediate_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
  "max_position_embeddings": 128, "tie_word_embeddings": true, "layer_types": ["full_attention", "full_attention",
  "full_attention", "full_attention"], "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}
}"#;

const CHAIN: &str = r#"{"layers": 4, "layer_window_ms": [10, 10, 10, 10], "layer_recompute_ms": [10, 7, 10, 7],
  "boundary_bytes": [4096, 4096, 4096, 4096, 4096], "param_h2d_bytes": [0, 0, 0, 0], "grad_d2h_bytes": [0, 0, 0, 0],
  "gpu_budget_bytes": 8192, "cpu_budget_bytes": 4096, "nvme_budget_bytes": 4096, "d2h_bytes_per_s": 1e6,
  "h2d_bytes_per_s": 1e6, "nvme_write_bytes_per_s": 1e6, "nvme_read_bytes_per_s": 1e6, "pcie_window_scale": 1,
  "nvme_window_scale": 1, "pcie_capacity_fraction": 1, "nvme_capacity_fraction": 1, "max_segment_layers": 4,
  "checkpoint_penalty": 1e-5, "nvme_tiebreak": 1e-3, "d2h_first_window_offset": 0, "h2d_first_window_offset": 1,
  "locks": {"fixed": {"4": "gpu"}, "gpu": [0, 4], "edges": [[0, 4]]}}"#;

/// What a hand or a disk might put in the place of a value.
fn replacement() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (0u64..10).prop_map(Value::from),
        prop::sample::select(vec![1u64 << 20, 1 << 31, 1 << 32, 1 << 53, 1 << 62, u64::MAX - 1, u64::MAX])
            .prop_map(Value::from),
        prop::sample::select(vec![-0.0, 1e-320, 0.5, 1e18, 1e300, f64::MAX, -1.0]).prop_map(Value::from),
        prop::sample::select(vec!["", "gpu", "hbm", "recompute", "nvme", "silu", "9"]).prop_map(Value::from),
        Just(json!([])),
        Just(json!({})),
        Just(json!([[[[]]]])),
    ]
}

/// Walks down `value` as `path` says and calls `change` where it ends.
fn at(value: &mut Value, path: &[u16], change: &mut dyn FnMut(&mut Value)) {
    let pick = |n: usize, step: u16| usize::from(step) % n;
    match (value, path) {
        (Value::Object(map), [step, rest @ ..]) if !map.is_empty() => {
            let n = pick(map.len(), *step);
            if let Some(inner) = map.values_mut().nth(n) {
                at(inner, rest, change);
            }
        }
        (Value::Array(list), [step, rest @ ..]) if !list.is_empty() => {
            let n = pick(list.len(), *step);
            at(&mut list[n], rest, change);
        }
        (leaf, _) => change(leaf),
    }
}

/// `text` with up to three values replaced or, where they hold others, cut short or repeated.
fn mutated(text: &'static str) -> impl Strategy<Value = String> {
    let edit = (prop::collection::vec(any::<u16>(), 1..4), replacement(), 0u8..6);
    prop::collection::vec(edit, 1..4).prop_map(move |edits| {
        let mut value: Value = serde_json::from_str(text).unwrap();
        for (path, new, how) in edits {
            at(&mut value, &path, &mut |place| match (how, place) {
                (0, Value::Array(list)) => drop(list.pop()),
                (1, Value::Array(list)) => {
                    let last = list.last().cloned();
                    list.extend(last);
                }
                (_, place) => *place = new.clone(),
            });
        }
        value.to_string()
    })
}

fn profile() -> String {
    let mut profile = HardwareProfile::preset("h200").unwrap();
    let list = |ms: f64| lazy_model::Marked::assumed(vec![ms; 4], "test");
    let one = |ms: f64| lazy_model::Marked::assumed(ms, "test");
    profile.times = Some(lazy_model::StepTimes {
        workload: "test".into(),
        forward_ms: list(1.0),
        saving_forward_ms: list(1.5),
        internals_forward_ms: list(1.2),
        backward_ms: list(2.0),
        prologue_ms: one(0.1),
        prologue_backward_ms: one(0.1),
        epilogue_ms: one(0.5),
    });
    profile.optimizer_elements_per_s = Some(one(1e8));
    profile.optimizer_commit_share = Some(one(0.25));
    profile.to_json()
}

fn schedule() -> String {
    let mut schedule = Schedule::named("checkpoint", &[Bytes(4096); 5], false);
    schedule.placement[1] = lazy_model::Placement::Host;
    schedule.placement[2] = lazy_model::Placement::Nvme;
    schedule.placement[3] = lazy_model::Placement::Recompute;
    schedule.to_json().unwrap()
}

fn leak(text: String) -> &'static str {
    Box::leak(text.into_boxed_str())
}

/// Plans four layers of one page each on the machine of `profile`, by the schedule.
fn verify(profile: &HardwareProfile, schedule: &Schedule) {
    let Some(costs) = profile.costs().filter(|c| c.forward.len() == 4) else { return };
    let room = |tier| profile.tiers.get(tier).unwrap_or(Bytes(1 << 30));
    let budgets = TierBytes {
        hbm: room(lazy_model::Tier::Hbm),
        host: room(lazy_model::Tier::Host),
        nvme: room(lazy_model::Tier::Nvme),
    };
    let problem = StepProblem { costs, budgets, ..steps::step(4, Bytes(4096)) };
    let _ = problem.chain(problem.budgets).validate();
    if let Ok(verified) = problem.verify(schedule) {
        assert!(verified.promise.peak_bytes.hbm <= problem.budgets.hbm);
    }
}

/// What the generator found, with or without luck.
#[test]
fn a_schedule_with_absurd_counts_is_refused_or_laid_out() {
    let edit = |from: &str, to: &str| schedule().replace(from, to);
    assert!(Schedule::from_json(&edit("\"layers\": 4", "\"layers\": 18446744073709551615")).is_err());
    for (from, to, path) in [
        ("\"prefetch\": 1", "\"prefetch\": \"x\"", "`execution.prefetch`"),
        ("\"layers\": 4", "\"layers\": -4", "`layers`"),
    ] {
        let message = Schedule::from_json(&edit(from, to)).unwrap_err().to_string();
        assert!(message.contains(path), "{message}");
    }
    let far = Schedule::from_json(&edit("\"prefetch\": 1", "\"prefetch\": 18446744073709551615")).unwrap();
    let all = Schedule::from_json(&edit("\"prefetch\": 1", "\"prefetch\": 4")).unwrap();
    let sizes = [Bytes(4096); 5];
    assert_eq!(StepPlan::new(&far, &sizes).unwrap(), StepPlan::new(&all, &sizes).unwrap());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(500), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn model_configs(text in mutated(CONFIG), batch in any::<usize>(), seq in 1usize..5000) {
        if let Ok(spec) = ModelSpec::from_json(&text) {
            for tokens in [batch % 64, batch] {
                if let Ok(work) = Workload::new(tokens, seq, 4) {
                    let _ = (spec.boundary_bytes(&work), spec.internals_bytes(LayerIndex(0), &work));
                }
            }
            let _ = (spec.total_parameters(), spec.flops_per_token_6n());
        }
    }

    #[test]
    fn chains(text in mutated(CHAIN)) {
        if let Ok(chain) = CostChain::from_json(&text) {
            let again = CostChain::from_json(&chain.to_json()).unwrap();
            prop_assert_eq!(&again, &chain);
            let _ = chain.hash();
        }
    }

    #[test]
    fn profiles(text in mutated(leak(profile()))) {
        if let Ok(profile) = HardwareProfile::from_json(&text) {
            prop_assert_eq!(&HardwareProfile::from_json(&profile.to_json()).unwrap(), &profile);
            verify(&profile, &Schedule::from_json(&schedule()).unwrap());
        }
    }

    #[test]
    fn schedules(text in mutated(leak(schedule()))) {
        if let Ok(read) = Schedule::from_json(&text) {
            let _ = StepPlan::new(&read, &[Bytes(4096); 5]).map(|plan| plan.waits().len());
            verify(&HardwareProfile::from_json(&profile()).unwrap(), &read);
        }
    }
}
