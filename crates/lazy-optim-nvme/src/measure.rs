//! Where chunks are updated in less time: each way is tried.

use std::collections::VecDeque;
use std::time::Instant;

use lazy_model::Seconds;
use rayon::prelude::*;

use crate::accelerator::{Accelerator, Begun, CHUNKS, GradAt, Part, State};
use crate::adam::{BlockMut, Gradient, Rule, update_block};
use crate::bf16;
use crate::device::DeviceSlice;
use crate::layout::Layout;
use crate::ring::{Buffers, Chunk, Ring};
use crate::slot::{BLOCK, Identity, SlotShape};
use crate::{GroupOptions, OptimError, UpdateChoice, UpdateCosts, UpdateOn};

/// Chunks that are timed; as many go before them.
const TIMED: usize = 2 * CHUNKS;

/// Takes the faster way for chunks of the ring; the processor without a GPU.
pub(crate) fn choose(ring: &mut Ring, layout: &Layout) -> Result<UpdateChoice, OptimError> {
    let cpu = UpdateChoice { on: UpdateOn::Cpu, measured: None };
    let Some(accelerator) = ring.shared_accelerator() else { return Ok(cpu) };
    let first = if layout.bucket_count() > 0 { &[0][..] } else { &[] };
    let Some(chunk) = ring.chunks(layout, first).next() else { return Ok(cpu) };
    let Some([grads, weights]) = accelerator.spare()? else { return Ok(cpu) };
    let trial = Trial {
        accelerator: &accelerator,
        chunk,
        shape: layout.slot(chunk.bucket),
        rule: Rule::new(&GroupOptions::default(), 1, 1.0, 1.0),
        grads: grads.slice(0..chunk.len),
        weights: weights.slice(0..chunk.len),
    };
    let mut sets = Vec::new();
    while let Some(mut set) = ring.lend() {
        // What they hold is no number that arithmetic is slow with.
        set.iter_mut().for_each(|buffer| buffer.as_mut_slice().fill(0));
        sets.push(set);
    }
    let measured = trial.measure(&mut sets);
    sets.into_iter().for_each(|set| ring.give_back(set));
    let measured = measured?;
    let on = if measured.cuda < measured.cpu { UpdateOn::Cuda } else { UpdateOn::Cpu };
    Ok(UpdateChoice { on, measured: Some(measured) })
}

/// Chunks that are updated again and again.
struct Trial<'a> {
    accelerator: &'a Accelerator,
    chunk: Chunk,
    shape: SlotShape,
    rule: Rule,
    grads: DeviceSlice,
    weights: DeviceSlice,
}

impl Trial<'_> {
    fn measure(&self, sets: &mut Vec<Buffers>) -> Result<UpdateCosts, OptimError> {
        let timed = |run: &mut dyn FnMut() -> Result<(), OptimError>| {
            run()?;
            let started = Instant::now();
            run()?;
            Ok::<_, OptimError>(Seconds(started.elapsed().as_secs_f64() / TIMED as f64))
        };
        let cuda = timed(&mut || self.on_gpu(sets))?;
        let cpu = timed(&mut || self.here(sets))?;
        Ok(UpdateCosts { cpu, cuda })
    }

    /// As a step does it to chunks at home on NVMe: checked here, updated there, sealed here.
    fn on_gpu(&self, sets: &mut Vec<Buffers>) -> Result<(), OptimError> {
        let (mut begun, before): (VecDeque<Begun>, _) = (VecDeque::new(), self.accelerator.failures());
        for i in 0..TIMED + CHUNKS {
            if let Some(done) = begun.pop_front_if(|_| i >= CHUNKS) {
                let mut set = done.land();
                self.sums(&mut set);
                sets.push(set);
                self.accelerator.check(before)?;
            }
            if let Some(mut set) = (i < TIMED).then(|| sets.pop()).flatten() {
                self.sums(&mut set);
                let (local, grad) = (0..self.chunk.len, GradAt::Device(self.grads));
                let parts = vec![Part { rule: self.rule, local, grad, weights: Some(self.weights) }];
                let state = (self.chunk, self.shape);
                match self.accelerator.begin(state, State::Buffers, set, parts, false) {
                    Ok(under_way) => begun.push_back(under_way),
                    Err((set, error)) => {
                        sets.push(set);
                        return Err(error);
                    }
                }
            }
        }
        Ok(())
    }

    fn sections<'a>(&self, set: &'a mut Buffers) -> impl IndexedParallelIterator<Item = [&'a mut [u8]; 3]> {
        let mut section = 0;
        let [main, avg, sq] = match set.as_mut_slice() {
            [main, avg, sq, ..] => [main, avg, sq].map(|buffer| {
                section += 1;
                &mut buffer.as_mut_slice()[..self.shape.bytes(section - 1, self.chunk.len)]
            }),
            _ => [(); 3].map(|()| &mut [][..]),
        };
        let bytes = self.shape.moments.block_bytes();
        let blocks =
            main.par_chunks_mut(BLOCK * 4).zip(avg.par_chunks_mut(bytes)).zip(sq.par_chunks_mut(bytes));
        blocks.map(|((main, avg), sq)| [main, avg, sq])
    }

    fn identity(&self) -> Identity {
        Identity { id: [0; 16], bucket: self.chunk.bucket, generation: 0 }
    }

    fn sums(&self, set: &mut Buffers) {
        let identity = self.identity();
        let sums =
            self.sections(set).enumerate().map(|(i, sections)| identity.sums(i, sections.map(|s| &*s)));
        std::hint::black_box(sums.collect::<Vec<_>>());
    }

    /// Gradients are fetched; blocks are checked, updated and sealed; weights are rounded and sent.
    fn here(&self, sets: &mut [Buffers]) -> Result<(), OptimError> {
        let Some(set) = sets.first_mut() else { return Ok(()) };
        let identity = self.identity();
        for _ in 0..TIMED {
            let mut staging = self.accelerator.scratch();
            self.accelerator.bring(&[(self.grads, 0)], &mut staging)?;
            let grads: &[f32] = bytemuck::cast_slice(&staging.as_slice()[..4 * self.chunk.len]);
            let update = |(i, ([main, avg, sq], grad)): (usize, ([&mut [u8]; 3], &[f32]))| {
                let before = identity.sums(i, [&*main, &*avg, &*sq]);
                let block =
                    BlockMut { moments: self.shape.moments, main: bytemuck::cast_slice_mut(main), avg, sq };
                update_block(&self.rule, block, 0..grad.len(), Gradient::F32(grad), None);
                [before, identity.sums(i, [&*main, &*avg, &*sq])]
            };
            let sums = self.sections(set).zip(grads.par_chunks(BLOCK)).enumerate().map(update);
            std::hint::black_box(sums.collect::<Vec<_>>());
            let room: &mut [u16] =
                bytemuck::cast_slice_mut(&mut staging.as_mut_slice()[..2 * self.chunk.len]);
            let rounded = room.par_chunks_mut(BLOCK).zip(self.sections(set));
            rounded.for_each(|(room, [main, ..])| bf16::round_all(bytemuck::cast_slice(main), room));
            self.accelerator.send(&[(staging.address(), self.weights)])?;
        }
        Ok(())
    }
}
