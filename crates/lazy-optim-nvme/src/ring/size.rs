//! What a ring takes, and how it cuts buckets.

use lazy_model::Bytes;

use crate::accelerator::{self, Needs};
use crate::home::Homes;
use crate::layout::Layout;
use crate::slot::BLOCK;
use crate::{AdamOptions, Moments};

/// What a ring takes.
pub(crate) struct RingSize {
    pub(super) cut: Cut,
    /// Sets of buffers, while the ring has its memory.
    pub(super) sets: usize,
    /// Bytes of each buffer of a set.
    pub(super) lengths: [Bytes; 4],
    /// Of a GPU, where there is one.
    pub(super) needs: Option<Needs>,
}

impl RingSize {
    pub(crate) fn new(layout: &Layout, options: &AdamOptions) -> Self {
        let cut = Cut::new(options);
        let [main, avg, sq] = cut.buffers(layout);
        let needs = Needs::new(layout, options, [main, avg, sq], Homes::new(layout, options).hbm);
        // The one on the GPU that its other chunks are beside is counted in the depth.
        let beside = needs.as_ref().map_or(0, |_| accelerator::CHUNKS - 1);
        let grads = needs.as_ref().map_or(Bytes::ZERO, |_| main);
        RingSize { cut, sets: options.depth + beside, lengths: [main, avg, sq, grads], needs }
    }

    /// Bytes of RAM.
    pub(crate) fn bytes(&self) -> Bytes {
        let scratch = self.needs.as_ref().map_or(Bytes::ZERO, Needs::scratch_bytes);
        self.lengths.into_iter().sum::<Bytes>() * self.sets as u64 + scratch
    }

    /// Bytes of a GPU's memory.
    pub(crate) fn device_bytes(&self) -> Bytes {
        self.needs.as_ref().map_or(Bytes::ZERO, Needs::device_bytes)
    }
}

/// How buckets are cut into chunks.
#[derive(Clone, Copy)]
pub(super) struct Cut {
    /// Whole checksum blocks, no more than a bucket needs.
    elements: usize,
}

impl Cut {
    fn new(options: &AdamOptions) -> Self {
        let asked = usize::try_from(options.chunk_bytes.0 / 4).unwrap_or(usize::MAX);
        Cut { elements: asked.min(options.bucket_elements).div_ceil(BLOCK).max(1) * BLOCK }
    }

    /// Elements of the chunks of a bucket.
    pub(super) fn chunk(self, moments: Moments) -> usize {
        self.elements.next_multiple_of(moments.blocks_in_pages() * BLOCK)
    }

    /// Bytes of the buffers that hold a chunk of any bucket, by section.
    fn buffers(self, layout: &Layout) -> [Bytes; 3] {
        [0, 1, 2].map(|section| {
            let longest =
                layout.slots().map(|slot| slot.padded(section, self.chunk(slot.moments).min(slot.elements)));
            longest.max().unwrap_or(Bytes::ZERO)
        })
    }
}
