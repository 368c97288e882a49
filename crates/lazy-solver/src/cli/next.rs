//! What a little more of each resource would save.

use lazy_model::{Bytes, CostChain, Seconds, Tier};
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
}

impl Change {
    pub(crate) fn sentence(&self) -> String {
        let name = match self.tier {
            Tier::Hbm => "HBM",
            Tier::Host => "host RAM",
            Tier::Nvme => "NVMe",
        };
        if self.saves_ms == 0.0 {
            format!("{} more {name} saves nothing", self.more)
        } else {
            format!("{} more {name} saves {}", self.more, Seconds::from_ms(self.saves_ms))
        }
    }
}

/// Solves again with a step more of each budget; the change that saves most comes first. Nothing where the plan is not proven,
/// or where the time limit leaves no room.
pub(crate) fn changes(planned: &Planned, options: &SolveOptions, clock: &Clock) -> Vec<Change> {
    let Some(now) = planned.time_ms().filter(|_| planned.solution.status == Status::Optimal) else {
        return vec![];
    };
    let largest = planned.problem.chain.boundary_bytes.iter().copied().max().unwrap_or_default();
    let more = Bytes((largest * BOUNDARIES).get().checked_next_power_of_two().unwrap_or(u64::MAX));
    // The user waits for these: each may take about as long as the plan itself did.
    let patience = Seconds(2.0 * planned.solution.solve.get() + 1.0);
    let mut list: Vec<Change> = Tier::ALL
        .into_iter()
        .filter_map(|tier| {
            let mut options = clock.left(options);
            let left = options.time_limit.map_or(patience.get(), |left| left.get().min(patience.get()));
            options.time_limit = Some(Seconds(left));
            let then = time_with(planned, tier, more, &options)?;
            let saves = now - then;
            Some(Change { tier, more, saves_ms: if saves > NOTHING_MS { saves } else { 0.0 } })
        })
        .collect();
    list.sort_by(|a, b| b.saves_ms.total_cmp(&a.saves_ms));
    list
}

/// The plan's time with `more` of a tier.
fn time_with(planned: &Planned, tier: Tier, more: Bytes, options: &SolveOptions) -> Option<f64> {
    if let Some(step) = &planned.problem.step {
        let mut step = step.clone();
        *step.budgets.get_mut(tier) += more;
        let found = solve_step(&step, &StepOptions { solve: *options, prefetch: None }).ok()?;
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
