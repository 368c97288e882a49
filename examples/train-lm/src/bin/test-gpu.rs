//! `train-lm test-gpu` as a program of its own, which needs the driver and CUDA's libraries alone.
#![allow(clippy::print_stdout, reason = "prints the results of its tests")]

use std::process::ExitCode;

use clap::Parser;
use train_lm::cuda::check::{CheckArgs, check};

/// Test the decoder on this machine's GPU
#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: CheckArgs,
}

fn main() -> ExitCode {
    match check(&Cli::parse().args, &mut |line| println!("{line}")) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            println!("no tests ran: {error}");
            ExitCode::FAILURE
        }
    }
}
