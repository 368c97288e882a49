//! Judges a placement in exact arithmetic: is it allowed, and what does it cost?
//!
//! Every number is taken as the decimal it prints as, and exposed time comes from an explicit window-by-window queue. Nothing here
//! is shared with a solver's formulation, so a solver's answer can be checked against it. Rounding happens once, at the end.
//!
//! A transfer of boundary `i` waits from its first allowed window on; each window drains what its capacity leaves after the
//! mandatory bytes. What is left after the last window is exposed, and so are mandatory bytes above a window's capacity.

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{One, Signed, ToPrimitive, Zero};
use serde::Serialize;

use crate::chain::{ChainError, CostChain};
use crate::keep::{HbmPeak, Keep, Position};
use crate::schedule::Counts;
use crate::step::TierBytes;
use crate::units::{BoundaryIndex, Bytes, LayerIndex, Placement, Tier};

/// The four kinds of transfer, each with its own rate and windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pool {
    /// GPU to host, for boundaries in host RAM and on NVMe.
    D2h,
    /// Host to GPU, for boundaries in host RAM and on NVMe.
    H2d,
    /// Host to NVMe.
    NvmeWrite,
    /// NVMe to host.
    NvmeRead,
}

impl Pool {
    /// All pools.
    pub const ALL: [Pool; 4] = [Pool::D2h, Pool::H2d, Pool::NvmeWrite, Pool::NvmeRead];

    /// Whether a boundary placed so passes through this pool: one on NVMe passes through all four.
    pub(crate) const fn carries(self, placement: Placement) -> bool {
        match placement {
            Placement::Nvme => true,
            Placement::Host => matches!(self, Pool::D2h | Pool::H2d),
            Placement::Hbm | Placement::Recompute => false,
        }
    }

    /// The name used in JSON and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Pool::D2h => "d2h",
            Pool::H2d => "h2d",
            Pool::NvmeWrite => "nvme_write",
            Pool::NvmeRead => "nvme_read",
        }
    }
}

/// Milliseconds that compute waits for each pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct ExposedMs {
    /// GPU to host.
    pub d2h: f64,
    /// Host to GPU.
    pub h2d: f64,
    /// Host to NVMe.
    pub nvme_write: f64,
    /// NVMe to host.
    pub nvme_read: f64,
}

impl ExposedMs {
    /// All pools together.
    pub fn total(&self) -> f64 {
        self.d2h + self.h2d + self.nvme_write + self.nvme_read
    }

    /// Of one pool.
    pub const fn get(&self, pool: Pool) -> f64 {
        match pool {
            Pool::D2h => self.d2h,
            Pool::H2d => self.h2d,
            Pool::NvmeWrite => self.nvme_write,
            Pool::NvmeRead => self.nvme_read,
        }
    }

    pub(crate) fn of(&mut self, pool: Pool) -> &mut f64 {
        match pool {
            Pool::D2h => &mut self.d2h,
            Pool::H2d => &mut self.h2d,
            Pool::NvmeWrite => &mut self.nvme_write,
            Pool::NvmeRead => &mut self.nvme_read,
        }
    }
}

/// What an allowed placement costs.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// The objective, exactly (ms): recompute + exposed + the chain's weights.
    pub objective: BigRational,
    /// The objective, rounded to the nearest double.
    pub objective_ms: f64,
    /// Time of the extra forwards that recomputed boundaries cost (ms).
    pub recompute_ms: f64,
    /// Time of the forwards that only bring back internals (ms). Counted in the keep model alone: elsewhere every layer pays it, and 0
    /// stands here.
    pub base_recompute_ms: f64,
    /// Time that transfers stick out of their windows (ms).
    pub exposed_ms: ExposedMs,
    /// Boundaries by placement.
    pub counts: Counts,
    /// Bytes of boundaries by tier; in the keep model host RAM holds internals too.
    pub bytes: TierBytes,
    /// The worst moment of HBM. Keep model only.
    pub hbm_peak: Option<HbmPeak>,
}

impl Evaluation {
    /// Time added to a step (ms): recompute and exposed, without the weights.
    pub fn step_ms(&self) -> f64 {
        self.base_recompute_ms + self.recompute_ms + self.exposed_ms.total()
    }
}

/// The first rule that a placement breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Violation {
    /// The chain itself is not valid.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// The chain asks for the keep model.
    #[error(
        "the chain sets `hbm_cap_bytes`, so a plan says which layers keep their internals: judge it with `evaluate_keep`"
    )]
    KeepModel,
    /// The chain does not ask for the keep model.
    #[error(
        "the chain does not set `hbm_cap_bytes`, so no layer keeps its internals: judge the plan with `evaluate`"
    )]
    NoKeepModel,
    /// Not one placement a boundary.
    #[error("the placement has {got} boundaries, the chain has {want}")]
    Length {
        /// Placements given.
        got: usize,
        /// Boundaries of the chain, N + 1.
        want: usize,
    },
    /// The locked edges are no path, so nothing is allowed.
    #[error("`locks.edges` is not a path from boundary 0 to {last} with blocks of at most {limit} layers")]
    LockedPath {
        /// The last boundary, N.
        last: usize,
        /// `max_segment_layers`.
        limit: usize,
    },
    /// The first and last boundary must be saved.
    #[error("boundary {0} is dropped, but the first and the last boundary must be saved")]
    EndDropped(BoundaryIndex),
    /// A lock forbids this placement.
    #[error("boundary {boundary} is {placement}, which `{lock}` forbids")]
    Locked {
        /// The boundary.
        boundary: BoundaryIndex,
        /// What the placement does with it.
        placement: Placement,
        /// The key that forbids it.
        lock: &'static str,
    },
    /// A block is longer than allowed.
    #[error("the block from boundary {first} to {next} has {} layers, more than {limit}", next.get() - first.get())]
    Segment {
        /// Saved boundary below the block.
        first: BoundaryIndex,
        /// Saved boundary above the block.
        next: BoundaryIndex,
        /// `max_segment_layers`.
        limit: usize,
    },
    /// A tier holds more than its budget.
    #[error("{tier} holds {needed} ({} bytes), its budget is {budget} ({})", needed.get(), budget.get())]
    Budget {
        /// The tier.
        tier: Tier,
        /// Bytes placed in it.
        needed: Bytes,
        /// Bytes allowed.
        budget: Bytes,
    },
    /// Not one entry a layer.
    #[error("the plan says of {got} layers whether they keep their internals, the chain has {want}")]
    KeepLength {
        /// Entries given.
        got: usize,
        /// Layers of the chain, N.
        want: usize,
    },
    /// The last boundary belongs to the loss.
    #[error("boundary {boundary} is {placement}, but the loss needs the last boundary in hbm")]
    LastMoved {
        /// The last boundary, N.
        boundary: BoundaryIndex,
        /// What the placement does with it.
        placement: Placement,
    },
    /// A layer's internals are where the chain does not allow them.
    #[error("the internals of layer {layer} are {keep}, which {rule} forbids")]
    Keep {
        /// The layer.
        layer: LayerIndex,
        /// What the plan does with its internals.
        keep: Keep,
        /// The key, or the rule, that forbids it.
        rule: &'static str,
    },
    /// HBM holds more than the cap at some moment of the step.
    #[error(
        "HBM at {at} holds {needed} ({} bytes) beside {fixed} ({}) that are fixed, and `hbm_cap_bytes` is {cap} ({})",
        needed.get(), fixed.get(), cap.get()
    )]
    Hbm {
        /// The worst moment.
        at: Position,
        /// Bytes held then, rounded up to a whole byte.
        needed: Bytes,
        /// `hbm_fixed_bytes`.
        fixed: Bytes,
        /// `hbm_cap_bytes`.
        cap: Bytes,
    },
    /// A link without bandwidth has traffic.
    #[error("{} has a rate of zero and traffic to carry", pool.name())]
    ZeroRate {
        /// The pool.
        pool: Pool,
    },
}

/// Judges `placement` (one entry a boundary, `0..=N`) by the rules of `chain`.
///
/// # Errors
/// The first [`Violation`] found, in the order: chain, length, locks, blocks, budgets, rates.
pub fn evaluate(chain: &CostChain, placement: &[Placement]) -> Result<Evaluation, Violation> {
    chain.validate()?;
    if chain.hbm_cap_bytes.is_some() {
        return Err(Violation::KeepModel);
    }
    if placement.len() != chain.boundaries() {
        return Err(Violation::Length { got: placement.len(), want: chain.boundaries() });
    }
    check_locks(chain, placement)?;
    let saved: Vec<usize> = (0..=chain.layers).filter(|&i| placement[i] != Placement::Recompute).collect();
    check_blocks(chain, &saved)?;
    let (counts, bytes) = tally(chain, placement);
    check_budgets(chain, bytes)?;

    let recompute = recompute_ms(chain, &saved);
    let mut objective = recompute.clone();
    let mut exposed_ms = ExposedMs::default();
    for pool in Pool::ALL {
        let queue = play(chain, pool, &chain.layer_window_ms, &arriving(chain, placement, pool))?;
        *exposed_ms.of(pool) = nearest(&queue.exposed_ms);
        objective += queue.exposed_ms;
    }
    objective += weights(chain, &counts);
    Ok(Evaluation {
        objective_ms: nearest(&objective),
        objective,
        recompute_ms: nearest(&recompute),
        base_recompute_ms: 0.0,
        exposed_ms,
        counts,
        bytes,
        hbm_peak: None,
    })
}

/// The two weights of the objective (ms).
pub(crate) fn weights(chain: &CostChain, counts: &Counts) -> BigRational {
    exact(chain.nvme_tiebreak) * BigInt::from(counts.nvme)
        + exact(chain.checkpoint_penalty) * BigInt::from(counts.checkpoints())
}

pub(crate) fn check_locks(chain: &CostChain, placement: &[Placement]) -> Result<(), Violation> {
    let n = chain.layers;
    let locks = chain.locks.clone().unwrap_or_default();
    let path = locks.edges.as_ref().map(|edges| locked_path(chain, edges)).transpose()?;
    for (i, &p) in placement.iter().enumerate() {
        let boundary = BoundaryIndex(i);
        let dropped = p == Placement::Recompute;
        if dropped && (i == 0 || i == n) {
            return Err(Violation::EndDropped(boundary));
        }
        let forbidden = |lock| Err(Violation::Locked { boundary, placement: p, lock });
        if path.as_ref().is_some_and(|path| path[i] == dropped) {
            return forbidden("locks.edges");
        }
        if locks.gpu.as_ref().is_some_and(|set| set.contains(&boundary) != (p == Placement::Hbm)) {
            return forbidden("locks.gpu");
        }
        if locks.fixed.get(&boundary).is_some_and(|fixed| *fixed != p) {
            return forbidden("locks.fixed");
        }
    }
    Ok(())
}

/// Which boundaries are on the locked path, if the edges are one.
fn locked_path(chain: &CostChain, edges: &[(BoundaryIndex, BoundaryIndex)]) -> Result<Vec<bool>, Violation> {
    let n = chain.layers;
    let mut on_path = vec![false; n + 1];
    let mut edges: Vec<(usize, usize)> = edges.iter().map(|(s, e)| (s.get(), e.get())).collect();
    edges.sort_unstable();
    let mut at = 0;
    on_path[0] = true;
    for (s, e) in edges {
        if s != at || e <= s || e - s > chain.max_segment_layers {
            return Err(Violation::LockedPath { last: n, limit: chain.max_segment_layers });
        }
        at = e;
        on_path[e] = true;
    }
    if at != n {
        return Err(Violation::LockedPath { last: n, limit: chain.max_segment_layers });
    }
    Ok(on_path)
}

pub(crate) fn check_blocks(chain: &CostChain, saved: &[usize]) -> Result<(), Violation> {
    let limit = chain.max_segment_layers;
    match saved.windows(2).find(|pair| pair[1] - pair[0] > limit) {
        Some(pair) => {
            Err(Violation::Segment { first: BoundaryIndex(pair[0]), next: BoundaryIndex(pair[1]), limit })
        }
        None => Ok(()),
    }
}

pub(crate) fn tally(chain: &CostChain, placement: &[Placement]) -> (Counts, TierBytes) {
    let mut counts = Counts::default();
    let mut bytes = TierBytes::default();
    for (p, &size) in placement.iter().zip(&chain.boundary_bytes) {
        let (count, sum) = match p {
            Placement::Hbm => (&mut counts.hbm, &mut bytes.hbm),
            Placement::Host => (&mut counts.host, &mut bytes.host),
            Placement::Nvme => (&mut counts.nvme, &mut bytes.nvme),
            Placement::Recompute => {
                counts.recompute += 1;
                continue;
            }
        };
        *count += 1;
        *sum += size;
    }
    (counts, bytes)
}

pub(crate) fn check_budgets(chain: &CostChain, bytes: TierBytes) -> Result<(), Violation> {
    for (tier, needed, budget) in [
        (Tier::Hbm, bytes.hbm, chain.gpu_budget_bytes),
        (Tier::Host, bytes.host, chain.cpu_budget_bytes),
        (Tier::Nvme, bytes.nvme, chain.nvme_budget_bytes),
    ] {
        if needed > budget {
            return Err(Violation::Budget { tier, needed, budget });
        }
    }
    Ok(())
}

/// The layers below each dropped boundary run once more; the last layer of a block does not.
pub(crate) fn recompute_ms(chain: &CostChain, saved: &[usize]) -> BigRational {
    let times = Decimals::new(&chain.layer_recompute_ms);
    let mut sum = BigInt::zero();
    for pair in saved.windows(2) {
        sum += times.values[pair[0]..pair[1] - 1].iter().sum::<BigInt>();
    }
    BigRational::new(sum, times.denominator)
}

/// Bytes of boundaries that enter a pool's queue at each window, `0..=N`.
fn arriving(chain: &CostChain, placement: &[Placement], pool: Pool) -> Vec<u64> {
    let offset = match pool {
        Pool::D2h | Pool::NvmeWrite => chain.d2h_first_window_offset,
        Pool::H2d | Pool::NvmeRead => chain.h2d_first_window_offset,
    };
    let mut arriving = vec![0; chain.layers + 1];
    for i in (0..placement.len()).filter(|&i| pool.carries(placement[i])) {
        arriving[i.saturating_add(offset).min(chain.layers)] += chain.boundary_bytes[i].get();
    }
    arriving
}

/// What one pool's queue did.
pub(crate) struct Queue {
    /// Waiting before each window drains, `0..N`, in units of 1 / `unit` byte.
    pub(crate) held: Vec<BigInt>,
    /// A power of ten.
    pub(crate) unit: BigInt,
    /// Bytes beyond every window, and mandatory ones above a window's capacity, as time.
    pub(crate) exposed_ms: BigRational,
}

/// Plays the queue of one pool window by window. `arriving[w]` bytes enter at window `w`; those of window N find no room.
pub(crate) fn play(
    chain: &CostChain,
    pool: Pool,
    windows: &[f64],
    arriving: &[u64],
) -> Result<Queue, Violation> {
    let (scale, fraction) = match pool {
        Pool::D2h | Pool::H2d => (chain.pcie_window_scale, chain.pcie_capacity_fraction),
        Pool::NvmeWrite | Pool::NvmeRead => (chain.nvme_window_scale, chain.nvme_capacity_fraction),
    };
    let (rate, mandatory) = match pool {
        Pool::D2h => (chain.d2h_bytes_per_s, Some(&chain.grad_d2h_bytes)),
        Pool::H2d => (chain.h2d_bytes_per_s, Some(&chain.param_h2d_bytes)),
        Pool::NvmeWrite => (chain.nvme_write_bytes_per_s, None),
        Pool::NvmeRead => (chain.nvme_read_bytes_per_s, None),
    };
    // Integers over powers of ten throughout: reducing fractions at every step would cost more than everything else.
    let factors = Decimals::new(&[rate.get(), scale, fraction]);
    let windows = Decimals::new(windows);
    let capacity_a_ms: BigInt = factors.values.iter().product();
    let unit = factors.denominator.pow(3) * 1000 * &windows.denominator;

    let mut held = Vec::with_capacity(windows.values.len());
    let mut queue = BigInt::zero();
    let mut exposed = BigInt::zero();
    for (w, window) in windows.values.iter().enumerate() {
        let mut room = &capacity_a_ms * window;
        if let Some(mandatory) = mandatory {
            room -= &unit * mandatory[w].get();
        }
        if room.is_negative() {
            exposed -= &room;
            room = BigInt::zero();
        }
        queue += &unit * arriving[w];
        held.push(queue.clone());
        queue = (queue - room).max(BigInt::zero());
    }
    exposed += queue + &unit * arriving.last().copied().unwrap_or(0);
    let rate = &factors.values[0];
    let exposed_ms = if exposed.is_zero() {
        BigRational::zero()
    } else if rate.is_zero() {
        return Err(Violation::ZeroRate { pool });
    } else {
        BigRational::new(exposed * 1000 * factors.denominator, &unit * rate)
    };
    Ok(Queue { held, unit, exposed_ms })
}

/// Numbers as integers over one power of ten.
pub(crate) struct Decimals {
    pub(crate) values: Vec<BigInt>,
    pub(crate) denominator: BigInt,
}

impl Decimals {
    pub(crate) fn new(numbers: &[f64]) -> Decimals {
        let parts: Vec<(u64, i32)> = numbers.iter().map(|x| decimal(*x)).collect();
        let places = parts.iter().map(|(_, exponent)| -exponent).max().unwrap_or(0).max(0);
        let values = parts
            .iter()
            .map(|(digits, exponent)| BigInt::from(*digits) * power_of_ten(exponent + places))
            .collect();
        Decimals { values, denominator: power_of_ten(places) }
    }
}

/// The shortest decimal that reads back as `x` (finite, not negative), as digits and a power of ten.
fn decimal(x: f64) -> (u64, i32) {
    let printed = format!("{x:e}");
    let (mantissa, exponent) = printed.split_once('e').unwrap_or((&printed, "0"));
    let places = mantissa.split_once('.').map_or(0, |(_, fraction)| fraction.len() as i32);
    let mantissa: String = mantissa.chars().filter(|c| *c != '.').collect();
    // At most 17 digits: always in range for a number that `validate` let through.
    (mantissa.parse().unwrap_or(0), exponent.parse::<i32>().unwrap_or(0) - places)
}

fn power_of_ten(exponent: i32) -> BigInt {
    if exponent <= 0 { BigInt::one() } else { BigInt::from(10).pow(exponent.unsigned_abs()) }
}

/// `x` as the decimal it prints as. Finite and not negative, or a wrong number comes out.
pub(crate) fn exact(x: f64) -> BigRational {
    let one = Decimals::new(&[x]);
    BigRational::new(one.values.into_iter().sum(), one.denominator)
}

pub(crate) fn nearest(x: &BigRational) -> f64 {
    x.to_f64().unwrap_or(f64::INFINITY)
}
