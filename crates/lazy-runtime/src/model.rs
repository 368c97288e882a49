//! A model as the executor takes it: prologue, layers and epilogue, their sizes, and where their parameters lie.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use lazy_model::step::{StepPlan, StepSizes, Streamed, TierBytes, Workspaces};
use lazy_model::{Bytes, Placement, Schedule, Tier};
use lazy_store::{NvmeOptions, StoreOptions};

use crate::error::RuntimeError;
use crate::layer::{Epilogue, Layer, Parameter, ParameterId, Prologue};
use crate::view::Slot;

/// Parameters and buffers in HBM start at multiples of this: what vector loads expect.
const ALIGNMENT: u64 = 256;
/// A loss is a float32.
const LOSS_BYTES: u64 = 4;

/// How a model's step is run, besides what a schedule says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelOptions {
    /// Micro-batches in a step.
    pub micro_batches: usize,
    /// Weights of the layers that the runtime keeps live in host RAM and come in layer by layer.
    pub stream_weights: bool,
    /// Gradients of the layers that the runtime keeps go to host RAM as they arise.
    pub stream_gradients: bool,
    /// What is streamed lives on NVMe instead.
    pub on_nvme: bool,
}

impl Default for ModelOptions {
    /// One micro-batch, nothing streamed.
    fn default() -> Self {
        ModelOptions { micro_batches: 1, stream_weights: false, stream_gradients: false, on_nvme: false }
    }
}

/// Whose parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// What makes boundary 0.
    Prologue,
    /// This layer.
    Layer(usize),
    /// What makes the loss.
    Epilogue,
}

/// Sizes of a model's step, for planners: see [`StepSizes`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelSizes {
    /// Boundaries `0..=N`.
    pub boundary: Vec<Bytes>,
    /// What each layer's backward needs of its forward.
    pub saved: Vec<Bytes>,
    /// What layers and loss need while they run.
    pub workspaces: Workspaces,
    /// Weights and gradients that pass through HBM a layer at a time.
    pub streamed: Streamed,
    /// Whether gradients add up over several micro-batches.
    pub accumulate: bool,
}

impl ModelSizes {
    /// The same, as plans are derived from.
    pub fn step(&self) -> StepSizes<'_> {
        StepSizes {
            boundary: &self.boundary,
            saved: &self.saved,
            workspaces: &self.workspaces,
            streamed: &self.streamed,
            accumulate: self.accumulate,
        }
    }
}

/// A model's layers and where their parameters lie. What several owners share, and what prologue and epilogue own, stays in HBM; what one layer
/// owns alone lies together, so that it can be streamed.
pub struct Model {
    pub(crate) prologue: Arc<dyn Prologue>,
    pub(crate) layers: Vec<Arc<dyn Layer>>,
    pub(crate) epilogue: Arc<dyn Epilogue>,
    options: ModelOptions,
    sizes: ModelSizes,
    pub(crate) held: Vec<Held>,
    pub(crate) owners: Vec<OwnerParts>,
    pub(crate) parameters: BTreeMap<ParameterId, Placed>,
}

/// A buffer that the executor holds from its start to its end.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) tier: Tier,
    pub(crate) offset: u64,
    pub(crate) bytes: Bytes,
    /// Whether gradients, which start a step at zero.
    pub(crate) gradients: bool,
}

/// The position of a buffer in [`Model::held`].
pub(crate) type HeldId = usize;

/// The parameters of one owner, as its calls find them.
#[derive(Clone, Debug, Default)]
pub(crate) struct OwnerParts {
    /// Buffers of weights: those that are the owner's alone first.
    pub(crate) weights: Vec<HeldId>,
    pub(crate) gradients: Vec<HeldId>,
    pub(crate) weight_slots: Vec<Slot>,
    pub(crate) gradient_slots: Vec<Slot>,
}

/// A parameter and where it lies.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    pub(crate) parameter: Parameter,
    pub(crate) owners: Vec<usize>,
    pub(crate) weights: Option<(HeldId, Range<usize>)>,
    pub(crate) gradient: Option<(HeldId, Range<usize>)>,
}

impl Owner {
    pub(crate) fn index(self, layers: usize) -> usize {
        match self {
            Owner::Layer(l) => l,
            Owner::Prologue => layers,
            Owner::Epilogue => layers + 1,
        }
    }
}

impl Model {
    /// Takes a model's parts, asks them for their sizes and parameters, and says where those lie. Layers of several kinds are a
    /// `Vec<Arc<dyn Layer>>`; prologue and epilogue may be functions, see [`crate::Source`].
    ///
    /// # Errors
    /// When there are no layers or no micro-batches, when two owners of a parameter declare it differently, and when an owner declares one
    /// twice.
    pub fn new<L: Layer + 'static>(
        prologue: impl Prologue + 'static,
        layers: Vec<L>,
        epilogue: impl Epilogue + 'static,
        options: ModelOptions,
    ) -> Result<Model, RuntimeError> {
        let layers = layers.into_iter().map(|layer| Arc::new(layer) as Arc<dyn Layer>).collect();
        Model::of(Arc::new(prologue), layers, Arc::new(epilogue), options)
    }

    fn of(
        prologue: Arc<dyn Prologue>,
        layers: Vec<Arc<dyn Layer>>,
        epilogue: Arc<dyn Epilogue>,
        options: ModelOptions,
    ) -> Result<Model, RuntimeError> {
        if layers.is_empty() || options.micro_batches == 0 {
            return Err(RuntimeError::Empty);
        }
        let sizes = sizes_of(&*prologue, &layers, &*epilogue, &options);
        let mut declared: Vec<Vec<Parameter>> = layers.iter().map(|l| l.parameters()).collect();
        declared.push(prologue.parameters());
        declared.push(epilogue.parameters());
        let mut model = Model {
            prologue,
            layers,
            epilogue,
            options,
            sizes,
            held: Vec::new(),
            owners: vec![OwnerParts::default(); declared.len()],
            parameters: BTreeMap::new(),
        };
        model.register(&declared)?;
        model.place(&declared);
        Ok(model)
    }

    /// Its sizes, for a planner.
    pub fn sizes(&self) -> &ModelSizes {
        &self.sizes
    }

    /// How it is run.
    pub fn options(&self) -> &ModelOptions {
        &self.options
    }

    /// Its parameters, each once, in the order of their ids.
    pub fn parameters(&self) -> impl Iterator<Item = &Parameter> {
        self.parameters.values().map(|placed| &placed.parameter)
    }

    /// HBM that the executor holds throughout: parameters that stay there with their gradients, and the losses.
    pub fn resident(&self) -> Bytes {
        let ends = self.held.iter().filter(|h| h.tier == Tier::Hbm);
        Bytes(ends.map(|h| h.offset + h.bytes.align_up(ALIGNMENT).get()).max().unwrap_or_default())
    }

    /// A schedule by hand, one letter a boundary: `G` stays in HBM, `C` goes to host RAM, `N` to NVMe, `-` is recomputed. No layer keeps its
    /// internals, and boundaries come back as [`lazy_model::schedule::Execution`] does by default; both can be changed before [`Model::plan`].
    ///
    /// # Errors
    /// When there are more or fewer letters than boundaries, or others.
    pub fn schedule(&self, letters: &str) -> Result<Schedule, RuntimeError> {
        let mut schedule = Schedule::named("by hand", &self.sizes.boundary, false);
        let placement: Option<Vec<Placement>> = letters.chars().map(Placement::from_letter).collect();
        match placement {
            Some(placement) if placement.len() == schedule.placement.len() => {
                schedule.placement = placement;
                Ok(schedule)
            }
            _ => Err(RuntimeError::Letters { letters: letters.into(), boundaries: schedule.placement.len() }),
        }
    }

    /// The operations of `schedule` for this model.
    ///
    /// # Errors
    /// When the schedule is for another model or cannot be carried out.
    pub fn plan(&self, schedule: &Schedule) -> Result<StepPlan, RuntimeError> {
        Ok(StepPlan::with_sizes(schedule, &self.sizes.step())?)
    }

    /// Bytes of each tier that a store needs to run `plan`: its extents, and in HBM what is resident. A store that is to run several
    /// plans, an evaluation's ([`StepPlan::evaluation`]) among them, needs the largest in each tier.
    pub fn needs(&self, plan: &StepPlan) -> TierBytes {
        TierBytes { hbm: plan.extents.hbm + self.resident(), ..plan.extents }
    }

    /// A store of exactly what `plan` needs, on the host device; what goes to NVMe lies in a file in the folder `spill`, and without such there
    /// is no file. The rest can be set as in any store:
    ///
    /// ```
    /// # use lazy_model::Bytes;
    /// # use lazy_runtime::*;
    /// # use lazy_store::StoreOptions;
    /// # struct Same;
    /// # impl Layer for Same {
    /// #     fn sizes(&self) -> LayerSizes { LayerSizes { output: Bytes(1024), ..LayerSizes::default() } }
    /// #     fn forward(&self, _: &Context<'_>, _: Forward<'_>) -> Result<Saved, LayerError> { Ok(Saved::none()) }
    /// #     fn backward(&self, _: &Context<'_>, _: Backward<'_>) -> Result<(), LayerError> { Ok(()) }
    /// # }
    /// # let source = Source::new(Bytes(1024), |_: &Context<'_>, _: Output<'_>| Ok(()));
    /// # let loss = |_: &Context<'_>, _: Loss<'_>| Ok(());
    /// # let model = Model::new(source, vec![Same, Same], loss, ModelOptions::default())?;
    /// let plan = model.plan(&model.schedule("CGG")?)?;
    /// let options = StoreOptions { poison: true, ..model.store_options(&plan, std::env::temp_dir()) };
    /// assert!(options.host >= Bytes(1024) && options.nvme.is_none());
    /// let (executor, program) = Executor::open(model, plan, options)?;
    /// # Ok::<(), RuntimeError>(())
    /// ```
    pub fn store_options(&self, plan: &StepPlan, spill: impl Into<PathBuf>) -> StoreOptions {
        let TierBytes { hbm, host, nvme } = self.needs(plan);
        let nvme = (nvme > Bytes::ZERO).then(|| NvmeOptions::new(spill, nvme));
        StoreOptions { hbm, host, nvme, ..StoreOptions::default() }
    }

    /// The losses of a step's micro-batches.
    pub(crate) fn loss(&self) -> HeldId {
        0
    }

    pub(crate) fn loss_range(micro_batch: usize) -> Range<usize> {
        let at = micro_batch * LOSS_BYTES as usize;
        at..at + LOSS_BYTES as usize
    }

    fn register(&mut self, declared: &[Vec<Parameter>]) -> Result<(), RuntimeError> {
        for (owner, parameters) in declared.iter().enumerate() {
            for parameter in parameters {
                let new =
                    Placed { parameter: parameter.clone(), owners: vec![], weights: None, gradient: None };
                let placed = self.parameters.entry(parameter.id).or_insert(new);
                let known = &placed.parameter;
                if (known.weights, known.gradient) != (parameter.weights, parameter.gradient) {
                    let (id, first, second) = (parameter.id.0, known.name.clone(), parameter.name.clone());
                    return Err(RuntimeError::SharedParameter { id, first, second });
                }
                if placed.owners.contains(&owner) {
                    return Err(RuntimeError::ParameterTwice { name: parameter.name.clone() });
                }
                placed.owners.push(owner);
            }
        }
        Ok(())
    }

    /// Gives every parameter its place: losses, what is common, then each layer's own.
    fn place(&mut self, declared: &[Vec<Parameter>]) {
        let losses = Bytes(LOSS_BYTES * self.options.micro_batches as u64);
        let mut hbm = 0;
        let mut homes = 0;
        self.hold(Tier::Hbm, losses, false, &mut hbm);
        let layers = self.layers.len();
        let common: Vec<ParameterId> = self
            .parameters
            .iter()
            .filter(|(_, p)| p.owners.len() > 1 || p.owners.iter().any(|&owner| owner >= layers))
            .map(|(&id, _)| id)
            .collect();
        for id in &common {
            let Parameter { weights, gradient, .. } = self.parameters[id].parameter;
            let weights =
                self.hold(Tier::Hbm, weights, false, &mut hbm).map(|held| (held, 0..weights.get() as usize));
            let gradient =
                self.hold(Tier::Hbm, gradient, true, &mut hbm).map(|held| (held, 0..gradient.get() as usize));
            if let Some(placed) = self.parameters.get_mut(id) {
                (placed.weights, placed.gradient) = (weights, gradient);
            }
        }
        // Homes lie as plans lay them out: weights of all layers, then gradients.
        let streamed = self.sizes.streamed.clone();
        for gradients in [false, true] {
            let on = if gradients { &streamed.gradients } else { &streamed.weights };
            for (layer, parameters) in declared.iter().take(layers).enumerate() {
                let own: Vec<&Parameter> = parameters.iter().filter(|p| !common.contains(&p.id)).collect();
                let (ranges, bytes) = together(&own, gradients);
                let held = if on.is_empty() {
                    self.hold(Tier::Hbm, bytes, gradients, &mut hbm)
                } else {
                    Some(self.hold_home(streamed.home(), bytes, gradients, &mut homes))
                };
                for (parameter, range) in own.iter().zip(ranges) {
                    let place = held.filter(|_| !range.is_empty()).map(|held| (held, range));
                    if let Some(placed) = self.parameters.get_mut(&parameter.id) {
                        *(if gradients { &mut placed.gradient } else { &mut placed.weights }) = place;
                    }
                }
                let parts = &mut self.owners[layer];
                if gradients { parts.gradients.extend(held) } else { parts.weights.extend(held) }
            }
        }
        for (owner, parameters) in declared.iter().enumerate() {
            self.slots(owner, parameters);
        }
    }

    /// Where the calls of an owner find its parameters, in their order.
    fn slots(&mut self, owner: usize, parameters: &[Parameter]) {
        let mut parts = std::mem::take(&mut self.owners[owner]);
        let slot = |buffers: &mut Vec<HeldId>, place: &Option<(HeldId, Range<usize>)>| match place {
            None => Slot { buffer: usize::MAX, bytes: 0..0 },
            Some((held, range)) => {
                let at = buffers.iter().position(|b| b == held).unwrap_or_else(|| {
                    buffers.push(*held);
                    buffers.len() - 1
                });
                Slot { buffer: at, bytes: range.clone() }
            }
        };
        for parameter in parameters {
            let Some(placed) = self.parameters.get(&parameter.id) else { continue };
            let weights = slot(&mut parts.weights, &placed.weights);
            parts.weight_slots.push(weights);
            let gradient = slot(&mut parts.gradients, &placed.gradient);
            parts.gradient_slots.push(gradient);
        }
        self.owners[owner] = parts;
    }

    fn hold(&mut self, tier: Tier, bytes: Bytes, gradients: bool, end: &mut u64) -> Option<HeldId> {
        if bytes == Bytes::ZERO {
            return None;
        }
        self.held.push(Held { tier, offset: *end, bytes, gradients });
        *end += bytes.align_up(ALIGNMENT).get();
        Some(self.held.len() - 1)
    }

    /// A home is there for every layer, also where it has nothing to keep in it.
    fn hold_home(&mut self, tier: Tier, bytes: Bytes, gradients: bool, end: &mut u64) -> HeldId {
        self.held.push(Held { tier, offset: *end, bytes, gradients });
        *end += bytes.align_up(lazy_model::step::PAGE_ALIGNMENT).get();
        self.held.len() - 1
    }
}

/// Where the weights or gradients of these parameters lie in one buffer, and its size.
fn together(parameters: &[&Parameter], gradients: bool) -> (Vec<Range<usize>>, Bytes) {
    let mut end = 0u64;
    let ranges = parameters.iter().map(|p| {
        let bytes = if gradients { p.gradient } else { p.weights };
        let start = Bytes(end).align_up(ALIGNMENT).get();
        if bytes > Bytes::ZERO {
            end = start + bytes.get();
        }
        start as usize..(start + bytes.get()) as usize
    });
    let ranges = ranges.collect();
    (ranges, Bytes(end))
}

fn sizes_of(
    prologue: &dyn Prologue,
    layers: &[Arc<dyn Layer>],
    epilogue: &dyn Epilogue,
    options: &ModelOptions,
) -> ModelSizes {
    let each: Vec<_> = layers.iter().map(|l| l.sizes()).collect();
    let declared: Vec<Vec<Parameter>> = layers.iter().map(|l| l.parameters()).collect();
    let elsewhere: Vec<Parameter> = prologue.parameters().into_iter().chain(epilogue.parameters()).collect();
    let owned = |layer: usize, id: ParameterId| {
        let others =
            declared.iter().enumerate().filter(|(other, _)| *other != layer).flat_map(|(_, list)| list);
        !others.chain(&elsewhere).any(|p| p.id == id)
    };
    let own = |gradients: bool| -> Vec<Bytes> {
        let of = |layer: usize| {
            let own: Vec<&Parameter> = declared[layer].iter().filter(|p| owned(layer, p.id)).collect();
            together(&own, gradients).1
        };
        let bytes: Vec<Bytes> = (0..layers.len()).map(of).collect();
        if bytes.iter().all(|&b| b == Bytes::ZERO) { Vec::new() } else { bytes }
    };
    let list = |stream: bool, gradients| if stream { own(gradients) } else { Vec::new() };
    ModelSizes {
        boundary: std::iter::once(prologue.output_bytes()).chain(each.iter().map(|s| s.output)).collect(),
        saved: each.iter().map(|s| s.saved).collect(),
        workspaces: Workspaces {
            forward: each.iter().map(|s| s.forward_workspace).collect(),
            backward: each.iter().map(|s| s.backward_workspace).collect(),
            loss: epilogue.workspace(),
        },
        streamed: Streamed {
            weights: list(options.stream_weights, false),
            gradients: list(options.stream_gradients, true),
            on_nvme: options.on_nvme,
        },
        accumulate: options.micro_batches > 1,
    }
}
