//! From a chain to a checked plan.

use std::time::{Duration, Instant};

use lazy_model::schedule::{Execution, SCHEDULE_VERSION, SolveRecord, shape_hash};
use lazy_model::{BoundaryIndex, CostChain, Evaluation, Keep, Placement, Schedule, Seconds, evaluate};
use serde::Serialize;

use crate::by_hand::plans;
use crate::error::SolverError;
use crate::keep;
use crate::lexicographic::lexicographic;
use crate::problem::Goal;
use crate::search::{Found, Plan};
use crate::weighted::{Answer, weighted};

/// How to solve.
#[derive(Clone, Copy, Debug, Default)]
pub struct SolveOptions {
    /// Wall-clock limit. `None`: until proven.
    pub time_limit: Option<Seconds>,
    /// Algorithm.
    pub method: Method,
    /// What decides among plans.
    pub tie_break: TieBreak,
}

/// What the chosen plan is the least of. [`Solution::objective_ms`] is the chain's own objective either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TieBreak {
    /// The chain's objective, with the chain's weights.
    #[default]
    Weighted,
    /// Step time (recompute and exposed) first, then the number of checkpoints, then the number on NVMe. Step times within 1e-6 ms
    /// count as equal. The chain's weights have no part in the choice.
    Lexicographic,
}

impl TieBreak {
    /// The name used in JSON and flags.
    pub const fn name(self) -> &'static str {
        match self {
            TieBreak::Weighted => "weighted",
            TieBreak::Lexicographic => "lexicographic",
        }
    }
}

/// An algorithm. All are exact. One that is asked for and does not apply to a chain gives way to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// The first of the others that applies.
    #[default]
    Auto,
    /// Dynamic programming over counts: boundaries of equal size, no locks.
    CountDp,
    /// A relaxation solved by dynamic programming, and a small program that reaches its bound.
    Surrogate,
    /// The whole integer program, with CBC.
    Mip,
}

impl Method {
    /// The name used in JSON and flags.
    pub const fn name(self) -> &'static str {
        match self {
            Method::Auto => "auto",
            Method::CountDp => "count_dp",
            Method::Surrogate => "surrogate",
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
    /// The time limit came before any allowed placement, and no plan made by hand is allowed either. There may be one.
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
    /// Objective of `placement` (ms), the chain's weights included. `evaluation` has the step time.
    pub objective_ms: Option<f64>,
    /// No allowed placement has a smaller objective than this (ms). Equals `objective_ms` when `Optimal`. Under
    /// [`TieBreak::Lexicographic`] no allowed placement has a smaller step time than this less the plan's own weights.
    pub bound_ms: Option<f64>,
    /// `(objective - bound) / objective`.
    pub gap: Option<f64>,
    /// Wall time taken.
    pub solve: Seconds,
    /// The algorithm that ran.
    pub method: Method,
    /// What went wrong, when `Failed`; why nothing was proven, where that is not for lack of time.
    pub message: Option<String>,
}

impl Solution {
    /// The plan as a schedule with the usual room for transfers and nothing promised, if there is a plan.
    pub fn schedule(&self, chain: &CostChain) -> Option<Schedule> {
        Some(Schedule {
            version: SCHEDULE_VERSION,
            layers: chain.layers,
            placement: self.placement.clone()?,
            keep: self.keep.as_ref().map_or_else(
                || vec![false; chain.layers],
                |keep| keep.iter().map(|k| *k == Keep::Hbm).collect(),
            ),
            execution: Execution::default(),
            transfers: None,
            shape_hash: shape_hash(&chain.boundary_bytes),
            chain_hash: chain.hash(),
            solve: SolveRecord {
                status: self.status.name().into(),
                method: self.method.name().into(),
                solver: "cbc".into(),
                objective_ms: self.objective_ms,
                bound_ms: self.bound_ms,
                solve_s: self.solve,
                prediction: None,
            },
            promise: None,
        })
    }

    /// What becomes of the layers' internals, as a string over `- K H R` (recomputed, kept in HBM, in host RAM, retained), one letter a
    /// layer. Chains that set `hbm_cap_bytes` only.
    pub fn keep_string(&self) -> Option<String> {
        self.keep.as_ref().map(|keep| keep.iter().map(|k| k.letter()).collect())
    }

    /// The placement as a string over `G C N -` (HBM, host, NVMe, recompute), one letter a boundary.
    pub fn placement_string(&self) -> Option<String> {
        self.placement.as_ref().map(|p| p.iter().map(|p| p.letter()).collect())
    }
}

/// Finds the placement with the least objective.
///
/// Safe to call from many threads; CBC itself runs one solve at a time, and waiting counts against the time limit. A CBC run that does not
/// end with its limit is waited for by the next solve: some seconds for chains of thousands of layers, nothing for hundreds. The same
/// chain gives the same placement every time, unless a time limit cuts the search.
///
/// # Errors
/// [`SolverError`] for an invalid chain or time limit. An infeasible chain, a time limit that came too early and a solver failure
/// are results: see [`Status`].
pub fn solve(chain: &CostChain, options: &SolveOptions) -> Result<Solution, SolverError> {
    let started = Instant::now();
    check(chain)?;
    let deadline = deadline(started, options)?;
    let mut solution = if chain.hbm_cap_bytes.is_some() {
        let (found, keep) = keep::search(chain, options.tie_break, deadline);
        Solution { keep, ..answer(found, Method::Mip) }
    } else {
        let Answer { found, method, note } = match options.tie_break {
            TieBreak::Weighted => weighted(chain, options.method, deadline),
            TieBreak::Lexicographic => lexicographic(chain, options.method, deadline),
        };
        let solution = answer(closer(chain, beside_by_hand(chain, found, options.tie_break)), method);
        let settled = matches!(solution.status, Status::Optimal | Status::Infeasible);
        let message = solution.message.clone().or(note.filter(|_| !settled));
        Solution { message, ..solution }
    };
    solution.solve = Seconds(started.elapsed().as_secs_f64());
    Ok(solution)
}

pub(crate) fn answer(found: Found, method: Method) -> Solution {
    let mut solution = Solution {
        status: Status::Infeasible,
        placement: None,
        keep: None,
        evaluation: None,
        objective_ms: None,
        bound_ms: None,
        gap: None,
        solve: Seconds::ZERO,
        method,
        message: None,
    };
    match found {
        Found::Plan(plan) => {
            let Plan { placement, evaluation, bound, proven } = *plan;
            let objective = evaluation.objective_ms;
            let bound = if proven { Some(objective) } else { bound.map(|bound| bound.min(objective)) };
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
    solution
}

/// What was found, or the best allowed plan that people make by hand where that is better. Only a search that did not end can lose to one.
fn beside_by_hand(chain: &CostChain, found: Found, tie_break: TieBreak) -> Found {
    let weights = |evaluation: &Evaluation| evaluation.objective_ms - evaluation.step_ms();
    let (searched, least) = match found {
        Found::Plan(plan) if !plan.proven => {
            let least = match tie_break {
                TieBreak::Weighted => plan.bound,
                TieBreak::Lexicographic => plan.bound.map(|bound| bound - weights(&plan.evaluation)),
            };
            (Some(*plan), least)
        }
        Found::OutOfTime { bound } => (None, bound),
        settled => return settled,
    };
    let goal = match tie_break {
        TieBreak::Weighted => Goal::Cost,
        TieBreak::Lexicographic => Goal::Step,
    };
    let by_hand = plans(chain).into_iter().filter_map(|(_, placement, _)| {
        let evaluation = evaluate(chain, &placement).ok()?;
        let mut plan = Plan::new(placement, evaluation, goal, least);
        if tie_break == TieBreak::Lexicographic {
            // A step time alone leaves open how few checkpoints reach it.
            plan.proven = false;
            plan.bound = least.map(|least| least + weights(&plan.evaluation));
        }
        Some(plan)
    });
    let worth = |plan: &Plan| {
        let Evaluation { counts, objective_ms, .. } = &plan.evaluation;
        match tie_break {
            TieBreak::Weighted => (*objective_ms, 0, 0),
            TieBreak::Lexicographic => (plan.evaluation.step_ms(), counts.checkpoints(), counts.nvme),
        }
    };
    let better = |a: &Plan, b: &Plan| {
        let ((a, a_checkpoints, a_nvme), (b, b_checkpoints, b_nvme)) = (worth(a), worth(b));
        a.total_cmp(&b).then((a_checkpoints, a_nvme).cmp(&(b_checkpoints, b_nvme)))
    };
    match searched.into_iter().chain(by_hand).min_by(better) {
        Some(plan) => Found::Plan(Box::new(plan)),
        None => Found::OutOfTime { bound: least },
    }
}

fn closer(chain: &CostChain, found: Found) -> Found {
    let Found::Plan(mut plan) = found else { return found };
    (plan.placement, plan.evaluation) = keep_closer(chain, plan.placement, plan.evaluation);
    Found::Plan(plan)
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
    Ok(chain.validate()?)
}

pub(crate) fn deadline(started: Instant, options: &SolveOptions) -> Result<Option<Instant>, SolverError> {
    let Some(limit) = options.time_limit else { return Ok(None) };
    let limit = Duration::try_from_secs_f64(limit.get())
        .map_err(|_| SolverError::TimeLimit(limit.get().to_string()))?;
    // A limit beyond what the clock can express is no limit.
    Ok(started.checked_add(limit))
}
