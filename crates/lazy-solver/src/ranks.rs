//! Several identical ranks on one host: what they share is split evenly, and a bound says how good that is.
//!
//! Each rank has its own HBM, its own PCIe link and its own peer link. Host RAM, NVMe space, the drives' bandwidth and the root complex are
//! the host's. A step ends with its slowest rank.
//!
//! Why an even split is enough: in any joint plan some rank has at most the average of a shared quantity (or of a weighted sum of
//! several), and that rank is no faster than the best plan of one rank that has the average. So for one shared quantity the even split is the
//! optimum, and for several the best plan under their sum alone is a lower bound on the slowest rank.

use std::time::Instant;

use lazy_model::timeline::LinkRates;
use lazy_model::{Bytes, BytesPerSecond, CostChain, Seconds, StepProblem, Tier, Windows};

use crate::explain::{Raise, Remedy, explain_step};
use crate::physical::{AT_ONCE, Clock, least_step};
use crate::problem::gcd;
use crate::solve::{SolveOptions, solve};
use crate::step::{Objective, StepFailure, StepOptions, StepSolution, solve_step};

/// A bound this near to the plan, relative to it, is not worth another solve.
const CLOSE: f64 = 1e-6;
/// More bytes than any machine has.
const ANY: Bytes = Bytes(1 << 60);

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
    options: &StepOptions<'_>,
) -> Result<RanksSolution, StepFailure> {
    let clock = Clock { limit: options.solve.time_limit, started: Instant::now() };
    let share = share(host, ranks);
    let options = StepOptions { objective: Objective::Physical, ..*options };
    let halved = StepOptions { solve: clock.share(&options.solve), ..options };
    let each = solve_step(&share, &halved).map_err(|why| of_all(host, ranks, why))?;
    let peer_exposed = peer.map_or(Seconds::ZERO, |rate| exchange(&share, ranks, rate));
    let prediction = each.schedule.solve.prediction;
    let step = prediction.map_or(each.verified.promise.step_s, |p| p.step_s);
    let bound = least(host, ranks, step, &each, &Limits { clock: &clock, solve: &options.solve })?;
    let (step, bound) = (step + peer_exposed, bound + peer_exposed);
    // The prediction of the plan is one of those the bound speaks of, but for rounding.
    let bound = if bound.get() < step.get() { bound } else { step };
    let gap = if step.get() > 0.0 { (step.get() - bound.get()) / step.get() } else { 0.0 };
    Ok(RanksSolution { ranks, share, each, peer_exposed, step, bound, gap })
}

/// [`explain_step`] for ranks that share a host: what is named of host RAM and NVMe is the whole host's, of HBM each rank's.
pub fn explain_ranks(host: &StepProblem, ranks: usize, options: &StepOptions<'_>) -> Vec<Remedy> {
    let n = ranks.max(1) as u64;
    let of_host = |raise: Raise| match raise.tier {
        Tier::Hbm => raise,
        tier => Raise { budget: host.budgets.get(tier), smallest: raise.smallest * n, ..raise },
    };
    let whole = |remedy| match remedy {
        Remedy::Budget(raise) => Remedy::Budget(of_host(raise)),
        Remedy::Budgets(raises) => Remedy::Budgets(raises.into_iter().map(of_host).collect()),
        other => other,
    };
    explain_step(&share(host, ranks), options).into_iter().map(whole).collect()
}

/// Why a rank has no plan on its part, where that names the host's RAM or NVMe in the sizes of the whole host.
fn of_all(host: &StepProblem, ranks: usize, why: StepFailure) -> StepFailure {
    match why {
        StepFailure::Fixed { tier, fixed, needed, .. } if tier != Tier::Hbm => {
            let all = ranks.max(1) as u64;
            let budget = host.budgets.get(tier);
            StepFailure::Fixed { tier, budget, fixed: fixed * all, needed: needed * all }
        }
        other => other,
    }
}

/// How long to look for a bound.
struct Limits<'a> {
    clock: &'a Clock,
    solve: &'a SolveOptions,
}

impl Limits<'_> {
    /// The least predicted step of one rank with this problem, where a bound is proven in time.
    fn least(&self, one: &StepProblem, known: Option<&StepSolution>) -> Result<Option<Seconds>, StepFailure> {
        let mut room = one.budgets;
        room.host = room.host.saturating_sub(one.always().host);
        // Whatever is on its way to a drive may wait in host RAM.
        let chain = one.keep_chain(&room, &Windows { staging: ANY, ..one.windows() });
        let bare = CostChain { nvme_staging_bytes: None, ..chain.clone() };
        let is_known = |known: &&StepSolution| room.nvme == Bytes::ZERO && known.chain == bare;
        match known.filter(is_known) {
            Some(known) => Ok(least_step(one, &known.chain, &known.solution)),
            None => Ok(least_step(one, &chain, &solve(&chain, &self.clock.share(self.solve))?)),
        }
    }
}

/// A bound on the slowest rank of every joint plan: the largest that the relaxations give.
fn least(
    host: &StepProblem,
    ranks: usize,
    step: Seconds,
    each: &StepSolution,
    limits: &Limits<'_>,
) -> Result<Seconds, StepFailure> {
    let mut shared = Shared::of(host, ranks, step, arithmetic(host));
    if shared.depends_on_time(host)
        && let Some(least) = limits.least(&unhindered(host, &shared), None)?
    {
        shared = Shared::of(host, ranks, step, least);
    }
    let mut bound = Seconds::ZERO;
    for relaxed in relaxations(host, &shared) {
        if bound.get() >= step.get() * (1.0 - CLOSE) {
            break;
        }
        if let Some(least) = limits.least(&relaxed, Some(each))?
            && least.get() > bound.get()
        {
            bound = least;
        }
    }
    Ok(bound)
}

/// A step without recomputation or waits.
fn arithmetic(host: &StepProblem) -> Seconds {
    let pass = host.costs.least_pass();
    host.passes(pass, pass) + host.least_optimizer()
}

/// One rank that has the host to itself, all of it as host RAM, and links that take no time: what even it recomputes, every rank does.
fn unhindered(host: &StepProblem, shared: &Shared) -> StepProblem {
    let mut one = host.clone();
    let rates = &mut one.costs.links;
    *rates = LinkRates {
        d2h: AT_ONCE,
        h2d: AT_ONCE,
        nvme_write: AT_ONCE,
        nvme_read: AT_ONCE,
        ..LinkRates::default()
    };
    one.budgets.host = host.always().host + shared.host + shared.nvme;
    one.budgets.nvme = Bytes::ZERO;
    one
}

/// One rank with all that it may have off HBM taken for host RAM, alone on the root complex.
fn together(host: &StepProblem, shared: &Shared) -> StepProblem {
    let mut together = host.clone();
    together.costs.links.contention.shared = None;
    together.budgets.host = host.always().host + shared.most_off_hbm();
    together.budgets.nvme = Bytes::ZERO;
    together
}

/// Problems of one rank that some rank of every joint plan that is no slower meets: all off HBM together; and, where there is NVMe, the
/// least host RAM, with all drives to itself.
fn relaxations(host: &StepProblem, shared: &Shared) -> Vec<StepProblem> {
    let mut relaxed = vec![together(host, shared)];
    if shared.nvme > Bytes::ZERO {
        let mut alone = host.clone();
        alone.costs.links.contention.shared = None;
        alone.budgets.host = host.always().host + Bytes(shared.host.get() / shared.ranks);
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
    /// Sums of sizes of boundaries are multiples of this.
    unit: u64,
}

impl Shared {
    /// Of joint plans no slower than `step` in which no rank takes less than `least` even if links took no time.
    fn of(host: &StepProblem, ranks: usize, step: Seconds, least: Seconds) -> Shared {
        let ranks = ranks.max(1) as u64;
        let costs = &host.costs;
        let sum = |list: &[Seconds]| list.iter().copied().sum::<Seconds>();
        let longer =
            costs.forward.iter().zip(&costs.saving_forward).map(|(f, s)| if s > f { *s } else { *f });
        let (forward, internals, backward) =
            (sum(&costs.forward), sum(&costs.internals_forward), sum(&costs.backward));
        // What a step may wait for links, and so add to the longest windows any of its plans has.
        let waits = Seconds((step - least).get().max(0.0) / host.micro_batches.max(1) as f64);
        let out = longer.sum::<Seconds>() + costs.epilogue + waits;
        let back = backward + internals + forward + waits;
        let carried = |out_rate: BytesPerSecond, back_rate: BytesPerSecond| {
            let bytes = (out_rate.get() * out.get()).min(back_rate.get() * back.get());
            // Beyond all memory a float says the same, saturated.
            Bytes(bytes.max(0.0).ceil() as u64)
        };
        let links = &costs.links;
        let room = host.budgets.host.saturating_sub(host.always().host * ranks);
        let staging = host.boundary_bytes.iter().copied().min().unwrap_or_default();
        let drives = carried(links.nvme_write, links.nvme_read);
        let nvme = if room >= staging { host.budgets.nvme.min(drives) } else { Bytes::ZERO };
        let carried = links.contention.shared.map_or(Bytes(u64::MAX), |rate| carried(rate, rate));
        let sizes: Vec<u64> = host.boundary_bytes.iter().map(|bytes| bytes.get()).collect();
        Shared { ranks, host: room, nvme, carried, staging, unit: gcd(&sizes).max(1) }
    }

    /// Whether less time would leave less room off HBM.
    fn depends_on_time(&self, host: &StepProblem) -> bool {
        (self.nvme > Bytes::ZERO && self.nvme < host.budgets.nvme) || self.carried < self.host + self.nvme
    }

    /// The most that the rank with the least off HBM can have there. Ranks that use NVMe stage through a buffer each: where `k` of them do,
    /// some rank has at most the average of what is left, and some rank without NVMe at most the average of the host RAM that is left.
    fn most_off_hbm(&self) -> Bytes {
        let whole = |bytes: u64| bytes / self.unit * self.unit;
        let users = if self.nvme > Bytes::ZERO { self.ranks } else { 0 };
        let with = |k: u64| {
            let host = self.host.get().saturating_sub(self.staging.get().saturating_mul(k));
            let all = whole(host).saturating_add(whole(self.nvme.get())).min(self.carried.get());
            let average = all / self.ranks;
            let others = host.checked_div(self.ranks - k);
            Bytes(whole(others.map_or(average, |others| others.min(average))))
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
    one.passes(Seconds(exposed), Seconds(exposed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::steps::{MIB, step};

    /// Eight ranks with 56.4 boundaries in host RAM and 158.9 on NVMe: where all use NVMe, 48 and 158 are left for boundaries, so one rank
    /// has 25 at most. Seven of them could leave 49 to be shared and the eighth without NVMe: 207 in all, 25 again. Of sizes that have no
    /// divisor in common, the average of the bytes counts.
    #[test]
    fn boundaries_of_one_size_are_whole() {
        let mut host = step(4, [64, 0, 0], 1.0);
        host.budgets.host = Bytes(MIB.get() * 564 / 10);
        host.budgets.nvme = Bytes(MIB.get() * 1589 / 10);
        let (long, none) = (Seconds(1e3), Seconds::ZERO);
        let most = |host: &StepProblem| Shared::of(host, 8, long, none).most_off_hbm();
        assert_eq!(most(&host), MIB * 25);
        host.boundary_bytes[1] = Bytes(MIB.get() + 1);
        assert!(most(&host) > MIB * 26 && most(&host) < Bytes(MIB.get() * 264 / 10), "{}", most(&host));
        // Of one rank alone nothing is averaged.
        let one = Shared::of(&step(4, [64, 3, 0], 1.0), 1, long, none);
        assert_eq!(one.most_off_hbm(), MIB * 3);
    }
}
