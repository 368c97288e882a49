//! Whole steps beside a GPU, with float32 gradients and bfloat16 weights in its memory: state in HBM, in RAM and on NVMe, updated on
//! the GPU and on the processor.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use lazy_optim_nvme::{
    AdamOptions, Bytes, DeviceChoice, DeviceSlice, Durability, Gradient, GroupOptions, NvmeAdam, ParamSpec,
    StepInput, Stream, UpdateOn, WeightsOut,
};
use lazy_store::BoxError;
use serde_json::Value;

use crate::ELEMENTS;
use crate::OF_TORCH;
use crate::program::Program;
use crate::rows::{Figures, alone, compared};
use crate::side::{Side as _, Transfer};
use crate::stats::Goal;
use crate::stream::{BUCKETS, ELEMENTS as STREAMED, Folder, fastest_fio};

/// A store that takes steps, gradients and weights in device memory.
struct Steps {
    stream: Arc<CudaStream>,
    adam: NvmeAdam,
    grad: CudaSlice<f32>,
    weights: CudaSlice<u16>,
}

impl Steps {
    fn new(folder: &Path, elements: usize, options: &AdamOptions) -> Result<Steps, BoxError> {
        let stream = CudaContext::new(0)?.new_stream()?;
        let params = [ParamSpec::new("w", &[elements])];
        let adam = NvmeAdam::create(folder, &params, options, |_, _, values| values.fill(0.1))?;
        let grad = stream.clone_htod(&vec![1e-3f32; elements])?;
        let weights = stream.alloc_zeros(elements)?;
        stream.synchronize()?;
        Ok(Steps { stream, adam, grad, weights })
    }

    /// Seconds of a step, and the bytes that it read and wrote. Without `all`, neither is the norm taken nor are weights written: what
    /// PyTorch's step does.
    fn step(&mut self, all: bool) -> Result<(f64, u64), BoxError> {
        let groups = [GroupOptions::default()];
        // SAFETY: the stream lives as long as the store.
        let stream = Some(unsafe { Stream::from_raw(self.stream.cu_stream().cast()) });
        let (norm, max_norm) = if all { (None, Some(1.0)) } else { (Some(1.0), None) };
        let input = StepInput { groups: &groups, grad_norm: norm, max_norm, stream, ..StepInput::default() };
        let n = self.grad.len();
        let (grad, _read) = self.grad.device_ptr(&self.stream);
        let (room, _written) = self.weights.device_ptr_mut(&self.stream);
        // SAFETY: both outlive the step, and nothing else uses them.
        let (grad, room) = unsafe { (DeviceSlice::f32(grad, n), DeviceSlice::bf16(room, n)) };
        let start = Instant::now();
        let room = all.then_some(WeightsOut::Device(room));
        let outcome =
            self.adam.step_into(&[Some(Gradient::Device(grad))], &input, vec![room], &mut |_, _| {})?;
        Ok((start.elapsed().as_secs_f64(), (outcome.bytes_read + outcome.bytes_written).get()))
    }
}

fn options(update: UpdateOn) -> AdamOptions {
    let device = DeviceChoice::Cuda { ordinal: 0 };
    AdamOptions { bucket_elements: STREAMED / BUCKETS, device, update, ..AdamOptions::default() }
}

/// Rows of whole steps, in `dir`.
pub(crate) fn rows(pairs: usize, dir: &Path, torch: Option<Program>) -> Result<Vec<Value>, BoxError> {
    let folder = Folder::make(dir)?;
    let mut rows = in_hbm(pairs, &folder.0, torch)?;
    rows.extend(in_ram(pairs, &folder.0)?);
    rows.extend(on_nvme(pairs, &folder)?);
    Ok(rows)
}

fn in_hbm(pairs: usize, folder: &Path, mut torch: Option<Program>) -> Result<Vec<Value>, BoxError> {
    let options = AdamOptions {
        hbm: Bytes(u64::MAX),
        durability: Durability::Checkpoint,
        bucket_elements: ELEMENTS,
        ..options(UpdateOn::Cuda)
    };
    let mut steps = Steps::new(&folder.join("hbm"), ELEMENTS, &options)?;
    const STEPS: usize = 20;
    let mut rate = |all| {
        let mut seconds = 0.0;
        for _ in 0..STEPS {
            seconds += steps.step(all)?.0;
        }
        Ok::<_, BoxError>((28 * ELEMENTS * STEPS) as f64 / seconds / 1e9)
    };
    let (mut ours, mut whole, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=pairs {
        let figures = (rate(false)?, rate(true)?);
        let peer = torch.as_mut().map(|torch| torch.measure::<1>("1")).transpose()?;
        if round > 0 {
            ours.push(figures.0);
            whole.push(figures.1);
            theirs.extend(peer.iter().flatten());
        }
    }
    let mut rows = Vec::new();
    if let Some(torch) = &torch {
        let theirs = Figures { label: &torch.name, values: &theirs };
        rows.extend(compared(
            "step, float32 state in HBM, 200 million elements",
            "GB/s",
            &ours,
            &theirs,
            Some(OF_TORCH),
        ));
    }
    let bare = Figures { label: "the step above", values: &ours };
    rows.extend(compared(
        "the same with norm, clipping and bfloat16 weights, by 28 bytes",
        "GB/s",
        &whole,
        &bare,
        None,
    ));
    Ok(rows)
}

fn in_ram(pairs: usize, folder: &Path) -> Result<Vec<Value>, BoxError> {
    let kept =
        |update| AdamOptions { host: Bytes(u64::MAX), durability: Durability::Checkpoint, ..options(update) };
    let auto = Steps::new(&folder.join("ram-auto"), STREAMED, &kept(UpdateOn::Auto))?.adam.update_on();
    let mut rows = Vec::new();
    if let Some(costs) = auto.measured {
        let label = format!("on the processor; taken: {:?}", auto.on);
        let cpu = Figures { label: &label, values: &[costs.cpu.0 * 1e3] };
        rows.extend(compared(
            "chunk, as measured at opening, on the GPU",
            "ms",
            &[costs.cuda.0 * 1e3],
            &cpu,
            None,
        ));
    }
    let mut cuda = Steps::new(&folder.join("ram-cuda"), STREAMED, &kept(UpdateOn::Cuda))?;
    let mut cpu = Steps::new(&folder.join("ram-cpu"), STREAMED, &kept(UpdateOn::Cpu))?;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..=pairs {
        let figures = (cuda.step(true)?.0, cpu.step(true)?.0);
        if round > 0 {
            ours.push(figures.0);
            theirs.push(figures.1);
        }
    }
    let link: Vec<f64> = ours.iter().map(|seconds| 12.0 * STREAMED as f64 / seconds / 1e9).collect();
    let theirs = Figures { label: "update on the processor", values: &theirs };
    rows.extend(compared(
        "step, state in RAM, 64 million elements, update on the GPU",
        "s",
        &ours,
        &theirs,
        None,
    ));
    rows.extend(alone("state over the link in that step, each way", "GB/s", &link, None));
    Ok(rows)
}

fn on_nvme(pairs: usize, folder: &Folder) -> Result<Vec<Value>, BoxError> {
    let mut cuda = Steps::new(&folder.0.join("nvme-cuda"), STREAMED, &options(UpdateOn::Cuda))?;
    let mut cpu = Steps::new(&folder.0.join("nvme-cpu"), STREAMED, &options(UpdateOn::Cpu))?;
    let bytes = cuda.step(true)?.1 / (8 << 20) * (8 << 20);
    let mut fio = fastest_fio(folder, bytes)?;
    let label = fio.as_ref().map(|fio| fio.label(Transfer::Both)).unwrap_or_default();
    let (mut on_gpu, mut here, mut drive) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=pairs {
        let figures = (cuda.step(true)?.0, cpu.step(true)?.0);
        let peer = fio.as_mut().map(|fio| fio.run(Transfer::Both)).transpose()?;
        if round > 0 {
            on_gpu.push(figures.0);
            here.push(figures.1);
            drive.extend(peer.map(|sample| sample.seconds));
        }
    }
    let row = |name: &str, ours: &[f64], label: &str, theirs: &[f64], goal| {
        compared(name, "s", ours, &Figures { label, values: theirs }, goal)
    };
    let name = "step, state on NVMe, 5.3 times a ring of three chunks, update on the GPU";
    let goal = Some(Goal::AtMost(1.10));
    let rows = [
        row(name, &on_gpu, &label, &drive, goal),
        row("the same, update on the processor", &here, &label, &drive, goal),
        row(name, &on_gpu, "update on the processor", &here, None),
    ];
    Ok(rows.into_iter().flatten().collect())
}
