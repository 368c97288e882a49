//! Measures a model on this machine: layers, links, optimizer.

mod host;

use std::path::Path;
use std::time::{Instant, SystemTime};

use lazy_model::{
    BesideBackward, Bytes, BytesPerSecond, HardwareProfile, Links, Marked, ModelSpec, Schedule, Seconds,
    Tiers,
};
use lazy_optim_nvme::{AdamOptions, Gradient, GroupOptions, Moments, NvmeAdam, ParamSpec, StepInput};
use lazy_runtime::Model;
use lazy_store::{DeviceChoice, LinkLimits, NvmeOptions, Store, StoreOptions};

use crate::backend::Backend;
use crate::cuda;
use crate::cuda::probe::{Beside, TRIAL_ELEMENTS};
use crate::error::{Result, TrainError};
use crate::homes::are_in_ram;
use crate::io::IoChoice;
use crate::model::Shape;
use crate::planning::optimized;
use crate::settings::Settings;
use crate::stop;
use host::Passes;

/// Steps of a trial store, the first of which does not count.
const REPETITIONS: usize = 9;
/// Most elements of the trial optimizer; its rate is scaled from there.
const OPTIMIZER_ELEMENTS: usize = 8 << 20;

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
    let specs = optimized(spec, settings);
    let (name, seen, beside, [element, commit]) = match backend {
        Backend::Host(model) => {
            let mut passes = Passes::open(model, shape, spill)?;
            let optimizer = optimizer(backend, &specs, spill, adam, &mut || passes.step())?;
            ("this machine", passes.seen, Beside::default(), optimizer)
        }
        Backend::Cuda(decoder) => {
            let (seen, beside) = cuda::probe::layer_times(decoder, spill)?;
            let optimizer = optimizer(backend, &specs, spill, adam, &mut || Ok(()))?;
            (decoder.gpu().name(), seen, beside, optimizer)
        }
    };
    let of_optimizer = |value| Marked::measured(value, "trial optimizer steps", &when);
    let times = seen.times(workload_name(spec, shape), spec.layers(), "trial steps", &when);
    let boundary = backend.model()?.sizes().boundary[0];
    let mut links = link_rates(boundary, (backend.device(), io), spill, limits, &when)?;
    beside.correct(&mut links, &when);
    Ok(HardwareProfile {
        name: name.into(),
        tiers: Tiers::default(),
        links,
        drives: None,
        compute: None,
        times: Some(times),
        optimizer_elements_per_s: Some(of_optimizer(1.0 / element)),
        optimizer_commit_share: Some(of_optimizer(commit / element)),
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

/// A layer of so many keeps its internals in trial steps, so that every way in which layers run is seen: few, so that a large model fits.
pub(crate) fn apart(layers: usize) -> usize {
    const KEPT: usize = 4;
    (layers / KEPT).max(2)
}

/// The plan of trial steps: boundaries stay in HBM, a few layers keep their internals.
pub(crate) fn schedule(model: &Model) -> Schedule {
    let mut schedule = Schedule::named("probe", &model.sizes().boundary, false);
    let apart = apart(schedule.keep.len());
    schedule.keep.iter_mut().step_by(apart).for_each(|keep| *keep = true);
    schedule
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

/// Seconds an element of whole optimizer steps, norm and commit included, and of their commit: each home of the state takes its share of the
/// time, at the rate that a trial store has there. `passes` are done before each step.
fn optimizer(
    backend: &Backend,
    specs: &[ParamSpec],
    spill: &Path,
    adam: &AdamOptions,
    passes: &mut dyn FnMut() -> Result<()>,
) -> Result<[f64; 2]> {
    let mut seconds = [0.0; 2];
    for (share, there) in homes(specs, adam)? {
        if share > 0.0 {
            let trial = trial(backend, specs, spill, &there, passes)?;
            seconds.iter_mut().zip(trial).for_each(|(sum, of)| *sum += share * of);
        }
    }
    Ok(seconds)
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

/// Seconds an element of steps of a trial store, and of their commit. It is of the model's size or [`OPTIMIZER_ELEMENTS`], whichever is smaller, with moments in the format of
/// the model's largest parameter.
fn trial(
    backend: &Backend,
    specs: &[ParamSpec],
    spill: &Path,
    adam: &AdamOptions,
    passes: &mut dyn FnMut() -> Result<()>,
) -> Result<[f64; 2]> {
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
    let (mut gradient, mut weights) = (vec![1e-3f32; in_ram], vec![0.0f32; in_ram]);
    let mut samples = Vec::new();
    for _ in 0..REPETITIONS {
        stop::check()?;
        passes()?;
        let start = Instant::now();
        let input =
            StepInput { groups: &[GroupOptions::default()], max_norm: Some(1.0), ..StepInput::default() };
        let outcome = match &on_gpu {
            None => {
                let outcome =
                    trial.step(&[Some(Gradient::F32(&gradient))], &input, &mut |_, first, values| {
                        weights[first..][..values.len()].copy_from_slice(values);
                    })?;
                // As long as clearing it takes.
                gradient.fill(1e-3);
                outcome
            }
            Some(on_gpu) => on_gpu.step(&mut trial, &input)?,
        };
        samples.push([start.elapsed().as_secs_f64(), outcome.seconds.commit.get()]);
    }
    drop(trial);
    std::fs::remove_dir_all(&dir).map_err(TrainError::io(&dir))?;
    Ok([0, 1].map(|of| median(samples.iter().skip(1).map(|sample| sample[of]).collect()) / elements as f64))
}

/// Time of the optimizer step for this many elements at the profile's rate, zero where the profile has none; and how it runs beside
/// backward where it does so, with that share of its state a bucket.
pub fn optimizer_time(
    profile: &HardwareProfile,
    elements: u64,
    bucket_share: Option<f64>,
) -> (Seconds, Option<BesideBackward>) {
    let [rate, commit] = [&profile.optimizer_elements_per_s, &profile.optimizer_commit_share]
        .map(|marked| marked.as_ref().map_or(0.0, |m| m.value));
    let time = if rate > 0.0 { elements as f64 / rate } else { 0.0 };
    let beside = |bucket_share| BesideBackward { bucket_share, commit: Seconds(commit * time) };
    (Seconds(time), bucket_share.map(beside))
}

/// Now, UTC, as `2026-11-29T17:52:47Z`.
pub fn timestamp() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::Decoder;
    use crate::model::HostModel;

    #[test]
    fn models_of_any_depth_have_times_for_every_way_a_layer_runs() {
        let shape = Shape { batch: 2, seq: 8 };
        for layers in [1, 2, 5] {
            let config = include_str!("../config.json");
            let config =
                config.replace("\"num_hidden_layers\": 12", &format!("\"num_hidden_layers\": {layers}"));
            let spec = ModelSpec::from_json(&config).unwrap();
            let decoder = Decoder::new(spec, &mut |_, shape| vec![0.0; shape.iter().product()]).unwrap();
            let model = HostModel::new(decoder, shape, 3, 0.0);
            let dir = tempfile::tempdir().unwrap();
            let mut passes = Passes::open(&model, shape, dir.path()).unwrap();
            (0..3).for_each(|_| passes.step().unwrap());
            let times = passes.seen.times("test".into(), layers, "trial steps", "now");
            for list in
                [&times.forward_ms, &times.saving_forward_ms, &times.internals_forward_ms, &times.backward_ms]
            {
                assert!(list.value.len() == layers && list.value.iter().all(|ms| *ms > 0.0), "{list:?}");
            }
            let ends = [&times.prologue_ms, &times.prologue_backward_ms, &times.epilogue_ms];
            assert!(ends.iter().all(|time| time.value > 0.0), "{times:?}");
            // The run that follows adds to gradients of zero.
            let gradients = model.gradients.read();
            assert!(gradients.iter().all(|gradient| gradient.iter().all(|value| *value == 0.0)));
        }
    }

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
