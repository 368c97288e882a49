//! Plans and schedules changed at random: each is refused before a byte moves, or runs to the same bits within the same budgets.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::BTreeMap;

use common::*;
use lazy_model::step::{BufferId, Op, StepPlan, Task, TaskId, Transfer};
use lazy_model::{Bytes, Lane, Placement, Tier};
use lazy_runtime::{Executor, ExecutorOptions, Program};
use lazy_store::QueueOrder;

/// Small, so that a plan runs in a millisecond.
const WIDTH: usize = 16;
/// Plans to be corrupted, and corruptions of each.
const PLANS: u64 = 60;
const CORRUPTIONS: u64 = 60;
/// Schedules to be corrupted.
const SCHEDULES: u64 = 300;

/// A change of a plan: what it is called, whether it breaks the flow of data for certain, and the changed plan.
struct Corrupted {
    kind: &'static str,
    breaks: bool,
    plan: StepPlan,
}

fn any_task<'a>(plan: &'a mut StepPlan, random: &mut Random) -> &'a mut Task {
    let tasks = plan.tasks().count();
    let which = random.below(tasks);
    let task = plan.ops.iter_mut().filter_map(|op| match op {
        Op::Run(task) => Some(task),
        _ => None,
    });
    task.skip(which).take(1).next().unwrap()
}

fn corrupt(plan: &StepPlan, random: &mut Random) -> Corrupted {
    let mut plan = plan.clone();
    let op = random.below(plan.ops.len());
    let (kind, breaks) = match random.below(9) {
        0 => {
            plan.ops.remove(op);
            ("remove", true)
        }
        1 => {
            plan.ops.insert(op, plan.ops[op].clone());
            ("duplicate", !matches!(plan.ops[op], Op::Run(_)))
        }
        2 => {
            let op = op.min(plan.ops.len() - 2);
            plan.ops.swap(op, op + 1);
            ("swap neighbours", false)
        }
        3 | 4 => {
            let buffers = plan.buffers.clone();
            let new = BufferId(random.below(buffers.len()));
            let task = any_task(&mut plan, random);
            let (first, second) = match random.below(2) {
                0 => (&mut task.reads, &mut task.writes),
                _ => (&mut task.writes, &mut task.reads),
            };
            let list = if first.is_empty() { second } else { first };
            let place = random.below(list.len());
            let old = std::mem::replace(&mut list[place], new);
            ("another buffer", buffers[old.0].content != buffers[new.0].content)
        }
        5 => {
            let which = random.below(plan.buffers.len());
            let buffer = &mut plan.buffers[which];
            let step = [4096, 256, 64, 1][random.below(4)];
            buffer.offset = match random.below(2) {
                0 => buffer.offset + step,
                _ => buffer.offset.checked_sub(step).unwrap_or(step),
            };
            ("offset", which < plan.homes || step < 256)
        }
        6 => {
            let lane = Lane::ALL[random.below(Lane::ALL.len())];
            let task = any_task(&mut plan, random);
            let old = std::mem::replace(&mut task.lane, lane);
            ("lane", old != lane)
        }
        7 => {
            let all = plan.tasks().count();
            let after = random.below(all + 2);
            any_task(&mut plan, random).after = (after > 0).then(|| TaskId(after - 1));
            ("after", false)
        }
        _ => {
            let tier = Tier::ALL[random.below(3)];
            let extent = plan.extents.get(tier).get();
            // What lies highest in memory need not fill the last page.
            let filled =
                plan.buffers.iter().filter(|b| b.tier == tier).map(|b| b.offset + b.bytes.get()).max();
            let less = random.below(extent as usize + 1) as u64;
            *plan.extents.get_mut(tier) = Bytes(less);
            ("extent", filled.is_some_and(|filled| less < filled))
        }
    };
    Corrupted { kind, breaks, plan }
}

fn runs(executor: &mut Executor, program: &mut Program, told: &str) {
    let micro_batches = executor.model().options().micro_batches;
    let report = executor.run(program, &step(2, micro_batches));
    let report =
        report.unwrap_or_else(|error| panic!("{told}: {error}: {:?}", std::error::Error::source(&error)));
    let (losses, wanted) = expected(2, micro_batches);
    assert_eq!(report.losses, losses, "{told}");
    assert!(bits(&gradients(executor)) == wanted, "{told}");
}

#[test]
fn corrupted_plans_are_refused_or_run_to_the_same_bits() {
    let mut counts: BTreeMap<&str, [usize; 2]> = BTreeMap::new();
    for number in 0..PLANS * deep(20) {
        let mut random = Random(number);
        let options = random.options();
        let model = model(&squares(), options);
        let schedule = scheduled(&model, &random.letters(), &random.keep(), random.ahead());
        let plan = model.plan(&schedule).unwrap();
        let dir = folder();
        // It holds what the plan needs that was not corrupted.
        let store = store(&model, &plan, &running(QueueOrder::Seeded(number), dir.path()));
        let mut executor = executor(store, model, ExecutorOptions::default());
        for corruption in 0..CORRUPTIONS {
            let Corrupted { kind, breaks, plan: changed } = corrupt(&plan, &mut random);
            let told = format!("plan {number}, corruption {corruption}, {kind}");
            let [refused, all] = counts.entry(kind).or_default();
            *all += 1;
            match executor.prepare(changed) {
                Err(_) => *refused += 1,
                Ok(_) if breaks => panic!("{told} is taken"),
                Ok(mut program) => runs(&mut executor, &mut program, &told),
            }
        }
    }
    eprintln!("refused, of all: {counts:?}");
    let [refused, all] = counts.values().fold([0, 0], |[a, b], [x, y]| [a + x, b + y]);
    assert!(2 * refused > all && refused < all, "{refused} of {all} are refused");
}

/// Letters, keep flags or transfers of a schedule changed.
fn corrupt_schedule(schedule: &mut lazy_model::Schedule, random: &mut Random) {
    let placements = [Placement::Hbm, Placement::Host, Placement::Nvme, Placement::Recompute];
    match random.below(9) {
        0 => {
            let (which, new) = (random.below(LAYERS + 1), placements[random.below(4)]);
            schedule.placement.iter_mut().skip(which).take(1).for_each(|placement| *placement = new);
        }
        1 => schedule.placement.truncate(random.below(LAYERS + 1)),
        2 => schedule.keep.truncate(random.below(LAYERS)),
        3 => schedule.keep.push(true),
        4 => schedule.layers = random.below(2 * LAYERS),
        _ => {
            let Some(transfers) = &mut schedule.transfers else { return };
            let which = random.below(LAYERS);
            if transfers.len() != LAYERS {
                return;
            }
            let position = random.below(2 * LAYERS + 3);
            match (&mut transfers[which], random.below(7)) {
                (transfer, 5) => *transfer = None,
                (_, 6) => drop(transfers.pop()),
                (Some(Transfer { out, .. }), 0) => *out = position,
                (Some(Transfer { gone, .. }), 1) => *gone = position,
                (Some(Transfer { stored, .. }), 2) => *stored = position,
                (Some(Transfer { read, .. }), 3) => *read = position,
                (Some(Transfer { read, back, .. }), _) => (*read, *back) = (position, position),
                (none, _) => {
                    *none = Some(Transfer {
                        out: which,
                        gone: which,
                        stored: which,
                        read: position,
                        back: position,
                    });
                }
            }
        }
    }
}

#[test]
fn corrupted_schedules_are_refused_or_run_to_the_same_bits() {
    let (mut refused, mut ran) = (0, 0);
    for number in 0..SCHEDULES * deep(20) {
        let mut random = Random(1_000_000 + number);
        let model = model(&squares(), random.options());
        let ahead = if number % 3 == 0 { random.ahead() } else { Ahead::Planned(random.below(10) as u32) };
        let mut schedule = scheduled(&model, &random.letters(), &random.keep(), ahead);
        corrupt_schedule(&mut schedule, &mut random);
        let Ok(plan) = model.plan(&schedule) else {
            refused += 1;
            continue;
        };
        ran += 1;
        let dir = folder();
        let (mut executor, mut program) =
            prepared(model, plan, &running(QueueOrder::Seeded(number), dir.path()));
        runs(&mut executor, &mut program, &format!("schedule {number}"));
    }
    eprintln!("{refused} schedules refused, {ran} run");
    assert!(refused > SCHEDULES / 4 && ran > SCHEDULES / 8, "{refused} refused, {ran} run");
}
