//! The last word of the simulation: plans made by hand and small changes are held against the chain's optimum, the fastest one that
//! keeps the caps is returned, and whatever it is, it carries a prediction.

use lazy_model::keep::{Keep, evaluate_keep};
use lazy_model::schedule::Prediction;
use lazy_model::{
    Bytes, CostChain, Evaluation, LayerIndex, Placement, Schedule, Seconds, StepProblem, Tier, TierBytes,
    Verified,
};

use crate::baselines::step_candidates;
use crate::carry::{carry_out, promised};
use crate::physical::{
    Clock, MOST_REFINEMENTS, NEAR, actual_windows, chain_room, correct, keep_more, predict,
};
use crate::search::tolerance;
use crate::solve::{Method, Solution, Status};
use crate::step::{StepOptions, StepSolution, best_execution};

/// A change must save this share of the step.
const WORTH_IT: f64 = 1e-4;
/// Layers laid out while changes are tried. Small steps get all of them, long ones, whose optimum is nearer, a few.
const MOST_LAYERS: usize = 600;
/// Why a plan is not proven: see [`Solution::message`].
pub(crate) const OVERFLOWED: &str = "not proven: the optimum of the chain, which counts memory by position, does not fit when it is laid \
    out, and the plan is one near it that does";
/// The same where the chain has no plan at all.
pub(crate) const NO_CHAIN: &str = "not proven: under caps as tight as these the chain, which counts transfers with caution, has no plan, \
    and the plan is the fastest of those made by rule and their neighbours";
/// The same where the simulation liked another plan better.
const CHANGED: &str =
    "not proven: the plan is simulated to be faster than the chain's optimum, which is all that was proven";

/// Changes of two or three decisions that are looked at.
const MOST_CHANGES: usize = 1_000;

/// A plan, carried out.
pub(crate) type Carried = (Schedule, Verified);

/// The fastest of the plan found, `reference` (a plan without keep, where one was worth finding), the plans made by hand, and what
/// small changes make of the best of them.
pub(crate) fn polish(
    problem: &StepProblem,
    options: &StepOptions<'_>,
    found: StepSolution,
    reference: Option<StepSolution>,
    clock: &Clock,
) -> StepSolution {
    let mut best = None;
    let mut time = found.verified.promise.step_s;
    let mut consider = |carried: Option<Carried>, best: &mut Option<Carried>| {
        if let Some(carried) = carried.filter(|c| faster(&c.1, time, 0.0)) {
            time = carried.1.promise.step_s;
            *best = Some(carried);
        }
    };
    if let Some(reference) = reference {
        let StepSolution { schedule, verified, .. } = keep_more(problem, reference);
        consider(Some((schedule, verified)), &mut best);
    }
    known(problem, options).for_each(|carried| consider(Some(carried), &mut best));
    for (_, schedule) in step_candidates(problem, &found.chain) {
        let so_far = best.as_ref().map_or(&found.verified, |b| &b.1).promise.step_s;
        // Even when time is up: that no plan made by hand is faster is a promise, and they are few.
        if is_worth(problem, &schedule, so_far, 0.0) {
            consider(best_execution(problem, &schedule, options.prefetch).ok(), &mut best);
        }
    }
    let start = best.clone().unwrap_or_else(|| (found.schedule.clone(), found.verified.clone()));
    best = climb(problem, options, start, clock).or(best);
    match best {
        Some((schedule, verified)) => {
            let why = found.solution.message.clone().unwrap_or_else(|| CHANGED.into());
            adopt(problem, found, schedule, verified, &why)
        }
        None => nearer(problem, found),
    }
}

/// Those of the known plans that keep the caps and the limit of blocks, as they are.
pub(crate) fn known<'a>(
    problem: &'a StepProblem,
    options: &StepOptions<'a>,
) -> impl Iterator<Item = Carried> + 'a {
    let list = if options.prefetch.is_none() { options.known } else { &[] };
    let short = |schedule: &&Schedule| {
        let skipped = schedule.placement.split(|p| *p != Placement::Recompute).map(<[Placement]>::len);
        skipped.max().unwrap_or_default() < problem.max_segment
    };
    list.iter().filter(short).filter_map(|schedule| {
        let verified = problem.verify(schedule).ok()?;
        Some((promised(schedule.clone(), &verified), verified))
    })
}

/// The fastest plan made by hand that fits, where the search found none.
pub(crate) fn by_hand(problem: &StepProblem, options: &StepOptions<'_>) -> Option<StepSolution> {
    let chain = problem.keep_chain(&chain_room(problem), &problem.windows());
    let carried = step_candidates(problem, &chain)
        .into_iter()
        .filter_map(|(_, schedule)| best_execution(problem, &schedule, options.prefetch).ok());
    let step = |carried: &Carried| carried.1.promise.step_s.get();
    by_rule(problem, carried.min_by(|a, b| step(a).total_cmp(&step(b))))
}

/// A plan that no search found.
pub(crate) fn by_rule(problem: &StepProblem, carried: Option<Carried>) -> Option<StepSolution> {
    let (schedule, verified) = carried?;
    let chain = problem.keep_chain(&chain_room(problem), &problem.windows());
    let solution = Solution {
        status: Status::Feasible,
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
    let found = StepSolution { schedule: schedule.clone(), verified: verified.clone(), solution, chain };
    Some(adopt(problem, found, schedule, verified, NO_CHAIN))
}

/// The same plan, where its prediction is far from the simulation with the nearest that the objective can give.
fn nearer(problem: &StepProblem, mut found: StepSolution) -> StepSolution {
    let far = |p: &Option<Prediction>| p.map_or(f64::INFINITY, |p| p.gap.abs());
    let now = found.schedule.solve.prediction;
    if far(&now) > NEAR {
        let again = prediction(problem, &found.schedule, &found.verified, &found.solution, &found.chain);
        if far(&again) < far(&now) {
            found.schedule.solve.prediction = again;
        }
    }
    found
}

/// By more than that share, and than rounding.
fn faster(verified: &Verified, than: Seconds, share: f64) -> bool {
    verified.promise.step_s.get() < than.get() * (1.0 - share - 1e-9)
}

/// Whether `schedule` is faster than a step of that time if it never waits.
fn is_worth(problem: &StepProblem, schedule: &Schedule, than: Seconds, share: f64) -> bool {
    arithmetic(problem, schedule).get() < than.get() * (1.0 - share - 1e-9)
}

/// Time of a step's arithmetic alone: no plan is faster than its own.
pub(crate) fn arithmetic(problem: &StepProblem, schedule: &Schedule) -> Seconds {
    let costs = &problem.costs;
    let mut pass = costs.prologue + costs.epilogue + costs.prologue_backward;
    for l in 0..schedule.layers {
        pass += costs.layer(LayerIndex(l), schedule.keep[l]);
        if l > 0 && schedule.placement[l] == Placement::Recompute {
            pass += costs.forward[l - 1];
        }
    }
    problem.passes(pass, pass) + problem.least_optimizer()
}

/// Takes each change that makes the step faster, until none does or enough were tried. Nothing where none does.
fn climb(problem: &StepProblem, options: &StepOptions<'_>, start: Carried, clock: &Clock) -> Option<Carried> {
    let (mut best, mut improved) = (start, false);
    let mut left = MOST_LAYERS / best.0.layers.max(1);
    'again: loop {
        for changed in changes(problem, &best) {
            if left == 0 || clock.is_half_gone() {
                break 'again;
            }
            if !is_worth(problem, &changed, best.1.promise.step_s, WORTH_IT) {
                continue;
            }
            left -= 1;
            if let Ok(carried) = carry_out(problem, &changed, options.prefetch)
                && faster(&carried.1, best.1.promise.step_s, WORTH_IT)
            {
                (best, improved) = (carried, true);
                continue 'again;
            }
        }
        break;
    }
    improved.then_some(best)
}

/// Plans up to three decisions from this one, the likeliest first.
fn changes(problem: &StepProblem, (schedule, verified): &Carried) -> Vec<Schedule> {
    let n = schedule.layers;
    let with = |edits: &[Edit]| {
        let mut changed = Schedule { transfers: None, ..schedule.clone() };
        edits.iter().for_each(|edit| edit.make(&mut changed));
        changed
    };
    let mut single: Vec<Edit> = (0..n).filter(|&l| !schedule.keep[l]).map(|l| Edit::Keep(l, true)).collect();
    let elsewhere = |i: usize| {
        let tiers = [Placement::Hbm, Placement::Host, Placement::Nvme];
        let placed = schedule.placement[i];
        tiers.into_iter().filter(move |t| *t != placed).map(move |t| Edit::Place(i, t))
    };
    single.extend((0..n).filter(|&i| schedule.placement[i] == Placement::Recompute).flat_map(elsewhere));
    let waits = verified.timeline.exposed().total() > Seconds::ZERO;
    let dropped: Vec<Edit> = (1..n)
        .filter(|&i| blocks_stay_short(schedule, i, problem.max_segment))
        .map(|i| Edit::Place(i, Placement::Recompute))
        .collect();
    if waits {
        single.extend((0..n).filter(|&i| schedule.placement[i] != Placement::Recompute).flat_map(elsewhere));
        single.extend(&dropped);
        single.extend((0..n).filter(|&l| schedule.keep[l]).map(|l| Edit::Keep(l, false)));
    }
    let mut list: Vec<Schedule> = single.iter().map(|edit| with(&[*edit])).collect();
    // The most room that boundaries can make for one more layer's internals.
    let emptied = emptied(problem, schedule);
    list.extend((0..n).filter(|&l| !schedule.keep[l]).map(|l| {
        let mut changed = emptied.clone();
        Edit::Keep(l, true).make(&mut changed);
        changed
    }));
    // Room for what a first change wants is made by others.
    let room: Vec<Edit> = (0..n)
        .filter(|&i| schedule.placement[i] != Placement::Recompute)
        .flat_map(elsewhere)
        .chain((0..n).filter(|&l| schedule.keep[l]).map(|l| Edit::Keep(l, false)))
        .chain(dropped)
        .collect();
    let pairs = single.iter().flat_map(|&first| room.iter().map(move |&second| [first, second]));
    let triples = pairs.clone().flat_map(|[a, b]| {
        let later = room.iter().filter(move |c| c.at() > b.at());
        later.map(move |&c| [a, b, c])
    });
    let apart = |edits: &[Edit]| edits[1..].iter().all(|edit| edit.at() != edits[0].at());
    list.extend(pairs.filter(|e| apart(e)).take(MOST_CHANGES).map(|e| with(&e)));
    list.extend(triples.filter(|e| apart(e)).take(MOST_CHANGES).map(|e| with(&e)));
    list
}

/// The same plan with its boundaries out of HBM as far as the other tiers hold them: the topmost in host RAM, the lowest on NVMe.
fn emptied(problem: &StepProblem, schedule: &Schedule) -> Schedule {
    let mut emptied = Schedule { transfers: None, ..schedule.clone() };
    let always = problem.always();
    let mut host = problem.budgets.host.saturating_sub(always.host);
    let mut nvme = problem.budgets.nvme.saturating_sub(always.nvme);
    for i in (0..schedule.layers).rev().filter(|&i| schedule.placement[i] != Placement::Recompute) {
        let size = problem.boundary_bytes[i];
        emptied.placement[i] = if size <= host {
            host = host - size;
            Placement::Host
        } else if size <= nvme {
            nvme = nvme - size;
            Placement::Nvme
        } else {
            Placement::Hbm
        };
    }
    emptied
}

/// One decision made differently.
#[derive(Clone, Copy)]
enum Edit {
    Keep(usize, bool),
    Place(usize, Placement),
}

impl Edit {
    fn make(self, schedule: &mut Schedule) {
        match self {
            Edit::Keep(l, keep) => schedule.keep[l] = keep,
            Edit::Place(i, placement) => schedule.placement[i] = placement,
        }
    }

    /// What is decided: a layer or a boundary.
    fn at(self) -> (bool, usize) {
        match self {
            Edit::Keep(l, _) => (true, l),
            Edit::Place(i, _) => (false, i),
        }
    }
}

/// Whether saved boundary `i` can be recomputed with blocks of at most `limit` layers.
pub(crate) fn blocks_stay_short(schedule: &Schedule, i: usize, limit: usize) -> bool {
    let skipped = |p: &&Placement| **p == Placement::Recompute;
    let below = schedule.placement[..i].iter().rev().take_while(skipped).count();
    let above = schedule.placement[i + 1..].iter().take_while(skipped).count();
    schedule.placement[i] != Placement::Recompute && below + above + 2 <= limit
}

/// `found` with another plan in it, as far as its chain has something to say of that, and why that one is not proven.
pub(crate) fn adopt(
    problem: &StepProblem,
    found: StepSolution,
    mut schedule: Schedule,
    verified: Verified,
    why: &str,
) -> StepSolution {
    let keep: Vec<Keep> =
        schedule.keep.iter().map(|&k| if k { Keep::Hbm } else { Keep::Recompute }).collect();
    let keeps = found.chain.hbm_cap_bytes.is_some();
    let chain = match keeps {
        true => found.chain,
        false => problem.keep_chain(&chain_room(problem), &problem.windows()),
    };
    // Where the plan is one of the chain's own that is as good as its optimum, what was proven holds for it.
    let own = evaluate_keep(&chain, &schedule.placement, &keep).ok();
    let proven = keeps
        && found.solution.status == Status::Optimal
        && own
            .as_ref()
            .zip(found.solution.objective_ms)
            .is_some_and(|(own, least)| own.objective_ms <= least + tolerance(least));
    let evaluation = own.or_else(|| judge(&chain, &schedule.placement, &keep));
    let objective_ms = evaluation.as_ref().map(|e| e.objective_ms);
    let bound_ms = found.solution.bound_ms.filter(|_| proven);
    let solution = Solution {
        status: if proven { Status::Optimal } else { Status::Feasible },
        placement: Some(schedule.placement.clone()),
        keep: Some(keep),
        evaluation,
        objective_ms,
        bound_ms,
        gap: found.solution.gap.filter(|_| proven),
        message: (!proven).then(|| why.into()),
        ..found.solution
    };
    schedule.solve.status = solution.status.name().into();
    schedule.solve.method.clone_from(&found.schedule.solve.method);
    schedule.solve.solver.clone_from(&found.schedule.solve.solver);
    (schedule.solve.objective_ms, schedule.solve.bound_ms) = (objective_ms, bound_ms);
    schedule.solve.solve_s = found.schedule.solve.solve_s;
    schedule.chain_hash = chain.hash();
    schedule.promise = Some(verified.promise);
    schedule.solve.prediction = prediction(problem, &schedule, &verified, &solution, &chain);
    StepSolution { schedule, verified, solution, chain }
}

/// A plan by a chain's rules, but for its caps: those that count have been verified.
fn judge(chain: &CostChain, placement: &[Placement], keep: &[Keep]) -> Option<Evaluation> {
    let all = Bytes(1 << 62);
    let open = CostChain {
        locks: None,
        hbm_cap_bytes: Some(all),
        gpu_budget_bytes: all,
        cpu_budget_bytes: all,
        nvme_budget_bytes: all,
        ..chain.clone()
    };
    evaluate_keep(&open, placement, keep).ok()
}

/// What the objective says of a plan that it did not choose: by windows as the plan has them, and links corrected by what they missed.
fn prediction(
    problem: &StepProblem,
    schedule: &Schedule,
    verified: &Verified,
    solution: &Solution,
    chain: &CostChain,
) -> Option<Prediction> {
    let room = TierBytes { hbm: problem.budgets.hbm, ..TierBytes::default() };
    let mut windows = actual_windows(problem, schedule);
    let mut nearest: Option<Prediction> = None;
    let mut solution = solution.clone();
    let mut judged = chain.clone();
    for refinements in 0..=MOST_REFINEMENTS {
        let step_s = predict(problem, schedule, &solution, &judged);
        let gap = if step_s.get() > 0.0 { verified.promise.step_s.get() / step_s.get() - 1.0 } else { 0.0 };
        if nearest.as_ref().is_none_or(|n| gap.abs() < n.gap.abs()) {
            nearest = Some(Prediction { step_s, gap, refinements });
        }
        if gap.abs() <= NEAR {
            break;
        }
        if refinements > 0 {
            correct(&mut windows, problem, schedule, verified, &solution, &judged, gap);
        }
        judged = problem.keep_chain(&room, &windows);
        solution.evaluation = judge(&judged, &schedule.placement, solution.keep.as_deref()?);
    }
    nearest
}

/// Whether a plan that keeps no internals might be faster than this one, or waits less.
pub(crate) fn reference_may_help(problem: &StepProblem, found: &StepSolution) -> bool {
    let step = found.verified.promise.step_s;
    let none = Schedule::named("checkpoint", &problem.boundary_bytes, false);
    let waits = step.get() > arithmetic(problem, &found.schedule).get() * (1.0 + WORTH_IT);
    waits || is_worth(problem, &none, step, 0.0)
}

/// What the exact layout leaves of HBM.
pub(crate) fn unused(problem: &StepProblem, verified: &Verified) -> Bytes {
    problem.budgets.hbm.saturating_sub(verified.promise.peak_bytes.get(Tier::Hbm))
}
