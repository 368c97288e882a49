//! Random small chains, solved and also enumerated: every placement judged, the cheapest kept.

#![allow(clippy::unwrap_used)]

use lazy_model::{BoundaryIndex, Bytes, BytesPerSecond, CostChain, Evaluation, Locks, Placement, evaluate};
use lazy_solver::{SolveOptions, Status, TieBreak, solve};

const STATES: [Placement; 4] = [Placement::Hbm, Placement::Host, Placement::Nvme, Placement::Recompute];

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

fn random_chain(r: &mut Random) -> CostChain {
    let n = 1 + r.pick(&[1, 2, 2, 3, 3, 3, 4]) as usize - usize::from(r.one_in(8));
    // Equal sizes, sizes in whole MiB, sizes that differ by a few bytes, sizes to the byte.
    let (kind, base) = (r.below(4), 1 + r.below(1 << 22));
    let boundary_bytes: Vec<Bytes> = (0..=n)
        .map(|_| match kind {
            0 => Bytes(base),
            1 => Bytes::from_mib(r.below(6)),
            2 => Bytes(base + r.below(3)),
            _ => Bytes(1 + r.below(1 << 22)),
        })
        .collect();
    let total: u64 = boundary_bytes.iter().map(|b| b.get()).sum();
    let budget = |r: &mut Random| match kind {
        // A few bytes more or fewer than some boundaries take.
        0 | 2 if r.one_in(2) => Bytes((base * (1 + r.below(3)) + r.below(5)).saturating_sub(2)),
        _ => Bytes(total * r.below(8) / 10),
    };
    let rate =
        |r: &mut Random| BytesPerSecond(if r.one_in(15) { 0.0 } else { (1 + r.below(20)) as f64 * 2.5e7 });
    let recompute = |r: &mut Random| (1 + r.below(200)) as f64 / 10.0;
    let mandatory = |r: &mut Random| Bytes(if r.one_in(4) { r.below(1 << 21) } else { 0 });
    let mut chain = CostChain {
        name: None,
        comment: None,
        layers: n,
        layer_window_ms: (0..n).map(|_| recompute(r)).collect(),
        layer_recompute_ms: (0..n).map(|_| recompute(r)).collect(),
        boundary_bytes,
        param_h2d_bytes: (0..n).map(|_| mandatory(r)).collect(),
        grad_d2h_bytes: (0..n).map(|_| mandatory(r)).collect(),
        gpu_budget_bytes: budget(r),
        cpu_budget_bytes: budget(r),
        nvme_budget_bytes: budget(r),
        d2h_bytes_per_s: rate(r),
        h2d_bytes_per_s: rate(r),
        nvme_write_bytes_per_s: rate(r),
        nvme_read_bytes_per_s: rate(r),
        pcie_window_scale: r.pick(&[1.0, 2.0, 4.0]),
        nvme_window_scale: r.pick(&[1.0, 6.0]),
        pcie_capacity_fraction: r.pick(&[1.0, 0.9, 0.35]),
        nvme_capacity_fraction: r.pick(&[1.0, 0.8]),
        max_segment_layers: 1 + r.below(4) as usize,
        checkpoint_penalty: r.pick(&[1e-5, 0.0]),
        nvme_tiebreak: r.pick(&[1e-3, 0.0]),
        d2h_first_window_offset: r.pick(&[0, 0, 1]),
        h2d_first_window_offset: r.pick(&[1, 1, 0, 2]),
        locks: None,
        layer_internal_bytes: None,
        layer_forward_workspace_bytes: None,
        layer_backward_workspace_bytes: None,
        loss_workspace_bytes: None,
        hbm_cap_bytes: None,
        hbm_fixed_bytes: None,
        transfer_slack_bytes: None,
        layer_backward_window_ms: None,
        internals_offload: None,
        retain_internals: None,
    };
    if r.one_in(4) {
        chain.locks = Some(random_locks(r, n));
    }
    chain
}

fn random_locks(r: &mut Random, n: usize) -> Locks {
    let mut locks = Locks::default();
    match r.below(3) {
        0 => locks.gpu = Some((0..=n).filter(|_| r.one_in(2)).map(BoundaryIndex).collect()),
        1 => {
            locks.fixed.insert(BoundaryIndex(r.below(n as u64 + 1) as usize), r.pick(&STATES));
        }
        _ => {
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
    }
    locks
}

fn allowed(chain: &CostChain) -> Vec<Evaluation> {
    let n = chain.boundaries();
    let decode = |code: usize| (0..n).map(|i| STATES[code >> (2 * i) & 3]).collect::<Vec<_>>();
    (0..1usize << (2 * n))
        .filter(|code| code & 3 != 3 && code >> (2 * (n - 1)) != 3)
        .filter_map(|code| evaluate(chain, &decode(code)).ok())
        .collect()
}

fn cheapest(chain: &CostChain) -> Option<Evaluation> {
    allowed(chain).into_iter().min_by(|a, b| a.objective.cmp(&b.objective))
}

#[test]
fn no_placement_of_a_random_chain_is_cheaper_than_the_solvers() {
    let mut r = Random(1);
    let (mut infeasible, mut exposed, mut all_tiers) = (0, 0, 0);
    for number in 0..600 {
        let chain = random_chain(&mut r);
        let solution = solve(&chain, &SolveOptions::default()).unwrap();
        let Some(best) = cheapest(&chain) else {
            infeasible += 1;
            assert_eq!(solution.status, Status::Infeasible, "chain {number}: {}", chain.to_json());
            continue;
        };
        assert_eq!(solution.status, Status::Optimal, "chain {number}: {}", chain.to_json());
        let got = solution.objective_ms.unwrap();
        assert!(
            (got - best.objective_ms).abs() < 2e-6,
            "chain {number}: {got} instead of {}: {}",
            best.objective_ms,
            chain.to_json()
        );
        exposed += usize::from(best.exposed_ms.total() > 0.0);
        all_tiers += usize::from(best.counts.hbm > 0 && best.counts.host > 0 && best.counts.nvme > 0);
    }
    // The sample is worth something only if it reaches the interesting corners.
    assert!(infeasible > 100 && exposed > 50 && all_tiers > 20, "{infeasible} {exposed} {all_tiers}");
}

#[test]
fn step_time_then_checkpoints_then_nvme_decide_whatever_the_weights_say() {
    let mut r = Random(2);
    let (mut ties, mut weights_disagree) = (0, 0);
    for number in 0..100 {
        let mut chain = random_chain(&mut r);
        // Weights that would choose otherwise.
        chain.checkpoint_penalty = r.pick(&[0.0, 1e-5, 7.0]);
        chain.nvme_tiebreak = r.pick(&[0.0, 1e-3, 11.0]);
        let options = SolveOptions { tie_break: TieBreak::Lexicographic, ..SolveOptions::default() };
        let solution = solve(&chain, &options).unwrap();
        // The weights are all that an objective holds beside the step.
        let bare = CostChain { checkpoint_penalty: 0.0, nvme_tiebreak: 0.0, ..chain.clone() };
        let all = allowed(&bare);
        let Some(fastest) = all.iter().map(|e| &e.objective).min() else {
            assert_eq!(solution.status, Status::Infeasible, "chain {number}: {}", chain.to_json());
            continue;
        };
        let fastest_ms = all.iter().map(|e| e.objective_ms).fold(f64::INFINITY, f64::min);
        let equal = all.iter().filter(|e| e.objective == *fastest);
        ties += usize::from(equal.clone().count() > 1);
        let fewest = equal.map(|e| (e.counts.checkpoints(), e.counts.nvme)).min().unwrap();
        assert_eq!(solution.status, Status::Optimal, "chain {number}: {}", chain.to_json());
        let got = solution.evaluation.unwrap();
        assert!(got.step_ms() - fastest_ms < 2e-6, "chain {number}: {}", chain.to_json());
        let counts = (got.counts.checkpoints(), got.counts.nvme);
        assert!(counts <= fewest, "chain {number}: {counts:?} instead of {fewest:?}: {}", chain.to_json());
        assert_eq!(Some(got.objective_ms), solution.objective_ms);
        weights_disagree += usize::from(got.objective_ms > cheapest(&chain).unwrap().objective_ms + 2e-6);
    }
    assert!(ties > 10 && weights_disagree > 5, "{ties} {weights_disagree}");
}
