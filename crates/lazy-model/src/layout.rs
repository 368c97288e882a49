//! Offsets for buffers whose lifetimes are known beforehand.

use crate::units::Bytes;

/// A request for `bytes` from list position `from` to `to`, both included.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lifetime {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) bytes: Bytes,
}

/// Places every request at the lowest offset that is free over its whole lifetime, large requests first, then early ones.
/// Returns the offsets in request order and the extent. For requests of one size the extent is the largest sum of bytes
/// live at once (the classic greedy for interval graphs); for mixed sizes it can be larger, never smaller.
pub(crate) fn lay_out(requests: &[Lifetime]) -> (Vec<u64>, Bytes) {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|&r| (std::cmp::Reverse(requests[r].bytes), requests[r].from));
    let mut offsets = vec![0u64; requests.len()];
    let mut placed: Vec<usize> = Vec::with_capacity(requests.len());
    let mut extent = 0u64;
    for r in order {
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
