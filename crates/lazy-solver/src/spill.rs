//! Plans that need little memory, made by rule, and repairs of plans that need too much: what there is where the chain of a step has no
//! plan that can be laid out.

use lazy_model::{Bytes, Placement, Schedule, StepProblem, Tier, VerifyError};

use crate::carry::carry_out;
use crate::physical::{Clock, chain_room, keep_more_of};
use crate::polish::{Carried, blocks_stay_short};

/// Decisions that are taken back before a plan is given up.
const MOST_REPAIRS: usize = 8;
/// Longest blocks that are tried.
const MOST_LAYERS: usize = 8;
/// Buffers in host RAM left free for what is on its way to a drive.
const STAGING: [usize; 3] = [2, 1, 0];

/// The fastest of these plans that keep the caps: blocks of equal length, the topmost saved boundaries in HBM as far as that fits, of the
/// others the lowest on NVMe where host RAM is full; then internals kept from the last layer down.
pub(crate) fn spilled(problem: &StepProblem, prefetch: Option<usize>, clock: &Clock) -> Option<Carried> {
    let step = |carried: &Carried| carried.1.promise.step_s;
    let mut best: Option<Carried> = None;
    for block in 1..=longest(problem) {
        if best.is_some() && clock.is_over() {
            break;
        }
        let Some(found) = fullest(problem, block, prefetch) else { continue };
        let found = keep_more_of(problem, found);
        if best.as_ref().is_none_or(|b| step(&found) < step(b)) {
            best = Some(found);
        }
    }
    best
}

/// The first of these plans that keeps the caps.
pub(crate) fn any_spilled(problem: &StepProblem, prefetch: Option<usize>) -> Option<Carried> {
    (1..=longest(problem)).find_map(|block| {
        let shelf = Shelf::new(problem, block);
        shelf.carried(shelf.least_in_hbm(), prefetch)
    })
}

fn longest(problem: &StepProblem) -> usize {
    problem.max_segment.min(problem.saved_bytes.len()).min(MOST_LAYERS)
}

/// With blocks of this length, the plan with the most boundaries in HBM, by bisection.
fn fullest(problem: &StepProblem, block: usize, prefetch: Option<usize>) -> Option<Carried> {
    let shelf = Shelf::new(problem, block);
    let mut fit = shelf.least_in_hbm();
    let mut best = shelf.carried(fit, prefetch)?;
    let mut too_many = shelf.saved + 1;
    while too_many - fit > 1 {
        let middle = fit + (too_many - fit) / 2;
        match shelf.carried(middle, prefetch) {
            Some(found) => {
                fit = middle;
                if found.1.promise.step_s <= best.1.promise.step_s {
                    best = found;
                }
            }
            None => too_many = middle,
        }
    }
    Some(best)
}

/// Regular plans of one block length.
struct Shelf<'a> {
    problem: &'a StepProblem,
    block: usize,
    /// Boundaries that are saved, but for the last.
    saved: usize,
    /// How many of them host RAM and NVMe hold.
    host: usize,
    nvme: usize,
}

impl Shelf<'_> {
    fn new(problem: &StepProblem, block: usize) -> Shelf<'_> {
        let saved = problem.saved_bytes.len().div_ceil(block);
        let room = chain_room(problem);
        let largest = problem.boundary_bytes.iter().copied().max().unwrap_or_default().align_up(4096);
        let fits =
            |room: Bytes| room.get().checked_div(largest.get()).map_or(saved, |n| saved.min(n as usize));
        // What goes to a drive passes through host RAM.
        let nvme = if room.host >= largest { fits(room.nvme) } else { 0 };
        Shelf { problem, block, saved, host: fits(room.host), nvme }
    }

    /// The fewest that have to stay in HBM.
    fn least_in_hbm(&self) -> usize {
        self.saved.saturating_sub(self.host + self.nvme)
    }

    /// The plan with that many in HBM, with as much host RAM left for staging as it needs.
    fn carried(&self, in_hbm: usize, prefetch: Option<usize>) -> Option<Carried> {
        let away = self.saved - in_hbm;
        let mut rooms =
            if away <= self.host { vec![away] } else { STAGING.map(|n| self.host.saturating_sub(n)).into() };
        rooms.dedup();
        let rooms = rooms.into_iter().filter(|in_host| away - in_host <= self.nvme);
        rooms
            .into_iter()
            .find_map(|in_host| carry_out(self.problem, &self.schedule(in_hbm, in_host), prefetch).ok())
    }

    fn schedule(&self, in_hbm: usize, in_host: usize) -> Schedule {
        let mut schedule = Schedule::named("spill", &self.problem.boundary_bytes, false);
        let n = schedule.layers;
        schedule.placement[..n].fill(Placement::Recompute);
        for (number, i) in (0..n).step_by(self.block).enumerate() {
            schedule.placement[i] = match self.saved - number {
                above if above <= in_hbm => Placement::Hbm,
                above if above <= in_hbm + in_host => Placement::Host,
                _ => Placement::Nvme,
            };
        }
        schedule
    }
}

/// `schedule`, which `error` refuses, with as few decisions taken back as make it fit; not many are tried.
pub(crate) fn repaired(
    problem: &StepProblem,
    schedule: &Schedule,
    mut error: VerifyError,
    prefetch: Option<usize>,
) -> Option<Carried> {
    let mut tried = Schedule { transfers: None, ..schedule.clone() };
    for _ in 0..MOST_REPAIRS {
        let VerifyError::OverBudget { tier, .. } = error else { return None };
        if !give_way(problem, &mut tried, tier) {
            return None;
        }
        match carry_out(problem, &tried, prefetch) {
            Ok(carried) => return Some(carried),
            Err(next) => error = next,
        }
    }
    None
}

/// Takes something out of `tier`: of HBM the internals that are cheapest to have again, then the lowest boundary; of others their lowest
/// boundary. Whether there was anything.
fn give_way(problem: &StepProblem, schedule: &mut Schedule, tier: Tier) -> bool {
    let costs = &problem.costs;
    if tier == Tier::Hbm {
        let kept = (0..schedule.layers).filter(|&l| schedule.keep[l]);
        if let Some(l) = kept.min_by(|&l, &m| costs.forward[l].get().total_cmp(&costs.forward[m].get())) {
            schedule.keep[l] = false;
            return true;
        }
    }
    let room = chain_room(problem);
    let used = |tier: Tier| -> Bytes {
        let there = schedule.placement[..schedule.layers].iter().zip(&problem.boundary_bytes);
        there.filter(|(p, _)| p.tier() == Some(tier)).map(|(_, bytes)| bytes.align_up(4096)).sum()
    };
    let slower: &[Placement] = match tier {
        Tier::Hbm => &[Placement::Host, Placement::Nvme],
        Tier::Host => &[Placement::Nvme],
        Tier::Nvme => &[],
    };
    for i in (0..schedule.layers).filter(|&i| schedule.placement[i].tier() == Some(tier)) {
        let bytes = problem.boundary_bytes[i].align_up(4096);
        let fits = |p: &&Placement| p.tier().is_some_and(|tier| used(tier) + bytes <= room.get(tier));
        let elsewhere = slower.iter().find(fits).copied();
        let skipped = || {
            let may = i > 0 && blocks_stay_short(schedule, i, problem.max_segment);
            may.then_some(Placement::Recompute)
        };
        if let Some(placement) = elsewhere.or_else(skipped) {
            schedule.placement[i] = placement;
            return true;
        }
    }
    false
}
