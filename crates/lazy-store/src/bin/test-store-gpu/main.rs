//! The store's tests on a GPU: one program that needs nothing but the driver and NVRTC, to be run where a GPU is.
//!
//! `test-store-gpu [--seeds N] [--dir DIR]` prints a line for each test and a count, and fails where one fails.

#![allow(clippy::print_stdout, reason = "prints the results of its tests")]

mod programs;
mod tests;

use std::path::PathBuf;
use std::process::ExitCode;

use lazy_store::BoxError;
use lazy_store::cuda::Gpu;
use lazy_store::cuda::kernels::{Arg, Grid, Kernel, Module};
use lazy_store::gpu_test;
use lazy_store::{DeviceRange, Stream};

/// What the tests share.
pub(crate) struct Context {
    gpu: Gpu,
    fill: Kernel,
    check: Kernel,
    spin: Kernel,
    /// A folder on a real file system.
    dir: PathBuf,
    seeds: u64,
}

impl Context {
    fn new(dir: PathBuf, seeds: u64) -> Result<Self, BoxError> {
        let gpu = Gpu::open(0)?;
        let module = Module::compile(&gpu, "store tests", include_str!("kernels.cu"), &[])?;
        let (fill, check, spin) = (module.kernel("fill")?, module.kernel("check")?, module.kernel("spin")?);
        Ok(Context { gpu, fill, check, spin, dir, seeds })
    }
}

/// Puts the filling of `range` with what `tag` stands for on `stream`.
fn fill(kernel: &Kernel, stream: Stream, range: DeviceRange, tag: u32) -> Result<(), BoxError> {
    let words = (range.bytes.get() / 4) as u32;
    let args = [Arg::Address(range.address), Arg::U32(words), Arg::U32(tag)];
    // SAFETY: the kernel's parameters; it writes `words` words of the range, which the task holds.
    Ok(unsafe { kernel.launch(stream, Grid::linear(64, 256), &args) }?)
}

/// Puts a comparison of `range` with what `tag` stands for on `stream`; differing words are counted in `errors`.
fn check(
    kernel: &Kernel,
    stream: Stream,
    range: DeviceRange,
    tag: u32,
    errors: DeviceRange,
) -> Result<(), BoxError> {
    let words = (range.bytes.get() / 4) as u32;
    let args = [Arg::Address(range.address), Arg::U32(words), Arg::U32(tag), Arg::Address(errors.address)];
    // SAFETY: the kernel's parameters; it reads the range and adds to one word of `errors`, which the task holds.
    Ok(unsafe { kernel.launch(stream, Grid::linear(64, 256), &args) }?)
}

/// Holds `stream` up.
fn spin(kernel: &Kernel, stream: Stream, microseconds: u64) -> Result<(), BoxError> {
    // SAFETY: the kernel's parameter; it touches no memory.
    Ok(unsafe { kernel.launch(stream, Grid::linear(1, 1), &[Arg::U64(microseconds * 1000)]) }?)
}

/// The `i`-th word of what `tag` stands for: as the kernel computes it.
fn word(tag: u32, i: u32) -> u32 {
    let x = tag.wrapping_mul(2_654_435_761).wrapping_add(i.wrapping_mul(2_246_822_519));
    (x ^ (x >> 15)).wrapping_mul(3_266_489_917)
}

fn main() -> ExitCode {
    let (mut dir, mut seeds) = (PathBuf::from("."), 200);
    let mut only = None;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match (arg.as_str(), args.next()) {
            ("--dir", Some(value)) => dir = value.into(),
            ("--seeds", Some(value)) if value.parse::<u64>().is_ok() => {
                seeds = value.parse().unwrap_or(seeds)
            }
            ("--only", Some(value)) => only = Some(value),
            _ => {
                println!("usage: test-store-gpu [--dir DIR] [--seeds N] [--only TEST]");
                return ExitCode::from(2);
            }
        }
    }
    let context = match Context::new(dir, seeds) {
        Ok(context) => context,
        Err(error) => {
            println!("no tests ran: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("{:?}, compute capability {:?}", context.gpu, context.gpu.capability());
    let tests = tests::ALL.iter().filter(|(name, _)| only.as_deref().is_none_or(|o| o == *name));
    gpu_test::run(&context, tests, &mut |line| println!("{line}"))
}
