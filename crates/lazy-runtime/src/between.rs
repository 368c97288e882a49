//! Parameters in RAM, handed over between two steps.

use std::collections::BTreeMap;
use std::sync::mpsc::channel;

use lazy_model::{Lane, Tier};
use lazy_store::{Extent, StoreError, Submission};
use smallvec::SmallVec;

use crate::error::RuntimeError;
use crate::executor::Executor;
use crate::hook::FinalGradient;
use crate::layer::LayerError;
use crate::model::{HeldId, Model, Placed};
use crate::view::{FEW, Input, Output};

const NAME: &str = "parameters between steps";

impl Executor {
    /// Hands every parameter that the runtime keeps in RAM to `update`, with its weights to be changed and its gradient as the last step
    /// left it, and waits: for an optimizer that runs between steps. Those are all that it keeps on the host device, and beside a GPU those
    /// that are streamed from host RAM; what lies elsewhere is absent. They come in the order of their ids. Nothing is copied: what `update`
    /// writes is what the next step reads.
    ///
    /// `update` is a task of the optimizer's lane. It must not wait for this executor or its store.
    ///
    /// # Errors
    /// When `update` fails or panics; its error is inside, with the task's name, and weights are as it left them.
    pub fn update_in_ram<R: Send + 'static>(
        &self,
        update: impl FnOnce(Vec<FinalGradient<'_>>) -> Result<R, LayerError> + Send + 'static,
    ) -> Result<R, RuntimeError> {
        let [gradients, weights] = [true, false].map(|gradients| self.held_in_ram(gradients));
        let extents = |held: &[HeldId]| -> SmallVec<[&Extent; FEW]> {
            held.iter().map(|&id| self.extent(id)).collect()
        };
        let (reads, writes) = (extents(&gradients), extents(&weights));
        let submission =
            Submission { reads: &reads, writes: &writes, ..Submission::new(Lane::Optimizer, NAME) };
        let (send, receive) = channel();
        let model = self.shared_model();
        self.store().submit(submission, move |access| {
            let (read, written) = access.split();
            let read = gradients.iter().copied().zip(read).collect();
            let written = weights.iter().copied().zip(written).collect();
            // The caller waits for it.
            let _ = send.send(update(handed_over(&model, &read, written))?);
            Ok(())
        })?;
        self.store().synchronize()?;
        receive.recv().map_err(|_| StoreError::Skipped { task: NAME.into() }.into())
    }

    /// Buffers of gradients or of weights that lie in RAM, each once.
    fn held_in_ram(&self, gradients: bool) -> Vec<HeldId> {
        let place =
            |placed: &Placed| if gradients { placed.gradient.clone() } else { placed.weights.clone() };
        let places = self.model().parameters.values().filter_map(place);
        let mut held: Vec<HeldId> = places.map(|(id, _)| id).collect();
        let in_ram =
            |extent: &Extent| extent.tier() != Tier::Nvme && self.store().device_range(extent).is_none();
        held.retain(|&id| in_ram(self.extent(id)));
        held.sort_unstable();
        held.dedup();
        held
    }
}

/// Parameters in the order of their ids, with their parts of these buffers.
fn handed_over<'a>(
    model: &'a Model,
    gradients: &BTreeMap<HeldId, &'a [u8]>,
    weights: BTreeMap<HeldId, &'a mut [u8]>,
) -> Vec<FinalGradient<'a>> {
    // Of each buffer of weights what is left, and where that begins; parts are cut off in the order in which they lie there.
    let mut left: BTreeMap<HeldId, (usize, &'a mut [u8])> =
        weights.into_iter().map(|(id, bytes)| (id, (0, bytes))).collect();
    let mut in_place: Vec<&Placed> = model.parameters.values().collect();
    in_place.sort_by_key(|placed| placed.weights.as_ref().map(|(held, range)| (*held, range.start)));
    let mut all: Vec<FinalGradient<'a>> = Vec::new();
    for Placed { parameter, weights, gradient, .. } in in_place {
        let weights = weights.as_ref().and_then(|(held, range)| {
            let (start, bytes) = left.remove(held)?;
            let (part, rest) = bytes.split_at_mut(range.start - start).1.split_at_mut(range.len());
            left.insert(*held, (range.end, rest));
            Some(Output::of(part))
        });
        let gradient =
            gradient.as_ref().and_then(|(held, range)| Some(Input::of(gradients.get(held)?).part(range)));
        if weights.is_some() || gradient.is_some() {
            all.push(FinalGradient { parameter, gradient, weights, stream: None });
        }
    }
    all.sort_by_key(|handed| handed.parameter.id);
    all
}
