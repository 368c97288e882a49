//! Judges a plan that also says which layers keep their internals, with HBM counted at every position of the step.
//!
//! The positions are forward 0..N-1, the turn (the loss, forward and backward) and backward N-1..0. A layer's *internals* are what
//! its backward needs besides its input boundary. A plain layer runs once more just before its backward to bring them back; a kept
//! one does not. `docs/model.md` states the model; nothing here is shared with the program that a solver is given.
//!
//! Transfers are played item by item through first-in-first-out queues: writes leave as early as possible, reads arrive as late as
//! possible but before their block runs backward. Bytes in flight are in HBM, counted before the window that moves them.

use std::fmt;

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{ToPrimitive, Zero};
use serde::{Deserialize, Serialize};

use crate::chain::CostChain;
use crate::evaluate::{
    Decimals, Evaluation, ExposedMs, Pool, Queue, Violation, check_blocks, check_budgets, check_locks,
    nearest, play, recompute_ms, tally, weights,
};
use crate::units::{BoundaryIndex, Bytes, LayerIndex, Placement};

/// Where a layer's internals wait for its backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// Nowhere: the layer runs once more just before its backward.
    #[default]
    Recompute,
    /// In HBM, from its forward on.
    Hbm,
    /// In host RAM. Chains with `internals_offload` only.
    Host,
    /// In HBM, from the run that brings back its output, when its block runs backward. Chains with `retain_internals` only, and only
    /// where the layer's output is recomputed.
    Retained,
}

impl Keep {
    /// Letter of the keep strings: `-` recompute, `K` HBM, `H` host, `R` retained.
    pub const fn letter(self) -> char {
        match self {
            Keep::Recompute => '-',
            Keep::Hbm => 'K',
            Keep::Host => 'H',
            Keep::Retained => 'R',
        }
    }

    /// The inverse of [`Keep::letter`].
    pub const fn from_letter(letter: char) -> Option<Keep> {
        match letter {
            '-' => Some(Keep::Recompute),
            'K' => Some(Keep::Hbm),
            'H' => Some(Keep::Host),
            'R' => Some(Keep::Retained),
            _ => None,
        }
    }
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Keep::Recompute => "recomputed",
            Keep::Hbm => "kept in hbm",
            Keep::Host => "kept in host",
            Keep::Retained => "retained",
        })
    }
}

/// A moment of the step at which HBM is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Position {
    /// While a layer runs forward.
    Forward(LayerIndex),
    /// While the loss runs, forward and backward.
    Turn,
    /// While a layer runs backward, what its block re-runs included.
    Backward(LayerIndex),
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Position::Forward(layer) => write!(f, "forward {layer}"),
            Position::Turn => f.write_str("the turn"),
            Position::Backward(layer) => write!(f, "backward {layer}"),
        }
    }
}

/// The most HBM that a plan holds, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HbmPeak {
    /// The first moment that reaches it.
    pub at: Position,
    /// Bytes held then beside `hbm_fixed_bytes`, rounded up to a whole byte.
    pub bytes: Bytes,
}

/// Judges a plan by the rules of a chain that sets `hbm_cap_bytes`: `placement` has one entry a boundary, `keep` one a layer.
///
/// # Errors
/// The first [`Violation`] found, in the order: chain, lengths, locks, internals, blocks, budgets, rates, HBM. Of HBM, the worst
/// moment.
pub fn evaluate_keep(
    chain: &CostChain,
    placement: &[Placement],
    keep: &[Keep],
) -> Result<Evaluation, Violation> {
    chain.validate()?;
    let Some(sizes) = Sizes::of(chain) else { return Err(Violation::NoKeepModel) };
    if placement.len() != chain.boundaries() {
        return Err(Violation::Length { got: placement.len(), want: chain.boundaries() });
    }
    if keep.len() != chain.layers {
        return Err(Violation::KeepLength { got: keep.len(), want: chain.layers });
    }
    check_locks(chain, placement)?;
    let last = placement[chain.layers];
    if last != Placement::Hbm {
        return Err(Violation::LastMoved { boundary: BoundaryIndex(chain.layers), placement: last });
    }
    check_keep(chain, placement, keep)?;
    let saved: Vec<usize> = (0..=chain.layers).filter(|&i| placement[i] != Placement::Recompute).collect();
    check_blocks(chain, &saved)?;
    let (mut counts, mut bytes) = tally(chain, placement);
    counts.kept = keep.iter().filter(|k| **k == Keep::Hbm).count();
    bytes.host += with(keep, Keep::Host).map(|l| sizes.internals[l]).sum::<Bytes>();
    check_budgets(chain, bytes)?;

    let plan = Plan::new(chain, sizes, placement, keep, &saved);
    let mut exposed_ms = ExposedMs::default();
    let mut objective = BigRational::zero();
    let mut queues = Vec::new();
    for pool in Pool::ALL {
        let queue = plan.queue(pool)?;
        *exposed_ms.of(pool) = nearest(&queue.exposed_ms);
        objective += &queue.exposed_ms;
        queues.push(queue);
    }
    let peak = plan.hbm_peak(&queues);
    let (fixed, cap) = (plan.sizes.fixed, plan.sizes.cap);
    if u128::from(peak.bytes.get()) + u128::from(fixed.get()) > u128::from(cap.get()) {
        return Err(Violation::Hbm { at: peak.at, needed: peak.bytes, fixed, cap });
    }

    let recompute = recompute_ms(chain, &saved);
    let times = Decimals::new(chain.rerun_ms());
    let base: BigInt = with(keep, Keep::Recompute).map(|l| times.values[l].clone()).sum();
    let base = BigRational::new(base, times.denominator);
    objective += &recompute + &base + weights(chain, &counts);
    Ok(Evaluation {
        objective_ms: nearest(&objective),
        objective,
        recompute_ms: nearest(&recompute),
        base_recompute_ms: nearest(&base),
        exposed_ms,
        counts,
        bytes,
        hbm_peak: Some(peak),
    })
}

/// The layers whose internals are treated so.
fn with(keep: &[Keep], wanted: Keep) -> impl Iterator<Item = usize> {
    (0..keep.len()).filter(move |&l| keep[l] == wanted)
}

fn check_keep(chain: &CostChain, placement: &[Placement], keep: &[Keep]) -> Result<(), Violation> {
    let locks = chain.locks.as_ref().map(|locks| &locks.keep);
    for (l, &k) in keep.iter().enumerate() {
        let layer = LayerIndex(l);
        let forbidden = |rule| Err(Violation::Keep { layer, keep: k, rule });
        if let Some(kept) = locks.and_then(|locks| locks.get(&layer))
            && k != (if *kept { Keep::Hbm } else { Keep::Recompute })
        {
            return forbidden("`locks.keep`");
        }
        if k == Keep::Host && chain.internals_offload != Some(true) {
            return forbidden("the absence of `internals_offload: true`");
        }
        if k == Keep::Retained {
            if chain.retain_internals != Some(true) {
                return forbidden("the absence of `retain_internals: true`");
            }
            if placement[l + 1] != Placement::Recompute {
                return forbidden("its saved output, for which it is not re-run,");
            }
        }
    }
    Ok(())
}

/// The keep extension's fields of a chain.
#[derive(Clone, Copy)]
struct Sizes<'a> {
    internals: &'a [Bytes],
    forward: &'a [Bytes],
    backward: &'a [Bytes],
    loss: Bytes,
    cap: Bytes,
    fixed: Bytes,
    slack: Bytes,
    staging: Bytes,
}

impl Sizes<'_> {
    fn of(chain: &CostChain) -> Option<Sizes<'_>> {
        Some(Sizes {
            internals: chain.layer_internal_bytes.as_deref()?,
            forward: chain.layer_forward_workspace_bytes.as_deref()?,
            backward: chain.layer_backward_workspace_bytes.as_deref()?,
            loss: chain.loss_workspace_bytes?,
            cap: chain.hbm_cap_bytes?,
            fixed: chain.hbm_fixed_bytes?,
            slack: chain.transfer_slack_bytes?,
            staging: chain.nvme_staging_bytes.unwrap_or_default(),
        })
    }
}

/// A plan that keeps the chain's locks, blocks and budgets.
struct Plan<'a> {
    chain: &'a CostChain,
    sizes: Sizes<'a>,
    placement: &'a [Placement],
    keep: &'a [Keep],
    saved: &'a [usize],
    /// Bytes of the boundaries `0..i` that are in HBM, for each i.
    resident: Vec<u128>,
    /// Bytes of the internals of layers `0..l` that are kept in HBM, for each l.
    kept: Vec<u128>,
}

impl<'a> Plan<'a> {
    fn new(
        chain: &'a CostChain,
        sizes: Sizes<'a>,
        placement: &'a [Placement],
        keep: &'a [Keep],
        saved: &'a [usize],
    ) -> Plan<'a> {
        let in_hbm = placement.iter().map(|p| *p == Placement::Hbm);
        let kept = keep.iter().map(|k| *k == Keep::Hbm);
        let (resident, kept) = (sums_below(&chain.boundary_bytes, in_hbm), sums_below(sizes.internals, kept));
        Plan { chain, sizes, placement, keep, saved, resident, kept }
    }

    /// Plays one pool. A boundary may leave from its own window on, and must be back when its block runs backward: in the mirrored
    /// order, from the block's end on. Internals leave after their layer and must be back before it.
    fn queue(&self, pool: Pool) -> Result<Queue, Violation> {
        let chain = self.chain;
        let outward = matches!(pool, Pool::D2h | Pool::NvmeWrite);
        let mut arriving = vec![0u64; chain.layers + 1];
        for pair in self.saved.windows(2) {
            if pool.carries(self.placement[pair[0]]) {
                let first = if outward { pair[0] } else { pair[1] };
                arriving[first] += chain.boundary_bytes[pair[0]].get();
            }
        }
        if matches!(pool, Pool::D2h | Pool::H2d) {
            for l in with(self.keep, Keep::Host) {
                arriving[l + 1] += self.sizes.internals[l].get();
            }
        }
        let backward = chain.layer_backward_window_ms.as_ref();
        let windows =
            if outward { &chain.layer_window_ms } else { backward.unwrap_or(&chain.layer_window_ms) };
        play(chain, pool, windows, &arriving)
    }

    /// The worst moment. `queues` are in the order of [`Pool::ALL`].
    fn hbm_peak(&self, queues: &[Queue]) -> HbmPeak {
        let unit = queues.iter().map(|q| &q.unit).max().cloned().unwrap_or_else(|| BigInt::from(1));
        // All units are powers of ten, so the largest is a multiple of each.
        // What has room in staging waits there and not in HBM; `in_use` came through NVMe's pool too.
        let in_flight = |position: usize, [pcie, nvme]: [usize; 2], in_use: u128| -> BigInt {
            let [pcie, nvme] = [pcie, nvme].map(|p| &queues[p].held[position] * (&unit / &queues[p].unit));
            let beyond = nvme + (BigInt::from(in_use) - BigInt::from(self.sizes.staging.get())) * &unit;
            pcie + beyond.max(BigInt::zero())
        };
        let n = self.chain.layers;
        let mut moments = Vec::with_capacity(2 * n + 1);
        for f in 0..n {
            let held = BigInt::from(self.forward_bytes(f)) * &unit + in_flight(f, [0, 2], 0);
            moments.push((Position::Forward(LayerIndex(f)), held));
        }
        moments.push((Position::Turn, BigInt::from(self.turn_bytes()) * &unit));
        for p in (0..n).rev() {
            let held =
                BigInt::from(self.backward_bytes(p)) * &unit + in_flight(p, [1, 3], self.in_use_from_nvme(p));
            moments.push((Position::Backward(LayerIndex(p)), held));
        }
        // The first of equals, as `max_by` would not.
        let mut peak = (Position::Forward(LayerIndex(0)), BigInt::zero());
        for moment in moments {
            if moment.1 > peak.1 {
                peak = moment;
            }
        }
        let up: BigInt = (peak.1 + &unit - 1) / &unit;
        let bytes = up.to_u64().unwrap_or(u64::MAX);
        HbmPeak { at: peak.0, bytes: Bytes(bytes) }
    }

    fn boundary(&self, i: usize) -> u128 {
        u128::from(self.chain.boundary_bytes[i].get())
    }

    fn internals(&self, l: usize) -> u128 {
        u128::from(self.sizes.internals[l].get())
    }

    /// Without transfers in flight.
    fn forward_bytes(&self, f: usize) -> u128 {
        let mut held = self.resident[f + 1] + self.kept[f];
        if self.placement[f] == Placement::Recompute {
            held += self.boundary(f);
        }
        // Internals that go to host RAM are made in HBM.
        if matches!(self.keep[f], Keep::Hbm | Keep::Host) {
            held += self.internals(f);
        }
        held + self.boundary(f + 1)
            + u128::from(self.sizes.forward[f].get())
            + u128::from(self.sizes.slack.get())
    }

    fn turn_bytes(&self) -> u128 {
        let n = self.chain.layers;
        self.resident[n] + self.kept[n] + u128::from(self.sizes.loss.get())
    }

    /// Without transfers in flight that are for blocks below.
    fn backward_bytes(&self, p: usize) -> u128 {
        let mut held = self.resident[p + 1] + self.kept[p] + u128::from(self.sizes.slack.get());
        let source = self.source(p);
        held += (source + 1..=p).map(|i| self.boundary(i)).sum::<u128>();
        // The copy in use.
        held += match self.placement[source] {
            Placement::Host | Placement::Nvme => self.boundary(source),
            Placement::Hbm | Placement::Recompute => 0,
        };
        held +=
            (source..p).filter(|&l| self.keep[l] == Keep::Retained).map(|l| self.internals(l)).sum::<u128>();
        held + self.running_bytes(p)
    }

    /// The boundary from which the block of layer `p` starts.
    fn source(&self, p: usize) -> usize {
        (0..=p).rev().find(|&i| self.placement[i] != Placement::Recompute).unwrap_or(0)
    }

    /// Bytes of the copy in use at backward position `p`, if it came from NVMe.
    fn in_use_from_nvme(&self, p: usize) -> u128 {
        let source = self.source(p);
        if self.placement[source] == Placement::Nvme { self.boundary(source) } else { 0 }
    }

    /// What the layer at backward position `p` needs for itself, or a layer that is re-run in its block, whatever the plan.
    fn running_bytes(&self, p: usize) -> u128 {
        let own = self.internals(p) + u128::from(self.sizes.backward[p].get());
        let lowest = (p + 1).saturating_sub(self.chain.max_segment_layers);
        let forward = self.sizes.forward[lowest..p].iter().map(|b| u128::from(b.get()));
        own.max(forward.max().unwrap_or(0))
    }
}

/// For each k, the sum of the chosen among the first k sizes.
fn sums_below(sizes: &[Bytes], chosen: impl Iterator<Item = bool>) -> Vec<u128> {
    let mut sums = vec![0];
    let mut sum = 0;
    for (size, chosen) in sizes.iter().zip(chosen) {
        sum += if chosen { u128::from(size.get()) } else { 0 };
        sums.push(sum);
    }
    sums
}
