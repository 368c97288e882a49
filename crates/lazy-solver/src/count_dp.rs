//! Chains whose boundaries are all of one size, without locks: how many boundaries go where decides almost everything.
//!
//! Some optimum has, in index order, first the boundaries on NVMe, then those in host RAM, then those in HBM, and none is further
//! away than it must be (proof in `docs/model.md`). So the number of checkpoints fixes the number in each tier, and what remains is
//! where the checkpoints are: a path, shortest first in recompute, whose labels also carry the exposed time of the four pools.

use std::time::Instant;

use lazy_model::{CostChain, Placement, Pool};

use crate::link::Link;
use crate::problem::recompute;
use crate::search::tolerance;
use crate::solve::TieBreak;

/// Table entries times blocks above which the method is not worth its memory and time.
const MOST_WORK: usize = 100_000_000;

/// The placement found, and its value: the objective, or the step time where that is what counts first.
pub(crate) struct Counted {
    pub(crate) placement: Vec<Placement>,
    pub(crate) value: f64,
}

/// What counting found.
pub(crate) enum Counting {
    Plan(Counted),
    Infeasible,
    OutOfTime,
}

/// Whether this method solves `chain`.
pub(crate) fn applies(chain: &CostChain) -> bool {
    let equal = chain.boundary_bytes.windows(2).all(|pair| pair[0] == pair[1]);
    let n = chain.boundaries();
    let work = n.saturating_mul(n).saturating_mul(chain.max_segment_layers.min(n));
    equal && chain.locks.as_ref().is_none_or(|locks| locks.is_empty()) && work <= MOST_WORK
}

/// The best placement of a chain that [`applies`] holds for.
pub(crate) fn solve(chain: &CostChain, tie_break: TieBreak, deadline: Option<Instant>) -> Counting {
    let Some(mut dp) = CountDp::new(chain, deadline) else { return Counting::Infeasible };
    dp.fill_rest();
    let counted = if dp.is_late() { None } else { dp.counted(tie_break) };
    match counted {
        // A search that was cut proves nothing.
        _ if dp.is_late() => Counting::OutOfTime,
        Some(counted) => Counting::Plan(counted),
        None => Counting::Infeasible,
    }
}

/// How many boundaries go where, and the least that can cost.
struct Counts {
    checkpoints: usize,
    /// Host and NVMe.
    off: usize,
    nvme: usize,
    /// Exposed time (ms) a pool at the very least: as if every transfer could use every window from boundary 0's on.
    exposed: [f64; 4],
    /// No plan with these counts has a shorter step (ms).
    bound: f64,
}

struct PoolData {
    /// Time of one boundary (ms); `None`: may carry nothing.
    ms: Option<f64>,
    nvme: bool,
    first: Vec<usize>,
    /// Room (ms) from each window on.
    room: Vec<f64>,
}

struct CountDp<'a> {
    chain: &'a CostChain,
    pools: Vec<PoolData>,
    overflow: f64,
    /// Boundaries that each tier holds.
    slots: [usize; 3],
    /// `rest[q][i]`: least recompute (ms) from checkpoint `i` to the end with exactly `q` more checkpoints.
    rest: Vec<Vec<f64>>,
    deadline: Option<Instant>,
}

/// A partial path that ends in an offloaded checkpoint.
struct Label {
    recompute: f64,
    exposed: [f64; 4],
    boundary: usize,
    parent: Option<usize>,
}

impl<'a> CountDp<'a> {
    fn new(chain: &'a CostChain, deadline: Option<Instant>) -> Option<CountDp<'a>> {
        let n = chain.layers;
        let size = chain.boundary_bytes[0].get();
        let mut overflow = 0.0;
        let mut pools = Vec::new();
        for pool in Pool::ALL {
            let link = Link::of(chain, pool);
            if link.rate == 0.0 {
                if link.mandatory.iter().any(|m| m.get() > 0) {
                    return None;
                }
                // Nothing weighs nothing, even on a link that carries nothing.
                let ms = (size == 0).then_some(0.0);
                pools.push(PoolData { ms, nvme: link.nvme, first: vec![n; n + 1], room: vec![0.0; n + 1] });
                continue;
            }
            let rooms = link.rooms(chain);
            overflow += rooms.overflow;
            pools.push(PoolData {
                ms: Some(link.ms(size)),
                nvme: link.nvme,
                first: (0..=n).map(|i| link.first(i, n)).collect(),
                room: rooms.from,
            });
        }
        let slots = [chain.gpu_budget_bytes, chain.cpu_budget_bytes, chain.nvme_budget_bytes]
            .map(|budget| budget.get().checked_div(size).map_or(n + 1, |slots| (slots as usize).min(n + 1)));
        Some(CountDp { chain, pools, overflow, slots, rest: vec![], deadline })
    }

    fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    fn counted(&self, tie_break: TieBreak) -> Option<Counted> {
        let chain = self.chain;
        let counts: Vec<Counts> = (2..=chain.boundaries()).filter_map(|m| self.counts(m)).collect();
        match tie_break {
            TieBreak::Weighted => self.best(&counts, |c| {
                chain.checkpoint_penalty * c.checkpoints as f64 + chain.nvme_tiebreak * c.nvme as f64
            }),
            TieBreak::Lexicographic => {
                let fastest = self.best(&counts, |_| 0.0)?;
                let limit = fastest.value + tolerance(fastest.value) / 2.0;
                let fewest = counts.iter().find_map(|c| self.step(c, limit));
                Some(fewest.map_or(fastest, |(value, placement)| Counted { placement, value }))
            }
        }
    }

    /// Least recompute of a block that begins at checkpoint `from`, for each next checkpoint.
    fn blocks(&self, from: usize) -> impl Iterator<Item = (usize, f64)> + use<'_> {
        let last = self.chain.layers.min(from.saturating_add(self.chain.max_segment_layers));
        let mut sum = 0.0;
        (from + 1..=last).map(move |next| {
            if next > from + 1 {
                sum += recompute(self.chain, next - 1);
            }
            (next, sum)
        })
    }

    fn fill_rest(&mut self) {
        let n = self.chain.layers;
        let mut current = vec![f64::INFINITY; n + 1];
        current[n] = 0.0;
        self.rest.push(current);
        for q in 1..=n {
            if self.is_late() {
                return;
            }
            let before = &self.rest[q - 1];
            let row = (0..=n)
                .map(|i| self.blocks(i).map(|(t, cost)| cost + before[t]).fold(f64::INFINITY, f64::min))
                .collect();
            self.rest.push(row);
        }
    }

    /// The tiers' counts for so many checkpoints, if the budgets, the links and the block limit allow them at all.
    fn counts(&self, checkpoints: usize) -> Option<Counts> {
        let [hbm, host, drive] = self.slots;
        let off = checkpoints.saturating_sub(hbm);
        let nvme = off.saturating_sub(host);
        let mut exposed = [0.0; 4];
        for (pool, exposed) in self.pools.iter().zip(&mut exposed) {
            let carried = if pool.nvme { nvme } else { off };
            if carried > 0 {
                *exposed = (pool.ms? * carried as f64 - pool.room[pool.first[0]]).max(0.0);
            }
        }
        let recompute = self.rest[checkpoints - 1][0];
        let bound = recompute + exposed.iter().sum::<f64>() + self.overflow;
        (nvme <= drive && recompute.is_finite()).then_some(Counts { checkpoints, off, nvme, exposed, bound })
    }

    /// The least step time plus `weight` over all counts.
    fn best(&self, counts: &[Counts], weight: impl Fn(&Counts) -> f64) -> Option<Counted> {
        let mut order: Vec<(f64, &Counts)> = counts.iter().map(|c| (c.bound + weight(c), c)).collect();
        order.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut best: Option<Counted> = None;
        for (bound, counts) in order {
            let limit = best.as_ref().map_or(f64::INFINITY, |best| best.value);
            if bound >= limit {
                break;
            }
            if let Some((step, placement)) = self.step(counts, limit - weight(counts))
                && step + weight(counts) < limit
            {
                best = Some(Counted { placement, value: step + weight(counts) });
            }
        }
        best
    }

    /// The least step time with these counts and its placement, if at most `limit`.
    fn step(&self, counts: &Counts, limit: f64) -> Option<(f64, Vec<Placement>)> {
        if counts.bound > limit {
            return None;
        }
        if counts.off == 0 {
            return Some((counts.bound, self.placement(counts, &[], 0)));
        }
        let start = Label { recompute: 0.0, exposed: counts.exposed, boundary: 0, parent: None };
        let mut labels = vec![self.enter(start, counts, 1)];
        let mut frontier = vec![0];
        for count in 1..counts.off {
            if self.is_late() {
                return None;
            }
            frontier = self.extend(&mut labels, &frontier, counts, count, limit);
        }
        let step = |label: &Label| self.at_least(label, counts, counts.off);
        let best = frontier.into_iter().min_by(|a, b| step(&labels[*a]).total_cmp(&step(&labels[*b])))?;
        let value = step(&labels[best]);
        let mut offloaded = vec![];
        let mut at = Some(best);
        while let Some(label) = at.map(|at| &labels[at]) {
            offloaded.push(label.boundary);
            at = label.parent;
        }
        offloaded.reverse();
        (value <= limit).then(|| (value, self.placement(counts, &offloaded, labels[best].boundary)))
    }

    /// No completion of a path of `count` checkpoints has a shorter step.
    fn at_least(&self, label: &Label, counts: &Counts, count: usize) -> f64 {
        let rest = self.rest[counts.checkpoints - count][label.boundary];
        label.recompute + rest + label.exposed.iter().sum::<f64>() + self.overflow
    }

    /// Counts in what the suffix of windows from the `count`-th checkpoint's first on is asked to carry.
    fn enter(&self, mut label: Label, counts: &Counts, count: usize) -> Label {
        for (pool, exposed) in self.pools.iter().zip(&mut label.exposed) {
            let carried = if pool.nvme { counts.nvme } else { counts.off };
            if let (Some(ms), true) = (pool.ms, count <= carried) {
                let demand = ms * (carried - count + 1) as f64;
                *exposed = exposed.max(demand - pool.room[pool.first[label.boundary]]);
            }
        }
        label
    }

    /// All useful paths of one more checkpoint: none is worse than another in recompute and in every pool.
    fn extend(
        &self,
        labels: &mut Vec<Label>,
        frontier: &[usize],
        counts: &Counts,
        count: usize,
        limit: f64,
    ) -> Vec<usize> {
        let mut ending: Vec<Vec<usize>> = vec![vec![]; self.chain.boundaries()];
        for &parent in frontier {
            let (from, so_far, exposed) =
                (labels[parent].boundary, labels[parent].recompute, labels[parent].exposed);
            for (next, cost) in self.blocks(from) {
                let label = Label { recompute: so_far + cost, exposed, boundary: next, parent: Some(parent) };
                let label = self.enter(label, counts, count + 1);
                if self.at_least(&label, counts, count + 1) > limit {
                    continue;
                }
                let beside = &mut ending[next];
                if beside.iter().any(|&other| dominates(&labels[other], &label)) {
                    continue;
                }
                beside.retain(|&other| !dominates(&label, &labels[other]));
                beside.push(labels.len());
                labels.push(label);
            }
        }
        ending.concat()
    }

    /// NVMe, host, HBM in index order over the offloaded checkpoints and the cheapest path from the last of them (or from 0) on.
    fn placement(&self, counts: &Counts, offloaded: &[usize], last: usize) -> Vec<Placement> {
        let mut placement = vec![Placement::Recompute; self.chain.boundaries()];
        for (k, &i) in offloaded.iter().enumerate() {
            placement[i] = if k < counts.nvme { Placement::Nvme } else { Placement::Host };
        }
        if offloaded.is_empty() {
            placement[0] = Placement::Hbm;
        }
        let mut at = last;
        for q in (1..=counts.checkpoints - offloaded.len().max(1)).rev() {
            let cost = |&(next, cost): &(usize, f64)| cost + self.rest[q - 1][next];
            let Some((next, _)) = self.blocks(at).min_by(|a, b| cost(a).total_cmp(&cost(b))) else { break };
            placement[next] = Placement::Hbm;
            at = next;
        }
        placement
    }
}

fn dominates(a: &Label, b: &Label) -> bool {
    a.recompute <= b.recompute && a.exposed.iter().zip(&b.exposed).all(|(a, b)| a <= b)
}
