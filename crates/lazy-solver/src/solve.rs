//! From a chain to a checked plan.

use std::time::{Duration, Instant};

use lazy_model::schedule::{Execution, SCHEDULE_VERSION, SolveRecord, shape_hash};
use lazy_model::{
    BoundaryIndex, Bytes, CostChain, Evaluation, Keep, Placement, Schedule, Seconds, Tier, Violation,
    evaluate,
};
use serde::Serialize;

use crate::cbc::{self, Outcome};
use crate::error::SolverError;
use crate::problem::{Goal, Problem};

/// Rounds of forbidding sets that CBC's tolerance packs into a budget a few bytes too small. Each round removes at least one such
/// set and in practice one is enough.
const MOST_REPAIRS: usize = 50;
/// A bound this near to the objective proves it (ms); the smallest published weight is 1e-5 ms.
const PROVEN_MS: f64 = 1e-6;

/// How to solve.
#[derive(Clone, Copy, Debug, Default)]
pub struct SolveOptions {
    /// Wall-clock limit. `None`: until proven.
    pub time_limit: Option<Seconds>,
    /// Algorithm.
    pub method: Method,
}

/// An algorithm. All are exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// Choose by the shape of the chain. Today always [`Method::Mip`].
    #[default]
    Auto,
    /// The compact integer program, with CBC.
    Mip,
}

impl Method {
    /// The name used in JSON and flags.
    pub const fn name(self) -> &'static str {
        match self {
            Method::Auto => "auto",
            Method::Mip => "mip",
        }
    }
}

/// What is known about the chain when the solver returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// The placement is proven to have the least objective.
    Optimal,
    /// The placement is allowed; a better one may exist.
    Feasible,
    /// The time limit came before any allowed placement. There may be one.
    NoIncumbent,
    /// No placement is allowed.
    Infeasible,
    /// The solver gave up or contradicted the exact check.
    Failed,
}

impl Status {
    /// The name used in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Status::Optimal => "optimal",
            Status::Feasible => "feasible",
            Status::NoIncumbent => "no_incumbent",
            Status::Infeasible => "infeasible",
            Status::Failed => "failed",
        }
    }
}

/// The answer. A placement in it has passed [`evaluate`](lazy_model::evaluate()); the objective is that evaluation's, not the solver's.
#[derive(Clone, Debug)]
pub struct Solution {
    /// What is known.
    pub status: Status,
    /// One entry a boundary, `0..=N`; present for `Optimal` and `Feasible`.
    pub placement: Option<Vec<Placement>>,
    /// What becomes of each layer's internals, one entry a layer; present beside `placement` for chains that set `hbm_cap_bytes`.
    pub keep: Option<Vec<Keep>>,
    /// Exact cost of the plan.
    pub evaluation: Option<Evaluation>,
    /// Objective of `placement` (ms).
    pub objective_ms: Option<f64>,
    /// No allowed placement has a smaller objective than this (ms). Equals `objective_ms` when `Optimal`.
    pub bound_ms: Option<f64>,
    /// `(objective - bound) / objective`.
    pub gap: Option<f64>,
    /// Wall time taken.
    pub solve: Seconds,
    /// The algorithm that ran.
    pub method: Method,
    /// What went wrong, when `Failed`.
    pub message: Option<String>,
}

impl Solution {
    /// The plan as a schedule with the usual room for transfers and nothing promised, if there is a plan.
    pub fn schedule(&self, chain: &CostChain) -> Option<Schedule> {
        Some(Schedule {
            version: SCHEDULE_VERSION,
            layers: chain.layers,
            placement: self.placement.clone()?,
            keep: vec![false; chain.layers],
            execution: Execution::default(),
            shape_hash: shape_hash(&chain.boundary_bytes),
            chain_hash: chain.hash(),
            solve: SolveRecord {
                status: self.status.name().into(),
                method: self.method.name().into(),
                solver: "cbc".into(),
                objective_ms: self.objective_ms,
                bound_ms: self.bound_ms,
                solve_s: self.solve,
            },
            promise: None,
        })
    }

    /// The placement as a string over `G C N -` (HBM, host, NVMe, recompute), one letter a boundary.
    pub fn placement_string(&self) -> Option<String> {
        self.placement.as_ref().map(|p| p.iter().map(|p| p.letter()).collect())
    }
}

/// Finds the placement with the least objective.
///
/// Safe to call from many threads; CBC itself runs one solve at a time, and waiting counts against the time limit. The same
/// chain gives the same placement every time, unless a time limit cuts the search.
///
/// # Errors
/// [`SolverError`] for an invalid chain or time limit, or a chain that asks for the keep model. An infeasible chain, a time
/// limit that came too early and a solver failure are results: see [`Status`].
pub fn solve(chain: &CostChain, options: &SolveOptions) -> Result<Solution, SolverError> {
    let started = Instant::now();
    check(chain)?;
    let deadline = deadline(started, options)?;
    let found = search(chain, Goal::Cost, deadline);
    let mut solution = Solution {
        status: Status::Infeasible,
        placement: None,
        keep: None,
        evaluation: None,
        objective_ms: None,
        bound_ms: None,
        gap: None,
        solve: Seconds::ZERO,
        method: Method::Mip,
        message: None,
    };
    match found {
        Found::Plan { placement, evaluation, bound } => {
            let (placement, evaluation) = keep_closer(chain, placement, evaluation);
            let objective = evaluation.objective_ms;
            let proven = bound.is_some_and(|b| objective - b <= PROVEN_MS + 1e-9 * objective.abs());
            let bound = if proven { Some(objective) } else { bound };
            solution.status = if proven { Status::Optimal } else { Status::Feasible };
            solution.gap = bound.map(|b| (objective - b) / objective.abs().max(1e-9));
            solution.bound_ms = bound;
            solution.objective_ms = Some(objective);
            solution.placement = Some(placement);
            solution.evaluation = Some(evaluation);
        }
        Found::OutOfTime { bound } => {
            solution.status = Status::NoIncumbent;
            solution.bound_ms = bound;
        }
        Found::Infeasible => {}
        Found::Failed(message) => {
            solution.status = Status::Failed;
            solution.message = Some(message);
        }
    }
    solution.solve = Seconds(started.elapsed().as_secs_f64());
    Ok(solution)
}

/// Among plans of equal cost, prefers the one that moves less: a boundary that fits into a faster tier goes there. That takes
/// traffic away, so the cost cannot rise; the exact check has the last word. The topmost go first, because they are needed back
/// first.
fn keep_closer(
    chain: &CostChain,
    placement: Vec<Placement>,
    evaluation: Evaluation,
) -> (Vec<Placement>, Evaluation) {
    let mut closer = placement.clone();
    let mut hbm = chain.gpu_budget_bytes.saturating_sub(evaluation.bytes.hbm);
    let mut host = chain.cpu_budget_bytes.saturating_sub(evaluation.bytes.host);
    let locked = |i: usize| {
        chain.locks.as_ref().is_some_and(|l| l.gpu.is_some() || l.fixed.contains_key(&BoundaryIndex(i)))
    };
    for tier in [Placement::Nvme, Placement::Host] {
        for i in (0..closer.len()).rev().filter(|&i| !locked(i)) {
            let size = chain.boundary_bytes[i];
            if closer[i] != tier {
                continue;
            }
            if size <= hbm {
                hbm = hbm - size;
                closer[i] = Placement::Hbm;
                if tier == Placement::Host {
                    host += size;
                }
            } else if tier == Placement::Nvme && size <= host {
                host = host - size;
                closer[i] = Placement::Host;
            }
        }
    }
    match evaluate(chain, &closer) {
        Ok(better) if better.objective <= evaluation.objective => (closer, better),
        _ => (placement, evaluation),
    }
}

pub(crate) fn check(chain: &CostChain) -> Result<(), SolverError> {
    chain.validate()?;
    if chain.hbm_cap_bytes.is_some() { Err(SolverError::KeepModel) } else { Ok(()) }
}

pub(crate) fn deadline(started: Instant, options: &SolveOptions) -> Result<Option<Instant>, SolverError> {
    let Some(limit) = options.time_limit else { return Ok(None) };
    let limit = Duration::try_from_secs_f64(limit.get())
        .map_err(|_| SolverError::TimeLimit(limit.get().to_string()))?;
    // A limit beyond what the clock can express is no limit.
    Ok(started.checked_add(limit))
}

/// What one search found, after the exact check.
pub(crate) enum Found {
    Plan { placement: Vec<Placement>, evaluation: Evaluation, bound: Option<f64> },
    OutOfTime { bound: Option<f64> },
    Infeasible,
    Failed(String),
}

/// Runs CBC until its answer passes the exact check.
pub(crate) fn search(chain: &CostChain, goal: Goal, deadline: Option<Instant>) -> Found {
    let Some(mut problem) = Problem::new(chain, goal) else { return Found::Infeasible };
    let judged = judged_chain(chain, goal);
    for _ in 0..MOST_REPAIRS {
        let (values, bound, finished) = match cbc::solve(&problem.mip, deadline) {
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
            Ok(evaluation) => return Found::Plan { placement, evaluation, bound },
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
