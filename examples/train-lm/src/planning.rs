//! From a model, a profile and caps to a verified schedule.

use lazy_model::{Bytes, HardwareProfile, ModelSpec, Schedule, StepProblem, Tier, TierBytes, Verified};
use lazy_optim_nvme::{AdamOptions, Durability, Moments, NvmeAdam, ParamSpec};
use lazy_runtime::Model;
use lazy_solver::budgets::BudgetArgs;
use lazy_solver::step::{StepFailure, StepOptions, best_execution, solve_step};

use crate::error::{Result, TrainError};
use crate::model::HostModel;
use crate::probe::optimizer_time;
use crate::settings::{DurabilityChoice, MomentFormat, Prefetch, Settings, StateHome};

/// Most layers between two saved boundaries.
const MAX_SEGMENT: usize = 4;
/// Buckets the state of a small model is cut into at the least.
const LEAST_BUCKETS: usize = 8;

/// How the optimizer's state of a model is cut: the default bucket for large models, at least eight buckets for small ones, chunks
/// no larger than a bucket.
pub fn adam_options(parameters: u64, settings: &Settings) -> AdamOptions {
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
    let host = match settings.state {
        StateHome::Nvme => Bytes::ZERO,
        StateHome::Host => Bytes(u64::MAX),
    };
    let chunk_bytes = Bytes(default.chunk_bytes.get().min(chunk.get()));
    AdamOptions { bucket_elements, chunk_bytes, durability, host, ..default }
}

/// A cap that was not given, where the plan does not have to be made to fit one.
const OPEN: Bytes = Bytes(1 << 60);

/// The planning problem of a run. Caps that were not given are chosen so that the activations do not fit where the plan is to be
/// solved, and are open where it is given.
///
/// # Errors
/// When a cap is not a size, or the profile's times are for another number of layers.
pub fn problem(
    model: &HostModel,
    settings: &Settings,
    profile: &HardwareProfile,
    adam: &AdamOptions,
    budgets: &BudgetArgs,
    plan: &str,
    prefetch: Prefetch,
) -> Result<StepProblem> {
    let runtime = model.model()?;
    let sizes = runtime.sizes().clone();
    let n = sizes.saved.len();
    let boundary = model.boundary_bytes();
    let costs = profile.costs().filter(|c| c.forward.len() == n).ok_or_else(|| {
        TrainError::Usage(format!(
            "the profile has no layer times for a model of {n} layers: make one with `cargo xtask probe` and the same --model, \
             --batch and --seq, or leave --profile out"
        ))
    })?;
    let fixed = fixed(model, &runtime, settings, adam)?;
    let defaults = if plan == "auto" {
        let least = least(model, settings, adam)?;
        default_budgets(n as u64, boundary, least, prefetch.blocks().unwrap_or(0) as u64)
    } else {
        TierBytes { hbm: OPEN, host: OPEN, nvme: OPEN }
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
        optimizer: optimizer_time(profile, model.decoder.spec().total_parameters()),
        fixed,
        budgets: TierBytes { hbm: cap(Tier::Hbm)?, host: cap(Tier::Host)?, nvme: cap(Tier::Nvme)? },
        max_segment: MAX_SEGMENT,
    })
}

/// What a step holds throughout, whatever is placed where.
fn fixed(model: &HostModel, runtime: &Model, settings: &Settings, adam: &AdamOptions) -> Result<TierBytes> {
    let shape = settings.shape();
    let declared = model.decoder.declared(shape.batch, shape.seq);
    Ok(TierBytes {
        hbm: declared.weights + declared.gradients + runtime.resident(),
        host: NvmeAdam::memory_bytes(&optimized(model, settings), adam)?,
        nvme: Bytes::ZERO,
    })
}

/// Parameters smaller than this keep float32 moments: they take no space worth saving.
const LEAST_IN_FEWER_BITS: usize = 4096;

/// The parameters as the optimizer knows them: matrices in group 0, the rest, which does not decay, in group 1; moments of the
/// largest in 8 bits, as far as the share that was asked for goes, and of the others as asked.
pub fn optimized(model: &HostModel, settings: &Settings) -> Vec<ParamSpec> {
    let parameters = model.decoder.parameters();
    let sizes: Vec<usize> = parameters.iter().map(|(_, v)| v.elem_count()).collect();
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
        .map(|((name, v), moments)| {
            ParamSpec::new(name.as_str(), v.dims()).in_group(usize::from(v.rank() < 2)).with_moments(moments)
        })
        .collect()
}

/// What a step holds at the least, whatever is placed where.
fn least(model: &HostModel, settings: &Settings, adam: &AdamOptions) -> Result<TierBytes> {
    let runtime = model.model()?;
    let fixed = fixed(model, &runtime, settings, adam)?;
    Ok(TierBytes { hbm: fixed.hbm + runtime.sizes().step().least_hbm(), ..fixed })
}

/// Refuses, before anything is measured, caps that are no sizes and steps that no plan can make fit.
///
/// # Errors
/// When a cap is wrong, or does not hold what is there whatever goes where, or this machine's memory does not.
pub fn check_room(
    model: &HostModel,
    settings: &Settings,
    adam: &AdamOptions,
    budgets: &BudgetArgs,
) -> Result<()> {
    let fixed = least(model, settings, adam)?;
    for tier in Tier::ALL {
        if let Some(budget) = budgets.cap(tier).map_err(TrainError::Usage)?
            && budget < fixed.get(tier)
        {
            let fixed = fixed.get(tier);
            return Err(StepFailure::Fixed { tier, budget, fixed, needed: fixed }.into());
        }
    }
    let (needed, there) = (fixed.hbm + fixed.host, total_memory());
    match there {
        Some(there) if there < needed => Err(TrainError::Usage(format!(
            "a step needs {needed} whatever is placed where, and this machine has {there} of memory: make --batch or --seq smaller, \
             or take a smaller model"
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
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse().ok())?;
    Some(Bytes(1024) * kib)
}

/// Caps into which the activations do not fit, so that a first run shows all tiers at work: HBM for a third of the boundaries besides what
/// every plan needs (read-ahead that was asked for included), host RAM for a quarter and staging, NVMe for a sixth; the rest has to be
/// recomputed.
fn default_budgets(layers: u64, boundary: Bytes, least: TierBytes, prefetch: u64) -> TierBytes {
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
            let text = std::fs::read_to_string(file).map_err(|source| {
                TrainError::Usage(format!(
                    "--plan {file}: {source}; give `auto`, `resident`, `checkpoint` or a schedule file"
                ))
            })?;
            let schedule = Schedule::from_json(&text)?;
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
