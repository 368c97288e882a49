//! The keep model: where boundaries go and which layers keep their internals, chosen together, with HBM counted at every position.
//!
//! The program is a relaxation: bytes in flight are counted by a few interval rows. Its optimum is judged exactly; where HBM
//! overflows, the row of that position is added with the interval that the plan's own queues show, and the program is solved again.
//! Each optimum bounds the objective from below, so the first plan that passes the judge is optimal.

mod greedy;
mod program;
mod shape;

use std::time::Instant;

use lazy_model::{
    BoundaryIndex, Bytes, CostChain, Evaluation, Keep, Placement, Tier, Violation, evaluate_keep,
};

use crate::cbc::{self, Outcome};
use crate::search::{self, Found, tolerance};
use crate::solve::TieBreak;
use program::{Goal, Program};
use shape::{Plan, Shape};

/// Rounds of adding rows. One to three are the rule; each adds at least one row that some plan violated.
const MOST_ROUNDS: usize = 200;
/// Cap that no plan reaches, for judging a plan by everything but HBM.
const NO_CAP: Bytes = Bytes(1 << 62);

/// Searches for the best plan, and what becomes of each layer's internals in it. A plan made by simple rules stands in where time
/// runs out.
pub(crate) fn search(
    chain: &CostChain,
    tie_break: TieBreak,
    deadline: Option<Instant>,
) -> (Found, Option<Vec<Keep>>) {
    let found = match tie_break {
        TieBreak::Weighted => cheapest(chain, deadline),
        TieBreak::Lexicographic => lexicographic(chain, deadline),
    };
    match found {
        Ok(Proved { plan, evaluation, bound, proven }) => {
            let ((placement, keep), evaluation) = stay_closer(chain, plan, evaluation, deadline);
            (Found::Plan(Box::new(search::Plan { placement, evaluation, bound, proven })), Some(keep))
        }
        Err(none) => (none, None),
    }
}

/// A plan that passed the judge, and what is known of better ones.
struct Proved {
    plan: Plan,
    evaluation: Evaluation,
    bound: Option<f64>,
    proven: bool,
}

/// The plan with the least of the chain's own objective.
fn cheapest(chain: &CostChain, deadline: Option<Instant>) -> Result<Proved, Found> {
    let mut best = greedy::plan(chain, deadline);
    let (end, bound) = rounds(chain, Goal::Cost, deadline, &mut best);
    let Some((plan, evaluation)) = best else {
        return Err(match end {
            End::OutOfTime => Found::OutOfTime { bound },
            End::Infeasible => Found::Infeasible,
            End::Failed(message) => Found::Failed(message),
            End::Plan => Found::Failed("the search ended without the plan it found".into()),
        });
    };
    let value = evaluation.objective_ms;
    let proven = bound.is_some_and(|bound| value - bound <= tolerance(value));
    Ok(Proved { plan, evaluation, bound, proven })
}

/// Step time first, then checkpoints, then NVMe. The bound is on the chain's objective: proven step time and the plan's own weights.
fn lexicographic(chain: &CostChain, deadline: Option<Instant>) -> Result<Proved, Found> {
    let bare = CostChain { checkpoint_penalty: 0.0, nvme_tiebreak: 0.0, ..chain.clone() };
    let mut proved = cheapest(&bare, deadline)?;
    let step = proved.evaluation.step_ms();
    if proved.proven {
        // Half the tolerance is the solver's, for rounding.
        let goal = Goal::Fewest { step_at_most: step + tolerance(step) / 2.0 };
        let mut best = None;
        let (end, _) = rounds(&bare, goal, deadline, &mut best);
        match best.filter(|(_, e)| matches!(end, End::Plan) && e.step_ms() <= step + tolerance(step)) {
            Some((plan, _)) => proved.plan = plan,
            None => proved.proven = false,
        }
    }
    if let Ok(evaluation) = evaluate_keep(chain, &proved.plan.0, &proved.plan.1) {
        let weights = evaluation.objective_ms - evaluation.step_ms();
        proved.bound = proved.bound.map(|bound| bound + weights);
        proved.evaluation = evaluation;
    }
    Ok(proved)
}

/// The fewest bytes in host RAM or on NVMe, or the lowest `hbm_cap_bytes`, with which some plan keeps all other rules.
pub(crate) fn least_bytes(chain: &CostChain, tier: Tier, deadline: Option<Instant>) -> Option<Bytes> {
    let mut judged = chain.clone();
    let mut least = None;
    // Sizes are rounded in the program, so what it calls the least may be a few bytes above it: ask for one byte less until none is left.
    set(&mut judged, tier, NO_CAP);
    let mut goal = Goal::BytesIn(tier);
    loop {
        let mut best = None;
        let (end, _) = rounds(&judged, goal, deadline, &mut best);
        let Some((_, evaluation)) = best.filter(|_| matches!(end, End::Plan)) else {
            // Out of time or failed: nothing is proven.
            return least.filter(|_| matches!(end, End::Infeasible));
        };
        let needed = match tier {
            Tier::Hbm => evaluation.hbm_peak?.bytes + chain.hbm_fixed_bytes?,
            Tier::Host => evaluation.bytes.host,
            Tier::Nvme => evaluation.bytes.nvme,
        };
        least = Some(needed);
        if needed == Bytes::ZERO {
            return least;
        }
        set(&mut judged, tier, needed - Bytes(1));
        goal = Goal::Any;
    }
}

/// Whether some plan keeps all rules; `None` where time ran out first.
pub(crate) fn feasible(chain: &CostChain, deadline: Option<Instant>) -> Option<bool> {
    let mut best = greedy::plan(chain, deadline);
    if best.is_some() {
        return Some(true);
    }
    match rounds(chain, Goal::Any, deadline, &mut best).0 {
        End::Plan => Some(true),
        End::Infeasible => Some(false),
        End::OutOfTime | End::Failed(_) => None,
    }
}

fn set(chain: &mut CostChain, tier: Tier, bytes: Bytes) {
    match tier {
        Tier::Hbm => chain.hbm_cap_bytes = Some(bytes),
        Tier::Host => chain.cpu_budget_bytes = bytes,
        Tier::Nvme => chain.nvme_budget_bytes = bytes,
    }
}

enum End {
    /// `best` is the optimum of the last program.
    Plan,
    OutOfTime,
    Infeasible,
    Failed(String),
}

type Best = Option<(Plan, Evaluation)>;

/// Solves, judges and adds rows until a plan passes. Leaves the best plan seen in `best`, and returns the best bound proven.
fn rounds(chain: &CostChain, goal: Goal, deadline: Option<Instant>, best: &mut Best) -> (End, Option<f64>) {
    let Some(mut shape) = Shape::new(chain) else { return (End::Failed("no keep model".into()), None) };
    let least_cap = goal == Goal::BytesIn(Tier::Hbm);
    if least_cap {
        shape.hbm = 0;
    }
    let mut bound: Option<f64> = None;
    let Some(mut program) = Program::new(chain, shape, goal) else { return (End::Infeasible, None) };
    for _ in 0..MOST_ROUNDS {
        let (values, proven, finished) = match cbc::solve(&program.mip, deadline) {
            Outcome::Finished { values, bound } => (values, Some(bound), true),
            Outcome::OutOfTime { values, bound } => (values, bound, false),
            Outcome::Infeasible => return (End::Infeasible, bound),
            Outcome::Failed(message) => return (End::Failed(message), bound),
        };
        // Every program is a relaxation: the best bound counts.
        bound = match (bound, proven) {
            (Some(a), Some(b)) => Some(f64::max(a, b)),
            (a, b) => a.or(b),
        };
        let plan = match program.plan(&values) {
            Some(plan) => plan,
            None if finished => {
                return (End::Failed("CBC called a fractional solution optimal".into()), bound);
            }
            None => return (End::OutOfTime, bound),
        };
        let end = if finished { End::Plan } else { End::OutOfTime };
        match evaluate_keep(chain, &plan.0, &plan.1) {
            Ok(evaluation) => {
                // The cap that was minimised is no limit to the judge.
                let cap = proven.filter(|_| least_cap).map(|units| units * program.shape().unit as f64);
                if finished && cap.is_some_and(|cap| program.add_overflowing(&plan, cap)) {
                    continue;
                }
                // Exposed time that the program does not count yet.
                let short = match goal {
                    Goal::Cost => {
                        let value = evaluation.objective_ms;
                        bound.is_some_and(|bound| value - bound > tolerance(value))
                    }
                    Goal::Fewest { step_at_most } => evaluation.step_ms() > step_at_most,
                    Goal::BytesIn(_) | Goal::Any => false,
                };
                if finished && short && program.add_exposed(&plan) {
                    if goal == Goal::Cost {
                        offer(best, plan, evaluation);
                    }
                    continue;
                }
                offer(best, plan, evaluation);
                return (end, bound);
            }
            Err(violation) => {
                if goal == Goal::Cost
                    && let Some((plan, evaluation)) =
                        greedy::repaired(chain, program.shape(), plan.clone(), deadline)
                {
                    offer(best, plan, evaluation);
                }
                if !finished {
                    return (End::OutOfTime, bound);
                }
                match violation {
                    Violation::Hbm { at, .. } => {
                        let hbm = program.shape().hbm as f64;
                        if !program.add_overflowing(&plan, hbm) {
                            let since = program.since(&plan, at);
                            program.forbid(&plan, at, since);
                        }
                    }
                    Violation::Budget { tier, .. } => program.forbid_in_tier(&plan, tier),
                    other => {
                        return (End::Failed(format!("CBC's solution breaks a rule: {other}")), bound);
                    }
                }
            }
        }
    }
    (
        End::Failed(
            "CBC's tolerance keeps exceeding a limit; round budgets and cap to whole boundaries".into(),
        ),
        bound,
    )
}

fn offer(best: &mut Best, plan: Plan, evaluation: Evaluation) {
    if best.as_ref().is_none_or(|(_, b)| evaluation.objective < b.objective) {
        *best = Some((plan, evaluation));
    }
}

/// Among plans of equal cost, prefers the one that moves less: a boundary that fits into a faster tier goes there, the topmost first.
/// The judge has the last word, while there is time.
fn stay_closer(
    chain: &CostChain,
    plan: Plan,
    evaluation: Evaluation,
    deadline: Option<Instant>,
) -> (Plan, Evaluation) {
    let mut best = (plan, evaluation);
    let locked = |i: usize| {
        chain.locks.as_ref().is_some_and(|l| l.gpu.is_some() || l.fixed.contains_key(&BoundaryIndex(i)))
    };
    for tier in [Placement::Nvme, Placement::Host] {
        for i in (0..chain.layers).rev().filter(|&i| !locked(i)) {
            for closer in [Placement::Hbm, Placement::Host] {
                if best.0.0[i] != tier || tier == closer {
                    continue;
                }
                if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                    return best;
                }
                let mut plan = best.0.clone();
                plan.0[i] = closer;
                if let Ok(evaluation) = evaluate_keep(chain, &plan.0, &plan.1)
                    && evaluation.objective <= best.1.objective
                {
                    best = (plan, evaluation);
                }
            }
        }
    }
    best
}
