//! Errors and panics of prologue, epilogue and hook: the store is as it was, and the next step runs.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::{Arc, Mutex};

use common::*;
use lazy_model::Bytes;
use lazy_runtime::{
    Context, Epilogue, ExecutorOptions, Grads, Input, Layer, LayerError, Loss, Model, Output, Parameter,
    Phase, Prologue, Weights,
};
use lazy_store::QueueOrder;

const WIDTH: usize = 128;

/// Where it goes wrong, in the second micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Prologue,
    Epilogue,
    PrologueBackward,
    /// The hook of this parameter.
    Hook(usize),
}

/// What goes wrong, and whether by a panic.
type Wrong = Arc<Mutex<Option<(At, bool)>>>;

fn fail(wrong: &Wrong, here: At) -> Result<(), LayerError> {
    let wrong = *wrong.lock().unwrap();
    match wrong {
        Some((at, false)) if at == here => Err(format!("{at:?} ran out of luck").into()),
        #[expect(clippy::panic, reason = "the executor has to survive it")]
        Some((at, true)) if at == here => panic!("{at:?} fell over"),
        _ => Ok(()),
    }
}

struct Failing(Wrong);

impl Failing {
    fn second(&self, cx: &Context<'_>, here: At) -> Result<(), LayerError> {
        if cx.micro_batch == 1 { fail(&self.0, here) } else { Ok(()) }
    }
}

impl Prologue for Failing {
    fn output_bytes(&self) -> Bytes {
        Ends.output_bytes()
    }
    fn parameters(&self) -> Vec<Parameter> {
        Prologue::parameters(&Ends)
    }
    fn forward(&self, cx: &Context<'_>, weights: Weights<'_>, out: Output<'_>) -> Result<(), LayerError> {
        assert!(matches!(cx.phase, Phase::Forward | Phase::Evaluation));
        self.second(cx, At::Prologue)?;
        Ends.forward(cx, weights, out)
    }
    fn backward(
        &self,
        cx: &Context<'_>,
        weights: Weights<'_>,
        dy: Input<'_>,
        grads: Grads<'_>,
    ) -> Result<(), LayerError> {
        self.second(cx, At::PrologueBackward)?;
        Ends.backward(cx, weights, dy, grads)
    }
}

impl Epilogue for Failing {
    fn workspace(&self) -> Bytes {
        Ends.workspace()
    }
    fn parameters(&self) -> Vec<Parameter> {
        Epilogue::parameters(&Ends)
    }
    fn run(&self, cx: &Context<'_>, call: Loss<'_>) -> Result<(), LayerError> {
        self.second(cx, At::Epilogue)?;
        Ends.run(cx, call)
    }
}

#[test]
fn a_fault_outside_the_layers_leaves_the_store_as_it_was_and_the_next_step_runs() {
    let faults = [At::Prologue, At::Epilogue, At::PrologueBackward, At::Hook(5), At::Hook(TIED.0)];
    for (options, updates) in
        [(resident(2), false), (resident(2), true), (streamed(false, 2), true), (streamed(true, 2), false)]
    {
        let wrong = Wrong::default();
        let layers = squares().iter().map(|s| Arc::clone(s) as Arc<dyn Layer>).collect();
        let ends = || Arc::new(Failing(Arc::clone(&wrong)));
        let model = Model::new(ends(), layers, ends(), options).unwrap();
        let plan = model.plan(&schedule("N-C-G-NCG", "-K------", 2)).unwrap();
        let dir = folder();
        let store = store(&model, &plan, &running(QueueOrder::Threads, dir.path()));
        let mut executor = executor(store, model, ExecutorOptions::default());
        let at_hook = Arc::clone(&wrong);
        if updates {
            executor.update_in_backward(move |last| {
                fail(&at_hook, At::Hook(last.parameter.id.0))?;
                descend(last.weights.unwrap().f32()?, last.gradient.unwrap().f32()?);
                Ok(())
            });
        } else {
            executor.on_final_gradient(move |last| fail(&at_hook, At::Hook(last.parameter.id.0)));
        }
        let mut program = executor.prepare(plan).unwrap();
        let mut evaluation = executor.prepare_evaluation().unwrap();
        let before = baseline(&executor);
        let first: Vec<Vec<f32>> = (0..=LAYERS).map(first_weights).collect();
        for at in faults {
            for panics in [false, true] {
                let told = format!("{at:?}, {options:?}, updates {updates}");
                *wrong.lock().unwrap() = Some((at, panics));
                let error = executor.run(&mut program, &step(0, 2)).unwrap_err();
                let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                let words = format!("{at:?} {}", if panics { "fell over" } else { "ran out of luck" });
                assert!(format!("{error} {source}").contains(&words), "{told}: {error} {source}");
                assert_eq!(baseline(&executor), before, "{told}");
                // An evaluation meets the same faults, where it has such a task.
                if matches!(at, At::Prologue | At::Epilogue) {
                    assert!(executor.run(&mut evaluation, &step(0, 2)).is_err());
                    assert_eq!(baseline(&executor), before, "{told}");
                }
                *wrong.lock().unwrap() = None;
                if updates {
                    // Some weights were updated, and others not.
                    set_all(&executor, &first);
                }
                assert!(bits(&weights(&executor)) == bits(&first), "{told}");
                let report = executor.run(&mut evaluation, &step(7, 2)).unwrap();
                assert_eq!(report.losses, expected(7, 2).0, "{told}");
                let report = executor.run(&mut program, &step(3, 2)).unwrap();
                let (losses, wanted) = expected(3, 2);
                assert_eq!(report.losses, losses, "{told}");
                assert!(bits(&gradients(&executor)) == wanted, "{told}");
                assert_eq!(baseline(&executor), before, "{told}");
                if updates {
                    set_all(&executor, &first);
                }
            }
        }
    }
}
