//! Random small chains, solved and also enumerated: every placement costed, the cheapest kept.

#![allow(clippy::unwrap_used)]

mod common;

use common::{Random, bare_chain, cases};
use lazy_model::{
    BoundaryIndex, Bytes, BytesPerSecond, CostChain, Evaluation, LayerIndex, Locks, Placement, evaluate,
};
use lazy_solver::{Method, Solution, SolveOptions, Status, TieBreak, solve};

/// Any chain of up to six layers, with all that makes chains nasty.
fn random_chain(r: &mut Random) -> CostChain {
    let n = r.pick(&[1, 2, 3, 3, 4, 4, 5, 6]);
    // Equal sizes, sizes in whole MiB, sizes that differ by a few bytes, sizes to the byte, nothing at all.
    let (kind, base) = (r.below(9), 1 + r.below(1 << 22));
    // Machines from another decade: sizes, rates and times of another order.
    let (size_factor, time_factor) =
        if r.one_in(6) { (r.pick(&[1, 1000]), r.pick(&[1e-3, 1e3])) } else { (1, 1.0) };
    let size = |r: &mut Random| match kind {
        0 | 1 => Bytes(base * size_factor),
        2 | 3 => Bytes::from_mib(r.below(6)) * size_factor,
        4 | 5 => Bytes((base + r.below(3)) * size_factor),
        6 | 7 => Bytes((1 + r.below(1 << 22)) * size_factor),
        _ => Bytes(0),
    };
    let boundary_bytes: Vec<Bytes> = (0..=n).map(|_| size(r)).collect();
    let total: u64 = boundary_bytes.iter().map(|b| b.get()).sum();
    let largest = boundary_bytes.iter().map(|b| b.get()).max().unwrap();
    let budget = |r: &mut Random| match r.below(4) {
        // A few bytes more or fewer than some boundaries take.
        0 | 1 => Bytes((largest * r.below(4) + r.below(5)).saturating_sub(2)),
        2 => Bytes(boundary_bytes.iter().filter(|_| r.one_in(2)).map(|b| b.get()).sum()),
        _ => Bytes(total * r.below(8) / 10),
    };
    let rate = |r: &mut Random| {
        let typical = (1 + r.below(20)) as f64 * 2.5e7;
        BytesPerSecond(if r.one_in(15) { 0.0 } else { typical * size_factor as f64 / time_factor })
    };
    // Few different times make many ties.
    let ties = r.one_in(3);
    let time = |r: &mut Random| {
        let ms = if ties { (1 + r.below(2)) as f64 } else { (1 + r.below(200)) as f64 / 10.0 };
        if r.one_in(12) { 0.0 } else { ms * time_factor }
    };
    let mandatory = |r: &mut Random| Bytes(if r.one_in(4) { r.below(1 << 21) * size_factor } else { 0 });
    let (gpu, cpu, nvme) = (budget(r), budget(r), budget(r));
    let mut chain = CostChain {
        layer_window_ms: (0..n).map(|_| time(r)).collect(),
        layer_recompute_ms: (0..n).map(|_| time(r)).collect(),
        param_h2d_bytes: (0..n).map(|_| mandatory(r)).collect(),
        grad_d2h_bytes: (0..n).map(|_| mandatory(r)).collect(),
        gpu_budget_bytes: gpu,
        cpu_budget_bytes: cpu,
        nvme_budget_bytes: nvme,
        d2h_bytes_per_s: rate(r),
        h2d_bytes_per_s: rate(r),
        nvme_write_bytes_per_s: rate(r),
        nvme_read_bytes_per_s: rate(r),
        pcie_window_scale: r.pick(&[1.0, 2.0, 4.0]),
        nvme_window_scale: r.pick(&[1.0, 6.0]),
        pcie_capacity_fraction: r.pick(&[1.0, 0.9, 0.35, 0.0]),
        nvme_capacity_fraction: r.pick(&[1.0, 0.8]),
        max_segment_layers: 1 + r.below(n as u64) as usize,
        checkpoint_penalty: r.pick(&[1e-5, 0.0, 7.0]),
        nvme_tiebreak: r.pick(&[1e-3, 0.0, 11.0]),
        d2h_first_window_offset: r.pick(&[0, 0, 1, 3]),
        h2d_first_window_offset: r.pick(&[1, 1, 0, 2]),
        ..bare_chain(boundary_bytes)
    };
    if r.one_in(4) {
        chain.locks = Some(random_locks(r, n));
    }
    chain
}

fn random_locks(r: &mut Random, n: usize) -> Locks {
    let mut locks = Locks::default();
    let kinds = 1 + r.below(7);
    if kinds & 1 > 0 {
        // Mostly a path, which may break the block limit; sometimes cut short, which is no path.
        let inner = (1..n).filter(|_| r.one_in(2));
        let stops: Vec<usize> = std::iter::once(0).chain(inner).chain([n]).collect();
        let mut edges: Vec<_> =
            stops.windows(2).map(|w| (BoundaryIndex(w[0]), BoundaryIndex(w[1]))).collect();
        if r.one_in(8) {
            edges.pop();
        }
        locks.edges = Some(edges);
    }
    if kinds & 2 > 0 {
        locks.gpu = Some((0..=n).filter(|_| r.one_in(2)).map(BoundaryIndex).collect());
    }
    if kinds & 4 > 0 {
        let states = [Placement::Hbm, Placement::Host, Placement::Nvme, Placement::Recompute];
        locks.fixed.insert(BoundaryIndex(r.below(n as u64 + 1) as usize), r.pick(&states));
        // Speaks of internals, which this model does not place.
        locks.keep.insert(LayerIndex(0), true);
    }
    locks
}

/// An allowed placement and what it costs, in plain floating point.
#[derive(Clone)]
struct Costed {
    placement: Vec<Placement>,
    step: f64,
    checkpoints: usize,
    nvme: usize,
}

impl Costed {
    fn objective(&self, chain: &CostChain) -> f64 {
        self.step
            + chain.checkpoint_penalty * self.checkpoints as f64
            + chain.nvme_tiebreak * self.nvme as f64
    }
}

/// Every allowed placement. Written from the definition, and shares no code with the solver or the exact judge.
fn enumerate(chain: &CostChain) -> Vec<Costed> {
    let mut found = Vec::new();
    if locked_path_is_one(chain) {
        extend(chain, &mut Vec::new(), [0; 3], &mut found);
    }
    found
}

fn locked_path_is_one(chain: &CostChain) -> bool {
    let Some(edges) = chain.locks.as_ref().and_then(|l| l.edges.as_ref()) else { return true };
    let mut at = 0;
    for (s, e) in edges {
        if s.get() != at || e.get() - s.get() > chain.max_segment_layers {
            return false;
        }
        at = e.get();
    }
    at == chain.layers
}

fn may_be(chain: &CostChain, i: usize, p: Placement) -> bool {
    let skipped = p == Placement::Recompute;
    let Some(locks) = &chain.locks else { return !(skipped && (i == 0 || i == chain.layers)) };
    let on_path =
        |edges: &Vec<(BoundaryIndex, BoundaryIndex)>| i == 0 || edges.iter().any(|(_, e)| e.get() == i);
    !(skipped && (i == 0 || i == chain.layers))
        && locks.edges.as_ref().is_none_or(|edges| on_path(edges) != skipped)
        && locks.gpu.as_ref().is_none_or(|set| set.contains(&BoundaryIndex(i)) == (p == Placement::Hbm))
        && locks.fixed.get(&BoundaryIndex(i)).is_none_or(|fixed| *fixed == p)
}

fn extend(chain: &CostChain, placement: &mut Vec<Placement>, used: [u64; 3], found: &mut Vec<Costed>) {
    let i = placement.len();
    if i == chain.boundaries() {
        found.extend(cost(chain, placement));
        return;
    }
    let budgets = [chain.gpu_budget_bytes, chain.cpu_budget_bytes, chain.nvme_budget_bytes];
    for (tier, p) in [Placement::Hbm, Placement::Host, Placement::Nvme].into_iter().enumerate() {
        let mut used = used;
        used[tier] += chain.boundary_bytes[i].get();
        if may_be(chain, i, p) && used[tier] <= budgets[tier].get() {
            placement.push(p);
            extend(chain, placement, used, found);
            placement.pop();
        }
    }
    let run = placement.iter().rev().take_while(|p| **p == Placement::Recompute).count();
    if may_be(chain, i, Placement::Recompute) && run + 1 < chain.max_segment_layers {
        placement.push(Placement::Recompute);
        extend(chain, placement, used, found);
        placement.pop();
    }
}

fn cost(chain: &CostChain, placement: &[Placement]) -> Option<Costed> {
    let n = chain.layers;
    let skipped = |i: &usize| placement[*i] == Placement::Recompute;
    let mut step: f64 = (1..n).filter(skipped).map(|i| chain.layer_recompute_ms[i - 1]).sum();
    let pcie = chain.pcie_window_scale * chain.pcie_capacity_fraction;
    let drive = chain.nvme_window_scale * chain.nvme_capacity_fraction;
    let (down, up) = (chain.d2h_first_window_offset, chain.h2d_first_window_offset);
    for (rate, offset, factor, mandatory, host) in [
        (chain.d2h_bytes_per_s, down, pcie, Some(&chain.grad_d2h_bytes), true),
        (chain.h2d_bytes_per_s, up, pcie, Some(&chain.param_h2d_bytes), true),
        (chain.nvme_write_bytes_per_s, down, drive, None, false),
        (chain.nvme_read_bytes_per_s, up, drive, None, false),
    ] {
        let bytes = |i: usize| match placement[i] {
            Placement::Nvme => chain.boundary_bytes[i].get() as f64,
            Placement::Host if host => chain.boundary_bytes[i].get() as f64,
            _ => 0.0,
        };
        let entering = |w: usize| -> f64 { (0..=n).filter(|i| (i + offset).min(n) == w).map(bytes).sum() };
        let (mut queue, mut exposed) = (0.0, 0.0);
        for w in 0..n {
            let capacity = rate.get() * chain.layer_window_ms[w] * factor / 1000.0;
            let room = capacity - mandatory.map_or(0.0, |m| m[w].get() as f64);
            exposed += f64::max(-room, 0.0);
            queue = f64::max(queue + entering(w) - room.max(0.0), 0.0);
        }
        exposed += queue + entering(n);
        if exposed > 0.0 {
            if rate.get() == 0.0 {
                return None;
            }
            step += exposed * 1000.0 / rate.get();
        }
    }
    let count = |p: Placement| placement.iter().filter(|q| **q == p).count();
    Some(Costed {
        placement: placement.to_vec(),
        step,
        checkpoints: n + 1 - count(Placement::Recompute),
        nvme: count(Placement::Nvme),
    })
}

fn cheapest(chain: &CostChain, all: &[Costed]) -> Option<Evaluation> {
    let best = all.iter().min_by(|a, b| a.objective(chain).total_cmp(&b.objective(chain)))?;
    let judged = evaluate(chain, &best.placement).unwrap();
    assert!((judged.objective_ms - best.objective(chain)).abs() <= 1e-9 * (1.0 + judged.objective_ms));
    Some(judged)
}

fn near(value: f64) -> f64 {
    2e-6 + 2e-9 * value
}

fn solved(chain: &CostChain, method: Method, tie_break: TieBreak) -> Solution {
    solve(chain, &SolveOptions { method, tie_break, ..SolveOptions::default() }).unwrap()
}

/// Fails unless the verdict is the enumeration's.
fn assert_cheapest(number: usize, chain: &CostChain, best: Option<&Evaluation>, solution: &Solution) {
    let about = || format!("chain {number}, {}: {}", solution.method.name(), chain.to_json());
    let Some(best) = best else {
        assert_eq!(solution.status, Status::Infeasible, "{}", about());
        return;
    };
    assert_eq!(solution.status, Status::Optimal, "{:?} {}", solution.message, about());
    let got = solution.objective_ms.unwrap();
    let want = best.objective_ms;
    assert!((got - want).abs() <= near(want), "{got} instead of {want}: {}", about());
    let judged = evaluate(chain, solution.placement.as_ref().unwrap()).unwrap();
    assert_eq!(judged.objective_ms, got, "{}", about());
}

#[test]
fn no_placement_of_a_random_chain_is_cheaper_than_the_solvers() {
    let mut r = Random(1);
    let (mut infeasible, mut exposed, mut all_tiers) = (0, 0, 0);
    let mut methods = [0; 3];
    let cases = cases(2000);
    for number in 0..cases {
        let chain = random_chain(&mut r);
        let best = cheapest(&chain, &enumerate(&chain));
        let solution = solved(&chain, Method::Auto, TieBreak::Weighted);
        assert_cheapest(number, &chain, best.as_ref(), &solution);
        let known = [Method::CountDp, Method::Surrogate, Method::Mip];
        methods[known.iter().position(|m| *m == solution.method).unwrap()] += 1;
        let Some(best) = best else {
            infeasible += 1;
            continue;
        };
        exposed += usize::from(best.exposed_ms.total() > 0.0);
        all_tiers += usize::from(best.counts.hbm > 0 && best.counts.host > 0 && best.counts.nvme > 0);
    }
    // The sample is worth something only if it reaches the interesting corners.
    let twentieth = cases / 20;
    assert!(infeasible > twentieth && exposed > twentieth && all_tiers > twentieth / 2);
    // The whole program is a last resort; the next test asks for it.
    assert!(methods[0] > twentieth && methods[1] > twentieth && methods[2] > 0, "{methods:?}");
}

#[test]
fn the_whole_program_alone_finds_the_same_optima() {
    let mut r = Random(2);
    for number in 0..cases(400) {
        let chain = random_chain(&mut r);
        let best = cheapest(&chain, &enumerate(&chain));
        let solution = solved(&chain, Method::Mip, TieBreak::Weighted);
        assert_eq!(solution.method, Method::Mip);
        assert_cheapest(number, &chain, best.as_ref(), &solution);
    }
}

#[test]
fn step_time_then_checkpoints_then_nvme_decide_whatever_the_weights_say() {
    let mut r = Random(3);
    let (mut ties, mut weights_disagree) = (0, 0);
    let cases = cases(400);
    for number in 0..cases {
        let mut chain = random_chain(&mut r);
        if number % 2 == 0 {
            // Equal times tie, and heavy weights would choose otherwise than step time.
            chain.layer_recompute_ms.fill(1.0);
            (chain.checkpoint_penalty, chain.nvme_tiebreak) = (7.0, 11.0);
        }
        let method = r.pick(&[Method::Auto, Method::Auto, Method::Mip]);
        let solution = solved(&chain, method, TieBreak::Lexicographic);
        let all = enumerate(&chain);
        let about = || format!("chain {number}, {}: {}", solution.method.name(), chain.to_json());
        let Some(fastest) = all.iter().map(|c| c.step).min_by(f64::total_cmp) else {
            assert_eq!(solution.status, Status::Infeasible, "{}", about());
            continue;
        };
        let equal = all.iter().filter(|c| c.step <= fastest + 1e-9 * (1.0 + fastest));
        ties += usize::from(equal.clone().count() > 1);
        let fewest = equal.map(|c| (c.checkpoints, c.nvme)).min().unwrap();
        assert_eq!(solution.status, Status::Optimal, "{:?} {}", solution.message, about());
        let got = solution.evaluation.as_ref().unwrap();
        assert!(got.step_ms() - fastest <= near(fastest), "{}", about());
        let counts = (got.counts.checkpoints(), got.counts.nvme);
        assert!(counts <= fewest, "{counts:?} instead of {fewest:?}: {}", about());
        assert_eq!(Some(got.objective_ms), solution.objective_ms);
        let cheapest = cheapest(&chain, &all).unwrap().objective_ms;
        weights_disagree += usize::from(got.objective_ms > cheapest + near(cheapest));
    }
    assert!(ties > cases / 10 && weights_disagree > cases / 20, "{ties} {weights_disagree} of {cases}");
}

/// The same programs, solved by another solver.
#[cfg(feature = "cross-check")]
#[test]
fn another_solver_finds_the_same_optima() {
    let mut r = Random(4);
    let cases = cases(300);
    let (mut infeasible, mut gave_up) = (0, 0);
    for number in 0..cases {
        let chain = random_chain(&mut r);
        let solution = solved(&chain, Method::Mip, TieBreak::Weighted);
        let other = lazy_solver::cross_check(&chain).unwrap();
        if other.status == Status::Failed {
            gave_up += 1;
            continue;
        }
        let about = || format!("chain {number}: {:?} {:?} {}", other.status, other.message, chain.to_json());
        let (Some(got), Some(want)) = (solution.objective_ms, other.objective_ms) else {
            assert_eq!(
                (solution.status, other.status),
                (Status::Infeasible, Status::Infeasible),
                "{}",
                about()
            );
            infeasible += 1;
            continue;
        };
        assert_eq!(solution.status, Status::Optimal, "{}", about());
        assert!((got - want).abs() <= near(want), "{got} instead of {want}: {}", about());
    }
    assert!(infeasible > cases / 20 && infeasible < cases / 2, "{infeasible} of {cases} are infeasible");
    // It meets a singular matrix in one of some thousand.
    assert!(gave_up <= cases / 300, "{gave_up} of {cases}");
}
