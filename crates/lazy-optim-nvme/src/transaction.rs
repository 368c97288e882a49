//! Writing the next state of some buckets and making it the state: what steps and reloads have in common.

use std::time::Instant;

use lazy_model::{Bytes, Lane};

use crate::home::{Bucket, Home, Slots};
use crate::layout::{Layout, StoreId};
use crate::record::{Committed, Record};
use crate::ring::{Log, Ring};
use crate::seal::{Sealer, Unsealed};
use crate::slot::{BlockSums, Identity, SlotHead};
use crate::state::{Latch, check_block};
use crate::step::elapsed;
use crate::{Durability, NvmeAdam, OptimError, StepSeconds};

/// What a pass that writes reads from, and where it notes what it wrote.
pub(crate) struct Writing<'a> {
    pub(crate) layout: &'a Layout,
    buckets: &'a [Bucket],
    id: StoreId,
    /// Of the slots written.
    generation: u64,
    /// Slots are the state while they are updated, too.
    in_place: bool,
    /// New checksums, by bucket.
    tables: Vec<Vec<BlockSums>>,
    written: Written,
}

/// The slots that a pass has written.
#[derive(Default)]
pub(crate) struct Written {
    sealer: Sealer,
    fresh: Vec<Fresh>,
}

/// A slot that was written.
struct Fresh {
    bucket: usize,
    table: Vec<BlockSums>,
    head_crc: u32,
}

impl<'a> Writing<'a> {
    pub(crate) fn home(&self, bucket: usize) -> &'a Home {
        &self.buckets[bucket].home
    }

    /// Refuses a block that is not the one that was written last. What is in RAM has no checksums.
    pub(crate) fn check(&self, index: usize, block: usize, sections: [&[u8]; 3]) -> Result<(), OptimError> {
        check_block(&self.buckets[index], self.id, (index, self.layout.slot(index)), block, &sections)
    }

    /// The new checksums of a block.
    pub(crate) fn sums(&self, bucket: usize, block: usize, sections: [&[u8]; 3]) -> Option<BlockSums> {
        let identity = Identity { id: self.id, bucket, generation: self.generation };
        self.buckets[bucket].slots().map(|_| identity.sums(block, sections))
    }

    /// Notes the checksums of a bucket's next block.
    pub(crate) fn note(&mut self, bucket: usize, sums: Option<BlockSums>) {
        self.tables[bucket].extend(sums);
    }

    /// All of a bucket's chunks are written: its slot is sealed in the end.
    pub(crate) fn bucket_written(&mut self, bucket: usize) {
        let Writing { layout, buckets, id, generation, in_place, .. } = *self;
        let mut fresh = Fresh { bucket, table: std::mem::take(&mut self.tables[bucket]), head_crc: 0 };
        if let (false, Some(slots)) = (in_place, buckets[bucket].slots()) {
            let (identity, slot) = (Identity { id, bucket, generation }, slots.next());
            let head = SlotHead { identity, slot, shape: layout.slot(bucket), table: fresh.table };
            let (bytes, head_crc) = head.encode();
            self.written.sealer.seal(slots.target(), bytes);
            (fresh.table, fresh.head_crc) = (head.table, head_crc);
        }
        self.written.fresh.push(fresh);
    }

    /// Ends the pass.
    pub(crate) fn end(self) -> Written {
        self.written
    }
}

impl NvmeAdam {
    /// Has `pass` write the next state of the `touched` buckets, seals it, and commits it with the record that `next` makes of the
    /// one of the new slots.
    pub(crate) fn transact(
        &mut self,
        touched: &[usize],
        log: &mut Log,
        seconds: &mut StepSeconds,
        pass: impl FnOnce(&mut Ring, &Record, Writing<'_>, &mut Log) -> (Result<(), OptimError>, Written),
        next: impl FnOnce(&Layout, Record) -> Record,
    ) -> Result<(), OptimError> {
        let started = Instant::now();
        // Set first and taken back at the end, so that a panic in the pass latches too.
        let interrupted = || "it was interrupted".to_string();
        self.latch = Some(Latch { reason: interrupted(), reopen: true });
        let in_place = self.durability == Durability::Checkpoint;
        let confirmed = if in_place { self.begin() } else { self.confirm() };
        let confirmed = confirmed.map_err(|error| self.latched(error, true))?;
        if confirmed > Bytes::ZERO {
            log.written += confirmed;
            log.span(Lane::NvmeWrite, "confirm the record".into(), started, Instant::now(), confirmed);
        }
        self.latch = None;
        self.replace_retired(touched)?;
        self.latch = Some(Latch { reason: interrupted(), reopen: in_place });
        let writing = Writing {
            layout: &self.layout,
            buckets: &self.buckets,
            id: self.id,
            generation: self.record.sequence + 1,
            in_place,
            tables: vec![Vec::new(); self.buckets.len()],
            written: Written::default(),
        };
        let (passed, Written { sealer, fresh }) = pass(&mut self.ring, &self.record, writing, log);
        let streamed = Instant::now();
        seconds.update = elapsed(started, streamed);
        self.latch = Some(Latch { reason: interrupted(), reopen: true });
        passed.map_err(|error| self.latched(error, in_place))?;
        let sealed = sealer.finish();
        sealed.map_err(|Unsealed { error, flush }| self.latched(error, flush || in_place))?;
        let before = log.written;
        let record = next(&self.layout, self.record_of(&fresh));
        if in_place {
            self.record = record;
        } else {
            log.written += fresh.iter().map(|fresh| self.layout.slot(fresh.bucket).head_bytes()).sum();
            log.written += self.commit(record).map_err(|error| self.latched(error, true))?;
        }
        self.turn(fresh);
        self.latch = None;
        let committed = Instant::now();
        log.span(Lane::NvmeWrite, "commit".into(), streamed, committed, log.written - before);
        seconds.commit = elapsed(streamed, committed);
        Ok(())
    }

    /// The record of the next sequence, which names the fresh slots.
    fn record_of(&self, fresh: &[Fresh]) -> Record {
        let mut record = Record { sequence: self.record.sequence + 1, ..self.record.clone() };
        for Fresh { bucket, head_crc, .. } in fresh {
            let slot = self.buckets[*bucket].slots().map_or(0, Slots::next);
            record.buckets[*bucket] = Committed { slot, generation: record.sequence, head_crc: *head_crc };
        }
        record
    }

    /// The fresh slots are the state.
    fn turn(&mut self, fresh: Vec<Fresh>) {
        for Fresh { bucket, table, .. } in fresh {
            let bucket = &mut self.buckets[bucket];
            (bucket.generation, bucket.table) = (self.record.sequence, table);
            if let Home::Nvme(slots) = &mut bucket.home {
                slots.turn();
            }
        }
    }

    /// Notes a failure for the steps to come, and passes it on.
    pub(crate) fn latched(&mut self, error: OptimError, reopen: bool) -> OptimError {
        self.latch = Some(Latch { reason: error.to_string(), reopen });
        error
    }
}
