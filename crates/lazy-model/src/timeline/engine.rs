//! The discrete-event simulation itself: from one start or end of a task to the next.

use crate::span::Lane;
use crate::step::{StepPlan, Task, Work};
use crate::timeline::{LinkRates, StepCosts};
use crate::units::Bytes;

const LANES: usize = Lane::ALL.len();

/// Times of the tasks of a plan, in list order, in seconds.
pub(super) struct Pass {
    pub(super) start: Vec<f64>,
    pub(super) end: Vec<f64>,
    /// The task of another lane whose end let this one start, where it had to wait for one.
    pub(super) blocked_on: Vec<Option<usize>>,
}

/// The task a lane is busy with.
#[derive(Clone, Copy)]
struct Running {
    task: usize,
    end: f64,
    /// Bytes left at `since`, moving at `rate`; unused for arithmetic.
    left: f64,
    since: f64,
    rate: f64,
}

/// What a task moves: nothing, where it brings in sums of gradients and is one of the `first` tasks, of a micro-batch that has none yet.
pub(super) fn moved(plan: &StepPlan, (index, task): (usize, &Task), first: usize) -> Bytes {
    if index < first && plan.brings_in_gradients(task) { Bytes::ZERO } else { task.bytes }
}

pub(super) fn run(plan: &StepPlan, costs: &StepCosts, first: usize) -> Pass {
    let tasks: Vec<&Task> = plan.tasks().collect();
    let waits = plan.waits();
    let mut queues: [Vec<usize>; LANES] = Default::default();
    for (t, task) in tasks.iter().enumerate() {
        queues[task.lane as usize].push(t);
    }
    // What never ends or starts (a link of rate zero) is left at infinity.
    let mut pass = Pass {
        start: vec![f64::INFINITY; tasks.len()],
        end: vec![f64::INFINITY; tasks.len()],
        blocked_on: vec![None; tasks.len()],
    };
    let mut done = vec![false; tasks.len()];
    let mut next = [0usize; LANES];
    let mut free_at = [0.0f64; LANES];
    let mut running: [Option<Running>; LANES] = [None; LANES];
    loop {
        let mut changed = false;
        for lane in 0..LANES {
            let Some(&task) = queues[lane].get(next[lane]).filter(|_| running[lane].is_none()) else {
                continue;
            };
            if !waits[task].iter().all(|w| done[w.0]) {
                continue;
            }
            let mut start = free_at[lane];
            for wait in &waits[task] {
                if pass.end[wait.0] > start {
                    start = pass.end[wait.0];
                    pass.blocked_on[task] = (tasks[wait.0].lane as usize != lane).then_some(wait.0);
                }
            }
            pass.start[task] = start;
            next[lane] += 1;
            let bytes = moved(plan, (task, tasks[task]), first);
            running[lane] = Some(begin(tasks[task], task, bytes, start, costs));
            changed = true;
        }
        if changed {
            share(&mut running, &costs.links);
        }
        let now = running.iter().flatten().map(|r| r.end).fold(f64::INFINITY, f64::min);
        if now == f64::INFINITY {
            return pass;
        }
        for lane in 0..LANES {
            let Some(ended) = running[lane].filter(|r| r.end <= now) else { continue };
            pass.end[ended.task] = now;
            done[ended.task] = true;
            free_at[lane] = now;
            running[lane] = None;
        }
        settle(&mut running, now);
        share(&mut running, &costs.links);
    }
}

fn begin(task: &Task, index: usize, bytes: Bytes, start: f64, costs: &StepCosts) -> Running {
    if task.work != Work::Copy {
        let end = start + costs.of(task).get();
        return Running { task: index, end, left: 0.0, since: start, rate: 0.0 };
    }
    let alone = alone(&costs.links, task.lane as usize);
    let left = bytes.get() as f64;
    let end = if left > 0.0 { start + left / alone } else { start };
    Running { task: index, end, left, since: start, rate: alone }
}

/// Rate of a lane that no other disturbs.
fn alone(links: &LinkRates, lane: usize) -> f64 {
    match Lane::ALL[lane] {
        Lane::D2h => links.d2h.get(),
        Lane::H2d => links.h2d.get(),
        Lane::NvmeWrite => links.nvme_write.get(),
        Lane::NvmeRead => links.nvme_read.get(),
        Lane::Compute | Lane::Optimizer => 0.0,
    }
}

/// Counts what transfers have moved up to `now`.
fn settle(running: &mut [Option<Running>; LANES], now: f64) {
    for r in running.iter_mut().flatten().filter(|r| r.rate > 0.0 && now > r.since) {
        r.left = (r.left - r.rate * (now - r.since)).max(0.0);
        r.since = now;
    }
}

/// Gives every transfer the rate that those beside it leave, and moves its end where that changes.
fn share(running: &mut [Option<Running>; LANES], links: &LinkRates) {
    let contention = &links.contention;
    let busy = |lane: Lane| running[lane as usize].is_some();
    let mut rates = [0.0f64; LANES];
    for (lane, rate) in rates.iter_mut().enumerate().filter(|(lane, _)| running[*lane].is_some()) {
        let both = match Lane::ALL[lane] {
            Lane::D2h if busy(Lane::H2d) => contention.d2h_both,
            Lane::H2d if busy(Lane::D2h) => contention.h2d_both,
            _ => None,
        };
        *rate = both.map_or(f64::INFINITY, |b| b.get()).min(alone(links, lane));
    }
    if let Some(shared) = contention.shared {
        let wanted: f64 = rates.iter().sum();
        if wanted > shared.get() {
            rates.iter_mut().for_each(|rate| *rate *= shared.get() / wanted);
        }
    }
    // All transfers have been counted up to the same moment, or have just begun.
    let now = running.iter().flatten().map(|r| r.since).fold(0.0, f64::max);
    for (r, rate) in running.iter_mut().zip(rates) {
        if let Some(r) = r.as_mut().filter(|r| r.left > 0.0 && r.rate != rate) {
            r.left = (r.left - r.rate * (now - r.since)).max(0.0);
            (r.since, r.rate) = (now, rate);
            r.end = now + r.left / rate;
        }
    }
}
