//! The update on the CPU, beside a copy in memory and PyTorch.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use lazy_optim_nvme::raw::{Sections, Step};
use lazy_optim_nvme::{Gradient, GroupOptions, Moments};
use lazy_store::BoxError;
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde_json::Value;

use crate::program::Program;
use crate::rows::{Figures, alone, compared};
use crate::stats::Goal;

/// Elements of one array, 64 MiB: more than any cache holds.
const ELEMENTS: usize = 16 << 20;
/// Updates of a measurement.
const UPDATES: usize = 5;
/// Bytes an element that are read and written: four numbers and three.
const BYTES: usize = 28;

/// Of the copy's rate, and of PyTorch's.
const OF_COPY: Goal = Goal::AtLeast(0.85);
const OF_TORCH: Goal = Goal::AtLeast(1.0);

/// Decimal gigabytes a second.
fn rate(bytes: usize, work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    bytes as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// State and a gradient of one parameter.
struct Update {
    state: Sections,
    grad: Vec<f32>,
    count: u64,
}

impl Update {
    fn new(moments: Moments) -> Update {
        let ramp = |sign: f32| (0..ELEMENTS).map(|i| sign * (i as f32 / ELEMENTS as f32 - 0.5)).collect();
        Update { state: Sections::new(moments, ramp(1.0)), grad: ramp(-1.0), count: 0 }
    }

    /// GB/s, counted as if moments were float32.
    fn run(&mut self, pool: &ThreadPool) -> f64 {
        rate(BYTES * ELEMENTS * UPDATES, || {
            for _ in 0..UPDATES {
                self.count += 1;
                let step = Step::new(&GroupOptions::default(), self.count, 1.0, 1.0);
                pool.install(|| self.state.update(&step, 0..ELEMENTS, Gradient::F32(&self.grad), None));
            }
        })
    }
}

/// As many bytes read and written, by the C library's copy: one long piece a thread.
struct Copy {
    from: Vec<u8>,
    to: Vec<u8>,
}

impl Copy {
    fn new() -> Copy {
        let bytes = BYTES / 2 * ELEMENTS;
        Copy { from: vec![1; bytes], to: vec![2; bytes] }
    }

    fn run(&mut self, pool: &ThreadPool) -> f64 {
        let piece = self.from.len().div_ceil(pool.current_num_threads());
        rate(BYTES * ELEMENTS * UPDATES, || {
            for _ in 0..UPDATES {
                let pieces = self.to.par_chunks_mut(piece).zip(self.from.par_chunks(piece));
                pool.install(|| pieces.for_each(|(to, from)| to.copy_from_slice(from)));
            }
        })
    }
}

fn torch(python: &Path) -> Result<Program, BoxError> {
    let numbers = [ELEMENTS.to_string(), UPDATES.to_string()];
    Program::start(Command::new(python).args(["-c", include_str!("torch.py"), "cpu"]).args(numbers))
}

/// Rows of `pairs` rounds each.
pub(crate) fn rows(pairs: usize, python: Option<&Path>) -> Result<Vec<Value>, BoxError> {
    let mut torch = python.map(torch).transpose()?;
    let every = std::thread::available_parallelism()?.get();
    let mut rows = Vec::new();
    for (threads, name) in [(1, "one thread"), (every, "all threads")] {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build()?;
        let (mut update, mut copy) = (Update::new(Moments::F32), Copy::new());
        let (mut ours, mut copies, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=pairs {
            let figures = (update.run(&pool), copy.run(&pool));
            let peer = torch.as_mut().map(|torch| torch.measure::<1>(&threads.to_string())).transpose()?;
            // The first round warms up.
            if round > 0 {
                ours.push(figures.0);
                copies.push(figures.1);
                theirs.extend(peer.iter().flatten());
            }
        }
        let name = format!("AdamW on the CPU, float32, {name}");
        let copies = Figures { label: "copy of as many bytes", values: &copies };
        rows.extend(compared(&name, "GB/s", &ours, &copies, Some(OF_COPY)));
        if let Some(torch) = &torch {
            let theirs = Figures { label: &torch.name, values: &theirs };
            rows.extend(compared(&name, "GB/s", &ours, &theirs, Some(OF_TORCH)));
        }
        for (moments, name) in [(Moments::Bf16, "bfloat16"), (Moments::Int8, "8-bit")] {
            let mut update = Update::new(moments);
            update.run(&pool);
            let rates: Vec<f64> = (0..pairs).map(|_| update.run(&pool) / BYTES as f64).collect();
            let name = format!("AdamW on the CPU, {name} moments, {threads} threads");
            rows.extend(alone(&name, "billion elements/s", &rates, None));
        }
    }
    Ok(rows)
}
