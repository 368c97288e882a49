//! Step time first, then checkpoints, then NVMe.

use std::time::Instant;

use lazy_model::CostChain;

use crate::problem::Goal;
use crate::search::{Found, Plan, search, tolerance};

/// The plan of least step time and, among those within the tolerance of it, the one of fewest checkpoints and then fewest boundaries
/// on NVMe. Two programs: the first finds the least step time, the second has it as a limit and counts. The plan's bound is on
/// the chain's objective: proven step time plus the plan's own weights.
pub(crate) fn lexicographic(chain: &CostChain, deadline: Option<Instant>) -> Found {
    let mut fastest = match search(chain, Goal::Step, deadline) {
        Found::Plan(plan) => plan,
        other => return other,
    };
    let step = fastest.evaluation.step_ms();
    let bound = fastest.bound;
    if fastest.proven {
        // Half the tolerance is the solver's, for rounding.
        let goal = Goal::Fewest { step_at_most: step + tolerance(step) / 2.0 };
        match search(chain, goal, deadline) {
            Found::Plan(fewest) if fewest.evaluation.step_ms() <= step + tolerance(step) => fastest = fewest,
            _ => fastest.proven = false,
        }
    }
    let weights = |plan: &Plan| plan.evaluation.objective_ms - plan.evaluation.step_ms();
    fastest.bound = bound.map(|bound| bound + weights(&fastest));
    Found::Plan(fastest)
}
