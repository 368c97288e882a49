//! The tests: everything that the kernels do, against the CPU, bit by bit.

use lazy_optim_nvme::raw::{self, DeviceGradient, DeviceWeights, Kernels, Sections, Step};
use lazy_optim_nvme::{Gradient, GroupOptions, Moments, WeightsOut};
use lazy_store::BoxError;
use lazy_store::gpu_test::{Random, Test};

use crate::cases::{Case, RECORDED, Recording, SIZES, STEPS};
use crate::data::Values as _;
use crate::steps;

pub(crate) const ALL: &[(&str, Test<Kernels>)] = &[
    ("every format, gradient, weight and cut has the bits of the CPU", updates),
    ("steps in a row have the bits of the CPU", trajectories),
    ("what overflows is what overflows on the CPU", overflows),
    ("partial sums of squares have the bits of the CPU", sums),
    ("the nine recorded runs of PyTorch", golden),
    ("whole steps from every home have the bits of the processor", steps::homes),
    ("weights read into any room are those that a step wrote", steps::weights),
    (
        "gradients awaited in device memory give the bits of final ones, and late infinities leave no trace",
        steps::awaited,
    ),
    ("what is saved from any home goes on in any other", steps::resumed),
    ("the nine recorded runs through whole steps", steps::golden),
];

const FORMATS: [Moments; 3] = [Moments::F32, Moments::Bf16, Moments::Int8];
/// Lengths around every edge: of a group of four, a scale, a block of threads, a block of the state, a partial sum.
const LENGTHS: [usize; 22] = [
    1, 2, 3, 4, 5, 7, 8, 255, 256, 257, 1023, 1024, 1025, 2047, 2049, 16_383, 16_384, 16_385, 65_535, 65_537,
    300_007, 3_000_001,
];
/// Where a parameter begins in its sections.
const FIRSTS: [usize; 8] = [0, 1, 2, 3, 4, 100, 256, 16_384 - 5];
/// Elements around a parameter that must stay as they are.
const AROUND: usize = 300;
/// What unused room holds: a number that no update gives.
const UNTOUCHED: u16 = 0x4b4b;

fn steps() -> [Step; 4] {
    let plain = GroupOptions::default();
    let l2 = GroupOptions { weight_decay: 0.1, decoupled: false, eps: 1e-6, ..plain };
    let ascent = GroupOptions { maximize: true, betas: (0.3, 0.95), ..plain };
    let forgetful = GroupOptions { betas: (0.0, 0.0), eps: 1e-30, ..plain };
    [
        Step::new(&plain, 1, 1.0, 1.0),
        Step::new(&l2, 3, 3.0, 0.7),
        Step::new(&ascent, 1000, 65_536.0, 1e-4),
        Step::new(&forgetful, 17, 0.1, 1.0),
    ]
}

/// A parameter of `n` elements from `first` on, with others' room around it.
fn state(random: &mut Random, moments: Moments, first: usize, n: usize) -> Sections {
    let mut state = Sections::new(moments, random.values(first + n + AROUND));
    state.set_moments(first, &random.values(n), &random.squares(n));
    state
}

fn bits(values: &[f32]) -> impl Iterator<Item = u32> {
    values.iter().map(|value| value.to_bits())
}

/// NaN is one value here: processors give its bits differently.
fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()))
}

fn equal(found: &Sections, wanted: &Sections) -> Result<(), BoxError> {
    if let Some(at) = bits(&found.main).zip(bits(&wanted.main)).position(|(a, b)| a != b) {
        return Err(format!("main[{at}] is {:e}, not {:e}", found.main[at], wanted.main[at]).into());
    }
    for (name, found, wanted) in [("exp_avg", &found.avg, &wanted.avg), ("exp_avg_sq", &found.sq, &wanted.sq)]
    {
        if let Some(at) = found.iter().zip(wanted).position(|(a, b)| a != b) {
            let at = 8 * at;
            return Err(format!("eight bytes of {name} at {at} differ").into());
        }
    }
    Ok(())
}

/// The kinds of weights to ask for.
#[derive(Clone, Copy, Debug)]
enum Out {
    None,
    F32,
    Bf16,
}

/// One update on both sides. Gradients and weights begin `skew` elements into their memory.
struct Trial<'a> {
    kernels: &'a Kernels,
    step: &'a Step,
    first: usize,
    n: usize,
    skew: usize,
    narrow: bool,
    out: Out,
}

impl Trial<'_> {
    fn run(&self, random: &mut Random, state: &mut Sections) -> Result<(), BoxError> {
        let Trial { kernels, step, first, n, skew, .. } = *self;
        let stream = &kernels.stream;
        let mut device = kernels.upload(state)?;
        let room = skew + n + AROUND;
        let (wide, narrow) = (random.values(room), random.halves(room));
        let (wide_there, narrow_there) = (stream.clone_htod(&wide)?, stream.clone_htod(&narrow)?);
        let mut wide_out = vec![f32::from_bits(u32::from(UNTOUCHED)); room];
        let mut narrow_out = vec![UNTOUCHED; room];
        let mut wide_out_there = stream.clone_htod(&wide_out)?;
        let mut narrow_out_there = stream.clone_htod(&narrow_out)?;
        let here = skew..skew + n;

        let (grads, grads_there) = if self.narrow {
            (Gradient::Bf16(&narrow[here.clone()]), DeviceGradient::Bf16(narrow_there.slice(here.clone())))
        } else {
            (Gradient::F32(&wide[here.clone()]), DeviceGradient::F32(wide_there.slice(here.clone())))
        };
        let (weights, weights_there) = match self.out {
            Out::None => (None, None),
            Out::F32 => (
                Some(WeightsOut::F32(&mut wide_out[here.clone()])),
                Some(DeviceWeights::F32(wide_out_there.slice_mut(here.clone()))),
            ),
            Out::Bf16 => (
                Some(WeightsOut::Bf16(&mut narrow_out[here.clone()])),
                Some(DeviceWeights::Bf16(narrow_out_there.slice_mut(here.clone()))),
            ),
        };
        state.update(step, first..first + n, grads, weights);
        kernels.update(step, &mut device, first, &grads_there, weights_there)?;
        equal(&kernels.download(&device)?, state)?;
        let wide_found = stream.clone_dtoh(&wide_out_there)?;
        if !bits(&wide_found).eq(bits(&wide_out)) {
            return Err("float32 weights differ".into());
        }
        if stream.clone_dtoh(&narrow_out_there)? != narrow_out {
            return Err("bfloat16 weights differ".into());
        }
        Ok(())
    }
}

fn updates(kernels: &Kernels) -> Result<String, BoxError> {
    let mut random = Random(1);
    let (mut count, mut elements) = (0, 0);
    for moments in FORMATS {
        for n in LENGTHS {
            // Every place for short parameters, one for long ones.
            let firsts = if n < 20_000 { &FIRSTS[..] } else { &FIRSTS[5..6] };
            for (&first, narrow) in firsts.iter().flat_map(|first| [(first, false), (first, true)]) {
                for out in [Out::None, Out::F32, Out::Bf16] {
                    let step = &steps()[random.below(4) as usize];
                    let skew = random.below(9) as usize;
                    let mut state = state(&mut random, moments, first, n);
                    let trial = Trial { kernels, step, first, n, skew, narrow, out };
                    trial.run(&mut random, &mut state).map_err(|error| {
                        format!("{moments:?}, {n} elements from {first}, skew {skew}, bf16 {narrow}, {out:?}: {error}")
                    })?;
                    (count, elements) = (count + 1, elements + n);
                }
            }
        }
    }
    Ok(format!("{count} updates of {elements} elements"))
}

fn trajectories(kernels: &Kernels) -> Result<String, BoxError> {
    let mut random = Random(2);
    let n = 40_001;
    for (moments, narrow) in FORMATS.into_iter().flat_map(|moments| [(moments, false), (moments, true)]) {
        let mut state = Sections::new(moments, random.values(n));
        for t in 1..=20 {
            let step = Step::new(&GroupOptions::default(), t, 1.0, 1.0);
            let trial = Trial { kernels, step: &step, first: 0, n, skew: 0, narrow, out: Out::Bf16 };
            trial
                .run(&mut random, &mut state)
                .map_err(|error| format!("{moments:?}, bf16 {narrow}, step {t}: {error}"))?;
        }
    }
    Ok(format!("{} of 20 steps of {n} elements", 2 * FORMATS.len()))
}

/// Squares that are infinite, moments that are, and what they make of the weights.
fn overflows(kernels: &Kernels) -> Result<String, BoxError> {
    let n = 1000;
    for moments in FORMATS {
        for (i, grad) in [1e30f32, -1e38, 3e38, f32::INFINITY, f32::NAN].into_iter().enumerate() {
            let mut grads = vec![0.5; n];
            grads[300 + i] = grad;
            grads[n - 1] = grad;
            let mut state = Sections::new(moments, vec![1.0; n]);
            let mut device = kernels.upload(&state)?;
            let there = kernels.stream.clone_htod(&grads)?;
            for t in 1..=3 {
                let step = Step::new(&GroupOptions::default(), t, 1.0, 1.0);
                state.update(&step, 0..n, Gradient::F32(&grads), None);
                let grads = DeviceGradient::F32(there.slice(..));
                kernels.update(&step, &mut device, 0, &grads, None)?;
                let mut found = kernels.download(&device)?;
                let [[avg, sq], [avg_there, sq_there]] = [state.moments(), found.moments()];
                let pairs = [(&state.main, &found.main), (&avg, &avg_there), (&sq, &sq_there)];
                if !pairs.into_iter().all(|(a, b)| same(a, b)) {
                    return Err(format!("{moments:?}, a gradient of {grad:e}, step {t}").into());
                }
            }
        }
    }
    Ok(String::new())
}

fn sums(kernels: &Kernels) -> Result<String, BoxError> {
    let mut random = Random(3);
    let mut count = 0;
    for n in LENGTHS.into_iter().chain([0, 131_072]) {
        for skew in [0, 1, 2, 3, 5] {
            let (wide, narrow) = (random.values(skew + n), random.halves(skew + n));
            let (wide_there, narrow_there) = (
                kernels.stream.clone_htod(&[&wide[..], &[0.0]].concat())?,
                kernels.stream.clone_htod(&[&narrow[..], &[0]].concat())?,
            );
            for (scale, first) in [(1.0, 0), (3.0, 65_536), (65_536.0, 65_534), (1.0, 70_001), (1.0, 131_071)]
            {
                let pairs = [
                    (Gradient::F32(&wide[skew..]), DeviceGradient::F32(wide_there.slice(skew..skew + n))),
                    (
                        Gradient::Bf16(&narrow[skew..]),
                        DeviceGradient::Bf16(narrow_there.slice(skew..skew + n)),
                    ),
                ];
                for (here, there) in pairs {
                    let (wanted, found) =
                        (raw::sums(here, first, scale), kernels.sums(&there, first, scale)?);
                    if wanted.iter().map(|s| s.to_bits()).ne(found.iter().map(|s| s.to_bits())) {
                        return Err(format!(
                            "{n} elements, from {first}, skew {skew}, scale {scale}: {found:?}, not {wanted:?}"
                        )
                        .into());
                    }
                    count += wanted.len();
                }
            }
        }
    }
    for bad in [f32::INFINITY, f32::NAN] {
        let mut grads = vec![1.0; 70_000];
        grads[69_999] = bad;
        let there = kernels.stream.clone_htod(&grads)?;
        let found = kernels.sums(&DeviceGradient::F32(there.slice(..)), 0, 1.0)?;
        if found[0] != 65_536.0 || found[1].is_finite() {
            return Err(format!("{bad} among the gradients sums up to {found:?}").into());
        }
    }
    Ok(format!("{count} sums"))
}

pub(crate) const RUNS: [(&str, &[u8]); 9] = [
    ("adamw", include_bytes!("../../../tests/data/adamw.safetensors")),
    ("adam_l2", include_bytes!("../../../tests/data/adam_l2.safetensors")),
    ("adamw_groups", include_bytes!("../../../tests/data/adamw_groups.safetensors")),
    ("adamw_schedule", include_bytes!("../../../tests/data/adamw_schedule.safetensors")),
    ("adamw_frozen_odd", include_bytes!("../../../tests/data/adamw_frozen_odd.safetensors")),
    ("adamw_never", include_bytes!("../../../tests/data/adamw_never.safetensors")),
    ("adamw_maximize", include_bytes!("../../../tests/data/adamw_maximize.safetensors")),
    ("adamw_tiny_grads", include_bytes!("../../../tests/data/adamw_tiny_grads.safetensors")),
    ("adamw_huge_grads", include_bytes!("../../../tests/data/adamw_huge_grads.safetensors")),
];

fn golden(kernels: &Kernels) -> Result<String, BoxError> {
    let mut worst = 0f64;
    for case in Case::all() {
        let run = RUNS.iter().find(|(file, _)| *file == case.file).ok_or("no such recording")?;
        worst = worst.max(golden_run(kernels, &case, run.1).map_err(|e| format!("{}: {e}", case.file))?);
    }
    Ok(format!("{} runs, largest error {worst:.1e} of the largest magnitude", RUNS.len()))
}

fn golden_run(kernels: &Kernels, case: &Case, bytes: &[u8]) -> Result<f64, BoxError> {
    let recording = Recording::open(bytes)?;
    let (mut params, mut grads, mut counts) = (Vec::new(), Vec::new(), [0; 4]);
    for param in 0..4 {
        params.push(kernels.upload(&Sections::new(Moments::F32, recording.initial(param)?))?);
        grads.push(kernels.stream.clone_htod(&recording.grads(param)?)?);
    }
    let mut worst = 0f64;
    for t in 0..STEPS {
        let groups = case.groups(t);
        for p in (0..4).filter(|p| (case.present)(*p, t)) {
            counts[p] += 1;
            let step = Step::new(&groups[case.group_of[p]], counts[p], 1.0, 1.0);
            let grad = DeviceGradient::F32(grads[p].slice(t * SIZES[p]..(t + 1) * SIZES[p]));
            kernels.update(&step, &mut params[p], 0, &grad, None)?;
        }
        if RECORDED.contains(&(t + 1)) {
            let mut state: [[Vec<f32>; 3]; 4] = Default::default();
            for (param, state) in params.iter().zip(&mut state) {
                let mut sections = kernels.download(param)?;
                let [avg, sq] = sections.moments();
                *state = [sections.main, avg, sq];
            }
            worst = worst.max(recording.compare(t + 1, &state)?);
        }
    }
    if counts != case.counts {
        return Err(format!("step counts are {counts:?}").into());
    }
    Ok(worst)
}
