//! One training step as an ordered list of operations, derived from a schedule.
//!
//! The list says which buffer is reserved, which task runs on which lane, what it reads and writes, and when a buffer
//! is released. Buffers get fixed offsets from their lifetimes *in list order*, and a task waits for the tasks that
//! last used the bytes it touches. So the extent promised here holds for every timing: a slow copy delays its
//! successors, it never makes a tier overflow, and since a task only waits for tasks before it in the list, nothing can
//! deadlock.
//!
//! What a step does with boundary `i` follows its placement. `hbm`: the buffer stays until the backward of layer `i`.
//! `host`: copied out beside the forward of layer `i`, copied back before its block runs backward. `nvme`: the same
//! through a staging buffer in host RAM. `recompute`: released after the forward of layer `i`; in the backward pass the
//! boundaries skipped inside a block are recomputed from the block's first boundary without saving, then each layer
//! runs once more, saving, just before its own backward.
//!
//! Layers, loss and streamed weights hold bytes too: with [`StepSizes`] that name them, kept internals, workspaces and weights get
//! ranges like every other buffer, so the extent of HBM is all that a step holds besides what is there throughout. Streamed weights
//! and gradients have a home in host RAM or on NVMe, at the lowest offsets there and in the order of the layers, whatever the
//! schedule: plans of one model can take turns over the same homes.
//!
//! When transfers start and end is counted in positions of the step, see [`Transfer`].

mod build;
mod check;
mod transfers;

use std::fmt;

use crate::schedule::Schedule;
use crate::span::Lane;
pub use crate::step::build::PAGE_ALIGNMENT;
pub use crate::step::transfers::{Transfer, TransferPlanner};
use crate::units::{BoundaryIndex, Bytes, LayerIndex, Placement, Tier};

/// Position of a buffer in [`StepPlan::buffers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub usize);

/// Position of a task among the tasks of a plan, in list order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(pub usize);

/// What a buffer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The activation at a boundary (in HBM, in host RAM or on NVMe: see the buffer's tier).
    Boundary(BoundaryIndex),
    /// The gradient of the loss with respect to a boundary.
    Gradient(BoundaryIndex),
    /// A boundary on its way to or from NVMe.
    Staging(BoundaryIndex),
    /// What a layer's backward needs of its forward: kept from one to the other, or made again in between.
    Internals(LayerIndex),
    /// What a layer needs while it runs.
    Workspace(LayerIndex),
    /// What the loss needs while it runs.
    LossWorkspace,
    /// Weights of a layer that are streamed: at home, on their way, or in HBM.
    Weights(LayerIndex),
    /// Gradients of a layer's weights that are streamed: in HBM, on their way, or at home.
    WeightGradients(LayerIndex),
}

/// A range of one tier, live from its reservation to its release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// What it holds.
    pub content: Content,
    /// Where it is.
    pub tier: Tier,
    /// Size.
    pub bytes: Bytes,
    /// Start within the tier's arena or spill file.
    pub offset: u64,
}

/// What a task does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Makes boundary 0 (the embedding).
    Prologue,
    /// Runs a layer forward; with `keep` its internals stay for the backward pass.
    Forward {
        /// Which layer.
        layer: LayerIndex,
        /// Whether its internals are kept.
        keep: bool,
    },
    /// Runs a layer forward once more: for its output, or with `save` for its internals, which its backward reads next.
    Recompute {
        /// Which layer.
        layer: LayerIndex,
        /// Whether for its internals.
        save: bool,
    },
    /// Loss, forward and backward: reads the last boundary, writes its gradient; in an evaluation forward alone.
    Epilogue,
    /// Runs a layer backward, its internals at hand.
    Backward(LayerIndex),
    /// Backward of the prologue: consumes the gradient of boundary 0.
    PrologueBackward,
    /// Moves bytes from the task's first read to its first write.
    Copy,
}

/// One piece of work on one lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// What it does.
    pub work: Work,
    /// The queue it runs on.
    pub lane: Lane,
    /// Buffers it reads.
    pub reads: Vec<BufferId>,
    /// Buffers it writes.
    pub writes: Vec<BufferId>,
    /// A task that must have ended before, besides those implied by the buffers: paces read-ahead.
    pub after: Option<TaskId>,
    /// Bytes it moves; zero for arithmetic.
    pub bytes: Bytes,
}

/// One entry of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    /// The buffer's range belongs to it from here on.
    Reserve(BufferId),
    /// The task is submitted.
    Run(Task),
    /// The buffer's range may be given to another buffer; its outstanding tasks are waited for by the next owner.
    Release(BufferId),
}

/// Bytes in each tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TierBytes {
    /// HBM.
    pub hbm: Bytes,
    /// Pinned host RAM.
    pub host: Bytes,
    /// NVMe.
    pub nvme: Bytes,
}

impl TierBytes {
    /// The entry of one tier.
    pub const fn get(&self, tier: Tier) -> Bytes {
        match tier {
            Tier::Hbm => self.hbm,
            Tier::Host => self.host,
            Tier::Nvme => self.nvme,
        }
    }

    /// The entry of one tier, to change.
    pub const fn get_mut(&mut self, tier: Tier) -> &mut Bytes {
        match tier {
            Tier::Hbm => &mut self.hbm,
            Tier::Host => &mut self.host,
            Tier::Nvme => &mut self.nvme,
        }
    }
}

/// The most bytes that layers and loss need while they run, besides boundaries, their gradients and internals. Empty lists: none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Workspaces {
    /// Each layer forward, whether or not it saves.
    pub forward: Vec<Bytes>,
    /// Each layer backward, its internals at hand; also while a layer that did not keep them makes them again.
    pub backward: Vec<Bytes>,
    /// Loss, forward and backward.
    pub loss: Bytes,
}

/// Weights and gradients that live in host RAM or on NVMe and pass through HBM a layer at a time. Empty lists: they stay in HBM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Streamed {
    /// Weights of each layer: copied in before every pass over the layer.
    pub weights: Vec<Bytes>,
    /// Weight gradients of each layer: copied out after its backward.
    pub gradients: Vec<Bytes>,
    /// Whether they live on NVMe; what is on its way then passes through host RAM.
    pub on_nvme: bool,
}

impl Streamed {
    /// Where they live.
    pub const fn home(&self) -> Tier {
        if self.on_nvme { Tier::Nvme } else { Tier::Host }
    }
}

/// Sizes of everything a step moves or holds for a while.
#[derive(Clone, Copy, Debug)]
pub struct StepSizes<'a> {
    /// Boundaries `0..=N`.
    pub boundary: &'a [Bytes],
    /// What each layer keeps where its internals are kept, `0..N`; empty: not counted.
    pub saved: &'a [Bytes],
    /// Layers and loss.
    pub workspaces: &'a Workspaces,
    /// Weights and gradients.
    pub streamed: &'a Streamed,
    /// Whether gradients add up over several micro-batches: those that are streamed are then brought in before they are added to.
    pub accumulate: bool,
}

impl StepSizes<'_> {
    /// Refuses sizes of another number of layers.
    fn check(&self, layers: usize) -> Result<(), StepError> {
        let (spaces, streamed) = (self.workspaces, self.streamed);
        let lists = [&spaces.forward, &spaces.backward, &streamed.weights, &streamed.gradients];
        let mut lengths = lists.iter().map(|list| list.len()).chain([self.saved.len()]);
        match lengths.find(|&n| n != 0 && n != layers) {
            Some(found) => Err(StepError::Sizes { found, layers }),
            None => Ok(()),
        }
    }

    /// HBM that every plan needs at some moment beside what is there throughout: for the loss with the last boundary and its gradient, or
    /// for the backward of the largest layer with its input and two gradients; beside either the weights of two layers where they are
    /// streamed, and beside a backward the gradients that arise and those of the layer above on their way out.
    pub fn least_hbm(&self) -> Bytes {
        let layers = self.boundary.len().saturating_sub(1);
        let last = layers.saturating_sub(1);
        let weights = at(&self.streamed.weights, last) + self.smallest_weights(last);
        let loss = at(self.boundary, layers) * 2 + self.workspaces.loss + weights;
        (0..layers).map(|layer| self.backward_hbm(layer)).fold(loss, Bytes::max)
    }

    /// The part of [`least_hbm`](Self::least_hbm) that the backward of one layer needs.
    pub fn backward_hbm(&self, layer: usize) -> Bytes {
        let Streamed { weights, gradients, on_nvme: _ } = self.streamed;
        let below = layer.checked_sub(1).filter(|_| self.accumulate);
        let coming = below.map_or(Bytes::ZERO, |below| at(gradients, below));
        let boundaries = at(self.boundary, layer) * 2 + at(self.boundary, layer + 1);
        let streams = at(weights, layer)
            + self.smallest_weights(layer)
            + coming
            + at(gradients, layer)
            + at(gradients, layer + 1);
        boundaries + at(self.saved, layer) + at(&self.workspaces.backward, layer) + streams
    }

    /// Which layer's weights come next depends on the placement, but it is one below.
    fn smallest_weights(&self, layer: usize) -> Bytes {
        self.streamed.weights.iter().take(layer).copied().min().unwrap_or_default()
    }
}

/// The entry of a list that may be empty for zero.
fn at(list: &[Bytes], l: usize) -> Bytes {
    list.get(l).copied().unwrap_or_default()
}

/// A step, ready to be simulated or carried out. As [`StepPlan::new`] makes it, every buffer that is no home is reserved once
/// before its first task and released once after its last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepPlan {
    /// Every buffer: homes, then the others in order of reservation.
    pub buffers: Vec<Buffer>,
    /// How many of the buffers are homes of streamed weights and gradients. They are there before and after the step, and the list
    /// neither reserves nor releases them.
    pub homes: usize,
    /// The list.
    pub ops: Vec<Op>,
    /// Bytes each tier needs for the buffers, whatever the timing.
    pub extents: TierBytes,
    waits: Vec<Vec<TaskId>>,
}

/// Why a schedule cannot be carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// Placement, keep flags and boundary sizes do not belong together.
    #[error(
        "the schedule is for {layers} layers with {placements} placements and {keeps} keep flags, but the model has \
         {boundaries} boundaries: make a schedule for this model"
    )]
    Shape {
        /// Layers the schedule names.
        layers: usize,
        /// Its placements.
        placements: usize,
        /// Its keep flags.
        keeps: usize,
        /// Boundaries of the model.
        boundaries: usize,
    },
    /// Boundary 0 has nothing below it to be recomputed from.
    #[error("boundary 0 cannot be recomputed: nothing lies below it; place it on hbm, host or nvme")]
    FirstRecomputed,
    /// The last boundary feeds the loss at once.
    #[error("boundary {0} is the last one and feeds the loss at once: its placement must be hbm")]
    LastNotInHbm(BoundaryIndex),
    /// Sizes of layers for another number of layers.
    #[error("there are sizes of {found} layers, the schedule is for {layers}: give one for each")]
    Sizes {
        /// Sizes found.
        found: usize,
        /// Layers of the schedule.
        layers: usize,
    },
    /// A transfer at a position at which it cannot happen.
    #[error("the schedule's transfer of boundary {boundary} {problem}: solve again")]
    Transfer {
        /// The boundary.
        boundary: BoundaryIndex,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A list of operations that is none of a step.
    #[error("operation {op} of the plan {problem}: derive the plan from a schedule again")]
    List {
        /// Position in the list; its length, where something is missing at the end.
        op: usize,
        /// What is wrong.
        problem: String,
    },
    /// Sizes that no address can express.
    #[error("the buffers in {0} add up to more than 2^64 bytes: check the boundary sizes")]
    TooLarge(Tier),
}

impl StepPlan {
    /// Derives the list of `schedule` for boundaries of the given sizes (`N + 1` of them) and nothing else that takes memory.
    ///
    /// # Errors
    /// As [`StepPlan::with_sizes`].
    pub fn new(schedule: &Schedule, boundary_bytes: &[Bytes]) -> Result<StepPlan, StepError> {
        let sizes = StepSizes {
            boundary: boundary_bytes,
            saved: &[],
            workspaces: &Workspaces::default(),
            streamed: &Streamed::default(),
            accumulate: false,
        };
        StepPlan::with_sizes(schedule, &sizes)
    }

    /// Derives the list of `schedule` for a step of the given sizes.
    ///
    /// # Errors
    /// When schedule and sizes do not belong together, when boundary 0 is to be recomputed or the last boundary is not in
    /// HBM, when a transfer is to happen where it cannot, and when the sizes add up to more than 64 bits hold.
    pub fn with_sizes(schedule: &Schedule, sizes: &StepSizes<'_>) -> Result<StepPlan, StepError> {
        let layers = schedule.layers;
        let boundaries = layers.checked_add(1);
        if layers == 0
            || boundaries != Some(schedule.placement.len())
            || schedule.keep.len() != layers
            || boundaries != Some(sizes.boundary.len())
        {
            return Err(StepError::Shape {
                layers,
                placements: schedule.placement.len(),
                keeps: schedule.keep.len(),
                boundaries: sizes.boundary.len(),
            });
        }
        sizes.check(layers)?;
        if schedule.placement[0] == Placement::Recompute {
            return Err(StepError::FirstRecomputed);
        }
        if schedule.placement[layers] != Placement::Hbm {
            return Err(StepError::LastNotInHbm(BoundaryIndex(layers)));
        }
        let mut plan = build::build(schedule, sizes)?;
        plan.waits = plan.derive_waits();
        Ok(plan)
    }

    /// The list of an evaluation: prologue, layers and loss forward, nothing kept. At no moment does it hold more of a tier than
    /// training does; where buffers differ in size, its extents may still be larger, since offsets can leave gaps.
    ///
    /// # Errors
    /// When sizes are not those of one model, and when they add up to more than 64 bits hold.
    pub fn evaluation(sizes: &StepSizes<'_>) -> Result<StepPlan, StepError> {
        let layers = sizes.boundary.len().saturating_sub(1);
        sizes.check(layers)?;
        let mut plan = build::evaluation(layers, sizes)?;
        plan.waits = plan.derive_waits();
        Ok(plan)
    }

    /// Whether a buffer is there before and after the step.
    pub fn is_home(&self, id: BufferId) -> bool {
        id.0 < self.homes
    }

    /// Whether a task brings in streamed gradients to be added to: the first micro-batch of a step, which starts from zero, leaves
    /// such tasks out.
    pub fn brings_in_gradients(&self, task: &Task) -> bool {
        task.work == Work::Copy
            && matches!(task.lane, Lane::H2d | Lane::NvmeRead)
            && task.writes.iter().any(|&id| matches!(self.buffer(id).content, Content::WeightGradients(_)))
    }

    /// The same list once more behind itself, as two micro-batches are submitted.
    pub(crate) fn twice(&self) -> StepPlan {
        let tasks = self.tasks().count();
        let again = |op: &Op| match op {
            Op::Run(task) => {
                let after = task.after.map(|TaskId(before)| TaskId(before + tasks));
                Op::Run(Task { after, ..task.clone() })
            }
            other => other.clone(),
        };
        let ops = self.ops.iter().cloned().chain(self.ops.iter().map(again)).collect();
        let mut plan = StepPlan { buffers: self.buffers.clone(), ops, waits: Vec::new(), ..*self };
        plan.waits = plan.derive_waits();
        plan
    }

    /// The tasks in list order; [`TaskId`] is the position in this sequence.
    pub fn tasks(&self) -> impl Iterator<Item = &Task> {
        self.ops.iter().filter_map(|op| match op {
            Op::Run(task) => Some(task),
            Op::Reserve(_) | Op::Release(_) => None,
        })
    }

    /// The buffer with this id.
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0]
    }

    /// A short name of a task: `forward 3`, `boundary 7 d2h`.
    pub fn name(&self, task: &Task) -> String {
        match task.work {
            Work::Prologue => "prologue".into(),
            Work::Forward { layer, .. } => format!("forward {layer}"),
            Work::Recompute { layer, save: false } => format!("recompute {layer}"),
            Work::Recompute { layer, save: true } => format!("recompute {layer} saving"),
            Work::Epilogue => "epilogue".into(),
            Work::Backward(layer) => format!("backward {layer}"),
            Work::PrologueBackward => "prologue backward".into(),
            Work::Copy => match task.reads.first().map(|&id| self.buffer(id).content) {
                Some(Content::Boundary(i) | Content::Staging(i)) => format!("boundary {i} {}", task.lane),
                Some(Content::Gradient(i)) => format!("gradient {i} {}", task.lane),
                Some(Content::Weights(l)) => format!("weights {l} {}", task.lane),
                Some(Content::WeightGradients(l)) => format!("weight gradients {l} {}", task.lane),
                Some(Content::Internals(l) | Content::Workspace(l)) => format!("layer {l} {}", task.lane),
                Some(Content::LossWorkspace) | None => format!("copy {}", task.lane),
            },
        }
    }

    /// For every task, the earlier tasks it has to wait for: the writers of what it reads, the users of what it
    /// overwrites (earlier owners of the same range included), and the one it is paced by.
    pub fn waits(&self) -> &[Vec<TaskId>] {
        &self.waits
    }

    fn derive_waits(&self) -> Vec<Vec<TaskId>> {
        let mut users = RangeUsers::default();
        let mut state: Vec<Hazards> = vec![Hazards::default(); self.buffers.len()];
        let mut all = Vec::new();
        for op in &self.ops {
            match op {
                Op::Reserve(id) => state[id.0].writers = users.take(self.buffer(*id)),
                Op::Release(id) => {
                    let hazards = std::mem::take(&mut state[id.0]);
                    users.put(self.buffer(*id), hazards.writers.into_iter().chain(hazards.readers).collect());
                }
                Op::Run(task) => {
                    let id = TaskId(all.len());
                    let mut waits: Vec<TaskId> = task.after.into_iter().collect();
                    for read in &task.reads {
                        waits.extend(&state[read.0].writers);
                        state[read.0].readers.push(id);
                    }
                    for write in &task.writes {
                        let hazards = &mut state[write.0];
                        waits.append(&mut hazards.writers);
                        waits.append(&mut hazards.readers);
                        hazards.writers.push(id);
                    }
                    waits.sort_unstable();
                    waits.dedup();
                    waits.retain(|&w| w != id);
                    all.push(waits);
                }
            }
        }
        all
    }
}

/// Tasks that last wrote a buffer (or used its range before it), and tasks that read it since.
#[derive(Clone, Default)]
struct Hazards {
    writers: Vec<TaskId>,
    readers: Vec<TaskId>,
}

/// Tasks that used ranges which are free now.
#[derive(Default)]
struct RangeUsers {
    ranges: Vec<(Tier, u64, u64, Vec<TaskId>)>,
}

impl RangeUsers {
    fn put(&mut self, buffer: &Buffer, tasks: Vec<TaskId>) {
        self.ranges.push((buffer.tier, buffer.offset, buffer.offset + buffer.bytes.get(), tasks));
    }

    /// The users of every free range that overlaps the buffer; what of those ranges lies outside it stays.
    fn take(&mut self, buffer: &Buffer) -> Vec<TaskId> {
        let (from, to) = (buffer.offset, buffer.offset + buffer.bytes.get());
        let mut tasks = Vec::new();
        let mut rest = Vec::with_capacity(self.ranges.len());
        for (tier, start, end, users) in self.ranges.drain(..) {
            if tier != buffer.tier || end <= from || to <= start {
                rest.push((tier, start, end, users));
                continue;
            }
            tasks.extend(&users);
            if start < from {
                rest.push((tier, start, from, users.clone()));
            }
            if to < end {
                rest.push((tier, to, end, users));
            }
        }
        self.ranges = rest;
        tasks
    }
}

impl fmt::Display for TierBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hbm {}, host {}, nvme {}", self.hbm, self.host, self.nvme)
    }
}
