//! A step to be planned on a machine: sizes, costs and budgets together; the cost chain they give, and the check that a
//! schedule keeps every budget at every moment of the step.

use std::collections::BTreeMap;

use crate::chain::{CostChain, Locks};
use crate::schedule::{ExposedSeconds, Promise, Schedule, ScheduleError};
use crate::step::{PAGE_ALIGNMENT, StepError, StepPlan, StepSizes, Streamed, TierBytes, Workspaces};
use crate::timeline::{LinkRates, StepCosts, Timeline, simulate, simulate_first, simulate_two};
use crate::units::{BoundaryIndex, Bytes, BytesPerSecond, LayerIndex, Placement, Seconds, Tier};

/// Objective weight of a saved boundary (ms), as in the reference formulation: breaks ties towards fewer checkpoints.
const CHECKPOINT_PENALTY_MS: f64 = 1e-5;
/// Objective weight of a boundary on NVMe (ms), as in the reference formulation.
const NVME_TIEBREAK_MS: f64 = 1e-3;

/// Everything a planner has to know about one optimizer step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepProblem {
    /// Size of each boundary, `0..=N`.
    pub boundary_bytes: Vec<Bytes>,
    /// What each layer needs for its backward besides its input, `0..N`: kept from forward on, or made again and held while it runs.
    pub saved_bytes: Vec<Bytes>,
    /// What layers and loss need while they run.
    pub workspaces: Workspaces,
    /// Weights and gradients that pass through HBM a layer at a time.
    pub streamed: Streamed,
    /// Times of layers and links, for one micro-batch.
    pub costs: StepCosts,
    /// Micro-batches in a step.
    pub micro_batches: usize,
    /// Time of the optimizer, gradient norm and clearing of gradients included.
    pub optimizer: Seconds,
    /// Where the optimizer runs beside backward instead of after it.
    pub beside_backward: Option<BesideBackward>,
    /// Bytes that are there throughout beside all that a step's operations hold. HBM: weights and gradients that are not streamed,
    /// states, the context of the device. Host: the optimizer's ring; the homes of what is streamed are not part of it, see
    /// [`always`](Self::always).
    pub fixed: TierBytes,
    /// The caps.
    pub budgets: TierBytes,
    /// Most layers in a block.
    pub max_segment: usize,
}

/// An optimizer that goes through its state in buckets while backward runs, each once its gradients are final: the last layers' first.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BesideBackward {
    /// The part of the state that is in one bucket: above 0, at most 1.
    pub bucket_share: f64,
    /// The part of [`StepProblem::optimizer`] that comes after all buckets: the commit.
    pub commit: Seconds,
}

/// Room for transfers beside arithmetic, as [`StepProblem::keep_chain`] puts it.
#[derive(Clone, Debug, PartialEq)]
pub struct Windows {
    /// Length of each layer's forward, for the ways out.
    pub forward_ms: Vec<f64>,
    /// Length of each layer's backward, for the ways in.
    pub backward_ms: Vec<f64>,
    /// What the links carry in them.
    pub rates: LinkRates,
    /// HBM besides what the windows say is in flight, at every position but the turn.
    pub slack: Bytes,
    /// Host RAM set aside for boundaries on their way to and from NVMe: what waits there does not wait in HBM.
    pub staging: Bytes,
}

/// A schedule that keeps the budgets, with what follows from it.
#[derive(Clone, Debug, PartialEq)]
pub struct Verified {
    /// The operations of one micro-batch.
    pub plan: StepPlan,
    /// Their simulated time line, in every micro-batch but the first where that has one of its own.
    pub timeline: Timeline,
    /// The time line of the first micro-batch, where it differs: it has no sums of streamed gradients to bring in.
    pub first: Option<Timeline>,
    /// What is promised of the whole step.
    pub promise: Promise,
}

impl Verified {
    /// The simulated time line of a step's first micro-batch.
    pub fn first(&self) -> &Timeline {
        self.first.as_ref().unwrap_or(&self.timeline)
    }
}

/// Why a schedule may not run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// Not a schedule for this model.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// Cannot be carried out.
    #[error(transparent)]
    Step(#[from] StepError),
    /// A tier would overflow.
    #[error(
        "the schedule needs {needed} in {tier} ({fixed} of it whatever is placed where), the budget is {budget}: raise the {tier} \
         budget to at least {} MiB or solve again under this one", needed.mib_rounded_up()
    )]
    OverBudget {
        /// The tier.
        tier: Tier,
        /// Bytes needed at the worst moment.
        needed: Bytes,
        /// The part that no placement changes.
        fixed: Bytes,
        /// The budget.
        budget: Bytes,
    },
}

impl StepProblem {
    /// The placement problem, with `room` bytes of each tier for boundaries between forward and backward.
    ///
    /// Windows are the forward times of the layers, in both directions: backward windows are longer, so what the chain
    /// calls hidden has room to spare. The last boundary is locked to HBM, since the loss reads it at once.
    pub fn chain(&self, room: TierBytes) -> CostChain {
        let layers = self.saved_bytes.len();
        let forward_ms: Vec<f64> = self.costs.forward.iter().map(|s| s.as_ms()).collect();
        CostChain {
            name: None,
            comment: None,
            layers,
            layer_window_ms: forward_ms.clone(),
            layer_recompute_ms: forward_ms,
            boundary_bytes: self.boundary_bytes.clone(),
            param_h2d_bytes: vec![Bytes::ZERO; layers],
            grad_d2h_bytes: vec![Bytes::ZERO; layers],
            gpu_budget_bytes: room.hbm,
            cpu_budget_bytes: room.host,
            nvme_budget_bytes: room.nvme,
            d2h_bytes_per_s: self.costs.links.d2h,
            h2d_bytes_per_s: self.costs.links.h2d,
            nvme_write_bytes_per_s: self.costs.links.nvme_write,
            nvme_read_bytes_per_s: self.costs.links.nvme_read,
            pcie_window_scale: 1.0,
            nvme_window_scale: 1.0,
            pcie_capacity_fraction: 1.0,
            nvme_capacity_fraction: 1.0,
            max_segment_layers: self.max_segment,
            checkpoint_penalty: CHECKPOINT_PENALTY_MS,
            nvme_tiebreak: NVME_TIEBREAK_MS,
            d2h_first_window_offset: 0,
            h2d_first_window_offset: 1,
            locks: Some(Locks {
                fixed: BTreeMap::from([(BoundaryIndex(layers), Placement::Hbm)]),
                ..Locks::default()
            }),
            layer_internal_bytes: None,
            layer_forward_workspace_bytes: None,
            layer_backward_workspace_bytes: None,
            loss_workspace_bytes: None,
            hbm_cap_bytes: None,
            hbm_fixed_bytes: None,
            transfer_slack_bytes: None,
            layer_backward_window_ms: None,
            layer_rerun_ms: None,
            internals_offload: None,
            retain_internals: None,
            nvme_staging_bytes: None,
        }
    }

    /// The placement problem with keep: which layers keep their internals is decided together with the boundaries, and HBM is counted
    /// at every position of the step against `room.hbm`, everything in it.
    ///
    /// Costs are those of [`StepCosts`]: saving a layer's output saves one forward, and keeping its internals a forward and another for
    /// them before its backward, for one that saves them. A layer for which that is no less is not kept. `windows` say how long transfers may take beside the arithmetic. Weights that are streamed take their part of the way in, and so do sums of streamed
    /// gradients that are added to; gradients leave during backward, when boundaries no longer do.
    pub fn keep_chain(&self, room: &TierBytes, windows: &Windows) -> CostChain {
        let layers = self.saved_bytes.len();
        let of = |list: &[Bytes], l: usize| list.get(l).copied().unwrap_or_default();
        let each = |size: &dyn Fn(usize) -> Bytes| Some((0..layers).map(size).collect::<Vec<_>>());
        let largest = |list: &[Bytes]| list.iter().copied().max().unwrap_or_default();
        // Of streamed weights two layers' are there at once, of streamed gradients the ones that arise and those on their way: out, and
        // in where they add up.
        let gradients = if self.micro_batches > 1 { 3 } else { 2 };
        let streamed = largest(&self.streamed.weights) * 2 + largest(&self.streamed.gradients) * gradients;
        // Sums come in in all micro-batches but the first: this is a pass of the average.
        let sums = |l: usize| {
            let bytes = of(&self.streamed.gradients, l);
            bytes - Bytes(bytes.get() / self.micro_batches.max(1) as u64)
        };
        let rates = &windows.rates;
        let mut chain = CostChain {
            layer_window_ms: windows.forward_ms.clone(),
            layer_backward_window_ms: Some(windows.backward_ms.clone()),
            param_h2d_bytes: (0..layers).map(|l| of(&self.streamed.weights, l) + sums(l)).collect(),
            gpu_budget_bytes: room.hbm,
            d2h_bytes_per_s: rates.d2h,
            h2d_bytes_per_s: rates.h2d,
            nvme_write_bytes_per_s: rates.nvme_write,
            nvme_read_bytes_per_s: rates.nvme_read,
            layer_internal_bytes: Some(self.saved_bytes.clone()),
            layer_forward_workspace_bytes: each(&|l| of(&self.workspaces.forward, l)),
            layer_backward_workspace_bytes: each(&|l| {
                of(&self.workspaces.backward, l) + self.boundary_bytes[l] + self.boundary_bytes[l + 1]
            }),
            loss_workspace_bytes: Some(self.workspaces.loss + self.boundary_bytes[layers] * 2),
            hbm_cap_bytes: Some(room.hbm),
            hbm_fixed_bytes: Some(self.fixed.hbm + streamed),
            transfer_slack_bytes: Some(windows.slack),
            nvme_staging_bytes: (windows.staging > Bytes::ZERO).then_some(windows.staging),
            ..self.chain(*room)
        };
        self.price_internals(&mut chain);
        chain
    }

    /// What keeping a layer's internals saves, where a forward for them alone takes another time than one that keeps them.
    fn price_internals(&self, chain: &mut CostChain) {
        let StepCosts { forward, saving_forward, internals_forward, .. } = &self.costs;
        if saving_forward == internals_forward {
            return;
        }
        let again = forward.iter().zip(internals_forward).map(|(f, i)| f.as_ms() + i.as_ms());
        let saved: Vec<f64> = again.zip(saving_forward).map(|(again, s)| again - s.as_ms()).collect();
        let never =
            saved.iter().enumerate().filter(|(_, ms)| **ms < 0.0).map(|(l, _)| (LayerIndex(l), false));
        chain.locks.get_or_insert_default().keep.extend(never);
        chain.layer_rerun_ms = Some(saved.into_iter().map(|ms| ms.max(0.0)).collect());
    }

    /// Windows of measured length for [`keep_chain`](Self::keep_chain): forward without saving, backward with the forward that brings
    /// internals back. Links that another's traffic slows down throughout have the lower rate.
    pub fn windows(&self) -> Windows {
        let costs = &self.costs;
        let mut rates = costs.links;
        let slowed = |alone: BytesPerSecond, limit: Option<BytesPerSecond>, when: bool| match limit {
            Some(limit) if when && limit.get() < alone.get() => limit,
            _ => alone,
        };
        let contention = rates.contention;
        rates.d2h = slowed(rates.d2h, contention.d2h_both, !self.streamed.weights.is_empty());
        rates.h2d = slowed(rates.h2d, contention.h2d_both, !self.streamed.gradients.is_empty());
        for rate in [&mut rates.d2h, &mut rates.h2d, &mut rates.nvme_write, &mut rates.nvme_read] {
            *rate = slowed(*rate, contention.shared, true);
        }
        let backward = costs.backward.iter().zip(&costs.internals_forward);
        Windows {
            forward_ms: costs.forward.iter().map(|s| s.as_ms()).collect(),
            backward_ms: backward.map(|(b, f)| (*b + *f).as_ms()).collect(),
            rates,
            slack: Bytes::ZERO,
            staging: Bytes::ZERO,
        }
    }

    /// Sizes of all that a step's operations hold.
    pub fn sizes(&self) -> StepSizes<'_> {
        StepSizes {
            boundary: &self.boundary_bytes,
            saved: &self.saved_bytes,
            workspaces: &self.workspaces,
            streamed: &self.streamed,
            accumulate: self.micro_batches > 1,
        }
    }

    /// Bytes of each tier that every plan takes from start to end, whatever is placed where: [`fixed`](Self::fixed) and the homes of
    /// streamed weights and gradients, each in whole pages as a step lays them out.
    pub fn always(&self) -> TierBytes {
        let homes = self.streamed.weights.iter().chain(&self.streamed.gradients);
        let homes: Bytes = homes.map(|bytes| bytes.align_up(PAGE_ALIGNMENT)).sum();
        let mut always = self.fixed;
        *always.get_mut(self.streamed.home()) += homes;
        always
    }

    /// Bytes each tier holds at the worst moment of `plan`, everything counted.
    pub fn peaks(&self, plan: &StepPlan) -> TierBytes {
        TierBytes {
            hbm: self.fixed.hbm + plan.extents.hbm,
            host: self.fixed.host + plan.extents.host,
            nvme: self.fixed.nvme + plan.extents.nvme,
        }
    }

    /// Checks that `schedule` is for this step and keeps every budget at every moment, and says what it promises.
    ///
    /// # Errors
    /// The first rule it breaks.
    pub fn verify(&self, schedule: &Schedule) -> Result<Verified, VerifyError> {
        schedule.check_shape(&self.boundary_bytes)?;
        let plan = StepPlan::with_sizes(schedule, &self.sizes())?;
        let peak_bytes = self.peaks(&plan);
        for tier in Tier::ALL {
            let (needed, budget) = (peak_bytes.get(tier), self.budgets.get(tier));
            if needed > budget {
                return Err(VerifyError::OverBudget { tier, needed, fixed: self.always().get(tier), budget });
            }
        }
        let timeline = simulate(&plan, &self.costs);
        let first = self.first_differs().then(|| simulate_first(&plan, &self.costs));
        let promise = self.promise(&plan, first.as_ref().unwrap_or(&timeline), peak_bytes);
        Ok(Verified { plan, timeline, first, promise })
    }

    /// Whether the first micro-batch has less to bring in than those after it: gradients start from zero.
    fn first_differs(&self) -> bool {
        self.sizes().accumulate && !self.streamed.gradients.is_empty()
    }

    /// The sum over a step's micro-batches, of which the first takes `first` and each of the others `later`.
    pub fn passes(&self, first: Seconds, later: Seconds) -> Seconds {
        let after = self.micro_batches.saturating_sub(1) as f64;
        if self.micro_batches == 0 { Seconds::ZERO } else { Seconds(first.get() + after * later.get()) }
    }

    /// The time of a step whose micro-batches run `plan` one after the other, the optimizer's included.
    pub fn step_time(&self, plan: &StepPlan) -> Seconds {
        let first = simulate_first(plan, &self.costs);
        let two = self.two(plan);
        self.sum(&first, two.as_ref(), &|t| t.total()) + self.after_passes(plan, &first, two.as_ref())
    }

    /// What a step takes for the optimizer once its passes have ended, of which the last takes `backward` from the loss on.
    ///
    /// Let the state be gone through in `u` seconds, `s` of it a bucket, and the commit take `c`. Beside backward the first bucket can begin
    /// when `s` of backward is done, and the last one when all is: the optimizer ends `max(s backward + u, backward + s u) + c` after
    /// backward began. So all of it is left but `(1 - s) min(u, backward)`.
    pub fn optimizer_after(&self, backward: Seconds) -> Seconds {
        let Some(BesideBackward { bucket_share, commit }) = self.beside_backward else {
            return self.optimizer;
        };
        let streaming = (self.optimizer - commit).get().max(0.0);
        Seconds(self.optimizer.get() - (1.0 - bucket_share) * streaming.min(backward.get()))
    }

    /// The least of it, however long backward takes.
    pub fn least_optimizer(&self) -> Seconds {
        self.optimizer_after(Seconds(f64::INFINITY))
    }

    /// What the optimizer takes after passes of which `first` is the first and `two` the first two, where those differ. Gradients are final
    /// in the last one.
    fn after_passes(&self, plan: &StepPlan, first: &Timeline, two: Option<&Timeline>) -> Seconds {
        let backward = |t: &Timeline| t.total() - t.forward(plan);
        let alone = backward(first);
        self.optimizer_after(two.map_or(alone, |two| backward(two) - alone))
    }

    /// The first two micro-batches, where more than arithmetic can go on from one to the next: what is streamed comes in ahead and leaves
    /// behind. Boundaries are all back at the end of their own.
    fn two(&self, plan: &StepPlan) -> Option<Timeline> {
        let streams = !self.streamed.weights.is_empty() || !self.streamed.gradients.is_empty();
        (streams && self.micro_batches > 1).then(|| simulate_two(plan, &self.costs))
    }

    /// What `of` comes to over all micro-batches: every one after the first adds what the second does.
    fn sum(&self, first: &Timeline, two: Option<&Timeline>, of: &dyn Fn(&Timeline) -> Seconds) -> Seconds {
        let alone = of(first);
        self.passes(alone, two.map_or(alone, |two| of(two) - alone))
    }

    fn promise(&self, plan: &StepPlan, first: &Timeline, peak_bytes: TierBytes) -> Promise {
        let two = self.two(plan);
        let sum = |of: &dyn Fn(&Timeline) -> Seconds| self.sum(first, two.as_ref(), of);
        let (step, forward) = (sum(&|t| t.total()), sum(&|t| t.forward(plan)));
        let link = |of: fn(ExposedSeconds) -> Seconds| sum(&|t| of(t.exposed()));
        let optimizer = self.after_passes(plan, first, two.as_ref());
        Promise {
            step_s: step + optimizer,
            forward_s: forward,
            backward_s: step - forward,
            optimizer_s: optimizer,
            exposed_s: ExposedSeconds {
                d2h: link(|e| e.d2h),
                h2d: link(|e| e.h2d),
                nvme_write: link(|e| e.nvme_write),
                nvme_read: link(|e| e.nvme_read),
            },
            peak_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::span::Lane;
    use crate::steps::step;

    const MIB: Bytes = Bytes::from_mib(1);

    fn problem(layers: usize, hbm: Bytes) -> StepProblem {
        StepProblem {
            fixed: TierBytes { hbm: MIB * 100, ..TierBytes::default() },
            budgets: TierBytes { hbm, host: MIB * 8, nvme: MIB * 8 },
            ..step(layers, MIB)
        }
    }

    #[test]
    fn checkpointing_four_layers_is_counted_by_hand() {
        let problem = problem(4, MIB * 116);
        let schedule = Schedule::named("checkpoint", &problem.boundary_bytes, false);
        let verified = problem.verify(&schedule).unwrap();
        // Backward of the last layer: four boundaries, two gradients and the layer's internals beside 100 MiB that are always there.
        assert_eq!(verified.promise.peak_bytes.hbm, MIB * 116);
        let step_ms = 2.0 * (4.0 * 10.0 + 5.0 + 4.0 * (11.0 + 20.0)) + 7.0;
        assert!((verified.promise.step_s.as_ms() - step_ms).abs() < 1e-9);
    }

    /// Three layers whose gradients take 30 ms each way, and a loss that needs all HBM, so that nothing comes in before it has ended at
    /// 35 ms. In the first micro-batch backwards of 20 ms follow forwards for internals, of 11 ms: 46 to 66, 77 to 97, 108 to 128, and the last
    /// gradients are home at 158. In later ones sums arrive at 65, 95 and 125: backwards start at 65, 96 and 127, arithmetic ends at 147
    /// and the last gradients are home at 177, but they leave beside the next forward: each micro-batch ends 147 ms after the one before.
    #[test]
    fn the_first_micro_batch_brings_no_sums_in() {
        for (micro_batches, first, later) in [(1, 1.0, 0.0), (2, 1.0, 1.0), (4, 1.0, 3.0)] {
            let mut problem = problem(3, MIB * 300);
            problem.streamed.gradients = vec![Bytes(30_000_000); 3];
            problem.workspaces.loss = Bytes(110_000_000);
            problem.budgets.host = MIB * 100;
            problem.micro_batches = micro_batches;
            let schedule = Schedule::named("checkpoint", &problem.boundary_bytes, false);
            let verified = problem.verify(&schedule).unwrap();
            let promise = verified.promise;
            let near =
                |time: Seconds, ms: f64| assert!((time.as_ms() - ms).abs() < 1e-9, "{time}, not {ms} ms");
            near(promise.step_s, first * 158.0 + later * 147.0 + 7.0);
            near(promise.forward_s, (first + later) * 30.0);
            near(promise.backward_s, first * 128.0 + later * 117.0);
            near(promise.exposed_s.h2d, later * 19.0);
            near(promise.exposed_s.total(), later * 19.0);
            near(problem.step_time(&verified.plan), promise.step_s.as_ms());
            near(verified.first().total(), 158.0);
            near(verified.timeline.total(), if later > 0.0 { 177.0 } else { 158.0 });
            let brought = |timeline: &Timeline| -> Bytes {
                timeline.spans.iter().filter(|s| s.lane == Lane::H2d).map(|s| s.bytes).sum()
            };
            assert_eq!(brought(verified.first()), Bytes::ZERO);
            assert_eq!(brought(&verified.timeline).get(), if later > 0.0 { 90_000_000 } else { 0 });
        }
    }

    /// Beside an optimizer that takes a bucket after the other, each when its part of backward is done and the one before it is written, and
    /// then commits.
    #[test]
    fn an_optimizer_beside_backward_is_promised_what_its_last_buckets_leave() {
        for (buckets, optimizer_ms, commit_ms) in
            [(8, 60.0, 4.0), (8, 124.0, 0.0), (8, 500.0, 100.0), (1, 60.0, 4.0), (3, 200.0, 20.0)]
        {
            let mut problem = problem(4, MIB * 200);
            problem.optimizer = Seconds::from_ms(optimizer_ms);
            let schedule = Schedule::named("checkpoint", &problem.boundary_bytes, false);
            let after = problem.verify(&schedule).unwrap().promise;
            assert!((after.optimizer_s.as_ms() - optimizer_ms).abs() < 1e-9);
            problem.beside_backward = Some(BesideBackward {
                bucket_share: 1.0 / f64::from(buckets),
                commit: Seconds::from_ms(commit_ms),
            });
            // Backward of the second micro-batch: the loss, and four layers made again.
            let backward_ms = 5.0 + 4.0 * (11.0 + 20.0);
            let mut written = 0.0f64;
            for bucket in 1..=buckets {
                let ready = backward_ms * f64::from(bucket) / f64::from(buckets);
                written = written.max(ready) + (optimizer_ms - commit_ms) / f64::from(buckets);
            }
            let left_ms = written + commit_ms - backward_ms;
            let verified = problem.verify(&schedule).unwrap();
            let promise = &verified.promise;
            assert!((promise.optimizer_s.as_ms() - left_ms).abs() < 1e-9, "{promise:?}, not {left_ms} ms");
            let passes = after.step_s.as_ms() - optimizer_ms;
            assert!((promise.step_s.as_ms() - passes - left_ms).abs() < 1e-9);
            assert!((problem.step_time(&verified.plan).as_ms() - passes - left_ms).abs() < 1e-9);
            assert!(problem.least_optimizer().as_ms() <= left_ms + 1e-9);
        }
    }

    /// Layers 0 and 2 are kept, layer 1 is not: 12 + 10 + 12 forward, 5 of loss, 20 + (11 + 20) + 20 backward. Boundary 2 skipped, layer 1
    /// runs a third time. What the chain says of the same: the least of all layers, 32 each, and what layer 1 costs more, 10 + 11 - 12.
    #[test]
    fn keeping_and_making_internals_again_have_their_own_times() {
        let mut problem = problem(3, MIB * 300);
        problem.micro_batches = 1;
        let mut schedule = Schedule::named("some", &problem.boundary_bytes, false);
        schedule.keep = vec![true, false, true];
        for (skipped, more) in [(Placement::Hbm, 0.0), (Placement::Recompute, 10.0)] {
            schedule.placement[2] = skipped;
            let promise = problem.verify(&schedule).unwrap().promise;
            assert!((promise.step_s.as_ms() - (34.0 + 5.0 + 71.0 + more + 7.0)).abs() < 1e-9);
            assert!((promise.forward_s.as_ms() - 34.0).abs() < 1e-9);
        }
        let room = TierBytes { hbm: MIB * 300, ..TierBytes::default() };
        let chain = problem.keep_chain(&room, &problem.windows());
        assert_eq!((chain.rerun_ms(), &chain.layer_recompute_ms[..]), (&[9.0; 3][..], &[10.0; 3][..]));
        assert_eq!(chain.layer_backward_window_ms, Some(vec![31.0; 3]));
        assert!((problem.costs.least_pass().as_ms() - (3.0 * 32.0 + 5.0)).abs() < 1e-9);
        // A layer whose keeping takes longer than running it again is not kept, and counts as run again.
        problem.costs.saving_forward[1] = Seconds::from_ms(22.5);
        let chain = problem.keep_chain(&room, &problem.windows());
        assert_eq!(chain.rerun_ms(), [9.0, 0.0, 9.0]);
        let locks = chain.locks.unwrap_or_default();
        assert_eq!(locks.keep, BTreeMap::from([(LayerIndex(1), false)]));
        assert!((problem.costs.least_pass().as_ms() - (2.0 * 32.0 + 41.0 + 5.0)).abs() < 1e-9);
        // One time for both, as profiles without the second have it: the chain as it was before there were two.
        problem.costs.internals_forward.clone_from(&problem.costs.saving_forward);
        let chain = problem.keep_chain(&room, &problem.windows());
        assert_eq!(chain.layer_rerun_ms, None);
    }

    #[test]
    fn one_mebibyte_less_is_refused_with_the_numbers() {
        let problem = problem(4, MIB * 115);
        let schedule = Schedule::named("checkpoint", &problem.boundary_bytes, false);
        let message = problem.verify(&schedule).unwrap_err().to_string();
        assert!(message.contains("116.00 MiB") && message.contains("115.00 MiB"), "{message}");
    }

    #[test]
    fn kept_internals_count() {
        let mut problem = problem(4, MIB * 145);
        let schedule = Schedule::named("resident", &problem.boundary_bytes, true);
        assert!(problem.verify(&schedule).is_err());
        problem.budgets.hbm = MIB * 146;
        assert_eq!(problem.verify(&schedule).unwrap().promise.peak_bytes.hbm, MIB * 146);
    }

    #[test]
    fn a_schedule_for_other_boundaries_is_refused() {
        let problem = problem(4, MIB * 200);
        let schedule = Schedule::named("checkpoint", &[MIB; 4], false);
        assert!(problem.verify(&schedule).unwrap_err().to_string().contains("another model"));
        let schedule = Schedule::named("checkpoint", &[MIB * 2; 5], false);
        assert!(problem.verify(&schedule).unwrap_err().to_string().contains("another model"));
    }
}
