//! A model under a plan written as letters, over a store of exactly the plan's size.

use std::path::Path;

use lazy_model::schedule::Schedule;
use lazy_model::{Bytes, Placement, StepPlan};
use lazy_runtime::Executor;
use lazy_store::{Store, StoreOptions};
use train_lm::model::TrainedModel;
use train_lm::probe::spill_file;

/// `letters` has one of `G C N -` a boundary; what goes to NVMe lies in `dir`. Poison is for tests that look at values only: it
/// costs a pass over every buffer.
pub(crate) fn planned(model: &TrainedModel, letters: &str, dir: &Path, poison: bool) -> (StepPlan, Executor) {
    let sizes = vec![model.boundary_bytes(); letters.len()];
    let mut schedule = Schedule::named("test", &sizes, false);
    schedule.placement = letters.chars().map(|c| Placement::from_letter(c).unwrap()).collect();
    let plan = StepPlan::new(&schedule, &sizes).unwrap();
    let store = Store::open(StoreOptions {
        hbm: plan.extents.hbm,
        host: plan.extents.host,
        nvme: (plan.extents.nvme > Bytes::ZERO).then(|| spill_file(dir, plan.extents.nvme)),
        poison,
        ..StoreOptions::default()
    });
    let executor = Executor::new(store.unwrap(), model.prologue(), model.layers(), model.epilogue());
    (plan, executor)
}
