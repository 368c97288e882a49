//! Whether a list of operations is that of a step: followed value by value, independently of what built it.

use crate::span::Lane;
use crate::step::build::alignment;
use crate::step::{Buffer, BufferId, Content, Op, StepError, StepPlan, StepSizes, Task, Work};
use crate::units::{BoundaryIndex, Bytes, LayerIndex, Tier};

/// Where the compute lane is in the step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Start,
    /// The next layer forward.
    Forward(usize),
    /// This many layers are still to run backward.
    Backward(usize),
    End,
}

/// What a buffer holds of what its content says.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Holds {
    Nothing,
    /// All of it; gradients of weights as far as earlier micro-batches added to them.
    Given,
    /// Gradients of weights with what this micro-batch adds.
    Added,
}

/// What a piece of arithmetic reads and writes, and where the step is after it, if it moves on.
struct Turn {
    then: Option<At>,
    reads: Vec<Content>,
    writes: Vec<Content>,
}

struct Checker<'a> {
    plan: &'a StepPlan,
    sizes: &'a StepSizes<'a>,
    layers: usize,
    /// Whether the list is an evaluation's.
    evaluation: bool,
    live: Vec<bool>,
    holds: Vec<Holds>,
    used: Vec<bool>,
    at: At,
    tasks: usize,
}

impl StepPlan {
    /// Follows the list and checks that it is a step of these sizes: every buffer lies within the extents and beside all others that are
    /// held, is reserved before and released after its tasks; every task runs on its lane, in the order of a step, and finds what it
    /// reads. Whoever carries out such a list needs no more than the extents.
    ///
    /// # Errors
    /// [`StepError::List`] names the first operation that is not as it should be.
    pub fn check(&self, sizes: &StepSizes<'_>) -> Result<(), StepError> {
        let layers = sizes.boundary.len().saturating_sub(1);
        sizes.check(layers)?;
        let count = self.buffers.len();
        let mut live = vec![false; count];
        live.iter_mut().take(self.homes).for_each(|home| *home = true);
        let mut checker = Checker {
            plan: self,
            sizes,
            layers,
            evaluation: !self.tasks().any(|task| matches!(task.work, Work::Backward(_))),
            // Weights are there, and gradients to add to where they add up.
            holds: live.iter().map(|&home| if home { Holds::Given } else { Holds::Nothing }).collect(),
            live,
            used: vec![false; count],
            at: At::Start,
            tasks: 0,
        };
        let refuse = |op, problem| StepError::List { op, problem };
        checker.homes().map_err(|problem| refuse(0, problem))?;
        for (at, op) in self.ops.iter().enumerate() {
            checker.follow(op).map_err(|problem| refuse(at, problem))?;
        }
        checker.end().map_err(|problem| refuse(self.ops.len(), problem))
    }
}

impl Checker<'_> {
    fn homes(&self) -> Result<(), String> {
        let streamed = self.sizes.streamed;
        let weights = (0..streamed.weights.len()).map(|l| Content::Weights(LayerIndex(l)));
        let gradients = (0..streamed.gradients.len()).map(|l| Content::WeightGradients(LayerIndex(l)));
        let wanted: Vec<Content> = weights.chain(gradients).collect();
        let homes = self.plan.buffers.get(..self.plan.homes).unwrap_or_default();
        if !homes.iter().map(|b| b.content).eq(wanted) || homes.iter().any(|b| b.tier != streamed.home()) {
            return Err("has other homes of weights and gradients than the sizes say".into());
        }
        (0..homes.len()).try_for_each(|b| self.place(BufferId(b)))?;
        // Whoever holds them knows where they are: one after the other from the bottom.
        let mut bottom = 0;
        for (b, home) in homes.iter().enumerate() {
            if home.offset != bottom {
                return Err(format!("has home {b} at offset {}, where it lies at {bottom}", home.offset));
            }
            bottom = bottom.saturating_add(home.bytes.align_up(alignment(home.tier)).get());
        }
        Ok(())
    }

    fn follow(&mut self, op: &Op) -> Result<(), String> {
        match op {
            Op::Reserve(id) => {
                self.known(*id)?;
                if std::mem::replace(&mut self.used[id.0], true) || self.plan.is_home(*id) {
                    return Err(format!("reserves buffer {} a second time", id.0));
                }
                self.live[id.0] = true;
                self.place(*id)
            }
            Op::Release(id) => {
                self.known(*id)?;
                if self.plan.is_home(*id) || !std::mem::replace(&mut self.live[id.0], false) {
                    return Err(format!("releases buffer {}, which is not held", id.0));
                }
                self.holds[id.0] = Holds::Nothing;
                Ok(())
            }
            Op::Run(task) => self.run(task),
        }
    }

    fn known(&self, id: BufferId) -> Result<&Buffer, String> {
        self.plan.buffers.get(id.0).ok_or_else(|| format!("names buffer {}, which there is not", id.0))
    }

    /// A buffer that is to be held: its size, and that its range is free and within the extent.
    fn place(&self, id: BufferId) -> Result<(), String> {
        let buffer = self.known(id)?;
        if buffer.bytes != self.size(buffer) {
            let (content, want) = (buffer.content, self.size(buffer));
            return Err(format!("has {} for {content:?} of {want}", buffer.bytes));
        }
        let alignment = alignment(buffer.tier);
        if !buffer.offset.is_multiple_of(alignment) {
            return Err(format!("puts buffer {} at {}, no multiple of {alignment}", id.0, buffer.offset));
        }
        let end = |b: &Buffer| b.offset.checked_add(b.bytes.get());
        let extent = self.plan.extents.get(buffer.tier).get();
        let Some(to) = end(buffer).filter(|&to| to <= extent) else {
            return Err(format!("puts buffer {} outside the {extent} bytes of {}", id.0, buffer.tier));
        };
        let overlaps = |(b, other): &(usize, &Buffer)| {
            *b != id.0
                && self.live[*b]
                && other.tier == buffer.tier
                && other.offset < to
                && end(other).is_none_or(|end| end > buffer.offset)
        };
        match self.plan.buffers.iter().enumerate().find(overlaps) {
            Some((other, _)) => Err(format!("puts buffer {} over buffer {other}, which is held", id.0)),
            None => Ok(()),
        }
    }

    /// What the content of a buffer takes.
    fn size(&self, buffer: &Buffer) -> Bytes {
        let of = |list: &[Bytes], l: usize| list.get(l).copied().unwrap_or_default();
        let sizes = self.sizes;
        match buffer.content {
            Content::Boundary(i) | Content::Gradient(i) | Content::Staging(i) => of(sizes.boundary, i.get()),
            Content::Internals(l) => of(sizes.saved, l.get()),
            // One of the two, by the work it is for; see `workspace`.
            Content::Workspace(l) => {
                let forward = of(&sizes.workspaces.forward, l.get());
                if buffer.bytes == forward { forward } else { of(&sizes.workspaces.backward, l.get()) }
            }
            Content::LossWorkspace => sizes.workspaces.loss,
            Content::Weights(l) => of(&sizes.streamed.weights, l.get()),
            Content::WeightGradients(l) => of(&sizes.streamed.gradients, l.get()),
        }
    }

    fn run(&mut self, task: &Task) -> Result<(), String> {
        for id in task.reads.iter().chain(&task.writes) {
            self.known(*id)?;
            if !self.live[id.0] {
                return Err(format!("uses buffer {}, which is not held", id.0));
            }
        }
        if task.after.is_some_and(|after| after.0 >= self.tasks) {
            return Err("waits for a task that comes later".into());
        }
        self.tasks += 1;
        if task.work == Work::Copy {
            return self.copy(task);
        }
        if task.lane != Lane::Compute || task.bytes != Bytes::ZERO {
            return Err("is arithmetic, but not on the compute lane or with bytes to move".into());
        }
        self.arithmetic(task)
    }

    fn copy(&mut self, task: &Task) -> Result<(), String> {
        let (&[from], &[to]) = (&task.reads[..], &task.writes[..]) else {
            return Err("is a copy, but not from one buffer to one".into());
        };
        let (source, target) = (self.known(from)?, self.known(to)?);
        let lane = match (source.tier, target.tier) {
            (Tier::Hbm, Tier::Host) => Lane::D2h,
            (Tier::Host, Tier::Hbm) => Lane::H2d,
            (Tier::Host, Tier::Nvme) => Lane::NvmeWrite,
            (Tier::Nvme, Tier::Host) => Lane::NvmeRead,
            _ => return Err("copies between tiers that no link joins".into()),
        };
        if task.lane != lane || task.bytes != target.bytes || source.bytes != target.bytes {
            return Err(format!("copies {} on {}, to a buffer of {}", task.bytes, task.lane, target.bytes));
        }
        let plain = |content| match content {
            Content::Staging(i) => Content::Boundary(i),
            other => other,
        };
        let moves = matches!(
            plain(source.content),
            Content::Boundary(_) | Content::Weights(_) | Content::WeightGradients(_)
        );
        if !moves || plain(source.content) != plain(target.content) {
            return Err(format!("copies {:?} over {:?}", source.content, target.content));
        }
        if matches!(source.content, Content::Weights(_)) && self.plan.is_home(to) {
            return Err("overwrites weights".into());
        }
        self.holds[to.0] = self.take(from)?;
        Ok(())
    }

    fn take(&self, id: BufferId) -> Result<Holds, String> {
        match self.holds[id.0] {
            Holds::Nothing => {
                Err(format!("reads {:?} in buffer {} before it is there", self.known(id)?.content, id.0))
            }
            holds => Ok(holds),
        }
    }

    fn arithmetic(&mut self, task: &Task) -> Result<(), String> {
        let Turn { then, reads, writes } = self.turn(task.work)?;
        self.wanted(reads, &task.reads, task.work)?;
        self.wanted(writes, &task.writes, task.work)?;
        for &id in &task.reads {
            self.take(id)?;
        }
        for &id in &task.writes {
            let Buffer { content, bytes, .. } = self.plan.buffers[id.0];
            self.holds[id.0] = match content {
                Content::Workspace(_) if bytes != self.size_of(content, task.work) => {
                    return Err(format!("has a workspace of {bytes}"));
                }
                Content::Workspace(_) | Content::LossWorkspace => Holds::Nothing,
                Content::WeightGradients(_) if self.sizes.accumulate && self.take(id)? == Holds::Added => {
                    return Err("adds to gradients twice".into());
                }
                Content::WeightGradients(_) => Holds::Added,
                _ => Holds::Given,
            };
        }
        self.at = then.unwrap_or(self.at);
        Ok(())
    }

    /// Whether these are the buffers of `contents` in HBM; what takes no bytes is not in the list.
    fn wanted(&self, mut contents: Vec<Content>, ids: &[BufferId], work: Work) -> Result<(), String> {
        let streamed = self.sizes.streamed;
        contents.retain(|&content| match content {
            Content::Boundary(_) | Content::Gradient(_) => true,
            Content::Weights(_) => !streamed.weights.is_empty(),
            Content::WeightGradients(_) => !streamed.gradients.is_empty(),
            _ => self.size_of(content, work) > Bytes::ZERO,
        });
        let found: Vec<Content> = ids.iter().map(|id| self.plan.buffers[id.0].content).collect();
        if found != contents {
            return Err(format!("has {found:?} where {work:?} takes {contents:?}"));
        }
        if ids.iter().any(|id| self.plan.buffers[id.0].tier != Tier::Hbm) {
            return Err("is arithmetic on what is not in HBM".into());
        }
        Ok(())
    }

    /// What the work takes, by the work it is for.
    fn size_of(&self, content: Content, work: Work) -> Bytes {
        let of = |list: &[Bytes], l: LayerIndex| list.get(l.get()).copied().unwrap_or_default();
        let spaces = self.sizes.workspaces;
        match (content, work) {
            (Content::Workspace(l), Work::Backward(_) | Work::Recompute { save: true, .. }) => {
                of(&spaces.backward, l)
            }
            (Content::Workspace(l), _) => of(&spaces.forward, l),
            _ => self.size(&Buffer { content, tier: Tier::Hbm, bytes: Bytes::ZERO, offset: 0 }),
        }
    }

    /// What the work takes now, or that it is not its turn.
    fn turn(&self, work: Work) -> Result<Turn, String> {
        let n = self.layers;
        let boundary = |i| Content::Boundary(BoundaryIndex(i));
        let gradient = |i| Content::Gradient(BoundaryIndex(i));
        let first = |its: bool| match its {
            true => Ok(()),
            false => Err(format!("is {work:?}, whose turn it is not")),
        };
        let within = |l: LayerIndex| l.get() < n;
        let (then, reads, writes) = match work {
            Work::Prologue => {
                first(self.at == At::Start)?;
                (Some(At::Forward(0)), vec![], vec![boundary(0)])
            }
            Work::Forward { layer, keep } => {
                let l = layer.get();
                first(within(layer) && self.at == At::Forward(l))?;
                let kept = keep.then_some(Content::Internals(layer));
                let writes = std::iter::once(boundary(l + 1)).chain(kept).chain([Content::Workspace(layer)]);
                (Some(At::Forward(l + 1)), vec![boundary(l), Content::Weights(layer)], writes.collect())
            }
            Work::Recompute { layer, save } => {
                first(matches!(self.at, At::Backward(_)) && within(layer))?;
                let l = layer.get();
                let made = if save { Content::Internals(layer) } else { boundary(l + 1) };
                (None, vec![boundary(l), Content::Weights(layer)], vec![made, Content::Workspace(layer)])
            }
            Work::Epilogue => {
                first(self.at == At::Forward(n))?;
                let (then, made) = match self.evaluation {
                    true => (At::End, None),
                    false => (At::Backward(n), Some(gradient(n))),
                };
                (Some(then), vec![boundary(n)], made.into_iter().chain([Content::LossWorkspace]).collect())
            }
            Work::Backward(layer) => {
                let l = layer.get();
                first(within(layer) && self.at == At::Backward(l + 1))?;
                let reads =
                    vec![boundary(l), gradient(l + 1), Content::Internals(layer), Content::Weights(layer)];
                let writes = vec![gradient(l), Content::WeightGradients(layer), Content::Workspace(layer)];
                (Some(At::Backward(l)), reads, writes)
            }
            Work::PrologueBackward => {
                first(self.at == At::Backward(0))?;
                (Some(At::End), vec![gradient(0)], vec![])
            }
            Work::Copy => return Err("is a copy".into()),
        };
        Ok(Turn { then, reads, writes })
    }

    fn end(&self) -> Result<(), String> {
        if self.at != At::End {
            return Err(format!("is missing: the step ends at {:?}", self.at));
        }
        let missing = |home: usize| {
            let gradients = matches!(self.plan.buffers[home].content, Content::WeightGradients(_));
            gradients && !self.evaluation && self.holds[home] != Holds::Added
        };
        if let Some(home) = (0..self.plan.homes).find(|&home| missing(home)) {
            return Err(format!("is missing: {:?} never reach their home", self.plan.buffers[home].content));
        }
        match (self.plan.homes..self.live.len()).find(|&b| self.live[b]) {
            Some(b) => Err(format!("is missing: buffer {b} is never released")),
            None => Ok(()),
        }
    }
}
