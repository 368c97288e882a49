//! One step: check, norm, update through the ring, commit.

use std::time::Instant;

use lazy_model::{Bytes, Lane, Seconds};

use crate::adam::{Gradient, Rule, WeightsOut};
use crate::device::DeviceSlice;
use crate::norm::{self, NormPart};
use crate::record::Record;
use crate::ring::{Log, Ring};
use crate::transaction::Writing;
use crate::update::{Out, UpdatePass};
use crate::{GroupOptions, MAX_BLOB_BYTES, NvmeAdam, OptimError, StepInput, StepOutcome};

impl NvmeAdam {
    /// One optimizer step.
    ///
    /// `grads` holds one entry a parameter, in order; `None` means no gradient this step: the parameter, its moments and its
    /// counter stay as they are. `weights(param, first, values)` receives the updated main weights as chunks are finished, a
    /// parameter's in order, for parameters with a gradient.
    ///
    /// The weights are handed out before the commit. If the step fails after that, the state on disk is the old one
    /// and the caller's copies may be newer: rebuild them with [`read_weights`](NvmeAdam::read_weights), which also
    /// clears the way for the next step; until then further steps are refused.
    pub fn step(
        &mut self,
        grads: &[Option<Gradient<'_>>],
        input: &StepInput<'_>,
        weights: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<StepOutcome, OptimError> {
        self.run(grads, input, Out::Each(weights))
    }

    /// [`step`](NvmeAdam::step), whose updated weights are written into `weights`, one entry a parameter, by all threads while
    /// the state is in their caches; as bfloat16 they are rounded to the nearest. `None` takes none.
    pub fn step_into(
        &mut self,
        grads: &[Option<Gradient<'_>>],
        input: &StepInput<'_>,
        weights: Vec<Option<WeightsOut<'_>>>,
    ) -> Result<StepOutcome, OptimError> {
        self.check_out(&weights)?;
        self.run(grads, input, Out::Into(weights))
    }

    /// The parts of the gradients' norm, for ranks that hold shards: their union, combined with
    /// [`combine_norm`](crate::combine_norm), is every rank's [`StepInput::grad_norm`]. Gradients in device memory are final by then:
    /// no stream is waited for.
    pub fn norm_parts(
        &self,
        grads: &[Option<Gradient<'_>>],
        scale: f64,
    ) -> Result<Vec<NormPart>, OptimError> {
        self.check_grads(grads)?;
        check_scale(scale)?;
        self.parts(grads, scale)
    }

    fn parts(&self, grads: &[Option<Gradient<'_>>], scale: f64) -> Result<Vec<NormPart>, OptimError> {
        let grads = || grads.iter().enumerate().map(|(param, grad)| (param, *grad, self.layout.first(param)));
        let in_ram = grads().map(|(_, grad, first)| (grad.filter(|grad| grad.on_device().is_none()), first));
        let mut parts = norm::parts(in_ram, scale);
        let on_device: Vec<(usize, DeviceSlice, usize)> =
            grads().filter_map(|(param, grad, first)| Some((param, grad?.on_device()?, first))).collect();
        if !on_device.is_empty() {
            let accelerator = self.ring.accelerator().ok_or(OptimError::Suspended)?;
            parts.extend(accelerator.norm_parts(on_device, scale)?);
        }
        Ok(parts)
    }

    fn run(
        &mut self,
        grads: &[Option<Gradient<'_>>],
        input: &StepInput<'_>,
        out: Out<'_, '_>,
    ) -> Result<StepOutcome, OptimError> {
        let started = Instant::now();
        self.check_latch(|_| true)?;
        self.check_input(grads, input)?;
        let mut log = Log::new(input.origin.unwrap_or(started));
        let accelerator = self.ring.shared_accelerator();
        let begun = accelerator.as_ref().map(|accelerator| accelerator.start());
        if let (Some(accelerator), Some(stream)) = (&accelerator, input.stream) {
            accelerator.wait_for(stream)?;
        }
        let grad_norm = match input.grad_norm {
            Some(norm) => norm,
            None => norm::combine_norm(self.parts(grads, input.scale)?),
        };
        let clip_coefficient = norm::clip_coefficient(grad_norm, input.max_norm);
        let mut outcome = StepOutcome { grad_norm, clip_coefficient, ..StepOutcome::default() };
        let normed = Instant::now();
        log.span(Lane::Optimizer, "gradient norm".into(), started, normed, Bytes::ZERO);
        outcome.seconds.norm = elapsed(started, normed);
        if grad_norm.is_finite() {
            outcome.warning = stalled(grads, input, grad_norm, clip_coefficient);
            self.update(grads, input, out, &mut outcome, &mut log)?;
        } else {
            outcome.skipped = true;
            outcome.warning = Some(format!("the gradient norm is {grad_norm}; the step was skipped"));
        }
        if let (Some(accelerator), Some(begun)) = (accelerator, begun) {
            let offset = log.since(begun);
            log.spans.extend(accelerator.spans(offset));
        }
        (outcome.bytes_read, outcome.bytes_written, outcome.spans) = (log.read, log.written, log.spans);
        Ok(outcome)
    }

    /// The buckets that hold an element with a gradient.
    fn touched(&self, grads: &[Option<Gradient<'_>>]) -> Vec<usize> {
        let touched = |bucket: &usize| {
            self.layout.segments(self.layout.bucket(*bucket)).any(|s| grads[s.param].is_some())
        };
        (0..self.buckets.len()).filter(touched).collect()
    }

    /// Updates every bucket that has a gradient, and commits.
    fn update(
        &mut self,
        grads: &[Option<Gradient<'_>>],
        input: &StepInput<'_>,
        out: Out<'_, '_>,
        outcome: &mut StepOutcome,
        log: &mut Log,
    ) -> Result<(), OptimError> {
        let touched = self.touched(grads);
        let clip = outcome.clip_coefficient;
        let pass = |ring: &mut Ring, record: &Record, writing: Writing<'_>, log: &mut Log| {
            let layout = writing.layout;
            let params = layout.params().iter().zip(&record.step_counts).zip(grads);
            let rules = params.map(|((param, count), grad)| {
                grad.map(|_| Rule::new(&input.groups[param.group], count + 1, input.scale, clip))
            });
            let mut pass = UpdatePass::new(writing, grads, rules.collect(), out, ring);
            let whole: Vec<bool> = (0..layout.bucket_count()).map(|bucket| pass.is_whole(bucket)).collect();
            let chunks = ring.chunks_or_whole(layout, &touched, |bucket| whole[bucket]);
            let passed = ring.run(layout, chunks, &mut pass, log);
            (passed, pass.end())
        };
        self.transact(&touched, log, &mut outcome.seconds, pass, |layout, record| Record {
            step_counts: record
                .step_counts
                .iter()
                .zip(grads)
                .map(|(n, grad)| n + u64::from(grad.is_some()))
                .collect(),
            groups: input.groups[..layout.group_count()].to_vec(),
            blob: input.blob.to_vec(),
            ..record
        })
    }

    fn check_grads(&self, grads: &[Option<Gradient<'_>>]) -> Result<(), OptimError> {
        let params = self.layout.params();
        if grads.len() != params.len() {
            return Err(OptimError::GradCount { wanted: params.len(), found: grads.len() });
        }
        for (index, grad) in grads.iter().enumerate() {
            let (wanted, found) = (self.layout.elements(index), grad.map_or(0, |grad| grad.len()));
            if grad.is_some() && wanted != found {
                return Err(OptimError::GradLength { name: params[index].name.clone(), wanted, found });
            }
            if let Some(slice) = grad.and_then(Gradient::on_device) {
                self.check_slice("the gradient", index, slice)?;
            }
        }
        Ok(())
    }

    /// Refuses device memory that cannot be used.
    fn check_slice(&self, what: &str, param: usize, slice: DeviceSlice) -> Result<(), OptimError> {
        let (name, address) = (&self.layout.params()[param].name, slice.address());
        if self.ring.accelerator().is_none() && !self.ring.is_given_up() {
            let what = format!(
                "{what} of {name} is in device memory; open the store with that GPU (AdamOptions::device)"
            );
            return Err(OptimError::Option { what });
        }
        if !address.is_multiple_of(slice.size() as u64) {
            let size = slice.size();
            let what = format!(
                "{what} of {name} is at device address {address:#x}; give a multiple of {size} bytes"
            );
            return Err(OptimError::Option { what });
        }
        Ok(())
    }

    fn check_out(&self, weights: &[Option<WeightsOut<'_>>]) -> Result<(), OptimError> {
        let params = self.layout.params();
        let refused = |what| Err(OptimError::Option { what });
        if weights.len() != params.len() {
            let (wanted, found) = (params.len(), weights.len());
            return refused(format!(
                "room for the weights of {found} parameters was given, there are {wanted}"
            ));
        }
        for (index, weights) in weights.iter().enumerate() {
            let wanted = self.layout.elements(index);
            if let Some(found) = weights.as_ref().map(WeightsOut::len).filter(|found| *found != wanted) {
                let name = &params[index].name;
                return refused(format!(
                    "the room for the weights of {name} has {found} elements, it has {wanted}"
                ));
            }
            if let Some(WeightsOut::Device(slice)) = weights {
                self.check_slice("the room for the weights", index, *slice)?;
            }
        }
        Ok(())
    }

    /// Everything that can be refused before anything moves.
    fn check_input(&self, grads: &[Option<Gradient<'_>>], input: &StepInput<'_>) -> Result<(), OptimError> {
        self.check_grads(grads)?;
        let (wanted, found) = (self.layout.group_count(), input.groups.len());
        if found < wanted {
            return Err(OptimError::GroupCount { wanted, found });
        }
        for (index, group) in input.groups.iter().enumerate() {
            check_group(index, group)?;
        }
        norm::check_max_norm(input.max_norm)?;
        check_scale(input.scale)?;
        if input.blob.len() > MAX_BLOB_BYTES {
            return Err(OptimError::BlobTooLarge { found: input.blob.len() });
        }
        Ok(())
    }
}

fn check_scale(scale: f64) -> Result<(), OptimError> {
    let rounded = scale as f32;
    if rounded.is_finite() && rounded > 0.0 { Ok(()) } else { Err(OptimError::Scale { scale }) }
}

fn check_group(group: usize, options: &GroupOptions) -> Result<(), OptimError> {
    let GroupOptions { lr, betas, eps, weight_decay, .. } = *options;
    for (name, value) in [("lr", lr), ("eps", eps), ("weight_decay", weight_decay)] {
        if !(value.is_finite() && value >= 0.0) {
            return Err(OptimError::HyperParameter { group, name, value, range: "finite and at least 0" });
        }
    }
    for (name, value) in [("beta1", betas.0), ("beta2", betas.1)] {
        if !(0.0..1.0).contains(&value) {
            return Err(OptimError::HyperParameter { group, name, value, range: "at least 0 and below 1" });
        }
    }
    Ok(())
}

/// Says so where clipping leaves gradients that are typically below `eps`: Adam then hardly moves, however long it
/// trains.
fn stalled(grads: &[Option<Gradient<'_>>], input: &StepInput<'_>, norm: f64, clip: f64) -> Option<String> {
    let elements: usize = grads.iter().flatten().map(Gradient::len).sum();
    let eps = input.groups.iter().map(|g| g.eps).fold(0.0, f64::max);
    let typical = clip * norm / (elements.max(1) as f64).sqrt();
    (clip < 1.0 && typical < eps).then(|| {
        format!(
            "the gradient norm {norm:.3e} was clipped to gradients of typically {typical:.1e}, below eps {eps:.1e}: \
             the weights will hardly move; raise max_norm or lower eps"
        )
    })
}

pub(crate) fn elapsed(from: Instant, to: Instant) -> Seconds {
    Seconds(to.saturating_duration_since(from).as_secs_f64())
}
