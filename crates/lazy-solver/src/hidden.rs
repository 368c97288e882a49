//! Placements that expose no more than they must: which bytes can be offloaded, from the top down, without any suffix of windows being
//! asked for more than it carries.
//!
//! With the boundaries on NVMe decided, what is left is to split the others between HBM and host RAM. A table of the sums that can be
//! offloaded from each boundary up, cut off where the windows from there on overflow, answers that for all splits at once.

use std::time::Instant;

use lazy_model::Placement;

use crate::place::{Filler, Random};
use crate::problem::gcd;
use crate::search::tolerance;

/// Bits of the table, as a power of two.
const TABLE_BITS: u32 = 27;
/// Ways back through a table that are tried: sums are rounded, so some miss a budget by a few units.
const WALKS: u64 = 200;
/// Sets on NVMe that are tried.
const SETS: usize = 4;

/// A placement of `filler`'s checkpoints that costs no more than what suffixes of boundaries expose at least and the fewest
/// boundaries on NVMe cost, if one is found.
pub(crate) fn hidden(filler: &Filler, deadline: Option<Instant>) -> Option<(f64, Vec<Placement>)> {
    let few = filler.fewest()?;
    let mut random = Random(3);
    let enough = filler.constant + filler.suffixes(false) + few.at_least;
    let enough = enough + tolerance(enough) / 2.0;
    let mut best: Option<(f64, Vec<Placement>)> = None;
    for number in 0..SETS {
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            break;
        }
        let few = few.set.clone().or_else(|| filler.largest_on_nvme(filler.lacking()))?;
        let nvme = roomiest(filler, few, number, &mut random);
        let Some(table) = Table::new(filler, &nvme) else { continue };
        let before = best.as_ref().map(|(cost, _)| *cost);
        for number in 0..WALKS {
            let Some(placement) = table.walk(filler, &nvme, number, &mut random) else { continue };
            let cost = filler.cost(&placement);
            if best.as_ref().is_none_or(|(least, _)| cost < *least) {
                best = Some((cost, placement));
            }
            if cost <= enough {
                return best;
            }
        }
        if before.is_some() && before == best.as_ref().map(|(cost, _)| *cost) {
            break;
        }
    }
    best
}

/// The set on NVMe made larger, one exchange at a time, while the drive is exposed no longer: the larger it is, the more ways there
/// are to fill HBM and host RAM. Later sets have some boundaries at random.
fn roomiest(filler: &Filler, mut set: Vec<usize>, number: usize, random: &mut Random) -> Vec<usize> {
    let may: Vec<usize> =
        (0..filler.sizes.len()).filter(|&i| !filler.skip[i] && filler.allowed[i].nvme).collect();
    let exposed = |set: &[usize]| filler.drive_exposed(set);
    let limit = exposed(&set);
    let mut pick = |most: usize| ((random.unit() * most as f64) as usize).min(most.saturating_sub(1));
    for _ in 0..number.min(set.len()) {
        let (k, i) = (pick(set.len()), may[pick(may.len())]);
        let before = set[k];
        if !set.contains(&i) {
            set[k] = i;
            if exposed(&set) > limit {
                set[k] = before;
            }
        }
    }
    loop {
        let mut pairs: Vec<(u64, usize, usize)> = vec![];
        for &i in may.iter().filter(|i| !set.contains(i)) {
            let gains = (0..set.len()).filter(|&k| filler.sizes[i] > filler.sizes[set[k]]);
            pairs.extend(gains.map(|k| (filler.sizes[i] - filler.sizes[set[k]], k, i)));
        }
        pairs.sort_unstable_by(|a, b| b.cmp(a));
        let better = pairs.into_iter().find_map(|(_, k, i)| {
            let mut other = set.clone();
            other[k] = i;
            (exposed(&other) <= limit).then_some(other)
        });
        match better {
            Some(other) => set = other,
            None => return set,
        }
    }
}

/// Which sums of offloaded bytes are possible.
struct Table {
    /// Checkpoints, from the top down, their sizes in units and whether they may stay and may leave.
    boundaries: Vec<(usize, u64, bool, bool)>,
    /// `rows[j]`: sums of the first `j` of them, in units.
    rows: Vec<Vec<u64>>,
    /// Sums of all of them that leave HBM and host RAM no more than they hold, or nearly.
    sums: Vec<u64>,
}

impl Table {
    fn new(filler: &Filler, nvme: &[usize]) -> Option<Table> {
        let saved: Vec<usize> = (0..filler.sizes.len()).rev().filter(|&i| !filler.skip[i]).collect();
        let on_nvme: u64 = nvme.iter().map(|&i| filler.sizes[i]).sum();
        let total: u64 = saved.iter().map(|&i| filler.sizes[i]).sum();
        let least = total.saturating_sub(filler.hbm);
        let most = filler.host.saturating_add(on_nvme).min(total);
        if least > most || on_nvme > filler.nvme {
            return None;
        }
        let sizes: Vec<u64> = saved.iter().map(|&i| filler.sizes[i]).collect();
        let divisor = gcd(&sizes).max(1);
        let finest = u64::try_from((most as u128 * (saved.len() as u128 + 1)) >> TABLE_BITS).ok()?;
        let unit = divisor * finest.div_ceil(divisor).max(1);
        // The exact judge decides; a unit's rounding a boundary is allowed for.
        let last = most / unit + saved.len() as u64;
        let words = (last / 64 + 1) as usize;
        let mut table = Table { boundaries: vec![], rows: vec![vec![0; words]], sums: vec![] };
        table.rows[0][0] = 1;
        let allowances: Vec<f64> = filler.pcie().map(|pool| filler.suffixes_of(pool) + 1e-7).collect();
        for &i in &saved {
            let leaves = nvme.contains(&i);
            let stay = !leaves && filler.allowed[i].hbm;
            let leave = leaves || filler.allowed[i].host && filler.host > 0;
            let size = (filler.sizes[i] + unit / 2) / unit;
            let before = table.rows.last()?;
            let mut row = if leave { before.clone() } else { vec![0; words] };
            if leave {
                shift(&mut row, size);
            }
            if stay {
                row.iter_mut().zip(before).for_each(|(word, other)| *word |= other);
            }
            let carried = filler
                .pcie()
                .zip(&allowances)
                .map(|(pool, allowance)| (pool.room[pool.first[i]] + allowance) / pool.ms_a_byte)
                .fold(f64::INFINITY, f64::min);
            cut(&mut row, (carried / unit as f64).round() as u64);
            table.rows.push(row);
            table.boundaries.push((i, size, stay, leave));
        }
        let all = table.rows.last()?;
        let has = |sum: &u64| all[(*sum / 64) as usize] >> (*sum % 64) & 1 > 0;
        let middle = (least + (most - least) / 2) / unit;
        let range = least / unit..=(most / unit + 1).min(last);
        // From the middle on, which misses neither budget.
        let outward = (0..=last).flat_map(|d| [middle.checked_sub(d + 1), middle.checked_add(d)]).flatten();
        let outward = outward.take(2 * (range.end() - range.start() + 1) as usize);
        let sums = outward.filter(|sum| range.contains(sum)).filter(has).take(WALKS as usize).collect();
        table.sums = sums;
        (!table.sums.is_empty()).then_some(table)
    }

    /// One way back through the table; `None` where rounding made it miss a budget.
    fn walk(
        &self,
        filler: &Filler,
        nvme: &[usize],
        number: u64,
        random: &mut Random,
    ) -> Option<Vec<Placement>> {
        let mut sum = self.sums[number as usize % self.sums.len()];
        let mut placement = vec![Placement::Recompute; filler.sizes.len()];
        let (mut hbm, mut host) = (0, 0);
        for (j, &(i, size, may_stay, may_leave)) in self.boundaries.iter().enumerate().rev() {
            let has = |sum: u64| self.rows[j][(sum / 64) as usize] >> (sum % 64) & 1 > 0;
            let stay = may_stay && has(sum);
            let leave = may_leave && size <= sum && has(sum - size);
            if leave && (!stay || random.unit() < 0.5) {
                sum -= size;
                placement[i] = if nvme.contains(&i) { Placement::Nvme } else { Placement::Host };
                host += if nvme.contains(&i) { 0 } else { filler.sizes[i] };
            } else {
                placement[i] = Placement::Hbm;
                hbm += filler.sizes[i];
            }
        }
        (hbm <= filler.hbm && host <= filler.host).then_some(placement)
    }
}

/// `sums << by`, within the length.
fn shift(sums: &mut Vec<u64>, by: u64) {
    let mut shifted = vec![0; sums.len()];
    std::mem::swap(sums, &mut shifted);
    let words = ((by / 64) as usize).min(sums.len());
    let len = sums.len();
    sums[words..].copy_from_slice(&shifted[..len - words]);
    let bits = by % 64;
    if bits > 0 {
        for w in (words..len).rev() {
            let carry = if w > words { sums[w - 1] >> (64 - bits) } else { 0 };
            sums[w] = sums[w] << bits | carry;
        }
    }
}

/// Takes sums above `most` away.
fn cut(sums: &mut [u64], most: u64) {
    let (word, bit) = ((most / 64) as usize, most % 64);
    if let Some(partly) = sums.get_mut(word) {
        *partly &= u64::MAX >> (63 - bit);
    }
    sums.iter_mut().skip(word + 1).for_each(|word| *word = 0);
}
