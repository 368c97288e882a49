//! From a program to a checked plan.

use std::time::Instant;

use lazy_model::{Bytes, CostChain, Evaluation, Placement, Tier, Violation, evaluate};

use crate::cbc::{self, Outcome};
use crate::mip::Mip;
use crate::problem::{Goal, Problem};

/// Rounds of forbidding sets that CBC's tolerance packs into a budget a few bytes too small. Each round removes at least one such
/// set and in practice one is enough.
const MOST_REPAIRS: usize = 50;

/// Chains of more layers have no program of their whole: CBC would spend hours where it does not look at the clock.
pub(crate) const MOST_LAYERS: usize = 2000;

/// What one search found, after the exact check.
pub(crate) enum Found {
    Plan(Box<Plan>),
    OutOfTime { bound: Option<f64> },
    Infeasible,
    Failed(String),
}

/// A plan that passed the exact check.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) placement: Vec<Placement>,
    pub(crate) evaluation: Evaluation,
    /// No allowed plan has less of what was minimised.
    pub(crate) bound: Option<f64>,
    /// Whether the bound is so near that this plan has the least.
    pub(crate) proven: bool,
}

impl Plan {
    pub(crate) fn new(
        placement: Vec<Placement>,
        evaluation: Evaluation,
        goal: Goal,
        bound: Option<f64>,
    ) -> Plan {
        let mut plan = Plan { placement, evaluation, bound, proven: false };
        plan.prove(goal);
        plan
    }

    /// Settles whether the bound proves the plan.
    pub(crate) fn prove(&mut self, goal: Goal) {
        let value = match goal {
            Goal::Cost => self.evaluation.objective_ms,
            Goal::Step => self.evaluation.step_ms(),
            Goal::Fewest { .. } => {
                let counts = self.evaluation.counts;
                ((self.placement.len() + 1) * counts.checkpoints() + counts.nvme) as f64
            }
            // Asked only for a placement.
            Goal::BytesIn(_) => f64::INFINITY,
        };
        self.proven = self.bound.is_some_and(|bound| value - bound <= tolerance(value));
    }
}

/// Values (ms) this near to each other count as equal; the smallest published weight is 1e-5 ms.
pub(crate) fn tolerance(value: f64) -> f64 {
    1e-6 + 1e-9 * value.abs()
}

/// Runs CBC until its answer passes the exact check.
pub(crate) fn search(chain: &CostChain, goal: Goal, deadline: Option<Instant>) -> Found {
    search_with(chain, goal, deadline, |mip| cbc::solve(mip, deadline))
}

/// Runs a solver of programs until its answer passes the exact check.
pub(crate) fn search_with(
    chain: &CostChain,
    goal: Goal,
    deadline: Option<Instant>,
    solve: impl Fn(&Mip) -> Outcome,
) -> Found {
    // Bytes alone make small programs.
    let too_long = chain.layers > MOST_LAYERS && !matches!(goal, Goal::BytesIn(_));
    if too_long || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
        return Found::OutOfTime { bound: None };
    }
    let Some(mut problem) = Problem::new(chain, goal) else { return Found::Infeasible };
    let judged = judged_chain(chain, goal);
    for _ in 0..MOST_REPAIRS {
        let (values, bound, finished) = match solve(&problem.mip) {
            Outcome::Finished { values, bound } => (values, Some(bound), true),
            Outcome::OutOfTime { values, bound } => (values, bound, false),
            Outcome::Infeasible => return Found::Infeasible,
            Outcome::Failed(message) => return Found::Failed(message),
        };
        let Some(placement) = problem.placement(&values) else {
            if finished {
                return Found::Failed("CBC called a fractional solution optimal".into());
            }
            return Found::OutOfTime { bound };
        };
        match evaluate(&judged, &placement) {
            Ok(evaluation) => return Found::Plan(Box::new(Plan::new(placement, evaluation, goal, bound))),
            // The tolerance let in a few bytes too many.
            Err(Violation::Budget { tier, budget, .. }) => {
                problem.forbid_overfull(&placement, tier, budget);
            }
            Err(_) if !finished => return Found::OutOfTime { bound },
            Err(violation) => return Found::Failed(format!("CBC's solution breaks a rule: {violation}")),
        }
    }
    Found::Failed("CBC's tolerance keeps exceeding a budget; round the budgets to whole boundaries".into())
}

/// The chain by whose rules an answer is judged: a tier whose bytes are minimised has no budget.
fn judged_chain(chain: &CostChain, goal: Goal) -> CostChain {
    let mut judged = chain.clone();
    if let Goal::BytesIn(tier) = goal {
        *budget_mut(&mut judged, tier) = chain.boundary_bytes.iter().copied().sum();
    }
    judged
}

pub(crate) fn budget_mut(chain: &mut CostChain, tier: Tier) -> &mut Bytes {
    match tier {
        Tier::Hbm => &mut chain.gpu_budget_bytes,
        Tier::Host => &mut chain.cpu_budget_bytes,
        Tier::Nvme => &mut chain.nvme_budget_bytes,
    }
}
