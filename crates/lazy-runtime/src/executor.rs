use std::sync::{Arc, Mutex, PoisonError};

use lazy_model::schedule::ExposedSeconds;
use lazy_model::step::{BufferId, Op, StepPlan, Task, Work};
use lazy_model::timeline::Timeline;
use lazy_model::{Bytes, Lane, LayerIndex, Seconds};
use lazy_store::{Access, Extent, Store, Submission};

use crate::error::RuntimeError;
use crate::layer::{Context, Epilogue, Layer, LayerError, Phase, Prologue, Saved};

/// A model's layers over a store, ready to carry out plans.
pub struct Executor {
    store: Store,
    model: Arc<Model>,
}

struct Model {
    prologue: Arc<dyn Prologue>,
    layers: Vec<Arc<dyn Layer>>,
    epilogue: Arc<dyn Epilogue>,
    /// Internals kept from forward to backward, by layer.
    kept: Vec<Mutex<Option<Saved>>>,
}

/// One measured pass over a plan.
#[derive(Clone, Debug)]
pub struct PassReport {
    /// A span for every task of the plan, in its order.
    pub timeline: Timeline,
    /// Prologue and layers forward.
    pub forward: Seconds,
    /// Loss and layers backward, recomputation included.
    pub backward: Seconds,
    /// Time the compute lane waited for each link.
    pub exposed: ExposedSeconds,
}

impl PassReport {
    fn new(plan: &StepPlan, timeline: Timeline) -> Self {
        // Spans count from the start of the step; a pass starts with its first task.
        let start = timeline.spans.first().map_or(Seconds::ZERO, |s| s.start);
        let forward = timeline.forward(plan);
        PassReport {
            forward: forward - start,
            backward: timeline.total() - forward,
            exposed: timeline.exposed_since(start),
            timeline,
        }
    }

    /// Bytes moved on a lane.
    pub fn bytes(&self, lane: Lane) -> Bytes {
        self.timeline.spans.iter().filter(|s| s.lane == lane).map(|s| s.bytes).sum()
    }
}

impl Executor {
    /// Takes a model apart into what the executor calls.
    pub fn new(
        store: Store,
        prologue: Arc<dyn Prologue>,
        layers: Vec<Arc<dyn Layer>>,
        epilogue: Arc<dyn Epilogue>,
    ) -> Self {
        let kept = layers.iter().map(|_| Mutex::new(None)).collect();
        Executor { store, model: Arc::new(Model { prologue, layers, epilogue, kept }) }
    }

    /// The store the executor works on.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Sizes of boundaries `0..=N`, as the prologue and the layers declare them.
    pub fn boundary_bytes(&self) -> Vec<Bytes> {
        std::iter::once(self.model.prologue.output_bytes())
            .chain(self.model.layers.iter().map(|l| l.output_bytes()))
            .collect()
    }

    /// Sizes of what the layers save, as they declare them.
    pub fn saved_bytes(&self) -> Vec<Bytes> {
        self.model.layers.iter().map(|l| l.saved_bytes()).collect()
    }

    /// Runs one micro-batch forward and backward. `cx` says which one; its layer and phase are filled in for every call.
    ///
    /// # Errors
    /// When the store refuses a reservation or a task fails. Everything reserved is released and nothing stays kept.
    pub fn run(&self, plan: &StepPlan, cx: Context) -> Result<PassReport, RuntimeError> {
        let layers = plan.tasks().filter(|t| matches!(t.work, Work::Forward { .. })).count();
        if layers != self.model.layers.len() {
            return Err(RuntimeError::Layers { plan: layers, executor: self.model.layers.len() });
        }
        let submitted = self.submit_all(plan, cx);
        let finished = self.store.synchronize();
        for slot in &self.model.kept {
            *slot.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
        let spans = self.store.take_spans();
        // A task that failed is the cause of whatever was refused after it.
        finished?;
        submitted?;
        Ok(PassReport::new(plan, Timeline { spans }))
    }

    fn submit_all(&self, plan: &StepPlan, cx: Context) -> Result<(), RuntimeError> {
        let mut extents: Vec<Option<Extent>> = plan.buffers.iter().map(|_| None).collect();
        let mut events = Vec::new();
        for op in &plan.ops {
            match op {
                Op::Reserve(id) => {
                    let buffer = plan.buffer(*id);
                    extents[id.0] = Some(self.store.reserve_at(buffer.tier, buffer.offset, buffer.bytes)?);
                }
                Op::Release(id) => {
                    if let Some(extent) = extents[id.0].take() {
                        self.store.release(extent);
                    }
                }
                Op::Run(task) => {
                    let held = |ids: &[BufferId]| -> Vec<&Extent> {
                        ids.iter().filter_map(|id| extents[id.0].as_ref()).collect()
                    };
                    let (reads, writes) = (held(&task.reads), held(&task.writes));
                    let after: Vec<_> = task.after.iter().map(|t| &events[t.0]).cloned().collect();
                    let name = plan.name(task);
                    let event = if task.work == Work::Copy {
                        self.store.copy(name, reads[0], writes[0], &after)?
                    } else {
                        let submission = Submission {
                            lane: task.lane,
                            name: name.into(),
                            reads: &reads,
                            writes: &writes,
                            after: &after,
                            bytes: task.bytes,
                        };
                        self.store.submit(submission, self.arithmetic(task, cx))?
                    };
                    events.push(event);
                }
            }
        }
        Ok(())
    }

    /// The closure that runs when the task's turn has come.
    fn arithmetic(
        &self,
        task: &Task,
        cx: Context,
    ) -> impl FnOnce(&mut Access<'_>) -> Result<(), LayerError> + Send + 'static {
        let model = Arc::clone(&self.model);
        let work = task.work;
        move |access| {
            let (reads, writes) = access.split();
            let (reads, mut writes) = (reads.collect::<Vec<_>>(), writes.collect::<Vec<_>>());
            model.run(work, cx, &reads, &mut writes)
        }
    }
}

impl Model {
    fn run(
        &self,
        work: Work,
        cx: Context,
        reads: &[&[u8]],
        writes: &mut [&mut [u8]],
    ) -> Result<(), LayerError> {
        let within = |layer: Option<LayerIndex>, phase| Context { layer, phase, ..cx };
        match work {
            Work::Prologue => self.prologue.forward(&within(None, Phase::Forward), writes[0]),
            Work::Forward { layer, keep } => {
                let cx = within(Some(layer), Phase::Forward);
                let saved = self.layer(layer).forward(&cx, reads[0], Some(writes[0]), keep)?;
                if keep {
                    *self.kept(layer) = Some(saved.ok_or_else(|| no_internals(layer))?);
                }
                Ok(())
            }
            Work::Recompute { layer, save } => {
                let cx = within(Some(layer), Phase::Recompute);
                let out = if save { None } else { Some(&mut *writes[0]) };
                let saved = self.layer(layer).forward(&cx, reads[0], out, save)?;
                if save {
                    *self.kept(layer) = Some(saved.ok_or_else(|| no_internals(layer))?);
                }
                Ok(())
            }
            Work::Epilogue => self.epilogue.run(&within(None, Phase::Backward), reads[0], writes[0]),
            Work::Backward(layer) => {
                let saved = self.kept(layer).take().ok_or_else(|| no_internals(layer))?;
                let cx = within(Some(layer), Phase::Backward);
                self.layer(layer).backward(&cx, reads[0], saved, reads[1], writes[0])
            }
            Work::PrologueBackward => self.prologue.backward(&within(None, Phase::Backward), reads[0]),
            Work::Copy => Ok(()),
        }
    }

    fn layer(&self, layer: LayerIndex) -> &dyn Layer {
        self.layers[layer.get()].as_ref()
    }

    fn kept(&self, layer: LayerIndex) -> std::sync::MutexGuard<'_, Option<Saved>> {
        self.kept[layer.get()].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn no_internals(layer: LayerIndex) -> LayerError {
    format!("layer {layer} was asked to save its internals and returned none").into()
}
