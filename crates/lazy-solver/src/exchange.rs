//! Exchanges between HBM and host RAM: the best of all ways to split some boundaries between the two, by meeting in the middle.
//!
//! Sizes that are random to the byte leave hardly any two sums equal, so how full HBM can be made is a question of single bytes, and
//! every byte that stays outside costs where traffic is exposed. The boundaries above a point and those below it are split in
//! every way; two halves together offload a sum of bytes, and their exposed time follows from a few numbers of each.

use lazy_model::Placement;

use crate::place::Filler;

/// One way to split the boundaries of a half.
#[derive(Clone, Copy)]
struct Half {
    /// Bytes offloaded.
    bytes: u64,
    /// For each PCIe pool, the most (ms) that a suffix of windows is asked beyond its room by this half alone.
    over: [f64; 2],
    /// Bit `k`: the half's free boundary `k`, from the top, is offloaded.
    choice: u32,
}

/// The cheapest placement that differs from `placement` in how `free` boundaries (in HBM or in host RAM) are split between these
/// two, if it costs less than `below`, with its cost (ms). Compares at most as many `pairs` of halves as there are, and takes them off.
pub(crate) fn exchange(
    filler: &Filler,
    placement: &[Placement],
    free: &[bool],
    below: f64,
    pairs: &mut u64,
) -> Option<(f64, Vec<Placement>)> {
    let n = placement.len();
    let on_nvme = |i: usize| placement[i] == Placement::Nvme;
    let count = (0..n).filter(|&i| on_nvme(i)).count();
    let base = filler.constant + filler.exposed(true, on_nvme) + filler.tiebreak * count as f64;
    let bytes =
        |of: &dyn Fn(usize) -> bool| -> u64 { (0..n).filter(|&i| of(i)).map(|i| filler.sizes[i]).sum() };
    let nvme = bytes(&on_nvme);
    let least = bytes(&|i| placement[i] != Placement::Recompute).saturating_sub(filler.hbm);
    let most = nvme.saturating_add(filler.host);
    // Half of the free boundaries on each side.
    let at: Vec<usize> = (0..n).filter(|&i| free[i]).collect();
    let middle = at.get(at.len() / 2).copied().unwrap_or(0);
    let split = Split { filler, placement, free };
    let limit = below - base;
    let upper = split.halves((middle..n).rev(), limit)?;
    let mut lower = split.halves((0..middle).rev(), f64::INFINITY)?;
    lower.sort_unstable_by(|a, b| a.bytes.cmp(&b.bytes).then(a.choice.cmp(&b.choice)));
    let pools: Vec<(f64, f64)> =
        filler.pcie().map(|pool| (pool.ms_a_byte, pool.room[pool.first[0]])).collect();
    let mut best: Option<(f64, u32, u32)> = None;
    let mut limit = limit;
    for above in &upper {
        let from = lower.partition_point(|below| above.bytes + below.bytes < least);
        for below in &lower[from..] {
            if *pairs == 0 {
                break;
            }
            *pairs -= 1;
            let off = above.bytes + below.bytes;
            let (mut at_least, mut exposed) = (0.0, 0.0);
            for (p, (ms, room)) in pools.iter().enumerate() {
                let sofar = above.over[p].max(0.0);
                at_least += sofar.max(off as f64 * ms - room);
                exposed += sofar.max(above.bytes as f64 * ms + below.over[p]);
            }
            if off > most || at_least >= limit {
                break;
            }
            if exposed < limit {
                limit = exposed;
                best = Some((exposed, above.choice, below.choice));
            }
        }
    }
    let (exposed, above, below) = best?;
    let mut better = placement.to_vec();
    for (half, choice) in [(middle..n, above), (0..middle, below)] {
        for (k, i) in half.rev().filter(|&i| free[i]).enumerate() {
            better[i] = if choice >> k & 1 > 0 { Placement::Host } else { Placement::Hbm };
        }
    }
    Some((base + exposed, better))
}

struct Split<'a> {
    filler: &'a Filler,
    placement: &'a [Placement],
    free: &'a [bool],
}

impl Split<'_> {
    /// Every way to split the boundaries of `half`, from the top down, that exposes less than `limit`; `None` where there are too many.
    fn halves(&self, half: impl Iterator<Item = usize>, limit: f64) -> Option<Vec<Half>> {
        let mut ways = vec![Half { bytes: 0, over: [f64::NEG_INFINITY; 2], choice: 0 }];
        let mut number = 0;
        for i in half {
            let offloaded = |way: &Half, bit: u32| {
                let mut way =
                    Half { bytes: way.bytes + self.filler.sizes[i], choice: way.choice | bit, ..*way };
                for (over, pool) in way.over.iter_mut().zip(self.filler.pcie()) {
                    *over = over.max(way.bytes as f64 * pool.ms_a_byte - pool.room[pool.first[i]]);
                }
                way
            };
            if self.free[i] {
                let bit = 1u32.checked_shl(number)?;
                number += 1;
                for k in 0..ways.len() {
                    ways.push(offloaded(&ways[k], bit));
                }
            } else if matches!(self.placement[i], Placement::Host | Placement::Nvme) {
                for way in &mut ways {
                    *way = offloaded(way, 0);
                }
            }
            ways.retain(|way| way.over.iter().map(|over| over.max(0.0)).sum::<f64>() < limit);
        }
        Some(ways)
    }
}
