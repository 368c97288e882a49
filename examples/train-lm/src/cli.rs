//! The command line of `train-lm`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::console::{print, tell};
use crate::cuda::check::{CheckArgs, check};
use crate::error::{Result, TrainError};
use crate::logits::LogitsArgs;
use crate::run_folder::write_file;
use crate::settings::TrainArgs;
use crate::{prepare, report, stop, train};

/// Trains a Qwen3-style decoder beyond memory: solved placement of activations, optimizer state on NVMe
#[derive(Parser)]
#[command(name = "train-lm", version, subcommand_required = true, arg_required_else_help = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// What it does.
#[derive(Subcommand)]
pub enum Command {
    /// Plan, train and report
    #[command(after_long_help = TRAIN_EXAMPLES)]
    Train(Box<TrainArgs>),
    /// Measure this machine for a model and write a hardware profile
    #[command(after_long_help = PROBE_EXAMPLES)]
    Probe(Box<ProbeArgs>),
    /// Draw the report of a run again, also of one under way, or two runs on one page
    Report(ReportArgs),
    /// Print a model's logits for a row of tokens as JSON, to compare them with another program's
    #[command(after_long_help = LOGITS_EXAMPLES)]
    Logits(LogitsArgs),
    /// Remove the spill folders of dead runs, and nothing else
    Clean(CleanArgs),
    /// Test the decoder on this machine's GPU
    TestGpu(CheckArgs),
}

const TRAIN_EXAMPLES: &str = "\
Examples:
  train-lm train --text book.txt --steps 500
      a small model on a text, planned for this machine; everything goes to a new folder under runs/
  train-lm train --model ./qwen3 --text corpus/ --hbm-gib 4 --host-gib 2 --dry-run
      what would go where, and how long a step would take; writes nothing
  train-lm train --resume runs/NAME --steps 1000
      goes on where the run stopped, to the same bits as if it never had
  train-lm train --profile runs/NAME/corrected-profile.json --text book.txt
      plans with the times and rates that an earlier run showed

Exit status: 0 when all steps were done, 1 when something was refused or failed, 130 or 143 when a signal asked to stop.";

const PROBE_EXAMPLES: &str = "\
Examples:
  train-lm probe --model ./qwen3 --batch 4 --seq 512 --write machine.json
      measures; then: train-lm train --profile machine.json with the same model, batch and sequence
  train-lm probe --throttle h2d=2,d2h=2,nvme_read=0.5,nvme_write=0.5 --write slow.json
      the same with links slowed down to rates in GB/s";

const LOGITS_EXAMPLES: &str = "\
Examples:
  train-lm logits --model runs/NAME/checkpoint --ids 84,104,101,32
      an object with \"ids\" and \"logits\": a list for each token, with a number for each token of the vocabulary
  train-lm logits --model ./qwen3 --ids 9707,11,1879
      the same of a model that training is to start from";

/// What `probe` takes.
#[derive(Args)]
pub struct ProbeArgs {
    #[command(flatten)]
    train: TrainArgs,
    /// Write the profile to this file; default: standard output
    #[arg(long = "write", value_name = "FILE", help_heading = "Output")]
    file: Option<PathBuf>,
}

/// What `report` takes.
#[derive(Args)]
pub struct ReportArgs {
    /// Folder of a run
    #[arg(value_name = "RUN")]
    run: PathBuf,
    /// Folder of another run, to be put beside it
    #[arg(value_name = "RUN2")]
    beside: Option<PathBuf>,
    /// Write two runs' page to this file; default: `compare.html` in the first one's folder
    #[arg(long, value_name = "FILE", requires = "beside")]
    out: Option<PathBuf>,
}

/// What `clean` takes.
#[derive(Args)]
pub struct CleanArgs {
    /// Folder that holds the spill folders
    #[arg(long, value_name = "DIR", default_value = "runs/spill")]
    nvme_dir: PathBuf,
}

impl Cli {
    /// Does what was asked for; the process ends with what this returns.
    pub fn run(self) -> ExitCode {
        self.command.run()
    }
}

impl Command {
    /// Does it; the process ends with what this returns.
    pub fn run(self) -> ExitCode {
        open_as_many_files_as_allowed();
        let outcome = match self {
            Command::Train(args) => train(&args),
            Command::Probe(args) => probe(&args),
            Command::Report(args) => report(&args),
            Command::Logits(args) => logits(&args),
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
}

/// Shells often allow a process fewer files than it may ask for, and a large model's state has hundreds. Where the system refuses, the limit
/// stays as it was.
fn open_as_many_files_as_allowed() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

fn train(args: &TrainArgs) -> Result<ExitCode> {
    stop::listen()?;
    if args.dry_run {
        let schedule = train::plan_only(args)?;
        if args.json {
            print(&(schedule.to_json()? + "\n"))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let summary = train::train(args)?;
    if args.json {
        let text = serde_json::to_string(&summary).map_err(TrainError::json(&summary.run))?;
        print(&(text + "\n"))?;
    }
    Ok(if summary.interrupted { ExitCode::from(stop::exit_status()) } else { ExitCode::SUCCESS })
}

fn probe(args: &ProbeArgs) -> Result<ExitCode> {
    stop::listen()?;
    let profile = prepare::probe_only(&args.train)?.to_json();
    match &args.file {
        Some(path) => write_file(path, profile.as_bytes())?,
        None => print(&profile)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn report(args: &ReportArgs) -> Result<ExitCode> {
    let path = match &args.beside {
        None => report::draw(&args.run)?,
        Some(other) => {
            let out = args.out.clone().unwrap_or_else(|| args.run.join("compare.html"));
            report::compare([&args.run, other], &out)?
        }
    };
    print(&format!("{}\n", path.display()))?;
    Ok(ExitCode::SUCCESS)
}

fn logits(args: &LogitsArgs) -> Result<ExitCode> {
    let text = serde_json::to_string(&args.compute()?).map_err(TrainError::json(Path::new("logits")))?;
    print(&(text + "\n"))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent_and_every_flag_has_a_heading() {
        Cli::command().debug_assert();
        let command = Cli::command();
        let train = command.find_subcommand("train").unwrap();
        let bare: Vec<_> = train
            .get_arguments()
            .filter(|arg| arg.get_help_heading().is_none() && arg.get_id() != "help")
            .map(|arg| arg.get_id().to_string())
            .collect();
        assert!(bare.is_empty(), "without a heading: {bare:?}");
    }
}
