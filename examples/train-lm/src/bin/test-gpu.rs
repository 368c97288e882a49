//! `train-lm test-gpu` as a program of its own, which needs the driver and CUDA's libraries alone.
#![allow(clippy::print_stdout, reason = "prints the results of its tests")]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use lazy_store::cuda::Gpu;

/// Test the decoder on this machine's GPU
#[derive(Parser)]
struct Args {
    /// Run the tests whose name contains this alone
    #[arg(default_value = "")]
    only: String,
    /// Folder for spill files
    #[arg(long, value_name = "DIR", default_value = ".")]
    nvme_dir: PathBuf,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("no tests ran: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("{gpu:?}, compute capability {:?}", gpu.capability());
    let mut say = |line: &str| println!("{line}");
    let (ran, failed) = train_lm::cuda::check::run(&gpu, &args.nvme_dir, &args.only, &mut say);
    println!("{ran} tests, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
