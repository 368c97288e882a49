//! A whole step: from sizes, costs and caps to a verified schedule.
//!
//! ```
//! use lazy_model::{Bytes, HardwareProfile, ModelSpec, StepProblem, TierBytes, Training, Workload};
//! use lazy_solver::step::{StepOptions, solve_step};
//!
//! let spec = ModelSpec::from_json(
//!     r#"{"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8,
//!         "head_dim": 128, "intermediate_size": 3072, "vocab_size": 32000, "rms_norm_eps": 1e-6, "tie_word_embeddings": true}"#,
//! )?;
//! let work = Workload::new(8, 1024, 2)?;
//! let profile = HardwareProfile::preset("h100").ok_or("no such preset")?;
//! let budgets = TierBytes { hbm: Bytes::from_mib(3072), host: Bytes::from_mib(256), nvme: Bytes::ZERO };
//! let problem = StepProblem::for_model(&spec, &work, &profile, budgets, &Training::default())?;
//! let found = solve_step(&problem, &StepOptions::default())?;
//! println!("{} in {}", found.schedule.placement_letters(), found.verified.promise.step_s);
//! assert!(found.verified.promise.peak_bytes.hbm <= budgets.hbm);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! With [`Objective::Physical`] the chain counts HBM at every position of the step and decides about layer internals too; its optimum is
//! laid out, simulated, and the chain corrected until both agree. With [`Objective::Reference`], and where that finds no plan, a chain
//! counts boundaries between forward and backward as a simple sum. What else HBM and host RAM hold during a step (gradients of
//! boundaries, transfers in flight, recomputed boundaries, staging) depends on the plan. So the chain is first given all the room the
//! caps leave; the operations of its optimum are laid out and verified, and where they overflow, the chain's budget shrinks by the
//! overflow and is solved again. `docs/model.md` derives both.

use std::time::Instant;

use lazy_model::{Bytes, Schedule, StepProblem, Tier, TierBytes, Verified, VerifyError};

pub use crate::carry::carry_out;
use crate::error::SolverError;
pub use crate::physical::step_bound;
use crate::physical::{Clock, keep_more, nothing_fits, solve_physical};
use crate::polish::{NO_CHAIN, adopt, by_hand, by_rule, known, polish, reference_may_help};
use crate::solve::{Solution, SolveOptions, Status, solve};
use crate::spill::spilled;

/// Read-ahead distances that are tried when none is asked for, in blocks.
const DISTANCES: [usize; 5] = [0, 1, 2, 3, 4];
/// Buffers for writes in flight that are tried. Fewer need less HBM and may make the forward pass wait.
const WRITES_IN_FLIGHT: [usize; 3] = [2, 1, 0];
/// Rounds of shrinking a budget. Each takes away the placement it was made for, and few are ever needed.
const MOST_ROUNDS: usize = 32;
/// More room must save this share of the step to be worth its memory.
const WORTH_IT: f64 = 1e-4;

/// What a step's plan minimises.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Objective {
    /// The time of the step, with internals kept where HBM allows and HBM counted at every position.
    #[default]
    Physical,
    /// The reference's: recomputed and exposed time of boundaries in the forward windows, a simple sum of HBM, nothing kept.
    Reference,
}

/// How to plan a step.
#[derive(Clone, Copy, Debug, Default)]
pub struct StepOptions<'a> {
    /// What to minimise.
    pub objective: Objective,
    /// How to solve each chain.
    pub solve: SolveOptions,
    /// Blocks to read ahead; `None`: as many as the time line says are worth their memory.
    pub prefetch: Option<usize>,
    /// Plans that were made for less memory, slower links or shorter blocks: the physical objective's plan is no slower than any of them that
    /// keeps the caps, so that more of anything is never worse. With [`prefetch`](Self::prefetch) they are not looked at.
    pub known: &'a [Schedule],
}

/// A step's schedule, and everything that was found on the way.
#[derive(Clone, Debug)]
pub struct StepSolution {
    /// The schedule, its promise filled in.
    pub schedule: Schedule,
    /// Its operations and their simulated time line.
    pub verified: Verified,
    /// The solver's answer for the last chain.
    pub solution: Solution,
    /// That chain.
    pub chain: lazy_model::CostChain,
}

/// Why a step has no schedule.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepFailure {
    /// A chain was refused.
    #[error(transparent)]
    Solver(#[from] SolverError),
    /// A tier's cap does not even hold what is there whatever goes where, or of HBM what loss or a layer need beside it. How much would do
    /// [`explain_step`](crate::explain_step) says.
    #[error(
        "the {tier} budget is {budget}, and {fixed} are taken whatever is placed where, which leaves too little for any plan: raise it, or \
         make batch or sequence smaller"
    )]
    Fixed {
        /// The tier.
        tier: Tier,
        /// Its cap.
        budget: Bytes,
        /// What is taken regardless.
        fixed: Bytes,
        /// What is needed before any boundary is placed: that, and in HBM what loss or a layer need beside it.
        needed: Bytes,
    },
    /// No placement fits the caps.
    #[error(
        "no placement fits: {hbm} of HBM, {host} of host RAM and {nvme} of NVMe are left for boundaries of up to {boundary} with at \
         most {max_segment} layers a block: raise the hbm, host or nvme budget, or make batch or sequence smaller"
    )]
    Infeasible {
        /// Room for boundaries in HBM.
        hbm: Bytes,
        /// In host RAM.
        host: Bytes,
        /// On NVMe.
        nvme: Bytes,
        /// The largest boundary.
        boundary: Bytes,
        /// Most layers in a block.
        max_segment: usize,
    },
    /// The time limit came first.
    #[error(
        "no plan was found within the time limit: raise it, or keep every boundary in HBM, which needs no search"
    )]
    NoIncumbent,
    /// The solver failed.
    #[error("the solver failed: {0}; keeping every boundary in HBM needs no solver")]
    Failed(String),
    /// The plan does not verify.
    #[error(transparent)]
    Verify(#[from] VerifyError),
}

/// Finds the schedule of a step under its caps.
///
/// # Errors
/// See [`StepFailure`].
pub fn solve_step(problem: &StepProblem, options: &StepOptions<'_>) -> Result<StepSolution, StepFailure> {
    let (always, mut room) = (problem.always(), TierBytes::default());
    for tier in Tier::ALL {
        let (budget, fixed) = (problem.budgets.get(tier), always.get(tier));
        let least = if tier == Tier::Hbm { problem.sizes().least_hbm() } else { Bytes::ZERO };
        if budget < fixed + least {
            return Err(StepFailure::Fixed { tier, budget, fixed, needed: fixed + least });
        }
        *room.get_mut(tier) = budget - fixed;
    }
    let clock = Clock { limit: options.solve.time_limit, started: Instant::now() };
    if options.objective == Objective::Reference {
        return without_keep(problem, options, room, &clock)
            .map_err(|why| refused(problem, room, why, &clock));
    }
    let Some(found) = solve_physical(problem, options, &clock)? else {
        let found = without_chain(problem, options, room, &clock)?;
        return Ok(polish(problem, options, found, None, &clock));
    };
    let mut reference = None;
    if reference_may_help(problem, &found) && !clock.is_over() {
        reference = without_keep(problem, options, room, &clock).ok();
    }
    Ok(polish(problem, options, found, reference, &clock))
}

/// The fastest plan there is where the chain has none that can be laid out: it counts transfers in flight with caution, and what it finds
/// no room for, boundaries alone may still fit.
fn without_chain(
    problem: &StepProblem,
    options: &StepOptions<'_>,
    room: TierBytes,
    clock: &Clock,
) -> Result<StepSolution, StepFailure> {
    let step = |found: &StepSolution| found.verified.promise.step_s.get();
    let known = known(problem, options).filter_map(|carried| by_rule(problem, Some(carried)));
    let spilled = by_rule(problem, spilled(problem, options.prefetch, clock));
    let spilled = known.chain(spilled).min_by(|a, b| step(a).total_cmp(&step(b)));
    if spilled.is_none() && nothing_fits(problem, &clock.share(&options.solve)) {
        return Err(unplaceable(problem, room));
    }
    let reference = without_keep(problem, options, room, clock).map(|found| {
        let found = keep_more(problem, found);
        let (schedule, verified) = (found.schedule.clone(), found.verified.clone());
        adopt(problem, found, schedule, verified, NO_CHAIN)
    });
    let (reference, why) = match reference {
        Ok(found) => (Some(found), None),
        Err(why) => (None, Some(why)),
    };
    let found = reference.into_iter().chain(spilled).min_by(|a, b| step(a).total_cmp(&step(b)));
    found.or_else(|| by_hand(problem, options)).ok_or_else(|| match why {
        // It would be one of this chain alone, which counts with caution too.
        Some(StepFailure::Infeasible { .. }) if clock.is_half_gone() => StepFailure::NoIncumbent,
        Some(why) => refused(problem, room, why, clock),
        None => unplaceable(problem, room),
    })
}

/// Why there is no plan, of the step and not of the last schedule that was tried: one that could not be laid out is no proof, where with
/// more time another might have been.
fn refused(problem: &StepProblem, room: TierBytes, why: StepFailure, clock: &Clock) -> StepFailure {
    match why {
        StepFailure::Verify(VerifyError::OverBudget { .. }) if clock.is_half_gone() => {
            StepFailure::NoIncumbent
        }
        StepFailure::Verify(VerifyError::OverBudget { .. }) => unplaceable(problem, room),
        other => other,
    }
}

/// The plan of the reference's chain: nothing kept, HBM for boundaries a simple sum that shrinks until the step fits.
fn without_keep(
    problem: &StepProblem,
    options: &StepOptions<'_>,
    room: TierBytes,
    clock: &Clock,
) -> Result<StepSolution, StepFailure> {
    let mut refused = None;
    // A block that is recomputed holds all its boundaries at once, which the chain does not count: where no plan with long blocks
    // can be laid out, one with shorter blocks may be.
    let halves = std::iter::successors(Some(problem.max_segment), |&m| (m > 1).then_some(m / 2));
    for max_segment in halves {
        match solve_blocks(&StepProblem { max_segment, ..problem.clone() }, options, room, clock) {
            Err(
                e @ (StepFailure::Infeasible { .. } | StepFailure::Verify(VerifyError::OverBudget { .. })),
            ) => {
                refused = refused.or(Some(e));
            }
            other => return other,
        }
    }
    Err(refused.unwrap_or(StepFailure::NoIncumbent))
}

/// [`solve_step`] with one limit on the length of blocks.
fn solve_blocks(
    problem: &StepProblem,
    options: &StepOptions<'_>,
    whole: TierBytes,
    clock: &Clock,
) -> Result<StepSolution, StepFailure> {
    let (mut room, mut overflow) = (whole, None);
    for _ in 0..MOST_ROUNDS {
        let chain = problem.chain(room);
        let solution = solve(&chain, &clock.share(&options.solve))?;
        let Some(bare) = solution.schedule(&chain) else {
            return Err(match (solution.status, overflow) {
                (Status::Infeasible, Some(overflow)) => StepFailure::Verify(overflow),
                _ => no_placement(problem, &solution, whole),
            });
        };
        match best_execution(problem, &bare, options.prefetch) {
            Ok((schedule, verified)) => return Ok(StepSolution { schedule, verified, solution, chain }),
            Err(VerifyError::OverBudget { tier, needed, budget, fixed }) => {
                // From what the boundaries take: room that no whole boundary fills would hide a small overflow round after round.
                let taken = solution.evaluation.as_ref().map_or(Bytes::ZERO, |e| e.bytes.get(tier));
                let smaller = taken.saturating_sub(needed - budget);
                // HBM holds at least the last boundary; the other tiers may hold none.
                let hopeless = tier == Tier::Nvme || taken == Bytes::ZERO;
                if hopeless || (tier == Tier::Hbm && smaller == Bytes::ZERO) {
                    return Err(VerifyError::OverBudget { tier, needed, budget, fixed }.into());
                }
                *room.get_mut(tier) = smaller;
                overflow = Some(VerifyError::OverBudget { tier, needed, budget, fixed });
            }
            Err(other) => return Err(other.into()),
        }
    }
    Err(overflow.map_or(StepFailure::NoIncumbent, StepFailure::Verify))
}

/// Verifies `schedule` with several amounts of room for transfers beside arithmetic, and returns the fastest that keeps the budgets;
/// among equals, the one that needs least. `prefetch` fixes the read-ahead. Fills in the promise.
///
/// # Errors
/// What the schedule breaks where it needs least.
pub fn best_execution(
    problem: &StepProblem,
    schedule: &Schedule,
    prefetch: Option<usize>,
) -> Result<(Schedule, Verified), VerifyError> {
    let counts = schedule.counts();
    if counts.host + counts.nvme == 0 {
        // Nothing moves, so one amount of room is as good as another.
        let mut still = schedule.clone();
        still.execution.prefetch = prefetch.unwrap_or(DISTANCES[0]);
        still.execution.writes_in_flight = 0;
        let verified = problem.verify(&still)?;
        still.promise = Some(verified.promise);
        return Ok((still, verified));
    }
    let distances = prefetch.map_or(DISTANCES.to_vec(), |d| vec![d]);
    let mut best: Option<(Schedule, Verified)> = None;
    let mut refused = None;
    let smallest_first = WRITES_IN_FLIGHT.iter().rev();
    for (writes, distance) in smallest_first.flat_map(|&w| distances.iter().map(move |&d| (w, d))) {
        let mut tried = schedule.clone();
        tried.execution.prefetch = distance;
        tried.execution.writes_in_flight = writes;
        match problem.verify(&tried) {
            Ok(verified) => {
                tried.promise = Some(verified.promise);
                let better = best.as_ref().is_none_or(|(_, b)| {
                    verified.promise.step_s.get() < b.promise.step_s.get() * (1.0 - WORTH_IT)
                });
                if better {
                    best = Some((tried, verified));
                }
            }
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    match (best, refused) {
        (Some(best), _) => Ok(best),
        (None, Some(error)) => Err(error),
        // Neither list is empty.
        (None, None) => problem.verify(schedule).map(|v| (schedule.clone(), v)),
    }
}

fn no_placement(problem: &StepProblem, solution: &Solution, room: TierBytes) -> StepFailure {
    match solution.status {
        Status::NoIncumbent => StepFailure::NoIncumbent,
        Status::Failed => StepFailure::Failed(solution.message.clone().unwrap_or_default()),
        Status::Infeasible | Status::Optimal | Status::Feasible => unplaceable(problem, room),
    }
}

fn unplaceable(problem: &StepProblem, room: TierBytes) -> StepFailure {
    StepFailure::Infeasible {
        hbm: room.hbm,
        host: room.host,
        nvme: room.nvme,
        boundary: problem.boundary_bytes.iter().copied().max().unwrap_or_default(),
        max_segment: problem.max_segment,
    }
}

#[cfg(test)]
mod tests {
    use lazy_model::Seconds;

    use super::*;
    use crate::steps::{MIB, step};

    /// Eight layers in `hbm` MiB besides the internals of one; boundaries in HBM cost nothing, everything else does.
    fn problem(hbm: u64, forward_ms: &[f64]) -> StepProblem {
        let mut problem = step(8, [hbm + 10, 256, 0], 1.0);
        let times = |factor: f64| forward_ms.iter().map(|ms| Seconds::from_ms(ms * factor)).collect();
        problem.costs.forward = times(1.0);
        problem.costs.saving_forward = times(1.1);
        problem.costs.backward = times(2.0);
        problem
    }

    /// A layer needs its input, its output or the two gradients, and a boundary may still be leaving: with host RAM for all
    /// boundaries there is a plan in that much HBM, whatever the times of the layers make attractive.
    #[test]
    fn room_for_one_layer_is_room_for_a_plan() {
        for forward_ms in [[0.1; 8], [1.0; 8], [0.3, 2.0, 0.3, 2.0, 0.3, 2.0, 0.3, 2.0]] {
            let found = solve_step(&problem(4, &forward_ms), &StepOptions::default());
            let found = found.unwrap_or_else(|e| panic!("{forward_ms:?}: {e}"));
            assert!(found.verified.promise.peak_bytes.hbm <= MIB * 14);
        }
    }

    #[test]
    fn a_refusal_names_a_cap() {
        let message = solve_step(&problem(2, &[1.0; 8]), &StepOptions::default()).unwrap_err().to_string();
        // Whose flags? A library's advice is about budgets.
        assert!(message.contains("the hbm budget") && !message.contains("--"), "{message}");
    }
}
