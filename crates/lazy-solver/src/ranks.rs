//! Several identical ranks on one host: what they share is split evenly, and a bound says how good that is.
//!
//! Each rank has its own HBM, its own PCIe link and its own peer link. Host RAM, NVMe space, the drives' bandwidth and the root complex are
//! the host's. A step ends with its slowest rank.
//!
//! Why an even split is enough: in any joint plan some rank has at most the average of a shared quantity (or of a weighted sum of
//! several), and that rank is no faster than the best plan of one rank that has the average. So for one shared quantity the even split is the
//! optimum, and for several the best plan under their sum alone is a lower bound on the slowest rank.

use std::time::Instant;

use lazy_model::{Bytes, BytesPerSecond, Seconds, StepProblem};

use crate::physical::{Clock, least_step};
use crate::solve::solve;
use crate::step::{Objective, StepFailure, StepOptions, StepSolution, solve_step};

/// The plan that every rank follows, and how good it is.
#[derive(Clone, Debug)]
pub struct RanksSolution {
    /// Number of ranks.
    pub ranks: usize,
    /// One rank's step on its share of the host.
    pub share: StepProblem,
    /// Its plan.
    pub each: StepSolution,
    /// Time that exchanges between accelerators stick out of the arithmetic they run beside; part of the times below.
    pub peer_exposed: Seconds,
    /// Predicted step time of the slowest rank (all are alike).
    pub step: Seconds,
    /// No joint plan has a smaller predicted step time.
    pub bound: Seconds,
    /// `(step - bound) / step`.
    pub gap: f64,
}

/// What each of `ranks` ranks has of a host: an even part of host RAM, NVMe, the drives and the root complex.
///
/// In `host`, the budgets of host RAM and NVMe, the NVMe rates and the root complex are the whole host's; everything else is one rank's.
pub fn share(host: &StepProblem, ranks: usize) -> StepProblem {
    let n = ranks.max(1);
    let part = |bytes: Bytes| Bytes(bytes.get() / n as u64);
    let rate = |rate: BytesPerSecond| BytesPerSecond(rate.get() / n as f64);
    let mut one = host.clone();
    one.budgets.host = part(host.budgets.host);
    one.budgets.nvme = part(host.budgets.nvme);
    let links = &mut one.costs.links;
    links.nvme_write = rate(links.nvme_write);
    links.nvme_read = rate(links.nvme_read);
    links.contention.shared = links.contention.shared.map(rate);
    one
}

/// Plans the steps of `ranks` ranks together, see [`share`] for what `host` says. With `peer`, the rate of the link between accelerators,
/// streamed weights come in once for all ranks, each a part, and are passed on, and gradients are reduced the same way.
///
/// # Errors
/// See [`StepFailure`]: one rank has no plan on its share.
pub fn solve_ranks(
    host: &StepProblem,
    ranks: usize,
    peer: Option<BytesPerSecond>,
    options: &StepOptions,
) -> Result<RanksSolution, StepFailure> {
    let clock = Clock { limit: options.solve.time_limit, started: Instant::now() };
    let share = share(host, ranks);
    let options = StepOptions { objective: Objective::Physical, ..*options };
    let halved = StepOptions { solve: clock.share(&options.solve), ..options };
    let each = solve_step(&share, &halved)?;
    let peer_exposed = peer.map_or(Seconds::ZERO, |rate| exchange(&share, ranks, rate));
    let prediction = each.schedule.solve.prediction;
    let step = prediction.map_or(each.verified.promise.step_s, |p| p.step_s);
    let mut bound = Seconds::ZERO;
    for relaxed in relaxations(host, &share, ranks) {
        let mut room = relaxed.budgets;
        room.host = room.host.saturating_sub(relaxed.fixed.host);
        let chain = relaxed.keep_chain(&room, &relaxed.windows());
        let solution = solve(&chain, &clock.share(&options.solve))?;
        if let Some(least) = least_step(&relaxed, &chain, &solution)
            && least.get() > bound.get()
        {
            bound = least;
        }
    }
    let (step, bound) = (step + peer_exposed, bound + peer_exposed);
    // The prediction of the plan is one of those the bound speaks of, but for rounding.
    let bound = if bound.get() < step.get() { bound } else { step };
    let gap = if step.get() > 0.0 { (step.get() - bound.get()) / step.get() } else { 0.0 };
    Ok(RanksSolution { ranks, share, each, peer_exposed, step, bound, gap })
}

/// Problems of one rank that some rank of every joint plan meets: the one with the least of host RAM and NVMe together, all of that taken for
/// host RAM; and, where there is NVMe, the one with the least host RAM, with all drives for itself. No other rank is on the root complex.
fn relaxations(host: &StepProblem, share: &StepProblem, ranks: usize) -> Vec<StepProblem> {
    let free = |problem: &StepProblem| {
        let mut one = problem.clone();
        one.costs.links.contention.shared = None;
        one
    };
    let ranks = ranks.max(1) as u64;
    let mut together = free(share);
    let both = host.budgets.host.saturating_sub(host.fixed.host * ranks) + host.budgets.nvme;
    together.budgets.host = share.fixed.host + Bytes(both.get() / ranks);
    together.budgets.nvme = Bytes::ZERO;
    let mut relaxed = vec![together];
    if host.budgets.nvme > Bytes::ZERO {
        let mut alone = free(host);
        alone.budgets.host = share.budgets.host;
        relaxed.push(alone);
    }
    relaxed
}

/// Time of gathering weights (in both passes) and reducing gradients (in backward) that finds no room beside the arithmetic, first in
/// first out over the layers, each exchange beside the layer before.
fn exchange(one: &StepProblem, ranks: usize, peer: BytesPerSecond) -> Seconds {
    let part = (ranks.saturating_sub(1)) as f64 / ranks.max(1) as f64;
    let time =
        |list: &[Bytes], l: usize| list.get(l).map_or(0.0, |bytes| bytes.get() as f64 * part / peer.get());
    let (mut queue, mut exposed) = (0.0f64, 0.0f64);
    let costs = &one.costs;
    for (l, window) in costs.forward.iter().enumerate() {
        queue = (queue + time(&one.streamed.weights, l) - window.get()).max(0.0);
    }
    exposed += std::mem::take(&mut queue);
    for (l, window) in costs.backward.iter().enumerate().rev() {
        let bytes = time(&one.streamed.weights, l) + time(&one.streamed.gradients, l);
        queue = (queue + bytes - window.get()).max(0.0);
    }
    exposed += queue;
    Seconds(exposed * one.micro_batches as f64)
}
