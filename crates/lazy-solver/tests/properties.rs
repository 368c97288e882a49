//! What must hold between chains: more room never hurts, units do not matter. And the field's failures S4, S5
//! and S7.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Random, bare_chain, cases, given};
use lazy_model::{BoundaryIndex, Bytes, BytesPerSecond, CostChain, Locks, Tier};
use lazy_solver::{Method, Raise, Remedy, Solution, SolveOptions, Status, TieBreak, explain, solve};

/// What two optima of the same value may differ by (ms).
const NEAR: f64 = 2e-6;

fn solved(chain: &CostChain) -> Solution {
    solve(chain, &SolveOptions::default()).unwrap()
}

/// Uneven layers that need all tiers.
fn uneven(r: &mut Random, layers: usize) -> CostChain {
    let sizes: Vec<Bytes> = (0..=layers).map(|_| Bytes((1 << 20) + r.below(1 << 20))).collect();
    let total: u64 = sizes.iter().map(|size| size.get()).sum();
    let share = |r: &mut Random| Bytes(total * (1 + r.below(4)) / 10);
    let times = |r: &mut Random| (0..layers).map(|_| (1 + r.below(80)) as f64 / 8.0).collect::<Vec<_>>();
    CostChain {
        layer_window_ms: times(r),
        layer_recompute_ms: times(r),
        gpu_budget_bytes: share(r),
        cpu_budget_bytes: share(r),
        nvme_budget_bytes: share(r),
        d2h_bytes_per_s: BytesPerSecond(r.pick(&[1e8, 3e8])),
        nvme_read_bytes_per_s: BytesPerSecond(5e7),
        max_segment_layers: 3,
        checkpoint_penalty: 1e-5,
        nvme_tiebreak: 1e-3,
        h2d_first_window_offset: 1,
        ..bare_chain(sizes)
    }
}

fn objective(solution: &Solution) -> f64 {
    let settled = matches!(solution.status, Status::Optimal | Status::Infeasible);
    assert!(settled, "{:?} {:?} {:?}", solution.status, solution.gap, solution.message);
    solution.objective_ms.unwrap_or(f64::INFINITY)
}

#[test]
fn more_budget_never_makes_a_plan_worse() {
    let mut r = Random(1);
    for number in 0..cases(16) {
        let chain = uneven(&mut r, 5);
        let before = objective(&solved(&chain));
        for tier in 0..3 {
            let mut richer = chain.clone();
            let budgets =
                [&mut richer.gpu_budget_bytes, &mut richer.cpu_budget_bytes, &mut richer.nvme_budget_bytes];
            *budgets.into_iter().nth(tier).unwrap() += Bytes(1 + r.below(1 << 20));
            let after = objective(&solved(&richer));
            assert!(after <= before + NEAR, "chain {number}, tier {tier}: {after} after {before}");
        }
    }
}

#[test]
fn units_do_not_matter() {
    let mut r = Random(2);
    for number in 0..cases(16) {
        let chain = uneven(&mut r, 5);
        let before = objective(&solved(&chain));
        // Eighths of a ms, as the times are, keep every number exact.
        let longer = |times: &[f64]| times.iter().map(|ms| ms * 8.0).collect::<Vec<_>>();
        let slower = |rate: BytesPerSecond| BytesPerSecond(rate.get() / 8.0);
        let in_eighths = CostChain {
            layer_window_ms: longer(&chain.layer_window_ms),
            layer_recompute_ms: longer(&chain.layer_recompute_ms),
            d2h_bytes_per_s: slower(chain.d2h_bytes_per_s),
            h2d_bytes_per_s: slower(chain.h2d_bytes_per_s),
            nvme_write_bytes_per_s: slower(chain.nvme_write_bytes_per_s),
            nvme_read_bytes_per_s: slower(chain.nvme_read_bytes_per_s),
            checkpoint_penalty: chain.checkpoint_penalty * 8.0,
            nvme_tiebreak: chain.nvme_tiebreak * 8.0,
            ..chain.clone()
        };
        let after = objective(&solved(&in_eighths));
        let near = |after: f64, before: f64| after == before || (after - before).abs() < NEAR;
        assert!(near(after / 8.0, before), "chain {number}: {after} instead of 8 x {before}");
        // Thousandfold bytes and rates.
        let faster = |rate: BytesPerSecond| BytesPerSecond(rate.get() * 1000.0);
        let larger = CostChain {
            boundary_bytes: chain.boundary_bytes.iter().map(|size| *size * 1000).collect(),
            gpu_budget_bytes: chain.gpu_budget_bytes * 1000,
            cpu_budget_bytes: chain.cpu_budget_bytes * 1000,
            nvme_budget_bytes: chain.nvme_budget_bytes * 1000,
            d2h_bytes_per_s: faster(chain.d2h_bytes_per_s),
            h2d_bytes_per_s: faster(chain.h2d_bytes_per_s),
            nvme_write_bytes_per_s: faster(chain.nvme_write_bytes_per_s),
            nvme_read_bytes_per_s: faster(chain.nvme_read_bytes_per_s),
            ..chain.clone()
        };
        let after = objective(&solved(&larger));
        assert!(near(after, before), "chain {number}: {after} instead of {before}");
    }
}

#[test]
fn the_same_chain_gives_the_same_plan_by_every_method_and_on_every_thread() {
    let mut r = Random(4);
    let chains: Vec<CostChain> = (0..4).map(|_| uneven(&mut r, 5)).chain([given("doc_cpu8_free")]).collect();
    let placements = || -> Vec<_> {
        let methods = [Method::Auto, Method::Surrogate];
        chains
            .iter()
            .flat_map(|chain| {
                methods.map(|method| {
                    let options = SolveOptions { method, ..SolveOptions::default() };
                    solve(chain, &options).unwrap().placement
                })
            })
            .collect()
    };
    let alone = placements();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| assert_eq!(placements(), alone));
        }
    });
}

/// S4: 19 activations do not go into a budget 64 bytes too small, by any method.
#[test]
fn s4_no_method_exceeds_a_budget_by_a_few_bytes() {
    let mut chain = given("doc_cpu14_free");
    let size = chain.boundary_bytes[0];
    chain.cpu_budget_bytes = size * 19 - Bytes(64);
    for method in [Method::CountDp, Method::Surrogate, Method::Mip] {
        let options = SolveOptions { method, ..SolveOptions::default() };
        let solution = solve(&chain, &options).unwrap();
        assert_eq!(solution.status, Status::Optimal);
        assert_eq!(solution.evaluation.unwrap().counts.host, 18, "{method:?}");
    }
}

/// S5: of plans that differ in nothing else, the one with the fewest boundaries on NVMe is found, by either order.
#[test]
fn s5_the_tie_break_is_not_lost_in_a_gap() {
    for (name, nvme) in [("doc_cpu14_free", 3), ("doc_cpu8_free", 11)] {
        for method in [Method::CountDp, Method::Mip] {
            for tie_break in [TieBreak::Weighted, TieBreak::Lexicographic] {
                let options = SolveOptions { method, tie_break, ..SolveOptions::default() };
                let solution = solve(&given(name), &options).unwrap();
                assert_eq!(solution.status, Status::Optimal);
                assert_eq!(solution.evaluation.unwrap().counts.nvme, nvme, "{name} {method:?} {tie_break:?}");
            }
        }
    }
}

/// S7: the binding limit is named, with the smallest value that works, and that value works.
#[test]
fn s7_an_infeasible_chain_says_why() {
    let mut all_recomputed = given("doc_no_nvme");
    let size = all_recomputed.boundary_bytes[0];
    (all_recomputed.gpu_budget_bytes, all_recomputed.cpu_budget_bytes) = (size * 10, Bytes::ZERO);
    let mut one_layer = bare_chain(vec![Bytes(10), Bytes(20)]);
    one_layer.gpu_budget_bytes = Bytes(29);
    let mut locked = given("doc_cpu14_free");
    locked.locks = Some(Locks { gpu: Some((0..32).map(BoundaryIndex).collect()), ..Locks::default() });
    for (chain, smallest) in [(all_recomputed, size * 17), (one_layer, Bytes(30)), (locked, size * 32)] {
        assert_eq!(solved(&chain).status, Status::Infeasible);
        let budget = chain.gpu_budget_bytes;
        let remedies = explain(&chain, &SolveOptions::default()).unwrap();
        assert!(
            remedies.contains(&Remedy::Budget(Raise { tier: Tier::Hbm, budget, smallest, least: true })),
            "{remedies:?}"
        );
        let repaired = CostChain { gpu_budget_bytes: smallest, ..chain };
        assert_eq!(solved(&repaired).status, Status::Optimal);
    }
    let mut no_blocks = given("tiny3_hand");
    no_blocks.max_segment_layers = 0;
    let error = solve(&no_blocks, &SolveOptions::default()).unwrap_err();
    assert!(error.to_string().contains("max_segment_layers"), "{error}");
}

/// The chain with one more layer below layer `at`: no time, no window, and an input boundary of no bytes. Where blocks may have any
/// length it changes nothing but the weight of that boundary, which is free to skip and free to save.
fn with_useless_layer(chain: &CostChain, at: usize) -> CostChain {
    let mut twin = chain.clone();
    twin.layers += 1;
    twin.layer_window_ms.insert(at, 0.0);
    twin.layer_recompute_ms.insert(at, 0.0);
    twin.param_h2d_bytes.insert(at, Bytes::ZERO);
    twin.grad_d2h_bytes.insert(at, Bytes::ZERO);
    twin.boundary_bytes.insert(at + 1, Bytes::ZERO);
    twin.max_segment_layers = twin.layers;
    twin
}

#[test]
fn a_useless_layer_changes_nothing() {
    let mut r = Random(3);
    for number in 0..cases(16) {
        let mut chain = uneven(&mut r, 8);
        // Longer blocks, or the useless layer takes a place in one; windows as boundaries see them, or it shifts them.
        chain.max_segment_layers = chain.layers;
        chain.h2d_first_window_offset = 0;
        let at = r.below(chain.layers as u64) as usize;
        let twin = with_useless_layer(&chain, at);
        // The whole program of chain 11 once came back with values that were not its best solution's.
        let methods = if number < 12 { &[Method::Auto, Method::Mip][..] } else { &[Method::Auto] };
        for &method in methods {
            let options = SolveOptions { method, ..SolveOptions::default() };
            let [before, after] = [&chain, &twin].map(|chain| objective(&solve(chain, &options).unwrap()));
            let same = after == before || (after - before).abs() < NEAR;
            assert!(same, "chain {number}, layer {at}, {method:?}: {after} instead of {before}");
        }
    }
}
