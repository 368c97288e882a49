//! From a model, a profile and caps to a verified schedule.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use lazy_model::step::PAGE_ALIGNMENT;
use lazy_model::{Bytes, HardwareProfile, ModelSpec, Schedule, StepProblem, Tier, TierBytes, Verified};
use lazy_optim_nvme::{AdamOptions, Durability, Moments, NvmeAdam, ParamSpec, UpdateOn};
use lazy_runtime::Model;
use lazy_solver::budgets::BudgetArgs;
use lazy_solver::step::{StepFailure, StepOptions, best_execution, solve_step};
use lazy_store::DeviceChoice;
use lazy_store::cuda::Gpu;

use crate::backend::Backend;
use crate::error::{Result, TrainError};
use crate::habits::{HabitArgs, Habits};
use crate::homes::are_in_ram;
use crate::probe::optimizer_time;
use crate::settings::{
    DurabilityChoice, MomentFormat, Prefetch, Settings, StateHome, TrainArgs, UpdateChoice,
};

/// Most layers between two saved boundaries.
const MAX_SEGMENT: usize = 4;
/// Buckets the state of a small model is cut into at the least.
const LEAST_BUCKETS: usize = 8;

/// How the optimizer's state of a model is cut: the default bucket for large models, at least eight buckets for small ones, chunks
/// no larger than a bucket.
pub fn adam_options(
    parameters: u64,
    settings: &Settings,
    update: UpdateChoice,
    device: DeviceChoice,
) -> AdamOptions {
    let default = AdamOptions::default();
    // A bucket is a whole number of blocks over which the gradient norm is summed.
    const BLOCK: usize = 65_536;
    let small = (parameters as usize / LEAST_BUCKETS / BLOCK * BLOCK).max(BLOCK / 16);
    let bucket_elements = small.min(default.bucket_elements);
    let chunk = Bytes((bucket_elements * size_of::<f32>()) as u64);
    let durability = match settings.durability {
        DurabilityChoice::Step => Durability::Step,
        DurabilityChoice::Checkpoint => Durability::Checkpoint,
    };
    let all = Bytes(u64::MAX);
    let (hbm, host) = match settings.state {
        StateHome::Nvme => (Bytes::ZERO, Bytes::ZERO),
        StateHome::Host => (Bytes::ZERO, settings.state_host.unwrap_or(all)),
        StateHome::Hbm => (settings.state_hbm.unwrap_or(all), settings.state_host.unwrap_or(all)),
    };
    let update = match update {
        UpdateChoice::Cpu => UpdateOn::Cpu,
        UpdateChoice::Cuda => UpdateOn::Cuda,
        UpdateChoice::Auto => UpdateOn::Auto,
    };
    let chunk_bytes = Bytes(default.chunk_bytes.get().min(chunk.get()));
    AdamOptions { bucket_elements, chunk_bytes, durability, device, update, hbm, host, ..default }
}

/// A cap that was not given, where the plan does not have to be made to fit one.
const OPEN: Bytes = Bytes(1 << 60);

/// The planning problem of a run. Caps that were not given are, where the plan is to be solved, what a GPU and its machine have free, and
/// on the host device chosen so that the activations do not fit; they are open where the plan is given. What is free on the file system of
/// `spill` is so but for the optimizer's state, where that is yet to be made in the folder `new_state`.
///
/// # Errors
/// When a cap is not a size, or the profile's times are for another number of layers.
pub fn problem(
    backend: &Backend,
    settings: &Settings,
    profile: &HardwareProfile,
    adam: &AdamOptions,
    args: &TrainArgs,
    spill: &Path,
    new_state: Option<&Path>,
) -> Result<StepProblem> {
    let runtime = backend.model()?;
    let sizes = runtime.sizes().clone();
    let n = sizes.saved.len();
    let budgets = &args.budgets;
    let costs = profile.costs().filter(|c| c.forward.len() == n).ok_or_else(|| {
        TrainError::Usage(format!(
            "the profile has no layer times for a model of {n} layers: make one with `cargo xtask probe` and the same --model, \
             --batch and --seq, or leave --profile out"
        ))
    })?;
    let fixed = fixed(backend, &runtime, settings, adam)?;
    let parameters = backend.spec().total_parameters();
    let beside = settings.is_beside_backward() && !are_in_ram(runtime.options());
    let bucket_share = beside.then(|| (adam.bucket_elements as f64 / parameters as f64).min(1.0));
    let (optimizer, beside_backward) = optimizer_time(profile, parameters, bucket_share);
    let defaults = match backend.gpu() {
        _ if args.plan != "auto" => TierBytes { hbm: OPEN, host: OPEN, nvme: OPEN },
        Some(gpu) => {
            let specs = optimized(backend.spec(), settings);
            let state = most_on_disk(&specs, adam, &args.habits)?;
            free_budgets(gpu, free_beside(spill, new_state, state)?)?
        }
        None => {
            let least = least(backend, settings, adam)?;
            default_budgets(&sizes.boundary, least, args.prefetch.blocks().unwrap_or(0) as u64)
        }
    };
    let cap = |tier| {
        Ok::<_, TrainError>(budgets.cap(tier).map_err(TrainError::Usage)?.unwrap_or(defaults.get(tier)))
    };
    Ok(StepProblem {
        boundary_bytes: sizes.boundary,
        saved_bytes: sizes.saved,
        workspaces: sizes.workspaces,
        streamed: sizes.streamed,
        costs,
        micro_batches: settings.accum,
        optimizer,
        beside_backward,
        fixed,
        budgets: TierBytes { hbm: cap(Tier::Hbm)?, host: cap(Tier::Host)?, nvme: cap(Tier::Nvme)? },
        max_segment: MAX_SEGMENT,
    })
}

/// What a step holds throughout, whatever is placed where.
fn fixed(backend: &Backend, runtime: &Model, settings: &Settings, adam: &AdamOptions) -> Result<TierBytes> {
    let optimized = optimized(backend.spec(), settings);
    let of_optimizer = match backend {
        Backend::Host(_) => Bytes::ZERO,
        Backend::Cuda(_) => NvmeAdam::device_bytes(&optimized, adam)?,
    };
    Ok(TierBytes {
        hbm: backend.own_bytes() + runtime.resident() + of_optimizer,
        host: NvmeAdam::memory_bytes(&optimized, adam)?,
        nvme: Bytes::ZERO,
    })
}

/// Parameters smaller than this keep float32 moments: they take no space worth saving.
const LEAST_IN_FEWER_BITS: usize = 4096;

/// The parameters as the optimizer knows them: matrices in group 0, the rest, which does not decay, in group 1; moments of the
/// largest in 8 bits, as far as the share that was asked for goes, and of the others as asked.
pub fn optimized(spec: &ModelSpec, settings: &Settings) -> Vec<ParamSpec> {
    let parameters = spec.parameters();
    let sizes: Vec<usize> = parameters.iter().map(|p| p.shape.iter().product()).collect();
    let mut in_order: Vec<usize> = (0..sizes.len()).filter(|i| sizes[*i] >= LEAST_IN_FEWER_BITS).collect();
    in_order.sort_by_key(|i| std::cmp::Reverse(sizes[*i]));
    let total: usize = sizes.iter().sum();
    let mut moments = vec![Moments::F32; sizes.len()];
    let mut in_8_bits = 0;
    for index in in_order {
        let fits = (in_8_bits + sizes[index]) as f64 <= settings.max_8bit_fraction * total as f64;
        moments[index] = match settings.moments {
            _ if fits => Moments::Int8,
            MomentFormat::Bf16 => Moments::Bf16,
            MomentFormat::F32 | MomentFormat::Int8 => Moments::F32,
        };
        in_8_bits += if fits { sizes[index] } else { 0 };
    }
    let named = parameters.iter().zip(moments);
    named
        .map(|(p, moments)| {
            let group = usize::from(p.shape.len() < 2);
            ParamSpec::new(p.name.as_str(), &p.shape).in_group(group).with_moments(moments)
        })
        .collect()
}

/// What a step holds at the least, whatever is placed where.
fn least(backend: &Backend, settings: &Settings, adam: &AdamOptions) -> Result<TierBytes> {
    let runtime = backend.model()?;
    let fixed = fixed(backend, &runtime, settings, adam)?;
    let sizes = runtime.sizes();
    let homes = sizes.streamed.weights.iter().chain(&sizes.streamed.gradients);
    let homes: Bytes = homes.map(|bytes| bytes.align_up(PAGE_ALIGNMENT)).sum();
    Ok(TierBytes { hbm: fixed.hbm + sizes.step().least_hbm(), host: fixed.host + homes, ..fixed })
}

/// Refuses, before anything is measured, caps that are no sizes and steps that no plan can make fit.
///
/// # Errors
/// When a cap is wrong, or does not hold what is there whatever goes where, or this machine's memory does not.
pub fn check_room(
    backend: &Backend,
    settings: &Settings,
    adam: &AdamOptions,
    budgets: &BudgetArgs,
) -> Result<()> {
    let fixed = least(backend, settings, adam)?;
    for tier in Tier::ALL {
        if let Some(budget) = budgets.cap(tier).map_err(TrainError::Usage)?
            && budget < fixed.get(tier)
        {
            let fixed = fixed.get(tier);
            return Err(StepFailure::Fixed { tier, budget, fixed, needed: fixed }.into());
        }
    }
    let remedy =
        "make --batch or --seq smaller, keep more of the optimizer's state on NVMe, or take a smaller model";
    let (in_ram, on_gpu) = match backend.gpu() {
        None => (fixed.hbm + fixed.host, None),
        Some(gpu) => (fixed.host, Some(gpu.memory()?.0)),
    };
    if let Some(there) = on_gpu.filter(|there| *there < fixed.hbm) {
        return Err(TrainError::Usage(format!(
            "a step needs {} of HBM whatever is placed where, and {there} are free on the GPU: {remedy}",
            fixed.hbm
        )));
    }
    match total_memory() {
        Some(there) if there < in_ram => Err(TrainError::Usage(format!(
            "a step needs {in_ram} whatever is placed where, and this machine has {there} of memory: {remedy}"
        ))),
        _ => Ok(()),
    }
}

/// Refuses a model whose weights and gradients alone are more than this machine's memory.
///
/// # Errors
/// When they are.
pub fn check_parameters(spec: &ModelSpec) -> Result<()> {
    let needed = Bytes(spec.total_parameters()) * (2 * size_of::<f32>() as u64);
    match total_memory() {
        Some(there) if there < needed => Err(TrainError::Usage(format!(
            "weights and gradients of the model need {needed}, and this machine has {there} of memory: take a smaller model"
        ))),
        _ => Ok(()),
    }
}

/// The machine's memory; on the host device part of it stands for HBM.
fn total_memory() -> Option<Bytes> {
    memory_of("MemTotal:")
}

/// A line of the kernel's account of memory.
fn memory_of(name: &str) -> Option<Bytes> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib =
        text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())?;
    Some(Bytes(1024) * kib)
}

/// Left of a GPU's free memory for what no plan counts: kernels, libraries, and pages that are broken off.
const HBM_RESERVE: Bytes = Bytes(3 << 29);

/// Caps of a run on a GPU: what is free there, four fifths of the RAM that is available, and nine tenths of what is free for spill files.
fn free_budgets(gpu: &Gpu, for_spill: Bytes) -> Result<TierBytes> {
    let share = |bytes: Bytes, of: [u64; 2]| Bytes(bytes.get() / of[1] * of[0]);
    Ok(TierBytes {
        hbm: gpu.memory()?.0.saturating_sub(HBM_RESERVE),
        host: share(memory_of("MemAvailable:").unwrap_or_default(), [4, 5]),
        nvme: share(for_spill, [9, 10]),
    })
}

/// Bytes free on the file system of the folder, or of the nearest one above that exists.
///
/// # Errors
/// When it cannot be asked.
pub fn free_space(dir: &Path) -> Result<Bytes> {
    let there = existing(dir)?;
    let stat = rustix::fs::statvfs(&there).map_err(|e| TrainError::io(&there)(e.into()))?;
    Ok(Bytes(stat.f_bavail.saturating_mul(stat.f_frsize)))
}

/// The folder, or the nearest one above that exists.
fn existing(dir: &Path) -> Result<PathBuf> {
    let there = std::path::absolute(dir).map_err(TrainError::io(dir))?;
    Ok(there.ancestors().find(|folder| folder.exists()).unwrap_or(dir).to_path_buf())
}

/// Bytes free in `dir` once `state` more are in the folder `other`: where that is on another file system, or nowhere, all that are free now.
fn free_beside(dir: &Path, other: Option<&Path>, state: Bytes) -> Result<Bytes> {
    let free = free_space(dir)?;
    let device = |dir: &Path| {
        let there = existing(dir)?;
        Ok::<_, TrainError>(std::fs::metadata(&there).map_err(TrainError::io(&there))?.dev())
    };
    Ok(match other {
        Some(other) if device(dir)? == device(other)? => free.saturating_sub(state),
        _ => free,
    })
}

/// The options of a store as it is on disk when it is saved: all of its state, wherever that is at home.
pub fn saved(adam: &AdamOptions) -> AdamOptions {
    AdamOptions { host: Bytes::ZERO, hbm: Bytes::ZERO, ..adam.clone() }
}

/// The most that the state of a new run takes on disk: with saves as it goes on, the slots that each generation keeps too, of which there is
/// one more than is kept while it is made.
fn most_on_disk(specs: &[ParamSpec], adam: &AdamOptions, habits: &HabitArgs) -> Result<Bytes> {
    if habits.no_save {
        return Ok(NvmeAdam::bytes_on_disk(specs, adam)?);
    }
    let state = NvmeAdam::bytes_on_disk(specs, &saved(adam))?;
    if habits.save_every.unwrap_or(0) == 0 {
        return Ok(state);
    }
    let generation = AdamOptions { durability: Durability::Checkpoint, ..saved(adam) };
    let generations = (habits.keep.unwrap_or(Habits::default().keep) as u64).saturating_add(1);
    Ok(state + NvmeAdam::bytes_on_disk(specs, &generation)? * generations)
}

/// Caps into which the activations do not fit, so that a first run shows all tiers at work: HBM for a third of the boundaries besides what
/// every plan needs (read-ahead that was asked for included), host RAM for a quarter and staging, NVMe for a sixth; the rest has to be
/// recomputed.
fn default_budgets(boundaries: &[Bytes], least: TierBytes, prefetch: u64) -> TierBytes {
    let (layers, boundary) = (boundaries.len() as u64 - 1, boundaries[0]);
    let room = |boundaries: u64| Bytes(boundary.align_up(4096).get() * boundaries);
    TierBytes {
        hbm: least.hbm + room((layers / 3).max(2) + prefetch),
        host: least.host + room(layers / 4 + 1),
        nvme: least.nvme + room((layers / 6).max(1)),
    }
}

/// A plan ready to run.
pub struct Chosen {
    /// What is carried out; its promise is filled in.
    pub schedule: Schedule,
    /// Its operations and simulated time line.
    pub verified: Verified,
    /// The caps it keeps: those given, and what it needs where none was.
    pub budgets: TierBytes,
}

/// Refuses, before anything is measured, a plan that is neither a name nor a schedule file.
///
/// # Errors
/// When it is none.
pub fn check_plan(plan: &str) -> Result<()> {
    match plan {
        "auto" | "resident" | "checkpoint" => Ok(()),
        file => read_schedule(file).map(drop),
    }
}

fn read_schedule(file: &str) -> Result<Schedule> {
    let text = std::fs::read_to_string(file).map_err(|source| {
        TrainError::Usage(format!(
            "--plan {file}: {source}; give `auto`, `resident`, `checkpoint` or a schedule file"
        ))
    })?;
    Ok(Schedule::from_json(&text)?)
}

/// Solves, names or reads the plan, and verifies it against the caps.
///
/// # Errors
/// When there is no plan, the file is not a schedule for this model, or the caps do not hold it.
pub fn choose(problem: &StepProblem, plan: &str, prefetch: Prefetch) -> Result<Chosen> {
    let (schedule, verified) = match plan {
        "auto" => {
            let options = StepOptions { prefetch: prefetch.blocks(), ..StepOptions::default() };
            let found = solve_step(problem, &options)?;
            (found.schedule, found.verified)
        }
        "resident" | "checkpoint" => {
            let schedule = Schedule::named(plan, &problem.boundary_bytes, plan == "resident");
            best_execution(problem, &schedule, prefetch.blocks())?
        }
        file => {
            let schedule = read_schedule(file)?;
            let distance = prefetch.blocks().unwrap_or(schedule.execution.prefetch);
            best_execution(problem, &schedule, Some(distance))?
        }
    };
    let mut budgets = problem.budgets;
    for tier in Tier::ALL {
        if budgets.get(tier) == OPEN {
            *budgets.get_mut(tier) = verified.promise.peak_bytes.get(tier);
        }
    }
    Ok(Chosen { schedule, verified, budgets })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_that_is_yet_to_be_made_takes_its_space_from_spill_files_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let (spill, state) = (dir.path().join("runs/spill"), dir.path().join("runs/a/state"));
        // More than anybody else takes or frees meanwhile.
        let much = Bytes(1 << 50);
        assert_eq!(free_beside(&spill, Some(&state), much).unwrap(), Bytes::ZERO);
        let elsewhere = Path::new("/proc/self/state");
        for other in [None, Some(elsewhere)] {
            assert!(free_beside(&spill, other, much).unwrap() > Bytes::ZERO, "{other:?}");
        }
    }

    /// Two slots to step, one for each generation that is kept and one for the next, and less than a twentieth besides.
    #[test]
    fn saves_take_a_slot_for_each_generation() {
        let elements = 1 << 22;
        let specs = [ParamSpec::new("w", &[elements])];
        let settings = Settings { durability: DurabilityChoice::Step, ..Settings::default() };
        let adam = adam_options(elements as u64, &settings, UpdateChoice::Auto, DeviceChoice::Host);
        for (no_save, save_every, keep, slots) in [
            (false, None, None, 2.0),
            (false, Some(10), None, 4.0),
            (false, Some(10), Some(3), 6.0),
            (true, None, None, 2.0),
        ] {
            let habits = HabitArgs { save_every, keep, no_save, ..HabitArgs::default() };
            let found = most_on_disk(&specs, &adam, &habits).unwrap().get() as f64 / (12 * elements) as f64;
            assert!((slots..slots * 1.05).contains(&found), "{habits:?}: {found}");
        }
        let habits = HabitArgs { save_every: Some(1), keep: Some(usize::MAX), ..HabitArgs::default() };
        assert!(most_on_disk(&specs, &adam, &habits).unwrap() > Bytes(1 << 60));
    }

    /// A bucket's slot: three float32 an element, and less than a twentieth besides, records among it.
    #[test]
    fn state_takes_two_slots_on_disk_or_one_wherever_it_lives_between_saves() {
        let elements = 1 << 22;
        let specs = [ParamSpec::new("w", &[elements])];
        let of = |state, durability| {
            let settings = Settings { state, durability, ..Settings::default() };
            let device = DeviceChoice::Host;
            let adam = adam_options(elements as u64, &settings, UpdateChoice::Auto, device);
            let bytes = NvmeAdam::bytes_on_disk(&specs, &saved(&adam)).unwrap();
            bytes.get() as f64 / (12 * elements) as f64
        };
        for (state, durability, slots) in [
            (StateHome::Nvme, DurabilityChoice::Step, 2.0),
            (StateHome::Nvme, DurabilityChoice::Checkpoint, 1.0),
            (StateHome::Host, DurabilityChoice::Checkpoint, 1.0),
            (StateHome::Hbm, DurabilityChoice::Checkpoint, 1.0),
        ] {
            let found = of(state, durability);
            assert!((slots..slots + 0.05).contains(&found), "{state:?} {durability:?}: {found}");
        }
    }
}
