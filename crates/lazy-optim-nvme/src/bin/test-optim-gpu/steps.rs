//! Whole steps of a store: from every home, with gradients and weights in device memory, against a store without a GPU.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use lazy_optim_nvme::raw::Kernels;
use lazy_optim_nvme::{
    AdamOptions, Bytes, DeviceChoice, DeviceSlice, Durability, Gradient, Gradients, GroupOptions,
    LoadOptions, Moments, NvmeAdam, ParamSpec, StatePart, StepInput, Stream, UpdateOn, WeightsOut,
};
use lazy_store::BoxError;
use lazy_store::cuda::Gpu;
use lazy_store::gpu_test::Random;

use crate::cases::{Case, NAMES, RECORDED, Recording, SIZES, STEPS};
use crate::data::Values as _;
use crate::tests::RUNS;

const FORMATS: [Moments; 6] =
    [Moments::F32, Moments::Bf16, Moments::Int8, Moments::F32, Moments::Int8, Moments::Bf16];
const ELEMENTS: [usize; 6] = [1_000_003, 65_536, 300_001, 4097, 511, 2_000_000];
/// Main, first and second moment of every parameter, as bits.
type State = Vec<[Vec<u32>; 3]>;

/// A folder that goes when it is dropped.
struct Folder(PathBuf);

impl Folder {
    fn make(name: &str) -> Result<Folder, BoxError> {
        let path = std::env::temp_dir().join(format!("test-optim-gpu-{}-{name}", std::process::id()));
        std::fs::create_dir(&path)?;
        Ok(Folder(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn specs() -> Vec<ParamSpec> {
    let params = ELEMENTS.iter().zip(FORMATS).enumerate();
    params.map(|(i, (n, moments))| ParamSpec::new(format!("p{i}"), &[*n]).with_moments(moments)).collect()
}

/// Buckets of 400,000 elements, chunks of 65,536, and budgets of HBM and RAM.
fn options(update: Option<UpdateOn>, [hbm, host]: [u64; 2]) -> AdamOptions {
    AdamOptions {
        bucket_elements: 400_000,
        chunk_bytes: Bytes(256 << 10),
        durability: if hbm + host > 0 { Durability::Checkpoint } else { Durability::Step },
        device: if update.is_some() { DeviceChoice::Cuda { ordinal: 0 } } else { DeviceChoice::Host },
        update: update.unwrap_or(UpdateOn::Cpu),
        hbm: Bytes(hbm),
        host: Bytes(host),
        ..AdamOptions::default()
    }
}

/// None, some buckets, all: of HBM, then of RAM.
const BUDGETS: [[u64; 2]; 6] =
    [[0, 0], [0, 10_000_000], [0, 1 << 40], [10_000_000, 0], [1 << 40, 0], [10_000_000, 10_000_000]];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Where {
    Ram,
    Mixed,
    Device,
    /// Gradients in device memory, weights shown.
    Shown,
}

const PLACES: [Where; 4] = [Where::Device, Where::Mixed, Where::Ram, Where::Shown];

impl Where {
    fn on_device(self, i: usize) -> bool {
        match self {
            Where::Ram => false,
            Where::Mixed => i.is_multiple_of(2),
            Where::Device | Where::Shown => true,
        }
    }
}

/// Numbers of one parameter in RAM and in device memory: float32 for even parameters, bfloat16 for odd ones.
struct Numbers {
    wide: Vec<f32>,
    narrow: Vec<u16>,
    wide_there: CudaSlice<f32>,
    narrow_there: CudaSlice<u16>,
}

impl Numbers {
    fn new(stream: &Arc<CudaStream>, wide: Vec<f32>, narrow: Vec<u16>) -> Result<Numbers, BoxError> {
        let (wide_there, narrow_there) = (stream.clone_htod(&wide)?, stream.clone_htod(&narrow)?);
        Ok(Numbers { wide, narrow, wide_there, narrow_there })
    }

    fn there(&mut self, stream: &Arc<CudaStream>, i: usize) -> DeviceSlice {
        let (wide, _used) = self.wide_there.device_ptr_mut(stream);
        let (narrow, _used) = self.narrow_there.device_ptr_mut(stream);
        // SAFETY: the slices outlive every step that this is given to, which is told of their stream.
        unsafe {
            if i.is_multiple_of(2) {
                DeviceSlice::f32(wide, self.wide.len())
            } else {
                DeviceSlice::bf16(narrow, self.narrow.len())
            }
        }
    }
}

/// Room for the weights of every parameter.
fn rooms(stream: &Arc<CudaStream>) -> Result<Vec<Numbers>, BoxError> {
    ELEMENTS.iter().map(|n| Numbers::new(stream, vec![7.0; *n], vec![7; *n])).collect()
}

/// The same, as a store is given it.
fn out<'a>(rooms: &'a mut [Numbers], stream: &Arc<CudaStream>, place: Where) -> Vec<Option<WeightsOut<'a>>> {
    let mut out = Vec::new();
    for (i, room) in rooms.iter_mut().enumerate() {
        out.push(Some(if place.on_device(i / 2) {
            WeightsOut::Device(room.there(stream, i))
        } else if i % 2 == 0 {
            WeightsOut::F32(&mut room.wide)
        } else {
            WeightsOut::Bf16(&mut room.narrow)
        }));
    }
    out
}

/// The gradients of step number `t`.
fn grads(stream: &Arc<CudaStream>, t: u64) -> Result<Vec<Numbers>, BoxError> {
    let mut random = Random(100 + t);
    let mut grads = Vec::new();
    for n in ELEMENTS {
        let wide: Vec<f32> = random.values(n).iter().map(|v| v.clamp(-1e3, 1e3)).collect();
        let narrow = wide.iter().map(|v| (v.to_bits() >> 16) as u16).collect();
        grads.push(Numbers::new(stream, wide, narrow)?);
    }
    Ok(grads)
}

/// A store, and room for its weights.
struct Run<'a> {
    stream: &'a Arc<CudaStream>,
    adam: NvmeAdam,
    rooms: Vec<Numbers>,
}

impl<'a> Run<'a> {
    fn new(stream: &'a Arc<CudaStream>, adam: NvmeAdam) -> Result<Self, BoxError> {
        Ok(Run { stream, adam, rooms: rooms(stream)? })
    }

    fn create(stream: &'a Arc<CudaStream>, folder: &Path, options: &AdamOptions) -> Result<Self, BoxError> {
        let mut random = Random(10);
        let init = |_: usize, _: usize, values: &mut [f32]| {
            values
                .iter_mut()
                .for_each(|value| *value = random.below(1 << 20) as f32 / (1 << 19) as f32 - 1.0);
        };
        Run::new(stream, NvmeAdam::create(folder, &specs(), options, init)?)
    }

    /// Step number `t`, with clipping on; the norm.
    fn step(&mut self, t: u64, place: Where) -> Result<f64, BoxError> {
        let stream = self.stream;
        let mut grads = grads(stream, t)?;
        let there: Vec<DeviceSlice> = grads.iter_mut().enumerate().map(|(i, g)| g.there(stream, i)).collect();
        let mut given = Vec::new();
        for (i, numbers) in grads.iter().enumerate() {
            let grad = match (place.on_device(i), i % 2) {
                (true, _) => Gradient::Device(there[i]),
                (false, 0) => Gradient::F32(&numbers.wide),
                (false, _) => Gradient::Bf16(&numbers.narrow),
            };
            given.push((t != 2 || i != 3).then_some(grad));
        }
        // SAFETY: the stream outlives the step.
        let ordered = unsafe { Stream::from_raw(stream.cu_stream().cast()) };
        let groups = [GroupOptions { lr: 1e-2, ..GroupOptions::default() }];
        let input = StepInput {
            groups: &groups,
            max_norm: Some(1.0),
            scale: 2.0,
            stream: Some(ordered),
            ..StepInput::default()
        };
        let started = Instant::now();
        let outcome = if place == Where::Shown {
            let rooms = &mut self.rooms;
            self.adam.step(&given, &input, &mut |param, first, values| {
                rooms[param].wide[first..first + values.len()].copy_from_slice(values);
            })?
        } else {
            let out = out(&mut self.rooms, stream, place);
            self.adam.step_into(&given, &input, out, &mut |_, _| {})?
        };
        if outcome.clip_coefficient >= 1.0 {
            return Err("nothing was clipped".into());
        }
        // By clocks of two processors.
        let (early, late) = (-1e-3, started.elapsed().as_secs_f64() + 1e-3);
        if let Some(span) = outcome.spans.iter().find(|span| span.start.0 < early || span.end.0 > late) {
            return Err(
                format!("{} ran from {} to {}, the step to {late}", span.name, span.start, span.end).into()
            );
        }
        Ok(outcome.grad_norm)
    }

    /// Step number `t`, whose gradients come into device memory as they are asked for, by copies that are only queued then; with `bad`,
    /// that one's is not finite. Whether the step was skipped.
    fn awaited(&mut self, t: u64, bad: Option<usize>) -> Result<bool, BoxError> {
        let stream = self.stream;
        let mut finals = grads(stream, t)?;
        if let Some(bad) = bad {
            finals[bad].wide[17] = f32::INFINITY;
            finals[bad].narrow[17] = 0x7f80;
        }
        let nan = |n: &usize| Numbers::new(stream, vec![f32::NAN; *n], vec![0x7fc0; *n]);
        let mut there = ELEMENTS.iter().map(nan).collect::<Result<Vec<_>, _>>()?;
        let slices: Vec<DeviceSlice> =
            there.iter_mut().enumerate().map(|(i, g)| g.there(stream, i)).collect();
        let mut wait = |param: usize| {
            stream.memcpy_htod(&finals[param].wide, &mut there[param].wide_there)?;
            stream.memcpy_htod(&finals[param].narrow, &mut there[param].narrow_there)?;
            Ok(Some(Gradient::Device(slices[param])))
        };
        // SAFETY: the stream outlives the step.
        let ordered = unsafe { Stream::from_raw(stream.cu_stream().cast()) };
        let groups = [GroupOptions::default()];
        let input = StepInput { groups: &groups, scale: 2.0, stream: Some(ordered), ..StepInput::default() };
        let out = out(&mut self.rooms, stream, Where::Device);
        let outcome = self.adam.step_into(Gradients::Awaited(&mut wait), &input, out, &mut |_, _| {})?;
        Ok(outcome.skipped)
    }

    /// The weights as they were handed out, as bits: those shown are float32.
    fn weights(&self, place: Where) -> Result<Vec<Vec<u32>>, BoxError> {
        let mut all = Vec::new();
        for (i, room) in self.rooms.iter().enumerate() {
            let on_device = place != Where::Shown && place.on_device(i / 2);
            let (wide, narrow) = if on_device {
                (self.stream.clone_dtoh(&room.wide_there)?, self.stream.clone_dtoh(&room.narrow_there)?)
            } else {
                (room.wide.clone(), room.narrow.clone())
            };
            let as_wide = i % 2 == 0 || place == Where::Shown;
            all.push(if as_wide {
                wide.iter().map(|v| v.to_bits()).collect()
            } else {
                narrow.iter().map(|v| u32::from(*v)).collect()
            });
        }
        Ok(all)
    }

    /// Reads the weights into room that holds something else.
    fn read_weights(&mut self, place: Where) -> Result<(), BoxError> {
        self.rooms = rooms(self.stream)?;
        // What fills the room is on the stream.
        self.stream.synchronize()?;
        let out = out(&mut self.rooms, self.stream, place);
        Ok(self.adam.read_weights_into(out)?)
    }

    fn state(&mut self) -> Result<State, BoxError> {
        let mut state: State = vec![Default::default(); ELEMENTS.len()];
        self.adam.read_state(&mut |StatePart { param, main, exp_avg, exp_avg_sq, .. }| {
            for (all, part) in state[param].iter_mut().zip([main, exp_avg, exp_avg_sq]) {
                all.extend(part.iter().map(|v| v.to_bits()));
            }
        })?;
        Ok(state)
    }
}

/// State, weights and norms.
type Trace = (State, Vec<Vec<u32>>, Vec<u64>);

/// What three steps leave.
fn trace(kernels: &Kernels, name: &str, options: &AdamOptions, place: Where) -> Result<Trace, BoxError> {
    let folder = Folder::make(name)?;
    let mut run = Run::create(&kernels.stream, &folder.0, options)?;
    let mut norms = Vec::new();
    for t in 1..=3 {
        norms.push(run.step(t, place)?.to_bits());
    }
    Ok((run.state()?, run.weights(place)?, norms))
}

/// Every home, way and place.
pub(crate) fn homes(kernels: &Kernels) -> Result<String, BoxError> {
    let wanted = trace(kernels, "wanted", &options(None, [0, 0]), Where::Ram)?;
    let shown = wanted.0.iter().map(|[main, ..]| main.clone()).collect::<Vec<_>>();
    let mut count = 0;
    for update in [UpdateOn::Cuda, UpdateOn::Cpu, UpdateOn::Auto] {
        // What is chosen is one of the others.
        let (budgets, places) = if update == UpdateOn::Auto { (1, 1) } else { (BUDGETS.len(), PLACES.len()) };
        for budgets in BUDGETS.into_iter().take(budgets) {
            for place in PLACES.into_iter().take(places) {
                let found = trace(kernels, &format!("{count}"), &options(Some(update), budgets), place);
                let found = found.map_err(|error| format!("{update:?}, {budgets:?}, {place:?}: {error}"))?;
                let weights = if place == Where::Shown { &shown } else { &wanted.1 };
                for (what, same) in [
                    ("the state", found.0 == wanted.0),
                    ("the weights", found.1 == *weights),
                    ("the norm", found.2 == wanted.2),
                ] {
                    if !same {
                        return Err(format!("{what} differs: {update:?}, {budgets:?}, {place:?}").into());
                    }
                }
                count += 1;
            }
        }
    }
    Ok(format!("{count} runs of 3 steps of {} elements", ELEMENTS.iter().sum::<usize>()))
}

/// Gradients that become final in device memory while the step runs.
pub(crate) fn awaited(kernels: &Kernels) -> Result<String, BoxError> {
    let stream = &kernels.stream;
    let folder = Folder::make("final")?;
    let mut wanted = Run::create(stream, &folder.0, &options(None, [0, 0]))?;
    for t in 1..=3 {
        let numbers = grads(stream, t)?;
        let given = numbers.iter().enumerate();
        let given: Vec<_> = given
            .map(|(i, g)| Some(if i % 2 == 0 { Gradient::F32(&g.wide) } else { Gradient::Bf16(&g.narrow) }))
            .collect();
        let groups = [GroupOptions::default()];
        let input = StepInput { groups: &groups, scale: 2.0, ..StepInput::default() };
        let out = out(&mut wanted.rooms, stream, Where::Ram);
        wanted.adam.step_into(&given, &input, out, &mut |_, _| {})?;
    }
    let (state, weights) = (wanted.state()?, wanted.weights(Where::Ram)?);
    for update in [UpdateOn::Cuda, UpdateOn::Cpu] {
        let folder = Folder::make("awaited")?;
        let mut run = Run::create(stream, &folder.0, &options(Some(update), [0, 0]))?;
        for t in 1..=3 {
            run.read_weights(Where::Device)?;
            let before = (run.state()?, run.weights(Where::Device)?);
            // The first parameter is asked for last, when nearly all is updated.
            for bad in [0, 1, ELEMENTS.len() - 1] {
                let skipped = run.awaited(t, Some(bad))?;
                if !skipped || (run.state()?, run.weights(Where::Device)?) != before {
                    return Err(
                        format!("{update:?}: a gradient of p{bad} that is not finite left traces").into()
                    );
                }
            }
            if run.awaited(t, None)? {
                return Err(format!("{update:?}: step {t} was skipped").into());
            }
        }
        if (run.state()?, run.weights(Where::Device)?) != (state.clone(), weights.clone()) {
            return Err(format!("{update:?}: not what final gradients give").into());
        }
    }
    Ok("2 runs of 3 steps, 9 taken back in each".into())
}

/// Weights read into room of every kind, from every home.
pub(crate) fn weights(kernels: &Kernels) -> Result<String, BoxError> {
    let mut count = 0;
    for update in [None, Some(UpdateOn::Cuda), Some(UpdateOn::Cpu)] {
        let (budgets, places) = if update.is_none() { (3, &[Where::Ram][..]) } else { (6, &PLACES[..3]) };
        for budgets in BUDGETS.into_iter().take(budgets) {
            for place in places {
                let folder = Folder::make("weights")?;
                let mut run = Run::create(&kernels.stream, &folder.0, &options(update, budgets))?;
                run.step(1, *place)?;
                let written = run.weights(*place)?;
                run.read_weights(*place)?;
                if run.weights(*place)? != written {
                    return Err(format!("they differ: {update:?}, {budgets:?}, {place:?}").into());
                }
                count += 1;
            }
        }
    }
    Ok(format!("{count} ways"))
}

/// Saved from every home and loaded into every other; lent in between.
pub(crate) fn resumed(kernels: &Kernels) -> Result<String, BoxError> {
    let straight = {
        let folder = Folder::make("straight")?;
        let mut run = Run::create(&kernels.stream, &folder.0, &options(None, [0, 0]))?;
        (1..=4).try_for_each(|t| run.step(t, Where::Ram).map(drop))?;
        run.state()?
    };
    let mut count = 0;
    for (j, from) in BUDGETS.into_iter().enumerate() {
        let folder = Folder::make("from")?;
        let mut run =
            Run::create(&kernels.stream, &folder.0.join("a"), &options(Some(UpdateOn::Cuda), from))?;
        run.step(1, Where::Device)?;
        run.step(2, Where::Device)?;
        let free = Gpu::open(0)?.memory()?.0;
        run.adam.suspend()?;
        let lent = Gpu::open(0)?.memory()?.0;
        let taken = NvmeAdam::device_bytes(&specs(), &options(Some(UpdateOn::Cuda), from))?;
        // The driver gives memory back in pieces of 2 MiB.
        if lent.get() + (2 << 20) < free.get() + taken.get() {
            return Err(format!("{from:?}: {taken} were taken, {free} free before and {lent} after").into());
        }
        run.adam.resume()?;
        run.adam.save("two")?.wait()?;
        run.step(3, Where::Device)?;
        drop(run);
        for (i, to) in BUDGETS.into_iter().enumerate() {
            for update in [None, Some(UpdateOn::Cuda)] {
                // Every second pair, each home among them.
                if update.is_none() && to[0] > 0 || (i + j) % 2 == 1 {
                    continue;
                }
                let (source, dir) =
                    (folder.0.join("a/two"), folder.0.join(format!("b{i}{}", update.is_some())));
                let adam =
                    NvmeAdam::load(&[source], &dir, &specs(), &options(update, to), LoadOptions::default())?;
                let mut run = Run::new(&kernels.stream, adam)?;
                let place = if update.is_some() { Where::Mixed } else { Where::Ram };
                run.step(3, place)?;
                run.step(4, place)?;
                if run.state()? != straight {
                    return Err(format!("from {from:?} to {to:?}, {update:?}").into());
                }
                count += 1;
            }
        }
    }
    Ok(format!("{count} ways"))
}

/// The recorded runs through whole steps, from each home.
pub(crate) fn golden(kernels: &Kernels) -> Result<String, BoxError> {
    let mut worst = 0f64;
    for (update, budgets) in [
        (UpdateOn::Cuda, [0, 0]),
        (UpdateOn::Cuda, [0, 1 << 40]),
        (UpdateOn::Cuda, [1 << 40, 0]),
        (UpdateOn::Cpu, [0, 1 << 40]),
    ] {
        for case in Case::all() {
            let run = RUNS.iter().find(|(file, _)| *file == case.file).ok_or("no such recording")?;
            let found = golden_run(kernels, &case, run.1, &options(Some(update), budgets));
            worst = worst.max(found.map_err(|e| format!("{}, {update:?}, {budgets:?}: {e}", case.file))?);
        }
    }
    Ok(format!("4 times {} runs, largest error {worst:.1e} of the largest magnitude", RUNS.len()))
}

fn golden_run(kernels: &Kernels, case: &Case, bytes: &[u8], options: &AdamOptions) -> Result<f64, BoxError> {
    let recording = Recording::open(bytes)?;
    let params: Vec<_> =
        (0..4).map(|p| ParamSpec::new(NAMES[p], &[SIZES[p]]).in_group(case.group_of[p])).collect();
    let (mut init, mut grads) = (Vec::new(), Vec::new());
    for p in 0..4 {
        init.push(recording.initial(p)?);
        grads.push(kernels.stream.clone_htod(&recording.grads(p)?)?);
    }
    let folder = Folder::make("golden")?;
    // What is in memory needs not be committed at each of 200 steps.
    let options = AdamOptions { bucket_elements: 50, durability: Durability::Checkpoint, ..options.clone() };
    let mut adam = NvmeAdam::create(&folder.0, &params, &options, |param, first, values| {
        values.copy_from_slice(&init[param][first..first + values.len()]);
    })?;
    kernels.stream.synchronize()?;
    let mut worst = 0f64;
    for t in 0..STEPS {
        let groups = case.groups(t);
        let mut given = Vec::new();
        for p in 0..4 {
            let (address, _used) = grads[p].device_ptr(&kernels.stream);
            // SAFETY: the slice outlives the step, and nothing writes it any more.
            let all = unsafe { DeviceSlice::f32(address + 4 * (t * SIZES[p]) as u64, SIZES[p]) };
            given.push((case.present)(p, t).then_some(Gradient::Device(all)));
        }
        let input = StepInput { groups: &groups, ..StepInput::default() };
        adam.step(&given, &input, &mut |_, _, _| {})?;
        if RECORDED.contains(&(t + 1)) {
            let mut state: [[Vec<f32>; 3]; 4] = Default::default();
            adam.read_state(&mut |part| {
                let parts = [part.main, part.exp_avg, part.exp_avg_sq];
                state[part.param].iter_mut().zip(parts).for_each(|(all, part)| all.extend(part));
            })?;
            worst = worst.max(recording.compare(t + 1, &state)?);
        }
    }
    if adam.step_counts() != case.counts {
        return Err(format!("step counts are {:?}", adam.step_counts()).into());
    }
    Ok(worst)
}
