//! What is promised of the optimizer, of the shipped model on a machine of fixed speed.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "common/machine.rs"]
mod machine;

use std::fs;

use lazy_solver::budgets::BudgetArgs;
use serde_json::{Value, json};
use train_lm::settings::{DeviceChoice, DurabilityChoice, TrainArgs};
use train_lm::train::plan_only;

/// 256 x 192 of the embedding, 192 of the last norm, and in each of 12 layers 192 x 192 twice, 192 x 96 twice, 192 x 576 three times and
/// four norms of 192, 192, 32 and 32.
const PARAMETERS: f64 = 5_363_136.0;
/// An eighth of that in whole blocks of 65,536.
const BUCKET: f64 = 655_360.0;

/// Layers of 5 ms forward and 10 ms backward, ends of 0.1, 5 and 0.1 ms; an optimizer step of 0.2 s, a quarter of it the commit.
fn profile() -> Value {
    let mut profile: Value = serde_json::from_str(&machine::profile(12, [5.0, 10.0])).unwrap();
    let value = |value: f64| json!({"value": value, "source": "assumed", "by": "test"});
    profile["optimizer_elements_per_s"] = value(PARAMETERS / 0.2);
    profile["optimizer_commit_share"] = value(0.25);
    profile
}

#[test]
fn without_clipping_all_of_the_optimizer_but_what_backward_hides_is_promised() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (text, machine) = (dir.path().join("text.txt"), dir.path().join("profile.json"));
    fs::write(&text, "a text of which nothing is read but its length. ".repeat(100)).unwrap();
    fs::write(&machine, profile().to_string()).unwrap();
    let passes_s = 0.0001 + 12.0 * 0.005 + 0.005 + 12.0 * (0.005 + 0.010) + 0.0001;
    // Backward, 185.1 ms, is longer than the 0.15 s in which the state goes by: the last bucket and the commit are left.
    let left_s = 0.15 * BUCKET / PARAMETERS + 0.05;
    for (clip, durability, accum, optimizer_s) in [
        (1.0, DurabilityChoice::Step, 1, 0.2),
        (0.0, DurabilityChoice::Step, 1, left_s),
        (0.0, DurabilityChoice::Step, 3, left_s),
        (0.0, DurabilityChoice::Checkpoint, 1, 0.2),
    ] {
        let args = TrainArgs {
            device: DeviceChoice::Host,
            text: vec![text.clone()],
            plan: "checkpoint".into(),
            clip: Some(clip),
            accum: Some(accum),
            durability: Some(durability),
            out: Some(dir.path().join("run")),
            json: true,
            budgets: BudgetArgs { profile: Some(machine.clone()), ..BudgetArgs::default() },
            ..TrainArgs::default()
        };
        let promise = plan_only(&args).unwrap().promise.unwrap();
        assert!((promise.optimizer_s.get() - optimizer_s).abs() < 1e-9, "{promise:?}, not {optimizer_s} s");
        assert!((promise.step_s.get() - accum as f64 * passes_s - optimizer_s).abs() < 1e-9, "{promise:?}");
    }
}
