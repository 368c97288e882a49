//! A model under a plan written as letters, over a store of exactly the plan's size.

use std::path::Path;

use lazy_runtime::{Executor, Program, Step};
use lazy_store::StoreOptions;
use train_lm::batch::Batch;
use train_lm::model::HostModel;

/// `letters` has one of `G C N -` a boundary; what goes to NVMe lies in `dir`. Poison is for tests that look at values only: it
/// costs a pass over every buffer.
pub(crate) fn planned(model: &HostModel, letters: &str, dir: &Path, poison: bool) -> (Program, Executor) {
    let runtime = model.model().unwrap();
    let plan = runtime.plan(&runtime.schedule(letters).unwrap()).unwrap();
    let options = StoreOptions { poison, ..runtime.store_options(&plan, dir) };
    let (executor, program) = Executor::open(runtime, plan, options).unwrap();
    (program, executor)
}

/// A step on one micro-batch of rows of `seq` tokens.
pub(crate) fn on(ids: Vec<u32>, seq: usize, step: u64) -> Step {
    Step::with_inputs(step, Batch::next_token([ids], seq))
}
