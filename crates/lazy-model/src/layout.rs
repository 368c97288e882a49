//! Offsets for buffers whose lifetimes are known beforehand.

use std::cmp::Reverse;

use crate::units::Bytes;

/// Positions between reservation and release of what serves one layer, at most.
const BRIEF: usize = 24;

/// A request for `bytes` from list position `from` to `to`, both included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lifetime {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) bytes: Bytes,
}

/// Places every request at the lowest offset that is free over its whole lifetime, in the order that needs least of a few: large requests
/// first, long lifetimes first (which stacks nested ones without gaps, as what a forward pass leaves for the backward pass is), and long ones
/// first but what a moment needs together by size. Returns the offsets in request order and the extent. For requests of one size the extent is
/// the largest sum of bytes live at once (the classic greedy for interval graphs); for mixed sizes it can be larger, never smaller.
pub(crate) fn lay_out(requests: &[Lifetime]) -> (Vec<u64>, Bytes) {
    let least = most_at_once(requests);
    let length = |r: usize| requests[r].to.saturating_sub(requests[r].from);
    let by_size = |r: usize| (Reverse(requests[r].bytes.get()), requests[r].from);
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|&r| by_size(r));
    let mut best = place(requests, &order);
    for round in 0..2 {
        if best.1.get() <= least {
            break;
        }
        // Few operations lie between the ends of what one layer needs.
        let long = |r: usize| round == 0 || length(r) > BRIEF;
        order.sort_by_key(|&r| (Reverse(if long(r) { length(r) } else { 0 }), by_size(r)));
        let other = place(requests, &order);
        if other.1 < best.1 {
            best = other;
        }
    }
    best
}

/// The most bytes live at one position: no layout needs less.
fn most_at_once(requests: &[Lifetime]) -> u64 {
    let mut changes: Vec<(usize, bool, u64)> = requests
        .iter()
        .flat_map(|r| [(r.from, true, r.bytes.get()), (r.to.saturating_add(1), false, r.bytes.get())])
        .collect();
    // What has ended goes before what starts.
    changes.sort_unstable();
    let (mut live, mut most) = (0u64, 0u64);
    for (_, starts, bytes) in changes {
        live = if starts { live.saturating_add(bytes) } else { live.saturating_sub(bytes) };
        most = most.max(live);
    }
    most
}

fn place(requests: &[Lifetime], order: &[usize]) -> (Vec<u64>, Bytes) {
    let mut offsets = vec![0u64; requests.len()];
    let mut placed: Vec<usize> = Vec::with_capacity(requests.len());
    let mut extent = 0u64;
    for &r in order {
        let request = &requests[r];
        let mut taken: Vec<(u64, u64)> = placed
            .iter()
            .filter(|&&p| requests[p].from <= request.to && request.from <= requests[p].to)
            .map(|&p| (offsets[p], offsets[p] + requests[p].bytes.get()))
            .collect();
        taken.sort_unstable();
        let mut at = 0u64;
        for (start, end) in taken {
            if start.saturating_sub(at) >= request.bytes.get() && start >= at {
                break;
            }
            at = at.max(end);
        }
        offsets[r] = at;
        extent = extent.max(at + request.bytes.get());
        placed.push(r);
    }
    (offsets, Bytes(extent))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn peak(requests: &[Lifetime]) -> u64 {
        let last = requests.iter().map(|r| r.to).max().unwrap_or(0);
        (0..=last)
            .map(|t| requests.iter().filter(|r| r.from <= t && t <= r.to).map(|r| r.bytes.get()).sum())
            .max()
            .unwrap_or(0)
    }

    /// What a forward pass keeps ends in the opposite order: the longest lifetimes at the bottom, without gaps, whatever the sizes.
    #[test]
    fn nested_lifetimes_stack_without_gaps() {
        let sizes = [3u64, 17, 2, 29, 5, 11];
        let nested = sizes.iter().enumerate().map(|(i, &bytes)| Lifetime {
            from: 10 * i,
            to: 200 - 10 * i,
            bytes: Bytes(bytes),
        });
        let brief = (0..6).map(|i| Lifetime { from: 10 * i + 2, to: 10 * i + 4, bytes: Bytes(7 + i as u64) });
        let requests: Vec<Lifetime> = nested.chain(brief).collect();
        assert_eq!(lay_out(&requests).1.get(), peak(&requests));
    }

    proptest! {
        #[test]
        fn never_overlaps_and_is_tight_for_one_size(
            raw in proptest::collection::vec((0usize..40, 0usize..20, 1u64..5), 0..40), uniform: bool,
        ) {
            let requests: Vec<Lifetime> = raw.iter().map(|&(from, length, size)| Lifetime {
                from, to: from + length, bytes: Bytes(if uniform { 3 } else { size }),
            }).collect();
            let (offsets, extent) = lay_out(&requests);
            for a in 0..requests.len() {
                prop_assert!(offsets[a] + requests[a].bytes.get() <= extent.get());
                for b in 0..a {
                    let together = requests[a].from <= requests[b].to && requests[b].from <= requests[a].to;
                    let apart = offsets[a] + requests[a].bytes.get() <= offsets[b]
                        || offsets[b] + requests[b].bytes.get() <= offsets[a];
                    prop_assert!(!together || apart);
                }
            }
            prop_assert!(extent.get() >= peak(&requests));
            if uniform {
                prop_assert_eq!(extent.get(), peak(&requests));
            }
        }
    }
}
