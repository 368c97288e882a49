//! Times of layers and rates of links on this machine.

use lazy_model::step::Work;
use lazy_model::{Bytes, HardwareProfile, Links, Marked, Schedule, Tiers};
use lazy_runtime::Program;
use lazy_runtime::StepReport;
use lazy_store::{BoxError, DeviceChoice, NvmeOptions, Store, StoreOptions};
use train_lm::cuda::trial::Trial;
use train_lm::probe::{Times, timestamp};

use crate::plans::{Planner, Pool, ids};
use crate::spill;

/// Steps after one that warms up.
const STEPS: u64 = 3;

/// Adds the times of a step's tasks.
fn add(times: &mut Times, program: &Program, report: &StepReport) {
    for (task, span) in program.plan().tasks().zip(&report.timeline.spans) {
        let list = match task.work {
            Work::Prologue => &mut times.prologue,
            Work::Forward { keep: false, .. } => &mut times.forward,
            Work::Forward { keep: true, .. } => &mut times.saving,
            Work::Backward(_) => &mut times.backward,
            Work::Epilogue => &mut times.epilogue,
            Work::PrologueBackward => &mut times.prologue_backward,
            Work::Recompute { save: true, .. } => &mut times.internals,
            Work::Recompute { save: false, .. } | Work::Copy => continue,
        };
        list.push(span.duration().get() * 1e3);
    }
}

/// The profile of this machine for the planner's model and shape.
pub(crate) fn profile(planner: &Planner) -> Result<HardwareProfile, BoxError> {
    let when = timestamp();
    let dir = spill(&planner.dir);
    std::fs::create_dir_all(&dir)?;
    let (pool, layers) = (Pool::new(), planner.spec.layers());
    let batch = vec![ids(planner.options.shape.tokens(), planner.spec.vocab)];
    let mut times = Times::default();
    let mut boundary = Bytes::ZERO;
    {
        // Every other layer keeps its internals, so that both kinds of forward are seen.
        let choose = |model: &lazy_runtime::Model| {
            boundary = model.sizes().boundary[0];
            let mut schedule = Schedule::named("probe", &model.sizes().boundary, false);
            schedule.keep.iter_mut().step_by(2).for_each(|keep| *keep = true);
            Ok(schedule)
        };
        let mut trial =
            Trial::open(&planner.gpu, &planner.spec, planner.options, &dir, choose, |_, shape| {
                pool.parameter(shape)
            })?;
        for step in 0..=STEPS {
            let report = trial.step(step, &batch)?;
            if step > 0 {
                add(&mut times, &trial.program, &report);
            }
        }
    }
    let room = Bytes(boundary.get() * 8);
    let store = Store::open(StoreOptions {
        device: DeviceChoice::Cuda { ordinal: 0 },
        hbm: room,
        host: room,
        nvme: Some(NvmeOptions::new(&dir, room)),
        ..StoreOptions::default()
    })?;
    let rates = store.probe_links(boundary)?;
    let marked = |rate| Marked::measured(rate, "copies of one boundary", &when);
    let links = Links::alone(
        marked(rates.d2h),
        marked(rates.h2d),
        marked(rates.nvme_write.unwrap_or_default()),
        marked(rates.nvme_read.unwrap_or_default()),
    );
    let workload = format!("{layers} layers, hidden {}", planner.spec.hidden);
    let times = times.medians(workload, layers, "steps of the decoder", &when);
    Ok(HardwareProfile {
        name: "this machine".into(),
        tiers: Tiers::default(),
        links,
        drives: None,
        compute: None,
        times: Some(times),
        optimizer_elements_per_s: None,
    })
}
