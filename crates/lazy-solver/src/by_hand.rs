//! Plans that people make by hand, unjudged.

use lazy_model::{BoundaryIndex, Bytes, CostChain, Placement, TierBytes};

/// Longest distance between the checkpoints of a regular plan, in layers.
const MOST_LAYERS: usize = 8;
pub(crate) const GREEDY: &str = "greedy";

/// Name, placement and whether all internals are kept.
pub(crate) fn plans(chain: &CostChain) -> Vec<(String, Vec<Placement>, bool)> {
    let n = chain.layers;
    let all = vec![Placement::Hbm; n + 1];
    let mut list =
        vec![("do-nothing".to_owned(), all.clone(), true), ("checkpoint-every-layer".to_owned(), all, false)];
    for k in 2..=chain.max_segment_layers.min(n).min(MOST_LAYERS) {
        let every =
            |i: usize| if i.is_multiple_of(k) || i == n { Placement::Hbm } else { Placement::Recompute };
        list.push((format!("checkpoint-every-{k}-layers"), (0..=n).map(every).collect(), false));
    }
    list.push((GREEDY.to_owned(), greedy(chain), false));
    list
}

/// What somebody does by hand: drop what is cheapest to recompute per byte until the rest fits, then fill the tiers, fastest first,
/// with what is needed back first.
fn greedy(chain: &CostChain) -> Vec<Placement> {
    let sizes = &chain.boundary_bytes;
    let mut room = TierBytes {
        hbm: chain.gpu_budget_bytes.min(beside_a_layer(chain)),
        host: chain.cpu_budget_bytes,
        nvme: chain.nvme_budget_bytes,
    };
    let everything = room.hbm + room.host + room.nvme;
    let mut skipped = vec![false; sizes.len()];
    let mut held: Bytes = sizes.iter().copied().sum();
    let mut cheapest: Vec<usize> = (1..chain.layers).collect();
    let per_byte = |i: &usize| chain.layer_recompute_ms[i - 1] / sizes[*i].get().max(1) as f64;
    cheapest.sort_by(|a, b| per_byte(a).total_cmp(&per_byte(b)));
    for i in cheapest {
        if held <= everything {
            break;
        }
        if may_skip(&skipped, i, chain.max_segment_layers) {
            skipped[i] = true;
            held = held.saturating_sub(sizes[i]);
        }
    }
    let mut placement = vec![Placement::Recompute; sizes.len()];
    // Of a step the last boundary has its place, the loss reads it at once.
    let fixed = |i: usize| chain.locks.as_ref()?.fixed.get(&BoundaryIndex(i)).copied();
    for i in (0..sizes.len()).rev().filter(|&i| !skipped[i]) {
        let fits = fixed(i).or_else(|| first_with_room(&room, sizes[i]));
        // What fits nowhere whole stays in HBM, and the judge says so.
        placement[i] = fits.unwrap_or(Placement::Hbm);
        if let Some(tier) = placement[i].tier() {
            *room.get_mut(tier) = room.get(tier).saturating_sub(sizes[i]);
        }
    }
    placement
}

fn first_with_room(room: &TierBytes, size: Bytes) -> Option<Placement> {
    [Placement::Hbm, Placement::Host, Placement::Nvme]
        .into_iter()
        .find(|p| p.tier().is_some_and(|tier| room.get(tier) >= size))
}

/// HBM that the cap leaves for boundaries beside the largest running layer, a block being re-run and the loss; all of it without a
/// cap.
fn beside_a_layer(chain: &CostChain) -> Bytes {
    let Some(cap) = chain.hbm_cap_bytes else { return Bytes(u64::MAX) };
    let zero = vec![Bytes::ZERO; chain.layers];
    let list = |key: &Option<Vec<Bytes>>| key.clone().unwrap_or_else(|| zero.clone());
    let internals = list(&chain.layer_internal_bytes);
    let (forward, backward) =
        (list(&chain.layer_forward_workspace_bytes), list(&chain.layer_backward_workspace_bytes));
    let running = (0..chain.layers).map(|l| internals[l] + backward[l].max(forward[l]));
    let running = running.max().unwrap_or_default() + chain.transfer_slack_bytes.unwrap_or_default();
    let largest = chain.boundary_bytes.iter().copied().max().unwrap_or_default();
    let block = largest * chain.max_segment_layers.min(chain.layers) as u64;
    let taken = chain.hbm_fixed_bytes.unwrap_or_default()
        + (running + block).max(chain.loss_workspace_bytes.unwrap_or_default());
    cap.saturating_sub(taken)
}

/// Whether boundary `i` can be dropped beside those already dropped, with blocks of at most `limit` layers.
fn may_skip(skipped: &[bool], i: usize, limit: usize) -> bool {
    let below = skipped[..i].iter().rev().take_while(|s| **s).count();
    let above = skipped[i + 1..].iter().take_while(|s| **s).count();
    below + 1 + above < limit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_count_the_layers_between_saved_boundaries() {
        let dropped = [false, true, true, false, false, false];
        // Dropping boundary 3 too makes a block of four layers, from 0 to 4.
        assert!(may_skip(&dropped, 3, 4));
        assert!(!may_skip(&dropped, 3, 3));
        assert!(may_skip(&dropped, 4, 2));
        assert!(!may_skip(&dropped, 4, 1));
    }
}
