//! Lists of operations are what a step is, with weights and gradients streamed too; lists that are not are refused.

#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use lazy_model::schedule::{Execution, Schedule};
use lazy_model::step::{Buffer, BufferId, Content, Op, StepError, StepSizes, Work};
use lazy_model::{Bytes, Lane, Placement, StepPlan, Streamed, Tier, TierBytes, Workspaces};
use proptest::prelude::*;

/// Sizes of a model, and a schedule for it.
#[derive(Clone, Debug)]
struct Case {
    schedule: Schedule,
    boundary: Vec<Bytes>,
    saved: Vec<Bytes>,
    workspaces: Workspaces,
    streamed: Streamed,
    accumulate: bool,
}

impl Case {
    fn sizes(&self) -> StepSizes<'_> {
        StepSizes {
            boundary: &self.boundary,
            saved: &self.saved,
            workspaces: &self.workspaces,
            streamed: &self.streamed,
            accumulate: self.accumulate,
        }
    }

    fn plan(&self) -> StepPlan {
        StepPlan::with_sizes(&self.schedule, &self.sizes()).unwrap()
    }
}

prop_compose! {
    fn any_case()(layers in 1usize..8)(
        letters in prop::collection::vec(0usize..4, layers),
        keep in prop::collection::vec(any::<bool>(), layers),
        boundary in prop::collection::vec(1u64..20_000, layers + 1),
        lists in prop::collection::vec(prop::collection::vec(0u64..9_000, layers), 5),
        (weights, gradients, on_nvme, accumulate) in any::<(bool, bool, bool, bool)>(),
        prefetch in 0usize..4, writes_in_flight in 0usize..3, staging_buffers in 1usize..3,
    ) -> Case {
        let bytes = |list: &[u64]| list.iter().copied().map(Bytes).collect::<Vec<_>>();
        let boundary = bytes(&boundary);
        let mut schedule = Schedule::named("test", &boundary, false);
        let places = [Placement::Hbm, Placement::Host, Placement::Nvme, Placement::Recompute];
        for (l, &letter) in letters.iter().enumerate() {
            schedule.placement[l] = places[if l == 0 { letter % 3 } else { letter }];
        }
        schedule.keep = keep;
        schedule.execution = Execution { prefetch, writes_in_flight, staging_buffers };
        let stream = |on: bool, list: &[u64]| if on { bytes(list) } else { Vec::new() };
        let forward = bytes(&lists[1]);
        let backward = bytes(&lists[2]).iter().zip(&forward).map(|(b, f)| (*b).max(*f)).collect();
        Case {
            schedule,
            boundary,
            saved: bytes(&lists[0]),
            workspaces: Workspaces { forward, backward, loss: Bytes(lists[0][0]) },
            streamed: Streamed { weights: stream(weights, &lists[3]), gradients: stream(gradients, &lists[4]), on_nvme },
            accumulate,
        }
    }
}

/// Bytes moved by the copies on a lane, of what `counts`.
fn moved(plan: &StepPlan, lane: Lane, counts: fn(Content) -> bool) -> u64 {
    let of = |id: &BufferId| plan.buffer(*id).content;
    let tasks = plan.tasks().filter(|t| t.lane == lane && t.writes.iter().any(|id| counts(of(id))));
    tasks.map(|t| t.bytes.get()).sum()
}

/// The most bytes that a plan's buffers hold in a tier at one position of its list, homes not counted.
fn most_at_once(plan: &StepPlan, tier: Tier) -> u64 {
    let bytes =
        |id: &BufferId| Some(plan.buffer(*id)).filter(|b| b.tier == tier).map_or(0, |b| b.bytes.get());
    let (mut live, mut most) = (0, 0);
    for op in &plan.ops {
        match op {
            Op::Reserve(id) => live += bytes(id),
            Op::Release(id) => live -= bytes(id),
            Op::Run(_) => {}
        }
        most = most.max(live);
    }
    most
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(400), ..ProptestConfig::default() })]

    #[test]
    fn what_is_derived_from_a_schedule_is_a_step(case in any_case()) {
        let plan = case.plan();
        prop_assert_eq!(plan.check(&case.sizes()), Ok(()));
        prop_assert!(plan.extents.hbm >= case.sizes().least_hbm());
    }

    #[test]
    fn an_evaluation_is_one_and_holds_no_more_at_once_than_training(case in any_case()) {
        let plan = StepPlan::evaluation(&case.sizes()).unwrap();
        prop_assert_eq!(plan.check(&case.sizes()), Ok(()));
        let training = case.plan();
        // Homes take the same places in both.
        prop_assert_eq!(&plan.buffers[..plan.homes], &training.buffers[..training.homes]);
        for tier in Tier::ALL {
            prop_assert!(most_at_once(&plan, tier) <= most_at_once(&training, tier), "{}", tier);
        }
    }

    #[test]
    fn gradients_leave_once_and_come_in_where_they_add_up(case in any_case()) {
        let plan = case.plan();
        let gradients = |content| matches!(content, Content::WeightGradients(_));
        let all: u64 = case.streamed.gradients.iter().map(|b| b.get()).sum();
        let (nvme, in_) = (u64::from(case.streamed.on_nvme), u64::from(case.accumulate));
        let lanes = [(Lane::D2h, 1), (Lane::H2d, in_), (Lane::NvmeWrite, nvme), (Lane::NvmeRead, nvme * in_)];
        for (lane, times) in lanes {
            prop_assert_eq!(moved(&plan, lane, gradients), all * times, "{}", lane);
        }
    }

    #[test]
    fn a_list_without_one_of_its_operations_is_refused(case in any_case(), at: prop::sample::Index) {
        let mut plan = case.plan();
        let at = at.index(plan.ops.len());
        plan.ops.remove(at);
        let refused = matches!(plan.check(&case.sizes()), Err(StepError::List { .. }));
        prop_assert!(refused);
    }

    #[test]
    fn an_operation_that_is_there_twice_is_refused_or_a_copy_or_a_recomputation(case in any_case(), at: prop::sample::Index) {
        let mut plan = case.plan();
        let at = at.index(plan.ops.len());
        let op = plan.ops[at].clone();
        let harmless = matches!(&op, Op::Run(t) if matches!(t.work, Work::Copy | Work::Recompute { .. }));
        plan.ops.insert(at, op);
        prop_assert!(harmless || plan.check(&case.sizes()).is_err());
    }

    #[test]
    fn a_buffer_elsewhere_is_refused_unless_the_place_is_free_and_aligned(
        case in any_case(), which: prop::sample::Index, offset in 0u64..40_000, unit in prop::sample::select(vec![1, 256, 4096]),
    ) {
        let mut plan = case.plan();
        let which = which.index(plan.buffers.len());
        let Buffer { tier, offset: usual, .. } = plan.buffers[which];
        let offset = offset / unit * unit;
        plan.buffers[which].offset = offset;
        // Whoever holds homes knows where they are.
        let may = match tier {
            _ if which < plan.homes => offset == usual,
            Tier::Hbm => offset.is_multiple_of(256),
            Tier::Host | Tier::Nvme => offset.is_multiple_of(4096),
        };
        let within = |plan: &StepPlan| {
            let mut live: Vec<usize> = (0..plan.homes).collect();
            let ends = |b: usize| plan.buffers[b].offset + plan.buffers[b].bytes.get();
            let apart = |a: usize, b: usize| {
                let (x, y) = (&plan.buffers[a], &plan.buffers[b]);
                x.tier != y.tier || ends(a) <= y.offset || ends(b) <= x.offset
            };
            let fits = |b: usize| ends(b) <= plan.extents.get(plan.buffers[b].tier).get();
            let mut good = live.iter().all(|&a| fits(a) && live.iter().all(|&b| a == b || apart(a, b)));
            for op in &plan.ops {
                match op {
                    Op::Reserve(id) => {
                        good &= fits(id.0) && live.iter().all(|&b| apart(id.0, b));
                        live.push(id.0);
                    }
                    Op::Release(id) => live.retain(|b| b != &id.0),
                    Op::Run(_) => {}
                }
            }
            good
        };
        prop_assert_eq!(plan.check(&case.sizes()).is_ok(), may && within(&plan));
    }

    #[test]
    fn smaller_extents_are_refused(case in any_case()) {
        let plan = case.plan();
        for tier in Tier::ALL {
            let mut less = plan.clone();
            // The last buffer in a tier ends within what the extent is rounded up to.
            let end = less.buffers.iter().filter(|b| b.tier == tier).map(|b| b.offset + b.bytes.get()).max();
            let Some(end) = end.filter(|&end| end > 0) else { continue };
            let mut extents: TierBytes = less.extents;
            *extents.get_mut(tier) = Bytes(end - 1);
            less.extents = extents;
            prop_assert!(less.check(&case.sizes()).is_err(), "{}", tier);
        }
    }
}

#[test]
fn a_plan_for_other_sizes_is_refused_with_the_numbers() {
    let sizes = [Bytes(4096); 3];
    let plan = StepPlan::new(&Schedule::named("test", &sizes, false), &sizes).unwrap();
    let other = [Bytes(4096), Bytes(8192), Bytes(4096)];
    let (none, streamed) = (Workspaces::default(), Streamed::default());
    let all =
        StepSizes { boundary: &other, saved: &[], workspaces: &none, streamed: &streamed, accumulate: false };
    let message = plan.check(&all).unwrap_err().to_string();
    assert!(message.contains("4.0 KiB") && message.contains("8.0 KiB"), "{message}");
}
