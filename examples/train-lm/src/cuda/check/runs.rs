//! Whole runs of the trainer on the GPU: the same weights wherever its state, its update and its activations are.

use std::path::PathBuf;

use lazy_model::{Placement, Schedule};
use lazy_optim_nvme::OptimError;
use lazy_solver::budgets::BudgetArgs;
use lazy_store::{BoxError, Bytes, StoreError};

use super::{Bench, Outcome};
use crate::cuda::Real;
use crate::error::TrainError;
use crate::homes::WeightsHome;
use crate::io::IoChoice;
use crate::settings::{DeviceChoice, DurabilityChoice, StateHome, TrainArgs, UpdateChoice};
use crate::train::{Summary, train};

/// What the runs read.
const TEXT: &str = concat!(include_str!("../kernels/tensor_cores.cu"), include_str!("../kernels/layers.cu"));
const STEPS: u64 = 6;

/// Runs in a folder that goes when they have ended.
struct Runs<'a> {
    dir: PathBuf,
    number: usize,
    bench: &'a Bench<'a>,
}

impl Drop for Runs<'_> {
    fn drop(&mut self) {
        // What is left is seen there.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl<'a> Runs<'a> {
    fn new(bench: &'a Bench<'a>, name: &str) -> Result<Runs<'a>, BoxError> {
        let dir = bench.dir.join(format!("test-gpu-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir)?;
        std::fs::write(dir.join("text.txt"), TEXT)?;
        Ok(Runs { dir, number: 0, bench })
    }

    /// The flags of a run, in a folder of its own.
    fn args(&mut self) -> TrainArgs {
        self.number += 1;
        TrainArgs {
            steps: Some(STEPS),
            text: vec![self.dir.join("text.txt")],
            out: Some(self.dir.join(self.number.to_string())),
            nvme_dir: Some(self.dir.join("spill")),
            device: DeviceChoice::Cuda,
            plan: "auto".into(),
            json: true,
            ..TrainArgs::default()
        }
    }

    /// No caps, and a profile measured once: measuring is what takes long in a run of six steps.
    fn measured(&mut self) -> Result<BudgetArgs, BoxError> {
        let profile = self.dir.join("profile.json");
        std::fs::write(&profile, crate::prepare::probe_only(&self.args())?.to_json())?;
        Ok(BudgetArgs { profile: Some(profile), ..BudgetArgs::default() })
    }

    /// Runs with some flags changed.
    fn run(&mut self, change: impl FnOnce(&mut TrainArgs)) -> Result<Summary, TrainError> {
        let mut args = self.args();
        change(&mut args);
        train(&args)
    }

    /// Runs that must end with these weights.
    fn same(
        &mut self,
        digest: &str,
        name: &str,
        change: impl FnOnce(&mut TrainArgs),
    ) -> Result<(), BoxError> {
        let summary = self.run(change).map_err(|e| format!("{name}: {e}"))?;
        match summary.weights_digest == digest {
            true => Ok(()),
            false => Err(format!("{name}: other weights, loss {:?}", summary.loss_last).into()),
        }
    }
}

fn hbm(mib: f64) -> BudgetArgs {
    BudgetArgs { hbm_mib: Some(mib), host_mib: Some(200.0), ..BudgetArgs::default() }
}

pub(super) fn same_weights(bench: &Bench<'_>) -> Outcome {
    let mut runs = Runs::new(bench, "runs")?;
    let first = runs.run(|_| ())?;
    let digest = &first.weights_digest;
    for (home, state) in [("nvme", StateHome::Nvme), ("host", StateHome::Host), ("hbm", StateHome::Hbm)] {
        for (on, update) in [("cpu", UpdateChoice::Cpu), ("cuda", UpdateChoice::Cuda)] {
            runs.same(digest, &format!("state {home}, update {on}"), |args| {
                (args.state, args.update) = (Some(state), update);
            })?;
        }
    }
    runs.same(digest, "a part of the state in each tier", |args| {
        args.state = Some(StateHome::Hbm);
        (args.state_hbm_gib, args.state_host_gib) = (Some(Bytes(20 << 20)), Some(Bytes(20 << 20)));
    })?;
    for plan in ["resident", "checkpoint"] {
        runs.same(digest, plan, |args| args.plan = plan.into())?;
    }
    let least = first.hbm_peak_bytes.get() as f64 / f64::from(1 << 20);
    let mut caps = 0;
    for share in [0.97, 0.9, 0.84] {
        match runs.same(digest, &format!("solved at {share} of the memory"), |args| {
            args.budgets = hbm(share * least)
        }) {
            Ok(()) => caps += 1,
            Err(error) if error.to_string().contains("budget is") => {}
            Err(error) => return Err(error),
        }
    }
    if caps < 2 {
        return Err("no caps below all of the memory were tried".into());
    }
    // Nothing clipped: the optimizer runs beside backward, or after it where steps cannot be taken back.
    let beside = runs.run(|args| args.clip = Some(0.0))?.weights_digest;
    for update in [UpdateChoice::Cpu, UpdateChoice::Cuda] {
        runs.same(&beside, &format!("beside backward, update {update:?}"), |args| {
            (args.clip, args.update, args.plan) = (Some(0.0), update, "checkpoint".into());
        })?;
    }
    runs.same(&beside, "after backward", |args| {
        (args.clip, args.durability) = (Some(0.0), Some(DurabilityChoice::Checkpoint));
    })?;
    Ok(format!("{} runs, loss {:?} to {:?}", runs.number, first.loss_first, first.loss_last))
}

/// Weights and gradients of layers at home in RAM: the bits of runs that keep them in HBM, in both types, wherever state and update are.
pub(super) fn streamed(bench: &Bench<'_>) -> Outcome {
    let mut runs = Runs::new(bench, "streamed")?;
    let budgets = runs.measured()?;
    let ways =
        [("auto", UpdateChoice::Cpu), ("resident", UpdateChoice::Auto), ("checkpoint", UpdateChoice::Cuda)];
    let cases = [
        ((Real::F32, Real::F32), (2, 0.0), &ways[..]),
        ((Real::Bf16, Real::Bf16), (1, 1.0), &ways[..]),
        ((Real::Bf16, Real::F32), (2, 1.0), &ways[2..]),
    ];
    let mut peaks = Vec::new();
    for ((dtype, gradients), (accum, clip), ways) in cases {
        let with = |args: &mut TrainArgs| {
            (args.dtype, args.grad_dtype) = (Some(dtype), Some(gradients));
            (args.accum, args.clip, args.dropout) = (Some(accum), Some(clip), Some(0.1));
            args.budgets = budgets.clone();
        };
        let resident = runs.run(|args| {
            with(args);
            args.plan = "checkpoint".into();
        })?;
        for &(plan, update) in ways {
            let name = format!("{dtype:?} {gradients:?}, accum {accum}, clip {clip}, {plan}, {update:?}");
            let streamed = runs.run(|args| {
                with(args);
                (args.weights, args.plan, args.update) = (WeightsHome::Host, plan.into(), update);
            })?;
            if streamed.weights_digest != resident.weights_digest {
                return Err(format!("{name}: other weights, loss {:?}", streamed.loss_last).into());
            }
            let peak = (streamed.hbm_peak_bytes, resident.hbm_peak_bytes);
            if plan == "checkpoint" && peak.0 >= peak.1 {
                return Err(format!("{name}: {} of HBM for {}", peak.0, peak.1).into());
            }
            if plan == "checkpoint" {
                peaks.push(format!("{} for {} of HBM", peak.0, peak.1));
            }
        }
    }
    // State in HBM beside them, on resuming the other way round, with evaluations.
    let with = |args: &mut TrainArgs| {
        (args.state, args.habits.eval_text) = (Some(StateHome::Hbm), args.text.clone());
        args.habits.eval_every = Some(2);
        args.budgets = budgets.clone();
    };
    let straight = runs.run(with)?;
    let half = runs.run(|args| {
        with(args);
        (args.steps, args.weights) = (Some(STEPS / 2), WeightsHome::Host);
    })?;
    runs.same(&straight.weights_digest, "resumed", |args| {
        (args.out, args.resume, args.text) = (None, Some(half.run.clone()), Vec::new());
        args.budgets = budgets.clone();
    })?;
    let evaluated = runs.run(|args| {
        with(args);
        args.weights = WeightsHome::Host;
    })?;
    let loss =
        |summary: &Summary| summary.evaluation_last.as_ref().map(|evaluation| evaluation.loss.to_bits());
    if loss(&evaluated) != loss(&straight) || evaluated.weights_digest != straight.weights_digest {
        return Err("an evaluation of weights at home in RAM has another loss".into());
    }
    Ok(format!("{} runs; {}", runs.number, peaks.join(", ")))
}

pub(super) fn resumed(bench: &Bench<'_>) -> Outcome {
    let mut runs = Runs::new(bench, "resumed")?;
    for state in [StateHome::Nvme, StateHome::Hbm] {
        let with =
            |args: &mut TrainArgs| (args.state, args.dropout, args.accum) = (Some(state), Some(0.1), Some(2));
        let straight = runs.run(with)?.weights_digest;
        let half = runs.run(|args| {
            with(args);
            args.steps = Some(STEPS / 2);
        })?;
        let more = |args: &mut TrainArgs| {
            (args.out, args.resume, args.text) = (None, Some(half.run.clone()), Vec::new())
        };
        runs.same(&straight, &format!("{state:?}, resumed"), more)?;
        let moved = runs.run(|args| {
            more(args);
            args.device = DeviceChoice::Host;
        });
        if !matches!(&moved, Err(TrainError::Usage(text)) if text.starts_with("--device")) {
            return Err(format!("resumed on another device: {:?}", moved.map(|s| s.steps)).into());
        }
    }
    Ok(format!("{} runs", runs.number))
}

/// Boundaries on a drive, moved by every means: the same weights, or a refusal by name.
pub(super) fn drives(bench: &Bench<'_>) -> Outcome {
    let mut runs = Runs::new(bench, "drives")?;
    let budgets = runs.measured()?;
    let resident = runs.run(|args| (args.plan, args.budgets) = ("checkpoint".into(), budgets.clone()))?;
    let mut schedule = Schedule::from_json(&std::fs::read_to_string(resident.run.join("schedule.json"))?)?;
    let last = schedule.placement.len() - 1;
    schedule.placement[..last].fill(Placement::Nvme);
    schedule.transfers = None;
    let file = runs.dir.join("spills.json");
    std::fs::write(&file, schedule.to_json()?)?;
    let mut seen = Vec::new();
    for io in [IoChoice::Auto, IoChoice::Uring, IoChoice::Posix, IoChoice::Cufile] {
        let ran = runs.run(|args| {
            (args.plan, args.io, args.budgets) = (file.display().to_string(), io, budgets.clone());
        });
        match ran {
            Ok(summary) if summary.weights_digest != resident.weights_digest => {
                return Err(format!("--io {io}: other weights").into());
            }
            Ok(summary) if summary.nvme_peak_bytes == Bytes::ZERO => return Err("nothing was spilled".into()),
            Ok(summary) => seen.push(format!("{io}: {}", summary.nvme_mode)),
            Err(TrainError::Store(StoreError::BackendRefused { asked: "cuFile", reason })) => {
                seen.push(format!("{io}: refused, {reason}"));
            }
            Err(error) => return Err(format!("--io {io}: {error}").into()),
        }
    }
    Ok(seen.join("; "))
}

/// The host device is the independent source: another decoder, by another library.
pub(super) fn beside_the_host_device(bench: &Bench<'_>) -> Outcome {
    let mut runs = Runs::new(bench, "beside")?;
    let mut on = |device, dtype| {
        runs.run(|args| {
            (args.device, args.dtype, args.dropout, args.accum) = (device, dtype, Some(0.1), Some(2));
            (args.batch, args.seq) = (Some(3), Some(33));
            // At larger rates a few steps of so little text amplify roundings.
            (args.lr, args.warmup) = (Some(1e-4), Some(0));
        })
    };
    let host = on(DeviceChoice::Host, None)?;
    let cuda = on(DeviceChoice::Cuda, Some(Real::F32))?;
    let loss = |summary: &Summary| Some((summary.loss_first?, summary.loss_last?));
    let (Some(wanted), Some(got)) = (loss(&host), loss(&cuda)) else { return Err("no loss".into()) };
    if (wanted.0 - got.0).abs() > 1e-5 || (wanted.1 - got.1).abs() > 1e-4 {
        return Err(format!("losses {got:?}, on the host device {wanted:?}").into());
    }
    Ok(format!("dropout and two micro-batches, losses {got:?} for {wanted:?}"))
}

/// What goes wrong is named, and the next run is not hindered.
pub(super) fn refusals(bench: &Bench<'_>) -> Outcome {
    let mut runs = Runs::new(bench, "refusals")?;
    let mut seen = Vec::new();
    let mut expect = |what: &str, error: Option<TrainError>, fits: fn(&TrainError) -> bool| match error {
        Some(error) if fits(&error) => {
            seen.push(format!("{what}: {error}"));
            Ok(())
        }
        Some(error) => Err(BoxError::from(format!("{what}: {error}"))),
        None => Err(format!("{what}: nothing went wrong").into()),
    };
    // A profile, so that what follows fails in the run and not while it is measured.
    let budgets = runs.measured()?;
    let (free, _) = runs.bench.gpu.memory()?;
    let taken = {
        // All but little of the memory is somebody else's.
        let stream = runs.bench.gpu.context().default_stream();
        let most = usize::try_from(free.get())?.saturating_sub(100 << 20);
        let held = stream.alloc_zeros::<u8>(most).map_err(|e| e.to_string())?;
        let refused = runs.run(|args| (args.plan, args.budgets) = ("resident".into(), budgets.clone())).err();
        drop(held);
        stream.synchronize().map_err(|e| e.to_string())?;
        refused
    };
    expect("no memory on the GPU", taken, |e| {
        matches!(
            e,
            TrainError::Usage(_)
                | TrainError::Store(StoreError::DeviceMemory { .. })
                | TrainError::Optimizer(OptimError::Store(StoreError::DeviceMemory { .. }))
        )
    })?;
    let other = runs.dir.join("schedule.json");
    let run = runs.run(|args| args.budgets = budgets.clone())?.run;
    let mut schedule: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(run.join("schedule.json"))?)?;
    schedule["placement"].as_array_mut().ok_or("no placement in the schedule")?.pop();
    std::fs::write(&other, schedule.to_string())?;
    let wrong =
        runs.run(|args| (args.plan, args.budgets) = (other.display().to_string(), budgets.clone())).err();
    expect("a schedule of another model", wrong, |e| {
        matches!(e, TrainError::Schedule(_) | TrainError::Verify(_) | TrainError::Plan(_))
    })?;
    let slowed = runs.run(|args| {
        (args.throttle, args.budgets) = (crate::settings::parse_throttle("h2d=1").ok(), budgets.clone());
    });
    expect("slow links", slowed.err(), |e| matches!(e, TrainError::Store(StoreError::Device { .. })))?;
    runs.run(|args| args.budgets = budgets.clone())?;
    Ok(seen.join("; "))
}
