//! One step: check, norm, update through the ring, commit.

use std::cell::RefCell;
use std::time::Instant;

use lazy_model::{Bytes, Lane, Seconds};

use crate::accelerator::Accelerator;
use crate::adam::{Gradient, WeightsOut};
use crate::device::DeviceSlice;
use crate::gradients::{Asking, Gradients};
use crate::layout::Layout;
use crate::norm::{self, NormPart};
use crate::out::Out;
use crate::record::Record;
use crate::ring::{Log, Ring};
use crate::transaction::Writing;
use crate::update::{Constants, Left, UpdatePass};
use crate::{Durability, GroupOptions, MAX_BLOB_BYTES, NvmeAdam, OptimError, StepInput, StepOutcome};

impl NvmeAdam {
    /// One optimizer step.
    ///
    /// `grads` are the gradients of all parameters. A parameter without one, its moments and its counter stay as they are.
    /// `weights(param, first, values)` receives the updated main weights as chunks are finished, for parameters with a gradient:
    /// a parameter is ready when its last piece was received. Pieces of a parameter come in order, but for [`Gradients::Awaited`],
    /// where those of a later bucket come first.
    ///
    /// The weights are handed out before the commit. If the step fails after that, the state on disk is the old one
    /// and the caller's copies may be newer: rebuild them with [`read_weights`](NvmeAdam::read_weights), which also
    /// clears the way for the next step; until then further steps are refused.
    ///
    /// With [`Gradients::Awaited`] updates begin before backward has ended. Their norm is known too late to clip them, unless
    /// [`StepInput::grad_norm`] gives it, so `max_norm` is refused; and so is [`Durability::Checkpoint`], whose steps cannot be
    /// taken back. Otherwise results are those of [`Gradients::Final`], bit for bit. Where a gradient is not finite, the step
    /// is skipped as ever, and weights that were handed out by then are handed out again as they were: until the last gradient was
    /// asked for, weights are not for use.
    pub fn step<'a, 'g: 'a>(
        &mut self,
        grads: impl Into<Gradients<'a, 'g>>,
        input: &StepInput<'_>,
        weights: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<StepOutcome, OptimError> {
        self.run(grads.into().shorter(), input, Out::Each(weights))
    }

    /// [`step`](NvmeAdam::step), whose updated weights are written into `weights`, one entry a parameter, by all threads while
    /// the state is in their caches; as bfloat16 they are rounded to the nearest. `None` takes none.
    ///
    /// `ready(param, room)` gives back the room of a parameter that has a gradient as soon as its weights are all there, while the
    /// step goes on: the next forward can begin with it, on another thread. With [`Gradients::Awaited`] none is given back before
    /// all gradients are known.
    pub fn step_into<'a, 'g: 'a, 'w>(
        &mut self,
        grads: impl Into<Gradients<'a, 'g>>,
        input: &StepInput<'_>,
        weights: Vec<Option<WeightsOut<'w>>>,
        ready: &mut dyn FnMut(usize, WeightsOut<'w>),
    ) -> Result<StepOutcome, OptimError> {
        self.check_out(&weights)?;
        self.run(grads.into().shorter(), input, Out::Into(weights, ready))
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
        let grads = grads.iter().enumerate().filter_map(|(param, grad)| Some((param, (*grad)?)));
        norm_parts(&self.layout, self.ring.accelerator(), grads, scale)
    }

    fn run<'a, 'g: 'a>(
        &mut self,
        grads: Gradients<'a, 'g>,
        input: &StepInput<'_>,
        out: Out<'a, '_>,
    ) -> Result<StepOutcome, OptimError> {
        let started = Instant::now();
        self.check_latch(|_| true)?;
        self.check_input(&grads, input)?;
        let (grads, asking) = grads.begin(self.layout.params().len());
        let mut log = Log::new(input.origin.unwrap_or(started));
        let accelerator = self.ring.shared_accelerator();
        let begun = accelerator.as_ref().map(|accelerator| accelerator.start());
        if let (Some(accelerator), Some(stream)) = (&accelerator, input.stream) {
            accelerator.wait_for(stream)?;
        }
        // Of those that are awaited there are none yet.
        let grad_norm = match input.grad_norm {
            Some(norm) => norm,
            None => norm::combine_norm(self.parts(&grads, input.scale)?),
        };
        let clip_coefficient = norm::clip_coefficient(grad_norm, input.max_norm);
        let mut outcome = StepOutcome { grad_norm, clip_coefficient, ..StepOutcome::default() };
        let normed = Instant::now();
        log.span(Lane::Optimizer, "gradient norm".into(), started, normed, Bytes::ZERO);
        outcome.seconds.norm = elapsed(started, normed);
        if grad_norm.is_finite() {
            self.update((grads, asking), input, out, &mut outcome, &mut log)?;
        }
        if !outcome.grad_norm.is_finite() {
            outcome.skipped = true;
            outcome.warning =
                Some(format!("the gradient norm is {}; the step was skipped", outcome.grad_norm));
        }
        if let (Some(accelerator), Some(begun)) = (accelerator, begun) {
            let offset = log.since(begun);
            log.spans.extend(accelerator.spans(offset));
        }
        (outcome.bytes_read, outcome.bytes_written, outcome.spans) = (log.read, log.written, log.spans);
        Ok(outcome)
    }

    /// The buckets to go through: those that hold an element with a gradient; of awaited ones all, the last parameters' first.
    fn touched(&self, grads: &[Option<Gradient<'_>>], asking: &Asking<'_, '_>) -> Vec<usize> {
        let params = |bucket: usize| self.layout.segments(self.layout.bucket(bucket)).map(|s| s.param);
        let all = 0..self.buckets.len();
        if !asking.is_needed() {
            return all.filter(|bucket| params(*bucket).any(|param| grads[param].is_some())).collect();
        }
        let mut all: Vec<usize> = all.collect();
        all.sort_by_key(|bucket| std::cmp::Reverse(params(*bucket).min()));
        all
    }

    /// Updates every bucket that has a gradient, and commits.
    fn update<'a, 'g: 'a>(
        &mut self,
        (grads, asking): (Vec<Option<Gradient<'g>>>, Asking<'a, 'g>),
        input: &StepInput<'_>,
        out: Out<'a, '_>,
        outcome: &mut StepOutcome,
        log: &mut Log,
    ) -> Result<(), OptimError> {
        let touched = self.touched(&grads, &asking);
        let clip = outcome.clip_coefficient;
        // What is left of them after the pass.
        let (passing, passed) = (RefCell::new(Some(((grads, asking), out))), RefCell::new(None));
        let pass = |ring: &mut Ring, record: &Record, writing: Writing<'_>, log: &mut Log| {
            let layout = writing.layout;
            let constants = Constants { layout, counts: &record.step_counts, input, clip };
            let Some((grads, out)) = passing.take() else { return (Ok(()), writing.end()) };
            let mut pass = UpdatePass::new(writing, constants, grads, out, ring);
            let whole: Vec<bool> = (0..layout.bucket_count()).map(|bucket| pass.is_whole(bucket)).collect();
            let chunks = ring.chunks_or_whole(layout, &touched, |bucket| whole[bucket]);
            let result = ring.run(layout, chunks, &mut pass, log);
            let result = result.and_then(|()| pass.end_asking());
            let (written, left) = pass.end();
            passed.replace(Some(left));
            (result, written)
        };
        let result = self.transact(&touched, log, &mut outcome.seconds, pass, |layout, record| {
            let passed = passed.borrow();
            let has = |param: usize| {
                passed.as_ref().is_some_and(|left: &Left<'_, '_, '_>| left.grads[param].is_some())
            };
            let counts = record.step_counts.iter().enumerate();
            Record {
                step_counts: counts.map(|(param, n)| n + u64::from(has(param))).collect(),
                groups: input.groups[..layout.group_count()].to_vec(),
                blob: input.blob.to_vec(),
                ..record
            }
        });
        let Some(mut left) = passed.into_inner() else { return result };
        if left.asking.is_needed() && input.grad_norm.is_none() {
            outcome.grad_norm = norm::combine_norm(std::mem::take(&mut left.asking.parts));
        }
        if left.asking.stopped.is_some() && matches!(result, Err(OptimError::NoGradient { .. })) {
            return self.take_back(left);
        }
        outcome.warning = stalled(&left.grads, input, outcome.grad_norm, clip);
        result
    }

    fn check_grads(&self, grads: &[Option<Gradient<'_>>]) -> Result<(), OptimError> {
        let params = self.layout.params();
        if grads.len() != params.len() {
            return Err(OptimError::GradCount { wanted: params.len(), found: grads.len() });
        }
        let has_device = self.ring.accelerator().is_some() || self.ring.is_given_up();
        let given = grads.iter().enumerate().filter_map(|(param, grad)| Some((param, (*grad)?)));
        given.into_iter().try_for_each(|(param, grad)| check_grad(&self.layout, has_device, param, grad))
    }

    /// Refuses device memory that cannot be used.
    fn check_slice(&self, what: &str, param: usize, slice: DeviceSlice) -> Result<(), OptimError> {
        let has_device = self.ring.accelerator().is_some() || self.ring.is_given_up();
        check_slice(&self.layout, has_device, what, param, slice)
    }

    pub(crate) fn check_out(&self, weights: &[Option<WeightsOut<'_>>]) -> Result<(), OptimError> {
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

    /// Refuses what cannot be had while gradients are still awaited.
    fn check_awaited(&self, input: &StepInput<'_>) -> Result<(), OptimError> {
        let refused = |what: &str| Err(OptimError::Option { what: what.into() });
        if self.durability == Durability::Checkpoint {
            return refused(
                "with durability = checkpoint a step cannot be taken back, should a gradient that is awaited not be finite: \
                 give gradients that are final, or set durability to step",
            );
        }
        if input.max_norm.is_some() && input.grad_norm.is_none() {
            return refused(
                "max_norm needs the norm of all gradients, which is not known while they are awaited: give gradients that \
                 are final, or grad_norm, or no max_norm",
            );
        }
        Ok(())
    }

    /// Everything that can be refused before anything moves.
    fn check_input(&self, grads: &Gradients<'_, '_>, input: &StepInput<'_>) -> Result<(), OptimError> {
        match grads {
            Gradients::Final(grads) => self.check_grads(grads)?,
            Gradients::Awaited(_) => self.check_awaited(input)?,
        }
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

/// Refuses a gradient that is not its parameter's.
pub(crate) fn check_grad(
    layout: &Layout,
    has_device: bool,
    param: usize,
    grad: Gradient<'_>,
) -> Result<(), OptimError> {
    let (wanted, found) = (layout.elements(param), grad.len());
    if wanted != found {
        let name = layout.params()[param].name.clone();
        return Err(OptimError::GradLength { name, wanted, found });
    }
    let slice = grad.on_device();
    slice.map_or(Ok(()), |slice| check_slice(layout, has_device, "the gradient", param, slice))
}

fn check_slice(
    layout: &Layout,
    has_device: bool,
    what: &str,
    param: usize,
    slice: DeviceSlice,
) -> Result<(), OptimError> {
    let (name, address) = (&layout.params()[param].name, slice.address());
    if !has_device {
        let what = format!(
            "{what} of {name} is in device memory; open the store with that GPU (AdamOptions::device)"
        );
        return Err(OptimError::Option { what });
    }
    if !address.is_multiple_of(slice.size() as u64) {
        let size = slice.size();
        let what =
            format!("{what} of {name} is at device address {address:#x}; give a multiple of {size} bytes");
        return Err(OptimError::Option { what });
    }
    Ok(())
}

/// The parts of the norm of the gradients given, wherever they are.
pub(crate) fn norm_parts<'a>(
    layout: &Layout,
    accelerator: Option<&Accelerator>,
    grads: impl Iterator<Item = (usize, Gradient<'a>)>,
    scale: f64,
) -> Result<Vec<NormPart>, OptimError> {
    let (mut in_ram, mut on_device) = (Vec::new(), Vec::new());
    for (param, grad) in grads {
        let first = layout.first(param);
        match grad.on_device() {
            None => in_ram.push((param, grad, first)),
            Some(slice) => on_device.push((param, slice, first)),
        }
    }
    let mut parts = norm::parts(in_ram, scale);
    if !on_device.is_empty() {
        parts.extend(accelerator.ok_or(OptimError::Suspended)?.norm_parts(on_device, scale)?);
    }
    Ok(parts)
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
