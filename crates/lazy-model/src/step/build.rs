//! From a schedule to the list of operations.

use std::collections::VecDeque;

use crate::layout::{Lifetime, lay_out};
use crate::schedule::Schedule;
use crate::span::Lane;
use crate::step::transfers::{self, Transfer};
use crate::step::{
    Buffer, BufferId, Content, Op, StepError, StepPlan, StepSizes, Task, TaskId, TierBytes, Work, at,
};
use crate::units::{BoundaryIndex, Bytes, LayerIndex, Placement, Tier};

/// Alignment of buffers in HBM: what vector loads and CUDA allocations expect.
const HBM_ALIGNMENT: u64 = 256;
/// Alignment of buffers in host RAM and on NVMe: a page, which suits `O_DIRECT` on drives with sectors up to that. Where a file
/// system asks for more, the store refuses the offsets.
pub const PAGE_ALIGNMENT: u64 = 4096;

/// What offsets in a tier are multiples of.
pub(super) const fn alignment(tier: Tier) -> u64 {
    match tier {
        Tier::Hbm => HBM_ALIGNMENT,
        Tier::Host | Tier::Nvme => PAGE_ALIGNMENT,
    }
}

/// The list of a schedule whose shape has been checked.
pub(super) fn build(schedule: &Schedule, sizes: &StepSizes<'_>) -> Result<StepPlan, StepError> {
    let n = schedule.layers;
    let transfers = match &schedule.transfers {
        Some(given) => given.clone(),
        None => transfers::by_distance(schedule),
    };
    transfers::check(schedule, &transfers)?;
    // Read-ahead that is counted in blocks has its staging buffers in a ring; positions say themselves how long one is needed.
    let ring = schedule.transfers.is_none().then_some(schedule.execution.staging_buffers.saturating_sub(1));
    let mut builder = Builder::new(schedule, sizes, &transfers, ring.unwrap_or(0));
    let backward = builder.blocks.iter().flat_map(|&(s, t)| (s..t - 1).chain((s..t).rev()));
    let uses = (0..n).chain(backward).collect();
    builder.open_homes(uses);
    builder.plan_transfers();
    builder.forward();
    let gradient = builder.turn();
    builder.backward(gradient);
    builder.finish()
}

/// The list of an evaluation of that many layers.
pub(super) fn evaluation(layers: usize, sizes: &StepSizes<'_>) -> Result<StepPlan, StepError> {
    let mut schedule = Schedule::named("evaluation", sizes.boundary, false);
    // What is to be recomputed goes once the layer above has read it; here for good.
    schedule.placement[..layers].fill(Placement::Recompute);
    let transfers = vec![None; layers];
    let mut builder = Builder::new(&schedule, sizes, &transfers, 0);
    builder.open_homes((0..layers).collect());
    builder.forward();
    builder.evaluate();
    builder.finish()
}

/// Buffers that are released in the order they came once more than `limit` are held.
struct Ring {
    limit: usize,
    held: VecDeque<BufferId>,
}

impl Ring {
    fn new(limit: usize) -> Self {
        Ring { limit, held: VecDeque::new() }
    }
}

/// Streamed weights or gradients: the order in which layers use them, and what is in HBM.
#[derive(Default)]
struct Stream {
    homes: Vec<BufferId>,
    /// Layers in the order of the passes over them; a layer that runs twice in a row is there once.
    uses: Vec<usize>,
    at: usize,
    /// What is there for `uses[at]` and what follows.
    loaded: VecDeque<BufferId>,
}

/// What happens to a boundary at the start of a position.
#[derive(Clone, Copy)]
enum Start {
    Out(usize),
    In(usize),
}

struct Builder<'a> {
    schedule: &'a Schedule,
    sizes: &'a StepSizes<'a>,
    transfers: &'a [Option<Transfer>],
    /// Blocks in backward order: source and end.
    blocks: Vec<(usize, usize)>,
    buffers: Vec<Buffer>,
    ops: Vec<Op>,
    tasks: usize,
    last_compute: Option<TaskId>,
    /// HBM buffer that holds boundary `i` now, if one does.
    in_hbm: Vec<Option<BufferId>>,
    /// Host or NVMe buffer that holds boundary `i` now, if one does.
    away: Vec<Option<BufferId>>,
    internals: Vec<Option<BufferId>>,
    /// Staging buffer of boundary `i` on its way in.
    staged: Vec<Option<BufferId>>,
    /// Transfers by the position at whose start they are submitted.
    starts: Vec<Vec<Start>>,
    /// Buffers by the position after which they are released.
    ends: Vec<Vec<BufferId>>,
    staging_in: Ring,
    weights: Stream,
    gradients: Stream,
    gradients_out: Ring,
    /// Staging of what is streamed from NVMe, and of what is streamed there.
    streams_in: Ring,
    streams_out: Ring,
}

impl<'a> Builder<'a> {
    fn new(
        schedule: &'a Schedule,
        sizes: &'a StepSizes<'a>,
        transfers: &'a [Option<Transfer>],
        staging_in: usize,
    ) -> Self {
        let n = schedule.layers;
        Builder {
            schedule,
            sizes,
            transfers,
            blocks: transfers::blocks(schedule),
            buffers: Vec::new(),
            ops: Vec::new(),
            tasks: 0,
            last_compute: None,
            in_hbm: vec![None; n + 1],
            away: vec![None; n],
            internals: vec![None; n],
            staged: vec![None; n],
            starts: vec![Vec::new(); 2 * n + 1],
            ends: vec![Vec::new(); 2 * n + 1],
            staging_in: Ring::new(staging_in),
            weights: Stream::default(),
            gradients: Stream::default(),
            gradients_out: Ring::new(1),
            streams_in: Ring::new(1),
            streams_out: Ring::new(1),
        }
    }

    fn plan_transfers(&mut self) {
        for (i, transfer) in self.transfers.iter().enumerate() {
            if let Some(t) = transfer {
                self.starts[t.out].push(Start::Out(i));
            }
        }
        // What is needed first is read first.
        for (i, transfer) in self.transfers.iter().enumerate().rev() {
            if let Some(t) = transfer {
                self.starts[t.read].push(Start::In(i));
                if t.back != t.read {
                    self.starts[t.back].push(Start::In(i));
                }
            }
        }
    }

    /// What is still held goes, and every buffer gets its place.
    fn finish(mut self) -> Result<StepPlan, StepError> {
        self.flush(|b| &mut b.staging_in.held);
        self.flush(|b| &mut b.gradients_out.held);
        self.flush(|b| &mut b.streams_in.held);
        self.flush(|b| &mut b.streams_out.held);
        self.flush(|b| &mut b.weights.loaded);
        let extents = self.lay_out()?;
        let homes = self.weights.homes.len() + self.gradients.homes.len();
        Ok(StepPlan { buffers: self.buffers, homes, ops: self.ops, extents, waits: Vec::new() })
    }

    fn reserve(&mut self, content: Content, tier: Tier, bytes: Bytes) -> BufferId {
        let id = BufferId(self.buffers.len());
        self.buffers.push(Buffer { content, tier, bytes, offset: 0 });
        self.ops.push(Op::Reserve(id));
        id
    }

    fn boundary(&mut self, i: usize, tier: Tier) -> BufferId {
        self.reserve(Content::Boundary(BoundaryIndex(i)), tier, self.sizes.boundary[i])
    }

    fn gradient(&mut self, i: usize) -> BufferId {
        self.reserve(Content::Gradient(BoundaryIndex(i)), Tier::Hbm, self.sizes.boundary[i])
    }

    fn staging(&mut self, i: usize) -> BufferId {
        self.reserve(Content::Staging(BoundaryIndex(i)), Tier::Host, self.sizes.boundary[i])
    }

    /// Reserves HBM for work that needs some.
    fn workspace(&mut self, content: Content, bytes: Bytes) -> Option<BufferId> {
        (bytes > Bytes::ZERO).then(|| self.reserve(content, Tier::Hbm, bytes))
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

    fn flush(&mut self, held: fn(&mut Self) -> &mut VecDeque<BufferId>) {
        for id in std::mem::take(held(self)) {
            self.release(id);
        }
    }

    fn run(
        &mut self,
        work: Work,
        lane: Lane,
        reads: Vec<BufferId>,
        writes: Vec<BufferId>,
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
        self.ops.push(Op::Run(Task { work, lane, reads, writes, after, bytes }));
        id
    }

    fn copy(&mut self, lane: Lane, from: BufferId, to: BufferId, after: Option<TaskId>) {
        self.run(Work::Copy, lane, vec![from], vec![to], after);
    }

    /// Arithmetic; what it needs besides what it reads and writes comes last, so that layers find the rest at fixed places.
    fn compute(
        &mut self,
        work: Work,
        mut reads: Vec<BufferId>,
        mut writes: Vec<BufferId>,
        also_read: impl IntoIterator<Item = BufferId>,
        also_written: impl IntoIterator<Item = BufferId>,
    ) {
        reads.extend(also_read);
        writes.extend(also_written);
        self.run(work, Lane::Compute, reads, writes, None);
    }

    fn start_of(&mut self, position: usize) {
        for start in std::mem::take(&mut self.starts[position]) {
            match start {
                Start::Out(i) => self.send_away(i),
                Start::In(i) => self.bring_back(i, position),
            }
        }
    }

    fn end_of(&mut self, position: usize) {
        for id in std::mem::take(&mut self.ends[position]) {
            self.release(id);
        }
    }

    fn forward(&mut self) {
        let first = self.boundary(0, Tier::Hbm);
        self.in_hbm[0] = Some(first);
        self.compute(Work::Prologue, vec![], vec![first], None, None);
        for l in 0..self.schedule.layers {
            let layer = LayerIndex(l);
            self.start_of(l);
            let weights = self.weights_of(l);
            let output = self.boundary(l + 1, Tier::Hbm);
            let keep = self.schedule.keep[l];
            let kept = if keep { self.workspace(Content::Internals(layer), self.saved(l)) } else { None };
            self.internals[l] = kept;
            let space = self.workspace(Content::Workspace(layer), at(&self.sizes.workspaces.forward, l));
            let input: Vec<BufferId> = self.in_hbm[l].into_iter().collect();
            let work = Work::Forward { layer, keep };
            self.compute(work, input, vec![output], weights, kept.into_iter().chain(space));
            if let Some(id) = space {
                self.release(id);
            }
            self.in_hbm[l + 1] = Some(output);
            if self.schedule.placement[l] == Placement::Recompute
                && let Some(id) = self.in_hbm[l].take()
            {
                self.release(id);
            }
            self.end_of(l);
        }
    }

    fn saved(&self, l: usize) -> Bytes {
        at(self.sizes.saved, l)
    }

    /// Copies boundary `i` out of HBM; its buffer there stays to the end of the position its transfer names.
    fn send_away(&mut self, i: usize) {
        let (Some(transfer), Some(from)) = (self.transfers[i], self.in_hbm[i]) else { return };
        if self.schedule.placement[i] == Placement::Nvme {
            let staging = self.staging(i);
            self.copy(Lane::D2h, from, staging, None);
            let copy = self.boundary(i, Tier::Nvme);
            self.copy(Lane::NvmeWrite, staging, copy, None);
            self.ends[transfer.stored].push(staging);
            self.away[i] = Some(copy);
        } else {
            let copy = self.boundary(i, Tier::Host);
            self.copy(Lane::D2h, from, copy, None);
            self.away[i] = Some(copy);
        }
        self.ends[transfer.gone].push(from);
    }

    /// Brings boundary `i` back to HBM, or from NVMe nearer to it, not before the last task submitted to the compute lane so far has
    /// ended.
    fn bring_back(&mut self, i: usize, position: usize) {
        let Some(transfer) = self.transfers[i] else { return };
        let pace = self.last_compute;
        if self.schedule.placement[i] == Placement::Nvme
            && position == transfer.read
            && let Some(copy) = self.away[i].take()
        {
            let staging = self.staging(i);
            self.copy(Lane::NvmeRead, copy, staging, pace);
            self.release(copy);
            self.staged[i] = Some(staging);
        }
        if position != transfer.back {
            return;
        }
        let target = self.boundary(i, Tier::Hbm);
        if let Some(staging) = self.staged[i].take() {
            self.copy(Lane::H2d, staging, target, pace);
            self.retire(|b| &mut b.staging_in, staging);
        } else if let Some(copy) = self.away[i].take() {
            self.copy(Lane::H2d, copy, target, pace);
            self.release(copy);
        }
        self.in_hbm[i] = Some(target);
    }

    fn turn(&mut self) -> BufferId {
        let n = self.schedule.layers;
        self.start_of(n);
        let gradient = self.gradient(n);
        let space = self.workspace(Content::LossWorkspace, self.sizes.workspaces.loss);
        if let Some(last) = self.in_hbm[n].take() {
            self.compute(Work::Epilogue, vec![last], vec![gradient], None, space);
            if let Some(id) = space {
                self.release(id);
            }
            self.release(last);
        }
        self.end_of(n);
        gradient
    }

    fn backward(&mut self, mut gradient: BufferId) {
        let n = self.schedule.layers;
        for (source, end) in std::mem::take(&mut self.blocks) {
            for l in (source..end).rev() {
                self.start_of(2 * n - l);
                if l + 1 == end {
                    (source..l).for_each(|below| self.recompute(below));
                }
                gradient = self.backward_of(l, gradient);
                self.end_of(2 * n - l);
            }
        }
        self.compute(Work::PrologueBackward, vec![gradient], vec![], None, None);
        self.release(gradient);
    }

    /// The loss alone.
    fn evaluate(&mut self) {
        let space = self.workspace(Content::LossWorkspace, self.sizes.workspaces.loss);
        if let Some(last) = self.in_hbm[self.schedule.layers].take() {
            self.compute(Work::Epilogue, vec![last], vec![], None, space);
            self.release(last);
        }
        if let Some(id) = space {
            self.release(id);
        }
    }

    fn recompute(&mut self, l: usize) {
        let weights = self.weights_of(l);
        let output = self.boundary(l + 1, Tier::Hbm);
        let layer = LayerIndex(l);
        let space = self.workspace(Content::Workspace(layer), at(&self.sizes.workspaces.forward, l));
        if let Some(input) = self.in_hbm[l] {
            let work = Work::Recompute { layer, save: false };
            self.compute(work, vec![input], vec![output], weights, space);
        }
        if let Some(id) = space {
            self.release(id);
        }
        self.in_hbm[l + 1] = Some(output);
    }

    fn backward_of(&mut self, l: usize, gradient: BufferId) -> BufferId {
        let layer = LayerIndex(l);
        let weights = self.weights_of(l);
        let below = self.gradient(l);
        let kept = self.schedule.keep[l];
        let internals = match self.internals[l].take() {
            None if !kept => self.workspace(Content::Internals(layer), self.saved(l)),
            kept => kept,
        };
        let space = self.workspace(Content::Workspace(layer), at(&self.sizes.workspaces.backward, l));
        let weight_gradients = self.gradients_of_next();
        if let Some(input) = self.in_hbm[l].take() {
            if !kept {
                let work = Work::Recompute { layer, save: true };
                let also_written = internals.into_iter().chain(space);
                self.compute(work, vec![input], vec![], weights, also_written);
            }
            let also_read = internals.into_iter().chain(weights);
            let also_written = weight_gradients.into_iter().chain(space);
            self.compute(Work::Backward(layer), vec![input, gradient], vec![below], also_read, also_written);
            self.release(input);
        }
        for id in internals.into_iter().chain(space) {
            self.release(id);
        }
        self.release(gradient);
        if let Some(id) = weight_gradients {
            self.send_home(Content::WeightGradients(layer), id, self.gradients.homes[l]);
            self.retire(|b| &mut b.gradients_out, id);
        }
        below
    }

    /// Homes of streamed weights and gradients, and the order in which layers use the weights in the passes.
    fn open_homes(&mut self, uses: Vec<usize>) {
        let streamed = self.sizes.streamed;
        let mut home = |content, bytes| {
            let id = BufferId(self.buffers.len());
            self.buffers.push(Buffer { content, tier: streamed.home(), bytes, offset: 0 });
            id
        };
        for (l, &bytes) in streamed.weights.iter().enumerate() {
            self.weights.homes.push(home(Content::Weights(LayerIndex(l)), bytes));
        }
        for (l, &bytes) in streamed.gradients.iter().enumerate() {
            self.gradients.homes.push(home(Content::WeightGradients(LayerIndex(l)), bytes));
        }
        if !streamed.weights.is_empty() {
            self.weights.uses = uses;
            self.weights.uses.dedup();
        }
        if !streamed.gradients.is_empty() {
            self.gradients.uses = (0..self.schedule.layers).rev().collect();
        }
    }

    /// The weights of `layer` where they are streamed; those of the layer that runs next are on their way, too.
    fn weights_of(&mut self, layer: usize) -> Option<BufferId> {
        if self.weights.uses.is_empty() {
            return None;
        }
        if self.weights.uses[self.weights.at] != layer {
            self.weights.at += 1;
            if let Some(done) = self.weights.loaded.pop_front() {
                self.release(done);
            }
        }
        while self.weights.loaded.len() < 2
            && let Some(&next) = self.weights.uses.get(self.weights.at + self.weights.loaded.len())
        {
            let content = Content::Weights(LayerIndex(next));
            let target = self.reserve(content, Tier::Hbm, self.sizes.streamed.weights[next]);
            self.bring_in(content, self.weights.homes[next], target);
            self.weights.loaded.push_back(target);
        }
        self.weights.loaded.front().copied()
    }

    /// Where the gradients of the next layer arise, if they are streamed. If they add up, what they are added to is there, and that of the layer
    /// after is on its way.
    fn gradients_of_next(&mut self) -> Option<BufferId> {
        let ahead = if self.sizes.accumulate { 2 } else { 1 };
        while self.gradients.loaded.len() < ahead
            && let Some(&next) = self.gradients.uses.get(self.gradients.at)
        {
            let content = Content::WeightGradients(LayerIndex(next));
            let target = self.reserve(content, Tier::Hbm, self.sizes.streamed.gradients[next]);
            if self.sizes.accumulate {
                self.bring_in(content, self.gradients.homes[next], target);
            }
            self.gradients.loaded.push_back(target);
            self.gradients.at += 1;
        }
        self.gradients.loaded.pop_front()
    }

    fn bring_in(&mut self, content: Content, home: BufferId, target: BufferId) {
        if !self.sizes.streamed.on_nvme {
            return self.copy(Lane::H2d, home, target, None);
        }
        let staging = self.reserve(content, Tier::Host, self.buffers[home.0].bytes);
        self.copy(Lane::NvmeRead, home, staging, None);
        self.copy(Lane::H2d, staging, target, None);
        self.retire(|b| &mut b.streams_in, staging);
    }

    fn send_home(&mut self, content: Content, from: BufferId, home: BufferId) {
        if !self.sizes.streamed.on_nvme {
            return self.copy(Lane::D2h, from, home, None);
        }
        let staging = self.reserve(content, Tier::Host, self.buffers[home.0].bytes);
        self.copy(Lane::D2h, from, staging, None);
        self.copy(Lane::NvmeWrite, staging, home, None);
        self.retire(|b| &mut b.streams_out, staging);
    }

    /// Gives every buffer its offset; returns the extent of each tier.
    fn lay_out(&mut self) -> Result<TierBytes, StepError> {
        let homes = self.weights.homes.len() + self.gradients.homes.len();
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
            let alignment = alignment(tier);
            let members: Vec<usize> =
                (0..self.buffers.len()).filter(|&b| self.buffers[b].tier == tier).collect();
            // No offset exceeds this sum, so nothing below overflows.
            members
                .iter()
                .try_fold(0u64, |sum, &b| {
                    sum.checked_add(self.buffers[b].bytes.get().checked_next_multiple_of(alignment)?)
                })
                .ok_or(StepError::TooLarge(tier))?;
            // Homes are there throughout: at the bottom, one after the other, they cost no plan anything.
            let (at_home, members): (Vec<usize>, Vec<usize>) = members.into_iter().partition(|&b| b < homes);
            let mut bottom = 0;
            for b in at_home {
                self.buffers[b].offset = bottom;
                bottom += self.buffers[b].bytes.align_up(alignment).get();
            }
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
                self.buffers[b].offset = bottom + offset;
            }
            *extents.get_mut(tier) = Bytes(bottom) + extent;
        }
        Ok(extents)
    }
}
