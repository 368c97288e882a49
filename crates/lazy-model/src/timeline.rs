//! The time line of a step: a discrete-event simulation of a [`StepPlan`] on given costs, and what can be read from a time
//! line, simulated or measured: time exposed by each link, bytes live in each tier over time.

mod engine;

use crate::schedule::ExposedSeconds;
use crate::span::{Lane, Span};
use crate::step::{Op, StepPlan, Task, Work};
use crate::units::{Bytes, BytesPerSecond, LayerIndex, Seconds, Tier};

/// What the layers and links of a step cost.
#[derive(Clone, Debug, PartialEq)]
pub struct StepCosts {
    /// Making boundary 0.
    pub prologue: Seconds,
    /// Each layer forward, without saving.
    pub forward: Vec<Seconds>,
    /// Each layer forward that keeps its internals: for them and for its output.
    pub saving_forward: Vec<Seconds>,
    /// Each layer forward once more before its backward: for its internals alone, which may spare it its last product.
    pub internals_forward: Vec<Seconds>,
    /// Each layer backward, its internals at hand.
    pub backward: Vec<Seconds>,
    /// Loss, forward and backward.
    pub epilogue: Seconds,
    /// Backward of the prologue.
    pub prologue_backward: Seconds,
    /// Rates of the links.
    pub links: LinkRates,
}

/// Transfer rates of the four links, and what becomes of them when several are busy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkRates {
    /// Device to host.
    pub d2h: BytesPerSecond,
    /// Host to device.
    pub h2d: BytesPerSecond,
    /// Writes to NVMe.
    pub nvme_write: BytesPerSecond,
    /// Reads from NVMe.
    pub nvme_read: BytesPerSecond,
    /// Rates when several are busy at once.
    pub contention: Contention,
}

/// What links come to when several are busy; what is absent is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Contention {
    /// Device to host while host to device is busy.
    pub d2h_both: Option<BytesPerSecond>,
    /// Host to device while device to host is busy.
    pub h2d_both: Option<BytesPerSecond>,
    /// All four links together: the root complex that all their bytes pass.
    pub shared: Option<BytesPerSecond>,
}

impl StepCosts {
    /// Arithmetic of a layer in one pass, its output never made again.
    ///
    /// # Panics
    /// Where there is no such layer.
    pub fn layer(&self, layer: LayerIndex, keep: bool) -> Seconds {
        let l = layer.get();
        let forward = if keep { self.saving_forward[l] } else { self.forward[l] + self.internals_forward[l] };
        forward + self.backward[l]
    }

    /// The least arithmetic of a pass: every layer as it takes less time, kept or run once more, and no boundary made again.
    pub fn least_pass(&self) -> Seconds {
        let less = |l| {
            let (kept, plain) = (self.layer(LayerIndex(l), true), self.layer(LayerIndex(l), false));
            if plain < kept { plain } else { kept }
        };
        let layers: Seconds = (0..self.backward.len()).map(less).sum();
        self.prologue + layers + self.epilogue + self.prologue_backward
    }

    /// Time a task takes once it runs.
    fn of(&self, task: &Task) -> Seconds {
        match task.work {
            Work::Prologue => self.prologue,
            Work::Forward { layer, keep: false } | Work::Recompute { layer, save: false } => {
                self.forward[layer.get()]
            }
            Work::Forward { layer, keep: true } => self.saving_forward[layer.get()],
            Work::Recompute { layer, save: true } => self.internals_forward[layer.get()],
            Work::Epilogue => self.epilogue,
            Work::Backward(layer) => self.backward[layer.get()],
            Work::PrologueBackward => self.prologue_backward,
            Work::Copy => match task.lane {
                Lane::D2h => self.links.d2h.time(task.bytes),
                Lane::H2d => self.links.h2d.time(task.bytes),
                Lane::NvmeWrite => self.links.nvme_write.time(task.bytes),
                Lane::NvmeRead => self.links.nvme_read.time(task.bytes),
                Lane::Compute | Lane::Optimizer => Seconds::ZERO,
            },
        }
    }
}

/// A simulated or measured pass over a [`StepPlan`]: one span for every task, in list order.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// The spans, in the order of the plan's tasks.
    pub spans: Vec<Span>,
}

/// Runs `plan` on `costs`: every lane is an ordered queue, a task starts when its lane is free and all tasks it waits for
/// have ended. Transfers that run at once slow each other down as [`Contention`] says.
///
/// # Panics
/// When `costs` has fewer layers than `plan`.
pub fn simulate(plan: &StepPlan, costs: &StepCosts) -> Timeline {
    spans(plan, costs, 0)
}

/// The same for the first micro-batch of a step that adds up several: what would bring in sums of streamed gradients moves nothing then
/// and takes no time.
///
/// # Panics
/// When `costs` has fewer layers than `plan`.
pub fn simulate_first(plan: &StepPlan, costs: &StepCosts) -> Timeline {
    spans(plan, costs, usize::MAX)
}

/// Two micro-batches without a pause in between, the first of a step and the one after it.
pub(crate) fn simulate_two(plan: &StepPlan, costs: &StepCosts) -> Timeline {
    spans(&plan.twice(), costs, plan.tasks().count())
}

/// The first `first` tasks are those of a step's first micro-batch.
fn spans(plan: &StepPlan, costs: &StepCosts, first: usize) -> Timeline {
    let pass = engine::run(plan, costs, first);
    let spans = plan
        .tasks()
        .enumerate()
        .map(|(t, task)| Span {
            name: plan.name(task).into(),
            lane: task.lane,
            start: Seconds(pass.start[t]),
            end: Seconds(pass.end[t]),
            bytes: engine::moved(plan, (t, task), first),
            blocked_on: pass.blocked_on[t],
        })
        .collect();
    Timeline { spans }
}

impl Timeline {
    /// End of the last span.
    pub fn total(&self) -> Seconds {
        self.spans.iter().map(|s| s.end).fold(Seconds::ZERO, latest)
    }

    /// From the start to the end of the last layer's forward, in every pass over the plan: [`Timeline::total`] less this is backward passes,
    /// the loss included.
    pub fn forward(&self, plan: &StepPlan) -> Seconds {
        let (mut from, mut forward) = (Seconds::ZERO, Seconds::ZERO);
        for pass in self.spans.chunks(plan.tasks().count().max(1)) {
            let ends = |is: &dyn Fn(&Task) -> bool| {
                let spans = plan.tasks().zip(pass).filter(|(task, _)| is(task));
                spans.map(|(_, span)| span.end).fold(from, latest)
            };
            let turn = ends(&|task| matches!(task.work, Work::Prologue | Work::Forward { .. }));
            let end = ends(&|task| task.lane == Lane::Compute);
            (from, forward) = (end, forward + (turn - from));
        }
        forward
    }

    /// Time the compute lane stood still for each link.
    ///
    /// Each gap on the compute lane is walked back from its end: the part in which the transfer waited for was running
    /// belongs to that transfer's link; before that, to whatever the transfer itself was waiting for, be it a transfer on
    /// another link or the one before it on its own.
    pub fn exposed(&self) -> ExposedSeconds {
        self.exposed_since(Seconds::ZERO)
    }

    /// The same for a pass whose first task could start at `start`.
    pub fn exposed_since(&self, start: Seconds) -> ExposedSeconds {
        let mut exposed = ExposedSeconds::default();
        for wait in self.exposed_waits(start) {
            let entry = match wait.lane {
                Lane::D2h => &mut exposed.d2h,
                Lane::H2d => &mut exposed.h2d,
                Lane::NvmeWrite => &mut exposed.nvme_write,
                Lane::NvmeRead => &mut exposed.nvme_read,
                Lane::Compute | Lane::Optimizer => continue,
            };
            *entry += wait.time;
        }
        exposed
    }

    /// The pieces that [`Timeline::exposed_since`] adds up: which transfer the compute lane waited for, and how long.
    pub fn exposed_waits(&self, start: Seconds) -> Vec<ExposedWait> {
        let mut before: Vec<Option<usize>> = Vec::with_capacity(self.spans.len());
        let mut last = [None; Lane::ALL.len()];
        for (index, span) in self.spans.iter().enumerate() {
            before.push(last[span.lane as usize]);
            last[span.lane as usize] = Some(index);
        }
        let mut waits = Vec::with_capacity(self.spans.len());
        for (index, span) in self.spans.iter().enumerate() {
            if span.lane != Lane::Compute {
                continue;
            }
            let idle_from = before[index].map_or(start, |b| self.spans[b].end);
            let mut cursor = span.start;
            let mut cause = span.blocked_on;
            let mut after = index;
            // Causes lie earlier in the list; spans from elsewhere that say otherwise explain nothing.
            while let Some(at) = cause.filter(|&at| at < after) {
                let other = &self.spans[at];
                if other.lane == Lane::Compute || cursor <= idle_from {
                    break;
                }
                let from = latest(idle_from, other.start);
                let to = if other.end < cursor { other.end } else { cursor };
                if to > from {
                    waits.push(ExposedWait { span: at, lane: other.lane, time: to - from });
                }
                cursor = if from < cursor { from } else { cursor };
                after = at;
                cause = other.blocked_on.or(before[at]);
            }
        }
        waits
    }

    /// Bytes of the plan's buffers live in a tier over time: `(from, bytes)` steps, ending with the step's end. A buffer is
    /// live from the start of the first task that touches it to the end of the last, a home throughout.
    pub fn occupancy(&self, plan: &StepPlan, tier: Tier) -> Vec<(Seconds, Bytes)> {
        let mut life: Vec<Option<(Seconds, Seconds)>> = vec![None; plan.buffers.len()];
        life[..plan.homes].fill(Some((Seconds::ZERO, self.total())));
        let mut task_index = 0;
        for op in &plan.ops {
            let Op::Run(task) = op else { continue };
            let Some(span) = self.spans.get(task_index) else { break };
            task_index += 1;
            for id in task.reads.iter().chain(&task.writes) {
                let entry = life[id.0].get_or_insert((span.start, span.end));
                entry.1 = latest(entry.1, span.end);
            }
        }
        let mut changes: Vec<(Seconds, i128)> = Vec::new();
        for (buffer, life) in plan.buffers.iter().zip(life) {
            if let (true, Some((from, to))) = (buffer.tier == tier, life) {
                changes.push((from, i128::from(buffer.bytes.get())));
                changes.push((to, -i128::from(buffer.bytes.get())));
            }
        }
        // At one instant, what ends goes before what starts.
        changes.sort_by(|a, b| a.0.get().total_cmp(&b.0.get()).then(a.1.cmp(&b.1)));
        let mut steps = vec![(Seconds::ZERO, Bytes::ZERO)];
        let mut live = 0i128;
        for (at, change) in changes {
            live += change;
            let bytes = Bytes(u64::try_from(live).unwrap_or(0));
            match steps.last_mut() {
                Some(last) if last.0 == at => last.1 = bytes,
                _ => steps.push((at, bytes)),
            }
        }
        let total = self.total();
        if steps.last().is_some_and(|last| last.0 < total) {
            steps.push((total, Bytes::ZERO));
        }
        steps
    }
}

/// A stretch in which the compute lane waited for one transfer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExposedWait {
    /// The transfer: index into [`Timeline::spans`].
    pub span: usize,
    /// Its link.
    pub lane: Lane,
    /// How long.
    pub time: Seconds,
}

fn latest(a: Seconds, b: Seconds) -> Seconds {
    if b > a { b } else { a }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{Execution, Schedule};
    use crate::units::Placement;

    /// Boundaries of 1 MB, layers of 10 ms forward and 20 ms backward, links that move one boundary in `link_ms`.
    fn case(letters: &str, prefetch: usize, link_ms: f64) -> (StepPlan, Timeline) {
        let bytes = vec![Bytes(1_000_000); letters.len()];
        let mut schedule = Schedule::named("test", &bytes, false);
        schedule.placement = letters.chars().map(|c| Placement::from_letter(c).unwrap()).collect();
        schedule.execution = Execution { prefetch, writes_in_flight: 2, staging_buffers: 2 };
        let plan = StepPlan::new(&schedule, &bytes).unwrap();
        let layers = letters.len() - 1;
        let rate = BytesPerSecond(1_000_000.0 / (link_ms / 1e3));
        let costs = StepCosts {
            prologue: Seconds::ZERO,
            forward: vec![Seconds::from_ms(10.0); layers],
            saving_forward: vec![Seconds::from_ms(12.0); layers],
            internals_forward: vec![Seconds::from_ms(10.0); layers],
            backward: vec![Seconds::from_ms(20.0); layers],
            epilogue: Seconds::ZERO,
            prologue_backward: Seconds::ZERO,
            links: LinkRates {
                d2h: rate,
                h2d: rate,
                nvme_write: rate,
                nvme_read: rate,
                ..LinkRates::default()
            },
        };
        let timeline = simulate(&plan, &costs);
        (plan, timeline)
    }

    fn ms(s: Seconds) -> f64 {
        (s.as_ms() * 1e6).round() / 1e6
    }

    #[test]
    fn all_in_hbm_costs_forward_resaving_forward_and_backward() {
        let (plan, timeline) = case("GGGG", 1, 1.0);
        assert_eq!(ms(timeline.total()), 3.0 * (10.0 + 10.0 + 20.0));
        assert_eq!(ms(timeline.forward(&plan)), 30.0);
        assert_eq!(ms(timeline.exposed().total()), 0.0);
    }

    #[test]
    fn a_skipped_boundary_costs_one_forward_more() {
        let (_, timeline) = case("G-GG", 1, 1.0);
        assert_eq!(ms(timeline.total()), 130.0);
    }

    #[test]
    fn reading_when_needed_exposes_the_whole_read_and_one_block_ahead_hides_it() {
        let (_, late) = case("GCGG", 0, 5.0);
        assert_eq!(ms(late.exposed().h2d), 5.0);
        assert_eq!(ms(late.total()), 125.0);
        let (_, early) = case("GCGG", 1, 5.0);
        assert_eq!(ms(early.exposed().total()), 0.0);
        assert_eq!(ms(early.total()), 120.0);
    }

    #[test]
    fn a_wait_for_nvme_is_split_between_disk_and_copy() {
        let (_, timeline) = case("GNGG", 0, 4.0);
        assert_eq!(ms(timeline.exposed().nvme_read), 4.0);
        assert_eq!(ms(timeline.exposed().h2d), 4.0);
        assert_eq!(ms(timeline.total()), 128.0);
    }

    #[test]
    fn a_link_a_hundred_times_slower_delays_but_ends() {
        let (plan, timeline) = case("CCNNCCG", 2, 1000.0);
        assert!(timeline.total().get() > 4.0);
        let peak = timeline.occupancy(&plan, Tier::Hbm).iter().map(|s| s.1).max().unwrap();
        assert!(peak <= plan.extents.hbm, "{peak} of {}", plan.extents.hbm);
    }

    #[test]
    fn checkpointing_everything_holds_all_boundaries_and_two_gradients_at_the_turn() {
        let (plan, _) = case("GGGGGG", 1, 1.0);
        // Six boundaries and the gradient of the last; the second gradient comes when the last boundary is gone.
        assert_eq!(plan.extents.hbm, Bytes(7 * 1_000_192));
        assert_eq!(plan.extents.host, Bytes::ZERO);
    }
}
