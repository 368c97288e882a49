//! The least objective, by the cheapest method that proves it.

use std::time::{Duration, Instant};

use lazy_model::{BoundaryIndex, CostChain, Locks, evaluate};

use crate::count_dp::{self, Counting};
use crate::place::place;
use crate::problem::Goal;
use crate::search::{Found, Plan, search};
use crate::solve::{Method, TieBreak};
use crate::surrogate::{Relaxed, Surrogate};

/// Time for the program that places given checkpoints.
const PLACING: Duration = Duration::from_secs(2);

/// The plan of least objective, and the method that found it.
pub(crate) fn weighted(chain: &CostChain, method: Method, deadline: Option<Instant>) -> (Found, Method) {
    if matches!(method, Method::Auto | Method::CountDp) && count_dp::applies(chain) {
        let found = match count_dp::solve(chain, TieBreak::Weighted, deadline) {
            Counting::Plan(found) => found,
            Counting::Infeasible => return (Found::Infeasible, Method::CountDp),
            Counting::OutOfTime => return (Found::OutOfTime { bound: None }, Method::CountDp),
        };
        if let Ok(evaluation) = evaluate(chain, &found.placement) {
            let plan = Plan::new(found.placement, evaluation, Goal::Cost, Some(found.value));
            if plan.proven {
                return (Found::Plan(Box::new(plan)), Method::CountDp);
            }
        }
    }
    if method == Method::Mip {
        return (search(chain, Goal::Cost, deadline), Method::Mip);
    }
    by_surrogate(chain, deadline)
}

/// The relaxation's sets of checkpoints, placed as well as they can be. Where that reaches the relaxation's bound it is an optimum; where
/// not, the whole program decides.
fn by_surrogate(chain: &CostChain, deadline: Option<Instant>) -> (Found, Method) {
    let Some(surrogate) = Surrogate::new(chain) else { return (Found::Infeasible, Method::Surrogate) };
    let Some(relaxed) = surrogate.solve(deadline) else { return (Found::Infeasible, Method::Surrogate) };
    let placed = placed(chain, &relaxed, deadline);
    if let Some(plan) = placed.as_ref().filter(|plan| plan.proven) {
        return (Found::Plan(Box::new(plan.clone())), Method::Surrogate);
    }
    (better_of(search(chain, Goal::Cost, deadline), placed, relaxed.bound), Method::Mip)
}

/// The best plan for the relaxation's sets of checkpoints: without a program, and if that does not meet the bound, for the first
/// set with one.
fn placed(chain: &CostChain, relaxed: &Relaxed, deadline: Option<Instant>) -> Option<Plan> {
    let mut best: Option<Plan> = None;
    let cheaper = |plan: &Plan, best: &Option<Plan>| {
        best.as_ref().is_none_or(|best| plan.evaluation.objective < best.evaluation.objective)
    };
    for set in &relaxed.sets {
        if best.as_ref().is_some_and(|plan| plan.proven || plan.evaluation.objective_ms <= set.at_least) {
            break;
        }
        if let Some((placement, evaluation)) = place(chain, &set.skip, relaxed.bound, deadline) {
            let plan = Plan::new(placement, evaluation, Goal::Cost, Some(relaxed.bound));
            if cheaper(&plan, &best) {
                best = Some(plan);
            }
        }
    }
    if best.as_ref().is_some_and(|plan| plan.proven) {
        return best;
    }
    let locked = with_checkpoints(chain, &relaxed.sets.first()?.skip);
    if let Found::Plan(plan) = search(&locked, Goal::Cost, Some(soon(deadline)))
        && cheaper(&plan, &best)
    {
        best = Some(Plan::new(plan.placement, plan.evaluation, Goal::Cost, Some(relaxed.bound)));
    }
    best
}

/// The whole program's answer, with the plan and the bound known before where they are better.
fn better_of(found: Found, placed: Option<Plan>, bound: f64) -> Found {
    let (searched, searched_bound) = match found {
        Found::Plan(plan) => {
            let bound = plan.bound;
            (Some(*plan), bound)
        }
        Found::OutOfTime { bound } => (None, bound),
        // A plan that passed the exact check refutes a verdict of infeasibility.
        Found::Failed(_) | Found::Infeasible if placed.is_some() => (None, None),
        other => return other,
    };
    let bound = searched_bound.map_or(bound, |searched| searched.max(bound));
    let best = [searched, placed]
        .into_iter()
        .flatten()
        .min_by(|a, b| a.evaluation.objective.cmp(&b.evaluation.objective));
    match best {
        Some(plan) => {
            Found::Plan(Box::new(Plan::new(plan.placement, plan.evaluation, Goal::Cost, Some(bound))))
        }
        None => Found::OutOfTime { bound: Some(bound) },
    }
}

/// A part of the time there is: the program for given checkpoints is quick or hopeless.
fn soon(deadline: Option<Instant>) -> Instant {
    let now = Instant::now();
    let most = now + PLACING;
    deadline.map_or(most, |deadline| most.min(now + deadline.saturating_duration_since(now) / 4))
}

/// The chain with its checkpoints decided and only their places left open.
fn with_checkpoints(chain: &CostChain, skip: &[bool]) -> CostChain {
    let stops: Vec<BoundaryIndex> = (0..skip.len()).filter(|&i| !skip[i]).map(BoundaryIndex).collect();
    let edges = stops.windows(2).map(|pair| (pair[0], pair[1])).collect();
    let locks = Locks { edges: Some(edges), ..chain.locks.clone().unwrap_or_default() };
    CostChain { locks: Some(locks), ..chain.clone() }
}
