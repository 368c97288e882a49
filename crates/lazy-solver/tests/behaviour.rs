//! What the solver promises beyond optimality: honest statuses, exact budgets, repeatability.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use lazy_model::{Bytes, CostChain, Seconds, Tier, evaluate};
use lazy_solver::{
    Method, Raise, Remedy, Solution, SolveOptions, SolverError, Status, TieBreak, baselines, explain, solve,
};

fn given(name: &str) -> CostChain {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/given/{name}.json"));
    CostChain::from_json(&fs::read_to_string(path).unwrap()).unwrap()
}

fn solved(chain: &CostChain) -> Solution {
    solve(chain, &SolveOptions::default()).unwrap()
}

fn limited(chain: &CostChain, seconds: f64) -> Result<Solution, SolverError> {
    solve(chain, &SolveOptions { time_limit: Some(Seconds(seconds)), ..SolveOptions::default() })
}

#[test]
fn a_budget_64_bytes_short_holds_one_boundary_less() {
    // CBC's tolerance accepts 19 boundaries here; the 18 that fit are the optimum of the budget of exactly 18.
    let mut chain = given("doc_cpu14_free");
    let size = chain.boundary_bytes[0];
    chain.cpu_budget_bytes = size * 18;
    let exact = solved(&chain).objective_ms.unwrap();
    chain.cpu_budget_bytes = size * 19 - Bytes(64);
    let equal_sizes = solved(&chain);
    assert_eq!(equal_sizes.status, Status::Optimal);
    assert!((equal_sizes.objective_ms.unwrap() - exact).abs() < 2e-6);
    // One boundary a byte larger: no common divisor is left to round by.
    chain.boundary_bytes[40] += Bytes(1);
    chain.nvme_budget_bytes = size * 3 + Bytes(1);
    let mixed = solved(&chain);
    assert_eq!(mixed.status, Status::Optimal);
    assert!(mixed.evaluation.unwrap().bytes.host <= chain.cpu_budget_bytes);
}

#[test]
fn equal_plans_differ_by_the_tie_break_alone() {
    // The same chain with and without the tie-break: 182.00052 + 3 x 0.001 on NVMe, fewest possible.
    let mut chain = given("doc_cpu14_free");
    chain.nvme_tiebreak = 0.0;
    assert!((solved(&chain).objective_ms.unwrap() - 182.00052).abs() < 2e-6);
    chain.nvme_tiebreak = 0.001;
    assert_eq!(solved(&chain).evaluation.unwrap().counts.nvme, 3);
}

#[test]
fn no_time_leaves_the_best_plan_made_by_hand() {
    let chain = given("doc_cpu14_free");
    let best = baselines(&chain).into_iter().filter_map(|b| b.outcome.ok()).map(|e| e.objective_ms);
    let best = best.min_by(f64::total_cmp).unwrap();
    for method in [Method::Auto, Method::Mip] {
        for tie_break in [TieBreak::Weighted, TieBreak::Lexicographic] {
            let options = SolveOptions { time_limit: Some(Seconds::ZERO), method, tie_break };
            let solution = solve(&chain, &options).unwrap();
            assert_eq!(solution.status, Status::Feasible, "{method:?} {tie_break:?}");
            assert!(solution.objective_ms.unwrap() <= best);
            assert!(evaluate(&chain, &solution.placement.unwrap()).is_ok());
        }
    }
    assert!(matches!(limited(&given("tiny3_hand"), -1.0), Err(SolverError::TimeLimit(_))));
    assert!(matches!(limited(&given("tiny3_hand"), f64::NAN), Err(SolverError::TimeLimit(_))));
}

#[test]
fn no_incumbent_is_said_where_plans_made_by_hand_do_not_fit_either() {
    // 5 + 3 MiB fill each tier; filling HBM from the top takes both threes.
    let mut chain = given("tiny3_hand");
    chain.boundary_bytes = [5, 5, 3, 3].map(Bytes::from_mib).to_vec();
    (chain.gpu_budget_bytes, chain.cpu_budget_bytes) = (Bytes::from_mib(8), Bytes::from_mib(8));
    (chain.nvme_budget_bytes, chain.max_segment_layers) = (Bytes::ZERO, 1);
    assert!(baselines(&chain).iter().all(|b| b.outcome.is_err()));
    let options =
        SolveOptions { time_limit: Some(Seconds::ZERO), method: Method::Mip, ..SolveOptions::default() };
    let solution = solve(&chain, &options).unwrap();
    assert_eq!(solution.status, Status::NoIncumbent);
    assert!(solution.placement.is_none() && solution.objective_ms.is_none());
    assert_eq!(solved(&chain).status, Status::Optimal);
}

#[test]
fn a_long_chain_cut_short_is_no_worse_than_plans_made_by_hand() {
    let mut chain = given("doc_cpu14_free");
    let n = 1000;
    chain.layers = n;
    for list in [&mut chain.layer_window_ms, &mut chain.layer_recompute_ms] {
        *list = list.iter().copied().cycle().take(n).collect();
    }
    for list in [&mut chain.param_h2d_bytes, &mut chain.grad_d2h_bytes] {
        *list = list.iter().copied().cycle().take(n).collect();
    }
    chain.boundary_bytes = (0..=n as u64).map(|i| chain.boundary_bytes[0] + Bytes(i)).collect();
    chain.gpu_budget_bytes = chain.gpu_budget_bytes * 16;
    chain.cpu_budget_bytes = chain.cpu_budget_bytes * 16;
    let solution = limited(&chain, 0.3).unwrap();
    assert!(matches!(solution.status, Status::Feasible | Status::Optimal));
    let objective = solution.objective_ms.unwrap();
    for baseline in baselines(&chain) {
        assert!(baseline.outcome.is_err() || baseline.outcome.unwrap().objective_ms >= objective);
    }
}

#[test]
fn a_stop_before_the_proof_never_reports_a_plan_that_breaks_a_rule() {
    // Every byte of all three tiers is needed: a hard number partition, with a known solution.
    let mut chain = given("doc_cpu14_free");
    let mut state = 12345u64;
    for size in &mut chain.boundary_bytes {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        *size = Bytes((1 << 29) + (state >> 36));
    }
    chain.max_segment_layers = 1;
    let third = |k: usize| chain.boundary_bytes.iter().skip(k).step_by(3).copied().sum();
    (chain.gpu_budget_bytes, chain.cpu_budget_bytes, chain.nvme_budget_bytes) =
        (third(0), third(1), third(2));
    let solution = limited(&chain, 1.0).unwrap();
    match &solution.placement {
        None => assert_eq!(solution.status, Status::NoIncumbent),
        Some(placement) => assert!(evaluate(&chain, placement).is_ok()),
    }
}

#[test]
fn eight_threads_get_what_one_gets() {
    let names = ["tiny3_hand", "tiny5_hetero", "tiny6_exposed", "doc_cpu15_locked", "infeasible_budget"];
    let alone: Vec<_> = names.iter().map(|n| solved(&given(n)).placement).collect();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let together: Vec<_> = names.iter().map(|n| solved(&given(n)).placement).collect();
                assert_eq!(together, alone);
            });
        }
    });
}

#[test]
fn a_cap_without_internals_is_refused_by_name() {
    let mut chain = given("tiny3_hand");
    chain.hbm_cap_bytes = Some(Bytes::from_gib(1.0));
    let error = solve(&chain, &SolveOptions::default()).unwrap_err();
    assert!(error.to_string().contains("layer_internal_bytes"), "{error}");
}

#[test]
fn chains_built_wrongly_in_code_are_refused() {
    let mut chain = given("tiny3_hand");
    chain.boundary_bytes.pop();
    let error = solve(&chain, &SolveOptions::default()).unwrap_err();
    assert!(error.to_string().contains("boundary_bytes"), "{error}");
}

#[test]
fn an_infeasible_chain_names_the_smallest_budgets_that_work() {
    // Boundaries of 5, 1, 1, 1, 5 MiB, blocks of up to 4 layers, 4 MiB in every tier: both ends must be saved.
    let chain = given("infeasible_budget");
    let remedies = explain(&chain, &SolveOptions::default()).unwrap();
    // Each tier alone: both ends (10 MiB) have to go there, since neither fits elsewhere.
    let budget = Bytes::from_mib(4);
    let smallest = Bytes::from_mib(10);
    let expected = [Tier::Hbm, Tier::Host, Tier::Nvme]
        .map(|tier| Remedy::Budget(Raise { tier, budget, smallest, least: true }));
    assert_eq!(remedies, expected);
    for tier in [0, 1, 2] {
        for (bytes, status) in [(smallest, Status::Optimal), (smallest - Bytes(1), Status::Infeasible)] {
            let mut changed = chain.clone();
            *[&mut changed.gpu_budget_bytes, &mut changed.cpu_budget_bytes, &mut changed.nvme_budget_bytes]
                [tier] = bytes;
            assert_eq!(solved(&changed).status, status);
        }
    }
}

#[test]
fn block_limits_and_locks_are_named_when_they_bind() {
    // 64 boundaries of 0.7 GiB beside room for 5: blocks of 16 layers.
    let mut chain = given("doc_no_nvme");
    let size = chain.boundary_bytes[0];
    (chain.gpu_budget_bytes, chain.cpu_budget_bytes) = (size * 5, Bytes::ZERO);
    chain.nvme_budget_bytes = Bytes::ZERO;
    let remedies = explain(&chain, &SolveOptions::default()).unwrap();
    assert!(remedies.contains(&Remedy::SegmentLayers { limit: 4, smallest: 16 }), "{remedies:?}");
    assert!(
        remedies.contains(&Remedy::Budget(Raise {
            tier: Tier::Hbm,
            budget: size * 5,
            smallest: size * 17,
            least: true
        })),
        "{remedies:?}"
    );

    let mut chain = given("doc_cpu15_locked");
    chain.gpu_budget_bytes = size * 29;
    assert_eq!(solved(&chain).status, Status::Infeasible);
    let remedies = explain(&chain, &SolveOptions::default()).unwrap();
    assert_eq!(
        remedies,
        [
            Remedy::Budget(Raise { tier: Tier::Hbm, budget: size * 29, smallest: size * 30, least: true }),
            Remedy::Unlock
        ]
    );
}

#[test]
fn nothing_is_moved_that_could_stay() {
    // Moving is free while windows have room; with HBM for all, all stays.
    let mut chain = given("doc_cpu14_free");
    chain.gpu_budget_bytes = chain.boundary_bytes[0] * 65;
    chain.nvme_tiebreak = 0.0;
    assert_eq!(solved(&chain).placement_string().unwrap(), "G".repeat(65));
}
