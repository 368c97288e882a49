//! Parameters that a layer keeps itself: nothing but the order of the tasks says when they may be read and written.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use lazy_model::{Bytes, Placement, Schedule};
use lazy_runtime::{
    Backward, Context, Epilogue, Executor, ExecutorOptions, Forward, Layer, LayerError, LayerSizes, Loss,
    Model, ModelOptions, Output, Owner, Parameter, Prologue, Saved, Step, Weights,
};
use lazy_store::{Lane, QueueOrder, Store, StoreOptions, Submission};

use crate::chain;

const LAYERS: usize = 3;
const MICRO_BATCHES: usize = 2;

/// A layer that keeps a parameter: how often its gradient was added to in this step, and how often it was updated.
#[derive(Default)]
struct Counter {
    number: usize,
    added: AtomicUsize,
    updates: AtomicUsize,
    wanted_updates: AtomicUsize,
}

impl Layer for Counter {
    fn sizes(&self) -> LayerSizes {
        LayerSizes { output: Bytes(256), ..LayerSizes::default() }
    }
    fn parameters(&self) -> Vec<Parameter> {
        vec![Parameter::own(self.number, "own")]
    }
    fn forward(&self, _: &Context<'_>, call: Forward<'_>) -> Result<Saved, LayerError> {
        if self.updates.load(SeqCst) != self.wanted_updates.load(SeqCst) {
            return Err("the weights are not ready".into());
        }
        if let Some(out) = call.out {
            out.bytes()?.copy_from_slice(call.x.bytes()?);
        }
        Ok(Saved::none())
    }
    fn backward(&self, _: &Context<'_>, call: Backward<'_>) -> Result<(), LayerError> {
        self.added.fetch_add(1, SeqCst);
        call.dx.bytes()?.copy_from_slice(call.dy.bytes()?);
        Ok(())
    }
}

struct Ends;

impl Prologue for Ends {
    fn output_bytes(&self) -> Bytes {
        Bytes(256)
    }
    fn forward(&self, _: &Context<'_>, _: Weights<'_>, out: Output<'_>) -> Result<(), LayerError> {
        out.bytes()?.fill(1);
        Ok(())
    }
}

impl Epilogue for Ends {
    fn run(&self, _: &Context<'_>, call: Loss<'_>) -> Result<(), LayerError> {
        call.loss.bytes()?.fill(0);
        call.dx.map_or(Ok(()), |dx| dx.bytes().map(|dx| dx.fill(0)))
    }
}

pub(crate) struct Own {
    layers: Vec<Arc<Counter>>,
    executor: Executor,
    program: lazy_runtime::Program,
}

impl Own {
    pub(crate) fn new() -> Own {
        let counter = |number| Arc::new(Counter { number, ..Counter::default() });
        let layers: Vec<Arc<Counter>> = (0..LAYERS).map(counter).collect();
        let options = ModelOptions { micro_batches: MICRO_BATCHES, ..ModelOptions::default() };
        let dynamic = layers.iter().map(|layer| Arc::clone(layer) as Arc<dyn Layer>).collect();
        let model = Model::new(Arc::new(Ends), dynamic, Arc::new(Ends), options).unwrap();
        let mut schedule = Schedule::named("own", &[Bytes(256); LAYERS + 1], false);
        schedule.placement[1] = Placement::Host;
        let plan = model.plan(&schedule).unwrap();
        let needs = model.needs(&plan);
        let order = QueueOrder::Seeded(0);
        let store =
            Store::open(StoreOptions { hbm: needs.hbm, host: needs.host, order, ..Default::default() });
        let mut executor = Executor::new(store.unwrap(), model, ExecutorOptions::default()).unwrap();
        let seen = layers.clone();
        executor.on_final_gradient(move |last| match seen[last.parameter.id.0].added.load(SeqCst) {
            MICRO_BATCHES => Ok(()),
            early => Err(format!("{early} micro-batches have added to the gradient").into()),
        });
        let program = executor.prepare(plan).unwrap();
        Own { layers, executor, program }
    }

    pub(crate) fn store(&self) -> &Store {
        self.executor.store()
    }

    /// A step whose weights somebody else updates while it is submitted.
    pub(crate) fn step(&mut self, seed: u64) -> Result<(), String> {
        self.store().reseed(seed);
        for (l, layer) in self.layers.iter().enumerate() {
            layer.added.store(0, SeqCst);
            layer.wanted_updates.fetch_add(1, SeqCst);
            let updated = Arc::clone(layer);
            let update = Submission::new(Lane::Optimizer, "update");
            let event = self.store().submit(update, move |_| {
                updated.updates.fetch_add(1, SeqCst);
                Ok(())
            });
            self.executor.weights_ready(Owner::Layer(l), event.unwrap()).unwrap();
        }
        let report = self.executor.run(&mut self.program, &Step::default());
        report.map(drop).map_err(|error| chain(&error))
    }
}

#[test]
fn final_gradients_and_ready_weights_are_waited_for_in_every_order() {
    let mut own = Own::new();
    for seed in 0..500 {
        assert_eq!(own.step(seed), Ok(()), "seed {seed}");
    }
}
