//! Step time first, then checkpoints, then NVMe.

use std::time::Instant;

use lazy_model::{CostChain, evaluate};

use crate::count_dp::{self, Counting};
use crate::problem::Goal;
use crate::search::{Found, Plan, search, tolerance};
use crate::solve::{Method, TieBreak};
use crate::weighted::{Answer, weighted};

/// The plan of least step time and, among those within the tolerance of it, the one of fewest checkpoints and then fewest boundaries
/// on NVMe.
///
/// The plan's bound is on the chain's objective: proven step time plus the plan's own weights.
pub(crate) fn lexicographic(chain: &CostChain, method: Method, deadline: Option<Instant>) -> Answer {
    if matches!(method, Method::Auto | Method::CountDp) && count_dp::applies(chain) {
        let found = match count_dp::solve(chain, TieBreak::Lexicographic, deadline) {
            Counting::Plan(found) => found,
            Counting::Infeasible => return Answer::new(Found::Infeasible, Method::CountDp),
            Counting::OutOfTime => return Answer::new(Found::OutOfTime { bound: None }, Method::CountDp),
        };
        if let Ok(evaluation) = evaluate(chain, &found.placement) {
            let mut plan = Plan::new(found.placement, evaluation, Goal::Step, Some(found.value));
            if plan.proven {
                plan.bound = Some(plan.evaluation.objective_ms);
                return Answer::new(Found::Plan(Box::new(plan)), Method::CountDp);
            }
        }
    }
    let without_weights = CostChain { checkpoint_penalty: 0.0, nvme_tiebreak: 0.0, ..chain.clone() };
    let answer = weighted(&without_weights, method, deadline);
    match answer.found {
        Found::Plan(fastest) => {
            let (plan, note) = fewest(chain, *fastest, deadline);
            Answer { found: Found::Plan(Box::new(plan)), note: answer.note.or(note), ..answer }
        }
        _ => answer,
    }
}

/// Among plans as fast as `fastest` (judged without weights), the one of fewest checkpoints, then fewest boundaries on NVMe; and what
/// went wrong.
fn fewest(chain: &CostChain, fastest: Plan, deadline: Option<Instant>) -> (Plan, Option<String>) {
    let mut note = None;
    let step = fastest.evaluation.step_ms();
    let mut plan = fastest.clone();
    if fastest.proven {
        // Half the tolerance is the solver's, for rounding.
        let goal = Goal::Fewest { step_at_most: step + tolerance(step) / 2.0 };
        match search(chain, goal, deadline) {
            Found::Plan(fewest) if fewest.evaluation.step_ms() <= step + tolerance(step) => plan = *fewest,
            other => {
                plan.proven = false;
                if let Found::Failed(message) = other {
                    note = Some(format!(
                        "no shorter step exists, but plans as fast may have fewer checkpoints: the integer program \
                         failed: {message}"
                    ));
                }
            }
        }
    }
    if let Ok(evaluation) = evaluate(chain, &plan.placement) {
        plan.evaluation = evaluation;
    }
    let weights = plan.evaluation.objective_ms - plan.evaluation.step_ms();
    plan.bound = fastest.bound.map(|bound| bound + weights);
    (plan, note)
}
