//! The update as a trip through the ring: on the processor, or begun on the GPU and finished here.

use std::ops::Range;
use std::sync::Arc;

use lazy_store::durable::AlignedBuf;
use rayon::prelude::*;

use crate::accelerator::{Accelerator, Begun, GradAt, Part, State, staged_at};
use crate::adam::{BlockMut, Gradient, Rule, WeightsOut, update_block};
use crate::device::DeviceSlice;
use crate::gradients::Asking;
use crate::home::Home;
use crate::layout::{Layout, Segment};
use crate::out::{Out, Rooms};
use crate::ring::{Buffers, Chunk, Entry, Pass, Ring, Sections};
use crate::slot::{BLOCK, BlockSums, SECTIONS};
use crate::step::{check_grad, norm_parts};
use crate::transaction::{Writing, Written};
use crate::{OptimError, StepInput, bf16, norm};

/// What makes the rules of a step.
pub(crate) struct Constants<'b> {
    pub(crate) layout: &'b Layout,
    /// Steps taken, by parameter.
    pub(crate) counts: &'b [u64],
    pub(crate) input: &'b StepInput<'b>,
    /// The clip coefficient.
    pub(crate) clip: f64,
}

impl Constants<'_> {
    fn rule(&self, param: usize) -> Rule {
        let group = &self.input.groups[self.layout.params()[param].group];
        Rule::new(group, self.counts[param] + 1, self.input.scale, self.clip)
    }
}

/// The update of one step.
struct Update<'b, 'g> {
    writing: Writing<'b>,
    /// By parameter.
    grads: Vec<Option<Gradient<'g>>>,
    /// The same; `None` where there is no gradient, or none yet.
    rules: Vec<Option<Rule>>,
}

impl<'g> Update<'_, 'g> {
    fn grad(&self, param: usize) -> Option<Gradient<'g>> {
        self.grads[param]
    }

    /// The parts of a chunk that belong to parameters with a gradient.
    fn moving(&self, chunk: Chunk) -> impl Iterator<Item = Segment> {
        let layout = self.writing.layout;
        let start = layout.bucket(chunk.bucket).start + chunk.first;
        layout.segments(start..start + chunk.len).filter(|segment| self.grad(segment.param).is_some())
    }
}

/// A block on its way, and what is to be done to it.
struct Block<'a, 'w> {
    bucket: usize,
    block: usize,
    sections: Sections<'a>,
    /// The parts of parameters with a gradient, the gradient, and where their weights go.
    parts: Vec<(Segment, Gradient<'a>, Option<WeightsOut<'w>>)>,
}

/// The update as a trip through the ring.
pub(crate) struct UpdatePass<'b, 'a, 'g, 'w> {
    update: Update<'b, 'g>,
    asking: Asking<'a, 'g>,
    constants: Constants<'b>,
    out: Out<'a, 'w>,
    /// Elements of each parameter whose weights were handed out.
    handed: Vec<usize>,
    /// Parameters of which weights may have been written, also by what the GPU was still at when the pass ended.
    changed: Vec<bool>,
    /// Parameters whose weights are all there, while it is not known whether they stay.
    unsure: Vec<usize>,
    accelerator: Option<Arc<Accelerator>>,
    /// Chunks of RAM and NVMe are updated on the GPU.
    on_gpu: bool,
}

/// What a pass leaves, besides what it wrote.
pub(crate) struct Left<'a, 'g, 'w> {
    pub(crate) grads: Vec<Option<Gradient<'g>>>,
    pub(crate) asking: Asking<'a, 'g>,
    pub(crate) out: Out<'a, 'w>,
    /// Parameters whose weights may be newer than the state.
    pub(crate) changed: Vec<bool>,
}

impl<'b, 'a, 'g, 'w> UpdatePass<'b, 'a, 'g, 'w> {
    pub(crate) fn new(
        writing: Writing<'b>,
        constants: Constants<'b>,
        (grads, asking): (Vec<Option<Gradient<'g>>>, Asking<'a, 'g>),
        out: Out<'a, 'w>,
        ring: &Ring,
    ) -> Self {
        let (accelerator, on_gpu) = (ring.shared_accelerator(), ring.updates_on_gpu());
        let rules = grads.iter().enumerate().map(|(param, grad)| grad.map(|_| constants.rule(param)));
        let (rules, unsure) = (rules.collect(), Vec::new());
        let (handed, changed) = (vec![0; grads.len()], vec![false; grads.len()]);
        let update = Update { writing, grads, rules };
        UpdatePass { update, asking, constants, out, handed, changed, unsure, accelerator, on_gpu }
    }

    pub(crate) fn end(self) -> (Written, Left<'a, 'g, 'w>) {
        let UpdatePass { update: Update { writing, grads, .. }, asking, out, changed, .. } = self;
        (writing.end(), Left { grads, asking, out, changed })
    }

    /// Waits for the gradient of a parameter, if it was not asked for yet. `false` where it is not finite.
    fn ask(&mut self, param: usize) -> Result<bool, OptimError> {
        let Constants { layout, input, .. } = self.constants;
        let grad = match self.asking.ask(param) {
            Some(Ok(Some(grad))) => grad,
            Some(Err(source)) => return Err(no_gradient(layout, param, source)),
            Some(Ok(None)) | None => return Ok(true),
        };
        let accelerator = self.accelerator.as_deref();
        check_grad(layout, accelerator.is_some(), param, grad)?;
        if let (Some(accelerator), Some(stream), Some(_)) = (accelerator, input.stream, grad.on_device()) {
            accelerator.wait_for(stream)?;
        }
        if input.grad_norm.is_none() {
            let parts = norm_parts(layout, accelerator, std::iter::once((param, grad)), input.scale)?;
            let finite = norm::combine_norm(parts.iter().copied()).is_finite();
            self.asking.parts.extend(parts);
            if !finite {
                self.asking.stopped = Some(param);
                return Ok(false);
            }
        }
        self.update.grads[param] = Some(grad);
        self.update.rules[param] = Some(self.constants.rule(param));
        Ok(true)
    }

    /// Asks for the gradients of parameters without elements, which are in no bucket. An error where one was not finite.
    pub(crate) fn end_asking(&mut self) -> Result<(), OptimError> {
        let layout = self.update.writing.layout;
        for param in (0..layout.params().len()).rev() {
            if self.asking.stopped.is_none() {
                self.ask(param)?;
            }
        }
        if let Some(param) = self.asking.stopped {
            return Err(no_gradient(layout, param, "it is not finite".into()));
        }
        self.settle();
        for param in (0..layout.params().len()).filter(|param| layout.elements(*param) == 0) {
            if self.update.grad(param).is_some() {
                self.out.give_back(param);
            }
        }
        Ok(())
    }

    /// Gives the rooms back that are full, once it is known that the step is not skipped.
    fn settle(&mut self) {
        if self.asking.is_over() {
            self.unsure.drain(..).for_each(|param| self.out.give_back(param));
        }
    }

    /// Whether a bucket is at home on the GPU with all that its update reads and writes: it needs not be cut.
    pub(crate) fn is_whole(&self, bucket: usize) -> bool {
        let layout = self.update.writing.layout;
        let mut moving =
            layout.segments(layout.bucket(bucket)).filter(|s| self.update.grad(s.param).is_some());
        matches!(self.update.writing.home(bucket), Home::Hbm(_))
            && moving.all(|Segment { param, .. }| {
                matches!(self.update.grad(param), Some(Gradient::Device(_))) && !self.out.needs_ram(param)
            })
    }

    /// The parts of a chunk that have a gradient, those in RAM brought into `grads`.
    fn parts(&self, chunk: Chunk, grads: Option<&mut AlignedBuf>) -> Vec<Part> {
        let staging = grads.map_or(&mut [][..], AlignedBuf::as_mut_slice);
        let mut parts = Vec::new();
        for Segment { param, first, local } in self.update.moving(chunk) {
            let (Some(grad), Some(rule)) = (self.update.grad(param), self.update.rules[param]) else {
                continue;
            };
            let range = first..first + local.len();
            let grad = grad.slice(range.clone());
            match grad {
                Gradient::F32(grad) => {
                    copy_all(bytemuck::cast_slice(grad), &mut staging[staged_at(local.start)..])
                }
                Gradient::Bf16(grad) => {
                    copy_all(bytemuck::cast_slice(grad), &mut staging[staged_at(local.start)..])
                }
                Gradient::Device(_) => {}
            }
            let weights = self.out.on_device(param, range);
            parts.push(Part { rule, local, grad: GradAt::of(grad), weights });
        }
        parts
    }

    /// What is left to do to a chunk that the GPU has updated: checksums of what goes to NVMe, and weights that go into RAM.
    fn finish(&mut self, chunk: Chunk, [main, avg, sq]: Sections<'_>) {
        let layout = self.update.writing.layout;
        let update = &mut self.update;
        if matches!(update.writing.home(chunk.bucket), Home::Nvme(_)) {
            let blocks: Vec<_> = layout.slot(chunk.bucket).blocks_of([&*main, &*avg, &*sq]).collect();
            let first = chunk.first / BLOCK;
            let sums =
                |(i, sections): (usize, &[&[u8]; 3])| update.writing.sums(chunk.bucket, first + i, *sections);
            let sums: Vec<Option<BlockSums>> = blocks.par_iter().enumerate().map(sums).collect();
            sums.into_iter().for_each(|sums| update.writing.note(chunk.bucket, sums));
        }
        // There are none of a bucket that is one chunk.
        let main: &[f32] = if main.is_empty() { &[] } else { bytemuck::cast_slice(main) };
        let mut rooms = self.out.rooms(self.update.moving(chunk));
        let mut pieces = Vec::new();
        for Segment { param, local, .. } in self.update.moving(chunk) {
            for at in local.clone().step_by(BLOCK) {
                let end = (at + BLOCK).min(local.end);
                pieces.extend(rooms.take(param, end - at).map(|room| (at..end, room)));
            }
        }
        pieces.into_par_iter().for_each(|(local, mut room)| room.write(0..local.len(), &main[local]));
        self.hand_out(chunk, main);
    }

    /// The new weights of a chunk are there: shows them to the caller, or gives the rooms back that are full.
    fn hand_out(&mut self, chunk: Chunk, main: &[f32]) {
        for Segment { param, first, local } in self.update.moving(chunk) {
            self.handed[param] += local.len();
            self.changed[param] = true;
            match &mut self.out {
                Out::Each(weights) => weights(param, first, &main[local]),
                Out::Into(..) if self.handed[param] == self.constants.layout.elements(param) => {
                    self.unsure.push(param);
                }
                Out::Into(..) => {}
            }
        }
        self.settle();
    }

    /// Updates a chunk on the processor.
    fn update_here(&mut self, chunk: Chunk, [main, avg, sq]: Sections<'_>) -> Result<(), OptimError> {
        let (accelerator, bucket) = (self.accelerator.clone(), chunk.bucket);
        let away = self.update.away(chunk, &self.out);
        let mut staging = accelerator.as_deref().filter(|_| !away.is_empty()).map(Accelerator::scratch);
        if let (Some(accelerator), Some(staging)) = (&accelerator, &mut staging) {
            accelerator.bring(&away.grads, staging)?;
        }
        let staged = staging.as_ref().map_or(&[][..], |staging| staging.as_slice());
        let update = &self.update;
        let mut rooms: Rooms<'_> = self.out.rooms(update.moving(chunk));
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
                    let grad = update.grad(segment.param)?.slice(segment.first..segment.first + n);
                    let grad = match grad {
                        Gradient::Device(slice) => staged_part(staged, i * BLOCK, &segment, slice),
                        grad => grad,
                    };
                    let room = rooms.take(segment.param, n);
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

fn no_gradient(layout: &Layout, param: usize, source: lazy_store::BoxError) -> OptimError {
    OptimError::NoGradient { name: layout.params()[param].name.clone(), source }
}

/// What a chunk that is updated on the processor has in device memory.
#[derive(Default)]
pub(crate) struct Away {
    /// Gradients, and where in the buffer of gradients they come.
    pub(crate) grads: Vec<(DeviceSlice, usize)>,
    /// Elements of the chunk, and the room for their weights.
    pub(crate) weights: Vec<(Range<usize>, DeviceSlice)>,
}

impl Away {
    fn is_empty(&self) -> bool {
        self.grads.is_empty() && self.weights.is_empty()
    }

    /// Puts new weights where they go: float32 from where they are, bfloat16 by way of the buffer, of which nobody needs the
    /// gradients any more.
    pub(crate) fn send(
        &self,
        accelerator: &Accelerator,
        main: &[u8],
        staging: &mut AlignedBuf,
    ) -> Result<(), OptimError> {
        let (main_at, staged_from) = (main.as_ptr().expose_provenance() as u64, staging.address());
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

impl<'b> Pass<'b> for UpdatePass<'b, '_, '_, '_> {
    const READS: usize = SECTIONS.len();
    const WRITES: usize = SECTIONS.len();
    const NAME: &'static str = "update";

    fn home(&self, bucket: usize) -> &'b Home {
        self.update.writing.home(bucket)
    }

    fn written(&mut self, bucket: usize) {
        self.update.writing.bucket_written(bucket);
    }

    fn enter(&mut self, bucket: usize) -> Result<Entry, OptimError> {
        if !self.asking.is_needed() {
            return Ok(Entry::Work);
        }
        let layout = self.update.writing.layout;
        let params: Vec<usize> = layout.segments(layout.bucket(bucket)).map(|s| s.param).collect();
        for param in params.iter().rev() {
            if !self.ask(*param)? {
                return Ok(Entry::Stop);
            }
        }
        self.settle();
        let moving = params.into_iter().any(|param| self.update.grad(param).is_some());
        Ok(if moving { Entry::Work } else { Entry::Leave })
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
        let state = match home {
            Home::Nvme(_) => State::Buffers,
            Home::Host(memory) => State::Ram(memory.addresses(chunk)),
            Home::Hbm(there) => State::Hbm(there),
            Home::Out(_) => return Err((buffers, OptimError::Suspended)),
        };
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
        let main = self.update.moving(chunk).any(|segment| self.out.needs_ram(segment.param));
        for Segment { param, .. } in self.update.moving(chunk) {
            self.changed[param] |= self.out.wants(param) && !self.out.needs_ram(param);
        }
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

impl Update<'_, '_> {
    /// What a chunk has in device memory.
    fn away(&self, chunk: Chunk, out: &Out<'_, '_>) -> Away {
        let mut away = Away::default();
        for Segment { param, first, local } in self.moving(chunk) {
            let range = first..first + local.len();
            if let Some(slice) = self.grad(param).and_then(Gradient::on_device) {
                away.grads.push((slice.slice(range.clone()), staged_at(local.start)));
            }
            if let Some(slice) = out.on_device(param, range) {
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
