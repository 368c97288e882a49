//! A plan that has been checked, with everything looked up that carrying it out needs.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use lazy_model::step::{BufferId, Content, Op, StepPlan, Task, TaskId, Work};
use lazy_model::{Bytes, Lane, Tier};
use lazy_store::{Event, Extent};

use crate::calls::{Call, Calls};
use crate::error::RuntimeError;
use crate::layer::ParameterId;
use crate::model::{HeldId, Model};
use crate::notes::Notes;

/// A plan that an executor has checked and can run again and again.
pub struct Program {
    pub(crate) plan: StepPlan,
    pub(crate) ops: Vec<Operation>,
    pub(crate) tasks: Vec<Prepared>,
    pub(crate) calls: Arc<Calls>,
    pub(crate) evaluation: bool,
    pub(crate) finals: Arc<[Finals]>,
    /// Room for what a pass holds; kept, so that a step allocates nothing.
    pub(crate) extents: Vec<Option<Extent>>,
    pub(crate) events: Vec<Event>,
}

/// One entry of the list.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    Reserve(BufferId),
    Run(usize),
    Release(BufferId),
}

/// A buffer of the plan, or one that the executor holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Plan(usize),
    Held(HeldId),
}

/// A task with its buffers looked up.
pub(crate) struct Prepared {
    pub(crate) name: Arc<str>,
    pub(crate) lane: Lane,
    pub(crate) bytes: Bytes,
    pub(crate) after: Option<TaskId>,
    pub(crate) reads: Vec<Place>,
    pub(crate) writes: Vec<Place>,
    /// A copy; otherwise a call.
    pub(crate) copy: bool,
    /// It brings in gradients to be added to.
    pub(crate) brings_in: bool,
    /// Gradients that nothing brings in, and that this task adds to.
    pub(crate) starts_at_zero: Option<Place>,
    /// Whose weights it uses.
    pub(crate) owner: Option<usize>,
    /// Groups of parameters whose gradients are final after it, by their places in [`Program::finals`].
    pub(crate) finals: Range<usize>,
}

/// Parameters whose gradients lie in one buffer, and their weights, too.
pub(crate) type Finals = Vec<Final>;

/// A parameter whose gradient is final.
#[derive(Clone, Debug)]
pub(crate) struct Final {
    pub(crate) parameter: ParameterId,
    pub(crate) gradient: Option<(HeldId, Range<usize>)>,
    pub(crate) weights: Option<(HeldId, Range<usize>)>,
}

impl Final {
    /// The buffers of gradient and weights.
    pub(crate) fn places(&self) -> (Option<HeldId>, Option<HeldId>) {
        (self.gradient.as_ref().map(|g| g.0), self.weights.as_ref().map(|w| w.0))
    }
}

impl Program {
    /// The plan it carries out.
    pub fn plan(&self) -> &StepPlan {
        &self.plan
    }

    pub(crate) fn new(
        model: &Arc<Model>,
        plan: StepPlan,
        notes: &Arc<Notes>,
    ) -> Result<Program, RuntimeError> {
        plan.check(&model.sizes().step())?;
        let evaluation = !plan.tasks().any(|task| matches!(task.work, Work::Backward(_)));
        let builder = Builder { model, plan: &plan, evaluation };
        let mut calls = Vec::new();
        let mut tasks: Vec<Prepared> = Vec::new();
        let mut ops = Vec::with_capacity(plan.ops.len());
        for op in &plan.ops {
            ops.push(match op {
                Op::Reserve(id) => Operation::Reserve(*id),
                Op::Release(id) => Operation::Release(*id),
                Op::Run(task) => {
                    let (prepared, call) = builder.prepare(task);
                    tasks.push(prepared);
                    calls.push(call);
                    Operation::Run(tasks.len() - 1)
                }
            });
        }
        let finals = if evaluation { Arc::default() } else { builder.finals(&mut tasks).into() };
        let kept = model.layers.iter().map(|_| Mutex::default()).collect();
        let calls = Arc::new(Calls::new(Arc::clone(model), calls, kept, Arc::clone(notes), evaluation));
        let extents = plan.buffers.iter().map(|_| None).collect();
        let events = Vec::with_capacity(tasks.len());
        Ok(Program { plan, ops, tasks, calls, evaluation, finals, extents, events })
    }
}

struct Builder<'a> {
    model: &'a Model,
    plan: &'a StepPlan,
    evaluation: bool,
}

impl Builder<'_> {
    fn place(&self, id: BufferId) -> Place {
        if !self.plan.is_home(id) {
            return Place::Plan(id.0);
        }
        match self.content(id) {
            Content::Weights(l) => Place::Held(self.model.owners[l.get()].weights[0]),
            Content::WeightGradients(l) => Place::Held(self.model.owners[l.get()].gradients[0]),
            _ => Place::Plan(id.0),
        }
    }

    fn content(&self, id: BufferId) -> Content {
        self.plan.buffer(id).content
    }

    fn owner(&self, task: &Task) -> Option<usize> {
        let layers = self.model.layers.len();
        match task.work {
            Work::Prologue | Work::PrologueBackward => Some(layers),
            Work::Epilogue => Some(layers + 1),
            Work::Forward { layer, .. } | Work::Recompute { layer, .. } | Work::Backward(layer) => {
                Some(layer.get())
            }
            Work::Copy => match task.reads.first().map(|&id| self.content(id)) {
                Some(Content::Weights(l)) => Some(l.get()),
                _ => None,
            },
        }
    }

    fn prepare(&self, task: &Task) -> (Prepared, Call) {
        let owner = self.owner(task);
        let mut reads: Vec<Place> = task.reads.iter().map(|&id| self.place(id)).collect();
        let mut writes: Vec<Place> = task.writes.iter().map(|&id| self.place(id)).collect();
        let mut call = Call { work: task.work, ..Call::default() };
        let mut starts_at_zero = None;
        let copy = task.work == Work::Copy;
        if let Some(owner) = owner.filter(|_| !copy) {
            self.arguments(task, owner, &mut call, &mut reads, &mut writes);
            let streamed =
                task.writes.iter().position(|&id| matches!(self.content(id), Content::WeightGradients(_)));
            starts_at_zero = streamed.filter(|_| !self.model.sizes().accumulate).map(|i| writes[i]);
        }
        let prepared = Prepared {
            name: self.plan.name(task).into(),
            lane: task.lane,
            bytes: task.bytes,
            after: task.after,
            reads,
            writes,
            copy,
            brings_in: self.plan.brings_in_gradients(task),
            starts_at_zero,
            owner,
            finals: 0..0,
        };
        (prepared, call)
    }

    /// Which of what a task reads and writes is what to the layer; what the executor holds is added to both.
    fn arguments(
        &self,
        task: &Task,
        owner: usize,
        call: &mut Call,
        reads: &mut Vec<Place>,
        writes: &mut Vec<Place>,
    ) {
        let find = |ids: &[BufferId], wanted: fn(&Content) -> bool| {
            ids.iter().position(|&id| wanted(&self.content(id)))
        };
        call.owner = owner;
        call.x = find(&task.reads, |c| matches!(c, Content::Boundary(_)));
        call.dy = find(&task.reads, |c| matches!(c, Content::Gradient(_)));
        call.internals = find(&task.reads, |c| matches!(c, Content::Internals(_)));
        call.out = find(&task.writes, |c| matches!(c, Content::Boundary(_)));
        call.dx = find(&task.writes, |c| matches!(c, Content::Gradient(_)));
        call.save = find(&task.writes, |c| matches!(c, Content::Internals(_)));
        call.workspace = find(&task.writes, |c| matches!(c, Content::Workspace(_) | Content::LossWorkspace));
        let weights = find(&task.reads, |c| matches!(c, Content::Weights(_)));
        let gradients = find(&task.writes, |c| matches!(c, Content::WeightGradients(_)));
        let parts = &self.model.owners[owner];
        let held = |list: &mut Vec<Place>, id: HeldId| {
            list.push(Place::Held(id));
            list.len() - 1
        };
        for (i, &id) in parts.weights.iter().enumerate() {
            let streamed = weights.filter(|_| i == 0 && self.is_home(id));
            call.weights.push(streamed.unwrap_or_else(|| held(reads, id)));
        }
        let adds = match task.work {
            Work::Backward(_) | Work::PrologueBackward => true,
            Work::Epilogue => !self.evaluation,
            _ => false,
        };
        if adds {
            for (i, &id) in parts.gradients.iter().enumerate() {
                let streamed = gradients.filter(|_| i == 0 && self.is_home(id));
                call.gradients.push(streamed.unwrap_or_else(|| held(writes, id)));
            }
        }
        if task.work == Work::Epilogue {
            call.loss = Some(held(writes, self.model.loss()));
        }
    }

    fn is_home(&self, id: HeldId) -> bool {
        self.model.held[id].tier != Tier::Hbm
    }

    /// Notes with each task which gradients are final after it: those of what the last of their owners adds, once they are at home.
    fn finals(&self, tasks: &mut [Prepared]) -> Vec<Finals> {
        let mut after: Vec<Vec<Final>> = tasks.iter().map(|_| Vec::new()).collect();
        let plan_tasks: Vec<&Task> = self.plan.tasks().collect();
        for (&parameter, placed) in &self.model.parameters {
            let last = |is: &dyn Fn(&Task) -> bool| plan_tasks.iter().rposition(|task| is(task));
            let home = placed.gradient.as_ref().map(|(held, _)| *held).filter(|&held| self.is_home(held));
            let at = match home {
                Some(home) => last(&|task| task.writes.iter().any(|&id| self.place(id) == Place::Held(home))),
                None => last(&|task| {
                    let adds =
                        matches!(task.work, Work::Backward(_) | Work::PrologueBackward | Work::Epilogue);
                    adds && self.owner(task).is_some_and(|owner| placed.owners.contains(&owner))
                }),
            };
            if let Some(at) = at {
                let (gradient, weights) = (placed.gradient.clone(), placed.weights.clone());
                after[at].push(Final { parameter, gradient, weights });
            }
        }
        let mut groups: Vec<Finals> = Vec::new();
        for (task, after) in tasks.iter_mut().zip(after) {
            let first = groups.len();
            groups.extend(after.chunk_by(|a, b| a.places() == b.places()).map(<[Final]>::to_vec));
            task.finals = first..groups.len();
        }
        groups
    }
}
