//! Opening a store.

use std::path::Path;

use lazy_store::durable::{DurableDir, DurableFile};

use crate::files::{
    LAYOUT_FILE, RECORD_FILE, damaged, exists, hex, open_dir, open_file, read_bytes, wrong_file,
};
use crate::layout::{Layout, StoreId};
use crate::record::{self, Committed, Record};
use crate::ring::Ring;
use crate::slot::{self, SlotHead, SlotShape};
use crate::state::Bucket;
use crate::wire::Damage;
use crate::{AdamOptions, NvmeAdam, OptimError, ParamSpec};

impl NvmeAdam {
    /// Opens the last committed state. Refuses, naming the first difference, parameters or a bucket size other than
    /// those the store was made with, and files that are not the committed ones. Data blocks are checked as they are
    /// read, by [`step`](NvmeAdam::step) and [`read_weights`](NvmeAdam::read_weights).
    pub fn open(dir: &Path, params: &[ParamSpec], options: &AdamOptions) -> Result<Self, OptimError> {
        let asked = Layout::new(params, options.bucket_elements)?;
        let ring = Ring::new(options)?;
        let folder = dir.to_path_buf();
        if !dir.is_dir() {
            return Err(OptimError::NoStore { dir: folder });
        }
        let dir = open_dir(dir, options)?;
        if !exists(&dir, &folder, LAYOUT_FILE)? {
            return Err(OptimError::NoStore { dir: folder });
        }
        let (id, layout, layout_crc) = read_layout(&dir, &folder)?;
        if let Some(difference) = layout.first_difference(&asked) {
            return Err(OptimError::LayoutMismatch { dir: folder, difference });
        }
        if !exists(&dir, &folder, RECORD_FILE)? {
            return Err(OptimError::Incomplete { dir: folder });
        }
        let record_file = open_file(&dir, &folder, RECORD_FILE)?;
        let (page, record) = newest_record(&record_file, &folder, &id, &layout, layout_crc)?;
        let mut buckets = Vec::with_capacity(record.buckets.len());
        for (bucket, committed) in record.buckets.iter().enumerate() {
            let shape = SlotShape { elements: layout.bucket(bucket).len() };
            buckets.push(open_bucket(&dir, &folder, &id, bucket, shape, committed)?);
        }
        let confirmed = false;
        Ok(NvmeAdam {
            folder,
            dir,
            id,
            layout,
            ring,
            buckets,
            record_file,
            page,
            record,
            confirmed,
            latch: None,
        })
    }
}

fn read_layout(dir: &DurableDir, folder: &Path) -> Result<(StoreId, Layout, u32), OptimError> {
    let file = open_file(dir, folder, LAYOUT_FILE)?;
    let bytes = read_bytes(folder, LAYOUT_FILE, &file, 0, file.len())?;
    Layout::decode(bytes.as_slice()).map_err(|damage| {
        // A file that was made and never written is a creation cut short.
        if bytes.as_slice().iter().all(|b| *b == 0) {
            OptimError::Incomplete { dir: folder.to_path_buf() }
        } else {
            damaged(folder, LAYOUT_FILE, damage)
        }
    })
}

/// The page and content of the highest valid record.
fn newest_record(
    file: &DurableFile,
    folder: &Path,
    id: &StoreId,
    layout: &Layout,
    layout_crc: u32,
) -> Result<(u64, Record), OptimError> {
    let page_bytes = record::page_bytes(layout);
    if file.len() < page_bytes * 2 {
        let (wanted, found) = ((page_bytes * 2).0.to_string(), file.len().0.to_string());
        return Err(wrong_file(folder, RECORD_FILE, "length", wanted, found));
    }
    let mut newest: Option<(u64, Record)> = None;
    let mut damage = None;
    for page in 0..2 {
        let bytes = read_bytes(folder, RECORD_FILE, file, page * page_bytes.0, page_bytes)?;
        match Record::decode(bytes.as_slice()) {
            Ok(record) if newest.as_ref().is_none_or(|(_, n)| n.sequence < record.sequence) => {
                newest = Some((page, record));
            }
            Ok(_) => {}
            // A page never written is no damage.
            Err(_) if bytes.as_slice().iter().all(|b| *b == 0) => {}
            Err(found) => damage = Some(found),
        }
    }
    let Some((page, record)) = newest else {
        return Err(match damage {
            Some(damage) => damaged(folder, RECORD_FILE, damage),
            None => OptimError::Incomplete { dir: folder.to_path_buf() },
        });
    };
    if record.id != *id || record.layout_crc != layout_crc {
        let field = if record.id != *id { "store id" } else { "layout" };
        return Err(wrong_file(folder, RECORD_FILE, field, hex(id), hex(&record.id)));
    }
    if record.buckets.len() != layout.bucket_count() || record.step_counts.len() != layout.params().len() {
        return Err(damaged(folder, RECORD_FILE, Damage::Field));
    }
    Ok((page, record))
}

fn open_bucket(
    dir: &DurableDir,
    folder: &Path,
    id: &StoreId,
    index: usize,
    shape: SlotShape,
    committed: &Committed,
) -> Result<Bucket, OptimError> {
    let mut files = Vec::with_capacity(2);
    for slot in 0..2 {
        let name = slot::file_name(index, slot);
        let file = open_file(dir, folder, &name)?;
        if file.len() < shape.file_bytes() {
            let (wanted, found) = (shape.file_bytes().0.to_string(), file.len().0.to_string());
            return Err(wrong_file(folder, &name, "length", wanted, found));
        }
        files.push(file);
    }
    let Committed { slot: live, generation, head_crc } = *committed;
    let name = slot::file_name(index, live);
    let bytes = read_bytes(folder, &name, &files[live], 0, shape.head_bytes())?;
    let (head, crc) = SlotHead::decode(bytes.as_slice()).map_err(|damage| damaged(folder, &name, damage))?;
    let checks = [
        ("store id", hex(id), hex(&head.identity.id)),
        ("bucket", index.to_string(), head.identity.bucket.to_string()),
        ("slot", live.to_string(), head.slot.to_string()),
        ("generation", generation.to_string(), head.identity.generation.to_string()),
        ("element count", shape.elements.to_string(), head.elements.to_string()),
        ("checksum", format!("{head_crc:08x}"), format!("{crc:08x}")),
    ];
    for (field, wanted, found) in checks {
        if wanted != found {
            return Err(wrong_file(folder, &name, field, wanted, found));
        }
    }
    let mut files = files.into_iter();
    match (files.next(), files.next()) {
        (Some(a), Some(b)) => Ok(Bucket { files: [a, b], live, generation, table: head.table }),
        _ => Err(damaged(folder, &name, Damage::Field)),
    }
}
