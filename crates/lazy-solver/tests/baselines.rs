//! Baselines of a chain: the plans people make by hand, and what they cost.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use lazy_model::{Bytes, CostChain, Tier, Violation};
use lazy_solver::{Baseline, SolveOptions, baselines, solve};

fn given(name: &str) -> CostChain {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/given/{name}.json"));
    CostChain::from_json(&fs::read_to_string(path).unwrap()).unwrap()
}

fn named<'a>(all: &'a [Baseline], name: &str) -> &'a Baseline {
    all.iter().find(|b| b.name == name).unwrap()
}

#[test]
fn the_published_chain_is_held_against_plans_made_by_hand() {
    let chain = given("doc_cpu14_free");
    let all = baselines(&chain);
    let names: Vec<&str> = all.iter().map(|b| b.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "do-nothing",
            "checkpoint-every-layer",
            "checkpoint-every-2-layers",
            "checkpoint-every-3-layers",
            "checkpoint-every-4-layers",
            "greedy"
        ]
    );
    // 65 boundaries of 0.703 GiB in a budget of 21.55 GiB.
    let Violation::Budget { tier, needed, .. } =
        named(&all, "checkpoint-every-layer").outcome.clone().unwrap_err()
    else {
        unreachable!()
    };
    assert_eq!((tier, needed), (Tier::Hbm, Bytes(65 * 754_974_720)));
    // 17 saved boundaries; in each of 16 blocks the three linear-attention layers run once more: 48 x 14 ms.
    let every_fourth = named(&all, "checkpoint-every-4-layers").outcome.as_ref().unwrap();
    assert!((every_fourth.objective_ms - (672.0 + 17e-5)).abs() < 1e-9);
    let best = solve(&chain, &SolveOptions::default()).unwrap().objective_ms.unwrap();
    let greedy = named(&all, "greedy").outcome.as_ref().unwrap();
    assert!(greedy.objective_ms >= best);
}

#[test]
fn doing_nothing_is_free_where_it_fits_and_locks_do_not_bind_baselines() {
    let mut chain = given("doc_cpu15_locked");
    chain.gpu_budget_bytes = chain.boundary_bytes[0] * 65;
    let all = baselines(&chain);
    assert_eq!(named(&all, "do-nothing").outcome.as_ref().unwrap().step_ms(), 0.0);
}
