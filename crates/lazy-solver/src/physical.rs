//! The physical objective: a step's own time, with keep and HBM decided together with the placements.
//!
//! The keep chain of a step predicts its time: arithmetic, recomputation, and what transfers stick out of windows of measured length. Its
//! optimum is laid out as operations, their exact peaks are checked and their time line is simulated. Where the operations show that
//! the chain was wrong about a cap or a link, the chain is corrected by that much and solved again, a few times at most.

use std::time::{Duration, Instant};

use lazy_model::schedule::Prediction;
use lazy_model::step::StepPlan;
use lazy_model::timeline::LinkRates;
use lazy_model::{
    Bytes, BytesPerSecond, CostChain, Keep, Placement, Schedule, Seconds, StepProblem, Streamed, Tier,
    TierBytes, Verified, VerifyError, Windows,
};

use crate::carry::{STAGING, carry_out, promised};
use crate::error::SolverError;
use crate::keep::feasible;
use crate::polish::{Carried, OVERFLOWED, adopt, unused};
use crate::solve::{Solution, SolveOptions, Status, TieBreak, solve};
use crate::spill::repaired;
use crate::step::{StepFailure, StepOptions, StepSolution};

/// How far prediction and simulation may lie apart.
pub(crate) const NEAR: f64 = 0.03;
/// Times the problem is corrected and solved again.
pub(crate) const MOST_REFINEMENTS: usize = 5;
/// A link that is no limit.
pub(crate) const AT_ONCE: BytesPerSecond = BytesPerSecond(1e18);
/// Times HBM is taken for larger by a boundary where the chain finds no plan.
const MOST_RAISES: usize = 2;
/// Caps and corrections that are tried in all.
const MOST_ROUNDS: usize = 12;

/// What one round of the search found.
struct Round {
    solution: StepSolution,
    prediction: Prediction,
}

/// Solves the keep chain of `problem`, corrected until its prediction holds. `None` where no plan of the chain can be laid out.
///
/// # Errors
/// When the solver refuses the chain.
pub(crate) fn solve_physical(
    problem: &StepProblem,
    options: &StepOptions<'_>,
    clock: &Clock,
) -> Result<Option<StepSolution>, StepFailure> {
    let mut best: Option<Round> = None;
    for nvme in nvme_rooms(problem) {
        // What is set aside for staging is of use to boundaries where host RAM is full: a buffer of it where NVMe is used, all where not. Where
        // solving is quick, either.
        let used = |b: &Round| b.solution.schedule.counts().nvme > 0;
        let unlikely = |b: &Round| used(b) != nvme.is_some() && !clock.has_hardly_begun();
        if best.as_ref().is_some_and(|b| !host_is_full(b) || unlikely(b)) {
            continue;
        }
        if let Some(found) = refine(problem, options, nvme, clock)?
            && best.as_ref().is_none_or(|b| better(&found, b))
        {
            best = Some(found);
        }
    }
    Ok(best.map(|round| {
        let mut solution = round.solution;
        solution.schedule.solve.prediction = Some(round.prediction);
        solution
    }))
}

/// Shares a time limit out over the solves of a step: each may take half of what is left.
pub(crate) struct Clock {
    pub(crate) limit: Option<Seconds>,
    pub(crate) started: Instant,
}

impl Clock {
    pub(crate) fn share(&self, options: &SolveOptions) -> SolveOptions {
        let share =
            |limit: Seconds| Seconds((limit.get() - self.started.elapsed().as_secs_f64()).max(0.0) / 2.0);
        SolveOptions { time_limit: self.limit.map(share), ..*options }
    }

    /// Whether so little of the time is gone that there is some for what may well be of no use.
    fn has_hardly_begun(&self) -> bool {
        self.limit.is_none_or(|limit| self.started.elapsed().as_secs_f64() < limit.get() / 4.0)
    }

    /// Whether so much is gone that small changes are not worth what is left. Before, no solve was cut short: the first may take half.
    pub(crate) fn is_half_gone(&self) -> bool {
        self.limit.is_some_and(|limit| self.started.elapsed().as_secs_f64() > limit.get() / 2.0)
    }

    /// Whether another solve would get next to nothing.
    pub(crate) fn is_over(&self) -> bool {
        self.limit.is_some_and(|limit| self.started.elapsed().as_secs_f64() > 0.9 * limit.get())
    }
}

/// Whether host RAM holds so much that one more boundary does not fit.
fn host_is_full(round: &Round) -> bool {
    let StepSolution { solution, chain, .. } = &round.solution;
    let used = solution.evaluation.as_ref().map_or(Bytes::ZERO, |e| e.bytes.host);
    let smallest = chain.boundary_bytes.iter().copied().min().unwrap_or_default();
    used + smallest > chain.cpu_budget_bytes
}

/// NVMe with host RAM set aside for staging (none: boundaries that are there at other times leave room for it), and none of either.
fn nvme_rooms(problem: &StepProblem) -> Vec<Option<Bytes>> {
    let largest = problem.boundary_bytes.iter().copied().max().unwrap_or_default().align_up(4096);
    let host = chain_room(problem).host;
    let staged = (0..=STAGING as u64).rev().map(|n| largest * n).filter(|&bytes| bytes <= host).map(Some);
    let staged = staged.filter(|_| problem.budgets.nvme > Bytes::ZERO);
    staged.chain([None]).collect()
}

fn better(a: &Round, b: &Round) -> bool {
    let time = |r: &Round| r.solution.verified.promise.step_s.get();
    let near = |r: &Round| r.prediction.gap.abs() <= NEAR;
    match (near(a), near(b)) {
        (true, false) if time(a) < time(b) * (1.0 + NEAR) => true,
        (false, true) if time(b) < time(a) * (1.0 + NEAR) => false,
        _ => time(a) < time(b),
    }
}

/// What the caps leave for a chain: of HBM all, since it counts what is there itself.
pub(crate) fn chain_room(problem: &StepProblem) -> TierBytes {
    let host = problem.budgets.host.saturating_sub(problem.always().host);
    TierBytes { host, ..problem.budgets }
}

/// Caps on HBM that are tried where the chain's own account of it is wrong: below `short` it finds no plan, from `over` on those it finds
/// overflow.
#[derive(Default)]
struct Tried {
    short: Option<Bytes>,
    over: Option<Bytes>,
    raised: usize,
}

impl Tried {
    /// The next cap after the chain found no plan under `cap`, if another is worth a try.
    fn found_none(&mut self, cap: Bytes, largest: Bytes) -> Option<Bytes> {
        self.short = self.short.max(Some(cap));
        if self.over.is_some_and(|over| over > cap) {
            return self.between(largest);
        }
        self.raised += 1;
        (self.raised <= MOST_RAISES).then_some(cap + largest)
    }

    /// The next cap after a plan found under `cap` did not fit by `by`.
    fn overflowed(&mut self, cap: Bytes, by: Bytes, largest: Bytes) -> Option<Bytes> {
        self.over = Some(self.over.map_or(cap, |over| over.min(cap)));
        let smaller = cap.saturating_sub(by);
        if self.short.is_some_and(|short| smaller <= short) { self.between(largest) } else { Some(smaller) }
    }

    fn between(&self, largest: Bytes) -> Option<Bytes> {
        let (short, over) = (self.short?, self.over?);
        let apart = over.saturating_sub(short);
        (apart.get() > largest.get() / 8).then_some(short + Bytes(apart.get() / 2))
    }
}

fn refine(
    problem: &StepProblem,
    options: &StepOptions<'_>,
    staging: Option<Bytes>,
    clock: &Clock,
) -> Result<Option<Round>, StepFailure> {
    let mut room = chain_room(problem);
    room.host = room.host.saturating_sub(staging.unwrap_or_default());
    if staging.is_none() {
        room.nvme = Bytes::ZERO;
    }
    let largest = problem.boundary_bytes.iter().copied().max().unwrap_or_default();
    // Boundaries pass through a buffer at least, set aside or not.
    let buffers = staging.map_or(Bytes::ZERO, |bytes| bytes.max(largest));
    let mut windows = Windows { staging: buffers, ..problem.windows() };
    let mut best: Option<Round> = None;
    let (mut tried, mut refinements, mut own) = (Tried::default(), 0, false);
    for round in 0..MOST_ROUNDS {
        if round > 0 && clock.is_over() || refinements > MOST_REFINEMENTS {
            break;
        }
        let chain = problem.keep_chain(&room, &windows);
        let solution = solve(&chain, &clock.share(&options.solve))?;
        let Some(schedule) = to_schedule(problem, &solution, &chain) else {
            // The chain counts boundaries on their way with caution: the layout has the last word on what fits.
            let cautious = chain.cpu_budget_bytes + chain.nvme_budget_bytes >= largest;
            if own || solution.status != Status::Infeasible || !cautious {
                break;
            }
            windows.slack = Bytes::ZERO;
            let Some(cap) = tried.found_none(room.hbm, largest) else { break };
            room.hbm = cap;
            continue;
        };
        let (schedule, verified) = match carry_out(problem, &schedule, options.prefetch) {
            Ok(found) => found,
            Err(VerifyError::OverBudget { tier, needed, budget, fixed }) => {
                let refused = VerifyError::OverBudget { tier, needed, budget, fixed };
                let mut over = needed - budget;
                // From what boundaries take: room that no whole one fills would hide a small overflow.
                let taken = solution.evaluation.as_ref().map_or(Bytes::ZERO, |e| e.bytes.get(tier));
                if let Some((schedule, verified)) = repaired(problem, &schedule, refused, options.prefetch) {
                    offer(&mut best, changed(problem, solution, chain, schedule, verified));
                }
                if round >= 2 && tier == Tier::Hbm {
                    // Small overflows that follow one another have a cause that the chain does not see: leave it room.
                    over += largest;
                }
                if tier != Tier::Hbm {
                    let smaller = taken.min(room.get(tier)).saturating_sub(over);
                    if taken == Bytes::ZERO {
                        break;
                    }
                    *room.get_mut(tier) = smaller;
                } else if windows.slack == Bytes::ZERO && tried.short.is_none() {
                    // Most often a boundary that is half on its way: nothing that the turn would have to make room for.
                    tried.over = Some(room.hbm);
                    windows.slack = over;
                } else {
                    let Some(cap) = tried.overflowed(room.hbm, over, largest) else { break };
                    room.hbm = cap;
                }
                continue;
            }
            Err(other) => return Err(other.into()),
        };
        own = true;
        let predicted = predict(problem, &schedule, &solution, &chain);
        let simulated = verified.promise.step_s;
        let gap = if predicted.get() > 0.0 { simulated.get() / predicted.get() - 1.0 } else { 0.0 };
        correct(&mut windows, problem, &schedule, &verified, &solution, &chain, gap);
        let prediction = Prediction { step_s: predicted, gap, refinements };
        let solution = StepSolution { schedule, verified, solution, chain };
        offer(&mut best, Round { solution, prediction });
        refinements += 1;
        if gap.abs() <= NEAR {
            // Boundaries and streamed weights on their way are counted with caution: where the layout has room that the chain did not see, it
            // gets that once.
            let Some(b) = best.as_ref().filter(|_| tried.raised == 0) else { break };
            let more = unused(problem, &b.solution.verified);
            if more < largest {
                break;
            }
            tried.raised = MOST_RAISES;
            room.hbm += more;
        }
    }
    Ok(best)
}

fn offer(best: &mut Option<Round>, found: Round) {
    if best.as_ref().is_none_or(|b| better(&found, b)) {
        *best = Some(found);
    }
}

/// A plan that is no longer the chain's own.
fn changed(
    problem: &StepProblem,
    solution: Solution,
    chain: CostChain,
    schedule: Schedule,
    verified: Verified,
) -> Round {
    let found = StepSolution { schedule: schedule.clone(), verified: verified.clone(), solution, chain };
    let solution = adopt(problem, found, schedule, verified, OVERFLOWED);
    let simulated = solution.verified.promise.step_s;
    let none = Prediction { step_s: simulated, gap: 0.0, refinements: 0 };
    let prediction = solution.schedule.solve.prediction.unwrap_or(none);
    Round { solution, prediction }
}

/// Where the operations showed the chain wrong about time, its windows become longer or its links slower.
pub(crate) fn correct(
    windows: &mut Windows,
    problem: &StepProblem,
    schedule: &Schedule,
    verified: &Verified,
    solution: &Solution,
    chain: &CostChain,
    gap: f64,
) {
    let Some(evaluation) = &solution.evaluation else { return };
    if gap <= 0.0 {
        // Time to spare: the loss is a window too where writes may run on, and each layer's backward has its measured length.
        let Windows { rates, slack, staging, .. } = *windows;
        *windows = Windows { rates, slack, staging, ..actual_windows(problem, schedule) };
        return;
    }
    let exposed = verified.timeline.exposed();
    let (seen, said) = (
        [exposed.d2h, exposed.h2d, exposed.nvme_write, exposed.nvme_read].map(Seconds::as_ms),
        [
            evaluation.exposed_ms.d2h,
            evaluation.exposed_ms.h2d,
            evaluation.exposed_ms.nvme_write,
            evaluation.exposed_ms.nvme_read,
        ],
    );
    let rates = &mut windows.rates;
    let links = [&mut rates.d2h, &mut rates.h2d, &mut rates.nvme_write, &mut rates.nvme_read];
    let forward: f64 = chain.layer_window_ms.iter().sum();
    let backward: f64 = windows.backward_ms.iter().sum();
    let lengths = [forward, backward, forward, backward];
    for (((link, seen), said), length) in links.into_iter().zip(seen).zip(said).zip(lengths) {
        let missed = (seen - said).max(0.0);
        if missed > 0.0 && length > 0.0 {
            link.0 *= (1.0 - missed / length).clamp(0.25, 1.0);
        }
    }
}

/// Windows as this plan has them: kept layers save in their forward and run nothing again; blocks recompute before their last layer.
pub(crate) fn actual_windows(problem: &StepProblem, schedule: &Schedule) -> Windows {
    let mut windows = problem.windows();
    let costs = &problem.costs;
    for (l, &keep) in schedule.keep.iter().enumerate() {
        if keep {
            windows.forward_ms[l] = costs.saving_forward[l].as_ms();
            windows.backward_ms[l] = costs.backward[l].as_ms();
        }
    }
    let n = schedule.layers;
    let mut end = n;
    for i in (0..n).rev() {
        if schedule.placement[i] != Placement::Recompute {
            end = i;
        } else if let Some(window) = windows.backward_ms.get_mut(end - 1) {
            *window += costs.forward[i - 1].as_ms();
        }
    }
    if let Some(last) = windows.forward_ms.last_mut() {
        *last += costs.epilogue.as_ms();
    }
    windows
}

fn to_schedule(problem: &StepProblem, solution: &Solution, chain: &CostChain) -> Option<Schedule> {
    let mut schedule = solution.schedule(chain)?;
    schedule.keep = solution.keep.as_ref()?.iter().map(|k| *k == Keep::Hbm).collect();
    schedule.shape_hash = lazy_model::schedule::shape_hash(&problem.boundary_bytes);
    Some(schedule)
}

/// What the chain's objective says of the step: the plan's arithmetic (streamed weights and gradients included, no boundary leaving
/// HBM), and the exposed time of boundaries.
pub(crate) fn predict(
    problem: &StepProblem,
    schedule: &Schedule,
    solution: &Solution,
    chain: &CostChain,
) -> Seconds {
    let mut still = schedule.clone();
    still.transfers = None;
    for placement in &mut still.placement {
        if matches!(placement, Placement::Host | Placement::Nvme) {
            *placement = Placement::Hbm;
        }
    }
    let alone = StepPlan::with_sizes(&still, &problem.sizes())
        .map_or(problem.optimizer, |plan| problem.step_time(&plan));
    let exposed = solution.evaluation.as_ref().map_or(0.0, |e| e.exposed_ms.total());
    let boundaries = Seconds::from_ms((exposed - mandatory_overflow_ms(chain)).max(0.0));
    alone + problem.passes(boundaries, boundaries)
}

/// The least predicted step time of any plan of `chain`, where the solver proved a bound: the least arithmetic, and what the bound leaves when the weights of the objective are taken off.
pub(crate) fn least_step(problem: &StepProblem, chain: &CostChain, solution: &Solution) -> Option<Seconds> {
    let bound = solution.bound_ms?;
    let nvme = if chain.nvme_budget_bytes > Bytes::ZERO { chain.nvme_tiebreak } else { 0.0 };
    let weights = (chain.checkpoint_penalty + nvme) * (chain.layers + 1) as f64;
    let recomputed = (bound - weights - mandatory_overflow_ms(chain)).max(0.0);
    let pass = problem.costs.least_pass() + Seconds::from_ms(recomputed);
    Some(problem.passes(pass, pass) + problem.least_optimizer())
}

/// No plan that keeps the caps has a shorter step, simulated or run: arithmetic with the least recomputation that the caps allow, as if links
/// took no time, and the copies for which HBM has no room but between two layers. `None` where the time limit came before a bound.
///
/// The chain it comes from counts nothing that operations do not hold: no slack, no streamed weights, forward workspaces that no backward
/// exceeds, NVMe as host RAM, and a boundary less beside each backward where boundaries may be on their way.
///
/// # Errors
/// When the solver refuses the chain.
pub fn step_bound(problem: &StepProblem, options: &SolveOptions) -> Result<Option<Seconds>, SolverError> {
    let chain = relaxed(problem);
    let solution = solve(&chain, &SolveOptions { tie_break: TieBreak::Weighted, ..*options })?;
    let waits = waits_for_copies(problem);
    Ok(least_step(problem, &chain, &solution).map(|step| step + problem.passes(waits, waits)))
}

/// How long arithmetic waits for copies in where HBM has no room for what the next layer reads while a layer runs backward.
///
/// While layer `l` runs backward, HBM holds its input, two gradients, internals and workspace. Where the rest is too small for any of the
/// boundaries below, boundary `l` is the source of its block and the source of the next one is not there: it is copied in when the
/// backward of `l` has ended, and nothing can run until it has come.
fn waits_for_copies(problem: &StepProblem) -> Seconds {
    let mut smallest = None;
    let mut waits = Seconds::ZERO;
    for l in 1..problem.saved_bytes.len() {
        let below = problem.boundary_bytes[l - 1];
        let least = smallest.map_or(below, |s: Bytes| s.min(below));
        smallest = Some(least);
        let room = problem.budgets.hbm.saturating_sub(problem.fixed.hbm + problem.sizes().backward_hbm(l));
        if room < least {
            waits += problem.costs.links.h2d.time(least);
        }
    }
    waits
}

/// Whether no plan keeps the caps, however it is carried out, as far as that is quickly told.
pub(crate) fn nothing_fits(problem: &StepProblem, options: &SolveOptions) -> bool {
    let until = options.time_limit.and_then(|t| Duration::try_from_secs_f64(t.get()).ok());
    let deadline = until.and_then(|t| Instant::now().checked_add(t));
    feasible(&relaxed(problem), deadline) == Some(false)
}

/// A chain that counts nothing which operations do not hold: where it has no plan, the step has none.
pub(crate) fn relaxed(problem: &StepProblem) -> CostChain {
    let mut free = problem.clone();
    let away = chain_room(problem).host + problem.budgets.nvme;
    free.budgets.nvme = Bytes::ZERO;
    free.streamed = Streamed::default();
    let mut windows = free.windows();
    windows.rates =
        LinkRates { d2h: AT_ONCE, h2d: AT_ONCE, nvme_write: AT_ONCE, nvme_read: AT_ONCE, ..windows.rates };
    let room = TierBytes { hbm: problem.budgets.hbm, host: away, nvme: Bytes::ZERO };
    let mut chain = free.keep_chain(&room, &windows);
    // The chain counts a copy in the position before its block, where operations may wait with it.
    let early = if away > Bytes::ZERO { problem.boundary_bytes.iter().copied().max() } else { None };
    let early = early.unwrap_or_default();
    if let Some(backward) = &mut chain.layer_backward_workspace_bytes {
        backward.iter_mut().for_each(|bytes| *bytes = bytes.saturating_sub(early));
    }
    let own = |l: usize| {
        let backward = chain.layer_backward_workspace_bytes.as_ref().map_or(Bytes::ZERO, |list| list[l]);
        problem.saved_bytes[l] + backward
    };
    // A block may be shorter than the longest: a layer below it must not count for more than the layer itself.
    let least = (0..problem.saved_bytes.len()).map(own).min().unwrap_or_default();
    if let Some(forward) = &mut chain.layer_forward_workspace_bytes {
        forward.iter_mut().for_each(|bytes| *bytes = (*bytes).min(least));
    }
    chain
}

/// What streamed weights and sums of gradients stick out of the windows whatever is placed where.
fn mandatory_overflow_ms(chain: &CostChain) -> f64 {
    let windows = chain.layer_backward_window_ms.as_ref().unwrap_or(&chain.layer_window_ms);
    let over = windows
        .iter()
        .zip(&chain.param_h2d_bytes)
        .map(|(window, &bytes)| (chain.h2d_bytes_per_s.time(bytes).as_ms() - window).max(0.0));
    over.sum()
}

/// A plan that was found without keep, with internals kept from the last layer down as far as HBM reaches.
pub(crate) fn keep_more(problem: &StepProblem, mut found: StepSolution) -> StepSolution {
    (found.schedule, found.verified) = keep_more_of(problem, (found.schedule, found.verified));
    found
}

/// The same of a plan alone.
pub(crate) fn keep_more_of(problem: &StepProblem, mut best: Carried) -> Carried {
    for l in (0..best.0.layers).rev() {
        let mut tried = best.0.clone();
        tried.keep[l] = true;
        if let Ok(verified) = problem.verify(&tried)
            && verified.promise.step_s < best.1.promise.step_s
        {
            best = (promised(tried, &verified), verified);
        }
    }
    best
}
