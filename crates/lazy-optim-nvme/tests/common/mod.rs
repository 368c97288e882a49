//! What the integration tests share: small models, deterministic values, the whole state in memory.
#![allow(dead_code, reason = "every test program uses another part")]
#![allow(clippy::unwrap_used, reason = "a test that cannot set up should stop")]

pub(crate) mod ranks;

use std::collections::BTreeMap;
use std::path::Path;

use lazy_optim_nvme::{
    AdamOptions, Bytes, Gradient, Gradients, GroupOptions, NvmeAdam, OptimError, ParamSpec, StatePart,
    StepInput, combine_norm,
};

/// Main, first and second moment of every parameter, as bits.
pub(crate) type State = Vec<[Vec<u32>; 3]>;

/// A folder in memory, where there is one, for tests that flush a lot and ask nothing of the drive.
pub(crate) fn scratch() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// Options with small buckets.
pub(crate) fn options(bucket_elements: usize) -> AdamOptions {
    AdamOptions { bucket_elements, ..AdamOptions::default() }
}

/// Options with every size given.
pub(crate) fn cut(bucket_elements: usize, chunk_kib: u64, depth: usize) -> AdamOptions {
    AdamOptions { bucket_elements, chunk_bytes: Bytes(chunk_kib << 10), depth, ..AdamOptions::default() }
}

pub(crate) fn params(sizes: &[usize]) -> Vec<ParamSpec> {
    sizes.iter().enumerate().map(|(i, n)| ParamSpec::new(format!("p{i}"), &[*n])).collect()
}

/// A value in -0.5..0.5 that depends on its three coordinates alone.
pub(crate) fn value(step: usize, param: usize, element: usize) -> f32 {
    let mut x = (step as u64) << 48 ^ (param as u64) << 40 ^ element as u64;
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ x >> 31) >> 40) as f32 / (1u64 << 24) as f32 - 0.5
}

/// Initial weights.
pub(crate) fn init(param: usize, first: usize, values: &mut [f32]) {
    for (i, v) in values.iter_mut().enumerate() {
        *v = value(0, param, first + i);
    }
}

/// Gradients of one step.
pub(crate) fn grads(params: &[ParamSpec], step: usize) -> Vec<Vec<f32>> {
    let grad = |p: usize, n: usize| (0..n).map(|i| value(step, p, i)).collect();
    params.iter().enumerate().map(|(p, spec)| grad(p, spec.shape.iter().product())).collect()
}

/// A gradient in float32.
pub(crate) fn grad(values: &[f32]) -> Option<Gradient<'_>> {
    Some(Gradient::F32(values))
}

pub(crate) fn all(grads: &[Vec<f32>]) -> Vec<Option<Gradient<'_>>> {
    grads.iter().map(|g| grad(g)).collect()
}

/// The blob that [`take_step`] commits, long enough for a record of several sectors.
pub(crate) fn blob(step: usize) -> Vec<u8> {
    step.to_le_bytes().repeat(300)
}

/// Step number `step` with clipping on.
pub(crate) fn take_step(adam: &mut NvmeAdam, params: &[ParamSpec], step: usize) -> Result<(), OptimError> {
    let group = GroupOptions { lr: 0.01 / step as f64, ..GroupOptions::default() };
    let blob = blob(step);
    let input =
        StepInput { groups: &[group], max_norm: Some(1.0), scale: 2.0, blob: &blob, ..StepInput::default() };
    let grads = grads(params, step);
    adam.step(&all(&grads), &input, &mut |_, _, _| {}).map(|outcome| assert!(!outcome.skipped))
}

/// The same step, whose gradients are awaited.
pub(crate) fn take_awaited_step(
    adam: &mut NvmeAdam,
    params: &[ParamSpec],
    step: usize,
) -> Result<(), OptimError> {
    let group = GroupOptions { lr: 0.01 / step as f64, ..GroupOptions::default() };
    let (grads, blob) = (grads(params, step), blob(step));
    let norm = combine_norm(adam.norm_parts(&all(&grads), 2.0)?);
    let input = StepInput {
        groups: &[group],
        grad_norm: Some(norm),
        max_norm: Some(1.0),
        scale: 2.0,
        blob: &blob,
        ..StepInput::default()
    };
    let awaited = Gradients::Awaited(&mut |param| Ok(grad(&grads[param])));
    adam.step(awaited, &input, &mut |_, _, _| {}).map(|outcome| assert!(!outcome.skipped))
}

/// The whole committed state.
pub(crate) fn state(adam: &mut NvmeAdam, params: &[ParamSpec]) -> State {
    let mut state: State = vec![Default::default(); params.len()];
    adam.read_state(&mut |StatePart { param, first, main, exp_avg, exp_avg_sq }| {
        for (all, part) in state[param].iter_mut().zip([main, exp_avg, exp_avg_sq]) {
            assert_eq!(all.len(), first);
            all.extend(part.iter().map(|v| v.to_bits()));
        }
    })
    .unwrap();
    state
}

/// Every byte of every file of a folder.
pub(crate) fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
}

/// Puts a folder's files back as [`files`] saw them.
pub(crate) fn restore(dir: &Path, files: &BTreeMap<String, Vec<u8>>) {
    for (name, bytes) in files {
        std::fs::write(dir.join(name), bytes).unwrap();
    }
}
