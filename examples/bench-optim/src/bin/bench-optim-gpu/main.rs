//! `cargo xtask bench optim-gpu`: the update on a GPU beside a copy in its memory and PyTorch's fused AdamW.
//!
//! Rows of one table are measured in turn, round by round. `--pairs N` says how often (7, and no less); `--python PYTHON` starts
//! `bench-optim/torch.py`. `--dir FOLDER` is where whole steps are measured, beside fio: it takes 6 GB there for some minutes.

#[path = "../../../../../crates/lazy-store/src/bin/bench-store/fio.rs"]
mod fio;
#[path = "../bench-optim/flags.rs"]
mod flags;
#[path = "../../../../../crates/lazy-store/src/bin/bench-store-gpu/program.rs"]
mod program;
#[path = "../../../../../crates/lazy-store/src/bin/bench-store/rows.rs"]
mod rows;
#[path = "../../../../../crates/lazy-store/src/bin/bench-store/side.rs"]
#[allow(dead_code, reason = "shared with benchmarks that compare more")]
mod side;
#[path = "../../../../../crates/lazy-store/src/bin/bench-store/stats.rs"]
#[allow(dead_code, reason = "shared with benchmarks that have goals of both kinds")]
mod stats;
mod steps;
#[path = "../bench-optim/stream.rs"]
#[allow(dead_code, reason = "shared with the benchmark without a GPU")]
mod stream;

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::Instant;

use cudarc::driver::CudaSlice;
use lazy_optim_nvme::raw::{CudaSections, DeviceGradient, DeviceWeights, Kernels, Sections, Step};
use lazy_optim_nvme::{GroupOptions, Moments};
use lazy_store::BoxError;
use lazy_store::cuda::Gpu;
use serde_json::Value;

use crate::flags::Flags;
use crate::program::Program;
use crate::rows::{Figures, alone, compared};
use crate::stats::Goal;

/// What the parts shared with other benchmarks fail with.
type Outcome<T> = Result<T, String>;

/// Elements of the parameter: one bucket of the default size.
const ELEMENTS: usize = 200_000_000;
/// Updates of a measurement.
const UPDATES: usize = 20;
/// Bytes that a float32 update reads and writes of an element: four numbers and three.
const BYTES: usize = 28;
/// Of the copy's rate, and of PyTorch's.
const OF_COPY: Goal = Goal::AtLeast(0.9);
const OF_TORCH: Goal = Goal::AtLeast(1.0);

/// A parameter, its gradient, and where its weights go.
struct Update<'a> {
    kernels: &'a Kernels,
    state: CudaSections,
    grad: Numbers,
    weights: Option<CudaSlice<u16>>,
    /// Of an element, read and written.
    bytes: usize,
    count: u64,
}

enum Numbers {
    F32(CudaSlice<f32>),
    Bf16(CudaSlice<u16>),
}

impl<'a> Update<'a> {
    /// Float32 throughout, or bfloat16 gradients and weights.
    fn new(kernels: &'a Kernels, moments: Moments, mixed: bool) -> Result<Self, BoxError> {
        let ramp: Vec<f32> = (0..ELEMENTS).map(|i| i as f32 / ELEMENTS as f32 - 0.5).collect();
        let (grad, weights) = if mixed {
            // 0.0078125 in bfloat16.
            let grad = kernels.stream.clone_htod(&vec![0x3c00; ELEMENTS])?;
            (Numbers::Bf16(grad), Some(kernels.stream.alloc_zeros(ELEMENTS)?))
        } else {
            (Numbers::F32(kernels.stream.clone_htod(&ramp)?), None)
        };
        let of_moments = match moments {
            Moments::F32 => 16,
            Moments::Bf16 => 8,
            Moments::Int8 => 4,
        };
        let state = kernels.upload(&Sections::new(moments, ramp))?;
        Ok(Update { kernels, state, grad, weights, bytes: 8 + of_moments + 4, count: 0 })
    }

    /// GB/s.
    fn run(&mut self) -> Result<f64, BoxError> {
        let grad = match &self.grad {
            Numbers::F32(grad) => DeviceGradient::F32(grad.slice(..)),
            Numbers::Bf16(grad) => DeviceGradient::Bf16(grad.slice(..)),
        };
        self.kernels.stream.synchronize()?;
        let start = Instant::now();
        for _ in 0..UPDATES {
            self.count += 1;
            let step = Step::new(&GroupOptions::default(), self.count, 1.0, 1.0);
            let weights = self.weights.as_mut().map(|weights| DeviceWeights::Bf16(weights.slice_mut(..)));
            self.kernels.update(&step, &mut self.state, 0, &grad, weights)?;
        }
        self.kernels.stream.synchronize()?;
        Ok((self.bytes * ELEMENTS * UPDATES) as f64 / start.elapsed().as_secs_f64() / 1e9)
    }
}

/// As many bytes as a float32 update reads and writes, copied by the driver.
struct Copy<'a> {
    kernels: &'a Kernels,
    from: CudaSlice<u8>,
    to: CudaSlice<u8>,
}

impl<'a> Copy<'a> {
    fn new(kernels: &'a Kernels) -> Result<Self, BoxError> {
        let room = || kernels.stream.alloc_zeros(BYTES / 2 * ELEMENTS);
        Ok(Copy { kernels, from: room()?, to: room()? })
    }

    /// GB/s.
    fn run(&mut self) -> Result<f64, BoxError> {
        self.kernels.stream.synchronize()?;
        let start = Instant::now();
        for _ in 0..UPDATES {
            self.kernels.stream.memcpy_dtod(&self.from, &mut self.to)?;
        }
        self.kernels.stream.synchronize()?;
        Ok((BYTES * ELEMENTS * UPDATES) as f64 / start.elapsed().as_secs_f64() / 1e9)
    }
}

fn torch(python: &Path) -> Result<Program, BoxError> {
    let numbers = [ELEMENTS.to_string(), UPDATES.to_string()];
    let script = include_str!("../bench-optim/torch.py");
    Program::start(Command::new(python).args(["-c", script, "cuda"]).args(numbers))
}

/// The float32 update beside the others.
fn float32(kernels: &Kernels, flags: &Flags, rows: &mut Vec<Value>) -> Result<(), BoxError> {
    let mut torch = flags.python.as_deref().map(torch).transpose()?;
    let (mut update, mut copy) = (Update::new(kernels, Moments::F32, false)?, Copy::new(kernels)?);
    let (mut ours, mut copies, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=flags.pairs {
        let figures = (update.run()?, copy.run()?);
        let peer = torch.as_mut().map(|torch| torch.measure::<1>("1")).transpose()?;
        // The first round warms up.
        if round > 0 {
            ours.push(figures.0);
            copies.push(figures.1);
            theirs.extend(peer.iter().flatten());
        }
    }
    let name = "AdamW on the GPU, float32";
    let copies = Figures { label: "device copy of as many bytes", values: &copies };
    rows.extend(compared(name, "GB/s", &ours, &copies, Some(OF_COPY)));
    if let Some(torch) = &torch {
        let theirs = Figures { label: &torch.name, values: &theirs };
        rows.extend(compared(name, "GB/s", &ours, &theirs, Some(OF_TORCH)));
    }
    Ok(())
}

/// The other formats, with bfloat16 gradients and weights, beside a copy.
fn mixed(kernels: &Kernels, flags: &Flags, rows: &mut Vec<Value>) -> Result<(), BoxError> {
    let mut copy = Copy::new(kernels)?;
    for (moments, name) in [(Moments::F32, "float32"), (Moments::Bf16, "bfloat16"), (Moments::Int8, "8-bit")]
    {
        let mut update = Update::new(kernels, moments, true)?;
        let (mut ours, mut copies) = (Vec::new(), Vec::new());
        for round in 0..=flags.pairs {
            let figures = (update.run()?, copy.run()?);
            if round > 0 {
                ours.push(figures.0);
                copies.push(figures.1);
            }
        }
        let name = format!("AdamW on the GPU, {name} moments, bfloat16 gradients and weights");
        let copies = Figures { label: "device copy", values: &copies };
        rows.extend(compared(&name, "GB/s", &ours, &copies, None));
    }
    Ok(())
}

/// Partial sums of squares; each measurement brings them to the host, too.
fn sums(kernels: &Kernels, flags: &Flags, rows: &mut Vec<Value>) -> Result<(), BoxError> {
    let grad = kernels.stream.clone_htod(&vec![0.25f32; ELEMENTS])?;
    let mut rates = Vec::new();
    for round in 0..=flags.pairs {
        let start = Instant::now();
        for _ in 0..UPDATES {
            kernels.sums(&DeviceGradient::F32(grad.slice(..)), 0, 1.0)?;
        }
        if round > 0 {
            rates.push((4 * ELEMENTS * UPDATES) as f64 / start.elapsed().as_secs_f64() / 1e9);
        }
    }
    rows.extend(alone("partial sums of squares, float32", "GB/s", &rates, None));
    Ok(())
}

fn measure() -> Result<Vec<Value>, BoxError> {
    let flags = Flags::parse(std::env::args().skip(1))?;
    if flags.only.is_some() {
        return Err("`--only` is a flag of `bench optim` alone".into());
    }
    let gpu = Gpu::open(0)?;
    eprintln!("{gpu:?}");
    let kernels = Kernels::new(&gpu)?;
    let mut rows = Vec::new();
    float32(&kernels, &flags, &mut rows)?;
    mixed(&kernels, &flags, &mut rows)?;
    sums(&kernels, &flags, &mut rows)?;
    rows.extend(steps::rows(flags.pairs, &flags.dir, flags.python.as_deref().map(torch).transpose()?)?);
    Ok(rows)
}

fn main() -> ExitCode {
    let printed = measure().and_then(|rows| Ok(writeln!(std::io::stdout(), "{:#}", Value::from(rows))?));
    match printed {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench optim-gpu: {error}");
            ExitCode::FAILURE
        }
    }
}
