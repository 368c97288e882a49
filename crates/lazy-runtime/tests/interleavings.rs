//! R1, R2: thousands of orders of execution, poison in whatever is free or not yet written, and the same bits; and the proof that a missing wait
//! would have been noticed.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::Path;

use common::{
    LAYERS, Running, bits, by_hand, descend, executor, first_weights, folder, gradients, model, schedule,
    squares, step, store,
};
use lazy_runtime::{Executor, ExecutorOptions, ModelOptions, Program};
use lazy_store::mutants::{Source, Wait};
use lazy_store::{BytesPerSecond, Lane, LinkLimits, QueueOrder, Tier};

/// Orders of execution in all.
const ORDERS: u64 = 5000;
/// Orders tried, in each case, before a mutant counts as a survivor.
const MUTANT_ORDERS: u64 = 40;

/// A plan and how it is run.
struct Case {
    letters: &'static str,
    keep: &'static str,
    prefetch: usize,
    options: ModelOptions,
    /// Whether a hook updates weights in the backward pass.
    updates: bool,
    wanted: Wanted,
}

/// Losses of two steps, and the bits of the second one's gradients, by a plain loop.
struct Wanted {
    losses: [Vec<f32>; 2],
    gradients: Vec<u32>,
}

fn wanted(micro_batches: usize, updates: bool) -> Wanted {
    let mut weights: Vec<Vec<f32>> = (0..=LAYERS).map(first_weights).collect();
    let (first, gradients) = by_hand(&weights, 0, micro_batches);
    if updates {
        weights.iter_mut().zip(&gradients).for_each(|(w, g)| descend(w, g));
    }
    let (second, gradients) = by_hand(&weights, 1, micro_batches);
    Wanted { losses: [first, second], gradients: bits(&gradients) }
}

fn cases() -> Vec<Case> {
    let case = |letters, keep, prefetch, (stream, on_nvme, micro_batches), updates| Case {
        letters,
        keep,
        prefetch,
        options: ModelOptions { micro_batches, stream_weights: stream, stream_gradients: stream, on_nvme },
        updates,
        wanted: wanted(micro_batches, updates),
    };
    vec![
        case("N-C-N--CG", "--------", 2, (false, false, 1), false),
        case("CCNNCCNNG", "-K----K-", 4, (false, false, 2), true),
        case("C-GNC-NNG", "--------", 1, (true, false, 2), true),
        case("NNC-GG-CG", "K--K----", 2, (true, true, 2), false),
        case("GG---CNCG", "--------", 0, (true, true, 1), false),
    ]
}

fn set_up(case: &Case, order: QueueOrder, limits: LinkLimits, dir: &Path) -> (Executor, Program) {
    let model = model(&squares(), case.options);
    let plan = model.plan(&schedule(case.letters, case.keep, case.prefetch)).unwrap();
    let store = store(&model, &plan, &Running { order, dir, limits });
    let mut executor = executor(store, model, ExecutorOptions::default());
    if case.updates {
        executor.update_in_backward(|last| {
            let (Some(gradient), Some(weights)) = (last.gradient, last.weights) else {
                return Err("what the runtime keeps in memory is handed over".into());
            };
            descend(weights.f32()?, gradient.f32()?);
            Ok(())
        });
    }
    let program = executor.prepare(plan).unwrap();
    (executor, program)
}

/// Two steps from the first weights; what is wrong with them.
fn two_steps(
    case: &Case,
    executor: &mut Executor,
    program: &mut Program,
    left_out: Option<Wait>,
) -> Option<String> {
    if case.updates {
        common::set_first_weights(executor);
    }
    let mutated = left_out.is_none() || executor.store().leave_out(left_out);
    assert!(mutated, "only a store in seeded order takes a mutant");
    for number in 0..2 {
        match executor.run(program, &step(number, case.options.micro_batches)) {
            Err(error) => return Some(error.to_string()),
            Ok(report) if report.losses != case.wanted.losses[number as usize] => {
                return Some(format!("other losses in step {number}"));
            }
            Ok(_) => {}
        }
    }
    if left_out.is_some() {
        let _ = executor.store().leave_out(None);
    }
    (bits(&gradients(executor)) != case.wanted.gradients).then(|| "other gradients".to_owned())
}

#[test]
fn r2_thousands_of_orders_give_the_bits_of_a_plain_loop_and_read_no_poison() {
    let cases = cases();
    let each = ORDERS / 2 / cases.len() as u64;
    for (number, case) in cases.iter().enumerate() {
        let dir = folder();
        let (mut executor, mut program) =
            set_up(case, QueueOrder::Seeded(0), LinkLimits::default(), dir.path());
        for seed in 0..each {
            // Two steps, and so two orders, a seed.
            executor.store().reseed(seed);
            let wrong = two_steps(case, &mut executor, &mut program, None);
            assert_eq!(wrong, None, "case {number}, seed {seed}");
        }
    }
}

#[test]
fn r1_links_of_any_speed_give_the_bits_of_a_plain_loop() {
    let mut random = 9u64;
    let mut rate = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // From nothing to notice to slower than a layer.
        (random >> 60 > 4).then_some(BytesPerSecond(2e7 + (random >> 40) as f64 * 30.0))
    };
    for (number, case) in cases().iter().enumerate() {
        for _ in 0..6 {
            let limits = LinkLimits { d2h: rate(), h2d: rate(), nvme_write: rate(), nvme_read: rate() };
            let dir = folder();
            let (mut executor, mut program) = set_up(case, QueueOrder::Threads, limits, dir.path());
            let wrong = two_steps(case, &mut executor, &mut program, None);
            assert_eq!(wrong, None, "case {number}, {limits:?}");
        }
    }
}

/// The waits that a step of these plans depends on.
///
/// Left out of the list is what a step cannot notice. A copy writes a buffer that nobody else has written or read since it was
/// reserved, so it waits for earlier owners of the range alone, and so do layers, but for gradients, which they add to. Nothing
/// overwrites on the optimizer's lane but the hook, whose event says that all who used the weights are done. Events named in
/// `after` pace read-ahead and hold nothing together. What is released was written, and in host RAM read after that; a range on
/// NVMe goes to the next micro-batch, whose boundaries come after its last reader's; boundaries of one size leave no remainder of
/// a range. The store's own sweep covers all of these.
fn needed() -> Vec<Wait> {
    let mut waits = vec![Wait::Overwrite(Source::Write, Lane::Compute)];
    for lane in [Lane::Compute, Lane::D2h, Lane::H2d, Lane::NvmeWrite, Lane::NvmeRead] {
        waits.extend([Wait::Read(lane), Wait::Completion(lane)]);
    }
    waits.extend([Lane::Compute, Lane::D2h, Lane::H2d].map(|lane| Wait::Overwrite(Source::Inherited, lane)));
    waits.extend([Wait::Release(Source::Write, Tier::Hbm), Wait::Release(Source::Reads, Tier::Hbm)]);
    waits.push(Wait::Release(Source::Reads, Tier::Host));
    waits
}

#[test]
fn mutants_without_a_wait_fail_on_some_order() {
    let cases = cases();
    let mut survivors = Vec::new();
    for wait in needed() {
        let killed = cases.iter().enumerate().find_map(|(number, case)| {
            let dir = folder();
            let fresh = || set_up(case, QueueOrder::Seeded(0), LinkLimits::default(), dir.path());
            let (mut executor, mut program) = fresh();
            (0..MUTANT_ORDERS).find_map(|seed| {
                executor.store().reseed(seed);
                Some((number, seed, two_steps(case, &mut executor, &mut program, Some(wait))?))
            })
        });
        match killed {
            Some((case, seed, how)) => {
                eprintln!("{:<32} killed in case {case} by seed {seed:>3}: {how}", format!("{wait:?}"));
            }
            None => {
                eprintln!("{:<32} SURVIVES", format!("{wait:?}"));
                survivors.push(wait);
            }
        }
    }
    assert_eq!(survivors, [], "these waits can be missing without any order noticing");
}
