//! Plans that keep internals, judged by the reference judge of the keep model: random chains whose budgets and cap sit at, or a few
//! bytes beside, what the plan needs.

#![allow(clippy::unwrap_used, clippy::panic)]

use lazy_model::{
    Bytes, CostChain, Keep, LayerIndex, Placement, Position, Violation, evaluate, evaluate_keep,
};
use serde_json::Value;

fn plan(case: &Value) -> (CostChain, Vec<Placement>, Vec<Keep>) {
    let chain = CostChain::from_json(&case["chain"].to_string()).unwrap();
    let placement = case["placement"].as_str().unwrap().chars().map(|c| Placement::from_letter(c).unwrap());
    let keep = case["keep"].as_str().unwrap().chars().map(|c| Keep::from_letter(c).unwrap());
    (chain, placement.collect(), keep.collect())
}

fn cases() -> Vec<Value> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/judged_keep.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn moment(text: &str) -> Position {
    let (phase, index) = text.split_once(' ').unwrap();
    let layer = LayerIndex(index.parse().unwrap());
    match phase {
        "forward" => Position::Forward(layer),
        "backward" => Position::Backward(layer),
        _ => Position::Turn,
    }
}

#[test]
fn plans_are_judged_as_the_reference_judges_them() {
    let cases = cases();
    assert!(cases.len() >= 60);
    for case in cases {
        let (chain, placement, keep) = plan(&case);
        let got = evaluate_keep(&chain, &placement, &keep);
        let Some(objective) = case["objective"].as_str() else {
            let violation = got.err().unwrap_or_else(|| panic!("allowed: {case}"));
            let why = case["why"].as_str().unwrap();
            let same_rule = match violation {
                Violation::Hbm { at, .. } => {
                    let at = at.to_string();
                    why.starts_with(&format!("HBM at {}", at.trim_start_matches("the ")))
                }
                Violation::Budget { .. } => why.ends_with("budget"),
                Violation::Segment { .. } => why == "segment too long",
                Violation::ZeroRate { .. } => why.ends_with("zero bandwidth"),
                Violation::LockedPath { .. } => why == "lock",
                _ => why.contains("may not be"),
            };
            assert!(same_rule, "{violation}: {case}");
            continue;
        };
        let got = got.unwrap_or_else(|v| panic!("{v}: {case}"));
        assert_eq!(got.objective.to_string(), objective, "{case}");
        assert_eq!(got.base_recompute_ms, case["base_recompute_ms"].as_f64().unwrap(), "{case}");
        assert_eq!(got.recompute_ms, case["recompute_ms"].as_f64().unwrap(), "{case}");
        let e = got.exposed_ms;
        let exposed: Vec<f64> = serde_json::from_value(case["exposed_ms"].clone()).unwrap();
        assert_eq!([e.d2h, e.h2d, e.nvme_write, e.nvme_read], exposed[..], "{case}");
        let peak = got.hbm_peak.unwrap();
        assert_eq!(peak.bytes.get(), case["hbm_peak_bytes"].as_u64().unwrap(), "{case}");
        assert_eq!(peak.at, moment(case["hbm_peak_at"].as_str().unwrap()), "{case}");
    }
}

/// Two layers, boundaries of 10, 20 and 5 bytes, internals of 100 and 200, 1 byte of every workspace, no traffic.
fn two_layers() -> CostChain {
    CostChain::from_json(
        r#"{"layers": 2, "layer_window_ms": [1, 1], "layer_recompute_ms": [3, 4], "boundary_bytes": [10, 20, 5],
            "param_h2d_bytes": [0, 0], "grad_d2h_bytes": [0, 0],
            "gpu_budget_bytes": 1000, "cpu_budget_bytes": 1000, "nvme_budget_bytes": 0,
            "d2h_bytes_per_s": 1e6, "h2d_bytes_per_s": 1e6, "nvme_write_bytes_per_s": 0, "nvme_read_bytes_per_s": 0,
            "pcie_window_scale": 1, "nvme_window_scale": 1, "pcie_capacity_fraction": 1, "nvme_capacity_fraction": 1,
            "max_segment_layers": 2, "checkpoint_penalty": 0, "nvme_tiebreak": 0,
            "layer_internal_bytes": [100, 200], "layer_forward_workspace_bytes": [1, 1],
            "layer_backward_workspace_bytes": [1, 1], "loss_workspace_bytes": 7,
            "hbm_cap_bytes": 1000, "hbm_fixed_bytes": 50, "transfer_slack_bytes": 0}"#,
    )
    .unwrap()
}

const KEPT: [Keep; 2] = [Keep::Hbm; 2];

#[test]
fn the_worst_moment_is_named_with_its_bytes() {
    let mut chain = two_layers();
    let in_hbm = [Placement::Hbm; 3];
    // The turn: boundaries 0 and 1, both internals, the loss: 30 + 300 + 7. Backward of layer 1: 30 + 100 + 200 + 1.
    let got = evaluate_keep(&chain, &in_hbm, &KEPT).unwrap();
    assert_eq!((got.hbm_peak.unwrap().at, got.hbm_peak.unwrap().bytes), (Position::Turn, Bytes(337)));
    assert_eq!((got.base_recompute_ms, got.counts.kept, got.step_ms()), (0.0, 2, 0.0));
    chain.hbm_cap_bytes = Some(Bytes(386));
    let message = evaluate_keep(&chain, &in_hbm, &KEPT).unwrap_err().to_string();
    assert_eq!(
        message,
        "HBM at the turn holds 337 B (337 bytes) beside 50 B (50) that are fixed, and `hbm_cap_bytes` is 386 B (386)"
    );
    // Fixed bytes alone above the cap.
    chain.hbm_cap_bytes = Some(Bytes(49));
    assert!(matches!(
        evaluate_keep(&chain, &in_hbm, &[Keep::Recompute; 2]),
        Err(Violation::Hbm { needed: Bytes(231), .. })
    ));
}

#[test]
fn a_retained_layer_runs_twice_and_is_held_while_its_block_runs() {
    let mut chain = two_layers();
    chain.retain_internals = Some(true);
    let one_block = [Placement::Hbm, Placement::Recompute, Placement::Hbm];
    let plain = evaluate_keep(&chain, &one_block, &[Keep::Recompute; 2]).unwrap();
    // Both layers run again for their internals, and layer 0 before that for boundary 1.
    assert_eq!((plain.base_recompute_ms, plain.recompute_ms), (7.0, 3.0));
    // Backward of layer 1: boundaries 0 and 1, its internals and workspace.
    assert_eq!(plain.hbm_peak.unwrap().bytes, Bytes(10 + 20 + 200 + 1));
    let retained = [Keep::Retained, Keep::Recompute];
    let got = evaluate_keep(&chain, &one_block, &retained).unwrap();
    assert_eq!((got.base_recompute_ms, got.recompute_ms), (4.0, 3.0));
    let peak = got.hbm_peak.unwrap();
    assert_eq!((peak.at, peak.bytes), (Position::Backward(LayerIndex(1)), Bytes(10 + 20 + 200 + 1 + 100)));
    // Not where the output is saved, and not unasked.
    let message = evaluate_keep(&chain, &[Placement::Hbm; 3], &retained).unwrap_err().to_string();
    assert!(message.contains("layer 0 are retained"), "{message}");
    chain.retain_internals = None;
    let message = evaluate_keep(&chain, &one_block, &retained).unwrap_err().to_string();
    assert!(message.contains("retain_internals"), "{message}");
}

#[test]
fn each_judge_refuses_the_other_kind_of_chain() {
    let mut chain = two_layers();
    assert_eq!(evaluate(&chain, &[Placement::Hbm; 3]), Err(Violation::KeepModel));
    assert!(matches!(
        evaluate_keep(&chain, &[Placement::Hbm; 3], &KEPT[..1]),
        Err(Violation::KeepLength { .. })
    ));
    let moved = [Placement::Hbm, Placement::Hbm, Placement::Host];
    assert!(matches!(evaluate_keep(&chain, &moved, &KEPT), Err(Violation::LastMoved { .. })));
    chain.hbm_cap_bytes = None;
    assert_eq!(evaluate_keep(&chain, &[Placement::Hbm; 3], &KEPT), Err(Violation::NoKeepModel));
}

#[test]
fn a_chain_that_asks_for_the_keep_model_brings_all_of_it() {
    let mut chain = two_layers();
    chain.loss_workspace_bytes = None;
    assert!(chain.validate().unwrap_err().to_string().contains("loss_workspace_bytes"));
    let mut chain = two_layers();
    chain.h2d_first_window_offset = 0;
    assert!(chain.validate().unwrap_err().to_string().contains("h2d_first_window_offset"));
}
