//! A model under a plan written as letters, over a store of exactly the plan's size.

use std::path::Path;
use std::sync::Arc;

use lazy_model::schedule::Schedule;
use lazy_model::{Bytes, Placement};
use lazy_runtime::{Executor, ExecutorOptions, Program, Step};
use lazy_store::{Store, StoreOptions};
use train_lm::model::{Ids, TrainedModel};
use train_lm::probe::spill_file;

/// `letters` has one of `G C N -` a boundary; what goes to NVMe lies in `dir`. Poison is for tests that look at values only: it
/// costs a pass over every buffer.
pub(crate) fn planned(model: &TrainedModel, letters: &str, dir: &Path, poison: bool) -> (Program, Executor) {
    let runtime = model.model().unwrap();
    let mut schedule = Schedule::named("test", &runtime.sizes().boundary, false);
    schedule.placement = letters.chars().map(|c| Placement::from_letter(c).unwrap()).collect();
    let plan = runtime.plan(&schedule).unwrap();
    let needs = runtime.needs(&plan);
    let store = Store::open(StoreOptions {
        hbm: needs.hbm,
        host: needs.host,
        nvme: (needs.nvme > Bytes::ZERO).then(|| spill_file(dir, needs.nvme)),
        poison,
        ..StoreOptions::default()
    });
    let executor = Executor::new(store.unwrap(), runtime, ExecutorOptions::default()).unwrap();
    (executor.prepare(plan).unwrap(), executor)
}

/// A step on one micro-batch of these tokens.
pub(crate) fn on(ids: Ids, step: u64) -> Step {
    Step { seed: 0, step, inputs: vec![Arc::new(ids)] }
}
