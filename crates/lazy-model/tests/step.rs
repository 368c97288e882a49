//! Plans of random schedules, checked against plain enumeration: bytes, order, contents, time.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::collections::BTreeMap;

use lazy_model::schedule::{Execution, Schedule};
use lazy_model::step::{
    Buffer, BufferId, Content, Op, StepError, StepSizes, Task, Transfer, TransferPlanner, Work,
};
use lazy_model::timeline::{Contention, LinkRates, StepCosts, Timeline, simulate};
use lazy_model::{
    Bytes, BytesPerSecond, Lane, LayerIndex, Placement, Seconds, Span, StepPlan, Streamed, Tier, Workspaces,
};
use proptest::prelude::*;

/// A schedule over `letters`, with boundaries of `sizes`.
fn schedule(letters: &str, sizes: &[Bytes], execution: Execution) -> Schedule {
    let mut schedule = Schedule::named("test", sizes, false);
    schedule.placement = letters.chars().map(|c| Placement::from_letter(c).unwrap()).collect();
    schedule.execution = execution;
    schedule
}

prop_compose! {
    fn any_schedule()(layers in 1usize..9)(
        first in 0usize..3,
        middle in prop::collection::vec(0usize..4, layers - 1),
        keep in prop::collection::vec(any::<bool>(), layers),
        sizes in prop::collection::vec(0u64..20_000, layers + 1),
        prefetch in 0usize..4,
        writes_in_flight in 0usize..4,
        staging_buffers in 0usize..4,
        planned in prop::option::of((any::<bool>(), any::<bool>())),
        rates in prop::array::uniform4(1e3f64..1e6),
    ) -> (Schedule, Vec<Bytes>) {
        let letters: String = std::iter::once(first)
            .chain(middle)
            .map(|p| ['G', 'C', 'N', '-'][p])
            .chain(['G'])
            .collect();
        let sizes: Vec<Bytes> = sizes.into_iter().map(Bytes).collect();
        let mut schedule = schedule(&letters, &sizes, Execution { prefetch, writes_in_flight, staging_buffers });
        schedule.keep = keep;
        if let Some((writes_run_on, reads_beside_loss)) = planned {
            let (none, all) = (Workspaces::default(), Streamed::default());
            let sized = StepSizes { boundary: &sizes, saved: &[], workspaces: &none, streamed: &all, accumulate: false };
            let costs = costs(&[0.01, 0.03, 0.02], rates, schedule.layers);
            let mut planner = TransferPlanner::new(&schedule, &sized, &costs);
            planner.writes_run_on = writes_run_on;
            planner.reads_beside_loss = reads_beside_loss;
            schedule.transfers = Some(planner.plan(&schedule));
        }
        (schedule, sizes)
    }
}

fn costs(times: &[f64], rates: [f64; 4], layers: usize) -> StepCosts {
    let time = |i: usize| Seconds(times[i % times.len()]);
    let list = |from: usize| (0..layers).map(|l| time(from + l)).collect();
    let [d2h, h2d, nvme_write, nvme_read] = rates.map(BytesPerSecond);
    StepCosts {
        prologue: time(0),
        forward: list(1),
        saving_forward: list(11),
        internals_forward: list(41),
        backward: list(21),
        epilogue: time(31),
        prologue_backward: time(32),
        links: LinkRates { d2h, h2d, nvme_write, nvme_read, ..LinkRates::default() },
    }
}

fn overlap(a: &Buffer, b: &Buffer) -> bool {
    let end = |x: &Buffer| x.offset + x.bytes.get();
    a.tier == b.tier && a.offset < end(b) && b.offset < end(a)
}

/// For each task, every earlier task that is over when it starts: by its waits, its lane's order, and what those imply.
fn earlier(plan: &StepPlan) -> Vec<Vec<bool>> {
    let tasks: Vec<&Task> = plan.tasks().collect();
    let mut before: Vec<Vec<bool>> = Vec::new();
    for (at, waits) in plan.waits().iter().enumerate() {
        let mut direct: Vec<usize> = waits.iter().map(|w| w.0).collect();
        direct.extend((0..at).rev().find(|&t| tasks[t].lane == tasks[at].lane));
        let mut row = vec![false; tasks.len()];
        for d in direct {
            assert!(d < at, "task {at} waits for task {d}");
            row[d] = true;
            for t in 0..d {
                row[t] |= before[d][t];
            }
        }
        before.push(row);
    }
    before
}

/// What a buffer holds while the list is carried out one by one.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Value {
    Boundary(usize),
    Gradient(usize),
}

/// Carries the list out one by one on values, and checks what every task finds. Returns how often each layer is recomputed.
fn carry_out(plan: &StepPlan) -> BTreeMap<usize, usize> {
    let mut held: BTreeMap<usize, Option<Value>> = BTreeMap::new();
    let mut recomputed = BTreeMap::new();
    let (mut forward, mut backward, mut saved) = (vec![], vec![], vec![]);
    for op in &plan.ops {
        let task = match op {
            Op::Reserve(id) => {
                assert!(held.insert(id.0, None).is_none(), "reserved twice");
                continue;
            }
            Op::Release(id) => {
                assert!(held.remove(&id.0).is_some(), "released without a reservation");
                continue;
            }
            Op::Run(task) => task,
        };
        let found: Vec<Value> =
            task.reads.iter().map(|id| held[&id.0].expect("read before it was written")).collect();
        let (wanted, made) = match task.work {
            Work::Prologue => (vec![], Some(Value::Boundary(0))),
            Work::Forward { layer: LayerIndex(l), keep } => {
                forward.push(l);
                saved.extend(keep.then_some(l));
                (vec![Value::Boundary(l)], Some(Value::Boundary(l + 1)))
            }
            Work::Recompute { layer: LayerIndex(l), save: false } => {
                *recomputed.entry(l).or_default() += 1;
                (vec![Value::Boundary(l)], Some(Value::Boundary(l + 1)))
            }
            Work::Recompute { layer: LayerIndex(l), save: true } => {
                saved.push(l);
                (vec![Value::Boundary(l)], None)
            }
            Work::Epilogue => {
                let n = forward.len();
                (vec![Value::Boundary(n)], Some(Value::Gradient(n)))
            }
            Work::Backward(LayerIndex(l)) => {
                backward.push(l);
                (vec![Value::Boundary(l), Value::Gradient(l + 1)], Some(Value::Gradient(l)))
            }
            Work::PrologueBackward => (vec![Value::Gradient(0)], None),
            Work::Copy => (vec![found[0]], Some(found[0])),
        };
        assert_eq!(found, wanted, "{}", plan.name(task));
        for id in &task.writes {
            *held.get_mut(&id.0).expect("written without a reservation") = made;
        }
    }
    assert!(held.is_empty(), "never released: {held:?}");
    let layers = forward.len();
    assert_eq!(forward, (0..layers).collect::<Vec<_>>());
    assert_eq!(backward, (0..layers).rev().collect::<Vec<_>>());
    saved.sort_unstable();
    assert_eq!(saved, forward, "internals are saved once, on the way forward or again before backward");
    recomputed
}

proptest! {
    #[test]
    fn every_task_finds_what_it_needs_and_a_skipped_boundary_is_one_forward((schedule, sizes) in any_schedule()) {
        let plan = StepPlan::new(&schedule, &sizes).unwrap();
        let skipped: BTreeMap<usize, usize> = (1..schedule.layers)
            .filter(|&i| schedule.placement[i] == Placement::Recompute)
            .map(|i| (i - 1, 1))
            .collect();
        prop_assert_eq!(carry_out(&plan), skipped);
    }

    #[test]
    fn buffers_that_live_at_once_are_apart_and_within_the_extents((schedule, sizes) in any_schedule()) {
        let plan = StepPlan::new(&schedule, &sizes).unwrap();
        let mut live: Vec<BufferId> = vec![];
        for op in &plan.ops {
            match op {
                Op::Run(_) => {}
                Op::Release(id) => live.retain(|l| l != id),
                Op::Reserve(id) => {
                    let new = plan.buffer(*id);
                    prop_assert!(new.offset + new.bytes.get() <= plan.extents.get(new.tier).get());
                    for other in &live {
                        prop_assert!(!overlap(new, plan.buffer(*other)), "{new:?} and {:?}", plan.buffer(*other));
                    }
                    live.push(*id);
                }
            }
            let staging = live.iter().filter(|id| matches!(plan.buffer(**id).content, Content::Staging(_))).count();
            // Positions hold a staging buffer until its transfer should be over, whatever the ring would say.
            prop_assert!(schedule.transfers.is_some() || staging <= schedule.execution.staging_buffers.max(1));
        }
    }

    #[test]
    fn whoever_touches_the_same_bytes_is_waited_for((schedule, sizes) in any_schedule()) {
        let plan = StepPlan::new(&schedule, &sizes).unwrap();
        let tasks: Vec<&Task> = plan.tasks().collect();
        let before = earlier(&plan);
        let touch = |a: &[BufferId], b: &[BufferId]| {
            a.iter().any(|a| b.iter().any(|b| overlap(plan.buffer(*a), plan.buffer(*b))))
        };
        for later in 0..tasks.len() {
            for first in 0..later {
                let (a, b) = (tasks[first], tasks[later]);
                let conflict = touch(&a.writes, &b.reads) || touch(&a.reads, &b.writes) || touch(&a.writes, &b.writes);
                prop_assert!(
                    !conflict || before[later][first],
                    "{} may run beside {}", plan.name(b), plan.name(a)
                );
            }
        }
    }

    #[test]
    fn at_any_speed_tiers_hold_and_waiting_explains_the_time(
        (schedule, sizes) in any_schedule(),
        times in prop::collection::vec(0.0f64..1.0, 1..40),
        rates in prop::array::uniform4(1e3f64..1e6),
    ) {
        let plan = StepPlan::new(&schedule, &sizes).unwrap();
        let timeline = simulate(&plan, &costs(&times, rates, schedule.layers));
        for tier in Tier::ALL {
            let peak = timeline.occupancy(&plan, tier).iter().map(|s| s.1).max().unwrap();
            prop_assert!(peak <= plan.extents.get(tier), "{tier}: {peak} of {}", plan.extents.get(tier));
        }
        // The step ends with arithmetic, and arithmetic stands still for transfers only.
        let busy: f64 =
            timeline.spans.iter().filter(|s| s.lane == Lane::Compute).map(|s| s.duration().get()).sum();
        let explained = busy + timeline.exposed().total().get();
        prop_assert!((timeline.total().get() - explained).abs() < 1e-9 * (1.0 + explained));
        let moved: u64 = timeline.spans.iter().map(|s| s.bytes.get()).sum();
        let wanted: u64 = (0..schedule.layers)
            .map(|i| sizes[i].get() * match schedule.placement[i] {
                Placement::Hbm | Placement::Recompute => 0,
                Placement::Host => 2,
                Placement::Nvme => 4,
            })
            .sum();
        prop_assert_eq!(moved, wanted);
    }
}

#[test]
fn reads_start_as_many_blocks_ahead_as_asked() {
    let sizes = [Bytes(4096); 5];
    let issued = |prefetch| {
        let execution = Execution { prefetch, ..Execution::default() };
        let plan = StepPlan::new(&schedule("CCCCG", &sizes, execution), &sizes).unwrap();
        let tasks: Vec<&Task> = plan.tasks().collect();
        let reads = tasks.iter().filter(|t| t.lane == Lane::H2d);
        reads.map(|t| (plan.name(t), plan.name(tasks[t.after.unwrap().0]))).collect::<Vec<_>>()
    };
    let pairs = |after: [&str; 4]| {
        let names = ["boundary 3 h2d", "boundary 2 h2d", "boundary 1 h2d", "boundary 0 h2d"];
        names.iter().zip(after).map(|(n, a)| ((*n).to_owned(), a.to_owned())).collect::<Vec<_>>()
    };
    assert_eq!(issued(0), pairs(["epilogue", "backward 3", "backward 2", "backward 1"]));
    assert_eq!(issued(1), pairs(["forward 3", "epilogue", "backward 3", "backward 2"]));
    assert_eq!(issued(2), pairs(["forward 3", "forward 3", "epilogue", "backward 3"]));
    assert_eq!(issued(usize::MAX), pairs(["forward 3"; 4]));
}

#[test]
fn absurd_sizes_and_counts_are_refused() {
    let huge = [Bytes(u64::MAX), Bytes(1)];
    let refused = StepPlan::new(&schedule("GG", &huge, Execution::default()), &huge).unwrap_err();
    assert_eq!(refused, StepError::TooLarge(Tier::Hbm));
    // Each fits 64 bits, their sum does not.
    let huge = [Bytes(1 << 63); 3];
    for letters in ["GGG", "CGG", "NGG"] {
        let plan = StepPlan::new(&schedule(letters, &huge, Execution::default()), &huge);
        assert!(matches!(plan, Err(StepError::TooLarge(_))), "{letters}");
    }

    let mut other = Schedule::named("test", &[Bytes(1); 2], false);
    other.layers = usize::MAX;
    assert!(matches!(StepPlan::new(&other, &[Bytes(1); 2]), Err(StepError::Shape { .. })));
    assert!(other.check_shape(&[Bytes(1); 2]).is_err());
    assert!(Schedule::from_json(&other.to_json().unwrap()).is_err());
}

#[test]
fn spans_that_wait_for_themselves_or_for_nothing_explain_nothing() {
    let span = |lane, start, end, blocked_on| Span {
        name: "any".into(),
        lane,
        start: Seconds(start),
        end: Seconds(end),
        bytes: Bytes::ZERO,
        blocked_on,
    };
    let spans = vec![
        span(Lane::H2d, 1.0, 2.0, Some(1)),
        span(Lane::D2h, 0.0, 1.0, Some(0)),
        span(Lane::Compute, 2.0, 3.0, Some(0)),
        span(Lane::Compute, 4.0, 5.0, Some(9)),
    ];
    let exposed = Timeline { spans }.exposed();
    assert_eq!(exposed.h2d, Seconds(1.0));
    assert_eq!(exposed.total(), Seconds(1.0));
}

#[test]
fn a_wait_for_a_queue_of_transfers_is_split_along_the_queue() {
    // A layer takes 1 s forward, a boundary 3 s out and 2 s back, and no write may stay in flight: so there are two ranges in HBM
    // for the forward pass, and each layer waits for the one its output goes to.
    let sizes = [Bytes(1000); 4];
    let execution = Execution { prefetch: 0, writes_in_flight: 0, staging_buffers: 1 };
    let plan = StepPlan::new(&schedule("CCCG", &sizes, execution), &sizes).unwrap();
    let mut costs = costs(&[1.0], [1000.0 / 3.0, 500.0, 1.0, 1.0], 3);
    (costs.prologue, costs.epilogue, costs.prologue_backward) = (Seconds::ZERO, Seconds::ZERO, Seconds::ZERO);
    let timeline = simulate(&plan, &costs);
    let at = |name: &str| timeline.spans.iter().find(|s| &*s.name == name).unwrap();
    assert_eq!(at("boundary 0 d2h").end, Seconds(3.0));
    assert_eq!(at("forward 1").start, Seconds(3.0));
    assert_eq!(at("boundary 1 d2h").end, Seconds(6.0));
    assert_eq!(at("forward 2").start, Seconds(6.0));
    // Boundary 2 is gone at 9 s, and the loss needs its range. Three waits of 2 s out, and three of 2 s back, each when needed.
    let exposed = timeline.exposed();
    assert_eq!(at("epilogue").start, Seconds(9.0));
    assert!((exposed.d2h.get() - 3.0 * 2.0).abs() < 1e-9, "{exposed:?}");
    assert!((exposed.h2d.get() - 3.0 * 2.0).abs() < 1e-9, "{exposed:?}");
}

/// Three layers of 10 ms forward and 10 more each way in backward; every link moves a boundary (1 MB) in 5 ms.
fn three_layers(contention: Contention) -> (Schedule, [Bytes; 4], StepCosts) {
    let sizes = [Bytes(1_000_000); 4];
    let execution = Execution { prefetch: 0, ..Execution::default() };
    let mut costs = costs(&[0.01], [2e8; 4], 3);
    (costs.prologue, costs.epilogue, costs.prologue_backward) = (Seconds::ZERO, Seconds::ZERO, Seconds::ZERO);
    costs.links.contention = contention;
    (schedule("GCGG", &sizes, execution), sizes, costs)
}

#[test]
fn what_the_root_complex_carries_limits_every_link() {
    let half = Contention { shared: Some(BytesPerSecond(1e8)), ..Contention::default() };
    for (contention, wanted) in [(Contention::default(), 0.005), (half, 0.010)] {
        let (schedule, sizes, costs) = three_layers(contention);
        let plan = StepPlan::new(&schedule, &sizes).unwrap();
        let exposed = simulate(&plan, &costs).exposed();
        assert!((exposed.h2d.get() - wanted).abs() < 1e-12, "{exposed:?}");
    }
}

#[test]
fn both_directions_at_once_slow_each_other_down() {
    // The gradient of layer 2's weights leaves when its backward has ended, which is when boundary 1 starts to come back.
    let both = Some(BytesPerSecond(1e8));
    let slow = Contention { d2h_both: both, h2d_both: both, ..Contention::default() };
    for (bytes, contention, wanted) in [
        (1_000_000, Contention::default(), 0.005),
        (1_000_000, slow, 0.010),
        // Half as much leaves: after 5 ms beside it, half of the boundary is there, and the rest comes at full speed.
        (500_000, slow, 0.0075),
    ] {
        let (schedule, sizes, costs) = three_layers(contention);
        let streamed = Streamed { gradients: vec![Bytes(bytes); 3], ..Streamed::default() };
        let none = Workspaces::default();
        let sized = StepSizes {
            boundary: &sizes,
            saved: &[],
            workspaces: &none,
            streamed: &streamed,
            accumulate: false,
        };
        let plan = StepPlan::with_sizes(&schedule, &sized).unwrap();
        let exposed = simulate(&plan, &costs).exposed();
        assert!((exposed.h2d.get() - wanted).abs() < 1e-12, "{bytes}: {exposed:?}, not {wanted}");
    }
}

#[test]
fn streamed_weights_come_a_layer_ahead_in_both_passes() {
    let (mut schedule, sizes, costs) = three_layers(Contention::default());
    schedule.placement[1] = Placement::Hbm;
    let streamed = Streamed { weights: vec![Bytes(1_000_000); 3], ..Streamed::default() };
    let spaces = Workspaces { forward: vec![], backward: vec![], loss: Bytes(256) };
    let sized = StepSizes {
        boundary: &sizes,
        saved: &[],
        workspaces: &spaces,
        streamed: &streamed,
        accumulate: false,
    };
    let plan = StepPlan::with_sizes(&schedule, &sized).unwrap();
    let timeline = simulate(&plan, &costs);
    // Only the first layer's are waited for. Layer 2 runs backward with those of its forward; 1 and 0 come again.
    assert!((timeline.exposed().h2d.get() - 0.005).abs() < 1e-12);
    let copies: Vec<String> =
        timeline.spans.iter().filter(|s| s.lane == Lane::H2d).map(|s| s.name.to_string()).collect();
    assert_eq!(copies, ["weights 0 h2d", "weights 1 h2d", "weights 2 h2d", "weights 1 h2d", "weights 0 h2d"]);
    assert_eq!(plan.extents.host, Bytes(3 * 1_003_520));
    // Four boundaries, a gradient, two layers' weights and the loss.
    assert_eq!(plan.extents.hbm, Bytes(7 * 1_000_192 + 256));
}

#[test]
fn transfers_that_cannot_be_are_refused() {
    let sizes = [Bytes(4096); 3];
    let good = Transfer { out: 0, gone: 1, stored: 1, read: 4, back: 4 };
    let plan = |transfer: Option<Transfer>| {
        let mut schedule = schedule("CGG", &sizes, Execution::default());
        schedule.transfers = Some(vec![transfer, None]);
        StepPlan::new(&schedule, &sizes).map(|_| ())
    };
    assert_eq!(plan(Some(good)), Ok(()));
    for bad in [
        None,
        Some(Transfer { out: 1, gone: 0, ..good }),
        Some(Transfer { gone: 9, ..good }),
        Some(Transfer { read: 5, back: 5, ..good }),
        Some(Transfer { read: 3, ..good }),
        Some(Transfer { out: usize::MAX, gone: usize::MAX, stored: usize::MAX, ..good }),
    ] {
        assert!(matches!(plan(bad), Err(StepError::Transfer { .. })), "{bad:?}");
    }
}

proptest! {
    /// What is said of every plan is true of each: streamed weights and gradients have homes, and pass HBM beside the largest layer.
    #[test]
    fn no_plan_needs_less_than_every_plan_does((schedule, sizes) in any_schedule(), seed in 1u64..1000) {
        let n = schedule.layers;
        let list = |salt: u64| (0..n as u64).map(|l| Bytes((seed * 7919 + salt * 104_729 + l * 31) % 9_001)).collect::<Vec<_>>();
        let spaces = Workspaces { forward: vec![], backward: list(1), loss: Bytes(seed) };
        let (saved, streamed) = (list(2), Streamed { weights: list(3), gradients: list(4), on_nvme: false });
        let all = StepSizes { boundary: &sizes, saved: &saved, workspaces: &spaces, streamed: &streamed, accumulate: false };
        let plan = StepPlan::with_sizes(&schedule, &all).unwrap();
        prop_assert!(plan.extents.hbm >= all.least_hbm());
        let homes: Bytes = list(3).iter().chain(&list(4)).map(|bytes| bytes.align_up(4096)).sum();
        prop_assert!(plan.extents.host >= homes);
    }
}
