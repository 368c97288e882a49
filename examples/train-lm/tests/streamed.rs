//! Runs whose layers have weights and gradients at home in host RAM: the bits of runs that keep them in HBM.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "common/machine.rs"]
mod machine;

use std::fs;
use std::path::PathBuf;

use lazy_solver::budgets::BudgetArgs;
use serde_json::{Value, json};
use train_lm::homes::WeightsHome;
use train_lm::settings::{DeviceChoice, DurabilityChoice, StateHome, TrainArgs};
use train_lm::train::{Summary, train};

const LAYERS: usize = 6;
/// Bytes of the parameters of a layer, each from a multiple of 256 on: 2 norms of 32 float32 and 2 of a head of 16, query and output of
/// 32 x 32, key and value of 32 x 16, three matrices of 32 x 64.
const LAYER_BYTES: u64 = 4 * 256 + 4 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64);

fn config() -> String {
    json!({
        "model_type": "qwen3", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "tie_word_embeddings": true
    })
    .to_string()
}

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap());
        fs::write(place.path("config.json"), config()).unwrap();
        fs::write(place.path("profile.json"), machine::profile(LAYERS, [20.0; 2])).unwrap();
        fs::write(place.path("text.txt"), "to be or not to be, that is the question. ".repeat(50)).unwrap();
        fs::write(place.path("held-out.txt"), "whether it is nobler in the mind to suffer ".repeat(9))
            .unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn args(&self, out: &str, weights: WeightsHome) -> TrainArgs {
        TrainArgs {
            device: DeviceChoice::Host,
            steps: Some(4),
            model: Some(self.path("config.json")),
            text: vec![self.path("text.txt")],
            batch: Some(2),
            seq: Some(32),
            dropout: Some(0.1),
            plan: "auto".into(),
            out: Some(self.path(out)),
            json: true,
            weights,
            budgets: self.budgets(),
            ..TrainArgs::default()
        }
    }

    fn budgets(&self) -> BudgetArgs {
        BudgetArgs { profile: Some(self.path("profile.json")), ..BudgetArgs::default() }
    }

    fn file(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    /// Evaluations without the time that they took.
    fn evaluations(&self, run: &str) -> Vec<Value> {
        let text = String::from_utf8(self.file(&format!("{run}/evaluations.jsonl"))).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.map(|line| json!([line["step"], line["loss"], line["tokens"]])).collect()
    }
}

fn run(args: &TrainArgs) -> Summary {
    train(args).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn weights_are_those_of_runs_that_keep_them_in_hbm_for_every_plan() {
    let place = Place::new();
    for (accum, clip) in [(1, 1.0), (2, 1.0), (1, 0.0), (2, 0.0)] {
        let of = |name: &str, plan: &str, weights| TrainArgs {
            accum: Some(accum),
            clip: Some(clip),
            plan: plan.into(),
            ..place.args(&format!("{name} {plan} {accum} {clip}"), weights)
        };
        let resident = run(&of("resident", "checkpoint", WeightsHome::Hbm));
        let plans = if (accum, clip) == (2, 0.0) {
            &["auto", "resident", "checkpoint"][..]
        } else {
            &["auto", "checkpoint"]
        };
        for &plan in plans {
            let streamed = run(&of("streamed", plan, WeightsHome::Host));
            assert_eq!(
                streamed.weights_digest, resident.weights_digest,
                "{plan}, accum {accum}, clip {clip}"
            );
            assert_eq!((streamed.loss_first, streamed.loss_last), (resident.loss_first, resident.loss_last));
            assert!(streamed.hbm_peak_bytes <= streamed.hbm_budget_bytes);
            let all_tiers = streamed.counts.hbm > 1 && streamed.counts.host > 0 && streamed.counts.nvme > 0;
            assert!(plan != "auto" || all_tiers, "{:?}", streamed.counts);
            if plan == "checkpoint" {
                // Weights and gradients of all layers leave HBM for RAM.
                let homes = 2 * LAYERS as u64 * LAYER_BYTES;
                assert!(streamed.hbm_peak_bytes < resident.hbm_peak_bytes, "{streamed:?}");
                assert!(streamed.host_peak_bytes.get() >= resident.host_peak_bytes.get() + homes);
            }
        }
        let text = |name: &str| {
            String::from_utf8(place.file(&format!("streamed checkpoint {accum} {clip}/{name}"))).unwrap()
        };
        let last: Value = serde_json::from_str(text("metrics.jsonl").lines().last().unwrap()).unwrap();
        // No boundary leaves HBM: what goes out are the gradients, in every micro-batch.
        assert_eq!(last["bytes"]["d2h"], accum as u64 * LAYERS as u64 * LAYER_BYTES);
        assert!(text("report.html").contains("at home in host RAM"));
    }
}

#[test]
fn a_run_goes_on_with_its_weights_elsewhere_and_evaluates_and_exports_the_same() {
    let place = Place::new();
    let with = |out: &str, weights, steps| {
        let mut args = TrainArgs { steps: Some(steps), accum: Some(2), ..place.args(out, weights) };
        args.habits.eval_text = vec![place.path("held-out.txt")];
        args.habits.eval_every = Some(2);
        args
    };
    let straight = run(&with("straight", WeightsHome::Hbm, 6));
    for (out, begun, continued) in [
        ("out", WeightsHome::Hbm, WeightsHome::Host),
        ("in", WeightsHome::Host, WeightsHome::Hbm),
        ("stays", WeightsHome::Host, WeightsHome::Host),
    ] {
        run(&with(out, begun, 4));
        let resumed = run(&TrainArgs {
            resume: Some(place.path(out)),
            steps: Some(6),
            plan: "auto".into(),
            weights: continued,
            budgets: place.budgets(),
            json: true,
            ..TrainArgs::default()
        });
        assert_eq!(resumed.weights_digest, straight.weights_digest, "{out}");
        assert_eq!(place.evaluations(out), place.evaluations("straight"), "{out}");
        let exported = |run: &str| place.file(&format!("{run}/checkpoint/model.safetensors"));
        assert!(exported(out) == exported("straight"), "{out}");
    }
}

#[test]
fn state_in_ram_and_first_weights_of_a_folder_go_with_it() {
    let place = Place::new();
    let first = run(&place.args("first", WeightsHome::Hbm));
    let from = |out: &str, weights| TrainArgs {
        model: Some(place.path("first/checkpoint")),
        state: Some(StateHome::Host),
        durability: Some(DurabilityChoice::Checkpoint),
        ..place.args(out, weights)
    };
    let none = run(&TrainArgs { steps: Some(0), ..from("none", WeightsHome::Host) });
    assert_eq!(none.weights_digest, first.weights_digest);
    let resident = run(&from("resident", WeightsHome::Hbm));
    assert_eq!(run(&from("streamed", WeightsHome::Host)).weights_digest, resident.weights_digest);
}

#[test]
fn caps_count_the_homes() {
    let place = Place::new();
    let mut args = TrainArgs { plan: "checkpoint".into(), ..place.args("run", WeightsHome::Host) };
    args.budgets.host_mib = Some(0.5);
    let message = train(&args).unwrap_err().to_string();
    assert!(message.contains("host budget is 512.0 KiB") && message.contains("--host-mib"), "{message}");
    assert!(!place.path("run").exists());
}
