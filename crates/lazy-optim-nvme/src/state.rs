//! The optimizer: what it holds, reading it, committing it.

use std::path::Path;
use std::time::Instant;

use lazy_model::{Bytes, Tier};
use lazy_store::NvmeMode;
use lazy_store::durable::{DurableDir, DurableFile};

use crate::files::write_bytes;
use crate::home::{self, Bucket, Home, Homes};
use crate::layout::{Layout, Segment, StoreId, layout_file_bytes};
use crate::moments::Moment;
use crate::record::{self, Record, Standing};
use crate::ring::{Chunk, Log, Pass, Ring, RingSize, Sections};
use crate::seal::Sealer;
use crate::slot::{self, BLOCK, Identity, SECTIONS, SlotHead, SlotShape};
use crate::{AdamOptions, Durability, OptimError, ParamSpec, StatePart, UpdateChoice};

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
    pub(crate) durability: Durability,
}

/// An earlier failure that stands in the way of the next step.
pub(crate) struct Latch {
    pub(crate) reason: String,
    /// A flush or the record's write failed: only the disk knows which state is the last.
    pub(crate) reopen: bool,
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
    /// A store of what was made or found in its folder: its record is in this page of this file.
    pub(crate) fn assemble(
        dir: DurableDir,
        durability: Durability,
        (id, layout): (StoreId, Layout),
        ring: Ring,
        buckets: Vec<Bucket>,
        (record_file, page, record): (DurableFile, u64, Record),
    ) -> Self {
        let (confirmed, latch) = (false, None);
        NvmeAdam { dir, id, layout, ring, buckets, record_file, page, record, confirmed, latch, durability }
    }

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

    pub(crate) fn read<const READS: usize>(
        &mut self,
        state: &mut dyn FnMut(StatePart<'_>),
    ) -> Result<(), OptimError> {
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

    /// Commits since creation: steps, and weights reloaded.
    pub fn sequence(&self) -> u64 {
        self.record.sequence
    }

    /// Number of buckets.
    pub fn bucket_count(&self) -> usize {
        self.buckets.len()
    }

    /// Where updates of state at home in RAM and on NVMe are computed, and what was measured to choose that.
    pub fn update_on(&self) -> UpdateChoice {
        self.ring.choice()
    }

    /// How the files are read and written: asked for and obtained.
    pub fn mode(&self) -> &NvmeMode {
        self.dir.mode()
    }

    /// Size of all files of a store: of the buckets on NVMe two slots, or one with [`Durability::Checkpoint`], with padding and
    /// checksums, and the records.
    pub fn bytes_on_disk(params: &[ParamSpec], options: &AdamOptions) -> Result<Bytes, OptimError> {
        Ok(bytes_on_disk(&Layout::new(params, options.bucket_elements)?, options))
    }

    /// Memory of the chunk ring: depth x three sections of a chunk, whatever the size of the model; with
    /// [`AdamOptions::host`], that of the state in RAM as well. Beside a GPU ([`AdamOptions::device`]) all of it is pinned, and the
    /// ring has two chunks more, room for each one's gradients, and one buffer of such room or of eight bytes for every 65,536
    /// elements, whichever is more.
    pub fn memory_bytes(params: &[ParamSpec], options: &AdamOptions) -> Result<Bytes, OptimError> {
        let layout = Layout::new(params, options.bucket_elements)?;
        Ok(RingSize::new(&layout, options).bytes() + Homes::new(&layout, options).host)
    }

    /// Memory taken of the GPU ([`AdamOptions::device`]): three chunks and their gradients, whatever the size of the model, eight
    /// bytes for every 65,536 elements, and the state at home there ([`AdamOptions::hbm`]). With [`UpdateOn::Cpu`] the gradients of
    /// three chunks only.
    ///
    /// [`UpdateOn::Cpu`]: crate::UpdateOn::Cpu
    pub fn device_bytes(params: &[ParamSpec], options: &AdamOptions) -> Result<Bytes, OptimError> {
        let layout = Layout::new(params, options.bucket_elements)?;
        Ok(RingSize::new(&layout, options).device_bytes())
    }

    /// Memory that is taken.
    #[cfg(test)]
    pub(crate) fn ring_bytes(&self) -> Bytes {
        let memory = self.buckets.iter().map(|bucket| match &bucket.home {
            Home::Host(memory) => memory.lock().iter().map(|buffer| Bytes(buffer.len() as u64)).sum(),
            _ => Bytes::ZERO,
        });
        self.ring.taken() + memory.sum()
    }

    /// Refuses to go on without memory, and after an earlier failure that `blocks`.
    pub(crate) fn check_latch(&self, blocks: impl Fn(&Latch) -> bool) -> Result<(), OptimError> {
        if self.ring.is_given_up() {
            return Err(OptimError::Suspended);
        }
        match &self.latch {
            Some(latch) if blocks(latch) => Err(OptimError::Latched {
                reason: latch.reason.clone(),
                remedy: if self.durability == Durability::Checkpoint {
                    "load what was saved last: with durability = checkpoint no step can be taken back"
                } else if latch.reopen {
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

    /// Makes sure that the disk says that a step was begun, before the first write to a slot that the record names.
    pub(crate) fn begin(&mut self) -> Result<Bytes, OptimError> {
        if self.record.standing == Standing::Begun {
            return Ok(Bytes::ZERO);
        }
        let written = self.commit(Record { standing: Standing::Begun, ..self.record.clone() })?;
        for (index, bucket) in self.buckets.iter().enumerate() {
            // What a bucket was loaded into RAM from is not its state any more.
            let name = slot::file_name(index, self.record.buckets[index].slot);
            if bucket.slots().is_none() && self.dir.exists(&name)? {
                self.dir.remove(&name)?;
            }
        }
        Ok(written)
    }

    /// Makes what the last step left in slots that are updated in place the state that the disk names.
    pub(crate) fn settle(&mut self) -> Result<(), OptimError> {
        if self.record.standing == Standing::Saved {
            return Ok(());
        }
        let mut record = self.record.clone();
        let mut sealer = Sealer::default();
        for (index, bucket) in self.buckets.iter().enumerate() {
            let Home::Nvme(slots) = &bucket.home else { continue };
            let identity = Identity { id: self.id, bucket: index, generation: bucket.generation };
            let (slot, shape, table) = (slots.number, self.layout.slot(index), bucket.table.clone());
            let (head, head_crc) = SlotHead { identity, slot, shape, table }.encode();
            record.buckets[index].head_crc = head_crc;
            sealer.seal(slots.source(), head);
        }
        sealer.finish().map_err(|unsealed| self.latched(unsealed.error, true))?;
        if self.buckets.iter().all(|bucket| bucket.slots().is_some()) {
            record.standing = Standing::Saved;
            self.commit(record).map_err(|error| self.latched(error, true))?;
        } else {
            // What is in RAM has no slot that the disk could name.
            self.record = record;
        }
        Ok(())
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

impl<'b, const N: usize> Pass<'b> for ReadState<'b, N> {
    const READS: usize = N;
    const WRITES: usize = 0;
    const NAME: &'static str = "hand out";

    fn home(&self, bucket: usize) -> &'b Home {
        &self.buckets[bucket].home
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
        let block = chunk.first / BLOCK + i;
        check_block(bucket, self.id, (chunk.bucket, slot), block, &sections[..N])?;
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

/// Size of all files of a store.
pub(crate) fn bytes_on_disk(layout: &Layout, options: &AdamOptions) -> Bytes {
    let homes = Homes::new(layout, options).tiers;
    let on_disk = layout.slots().zip(homes).filter(|(_, tier)| *tier == Tier::Nvme);
    let count = home::slot_count(options.durability) as u64;
    let slots: Bytes = on_disk.map(|(slot, _)| slot.file_bytes() * count).sum();
    slots + layout_file_bytes(layout.encode(&[0; 16]).0.len()) + record::page_bytes(layout) * 2
}

/// Refuses a block of a bucket of which one of the first sections is not what was written last. What is in memory has no checksums.
pub(crate) fn check_block(
    bucket: &Bucket,
    id: StoreId,
    (index, shape): (usize, SlotShape),
    block: usize,
    sections: &[&[u8]],
) -> Result<(), OptimError> {
    let Some(slots) = bucket.slots() else { return Ok(()) };
    let identity = Identity { id, bucket: index, generation: bucket.generation };
    let wrong = |(section, data): &(usize, &&[u8])| {
        identity.sum(block, *section, data) != bucket.table[block][*section]
    };
    match sections.iter().enumerate().find(wrong) {
        Some((section, _)) => Err(bad_block(slots.source().path(), shape, index, block, section)),
        None => Ok(()),
    }
}

/// The error for a block of a slot that does not match its checksum.
pub(crate) fn bad_block(
    path: &Path,
    shape: SlotShape,
    bucket: usize,
    block: usize,
    section: usize,
) -> OptimError {
    let first = block * BLOCK;
    let end = (first + BLOCK).min(shape.elements);
    OptimError::Checksum { path: path.to_path_buf(), bucket, section: SECTIONS[section], first, end }
}
