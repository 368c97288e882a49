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

use std::collections::VecDeque;
use std::fmt;

use crate::layout::{Lifetime, lay_out};
use crate::schedule::{Execution, Schedule};
use crate::span::Lane;
use crate::units::{BoundaryIndex, Bytes, LayerIndex, Placement, Tier};

/// Alignment of buffers in HBM: what vector loads and CUDA allocations expect.
const HBM_ALIGNMENT: u64 = 256;
/// Alignment of buffers in host RAM and on NVMe: a page, which suits `O_DIRECT` on drives with sectors up to that. Where a file
/// system asks for more, the store refuses the offsets.
const PAGE_ALIGNMENT: u64 = 4096;

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
    /// Runs a layer forward once more, only for its output.
    Recompute(LayerIndex),
    /// Loss, forward and backward: reads the last boundary, writes its gradient.
    Epilogue,
    /// Runs a layer backward. Unless `kept`, the layer first runs forward once more, saving its internals.
    Backward {
        /// Which layer.
        layer: LayerIndex,
        /// Whether its internals were kept by the forward pass.
        kept: bool,
    },
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

/// A step, ready to be simulated or carried out. As [`StepPlan::new`] makes it, every buffer is reserved once before its first
/// task and released once after its last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepPlan {
    /// Every buffer, in order of reservation.
    pub buffers: Vec<Buffer>,
    /// The list.
    pub ops: Vec<Op>,
    /// Bytes each tier needs for the buffers, whatever the timing.
    pub extents: TierBytes,
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
    /// Sizes that no address can express.
    #[error("the buffers in {0} add up to more than 2^64 bytes: check the boundary sizes")]
    TooLarge(Tier),
}

impl StepPlan {
    /// Derives the list of `schedule` for boundaries of the given sizes (`N + 1` of them).
    ///
    /// # Errors
    /// When schedule and sizes do not belong together, when boundary 0 is to be recomputed or the last boundary is not in
    /// HBM, and when the sizes add up to more than 64 bits hold.
    pub fn new(schedule: &Schedule, boundary_bytes: &[Bytes]) -> Result<StepPlan, StepError> {
        let layers = schedule.layers;
        let boundaries = layers.checked_add(1);
        if layers == 0
            || boundaries != Some(schedule.placement.len())
            || schedule.keep.len() != layers
            || boundaries != Some(boundary_bytes.len())
        {
            return Err(StepError::Shape {
                layers,
                placements: schedule.placement.len(),
                keeps: schedule.keep.len(),
                boundaries: boundary_bytes.len(),
            });
        }
        if schedule.placement[0] == Placement::Recompute {
            return Err(StepError::FirstRecomputed);
        }
        if schedule.placement[layers] != Placement::Hbm {
            return Err(StepError::LastNotInHbm(BoundaryIndex(layers)));
        }
        Builder::new(schedule, boundary_bytes).build()
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
            Work::Recompute(layer) => format!("recompute {layer}"),
            Work::Epilogue => "epilogue".into(),
            Work::Backward { layer, .. } => format!("backward {layer}"),
            Work::PrologueBackward => "prologue backward".into(),
            Work::Copy => match task.reads.first().map(|&id| self.buffer(id).content) {
                Some(Content::Boundary(i) | Content::Staging(i)) => format!("boundary {i} {}", task.lane),
                Some(Content::Gradient(i)) => format!("gradient {i} {}", task.lane),
                None => format!("copy {}", task.lane),
            },
        }
    }

    /// For every task, the earlier tasks it has to wait for: the writers of what it reads, the users of what it
    /// overwrites (earlier owners of the same range included), and the one it is paced by.
    pub fn waits(&self) -> Vec<Vec<TaskId>> {
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

/// Buffers that are released in the order they came once more than `limit` are held: the room for transfers in flight.
struct Ring {
    limit: usize,
    held: VecDeque<BufferId>,
}

impl Ring {
    fn new(limit: usize) -> Self {
        Ring { limit, held: VecDeque::new() }
    }
}

struct Builder<'a> {
    schedule: &'a Schedule,
    execution: Execution,
    boundary_bytes: &'a [Bytes],
    buffers: Vec<Buffer>,
    ops: Vec<Op>,
    tasks: usize,
    last_compute: Option<TaskId>,
    /// HBM buffer that holds boundary `i` now, if one does.
    in_hbm: Vec<Option<BufferId>>,
    /// Host or NVMe buffer that holds boundary `i` now, if one does.
    away: Vec<Option<BufferId>>,
    leaving: Ring,
    staging_out: Ring,
    staging_in: Ring,
}

impl<'a> Builder<'a> {
    fn new(schedule: &'a Schedule, boundary_bytes: &'a [Bytes]) -> Self {
        let execution = schedule.execution;
        Builder {
            schedule,
            execution,
            boundary_bytes,
            buffers: Vec::new(),
            ops: Vec::new(),
            tasks: 0,
            last_compute: None,
            in_hbm: vec![None; boundary_bytes.len()],
            away: vec![None; boundary_bytes.len()],
            leaving: Ring::new(execution.writes_in_flight),
            // A ring of n buffers holds n - 1 of them while the next one is filled.
            staging_out: Ring::new(execution.staging_buffers.saturating_sub(1)),
            staging_in: Ring::new(execution.staging_buffers.saturating_sub(1)),
        }
    }

    fn build(mut self) -> Result<StepPlan, StepError> {
        self.forward();
        let gradient = self.turn();
        self.backward(gradient);
        let extents = self.lay_out()?;
        Ok(StepPlan { buffers: self.buffers, ops: self.ops, extents })
    }

    fn reserve(&mut self, content: Content, tier: Tier) -> BufferId {
        let (Content::Boundary(i) | Content::Gradient(i) | Content::Staging(i)) = content;
        let id = BufferId(self.buffers.len());
        self.buffers.push(Buffer { content, tier, bytes: self.boundary_bytes[i.get()], offset: 0 });
        self.ops.push(Op::Reserve(id));
        id
    }

    fn release(&mut self, id: BufferId) {
        self.ops.push(Op::Release(id));
    }

    /// Hands `id` to a ring, which gives up its oldest buffer when it holds too many.
    fn retire(&mut self, ring: fn(&mut Self) -> &mut Ring, id: BufferId) {
        let ring = ring(self);
        ring.held.push_back(id);
        if ring.held.len() > ring.limit
            && let Some(oldest) = ring.held.pop_front()
        {
            self.release(oldest);
        }
    }

    fn flush(&mut self, ring: fn(&mut Self) -> &mut Ring) {
        for id in std::mem::take(&mut ring(self).held) {
            self.release(id);
        }
    }

    fn run(
        &mut self,
        work: Work,
        lane: Lane,
        reads: &[BufferId],
        writes: &[BufferId],
        after: Option<TaskId>,
    ) -> TaskId {
        let bytes = match work {
            Work::Copy => self.buffers[writes[0].0].bytes,
            _ => Bytes::ZERO,
        };
        let id = TaskId(self.tasks);
        self.tasks += 1;
        if lane == Lane::Compute {
            self.last_compute = Some(id);
        }
        self.ops.push(Op::Run(Task {
            work,
            lane,
            reads: reads.to_vec(),
            writes: writes.to_vec(),
            after,
            bytes,
        }));
        id
    }

    fn compute(&mut self, work: Work, reads: &[BufferId], writes: &[BufferId]) {
        self.run(work, Lane::Compute, reads, writes, None);
    }

    fn forward(&mut self) {
        let mut current = self.reserve(Content::Boundary(BoundaryIndex(0)), Tier::Hbm);
        self.compute(Work::Prologue, &[], &[current]);
        for l in 0..self.schedule.layers {
            let layer = LayerIndex(l);
            let placement = self.schedule.placement[l];
            self.send_away(layer.input(), placement, current);
            let output = self.reserve(Content::Boundary(layer.output()), Tier::Hbm);
            let keep = self.schedule.keep[l];
            self.compute(Work::Forward { layer, keep }, &[current], &[output]);
            match placement {
                Placement::Hbm => self.in_hbm[l] = Some(current),
                Placement::Recompute => self.release(current),
                Placement::Host | Placement::Nvme => self.retire(|b| &mut b.leaving, current),
            }
            current = output;
        }
        self.in_hbm[self.schedule.layers] = Some(current);
        self.flush(|b| &mut b.leaving);
        self.flush(|b| &mut b.staging_out);
    }

    /// Copies boundary `i` out of HBM if that is where it goes.
    fn send_away(&mut self, i: BoundaryIndex, placement: Placement, from: BufferId) {
        match placement {
            Placement::Hbm | Placement::Recompute => {}
            Placement::Host => {
                let copy = self.reserve(Content::Boundary(i), Tier::Host);
                self.run(Work::Copy, Lane::D2h, &[from], &[copy], None);
                self.away[i.get()] = Some(copy);
            }
            Placement::Nvme => {
                let staging = self.reserve(Content::Staging(i), Tier::Host);
                self.run(Work::Copy, Lane::D2h, &[from], &[staging], None);
                let copy = self.reserve(Content::Boundary(i), Tier::Nvme);
                self.run(Work::Copy, Lane::NvmeWrite, &[staging], &[copy], None);
                self.retire(|b| &mut b.staging_out, staging);
                self.away[i.get()] = Some(copy);
            }
        }
    }

    /// Brings boundary `i` back to HBM, not before the last task submitted to the compute lane so far has ended.
    fn bring_back(&mut self, i: BoundaryIndex) {
        let Some(copy) = self.away[i.get()].take() else { return };
        let pace = self.last_compute;
        let target = self.reserve(Content::Boundary(i), Tier::Hbm);
        if self.buffers[copy.0].tier == Tier::Nvme {
            let staging = self.reserve(Content::Staging(i), Tier::Host);
            self.run(Work::Copy, Lane::NvmeRead, &[copy], &[staging], pace);
            self.run(Work::Copy, Lane::H2d, &[staging], &[target], None);
            self.retire(|b| &mut b.staging_in, staging);
        } else {
            self.run(Work::Copy, Lane::H2d, &[copy], &[target], pace);
        }
        self.release(copy);
        self.in_hbm[i.get()] = Some(target);
    }

    /// Blocks in backward order: `(source, end)` with the source saved and everything between to be recomputed.
    fn blocks(&self) -> Vec<(usize, usize)> {
        let mut blocks = Vec::new();
        let mut end = self.schedule.layers;
        for i in (0..self.schedule.layers).rev() {
            if self.schedule.placement[i] != Placement::Recompute {
                blocks.push((i, end));
                end = i;
            }
        }
        blocks
    }

    /// Issues the reads that are due when block number `block` (in backward order; 0 also stands for the turn) starts.
    fn read_ahead(&mut self, blocks: &[(usize, usize)], next: &mut usize, block: usize) {
        while *next < blocks.len() && *next <= block {
            self.bring_back(BoundaryIndex(blocks[*next].0));
            *next += 1;
        }
    }

    fn turn(&mut self) -> BufferId {
        let blocks = self.blocks();
        let mut next = 0;
        if let Some(last) = self.execution.prefetch.checked_sub(1) {
            self.read_ahead(&blocks, &mut next, last);
        }
        let n = self.schedule.layers;
        let gradient = self.reserve(Content::Gradient(BoundaryIndex(n)), Tier::Hbm);
        if let Some(last) = self.in_hbm[n].take() {
            self.compute(Work::Epilogue, &[last], &[gradient]);
            self.release(last);
        }
        gradient
    }

    fn backward(&mut self, mut gradient: BufferId) {
        let blocks = self.blocks();
        let mut next = self.execution.prefetch.min(blocks.len());
        for (number, &(source, end)) in blocks.iter().enumerate() {
            self.read_ahead(&blocks, &mut next, number.saturating_add(self.execution.prefetch));
            for l in source..end - 1 {
                let output = self.reserve(Content::Boundary(BoundaryIndex(l + 1)), Tier::Hbm);
                if let Some(input) = self.in_hbm[l] {
                    self.compute(Work::Recompute(LayerIndex(l)), &[input], &[output]);
                }
                self.in_hbm[l + 1] = Some(output);
            }
            for l in (source..end).rev() {
                let layer = LayerIndex(l);
                let below = self.reserve(Content::Gradient(layer.input()), Tier::Hbm);
                if let Some(input) = self.in_hbm[l].take() {
                    let kept = self.schedule.keep[l];
                    self.compute(Work::Backward { layer, kept }, &[input, gradient], &[below]);
                    self.release(input);
                }
                self.release(gradient);
                gradient = below;
            }
        }
        self.compute(Work::PrologueBackward, &[gradient], &[]);
        self.release(gradient);
        self.flush(|b| &mut b.staging_in);
    }

    /// Gives every buffer its offset; returns the extent of each tier.
    fn lay_out(&mut self) -> Result<TierBytes, StepError> {
        let mut lifetimes = vec![(0, 0); self.buffers.len()];
        for (at, op) in self.ops.iter().enumerate() {
            match op {
                Op::Reserve(id) => lifetimes[id.0].0 = at,
                Op::Release(id) => lifetimes[id.0].1 = at,
                Op::Run(_) => {}
            }
        }
        let mut extents = TierBytes::default();
        for tier in Tier::ALL {
            let alignment = if tier == Tier::Hbm { HBM_ALIGNMENT } else { PAGE_ALIGNMENT };
            let members: Vec<usize> =
                (0..self.buffers.len()).filter(|&b| self.buffers[b].tier == tier).collect();
            // No offset exceeds this sum, so nothing below overflows.
            members
                .iter()
                .try_fold(0u64, |sum, &b| {
                    sum.checked_add(self.buffers[b].bytes.get().checked_next_multiple_of(alignment)?)
                })
                .ok_or(StepError::TooLarge(tier))?;
            let requests: Vec<Lifetime> = members
                .iter()
                .map(|&b| Lifetime {
                    from: lifetimes[b].0,
                    to: lifetimes[b].1,
                    bytes: self.buffers[b].bytes.align_up(alignment),
                })
                .collect();
            let (offsets, extent) = lay_out(&requests);
            for (&b, offset) in members.iter().zip(offsets) {
                self.buffers[b].offset = offset;
            }
            *extents.get_mut(tier) = extent;
        }
        Ok(extents)
    }
}

impl fmt::Display for TierBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "hbm {}, host {}, nvme {}", self.hbm, self.host, self.nvme)
    }
}
