//! The least objective, by the cheapest method that proves it.

use std::time::{Duration, Instant};

use lazy_model::{BoundaryIndex, CostChain, Locks, Placement, evaluate};

use crate::count_dp::{self, Counting};
use crate::fit::every;
use crate::place::{Filler, place};
use crate::problem::Goal;
use crate::search::{Found, MOST_LAYERS, Plan, search, tolerance};
use crate::solve::{Method, TieBreak};
use crate::surrogate::{Relaxed, Set, Surrogate};

/// Sets of checkpoints placed before others are listed.
const PLACED: usize = 5;
/// Time for the program that places given checkpoints.
const PLACING: Duration = Duration::from_secs(2);

/// What was found and how.
pub(crate) struct Answer {
    pub(crate) found: Found,
    pub(crate) method: Method,
    /// Why a plan is not proven, beyond time that ran out.
    pub(crate) note: Option<String>,
}

impl Answer {
    pub(crate) fn new(found: Found, method: Method) -> Answer {
        Answer { found, method, note: None }
    }
}

/// The plan of least objective.
pub(crate) fn weighted(chain: &CostChain, method: Method, deadline: Option<Instant>) -> Answer {
    if matches!(method, Method::Auto | Method::CountDp) && count_dp::applies(chain) {
        let found = match count_dp::solve(chain, TieBreak::Weighted, deadline) {
            Counting::Plan(found) => found,
            Counting::Infeasible => return Answer::new(Found::Infeasible, Method::CountDp),
            Counting::OutOfTime => return Answer::new(Found::OutOfTime { bound: None }, Method::CountDp),
        };
        if let Ok(evaluation) = evaluate(chain, &found.placement) {
            let plan = Plan::new(found.placement, evaluation, Goal::Cost, Some(found.value));
            if plan.proven {
                return Answer::new(Found::Plan(Box::new(plan)), Method::CountDp);
            }
        }
    }
    if method == Method::Mip {
        let note = too_long(chain);
        return Answer { note, ..Answer::new(search(chain, Goal::Cost, deadline), Method::Mip) };
    }
    by_surrogate(chain, deadline)
}

/// The relaxation's sets of checkpoints, placed as well as they can be. Where that reaches the relaxation's bound it is an optimum; where
/// not, the whole program decides.
fn by_surrogate(chain: &CostChain, deadline: Option<Instant>) -> Answer {
    let infeasible = Answer::new(Found::Infeasible, Method::Surrogate);
    let Some(surrogate) = Surrogate::new(chain) else { return infeasible };
    let Some(relaxed) = surrogate.solve(deadline) else { return infeasible };
    let filled = filled(chain, &relaxed, deadline);
    let (settled, bound) = match filled {
        Some(plan) if !plan.proven => settle(chain, &surrogate, plan, relaxed.bound, deadline),
        other => (other, relaxed.bound),
    };
    if let Some(plan) = settled.as_ref().filter(|plan| plan.proven) {
        return Answer::new(Found::Plan(Box::new(plan.clone())), Method::Surrogate);
    }
    if let Some(note) = too_long(chain) {
        let found =
            settled.map_or(Found::OutOfTime { bound: Some(bound) }, |plan| Found::Plan(Box::new(plan)));
        return Answer { note: Some(note), ..Answer::new(found, Method::Surrogate) };
    }
    better_of(search(chain, Goal::Cost, deadline), settled, bound)
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
        let Some(sets) = surrogate.sets_below(limit, deadline) else { break };
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
    let filler = Filler::new(chain, &set.skip, deadline)?;
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
    let refined = |set: &Set| -> Option<f64> {
        Some(Filler::new(chain, &set.skip, deadline)?.at_least()?.max(set.at_least))
    };
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

/// Why a chain's whole program is not solved.
fn too_long(chain: &CostChain) -> Option<String> {
    let layers = chain.layers;
    (layers > MOST_LAYERS).then(|| {
        format!(
            "the chain has {layers} layers; the integer program is not solved for more than {MOST_LAYERS}, so \
             only the special methods and plans made by hand were tried"
        )
    })
}

/// The whole program's answer, with the plan and the bound known before where they are better.
fn better_of(found: Found, placed: Option<Plan>, bound: f64) -> Answer {
    let mut note = None;
    let (searched, searched_bound) = match found {
        Found::Plan(plan) => {
            let bound = plan.bound;
            (Some(*plan), bound)
        }
        Found::OutOfTime { bound } => (None, bound),
        // A plan that passed the exact check is not lost by what CBC says.
        Found::Failed(message) if placed.is_some() => {
            note = Some(format!("the plan is not proven: the integer program failed: {message}"));
            (None, None)
        }
        Found::Infeasible if placed.is_some() => {
            note =
                Some("the plan is not proven: CBC calls the chain infeasible, which the plan refutes".into());
            (None, None)
        }
        other => return Answer::new(other, Method::Mip),
    };
    let bound = searched_bound.map_or(bound, |searched| searched.max(bound));
    let best = [searched, placed]
        .into_iter()
        .flatten()
        .min_by(|a, b| a.evaluation.objective.cmp(&b.evaluation.objective));
    let found = match best {
        Some(plan) => {
            Found::Plan(Box::new(Plan::new(plan.placement, plan.evaluation, Goal::Cost, Some(bound))))
        }
        None => Found::OutOfTime { bound: Some(bound) },
    };
    Answer { note, ..Answer::new(found, Method::Mip) }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        let chain = CostChain::from_json(
            r#"{"layers": 1, "layer_window_ms": [1], "layer_recompute_ms": [1], "boundary_bytes": [1, 1],
                "param_h2d_bytes": [0], "grad_d2h_bytes": [0],
                "gpu_budget_bytes": 2, "cpu_budget_bytes": 0, "nvme_budget_bytes": 0,
                "d2h_bytes_per_s": 1, "h2d_bytes_per_s": 1, "nvme_write_bytes_per_s": 0, "nvme_read_bytes_per_s": 0,
                "pcie_window_scale": 1, "nvme_window_scale": 1,
                "pcie_capacity_fraction": 1, "nvme_capacity_fraction": 1,
                "max_segment_layers": 1, "checkpoint_penalty": 0.5, "nvme_tiebreak": 0}"#,
        )
        .unwrap();
        let placement = vec![Placement::Hbm; 2];
        let evaluation = evaluate(&chain, &placement).unwrap();
        Plan::new(placement, evaluation, Goal::Cost, Some(0.25))
    }

    /// The plan costs 1 ms by its two checkpoints; 0.25 ms is known as a bound.
    #[test]
    fn a_verdict_that_a_plan_outlives_is_told_beside_it() {
        let failed = better_of(Found::Failed("out of luck".into()), Some(plan()), 0.25);
        assert!(failed.note.is_some_and(|note| note.contains("out of luck")));
        let Found::Plan(kept) = failed.found else { panic!() };
        assert!(!kept.proven && kept.bound == Some(0.25) && kept.evaluation.objective_ms == 1.0);

        let refuted = better_of(Found::Infeasible, Some(plan()), 0.25);
        assert!(refuted.note.is_some_and(|note| note.contains("infeasible")));
        assert!(matches!(refuted.found, Found::Plan(kept) if !kept.proven));
    }

    #[test]
    fn a_verdict_stands_where_there_is_no_plan() {
        let failed = better_of(Found::Failed("out of luck".into()), None, 0.25);
        assert!(matches!(failed.found, Found::Failed(message) if message == "out of luck"));
        assert!(matches!(better_of(Found::Infeasible, None, 0.25).found, Found::Infeasible));
        let late = better_of(Found::OutOfTime { bound: Some(0.5) }, None, 0.25).found;
        assert!(matches!(late, Found::OutOfTime { bound: Some(bound) } if bound == 0.5));
    }

    #[test]
    fn the_better_bound_counts() {
        let known = better_of(Found::OutOfTime { bound: Some(1.0) }, Some(plan()), 0.25);
        assert!(matches!(known.found, Found::Plan(kept) if kept.proven));
        let known = better_of(Found::OutOfTime { bound: None }, Some(plan()), 0.25);
        assert!(matches!(known.found, Found::Plan(kept) if kept.bound == Some(0.25)));
        assert!(known.note.is_none());
    }
}
