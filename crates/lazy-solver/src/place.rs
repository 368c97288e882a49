//! Places given checkpoints without a program: fills HBM exactly by subset sums, and looks through many fillings.
//!
//! No proof is tried here. A filling that meets the relaxation's bound is an optimum; the best one found is where the program's search
//! would have to begin otherwise.

use std::cell::OnceCell;
use std::time::Instant;

use lazy_model::{Bytes, CostChain, Evaluation, Placement, Pool, evaluate};

use crate::fewest::{Fewest, fewest};
use crate::fit::{EXACT, polish};
use crate::hidden::hidden;
use crate::link::Link;
use crate::problem::{Allowed, allowed, gcd, recompute};
use crate::search::tolerance;

/// Bits of a row of reachable sums, and of all rows together, as powers of two.
const ROW_BITS: u32 = 21;
const TABLE_BITS: u32 = 27;
/// As above, where what is on NVMe is given: then there is some slack.
const COARSE_TABLE_BITS: u32 = 24;
/// Fullest sums that are tried.
const SUMS: usize = 128;
/// Fillings looked at.
const TRIES: u64 = 1000;
/// Sets on NVMe tried beside, and fillings looked at for each.
const NVME_SETS: usize = 12;
const TRIES_NVME: u64 = 64;
/// Boundaries in all of the sets that differ from one by a boundary.
const MOST_BESIDE: usize = 20_000_000;

/// The placement of least objective found for the checkpoints (those not in `skip`), stopping early at `bound`.
pub(crate) fn place(
    chain: &CostChain,
    skip: &[bool],
    bound: f64,
    deadline: Option<Instant>,
) -> Option<(Vec<Placement>, Evaluation)> {
    let filler = Filler::new(chain, skip, deadline)?;
    let bound = filler.at_least()?.max(bound);
    let enough = bound + tolerance(bound) / 2.0;
    let mut best: Option<(f64, Vec<Placement>)> = None;
    let nvme_sets = filler.nvme_sets();
    for (number, nvme) in [vec![]].into_iter().chain(nvme_sets).enumerate() {
        let late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        if late || best.as_ref().is_some_and(|(cost, _)| *cost <= enough) {
            break;
        }
        let tries = if number == 0 { TRIES } else { TRIES_NVME };
        fill(&filler, &nvme, tries, enough, deadline, &mut best);
        // Few checkpoints have every placement tried.
        let many = skip.iter().filter(|skip| !**skip).count() > EXACT;
        if number == 0 && many && best.as_ref().is_none_or(|(cost, _)| *cost > enough) {
            let cheaper =
                |found: &(f64, Vec<Placement>)| best.as_ref().is_none_or(|(cost, _)| found.0 < *cost);
            best = hidden(&filler, deadline).filter(cheaper).or(best);
        }
    }
    let (_, placement) = polish(&filler, best?.1, bound, deadline);
    let evaluation = evaluate(chain, &placement).ok()?;
    Some((placement, evaluation))
}

/// Tries fillings that have `nvme` on NVMe (if empty, what HBM and host RAM cannot hold), and keeps the best in `best`.
fn fill(
    filler: &Filler,
    nvme: &[usize],
    tries: u64,
    enough: f64,
    deadline: Option<Instant>,
    best: &mut Option<(f64, Vec<Placement>)>,
) {
    let Some(sums) = Sums::new(filler, nvme) else { return };
    let mut random = Random(1);
    // Few boundaries have few fillings.
    for number in 0..tries.min(16 << sums.free.len().min(16)) {
        let late = deadline.is_some_and(|deadline| number % 16 == 0 && Instant::now() >= deadline);
        if late || best.as_ref().is_some_and(|(cost, _)| *cost <= enough) {
            break;
        }
        let in_hbm = sums.filling(filler, number, &mut random);
        let Some(placement) = filler.offload(&in_hbm, nvme) else { continue };
        let cost = filler.cost(&placement);
        if best.as_ref().is_none_or(|(least, _)| cost < *least) {
            *best = Some((cost, placement));
        }
    }
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

pub(crate) struct PoolData {
    nvme: bool,
    pub(crate) ms_a_byte: f64,
    /// The first window of each boundary.
    pub(crate) first: Vec<usize>,
    /// Room in the windows from each on (ms).
    pub(crate) room: Vec<f64>,
}

/// The checkpoints and what is known about where they may go.
pub(crate) struct Filler {
    pub(crate) allowed: Vec<Allowed>,
    pub(crate) skip: Vec<bool>,
    pub(crate) sizes: Vec<u64>,
    pub(crate) hbm: u64,
    pub(crate) host: u64,
    pub(crate) nvme: u64,
    pools: Vec<PoolData>,
    pub(crate) tiebreak: f64,
    /// Recompute, checkpoints' weight and mandatory overflow (ms).
    pub(crate) constant: f64,
    pub(crate) deadline: Option<Instant>,
    fewest: OnceCell<Option<Fewest>>,
}

/// What a tier can hold of a suffix of boundaries.
struct Part {
    /// What those below leave that must be in the tier.
    room: u64,
    /// What of the suffix may be in the tier.
    may: u64,
}

impl Part {
    fn add(&mut self, size: u64, may: bool, must: bool) {
        self.may += if may { size } else { 0 };
        self.room += if must { size } else { 0 };
    }

    fn most(&self) -> u64 {
        self.room.min(self.may)
    }
}

impl Filler {
    /// `None` where locks contradict each other. Until `deadline` it may look for the cheapest set on NVMe.
    pub(crate) fn new(chain: &CostChain, skip: &[bool], deadline: Option<Instant>) -> Option<Filler> {
        let n = chain.layers;
        let sizes: Vec<u64> = chain.boundary_bytes.iter().map(|b: &Bytes| b.get()).collect();
        let recompute: f64 =
            skip.iter().enumerate().filter(|(_, s)| **s).map(|(i, _)| recompute(chain, i)).sum();
        // Sums of sizes are multiples of their common divisor.
        let saved: Vec<u64> = (0..=n).filter(|&i| !skip[i]).map(|i| sizes[i]).collect();
        let divisor = gcd(&saved).max(1);
        let whole = |budget: Bytes| budget.get() / divisor * divisor;
        let checkpoints = skip.iter().filter(|s| !**s).count() as f64;
        let mut filler = Filler {
            allowed: allowed(chain)?,
            skip: skip.to_vec(),
            sizes,
            hbm: whole(chain.gpu_budget_bytes),
            host: whole(chain.cpu_budget_bytes),
            nvme: whole(chain.nvme_budget_bytes),
            pools: vec![],
            tiebreak: chain.nvme_tiebreak,
            constant: recompute + chain.checkpoint_penalty * checkpoints,
            deadline,
            fewest: OnceCell::new(),
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

    /// The pools that every offloaded boundary loads.
    pub(crate) fn pcie(&self) -> impl Iterator<Item = &PoolData> {
        self.pools.iter().filter(|pool| !pool.nvme)
    }

    /// The pools that boundaries on NVMe load beside.
    pub(crate) fn drive(&self) -> impl Iterator<Item = &PoolData> {
        self.pools.iter().filter(|pool| pool.nvme)
    }

    /// Whether every checkpoint may go to every tier.
    pub(crate) fn unlocked(&self) -> bool {
        self.allowed.iter().zip(&self.skip).all(|(a, skip)| *skip || a.hbm && a.host && a.nvme)
    }

    /// Exposed time of the pools that `nvme` chooses, for what is offloaded.
    pub(crate) fn exposed(&self, nvme: bool, offloaded: impl Fn(usize) -> bool) -> f64 {
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

    pub(crate) fn cost(&self, placement: &[Placement]) -> f64 {
        let on_nvme = |i: usize| placement[i] == Placement::Nvme;
        let offloaded = |i: usize| on_nvme(i) || placement[i] == Placement::Host;
        let count = (0..placement.len()).filter(|&i| on_nvme(i)).count();
        self.constant
            + self.exposed(false, offloaded)
            + self.exposed(true, on_nvme)
            + self.tiebreak * count as f64
    }

    /// No placement costs less; `None` where there is none. Every suffix of boundaries puts at most HBM's bytes into HBM, and at most
    /// host RAM's of the rest there.
    pub(crate) fn at_least(&self) -> Option<f64> {
        let lacking = self.lacking();
        let drive = self.suffixes(true) + self.tiebreak * self.largest_on_nvme(lacking)?.len() as f64;
        let drive = drive.max(self.fewest()?.at_least);
        (lacking <= self.nvme).then_some(self.constant + self.suffixes(false) + drive)
    }

    /// What suffixes of boundaries expose at least, however HBM (and, for the drive, host RAM) is filled.
    pub(crate) fn suffixes(&self, nvme: bool) -> f64 {
        self.pools.iter().filter(|pool| pool.nvme == nvme).map(|pool| self.suffixes_of(pool)).sum()
    }

    /// What suffixes of boundaries expose at least in one pool. A suffix has no more in HBM than may be there, nor than those below leave that
    /// must be there; so for host RAM.
    pub(crate) fn suffixes_of(&self, pool: &PoolData) -> f64 {
        let saved = || (0..self.sizes.len()).rev().filter(|&i| !self.skip[i]);
        let sum = |there: &dyn Fn(&Allowed) -> bool| -> u64 {
            saved().filter(|&i| there(&self.allowed[i])).map(|i| self.sizes[i]).sum()
        };
        let only_hbm = |a: &Allowed| a.hbm && !a.host && !a.nvme;
        let only_host = |a: &Allowed| a.host && !a.hbm && !a.nvme;
        let mut hbm = Part { room: self.hbm.saturating_sub(sum(&only_hbm)), may: 0 };
        let mut host = Part { room: self.host.saturating_sub(sum(&only_host)), may: 0 };
        let (mut bytes, mut worst) = (0u64, 0.0f64);
        for i in saved() {
            let (size, allowed) = (self.sizes[i], &self.allowed[i]);
            bytes += size;
            hbm.add(size, allowed.hbm, only_hbm(allowed));
            host.add(size, allowed.host, only_host(allowed));
            let elsewhere = if pool.nvme { hbm.most().saturating_add(host.most()) } else { hbm.most() };
            let asked = bytes.saturating_sub(elsewhere) as f64 * pool.ms_a_byte;
            worst = worst.max(asked - pool.room[pool.first[i]]);
        }
        worst
    }

    /// See [`fewest`].
    pub(crate) fn fewest(&self) -> Option<&Fewest> {
        self.fewest.get_or_init(|| fewest(self)).as_ref()
    }

    /// What boundaries on NVMe expose of the drive's pools.
    pub(crate) fn drive_exposed(&self, nvme: &[usize]) -> f64 {
        let mut down = nvme.to_vec();
        down.sort_unstable_by(|a, b| b.cmp(a));
        self.drive()
            .map(|pool| {
                let (mut bytes, mut worst) = (0, 0.0f64);
                for &i in &down {
                    bytes += self.sizes[i];
                    worst = worst.max(bytes as f64 * pool.ms_a_byte - pool.room[pool.first[i]]);
                }
                worst
            })
            .sum()
    }

    pub(crate) fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Bytes of checkpoints that neither HBM nor host RAM can hold.
    pub(crate) fn lacking(&self) -> u64 {
        let saved = (0..self.sizes.len()).filter(|&i| !self.skip[i]);
        saved.map(|i| self.sizes[i]).sum::<u64>().saturating_sub(self.hbm).saturating_sub(self.host)
    }

    /// The largest checkpoints that may be on NVMe, as many as have `lacking` bytes; `None` where all have less.
    pub(crate) fn largest_on_nvme(&self, lacking: u64) -> Option<Vec<usize>> {
        let mut may: Vec<usize> =
            (0..self.sizes.len()).filter(|&i| !self.skip[i] && self.allowed[i].nvme).collect();
        may.sort_by_key(|&i| (std::cmp::Reverse(self.sizes[i]), i));
        let mut bytes = 0;
        let mut count = 0;
        while bytes < lacking {
            bytes += self.sizes[*may.get(count)?];
            count += 1;
        }
        may.truncate(count);
        Some(may)
    }

    /// Sets of as few boundaries as may be on NVMe: the largest, or what exchanges of one boundary at a time make of them until the drive
    /// keeps up, and sets that differ from that by one boundary.
    fn nvme_sets(&self) -> Vec<Vec<usize>> {
        let Some(largest) = self.largest_on_nvme(self.lacking()).filter(|set| !set.is_empty()) else {
            return vec![];
        };
        let cheapest = self.fewest().and_then(|fewest| fewest.set.clone());
        let mut set = cheapest.filter(|set| !set.is_empty()).unwrap_or(largest);
        loop {
            let exposed = self.drive_exposed(&set);
            let mut beside = self.beside(&set);
            match beside.first() {
                Some((less, _, better)) if *less < exposed => set = better.clone(),
                _ => {
                    beside.truncate(NVME_SETS);
                    let others = beside.into_iter().map(|(_, _, set)| set);
                    return [set].into_iter().chain(others).collect();
                }
            }
        }
    }

    /// Sets that differ from `set` by one boundary and relieve host RAM enough, with what they expose and the bytes given away, least first.
    fn beside(&self, set: &[usize]) -> Vec<(f64, u64, Vec<usize>)> {
        let bytes: u64 = set.iter().map(|&i| self.sizes[i]).sum();
        let spare = bytes.saturating_sub(self.lacking());
        let may = |i: &usize| !self.skip[*i] && self.allowed[*i].nvme && !set.contains(i);
        let mut sets = vec![];
        // Every set is a copy.
        if self.sizes.len() * set.len() * set.len() > MOST_BESIDE {
            return sets;
        }
        for i in (0..self.sizes.len()).filter(may) {
            for k in 0..set.len() {
                let lost = self.sizes[set[k]].saturating_sub(self.sizes[i]);
                if lost <= spare {
                    let mut other = set.to_vec();
                    other[k] = i;
                    sets.push((self.drive_exposed(&other), lost, other));
                }
            }
        }
        sets.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        sets
    }

    /// Places what is not in HBM: on NVMe the fewest that relieve host RAM, from the bottom up, where windows are longest.
    fn offload(&self, in_hbm: &[bool], given: &[usize]) -> Option<Vec<Placement>> {
        let mut placement = vec![Placement::Recompute; self.sizes.len()];
        let (mut host, mut nvme) = (0, 0);
        let mut movable = Vec::new();
        for i in (0..self.sizes.len()).filter(|&i| !self.skip[i]) {
            if in_hbm[i] {
                placement[i] = Placement::Hbm;
            } else if self.allowed[i].host && !given.contains(&i) {
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
    /// Fillings of HBM that leave `nvme` out and, if there is any, room in host RAM for all else.
    fn new(filler: &Filler, nvme: &[usize]) -> Option<Sums> {
        let saved = (0..filler.sizes.len()).filter(|&i| !filler.skip[i]);
        let (may, must_not): (Vec<usize>, Vec<usize>) =
            saved.partition(|&i| filler.allowed[i].hbm && !nvme.contains(&i));
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
        let bits = if nvme.is_empty() { TABLE_BITS } else { COARSE_TABLE_BITS };
        let table = (room as u128 * (free.len() as u128 + 1)) >> bits;
        let finest = (room >> ROW_BITS).max(u64::try_from(table).ok()?);
        let divisor = gcd(&sizes).max(1);
        let unit = divisor * finest.div_ceil(divisor).max(1);
        let on_nvme: u64 = nvme.iter().map(|&i| filler.sizes[i]).sum();
        let elsewhere = filler.host.saturating_add(if nvme.is_empty() { filler.nvme } else { on_nvme });
        let least = total.saturating_sub(elsewhere).div_ceil(unit);
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
