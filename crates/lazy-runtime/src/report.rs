use std::fmt;
use std::sync::Arc;

use lazy_model::schedule::ExposedSeconds;
use lazy_model::step::{Content, StepPlan, Task, TierBytes, Work};
use lazy_model::timeline::Timeline;
use lazy_model::{Bytes, Lane, Seconds, Span, Tier, Verified};

use crate::program::Program;

/// What a step did, measured, in the planner's own terms.
#[derive(Clone, Debug)]
pub struct StepReport {
    /// The loss of each micro-batch.
    pub losses: Vec<f32>,
    /// A span for every task of the plan, in its order, once for each micro-batch.
    pub timeline: Timeline,
    /// Prologue and layers forward, of all micro-batches.
    pub forward: Seconds,
    /// Loss and layers backward, recomputation included.
    pub backward: Seconds,
    /// Forwards that were run again.
    pub recompute: Seconds,
    /// Time the compute lane waited for each link.
    pub exposed: ExposedSeconds,
    /// What it waited for, the longest first.
    pub waits: Vec<Wait>,
    /// The most each tier held at once; parameters that stay in HBM included.
    pub peaks: TierBytes,
    /// The end of the highest range that was held in each tier; parameters that stay in HBM included. What a plan's extents promise.
    pub extents: TierBytes,
    tasks: usize,
}

/// Time that the compute lane stood still for one transfer, in all micro-batches together.
#[derive(Clone, Debug, PartialEq)]
pub struct Wait {
    /// What was on its way: a boundary, weights of a layer or their gradients.
    pub content: Content,
    /// On which link.
    pub lane: Lane,
    /// The task, as spans name it.
    pub name: Arc<str>,
    /// How long.
    pub time: Seconds,
}

/// One line of [`Comparison`].
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    /// What is compared.
    pub what: String,
    /// What the plan promised.
    pub predicted: f64,
    /// What was measured.
    pub measured: f64,
    /// `s` or `bytes`.
    pub unit: &'static str,
}

/// Promise and measurement side by side; prints as a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// Step, forward, backward, recomputation; for each link its transfers and the time waited for them; each tier's extent.
    pub rows: Vec<Compared>,
}

impl StepReport {
    pub(crate) fn new(
        program: &Program,
        spans: Vec<Span>,
        micro_batches: usize,
        losses: Vec<f32>,
        (peaks, extents): (TierBytes, TierBytes),
    ) -> StepReport {
        let plan = program.plan();
        let timeline = Timeline { spans: of_the_plan(program, spans, micro_batches) };
        let start = timeline.spans.first().map_or(Seconds::ZERO, |s| s.start);
        let (mut forward, mut backward, mut recompute) = (Seconds::ZERO, Seconds::ZERO, Seconds::ZERO);
        let mut from = start;
        for pass in timeline.spans.chunks(program.tasks.len().max(1)) {
            let ends = |is: &dyn Fn(&Task) -> bool| {
                let ends = plan.tasks().zip(pass).filter(|(task, _)| is(task)).map(|(_, span)| span.end);
                ends.fold(from, |a, b| if b > a { b } else { a })
            };
            let turn = ends(&|task| matches!(task.work, Work::Prologue | Work::Forward { .. }));
            let end = ends(&|task| task.lane == Lane::Compute);
            (forward, backward) = (forward + (turn - from), backward + (end - turn));
            from = end;
            let again =
                plan.tasks().zip(pass).filter(|(task, _)| matches!(task.work, Work::Recompute { .. }));
            recompute += again.map(|(_, span)| span.duration()).sum();
        }
        StepReport {
            losses,
            forward,
            backward,
            recompute,
            exposed: timeline.exposed_since(start),
            waits: waits(plan, &timeline, start, program.tasks.len()),
            timeline,
            peaks,
            extents,
            tasks: program.tasks.len(),
        }
    }

    /// The time line of one micro-batch: a span for every task of the plan.
    pub fn pass(&self, micro_batch: usize) -> Timeline {
        let first = micro_batch * self.tasks;
        let spans = self.timeline.spans.iter().skip(first).take(self.tasks).cloned();
        let own =
            |span: Span| Span { blocked_on: span.blocked_on.and_then(|at| at.checked_sub(first)), ..span };
        Timeline { spans: spans.map(own).collect() }
    }

    /// Bytes moved on a lane.
    pub fn bytes(&self, lane: Lane) -> Bytes {
        self.timeline.spans.iter().filter(|s| s.lane == lane).map(|s| s.bytes).sum()
    }

    /// From the first task's start to the last one's end.
    pub fn total(&self) -> Seconds {
        self.timeline.total() - self.timeline.spans.first().map_or(Seconds::ZERO, |s| s.start)
    }

    /// This step beside what was promised of it, and measured extents beside the plan's with `resident` bytes of HBM.
    pub fn compare(&self, verified: &Verified, resident: Bytes) -> Comparison {
        let Verified { plan, timeline: later, promise, .. } = verified;
        let after = (self.timeline.spans.len() / self.tasks.max(1)) as f64 - 1.0;
        let sum = |of: &dyn Fn(&Timeline) -> f64| of(verified.first()) + after * of(later);
        let again = |timeline: &Timeline| -> f64 {
            let pairs = plan.tasks().zip(&timeline.spans);
            let again = pairs.filter(|(task, _)| matches!(task.work, Work::Recompute { .. }));
            again.map(|(_, span)| span.duration().get()).sum()
        };
        let seconds = |what: &str, predicted: f64, measured: Seconds| Compared {
            what: what.to_owned(),
            predicted,
            measured: measured.get(),
            unit: "s",
        };
        let mut rows = vec![
            seconds("step", (promise.step_s - promise.optimizer_s).get(), self.total()),
            seconds("forward", promise.forward_s.get(), self.forward),
            seconds("backward", promise.backward_s.get(), self.backward),
            seconds("recompute", sum(&again), self.recompute),
        ];
        let pick = |exposed: &ExposedSeconds, lane| match lane {
            Lane::D2h => exposed.d2h,
            Lane::H2d => exposed.h2d,
            Lane::NvmeWrite => exposed.nvme_write,
            _ => exposed.nvme_read,
        };
        for lane in [Lane::D2h, Lane::H2d, Lane::NvmeWrite, Lane::NvmeRead] {
            let busy = |timeline: &Timeline| -> f64 {
                timeline.spans.iter().filter(|s| s.lane == lane).map(|s| s.duration().get()).sum()
            };
            rows.push(seconds(&format!("{lane} busy"), sum(&busy), Seconds(busy(&self.timeline))));
            let (promised, measured) = (pick(&promise.exposed_s, lane), pick(&self.exposed, lane));
            rows.push(seconds(&format!("{lane} exposed"), promised.get(), measured));
        }
        for tier in Tier::ALL {
            let resident = if tier == Tier::Hbm { resident } else { Bytes::ZERO };
            rows.push(Compared {
                what: format!("{tier} extent"),
                predicted: (plan.extents.get(tier) + resident).get() as f64,
                measured: self.extents.get(tier).get() as f64,
                unit: "bytes",
            });
        }
        Comparison { rows }
    }
}

/// The spans of the program's tasks among those of all that ran, in their order, as many times as it was run. What ran for anyone else is
/// left out.
fn of_the_plan(program: &Program, spans: Vec<Span>, micro_batches: usize) -> Vec<Span> {
    let names = || program.tasks.iter().map(|task| &task.name);
    let mut wanted = (0..micro_batches).flat_map(|_| names()).peekable();
    let mut places: Vec<Option<usize>> = Vec::with_capacity(spans.len());
    let mut own = Vec::with_capacity(micro_batches * program.tasks.len());
    for span in spans {
        // Names are told apart by where they lie: each program has its own.
        if wanted.next_if(|name| Arc::ptr_eq(name, &span.name)).is_some() {
            places.push(Some(own.len()));
            own.push(span);
        } else {
            places.push(None);
        }
    }
    for span in &mut own {
        span.blocked_on = span.blocked_on.and_then(|at| places.get(at).copied().flatten());
    }
    own
}

fn waits(plan: &StepPlan, timeline: &Timeline, start: Seconds, tasks: usize) -> Vec<Wait> {
    // In lists whose room is known: a report takes as many allocations for a long step as for a short one.
    let mut plan_tasks: Vec<&Task> = Vec::with_capacity(tasks);
    plan_tasks.extend(plan.tasks());
    let mut waits: Vec<Wait> = Vec::with_capacity(tasks);
    for exposed in timeline.exposed_waits(start) {
        let Some(&moved) = plan_tasks.get(exposed.span % tasks.max(1)).and_then(|task| task.reads.first())
        else {
            continue;
        };
        let name = &timeline.spans[exposed.span].name;
        match waits.iter_mut().find(|wait| Arc::ptr_eq(&wait.name, name)) {
            Some(wait) => wait.time += exposed.time,
            None => waits.push(Wait {
                content: plan.buffer(moved).content,
                lane: exposed.lane,
                name: Arc::clone(name),
                time: exposed.time,
            }),
        }
    }
    waits.sort_unstable_by(|a, b| b.time.get().total_cmp(&a.time.get()).then_with(|| a.name.cmp(&b.name)));
    waits
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<20} {:>16} {:>16} {:>8}", "", "predicted", "measured", "ratio")?;
        for Compared { what, predicted, measured, unit } in &self.rows {
            let ratio = if *predicted > 0.0 { format!("{:.3}", measured / predicted) } else { "-".into() };
            let show = |value: f64| match *unit {
                "s" => format!("{:.3} ms", value * 1e3),
                _ => format!("{value:.0} B"),
            };
            writeln!(f, "{what:<20} {:>16} {:>16} {ratio:>8}", show(*predicted), show(*measured))?;
        }
        Ok(())
    }
}
