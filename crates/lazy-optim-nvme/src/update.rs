//! The update as a trip through the ring: on the processor, or begun on the GPU and finished here.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use lazy_store::durable::AlignedBuf;
use rayon::prelude::*;

use crate::accelerator::{Accelerator, Begun, GradAt, Part, State, staged_at};
use crate::adam::{BlockMut, Gradient, Rule, WeightsOut, update_block};
use crate::device::DeviceSlice;
use crate::home::Home;
use crate::layout::Segment;
use crate::ring::{Buffers, Chunk, Pass, Ring, Sections};
use crate::slot::{BLOCK, BlockSums, SECTIONS};
use crate::transaction::{Writing, Written};
use crate::{OptimError, bf16};

/// Where updated weights go.
pub(crate) enum Out<'a, 'w> {
    /// To the caller, chunk by chunk.
    Each(&'a mut dyn FnMut(usize, usize, &[f32])),
    /// Into what is left of each parameter's room.
    Into(Vec<Option<WeightsOut<'w>>>),
}

impl<'w> Out<'_, 'w> {
    /// The room of the next `n` elements of a parameter, where it is in RAM.
    fn take(&mut self, param: usize, n: usize) -> Option<WeightsOut<'w>> {
        match self {
            Out::Into(rooms) => match &mut rooms[param] {
                Some(WeightsOut::Device(_)) | None => None,
                Some(room) => Some(room.split_off(n)),
            },
            Out::Each(_) => None,
        }
    }

    /// The same, where it is in device memory.
    fn take_on_device(&mut self, param: usize, n: usize) -> Option<DeviceSlice> {
        match self {
            Out::Into(rooms) => match &mut rooms[param] {
                Some(WeightsOut::Device(room)) => Some(room.split_off(n)),
                _ => None,
            },
            Out::Each(_) => None,
        }
    }
}

/// The update of one step.
struct Update<'a> {
    writing: Writing<'a>,
    grads: &'a [Option<Gradient<'a>>],
    /// By parameter; `None` where there is no gradient.
    rules: Vec<Option<Rule>>,
}

/// A block on its way, and what is to be done to it.
struct Block<'a, 'w> {
    bucket: usize,
    block: usize,
    sections: Sections<'a>,
    /// The parts of parameters with a gradient, the gradient, and where their weights go.
    parts: Vec<(Segment, Gradient<'a>, Option<WeightsOut<'w>>)>,
}

/// Where in a chunk elements are whose weights go into RAM, and their room there.
type Rooms<'w> = Vec<(Range<usize>, WeightsOut<'w>)>;

/// The update as a trip through the ring.
pub(crate) struct UpdatePass<'a, 'o, 'w> {
    update: Update<'a>,
    out: Out<'o, 'w>,
    accelerator: Option<Arc<Accelerator>>,
    /// Chunks of RAM and NVMe are updated on the GPU.
    on_gpu: bool,
    /// Of the chunks on the GPU, oldest first.
    rooms: VecDeque<Rooms<'w>>,
}

impl<'a, 'o, 'w> UpdatePass<'a, 'o, 'w> {
    pub(crate) fn new(
        writing: Writing<'a>,
        grads: &'a [Option<Gradient<'a>>],
        rules: Vec<Option<Rule>>,
        out: Out<'o, 'w>,
        ring: &Ring,
    ) -> Self {
        let (accelerator, on_gpu) = (ring.shared_accelerator(), ring.updates_on_gpu());
        let update = Update { writing, grads, rules };
        UpdatePass { update, out, accelerator, on_gpu, rooms: VecDeque::new() }
    }

    pub(crate) fn end(self) -> Written {
        self.update.writing.end()
    }

    /// Whether a bucket is at home on the GPU with all that its update reads and writes: it needs not be cut.
    pub(crate) fn is_whole(&self, bucket: usize) -> bool {
        let layout = self.update.writing.layout;
        let mut moving =
            layout.segments(layout.bucket(bucket)).filter(|s| self.update.grads[s.param].is_some());
        let stays = |out: &Out<'_, '_>, param: usize| match out {
            Out::Each(_) => false,
            Out::Into(rooms) => matches!(rooms[param], None | Some(WeightsOut::Device(_))),
        };
        matches!(self.update.writing.home(bucket), Home::Hbm(_))
            && moving.all(|Segment { param, .. }| {
                matches!(self.update.grads[param], Some(Gradient::Device(_))) && stays(&self.out, param)
            })
    }

    /// The parts of a chunk that have a gradient, those in RAM brought into `grads`. Room in RAM for their weights is kept.
    fn parts(&mut self, chunk: Chunk, grads: Option<&mut AlignedBuf>) -> Vec<Part> {
        let layout = self.update.writing.layout;
        let start = layout.bucket(chunk.bucket).start + chunk.first;
        let staging = grads.map_or(&mut [][..], AlignedBuf::as_mut_slice);
        let (mut parts, mut rooms) = (Vec::new(), Rooms::new());
        for Segment { param, first, local } in layout.segments(start..start + chunk.len) {
            let (Some(grad), Some(rule)) = (self.update.grads[param], self.update.rules[param]) else {
                continue;
            };
            let grad = grad.slice(first..first + local.len());
            match grad {
                Gradient::F32(grad) => {
                    copy_all(bytemuck::cast_slice(grad), &mut staging[staged_at(local.start)..])
                }
                Gradient::Bf16(grad) => {
                    copy_all(bytemuck::cast_slice(grad), &mut staging[staged_at(local.start)..])
                }
                Gradient::Device(_) => {}
            }
            let weights = self.out.take_on_device(param, local.len());
            rooms.extend(self.out.take(param, local.len()).map(|room| (local.clone(), room)));
            parts.push(Part { rule, local, grad: GradAt::of(grad), weights });
        }
        self.rooms.push_back(rooms);
        parts
    }

    /// What is left to do to a chunk that the GPU has updated: checksums of what goes to NVMe, and weights that go into RAM.
    fn finish(&mut self, chunk: Chunk, [main, avg, sq]: Sections<'_>) {
        let layout = self.update.writing.layout;
        let update = &mut self.update;
        let rooms = self.rooms.pop_front().unwrap_or_default();
        if matches!(update.writing.home(chunk.bucket), Home::Nvme(_)) {
            let blocks: Vec<_> = layout.slot(chunk.bucket).blocks_of([&*main, &*avg, &*sq]).collect();
            let first = chunk.first / BLOCK;
            let sums =
                |(i, sections): (usize, &[&[u8]; 3])| update.writing.sums(chunk.bucket, first + i, *sections);
            let sums: Vec<Option<BlockSums>> = blocks.par_iter().enumerate().map(sums).collect();
            sums.into_iter().for_each(|sums| update.writing.note(chunk.bucket, sums));
        }
        let main: &[f32] = bytemuck::cast_slice(main);
        let pieces = rooms.into_iter().flat_map(|(local, mut room)| {
            local.clone().step_by(BLOCK).map(move |at| {
                let end = (at + BLOCK).min(local.end);
                (at..end, room.split_off(end - at))
            })
        });
        let pieces: Vec<_> = pieces.collect();
        pieces.into_par_iter().for_each(|(local, mut room)| room.write(0..local.len(), &main[local]));
        self.hand_out(chunk, main);
    }

    /// Shows the caller the new weights of a chunk, where that was asked for.
    fn hand_out(&mut self, chunk: Chunk, main: &[f32]) {
        let Out::Each(weights) = &mut self.out else { return };
        let layout = self.update.writing.layout;
        let start = layout.bucket(chunk.bucket).start + chunk.first;
        for segment in layout.segments(start..start + chunk.len) {
            if self.update.grads[segment.param].is_some() {
                weights(segment.param, segment.first, &main[segment.local]);
            }
        }
    }

    /// Updates a chunk on the processor.
    fn update_here(&mut self, chunk: Chunk, [main, avg, sq]: Sections<'_>) -> Result<(), OptimError> {
        let (accelerator, bucket) = (self.accelerator.clone(), chunk.bucket);
        let away = self.update.away(chunk, &mut self.out);
        let mut staging = accelerator.as_deref().filter(|_| !away.is_empty()).map(Accelerator::scratch);
        if let (Some(accelerator), Some(staging)) = (&accelerator, &mut staging) {
            accelerator.bring(&away.grads, staging)?;
        }
        let staged = staging.as_ref().map_or(&[][..], |staging| staging.as_slice());
        let (update, out) = (&self.update, &mut self.out);
        let layout = update.writing.layout;
        let bytes = layout.slot(bucket).moments.block_bytes();
        let start = layout.bucket(bucket).start + chunk.first;
        let sections = main.chunks_mut(BLOCK * 4).zip(avg.chunks_mut(bytes)).zip(sq.chunks_mut(bytes));
        let blocks: Vec<Block<'_, '_>> = sections
            .enumerate()
            .map(|(i, ((main, avg), sq))| {
                let first = start + i * BLOCK;
                let parts = layout.segments(first..first + main.len() / 4).filter_map(|segment| {
                    let n = segment.local.len();
                    let grad = update.grads[segment.param]?.slice(segment.first..segment.first + n);
                    let grad = match grad {
                        Gradient::Device(slice) => staged_part(staged, i * BLOCK, &segment, slice),
                        grad => grad,
                    };
                    let room = out.take(segment.param, n);
                    Some((segment, grad, room))
                });
                let parts = parts.collect();
                Block { bucket, block: chunk.first / BLOCK + i, sections: [main, avg, sq], parts }
            })
            .collect();
        let sums: Vec<Result<Option<BlockSums>, OptimError>> =
            blocks.into_par_iter().map(|block| update.block(block)).collect();
        for sums in sums {
            self.update.writing.note(bucket, sums?);
        }
        if let (Some(accelerator), Some(staging)) = (&accelerator, &mut staging) {
            away.send(accelerator, main, staging)?;
        }
        self.hand_out(chunk, bytemuck::cast_slice(main));
        Ok(())
    }
}

/// What a chunk that is updated on the processor has in device memory.
struct Away {
    /// Gradients, and where in the buffer of gradients they come.
    grads: Vec<(DeviceSlice, usize)>,
    /// Elements of the chunk, and the room for their weights.
    weights: Vec<(Range<usize>, DeviceSlice)>,
}

impl Away {
    fn is_empty(&self) -> bool {
        self.grads.is_empty() && self.weights.is_empty()
    }

    /// Puts new weights where they go: float32 from where they are, bfloat16 by way of the buffer, of which nobody needs the
    /// gradients any more.
    fn send(
        &self,
        accelerator: &Accelerator,
        main: &mut [u8],
        staging: &mut AlignedBuf,
    ) -> Result<(), OptimError> {
        let (main_at, staged_from) = (main.as_mut_ptr().expose_provenance() as u64, staging.address());
        let (main, rounded): (&[f32], _) = (bytemuck::cast_slice(main), staging.as_mut_slice());
        let mut numbers = Vec::with_capacity(self.weights.len());
        for (local, slice) in &self.weights {
            let at = staged_at(local.start);
            if slice.is_bf16() {
                let room: &mut [u16] = bytemuck::cast_slice_mut(&mut rounded[at..at + 2 * local.len()]);
                let pieces = room.par_chunks_mut(BLOCK).zip(main[local.clone()].par_chunks(BLOCK));
                pieces.for_each(|(room, main)| bf16::round_all(main, room));
                numbers.push((staged_from + at as u64, *slice));
            } else {
                numbers.push((main_at + at as u64, *slice));
            }
        }
        accelerator.send(&numbers)
    }
}

/// The gradient of a part of a block that was brought from device memory: those of a parameter begin where its first element in the
/// chunk has its place. The block's first element is number `block` of the chunk.
fn staged_part<'a>(staged: &'a [u8], block: usize, segment: &Segment, slice: DeviceSlice) -> Gradient<'a> {
    let at = block + segment.local.start;
    let parameter = at.saturating_sub(segment.first);
    let first = staged_at(parameter) + (at - parameter) * slice.size();
    let bytes = &staged[first..first + slice.len() * slice.size()];
    if slice.is_bf16() {
        Gradient::Bf16(bytemuck::cast_slice(bytes))
    } else {
        Gradient::F32(bytemuck::cast_slice(bytes))
    }
}

/// Copies bytes on all threads.
fn copy_all(from: &[u8], to: &mut [u8]) {
    const PIECE: usize = 1 << 20;
    let to = to[..from.len()].par_chunks_mut(PIECE);
    to.zip(from.par_chunks(PIECE)).for_each(|(to, from)| to.copy_from_slice(from));
}

impl<'b> Pass<'b> for UpdatePass<'b, '_, '_> {
    const READS: usize = SECTIONS.len();
    const WRITES: usize = SECTIONS.len();
    const NAME: &'static str = "update";

    fn home(&self, bucket: usize) -> &'b Home {
        self.update.writing.home(bucket)
    }

    fn written(&mut self, bucket: usize) {
        self.update.writing.bucket_written(bucket);
    }

    fn is_begun(&self, home: &Home) -> bool {
        self.on_gpu || matches!(home, Home::Hbm(_))
    }

    fn begin(
        &mut self,
        chunk: Chunk,
        home: &'b Home,
        mut buffers: Buffers,
    ) -> Result<Begun, (Buffers, OptimError)> {
        let Some(accelerator) = self.accelerator.clone() else {
            return Err((buffers, OptimError::Suspended));
        };
        let shape = self.update.writing.layout.slot(chunk.bucket);
        if let (Home::Nvme(_), [main, avg, sq, ..]) = (home, buffers.as_slice()) {
            let mut section = 0;
            let sections = [main, avg, sq].map(|buffer| {
                section += 1;
                &buffer.as_slice()[..shape.bytes(section - 1, chunk.len)]
            });
            let blocks: Vec<_> = shape.blocks_of(sections).collect();
            let check = |(i, sections): (usize, &[&[u8]; 3])| {
                self.update.writing.check(chunk.bucket, chunk.first / BLOCK + i, *sections)
            };
            if let Err(error) = blocks.par_iter().enumerate().try_for_each(check) {
                return Err((buffers, error));
            }
        }
        let parts = self.parts(chunk, buffers.last_mut());
        let in_ram = self.rooms.back().is_some_and(|rooms| !rooms.is_empty());
        let main = in_ram || matches!(self.out, Out::Each(_));
        let state = match home {
            Home::Nvme(_) => State::Buffers,
            Home::Host(memory) => State::Ram(memory.addresses(chunk)),
            Home::Hbm(there) => State::Hbm(there),
        };
        accelerator.begin((chunk, shape), state, buffers, parts, main)
    }

    fn work(&mut self, chunk: Chunk, sections: Sections<'_>) -> Result<(), OptimError> {
        if self.is_begun(self.home(chunk.bucket)) {
            self.finish(chunk, sections);
            return Ok(());
        }
        self.update_here(chunk, sections)
    }
}

impl Update<'_> {
    /// What a chunk has in device memory.
    fn away(&self, chunk: Chunk, out: &mut Out<'_, '_>) -> Away {
        let layout = self.writing.layout;
        let start = layout.bucket(chunk.bucket).start + chunk.first;
        let mut away = Away { grads: Vec::new(), weights: Vec::new() };
        for Segment { param, first, local } in layout.segments(start..start + chunk.len) {
            let Some(grad) = self.grads[param] else { continue };
            if let Some(slice) = grad.on_device() {
                away.grads.push((slice.slice(first..first + local.len()), staged_at(local.start)));
            }
            if let Some(slice) = out.take_on_device(param, local.len()) {
                away.weights.push((local, slice));
            }
        }
        away
    }

    /// Checks one block, updates it, and returns its new checksums, all while it is in the core's cache. There are none in RAM.
    fn block(
        &self,
        Block { bucket, block, sections, parts }: Block<'_, '_>,
    ) -> Result<Option<BlockSums>, OptimError> {
        let [main, avg, sq] = sections;
        self.writing.check(bucket, block, [main, avg, sq])?;
        let moments = self.writing.layout.slot(bucket).moments;
        for (Segment { param, local, .. }, grad, room) in parts {
            if let Some(rule) = &self.rules[param] {
                let block = BlockMut { moments, main: bytemuck::cast_slice_mut(main), avg, sq };
                update_block(rule, block, local, grad, room);
            }
        }
        Ok(self.writing.sums(bucket, block, [main, avg, sq]))
    }
}
