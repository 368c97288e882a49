//! Plans that people use without a solver, to hold a solved plan against.
//!
//! | name | boundaries | internals |
//! | --- | --- | --- |
//! | `do-nothing` | all in HBM | all kept, where the problem knows of internals |
//! | `checkpoint-every-layer` | all in HBM | none kept |
//! | `checkpoint-every-k-layers` | every k-th and the last in HBM, the others recomputed | none kept |
//! | `greedy` | the cheapest to recompute dropped until the rest fits, then HBM, host RAM and NVMe filled from the last boundary down | none kept |

use lazy_model::{
    CostChain, Evaluation, Placement, Schedule, StepProblem, TierBytes, Verified, VerifyError, Violation,
    evaluate,
};

use crate::step::best_execution;

/// Longest distance between the checkpoints of a baseline, in layers.
const MOST_LAYERS: usize = 8;

/// A plan that needs no solver, judged by a chain's rules.
#[derive(Clone, Debug)]
pub struct Baseline {
    /// Its name, for example `checkpoint-every-2-layers`.
    pub name: String,
    /// One entry a boundary, `0..=N`.
    pub placement: Vec<Placement>,
    /// What it costs, or the first rule it breaks.
    pub outcome: Result<Evaluation, Violation>,
}

/// A plan that needs no solver, laid out and simulated under a step's caps.
#[derive(Debug)]
pub struct StepBaseline {
    /// Its name.
    pub name: String,
    /// The plan.
    pub schedule: Schedule,
    /// Its time line and promise, or the cap it breaks.
    pub outcome: Result<Verified, VerifyError>,
}

/// The baselines of a chain. Its locks bind a solver, not them: they are judged without.
pub fn baselines(chain: &CostChain) -> Vec<Baseline> {
    let free = CostChain { locks: None, ..chain.clone() };
    candidates(chain)
        .into_iter()
        .map(|(name, placement, _)| {
            let outcome = evaluate(&free, &placement);
            Baseline { name, placement, outcome }
        })
        .collect()
}

/// The baselines of a step. `chain` is its placement problem: `greedy` looks at it alone.
pub fn step_baselines(problem: &StepProblem, chain: &CostChain) -> Vec<StepBaseline> {
    candidates(chain)
        .into_iter()
        .map(|(name, placement, keep)| {
            let mut schedule = Schedule::named(&name, &problem.boundary_bytes, keep);
            schedule.placement = placement;
            match best_execution(problem, &schedule, None) {
                Ok((schedule, verified)) => StepBaseline { name, schedule, outcome: Ok(verified) },
                Err(error) => StepBaseline { name, schedule, outcome: Err(error) },
            }
        })
        .collect()
}

/// Name, placement and whether all internals are kept.
fn candidates(chain: &CostChain) -> Vec<(String, Vec<Placement>, bool)> {
    let n = chain.layers;
    let all = vec![Placement::Hbm; n + 1];
    let mut list =
        vec![("do-nothing".to_owned(), all.clone(), true), ("checkpoint-every-layer".to_owned(), all, false)];
    for k in 2..=chain.max_segment_layers.min(n).min(MOST_LAYERS) {
        let every =
            |i: usize| if i.is_multiple_of(k) || i == n { Placement::Hbm } else { Placement::Recompute };
        list.push((format!("checkpoint-every-{k}-layers"), (0..=n).map(every).collect(), false));
    }
    list.push(("greedy".to_owned(), greedy(chain), false));
    list
}

/// What somebody does by hand: drop what is cheapest to recompute per byte until the rest fits, then fill the tiers, fastest first,
/// with what is needed back first.
fn greedy(chain: &CostChain) -> Vec<Placement> {
    let sizes = &chain.boundary_bytes;
    let mut room = TierBytes {
        hbm: chain.gpu_budget_bytes,
        host: chain.cpu_budget_bytes,
        nvme: chain.nvme_budget_bytes,
    };
    let everything = room.hbm + room.host + room.nvme;
    let mut skipped = vec![false; sizes.len()];
    let mut held: lazy_model::Bytes = sizes.iter().copied().sum();
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
    for i in (0..sizes.len()).rev().filter(|&i| !skipped[i]) {
        let fits = [Placement::Hbm, Placement::Host, Placement::Nvme]
            .into_iter()
            .find(|p| p.tier().is_some_and(|tier| room.get(tier) >= sizes[i]));
        // What fits nowhere whole stays in HBM, and the judge says so.
        placement[i] = fits.unwrap_or(Placement::Hbm);
        if let Some(tier) = placement[i].tier() {
            *room.get_mut(tier) = room.get(tier).saturating_sub(sizes[i]);
        }
    }
    placement
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
