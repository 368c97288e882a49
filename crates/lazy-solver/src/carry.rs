//! From a placement to operations: when transfers start and end, so that a step keeps its caps and waits as little as it can.

use lazy_model::step::{StepPlan, TransferPlanner};
use lazy_model::{Schedule, Seconds, StepProblem, Tier, Verified, VerifyError};

use crate::polish::Carried;
use crate::step::best_execution;

/// Staging buffers towards and from NVMe, where host RAM allows.
pub(crate) const STAGING: usize = 2;
/// Times the positions of transfers are taken anew from where the last ones made arithmetic wait.
const FOLLOWED: usize = 2;

/// The fastest way to carry `schedule` out that keeps the budgets, its transfers timed by position.
///
/// # Errors
/// What it breaks where it needs least.
pub fn carry_out(
    problem: &StepProblem,
    schedule: &Schedule,
    prefetch: Option<usize>,
) -> Result<(Schedule, Verified), VerifyError> {
    if prefetch.is_some() {
        return best_execution(problem, schedule, prefetch);
    }
    let counts = schedule.counts();
    if counts.host + counts.nvme == 0 {
        let verified = problem.verify(schedule)?;
        return Ok((promised(schedule.clone(), &verified), verified));
    }
    let sizes = problem.sizes();
    let mut best: Option<(Schedule, Verified)> = None;
    let mut least: Option<VerifyError> = None;
    let mut smaller = |error: VerifyError| {
        let over = |e: &VerifyError| match e {
            VerifyError::OverBudget { needed, budget, .. } => Some(*needed - *budget),
            _ => None,
        };
        if least.as_ref().is_none_or(|l| over(&error) < over(l)) {
            least = Some(error);
        }
    };
    let buffers: &[usize] = if counts.nvme > 0 { &[STAGING, 1] } else { &[1] };
    for &staging in buffers {
        for (writes_run_on, reads_beside_loss) in [(false, false), (true, false), (false, true), (true, true)]
        {
            let mut tried = schedule.clone();
            tried.execution.staging_buffers = staging;
            let mut planner = TransferPlanner::new(&tried, &sizes, &problem.costs);
            planner.writes_run_on = writes_run_on;
            planner.reads_beside_loss = reads_beside_loss;
            for _ in 0..=FOLLOWED {
                tried.transfers = Some(planner.plan(&tried));
                match problem.verify(&tried) {
                    Ok(verified) => {
                        planner.follow(&verified.plan, &verified.timeline);
                        let waits = verified.timeline.exposed().total() > Seconds::ZERO;
                        let time = verified.promise.step_s.get();
                        if best.as_ref().is_none_or(|(_, b)| time < b.promise.step_s.get() * (1.0 - 1e-9)) {
                            best = Some((promised(tried.clone(), &verified), verified));
                        }
                        if !waits {
                            break;
                        }
                    }
                    Err(error @ VerifyError::OverBudget { tier, .. }) => {
                        // More staging than there are buffers for: from here on what is to leave waits for one.
                        planner.staging_in_turn |= tier == Tier::Host && !writes_run_on;
                        smaller(error);
                        // Reads that pile up need less room where they start as late as the plan's own waits allow.
                        let Ok(plan) = StepPlan::with_sizes(&tried, &sizes) else { break };
                        planner.follow(&plan, &lazy_model::timeline::simulate(&plan, &problem.costs));
                    }
                    Err(other) => return Err(other),
                }
            }
        }
    }
    if let Some(best) = best {
        return Ok(best);
    }
    match (in_turn(problem, schedule, buffers), best_execution(problem, schedule, None)) {
        (Some(a), Ok(b)) => Ok(if a.1.promise.step_s < b.1.promise.step_s { a } else { b }),
        (Some(found), Err(_)) => Ok(found),
        (None, found) => found.map_err(|error| least.unwrap_or(error)),
    }
}

/// The fastest way that has no boundary in HBM beside a running backward but those that the block needs: copies in wait for the block
/// before, and arithmetic for them. Reads from drives into staging go on.
fn in_turn(problem: &StepProblem, schedule: &Schedule, buffers: &[usize]) -> Option<Carried> {
    let sizes = problem.sizes();
    let mut best: Option<Carried> = None;
    for (&staging, out_in_turn) in buffers.iter().flat_map(|b| [(b, false), (b, true)]) {
        let mut tried = schedule.clone();
        tried.execution.staging_buffers = staging;
        let mut planner = TransferPlanner::new(&tried, &sizes, &problem.costs);
        planner.copies_in_turn = true;
        planner.staging_in_turn = true;
        for _ in 0..=FOLLOWED {
            let mut transfers = planner.plan(&tried);
            if out_in_turn {
                transfers.iter_mut().flatten().for_each(|t| t.gone = t.out);
            }
            tried.transfers = Some(transfers);
            let Ok(plan) = StepPlan::with_sizes(&tried, &sizes) else { break };
            planner.follow(&plan, &lazy_model::timeline::simulate(&plan, &problem.costs));
            let Ok(verified) = problem.verify(&tried) else { continue };
            if best.as_ref().is_none_or(|b| verified.promise.step_s < b.1.promise.step_s) {
                best = Some((promised(tried.clone(), &verified), verified));
            }
        }
    }
    best
}

pub(crate) fn promised(mut schedule: Schedule, verified: &Verified) -> Schedule {
    schedule.promise = Some(verified.promise);
    schedule
}
