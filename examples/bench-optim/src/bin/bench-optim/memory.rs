//! What a step takes of memory, whatever the number of buckets.

use std::fs;

use lazy_optim_nvme::{AdamOptions, Bytes, Gradient, GroupOptions, NvmeAdam, ParamSpec, StepInput};
use lazy_store::BoxError;
use serde_json::Value;

use crate::rows::{Figures, compared};
use crate::stats::Goal;
use crate::stream::Folder;

/// Elements of a bucket, two chunks.
const BUCKET: usize = 1 << 20;
/// A chunk is this of a section: depth times three sections of it are 18 MiB.
const CHUNK: Bytes = Bytes(2 << 20);

/// MiB of RAM that the system counts for this process: now, or `VmHWM` at most since that was last reset.
fn memory(key: &str) -> Result<f64, BoxError> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    let kib: f64 = line.and_then(|line| line.trim().strip_suffix(" kB")).ok_or("no such line")?.parse()?;
    Ok(kib / 1024.0)
}

/// MiB at the most in steps of a store of so many buckets, from opening it on, besides the gradients.
fn peak(folder: &Folder, buckets: usize) -> Result<f64, BoxError> {
    let options = AdamOptions { bucket_elements: BUCKET, chunk_bytes: CHUNK, ..AdamOptions::default() };
    let params = [ParamSpec::new("w", &[buckets * BUCKET])];
    let dir = folder.0.join(format!("{buckets}-buckets"));
    if !dir.exists() {
        NvmeAdam::create(&dir, &params, &options, |_, _, values| values.fill(0.1))?;
    }
    let grads = vec![0x3a83u16; buckets * BUCKET];
    let before = memory("VmRSS")?;
    // Sets the peak to what there is now.
    fs::write("/proc/self/clear_refs", "5")?;
    let mut adam = NvmeAdam::open(&dir, &params, &options)?;
    let input = StepInput { groups: &[GroupOptions::default()], max_norm: Some(1.0), ..StepInput::default() };
    for _ in 0..2 {
        adam.step(&[Some(Gradient::Bf16(&grads))], &input, &mut |_, _, _| {})?;
    }
    Ok(memory("VmHWM")? - before)
}

pub(crate) fn rows(pairs: usize, folder: &Folder) -> Result<Vec<Value>, BoxError> {
    let (mut many, mut few) = (Vec::new(), Vec::new());
    for round in 0..=pairs {
        let found = [peak(folder, 100)?, peak(folder, 5)?];
        // The first round has the threads made.
        if round > 0 {
            many.push(found[0]);
            few.push(found[1]);
        }
    }
    let ring = NvmeAdam::memory_bytes(
        &[ParamSpec::new("w", &[100 * BUCKET])],
        &AdamOptions { bucket_elements: BUCKET, chunk_bytes: CHUNK, ..AdamOptions::default() },
    )?;
    let ring = vec![ring.get() as f64 / f64::from(1 << 20); many.len()];
    let name = "peak memory of steps over 100 buckets";
    let against =
        |label, values: &[f64], goal| compared(name, "MiB", &many, &Figures { label, values }, Some(goal));
    let rows = [
        against("over 5 buckets", &few, Goal::AtMost(1.05)),
        against("depth x chunk", &ring, Goal::AtMost(1.15)),
    ];
    Ok(rows.into_iter().flatten().collect())
}
