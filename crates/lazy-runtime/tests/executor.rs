//! The executor over a real store: gradients of a plain loop whatever the schedule, faults that leave nothing behind, reports.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::{Arc, Mutex};

use common::*;
use lazy_model::{Bytes, StepPlan};
use lazy_runtime::{ExecutorOptions, Model, ModelOptions, Owner, Phase, RuntimeError, Step};
use lazy_store::{QueueOrder, Store, StoreOptions};
use proptest::prelude::*;

const WIDTH: usize = 256;

#[test]
fn every_schedule_and_prefetch_gives_the_bits_of_a_plain_loop() {
    let (losses, wanted) = expected(3, 2);
    for letters in ["GGGGGGGGG", "CCCCCCCCG", "NNNNNNNNG", "G---G---G", "N-C-N--CG", "C-GN-CG-G"] {
        for prefetch in [0, 1, 2, 4] {
            let dir = folder();
            let running = running(QueueOrder::Threads, dir.path());
            let (mut executor, mut program) = set_up(letters, NO_KEEP, prefetch, resident(2), &running);
            let report = executor.run(&mut program, &step(3, 2)).unwrap();
            assert_eq!(report.losses, losses);
            assert!(bits(&gradients(&executor)) == wanted, "{letters} prefetch {prefetch}");
        }
    }
}

#[test]
fn streamed_weights_and_kept_internals_give_the_same_bits() {
    for micro_batches in [1, 3] {
        let (losses, wanted) = expected(3, micro_batches);
        for options in
            [resident(micro_batches), streamed(false, micro_batches), streamed(true, micro_batches)]
        {
            for (letters, keep) in
                [("GGGGGGGGG", "KKKKKKKK"), ("N-C-G--CG", "K--K-KK-"), ("G---N---G", NO_KEEP)]
            {
                let dir = folder();
                let running = running(QueueOrder::Threads, dir.path());
                let (mut executor, mut program) = set_up(letters, keep, 1, options, &running);
                // A second step starts from zero again.
                for _ in 0..2 {
                    let report = executor.run(&mut program, &step(3, micro_batches)).unwrap();
                    assert_eq!(report.losses, losses);
                    assert!(bits(&gradients(&executor)) == wanted, "{letters} {keep} {options:?}");
                }
            }
        }
    }
}

#[test]
fn an_optimizer_in_the_backward_pass_trains_to_the_bits_of_a_plain_loop() {
    let wanted = bits(&trained_by_hand(4, 2));
    for options in [resident(2), streamed(false, 2)] {
        let dir = folder();
        let (mut executor, mut program) =
            set_up("N-C-G--CG", NO_KEEP, 2, options, &running(QueueOrder::Threads, dir.path()));
        update_in_backward(&mut executor);
        for number in 0..4 {
            executor.run(&mut program, &step(number, 2)).unwrap();
        }
        assert!(bits(&weights(&executor)) == wanted, "{options:?}");
    }
}

#[test]
fn an_optimizer_between_steps_finds_what_lies_in_ram_and_changes_it_in_place() {
    let weights_alone = ModelOptions { stream_gradients: false, ..streamed(false, 2) };
    let gradients_alone = ModelOptions { stream_weights: false, ..streamed(false, 2) };
    let wanted = bits(&trained_by_hand(4, 2));
    for options in [resident(2), streamed(false, 2), weights_alone, gradients_alone] {
        let dir = folder();
        let (mut executor, mut program) =
            set_up("N-C-G--CG", NO_KEEP, 2, options, &running(QueueOrder::Threads, dir.path()));
        for number in 0..4 {
            executor.run(&mut program, &step(number, 2)).unwrap();
            let ids = executor.update_in_ram(|all| {
                let ids: Vec<usize> = all.iter().map(|last| last.parameter.id.0).collect();
                for last in all {
                    let (weights, gradient) = last.in_memory()?;
                    descend(weights.f32()?, gradient.f32()?);
                }
                Ok(ids)
            });
            assert_eq!(ids.unwrap(), (0..=LAYERS).collect::<Vec<_>>());
        }
        assert!(bits(&weights(&executor)) == wanted, "{options:?}");
        let refused = executor.update_in_ram(|_| Err::<(), _>("no luck".into())).unwrap_err();
        assert!(
            refused.to_string().contains("`parameters between steps`")
                && refused.to_string().contains("no luck")
        );
    }
    // Of what lies on a drive nothing is handed over.
    let dir = folder();
    let (executor, _) =
        set_up("GGGGGGGGG", NO_KEEP, 1, streamed(true, 1), &running(QueueOrder::Threads, dir.path()));
    let there =
        executor.update_in_ram(|all| Ok(all.iter().map(|last| last.parameter.id).collect::<Vec<_>>()));
    assert_eq!(there.unwrap(), [TIED]);
}

#[test]
fn gradients_are_final_once_and_from_the_top_down() {
    let dir = folder();
    let (mut executor, mut program) =
        set_up("N-C-G--CG", NO_KEEP, 2, streamed(false, 3), &running(QueueOrder::Threads, dir.path()));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&seen);
    executor.on_final_gradient(move |last| {
        assert!(last.weights.is_none());
        noted.lock().unwrap().push((last.parameter.id.0, last.gradient.unwrap().f32()?.to_vec()));
        Ok(())
    });
    executor.run(&mut program, &step(3, 3)).unwrap();
    let seen = seen.lock().unwrap();
    let order: Vec<usize> = seen.iter().map(|(id, _)| *id).collect();
    // What prologue and epilogue share is final when both have added to it.
    assert_eq!(order, (0..LAYERS).rev().chain([TIED.0]).collect::<Vec<_>>());
    let mut by_id = seen.clone();
    by_id.sort_by_key(|(id, _)| *id);
    let values: Vec<Vec<f32>> = by_id.into_iter().map(|(_, values)| values).collect();
    assert!(bits(&values) == expected(3, 3).1);
}

#[test]
fn a_forward_waits_for_the_event_that_its_weights_are_ready() {
    let dir = folder();
    let (mut executor, mut program) =
        set_up("GGGGGGGGG", NO_KEEP, 1, resident(1), &running(QueueOrder::Threads, dir.path()));
    let ready = Arc::new(Mutex::new(false));
    let set = Arc::clone(&ready);
    let update = lazy_store::Submission::new(lazy_store::Lane::Optimizer, "update");
    let event = executor.store().submit(update, move |_| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        *set.lock().unwrap() = true;
        Ok(())
    });
    executor.weights_ready(Owner::Layer(3), event.unwrap()).unwrap();
    assert!(matches!(
        executor.weights_ready(
            Owner::Layer(8),
            executor
                .store()
                .submit(lazy_store::Submission::new(lazy_store::Lane::Optimizer, "none"), |_| Ok(()))
                .unwrap()
        ),
        Err(RuntimeError::NoLayer { layer: 8, layers: 8 })
    ));
    let report = executor.run(&mut program, &step(0, 1)).unwrap();
    assert!(*ready.lock().unwrap());
    let span = |name: &str| report.timeline.spans.iter().find(|s| &*s.name == name).unwrap();
    assert!(span("forward 3").start.get() - span("forward 2").end.get() > 0.02, "forward 3 waits");
}

#[test]
fn an_evaluation_gives_the_losses_and_touches_no_gradient() {
    for options in [resident(2), streamed(false, 2), streamed(true, 2)] {
        let dir = folder();
        let (mut executor, mut program) =
            set_up("N-C-G--CG", NO_KEEP, 2, options, &running(QueueOrder::Threads, dir.path()));
        executor.run(&mut program, &step(3, 2)).unwrap();
        let mut evaluation = executor.prepare_evaluation().unwrap();
        let report = executor.run(&mut evaluation, &step(7, 2)).unwrap();
        assert_eq!(report.losses, expected(7, 2).0);
        assert!(bits(&gradients(&executor)) == expected(3, 2).1);
    }
}

#[test]
fn a_fault_in_any_layer_is_named_and_leaves_the_store_as_it_was_and_usable() {
    for options in [resident(2), streamed(false, 2), streamed(true, 2)] {
        let (dir, squares) = (folder(), squares());
        let model = model(&squares, options);
        let plan = model.plan(&schedule("N-C-G--CG", NO_KEEP, 2)).unwrap();
        let store = store(&model, &plan, &running(QueueOrder::Threads, dir.path()));
        let mut executor = executor(store, model, ExecutorOptions::default());
        let mut program = executor.prepare(plan).unwrap();
        let before = baseline(&executor);
        for layer in [0, 3, 7] {
            for phase in [Phase::Forward, Phase::Recompute, Phase::Backward] {
                for fault in [Fault::Error(phase), Fault::Panic(phase)] {
                    *squares[layer].fault.lock().unwrap() = fault;
                    let error = executor.run(&mut program, &step(0, 2)).unwrap_err().to_string();
                    assert!(error.contains(&layer.to_string()), "{error}");
                    assert_eq!(baseline(&executor), before);
                    *squares[layer].fault.lock().unwrap() = Fault::None;
                }
            }
        }
        // Two forwards without a backward.
        let mut evaluation = executor.prepare_evaluation().unwrap();
        for _ in 0..2 {
            executor.run(&mut evaluation, &step(3, 2)).unwrap();
            assert_eq!(baseline(&executor), before);
        }
        executor.run(&mut program, &step(3, 2)).unwrap();
        assert!(bits(&gradients(&executor)) == expected(3, 2).1);
        assert_eq!(baseline(&executor), before);
    }
}

/// R4: a recomputation that goes another way.
#[test]
fn r4_another_shape_or_other_values_when_recomputed_are_named() {
    for (fault, check, words) in [
        (
            Fault::Shape,
            false,
            "layer 5 was recomputed another way: its output was [256, 1] of f32, and is [128, 1]",
        ),
        (Fault::Values, true, "layer 5 was recomputed to other values"),
    ] {
        for letters in ["GGGGGGGGG", "G---G---G"] {
            let (dir, squares) = (folder(), squares());
            let model = model(&squares, resident(1));
            let plan = model.plan(&schedule(letters, NO_KEEP, 1)).unwrap();
            let store = store(&model, &plan, &running(QueueOrder::Threads, dir.path()));
            let mut executor = executor(store, model, ExecutorOptions { check_recompute: check });
            let mut program = executor.prepare(plan).unwrap();
            executor.run(&mut program, &step(0, 1)).unwrap();
            *squares[5].fault.lock().unwrap() = fault;
            let error = std::error::Error::source(&executor.run(&mut program, &step(0, 1)).unwrap_err())
                .map(ToString::to_string);
            assert!(error.as_ref().is_some_and(|e| e.contains(words)), "{error:?}");
        }
    }
}

#[test]
fn a_plan_for_another_model_is_refused() {
    let bytes = [BYTES; 5];
    let plan = StepPlan::new(&lazy_model::Schedule::named("checkpoint", &bytes, false), &bytes).unwrap();
    let dir = folder();
    let (executor, _) =
        set_up("GGGGGGGGG", NO_KEEP, 1, resident(1), &running(QueueOrder::Threads, dir.path()));
    assert!(matches!(executor.prepare(plan), Err(RuntimeError::Step(_))));
}

#[test]
fn a_store_smaller_than_the_plan_is_refused_and_left_as_it_was() {
    let model = model(&squares(), resident(1));
    let plan = model.plan(&schedule("GGGGGGGGG", NO_KEEP, 1)).unwrap();
    let hbm = model.resident() + Bytes(plan.extents.hbm.get() / 2);
    let store = Store::open(StoreOptions { hbm, ..Default::default() }).unwrap();
    let mut executor = executor(store, model, ExecutorOptions::default());
    let mut program = executor.prepare(plan).unwrap();
    let before = baseline(&executor);
    assert!(matches!(executor.run(&mut program, &step(0, 1)), Err(RuntimeError::Store(_))));
    assert_eq!(baseline(&executor), before);
}

#[test]
fn steps_and_weights_that_do_not_fit_the_model_are_refused() {
    let dir = folder();
    let (mut executor, mut program) =
        set_up("GGGGGGGGG", NO_KEEP, 1, resident(2), &running(QueueOrder::Threads, dir.path()));
    let refused = executor.run(&mut program, &step(0, 1)).unwrap_err();
    assert!(matches!(refused, RuntimeError::Inputs { got: 1, want: 2 }));
    let error = executor.run(&mut program, &Step::default()).unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("brings no side inputs"), "{cause}");
    let three = executor.set_weights(&[(TIED, &[0; 3])]).unwrap_err().to_string();
    assert!(three.contains("3 bytes") && three.contains("1024"), "{three}");
    assert!(executor.gradient(lazy_runtime::ParameterId(99)).is_err());
    let (_, mut other) =
        set_up("GGGGGGGGG", NO_KEEP, 1, resident(2), &running(QueueOrder::Threads, dir.path()));
    assert!(matches!(executor.run(&mut other, &step(0, 2)), Err(RuntimeError::ForeignProgram)));
}

#[test]
fn the_report_counts_bytes_and_passes_and_compares_with_the_promise() {
    let dir = folder();
    let (mut executor, mut program) =
        set_up("GCNCGGGGG", NO_KEEP, 1, resident(2), &running(QueueOrder::Threads, dir.path()));
    let report = executor.run(&mut program, &step(0, 2)).unwrap();
    use lazy_model::Lane::*;
    let moved = [D2h, H2d, NvmeWrite, NvmeRead].map(|lane| report.bytes(lane).get() / BYTES.get());
    assert_eq!(moved, [6, 6, 2, 2]);
    let tasks = program.plan().tasks().count();
    assert_eq!(report.timeline.spans.len(), 2 * tasks);
    for pass in [0, 1] {
        assert_eq!(report.pass(pass).spans.len(), tasks);
        assert_eq!(&*report.pass(pass).spans[0].name, "prologue");
    }
    assert!(report.forward.get() > 0.0 && report.backward.get() > 0.0 && report.recompute.get() > 0.0);
    assert!(report.recompute < report.backward);
}

fn any_letters(picks: &[usize]) -> String {
    let mut letters: String = picks.iter().map(|&p| ['G', 'C', 'N', '-'][p]).collect();
    if letters.starts_with('-') {
        letters.replace_range(..1, "C");
    }
    letters + "G"
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    /// The store holds exactly what was promised, so a step that needed more would fail.
    #[test]
    fn any_schedule_completes_within_its_promise(
        picks in proptest::collection::vec(0usize..4, LAYERS), prefetch in 0usize..5, planned in proptest::option::of(0u32..10), writes_in_flight in 0usize..4,
        staging_buffers in 1usize..4, keep in proptest::collection::vec(any::<bool>(), LAYERS), seed: u64,
        (weights, gradients_out, on_nvme) in any::<(bool, bool, bool)>(), micro_batches in 1usize..4,
    ) {
        let keep: String = keep.iter().map(|&k| if k { 'K' } else { '-' }).collect();
        let options = ModelOptions { micro_batches, stream_weights: weights, stream_gradients: gradients_out, on_nvme };
        let model: Model = model(&squares(), options);
        let ahead = planned.map_or(Ahead::Prefetch(prefetch), Ahead::Planned);
        let mut schedule = scheduled(&model, &any_letters(&picks), &keep, ahead);
        schedule.execution.writes_in_flight = writes_in_flight;
        schedule.execution.staging_buffers = staging_buffers;
        let plan = model.plan(&schedule).unwrap();
        let dir = folder();
        let store = store(&model, &plan, &running(QueueOrder::Seeded(seed), dir.path()));
        let mut executor = executor(store, model, ExecutorOptions::default());
        let mut program = executor.prepare(plan).unwrap();
        executor.run(&mut program, &step(2, micro_batches)).unwrap();
        prop_assert!(bits(&gradients(&executor)) == expected(2, micro_batches).1);
    }
}

#[test]
fn the_host_device_gives_no_addresses() {
    let dir = folder();
    let (executor, _) =
        set_up("GGGGGGGGG", NO_KEEP, 0, resident(1), &running(QueueOrder::Threads, dir.path()));
    let id = executor.model().parameters().next().unwrap().id;
    for refused in [executor.weights_on_device(id), executor.gradient_on_device(id)] {
        assert!(matches!(refused, Err(RuntimeError::NotOnDevice { .. })));
    }
    let unknown = lazy_runtime::ParameterId(usize::MAX);
    assert!(matches!(executor.weights_on_device(unknown), Err(RuntimeError::NoParameter { .. })));
}
