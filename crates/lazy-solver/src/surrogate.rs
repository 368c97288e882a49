//! A relaxation that sees only how many bytes of checkpoints there are, solved exactly; its value bounds the objective from below.
//!
//! Which boundaries are checkpoints decides the recompute time and the checkpoints' bytes. Whatever is placed where, bytes beyond
//! HBM must be offloaded, offloaded bytes beyond host RAM must go to NVMe, and bytes beyond the room of all windows are exposed. So
//! the cheapest set of checkpoints, charged for its bytes in this way, bounds every plan (proof in `docs/model.md`). Sets are built
//! boundary by boundary; of partial sets only those survive that no other beats in cost, bytes and length of the running block.

use std::time::Instant;

use lazy_model::{CostChain, Pool};

use crate::link::{Link, Rooms};
use crate::problem::{Allowed, allowed, gcd, recompute};
use crate::search::MOST_LAYERS;

/// Partial sets kept in all; beyond that the relaxation gives up its proof.
const MOST_LABELS: usize = 1_500_000;
/// Partial sets a boundary in the first pass, which only looks for a good complete one.
const BEAM: usize = 256;
/// Sets this much dearer than the best one known, relative to it, are still of interest.
const SLACK: f64 = 1e-3;
/// Partial and complete sets that a listing may have.
const MOST_NODES: usize = 2_000_000;
const MOST_SETS: usize = 5_000;
/// Complete sets handed out.
const SETS: usize = 12;
/// Prices of a byte, relative to the best one, at which completions are bounded.
const PRICES: [f64; 5] = [0.9, 0.97, 1.0, 1.03, 1.1];

/// The relaxation's answer.
pub(crate) struct Relaxed {
    /// No allowed plan has a smaller objective (ms).
    pub(crate) bound: f64,
    /// Which boundaries the best sets skip, best first. The first is the relaxation's optimum, if that was found.
    pub(crate) sets: Vec<Set>,
}

/// A set of checkpoints, and what it costs at least (ms).
#[derive(Clone)]
pub(crate) struct Set {
    pub(crate) at_least: f64,
    pub(crate) skip: Vec<bool>,
}

/// The relaxation of one chain.
pub(crate) struct Surrogate {
    limit: usize,
    checkpoint: f64,
    boundaries: Vec<Boundary>,
    charge: Charge,
}

#[derive(Clone, Copy)]
struct Boundary {
    bytes: u64,
    /// Cost of skipping it (ms).
    skipping: f64,
    may_skip: bool,
    may_keep: bool,
}

/// What a number of checkpoint bytes costs at least (ms).
struct Charge {
    hbm: u64,
    host: u64,
    nvme: u64,
    /// For PCIe and NVMe pools: ms a byte and room in ms; a pool that may carry nothing has no entry.
    pcie: Vec<(f64, f64)>,
    drive: Vec<(f64, f64)>,
    overflow: f64,
    tiebreak: f64,
    /// Sums of the largest sizes: `largest[k]` bytes need more than `k - 1` boundaries.
    largest: Vec<u64>,
}

#[derive(Clone, Copy)]
struct Label {
    cost: f64,
    bytes: u64,
    /// Boundaries skipped since the last checkpoint.
    run: u32,
    parent: u32,
}

/// A lower bound on what remains: at a price for each byte, the cheapest completion from each boundary and run.
struct Completion {
    price: f64,
    /// Least of charge(bytes) - price x bytes.
    charge: f64,
    /// `[boundary][run]`.
    rest: Vec<Vec<f64>>,
}

impl Surrogate {
    /// The relaxation of `chain`, or `None` where locks or a link without bandwidth already rule out every placement.
    pub(crate) fn new(chain: &CostChain) -> Option<Surrogate> {
        let allowed = allowed(chain)?;
        let boundaries = allowed.iter().enumerate().map(|(i, a)| Boundary {
            bytes: chain.boundary_bytes[i].get(),
            skipping: recompute(chain, i),
            may_skip: a.skip,
            may_keep: a.hbm || a.host || a.nvme,
        });
        Some(Surrogate {
            limit: chain.max_segment_layers.min(chain.layers),
            checkpoint: chain.checkpoint_penalty,
            boundaries: boundaries.collect(),
            charge: Charge::new(chain, &allowed)?,
        })
    }

    /// Solves the relaxation; `None` where no set of checkpoints fits.
    pub(crate) fn solve(&self, deadline: Option<Instant>) -> Option<Relaxed> {
        let best_price = self.best_price()?;
        let completions: Vec<Completion> =
            PRICES.iter().map(|factor| self.completion(best_price * factor)).collect();
        let root = completions.iter().map(|c| c.charge + c.rest[0][0]).fold(f64::NEG_INFINITY, f64::max);
        let mut sets: Vec<Set> = vec![];
        let beam = BEAM.min(MOST_LABELS / 2 / self.boundaries.len());
        for width in [beam.max(1), usize::MAX] {
            let limit = sets.first().map_or(f64::INFINITY, |set| set.at_least);
            // Some room above the limit leaves sets to choose from.
            match self.pass(&completions, limit + SLACK * limit.abs(), width, deadline) {
                Some(found) => sets = if found.is_empty() { sets } else { found },
                None => return Some(Relaxed { bound: root, sets }),
            }
        }
        let bound = sets.first()?.at_least;
        Some(Relaxed { bound, sets })
    }

    /// All sets of checkpoints that cost at least less than `limit`, best first; `None` where there are too many, or too little time.
    pub(crate) fn sets_below(&self, limit: f64, deadline: Option<Instant>) -> Option<Vec<Set>> {
        let best_price = self.best_price()?;
        let completions: Vec<Completion> =
            PRICES.iter().map(|factor| self.completion(best_price * factor)).collect();
        // One boundary follows another on the stack.
        if self.boundaries.len() > MOST_LAYERS + 1 {
            return None;
        }
        let mut search =
            Listing { surrogate: self, completions: &completions, limit, deadline, nodes: 0, sets: vec![] };
        let start = Label { cost: 0.0, bytes: 0, run: 0, parent: 0 };
        search.extend(start, &mut Vec::new())?;
        let mut sets = search.sets;
        sets.sort_by(|a, b| a.at_least.total_cmp(&b.at_least));
        Some(sets)
    }

    /// No completion of `label`, which has decided on the boundaries below `i`, costs less (ms).
    fn at_least(&self, completions: &[Completion], i: usize, label: &Label) -> f64 {
        let rest = |c: &Completion| c.price * label.bytes as f64 + c.charge + c.rest[i][label.run as usize];
        label.cost + completions.iter().map(rest).fold(f64::NEG_INFINITY, f64::max)
    }

    /// The best complete sets that cost at most `limit`, best first, keeping the `width` most promising partial sets of each boundary.
    /// `None` where there are too many, or too little time.
    fn pass(
        &self,
        completions: &[Completion],
        limit: f64,
        width: usize,
        deadline: Option<Instant>,
    ) -> Option<Vec<Set>> {
        let at_least = |i: usize, label: &Label| self.at_least(completions, i, label);
        let start = Label { cost: 0.0, bytes: 0, run: 0, parent: 0 };
        let mut stages: Vec<Vec<Label>> = vec![vec![start]];
        let mut kept = 0;
        for (i, boundary) in self.boundaries.iter().enumerate() {
            let mut next = Vec::new();
            for (parent, label) in stages[i].iter().enumerate() {
                for child in self.children(label, boundary, parent as u32) {
                    if at_least(i + 1, &child) <= limit {
                        next.push(child);
                    }
                }
            }
            undominated(&mut next, self.limit);
            if next.len() > width {
                next.sort_by(|a, b| at_least(i + 1, a).total_cmp(&at_least(i + 1, b)));
                next.truncate(width);
            }
            kept += next.len();
            if kept > MOST_LABELS || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return None;
            }
            stages.push(next);
        }
        let value = |label: &Label| label.cost + self.charge.at(label.bytes);
        let last = stages.last()?;
        let mut order: Vec<usize> = (0..last.len()).filter(|&at| value(&last[at]).is_finite()).collect();
        order.sort_by(|&a, &b| {
            value(&last[a]).total_cmp(&value(&last[b])).then(last[a].bytes.cmp(&last[b].bytes))
        });
        order.truncate(SETS);
        Some(
            order
                .into_iter()
                .map(|at| Set { at_least: value(&last[at]), skip: skipped(&stages, at) })
                .collect(),
        )
    }

    fn children(&self, label: &Label, boundary: &Boundary, parent: u32) -> impl Iterator<Item = Label> {
        let kept = boundary.may_keep.then_some(Label {
            cost: label.cost + self.checkpoint,
            bytes: label.bytes + boundary.bytes,
            run: 0,
            parent,
        });
        let skipped = (boundary.may_skip && (label.run as usize) + 1 < self.limit).then_some(Label {
            cost: label.cost + boundary.skipping,
            run: label.run + 1,
            parent,
            ..*label
        });
        kept.into_iter().chain(skipped)
    }

    /// For a price of a byte, the cheapest completions, from the last boundary down.
    fn completion(&self, price: f64) -> Completion {
        let runs = self.limit.max(1);
        let n = self.boundaries.len();
        let mut rest = vec![vec![0.0; runs]; n + 1];
        for (i, b) in self.boundaries.iter().enumerate().rev() {
            let keep = if b.may_keep {
                self.checkpoint + price * b.bytes as f64 + rest[i + 1][0]
            } else {
                f64::INFINITY
            };
            for run in 0..runs {
                let skip = if b.may_skip && run + 1 < runs {
                    b.skipping + rest[i + 1][run + 1]
                } else {
                    f64::INFINITY
                };
                rest[i][run] = keep.min(skip);
            }
        }
        Completion { price, charge: self.charge.least_minus(price), rest }
    }

    /// The price at which the bound from completions is largest, by bisection on its slope. `None` where no set fits at all.
    fn best_price(&self) -> Option<f64> {
        let mut high = 1e-18;
        let fits = |price: f64| {
            let c = self.completion(price);
            (c.rest[0][0].is_finite()).then(|| self.bytes_at(&c))
        };
        fits(high)?;
        while fits(high)? > self.charge.bytes_at(high) && high < 1e30 {
            high *= 2.0;
        }
        let mut low = 0.0;
        for _ in 0..60 {
            let middle = (low + high) / 2.0;
            if fits(middle)? > self.charge.bytes_at(middle) { low = middle } else { high = middle }
        }
        Some(high)
    }

    /// Bytes of a cheapest set at a price.
    fn bytes_at(&self, c: &Completion) -> u64 {
        let (mut run, mut bytes) = (0, 0);
        for (i, b) in self.boundaries.iter().enumerate() {
            let skip =
                b.may_skip && run + 1 < self.limit && b.skipping + c.rest[i + 1][run + 1] <= c.rest[i][run];
            if skip {
                run += 1;
            } else {
                run = 0;
                bytes += b.bytes;
            }
        }
        bytes
    }
}

/// A search for all sets below a limit, depth first.
struct Listing<'a> {
    surrogate: &'a Surrogate,
    completions: &'a [Completion],
    limit: f64,
    deadline: Option<Instant>,
    nodes: usize,
    sets: Vec<Set>,
}

impl Listing<'_> {
    /// Lists the completions of a partial set; `None` where there are too many, or too little time.
    fn extend(&mut self, label: Label, skip: &mut Vec<bool>) -> Option<()> {
        self.nodes += 1;
        let look = self.nodes.is_multiple_of(1024);
        let late = look && self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if self.nodes > MOST_NODES || late {
            return None;
        }
        let Some(boundary) = self.surrogate.boundaries.get(skip.len()) else {
            let at_least = label.cost + self.surrogate.charge.at(label.bytes);
            if at_least < self.limit {
                self.sets.push(Set { at_least, skip: skip.clone() });
            }
            return (self.sets.len() <= MOST_SETS).then_some(());
        };
        let children: Vec<Label> = self.surrogate.children(&label, boundary, 0).collect();
        for child in children {
            if self.surrogate.at_least(self.completions, skip.len() + 1, &child) < self.limit {
                skip.push(child.run > 0);
                self.extend(child, skip)?;
                skip.pop();
            }
        }
        Some(())
    }
}

/// Room (ms) that any plan can use. What is offloaded at boundary `i` and above is all but what may be saved below it, and has the windows
/// from there on alone; so the least, over `i`, of their room and the time of all that may be saved below.
fn usable(chain: &CostChain, link: &Link, rooms: &Rooms, allowed: &[Allowed]) -> f64 {
    let (mut below, mut least) = (0, f64::INFINITY);
    for (i, a) in allowed.iter().enumerate() {
        least = least.min(rooms.from[link.first(i, chain.layers)] + link.ms(below));
        let leaves = if link.nvme { a.nvme } else { a.host || a.nvme };
        below += if leaves { chain.boundary_bytes[i].get() } else { 0 };
    }
    least
}

/// What the last stage's label `at` skips.
fn skipped(stages: &[Vec<Label>], mut at: usize) -> Vec<bool> {
    let mut skip = vec![false; stages.len() - 1];
    for (i, stage) in stages[1..].iter().enumerate().rev() {
        skip[i] = stage[at].run > 0;
        at = stage[at].parent as usize;
    }
    skip
}

/// Keeps the labels that none other equals or beats in bytes, cost and run.
fn undominated(labels: &mut Vec<Label>, runs: usize) {
    labels.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.cost.total_cmp(&b.cost)).then(a.run.cmp(&b.run)));
    // Least cost so far among runs up to each.
    let mut least = vec![f64::INFINITY; runs.max(1)];
    labels.retain(|label| {
        let run = label.run as usize;
        if least[run] <= label.cost {
            return false;
        }
        for cost in least[run..].iter_mut().take_while(|cost| **cost > label.cost) {
            *cost = label.cost;
        }
        true
    });
}

impl Charge {
    fn new(chain: &CostChain, allowed: &[Allowed]) -> Option<Charge> {
        let sizes: Vec<u64> = chain.boundary_bytes.iter().map(|b| b.get()).collect();
        let unit = gcd(&sizes).max(1);
        let room = |budget: u64, may: fn(&Allowed) -> bool| {
            let most: u64 = allowed.iter().zip(&sizes).filter(|(a, _)| may(a)).map(|(_, size)| size).sum();
            (budget / unit * unit).min(most)
        };
        let mut charge = Charge {
            hbm: room(chain.gpu_budget_bytes.get(), |a| a.hbm),
            host: room(chain.cpu_budget_bytes.get(), |a| a.host),
            nvme: room(chain.nvme_budget_bytes.get(), |a| a.nvme),
            pcie: vec![],
            drive: vec![],
            overflow: 0.0,
            tiebreak: chain.nvme_tiebreak,
            largest: vec![0],
        };
        for pool in Pool::ALL {
            let link = Link::of(chain, pool);
            if link.rate == 0.0 {
                if link.mandatory.iter().any(|m| m.get() > 0) {
                    return None;
                }
                if !link.nvme {
                    charge.host = 0;
                }
                charge.nvme = 0;
                continue;
            }
            let rooms = link.rooms(chain);
            charge.overflow += rooms.overflow;
            let entry = (1000.0 / link.rate, usable(chain, &link, &rooms, allowed));
            if link.nvme { charge.drive.push(entry) } else { charge.pcie.push(entry) }
        }
        let mut descending = sizes;
        descending.sort_unstable_by(|a, b| b.cmp(a));
        for size in descending {
            charge.largest.push(charge.largest.last().copied().unwrap_or(0) + size);
        }
        Some(charge)
    }

    /// What `bytes` of checkpoints cost at least beyond their recompute time; infinite where they do not fit.
    fn at(&self, bytes: u64) -> f64 {
        let off = bytes.saturating_sub(self.hbm);
        let nvme = off.saturating_sub(self.host);
        if nvme > self.nvme {
            return f64::INFINITY;
        }
        let boundaries = self.largest.partition_point(|sum| *sum < nvme);
        self.exposed(off as f64, nvme as f64) + self.tiebreak * boundaries as f64
    }

    fn exposed(&self, off: f64, nvme: f64) -> f64 {
        let over = |pools: &[(f64, f64)], bytes: f64| -> f64 {
            pools.iter().map(|(ms, room)| (bytes * ms - room).max(0.0)).sum()
        };
        self.overflow + over(&self.pcie, off) + over(&self.drive, nvme)
    }

    /// Without the tie-break the charge is convex and piecewise linear: its corners, with its value there.
    fn corners(&self) -> Vec<(f64, f64)> {
        let (hbm, host, most) =
            (self.hbm as f64, self.host as f64, self.hbm as f64 + self.host as f64 + self.nvme as f64);
        let pcie = self.pcie.iter().map(|(ms, room)| hbm + room / ms);
        let drive = self.drive.iter().map(|(ms, room)| hbm + host + room / ms);
        let corners = [0.0, hbm, hbm + host, most].into_iter().chain(pcie).chain(drive);
        corners
            .filter(|corner| *corner <= most)
            .map(|corner| {
                let off = (corner - hbm).max(0.0);
                (corner, self.exposed(off, (off - host).max(0.0)))
            })
            .collect()
    }

    /// Least of charge - price x bytes.
    fn least_minus(&self, price: f64) -> f64 {
        self.corners().iter().map(|(bytes, ms)| ms - price * bytes).fold(f64::INFINITY, f64::min)
    }

    /// The bytes where charge - price x bytes is least.
    fn bytes_at(&self, price: f64) -> u64 {
        let corners = self.corners();
        let value = |corner: &&(f64, f64)| corner.1 - price * corner.0;
        corners.iter().min_by(|a, b| value(a).total_cmp(&value(b))).map_or(0, |corner| corner.0 as u64)
    }
}
