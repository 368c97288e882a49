//! The program of a keep chain, and the rows added to it where a plan overflows. `docs/model.md` derives both.

use std::collections::{BTreeMap, HashSet};

use lazy_model::{CostChain, Keep, LayerIndex, Placement, Position, Tier};

use super::shape::{NOT_COUNTED, Plan, Shape};
use crate::mip::{Column, Mip};
use crate::problem::{Allowed, allowed, recompute};

/// Blocks of up to so many layers have their covers in the program from the start. Longer ones would swamp it: N L of them, with L terms
/// each. There they come with the plans that need them.
const EAGER_BLOCK: usize = 8;

/// What is minimised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Goal {
    /// The chain's own objective.
    Cost,
    /// Checkpoints, and among equals those on NVMe, of plans whose step takes at most so many ms.
    Fewest { step_at_most: f64 },
    /// The bytes in host RAM or on NVMe, whose budget is ignored, or the HBM above `Shape::hbm`.
    BytesIn(Tier),
    /// Nothing: any plan will do.
    Any,
}

impl Goal {
    /// What a ms, a checkpoint and a boundary on NVMe count.
    fn weights(self, chain: &CostChain) -> (f64, f64, f64) {
        match self {
            Goal::Cost => (1.0, chain.checkpoint_penalty, chain.nvme_tiebreak),
            // One checkpoint outweighs all boundaries on NVMe.
            Goal::Fewest { .. } => (0.0, (chain.boundaries() + 1) as f64, 1.0),
            Goal::BytesIn(_) | Goal::Any => (0.0, 0.0, 0.0),
        }
    }
}

/// Something that takes room: a boundary that stays in HBM, or a column that is 1 when its bytes are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Held {
    /// The boundary is neither skipped nor offloaded.
    Resident(usize),
    One(Column),
}

/// `constant + sum of bytes of what is held <= HBM + spare`, at one position.
struct HbmRow {
    held: Vec<(Held, u64)>,
    constant: i128,
    /// Bytes that the interval's windows have carried away.
    spare: f64,
}

/// The columns and rows of a keep chain, which grow as plans overflow.
pub(crate) struct Program {
    pub(crate) mip: Mip,
    shape: Shape,
    goal: Goal,
    skip: Vec<Column>,
    off: Vec<Column>,
    nvme: Vec<Column>,
    kept: Vec<Column>,
    host: Vec<Option<Column>>,
    retained: Vec<Option<Column>>,
    /// `cover[z, i, p]`: `z` (a binary of boundary or layer i) is 1 and boundaries `i + 1 ..= p` are all skipped.
    cover: BTreeMap<(Column, usize), Column>,
    /// HBM beyond the cap, in units; only where the least cap is asked for.
    beyond: Option<Column>,
    added: HashSet<(Position, [usize; 4])>,
    /// Exposed time of each pool that may carry anything.
    exposed: [Option<Column>; 4],
    /// Rows of exposed time: pool, first window, whether with the blocks that begin below.
    exposed_from: HashSet<(usize, usize, bool)>,
    /// Exposed time of mandatory traffic (ms), whatever is placed where.
    overflow_ms: f64,
}

impl Program {
    /// The program of `chain` (validated, with the keep extension), or `None` where locks or a link without bandwidth already rule
    /// out every plan.
    pub(crate) fn new(chain: &CostChain, shape: Shape, goal: Goal) -> Option<Program> {
        let mut allowed = allowed(chain)?;
        let n = shape.layers;
        // The last boundary belongs to the loss.
        if !allowed[n].hbm {
            return None;
        }
        allowed.truncate(n);
        let mut p = Program {
            mip: Mip::default(),
            shape,
            goal,
            skip: vec![],
            off: vec![],
            nvme: vec![],
            kept: vec![],
            host: vec![],
            retained: vec![],
            cover: BTreeMap::new(),
            beyond: None,
            added: HashSet::new(),
            exposed: [None; 4],
            exposed_from: HashSet::new(),
            overflow_ms: 0.0,
        };
        p.boundary_columns(chain, &allowed);
        p.layer_columns(chain);
        p.count_rows();
        p.block_rows();
        p.budget_rows(chain);
        p.dominance_rows(chain);
        for pool in 0..4 {
            p.exposure_rows(pool, goal.weights(chain).0)?;
        }
        if let Goal::Fewest { step_at_most } = goal {
            p.step_row(chain, step_at_most);
        }
        let top = n.saturating_sub(p.shape.limit.min(EAGER_BLOCK));
        p.add(Position::Turn, [0; 4]);
        for l in top..n {
            let nvme = if p.shape.staging > 0 { NOT_COUNTED } else { l };
            p.add(Position::Backward(LayerIndex(l)), [0, l, 0, nvme]);
        }
        Some(p)
    }

    fn boundary_columns(&mut self, chain: &CostChain, allowed: &[Allowed]) {
        let (ms, penalty, on_nvme) = self.goal.weights(chain);
        let any_nvme = self.goal == Goal::BytesIn(Tier::Nvme) || chain.nvme_budget_bytes.get() > 0;
        let any_host = self.goal == Goal::BytesIn(Tier::Host) || chain.cpu_budget_bytes.get() > 0;
        self.mip.constant += penalty * (self.shape.layers + 1) as f64;
        for (i, a) in allowed.iter().enumerate() {
            let size = self.shape.boundary[i] as f64 / self.shape.unit as f64;
            let (skip, off, nvme) = match self.goal {
                Goal::BytesIn(Tier::Host) => (0.0, size, -size),
                Goal::BytesIn(Tier::Nvme) => (0.0, 0.0, size),
                _ => (ms * recompute(chain, i) - penalty, 0.0, on_nvme),
            };
            // A boundary of no bytes fits into a tier of none.
            let empty = self.shape.boundary[i] == 0;
            let (host, nvme_ok) = (a.host && (any_host || empty), a.nvme && (any_nvme || empty));
            let (s, o, v) = (
                self.mip.binary(skip, a.skip),
                self.mip.binary(off, host || nvme_ok),
                self.mip.binary(nvme, nvme_ok),
            );
            self.mip.row(vec![(s, 1.0), (o, 1.0)], if a.hbm { f64::NEG_INFINITY } else { 1.0 }, 1.0);
            self.mip.row(vec![(v, 1.0), (o, -1.0)], if host { f64::NEG_INFINITY } else { 0.0 }, 0.0);
            self.skip.push(s);
            self.off.push(o);
            self.nvme.push(v);
        }
    }

    fn layer_columns(&mut self, chain: &CostChain) {
        let n = self.shape.layers;
        let locks = chain.locks.as_ref().map(|locks| &locks.keep);
        let offload = chain.internals_offload == Some(true);
        let retain = chain.retain_internals == Some(true);
        for l in 0..n {
            let lock = locks.and_then(|locks| locks.get(&LayerIndex(l))).copied();
            let saved = self.goal.weights(chain).0 * chain.rerun_ms()[l];
            let host_cost = match self.goal {
                Goal::BytesIn(Tier::Host) => self.shape.internals[l] as f64 / self.shape.unit as f64,
                _ => 0.0,
            };
            self.mip.constant += saved;
            let kept = self.mip.binary(-saved, lock != Some(false));
            let open = lock.is_none();
            let host = (offload && open).then(|| self.mip.binary(host_cost - saved, true));
            // Only a layer whose output can be skipped is ever re-run for it.
            let output = (l + 1 < n).then(|| self.skip[l + 1]);
            let output = output.filter(|s| retain && open && self.may_be_one(*s));
            let retained = output.map(|output| {
                let r = self.mip.binary(-saved, true);
                self.mip.at_most(vec![(r, 1.0), (output, -1.0)], 0.0);
                r
            });
            let mut one = vec![(kept, 1.0)];
            one.extend(host.iter().chain(&retained).map(|c| (*c, 1.0)));
            if lock == Some(true) {
                self.mip.row(one, 1.0, 1.0);
            } else if one.len() > 1 {
                self.mip.at_most(one, 1.0);
            }
            self.kept.push(kept);
            self.host.push(host);
            self.retained.push(retained);
        }
        if self.goal == Goal::BytesIn(Tier::Hbm) {
            self.beyond = Some(self.mip.real(1.0));
        }
    }

    /// How many boundaries are skipped, offloaded and on NVMe, and how many layers are kept, as integers for CBC to branch on: whether
    /// there is room for one more settles more than any single one does.
    fn count_rows(&mut self) {
        let host = self.host.iter().flatten().copied().collect();
        for list in [self.nvme.clone(), self.skip.clone(), self.kept.clone(), self.off.clone(), host] {
            let list: Vec<Column> = list.into_iter().filter(|c| self.may_be_one(*c)).collect();
            if list.len() < 2 {
                continue;
            }
            let count = self.mip.integer(0.0, list.len());
            let mut terms: Vec<(Column, f64)> = list.into_iter().map(|c| (c, 1.0)).collect();
            terms.push((count, -1.0));
            self.mip.row(terms, 0.0, 0.0);
        }
    }

    fn may_be_one(&self, column: Column) -> bool {
        self.mip.binary[column].is_none_or(|(_, upper)| upper > 0.5)
    }

    fn block_rows(&mut self) {
        let (n, limit) = (self.shape.layers, self.shape.limit);
        for first in 1..=n - limit {
            let run = &self.skip[first..n.min(first + limit)];
            // With boundary N at the end the run is one shorter, and N is saved.
            if run.len() == limit {
                let run = run.iter().map(|s| (*s, 1.0)).collect();
                self.mip.at_most(run, (limit - 1) as f64);
            }
        }
    }

    /// Budgets of the tiers, in whole units, sizes rounded down: see `Problem::budget_rows`.
    fn budget_rows(&mut self, chain: &CostChain) {
        let n = self.shape.layers;
        for (tier, budget) in [
            (Tier::Hbm, chain.gpu_budget_bytes),
            (Tier::Host, chain.cpu_budget_bytes),
            (Tier::Nvme, chain.nvme_budget_bytes),
        ] {
            // In the keep model the HBM goal is the cap, not this budget.
            if self.goal == Goal::BytesIn(tier) && tier != Tier::Hbm {
                continue;
            }
            let items = self.in_tier(tier);
            // The last boundary is in HBM whatever the plan.
            let last = if tier == Tier::Hbm { self.shape.boundary[n] } else { 0 };
            let total: u128 = items.iter().map(|(_, size)| u128::from(*size)).sum();
            if total + u128::from(last) > u128::from(budget.get()) {
                let limit = (i128::from(budget.get()) - i128::from(last)) as f64;
                self.packed(&items, limit, None);
            }
        }
    }

    /// What takes room in a tier's budget. A boundary in host RAM is `off - nvme`: two entries, one negative in effect.
    fn in_tier(&self, tier: Tier) -> Vec<(Weight, u64)> {
        let boundaries = (0..self.shape.layers).map(|i| {
            let weight = match tier {
                Tier::Hbm => Weight::Held(Held::Resident(i)),
                Tier::Host => Weight::Host(i),
                Tier::Nvme => Weight::Held(Held::One(self.nvme[i])),
            };
            (weight, self.shape.boundary[i])
        });
        let internals = self.host.iter().zip(&self.shape.internals);
        let internals = internals.filter_map(|(h, size)| {
            (*h).filter(|_| tier == Tier::Host).map(|h| (Weight::Held(Held::One(h)), *size))
        });
        boundaries.chain(internals).collect()
    }

    /// `sum of size x held <= limit (bytes)`, in whole units, both sides rounded down. No plan is lost by that: a sum of rounded
    /// sizes is a whole number not above the rounded sum. `relaxed` is added on the right.
    fn packed(&mut self, items: &[(Weight, u64)], limit: f64, relaxed: Option<Column>) {
        let unit = self.shape.unit;
        let mut right = whole_units(limit, unit);
        let mut terms: BTreeMap<Column, f64> = BTreeMap::new();
        for (weight, size) in items {
            let size = (size / unit) as f64;
            match weight {
                Weight::Held(Held::Resident(i)) => {
                    right -= size;
                    *terms.entry(self.skip[*i]).or_default() -= size;
                    *terms.entry(self.off[*i]).or_default() -= size;
                }
                Weight::Held(Held::One(column)) => *terms.entry(*column).or_default() += size,
                Weight::Host(i) => {
                    *terms.entry(self.off[*i]).or_default() += size;
                    *terms.entry(self.nvme[*i]).or_default() -= size;
                }
            }
        }
        if let Some(column) = relaxed {
            terms.insert(column, -1.0);
        } else if terms.values().map(|c| c.max(0.0)).sum::<f64>() <= right {
            return;
        }
        self.mip.at_most(terms.into_iter().filter(|(_, c)| *c != 0.0).collect(), right);
    }

    /// Of two layers the higher one is worth keeping first if it is no larger and no cheaper to re-run.
    fn dominance_rows(&mut self, chain: &CostChain) {
        if chain.locks.as_ref().is_some_and(|locks| !locks.keep.is_empty()) {
            return;
        }
        let times = chain.rerun_ms();
        let size = self.shape.internals.clone();
        for l in 0..self.shape.layers {
            let better = (l + 1..self.shape.layers).find(|&m| size[l] >= size[m] && times[l] <= times[m]);
            if let Some(m) = better {
                let mut row = vec![(self.kept[l], 1.0), (self.kept[m], -1.0)];
                row.extend(self.retained[m].map(|r| (r, -1.0)));
                // Of equal sizes none above a kept one is in host RAM.
                row.extend(self.host[m].filter(|_| size[l] > size[m]).map(|h| (h, -1.0)));
                self.mip.at_most(row, 0.0);
            }
        }
        self.order_rows();
    }

    /// Of layers with internals of one size, those in host RAM are all below those in HBM: `up` is 1 up to the last of the former and falls to 0
    /// before the first of the latter.
    fn order_rows(&mut self) {
        let mut last: BTreeMap<u64, Column> = BTreeMap::new();
        for l in 0..self.shape.layers {
            let Some(host) = self.host[l] else { continue };
            let up = self.mip.real(0.0);
            self.mip.at_most(vec![(host, 1.0), (up, -1.0)], 0.0);
            self.mip.at_most(vec![(self.kept[l], 1.0), (up, 1.0)], 1.0);
            if let Some(below) = last.insert(self.shape.internals[l], up) {
                self.mip.at_most(vec![(up, 1.0), (below, -1.0)], 0.0);
            }
        }
    }

    /// Exposed time of one pool: at least what each suffix of windows is asked to carry beyond its room.
    fn exposure_rows(&mut self, pool: usize, ms: f64) -> Option<()> {
        let link = self.shape.links[pool].clone();
        let (n, users) = (self.shape.layers, self.users(pool));
        let internals: Vec<Option<Column>> = if link.nvme { vec![None; n] } else { self.host.clone() };
        if link.stuck {
            return None;
        }
        if link.rate == 0.0 {
            let boundaries = users.iter().copied().zip(self.shape.boundary.iter().copied());
            let layers =
                internals.iter().zip(&self.shape.internals).filter_map(|(h, size)| Some(((*h)?, *size)));
            for (column, _) in boundaries.chain(layers).filter(|(_, size)| *size > 0) {
                self.mip.binary[column] = Some((0.0, 0.0));
            }
            return Some(());
        }
        if let Goal::BytesIn(_) | Goal::Any = self.goal {
            return Some(());
        }
        self.overflow_ms += link.overflow_ms;
        self.mip.constant += ms * link.overflow_ms;
        let exposed = self.mip.real(ms);
        self.exposed[pool] = Some(exposed);
        let all = self.shape.limit <= EAGER_BLOCK;
        for w in (0..=self.shape.layers).rev() {
            self.expose(pool, w, all);
        }
        Some(())
    }

    /// Exposed time of a pool is at least what the windows from `w` on are asked to carry beyond their room. Boundary i enters when
    /// written at i, when read at the end of its block; internals of layer l at l + 1. `across`: with the boundaries read at `w` or
    /// later whose block begins further below. False if the row is there already.
    fn expose(&mut self, pool: usize, w: usize, across: bool) -> bool {
        let Some(exposed) = self.exposed[pool].filter(|_| self.exposed_from.insert((pool, w, across))) else {
            return false;
        };
        let link = self.shape.links[pool].clone();
        let (n, users) = (self.shape.layers, self.users(pool));
        let lowest = if link.outward { w } else { w.saturating_sub(1) };
        let mut row: Vec<(Column, u64)> = (lowest..n).map(|i| (users[i], self.shape.boundary[i])).collect();
        if !link.nvme {
            let layers = w.saturating_sub(1)..n;
            row.extend(layers.filter_map(|l| Some((self.host[l]?, self.shape.internals[l]))));
        }
        row.retain(|(column, size)| *size > 0 && self.may_be_one(*column));
        if across && !link.outward && w > 0 {
            row.extend(self.blocks_across(&users, w - 1));
        }
        let room = link.between(w, n);
        if row.iter().map(|(_, size)| *size as f64).sum::<f64>() > room {
            let mut terms = vec![(exposed, 1.0)];
            terms.extend(row.into_iter().map(|(column, size)| (column, -link.ms(size))));
            self.mip.row(terms, -room * 1000.0 / link.rate, f64::INFINITY);
        }
        true
    }

    /// Adds the rows that make a plan's exposed reads count in full. False if they are there already.
    pub(crate) fn add_exposed(&mut self, plan: &Plan) -> bool {
        if self.shape.limit <= EAGER_BLOCK {
            return false;
        }
        let since = self.shape.busy_since(plan, self.shape.layers);
        let h2d = self.expose(1, since[1], true);
        self.expose(3, since[3], true) || h2d
    }

    /// Recompute of both kinds and exposed time together take at most `limit` ms.
    fn step_row(&mut self, chain: &CostChain, limit: f64) {
        let times = chain.rerun_ms();
        let mut terms: Vec<(Column, f64)> = self.exposed.iter().flatten().map(|x| (*x, 1.0)).collect();
        for (l, time) in times.iter().enumerate() {
            terms.push((self.skip[l], recompute(chain, l)));
            terms.push((self.kept[l], -time));
            terms.extend(self.host[l].iter().chain(&self.retained[l]).map(|c| (*c, -time)));
        }
        self.mip.at_most(terms, limit - self.overflow_ms - times.iter().sum::<f64>());
    }

    /// The binaries of the boundaries that a pool carries.
    fn users(&self, pool: usize) -> Vec<Column> {
        if self.shape.links[pool].nvme { self.nvme.clone() } else { self.off.clone() }
    }

    /// Boundaries below `p` whose block reaches beyond `p`, as covers.
    fn blocks_across(&mut self, users: &[Column], p: usize) -> Vec<(Column, u64)> {
        let lowest = (p + 1).saturating_sub(self.shape.limit);
        let below = (lowest..p).filter(|&i| self.may_be_one(users[i]) && self.shape.boundary[i] > 0);
        let below: Vec<usize> = below.collect();
        below
            .into_iter()
            .filter_map(|i| Some((self.cover(users[i], i, p)?, self.shape.boundary[i])))
            .collect()
    }

    /// A column that is at least 1 where binary `z` is and the boundaries `i + 1 ..= p` are all skipped. `None` where they cannot be.
    fn cover(&mut self, z: Column, i: usize, p: usize) -> Option<Column> {
        if let Some(column) = self.cover.get(&(z, p)) {
            return Some(*column);
        }
        if (i + 1..=p).any(|j| !self.may_be_one(self.skip[j])) {
            return None;
        }
        let column = self.mip.real(0.0);
        let mut terms = vec![(column, 1.0), (z, -1.0)];
        terms.extend(self.skip[i + 1..=p].iter().map(|s| (*s, -1.0)));
        self.mip.row(terms, -((p - i) as f64), f64::INFINITY);
        self.cover.insert((z, p), column);
        Some(column)
    }

    /// What HBM holds at a position, bytes in flight by what entered each pool since window `since`.
    fn hbm_row(&mut self, at: Position, since: [usize; 4]) -> HbmRow {
        let n = self.shape.layers;
        let (end, layers) = match at {
            Position::Forward(f) => (f.get() + 1, f.get()),
            Position::Turn => (n, n),
            Position::Backward(p) => (p.get() + 1, p.get()),
        };
        let mut row = HbmRow { held: vec![], constant: 0, spare: 0.0 };
        row.held.extend((0..end).map(|i| (Held::Resident(i), self.shape.boundary[i])));
        row.held.extend((0..layers).map(|l| (Held::One(self.kept[l]), self.shape.internals[l])));
        match at {
            Position::Turn => row.constant = i128::from(self.shape.loss),
            Position::Forward(f) => {
                let f = f.get();
                let own = self.shape.internals[f];
                row.held.push((Held::One(self.skip[f]), self.shape.boundary[f]));
                row.held.push((Held::One(self.kept[f]), own));
                row.held.extend(self.host[f].map(|h| (Held::One(h), own)));
                row.constant = [self.shape.boundary[f + 1], self.shape.forward[f], self.shape.slack]
                    .into_iter()
                    .map(i128::from)
                    .sum();
                self.in_flight(&mut row, f, [(0, since[0]), (2, since[2])]);
            }
            Position::Backward(p) => {
                let p = p.get();
                row.constant = i128::from(self.shape.running[p]) + i128::from(self.shape.slack);
                row.held.push((Held::One(self.skip[p]), self.shape.boundary[p]));
                let skip = self.skip.clone();
                let transient = self.blocks_across(&skip, p);
                row.held.extend(transient.into_iter().map(|(c, size)| (Held::One(c), size)));
                for l in (p + 1).saturating_sub(self.shape.limit)..p {
                    // A retained layer's output is skipped: in its own block, so at l + 1 without a cover.
                    let Some(r) = self.retained[l] else { continue };
                    let held = if l + 1 == p { Some(r) } else { self.cover(r, l + 1, p) };
                    row.held.extend(held.map(|c| (Held::One(c), self.shape.internals[l])));
                }
                self.in_flight(&mut row, p, [(1, since[1]), (3, since[3])]);
            }
        }
        row
    }

    /// Adds what entered the pools in the windows `since ..= p`, and takes away what those windows below `p` carry.
    fn in_flight(&mut self, row: &mut HbmRow, p: usize, pools: [(usize, usize); 2]) {
        for (pool, since) in pools {
            let link = self.shape.links[pool].clone();
            let users = self.users(pool);
            if link.rate == 0.0 || since == NOT_COUNTED {
                continue;
            }
            if link.nvme {
                row.constant -= i128::from(self.shape.staging);
            }
            row.spare += link.between(since, p);
            let held = |c: Column, size: u64| (Held::One(c), size);
            row.held.extend((since..=p).map(|i| held(users[i], self.shape.boundary[i])));
            if !link.nvme {
                let layers = since.saturating_sub(1)..p;
                row.held.extend(layers.filter_map(|l| Some(held(self.host[l]?, self.shape.internals[l]))));
            }
            // Read: what enters at `since` or later may also begin below, where its block reaches up to there.
            if let Some(q) = since.checked_sub(1).filter(|_| !link.outward) {
                row.held.push(held(users[q], self.shape.boundary[q]));
                let across = self.blocks_across(&users, q);
                row.held.extend(across.into_iter().map(|(c, size)| held(c, size)));
            }
        }
        row.held.retain(|(h, _)| match h {
            Held::One(c) => self.may_be_one(*c),
            Held::Resident(_) => true,
        });
    }

    /// Adds the row of a position. False if it is there already.
    pub(crate) fn add(&mut self, at: Position, since: [usize; 4]) -> bool {
        if !self.added.insert((at, since)) {
            return false;
        }
        let row = self.hbm_row(at, since);
        let items: Vec<(Weight, u64)> = row.held.iter().map(|(h, size)| (Weight::Held(*h), *size)).collect();
        let limit = (self.shape.hbm - row.constant) as f64 + row.spare;
        self.packed(&items, limit, self.beyond);
        true
    }

    /// Adds the rows of all positions at which a plan holds more than `cap` bytes. False if all are there already.
    pub(crate) fn add_overflowing(&mut self, plan: &Plan, cap: f64) -> bool {
        let held = self.shape.held(plan);
        let mut any = false;
        for (index, held) in held.into_iter().enumerate() {
            if held > cap {
                let at = self.shape.position(index);
                any |= self.add(at, self.since(plan, at));
            }
        }
        any
    }

    /// Where the busy periods begin that reach into a position.
    pub(crate) fn since(&self, plan: &Plan, at: Position) -> [usize; 4] {
        match at {
            Position::Turn => [0; 4],
            // Only the pools of the pass count; the others must not make rows look different.
            Position::Forward(l) => {
                let s = self.shape.busy_since(plan, l.get());
                [s[0], 0, s[2], 0]
            }
            Position::Backward(l) => {
                let s = self.shape.busy_since(plan, l.get());
                [0, s[1], 0, s[3]]
            }
        }
    }

    /// Forbids what `plan` holds at a position from being there together: for plans that pass a row although they are a few bytes
    /// too large. Every plan that keeps the position's row exactly satisfies it.
    pub(crate) fn forbid(&mut self, plan: &Plan, at: Position, since: [usize; 4]) {
        let row = self.hbm_row(at, since);
        let truth = self.truth(plan);
        let is_held = |h: &Held| match h {
            Held::Resident(i) => plan.0[*i] == Placement::Hbm,
            Held::One(c) => truth.get(c).copied().unwrap_or(false),
        };
        let mut held: Vec<(Held, u64)> =
            row.held.into_iter().filter(|(h, size)| is_held(h) && *size > 0).collect();
        held.sort_by_key(|(h, size)| (std::cmp::Reverse(*size), *h));
        // Not the fewest: which of them make up the last bytes is not for doubles to say.
        held.dedup_by_key(|(h, _)| *h);
        self.not_all(held.into_iter().map(|(h, _)| Weight::Held(h)).collect());
    }

    /// Forbids what `plan` has in a tier from being there together.
    pub(crate) fn forbid_in_tier(&mut self, plan: &Plan, tier: Tier) {
        let truth = self.truth(plan);
        let held = self.in_tier(tier).into_iter().filter(|(w, size)| {
            *size > 0
                && match w {
                    Weight::Held(Held::Resident(i)) => plan.0[*i] == Placement::Hbm,
                    Weight::Held(Held::One(c)) => truth.get(c).copied().unwrap_or(false),
                    Weight::Host(i) => plan.0[*i] == Placement::Host,
                }
        });
        let held = held.map(|(w, _)| w).collect();
        self.not_all(held);
    }

    fn not_all(&mut self, held: Vec<Weight>) {
        let mut right = held.len() as f64 - 1.0;
        let mut terms = Vec::new();
        for weight in held {
            match weight {
                Weight::Held(Held::Resident(i)) => {
                    right -= 1.0;
                    terms.extend([(self.skip[i], -1.0), (self.off[i], -1.0)]);
                }
                Weight::Held(Held::One(c)) => terms.push((c, 1.0)),
                Weight::Host(i) => terms.extend([(self.off[i], 1.0), (self.nvme[i], -1.0)]),
            }
        }
        self.mip.at_most(terms, right);
    }

    /// The value that every column but the real ones of exposure has in a plan.
    fn truth(&self, (placement, keep): &Plan) -> BTreeMap<Column, bool> {
        let mut truth = BTreeMap::new();
        for i in 0..self.shape.layers {
            let p = placement[i];
            truth.insert(self.skip[i], p == Placement::Recompute);
            truth.insert(self.off[i], matches!(p, Placement::Host | Placement::Nvme));
            truth.insert(self.nvme[i], p == Placement::Nvme);
            truth.insert(self.kept[i], keep[i] == Keep::Hbm);
            truth.extend(self.host[i].map(|c| (c, keep[i] == Keep::Host)));
            truth.extend(self.retained[i].map(|c| (c, keep[i] == Keep::Retained)));
        }
        for ((z, p), column) in &self.cover {
            let from = self.above(*z);
            let skipped = (from..=*p).all(|j| placement[j] == Placement::Recompute);
            let value = truth.get(z).copied().unwrap_or(false) && skipped;
            truth.insert(*column, value);
        }
        truth
    }

    /// The first boundary that must be skipped for a cover of `z`.
    fn above(&self, z: Column) -> usize {
        let find = |columns: &[Column]| columns.iter().position(|c| *c == z);
        let boundary = [&self.skip, &self.off, &self.nvme].into_iter().find_map(|list| find(list));
        let layer = || self.retained.iter().position(|c| *c == Some(z));
        boundary.map_or_else(|| layer().map_or(0, |l| l + 2), |i| i + 1)
    }

    /// Reads a plan off a solution, or `None` where a binary is fractional.
    pub(crate) fn plan(&self, values: &[f64]) -> Option<Plan> {
        let bit = |column: Column| {
            let v = values.get(column)?;
            ((v - v.round()).abs() < 1e-5).then_some(*v > 0.5)
        };
        let maybe = |column: Option<Column>| column.map_or(Some(false), bit);
        let n = self.shape.layers;
        let mut plan = (Vec::with_capacity(n + 1), Vec::with_capacity(n));
        for i in 0..n {
            plan.0.push(match (bit(self.skip[i])?, bit(self.off[i])?, bit(self.nvme[i])?) {
                (true, _, _) => Placement::Recompute,
                (_, true, true) => Placement::Nvme,
                (_, true, false) => Placement::Host,
                _ => Placement::Hbm,
            });
            plan.1.push(match (bit(self.kept[i])?, maybe(self.host[i])?, maybe(self.retained[i])?) {
                (true, _, _) => Keep::Hbm,
                (_, true, _) => Keep::Host,
                (_, _, true) => Keep::Retained,
                _ => Keep::Recompute,
            });
        }
        plan.0.push(Placement::Hbm);
        Some(plan)
    }

    pub(crate) fn shape(&self) -> &Shape {
        &self.shape
    }
}

/// An entry of a row in whole units.
#[derive(Clone, Copy, Debug)]
enum Weight {
    Held(Held),
    /// The boundary is in host RAM: offloaded, but not to NVMe.
    Host(usize),
}

/// Bytes as whole units, rounded down; a limit that is a whole number of units but for rounding in the last digits stays it.
fn whole_units(bytes: f64, unit: u64) -> f64 {
    let units = bytes / unit as f64;
    (units + 1e-9 * units.abs().max(1.0)).floor()
}
