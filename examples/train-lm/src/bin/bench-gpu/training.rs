//! Steps of the trainer as a whole: passes and optimizer, its state wherever it is.

use clap::Args as ClapArgs;
use lazy_model::Bytes;
use lazy_store::{BoxError, DeviceChoice as StoreDevice, LinkLimits};
use serde_json::Value;
use train_lm::habits::HabitArgs;
use train_lm::homes::WeightsHome;
use train_lm::io::IoChoice;
use train_lm::metrics::StepMetrics;
use train_lm::probe::{link_rates, median, timestamp};
use train_lm::settings::{DeviceChoice, DurabilityChoice, MomentFormat, StateHome, TrainArgs, UpdateChoice};
use train_lm::train::train;

use crate::{Args, config, row, spill};

/// What the trainer is told of weights and the optimizer's state.
#[derive(ClapArgs, Clone, Debug)]
pub(crate) struct StateArgs {
    /// Where weights and gradients of layers are when no layer uses them
    #[arg(long, value_enum, default_value_t)]
    weights: WeightsHome,
    /// Where it lives
    #[arg(long, value_enum, default_value_t)]
    state: StateHome,
    /// Most of it in HBM
    #[arg(long, value_name = "GIB")]
    state_hbm_gib: Option<f64>,
    /// Most of it in RAM
    #[arg(long, value_name = "GIB")]
    state_host_gib: Option<f64>,
    /// Format of its moments
    #[arg(long, value_enum, default_value_t)]
    moments: MomentFormat,
    /// What a step leaves of it on disk
    #[arg(long, value_enum)]
    durability: Option<DurabilityChoice>,
    /// Where its arithmetic runs
    #[arg(long, value_enum, default_value_t)]
    update: UpdateChoice,
    /// Gradient norm to clip to; 0 lets the optimizer run beside backward
    #[arg(long, default_value_t = 1.0)]
    clip: f64,
}

/// The time that the bytes of one step's state need on the drive, at the rates that copies of 128 MiB alone had before.
fn disk_time(args: &Args, metrics: &[&StepMetrics]) -> Result<f64, BoxError> {
    let dir = spill(&args.dir);
    std::fs::create_dir_all(&dir)?;
    let links = link_rates(
        Bytes(128 << 20),
        (StoreDevice::Cuda { ordinal: 0 }, IoChoice::Auto),
        &dir,
        LinkLimits::default(),
        &timestamp(),
    )?;
    let rates = links.rates();
    let time = |m: &StepMetrics| {
        rates.nvme_read.time(m.bytes.nvme_read).get() + rates.nvme_write.time(m.bytes.nvme_write).get()
    };
    eprintln!("drive alone: {} read, {} written", rates.nvme_read, rates.nvme_write);
    Ok(median(metrics.iter().map(|m| time(m)).collect()))
}

/// A run of the trainer, and its steps beside what they need at the least.
pub(crate) fn rows(args: &Args) -> Result<Vec<Value>, BoxError> {
    let dir = args.dir.join("bench-gpu-run");
    std::fs::create_dir_all(&dir)?;
    let (model, text) = (dir.join("config.json"), dir.join("text.txt"));
    std::fs::write(&model, config(&args.shape)?)?;
    std::fs::write(&text, include_str!("main.rs").repeat(40))?;
    let gib = |gib: Option<f64>| gib.map(Bytes::from_gib);
    let state = &args.state;
    let flags = TrainArgs {
        steps: Some(args.steps + 1),
        model: Some(model),
        text: vec![text],
        batch: Some(args.batch),
        seq: Some(args.seq),
        device: DeviceChoice::Cuda,
        plan: "auto".into(),
        out: Some(dir.join("run")),
        nvme_dir: Some(spill(&args.dir)),
        weights: state.weights,
        state: Some(state.state),
        state_hbm_gib: gib(state.state_hbm_gib),
        state_host_gib: gib(state.state_host_gib),
        moments: Some(state.moments),
        durability: state.durability,
        update: state.update,
        clip: Some(state.clip),
        // Small enough for weights of any size: the loss is to fall.
        lr: Some(1e-4),
        habits: HabitArgs { no_save: true, ..HabitArgs::default() },
        trace_steps: args.steps + 1,
        ..TrainArgs::default()
    };
    let summary = train(&flags)?;
    let text = std::fs::read_to_string(summary.run.join("metrics.jsonl"))?;
    let all = text.lines().map(serde_json::from_str).collect::<Result<Vec<StepMetrics>, _>>()?;
    let metrics: Vec<&StepMetrics> = all.iter().skip(1).collect();
    let middle = |of: fn(&StepMetrics) -> f64| median(metrics.iter().map(|m| of(m)).collect());
    let step = middle(|m| m.seconds.step.get());
    let compute = middle(|m| (m.seconds.forward + m.seconds.backward + m.seconds.clip).get());
    let optimizer = middle(|m| m.seconds.optimizer.get());
    let home = if state.weights == WeightsHome::Host { ", weights in RAM" } else { "" };
    let name = format!("{} {}x{}{home}, state {:?}", args.shape, args.batch, args.seq, state.state);
    eprintln!(
        "{name}: step {step:.3} s, passes and norm {compute:.3}, optimizer after them {optimizer:.3}, bytes {:?}, peak {:?}, by NVML {:?}, loss {:?} to {:?}",
        metrics.last().map(|m| m.bytes),
        summary.hbm_peak_bytes,
        summary.gpu_peak_bytes,
        summary.loss_first,
        summary.loss_last
    );
    let mut rows = vec![row(&name, (1.0 / step, "steps/s"), None, None)];
    let disk = disk_time(args, &metrics)?;
    if disk > 0.0 {
        let bound = ("compute or drive", compute.max(disk));
        rows.push(row(&format!("{name}: step"), (step, "s"), Some(bound), Some((1.05, true))));
    }
    let predicted = ("predicted", summary.predicted_step_s);
    rows.push(row(&format!("{name}: step"), (step, "s"), Some(predicted), None));
    if let Some(seen) = summary.gpu_peak_bytes {
        let counted = ("counted", crate::gib(summary.hbm_peak_bytes));
        rows.push(row(&format!("{name}: peak by NVML"), (crate::gib(seen), "GiB"), Some(counted), None));
    }
    Ok(rows)
}
