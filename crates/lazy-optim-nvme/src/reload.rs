//! Weights that the trainer changed, and memory that others need for a while.

use std::time::Instant;

use crate::home::Home;
use crate::ring::{Chunk, Log, Pass, Sections};
use crate::slot::{BLOCK, SECTIONS};
use crate::transaction::Writing;
use crate::{NvmeAdam, OptimError, StepSeconds};

impl NvmeAdam {
    /// Takes over weights that the trainer changed behind the optimizer's back (loaded from elsewhere, averaged, merged): gives
    /// `weights(param, first, values)` the main weights, each element once, to be overwritten, and commits them. Moments and
    /// step counts stay; [`sequence`](NvmeAdam::sequence) counts this commit too. On an error the state is the old one.
    pub fn reload_weights(
        &mut self,
        weights: &mut dyn FnMut(usize, usize, &mut [f32]),
    ) -> Result<(), OptimError> {
        self.check_latch(|_| true)?;
        let all: Vec<usize> = (0..self.buckets.len()).collect();
        let pass = |ring: &mut crate::ring::Ring, _: &_, writing: Writing<'_>, log: &mut Log| {
            let layout = writing.layout;
            let mut pass = ReloadPass { writing, weights };
            let passed = ring.run(layout, ring.chunks(layout, &all), &mut pass, log);
            (passed, pass.writing.end())
        };
        self.transact(&all, &mut Log::new(Instant::now()), &mut StepSeconds::default(), pass, |_, record| {
            record
        })
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
        for (i, sections) in shape.blocks_of([main, avg, sq]).enumerate() {
            let sums = self.writing.sums(bucket, first + i, sections);
            self.writing.note(bucket, sums);
        }
        Ok(())
    }
}
