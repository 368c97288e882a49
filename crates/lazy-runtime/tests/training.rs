//! Weights after many steps: the bits of a plain loop for every plan, read-ahead, home of weights and number of micro-batches.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::HashSet;

use common::*;
use lazy_runtime::ModelOptions;
use lazy_store::QueueOrder;

const WIDTH: usize = 128;
const STEPS: u64 = 20;

/// Plans by name. The last three are what a planner does with little, more and much HBM.
const PLANS: [(&str, &str, &str); 6] = [
    ("resident", "GGGGGGGGG", "KKKKKKKK"),
    ("checkpoint", "GGGGGGGGG", NO_KEEP),
    ("host and nvme", "NCNCNCNCG", NO_KEEP),
    ("auto, little HBM", "N--N-C--G", NO_KEEP),
    ("auto, more HBM", "NC-NC-G-G", "-------K"),
    ("auto, much HBM", "CCGG-GGGG", "-K---KKK"),
];
const AHEAD: [Ahead; 5] =
    [Ahead::Prefetch(0), Ahead::Prefetch(1), Ahead::Prefetch(2), Ahead::Prefetch(4), Ahead::Planned(2)];
/// Where weights and gradients of the layers live, and whether they are updated beside the backward pass.
const HOMES: [(bool, bool); 3] = [(false, false), (true, false), (true, true)];

/// Plan, read-ahead, home and micro-batches, by their places: so many that every two values of two of them meet, or all.
fn combinations() -> Vec<[usize; 4]> {
    let all = (0..PLANS.len() * AHEAD.len() * HOMES.len() * 2)
        .map(|n| [n / 30, n / 6 % AHEAD.len(), n / 2 % HOMES.len(), n % 2]);
    if deep(2) > 1 {
        return all.collect();
    }
    let pairs = |c: &[usize; 4]| {
        let c = *c;
        (0..4).flat_map(move |a| (a + 1..4).map(move |b| (a, b, c[a], c[b]))).collect::<Vec<_>>()
    };
    let mut open: HashSet<_> = all.clone().flat_map(|c| pairs(&c)).collect();
    let mut chosen = Vec::new();
    // Each time the one that brings the most pairs that have not met.
    while !open.is_empty() {
        let new = |c: &[usize; 4]| pairs(c).iter().filter(|pair| open.contains(*pair)).count();
        let best = all.clone().max_by_key(new).unwrap();
        open.retain(|pair| !pairs(&best).contains(pair));
        chosen.push(best);
    }
    chosen
}

#[test]
fn weights_after_twenty_steps_have_the_bits_of_a_plain_loop() {
    let wanted = [1, 3].map(|micro_batches| bits(&trained_by_hand(STEPS, micro_batches)));
    let combinations = combinations();
    assert!(combinations.len() >= PLANS.len() * AHEAD.len(), "every pair occurs");
    for [plan, ahead, home, number] in combinations {
        let (name, letters, keep) = PLANS[plan];
        let (streams, on_nvme) = HOMES[home];
        let micro_batches = [1, 3][number];
        let options =
            ModelOptions { micro_batches, stream_weights: streams, stream_gradients: streams, on_nvme };
        let dir = folder();
        let running = running(QueueOrder::Threads, dir.path());
        let (mut executor, mut program) = set_up_ahead(letters, keep, AHEAD[ahead], options, &running);
        if !on_nvme {
            update_in_backward(&mut executor);
        }
        for number in 0..STEPS {
            let report = executor.run(&mut program, &step(number, micro_batches)).unwrap();
            assert!(report.losses.iter().all(|loss| loss.is_finite()));
            if on_nvme {
                update_after(&executor);
            }
        }
        assert!(bits(&weights(&executor)) == wanted[number], "{name}, {:?}, {options:?}", AHEAD[ahead]);
    }
}

#[test]
fn a_thousand_steps_four_blocks_ahead_lose_no_step_and_no_number() {
    let dir = folder();
    let running = running(QueueOrder::Threads, dir.path());
    let (mut executor, mut program) = set_up("C-CCG-CCG", NO_KEEP, 4, streamed(false, 1), &running);
    update_in_backward(&mut executor);
    let mut by_loop: Vec<Vec<f32>> = (0..=LAYERS).map(first_weights).collect();
    let (mut first, mut last) = (f32::NAN, f32::NAN);
    for number in 0..1000 {
        let report = executor.run(&mut program, &step(number, 1)).unwrap();
        let (losses, gradients) = by_hand(&by_loop, number, 1);
        by_loop.iter_mut().zip(&gradients).for_each(|(w, g)| descend(w, g));
        assert_eq!(report.losses, losses, "step {number}");
        last = losses[0];
        assert!(last.is_finite());
        first = if first.is_nan() { last } else { first };
    }
    let trained = weights(&executor);
    assert!(bits(&trained) == bits(&by_loop));
    assert!(trained.iter().flatten().all(|w| w.is_finite()));
    // It is a training, not standing still.
    assert!(last < first, "{last} after {first}");
}
