//! Weights that the trainer changed, and memory that others need for a while.

use std::time::Instant;

use crate::home::Home;
use crate::moments::Moment;
use crate::record::Record;
use crate::ring::{Chunk, Log, Pass, Sections};
use crate::slot::{BLOCK, SECTIONS};
use crate::transaction::Writing;
use crate::{Durability, NvmeAdam, OptimError, StepSeconds};

impl NvmeAdam {
    /// Takes over weights that the trainer changed behind the optimizer's back (loaded from elsewhere, averaged, merged): gives
    /// `weights(param, first, values)` the main weights, each element once, to be overwritten, and commits them. Moments and
    /// step counts stay; [`sequence`](NvmeAdam::sequence) counts this commit too. On an error the state is the old one.
    pub fn reload_weights(
        &mut self,
        weights: &mut dyn FnMut(usize, usize, &mut [f32]),
    ) -> Result<(), OptimError> {
        self.rewrite(weights, false)
    }

    /// Goes on with the weights alone: moments are zero and step counts 0, as in a new store, and that is committed.
    /// [`sequence`](NvmeAdam::sequence) counts it too; the blob stays. On an error the state is the old one.
    pub fn forget_moments(&mut self) -> Result<(), OptimError> {
        self.rewrite(&mut |_, _, _| {}, true)
    }

    fn rewrite(
        &mut self,
        weights: &mut dyn FnMut(usize, usize, &mut [f32]),
        forget: bool,
    ) -> Result<(), OptimError> {
        self.check_latch(|_| true)?;
        let all: Vec<usize> = (0..self.buckets.len()).collect();
        let pass = |ring: &mut crate::ring::Ring, _: &_, writing: Writing<'_>, log: &mut Log| {
            let layout = writing.layout;
            let mut pass = ReloadPass { writing, weights, forget };
            let passed = ring.run(layout, ring.chunks(layout, &all), &mut pass, log);
            (passed, pass.writing.end())
        };
        let next = |_: &_, mut record: Record| {
            if forget {
                record.step_counts.fill(0);
            }
            record
        };
        self.transact(&all, &mut Log::new(Instant::now()), &mut StepSeconds::default(), pass, next)
    }

    /// Takes the disk space that the next step needs: a file in the place of each slot that a generation holds. Steps do so
    /// themselves; this is for those who want to know at the start. With [`Durability::Checkpoint`] the store is no longer
    /// what was saved then, as after a step.
    ///
    /// # Errors
    /// [`OptimError::NoSpace`], where there is not room for all; none is taken then.
    pub fn reserve(&mut self) -> Result<(), OptimError> {
        self.check_latch(|_| true)?;
        let all: Vec<usize> = (0..self.buckets.len()).collect();
        if self.durability == Durability::Checkpoint && self.has_retired(&all)? {
            self.begin().map_err(|error| self.latched(error, true))?;
        }
        self.replace_retired(&all)
    }

    /// Gives back the memory of the ring and of the buckets at home in RAM and HBM, which go to a file each in the store's folder: all
    /// of [`memory_bytes`](NvmeAdam::memory_bytes) and [`device_bytes`](NvmeAdam::device_bytes). For
    /// somebody else who needs it between steps, such as inference on the same GPU. Whatever needs the state afterwards
    /// is refused until [`resume`](NvmeAdam::resume).
    pub fn suspend(&mut self) -> Result<(), OptimError> {
        if self.is_suspended() {
            return Ok(());
        }
        self.check_latch(|latch| latch.reopen)?;
        self.move_out()?;
        self.ring.give_up();
        Ok(())
    }

    /// Takes the memory again that [`suspend`](NvmeAdam::suspend) gave back.
    pub fn resume(&mut self) -> Result<(), OptimError> {
        self.ring.take_again()?;
        self.move_in()
    }

    /// Whether the store is suspended.
    pub fn is_suspended(&self) -> bool {
        self.ring.is_given_up()
    }
}

/// Puts other main weights in the place of those there are.
struct ReloadPass<'a, 'w> {
    writing: Writing<'a>,
    weights: &'w mut dyn FnMut(usize, usize, &mut [f32]),
    /// Moments become zero.
    forget: bool,
}

impl<'b> Pass<'b> for ReloadPass<'b, '_> {
    const READS: usize = SECTIONS.len();
    const WRITES: usize = SECTIONS.len();
    const NAME: &'static str = "reload";

    fn home(&self, bucket: usize) -> &'b Home {
        self.writing.home(bucket)
    }

    fn written(&mut self, bucket: usize) {
        self.writing.bucket_written(bucket);
    }

    fn work(&mut self, chunk: Chunk, [main, avg, sq]: Sections<'_>) -> Result<(), OptimError> {
        let (layout, bucket) = (self.writing.layout, chunk.bucket);
        let first = chunk.first / BLOCK;
        let shape = layout.slot(bucket);
        for (i, sections) in shape.blocks_of([main, avg, sq]).enumerate() {
            self.writing.check(bucket, first + i, sections)?;
        }
        let start = layout.bucket(bucket).start + chunk.first;
        let values: &mut [f32] = bytemuck::cast_slice_mut(main);
        for segment in layout.segments(start..start + chunk.len) {
            (self.weights)(segment.param, segment.first, &mut values[segment.local]);
        }
        if self.forget {
            for (moment, section) in [(Moment::First, &mut *avg), (Moment::Second, &mut *sq)] {
                let blocks = section.chunks_mut(shape.moments.block_bytes());
                blocks.for_each(|block| shape.moments.fill_zero(moment, block));
            }
        }
        for (i, sections) in shape.blocks_of([main, avg, sq]).enumerate() {
            let sums = self.writing.sums(bucket, first + i, sections);
            self.writing.note(bucket, sums);
        }
        Ok(())
    }
}
