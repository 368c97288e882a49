//! The arithmetic of a program's tasks: what the store calls when a task's turn has come.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use lazy_model::LayerIndex;
use lazy_model::step::Work;
use lazy_store::{Access, BoxError, Routine, Stream, StreamAccess};
use smallvec::SmallVec;

use crate::layer::{Backward, Context, Forward, LayerError, Loss, Phase, Saved};
use crate::model::Model;
use crate::notes::Notes;
use crate::view::{FEW, Grads, Input, Output, Weights};

/// What a task's buffers are to the layer: positions among its reads and writes.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) work: Work,
    pub(crate) owner: usize,
    pub(crate) x: Option<usize>,
    pub(crate) dy: Option<usize>,
    pub(crate) internals: Option<usize>,
    pub(crate) weights: Vec<usize>,
    pub(crate) out: Option<usize>,
    pub(crate) dx: Option<usize>,
    pub(crate) save: Option<usize>,
    pub(crate) workspace: Option<usize>,
    pub(crate) loss: Option<usize>,
    pub(crate) gradients: Vec<usize>,
}

impl Default for Call {
    fn default() -> Self {
        Call {
            work: Work::Copy,
            owner: 0,
            x: None,
            dy: None,
            internals: None,
            weights: Vec::new(),
            out: None,
            dx: None,
            save: None,
            workspace: None,
            loss: None,
            gradients: Vec::new(),
        }
    }
}

/// What the calls of a step have in common.
#[derive(Clone, Default)]
pub(crate) struct Common {
    pub(crate) seed: u64,
    pub(crate) step: u64,
    pub(crate) inputs: Vec<Arc<dyn Any + Send + Sync>>,
}

/// The calls of a program.
pub(crate) struct Calls {
    model: Arc<Model>,
    calls: Vec<Call>,
    /// What forwards saved outside the store, by layer.
    kept: Vec<Mutex<Saved>>,
    notes: Arc<Notes>,
    evaluation: bool,
    common: RwLock<Common>,
}

/// The buffers of a task, wherever they are.
struct Buffers<'a> {
    reads: SmallVec<[Input<'a>; FEW]>,
    writes: SmallVec<[Option<Output<'a>>; FEW]>,
}

impl<'a> Buffers<'a> {
    fn read(&self, at: Option<usize>) -> Input<'a> {
        at.map_or(Input::of(&[]), |at| self.reads[at])
    }

    fn write(&mut self, at: Option<usize>) -> Option<Output<'a>> {
        self.writes[at?].take()
    }

    fn write_or_empty(&mut self, at: Option<usize>) -> Output<'a> {
        self.write(at).unwrap_or_else(|| Output::of(&mut []))
    }
}

impl Calls {
    pub(crate) fn new(
        model: Arc<Model>,
        calls: Vec<Call>,
        kept: Vec<Mutex<Saved>>,
        notes: Arc<Notes>,
        evaluation: bool,
    ) -> Calls {
        Calls { model, calls, kept, notes, evaluation, common: RwLock::default() }
    }

    /// Whether they are the calls of this very model.
    pub(crate) fn is_of(&self, model: &Arc<Model>) -> bool {
        Arc::ptr_eq(&self.model, model)
    }

    /// What the steps to come have in common. No task of an earlier one is under way.
    pub(crate) fn set(&self, common: Common) {
        *self.common.write().unwrap_or_else(PoisonError::into_inner) = common;
    }

    /// Drops what an abandoned step left.
    pub(crate) fn clear(&self) {
        for layer in 0..self.kept.len() {
            *self.kept(layer) = Saved::none();
        }
    }

    /// The number by which the store knows a task of a micro-batch.
    pub(crate) fn item(&self, micro_batch: usize, task: usize) -> usize {
        micro_batch * self.calls.len() + task
    }

    fn kept(&self, layer: usize) -> MutexGuard<'_, Saved> {
        self.kept[layer].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn carry_out(&self, item: usize, buffers: Buffers<'_>, stream: Option<Stream>) -> Result<(), LayerError> {
        let (micro_batch, task) = (item / self.calls.len(), item % self.calls.len());
        let call = &self.calls[task];
        let common = self.common.read().unwrap_or_else(PoisonError::into_inner);
        let layer = match call.work {
            Work::Forward { layer, .. } | Work::Recompute { layer, .. } | Work::Backward(layer) => {
                Some(layer)
            }
            _ => None,
        };
        let phase = match call.work {
            _ if self.evaluation => Phase::Evaluation,
            Work::Prologue | Work::Forward { .. } => Phase::Forward,
            Work::Recompute { .. } => Phase::Recompute,
            _ => Phase::Backward,
        };
        let cx = Context {
            seed: common.seed,
            step: common.step,
            micro_batch,
            layer,
            phase,
            inputs: common.inputs.get(micro_batch).map(|inputs| &**inputs),
            stream,
            notes: Some(&self.notes),
        };
        self.dispatch(call, &cx, buffers)
    }

    fn dispatch(&self, call: &Call, cx: &Context<'_>, mut buffers: Buffers<'_>) -> Result<(), LayerError> {
        let parts = &self.model.owners[call.owner];
        let weights: SmallVec<[Input<'_>; FEW]> = call.weights.iter().map(|&at| buffers.reads[at]).collect();
        let weights = Weights { buffers: &weights, slots: &parts.weight_slots };
        let gradients = call.gradients.iter().map(|&at| buffers.write_or_empty(Some(at))).collect();
        let grads = Grads { buffers: gradients, slots: &parts.gradient_slots };
        let x = buffers.read(call.x);
        match call.work {
            Work::Prologue => self.model.prologue.forward(cx, weights, buffers.write_or_empty(call.out)),
            Work::Forward { layer, keep } => {
                let save = keep.then(|| buffers.write_or_empty(call.save));
                let out = buffers.write(call.out);
                let workspace = buffers.write_or_empty(call.workspace);
                self.forward(layer, cx, Forward { weights, x, out, save, workspace })
            }
            Work::Recompute { layer, save } => {
                let save = save.then(|| buffers.write_or_empty(call.save));
                let out = buffers.write(call.out);
                let workspace = buffers.write_or_empty(call.workspace);
                self.forward(layer, cx, Forward { weights, x, out, save, workspace })
            }
            Work::Epilogue => self.model.epilogue.run(
                cx,
                Loss {
                    weights,
                    x,
                    dx: buffers.write(call.dx),
                    grads,
                    loss: buffers.write_or_empty(call.loss).part(&Model::loss_range(cx.micro_batch)),
                    workspace: buffers.write_or_empty(call.workspace),
                },
            ),
            Work::Backward(layer) => {
                let saved = std::mem::take(&mut *self.kept(layer.get()));
                let backward = Backward {
                    weights,
                    x,
                    internals: buffers.read(call.internals),
                    saved,
                    dy: buffers.read(call.dy),
                    dx: buffers.write_or_empty(call.dx),
                    grads,
                    workspace: buffers.write_or_empty(call.workspace),
                };
                self.model.layers[layer.get()].backward(cx, backward)
            }
            Work::PrologueBackward => self.model.prologue.backward(cx, weights, buffers.read(call.dy), grads),
            Work::Copy => Ok(()),
        }
    }

    fn forward(&self, layer: LayerIndex, cx: &Context<'_>, mut call: Forward<'_>) -> Result<(), LayerError> {
        let saves = call.save.is_some();
        self.notes.begin(cx);
        let model = &self.model.layers[layer.get()];
        let saved = if self.notes.checksums && cx.stream.is_none() {
            // Where no output is wanted, one is made only to be compared.
            let mut spare = Vec::new();
            let mut out = match call.out.take() {
                Some(out) => out,
                None => {
                    spare.resize(self.model.sizes().boundary[layer.get() + 1].get() as usize, 0);
                    Output::of(&mut spare)
                }
            };
            let saved = model.forward(cx, Forward { out: Some(out.reborrow()), ..call })?;
            self.notes.output(cx, out.as_input().bytes()?)?;
            saved
        } else {
            model.forward(cx, call)?
        };
        if saves {
            *self.kept(layer.get()) = saved;
        }
        Ok(())
    }
}

impl Routine for Calls {
    fn run(&self, item: usize, access: &mut Access<'_>) -> Result<(), BoxError> {
        let (reads, writes) = access.split();
        let buffers = Buffers {
            reads: reads.map(Input::of).collect(),
            writes: writes.map(|w| Some(Output::of(w))).collect(),
        };
        self.carry_out(item, buffers, None)
    }

    fn issue(&self, item: usize, access: &StreamAccess<'_>) -> Result<(), BoxError> {
        let reads = access.reads().map(Input::device).collect();
        let writes = access.writes().map(|range| Some(Output::device(range))).collect();
        self.carry_out(item, Buffers { reads, writes }, Some(access.stream()))
    }
}
