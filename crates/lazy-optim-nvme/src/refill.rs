//! Compute weights from the committed mains, written where the trainer wants them.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use rayon::prelude::*;

use crate::accelerator::Accelerator;
use crate::adam::WeightsOut;
use crate::home::{Bucket, Home};
use crate::layout::{Layout, StoreId};
use crate::out::Out;
use crate::ring::{Chunk, Log, Pass, Sections};
use crate::slot::BLOCK;
use crate::state::check_block;
use crate::update::{Away, Left};
use crate::{NvmeAdam, OptimError};

impl NvmeAdam {
    /// Fills `weights`, one entry a parameter, with the committed main weights, by all threads while they are in their caches: the mate
    /// of [`step_into`](NvmeAdam::step_into), for after a store was made, opened or loaded, with the bits that a step would write. `None`
    /// takes none.
    ///
    /// Like [`read_weights`](NvmeAdam::read_weights) it clears the way after a failed step. Room in device memory is written at once,
    /// whatever is on any stream: nobody uses it any more when this is called. On an error some of the room may be filled.
    pub fn read_weights_into(&mut self, weights: Vec<Option<WeightsOut<'_>>>) -> Result<(), OptimError> {
        self.check_latch(|latch| latch.reopen)?;
        self.check_out(&weights)?;
        self.refill(&mut Out::Into(weights, &mut |_, _| {}))
    }

    /// After a step that was given up: hands the weights out again that were, as they were before.
    pub(crate) fn take_back(&mut self, left: Left<'_, '_, '_>) -> Result<(), OptimError> {
        let Left { mut out, changed, .. } = left;
        if !changed.contains(&true) {
            self.latch = None;
            return Ok(());
        }
        match &mut out {
            Out::Each(weights) => {
                return self.read::<1>(&mut |part| {
                    if changed[part.param] {
                        weights(part.param, part.first, part.main);
                    }
                });
            }
            Out::Into(rooms, _) => {
                let untouched = rooms.iter_mut().zip(&changed).filter(|(_, changed)| !**changed);
                untouched.for_each(|(room, _)| *room = None);
            }
        }
        self.refill(&mut out).map_err(|error| self.latched(error, false))
    }

    fn refill(&mut self, out: &mut Out<'_, '_>) -> Result<(), OptimError> {
        let layout = &self.layout;
        let wanted = |bucket: &usize| layout.segments(layout.bucket(*bucket)).any(|s| out.wants(s.param));
        let buckets: Vec<usize> = (0..self.buckets.len()).filter(wanted).collect();
        let accelerator = self.ring.shared_accelerator();
        let mut pass = Refill { layout, buckets: &self.buckets, id: self.id, out, accelerator };
        let chunks = self.ring.chunks(layout, &buckets);
        self.ring.run(layout, chunks, &mut pass, &mut Log::new(Instant::now()))?;
        self.latch = None;
        Ok(())
    }
}

/// Reads main weights, checks them, and writes what is wanted of them.
struct Refill<'b, 'o, 'a, 'w> {
    layout: &'b Layout,
    buckets: &'b [Bucket],
    id: StoreId,
    out: &'o mut Out<'a, 'w>,
    accelerator: Option<Arc<Accelerator>>,
}

/// Weights of a block, and the room for them in RAM.
type Piece<'r> = (Range<usize>, WeightsOut<'r>);

impl<'b> Pass<'b> for Refill<'b, '_, '_, '_> {
    const READS: usize = 1;
    const WRITES: usize = 0;
    const NAME: &'static str = "hand out";

    fn home(&self, bucket: usize) -> &'b Home {
        &self.buckets[bucket].home
    }

    fn work(&mut self, chunk: Chunk, [main, ..]: Sections<'_>) -> Result<(), OptimError> {
        let Refill { layout, buckets, id, out, accelerator } = self;
        let (start, shape) = (layout.bucket(chunk.bucket).start + chunk.first, layout.slot(chunk.bucket));
        let mut away = Away::default();
        for segment in layout.segments(start..start + chunk.len) {
            let range = segment.first..segment.first + segment.local.len();
            away.weights.extend(out.on_device(segment.param, range).map(|slice| (segment.local, slice)));
        }
        let mut rooms = out.rooms(layout.segments(start..start + chunk.len));
        let mut pieces = |first: usize, len: usize| -> Vec<Piece<'_>> {
            let parts = layout.segments(first..first + len);
            parts
                .filter_map(|part| Some((part.local.clone(), rooms.take(part.param, part.local.len())?)))
                .collect()
        };
        let blocks: Vec<(usize, &[u8], Vec<Piece<'_>>)> = main
            .chunks(BLOCK * 4)
            .enumerate()
            .map(|(i, main)| (chunk.first / BLOCK + i, main, pieces(start + i * BLOCK, main.len() / 4)))
            .collect();
        let bucket = &buckets[chunk.bucket];
        blocks.into_par_iter().try_for_each(|(block, main, pieces)| {
            check_block(bucket, *id, (chunk.bucket, shape), block, &[main])?;
            let main: &[f32] = bytemuck::cast_slice(main);
            pieces.into_iter().for_each(|(local, mut room)| room.write(0..local.len(), &main[local]));
            Ok::<_, OptimError>(())
        })?;
        match accelerator {
            Some(accelerator) if !away.weights.is_empty() => {
                away.send(accelerator, main, &mut accelerator.scratch())
            }
            _ => Ok(()),
        }
    }
}
