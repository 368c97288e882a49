//! The best placement of given checkpoints: exactly where they are few, by many exchanges where they are many.

use std::time::Instant;

use lazy_model::Placement;

use crate::exchange::exchange;
use crate::place::{Filler, Random};
use crate::search::tolerance;

/// Free boundaries whose splits are all looked at, and those of one exchange where there are more.
pub(crate) const EXACT: usize = 28;
const AT_ONCE: usize = 28;
/// Exchanges tried.
const ROUNDS: usize = 400;
/// Exchanges in a row that may gain nothing.
const MOST_IDLE: usize = 60;
/// Pairs of halves compared in one exchange, and for all of a set of checkpoints.
const PAIRS: u64 = 1 << 19;
const PAIRS_OF_ALL: u64 = 1 << 26;
/// Sets of boundaries on NVMe that are tried.
const NVME_SETS: usize = 1000;

/// What is known of given checkpoints.
pub(crate) struct Fit {
    /// A placement that costs less than what was known, and its cost (ms).
    pub(crate) better: Option<(f64, Vec<Placement>)>,
    /// Whether none of these checkpoints costs less than that, or than what was known.
    pub(crate) exact: bool,
}

/// Looks for a placement of `filler`'s checkpoints that costs less than `best`, trying every one.
pub(crate) fn every(filler: &Filler, best: f64, deadline: Option<Instant>) -> Fit {
    let saved: Vec<usize> = (0..filler.sizes.len()).filter(|&i| !filler.skip[i]).collect();
    let unknown = Fit { better: None, exact: false };
    if saved.len() > EXACT || !filler.unlocked() {
        return unknown;
    }
    let total: u64 = saved.iter().map(|&i| filler.sizes[i]).sum();
    let off = total.saturating_sub(filler.hbm);
    let least = off.saturating_sub(filler.host);
    let pcie = |off: u64| -> f64 {
        filler.pcie().map(|pool| (off as f64 * pool.ms_a_byte - pool.room[pool.first[0]]).max(0.0)).sum()
    };
    let mut fit = Fit { better: None, exact: true };
    let mut best = best;
    let mut tried = 0;
    let mut pairs = PAIRS_OF_ALL;
    for count in 0..=saved.len() {
        let weights = filler.constant + filler.tiebreak * count as f64;
        let base = weights + pcie(off);
        if base >= best {
            break;
        }
        // The most bytes that may be offloaded, and what of them host RAM cannot hold.
        let (mut most, mut beyond) = (off, total + 1);
        while beyond - most > 1 {
            let middle = most + (beyond - most) / 2;
            if weights + pcie(middle) < best { most = middle } else { beyond = middle }
        }
        let wanted = Wanted { least, most: most.saturating_sub(filler.host), budget: filler.nvme };
        let mut sets = vec![];
        if !wanted.choose(filler, &saved, count, &mut vec![], &mut sets) {
            return Fit { exact: false, ..fit };
        }
        for nvme in sets {
            let exposed = filler.exposed(true, |i| nvme.contains(&i));
            if base + exposed >= best {
                continue;
            }
            tried += 1;
            if tried > NVME_SETS || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Fit { exact: false, ..fit };
            }
            let mut placement = vec![Placement::Recompute; filler.sizes.len()];
            let mut free = vec![false; filler.sizes.len()];
            for &i in &saved {
                free[i] = !nvme.contains(&i);
                placement[i] = if free[i] { Placement::Hbm } else { Placement::Nvme };
            }
            if let Some(found) = exchange(filler, &placement, &free, best, &mut pairs) {
                best = found.0;
                fit.better = Some(found);
            }
            if pairs == 0 {
                return Fit { exact: false, ..fit };
            }
        }
    }
    fit
}

/// What sets of boundaries on NVMe are worth trying (bytes).
struct Wanted {
    least: u64,
    /// Host RAM never lacks more than this: a set that has it without one of its boundaries has that one in vain.
    most: u64,
    budget: u64,
}

impl Wanted {
    /// The sets of `count` boundaries of `from` worth trying; false where there are too many.
    fn choose(
        &self,
        filler: &Filler,
        from: &[usize],
        count: usize,
        chosen: &mut Vec<usize>,
        sets: &mut Vec<Vec<usize>>,
    ) -> bool {
        let size = |i: &usize| filler.sizes[*i];
        let bytes: u64 = chosen.iter().map(size).sum();
        let in_vain = !chosen.is_empty() && bytes - chosen.iter().map(size).min().unwrap_or(0) >= self.most;
        if in_vain || bytes > self.budget {
            return true;
        }
        if count == 0 {
            if bytes >= self.least {
                sets.push(chosen.clone());
            }
            return sets.len() <= NVME_SETS;
        }
        // The largest of what is left must do.
        let mut largest: Vec<u64> = from.iter().map(size).collect();
        largest.sort_unstable_by(|a, b| b.cmp(a));
        if from.len() < count || bytes + largest.iter().take(count).sum::<u64>() < self.least {
            return true;
        }
        for (k, &i) in from.iter().enumerate() {
            chosen.push(i);
            let few = self.choose(filler, &from[k + 1..], count - 1, chosen, sets);
            chosen.pop();
            if !few {
                return false;
            }
        }
        true
    }
}

/// Makes `placement` cheaper by exchanges among some boundaries at a time, down to `enough`.
pub(crate) fn polish(
    filler: &Filler,
    mut placement: Vec<Placement>,
    enough: f64,
    deadline: Option<Instant>,
) -> (f64, Vec<Placement>) {
    let mut cost = filler.cost(&placement);
    let allowed = |i: &usize| filler.allowed[*i].hbm && filler.allowed[*i].host;
    let movable = |placement: &[Placement]| -> Vec<usize> {
        let either = |i: &usize| matches!(placement[*i], Placement::Hbm | Placement::Host);
        (0..placement.len()).filter(either).filter(allowed).collect()
    };
    let mut random = Random(2);
    let enough = enough + tolerance(enough) / 2.0;
    let mut idle = 0;
    for _ in 0..ROUNDS {
        let offloaded = |i: usize| matches!(placement[i], Placement::Host | Placement::Nvme);
        let nothing_exposed = filler.exposed(false, offloaded) <= tolerance(cost) / 2.0;
        let done = cost <= enough || nothing_exposed || idle > MOST_IDLE;
        if done || deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            break;
        }
        let mut left = movable(&placement);
        let all = left.len() <= AT_ONCE;
        let mut free = vec![false; placement.len()];
        for _ in 0..AT_ONCE.min(left.len()) {
            let k = (random.unit() * left.len() as f64) as usize;
            free[left.swap_remove(k.min(left.len() - 1))] = true;
        }
        let mut pairs = PAIRS;
        if let Some((less, better)) = exchange(filler, &placement, &free, cost, &mut pairs) {
            (cost, placement) = (less, better);
            idle = 0;
        } else {
            idle += 1;
        }
        if all {
            break;
        }
    }
    (cost, placement)
}
