//! The least objective, by the cheapest method that proves it.

use std::time::Instant;

use lazy_model::{BoundaryIndex, CostChain, Locks, evaluate};

use crate::count_dp;
use crate::problem::Goal;
use crate::search::{Found, Plan, search};
use crate::solve::{Method, TieBreak};
use crate::surrogate::Surrogate;

/// The plan of least objective, and the method that found it.
pub(crate) fn weighted(chain: &CostChain, method: Method, deadline: Option<Instant>) -> (Found, Method) {
    if matches!(method, Method::Auto | Method::CountDp) && count_dp::applies(chain) {
        let Some(found) = count_dp::solve(chain, TieBreak::Weighted) else {
            return (Found::Infeasible, Method::CountDp);
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

/// The relaxation's set of checkpoints, placed as well as it can be. Where that reaches the relaxation's bound it is an optimum; where
/// not, the whole program decides.
fn by_surrogate(chain: &CostChain, deadline: Option<Instant>) -> (Found, Method) {
    let Some(surrogate) = Surrogate::new(chain) else { return (Found::Infeasible, Method::Surrogate) };
    let Some(relaxed) = surrogate.solve() else { return (Found::Infeasible, Method::Surrogate) };
    let mut placed = None;
    if let Some(skip) = &relaxed.skip
        && let Found::Plan(mut plan) = search(&with_checkpoints(chain, skip), Goal::Cost, deadline)
    {
        plan.bound = Some(relaxed.bound);
        plan.prove(Goal::Cost);
        if plan.proven {
            return (Found::Plan(plan), Method::Surrogate);
        }
        placed = Some(plan);
    }
    match search(chain, Goal::Cost, deadline) {
        Found::Plan(mut plan) => {
            plan.bound = Some(plan.bound.map_or(relaxed.bound, |bound| bound.max(relaxed.bound)));
            if let Some(placed) = placed.filter(|p| p.evaluation.objective < plan.evaluation.objective) {
                *plan = Plan { bound: plan.bound, ..*placed };
            }
            plan.prove(Goal::Cost);
            (Found::Plan(plan), Method::Mip)
        }
        Found::OutOfTime { bound } => {
            let bound = Some(bound.map_or(relaxed.bound, |bound| bound.max(relaxed.bound)));
            let found = match placed {
                Some(mut plan) => {
                    plan.bound = bound;
                    plan.prove(Goal::Cost);
                    Found::Plan(plan)
                }
                None => Found::OutOfTime { bound },
            };
            (found, Method::Mip)
        }
        other => (other, Method::Mip),
    }
}

/// The chain with its checkpoints decided and only their places left open.
fn with_checkpoints(chain: &CostChain, skip: &[bool]) -> CostChain {
    let stops: Vec<BoundaryIndex> = (0..skip.len()).filter(|&i| !skip[i]).map(BoundaryIndex).collect();
    let edges = stops.windows(2).map(|pair| (pair[0], pair[1])).collect();
    let locks = Locks { edges: Some(edges), ..chain.locks.clone().unwrap_or_default() };
    CostChain { locks: Some(locks), ..chain.clone() }
}
