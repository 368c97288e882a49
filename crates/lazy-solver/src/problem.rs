//! From a cost chain to a compact exact program. `docs/model.md` derives it.
//!
//! Per boundary three binaries: `skip` (recomputed), `off` (host or NVMe) and `nvme` (only with `off`). HBM is what is left. No
//! block edges, because skipping a boundary costs one layer and blocks only bound runs of skips. No transfer per window, because
//! a pool's exposed time is the largest overflow of any suffix of windows: one real column and one row per suffix.

use lazy_model::{BoundaryIndex, Bytes, CostChain, Locks, Placement, Pool, Tier};

use crate::cbc::WHOLE;
use crate::link::Link;
use crate::mip::{Column, Mip};

/// In longer chains each suffix of windows is stated by the one before and what enters beside it, which takes a column a suffix. Written
/// out in full, as CBC likes it best, rows grow with the square of the layers, and so does its first relaxation, during which it
/// does not look at the clock.
const MOST_LAYERS_WRITTEN_OUT: usize = 300;

/// What is minimised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Goal {
    /// The chain's own objective.
    Cost,
    /// Step time alone: recompute and exposed, without the weights.
    Step,
    /// Checkpoints, and among equals those on NVMe, of plans whose step takes at most so many ms.
    Fewest { step_at_most: f64 },
    /// The bytes in one tier, whose budget is ignored.
    BytesIn(Tier),
}

impl Goal {
    /// What a ms, a checkpoint and a boundary on NVMe count.
    fn weights(self, chain: &CostChain) -> (f64, f64, f64) {
        match self {
            Goal::Cost => (1.0, chain.checkpoint_penalty, chain.nvme_tiebreak),
            Goal::Step => (1.0, 0.0, 0.0),
            // One checkpoint outweighs all boundaries on NVMe.
            Goal::Fewest { .. } => (0.0, (chain.boundaries() + 1) as f64, 1.0),
            Goal::BytesIn(_) => (0.0, 0.0, 0.0),
        }
    }
}

/// The program of a chain, with what is needed to read its solutions.
pub(crate) struct Problem {
    pub(crate) mip: Mip,
    sizes: Vec<u64>,
    skip: Vec<Column>,
    off: Vec<Column>,
    nvme: Vec<Column>,
    /// Exposed time of each pool that may carry anything.
    exposed: Vec<Column>,
    /// Exposed time of mandatory traffic (ms), whatever is placed where.
    overflow: f64,
}

/// Which placements the ends and the locks leave to a boundary.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allowed {
    pub(crate) hbm: bool,
    pub(crate) host: bool,
    pub(crate) nvme: bool,
    pub(crate) skip: bool,
}

impl Problem {
    /// The program of `chain` (validated), or `None` where locks or a link without bandwidth already rule out every placement.
    pub(crate) fn new(chain: &CostChain, goal: Goal) -> Option<Problem> {
        Problem::stated(chain, goal, chain.layers <= MOST_LAYERS_WRITTEN_OUT)
    }

    fn stated(chain: &CostChain, goal: Goal, written_out: bool) -> Option<Problem> {
        let allowed = allowed(chain)?;
        let mut problem = Problem::with_columns(chain, &allowed, goal);
        problem.block_rows(chain);
        problem.budget_rows(chain, goal);
        for pool in Pool::ALL {
            problem.pool_rows(chain, pool, goal, written_out)?;
        }
        if let Goal::Fewest { step_at_most } = goal {
            problem.step_row(chain, step_at_most);
        }
        Some(problem)
    }

    fn with_columns(chain: &CostChain, allowed: &[Allowed], goal: Goal) -> Problem {
        let sizes: Vec<u64> = chain.boundary_bytes.iter().map(|b| b.get()).collect();
        let mut p = Problem {
            mip: Mip::default(),
            sizes,
            skip: vec![],
            off: vec![],
            nvme: vec![],
            exposed: vec![],
            overflow: 0.0,
        };
        let unit = unit(&p.sizes);
        let (ms, checkpoint, on_nvme) = goal.weights(chain);
        for (i, a) in allowed.iter().enumerate() {
            let size = p.sizes[i] as f64 / unit as f64;
            // Cost of HBM (in the constant), and what skipping, offloading and NVMe add to it.
            let (hbm, skip, off, nvme) = match goal {
                Goal::Cost | Goal::Step | Goal::Fewest { .. } => {
                    (checkpoint, ms * recompute(chain, i) - checkpoint, 0.0, on_nvme)
                }
                Goal::BytesIn(Tier::Hbm) => (size, -size, -size, 0.0),
                Goal::BytesIn(Tier::Host) => (0.0, 0.0, size, -size),
                Goal::BytesIn(Tier::Nvme) => (0.0, 0.0, 0.0, size),
            };
            let (s, o, v) =
                (p.mip.binary(skip, a.skip), p.mip.binary(off, a.host || a.nvme), p.mip.binary(nvme, a.nvme));
            p.mip.constant += hbm;
            // One placement each; without HBM as the rest, exactly one of the others.
            p.mip.row(vec![(s, 1.0), (o, 1.0)], if a.hbm { f64::NEG_INFINITY } else { 1.0 }, 1.0);
            // NVMe only when offloaded; without host, offloaded means NVMe.
            p.mip.row(vec![(v, 1.0), (o, -1.0)], if a.host { f64::NEG_INFINITY } else { 0.0 }, 0.0);
            p.skip.push(s);
            p.off.push(o);
            p.nvme.push(v);
        }
        p
    }

    /// No `max_segment_layers` boundaries in a row are skipped.
    fn block_rows(&mut self, chain: &CostChain) {
        let limit = chain.max_segment_layers;
        for first in 1..=chain.layers.saturating_sub(limit) {
            let run = self.skip[first..first + limit].iter().map(|s| (*s, 1.0)).collect();
            self.mip.at_most(run, (limit - 1) as f64);
        }
    }

    /// Budgets, in whole units of bytes. Sizes and budgets are rounded down, which never forbids a set that fits: a sum of rounded
    /// sizes is a whole number not above the rounded sum. Where units are the sizes' common divisor nothing is lost either;
    /// elsewhere a set that is too large by less than a unit a boundary passes here, and the exact check sends it back.
    ///
    /// Whole numbers are for CBC's sake: coefficients like 1023.9999986 beside 1024 made its cuts remove every solution.
    fn budget_rows(&mut self, chain: &CostChain, goal: Goal) {
        let unit = unit(&self.sizes);
        // Rounding may have made sizes equal: divide once more by what the rounded sizes share.
        let rounded: Vec<u64> = self.sizes.iter().map(|size| size / unit).collect();
        let unit = unit * gcd(&rounded).max(1);
        let total: u64 = self.sizes.iter().sum();
        for (tier, budget) in [
            (Tier::Hbm, chain.gpu_budget_bytes),
            (Tier::Host, chain.cpu_budget_bytes),
            (Tier::Nvme, chain.nvme_budget_bytes),
        ] {
            if goal == Goal::BytesIn(tier) || budget.get() >= total {
                continue;
            }
            self.in_tier_at_most(tier, |size| (size / unit) as f64, (budget.get() / unit) as f64, None);
        }
    }

    /// `sum of weight(size) x [boundary is in tier] <= limit`, over all boundaries or those chosen.
    fn in_tier_at_most(
        &mut self,
        tier: Tier,
        weight: impl Fn(u64) -> f64,
        limit: f64,
        only: Option<&[usize]>,
    ) {
        let mut limit = limit;
        let mut terms = Vec::new();
        let all: Vec<usize> = (0..self.sizes.len()).collect();
        for &i in only.unwrap_or(&all) {
            let w = weight(self.sizes[i]);
            match tier {
                Tier::Hbm => {
                    limit -= w;
                    terms.extend([(self.skip[i], -w), (self.off[i], -w)]);
                }
                Tier::Host => terms.extend([(self.off[i], w), (self.nvme[i], -w)]),
                Tier::Nvme => terms.push((self.nvme[i], w)),
            }
        }
        self.mip.at_most(terms, limit);
    }

    /// Exposed time of one pool: at least what each suffix of windows is asked to carry beyond its room. Only the suffixes that
    /// begin at some boundary's first window can bind, and of those only the ones that can overflow at all.
    fn pool_rows(&mut self, chain: &CostChain, pool: Pool, goal: Goal, written_out: bool) -> Option<()> {
        let n = chain.layers;
        let link = Link::of(chain, pool);
        let users = if link.nvme { self.nvme.clone() } else { self.off.clone() };
        if link.rate == 0.0 {
            if link.mandatory.iter().any(|m| m.get() > 0) {
                return None;
            }
            for (column, _) in users.iter().zip(&self.sizes).filter(|(_, size)| **size > 0) {
                self.mip.binary[*column] = Some((0.0, 0.0));
            }
            return Some(());
        }
        if let Goal::BytesIn(_) = goal {
            return Some(());
        }
        let rooms = link.rooms(chain);
        let weight = goal.weights(chain).0;
        self.overflow += rooms.overflow;
        self.mip.constant += weight * rooms.overflow;
        let exposed = self.mip.real(weight);
        self.exposed.push(exposed);
        let equal = self.sizes[0] > 0 && self.sizes.iter().all(|size| *size == self.sizes[0]);
        let mut demand = 0.0;
        let mut tail: Vec<(Column, f64)> = vec![(exposed, 1.0)];
        // Boundaries enter in index order, so each suffix of windows is a suffix of boundaries.
        for i in (0..=n).rev() {
            let (ms, w) = (link.ms(self.sizes[i]), link.first(i, n));
            tail.push((users[i], -ms));
            demand += ms;
            let last_of_window = i == 0 || link.first(i - 1, n) < w;
            if last_of_window && demand > rooms.from[w] {
                self.mip.row(tail.clone(), -rooms.from[w], f64::INFINITY);
                if equal && written_out {
                    self.whole_transfers_row(&tail, ms, rooms.from[w]);
                }
            }
            if !written_out {
                tail = self.carried(exposed, tail);
            }
        }
        Some(())
    }

    /// A suffix's demand as a column of its own, for the next suffix to go on from.
    fn carried(&mut self, exposed: Column, tail: Vec<(Column, f64)>) -> Vec<(Column, f64)> {
        let sum = self.mip.real(0.0);
        let users = tail.into_iter().filter(|(column, _)| *column != exposed);
        self.mip.row(users.chain([(sum, 1.0)]).collect(), 0.0, 0.0);
        vec![(exposed, 1.0), (sum, -1.0)]
    }

    /// Where every transfer takes `ms`, `room` holds whole ones only: of those in `tail`, `floor(room / ms)` are hidden, and each
    /// further one exposes at least what is missing to the next whole one. Mixed-integer rounding of the suffix's own row; CBC does not
    /// find it by itself.
    fn whole_transfers_row(&mut self, tail: &[(Column, f64)], ms: f64, room: f64) {
        let whole = (room / ms).floor();
        let missing = ms * (whole + 1.0) - room;
        // Next to nothing is missing: the row's coefficient would be out of all proportion, and it would say little.
        if missing < 1e-3 * ms {
            return;
        }
        let terms =
            tail.iter().map(|&(column, weight)| (column, if weight > 0.0 { 1.0 / missing } else { -1.0 }));
        self.mip.row(terms.collect(), -whole, f64::INFINITY);
    }

    /// Recompute and exposed time together take at most `limit` ms.
    fn step_row(&mut self, chain: &CostChain, limit: f64) {
        let skipped = self.skip.iter().enumerate().map(|(i, s)| (*s, recompute(chain, i)));
        let exposed = self.exposed.iter().map(|x| (*x, 1.0));
        self.mip.at_most(skipped.chain(exposed).collect(), limit - self.overflow);
    }

    /// Reads a placement off a solution, or `None` where a binary is fractional.
    pub(crate) fn placement(&self, values: &[f64]) -> Option<Vec<Placement>> {
        let bit = |column: Column| {
            let v = values.get(column)?;
            ((v - v.round()).abs() < WHOLE).then_some(*v > 0.5)
        };
        let state = |i: usize| {
            Some(match (bit(self.skip[i])?, bit(self.off[i])?, bit(self.nvme[i])?) {
                (true, _, _) => Placement::Recompute,
                (_, true, true) => Placement::Nvme,
                (_, true, false) => Placement::Host,
                _ => Placement::Hbm,
            })
        };
        (0..self.sizes.len()).map(state).collect()
    }

    /// Forbids the boundaries that `placement` puts into `tier` from being there together, given that they exceed `budget`. No
    /// allowed placement is lost: the row holds for every set that fits.
    pub(crate) fn forbid_overfull(&mut self, placement: &[Placement], tier: Tier, budget: Bytes) {
        let mut cover: Vec<usize> =
            (0..self.sizes.len()).filter(|&i| placement[i].tier() == Some(tier)).collect();
        cover.sort_by_key(|&i| (std::cmp::Reverse(self.sizes[i]), i));
        // The fewest largest that exceed the budget; any boundary at least as large may join without weakening the limit.
        let mut sum = 0;
        let mut needed = 0;
        while sum <= budget.get() && needed < cover.len() {
            sum += self.sizes[cover[needed]];
            needed += 1;
        }
        cover.truncate(needed);
        let Some(&largest) = cover.first() else { return };
        let joins = |i: &usize| self.sizes[*i] >= self.sizes[largest] && placement[*i].tier() != Some(tier);
        let extension: Vec<usize> = (0..self.sizes.len()).filter(joins).collect();
        let limit = (cover.len() - 1) as f64;
        cover.extend(extension);
        self.in_tier_at_most(tier, |_| 1.0, limit, Some(&cover));
    }
}

/// Cost of skipping boundary `i` (ms): one more forward of the layer below it.
pub(crate) fn recompute(chain: &CostChain, i: usize) -> f64 {
    if i == 0 { 0.0 } else { chain.layer_recompute_ms[i - 1] }
}

/// Bytes that count as 1 in budget rows: the sizes' common divisor where that gives moderate whole numbers, else a 2^18th of the
/// largest size. CBC lets a binary be off by 1e-6, so larger coefficients would be no more exact.
fn unit(sizes: &[u64]) -> u64 {
    let largest = sizes.iter().copied().max().unwrap_or(0);
    gcd(sizes).max(largest >> 18).max(1)
}

pub(crate) fn gcd(sizes: &[u64]) -> u64 {
    sizes.iter().fold(0, |a, &b| {
        let (mut a, mut b) = (a, b);
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    })
}

/// `None` where the locked edges are no path or two locks contradict each other.
pub(crate) fn allowed(chain: &CostChain) -> Option<Vec<Allowed>> {
    let n = chain.layers;
    let none = Locks::default();
    let locks = chain.locks.as_ref().unwrap_or(&none);
    let mut allowed = vec![Allowed { hbm: true, host: true, nvme: true, skip: true }; n + 1];
    allowed[0].skip = false;
    allowed[n].skip = false;
    if let Some(edges) = &locks.edges {
        let mut ends = edges.clone();
        ends.sort_unstable();
        let chained = ends.windows(2).all(|pair| pair[0].1 == pair[1].0);
        let whole =
            ends.first().is_some_and(|e| e.0.get() == 0) && ends.last().is_some_and(|e| e.1.get() == n);
        let short = ends.iter().all(|(s, e)| s < e && e.get() - s.get() <= chain.max_segment_layers);
        if !(chained && whole && short) {
            return None;
        }
        for (i, a) in allowed.iter_mut().enumerate() {
            let on_path = i == 0 || ends.iter().any(|(_, e)| e.get() == i);
            *a = if on_path {
                Allowed { skip: false, ..*a }
            } else {
                Allowed { hbm: false, host: false, nvme: false, ..*a }
            };
        }
    }
    if let Some(set) = &locks.gpu {
        for (i, a) in allowed.iter_mut().enumerate() {
            *a = if set.contains(&BoundaryIndex(i)) {
                Allowed { hbm: a.hbm, host: false, nvme: false, skip: false }
            } else {
                Allowed { hbm: false, ..*a }
            };
        }
    }
    for (i, fixed) in &locks.fixed {
        let a = &mut allowed[i.get()];
        a.hbm &= *fixed == Placement::Hbm;
        a.host &= *fixed == Placement::Host;
        a.nvme &= *fixed == Placement::Nvme;
        a.skip &= *fixed == Placement::Recompute;
    }
    allowed.iter().all(|a| a.hbm || a.host || a.nvme || a.skip).then_some(allowed)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::cbc::{self, Outcome};
    use crate::filler_tests::random_chain;
    use crate::place::Random;

    #[test]
    fn suffixes_stated_one_by_one_have_the_optimum_of_those_written_out() {
        let mut exposed = 0;
        for seed in 0..60 {
            let chain = random_chain(&mut Random(1000 + seed));
            let value = |written_out| {
                let problem = Problem::stated(&chain, Goal::Step, written_out).unwrap();
                match cbc::solve(&problem.mip, None) {
                    Outcome::Finished { values, bound } => {
                        let late: f64 = problem.exposed.iter().map(|x| values[*x]).sum();
                        Some((bound, late))
                    }
                    Outcome::Infeasible => None,
                    other => panic!("{other:?}"),
                }
            };
            let (full, short) = (value(true), value(false));
            assert_eq!(full.is_some(), short.is_some());
            if let (Some((full, late)), Some((short, _))) = (full, short) {
                assert!((full - short).abs() < 1e-6 * (1.0 + full), "{full} {short}");
                exposed += usize::from(late > 1e-3);
            }
        }
        assert!(exposed > 5, "{exposed}");
    }
}
