//! The least objective, by the cheapest method that proves it.

use std::time::{Duration, Instant};

use lazy_model::{BoundaryIndex, CostChain, Locks, Placement, evaluate};

use crate::count_dp::{self, Counting};
use crate::fit::every;
use crate::place::{Filler, place};
use crate::problem::Goal;
use crate::search::{Found, Plan, search, tolerance};
use crate::solve::{Method, TieBreak};
use crate::surrogate::{Relaxed, Set, Surrogate};

/// Sets of checkpoints placed before others are listed.
const PLACED: usize = 5;
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
    let filled = filled(chain, &relaxed, deadline);
    let (settled, bound) = match filled {
        Some(plan) if !plan.proven => settle(chain, &surrogate, plan, relaxed.bound, deadline),
        other => (other, relaxed.bound),
    };
    if let Some(plan) = settled.as_ref().filter(|plan| plan.proven) {
        return (Found::Plan(Box::new(plan.clone())), Method::Surrogate);
    }
    (better_of(search(chain, Goal::Cost, deadline), settled, bound), Method::Mip)
}

/// Steps in which sets of checkpoints are listed, as parts of the gap.
const STEPS: [f64; 5] = [0.01, 0.03, 0.1, 0.3, 1.0];
/// Sets that may stay open before the listing ends.
const MOST_OPEN: usize = 3;

/// Lists the sets of checkpoints that could beat `plan`, cheapest first, and looks for the best placement of each. Gives the best plan
/// and the bound.
fn settle(
    chain: &CostChain,
    surrogate: &Surrogate,
    mut plan: Plan,
    bound: f64,
    deadline: Option<Instant>,
) -> (Option<Plan>, f64) {
    let mut lowest = bound;
    let mut open: Vec<f64> = vec![];
    let mut seen = 0;
    for step in STEPS {
        let best = plan.evaluation.objective_ms;
        let limit = bound + (best - bound) * step;
        if plan.proven || limit <= lowest {
            continue;
        }
        let Some(sets) = surrogate.sets_below(limit) else { break };
        let mut reached = limit;
        // The sets of the step before come first again.
        for set in sets.iter().skip(seen) {
            let late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if late || open.len() > MOST_OPEN {
                reached = set.at_least;
                break;
            }
            seen += 1;
            if let Some(at_least) = look(chain, set, &mut plan, deadline) {
                open.push(at_least);
            }
        }
        lowest = open.iter().copied().fold(reached, f64::min).max(bound);
        let best = plan.evaluation.objective_ms;
        lowest = lowest.min(best - tolerance(best) / 2.0).max(bound);
        plan.bound = Some(lowest);
        plan.prove(Goal::Cost);
        if reached < limit {
            break;
        }
    }
    (Some(plan), lowest)
}

/// Looks for the best placement of one set of checkpoints, and takes it into `plan` if it is better. `None` where no placement of the set
/// beats the plan then, else what one costs at least (ms).
fn look(chain: &CostChain, set: &Set, plan: &mut Plan, deadline: Option<Instant>) -> Option<f64> {
    let take = |plan: &mut Plan, placement: Vec<Placement>| {
        if let Ok(evaluation) = evaluate(chain, &placement)
            && evaluation.objective < plan.evaluation.objective
        {
            *plan = Plan::new(placement, evaluation, Goal::Cost, plan.bound);
        }
    };
    let filler = Filler::new(chain, &set.skip)?;
    let at_least = filler.at_least()?.max(set.at_least);
    let beaten = |plan: &Plan, value: f64| {
        let best = plan.evaluation.objective_ms;
        value >= best - tolerance(best) / 2.0
    };
    if beaten(plan, at_least) {
        return None;
    }
    let fit = every(&filler, plan.evaluation.objective_ms, deadline);
    if let Some((_, placement)) = fit.better {
        take(plan, placement);
    }
    if fit.exact {
        return None;
    }
    if let Some((placement, _)) = place(chain, &set.skip, at_least, deadline) {
        take(plan, placement);
    }
    if beaten(plan, at_least) {
        return None;
    }
    match search(&with_checkpoints(chain, &set.skip), Goal::Cost, Some(soon(deadline))) {
        Found::Plan(found) => {
            let least = found.bound.map_or(at_least, |bound| bound.max(at_least));
            take(plan, found.placement);
            (!beaten(plan, least)).then_some(least)
        }
        Found::Infeasible => None,
        Found::OutOfTime { bound } => Some(bound.map_or(at_least, |bound| bound.max(at_least))),
        Found::Failed(_) => Some(at_least),
    }
}

fn cheaper(plan: &Plan, best: &Option<Plan>) -> bool {
    best.as_ref().is_none_or(|best| plan.evaluation.objective < best.evaluation.objective)
}

/// The best plan for the relaxation's sets of checkpoints, found without a program.
fn filled(chain: &CostChain, relaxed: &Relaxed, deadline: Option<Instant>) -> Option<Plan> {
    let mut best: Option<Plan> = None;
    let refined =
        |set: &Set| -> Option<f64> { Some(Filler::new(chain, &set.skip)?.at_least()?.max(set.at_least)) };
    let mut sets: Vec<(f64, &Set)> =
        relaxed.sets.iter().filter_map(|set| Some((refined(set)?, set))).collect();
    sets.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (at_least, set) in sets.into_iter().take(PLACED) {
        if best.as_ref().is_some_and(|plan| plan.proven || plan.evaluation.objective_ms <= at_least) {
            break;
        }
        if let Some((placement, evaluation)) = place(chain, &set.skip, relaxed.bound, deadline) {
            let plan = Plan::new(placement, evaluation, Goal::Cost, Some(relaxed.bound));
            if cheaper(&plan, &best) {
                best = Some(plan);
            }
        }
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
