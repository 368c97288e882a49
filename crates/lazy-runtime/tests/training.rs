//! Runs of many steps: the weights of a plain loop, bit for bit, whatever the plan, the tiers, the read-ahead and the links.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::path::Path;

use common::{
    LAYERS, Running, bits, by_hand, descend, executor, first_weights, floats, folder, model, schedule,
    squares, step, store, trained_by_hand, weights,
};
use lazy_model::step::TransferPlanner;
use lazy_model::timeline::{LinkRates, StepCosts};
use lazy_model::{BytesPerSecond, Schedule, Seconds};
use lazy_runtime::{Executor, ExecutorOptions, Model, ModelOptions, ParameterId, Program};
use lazy_store::{LinkLimits, QueueOrder};

const STEPS: u64 = 20;

/// Plans by name: letters, kept layers. The caps of three automatic ones: much HBM, some, next to none.
const PLANS: [(&str, &str, &str); 6] = [
    ("resident", "GGGGGGGGG", "KKKKKKKK"),
    ("checkpoint", "GGGGGGGGG", "--------"),
    ("mixed", "N-C-N--CG", "--------"),
    ("auto, much", "GGCGGGGGG", "KK-KKKK-"),
    ("auto, some", "C-GCG-GNG", "---K---K"),
    ("auto, little", "NNCN--CNG", "--------"),
];

fn options(stream: bool, on_nvme: bool, micro_batches: usize) -> ModelOptions {
    ModelOptions { micro_batches, stream_weights: stream, stream_gradients: stream, on_nvme }
}

/// Positions as the plan's own time line gives them, for layers and links of these speeds.
fn planned(model: &Model, mut schedule: Schedule) -> Schedule {
    let rate = BytesPerSecond(1e6);
    let times = |ms: f64| vec![Seconds::from_ms(ms); LAYERS];
    let costs = StepCosts {
        prologue: Seconds::from_ms(1.0),
        forward: times(5.0),
        saving_forward: times(6.0),
        backward: times(10.0),
        epilogue: Seconds::from_ms(1.0),
        prologue_backward: Seconds::from_ms(1.0),
        links: LinkRates { d2h: rate, h2d: rate, nvme_write: rate, nvme_read: rate, ..LinkRates::default() },
    };
    let sizes = model.sizes().step();
    schedule.transfers = Some(TransferPlanner::new(&schedule, &sizes, &costs).plan(&schedule));
    schedule
}

fn set_up(
    (letters, keep): (&str, &str),
    prefetch: Option<usize>,
    options: ModelOptions,
    limits: LinkLimits,
    dir: &Path,
) -> (Executor, Program) {
    let model = model(&squares(), options);
    let by_distance = schedule(letters, keep, prefetch.unwrap_or(1));
    let schedule = if prefetch.is_none() { planned(&model, by_distance) } else { by_distance };
    let plan = model.plan(&schedule).unwrap();
    let store = store(&model, &plan, &Running { order: QueueOrder::Threads, dir, limits });
    let mut executor = executor(store, model, ExecutorOptions::default());
    if !options.on_nvme {
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

/// A step of an optimizer that comes after the step.
fn update(executor: &Executor) {
    let updated: Vec<Vec<f32>> = weights(executor)
        .into_iter()
        .enumerate()
        .map(|(p, mut w)| {
            descend(&mut w, &floats(executor.gradient(ParameterId(p)).unwrap()));
            w
        })
        .collect();
    let named: Vec<(ParameterId, &[u8])> =
        updated.iter().enumerate().map(|(p, w)| (ParameterId(p), bytemuck::cast_slice(w))).collect();
    executor.set_weights(&named).unwrap();
}

fn train(executor: &mut Executor, program: &mut Program, steps: u64) -> Vec<u32> {
    let options = *executor.model().options();
    for number in 0..steps {
        executor.run(program, &step(number, options.micro_batches)).unwrap();
        if options.on_nvme {
            update(executor);
        }
    }
    bits(&weights(executor))
}

#[test]
fn twenty_steps_give_the_weights_of_a_plain_loop_under_every_plan() {
    let distances = [Some(0), Some(1), Some(2), Some(4), None];
    for micro_batches in [1, 3] {
        let wanted = bits(&trained_by_hand(STEPS, micro_batches));
        for (p, (name, letters, keep)) in PLANS.into_iter().enumerate() {
            for (d, prefetch) in distances.into_iter().enumerate() {
                // Every plan with every read-ahead; where weights are goes round.
                let home = [(false, false), (true, false), (true, true)][(p + d + micro_batches) % 3];
                let options = options(home.0, home.1, micro_batches);
                let dir = folder();
                let (mut executor, mut program) =
                    set_up((letters, keep), prefetch, options, LinkLimits::default(), dir.path());
                let trained = train(&mut executor, &mut program, STEPS);
                assert!(trained == wanted, "{name}, prefetch {prefetch:?}, {options:?}");
            }
        }
    }
}

#[test]
fn a_link_a_hundred_times_slower_delays_and_changes_nothing() {
    let slow = Some(BytesPerSecond(2e6));
    let limits = [
        LinkLimits { d2h: slow, ..LinkLimits::default() },
        LinkLimits { h2d: slow, ..LinkLimits::default() },
        LinkLimits { nvme_write: slow, ..LinkLimits::default() },
        LinkLimits { nvme_read: slow, ..LinkLimits::default() },
    ];
    let wanted = bits(&trained_by_hand(1, 2));
    for limits in limits {
        for prefetch in [Some(0), Some(2), Some(4), None] {
            for stream in [false, true] {
                let dir = folder();
                let options = options(stream, false, 2);
                let (mut executor, mut program) =
                    set_up(("N-CNN--CG", "--------"), prefetch, options, limits, dir.path());
                let trained = train(&mut executor, &mut program, 1);
                assert!(trained == wanted, "{limits:?}, prefetch {prefetch:?}, streamed {stream}");
            }
        }
    }
}

#[test]
fn a_thousand_steps_at_prefetch_4_have_the_losses_of_a_plain_loop() {
    let dir = folder();
    let options = options(true, false, 1);
    let (mut executor, mut program) =
        set_up(("CCNC-NNCG", "--------"), Some(4), options, LinkLimits::default(), dir.path());
    let mut weights: Vec<Vec<f32>> = (0..=LAYERS).map(first_weights).collect();
    for number in 0..1000 {
        let (losses, gradients) = by_hand(&weights, number, 1);
        weights.iter_mut().zip(&gradients).for_each(|(w, g)| descend(w, g));
        let report = executor.run(&mut program, &step(number, 1)).unwrap();
        assert!(report.losses[0].is_finite());
        assert_eq!(report.losses, losses, "step {number}");
    }
    assert!(weights.iter().flatten().all(|w| w.is_finite()));
    assert!(bits(&common::weights(&executor)) == bits(&weights));
}
