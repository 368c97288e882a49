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

/// A bound this near to the plan, relative to it, is not worth another solve.
const CLOSE: f64 = 1e-6;

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
    for relaxed in relaxations(host, ranks, step) {
        if bound.get() >= step.get() * (1.0 - CLOSE) {
            break;
        }
        let mut room = relaxed.budgets;
        room.host = room.host.saturating_sub(relaxed.fixed.host);
        let chain = relaxed.keep_chain(&room, &relaxed.windows());
        let solved;
        let solution = if chain == each.chain {
            &each.solution
        } else {
            solved = solve(&chain, &clock.share(&options.solve))?;
            &solved
        };
        if let Some(least) = least_step(&relaxed, &chain, solution)
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

/// Problems of one rank that some rank of every joint plan faster than `step` meets: all that it may have off HBM taken for host RAM; and,
/// where there is NVMe, the least host RAM, with all drives to itself. No other rank is on the root complex.
fn relaxations(host: &StepProblem, ranks: usize, step: Seconds) -> Vec<StepProblem> {
    let shared = Shared::of(host, ranks, step);
    let mut free = host.clone();
    free.costs.links.contention.shared = None;
    let mut together = free.clone();
    together.budgets.host = host.fixed.host + shared.most_off_hbm();
    together.budgets.nvme = Bytes::ZERO;
    let mut relaxed = vec![together];
    if shared.nvme > Bytes::ZERO {
        let mut alone = free;
        alone.budgets.host = host.fixed.host + Bytes(shared.host.get() / shared.ranks);
        alone.budgets.nvme = shared.nvme;
        relaxed.push(alone);
    }
    relaxed
}

/// What all ranks together may hold off HBM in a step of some length.
struct Shared {
    ranks: u64,
    /// Host RAM besides what is there throughout.
    host: Bytes,
    /// NVMe, as far as the drives write and read it in the time there is.
    nvme: Bytes,
    /// Host RAM and NVMe, as far as the root complex carries it.
    carried: Bytes,
    /// The smallest staging buffer.
    staging: Bytes,
}

impl Shared {
    fn of(host: &StepProblem, ranks: usize, step: Seconds) -> Shared {
        let ranks = ranks.max(1) as u64;
        let costs = &host.costs;
        let sum = |list: &[Seconds]| list.iter().copied().sum::<Seconds>();
        let (forward, saving, backward) =
            (sum(&costs.forward), sum(&costs.saving_forward), sum(&costs.backward));
        let arithmetic = costs.prologue + saving + backward + costs.epilogue + costs.prologue_backward;
        let pass = Seconds((step - host.optimizer).get() / host.micro_batches.max(1) as f64);
        // What a faster step may wait for links, and so add to the longest windows any of its plans has.
        let waits = Seconds((pass - arithmetic).get().max(0.0));
        let (out, back) = (saving + costs.epilogue + waits, backward + saving + forward + waits);
        let carried = |out_rate: BytesPerSecond, back_rate: BytesPerSecond| {
            let bytes = (out_rate.get() * out.get()).min(back_rate.get() * back.get());
            // Beyond all memory a float says the same, saturated.
            Bytes(bytes.max(0.0).ceil() as u64)
        };
        let links = &costs.links;
        let room = host.budgets.host.saturating_sub(host.fixed.host * ranks);
        let staging = host.boundary_bytes.iter().copied().min().unwrap_or_default();
        let drives = carried(links.nvme_write, links.nvme_read);
        let nvme = if room >= staging { host.budgets.nvme.min(drives) } else { Bytes::ZERO };
        let carried = links.contention.shared.map_or(Bytes(u64::MAX), |rate| carried(rate, rate));
        Shared { ranks, host: room, nvme, carried, staging }
    }

    /// The most that the rank with the least off HBM can have there. Ranks that use NVMe stage through a buffer each: where `k` of them do,
    /// some rank has at most the average of what is left, and some rank without NVMe at most the average of the host RAM that is left.
    fn most_off_hbm(&self) -> Bytes {
        let all = (self.host + self.nvme).min(self.carried);
        let users = if self.nvme > Bytes::ZERO { self.ranks } else { 0 };
        let with = |k: u64| {
            let staged = Bytes(self.staging.get().saturating_mul(k));
            let average = (self.host + self.nvme).saturating_sub(staged).min(all).get() / self.ranks;
            let others = self.host.saturating_sub(staged).get().checked_div(self.ranks - k);
            Bytes(others.map_or(average, |others| others.min(average)))
        };
        let possible = (0..=users).filter(|&k| self.staging.get().saturating_mul(k) <= self.host.get());
        possible.map(with).max().unwrap_or_default()
    }
}

/// Time of gathering weights (in both passes) and reducing gradients (in backward) that finds no room beside the arithmetic, first in
/// first out over the layers, each exchange beside the layer before.
pub fn exchange(one: &StepProblem, ranks: usize, peer: BytesPerSecond) -> Seconds {
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
