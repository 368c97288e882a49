//! The pipeline: a bounded ring of aligned buffers through which chunks are read, worked on and written.

use std::sync::Arc;

use lazy_model::Bytes;
use lazy_store::durable::AlignedBuf;

use crate::accelerator::Accelerator;
use crate::layout::Layout;
use crate::measure;
use crate::{AdamOptions, OptimError, UpdateChoice, UpdateOn};

mod pass;
mod size;
mod trip;

pub(crate) use pass::{Chunk, Entry, Log, Pass, Sections};
pub(crate) use size::RingSize;

/// Longest single read or write, well under the 0x7fff_f000 bytes that Linux moves at most in one call.
const MAX_TRANSFER: u64 = 1 << 30;
const _: () = assert!(MAX_TRANSFER < 0x7fff_f000);

/// Of the sections of a chunk, and beside a GPU of its gradients.
pub(crate) type Buffers = Vec<AlignedBuf>;

/// The buffers, reused by every trip.
pub(crate) struct Ring {
    free: Vec<Buffers>,
    size: RingSize,
    /// Chunks read ahead of the one being worked on.
    ahead: usize,
    accelerator: Option<Arc<Accelerator>>,
    choice: UpdateChoice,
}

impl Ring {
    pub(crate) fn new(layout: &Layout, options: &AdamOptions) -> Result<Self, OptimError> {
        if options.depth == 0 {
            return Err(OptimError::Option { what: "depth is 0; give at least 1".into() });
        }
        if options.chunk_bytes.0 > MAX_TRANSFER {
            let (asked, most) = (options.chunk_bytes, Bytes(MAX_TRANSFER));
            return Err(OptimError::Option { what: format!("chunk_bytes is {asked}; give at most {most}") });
        }
        // Half of what the chunk under work leaves goes to reads, the rest to writes.
        let (size, ahead) = (RingSize::new(layout, options), options.depth / 2);
        let choice = UpdateChoice { on: options.update, measured: None };
        let mut ring = Ring { free: Vec::new(), size, ahead, accelerator: None, choice };
        ring.take_again()?;
        if options.update == UpdateOn::Auto {
            ring.choice = measure::choose(&mut ring, layout)?;
        }
        Ok(ring)
    }

    /// Takes the memory of the buffers, and of a GPU.
    pub(crate) fn take_again(&mut self) -> Result<(), OptimError> {
        if let (None, Some(needs)) = (&self.accelerator, &self.size.needs) {
            self.accelerator = Some(Arc::new(Accelerator::open(needs)?));
        }
        while self.free.len() < self.size.sets {
            let mut set = Buffers::with_capacity(self.size.lengths.len());
            for bytes in self.size.lengths {
                let mut buffer = AlignedBuf::zeroed(bytes)?;
                self.accelerator().map_or(Ok(()), |accelerator| accelerator.pin(&mut buffer))?;
                set.push(buffer);
            }
            self.free.push(set);
        }
        Ok(())
    }

    /// Gives the memory of the buffers and of the GPU back.
    pub(crate) fn give_up(&mut self) {
        self.free = Vec::new();
        self.accelerator = None;
    }

    /// Memory that is taken.
    #[cfg(test)]
    pub(crate) fn taken(&self) -> Bytes {
        let scratch = self.accelerator().map_or(0, |accelerator| accelerator.scratch().len());
        Bytes((self.free.iter().flatten().map(AlignedBuf::len).sum::<usize>() + scratch) as u64)
    }

    /// Whether there is no memory to work in.
    pub(crate) fn is_given_up(&self) -> bool {
        self.free.is_empty()
    }

    /// The GPU, where there is one.
    pub(crate) fn accelerator(&self) -> Option<&Accelerator> {
        self.accelerator.as_deref()
    }

    /// Whether chunks of buckets at home in RAM and on NVMe are updated on the GPU.
    pub(crate) fn updates_on_gpu(&self) -> bool {
        self.accelerator.is_some() && self.choice.on == UpdateOn::Cuda
    }

    /// Where they are updated, and why.
    pub(crate) fn choice(&self) -> UpdateChoice {
        self.choice
    }

    /// The same, to be kept.
    pub(crate) fn shared_accelerator(&self) -> Option<Arc<Accelerator>> {
        self.accelerator.clone()
    }

    /// The chunks of the given buckets, in order.
    pub(crate) fn chunks<'a>(
        &self,
        layout: &'a Layout,
        buckets: &'a [usize],
    ) -> impl Iterator<Item = Chunk> + use<'a> {
        self.chunks_or_whole(layout, buckets, |_| false)
    }

    /// The same, but for some buckets that are one chunk, which takes no buffers.
    pub(crate) fn chunks_or_whole<'a, W: Fn(usize) -> bool + 'a>(
        &self,
        layout: &'a Layout,
        buckets: &'a [usize],
        is_whole: W,
    ) -> impl Iterator<Item = Chunk> + use<'a, W> {
        let cut = self.size.cut;
        buckets.iter().flat_map(move |&bucket| {
            let slot = layout.slot(bucket);
            let step = if is_whole(bucket) { slot.elements.max(1) } else { cut.chunk(slot.moments) };
            (0..slot.elements).step_by(step).map(move |first| Chunk {
                bucket,
                first,
                len: step.min(slot.elements - first),
            })
        })
    }

    /// Whether a set of buffers holds a chunk.
    fn holds(&self, layout: &Layout, chunk: Chunk) -> bool {
        layout.slot(chunk.bucket).padded(0, chunk.len) <= self.size.lengths[0]
    }

    /// Lends a set of buffers; [`give_back`](Ring::give_back) takes it.
    pub(crate) fn lend(&mut self) -> Option<Buffers> {
        self.free.pop()
    }

    /// Takes buffers back, unless their transfer lost one.
    pub(crate) fn give_back(&mut self, mut buffers: Buffers) {
        let lengths = self.size.lengths.map(|bytes| bytes.0 as usize);
        buffers.iter_mut().zip(lengths).for_each(|(buffer, length)| buffer.set_len(length));
        if buffers.iter().map(AlignedBuf::len).eq(lengths) {
            self.free.push(buffers);
        }
    }
}
