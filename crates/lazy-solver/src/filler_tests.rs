//! What is found for given checkpoints, against every placement of them, judged exactly.

#![allow(clippy::unwrap_used)]

use lazy_model::{BoundaryIndex, Bytes, CostChain, Locks, Placement, evaluate};

use crate::exchange::exchange;
use crate::fit::{every, polish};
use crate::hidden::hidden;
use crate::place::{Filler, Random};

const TIERS: [Placement; 3] = [Placement::Hbm, Placement::Host, Placement::Nvme];
const CHAINS: u64 = 150;

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        ((self.unit() * n as f64) as u64).min(n - 1)
    }
}

/// A chain of a seed: up to seven boundaries, tight budgets, slow links.
pub(crate) fn random_chain(r: &mut Random) -> CostChain {
    let n = 2 + r.below(5) as usize;
    let step = [1 << 20, 1 << 20, 1][r.below(3) as usize];
    let sizes: Vec<u64> = (0..=n).map(|_| (1 + r.below(6 << 20)).next_multiple_of(step)).collect();
    let total: u64 = sizes.iter().sum();
    let mut times = |most: u64| -> Vec<u64> { (0..n).map(|_| r.below(most)).collect() };
    let (window, recompute, mandatory) = (times(20), times(20), times(1 << 20));
    let mut pick = |from: [f64; 4]| from[r.below(4) as usize];
    let (pcie, drive, tiebreak) =
        (pick([1.0, 1.0, 3.0, 9.0]), pick([1.0, 1.0, 3.0, 9.0]), pick([0.001, 0.001, 0.0, 2.0]));
    let mut share = |parts: [f64; 4]| (total as f64 * pick(parts)) as u64;
    let chain = serde_json::json!({
        "layers": n, "layer_window_ms": window, "layer_recompute_ms": recompute, "boundary_bytes": sizes,
        "param_h2d_bytes": mandatory, "grad_d2h_bytes": mandatory,
        "gpu_budget_bytes": share([0.1, 0.2, 0.4, 0.6]), "cpu_budget_bytes": share([0.0, 0.2, 0.3, 0.4]),
        "nvme_budget_bytes": share([0.1, 0.3, 0.6, 0.9]),
        "d2h_bytes_per_s": 5e8, "h2d_bytes_per_s": 8e8,
        "nvme_write_bytes_per_s": 3e8, "nvme_read_bytes_per_s": 2e8,
        "pcie_window_scale": pcie, "nvme_window_scale": drive,
        "pcie_capacity_fraction": 1, "nvme_capacity_fraction": 1, "max_segment_layers": n,
        "checkpoint_penalty": 1e-5, "nvme_tiebreak": tiebreak,
    });
    CostChain::from_json(&chain.to_string()).unwrap()
}

/// A chain, its checkpoints, and all allowed placements of them with their exact objectives.
fn cases() -> impl Iterator<Item = (CostChain, Filler, Vec<(f64, Vec<Placement>)>)> {
    (0..CHAINS).map(|seed| {
        let mut r = Random(seed);
        let chain = random_chain(&mut r);
        let n = chain.layers;
        let skip: Vec<bool> = (0..=n).map(|i| i > 0 && i < n && r.below(5) == 0).collect();
        let filler = Filler::new(&chain, &skip, None).unwrap();
        let mut placements = vec![vec![]];
        for skipped in &skip {
            let here = if *skipped { &[Placement::Recompute][..] } else { &TIERS[..] };
            placements = placements
                .iter()
                .flat_map(|below| here.iter().map(|p| [&below[..], &[*p]].concat()))
                .collect();
        }
        let judged = placements
            .into_iter()
            .filter_map(|p| Some((evaluate(&chain, &p).ok()?.objective_ms, p)))
            .collect();
        (chain, filler, judged)
    })
}

fn least<'a>(placements: impl IntoIterator<Item = &'a (f64, Vec<Placement>)>) -> f64 {
    placements.into_iter().map(|(cost, _)| *cost).fold(f64::INFINITY, f64::min)
}

fn near(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() < 1e-9 * (1.0 + a.abs())
}

#[test]
fn costs_are_the_judges_and_none_is_below_the_bound() {
    for (_, filler, placements) in cases() {
        assert!(placements.iter().all(|(cost, placement)| near(filler.cost(placement), *cost)));
        let bound = filler.at_least().unwrap_or(f64::INFINITY);
        assert!(bound <= least(&placements) + 1e-9, "{bound} {}", least(&placements));
    }
}

/// Locks say of some boundaries where they are: no allowed placement is below the bound. Where they say what is in HBM and the rest fits host
/// RAM, the bound is what that costs.
#[test]
fn a_bound_counts_what_locks_leave() {
    let (mut bounded, mut met) = (0, 0);
    for (number, (chain, filler, placements)) in cases().enumerate() {
        let mut r = Random(1000 + number as u64);
        let saved: Vec<BoundaryIndex> =
            (0..filler.sizes.len()).filter(|&i| !filler.skip[i]).map(BoundaryIndex).collect();
        let given = placements.get(r.below(placements.len().max(1) as u64) as usize).map(|(_, given)| given);
        let hbm = |i: &&BoundaryIndex| given.is_some_and(|given| given[i.get()] == Placement::Hbm);
        let set = saved.iter().filter(hbm).copied().collect();
        let fixed = saved.iter().filter(|_| r.below(3) == 0).filter_map(|i| Some((*i, given?[i.get()])));
        for locks in [
            Locks { gpu: Some(set), ..Locks::default() },
            Locks { fixed: fixed.collect(), ..Locks::default() },
        ] {
            let whole = locks.gpu.is_some();
            let locked = CostChain { locks: Some(locks), ..chain.clone() };
            let bound = Filler::new(&locked, &filler.skip, None).unwrap().at_least().unwrap_or(f64::INFINITY);
            let allowed =
                placements.iter().filter_map(|(_, p)| Some((evaluate(&locked, p).ok()?.objective_ms, p)));
            let best = allowed.min_by(|a, b| a.0.total_cmp(&b.0));
            let (best, on_nvme) =
                best.map_or((f64::INFINITY, false), |(cost, p)| (cost, p.contains(&Placement::Nvme)));
            assert!(bound <= best + 1e-9, "{number}: {bound} {best}");
            bounded += usize::from(best.is_finite());
            if whole && best.is_finite() && !on_nvme {
                assert!(near(bound, best), "{number}: {bound}, not {best}");
                met += 1;
            }
        }
    }
    assert!(bounded > 50 && met > 5, "{bounded} {met}");
}

#[test]
fn the_cheapest_set_on_nvme_is_that_of_all_sets() {
    let mut sets_found = 0;
    for (_, filler, _) in cases() {
        let saved: Vec<usize> = (0..filler.sizes.len()).filter(|&i| !filler.skip[i]).collect();
        let lacking = filler.lacking();
        let sets = (0..1u32 << saved.len()).map(|bits| -> Vec<usize> {
            saved.iter().enumerate().filter(|(k, _)| bits >> k & 1 > 0).map(|(_, i)| *i).collect()
        });
        let relieve = |set: &Vec<usize>| set.iter().map(|&i| filler.sizes[i]).sum::<u64>() >= lacking;
        let cost = |set: &Vec<usize>| {
            filler.tiebreak * set.len() as f64 + filler.exposed(true, |i| set.contains(&i))
        };
        let relieving: Vec<Vec<usize>> = sets.filter(relieve).collect();
        let Some(first) = relieving.iter().map(Vec::len).min() else {
            assert!(filler.fewest().is_none());
            continue;
        };
        // Three counts are searched; more boundaries cost at least their weight.
        let searched =
            relieving.iter().filter(|set| set.len() <= first + 2).map(cost).fold(f64::INFINITY, f64::min);
        let beyond =
            if first + 3 > saved.len() { f64::INFINITY } else { filler.tiebreak * (first + 3) as f64 };
        let few = filler.fewest().unwrap();
        assert!(near(few.at_least, searched.min(beyond)), "{} {searched} {beyond}", few.at_least);
        if let Some(set) = &few.set {
            assert!(relieve(set) && near(cost(set), searched));
            sets_found += 1;
        }
    }
    assert!(sets_found > 0);
}

#[test]
fn an_exchange_is_the_best_of_all_splits() {
    let mut exchanged = 0;
    for (seed, (_, filler, placements)) in (0..).zip(cases()) {
        let mut r = Random(seed);
        let Some((_, start)) = placements.get(r.below(placements.len().max(1) as u64) as usize) else {
            continue;
        };
        let either = |p: Placement| matches!(p, Placement::Hbm | Placement::Host);
        let free: Vec<bool> = start.iter().map(|p| either(*p) && r.below(4) > 0).collect();
        let differs_there = |other: &Vec<Placement>| {
            (0..start.len()).all(|i| other[i] == start[i] || free[i] && either(other[i]))
        };
        let expected = least(placements.iter().filter(|(_, p)| differs_there(p)));
        let found = exchange(&filler, start, &free, f64::INFINITY, &mut 1_000_000).unwrap();
        assert!(near(found.0, expected), "{} {expected}", found.0);
        assert!(differs_there(&found.1) && near(filler.cost(&found.1), found.0));
        assert!(exchange(&filler, start, &free, expected - 1e-7, &mut 1_000_000).is_none());
        exchanged += usize::from(found.1 != *start);
    }
    assert!(exchanged > 0);
}

#[test]
fn trying_every_placement_finds_the_best_and_says_so() {
    for (chain, filler, placements) in cases() {
        let expected = least(&placements);
        let fit = every(&filler, f64::INFINITY, None);
        assert!(fit.exact);
        let found = fit.better.as_ref().map_or(f64::INFINITY, |(cost, _)| *cost);
        assert!(near(found, expected), "{found} {expected}");
        if let Some((cost, placement)) = fit.better {
            assert!(near(evaluate(&chain, &placement).unwrap().objective_ms, cost));
        }
        let again = every(&filler, expected - 1e-7, None);
        assert!(again.exact && again.better.is_none());
    }
}

#[test]
fn polishing_never_makes_a_placement_dearer_and_leaves_it_allowed() {
    for (seed, (chain, filler, placements)) in (0..).zip(cases()) {
        let at = Random(seed).below(placements.len().max(1) as u64) as usize;
        let Some((before, start)) = placements.get(at) else { continue };
        let (cost, placement) = polish(&filler, start.clone(), 0.0, None);
        assert!(cost <= before + 1e-9 && cost >= least(&placements) - 1e-9);
        assert!(near(evaluate(&chain, &placement).unwrap().objective_ms, cost));
    }
}

#[test]
fn what_need_not_be_exposed_is_hidden() {
    let (mut attained, mut found) = (0, 0);
    for (chain, filler, placements) in cases() {
        let best = least(&placements);
        let attains = filler.at_least().is_some_and(|bound| near(bound, best));
        attained += usize::from(attains);
        let Some((cost, placement)) = hidden(&filler, None) else { continue };
        let judged = evaluate(&chain, &placement).unwrap().objective_ms;
        assert!(near(judged, cost) && cost >= best - 1e-9);
        found += usize::from(attains && near(cost, best));
    }
    // A search, not a proof; it rarely misses.
    assert!(attained > 30 && found * 10 >= attained * 9, "{found} of {attained}");
}

/// Budgets of no bytes and of all bytes leave one placement each.
#[test]
fn extremes_have_one_answer() {
    let mut chain = random_chain(&mut Random(5));
    let all: Bytes = chain.boundary_bytes.iter().copied().sum();
    let skip = vec![false; chain.boundaries()];
    (chain.gpu_budget_bytes, chain.cpu_budget_bytes, chain.nvme_budget_bytes) =
        (Bytes::ZERO, all, Bytes::ZERO);
    let filler = Filler::new(&chain, &skip, None).unwrap();
    let (_, placement) = hidden(&filler, None).unwrap();
    assert!(placement.iter().all(|p| *p == Placement::Host));
    (chain.gpu_budget_bytes, chain.cpu_budget_bytes) = (Bytes::ZERO, Bytes::ZERO);
    let filler = Filler::new(&chain, &skip, None).unwrap();
    assert!(hidden(&filler, None).is_none());
    assert!(every(&filler, f64::INFINITY, None).better.is_none());
}
