//! From a problem to a plan, or to the reason why there is none.

use std::time::Instant;

use lazy_model::keep::{Keep, evaluate_keep};
use lazy_model::schedule::Promise;
use lazy_model::step::TierBytes;
use lazy_model::{
    Bytes, CostChain, Evaluation, Placement, Pool, Schedule, Seconds, StepProblem, Tier, Verified,
    VerifyError, Violation, evaluate,
};
use lazy_solver::ranks::{RanksSolution, explain_ranks, solve_ranks};
use lazy_solver::step::{StepFailure, StepOptions, best_execution, solve_step, step_bound};
use lazy_solver::{
    Method, Remedy, Solution, SolveOptions, SolverError, Status, baselines, explain, explain_step, solve,
    step_baselines,
};

use super::given::GivenPlan;
use super::problem::{Problem, Ranks};

/// Nobody waits longer for the reason why a step has no plan, unless a limit says so: each cap that is tried is a search of its own.
const PATIENCE: Seconds = Seconds(30.0);

/// A solved problem and what belongs to it.
pub(crate) struct Planned {
    pub(crate) problem: Problem,
    pub(crate) solution: Solution,
    /// Whether the plan was given, not found.
    pub(crate) given: bool,
    /// Present with a placement.
    pub(crate) schedule: Option<Schedule>,
    /// Present where the layers' times are known and the plan keeps every budget.
    pub(crate) verified: Option<Verified>,
    /// Present where several ranks were planned together.
    pub(crate) ranks: Option<RanksSolution>,
    /// No plan that keeps the caps has a shorter step, where that is known.
    pub(crate) step_bound: Option<Seconds>,
    /// Why there is no plan, where there is none.
    pub(crate) why: Option<String>,
    /// What alone would make it feasible.
    pub(crate) remedies: Vec<Remedy>,
    pub(crate) rivals: Vec<Rival>,
}

/// A plan made without a solver.
pub(crate) struct Rival {
    pub(crate) name: String,
    pub(crate) placement: Vec<Placement>,
    pub(crate) keep: Vec<Keep>,
    pub(crate) cost: Result<RivalCost, String>,
}

#[derive(Clone, Copy)]
pub(crate) struct RivalCost {
    pub(crate) objective_ms: Option<f64>,
    /// Time added to the step.
    pub(crate) step_ms: Option<f64>,
    /// The whole step.
    pub(crate) predicted: Option<Seconds>,
}

impl RivalCost {
    /// The whole step where that is known, else the time added to it.
    pub(crate) fn time_ms(&self) -> Option<f64> {
        self.predicted.map(Seconds::as_ms).or(self.step_ms)
    }
}

/// A wall-clock limit that several solves share.
#[derive(Clone, Copy)]
pub(crate) struct Clock {
    started: Instant,
    limit: Option<Seconds>,
}

impl Clock {
    pub(crate) fn start(options: &SolveOptions) -> Clock {
        Clock { started: Instant::now(), limit: options.time_limit }
    }

    /// `options` with what is left of the limit.
    pub(crate) fn left(&self, options: &SolveOptions) -> SolveOptions {
        let left = |limit: Seconds| Seconds((limit.get() - self.started.elapsed().as_secs_f64()).max(0.0));
        SolveOptions { time_limit: self.limit.map(left), ..*options }
    }

    /// `options` with what is left of half the limit.
    pub(crate) fn half(&self, options: &SolveOptions) -> SolveOptions {
        let half = Clock { limit: self.limit.map(|limit| Seconds(limit.get() / 2.0)), ..*self };
        half.left(options)
    }
}

impl Planned {
    pub(crate) fn promise(&self) -> Option<&Promise> {
        self.verified.as_ref().map(|v| &v.promise)
    }

    /// The simulated step; of several ranks, with what they wait for one another.
    pub(crate) fn step(&self) -> Option<Seconds> {
        let peers = self.problem.ranks.as_ref().map_or(Seconds::ZERO, Ranks::peer_exposed);
        self.promise().map(|p| p.step_s + peers)
    }

    /// What each tier may hold.
    pub(crate) fn budgets(&self) -> TierBytes {
        let chain = &self.problem.chain;
        self.problem.step.as_ref().map_or(
            TierBytes {
                hbm: chain.hbm_cap_bytes.unwrap_or(chain.gpu_budget_bytes),
                host: chain.cpu_budget_bytes,
                nvme: chain.nvme_budget_bytes,
            },
            |step| step.budgets,
        )
    }

    /// Bytes each tier holds at its worst moment; where HBM is a simple sum, of boundaries.
    pub(crate) fn peaks(&self) -> Option<TierBytes> {
        if let Some(promise) = self.promise() {
            return Some(promise.peak_bytes);
        }
        let evaluation = self.solution.evaluation.as_ref()?;
        let fixed = self.problem.chain.hbm_fixed_bytes.unwrap_or_default();
        let hbm = evaluation.hbm_peak.map_or(evaluation.bytes.hbm, |peak| fixed + peak.bytes);
        Some(TierBytes { hbm, ..evaluation.bytes })
    }

    /// Time the step waits for a link.
    pub(crate) fn exposed(&self, pool: Pool) -> Seconds {
        if let Some(promise) = self.promise() {
            return match pool {
                Pool::D2h => promise.exposed_s.d2h,
                Pool::H2d => promise.exposed_s.h2d,
                Pool::NvmeWrite => promise.exposed_s.nvme_write,
                Pool::NvmeRead => promise.exposed_s.nvme_read,
            };
        }
        let evaluation = self.solution.evaluation.as_ref();
        Seconds::from_ms(evaluation.map_or(0.0, |e| e.exposed_ms.get(pool)))
    }

    /// The plan's time as its rivals' is given: of the whole step where that is known.
    pub(crate) fn time_ms(&self) -> Option<f64> {
        let added = self.solution.evaluation.as_ref().map(Evaluation::step_ms);
        self.step().map(Seconds::as_ms).or(added)
    }

    /// The fastest rival that fits.
    pub(crate) fn best_rival(&self) -> Option<(&Rival, f64)> {
        let timed = self.rivals.iter().filter_map(|r| Some((r, r.cost.as_ref().ok()?.time_ms()?)));
        timed.min_by(|a, b| a.1.total_cmp(&b.1))
    }
}

/// Solves the problem, explains it where it has no plan, and judges the rivals. Of a step the plan is no slower than those `known`.
pub(crate) fn make(
    problem: Problem,
    options: &SolveOptions,
    clock: &Clock,
    known: &[Schedule],
) -> Result<Planned, String> {
    let mut planned = match &problem.step {
        Some(_) => solve_whole_step(problem, options, known)?,
        None => {
            let solution = solve(&problem.chain, options).map_err(|e| e.to_string())?;
            let schedule = solution.schedule(&problem.chain);
            bare(problem, solution, schedule)
        }
    };
    if planned.solution.status == Status::Infeasible {
        let left = clock.left(options);
        planned.remedies = match &planned.problem.step {
            Some(step) => {
                let time_limit = left.time_limit.or(Some(PATIENCE));
                let solve = SolveOptions { time_limit, ..left };
                let options = StepOptions { solve, ..StepOptions::default() };
                match &planned.problem.ranks {
                    Some(Ranks { count, host, .. }) => explain_ranks(host, *count, &options),
                    None => explain_step(step, &options),
                }
            }
            None => explain(&planned.problem.chain, &left).map_err(|e| e.to_string())?,
        };
    }
    planned.rivals = rivals(&planned.problem);
    disprove(&mut planned);
    planned.step_bound = least(&planned, &clock.left(options)).map_err(|e| e.to_string())?;
    Ok(planned)
}

/// The bound of a step with a plan. Of several ranks none is known: it would be of one's even part, where others might have had less.
fn least(planned: &Planned, left: &SolveOptions) -> Result<Option<Seconds>, SolverError> {
    let (Some(step), Some(ours), None) = (&planned.problem.step, planned.step(), &planned.problem.ranks)
    else {
        return Ok(None);
    };
    // Beside the plan a convenience: it may take about as long as the plan did.
    let patience = 2.0 * planned.solution.solve.get() + 1.0;
    let time_limit = left.time_limit.map_or(patience, |left| left.get().min(patience));
    let bound = step_bound(step, &SolveOptions { time_limit: Some(Seconds(time_limit)), ..*left })?;
    // Two sums of the same times in another order differ by rounding.
    Ok(bound.map(|bound| if ours < bound { ours } else { bound }))
}

/// A step's plan is proven best for the chain that stands for the step. Where a plan made by hand is simulated to be faster, it is not
/// the best one, whatever the chain says.
fn disprove(planned: &mut Planned) {
    let slower = match (planned.time_ms(), planned.best_rival()) {
        (Some(ours), Some((_, theirs))) => ours > theirs + 1e-6,
        _ => false,
    };
    let solution = &mut planned.solution;
    if planned.problem.step.is_some() && slower && solution.status == Status::Optimal {
        (solution.status, solution.bound_ms, solution.gap) = (Status::Feasible, None, None);
    }
}

fn bare(problem: Problem, solution: Solution, schedule: Option<Schedule>) -> Planned {
    Planned {
        problem,
        solution,
        given: false,
        schedule,
        verified: None,
        ranks: None,
        step_bound: None,
        why: None,
        remedies: vec![],
        rivals: vec![],
    }
}

/// Nothing found yet.
fn empty(status: Status) -> Solution {
    Solution {
        status,
        placement: None,
        keep: None,
        evaluation: None,
        objective_ms: None,
        bound_ms: None,
        gap: None,
        solve: Seconds::ZERO,
        method: Method::Mip,
        message: None,
    }
}

fn solve_whole_step(problem: Problem, options: &SolveOptions, known: &[Schedule]) -> Result<Planned, String> {
    let Some(step) = &problem.step else { return Err("no step to solve".into()) };
    let with = StepOptions { solve: *options, known, ..StepOptions::default() };
    let found = match &problem.ranks {
        Some(Ranks { count, host, peer }) => {
            solve_ranks(host, *count, *peer, &with).map(|found| (found.each.clone(), Some(found)))
        }
        None => solve_step(step, &with).map(|found| (found, None)),
    };
    let (status, message) = match found {
        Ok((found, ranks)) => {
            let problem = Problem { chain: found.chain, ..problem };
            let verified = Some(found.verified);
            return Ok(Planned { verified, ranks, ..bare(problem, found.solution, Some(found.schedule)) });
        }
        Err(StepFailure::NoIncumbent) => (Status::NoIncumbent, None),
        Err(StepFailure::Failed(reason)) => (Status::Failed, Some(reason)),
        Err(
            e @ (StepFailure::Fixed { .. }
            | StepFailure::Infeasible { .. }
            | StepFailure::Verify(VerifyError::OverBudget { .. })),
        ) => (Status::Infeasible, Some(format!("{e}{}", streaming_hint(step, &e)))),
        Err(e) => return Err(e.to_string()),
    };
    let solution = Solution { message: message.clone(), ..empty(status) };
    Ok(Planned { why: message, ..bare(problem, solution, None) })
}

/// Where HBM is too small for what is there throughout, a smaller batch helps little; weights that leave do.
fn streaming_hint(step: &StepProblem, failure: &StepFailure) -> String {
    let stays = step.streamed.weights.is_empty() || step.streamed.gradients.is_empty();
    match failure {
        StepFailure::Fixed { tier: Tier::Hbm, .. } if stays => format!(
            "; {} are there throughout, weights and gradients above all: `--stream-weights` and `--stream-gradients` move those of \
             the layers to host RAM",
            step.fixed.hbm
        ),
        _ => String::new(),
    }
}

/// Judges a plan that was given.
pub(crate) fn judge(problem: Problem, given: GivenPlan) -> Result<Planned, String> {
    let chain = &problem.chain;
    let keep = keeps(&given)?;
    if let Some(why) = wrong_length(&given, keep.as_deref(), chain) {
        let rivals = rivals(&problem);
        return Ok(Planned { given: true, rivals, ..refused(problem, why) });
    }
    let judged = match &problem.step {
        Some(_) => None,
        None => Some(judge_chain(&problem, &given.placement, keep.as_deref())),
    };
    let mut planned = match (&problem.step, judged) {
        (Some(step), _) => {
            let mut schedule = given
                .schedule
                .clone()
                .unwrap_or_else(|| Schedule::named("given", &step.boundary_bytes, false));
            schedule.placement.clone_from(&given.placement);
            if let Some(keep) = &keep {
                schedule.keep = keep.iter().map(|k| *k == Keep::Hbm).collect();
            }
            // A schedule says how far its transfers run ahead; letters do not.
            let found = match &given.schedule {
                Some(_) => step.verify(&schedule).map(|verified| {
                    schedule.promise = Some(verified.promise);
                    (schedule, verified)
                }),
                None => best_execution(step, &schedule, None),
            };
            match found {
                Ok((schedule, verified)) => {
                    let solution = Solution {
                        placement: Some(given.placement.clone()),
                        keep: keep.clone(),
                        evaluation: judge_step(step, &given.placement, keep.as_deref()),
                        ..empty(Status::Feasible)
                    };
                    Planned { verified: Some(verified), ..bare(problem, solution, Some(schedule)) }
                }
                Err(e) => refused(problem, e.to_string()),
            }
        }
        (None, Some(Ok(evaluation))) => {
            let solution = Solution {
                placement: Some(given.placement.clone()),
                keep: problem.chain.hbm_cap_bytes.and(keep),
                evaluation: Some(evaluation),
                ..empty(Status::Feasible)
            };
            let schedule = solution.schedule(&problem.chain);
            bare(problem, solution, schedule)
        }
        (None, Some(Err(violation))) => refused(problem, violation.to_string()),
        (None, None) => return Err("nothing to judge".into()),
    };
    planned.given = true;
    let evaluation = planned.solution.evaluation.as_ref();
    planned.solution.objective_ms = evaluation.map(|e| e.objective_ms);
    planned.rivals = rivals(&planned.problem);
    Ok(planned)
}

fn refused(problem: Problem, why: String) -> Planned {
    Planned { why: Some(why), ..bare(problem, empty(Status::Infeasible), None) }
}

/// Why a plan cannot be one of this problem, whatever it says.
fn wrong_length(given: &GivenPlan, keep: Option<&[Keep]>, chain: &CostChain) -> Option<String> {
    let (boundaries, layers) = (given.placement.len(), keep.map_or(chain.layers, <[Keep]>::len));
    if boundaries != chain.boundaries() {
        return Some(format!("it has {boundaries} boundaries, the problem {}", chain.boundaries()));
    }
    (layers != chain.layers)
        .then(|| format!("it says of {layers} layers what they keep; there are {}", chain.layers))
}

fn keeps(given: &GivenPlan) -> Result<Option<Vec<Keep>>, String> {
    let Some(text) = &given.keep else { return Ok(None) };
    let letter = |c| {
        Keep::from_letter(c).ok_or_else(|| {
            format!("--keep: {c:?} is no letter for a layer; K keeps its internals in HBM, - recomputes them")
        })
    };
    text.chars().map(letter).collect::<Result<_, _>>().map(Some)
}

fn judge_chain(
    problem: &Problem,
    placement: &[Placement],
    keep: Option<&[Keep]>,
) -> Result<Evaluation, Violation> {
    let none = vec![Keep::Recompute; problem.chain.layers];
    match (problem.chain.hbm_cap_bytes, keep) {
        (Some(_), keep) => evaluate_keep(&problem.chain, placement, keep.unwrap_or(&none)),
        (None, Some(keep)) if keep.iter().any(|k| *k != Keep::Recompute) => Err(Violation::NoKeepModel),
        (None, _) => evaluate(&problem.chain, placement),
    }
}

/// Counts and times of a plan whose step has been verified, kept internals included: the chain's own budgets and locks are the
/// planner's means, not the step's rules, so here nothing is short of room.
fn judge_step(step: &StepProblem, placement: &[Placement], keep: Option<&[Keep]>) -> Option<Evaluation> {
    let none = vec![Keep::Recompute; step.saved_bytes.len()];
    let enough = Bytes(1 << 60);
    let chain = step.keep_chain(&TierBytes { hbm: enough, host: enough, nvme: enough }, &step.windows());
    evaluate_keep(&chain, placement, keep.unwrap_or(&none)).ok()
}

fn rivals(problem: &Problem) -> Vec<Rival> {
    let peers = problem.ranks.as_ref().map_or(Seconds::ZERO, Ranks::peer_exposed);
    let mut list: Vec<Rival> = match &problem.step {
        Some(step) => step_baselines(step, &problem.chain)
            .into_iter()
            .map(|b| Rival {
                name: b.name,
                placement: b.schedule.placement,
                keep: b.schedule.keep.iter().map(|k| if *k { Keep::Hbm } else { Keep::Recompute }).collect(),
                cost: b.outcome.map_err(|e| e.to_string()).map(|verified| RivalCost {
                    objective_ms: None,
                    step_ms: None,
                    predicted: Some(verified.promise.step_s + peers),
                }),
            })
            .collect(),
        None => baselines(&problem.chain)
            .into_iter()
            .map(|b| Rival {
                name: b.name,
                placement: b.placement,
                keep: b.keep,
                cost: b.outcome.map(|e| of_chain(&e)).map_err(|e| e.to_string()),
            })
            .collect(),
    };
    if let Some(placement) = problem.reference.as_ref().and_then(|r| r.placement.clone()) {
        let cost = judge_chain(problem, &placement, None);
        let cost = cost.map(|e| of_chain(&e)).map_err(|e| e.to_string());
        list.push(Rival { name: "reference-schedule".into(), placement, keep: vec![], cost });
    }
    list
}

fn of_chain(evaluation: &Evaluation) -> RivalCost {
    let (objective_ms, step_ms) = (Some(evaluation.objective_ms), Some(evaluation.step_ms()));
    RivalCost { objective_ms, step_ms, predicted: None }
}
