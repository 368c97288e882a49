//! Why a chain or a step has no plan, and what would help.

use std::cell::Cell;
use std::fmt;
use std::time::{Duration, Instant};

use lazy_model::{Bytes, CostChain, Pool, Schedule, Seconds, StepProblem, Tier, TierBytes};

use crate::error::SolverError;
use crate::keep;
use crate::problem::Goal;
use crate::search::{Found, search};
use crate::solve::{SolveOptions, check, deadline};
use crate::spill::any_spilled;
use crate::step::{StepFailure, StepOptions, solve_step};

/// Steps above what was refused at which larger sizes of a tier are tried first.
const FIRST_PROBE: u64 = 64;
/// A search that ends so near its deadline may have been cut short.
const A_MOMENT: Duration = Duration::from_millis(50);
/// In less no step is planned (s).
const SHORTEST_S: f64 = 0.01;

/// A larger budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Raise {
    /// The tier.
    pub tier: Tier,
    /// What it is.
    pub budget: Bytes,
    /// The least that suffices.
    pub smallest: Bytes,
    /// Whether less is known not to suffice; otherwise time ended the search, and a smaller size might do.
    pub least: bool,
}

/// A change that makes an infeasible chain or step feasible, everything else left as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// A larger budget.
    Budget(Raise),
    /// Larger budgets of several tiers at once, where none alone suffices: none of them can be smaller beside the others.
    Budgets(Vec<Raise>),
    /// A higher `hbm_cap_bytes`.
    HbmCap {
        /// What it is.
        cap: Bytes,
        /// The least that suffices.
        smallest: Bytes,
    },
    /// Longer blocks.
    SegmentLayers {
        /// What the limit is.
        limit: usize,
        /// The least that suffices.
        smallest: usize,
    },
    /// Removing the locks.
    Unlock,
    /// A link that must carry something and has no bandwidth.
    Rate {
        /// The pool.
        pool: Pool,
    },
}

/// A size to be typed into a flag: the same digits rounded down would be refused again.
fn rounded_up(size: Bytes) -> String {
    const GIB: u64 = 1 << 30;
    if size.get() < GIB {
        return format!("{} MiB", size.mib_rounded_up());
    }
    let thousandths = (u128::from(size.get()) * 1000).div_ceil(u128::from(GIB));
    format!("{}.{:03} GiB", thousandths / 1000, thousandths % 1000)
}

impl fmt::Display for Raise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Raise { tier, budget, smallest, least } = self;
        let (to, bytes) = (rounded_up(*smallest), smallest.get());
        if *least {
            return write!(f, "the {tier} budget from {budget} to at least {to} ({bytes} bytes)");
        }
        write!(f, "the {tier} budget from {budget} to {to} ({bytes} bytes), and less might do")
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remedy::Budget(raise) => write!(f, "raise {raise}"),
            Remedy::Budgets(raises) => {
                let each: Vec<String> = raises.iter().map(Raise::to_string).collect();
                write!(f, "raise {}", each.join(" and "))
            }
            Remedy::HbmCap { cap, smallest } => write!(
                f,
                "raise hbm_cap_bytes from {cap} to at least {} ({} bytes)",
                rounded_up(*smallest),
                smallest.get()
            ),
            Remedy::SegmentLayers { limit, smallest } => {
                write!(f, "allow blocks of {smallest} layers (max_segment_layers is {limit})")
            }
            Remedy::Unlock => write!(f, "remove the locks: without them a placement exists"),
            Remedy::Rate { pool } => {
                write!(f, "give {} a rate above zero: every step must move bytes over it", pool.name())
            }
        }
    }
}

/// Finds, for an infeasible chain, each single change that would make it feasible: the smallest sufficient value of each budget and
/// of the block limit, and whether the locks are to blame. Empty when no single change helps (or the time limit came first).
///
/// # Errors
/// As [`solve`](crate::solve()).
pub fn explain(chain: &CostChain, options: &SolveOptions) -> Result<Vec<Remedy>, SolverError> {
    check(chain)?;
    let deadline = deadline(Instant::now(), options)?;
    let silent = silent_links(chain);
    if !silent.is_empty() {
        return Ok(silent);
    }
    let mut remedies = Vec::new();
    if let Some(cap) = chain.hbm_cap_bytes
        && let Some(smallest) = keep::least_bytes(chain, Tier::Hbm, deadline).filter(|s| *s > cap)
    {
        remedies.push(Remedy::HbmCap { cap, smallest });
    }
    for (tier, budget) in [
        (Tier::Hbm, chain.gpu_budget_bytes),
        (Tier::Host, chain.cpu_budget_bytes),
        (Tier::Nvme, chain.nvme_budget_bytes),
    ] {
        if let Some((smallest, least)) = least_bytes(chain, tier, deadline).filter(|s| s.0 > budget) {
            remedies.push(Remedy::Budget(Raise { tier, budget, smallest, least }));
        }
    }
    let limit = chain.max_segment_layers;
    if let Some(smallest) = least_segment(chain, deadline) {
        remedies.push(Remedy::SegmentLayers { limit, smallest });
    }
    if chain.locks.is_some() && feasible(&CostChain { locks: None, ..chain.clone() }, deadline) {
        remedies.push(Remedy::Unlock);
    }
    Ok(remedies)
}

fn silent_links(chain: &CostChain) -> Vec<Remedy> {
    [
        (Pool::D2h, chain.d2h_bytes_per_s, &chain.grad_d2h_bytes),
        (Pool::H2d, chain.h2d_bytes_per_s, &chain.param_h2d_bytes),
    ]
    .into_iter()
    .filter(|(_, rate, mandatory)| rate.get() == 0.0 && mandatory.iter().any(|m| m.get() > 0))
    .map(|(pool, ..)| Remedy::Rate { pool })
    .collect()
}

/// The fewest bytes in `tier` with which some placement keeps all other rules, and whether that is proven.
fn least_bytes(chain: &CostChain, tier: Tier, deadline: Option<Instant>) -> Option<(Bytes, bool)> {
    if chain.hbm_cap_bytes.is_some() {
        // Its HBM is the cap; the budget of boundaries alone rarely binds beside it.
        let least = if tier == Tier::Hbm { None } else { keep::least_bytes(chain, tier, deadline) };
        return least.map(|least| (least, true));
    }
    match search(chain, Goal::BytesIn(tier), deadline) {
        Found::Plan(plan) => {
            // Only the deadline ends a search with a plan before it is proven.
            let late = deadline.is_some_and(|deadline| Instant::now() + A_MOMENT >= deadline);
            Some((plan.evaluation.bytes.get(tier), !late))
        }
        _ => None,
    }
}

fn feasible(chain: &CostChain, deadline: Option<Instant>) -> bool {
    if chain.hbm_cap_bytes.is_some() {
        return keep::feasible(chain, deadline) == Some(true);
    }
    least_bytes(chain, Tier::Hbm, deadline).is_some_and(|(bytes, _)| bytes <= chain.gpu_budget_bytes)
}

/// The smallest block limit above the chain's own that suffices, by bisection: a longer limit allows all that a shorter one does.
fn least_segment(chain: &CostChain, deadline: Option<Instant>) -> Option<usize> {
    let suffices = |limit| feasible(&CostChain { max_segment_layers: limit, ..chain.clone() }, deadline);
    let (mut short, mut enough) = (chain.max_segment_layers, chain.layers);
    if enough <= short || !suffices(enough) {
        return None;
    }
    while enough - short > 1 {
        let middle = short + (enough - short) / 2;
        if suffices(middle) { enough = middle } else { short = middle }
    }
    Some(enough)
}

/// Finds, for a step without a plan, each single cap that would give it one if it were larger: the smallest that suffices, to within a
/// thousandth of the largest boundary. Where no single cap does, each pair of them, else all three: the smallest HBM with as much of the
/// others as can be used, then the smallest host RAM beside that, then NVMe, so that none can be smaller beside the others.
///
/// Every size named was planned with. What is looked at together gets equal shares of the time limit; where that ends a search, the least
/// that was found to suffice is named. Empty when nothing was found before the limit.
pub fn explain_step(problem: &StepProblem, options: &StepOptions<'_>) -> Vec<Remedy> {
    let search = Search::new(problem, options);
    let [hbm, host, nvme] = Tier::ALL;
    let sets: [&[&[Tier]]; 3] =
        [&[&[hbm], &[host], &[nvme]], &[&[hbm, host], &[hbm, nvme], &[host, nvme]], &[&Tier::ALL]];
    for together in sets {
        let mut remedies = Vec::new();
        for (number, tiers) in together.iter().enumerate() {
            let until = search.until(together.len() - number);
            if let Some(remedy) = search.raised(tiers, until).filter(|remedy| !remedies.contains(remedy)) {
                remedies.push(remedy);
            }
        }
        if !remedies.is_empty() {
            return remedies;
        }
    }
    vec![]
}

/// Some plan of a step under its caps, as quickly as one is found.
///
/// # Errors
/// As [`solve_step`]: [`StepFailure::NoIncumbent`] where nobody can tell within the time limit.
pub fn any_plan(problem: &StepProblem, options: &StepOptions<'_>) -> Result<Schedule, StepFailure> {
    let search = Search::new(problem, options);
    search.any(problem, search.until(1))
}

/// The search for caps that suffice.
struct Search<'a> {
    problem: &'a StepProblem,
    options: &'a StepOptions<'a>,
    started: Instant,
    /// Sizes are told apart by this.
    step: Bytes,
    /// More of a tier is never used.
    everything: Bytes,
}

impl<'a> Search<'a> {
    fn new(problem: &'a StepProblem, options: &'a StepOptions<'a>) -> Search<'a> {
        let largest = problem.boundary_bytes.iter().copied().max().unwrap_or_default();
        let all = problem.boundary_bytes.iter().chain(&problem.saved_bytes).copied().sum::<Bytes>();
        let step = Bytes((largest.get() / 1000).max(1));
        Search { problem, options, started: Instant::now(), step, everything: all * 2 }
    }

    /// Seconds after the start at which the first of `rest` equal shares of the time that is left ends.
    fn until(&self, rest: usize) -> Option<f64> {
        let now = self.started.elapsed().as_secs_f64();
        self.options.solve.time_limit.map(|limit| now + (limit.get() - now) / rest as f64)
    }

    /// The step under these caps, where they hold what is there whatever goes where.
    fn under(&self, budgets: TierBytes) -> Option<StepProblem> {
        let problem = StepProblem { budgets, ..self.problem.clone() };
        Tier::ALL.iter().all(|&tier| budgets.get(tier) >= floor(&problem, tier)).then_some(problem)
    }

    /// Whether plans made by rule are enough; `None` after `until`.
    fn enough_by_rule(&self, budgets: TierBytes, until: Option<f64>) -> Option<bool> {
        let Some(problem) = self.under(budgets) else { return Some(false) };
        if until.is_some_and(|until| self.started.elapsed().as_secs_f64() > until) {
            return None;
        }
        Some(any_spilled(&problem, self.options.prefetch).is_some())
    }

    /// Some plan of a step, before `until`.
    fn any(&self, problem: &StepProblem, until: Option<f64>) -> Result<Schedule, StepFailure> {
        let mut options = *self.options;
        if let Some(until) = until {
            let left = until - self.started.elapsed().as_secs_f64();
            if left <= SHORTEST_S {
                return Err(StepFailure::NoIncumbent);
            }
            // One size that is hard to decide must not take the time of all others.
            options.solve.time_limit = Some(Seconds(left / 3.0));
        }
        // Most sizes are told by plans that need no search, where caps hold what is there whatever goes where.
        let by_rule = self.under(problem.budgets).and_then(|_| any_spilled(problem, options.prefetch));
        match by_rule {
            Some((schedule, _)) => Ok(schedule),
            None => Ok(solve_step(problem, &options)?.schedule),
        }
    }

    /// Whether a step has a plan under these caps; `None` where nobody can tell in time.
    fn enough(&self, budgets: TierBytes, until: Option<f64>) -> Option<bool> {
        let Some(problem) = self.under(budgets) else { return Some(false) };
        match self.any(&problem, until) {
            Ok(_) => Some(true),
            Err(StepFailure::NoIncumbent | StepFailure::Failed(_)) => None,
            Err(_) => Some(false),
        }
    }

    /// The least caps of `tiers`, each with as much of those after it as can be used. `None` where that does not suffice, or nobody can tell.
    fn raised(&self, tiers: &[Tier], until: Option<f64>) -> Option<Remedy> {
        let low = |tier: Tier| self.problem.budgets.get(tier).max(floor(self.problem, tier));
        let mut budgets = self.problem.budgets;
        for &tier in tiers {
            *budgets.get_mut(tier) = low(tier) + self.everything;
        }
        let mut raises = Vec::new();
        for (number, &tier) in tiers.iter().enumerate() {
            // Equal shares for each, however much the ones before used.
            let now = self.started.elapsed().as_secs_f64();
            let share = until.map(|until| now + (until - now) / (tiers.len() - number) as f64);
            let with = |cap: Bytes| {
                let mut raised = budgets;
                *raised.get_mut(tier) = cap;
                raised
            };
            let (budget, least) = (self.problem.budgets.get(tier), low(tier));
            // A size near the least is known soon; then the search looks below it.
            let half = share.map(|share| (now + share) / 2.0);
            let most = least + self.everything;
            let by_rule = smallest(least, most, self.step, |cap| self.enough_by_rule(with(cap), half));
            // A plan by rule is a plan, but what no rule finds others may.
            let by_rule = by_rule.map(|(size, _)| size);
            let enough = |cap: Bytes| self.enough(with(cap), share);
            // That all caps as they are do not suffice is why this was asked.
            let asked = tiers.len() > 1 || least > budget;
            let (smallest, least) = match asked.then(|| enough(least)) {
                Some(Some(true)) => (least, true),
                at_least => {
                    let (size, known) = smallest(least, by_rule.unwrap_or(most), self.step, enough)
                        .or_else(|| Some((by_rule?, false)))?;
                    (size, known && at_least != Some(None))
                }
            };
            *budgets.get_mut(tier) = smallest;
            if smallest > budget {
                raises.push(Raise { tier, budget, smallest, least });
            }
        }
        match raises.as_slice() {
            [] => None,
            // Alone it was not decided in time.
            [alone] => Some(Remedy::Budget(*alone)),
            _ => Some(Remedy::Budgets(raises)),
        }
    }
}

/// No plan needs less of a tier.
fn floor(problem: &StepProblem, tier: Tier) -> Bytes {
    let least = if tier == Tier::Hbm { problem.sizes().least_hbm() } else { Bytes::ZERO };
    problem.always().get(tier) + least
}

/// The smallest size, to within `step`, from which on `enough` holds, given that it does not hold at `low`. `None` where it does not
/// even hold at `high`, or nobody could tell; where nobody can tell later on, the least known to be enough, and false.
fn smallest(
    low: Bytes,
    high: Bytes,
    step: Bytes,
    enough: impl Fn(Bytes) -> Option<bool>,
) -> Option<(Bytes, bool)> {
    if !enough(high)? {
        return None;
    }
    let known = Cell::new(true);
    let enough = |size: Bytes| {
        let told = enough(size);
        known.set(known.get() && told.is_some());
        told
    };
    let (mut short, mut sufficient) = (low, high);
    // Mostly little is missing, and where the time ends the search, a size near that should be known.
    let mut more = step * FIRST_PROBE;
    while low + more < sufficient {
        if enough(low + more) == Some(true) {
            sufficient = low + more;
        } else {
            short = low + more;
        }
        more = more * 2;
    }
    while sufficient - short > step {
        let middle = short + Bytes((sufficient - short).get() / 2);
        if enough(middle) == Some(true) {
            sufficient = middle;
        } else {
            short = middle;
        }
    }
    Some((sufficient, known.get()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_size_is_found_or_the_least_that_was_seen_to_do() {
        let from = |least: u64| move |size: Bytes| Some(size.get() >= least);
        assert_eq!(smallest(Bytes(10), Bytes(1000), Bytes(1), from(137)), Some((Bytes(137), true)));
        assert_eq!(smallest(Bytes(10), Bytes(1000), Bytes(1), from(2000)), None);
        let patient = |size: Bytes| (size.get() > 400).then_some(true);
        assert_eq!(smallest(Bytes(10), Bytes(1000), Bytes(1), patient), Some((Bytes(401), false)));
        assert_eq!(smallest(Bytes(10), Bytes(1000), Bytes(1), |_| None), None);
    }
}
