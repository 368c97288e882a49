//! Plans, how they were predicted, and what their steps took.

use std::path::PathBuf;

use lazy_model::{Bytes, HardwareProfile, Lane, ModelSpec, Schedule, Seconds, StepProblem, TierBytes, Tiers};
use lazy_runtime::{Model, ModelOptions};
use lazy_solver::step::{StepOptions, solve_step};
use lazy_store::cuda::Gpu;
use lazy_store::{BoxError, DeviceChoice, LinkLimits};
use train_lm::cuda::probe::{Pool, ids, layer_times};
use train_lm::cuda::trial::Trial;
use train_lm::cuda::{CudaDecoder, CudaOptions};
use train_lm::io::IoChoice;
use train_lm::probe::{link_rates, median, timestamp, workload_name};

use crate::spill;

/// Most layers between two saved boundaries.
const MAX_SEGMENT: usize = 4;
/// A budget that nothing here exceeds.
const OPEN: Bytes = Bytes(1 << 50);

/// A way to run a step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Plan {
    /// All layers keep their internals.
    Resident,
    /// None does.
    Checkpoint,
    /// Solved for a cap on HBM, and one on host RAM.
    Solved { hbm: Bytes, host: Bytes },
    /// All boundaries go to host RAM.
    Host,
    /// All boundaries go to NVMe.
    Nvme,
    /// None is kept, and weights come in from host RAM.
    Streamed,
}

/// What all plans share.
pub(crate) struct Planner {
    pub(crate) gpu: Gpu,
    pub(crate) spec: ModelSpec,
    pub(crate) options: CudaOptions,
    pub(crate) dir: PathBuf,
    pub(crate) steps: u64,
}

/// A plan's steps beside its promise.
pub(crate) struct Measured {
    pub(crate) name: String,
    /// Median step.
    pub(crate) step: Seconds,
    pub(crate) predicted: Seconds,
    pub(crate) peak: Bytes,
    pub(crate) predicted_peak: Bytes,
    /// Time the busiest link needs for its bytes.
    pub(crate) link: Seconds,
    /// Time that arithmetic waited.
    pub(crate) wait: Seconds,
    pub(crate) predicted_wait: Seconds,
    forward: Seconds,
    counts: String,
    loss: f32,
}

impl Measured {
    pub(crate) fn line(&self) -> String {
        let ms = |s: Seconds| s.get() * 1e3;
        format!(
            "{} ({}): step {:.1} ms, predicted {:.1}; forward {:.1}; waits {:.1}, predicted {:.1}; peak {:.2} GiB, predicted {:.2}; loss {}",
            self.name,
            self.counts,
            ms(self.step),
            ms(self.predicted),
            ms(self.forward),
            ms(self.wait),
            ms(self.predicted_wait),
            crate::gib(self.peak),
            crate::gib(self.predicted_peak),
            self.loss
        )
    }
}

/// The profile of this machine for the planner's model and shape.
pub(crate) fn profile(planner: &Planner) -> Result<HardwareProfile, BoxError> {
    let when = timestamp();
    let dir = spill(&planner.dir);
    std::fs::create_dir_all(&dir)?;
    let decoder = CudaDecoder::new(&planner.gpu, planner.spec.clone(), planner.options)?;
    let (seen, beside) = layer_times(&decoder, &dir)?;
    let workload = workload_name(&planner.spec, planner.options.shape);
    let device = DeviceChoice::Cuda { ordinal: 0 };
    let boundary = decoder.model()?.sizes().boundary[0];
    let mut links = link_rates(boundary, (device, IoChoice::Auto), &dir, LinkLimits::default(), &when)?;
    beside.correct(&mut links, &when);
    Ok(HardwareProfile {
        name: planner.gpu.name().into(),
        tiers: Tiers::default(),
        links,
        drives: None,
        compute: None,
        times: Some(seen.times(workload, planner.spec.layers(), "steps of the decoder", &when)),
        optimizer_elements_per_s: None,
        optimizer_commit_share: None,
    })
}

impl Planner {
    fn name(plan: &Plan) -> String {
        match plan {
            Plan::Resident => "resident".into(),
            Plan::Checkpoint => "checkpoint".into(),
            Plan::Solved { hbm, .. } => format!("solved at {:.0} GiB", crate::gib(*hbm)),
            Plan::Host => "in host RAM".into(),
            Plan::Nvme => "on NVMe".into(),
            Plan::Streamed => "weights streamed".into(),
        }
    }

    fn problem(
        &self,
        model: &Model,
        profile: &HardwareProfile,
        budgets: TierBytes,
    ) -> Result<StepProblem, BoxError> {
        let sizes = model.sizes().clone();
        Ok(StepProblem {
            boundary_bytes: sizes.boundary,
            saved_bytes: sizes.saved,
            workspaces: sizes.workspaces,
            streamed: sizes.streamed,
            costs: profile.costs().ok_or("the profile has no times of layers")?,
            micro_batches: 1,
            optimizer: Seconds::ZERO,
            fixed: TierBytes { hbm: model.resident(), ..TierBytes::default() },
            budgets,
            beside_backward: None,
            max_segment: MAX_SEGMENT,
        })
    }

    fn schedule(&self, plan: &Plan, model: &Model, profile: &HardwareProfile) -> Result<Schedule, BoxError> {
        let boundaries = &model.sizes().boundary;
        let all = |letter: &str| Ok(model.schedule(&(letter.repeat(boundaries.len() - 1) + "G"))?);
        match plan {
            Plan::Resident => Ok(Schedule::named("resident", boundaries, true)),
            Plan::Checkpoint | Plan::Streamed => Ok(Schedule::named("checkpoint", boundaries, false)),
            Plan::Host => all("C"),
            Plan::Nvme => all("N"),
            Plan::Solved { hbm, host } => {
                let budgets = TierBytes { hbm: *hbm, host: *host, nvme: Bytes::ZERO };
                Ok(solve_step(&self.problem(model, profile, budgets)?, &StepOptions::default())?.schedule)
            }
        }
    }

    pub(crate) fn run(&self, plan: &Plan, profile: &HardwareProfile) -> Result<Measured, BoxError> {
        let stream_weights = matches!(plan, Plan::Streamed);
        let options =
            CudaOptions { model: ModelOptions { stream_weights, ..self.options.model }, ..self.options };
        let model = CudaDecoder::new(&self.gpu, self.spec.clone(), options)?.model()?;
        let schedule = self.schedule(plan, &model, profile)?;
        let open = self.problem(&model, profile, TierBytes { hbm: OPEN, host: OPEN, nvme: OPEN })?;
        let promised = open.verify(&schedule)?.promise;
        let counts = schedule.counts();
        drop(model);
        let (dir, pool) = (spill(&self.dir), Pool::new(options.real));
        std::fs::create_dir_all(&dir)?;
        let mut trial = Trial::open(
            &self.gpu,
            &self.spec,
            options,
            &dir,
            |_| Ok(schedule),
            |_, shape| pool.parameter(shape),
        )?;
        let batch = vec![ids(self.options.shape.tokens(), self.spec.vocab)];
        trial.step(0, &batch)?;
        let reports: Result<Vec<_>, _> = (1..=self.steps).map(|step| trial.step(step, &batch)).collect();
        let reports = reports?;
        let middle = |of: &dyn Fn(&lazy_runtime::StepReport) -> Seconds| {
            Seconds(median(reports.iter().map(|r| of(r).get()).collect()))
        };
        let last = &reports[reports.len() - 1];
        let links = profile.links.rates();
        let time = |lane, rate: lazy_model::BytesPerSecond| rate.time(last.bytes(lane)).get();
        let link = [
            time(Lane::D2h, links.d2h),
            time(Lane::H2d, links.h2d),
            time(Lane::NvmeWrite, links.nvme_write),
            time(Lane::NvmeRead, links.nvme_read),
        ];
        Ok(Measured {
            name: Self::name(plan),
            step: middle(&|r| r.forward + r.backward),
            predicted: promised.step_s,
            peak: last.extents.hbm,
            predicted_peak: promised.peak_bytes.hbm,
            // Out and back are one drive.
            link: Seconds(link[0].max(link[1]).max(link[2] + link[3])),
            wait: middle(&|r| r.exposed.total()),
            predicted_wait: promised.exposed_s.total(),
            forward: middle(&|r| r.forward),
            counts: format!("{counts:?}"),
            loss: last.losses[0],
        })
    }
}
