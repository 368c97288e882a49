use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use lazy_model::step::{StepPlan, TierBytes};
use lazy_model::{Bytes, Lane, Tier};
use lazy_store::{DeviceRange, Event, Extent, Routine, Store, StoreError, StoreOptions, Submission};
use smallvec::SmallVec;

use crate::calls::Common;
use crate::error::RuntimeError;
use crate::hook::{FinalGradient, Hook, HookCalls};
use crate::layer::{LayerError, Parameter, ParameterId};
use crate::model::{HeldId, Model, Owner};
use crate::notes::Notes;
use crate::program::{Operation, Place, Prepared, Program};
use crate::report::StepReport;
use crate::view::{FEW, part_of};

/// How an executor runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExecutorOptions {
    /// Compare a checksum of every recomputed output with that of the forward it repeats. Costs a pass over every output, and one spare output
    /// a layer; on the host device only.
    pub check_recompute: bool,
}

/// Runs steps of a model over a store: every reservation, task and release as a [`Program`] lists them, and nothing else.
pub struct Executor {
    store: Store,
    model: Arc<Model>,
    /// Parameters, their gradients and the losses.
    held: Vec<Extent>,
    notes: Arc<Notes>,
    hook: Option<Arc<Hook>>,
    names: Names,
    /// What the next step's first use of an owner's weights waits for.
    ready: Mutex<Vec<Option<Event>>>,
}

/// Names of tasks that no plan lists, made once.
struct Names {
    zeroes: Arc<str>,
    finals: Arc<str>,
}

/// What a step is run on.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// Seed of the run.
    pub seed: u64,
    /// Number of the optimizer step.
    pub step: u64,
    /// What each micro-batch's calls find in [`crate::Context::inputs`]: one entry for each, or none at all.
    pub inputs: Vec<Arc<dyn Any + Send + Sync>>,
}

impl Step {
    /// A step of seed 0 with these side inputs, one for each micro-batch.
    ///
    /// ```
    /// # use lazy_runtime::Step;
    /// let tokens: Vec<u32> = vec![3, 1, 2];
    /// let step = Step { seed: 42, ..Step::with_inputs(7, [tokens]) };
    /// assert_eq!((step.step, step.inputs.len()), (7, 1));
    /// ```
    pub fn with_inputs<T: Send + Sync + 'static>(step: u64, inputs: impl IntoIterator<Item = T>) -> Step {
        let inputs = inputs.into_iter().map(|input| Arc::new(input) as _).collect();
        Step { seed: 0, step, inputs }
    }
}

impl Executor {
    /// Opens a store, takes what [`Executor::new`] takes, and prepares `plan`. For a store of the plan's size see [`Model::store_options`].
    ///
    /// # Errors
    /// When the store cannot be opened or has not the room, and when the plan is none of this model.
    pub fn open(
        model: Model,
        plan: StepPlan,
        store: StoreOptions,
    ) -> Result<(Executor, Program), RuntimeError> {
        let executor = Executor::new(Store::open(store)?, model, ExecutorOptions::default())?;
        let program = executor.prepare(plan)?;
        Ok((executor, program))
    }

    /// Takes HBM for what stays there, and the homes of what is streamed. Weights are zero until they are set.
    ///
    /// # Errors
    /// When the store has not the room, see [`Model::needs`], and when checksums are asked for beside a GPU.
    pub fn new(store: Store, model: Model, options: ExecutorOptions) -> Result<Executor, RuntimeError> {
        if options.check_recompute && store.gpu().is_some() {
            return Err(RuntimeError::ChecksumsOnHost);
        }
        let mut held = Vec::with_capacity(model.held.len());
        for buffer in &model.held {
            let extent = store.reserve_at(buffer.tier, buffer.offset, buffer.bytes)?;
            match buffer.tier {
                Tier::Nvme => {
                    drop(store.overwrite("zeros", &extent, vec![0; buffer.bytes.get() as usize])?)
                }
                _ => drop(store.fill("zeros", Lane::Compute, &extent, 0)?),
            }
            held.push(extent);
        }
        store.synchronize()?;
        let layers = model.layers.len();
        Ok(Executor {
            store,
            held,
            notes: Arc::new(Notes::new(layers, options.check_recompute)),
            hook: None,
            names: Names { zeroes: "gradients to zero".into(), finals: "final gradients".into() },
            ready: Mutex::new(vec![None; model.owners.len()]),
            model: Arc::new(model),
        })
    }

    /// The store it works on.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    pub(crate) fn shared_model(&self) -> Arc<Model> {
        Arc::clone(&self.model)
    }

    pub(crate) fn extent(&self, held: HeldId) -> &Extent {
        &self.held[held]
    }

    /// Checks that a plan is one of this model, and looks up what it needs.
    ///
    /// # Errors
    /// When the list is none of a step of this model: nothing of it is run.
    pub fn prepare(&self, plan: StepPlan) -> Result<Program, RuntimeError> {
        Program::new(&self.model, plan, &self.notes)
    }

    /// The program of an evaluation: every micro-batch forward, and its loss.
    ///
    /// # Errors
    /// When the sizes add up to more than 64 bits hold.
    pub fn prepare_evaluation(&self) -> Result<Program, RuntimeError> {
        self.prepare(StepPlan::evaluation(&self.model.sizes().step())?)
    }

    /// Calls `hook` for every parameter whose gradient is final, as soon as it is: while the layers below still run backward. The next
    /// step's use of the parameter's weights waits until the hook has returned. Replaces an earlier hook.
    pub fn on_final_gradient(
        &mut self,
        hook: impl Fn(FinalGradient<'_>) -> Result<(), LayerError> + Send + Sync + 'static,
    ) {
        self.hook = Some(Arc::new(Hook::new(Box::new(hook), Arc::clone(&self.model), false)));
    }

    /// As [`Executor::on_final_gradient`], and hands the hook the weights to be updated. A step that fails may have updated some of them and
    /// not others: set them all again before the next one, from the last that was saved.
    pub fn update_in_backward(
        &mut self,
        hook: impl Fn(FinalGradient<'_>) -> Result<(), LayerError> + Send + Sync + 'static,
    ) {
        self.hook = Some(Arc::new(Hook::new(Box::new(hook), Arc::clone(&self.model), true)));
    }

    /// Lets the next step's first use of these weights wait for an event of this store: what an optimizer that writes the weights itself
    /// hands over, instead of waiting.
    ///
    /// # Errors
    /// When there is no such layer.
    pub fn weights_ready(&self, owner: Owner, event: Event) -> Result<(), RuntimeError> {
        let layers = self.model.layers.len();
        if let Owner::Layer(layer) = owner
            && layer >= layers
        {
            return Err(RuntimeError::NoLayer { layer, layers });
        }
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)[owner.index(layers)] = Some(event);
        Ok(())
    }

    /// Sets the weights of parameters that the runtime keeps.
    ///
    /// # Errors
    /// When there is no such parameter, and for another number of bytes.
    pub fn set_weights(&self, weights: &[(ParameterId, &[u8])]) -> Result<(), RuntimeError> {
        let mut changed: Vec<(HeldId, Vec<u8>)> = Vec::new();
        for &(id, bytes) in weights {
            let (held, range) = self.place(id, false)?;
            if range.len() != bytes.len() {
                return Err(RuntimeError::WeightBytes { id: id.0, got: bytes.len(), want: range.len() });
            }
            let known = changed.iter().position(|(other, _)| *other == held);
            let at = match known {
                Some(at) => at,
                None => {
                    let extent = &self.held[held];
                    // An update that failed leaves nothing to keep.
                    let bytes = match extent.is_written() {
                        true => self.store.get(extent)?,
                        false => vec![0; extent.bytes().get() as usize],
                    };
                    changed.push((held, bytes));
                    changed.len() - 1
                }
            };
            changed[at].1[range].copy_from_slice(bytes);
        }
        for (held, bytes) in changed {
            self.store.overwrite("weights", &self.held[held], bytes)?;
        }
        Ok(self.store.synchronize()?)
    }

    /// Sets all weights that the runtime keeps, float32: `fill` is called for each parameter, in the order of their ids, with zeros to write to.
    /// Takes as much RAM as the largest of them, and as the buffer it lies in.
    ///
    /// # Errors
    /// When weights are no multiple of four bytes.
    pub fn initialize(&self, mut fill: impl FnMut(&Parameter, &mut [f32])) -> Result<(), RuntimeError> {
        for parameter in self.model.parameters() {
            let Parameter { id, weights: bytes, .. } = *parameter;
            if bytes == Bytes::ZERO {
                continue;
            }
            if !bytes.get().is_multiple_of(4) {
                return Err(RuntimeError::NotFloats { name: parameter.name.clone(), bytes });
            }
            let mut values = vec![0.0; bytes.get() as usize / 4];
            fill(parameter, &mut values);
            self.set_weights(&[(id, bytemuck::cast_slice(&values))])?;
        }
        Ok(())
    }

    /// A copy of the weights of a parameter that the runtime keeps.
    ///
    /// # Errors
    /// When there is no such parameter.
    pub fn weights(&self, id: ParameterId) -> Result<Vec<u8>, RuntimeError> {
        self.read(self.place(id, false)?)
    }

    /// A copy of the gradient of a parameter that the runtime keeps, as the last step left it.
    ///
    /// # Errors
    /// When there is no such parameter.
    pub fn gradient(&self, id: ParameterId) -> Result<Vec<u8>, RuntimeError> {
        self.read(self.place(id, true)?)
    }

    /// Where the weights of a parameter lie in the memory of a GPU, from the executor's start to its end: for an optimizer that writes them
    /// there between steps.
    ///
    /// # Errors
    /// When there is no such parameter that the runtime keeps, and when its weights are streamed or there is no GPU.
    pub fn weights_on_device(&self, id: ParameterId) -> Result<DeviceRange, RuntimeError> {
        self.on_device(id, false)
    }

    /// Where the gradient of a parameter lies in the memory of a GPU, from the executor's start to its end. A step begins by setting
    /// it to zero.
    ///
    /// # Errors
    /// As for [`Executor::weights_on_device`].
    pub fn gradient_on_device(&self, id: ParameterId) -> Result<DeviceRange, RuntimeError> {
        self.on_device(id, true)
    }

    fn on_device(&self, id: ParameterId, gradient: bool) -> Result<DeviceRange, RuntimeError> {
        let (held, range) = self.place(id, gradient)?;
        let all = self.store.device_range(&self.held[held]).ok_or_else(|| {
            let name = self.model.parameters[&id].parameter.name.clone();
            RuntimeError::NotOnDevice { name }
        })?;
        Ok(part_of(all, &range))
    }

    fn read(&self, (held, range): (HeldId, Range<usize>)) -> Result<Vec<u8>, RuntimeError> {
        let mut bytes = self.store.get(&self.held[held])?;
        bytes.truncate(range.end);
        bytes.drain(..range.start);
        Ok(bytes)
    }

    fn place(&self, id: ParameterId, gradient: bool) -> Result<(HeldId, Range<usize>), RuntimeError> {
        let placed = self.model.parameters.get(&id).ok_or(RuntimeError::NoParameter { id: id.0 })?;
        let place = if gradient { &placed.gradient } else { &placed.weights };
        place.clone().ok_or(RuntimeError::NoParameter { id: id.0 })
    }

    /// Runs a step, or an evaluation: its micro-batches one after the other, each as the program lists it. When this returns, everything
    /// has run, and all that the step reserved is released.
    ///
    /// # Errors
    /// When the store refuses a reservation or a task fails; a layer's own error is inside, with the task's name. The step is abandoned:
    /// gradients count for nothing, weights are as they were but for what the hook has done, and the next step can be run.
    pub fn run(&mut self, program: &mut Program, step: &Step) -> Result<StepReport, RuntimeError> {
        if !program.calls.is_of(&self.model) {
            return Err(RuntimeError::ForeignProgram);
        }
        let micro_batches = self.model.options().micro_batches;
        if !step.inputs.is_empty() && step.inputs.len() != micro_batches {
            return Err(RuntimeError::Inputs { got: step.inputs.len(), want: micro_batches });
        }
        program.calls.set(Common { seed: step.seed, step: step.step, inputs: step.inputs.clone() });
        self.store.start_step();
        let submitted = self.submit_all(program, micro_batches);
        let finished = self.store.synchronize();
        program.extents.iter_mut().for_each(|extent| *extent = None);
        program.calls.clear();
        program.calls.set(Common::default());
        let spans = self.store.take_spans();
        // A task that failed is the cause of whatever was refused after it.
        finished?;
        submitted?;
        let losses = self.losses()?;
        let held = (each_tier(|tier| self.store.peak(tier)), each_tier(|tier| self.store.high_water(tier)));
        Ok(StepReport::new(program, spans, micro_batches, losses, held))
    }

    /// Runs steps one after the other. Returns the losses of all, a step's micro-batches beside each other.
    ///
    /// # Errors
    /// As [`Executor::run`], at the first step that fails.
    pub fn run_all(
        &mut self,
        program: &mut Program,
        steps: impl IntoIterator<Item = Step>,
    ) -> Result<Vec<f32>, RuntimeError> {
        let mut losses = Vec::new();
        for step in steps {
            losses.extend(self.run(program, &step)?.losses);
        }
        Ok(losses)
    }

    fn losses(&self) -> Result<Vec<f32>, RuntimeError> {
        let bytes = self.store.get(&self.held[self.model.loss()])?;
        let (losses, _) = bytes.as_chunks::<4>();
        Ok(losses.iter().map(|loss| f32::from_le_bytes(*loss)).collect())
    }

    fn submit_all(&self, program: &mut Program, micro_batches: usize) -> Result<(), RuntimeError> {
        let ready = {
            let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
            let none = vec![None; ready.len()];
            std::mem::replace(&mut *ready, none)
        };
        if !program.evaluation {
            for (buffer, extent) in self.model.held.iter().zip(&self.held) {
                if buffer.gradients && buffer.tier == Tier::Hbm {
                    self.store.fill(Arc::clone(&self.names.zeroes), Lane::Compute, extent, 0)?;
                }
            }
        }
        let routine: Arc<dyn Routine> = Arc::clone(&program.calls) as _;
        let hook = self
            .hook
            .as_ref()
            .map(|hook| Arc::new(HookCalls { hook: Arc::clone(hook), finals: Arc::clone(&program.finals) }));
        for micro_batch in 0..micro_batches {
            let last = micro_batch + 1 == micro_batches;
            let pass = Pass { executor: self, micro_batch, last, ready: &ready, hook: hook.as_ref() };
            pass.submit(program, &routine)?;
        }
        Ok(())
    }
}

fn each_tier(bytes: impl Fn(Tier) -> Bytes) -> TierBytes {
    TierBytes { hbm: bytes(Tier::Hbm), host: bytes(Tier::Host), nvme: bytes(Tier::Nvme) }
}

/// One micro-batch's way through a program.
struct Pass<'a> {
    executor: &'a Executor,
    micro_batch: usize,
    last: bool,
    ready: &'a [Option<Event>],
    hook: Option<&'a Arc<HookCalls>>,
}

impl Pass<'_> {
    fn submit(&self, program: &mut Program, routine: &Arc<dyn Routine>) -> Result<(), RuntimeError> {
        let Program { plan, ops, tasks, calls, extents, events, evaluation, .. } = program;
        let base = self.executor.model.resident().get();
        events.clear();
        for op in ops.iter() {
            match *op {
                Operation::Reserve(id) => {
                    let buffer = plan.buffer(id);
                    let above = if buffer.tier == Tier::Hbm { base } else { 0 };
                    let offset = buffer.offset + above;
                    extents[id.0] =
                        Some(self.executor.store.reserve_at(buffer.tier, offset, buffer.bytes)?);
                }
                Operation::Release(id) => extents[id.0] = None,
                Operation::Run(task) => {
                    let item = calls.item(self.micro_batch, task);
                    let event = self.task(&tasks[task], extents, events, routine, item)?;
                    if self.last && !*evaluation && !tasks[task].finals.is_empty() {
                        self.finals(tasks[task].finals.clone(), &event)?;
                    }
                    events.push(event);
                }
            }
        }
        Ok(())
    }

    fn task(
        &self,
        task: &Prepared,
        extents: &[Option<Extent>],
        events: &[Event],
        routine: &Arc<dyn Routine>,
        item: usize,
    ) -> Result<Event, RuntimeError> {
        let store = &self.executor.store;
        let find = |places: &[Place]| -> Result<SmallVec<[&Extent; FEW]>, StoreError> {
            let extent = |place: &Place| match *place {
                Place::Plan(buffer) => extents[buffer].as_ref(),
                Place::Held(held) => self.executor.held.get(held),
            };
            // The program was checked: every buffer is held while a task uses it.
            Ok(places.iter().filter_map(extent).collect())
        };
        let (reads, writes) = (find(&task.reads)?, find(&task.writes)?);
        let mut after: SmallVec<[Event; 2]> = task.after.iter().map(|t| events[t.0].clone()).collect();
        if self.micro_batch == 0
            && let Some(event) = task.owner.and_then(|owner| self.ready[owner].as_ref())
        {
            after.push(event.clone());
        }
        let name = Arc::clone(&task.name);
        let (lane, bytes) = (task.lane, task.bytes);
        if task.brings_in && self.micro_batch == 0 {
            // What would come in is zero, and need not be read for that.
            return Ok(match writes.iter().find(|extent| extent.tier() == Tier::Hbm) {
                Some(extent) => store.fill(name, lane, extent, 0)?,
                None => store.submit(Submission::new(lane, name), |_| Ok(()))?,
            });
        }
        if let Some(place) = task.starts_at_zero {
            let zero = find(&[place])?;
            store.fill(Arc::clone(&self.executor.names.zeroes), Lane::Compute, zero[0], 0)?;
        }
        if task.copy {
            return Ok(store.copy(name, reads[0], writes[0], &after)?);
        }
        let submission = Submission { lane, name, reads: &reads, writes: &writes, after: &after, bytes };
        Ok(store.submit_routine(submission, routine, item)?)
    }

    /// Submits the hook for the gradients that are final after a task, one call of it for each buffer of gradients.
    fn finals(&self, groups: Range<usize>, event: &Event) -> Result<(), RuntimeError> {
        let Some(hook) = self.hook else { return Ok(()) };
        let in_memory = |place: Option<HeldId>| {
            place.map(|held| &self.executor.held[held]).filter(|extent| extent.tier() != Tier::Nvme)
        };
        for group in groups {
            let Some(first) = hook.finals[group].first() else { continue };
            let (gradient, weights) = first.places();
            let reads: SmallVec<[&Extent; 1]> = in_memory(gradient).into_iter().collect();
            let weights = in_memory(weights).filter(|_| hook.hook.updates);
            let writes: SmallVec<[&Extent; 1]> = weights.into_iter().collect();
            let submission = Submission {
                reads: &reads,
                writes: &writes,
                after: std::slice::from_ref(event),
                ..Submission::new(Lane::Optimizer, Arc::clone(&self.executor.names.finals))
            };
            let done = hook.submit(&self.executor.store, submission, group)?;
            let mut ready = self.executor.ready.lock().unwrap_or_else(PoisonError::into_inner);
            for parameter in &hook.finals[group] {
                for &owner in &self.executor.model.parameters[&parameter.parameter].owners {
                    ready[owner] = Some(done.clone());
                }
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let layers = self.model.layers.len();
        let held: Bytes = self.held.iter().map(Extent::bytes).sum();
        f.debug_struct("Executor").field("layers", &layers).field("held", &held).finish_non_exhaustive()
    }
}
