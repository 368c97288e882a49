//! The optimizer's tests on a GPU: one program that needs nothing but the driver and NVRTC, to be run where a GPU is.
//!
//! `test-optim-gpu [WORD]` prints a line for each test whose name contains the word, and a count, and fails where one fails.

#![allow(clippy::print_stdout, reason = "prints the results of its tests")]

#[path = "../../../tests/common/cases.rs"]
mod cases;
mod data;
mod steps;
mod tests;

use std::process::ExitCode;
use std::time::Instant;

use lazy_optim_nvme::raw::Kernels;
use lazy_store::BoxError;
use lazy_store::cuda::Gpu;
use lazy_store::gpu_test;

fn open() -> Result<(Gpu, Kernels), BoxError> {
    let gpu = Gpu::open(0)?;
    let kernels = Kernels::new(&gpu)?;
    Ok((gpu, kernels))
}

fn main() -> ExitCode {
    let start = Instant::now();
    let (gpu, kernels) = match open() {
        Ok(opened) => opened,
        Err(error) => {
            println!("no tests ran: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("{gpu:?}, compute capability {:?}", gpu.capability());
    println!("kernels in {:.2} s", start.elapsed().as_secs_f64());
    let word = std::env::args().nth(1).unwrap_or_default();
    let tests = tests::ALL.iter().filter(|(name, _)| name.contains(&word));
    gpu_test::run(&kernels, tests, &mut |line| println!("{line}"))
}
