//! Whole steps: the streamed state beside fio, beside one buffer, and in the formats and ways it can be kept.

use std::fs;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use lazy_optim_nvme::{
    AdamOptions, Bytes, Durability, Gradient, GroupOptions, LoadOptions, Moments, NvmeAdam, ParamSpec,
    StepInput, WeightsOut,
};
use lazy_store::BoxError;
use lazy_store::durable::{AlignedBuf, DurableDir, IoOptions};
use serde_json::Value;

use crate::fio::{self, Fio, Setting};
use crate::rows::{Figures, alone, compared};
use crate::side::{Side as _, Transfer};
use crate::stats::Goal;

/// Elements of the state: with float32 moments 5.3 times the RAM of the default ring.
pub(crate) const ELEMENTS: usize = 64 << 20;
/// Buckets it is cut into.
pub(crate) const BUCKETS: usize = 8;

/// Blocks and depths that fio is tried with.
const BLOCKS: [u64; 2] = [1 << 20, 4 << 20];
const DEPTHS: [u32; 4] = [1, 4, 16, 32];

/// A folder that goes when it is dropped.
pub(crate) struct Folder(pub(crate) PathBuf);

impl Folder {
    pub(crate) fn make(dir: &Path) -> Result<Folder, BoxError> {
        // fio is started elsewhere.
        let dir = fs::canonicalize(dir).map_err(|error| format!("--dir {}: {error}", dir.display()))?;
        let folder = dir.join(format!("bench-optim-{}", std::process::id()));
        fs::create_dir(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(Folder(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A store that takes steps.
struct Steps {
    adam: NvmeAdam,
    grad: Vec<f32>,
    weights: Vec<u16>,
}

impl Steps {
    fn new(folder: &Folder, name: &str, moments: Moments, options: &AdamOptions) -> Result<Steps, BoxError> {
        let params = [ParamSpec::new("w", &[ELEMENTS]).with_moments(moments)];
        let adam = NvmeAdam::create(&folder.0.join(name), &params, options, |_, _, values| values.fill(0.1))?;
        Ok(Steps { adam, grad: vec![1e-3; ELEMENTS], weights: vec![0; ELEMENTS] })
    }

    /// Seconds of a step, and the bytes that it read and wrote.
    fn step(&mut self) -> Result<(f64, u64), BoxError> {
        let input =
            StepInput { groups: &[GroupOptions::default()], max_norm: Some(1.0), ..StepInput::default() };
        let start = Instant::now();
        let room = vec![Some(WeightsOut::Bf16(&mut self.weights))];
        let outcome =
            self.adam.step_into(&[Some(Gradient::F32(&self.grad))], &input, room, &mut |_, _| {})?;
        Ok((start.elapsed().as_secs_f64(), (outcome.bytes_read + outcome.bytes_written).get()))
    }
}

pub(crate) fn options(depth: usize, durability: Durability) -> AdamOptions {
    AdamOptions { bucket_elements: ELEMENTS / BUCKETS, depth, durability, ..AdamOptions::default() }
}

/// Has the drive write back what it holds, so that nobody's flush pays for what others wrote.
pub(crate) fn settle(folder: &Folder) -> Result<(), BoxError> {
    Ok(fs::File::create(folder.0.join("flush"))?.sync_all()?)
}

/// Seconds of steps of several stores and of `other`, taken in turn on a drive that is at rest; the first round warms up.
fn rounds(
    folder: &Folder,
    pairs: usize,
    stores: &mut [&mut Steps],
    mut other: impl FnMut() -> Result<f64, BoxError>,
) -> Result<(Vec<Vec<f64>>, Vec<f64>), BoxError> {
    let (mut ours, mut theirs) = (vec![Vec::new(); stores.len()], Vec::new());
    for round in 0..=pairs {
        let mut step = |steps: &mut &mut Steps| {
            settle(folder)?;
            Ok(steps.step()?.0)
        };
        let found = stores.iter_mut().map(&mut step).collect::<Result<Vec<_>, BoxError>>()?;
        settle(folder)?;
        let peer = other()?;
        if round > 0 {
            ours.iter_mut().zip(found).for_each(|(ours, found)| ours.push(found));
            theirs.push(peer);
        }
    }
    Ok((ours, theirs))
}

/// Rows of `pairs` rounds each, measured in a folder.
pub(crate) fn rows(pairs: usize, folder: &Folder) -> Result<Vec<Value>, BoxError> {
    let mut rows = Vec::new();
    for table in [beside_fio, beside_other_formats, saves, loads] {
        rows.extend(table(pairs, folder)?);
        // The next ones need the space.
        fs::remove_dir_all(&folder.0)?;
        fs::create_dir(&folder.0)?;
    }
    Ok(rows)
}

fn beside_fio(pairs: usize, folder: &Folder) -> Result<Vec<Value>, BoxError> {
    let mut streamed = Steps::new(folder, "step", Moments::F32, &options(3, Durability::Step))?;
    let mut serial = Steps::new(folder, "serial", Moments::F32, &options(1, Durability::Step))?;
    let mut in_place = Steps::new(folder, "checkpoint", Moments::F32, &options(3, Durability::Checkpoint))?;
    // As many bytes, in whole blocks of both directions.
    let bytes = streamed.step()?.1 / (8 << 20) * (8 << 20);
    let mut fio = fastest_fio(folder, bytes)?;
    let label = fio.as_ref().map(|fio| fio.label(Transfer::Both)).unwrap_or_default();
    let mut flushed = Vec::new();
    let (ours, theirs) = rounds(folder, pairs, &mut [&mut streamed, &mut serial, &mut in_place], || {
        let Some(fio) = &mut fio else { return Ok(0.0) };
        let seconds = fio.run(Transfer::Both)?.seconds;
        let start = Instant::now();
        fs::File::open(&fio.file)?.sync_data()?;
        flushed.push(seconds + start.elapsed().as_secs_f64());
        Ok(seconds)
    })?;
    // Of the rounds that are counted.
    let flushed = flushed.get(1..).unwrap_or_default();
    let row = |name: &str, ours: &[f64], label: &str, theirs: &[f64], goal| {
        compared(name, "s", ours, &Figures { label, values: theirs }, goal)
    };
    let [streamed, serial, in_place] = [&ours[0], &ours[1], &ours[2]];
    let name = "step, float32, state 5.3 times the ring";
    let rows = [
        fio.is_some().then(|| row(name, streamed, &label, &theirs, Some(Goal::AtMost(1.10)))).flatten(),
        row(name, streamed, "the same fio, and a flush of its file", flushed, Some(Goal::AtMost(1.10))),
        row(
            "step, one buffer that is read, updated and written",
            serial,
            name,
            streamed,
            Some(Goal::AtLeast(1.6)),
        ),
        row("step, durability step", streamed, "durability checkpoint", in_place, Some(Goal::AtMost(1.03))),
    ];
    Ok(rows.into_iter().flatten().collect())
}

/// fio on a file of its own, with the setting that it moves `bytes` fastest with, half of them in each direction; none where it is
/// not installed.
pub(crate) fn fastest_fio(folder: &Folder, bytes: u64) -> Result<Option<Fio>, BoxError> {
    if fio::version().is_none() {
        eprintln!("bench optim: fio is not installed, so whole steps have nothing to be held against");
        return Ok(None);
    }
    let dir = DurableDir::open(&folder.0, &IoOptions::default())?;
    let file = dir.create_file("peer", Bytes(bytes))?;
    for piece in 0..bytes / (8 << 20) {
        let mut buffer = AlignedBuf::zeroed(Bytes(8 << 20))?;
        buffer.as_mut_f32().iter_mut().enumerate().for_each(|(i, v)| *v = (i as f32).sqrt());
        file.write_at(piece * (8 << 20), buffer).wait().1?;
    }
    file.sync_data()?;
    let mut best: Option<(f64, Fio)> = None;
    for (block, depth) in BLOCKS.into_iter().flat_map(|block| DEPTHS.map(|depth| (block, depth))) {
        for two_jobs in [false, true] {
            let setting = Setting { block, depth, two_jobs, tuned: true, memory: None };
            let mut fio = Fio { file: folder.0.join("peer"), bytes, setting };
            let seconds = fio.run(Transfer::Both)?.seconds;
            if best.as_ref().is_none_or(|(fastest, _)| seconds < *fastest) {
                best = Some((seconds, fio));
            }
        }
    }
    Ok(best.map(|(_, fio)| fio))
}

fn beside_other_formats(pairs: usize, folder: &Folder) -> Result<Vec<Value>, BoxError> {
    let options = options(3, Durability::Step);
    let mut wide = Steps::new(folder, "wide", Moments::F32, &options)?;
    let mut half = Steps::new(folder, "half", Moments::Bf16, &options)?;
    let mut byte = Steps::new(folder, "byte", Moments::Int8, &options)?;
    let moved = [wide.step()?.1, half.step()?.1, byte.step()?.1];
    let (ours, _) = rounds(folder, pairs, &mut [&mut wide, &mut half, &mut byte], || Ok(0.0))?;
    let mut rows = Vec::new();
    for (i, name) in [(1, "bfloat16"), (2, "8-bit")] {
        let share = moved[i] as f64 / moved[0] as f64;
        let label = format!("float32, {share:.2} of whose bytes it moves");
        let theirs = Figures { label: &label, values: &ours[0] };
        // In proportion to the bytes, and a tenth.
        rows.extend(compared(
            &format!("step, {name} moments"),
            "s",
            &ours[i],
            &theirs,
            Some(Goal::AtMost(share * 1.1)),
        ));
    }
    Ok(rows)
}

fn saves(pairs: usize, folder: &Folder) -> Result<Vec<Value>, BoxError> {
    let mut steps = Steps::new(folder, "saved", Moments::F32, &options(3, Durability::Step))?;
    let (mut saves, mut copies) = (Vec::new(), Vec::new());
    for round in 0..pairs {
        steps.step()?;
        let name = format!("save-{round}");
        let start = Instant::now();
        steps.adam.save(&name)?.wait()?;
        saves.push(start.elapsed().as_secs_f64());
        let (from, to) = (folder.0.join("saved").join(&name), folder.0.join("copy"));
        let start = Instant::now();
        copy(&from, &to)?;
        copies.push(start.elapsed().as_secs_f64());
        fs::remove_dir_all(&to)?;
        steps.adam.remove_generation(&name)?;
    }
    let peer = Figures { label: "copying and flushing its files", values: &copies };
    let mut rows: Vec<Value> =
        compared("save", "s", &saves, &peer, Some(Goal::AtMost(0.05))).into_iter().collect();
    let ring = NvmeAdam::memory_bytes(&[ParamSpec::new("w", &[ELEMENTS])], &options(3, Durability::Step))?;
    rows.extend(alone("memory of the ring", "MiB", &[ring.get() as f64 / f64::from(1 << 20)], None));
    Ok(rows)
}

/// A generation taken into RAM in another cut, beside reading its files.
fn loads(pairs: usize, folder: &Folder) -> Result<Vec<Value>, BoxError> {
    let mut steps = Steps::new(folder, "loaded", Moments::F32, &options(3, Durability::Step))?;
    steps.adam.save("here")?.wait()?;
    let (from, to) = (folder.0.join("loaded").join("here"), folder.0.join("in-ram"));
    let params = [ParamSpec::new("w", &[ELEMENTS])];
    let in_ram = AdamOptions {
        bucket_elements: ELEMENTS / BUCKETS / 2 * 3,
        host: Bytes(1 << 40),
        ..options(3, Durability::Checkpoint)
    };
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..pairs {
        uncache(&from)?;
        let start = Instant::now();
        drop(NvmeAdam::load(&[&from], &to, &params, &in_ram, LoadOptions::default())?);
        ours.push(start.elapsed().as_secs_f64());
        fs::remove_dir_all(&to)?;
        uncache(&from)?;
        let (start, mut room) = (Instant::now(), vec![0; 4 << 20]);
        for entry in fs::read_dir(&from)? {
            let mut file = fs::File::open(entry?.path())?;
            while file.read(&mut room)? > 0 {}
        }
        theirs.push(start.elapsed().as_secs_f64());
    }
    let peer = Figures { label: "reading its files, 4 MiB at a time", values: &theirs };
    Ok(compared("load into RAM, in another cut", "s", &ours, &peer, None).into_iter().collect())
}

/// Has the files of a folder read from the drive next time.
fn uncache(folder: &Path) -> Result<(), BoxError> {
    for entry in fs::read_dir(folder)? {
        let file = fs::File::open(entry?.path())?;
        file.sync_all()?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}

/// What `cp` and `sync` do.
fn copy(from: &Path, to: &Path) -> Result<(), BoxError> {
    fs::create_dir(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        fs::copy(entry.path(), &target)?;
        fs::File::open(&target)?.sync_all()?;
    }
    Ok(())
}

const _: () = assert!(ELEMENTS * 12 > 4 * 3 * 3 * (16 << 20), "the state is at least four times the ring");
