//! Plans that people use without a solver, to hold a solved plan against.
//!
//! | name | boundaries | internals |
//! | --- | --- | --- |
//! | `do-nothing` | all in HBM | all kept, where the problem knows of internals |
//! | `checkpoint-every-layer` | all in HBM | none kept |
//! | `checkpoint-every-k-layers` | every k-th and the last in HBM, the others recomputed | none kept |
//! | `greedy` | the cheapest to recompute dropped until the rest fits, then HBM, host RAM and NVMe filled from the last boundary down | as many of the last layers' kept as then fit |

use lazy_model::keep::{Keep, evaluate_keep};
use lazy_model::{
    Bytes, CostChain, Evaluation, Placement, Schedule, StepProblem, TierBytes, Verified, VerifyError,
    Violation, evaluate,
};

use crate::step::best_execution;

/// Longest distance between the checkpoints of a baseline, in layers.
const MOST_LAYERS: usize = 8;
const GREEDY: &str = "greedy";

/// A plan that needs no solver, judged by a chain's rules.
#[derive(Clone, Debug)]
pub struct Baseline {
    /// Its name, for example `checkpoint-every-2-layers`.
    pub name: String,
    /// One entry a boundary, `0..=N`.
    pub placement: Vec<Placement>,
    /// One entry a layer; none is kept where the chain does not set `hbm_cap_bytes`.
    pub keep: Vec<Keep>,
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
    let keeps = chain.hbm_cap_bytes.is_some();
    candidates(&free)
        .into_iter()
        .map(|(name, placement, keep)| {
            let all = if keep && keeps { chain.layers } else { 0 };
            let mut kept = keep_last(chain.layers, all);
            let mut outcome = judge(&free, &placement, &kept);
            if keeps && name == GREEDY && outcome.is_ok() {
                (kept, outcome) = keep_greedily(&free, &placement, outcome);
            }
            Baseline { name, placement, keep: kept, outcome }
        })
        .collect()
}

fn judge(chain: &CostChain, placement: &[Placement], keep: &[Keep]) -> Result<Evaluation, Violation> {
    if chain.hbm_cap_bytes.is_some() {
        evaluate_keep(chain, placement, keep)
    } else {
        evaluate(chain, placement)
    }
}

/// The last `kept` layers keep their internals.
fn keep_last(layers: usize, kept: usize) -> Vec<Keep> {
    (0..layers).map(|l| if l + kept >= layers { Keep::Hbm } else { Keep::Recompute }).collect()
}

/// Keeps as many of the last layers as fit: those hold their internals for the shortest time. By bisection, since keeping one more
/// never makes room.
fn keep_greedily(
    chain: &CostChain,
    placement: &[Placement],
    none: Result<Evaluation, Violation>,
) -> (Vec<Keep>, Result<Evaluation, Violation>) {
    let mut best = (keep_last(chain.layers, 0), none);
    let (mut fit, mut too_many) = (0, chain.layers + 1);
    while too_many - fit > 1 {
        let kept = fit + (too_many - fit) / 2;
        let keep = keep_last(chain.layers, kept);
        match judge(chain, placement, &keep) {
            Ok(evaluation) => (fit, best) = (kept, (keep, Ok(evaluation))),
            Err(_) => too_many = kept,
        }
    }
    best
}

/// The baselines of a step. `chain` is its placement problem: `greedy` looks at it alone.
pub fn step_baselines(problem: &StepProblem, chain: &CostChain) -> Vec<StepBaseline> {
    step_candidates(problem, chain)
        .into_iter()
        .map(|(name, schedule)| match best_execution(problem, &schedule, None) {
            Ok((schedule, verified)) => StepBaseline { name, schedule, outcome: Ok(verified) },
            Err(error) => StepBaseline { name, schedule, outcome: Err(error) },
        })
        .collect()
}

/// The same before anything is laid out.
pub(crate) fn step_candidates(problem: &StepProblem, chain: &CostChain) -> Vec<(String, Schedule)> {
    candidates(chain)
        .into_iter()
        .map(|(name, placement, keep)| {
            let mut schedule = Schedule::named(&name, &problem.boundary_bytes, keep);
            schedule.placement = placement;
            if name == GREEDY {
                keep_what_fits(problem, &mut schedule);
            }
            (name, schedule)
        })
        .collect()
}

/// As many of the last layers keep their internals as fit beside transfers that run no further ahead than they must.
fn keep_what_fits(problem: &StepProblem, schedule: &mut Schedule) {
    let layers = schedule.keep.len();
    let mut tried = schedule.clone();
    tried.execution.prefetch = 0;
    tried.execution.writes_in_flight = 0;
    let (mut fit, mut too_many) = (0, layers + 1);
    while too_many - fit > 1 {
        let kept = fit + (too_many - fit) / 2;
        tried.keep = (0..layers).map(|l| l + kept >= layers).collect();
        if problem.verify(&tried).is_ok() { fit = kept } else { too_many = kept }
    }
    schedule.keep = (0..layers).map(|l| l + fit >= layers).collect();
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
