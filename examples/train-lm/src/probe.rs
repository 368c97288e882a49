//! Measures a model on this machine: layers, links, optimizer.

use std::path::Path;
use std::time::{Instant, SystemTime};

use lazy_model::{
    Bytes, BytesPerSecond, HardwareProfile, LayerIndex, Links, Marked, ModelSpec, Seconds, StepTimes, Tiers,
};
use lazy_optim_nvme::{AdamOptions, Gradient, GroupOptions, Moments, NvmeAdam, ParamSpec, StepInput};
use lazy_runtime::{Backward, Context, Forward, Grads, Input, Loss, Output, Phase, Saved, Weights};
use lazy_store::{DeviceChoice, LinkLimits, NvmeOptions, Store, StoreOptions};

use crate::backend::Backend;
use crate::batch::Batch;
use crate::cuda;
use crate::cuda::probe::{Beside, TRIAL_ELEMENTS};
use crate::error::{Result, TrainError};
use crate::homes::are_in_ram;
use crate::io::IoChoice;
use crate::model::{HostModel, Shape};
use crate::planning::optimized;
use crate::settings::Settings;
use crate::stop;

/// Repetitions after one that warms up.
const REPETITIONS: usize = 5;
/// Most elements of the trial optimizer; its rate is scaled from there.
const OPTIMIZER_ELEMENTS: usize = 4 << 20;

/// Runs the probe pass. Files are made under `spill` and removed again.
///
/// # Errors
/// When a layer, the store or the optimizer fails.
pub fn probe(
    backend: &Backend,
    settings: &Settings,
    spill: &Path,
    (limits, io): (LinkLimits, IoChoice),
    adam: &AdamOptions,
) -> Result<HardwareProfile> {
    let when = timestamp();
    let (spec, shape) = (backend.spec(), settings.shape());
    let (name, (times, beside)) = match backend {
        Backend::Host(model) => {
            ("this machine", (layer_times(&model.with_layers()?, shape)?, Beside::default()))
        }
        Backend::Cuda(decoder) => (decoder.gpu().name(), cuda::probe::layer_times(decoder, spill)?),
    };
    let times = times.medians(workload_name(spec, shape), spec.layers(), "probe pass", &when);
    stop::check()?;
    let boundary = backend.model()?.sizes().boundary[0];
    let mut links = link_rates(boundary, (backend.device(), io), spill, limits, &when)?;
    beside.correct(&mut links, &when);
    let rate = optimizer_rate(backend, &optimized(spec, settings), spill, adam)?;
    Ok(HardwareProfile {
        name: name.into(),
        tiers: Tiers::default(),
        links,
        drives: None,
        compute: None,
        times: Some(times),
        optimizer_elements_per_s: Some(Marked::measured(rate, "trial optimizer steps", &when)),
    })
}

/// What the times of a profile hold for.
pub fn workload_name(spec: &ModelSpec, shape: Shape) -> String {
    format!(
        "{} {} layers, hidden {}, {} parameters, {} x {} tokens",
        spec.family.model_type(),
        spec.layers(),
        spec.hidden,
        spec.total_parameters(),
        shape.batch,
        shape.seq
    )
}

fn layer_times(model: &HostModel, shape: Shape) -> Result<Times> {
    let bytes = model.boundary_bytes().get() as usize;
    let (prologue, layers, epilogue) = (model.prologue(), model.layers(), model.epilogue());
    let vocab = model.decoder.spec().vocab as u32;
    let ids = (0..shape.tokens() as u32).map(|t| t.wrapping_mul(2_654_435_761) % vocab).collect();
    let batch = &Batch::next_token([ids], shape.seq)[0];
    let cx = Context::new(None, Phase::Forward).with_inputs(batch);
    let (mut x, mut y) = (vec![0u8; bytes], vec![0u8; bytes]);
    let (mut dx, mut dy) = (vec![0u8; bytes], vec![0u8; bytes]);
    let mut times = Times::default();
    // In a step's order: what a layer finds in the caches is what it finds there.
    for repetition in 0..=REPETITIONS {
        let mut taken = Times::default();
        taken.prologue.push(time(|| prologue.forward(&cx, Weights::none(), Output::of(&mut x)))?);
        for (l, layer) in layers.iter().enumerate() {
            stop::check()?;
            let cx = Context::new(Some(LayerIndex(l)), Phase::Forward).with_inputs(batch);
            taken.forward.push(time(|| layer.forward(&cx, forward(&x, Some(&mut y), false)).map(drop))?);
            std::mem::swap(&mut x, &mut y);
        }
        for (l, layer) in layers.iter().enumerate() {
            stop::check()?;
            let cx = Context::new(Some(LayerIndex(l)), Phase::Forward).with_inputs(batch);
            taken.saving.push(time(|| layer.forward(&cx, forward(&x, Some(&mut y), true)).map(drop))?);
            std::mem::swap(&mut x, &mut y);
        }
        let mut loss = [0; size_of::<f32>()];
        let call = Loss {
            weights: Weights::none(),
            x: Input::of(&x),
            dx: Some(Output::of(&mut dx)),
            grads: Grads::none(),
            loss: Output::of(&mut loss),
            workspace: Output::of(&mut []),
        };
        taken.epilogue.push(time(|| epilogue.run(&cx, call))?);
        for (l, layer) in layers.iter().enumerate().rev() {
            stop::check()?;
            let cx = Context::new(Some(LayerIndex(l)), Phase::Recompute).with_inputs(batch);
            let mut saved = Saved::none();
            taken.internals.push(time(|| layer.forward(&cx, forward(&x, None, true)).map(|s| saved = s))?);
            std::mem::swap(&mut dx, &mut dy);
            let backward = Backward {
                weights: Weights::none(),
                x: Input::of(&x),
                internals: Input::of(&[]),
                saved,
                dy: Input::of(&dy),
                dx: Output::of(&mut dx),
                grads: Grads::none(),
                workspace: Output::of(&mut []),
            };
            taken.backward.push(time(|| layer.backward(&cx, backward))?);
        }
        let backward = || prologue.backward(&cx, Weights::none(), Input::of(&dx), Grads::none());
        taken.prologue_backward.push(time(backward)?);
        if repetition > 0 {
            times.append(taken);
        }
    }
    model.gradients.zero();
    Ok(times)
}

/// A forward for an output, for internals, or for both.
fn forward<'a>(x: &'a [u8], out: Option<&'a mut [u8]>, save: bool) -> Forward<'a> {
    let save = save.then(|| Output::of(&mut []));
    let (weights, workspace) = (Weights::none(), Output::of(&mut []));
    Forward { weights, x: Input::of(x), out: out.map(Output::of), save, workspace }
}

/// Samples in milliseconds, by what ran.
#[derive(Default)]
pub struct Times {
    /// Making boundary 0.
    pub prologue: Vec<f64>,
    /// A layer forward for its output.
    pub forward: Vec<f64>,
    /// A layer forward that keeps its internals.
    pub saving: Vec<f64>,
    /// A layer forward for its internals alone.
    pub internals: Vec<f64>,
    /// A layer backward.
    pub backward: Vec<f64>,
    /// The loss, forward and backward.
    pub epilogue: Vec<f64>,
    /// Backward of the prologue.
    pub prologue_backward: Vec<f64>,
}

impl Times {
    /// The medians, as a profile has them. All layers are of one kind: the median over layers and repetitions stands for each.
    pub fn medians(self, workload: String, layers: usize, source: &str, when: &str) -> StepTimes {
        let each = |samples: Vec<f64>| Marked::measured(vec![median(samples); layers], source, when);
        let one = |samples: Vec<f64>| Marked::measured(median(samples), source, when);
        StepTimes {
            workload,
            forward_ms: each(self.forward),
            saving_forward_ms: each(self.saving),
            internals_forward_ms: each(self.internals),
            backward_ms: each(self.backward),
            prologue_ms: one(self.prologue),
            prologue_backward_ms: one(self.prologue_backward),
            epilogue_ms: one(self.epilogue),
        }
    }

    fn append(&mut self, other: Times) {
        self.prologue.extend(other.prologue);
        self.forward.extend(other.forward);
        self.saving.extend(other.saving);
        self.internals.extend(other.internals);
        self.backward.extend(other.backward);
        self.epilogue.extend(other.epilogue);
        self.prologue_backward.extend(other.prologue_backward);
    }
}

fn time(work: impl FnOnce() -> std::result::Result<(), lazy_runtime::LayerError>) -> Result<f64> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

/// The middle sample; the mean of the middle two of an even number; zero of none.
pub fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    let n = samples.len();
    match n {
        0 => 0.0,
        _ if n % 2 == 1 => samples[n / 2],
        _ => (samples[n / 2 - 1] + samples[n / 2]) / 2.0,
    }
}

/// Rates of copies of one boundary over each link: each alone, both directions of the host's at once, and the drive's several in a row.
///
/// # Errors
/// When the store cannot be opened or a copy fails.
pub fn link_rates(
    boundary: Bytes,
    (device, io): (DeviceChoice, IoChoice),
    spill: &Path,
    limits: LinkLimits,
    when: &str,
) -> Result<Links> {
    // Extents on a drive start at multiples of what its files take: at most this.
    let room = Bytes(boundary.get().next_multiple_of(64 << 10) * 8);
    let store = Store::open(StoreOptions {
        device,
        hbm: room,
        host: room,
        nvme: Some(NvmeOptions { backend: io.spill(), ..NvmeOptions::new(spill, room) }),
        limits,
        ..StoreOptions::default()
    })?;
    let rates = store.probe_links(boundary)?;
    let marked = |rate, source| Marked::measured(rate, source, when);
    let (alone, both) = ("copies of one boundary", "copies of one boundary in both directions");
    let nvme = |rate: Option<BytesPerSecond>| marked(rate.unwrap_or_default(), "boundaries in a row");
    Ok(Links {
        d2h_both: Some(marked(rates.d2h_both, both)),
        h2d_both: Some(marked(rates.h2d_both, both)),
        ..Links::alone(
            marked(rates.d2h, alone),
            marked(rates.h2d, alone),
            nvme(rates.nvme_write),
            nvme(rates.nvme_read),
        )
    })
}

/// Elements a second of whole optimizer steps, norm and commit included: each home of the state takes its share of the time, at the rate
/// that a trial store has there.
fn optimizer_rate(backend: &Backend, specs: &[ParamSpec], spill: &Path, adam: &AdamOptions) -> Result<f64> {
    let mut seconds = 0.0;
    for (share, there) in homes(specs, adam)? {
        if share > 0.0 {
            seconds += share / trial_rate(backend, specs, spill, &there)?;
        }
    }
    Ok(1.0 / seconds)
}

/// HBM, RAM and NVMe: the share of the state's bytes that is at home there, and options under which all of a store is.
fn homes(specs: &[ParamSpec], adam: &AdamOptions) -> Result<[(f64, AdamOptions); 3]> {
    let (none, all) = (Bytes::ZERO, Bytes(u64::MAX));
    let only = |hbm, host| AdamOptions { hbm, host, ..adam.clone() };
    let in_ram = |hbm, host| -> Result<f64> {
        let bytes = |host| NvmeAdam::memory_bytes(specs, &only(hbm, host));
        Ok(bytes(host)?.saturating_sub(bytes(none)?).get() as f64)
    };
    let total = in_ram(none, all)?.max(1.0);
    let (but_hbm, host) = (in_ram(adam.hbm, all)?, in_ram(adam.hbm, adam.host)?);
    Ok([
        ((total - but_hbm) / total, only(all, none)),
        (host / total, only(none, all)),
        ((but_hbm - host) / total, only(none, none)),
    ])
}

/// Elements a second of a trial store of the model's size or [`OPTIMIZER_ELEMENTS`], whichever is smaller, with moments in the format of
/// the model's largest parameter.
fn trial_rate(backend: &Backend, specs: &[ParamSpec], spill: &Path, adam: &AdamOptions) -> Result<f64> {
    let all = usize::try_from(backend.spec().total_parameters()).unwrap_or(usize::MAX);
    let largest = specs.iter().max_by_key(|spec| spec.shape.iter().product::<usize>());
    let moments = largest.map_or(Moments::F32, |spec| spec.moments);
    let (in_ram, on_gpu) = match backend {
        Backend::Host(_) => (all.min(OPTIMIZER_ELEMENTS), None),
        // Gradients and weights of layers, which are most of all, are in RAM then.
        Backend::Cuda(decoder) if are_in_ram(&decoder.options().model) => (all.min(TRIAL_ELEMENTS), None),
        Backend::Cuda(decoder) => (0, Some(cuda::probe::TrialParameter::new(decoder, all)?)),
    };
    let elements = on_gpu.as_ref().map_or(in_ram, |parameter| parameter.elements());
    let dir = spill.join("trial-optimizer");
    let params = [ParamSpec::new("trial", &[elements]).with_moments(moments)];
    let mut trial = NvmeAdam::create(&dir, &params, adam, |_, _, values| values.fill(0.0))?;
    let gradient = vec![1e-3f32; in_ram];
    let mut samples = Vec::new();
    for _ in 0..REPETITIONS {
        stop::check()?;
        let start = Instant::now();
        let input =
            StepInput { groups: &[GroupOptions::default()], max_norm: Some(1.0), ..StepInput::default() };
        match &on_gpu {
            None => trial.step(&[Some(Gradient::F32(&gradient))], &input, &mut |_, _, _| ())?,
            Some(on_gpu) => on_gpu.step(&mut trial, &input)?,
        };
        samples.push(start.elapsed().as_secs_f64());
    }
    drop(trial);
    std::fs::remove_dir_all(&dir).map_err(TrainError::io(&dir))?;
    Ok(elements as f64 / median(samples))
}

/// Time of the optimizer step for this many elements at the profile's rate; zero where the profile has none.
pub fn optimizer_time(profile: &HardwareProfile, elements: u64) -> Seconds {
    let rate = profile.optimizer_elements_per_s.as_ref().map_or(0.0, |m| m.value);
    Seconds(if rate > 0.0 { elements as f64 / rate } else { 0.0 })
}

/// Now, UTC, as `2026-11-29T17:52:47Z`.
pub fn timestamp() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_is_timed_where_it_is_at_home() {
        // Eight buckets of 65,536 elements, three float32 each: two fit into HBM, three of the others into RAM.
        let bucket = 65_536 * 12;
        let adam = AdamOptions {
            bucket_elements: 65_536,
            hbm: Bytes(2 * bucket + 5),
            host: Bytes(3 * bucket + 5),
            ..AdamOptions::default()
        };
        let specs = [ParamSpec::new("w", &[8, 65_536])];
        let shares = |adam: &AdamOptions| homes(&specs, adam).unwrap().map(|(share, _)| share);
        assert_eq!(shares(&adam), [0.25, 0.375, 0.375]);
        assert_eq!(shares(&AdamOptions { hbm: Bytes::ZERO, ..adam.clone() }), [0.0, 0.375, 0.625]);
        let everything = AdamOptions { hbm: Bytes(u64::MAX), ..adam };
        assert_eq!(shares(&everything), [1.0, 0.0, 0.0]);
    }
}
