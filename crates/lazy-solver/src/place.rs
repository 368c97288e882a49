//! Places given checkpoints without a program: fills HBM exactly by subset sums, and looks through many fillings.
//!
//! No proof is tried here. A filling that meets the relaxation's bound is an optimum; the best one found is where the program's search
//! would have to begin otherwise.

use std::time::Instant;

use lazy_model::{Bytes, CostChain, Evaluation, Placement, Pool, evaluate};

use crate::link::Link;
use crate::problem::{Allowed, allowed, gcd, recompute};
use crate::search::tolerance;

/// Bits of a row of reachable sums, and of all rows together, as powers of two.
const ROW_BITS: u32 = 21;
const TABLE_BITS: u32 = 29;
/// Fullest sums that are tried.
const SUMS: usize = 128;
/// Fillings looked at.
const TRIES: u64 = 1000;

/// The placement of least objective found for the checkpoints (those not in `skip`), stopping early at `bound`.
pub(crate) fn place(
    chain: &CostChain,
    skip: &[bool],
    bound: f64,
    deadline: Option<Instant>,
) -> Option<(Vec<Placement>, Evaluation)> {
    let filler = Filler::new(chain, skip)?;
    let sums = Sums::new(&filler)?;
    let mut random = Random(1);
    let mut best: Option<(f64, Vec<Placement>)> = None;
    let enough = bound + tolerance(bound) / 2.0;
    // Few boundaries have few fillings.
    let tries = TRIES.min(16 << sums.free.len().min(16));
    for number in 0..tries {
        let late = deadline.is_some_and(|deadline| number % 16 == 0 && Instant::now() >= deadline);
        if late || best.as_ref().is_some_and(|(cost, _)| *cost <= enough) {
            break;
        }
        let in_hbm = sums.filling(&filler, number, &mut random);
        let Some(placement) = filler.offload(&in_hbm) else { continue };
        let cost = filler.cost(&placement);
        if best.as_ref().is_none_or(|(least, _)| cost < *least) {
            best = Some((cost, placement));
        }
    }
    let (_, placement) = best?;
    let evaluation = evaluate(chain, &placement).ok()?;
    Some((placement, evaluation))
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

struct PoolData {
    nvme: bool,
    ms_a_byte: f64,
    first: Vec<usize>,
    room: Vec<f64>,
}

/// The checkpoints and what is known about where they may go.
struct Filler {
    allowed: Vec<Allowed>,
    skip: Vec<bool>,
    sizes: Vec<u64>,
    hbm: u64,
    host: u64,
    nvme: u64,
    pools: Vec<PoolData>,
    tiebreak: f64,
    /// Recompute, checkpoints' weight and mandatory overflow (ms).
    constant: f64,
}

impl Filler {
    fn new(chain: &CostChain, skip: &[bool]) -> Option<Filler> {
        let n = chain.layers;
        let sizes: Vec<u64> = chain.boundary_bytes.iter().map(|b: &Bytes| b.get()).collect();
        let recompute: f64 =
            skip.iter().enumerate().filter(|(_, s)| **s).map(|(i, _)| recompute(chain, i)).sum();
        let checkpoints = skip.iter().filter(|s| !**s).count() as f64;
        let mut filler = Filler {
            allowed: allowed(chain)?,
            skip: skip.to_vec(),
            sizes,
            hbm: chain.gpu_budget_bytes.get(),
            host: chain.cpu_budget_bytes.get(),
            nvme: chain.nvme_budget_bytes.get(),
            pools: vec![],
            tiebreak: chain.nvme_tiebreak,
            constant: recompute + chain.checkpoint_penalty * checkpoints,
        };
        for pool in Pool::ALL {
            let link = Link::of(chain, pool);
            if link.rate == 0.0 {
                filler.nvme = 0;
                filler.host = if link.nvme { filler.host } else { 0 };
                continue;
            }
            let rooms = link.rooms(chain);
            filler.constant += rooms.overflow;
            filler.pools.push(PoolData {
                nvme: link.nvme,
                ms_a_byte: 1000.0 / link.rate,
                first: (0..=n).map(|i| link.first(i, n)).collect(),
                room: rooms.from,
            });
        }
        Some(filler)
    }

    /// Exposed time of the pools that `nvme` chooses, for what is offloaded.
    fn exposed(&self, nvme: bool, offloaded: impl Fn(usize) -> bool) -> f64 {
        let mut sum = 0.0;
        for pool in self.pools.iter().filter(|pool| pool.nvme == nvme) {
            let (mut bytes, mut worst) = (0, 0.0f64);
            for i in (0..self.sizes.len()).rev().filter(|&i| offloaded(i)) {
                bytes += self.sizes[i];
                worst = worst.max(bytes as f64 * pool.ms_a_byte - pool.room[pool.first[i]]);
            }
            sum += worst;
        }
        sum
    }

    fn cost(&self, placement: &[Placement]) -> f64 {
        let on_nvme = |i: usize| placement[i] == Placement::Nvme;
        let offloaded = |i: usize| on_nvme(i) || placement[i] == Placement::Host;
        let count = (0..placement.len()).filter(|&i| on_nvme(i)).count();
        self.constant
            + self.exposed(false, offloaded)
            + self.exposed(true, on_nvme)
            + self.tiebreak * count as f64
    }

    /// Places what is not in HBM: on NVMe the fewest that relieve host RAM, from the bottom up, where windows are longest.
    fn offload(&self, in_hbm: &[bool]) -> Option<Vec<Placement>> {
        let mut placement = vec![Placement::Recompute; self.sizes.len()];
        let (mut host, mut nvme) = (0, 0);
        let mut movable = Vec::new();
        for i in (0..self.sizes.len()).filter(|&i| !self.skip[i]) {
            if in_hbm[i] {
                placement[i] = Placement::Hbm;
            } else if self.allowed[i].host {
                placement[i] = Placement::Host;
                host += self.sizes[i];
                if self.allowed[i].nvme {
                    movable.push(i);
                }
            } else {
                placement[i] = Placement::Nvme;
                nvme += self.sizes[i];
            }
        }
        while host > self.host {
            let excess = host - self.host;
            // The lowest that alone suffices, else the largest.
            let alone = movable.iter().position(|&i| self.sizes[i] >= excess);
            let largest = || (0..movable.len()).max_by_key(|&k| self.sizes[movable[k]]);
            let i = movable.remove(alone.or_else(largest)?);
            placement[i] = Placement::Nvme;
            host -= self.sizes[i];
            nvme += self.sizes[i];
        }
        (nvme <= self.nvme).then_some(placement)
    }
}

/// Which sums the lowest boundaries that may be in HBM can reach, in units.
struct Sums {
    unit: u64,
    /// Boundaries that may go to HBM or elsewhere, in index order.
    free: Vec<usize>,
    /// Boundaries that must be in HBM.
    fixed: Vec<usize>,
    /// What HBM has left for the free ones (units).
    room: u64,
    /// `reachable[k]`: sums of subsets of the first `k` free ones.
    reachable: Vec<Vec<u64>>,
    /// The largest sums that all of them reach and that leave no more than fits elsewhere, descending.
    fullest: Vec<u64>,
}

impl Sums {
    fn new(filler: &Filler) -> Option<Sums> {
        let saved = (0..filler.sizes.len()).filter(|&i| !filler.skip[i]);
        let (may, must_not): (Vec<usize>, Vec<usize>) = saved.partition(|&i| filler.allowed[i].hbm);
        let (free, fixed): (Vec<usize>, Vec<usize>) = may.into_iter().partition(|&i| {
            filler.allowed[i].host && filler.host > 0 || filler.allowed[i].nvme && filler.nvme > 0
        });
        let taken: u64 = fixed.iter().map(|&i| filler.sizes[i]).sum();
        let room = filler.hbm.checked_sub(taken)?;
        let total: u64 = free.iter().chain(&must_not).map(|&i| filler.sizes[i]).sum();
        let bytes: u64 = free.iter().map(|&i| filler.sizes[i]).sum();
        let room = room.min(bytes);
        // Rounding sizes up keeps every filling allowed.
        let sizes: Vec<u64> = free.iter().map(|&i| filler.sizes[i]).collect();
        let table = (room as u128 * (free.len() as u128 + 1)) >> TABLE_BITS;
        let finest = (room >> ROW_BITS).max(u64::try_from(table).ok()?);
        let divisor = gcd(&sizes).max(1);
        let unit = divisor * finest.div_ceil(divisor).max(1);
        let least = total.saturating_sub(filler.host.saturating_add(filler.nvme)).div_ceil(unit);
        let room = room / unit;
        let words = (room / 64 + 1) as usize;
        let mut reachable = vec![vec![0u64; words]];
        reachable[0][0] = 1;
        for size in &sizes {
            let mut sums = reachable.last()?.clone();
            or_shifted(&mut sums, size.div_ceil(unit));
            reachable.push(sums);
        }
        let mut sums = Sums { unit, free, fixed, room, reachable, fullest: vec![] };
        sums.fullest =
            (least..=room).rev().filter(|sum| sums.reaches(sums.free.len(), *sum)).take(SUMS).collect();
        (!sums.fullest.is_empty()).then_some(sums)
    }

    fn reaches(&self, k: usize, sum: u64) -> bool {
        sum <= self.room && self.reachable[k][(sum / 64) as usize] >> (sum % 64) & 1 > 0
    }

    /// One way to fill HBM: as full as can be at first, a little less the later it is asked.
    fn filling(&self, filler: &Filler, number: u64, random: &mut Random) -> Vec<bool> {
        let mut sum = self.fullest[(number / 8) as usize % self.fullest.len()];
        let mut in_hbm = vec![false; filler.sizes.len()];
        for &i in &self.fixed {
            in_hbm[i] = true;
        }
        // The top goes to HBM rather than the bottom: it has the fewest windows. How strongly varies from try to try.
        let lean = [0.5, 0.7, 0.9, 1.0, 0.3, 0.8, 0.6, 0.95][(number % 8) as usize];
        let count = self.free.len() as f64;
        for k in (0..self.free.len()).rev() {
            let size = filler.sizes[self.free[k]].div_ceil(self.unit);
            let take = size <= sum && self.reaches(k, sum - size);
            let leave = self.reaches(k, sum);
            let height = k as f64 / count;
            let wanted = if height > 0.5 { lean } else { 1.0 - lean };
            if take && (!leave || random.unit() < wanted) {
                in_hbm[self.free[k]] = true;
                sum -= size;
            }
        }
        in_hbm
    }
}

/// `sums |= sums << by`, within the length.
fn or_shifted(sums: &mut [u64], by: u64) {
    let (words, bits) = ((by / 64) as usize, by % 64);
    if by == 0 {
        return;
    }
    for w in (words..sums.len()).rev() {
        let mut word = sums[w - words] << bits;
        if bits > 0 && w > words {
            word |= sums[w - words - 1] >> (64 - bits);
        }
        sums[w] |= word;
    }
}
