//! The optimizer: what it holds, reading it, committing it.

use std::time::Instant;

use lazy_model::Bytes;
use lazy_store::NvmeMode;
use lazy_store::durable::{DurableDir, DurableFile};

use crate::files::write_bytes;
use crate::layout::{Layout, Segment, StoreId, layout_file_bytes};
use crate::moments::Moment;
use crate::record::{self, Record};
use crate::ring::{self, Chunk, Log, Pass, Ring, Sections};
use crate::slot::{BLOCK, BlockSums, Identity, SECTIONS, SlotShape};
use crate::{AdamOptions, OptimError, ParamSpec, StatePart};

/// Adam and AdamW with main weights and moments in slot files. See the [crate] page.
pub struct NvmeAdam {
    pub(crate) dir: DurableDir,
    pub(crate) id: StoreId,
    pub(crate) layout: Layout,
    pub(crate) ring: Ring,
    pub(crate) buckets: Vec<Bucket>,
    pub(crate) record_file: DurableFile,
    /// The page that holds `record`.
    pub(crate) page: u64,
    pub(crate) record: Record,
    /// Whether this process itself has seen the record flushed. See [`NvmeAdam::confirm`].
    pub(crate) confirmed: bool,
    pub(crate) latch: Option<Latch>,
}

/// An earlier failure that stands in the way of the next step.
pub(crate) struct Latch {
    pub(crate) reason: String,
    /// A flush or the record's write failed: only the disk knows which state is the last.
    pub(crate) reopen: bool,
}

/// The two slot files of a bucket and what is known of the committed one.
pub(crate) struct Bucket {
    pub(crate) files: [DurableFile; 2],
    pub(crate) live: usize,
    pub(crate) generation: u64,
    /// Checksums of the committed slot's blocks.
    pub(crate) table: Vec<BlockSums>,
}

impl std::fmt::Debug for NvmeAdam {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NvmeAdam")
            .field("folder", &self.dir)
            .field("sequence", &self.record.sequence)
            .field("buckets", &self.buckets.len())
            .finish_non_exhaustive()
    }
}

impl NvmeAdam {
    /// Streams the committed main weights: `weights(param, first, values)` in parameter order, each element once.
    ///
    /// Rebuilds compute weights after opening, and after a failed step, whose updates may have reached some of them:
    /// success re-enables stepping, unless the failure was in flushing or committing; then only opening again tells
    /// which state is the last.
    pub fn read_weights(&mut self, weights: &mut dyn FnMut(usize, usize, &[f32])) -> Result<(), OptimError> {
        self.read::<1>(&mut |part| weights(part.param, part.first, part.main))
    }

    /// Streams the whole committed state: in parameter order, as
    /// [`read_weights`](NvmeAdam::read_weights) does, for export or to check every byte.
    pub fn read_state(&mut self, state: &mut dyn FnMut(StatePart<'_>)) -> Result<(), OptimError> {
        self.read::<3>(state)
    }

    fn read<const READS: usize>(&mut self, state: &mut dyn FnMut(StatePart<'_>)) -> Result<(), OptimError> {
        self.check_latch(|latch| latch.reopen)?;
        let all: Vec<usize> = (0..self.buckets.len()).collect();
        let chunks = self.ring.chunks(&self.layout, &all);
        let (layout, buckets, id) = (&self.layout, &self.buckets, self.id);
        let mut pass = ReadState::<READS> { layout, buckets, id, state, moments: Default::default() };
        self.ring.run(&self.layout, chunks, &mut pass, &mut Log::new(Instant::now()))?;
        self.latch = None;
        Ok(())
    }

    /// The blob of the last committed step; empty before the first.
    pub fn blob(&self) -> &[u8] {
        &self.record.blob
    }

    /// Steps taken, by parameter. A parameter without a gradient in a step does not count it.
    pub fn step_counts(&self) -> &[u64] {
        &self.record.step_counts
    }

    /// Steps committed since creation.
    pub fn sequence(&self) -> u64 {
        self.record.sequence
    }

    /// Number of buckets.
    pub fn bucket_count(&self) -> usize {
        self.buckets.len()
    }

    /// How the files are read and written: asked for and obtained.
    pub fn mode(&self) -> &NvmeMode {
        self.dir.mode()
    }

    /// Size of all files of a store: two slots of 12 bytes an element, padding, checksums and the records.
    pub fn bytes_on_disk(params: &[ParamSpec], options: &AdamOptions) -> Result<Bytes, OptimError> {
        let layout = Layout::new(params, options.bucket_elements)?;
        let slots: Bytes = layout.slots().map(|slot| slot.file_bytes() * 2).sum();
        let file = layout_file_bytes(layout.encode(&[0; 16]).0.len());
        Ok(slots + file + record::page_bytes(&layout) * 2)
    }

    /// Memory of the chunk ring: depth x three sections of a chunk, whatever the size of the model.
    pub fn ring_bytes(params: &[ParamSpec], options: &AdamOptions) -> Result<Bytes, OptimError> {
        Ok(ring::ring_bytes(&Layout::new(params, options.bucket_elements)?, options))
    }

    /// Refuses to go on after an earlier failure that `blocks`.
    pub(crate) fn check_latch(&self, blocks: impl Fn(&Latch) -> bool) -> Result<(), OptimError> {
        match &self.latch {
            Some(latch) if blocks(latch) => Err(OptimError::Latched {
                reason: latch.reason.clone(),
                remedy: if latch.reopen {
                    "open the store again: the disk knows which state is the last"
                } else {
                    "rebuild the weights with read_weights, or open the store again"
                },
            }),
            _ => Ok(()),
        }
    }

    /// Makes sure the record that was opened is on the disk and not only in the page cache, before the first write to
    /// a slot that an older record needs. After a failed flush the kernel may show pages that the disk never got.
    pub(crate) fn confirm(&mut self) -> Result<Bytes, OptimError> {
        if self.confirmed {
            return Ok(Bytes::ZERO);
        }
        let written = self.write_record(&self.record, self.page)?;
        // So may names of slots that were replaced.
        self.dir.sync()?;
        self.confirmed = true;
        Ok(written)
    }

    /// Writes and flushes `record` as the new state, in the older page.
    pub(crate) fn commit(&mut self, record: Record) -> Result<Bytes, OptimError> {
        let page = 1 - self.page;
        let written = self.write_record(&record, page)?;
        (self.page, self.record, self.confirmed) = (page, record, true);
        Ok(written)
    }

    fn write_record(&self, record: &Record, page: u64) -> Result<Bytes, OptimError> {
        let offset = page * record::page_bytes(&self.layout).0;
        write_bytes(&self.record_file, offset, &record.encode())
    }
}

/// Reads the first `READS` sections of the committed state.
struct ReadState<'a, const READS: usize> {
    layout: &'a Layout,
    buckets: &'a [Bucket],
    id: StoreId,
    state: &'a mut dyn FnMut(StatePart<'_>),
    /// A block's moments as float32.
    moments: [Vec<f32>; 2],
}

impl<const N: usize> Pass for ReadState<'_, N> {
    const READS: usize = N;
    const WRITES: usize = 0;
    const NAME: &'static str = "hand out";

    fn source(&self, bucket: usize) -> &DurableFile {
        let bucket = &self.buckets[bucket];
        &bucket.files[bucket.live]
    }

    fn target(&self, bucket: usize) -> &DurableFile {
        self.source(bucket)
    }

    fn work(&mut self, chunk: Chunk, sections: Sections<'_>) -> Result<(), OptimError> {
        let slot = self.layout.slot(chunk.bucket);
        for (i, sections) in slot.blocks_of(sections.map(|s| &*s)).enumerate() {
            self.block(chunk, slot, i, sections)?;
        }
        Ok(())
    }
}

impl<const N: usize> ReadState<'_, N> {
    /// Checks a block of a chunk and hands out what it holds.
    fn block(
        &mut self,
        chunk: Chunk,
        slot: SlotShape,
        i: usize,
        sections: [&[u8]; 3],
    ) -> Result<(), OptimError> {
        let bucket = &self.buckets[chunk.bucket];
        let identity = Identity { id: self.id, bucket: chunk.bucket, generation: bucket.generation };
        let block = chunk.first / BLOCK + i;
        for (section, data) in sections.iter().enumerate().take(N) {
            if identity.sum(block, section, data) != bucket.table[block][section] {
                return Err(bad_block(self.layout, bucket, chunk.bucket, block, section));
            }
        }
        let main: &[f32] = bytemuck::cast_slice(sections[0]);
        if N > 1 {
            for (moment, (values, bytes)) in
                [Moment::First, Moment::Second].into_iter().zip(self.moments.iter_mut().zip(&sections[1..]))
            {
                values.resize(main.len(), 0.0);
                slot.moments.decode(moment, bytes, 0..main.len(), values);
            }
        }
        let [avg, sq] = &self.moments;
        let start = self.layout.bucket(chunk.bucket).start + block * BLOCK;
        for Segment { param, first, local } in self.layout.segments(start..start + main.len()) {
            let moments = if N > 1 { local.clone() } else { 0..0 };
            let (main, exp_avg, exp_avg_sq) = (&main[local], &avg[moments.clone()], &sq[moments]);
            (self.state)(StatePart { param, first, main, exp_avg, exp_avg_sq });
        }
        Ok(())
    }
}

/// The error for a block of a committed slot that does not match its checksum.
pub(crate) fn bad_block(
    layout: &Layout,
    bucket: &Bucket,
    index: usize,
    block: usize,
    section: usize,
) -> OptimError {
    let first = block * BLOCK;
    OptimError::Checksum {
        path: bucket.files[bucket.live].path().to_path_buf(),
        bucket: index,
        section: SECTIONS[section],
        first,
        end: (first + BLOCK).min(layout.bucket(index).len()),
    }
}
