//! What an optimizer hangs on to a step.

use std::sync::Arc;

use lazy_store::{Event, Store, StoreError, Stream, Submission, Tier};

use crate::layer::{LayerError, Parameter};
use crate::model::Model;
use crate::program::Final;
use crate::view::{Input, Output};

/// A parameter whose gradient is final: all micro-batches have added to it.
///
/// The hook runs on the optimizer's lane, beside the backward of the layers below; the weights are no longer needed by this step, and the
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

    /// Queues the calls for parameters whose gradients lie in one buffer, and their weights, too.
    pub(crate) fn submit(
        self: &Arc<Self>,
        store: &Store,
        task: Submission<'_>,
        finals: &[Final],
    ) -> Result<Event, StoreError> {
        let (hook, finals) = (Arc::clone(self), finals.to_vec());
        let in_hbm = task.reads.iter().chain(task.writes).any(|extent| extent.tier() == Tier::Hbm);
        let (reads, writes) = (!task.reads.is_empty(), !task.writes.is_empty());
        if store.gpu().is_some() && in_hbm {
            return store.launch(task, move |access| {
                for parameter in &finals {
                    let gradient = reads.then(|| Input::device(access.read(0)));
                    let weights = writes.then(|| Output::device(access.write(0)));
                    hook.call(parameter, gradient, weights, Some(access.stream()))?;
                }
                Ok(())
            });
        }
        store.submit(task, move |access| {
            let (mut gradients, mut weights) = access.split();
            let (gradient, mut weights) = (gradients.next(), weights.next());
            for parameter in &finals {
                let weights = weights.as_deref_mut().map(Output::of);
                hook.call(parameter, gradient.map(Input::of), weights, None)?;
            }
            Ok(())
        })
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
