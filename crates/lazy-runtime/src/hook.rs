//! What an optimizer hangs on to a step.

use std::sync::Arc;

use lazy_store::{
    Access, BoxError, Event, Routine, Store, StoreError, Stream, StreamAccess, Submission, Tier,
};

use crate::layer::{LayerError, Parameter};
use crate::model::Model;
use crate::program::{Final, Finals};
use crate::view::{Input, Output};

/// A parameter whose gradient is final: all micro-batches have added to it. Hooks are handed it, and
/// [`crate::Executor::update_in_ram`] hands it over between two steps.
///
/// A hook runs on the optimizer's lane, beside the backward of the layers below; the weights are no longer needed by this step, and the
/// next step waits for it. On a GPU, for parameters in HBM, it puts its work on `stream` and waits for nothing.
#[derive(Debug)]
pub struct FinalGradient<'a> {
    /// Which.
    pub parameter: &'a Parameter,
    /// Its gradient; absent where the layer keeps it itself and where it lies on NVMe ([`crate::Executor::gradient`] reads it then, after
    /// the step).
    pub gradient: Option<Input<'a>>,
    /// Its weights, for a hook that updates them; absent otherwise, and in the same cases.
    pub weights: Option<Output<'a>>,
    /// The stream of the optimizer's lane, for gradients and weights in the HBM of a GPU.
    pub stream: Option<Stream>,
}

impl<'a> FinalGradient<'a> {
    /// Weights and gradient, in a hook of [`crate::Executor::update_in_backward`].
    ///
    /// # Errors
    /// When one of them is not there: the layer keeps it, it lies on NVMe or, between steps, on a GPU, or the hook is not one for updates.
    pub fn in_memory(self) -> Result<(Output<'a>, Input<'a>), LayerError> {
        let name = &self.parameter.name;
        self.weights.zip(self.gradient).ok_or_else(|| {
            format!(
                "weights or gradient of {name} are not handed over: the layer keeps them, or they lie on NVMe"
            )
            .into()
        })
    }
}

/// What the caller gives.
pub(crate) type OnFinal = dyn Fn(FinalGradient<'_>) -> Result<(), LayerError> + Send + Sync;

/// A caller's hook.
pub(crate) struct Hook {
    call: Box<OnFinal>,
    model: Arc<Model>,
    /// Whether it updates weights.
    pub(crate) updates: bool,
}

impl Hook {
    pub(crate) fn new(call: Box<OnFinal>, model: Arc<Model>, updates: bool) -> Hook {
        Hook { call, model, updates }
    }

    fn call(
        &self,
        parameter: &Final,
        gradient: Option<Input<'_>>,
        weights: Option<Output<'_>>,
        stream: Option<Stream>,
    ) -> Result<(), LayerError> {
        let gradient = gradient.zip(parameter.gradient.as_ref()).map(|(all, (_, range))| all.part(range));
        let weights = weights.zip(parameter.weights.as_ref()).map(|(all, (_, range))| all.part(range));
        let parameter = &self.model.parameters[&parameter.parameter].parameter;
        (self.call)(FinalGradient { parameter, gradient, weights, stream })
    }
}

/// The calls of a hook for one program, by the groups of parameters.
pub(crate) struct HookCalls {
    pub(crate) hook: Arc<Hook>,
    pub(crate) finals: Arc<[Finals]>,
}

impl HookCalls {
    /// Queues the calls for a group.
    pub(crate) fn submit(
        self: &Arc<Self>,
        store: &Store,
        task: Submission<'_>,
        group: usize,
    ) -> Result<Event, StoreError> {
        let in_hbm = task.reads.iter().chain(task.writes).any(|extent| extent.tier() == Tier::Hbm);
        if store.gpu().is_some() && !in_hbm {
            // What lies in host RAM is not the stream's.
            let calls = Arc::clone(self);
            return store.submit(task, move |access| calls.run(group, access));
        }
        let routine: Arc<dyn Routine> = Arc::clone(self) as _;
        store.submit_routine(task, &routine, group)
    }
}

impl Routine for HookCalls {
    fn run(&self, group: usize, access: &mut Access<'_>) -> Result<(), BoxError> {
        let (mut gradients, mut weights) = access.split();
        let (gradient, mut weights) = (gradients.next(), weights.next());
        for parameter in &self.finals[group] {
            let weights = weights.as_deref_mut().map(Output::of);
            self.hook.call(parameter, gradient.map(Input::of), weights, None)?;
        }
        Ok(())
    }

    fn issue(&self, group: usize, access: &StreamAccess<'_>) -> Result<(), BoxError> {
        for parameter in &self.finals[group] {
            let gradient = access.reads().next().map(Input::device);
            let weights = access.writes().next().map(Output::device);
            self.hook.call(parameter, gradient, weights, Some(access.stream()))?;
        }
        Ok(())
    }
}
