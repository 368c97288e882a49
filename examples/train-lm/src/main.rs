//! The `train-lm` program.

use std::process::ExitCode;

use clap::Parser;
use train_lm::cli::Cli;

fn main() -> ExitCode {
    Cli::parse().run()
}
