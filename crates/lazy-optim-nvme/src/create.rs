//! Making a store.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::Path;
use std::time::Instant;

use lazy_model::Bytes;
use lazy_store::durable::{DurableDir, DurableFile};

use crate::files::{LAYOUT_FILE, RECORD_FILE, open_dir, write_bytes};
use crate::home::{self, Bucket, Home, Memory, Slots};
use crate::layout::{Layout, StoreId, layout_file_bytes};
use crate::moments::Moment;
use crate::record::{self, Committed, Record, Standing};
use crate::ring::{Chunk, Log, Pass, Ring, Sections};
use crate::slot::{self, BLOCK, BlockSums, Identity, SECTIONS, SlotHead};
use crate::{AdamOptions, Durability, NvmeAdam, OptimError, ParamSpec};

impl NvmeAdam {
    /// Makes a store in `dir` and seals the initial state to disk, chunk by chunk: `init(param, first, values)` fills
    /// the elements of a parameter from `first` on, each element once, in order. Moments start at zero.
    ///
    /// Refuses a folder that already holds a store, and a disk without room for all files. On any error the files
    /// made so far are removed.
    pub fn create(
        dir: &Path,
        params: &[ParamSpec],
        options: &AdamOptions,
        mut init: impl FnMut(usize, usize, &mut [f32]),
    ) -> Result<Self, OptimError> {
        Self::create_in(open_dir(dir, options)?, params, options, &mut init)
    }

    pub(crate) fn create_in(
        dir: DurableDir,
        params: &[ParamSpec],
        options: &AdamOptions,
        init: &mut dyn FnMut(usize, usize, &mut [f32]),
    ) -> Result<Self, OptimError> {
        home::check(options)?;
        let layout = Layout::new(params, options.bucket_elements)?;
        let mut ring = Ring::new(&layout, options)?;
        if dir.exists(LAYOUT_FILE)? || dir.exists(RECORD_FILE)? {
            return Err(OptimError::AlreadyExists { dir: dir.path().to_path_buf() });
        }
        let (needed, free) = (NvmeAdam::bytes_on_disk(params, options)?, dir.free_space()?);
        if needed > free {
            return Err(OptimError::NoSpace { dir: dir.path().to_path_buf(), needed, free });
        }
        let (id, mut made) = (new_id(), Vec::new());
        match seal(&dir, &layout, options, &mut ring, init, &mut made, id) {
            Ok((buckets, record_file, record)) => {
                let (page, confirmed, latch, durability) = (0, true, None, options.durability);
                Ok(NvmeAdam {
                    dir,
                    id,
                    layout,
                    ring,
                    buckets,
                    record_file,
                    page,
                    record,
                    confirmed,
                    latch,
                    durability,
                })
            }
            Err(error) => {
                for name in made {
                    // The first error is the one to report; a file left behind is refused by name next time.
                    let _ = dir.remove(&name);
                }
                let _ = dir.sync();
                Err(error)
            }
        }
    }
}

/// Makes layout, slots, and last the record: only with it is there a store. The names of the files made go to `made`,
/// also on failure.
fn seal(
    dir: &DurableDir,
    layout: &Layout,
    options: &AdamOptions,
    ring: &mut Ring,
    init: &mut dyn FnMut(usize, usize, &mut [f32]),
    made: &mut Vec<String>,
    id: StoreId,
) -> Result<(Vec<Bucket>, DurableFile, Record), OptimError> {
    let mut make = |name: &str, bytes: Bytes| {
        let file = dir.create_file(name, bytes)?;
        made.push(name.to_string());
        Ok::<_, OptimError>(file)
    };
    let (layout_bytes, layout_crc) = layout.encode(&id);
    let layout_file = make(LAYOUT_FILE, layout_file_bytes(layout_bytes.len()))?;
    write_bytes(&layout_file, 0, &layout_bytes)?;
    let record_file = make(RECORD_FILE, record::page_bytes(layout) * 2)?;
    let mut buckets = Vec::with_capacity(layout.bucket_count());
    let in_memory = home::in_memory(layout, options).0;
    for (index, shape) in layout.slots().enumerate() {
        let home = if index < in_memory {
            Home::Host(Memory::new(shape)?)
        } else {
            let mut slot = |slot| make(&slot::file_name(index, slot), shape.file_bytes());
            // The first slot is written now.
            Home::Nvme(match options.durability {
                Durability::Step => {
                    let first = slot(0)?;
                    Slots::two(1, slot(1)?, first)
                }
                Durability::Checkpoint => Slots::in_place(0, slot(0)?),
            })
        };
        buckets.push(Bucket { home, generation: 0, table: Vec::new() });
    }
    let all: Vec<usize> = (0..buckets.len()).collect();
    let tables = vec![Vec::new(); buckets.len()];
    let mut pass = SealMains { layout, buckets: &buckets, id, init, tables };
    ring.run(layout, ring.chunks(layout, &all), &mut pass, &mut Log::new(Instant::now()))?;
    let tables = pass.tables;
    let mut committed = Vec::with_capacity(buckets.len());
    for ((index, bucket), table) in buckets.iter_mut().enumerate().zip(tables) {
        let Home::Nvme(slots) = &mut bucket.home else {
            committed.push(Committed { slot: 0, generation: 0, head_crc: 0 });
            continue;
        };
        let identity = Identity { id, bucket: index, generation: 0 };
        let head = SlotHead { identity, slot: 0, shape: layout.slot(index), table };
        let (bytes, head_crc) = head.encode();
        slots.turn();
        write_bytes(slots.source(), 0, &bytes)?;
        committed.push(Committed { slot: 0, generation: 0, head_crc });
        bucket.table = head.table;
    }
    dir.sync()?;
    let step_counts = vec![0; layout.params().len()];
    // What is in RAM is on disk only in what is saved.
    let standing = if in_memory > 0 { Standing::Begun } else { Standing::of(options.durability) };
    let (groups, blob) = (Vec::new(), Vec::new());
    let record =
        Record { id, layout_crc, standing, sequence: 0, buckets: committed, step_counts, groups, blob };
    write_bytes(&record_file, 0, &record.encode())?;
    Ok((buckets, record_file, record))
}

/// Writes the initial state.
struct SealMains<'a> {
    layout: &'a Layout,
    buckets: &'a [Bucket],
    id: StoreId,
    init: &'a mut dyn FnMut(usize, usize, &mut [f32]),
    tables: Vec<Vec<BlockSums>>,
}

impl<'b> Pass<'b> for SealMains<'b> {
    const READS: usize = 0;
    const WRITES: usize = SECTIONS.len();
    const NAME: &'static str = "initialise";

    fn home(&self, bucket: usize) -> &'b Home {
        &self.buckets[bucket].home
    }

    fn work(&mut self, chunk: Chunk, sections: Sections<'_>) -> Result<(), OptimError> {
        let [main, avg, sq] = sections;
        let start = self.layout.bucket(chunk.bucket).start + chunk.first;
        let weights: &mut [f32] = bytemuck::cast_slice_mut(main);
        weights.fill(0.0);
        for segment in self.layout.segments(start..start + chunk.len) {
            (self.init)(segment.param, segment.first, &mut weights[segment.local]);
        }
        let slot = self.layout.slot(chunk.bucket);
        for (moment, section) in [(Moment::First, &mut *avg), (Moment::Second, &mut *sq)] {
            let blocks = section.chunks_mut(slot.moments.block_bytes());
            blocks.for_each(|block| slot.moments.fill_zero(moment, block));
        }
        if self.buckets[chunk.bucket].slots().is_none() {
            return Ok(());
        }
        let identity = Identity { id: self.id, bucket: chunk.bucket, generation: 0 };
        let blocks = slot.blocks_of([&*main, &*avg, &*sq]).enumerate();
        self.tables[chunk.bucket]
            .extend(blocks.map(|(i, sections)| identity.sums(chunk.first / BLOCK + i, sections)));
        Ok(())
    }
}

/// A fresh store id. The standard library's hasher keys are random and differ for every hasher made.
fn new_id() -> StoreId {
    let mut id = [0; 16];
    for half in id.chunks_mut(8) {
        half.copy_from_slice(&RandomState::new().build_hasher().finish().to_le_bytes());
    }
    id
}
