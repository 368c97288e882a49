//! `cargo xtask bench gpu`: steps of a Qwen3-shaped decoder on a GPU under several plans, beside what was predicted of them, and beside
//! PyTorch on the same shape where it is at hand. The program that is built can be copied to where the GPU is.
//!
//! Layers and links are measured by an earlier process, whose profile is what plans are made and predicted from.

#![allow(clippy::print_stdout, reason = "prints its rows")]

mod peer;
mod plans;
mod training;

use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Parser;
use lazy_model::{Bytes, HardwareProfile, ModelSpec};
use lazy_runtime::ModelOptions;
use lazy_store::BoxError;
use lazy_store::cuda::Gpu;
use serde_json::{Value, json};
use train_lm::cuda::{CudaOptions, Real};
use train_lm::model::Shape;

use crate::plans::{Measured, Plan, Planner};

/// Steps of a Qwen3-shaped decoder on a GPU under several plans, beside PyTorch
#[derive(Parser)]
struct Args {
    /// Shape: qwen3-0.6b, 1.7b, 4b, 8b, 14b or 32b; heads are tied up to 4b
    #[arg(long, default_value = "qwen3-4b")]
    shape: String,
    /// Rows
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Tokens in a row
    #[arg(long, default_value_t = 1024)]
    seq: usize,
    /// Steps of each plan, after one that warms up
    #[arg(long, default_value_t = 5)]
    steps: u64,
    /// Caps on HBM, in GiB, for weights, gradients and activations, for which plans are solved
    #[arg(long, value_delimiter = ',', default_value = "70,40,24")]
    caps: Vec<f64>,
    /// Host RAM for boundaries
    #[arg(long, value_name = "GIB", default_value_t = 16.0)]
    host_gib: f64,
    /// Which rows: `resident` and `checkpoint`, on which others are measured, are always there
    #[arg(long, value_enum, value_delimiter = ',', default_value = "solved,host,nvme,streamed")]
    rows: Vec<Rows>,
    /// Times that the drive is measured and boundaries go there right after, of which the middle one counts: drives that others use
    /// too change within a minute
    #[arg(long, value_name = "N", default_value_t = 5)]
    drive_rounds: usize,
    /// Where the optimizer's state lives in the rows `train`
    #[command(flatten)]
    state: training::StateArgs,
    /// Folder for spill files
    #[arg(long, default_value = ".")]
    dir: PathBuf,
    /// Python that has PyTorch
    #[arg(long, default_value = "python3")]
    python: PathBuf,
    /// PyTorch on the same shape: a program with the flags of `torch_lm.py`
    #[arg(long)]
    peer: Option<PathBuf>,
    /// Measure layers and links, write the profile to this file, and end
    #[arg(long, value_name = "FILE")]
    probe: Option<PathBuf>,
}

/// A group of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Rows {
    /// Plans solved for the caps
    Solved,
    /// All boundaries in host RAM
    Host,
    /// All boundaries on NVMe
    Nvme,
    /// Weights streamed from host RAM
    Streamed,
    /// Steps of the trainer, its optimizer's state and all: nothing else is measured then
    Train,
}

/// Hidden, layers, intermediate, heads, heads of keys, head_dim; and the size of the vocabulary they share.
const SHAPES: [(&str, [usize; 6]); 6] = [
    ("qwen3-0.6b", [1024, 28, 3072, 16, 8, 128]),
    ("qwen3-1.7b", [2048, 28, 6144, 16, 8, 128]),
    ("qwen3-4b", [2560, 36, 9728, 32, 8, 128]),
    ("qwen3-8b", [4096, 36, 12288, 32, 8, 128]),
    ("qwen3-14b", [5120, 40, 17408, 40, 8, 128]),
    ("qwen3-32b", [5120, 64, 25600, 64, 8, 128]),
];
const VOCABULARY: usize = 151_936;

fn config(shape: &str) -> Result<String, BoxError> {
    let names = || SHAPES.map(|(name, _)| name).join(", ");
    let known = SHAPES.iter().find(|(name, _)| *name == shape);
    let [hidden, layers, intermediate, heads, kv_heads, head_dim] =
        known.ok_or_else(|| format!("--shape {shape}: give one of {}", names()))?.1;
    let config = json!({
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": hidden < 4096, "attention_bias": false,
        "max_position_embeddings": 40960, "hidden_act": "silu",
    });
    Ok(config.to_string())
}

fn main() -> Result<(), BoxError> {
    let args = Args::parse();
    let gpu = Gpu::open(0)?;
    let options = CudaOptions {
        shape: Shape { batch: args.batch, seq: args.seq },
        real: Real::Bf16,
        gradients: Real::Bf16,
        dropout: 0.0,
        model: ModelOptions::default(),
        poison: false,
    };
    let spec = ModelSpec::from_json(&config(&args.shape)?)?;
    let planner = Planner { gpu, spec, options, dir: args.dir.clone(), steps: args.steps };
    if let Some(file) = &args.probe {
        std::fs::write(file, plans::profile(&planner)?.to_json())?;
        return Ok(());
    }
    let rows = match args.rows.contains(&Rows::Train) {
        true => training::rows(&args)?,
        false => rows(&args, &planner, &probed(&args)?)?,
    };
    println!("{}", serde_json::to_string_pretty(&rows)?);
    Ok(())
}

/// The profile that another process measures.
fn probed(args: &Args) -> Result<HardwareProfile, BoxError> {
    let file = args.dir.join("bench-gpu-profile.json");
    let mut own = Command::new(std::env::current_exe()?);
    own.args(["--shape", &args.shape, "--batch", &args.batch.to_string(), "--seq", &args.seq.to_string()]);
    own.arg("--dir").arg(&args.dir).arg("--probe").arg(&file);
    let status = own.status()?;
    if !status.success() {
        return Err(format!("the process that measures layers and links ended with {status}").into());
    }
    let profile = HardwareProfile::from_json(&std::fs::read_to_string(&file)?)?;
    std::fs::remove_file(&file)?;
    Ok(profile)
}

/// A row with a peer and a goal, where there are such.
fn row(name: &str, value: (f64, &str), against: Option<(&str, f64)>, goal: Option<(f64, bool)>) -> Value {
    let ratio = against.map(|(_, other)| value.0 / other);
    let met = goal
        .zip(ratio)
        .map(|((target, at_most), ratio)| if at_most { ratio <= target } else { ratio >= target });
    json!({
        "row": name, "value": value.0, "unit": value.1,
        "against": against.map(|(name, _)| name), "against_value": against.map(|(_, value)| value), "ratio": ratio,
        "target": met.and(goal).map(|(target, _)| target), "met": met, "at_most": goal.is_some_and(|(_, at_most)| at_most),
    })
}

/// A row of what was measured beside what was predicted, which may be off by a share of `most` either way.
fn promised(name: &str, unit: &str, (value, predicted): (f64, f64), most: f64) -> Value {
    let against = (predicted > 0.0).then_some(("predicted", predicted));
    let mut row = row(name, (value, unit), against, Some((1.0 + most, true)));
    if against.is_some() {
        row["met"] = json!((value / predicted - 1.0).abs() <= most);
    }
    row
}

fn gibibytes(gib: f64) -> Bytes {
    Bytes((gib * (1u64 << 30) as f64) as u64)
}

fn gib(bytes: Bytes) -> f64 {
    bytes.get() as f64 / (1u64 << 30) as f64
}

fn rows(args: &Args, planner: &Planner, profile: &HardwareProfile) -> Result<Vec<Value>, BoxError> {
    let mut rows = Vec::new();
    let tokens = (args.batch * args.seq) as f64;
    let peers = match &args.peer {
        Some(program) => peer::run(&args.python, program, args)?,
        None => Vec::new(),
    };
    let torch = |mode: &str| peers.iter().find(|p| p.mode == mode);
    let run = |plan: Plan| -> Result<Measured, BoxError> {
        let measured = planner.run(&plan, profile)?;
        eprintln!("{}", measured.line());
        Ok(measured)
    };
    let resident = run(Plan::Resident)?;
    let checkpoint = run(Plan::Checkpoint)?;
    let speed = |m: &Measured| (tokens / m.step.get(), "tokens/s");
    let beside = |mode: &str| torch(mode).map(|p| (p.name.as_str(), p.tokens_per_s));
    rows.push(row("resident", speed(&resident), beside("resident"), Some((1.0, false))));
    rows.push(row("checkpoint every layer", speed(&checkpoint), beside("ckpt"), None));
    let mut all = vec![resident, checkpoint];
    let solved = args.rows.contains(&Rows::Solved);
    for &cap in args.caps.iter().filter(|_| solved) {
        let auto = run(Plan::Solved { hbm: gibibytes(cap), host: gibibytes(args.host_gib) })?;
        let name = format!("solved at {cap} GiB");
        let slower = ("resident", all[0].step.get());
        if cap >= 70.0 {
            rows.push(row(&name, (auto.step.get(), "s"), Some(slower), Some((1.06, true))));
            rows.push(row(&name, speed(&auto), beside("ckpt"), Some((1.12, false))));
            let best = peers
                .iter()
                .filter(|p| p.kept.is_some())
                .max_by(|a, b| a.tokens_per_s.total_cmp(&b.tokens_per_s));
            rows.push(row(
                &name,
                speed(&auto),
                best.map(|p| (p.name.as_str(), p.tokens_per_s)),
                Some((1.0, false)),
            ));
        } else {
            // On the line from resident to checkpoint at the memory that is used.
            let (full, least) = (&all[0], &all[1]);
            let share = (gib(full.peak) - cap.min(gib(full.peak))) / (gib(full.peak) - gib(least.peak));
            let line = full.step.get() + share * (least.step - full.step).get();
            rows.push(row(
                &name,
                (auto.step.get(), "s"),
                Some(("line from resident to checkpoint", line)),
                Some((1.0, true)),
            ));
        }
        all.push(auto);
    }
    for rows_of in [Rows::Host, Rows::Nvme] {
        if args.rows.contains(&rows_of) {
            let forced = if rows_of == Rows::Host { run(Plan::Host)? } else { on_drive(args, planner)? };
            let compute = all[1].step.get();
            let bound = compute.max(forced.link.get());
            let name = format!("boundaries {}", forced.name);
            rows.push(row(
                &name,
                (forced.step.get(), "s"),
                Some(("compute or link", bound)),
                Some((1.05, true)),
            ));
            let waits = (forced.wait.get(), forced.predicted_wait.get());
            rows.push(promised(&format!("{name}: waits"), "s", waits, 0.1));
            all.push(forced);
        }
    }
    if args.rows.contains(&Rows::Streamed) {
        let streamed = run(Plan::Streamed)?;
        let against = ("checkpoint, weights resident", all[1].step.get());
        rows.push(row(
            "weights streamed from host RAM",
            (streamed.step.get(), "s"),
            Some(against),
            Some((1.0 / 0.95, true)),
        ));
        all.push(streamed);
    }
    for measured in &all {
        let (name, step) = (&measured.name, (measured.step.get(), measured.predicted.get()));
        rows.push(promised(&format!("{name}: step"), "s", step, 0.05));
        let peak = (gib(measured.peak), gib(measured.predicted_peak));
        rows.push(promised(&format!("{name}: peak"), "GiB", peak, 0.01));
    }
    Ok(rows)
}

/// The steps with all boundaries on NVMe of the round whose step is in the middle beside its prediction. Each round begins with a process
/// that measures anew.
fn on_drive(args: &Args, planner: &Planner) -> Result<Measured, BoxError> {
    let mut rounds = Vec::new();
    for _ in 0..args.drive_rounds.max(1) {
        let measured = planner.run(&Plan::Nvme, &probed(args)?)?;
        eprintln!("{}", measured.line());
        rounds.push(measured);
    }
    let ratio = |m: &Measured| m.step.get() / m.predicted.get();
    rounds.sort_by(|a, b| ratio(a).total_cmp(&ratio(b)));
    Ok(rounds.swap_remove(rounds.len() / 2))
}

/// Where spill files of a plan lie.
fn spill(dir: &Path) -> PathBuf {
    dir.join("bench-gpu-spill")
}
