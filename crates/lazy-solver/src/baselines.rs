//! Plans that people use without a solver, to hold a solved plan against.
//!
//! | name | boundaries | internals |
//! | --- | --- | --- |
//! | `do-nothing` | all in HBM | all kept, where the problem knows of internals |
//! | `checkpoint-every-layer` | all in HBM | none kept |
//! | `checkpoint-every-k-layers` | every k-th and the last in HBM, the others recomputed | none kept |
//! | `greedy` | the cheapest to recompute dropped until the rest fits, then HBM, host RAM and NVMe filled from the last boundary down | as many of the last layers' kept as then fit |

use lazy_model::keep::{Keep, evaluate_keep};
use lazy_model::{
    CostChain, Evaluation, Placement, Schedule, StepProblem, Verified, VerifyError, Violation, evaluate,
};

use crate::by_hand::{GREEDY, plans};
use crate::step::best_execution;

/// A plan that needs no solver, judged by a chain's rules.
#[derive(Clone, Debug)]
pub struct Baseline {
    /// Its name, for example `checkpoint-every-2-layers`.
    pub name: String,
    /// One entry a boundary, `0..=N`.
    pub placement: Vec<Placement>,
    /// One entry a layer; none is kept where the chain does not set `hbm_cap_bytes`.
    pub keep: Vec<Keep>,
    /// What it costs, or the first rule it breaks.
    pub outcome: Result<Evaluation, Violation>,
}

/// A plan that needs no solver, laid out and simulated under a step's caps.
#[derive(Debug)]
pub struct StepBaseline {
    /// Its name.
    pub name: String,
    /// The plan.
    pub schedule: Schedule,
    /// Its time line and promise, or the cap it breaks.
    pub outcome: Result<Verified, VerifyError>,
}

/// The baselines of a chain. Its locks bind a solver, not them: they are judged without.
pub fn baselines(chain: &CostChain) -> Vec<Baseline> {
    let free = CostChain { locks: None, ..chain.clone() };
    let keeps = chain.hbm_cap_bytes.is_some();
    plans(&free)
        .into_iter()
        .map(|(name, placement, keep)| {
            let all = if keep && keeps { chain.layers } else { 0 };
            let mut kept = keep_last(chain.layers, all);
            let mut outcome = judge(&free, &placement, &kept);
            if keeps && name == GREEDY && outcome.is_ok() {
                (kept, outcome) = keep_greedily(&free, &placement, outcome);
            }
            Baseline { name, placement, keep: kept, outcome }
        })
        .collect()
}

fn judge(chain: &CostChain, placement: &[Placement], keep: &[Keep]) -> Result<Evaluation, Violation> {
    if chain.hbm_cap_bytes.is_some() {
        evaluate_keep(chain, placement, keep)
    } else {
        evaluate(chain, placement)
    }
}

/// The last `kept` layers keep their internals.
fn keep_last(layers: usize, kept: usize) -> Vec<Keep> {
    (0..layers).map(|l| if l + kept >= layers { Keep::Hbm } else { Keep::Recompute }).collect()
}

/// Keeps as many of the last layers as fit: those hold their internals for the shortest time. By bisection, since keeping one more
/// never makes room.
fn keep_greedily(
    chain: &CostChain,
    placement: &[Placement],
    none: Result<Evaluation, Violation>,
) -> (Vec<Keep>, Result<Evaluation, Violation>) {
    let mut best = (keep_last(chain.layers, 0), none);
    let (mut fit, mut too_many) = (0, chain.layers + 1);
    while too_many - fit > 1 {
        let kept = fit + (too_many - fit) / 2;
        let keep = keep_last(chain.layers, kept);
        match judge(chain, placement, &keep) {
            Ok(evaluation) => (fit, best) = (kept, (keep, Ok(evaluation))),
            Err(_) => too_many = kept,
        }
    }
    best
}

/// The baselines of a step. `chain` is its placement problem: `greedy` looks at it alone.
pub fn step_baselines(problem: &StepProblem, chain: &CostChain) -> Vec<StepBaseline> {
    step_candidates(problem, chain)
        .into_iter()
        .map(|(name, schedule)| match best_execution(problem, &schedule, None) {
            Ok((schedule, verified)) => StepBaseline { name, schedule, outcome: Ok(verified) },
            Err(error) => StepBaseline { name, schedule, outcome: Err(error) },
        })
        .collect()
}

/// The same before anything is laid out.
pub(crate) fn step_candidates(problem: &StepProblem, chain: &CostChain) -> Vec<(String, Schedule)> {
    plans(chain)
        .into_iter()
        .map(|(name, placement, keep)| {
            let mut schedule = Schedule::named(&name, &problem.boundary_bytes, keep);
            schedule.placement = placement;
            if name == GREEDY {
                keep_what_fits(problem, &mut schedule);
            }
            (name, schedule)
        })
        .collect()
}

/// As many of the last layers keep their internals as fit beside transfers that run no further ahead than they must.
fn keep_what_fits(problem: &StepProblem, schedule: &mut Schedule) {
    let layers = schedule.keep.len();
    let mut tried = schedule.clone();
    tried.execution.prefetch = 0;
    tried.execution.writes_in_flight = 0;
    let (mut fit, mut too_many) = (0, layers + 1);
    while too_many - fit > 1 {
        let kept = fit + (too_many - fit) / 2;
        tried.keep = (0..layers).map(|l| l + kept >= layers).collect();
        if problem.verify(&tried).is_ok() { fit = kept } else { too_many = kept }
    }
    schedule.keep = (0..layers).map(|l| l + fit >= layers).collect();
}
