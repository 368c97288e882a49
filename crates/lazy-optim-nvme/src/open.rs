//! Opening a store.

use std::path::Path;

use lazy_store::durable::{DurableDir, DurableFile};

use crate::files::{LAYOUT_FILE, RECORD_FILE, check_length, damaged, hex, open_dir, read_bytes, wrong_file};
use crate::home::{self, Bucket, Home, Homes, Slots};
use crate::layout::{Layout, StoreId};
use crate::record::{self, Committed, Record, Standing};
use crate::ring::Ring;
use crate::slot::{self, Identity, SlotHead, SlotShape};
use crate::wire::Damage;
use crate::{AdamOptions, Durability, NvmeAdam, OptimError, ParamSpec, save};

impl NvmeAdam {
    /// Opens the last committed state. Refuses, naming the first difference, parameters or a bucket size other than
    /// those the store was made with, and files that are not the committed ones. Data blocks are checked as they are
    /// read, by [`step`](NvmeAdam::step) and [`read_weights`](NvmeAdam::read_weights).
    pub fn open(dir: &Path, params: &[ParamSpec], options: &AdamOptions) -> Result<Self, OptimError> {
        // Looked at first, because opening a folder of durable files makes it.
        if !dir.is_dir() {
            return Err(OptimError::NoStore { dir: dir.to_path_buf() });
        }
        Self::open_in(open_dir(dir, options)?, params, options)
    }

    pub(crate) fn open_in(
        dir: DurableDir,
        params: &[ParamSpec],
        options: &AdamOptions,
    ) -> Result<Self, OptimError> {
        home::check(options)?;
        save::sweep(&dir)?;
        let asked = Layout::new(params, options.bucket_elements)?;
        let ring = Ring::new(&asked, options)?;
        let folder = || dir.path().to_path_buf();
        if !dir.exists(LAYOUT_FILE)? {
            return Err(OptimError::NoStore { dir: folder() });
        }
        let (id, layout, layout_crc) = read_layout(&dir)?;
        if let Some(difference) = layout.first_difference(&asked) {
            return Err(OptimError::LayoutMismatch { dir: folder(), difference });
        }
        if !dir.exists(RECORD_FILE)? {
            return Err(OptimError::Incomplete { dir: folder() });
        }
        let record_file = dir.open_file(RECORD_FILE)?;
        let (page, record) = newest_record(&dir, &record_file, &layout)?;
        if record.id != id {
            return Err(wrong_file(&record_file, "store id", hex(&id), hex(&record.id)));
        }
        if record.layout_crc != layout_crc {
            let (wanted, found) = (format!("{layout_crc:08x}"), format!("{:08x}", record.layout_crc));
            return Err(wrong_file(&record_file, "layout checksum", wanted, found));
        }
        if record.buckets.len() != layout.bucket_count() || record.step_counts.len() != params.len() {
            return Err(damaged(&record_file, Damage::Field));
        }
        let durability = match record.standing {
            Standing::Committed => Durability::Step,
            Standing::Saved => Durability::Checkpoint,
            Standing::Begun => return Err(OptimError::NotKept { dir: folder(), sequence: record.sequence }),
        };
        if durability != options.durability {
            let difference =
                format!("durability is {durability:?} on disk, {:?} asked for", options.durability);
            return Err(OptimError::LayoutMismatch { dir: folder(), difference });
        }
        let homes = Homes::new(&layout, options);
        let mut buckets = Vec::with_capacity(record.buckets.len());
        for (index, committed) in record.buckets.iter().enumerate() {
            let mut bucket = open_bucket(&dir, &id, index, durability, layout.slot(index), committed)?;
            let identity = Identity { id, bucket: index, generation: bucket.generation };
            bucket.move_in(homes.tiers[index], layout.slot(index), identity, &ring)?;
            buckets.push(bucket);
        }
        let found = (record_file, page, record);
        Ok(NvmeAdam::assemble(dir, durability, (id, layout), ring, buckets, found))
    }
}

fn read_layout(dir: &DurableDir) -> Result<(StoreId, Layout, u32), OptimError> {
    let file = dir.open_file(LAYOUT_FILE)?;
    let bytes = read_bytes(&file, 0, file.len())?;
    Layout::decode(bytes.as_slice()).map_err(|damage| {
        // A file that was made and never written is a creation cut short.
        if bytes.as_slice().iter().all(|b| *b == 0) {
            OptimError::Incomplete { dir: dir.path().to_path_buf() }
        } else {
            damaged(&file, damage)
        }
    })
}

/// The page and content of the highest valid record.
fn newest_record(dir: &DurableDir, file: &DurableFile, layout: &Layout) -> Result<(u64, Record), OptimError> {
    let page_bytes = record::page_bytes(layout);
    check_length(file, page_bytes * 2)?;
    let mut newest: Option<(u64, Record)> = None;
    let mut damage = None;
    for page in 0..2 {
        let bytes = read_bytes(file, page * page_bytes.0, page_bytes)?;
        match Record::decode(bytes.as_slice()) {
            // Of two of one sequence, the one that says that a step was begun is the later one.
            Ok(record) if newest.as_ref().is_none_or(|(_, n)| n.is_before(&record)) => {
                newest = Some((page, record));
            }
            Ok(_) => {}
            // A page never written is no damage.
            Err(_) if bytes.as_slice().iter().all(|b| *b == 0) => {}
            Err(found) => damage = Some(found),
        }
    }
    newest.ok_or_else(|| match damage {
        Some(damage) => damaged(file, damage),
        None => OptimError::Incomplete { dir: dir.path().to_path_buf() },
    })
}

fn open_bucket(
    dir: &DurableDir,
    id: &StoreId,
    index: usize,
    durability: Durability,
    shape: SlotShape,
    committed: &Committed,
) -> Result<Bucket, OptimError> {
    let open = |slot| {
        let file = dir.open_file(&slot::file_name(index, slot))?;
        check_length(&file, shape.file_bytes())?;
        Ok::<_, OptimError>(file)
    };
    let (number, generation) = (committed.slot, committed.generation);
    let file = open(number)?;
    let bytes = read_bytes(&file, 0, shape.head_bytes())?;
    let head = check_head(file.path(), id, index, shape, committed, bytes.as_slice())?;
    let slots = match durability {
        Durability::Step => Slots::two(number, file, open(1 - number)?),
        Durability::Checkpoint => Slots::in_place(number, file),
    };
    Ok(Bucket { home: Home::Nvme(slots), generation, table: head.table })
}

/// Reads the head of a slot file and refuses any other than the one that was committed.
pub(crate) fn check_head(
    path: &Path,
    id: &StoreId,
    index: usize,
    shape: SlotShape,
    committed: &Committed,
    bytes: &[u8],
) -> Result<SlotHead, OptimError> {
    let Committed { slot, generation, head_crc } = *committed;
    let path = || path.to_path_buf();
    let (head, crc) = SlotHead::decode(bytes)
        .map_err(|damage| OptimError::Damaged { path: path(), what: damage.to_string() })?;
    let checks = [
        ("store id", hex(id), hex(&head.identity.id)),
        ("bucket", index.to_string(), head.identity.bucket.to_string()),
        ("slot", slot.to_string(), head.slot.to_string()),
        ("generation", generation.to_string(), head.identity.generation.to_string()),
        ("element count", shape.elements.to_string(), head.shape.elements.to_string()),
        ("format", format!("{:?}", shape.moments), format!("{:?}", head.shape.moments)),
        ("checksum", format!("{head_crc:08x}"), format!("{crc:08x}")),
    ];
    for (field, wanted, found) in checks {
        if wanted != found {
            return Err(OptimError::WrongFile { path: path(), field, wanted, found });
        }
    }
    Ok(head)
}
