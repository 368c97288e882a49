//! Passes of trial steps on the host device. Between them the optimizer takes its trial steps, as in a run, so that each finds caches,
//! memory and drive as the other leaves them.

use std::path::Path;

use lazy_model::Observations;
use lazy_runtime::{Executor, Model, ModelOptions, Program, Step};

use super::schedule;
use crate::batch::Batch;
use crate::cuda::probe::ids;
use crate::error::Result;
use crate::model::{HostModel, Shape};
use crate::random::{fill_initial, initial_values};

/// Passes that are remembered.
const MOST: usize = 16;

/// Passes of one micro-batch, on weights and tokens made up.
pub(super) struct Passes<'a> {
    model: &'a HostModel,
    executor: Executor,
    program: Program,
    batches: Vec<Batch>,
    done: u64,
    /// What was seen of all but the first, which touches memory for the first time.
    pub(super) seen: Observations,
}

impl<'a> Passes<'a> {
    /// Makes an executor for them. What goes to a file lies in `spill`.
    pub(super) fn open(model: &'a HostModel, shape: Shape, spill: &Path) -> Result<Passes<'a>> {
        let decoder = &model.decoder;
        for (index, (name, weights)) in decoder.parameters().iter().enumerate() {
            decoder.write_parameter(index, 0, &initial_values(0, name, weights.dims()))?;
        }
        let options = ModelOptions { micro_batches: 1, ..*model.model()?.options() };
        let runtime = Model::new(model.prologue(), model.layers(), model.epilogue(), options)?;
        let plan = runtime.plan(&schedule(&runtime))?;
        let seen = Observations::new(&plan, MOST);
        let options = runtime.store_options(&plan, spill);
        let (executor, program) = Executor::open(runtime, plan, options)?;
        let shapes = decoder.spec().parameters();
        executor.initialize(|p, values| fill_initial(0, &p.name, &shapes[p.id.0].shape, 0, values))?;
        let batches = Batch::next_token([ids(shape.tokens(), decoder.spec().vocab)], shape.seq);
        Ok(Passes { model, executor, program, batches, done: 0, seen })
    }

    /// Does the passes of a step.
    pub(super) fn step(&mut self) -> Result<()> {
        let step = Step::with_inputs(self.done, self.batches.clone());
        let passes = self.executor.run(&mut self.program, &step)?;
        self.model.gradients.zero();
        if self.done > 0 {
            self.seen.note(&passes.timeline);
        }
        self.done += 1;
        Ok(())
    }
}
