//! The numbers of a keep chain in the form the program and the simulation use: bytes as integers, what windows carry as doubles.

use lazy_model::{CostChain, Keep, LayerIndex, Placement, Pool, Position};

use crate::problem::gcd;

/// In the place of a window: nothing of the pool is in HBM.
pub(crate) const NOT_COUNTED: usize = usize::MAX;

/// A plan: one placement a boundary, one entry a layer.
pub(crate) type Plan = (Vec<Placement>, Vec<Keep>);

/// Pools with their direction. Each has its boundaries (all offloaded ones, or those on NVMe) and its windows.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub(crate) outward: bool,
    pub(crate) nvme: bool,
    /// Bytes a second.
    pub(crate) rate: f64,
    /// Whether mandatory bytes have no rate to travel at.
    pub(crate) stuck: bool,
    /// Bytes each window carries beside the mandatory ones.
    pub(crate) spare: Vec<f64>,
    /// Sums of `spare`: `room[w]` bytes fit into the windows below `w`.
    pub(crate) room: Vec<f64>,
    /// Exposed whatever is placed where (ms).
    pub(crate) overflow_ms: f64,
}

impl Link {
    fn new(chain: &CostChain, pool: Pool) -> Link {
        let (outward, nvme) =
            (matches!(pool, Pool::D2h | Pool::NvmeWrite), matches!(pool, Pool::NvmeWrite | Pool::NvmeRead));
        let factor = if nvme {
            chain.nvme_window_scale * chain.nvme_capacity_fraction
        } else {
            chain.pcie_window_scale * chain.pcie_capacity_fraction
        };
        let (rate, mandatory) = match pool {
            Pool::D2h => (chain.d2h_bytes_per_s, Some(&chain.grad_d2h_bytes)),
            Pool::H2d => (chain.h2d_bytes_per_s, Some(&chain.param_h2d_bytes)),
            Pool::NvmeWrite => (chain.nvme_write_bytes_per_s, None),
            Pool::NvmeRead => (chain.nvme_read_bytes_per_s, None),
        };
        let rate = rate.get();
        let backward = chain.layer_backward_window_ms.as_ref().filter(|_| !outward);
        let windows = backward.unwrap_or(&chain.layer_window_ms);
        let mut link = Link {
            outward,
            nvme,
            rate,
            stuck: rate == 0.0 && mandatory.is_some_and(|m| m.iter().any(|b| b.get() > 0)),
            spare: vec![],
            room: vec![0.0],
            overflow_ms: 0.0,
        };
        let mut room = 0.0;
        for (w, window) in windows.iter().enumerate() {
            let mandatory = mandatory.map_or(0, |m| m[w].get()) as f64;
            let spare = rate * window * factor / 1000.0 - mandatory;
            if spare < 0.0 && rate > 0.0 {
                link.overflow_ms -= spare * 1000.0 / rate;
            }
            link.spare.push(spare.max(0.0));
            room += spare.max(0.0);
            link.room.push(room);
        }
        link
    }

    /// Bytes that the windows `from..to` carry.
    pub(crate) fn between(&self, from: usize, to: usize) -> f64 {
        self.room[to] - self.room[from]
    }

    pub(crate) fn ms(&self, bytes: u64) -> f64 {
        bytes as f64 * 1000.0 / self.rate
    }

    /// Whether a boundary placed so passes here.
    pub(crate) fn carries(&self, placement: Placement) -> bool {
        placement == Placement::Nvme || (!self.nvme && placement == Placement::Host)
    }
}

/// A keep chain's numbers.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) layers: usize,
    /// Most layers in a block.
    pub(crate) limit: usize,
    pub(crate) boundary: Vec<u64>,
    pub(crate) internals: Vec<u64>,
    pub(crate) forward: Vec<u64>,
    pub(crate) loss: u64,
    pub(crate) slack: u64,
    /// Bytes on their way to or from NVMe that are not in HBM.
    pub(crate) staging: u64,
    /// What HBM holds at each backward position for the running layer.
    pub(crate) running: Vec<u64>,
    /// HBM for all of this. Negative where the fixed bytes exceed the cap.
    pub(crate) hbm: i128,
    /// d2h, h2d, nvme_write, nvme_read.
    pub(crate) links: [Link; 4],
    pub(crate) unit: u64,
}

impl Shape {
    /// `None` where the chain lacks the keep extension (a validated one with `hbm_cap_bytes` does not).
    pub(crate) fn new(chain: &CostChain) -> Option<Shape> {
        let bytes = |list: &Option<Vec<lazy_model::Bytes>>| -> Option<Vec<u64>> {
            Some(list.as_ref()?.iter().map(|b| b.get()).collect())
        };
        let (n, limit) = (chain.layers, chain.max_segment_layers.min(chain.layers));
        let boundary: Vec<u64> = chain.boundary_bytes.iter().map(|b| b.get()).collect();
        let internals = bytes(&chain.layer_internal_bytes)?;
        let forward = bytes(&chain.layer_forward_workspace_bytes)?;
        let backward = bytes(&chain.layer_backward_workspace_bytes)?;
        let running = (0..n)
            .map(|p| {
                let below = forward[(p + 1).saturating_sub(limit)..p].iter().copied().max().unwrap_or(0);
                (internals[p] + backward[p]).max(below)
            })
            .collect();
        let placed: Vec<u64> = boundary.iter().chain(&internals).copied().collect();
        Some(Shape {
            layers: n,
            limit,
            unit: unit(&placed),
            boundary,
            internals,
            forward,
            loss: chain.loss_workspace_bytes?.get(),
            slack: chain.transfer_slack_bytes?.get(),
            staging: chain.nvme_staging_bytes.map_or(0, |b| b.get()),
            running,
            hbm: i128::from(chain.hbm_cap_bytes?.get()) - i128::from(chain.hbm_fixed_bytes?.get()),
            links: Pool::ALL.map(|pool| Link::new(chain, pool)),
        })
    }

    /// The position of an entry of [`Shape::held`].
    pub(crate) fn position(&self, index: usize) -> Position {
        match index.checked_sub(self.layers) {
            None => Position::Forward(LayerIndex(index)),
            Some(0) => Position::Turn,
            Some(p) => Position::Backward(LayerIndex(p - 1)),
        }
    }

    /// Bytes that enter each window of a pool, `0..=N`.
    fn arriving(&self, link: &Link, (placement, keep): &Plan, ends: &[usize]) -> Vec<f64> {
        let mut arriving = vec![0.0; self.layers + 1];
        for i in (0..self.layers).filter(|&i| link.carries(placement[i])) {
            arriving[if link.outward { i } else { ends[i] }] += self.boundary[i] as f64;
        }
        if !link.nvme {
            for l in (0..self.layers).filter(|&l| keep[l] == Keep::Host) {
                arriving[l + 1] += self.internals[l] as f64;
            }
        }
        arriving
    }

    /// For each pool, the first window of the busy period that reaches into position `p`: the queue is empty before it. Any window
    /// is a valid start of an interval row; this one makes the row hold all that is in flight. [`NOT_COUNTED`] where all of it is in staging.
    pub(crate) fn busy_since(&self, plan: &Plan, p: usize) -> [usize; 4] {
        let ends = block_ends(&plan.0);
        [0, 1, 2, 3].map(|pool| {
            let link = &self.links[pool];
            let arriving = self.arriving(link, plan, &ends);
            let (mut queue, mut since) = (0.0f64, 0);
            for (w, (arriving, spare)) in arriving.iter().zip(&link.spare).enumerate().take(p) {
                queue = (queue + arriving - spare).max(0.0);
                if queue <= 0.0 {
                    since = w + 1;
                }
            }
            let in_use = if link.outward { 0.0 } else { self.in_use_from_nvme(&plan.0, p) };
            let in_staging = queue + arriving[p] + in_use <= self.staging as f64;
            if link.nvme && self.staging > 0 && in_staging { NOT_COUNTED } else { since }
        })
    }

    /// Bytes of the copy in use at backward position `p`, if it came from NVMe.
    fn in_use_from_nvme(&self, placement: &[Placement], p: usize) -> f64 {
        let top = p.min(self.layers - 1);
        let source = (0..=top).rev().find(|&i| placement[i] != Placement::Recompute).unwrap_or(0);
        if placement[source] == Placement::Nvme { self.boundary[source] as f64 } else { 0.0 }
    }

    /// HBM in bytes at forward 0..N-1, the turn, and backward 0..N-1, of a plan whose blocks are not too long. In doubles: quick, and a few
    /// bytes off.
    pub(crate) fn held(&self, plan: &Plan) -> Vec<f64> {
        let n = self.layers;
        let (placement, keep) = plan;
        let ends = block_ends(placement);
        let flight: Vec<Vec<f64>> = self
            .links
            .iter()
            .map(|link| {
                let arriving = self.arriving(link, plan, &ends);
                let mut queue = 0.0f64;
                let window = |(arriving, spare): (&f64, &f64)| {
                    let held = queue + arriving;
                    queue = (held - spare).max(0.0);
                    held
                };
                arriving.iter().zip(&link.spare).map(window).collect()
            })
            .collect();
        let mut all = Vec::with_capacity(2 * n + 1);
        let mut backward = Vec::with_capacity(n);
        let (mut resident, mut kept, mut block, mut retained) = (0.0, 0.0, 0.0, 0.0);
        // The copy in use, if it came from NVMe.
        let mut from_nvme = 0.0;
        let beyond_staging = |bytes: f64| (bytes - self.staging as f64).max(0.0);
        for l in 0..n {
            let (size, own) = (self.boundary[l] as f64, self.internals[l] as f64);
            match placement[l] {
                Placement::Recompute => block += size,
                // A copy that is in use.
                Placement::Host => (block, retained, from_nvme) = (size, 0.0, 0.0),
                Placement::Nvme => (block, retained, from_nvme) = (size, 0.0, size),
                Placement::Hbm => {
                    resident += size;
                    (block, retained, from_nvme) = (0.0, 0.0, 0.0);
                }
            }
            let slack = self.slack as f64;
            let passing = if placement[l] == Placement::Recompute { size } else { 0.0 };
            let made = if matches!(keep[l], Keep::Hbm | Keep::Host) { own } else { 0.0 };
            let output = self.boundary[l + 1] as f64 + self.forward[l] as f64;
            let writes = flight[0][l] + beyond_staging(flight[2][l]);
            all.push(resident + kept + passing + made + output + slack + writes);
            let running = self.running[l] as f64 + slack;
            let reads = flight[1][l] + beyond_staging(flight[3][l] + from_nvme);
            backward.push(resident + kept + block + retained + running + reads);
            match keep[l] {
                Keep::Hbm => kept += own,
                Keep::Retained => retained += own,
                Keep::Host | Keep::Recompute => {}
            }
        }
        all.push(resident + kept + self.loss as f64);
        all.extend(backward);
        all
    }
}

/// For each boundary, the saved boundary that ends the block it begins (N where it begins none).
fn block_ends(placement: &[Placement]) -> Vec<usize> {
    let last = placement.len() - 1;
    let mut ends = vec![last; placement.len()];
    let mut next = last;
    for i in (0..last).rev() {
        ends[i] = next;
        if placement[i] != Placement::Recompute {
            next = i;
        }
    }
    ends
}

/// Bytes that count as 1 in rows: a common divisor of all sizes where that gives moderate whole numbers, else a 2^20th of the
/// largest, times what the sizes rounded down to it share.
fn unit(sizes: &[u64]) -> u64 {
    let largest = sizes.iter().copied().max().unwrap_or(0);
    let unit = gcd(sizes).max(largest >> 20).max(1);
    let rounded: Vec<u64> = sizes.iter().map(|s| s / unit).collect();
    unit * gcd(&rounded).max(1)
}
