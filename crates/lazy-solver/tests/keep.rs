//! Keeping internals: the published instances, and random small chains that are also enumerated.

#![allow(clippy::unwrap_used)]

mod common;
#[path = "common/keep_chains.rs"]
mod keep_chains;

use std::fs;
use std::path::Path;

use common::{Random, cases};
use lazy_model::{
    BoundaryIndex, Bytes, BytesPerSecond, CostChain, Evaluation, Keep, LayerIndex, Locks, Placement, Seconds,
    Tier, evaluate_keep,
};
use lazy_solver::{Raise, Remedy, SolveOptions, Status, TieBreak, explain, solve};
use serde_json::Value;

const STATES: [Placement; 4] = [Placement::Hbm, Placement::Host, Placement::Nvme, Placement::Recompute];

fn given(name: &str) -> (CostChain, Value) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/keep/{name}.json"));
    let text = fs::read_to_string(path).unwrap();
    let expected = serde_json::from_str::<Value>(&text).unwrap()["expected"].clone();
    (CostChain::from_json(&text).unwrap(), expected)
}

#[test]
fn every_published_instance_reaches_its_proven_verdict() {
    for name in ["tiny5", "h200_36_40", "keep_infeasible", "lazy27_cpu14_90"] {
        let (chain, expected) = given(name);
        let solution = solve(&chain, &SolveOptions::default()).unwrap();
        let Some(objective) = expected["objective"].as_f64() else {
            assert_eq!(solution.status, Status::Infeasible, "{name}");
            assert!(solution.keep.is_none());
            continue;
        };
        assert_eq!(solution.status, Status::Optimal, "{name}: {:?}", solution.message);
        let got = solution.objective_ms.unwrap();
        assert!((got - objective).abs() < 2e-6, "{name}: {got} instead of {objective}");
        let again = evaluate_keep(&chain, &solution.placement.unwrap(), &solution.keep.unwrap()).unwrap();
        assert_eq!(again.objective_ms, got);
        assert_eq!(again.base_recompute_ms, expected["base_recompute_ms"].as_f64().unwrap(), "{name}");
    }
}

/// What a random chain may ask for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plain,
    Offload,
    Retain,
    Both,
}

fn random_chain(r: &mut Random, kind: Kind) -> CostChain {
    let most = if kind == Kind::Plain { [1, 2, 3, 3, 4, 4, 4, 5] } else { [1, 2, 2, 3, 3, 3, 3, 4] };
    let n = r.pick(&most);
    // Whole MiB, sizes to the byte, sizes that differ by a few bytes.
    let (form, mib) = (r.below(3), 1u64 << 20);
    let size = |r: &mut Random, low: u64, high: u64| {
        Bytes(match form {
            0 => (low + r.below(high - low + 1)) * mib,
            1 => low * mib + r.below((high - low) * mib + 3),
            _ => low * mib + r.below(4),
        })
    };
    let offload = matches!(kind, Kind::Offload | Kind::Both);
    // Internals are worth moving over fast links only.
    let step = if offload { 4e8 } else { 2.5e7 };
    let rate =
        |r: &mut Random| BytesPerSecond(if r.one_in(20) { 0.0 } else { (1 + r.below(40)) as f64 * step });
    let tenths = |r: &mut Random, most: u64| r.below(most + 1) as f64 / 10.0;
    let mandatory = |r: &mut Random| Bytes(if r.one_in(4) { r.below(1 << 20) } else { 0 });
    let boundary_bytes: Vec<Bytes> = (0..=n).map(|_| size(r, 1, 4)).collect();
    let internals: Vec<Bytes> = (0..n).map(|_| size(r, 1, 12)).collect();
    let (boundaries, inside): (Bytes, Bytes) =
        (boundary_bytes.iter().copied().sum(), internals.iter().copied().sum());
    let share =
        |r: &mut Random, of: Bytes, low: u64, high: u64| Bytes(of.get() * (low + r.below(high - low)) / 100);
    let fixed = size(r, 0, 5);
    let cap = fixed
        + share(r, boundaries + inside, if kind == Kind::Retain { 25 } else { 45 }, 115)
        + Bytes(r.below(9));
    let mut chain = CostChain {
        name: None,
        comment: None,
        layers: n,
        layer_window_ms: (0..n).map(|_| tenths(r, 200)).collect(),
        layer_recompute_ms: (0..n).map(|_| tenths(r, 150)).collect(),
        param_h2d_bytes: (0..n).map(|_| mandatory(r)).collect(),
        grad_d2h_bytes: (0..n).map(|_| mandatory(r)).collect(),
        gpu_budget_bytes: if r.one_in(4) { share(r, boundaries, 30, 100) } else { cap },
        cpu_budget_bytes: if kind == Kind::Retain && r.one_in(2) {
            Bytes::ZERO
        } else {
            share(r, if offload { boundaries + inside } else { boundaries }, 0, 70)
        },
        nvme_budget_bytes: if r.one_in(2) { Bytes::ZERO } else { share(r, boundaries, 0, 60) },
        boundary_bytes,
        d2h_bytes_per_s: rate(r),
        h2d_bytes_per_s: rate(r),
        nvme_write_bytes_per_s: rate(r),
        nvme_read_bytes_per_s: rate(r),
        pcie_window_scale: r.pick(&[1.0, 2.5]),
        nvme_window_scale: r.pick(&[1.0, 6.0]),
        pcie_capacity_fraction: r.pick(&[1.0, 0.9, 0.35]),
        nvme_capacity_fraction: r.pick(&[1.0, 0.8]),
        max_segment_layers: 1 + r.below(5) as usize,
        checkpoint_penalty: r.pick(&[1e-5, 0.0]),
        nvme_tiebreak: r.pick(&[1e-3, 0.0]),
        d2h_first_window_offset: 0,
        h2d_first_window_offset: 1,
        locks: None,
        layer_internal_bytes: Some(internals),
        layer_forward_workspace_bytes: Some((0..n).map(|_| size(r, 0, 3)).collect()),
        layer_backward_workspace_bytes: Some((0..n).map(|_| size(r, 0, 3)).collect()),
        loss_workspace_bytes: Some(size(r, 0, 8)),
        hbm_cap_bytes: Some(cap),
        hbm_fixed_bytes: Some(fixed),
        transfer_slack_bytes: Some(r.pick(&[Bytes::ZERO, Bytes(1 << 20), Bytes(1 << 22)])),
        layer_backward_window_ms: r.one_in(2).then(|| (0..n).map(|_| tenths(r, 400)).collect()),
        layer_rerun_ms: r.one_in(3).then(|| (0..n).map(|_| tenths(r, 150)).collect()),
        internals_offload: offload.then_some(true),
        retain_internals: matches!(kind, Kind::Retain | Kind::Both).then_some(true),
        nvme_staging_bytes: r.one_in(2).then(|| size(r, 1, 6)),
    };
    if r.one_in(4) {
        chain.locks = Some(random_locks(r, n));
    }
    chain
}

fn random_locks(r: &mut Random, n: usize) -> Locks {
    let mut locks = Locks::default();
    match r.below(4) {
        0 => {
            locks.keep.insert(LayerIndex(r.below(n as u64) as usize), r.one_in(2));
        }
        1 => {
            locks.fixed.insert(BoundaryIndex(r.below(n as u64 + 1) as usize), r.pick(&STATES));
        }
        2 => locks.gpu = Some((0..=n).filter(|&i| i == n || r.one_in(2)).map(BoundaryIndex).collect()),
        _ => {
            let inner = (1..n).filter(|_| r.one_in(2));
            let stops: Vec<usize> = std::iter::once(0).chain(inner).chain([n]).collect();
            locks.edges =
                Some(stops.windows(2).map(|w| (BoundaryIndex(w[0]), BoundaryIndex(w[1]))).collect());
        }
    }
    locks
}

/// The cheapest of all plans. Keeping takes room and time on links, never gives any: a placement that is not allowed with the fewest
/// internals kept is not looked at further, and elsewhere only the time of runs saved can make a plan cheaper than that one.
fn cheapest(chain: &CostChain) -> Option<Evaluation> {
    let n = chain.layers;
    let mut keeps = vec![Keep::Recompute, Keep::Hbm];
    keeps.extend((chain.internals_offload == Some(true)).then_some(Keep::Host));
    keeps.extend((chain.retain_internals == Some(true)).then_some(Keep::Retained));
    let locked = |l: usize| chain.locks.as_ref().and_then(|k| k.keep.get(&LayerIndex(l))) == Some(&true);
    let fewest: Vec<Keep> = (0..n).map(|l| keeps[usize::from(locked(l))]).collect();
    let times = chain.rerun_ms();
    let mut best: Option<Evaluation> = None;
    for code in 0..4usize.pow(n as u32) {
        let mut placement: Vec<_> = (0..n).map(|i| STATES[code >> (2 * i) & 3]).collect();
        placement.push(Placement::Hbm);
        let Ok(bare) = evaluate_keep(chain, &placement, &fewest) else { continue };
        for code in 0..keeps.len().pow(n as u32) {
            let keep: Vec<_> =
                (0..n as u32).map(|l| keeps[code / keeps.len().pow(l) % keeps.len()]).collect();
            let runs: f64 = (0..n).filter(|&l| keep[l] == Keep::Recompute).map(|l| times[l]).sum();
            let least = bare.objective_ms - bare.base_recompute_ms + runs;
            if best.as_ref().is_some_and(|b| least > b.objective_ms + 1e-9) {
                continue;
            }
            if let Ok(evaluation) = evaluate_keep(chain, &placement, &keep)
                && best.as_ref().is_none_or(|b| evaluation.objective < b.objective)
            {
                best = Some(evaluation);
            }
        }
    }
    best
}

fn compare(seed: u64, kind: Kind, count: usize) -> [usize; 5] {
    let mut r = Random(seed);
    let mut seen = [0; 5];
    for number in 0..count {
        let chain = random_chain(&mut r, kind);
        let solution = solve(&chain, &SolveOptions::default()).unwrap();
        let Some(best) = cheapest(&chain) else {
            seen[0] += 1;
            assert_eq!(solution.status, Status::Infeasible, "{kind:?} {number}: {}", chain.to_json());
            continue;
        };
        let at = format!("{kind:?} {number}, {:?}: {}", solution.message, chain.to_json());
        assert_eq!(solution.status, Status::Optimal, "{at}");
        let got = solution.objective_ms.unwrap();
        assert!((got - best.objective_ms).abs() < 2e-6, "{got} instead of {}: {at}", best.objective_ms);
        if number % 4 == 0 {
            let bare = CostChain { checkpoint_penalty: 0.0, nvme_tiebreak: 0.0, ..chain.clone() };
            let options = SolveOptions { tie_break: TieBreak::Lexicographic, ..SolveOptions::default() };
            let fastest = solve(&chain, &options).unwrap();
            assert_eq!(fastest.status, Status::Optimal, "{at}");
            let (got, least) = (fastest.evaluation.unwrap().step_ms(), cheapest(&bare).unwrap().step_ms());
            assert!((got - least).abs() < 2e-6, "a step of {got} instead of {least}: {at}");
        }
        let keep = solution.keep.unwrap();
        seen[1] += usize::from(best.exposed_ms.total() > 0.0);
        for (k, wanted) in [Keep::Hbm, Keep::Host, Keep::Retained].into_iter().enumerate() {
            seen[2 + k] += usize::from(keep.contains(&wanted));
        }
    }
    seen
}

#[test]
fn no_plan_of_a_random_chain_is_cheaper_than_the_solvers() {
    let [infeasible, exposed, kept, ..] = compare(1, Kind::Plain, cases(300));
    // The sample is worth something only if it reaches the interesting corners.
    assert!(infeasible > 30 && exposed > 20 && kept > 60, "{infeasible} {exposed} {kept}");
}

#[test]
fn internals_in_host_ram_are_placed_as_enumeration_places_them() {
    let [infeasible, _, kept, offloaded, _] = compare(2, Kind::Offload, cases(120));
    assert!(infeasible > 10 && kept > 10 && offloaded > 5, "{infeasible} {kept} {offloaded}");
}

#[test]
fn internals_are_retained_as_enumeration_retains_them() {
    let [_, _, kept, _, retained] = compare(3, Kind::Retain, cases(120));
    assert!(kept > 10 && retained > 5, "{kept} {retained}");
    let [_, _, _, offloaded, retained] = compare(4, Kind::Both, cases(60));
    assert!(offloaded > 3 && retained > 0, "{offloaded} {retained}");
}

/// CBC's first incumbent is the best plan here, and its root has nothing better: CLP must not abort over how it is told.
#[test]
fn a_search_that_ends_at_its_root_does_not_abort_the_process() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/keep/closed_root.json");
    let chain = CostChain::from_json(&fs::read_to_string(path).unwrap()).unwrap();
    let solution = solve(&chain, &SolveOptions::default()).unwrap();
    assert_eq!(solution.status, Status::Optimal);
    let best = cheapest(&chain).unwrap().objective_ms;
    assert!((solution.objective_ms.unwrap() - best).abs() < 2e-6, "{best}");
}

#[test]
fn an_infeasible_chain_names_the_lowest_cap_that_works() {
    let (chain, _) = given("keep_infeasible");
    let remedies = explain(&chain, &SolveOptions::default()).unwrap();
    let cap = chain.hbm_cap_bytes.unwrap();
    let smallest = remedies.iter().find_map(|r| match r {
        Remedy::HbmCap { cap: had, smallest } if *had == cap => Some(*smallest),
        _ => None,
    });
    let smallest = smallest.unwrap();
    for (bytes, status) in [(smallest, Status::Optimal), (smallest - Bytes(1), Status::Infeasible)] {
        let mut changed = chain.clone();
        changed.hbm_cap_bytes = Some(bytes);
        assert_eq!(solve(&changed, &SolveOptions::default()).unwrap().status, status);
    }
    // Host RAM alone helps too; what it says is the least there is.
    let host = remedies.iter().find_map(|r| match r {
        Remedy::Budget(Raise { tier: Tier::Host, smallest, .. }) => Some(*smallest),
        _ => None,
    });
    if let Some(smallest) = host {
        for (bytes, status) in [(smallest, Status::Optimal), (smallest - Bytes(1), Status::Infeasible)] {
            let changed = CostChain { cpu_budget_bytes: bytes, ..chain.clone() };
            assert_eq!(solve(&changed, &SolveOptions::default()).unwrap().status, status);
        }
    }
}

#[test]
fn no_time_leaves_a_plan_made_by_rule() {
    let (chain, expected) = given("h200_36_40");
    let options = SolveOptions { time_limit: Some(Seconds(0.0)), ..SolveOptions::default() };
    let solution = solve(&chain, &options).unwrap();
    assert_eq!(solution.status, Status::Feasible);
    assert!(solution.objective_ms.unwrap() >= expected["objective"].as_f64().unwrap() - 2e-6);
}

#[test]
fn a_chain_of_one_layer_keeps_it_where_it_fits() {
    let (mut chain, _) = given("tiny5");
    chain.layers = 1;
    chain.locks = None;
    for list in [&mut chain.layer_window_ms, &mut chain.layer_recompute_ms] {
        list.truncate(1);
    }
    chain.layer_backward_window_ms.as_mut().unwrap().truncate(1);
    chain.boundary_bytes.truncate(2);
    chain.param_h2d_bytes.truncate(1);
    chain.grad_d2h_bytes.truncate(1);
    for list in [
        &mut chain.layer_internal_bytes,
        &mut chain.layer_forward_workspace_bytes,
        &mut chain.layer_backward_workspace_bytes,
    ] {
        list.as_mut().unwrap().truncate(1);
    }
    let solution = solve(&chain, &SolveOptions::default()).unwrap();
    assert_eq!((solution.status, solution.keep), (Status::Optimal, Some(vec![Keep::Hbm])));
}

#[test]
fn step_time_then_checkpoints_then_nvme_decide_on_request() {
    // Weights that would skip boundaries, were they asked.
    let (mut chain, expected) = given("h200_36_40");
    (chain.checkpoint_penalty, chain.nvme_tiebreak) = (7.0, 11.0);
    let options = SolveOptions { tie_break: TieBreak::Lexicographic, ..SolveOptions::default() };
    let solution = solve(&chain, &options).unwrap();
    assert_eq!(solution.status, Status::Optimal);
    let got = solution.evaluation.unwrap();
    // The weights alone stand between the published objective and the step: 37 checkpoints of 1e-5 ms.
    assert!((got.step_ms() - (expected["objective"].as_f64().unwrap() - 37e-5)).abs() < 2e-6);
    assert_eq!((got.counts.checkpoints(), got.counts.nvme), (37, 0));
    assert!((solution.objective_ms.unwrap() - got.step_ms() - 37.0 * 7.0).abs() < 1e-6);
}

#[test]
fn more_hbm_never_makes_a_plan_worse() {
    for (kind, name, seeds) in keep_chains::KINDS {
        // An idle link and much host RAM; little host RAM.
        for seed in 0..seeds.min(2) {
            let objective = |cap: u64| {
                let chain = keep_chains::chain(kind, 20, cap, seed).unwrap();
                let solution = solve(&chain, &SolveOptions::default()).unwrap();
                assert_eq!(solution.status, Status::Optimal, "{name} {cap} {seed}");
                solution.objective_ms.unwrap()
            };
            let [least, middle, most] = keep_chains::CAPS_GB.map(objective);
            assert!(
                least + 2e-6 >= middle && middle + 2e-6 >= most,
                "{name} {seed}: {least} {middle} {most}"
            );
        }
    }
}

/// 36 equal layers: which of them go to host RAM matters little, how many does. The values were found and proven by other solvers.
#[test]
fn equal_layers_in_host_ram_are_proven_without_trying_their_orders() {
    for (cap, objective) in [(24, 229.1), (40, 165.9), (70, 47.4)] {
        let (mut chain, _) = given("h200_36_40");
        chain.internals_offload = Some(true);
        chain.hbm_cap_bytes = Some(Bytes(cap * 1_000_000_000));
        chain.gpu_budget_bytes = Bytes(cap * 1_000_000_000);
        let solution = solve(&chain, &SolveOptions::default()).unwrap();
        assert_eq!(solution.status, Status::Optimal, "{cap} GB");
        let weights = 37.0 * chain.checkpoint_penalty;
        let got = solution.objective_ms.unwrap();
        assert!((got - weights - objective).abs() < 2e-6, "{cap} GB: {got}");
    }
}
