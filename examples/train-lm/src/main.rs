//! The `train-lm` program.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use train_lm::error::{Result, TrainError};
use train_lm::settings::TrainArgs;

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
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("train-lm: {error}");
            ExitCode::FAILURE
        }
    }
}

#[expect(clippy::print_stdout, reason = "standard output is for results")]
fn train(args: &TrainArgs) -> Result<()> {
    let summary = train_lm::train::train(args)?;
    if args.json {
        let text = serde_json::to_string(&summary).map_err(TrainError::json(&summary.run))?;
        println!("{text}");
    }
    Ok(())
}

#[expect(clippy::print_stdout, reason = "standard output is for results")]
fn probe(args: &ProbeArgs) -> Result<()> {
    let profile = train_lm::train::probe_only(&args.train)?.to_json();
    match &args.file {
        Some(path) => train_lm::run_folder::write_file(path, profile.as_bytes()),
        None => {
            print!("{profile}");
            Ok(())
        }
    }
}

fn clean(args: &CleanArgs) -> Result<()> {
    if !args.nvme_dir.exists() {
        eprintln!("{}: nothing there", args.nvme_dir.display());
        return Ok(());
    }
    let swept = lazy_store::scratch::sweep(&args.nvme_dir)?;
    for path in &swept.removed {
        eprintln!("removed {}", path.display());
    }
    for (path, reason) in &swept.unsure {
        eprintln!("left alone {}: {reason}", path.display());
    }
    eprintln!(
        "{} removed, {} in use, {} left alone",
        swept.removed.len(),
        swept.alive.len(),
        swept.unsure.len()
    );
    Ok(())
}
