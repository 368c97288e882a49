//! What a little more of each resource would save.

use std::fmt;

use lazy_model::{Bytes, CostChain, Pool, Seconds, Tier};
use lazy_solver::step::{StepOptions, solve_step};
use lazy_solver::{SolveOptions, Status, solve};

use super::plan::{Clock, Planned};

/// Boundaries that the step of a budget holds at least.
const BOUNDARIES: u64 = 4;
/// A saving below this is none (ms).
const NOTHING_MS: f64 = 1e-3;

/// One change, and what it saves.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    /// The tier of which there is more.
    pub(crate) tier: Tier,
    pub(crate) more: Bytes,
    /// Of the step; zero where it saves nothing.
    pub(crate) saves_ms: f64,
    /// Whether every one of several ranks gets as much.
    pub(crate) each: bool,
}

impl Change {
    pub(crate) fn sentence(&self) -> String {
        let name = match self.tier {
            Tier::Hbm => "HBM",
            Tier::Host => "host RAM",
            Tier::Nvme => "NVMe",
        };
        let whose = if self.each { " a rank" } else { "" };
        if self.saves_ms == 0.0 {
            format!("{} more {name}{whose} saves nothing", self.more)
        } else {
            format!("{} more {name}{whose} saves {}", self.more, Seconds::from_ms(self.saves_ms))
        }
    }
}

/// What keeps the step from being shorter.
pub(crate) struct Limit {
    /// For example `the hbm budget`.
    pub(crate) what: String,
    /// For example `12.30 ms exposed`; may be empty.
    pub(crate) detail: String,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if self.detail.is_empty() { Ok(()) } else { write!(f, " ({})", self.detail) }
    }
}

/// The budgets of which more would help, and the links that are waited for. Nothing where no change was tried.
pub(crate) fn limits(planned: &Planned, changes: &[Change]) -> Vec<Limit> {
    let helps = changes.iter().filter(|c| c.saves_ms > 0.0);
    let mut found: Vec<Limit> =
        helps.map(|c| Limit { what: format!("the {} budget", c.tier), detail: String::new() }).collect();
    for pool in Pool::ALL {
        let exposed = planned.exposed(pool);
        if exposed.as_ms() > NOTHING_MS {
            found.push(Limit { what: pool.name().into(), detail: format!("{exposed} exposed") });
        }
    }
    if found.is_empty() && !changes.is_empty() {
        found.push(Limit { what: "arithmetic alone".into(), detail: String::new() });
    }
    found
}

/// Solves again with a step more of each budget; the change that saves most comes first. Nothing where the plan is not proven,
/// or where the time limit leaves no room.
pub(crate) fn changes(planned: &Planned, options: &SolveOptions, clock: &Clock) -> Vec<Change> {
    let Some(now) = planned.time_ms().filter(|_| planned.solution.status == Status::Optimal) else {
        return vec![];
    };
    let more = step_of(planned);
    let peers = planned.problem.ranks.as_ref().map_or(0.0, |ranks| ranks.peer_exposed().as_ms());
    let each = planned.problem.ranks.is_some();
    // The user waits for these: each may take about as long as the plan itself did.
    let patience = Seconds(2.0 * planned.solution.solve.get() + 1.0);
    let mut list: Vec<Change> = Tier::ALL
        .into_iter()
        .filter_map(|tier| {
            let mut options = clock.left(options);
            let left = options.time_limit.map_or(patience.get(), |left| left.get().min(patience.get()));
            options.time_limit = Some(Seconds(left));
            let then = peers + time_with(planned, tier, more, &options)?;
            let saves = now - then;
            Some(Change { tier, more, saves_ms: if saves > NOTHING_MS { saves } else { 0.0 }, each })
        })
        .collect();
    list.sort_by(|a, b| b.saves_ms.total_cmp(&a.saves_ms));
    list
}

/// A round size that holds a few boundaries, and where internals may be kept, those of any layer.
fn step_of(planned: &Planned) -> Bytes {
    let problem = &planned.problem;
    let largest = |sizes: &[Bytes]| sizes.iter().copied().max().unwrap_or_default();
    let saved = problem.step.as_ref().map(|s| &s.saved_bytes).or(problem.chain.layer_internal_bytes.as_ref());
    let internals = saved.map_or(Bytes::ZERO, |sizes| largest(sizes));
    let least = (largest(&problem.chain.boundary_bytes) * BOUNDARIES).max(internals);
    Bytes(least.get().checked_next_power_of_two().unwrap_or(u64::MAX))
}

/// The plan's time with `more` of a tier.
fn time_with(planned: &Planned, tier: Tier, more: Bytes, options: &SolveOptions) -> Option<f64> {
    if let Some(step) = &planned.problem.step {
        let mut step = step.clone();
        *step.budgets.get_mut(tier) += more;
        let found = solve_step(&step, &StepOptions { solve: *options, ..StepOptions::default() }).ok()?;
        return Some(found.verified.promise.step_s.as_ms());
    }
    let mut chain = planned.problem.chain.clone();
    raise(&mut chain, tier, more);
    solve(&chain, options).ok()?.evaluation.map(|e| e.step_ms())
}

fn raise(chain: &mut CostChain, tier: Tier, more: Bytes) {
    match tier {
        Tier::Hbm => {
            chain.gpu_budget_bytes += more;
            if let Some(cap) = &mut chain.hbm_cap_bytes {
                *cap += more;
            }
        }
        Tier::Host => chain.cpu_budget_bytes += more,
        Tier::Nvme => chain.nvme_budget_bytes += more,
    }
}
