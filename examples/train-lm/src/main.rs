//! The `train-lm` program.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use train_lm::console::{print, tell};
use train_lm::cuda::check::{CheckArgs, check};
use train_lm::error::{Result, TrainError};
use train_lm::settings::TrainArgs;
use train_lm::stop;

/// Trains a Qwen3-style decoder beyond memory: solved placement of activations, optimizer state on NVMe
#[derive(Parser)]
#[command(version, subcommand_required = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Plan, train and report
    Train(Box<TrainArgs>),
    /// Measure this machine for a model and write a hardware profile
    Probe(Box<ProbeArgs>),
    /// Remove the spill folders of dead runs, and nothing else
    Clean(CleanArgs),
    /// Test the decoder on this machine's GPU
    TestGpu(CheckArgs),
}

#[derive(Args)]
struct ProbeArgs {
    #[command(flatten)]
    train: TrainArgs,
    /// Write the profile to this file; default: standard output
    #[arg(long = "write", value_name = "FILE")]
    file: Option<PathBuf>,
}

#[derive(Args)]
struct CleanArgs {
    /// Folder that holds the spill folders
    #[arg(long, value_name = "DIR", default_value = "runs/spill")]
    nvme_dir: PathBuf,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Train(args) => train(&args),
        Command::Probe(args) => probe(&args),
        Command::Clean(args) => clean(&args),
        Command::TestGpu(args) => test_gpu(&args),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            tell(&format!("train-lm: {error}"));
            match error {
                TrainError::Interrupted => ExitCode::from(stop::exit_status()),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

fn train(args: &TrainArgs) -> Result<ExitCode> {
    stop::listen()?;
    let summary = train_lm::train::train(args)?;
    if args.json {
        let text = serde_json::to_string(&summary).map_err(TrainError::json(&summary.run))?;
        print(&(text + "\n"))?;
    }
    Ok(if summary.interrupted { ExitCode::from(stop::exit_status()) } else { ExitCode::SUCCESS })
}

fn probe(args: &ProbeArgs) -> Result<ExitCode> {
    stop::listen()?;
    let profile = train_lm::prepare::probe_only(&args.train)?.to_json();
    match &args.file {
        Some(path) => train_lm::run_folder::write_file(path, profile.as_bytes())?,
        None => print(&profile)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn test_gpu(args: &CheckArgs) -> Result<ExitCode> {
    Ok(if check(args, &mut tell)? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn clean(args: &CleanArgs) -> Result<ExitCode> {
    if !args.nvme_dir.exists() {
        tell(&format!("{}: nothing there", args.nvme_dir.display()));
        return Ok(ExitCode::SUCCESS);
    }
    let swept = lazy_store::scratch::sweep(&args.nvme_dir)?;
    for path in &swept.removed {
        tell(&format!("removed {}", path.display()));
    }
    for (path, reason) in &swept.unsure {
        tell(&format!("left alone {}: {reason}", path.display()));
    }
    tell(&format!(
        "{} removed, {} in use, {} left alone",
        swept.removed.len(),
        swept.alive.len(),
        swept.unsure.len()
    ));
    Ok(ExitCode::SUCCESS)
}
