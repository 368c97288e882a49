//! Plans by simple rules: something to show when time runs out, and repairs of plans that overflow.

use std::time::{Duration, Instant};

use lazy_model::{BoundaryIndex, CostChain, Evaluation, Keep, LayerIndex, Placement, evaluate_keep};

use super::shape::{Plan, Shape};

/// Block lengths times shares of boundaries in host RAM that are tried.
const HOST_SHARES: usize = 4;
/// Time for a plan where there is none left: enough for hundreds of layers.
const AT_LEAST: Duration = Duration::from_millis(100);

/// The best plan of a few made by rule, if one is allowed: blocks of equal length, the lowest saved boundaries in host RAM as far as
/// the budget and the windows allow, the rest in HBM; then internals kept as long as HBM holds them and there is time.
pub(crate) fn plan(chain: &CostChain, deadline: Option<Instant>) -> Option<(Plan, Evaluation)> {
    let shape = Shape::new(chain)?;
    let until = until(deadline);
    let mut best: Option<(Plan, Evaluation)> = None;
    for block in 1..=shape.limit.min(8) {
        let all = host_prefix(chain, &shape, block);
        for share in 0..=HOST_SHARES {
            let mut bare = boundaries(chain, &shape, block, all * share / HOST_SHARES);
            lock(chain, &mut bare);
            if best.is_some() && is_over(until) {
                return best;
            }
            let Ok(evaluation) = evaluate_keep(chain, &bare.0, &bare.1) else { continue };
            if is_over(until) {
                return Some((bare, evaluation));
            }
            let offloaded =
                (chain.internals_offload == Some(true)).then(|| offload(chain, bare.clone(), until));
            for start in offloaded.into_iter().chain([bare]) {
                for by_density in [true, false] {
                    let full = fill(chain, &shape, start.clone(), by_density, until);
                    let Ok(evaluation) = evaluate_keep(chain, &full.0, &full.1) else { continue };
                    if best.as_ref().is_none_or(|(_, b)| evaluation.objective < b.objective) {
                        best = Some((full, evaluation));
                    }
                }
            }
        }
        if block == 1 && best.is_some() {
            // Longer blocks recompute more and are for chains that do not fit otherwise.
            break;
        }
    }
    best
}

/// A plan that overflows, with as many internals dropped as HBM demands, the cheapest first; then filled again.
pub(crate) fn repaired(
    chain: &CostChain,
    shape: &Shape,
    mut plan: Plan,
    deadline: Option<Instant>,
) -> Option<(Plan, Evaluation)> {
    let until = until(deadline);
    let mut kept: Vec<usize> =
        (0..shape.layers).filter(|&l| plan.1[l] != Keep::Recompute && !is_locked(chain, l)).collect();
    kept.sort_by(|&l, &m| density(chain, shape, l).total_cmp(&density(chain, shape, m)));
    for l in kept {
        if fits(shape, &plan) || is_over(until) {
            break;
        }
        plan.1[l] = Keep::Recompute;
    }
    evaluate_keep(chain, &plan.0, &plan.1).ok()?;
    let full = fill(chain, shape, plan, true, until);
    let evaluation = evaluate_keep(chain, &full.0, &full.1).ok()?;
    Some((full, evaluation))
}

/// How many saved boundaries from below fit into host RAM.
fn host_prefix(chain: &CostChain, shape: &Shape, block: usize) -> usize {
    let mut left = chain.cpu_budget_bytes.get();
    let saved = (0..shape.layers).step_by(block);
    let fitting = saved.take_while(|&i| {
        let fits = shape.boundary[i] <= left;
        left = left.saturating_sub(shape.boundary[i]);
        fits
    });
    if shape.links[0].rate > 0.0 && shape.links[1].rate > 0.0 { fitting.count() } else { 0 }
}

fn boundaries(chain: &CostChain, shape: &Shape, block: usize, in_host: usize) -> Plan {
    let n = chain.layers;
    let mut placement = vec![Placement::Recompute; n + 1];
    for (count, i) in (0..n).step_by(block).enumerate() {
        placement[i] = if count < in_host { Placement::Host } else { Placement::Hbm };
    }
    placement[n] = Placement::Hbm;
    (placement, vec![Keep::Recompute; shape.layers])
}

/// Makes a plan obey the locks of single boundaries and layers.
fn lock(chain: &CostChain, plan: &mut Plan) {
    let Some(locks) = &chain.locks else { return };
    if let Some(set) = &locks.gpu {
        for (i, p) in plan.0.iter_mut().enumerate() {
            if set.contains(&BoundaryIndex(i)) {
                *p = Placement::Hbm;
            } else if *p == Placement::Hbm {
                *p = Placement::Host;
            }
        }
    }
    for (i, p) in &locks.fixed {
        plan.0[i.get()] = *p;
    }
    for (l, kept) in &locks.keep {
        plan.1[l.get()] = if *kept { Keep::Hbm } else { Keep::Recompute };
    }
}

/// Sends the internals of one layer after another to host RAM, from the lowest up, where that saves more than it exposes.
fn offload(chain: &CostChain, mut plan: Plan, until: Option<Instant>) -> Plan {
    let Ok(evaluation) = evaluate_keep(chain, &plan.0, &plan.1) else { return plan };
    let mut best = evaluation.objective;
    for l in 0..chain.layers {
        if plan.1[l] != Keep::Recompute || is_locked(chain, l) {
            continue;
        }
        if is_over(until) {
            break;
        }
        plan.1[l] = Keep::Host;
        match evaluate_keep(chain, &plan.0, &plan.1) {
            Ok(evaluation) if evaluation.objective < best => best = evaluation.objective,
            _ => plan.1[l] = Keep::Recompute,
        }
    }
    plan
}

/// Keeps one layer after another where HBM still holds all: by time saved a byte, or from the last down.
fn fill(chain: &CostChain, shape: &Shape, mut plan: Plan, by_density: bool, until: Option<Instant>) -> Plan {
    let mut order: Vec<usize> =
        (0..shape.layers).rev().filter(|&l| plan.1[l] == Keep::Recompute && !is_locked(chain, l)).collect();
    if by_density {
        order.sort_by(|&l, &m| density(chain, shape, m).total_cmp(&density(chain, shape, l)));
    }
    for l in order {
        if is_over(until) {
            break;
        }
        plan.1[l] = Keep::Hbm;
        if !fits(shape, &plan) {
            plan.1[l] = Keep::Recompute;
        }
    }
    plan
}

fn until(deadline: Option<Instant>) -> Option<Instant> {
    deadline.map(|deadline| deadline.max(Instant::now() + AT_LEAST))
}

fn is_over(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() >= until)
}

fn is_locked(chain: &CostChain, l: usize) -> bool {
    chain.locks.as_ref().is_some_and(|k| k.keep.contains_key(&LayerIndex(l)))
}

fn density(chain: &CostChain, shape: &Shape, l: usize) -> f64 {
    chain.rerun_ms()[l] / shape.internals[l].max(1) as f64
}

fn fits(shape: &Shape, plan: &Plan) -> bool {
    // A byte of room for rounding: the judge is exact.
    let room = shape.hbm as f64 - 1.0;
    shape.held(plan).iter().all(|held| *held <= room)
}
