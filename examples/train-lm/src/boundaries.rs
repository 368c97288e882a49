//! `boundaries.jsonl`: what each extent held before it went to NVMe and after it came back.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use lazy_model::step::{Op, StepPlan, Work};
use lazy_model::{Bytes, Lane};
use lazy_store::{BoundaryRecord, BoundarySide, Store};
use serde::Serialize;

use crate::error::{Result, TrainError};

/// A line of the file.
#[derive(Serialize)]
struct Line<'a> {
    step: u64,
    micro_batch: usize,
    /// The copy, as spans and errors name it.
    task: Option<&'a str>,
    side: &'static str,
    offset: u64,
    bytes: Bytes,
    crc32c: String,
    /// Of the bytes as float32, which is what boundaries are made of.
    count: u64,
    finite: u64,
    abs_max: f64,
    abs_mean: f64,
}

/// Writes the file, a pass at a time.
pub(crate) struct BoundaryLog {
    file: BufWriter<File>,
    path: PathBuf,
    copies: Copies,
}

/// The copies to and from NVMe by direction and offset, in a pass's order. One range has one user at a time, so its records
/// come in that order.
struct Copies(HashMap<(Lane, u64), Vec<String>>);

impl BoundaryLog {
    /// Makes the file, in place of one that an earlier process left.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(crate) fn create(path: &Path, plan: &StepPlan) -> Result<BoundaryLog> {
        let file = BufWriter::new(File::create(path).map_err(TrainError::io(path))?);
        Ok(BoundaryLog { file, path: path.to_owned(), copies: Copies::of(plan) })
    }

    /// Appends what the store kept of the step that has just ended, well or not.
    ///
    /// # Errors
    /// When the disk is full or gone.
    pub(crate) fn write(&mut self, step: u64, store: &Store) -> Result<()> {
        let records = store.take_boundary_records();
        for (record, name) in records.iter().zip(self.copies.names(&records)) {
            let (micro_batch, task) = name.map_or((0, None), |(m, name)| (m, Some(name)));
            let BoundaryRecord { offset, bytes, checksum, f32, .. } = record;
            let side = match record.side {
                BoundarySide::BeforeWrite => "before_write",
                BoundarySide::AfterRead => "after_read",
            };
            let line = Line {
                step,
                micro_batch,
                task,
                side,
                offset: *offset,
                bytes: *bytes,
                crc32c: format!("{checksum:08x}"),
                count: f32.count,
                finite: f32.finite,
                abs_max: f32.abs_max,
                abs_mean: f32.abs_mean,
            };
            serde_json::to_writer(&mut self.file, &line).map_err(TrainError::json(&self.path))?;
            self.file.write_all(b"\n").map_err(TrainError::io(&self.path))?;
        }
        // A step that failed is the last one, and what it left is what is looked for.
        self.file.flush().map_err(TrainError::io(&self.path))
    }
}

impl Copies {
    fn of(plan: &StepPlan) -> Copies {
        let mut copies: HashMap<_, Vec<String>> = HashMap::new();
        for op in &plan.ops {
            let Op::Run(task) = op else { continue };
            let buffer = match task.lane {
                Lane::NvmeWrite => task.writes.first(),
                Lane::NvmeRead => task.reads.first(),
                _ => None,
            };
            if let (Some(&buffer), Work::Copy) = (buffer, &task.work) {
                copies.entry((task.lane, plan.buffer(buffer).offset)).or_default().push(plan.name(task));
            }
        }
        Copies(copies)
    }

    /// The micro-batches and copies that the records of one step are of.
    fn names(&self, records: &[BoundaryRecord]) -> Vec<Option<(usize, &str)>> {
        let mut seen: HashMap<(Lane, u64), usize> = HashMap::new();
        let name = |record: &BoundaryRecord| {
            let lane = match record.side {
                BoundarySide::BeforeWrite => Lane::NvmeWrite,
                BoundarySide::AfterRead => Lane::NvmeRead,
            };
            let nth = seen.entry((lane, record.offset)).or_default();
            let names = self.0.get(&(lane, record.offset)).filter(|names| !names.is_empty());
            let name = names.map(|names| (*nth / names.len(), names[*nth % names.len()].as_str()));
            *nth += 1;
            name
        };
        records.iter().map(name).collect()
    }
}

#[cfg(test)]
mod tests {
    use lazy_store::ValueStats;

    use super::*;

    #[test]
    fn a_range_used_by_one_boundary_after_the_other_has_each_ones_name() {
        // Boundary 5 lies where boundary 2 lay; 3 lies elsewhere.
        let uses = |lane: Lane| {
            let named = |boundary: usize| format!("boundary {boundary} {lane}");
            [((lane, 0), vec![named(2), named(5)]), ((lane, 64), vec![named(3)])]
        };
        let copies = Copies([Lane::NvmeWrite, Lane::NvmeRead].into_iter().flat_map(uses).collect());
        let record = |side, offset| {
            let (f32, bf16) = (ValueStats::default(), ValueStats::default());
            BoundaryRecord { side, offset, bytes: Bytes(64), checksum: 0, f32, bf16 }
        };
        let (out, back) = (BoundarySide::BeforeWrite, BoundarySide::AfterRead);
        let records = [(out, 64), (out, 0), (back, 0), (out, 0), (back, 64), (back, 0), (back, 0)]
            .map(|(s, o)| record(s, o));
        let names = copies.names(&records);
        let expected = [
            "boundary 3 nvme_write",
            "boundary 2 nvme_write",
            "boundary 2 nvme_read",
            "boundary 5 nvme_write",
            "boundary 3 nvme_read",
            "boundary 5 nvme_read",
        ];
        assert_eq!(names[..6], expected.map(|name| Some((0, name))));
        assert_eq!(names[6], Some((1, "boundary 2 nvme_read")));
    }
}
