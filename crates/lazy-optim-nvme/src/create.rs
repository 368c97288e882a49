//! Making a store.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::ops::Range;
use std::path::Path;
use std::time::Instant;

use lazy_model::{Bytes, Tier};
use lazy_store::durable::{DurableDir, DurableFile};

use crate::files::{LAYOUT_FILE, RECORD_FILE, open_dir, write_bytes};
use crate::home::{self, Bucket, Home, Homes, Slots};
use crate::layout::{Layout, StoreId, layout_file_bytes};
use crate::moments::Moment;
use crate::record::{self, Committed, Record, Standing};
use crate::ring::{Chunk, Log, Pass, Ring, Sections};
use crate::slot::{self, BLOCK, BlockSums, Identity, SECTIONS, SlotHead, SlotShape};
use crate::state::bytes_on_disk;
use crate::{AdamOptions, Durability, Moments, NvmeAdam, OptimError, ParamSpec};

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
        if dir.exists(LAYOUT_FILE)? || dir.exists(RECORD_FILE)? {
            return Err(OptimError::AlreadyExists { dir: dir.path().to_path_buf() });
        }
        let seed = Seed { sequence: 0, step_counts: vec![0; params.len()], blob: Vec::new() };
        make(dir, layout, options, &mut Initial(init), seed)
    }
}

/// The state of a new store, chunk by chunk.
pub(crate) trait Contents {
    /// Writes the parts of parameters in elements `flat` of the flat space over sections that hold zeros.
    fn fill(
        &mut self,
        layout: &Layout,
        flat: Range<usize>,
        moments: Moments,
        sections: Sections<'_>,
    ) -> Result<(), OptimError>;
}

/// What else a new store starts with.
pub(crate) struct Seed {
    pub(crate) sequence: u64,
    pub(crate) step_counts: Vec<u64>,
    pub(crate) blob: Vec<u8>,
}

/// Makes a store in a folder without one. On any error the files made so far are removed.
pub(crate) fn make(
    dir: DurableDir,
    layout: Layout,
    options: &AdamOptions,
    contents: &mut dyn Contents,
    seed: Seed,
) -> Result<NvmeAdam, OptimError> {
    let mut ring = Ring::new(&layout, options)?;
    let (needed, free) = (bytes_on_disk(&layout, options), dir.free_space()?);
    if needed > free {
        return Err(OptimError::NoSpace { dir: dir.path().to_path_buf(), needed, free });
    }
    let (id, mut made) = (new_id(), Vec::new());
    let new = New { dir: &dir, layout: &layout, options, id };
    match new.seal(&mut ring, contents, seed, &mut made) {
        Ok((buckets, record_file, record)) => {
            let made = (record_file, 0, record);
            let adam = NvmeAdam::assemble(dir, options.durability, (id, layout), ring, buckets, made);
            Ok(NvmeAdam { confirmed: true, ..adam })
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

/// A store being made.
struct New<'a> {
    dir: &'a DurableDir,
    layout: &'a Layout,
    options: &'a AdamOptions,
    id: StoreId,
}

impl New<'_> {
    /// Makes layout, slots, and last the record: only with it is there a store. The names of the files made go to `made`,
    /// also on failure.
    fn seal(
        &self,
        ring: &mut Ring,
        contents: &mut dyn Contents,
        seed: Seed,
        made: &mut Vec<String>,
    ) -> Result<(Vec<Bucket>, DurableFile, Record), OptimError> {
        let New { dir, layout, options, id } = *self;
        let mut make = |name: &str, bytes: Bytes| {
            let file = dir.create_file(name, bytes)?;
            made.push(name.to_string());
            Ok::<_, OptimError>(file)
        };
        let (layout_bytes, layout_crc) = layout.encode(&id);
        let layout_file = make(LAYOUT_FILE, layout_file_bytes(layout_bytes.len()))?;
        write_bytes(&layout_file, 0, &layout_bytes)?;
        let record_file = make(RECORD_FILE, record::page_bytes(layout) * 2)?;
        let Seed { sequence, step_counts, blob } = seed;
        let mut buckets = self.homes(&mut make, ring, sequence)?;
        let tables = self.fill(ring, contents, &buckets, sequence)?;
        let mut committed = Vec::with_capacity(buckets.len());
        for ((index, bucket), table) in buckets.iter_mut().enumerate().zip(tables) {
            let mut head_crc = 0;
            if let Home::Nvme(slots) = &mut bucket.home {
                let identity = Identity { id, bucket: index, generation: sequence };
                let head = SlotHead { identity, slot: 0, shape: layout.slot(index), table };
                let (bytes, crc) = head.encode();
                slots.turn();
                write_bytes(slots.source(), 0, &bytes)?;
                (head_crc, bucket.table) = (crc, head.table);
            }
            committed.push(Committed { slot: 0, generation: sequence, head_crc });
        }
        dir.sync()?;
        // What is in memory is on disk only in what is saved.
        let standing = if buckets.iter().any(|b| b.slots().is_none()) {
            Standing::Begun
        } else {
            Standing::of(options.durability)
        };
        let groups = Vec::new();
        let record =
            Record { id, layout_crc, standing, sequence, buckets: committed, step_counts, groups, blob };
        write_bytes(&record_file, 0, &record.encode())?;
        Ok((buckets, record_file, record))
    }

    /// Slot files for what is at home on NVMe, memory for the rest.
    fn homes(
        &self,
        make: &mut dyn FnMut(&str, Bytes) -> Result<DurableFile, OptimError>,
        ring: &Ring,
        generation: u64,
    ) -> Result<Vec<Bucket>, OptimError> {
        let homes = Homes::new(self.layout, self.options);
        let mut home = |(index, shape): (usize, SlotShape)| {
            if homes.tiers[index] != Tier::Nvme {
                return Home::memory(homes.tiers[index], shape, ring);
            }
            let mut slot = |slot| make(&slot::file_name(index, slot), shape.file_bytes());
            // The first slot is written now.
            Ok(Home::Nvme(match self.options.durability {
                Durability::Step => {
                    let first = slot(0)?;
                    Slots::two(1, slot(1)?, first)
                }
                Durability::Checkpoint => Slots::in_place(0, slot(0)?),
            }))
        };
        let slots = self.layout.slots().enumerate();
        slots.map(|slot| Ok(Bucket { home: home(slot)?, generation, table: Vec::new() })).collect()
    }

    fn fill(
        &self,
        ring: &mut Ring,
        contents: &mut dyn Contents,
        buckets: &[Bucket],
        generation: u64,
    ) -> Result<Vec<Vec<BlockSums>>, OptimError> {
        let (layout, id) = (self.layout, self.id);
        let all: Vec<usize> = (0..buckets.len()).collect();
        let mut pass =
            Fill { layout, buckets, id, generation, contents, tables: vec![Vec::new(); buckets.len()] };
        ring.run(layout, ring.chunks(layout, &all), &mut pass, &mut Log::new(Instant::now()))?;
        Ok(pass.tables)
    }
}

/// The caller's weights, and moments of zero.
struct Initial<'a>(&'a mut dyn FnMut(usize, usize, &mut [f32]));

impl Contents for Initial<'_> {
    fn fill(
        &mut self,
        layout: &Layout,
        flat: Range<usize>,
        _: Moments,
        [main, ..]: Sections<'_>,
    ) -> Result<(), OptimError> {
        let weights: &mut [f32] = bytemuck::cast_slice_mut(main);
        for segment in layout.segments(flat) {
            (self.0)(segment.param, segment.first, &mut weights[segment.local]);
        }
        Ok(())
    }
}

/// Writes the first slots.
struct Fill<'a, 'c> {
    layout: &'a Layout,
    buckets: &'a [Bucket],
    id: StoreId,
    generation: u64,
    contents: &'c mut dyn Contents,
    tables: Vec<Vec<BlockSums>>,
}

impl<'b> Pass<'b> for Fill<'b, '_> {
    const READS: usize = 0;
    const WRITES: usize = SECTIONS.len();
    const NAME: &'static str = "initialise";

    fn home(&self, bucket: usize) -> &'b Home {
        &self.buckets[bucket].home
    }

    fn work(&mut self, chunk: Chunk, [main, avg, sq]: Sections<'_>) -> Result<(), OptimError> {
        let start = self.layout.bucket(chunk.bucket).start + chunk.first;
        let slot = self.layout.slot(chunk.bucket);
        main.fill(0);
        for (moment, section) in [(Moment::First, &mut *avg), (Moment::Second, &mut *sq)] {
            let blocks = section.chunks_mut(slot.moments.block_bytes());
            blocks.for_each(|block| slot.moments.fill_zero(moment, block));
        }
        let sections = [&mut *main, &mut *avg, &mut *sq];
        self.contents.fill(self.layout, start..start + chunk.len, slot.moments, sections)?;
        if self.buckets[chunk.bucket].slots().is_none() {
            return Ok(());
        }
        let identity = Identity { id: self.id, bucket: chunk.bucket, generation: self.generation };
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
