//! Training under different plans: the same bits from all of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use half::bf16;
use lazy_model::{Bytes, Schedule};
use lazy_runtime::{LayerError, Model, ModelOptions};
use lazy_store::cuda::kernels::{Arg, Grid, Kernel, Module};
use lazy_store::{BoxError, DeviceRange, Lane, Store, StoreError, Stream, Submission};

use super::{Bench, Dims, Outcome, ids, options, spec, weights};
use crate::cuda::trial::{Trial, bytes_of};
use crate::cuda::{CudaOptions, Real};
use crate::model::Shape;

const DIMS: Dims = [256, 6, 512, 4, 2, 64, 512];
const SHAPE: Shape = Shape { batch: 2, seq: 96 };
const RATE: f32 = 0.05;
/// How long a copy is held up where copies are slow, in nanoseconds.
const HELD: u64 = 300_000;

/// Kernels that tests need.
#[derive(Clone)]
struct Extra {
    descend: Kernel,
    spin: Kernel,
}

impl Extra {
    fn compile(bench: &Bench<'_>) -> Result<Extra, StoreError> {
        let source = concat!(include_str!("../kernels/common.cu"), include_str!("../kernels/trial.cu"));
        let module = Module::compile(bench.gpu, "trial", source, &["-DREAL_BF16"])?;
        Ok(Extra { descend: module.kernel("descend")?, spin: module.kernel("spin")? })
    }

    fn descend(&self, stream: Stream, weights: DeviceRange, gradient: DeviceRange) -> Result<(), StoreError> {
        let n = weights.bytes.get() / 2;
        let args =
            [Arg::Address(weights.address), Arg::Address(gradient.address), Arg::F32(RATE), Arg::U64(n)];
        // SAFETY: the kernel's parameters: bfloat16 weights, and a float32 gradient of as many, which the hook holds.
        unsafe { self.descend.launch(stream, Grid::linear(64, 256), &args) }
    }

    /// Holds the streams of both copy directions up, again and again, until `done`.
    fn slow_copies(&self, store: &Store, done: &AtomicBool) -> Result<(), StoreError> {
        while !done.load(Ordering::Relaxed) {
            let held = [Lane::D2h, Lane::H2d].map(|lane| {
                let spin = self.spin.clone();
                store.launch(Submission::new(lane, "spin"), move |access| {
                    // SAFETY: the kernel's parameter; it touches no memory.
                    Ok(unsafe { spin.launch(access.stream(), Grid::linear(1, 1), &[Arg::U64(HELD)]) }?)
                })
            });
            // One spin a lane at a time: a queue of them would grow for as long as the steps run.
            held.into_iter().try_for_each(|spin| spin.map(|spin| spin.wait()))?;
        }
        Ok(())
    }
}

/// The same update of weights that live in RAM.
fn descend_in_ram(weights: &mut [u8], gradient: &[f32]) {
    for (w, g) in weights.chunks_exact_mut(2).zip(gradient) {
        let new = bf16::from_le_bytes([w[0], w[1]]).to_f32() - RATE * g;
        w.copy_from_slice(&bf16::from_f32(new).to_le_bytes());
    }
}

type Choose = dyn FnOnce(&Model) -> Result<Schedule, BoxError>;

/// One way to run the same training.
struct Way {
    name: String,
    model: ModelOptions,
    schedule: Box<Choose>,
    slow: bool,
}

impl Way {
    fn new(
        name: impl Into<String>,
        schedule: impl FnOnce(&Model) -> Result<Schedule, BoxError> + 'static,
    ) -> Way {
        Way { name: name.into(), model: ModelOptions::default(), schedule: Box::new(schedule), slow: false }
    }

    fn letters(letters: &'static str) -> Way {
        Way::new(letters, move |model| Ok(model.schedule(letters)?))
    }
}

/// Trains for so many steps. Losses and weights.
fn train(bench: &Bench<'_>, extra: &Extra, way: Way, steps: u64) -> Result<(Vec<f32>, Vec<u8>), BoxError> {
    let spec = spec(DIMS)?;
    let options = CudaOptions { model: way.model, ..options(SHAPE, Real::Bf16) };
    let init = |name: &str, shape: &[usize]| bytes_of(Real::Bf16, &weights(name, shape));
    let mut trial = Trial::open(bench.gpu, &spec, options, bench.dir, way.schedule, init)?;
    let own = extra.clone();
    trial.executor.update_in_backward(move |last| {
        let stream = last.stream;
        let (weights, gradient) = last.in_memory()?;
        match stream {
            Some(stream) => Ok(own.descend(stream, weights.range()?, gradient.range()?)?),
            None => {
                let gradient = gradient.f32()?.to_vec();
                descend_in_ram(weights.bytes()?, &gradient);
                Ok::<(), LayerError>(())
            }
        }
    });
    let ids = ids(SHAPE, spec.vocab);
    let done = Arc::new(AtomicBool::new(false));
    let slowing = way.slow.then(|| {
        let (extra, store, done) = (extra.clone(), trial.executor.store().clone(), Arc::clone(&done));
        std::thread::spawn(move || extra.slow_copies(&store, &done))
    });
    let mut losses = Vec::new();
    let mut failed = None;
    for step in 0..steps {
        // The same tokens, rotated, so that steps differ.
        let mut ids = ids.clone();
        ids.rotate_left(step as usize % 7);
        let batches = vec![ids; way.model.micro_batches];
        match trial.step(step, &batches) {
            Ok(report) => losses.push(report.losses.iter().sum()),
            Err(error) => {
                failed = Some(error);
                break;
            }
        }
    }
    done.store(true, Ordering::Relaxed);
    if let Some(slowing) = slowing {
        slowing.join().map_err(|_| "the thread that slows copies down ended")??;
    }
    match failed {
        Some(error) => Err(error),
        None => Ok((losses, trial.weights()?)),
    }
}

/// Every layer keeps its internals.
fn resident(model: &Model) -> Result<Schedule, BoxError> {
    Ok(Schedule::named("resident", &model.sizes().boundary, true))
}

/// Ways that must agree.
fn ways() -> Vec<Way> {
    let mut ways = vec![
        Way::new("checkpoint", |model| Ok(Schedule::named("checkpoint", &model.sizes().boundary, false))),
        Way::letters("G-G-G-G"),
        Way::letters("CN-GN-G"),
        Way::new("some kept", |model| {
            let mut schedule = model.schedule("CNCGGGG")?;
            (schedule.keep[3], schedule.keep[5]) = (true, true);
            Ok(schedule)
        }),
    ];
    for prefetch in [0, 1, 2, 4] {
        ways.push(Way::new(format!("host and NVMe, {prefetch} ahead"), move |model| {
            let mut schedule = model.schedule("CNCNCCG")?;
            schedule.execution.prefetch = prefetch;
            Ok(schedule)
        }));
    }
    let streamed = ModelOptions { stream_weights: true, stream_gradients: true, ..ModelOptions::default() };
    ways.push(Way { model: streamed, ..Way::letters("CCCCCCG") });
    ways.push(Way { model: streamed, ..Way::new("resident, weights streamed", resident) });
    ways.push(Way { slow: true, ..Way::letters("CNCNCCG") });
    ways.push(Way { slow: true, model: streamed, ..Way::letters("CNC-CCG") });
    ways
}

pub(super) fn same_bits(bench: &Bench<'_>) -> Outcome {
    let extra = Extra::compile(bench)?;
    let (losses, weights) = train(bench, &extra, Way::new("resident", resident), 20)?;
    let (first, last) = (losses[0], losses[19]);
    if last.is_nan() || last >= first {
        return Err(format!("the loss went from {first} to {last}").into());
    }
    let ways = ways();
    let count = ways.len();
    for way in ways {
        let name = way.name.clone();
        let (own, after) = train(bench, &extra, way, 20).map_err(|e| format!("{name}: {e}"))?;
        if own != losses || after != weights {
            return Err(format!("{name}: other bits than with everything resident").into());
        }
    }
    let once = train(bench, &extra, Way::new("two", resident), 20)?;
    if once != (losses, weights) {
        return Err("resident twice: other bits".into());
    }
    let two = ModelOptions { micro_batches: 2, ..ModelOptions::default() };
    let resident_twice = train(bench, &extra, Way { model: two, ..Way::new("", resident) }, 20)?;
    let spilled = train(bench, &extra, Way { model: two, ..Way::letters("CN-GN-G") }, 20)?;
    if resident_twice != spilled {
        return Err("two micro-batches: other bits spilled than resident".into());
    }
    Ok(format!(
        "{count} plans, loss {first:.3} to {last:.3}, {} of weights",
        Bytes(resident_twice.1.len() as u64)
    ))
}

pub(super) fn long_run(bench: &Bench<'_>) -> Outcome {
    let extra = Extra::compile(bench)?;
    let four_ahead = |model: &Model| {
        let mut schedule = model.schedule("CCCCCCG")?;
        schedule.execution.prefetch = 4;
        Ok(schedule)
    };
    let long = train(bench, &extra, Way::new("long", four_ahead), 1000)?;
    let slow = train(bench, &extra, Way { slow: true, ..Way::new("slow", four_ahead) }, 1000)?;
    let same = train(bench, &extra, Way::new("resident", resident), 1000)?;
    let losses = &long.0;
    match losses.iter().position(|loss| !loss.is_finite()) {
        Some(at) => Err(format!("the loss of step {at} is {}", losses[at]).into()),
        None if same != long => Err("other bits than with everything resident".into()),
        None if slow != long => Err("other bits where copies are held up".into()),
        None => Ok(format!("loss {:.3} to {:.4}", losses[0], losses[999])),
    }
}
