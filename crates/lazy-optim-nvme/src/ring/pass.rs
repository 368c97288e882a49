//! What is done with chunks as they come through the ring.

use std::time::Instant;

use lazy_model::{Bytes, Lane, Seconds, Span};

use super::Buffers;
use crate::OptimError;
use crate::accelerator::Begun;
use crate::home::Home;

/// A run of elements of one bucket that moves as one; it starts on a checksum block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) bucket: usize,
    /// First element, counted in the bucket.
    pub(crate) first: usize,
    /// Elements.
    pub(crate) len: usize,
}

/// Main weights, first and second moments, in their formats.
pub(crate) type Sections<'a> = [&'a mut [u8]; 3];

/// What is done with the chunks of a bucket.
pub(crate) enum Entry {
    /// They are worked on.
    Work,
    /// Nothing: it stays as it is.
    Leave,
    /// The trip ends here.
    Stop,
}

/// What a trip through the ring does to each chunk.
pub(crate) trait Pass<'b> {
    /// Sections read, from `main` on.
    const READS: usize;
    /// Sections written, from `main` on.
    const WRITES: usize;
    /// What the arithmetic is called in traces.
    const NAME: &'static str;

    /// Where a bucket is: read from its live slot, written to its next one, or worked on where it lies.
    fn home(&self, bucket: usize) -> &'b Home;
    /// Asked before each chunk of a bucket is worked on; may wait for something.
    fn enter(&mut self, _bucket: usize) -> Result<Entry, OptimError> {
        Ok(Entry::Work)
    }
    /// Whether the chunks of a bucket go through [`begin`](Pass::begin).
    fn is_begun(&self, _home: &Home) -> bool {
        false
    }
    /// Starts the work on a chunk on the GPU. `buffers` are a set of the ring's: the sections of a chunk from NVMe, else room; none
    /// for a bucket that is one chunk. [`work`](Pass::work) follows when it is done, in the order of the chunks.
    fn begin(
        &mut self,
        _chunk: Chunk,
        _home: &'b Home,
        buffers: Buffers,
    ) -> Result<Begun, (Buffers, OptimError)> {
        Err((buffers, OptimError::Suspended))
    }
    /// Works on a chunk's three sections, the bytes of `chunk.len` elements each; sections not read hold anything. Of what is at home
    /// in HBM and was begun, there is none but the main weights, and none for a bucket that is one chunk.
    fn work(&mut self, chunk: Chunk, sections: Sections<'_>) -> Result<(), OptimError>;
    /// All of a bucket's chunks are written.
    fn written(&mut self, _bucket: usize) {}
}

/// The account of one or more trips.
pub(crate) struct Log {
    origin: Instant,
    pub(crate) read: Bytes,
    pub(crate) written: Bytes,
    pub(crate) spans: Vec<Span>,
}

impl Log {
    pub(crate) fn new(origin: Instant) -> Self {
        Log { origin, read: Bytes::ZERO, written: Bytes::ZERO, spans: Vec::new() }
    }

    /// A time, counted from the zero of the spans'; negative where it is before.
    pub(crate) fn since(&self, t: Instant) -> Seconds {
        let later = t.saturating_duration_since(self.origin).as_secs_f64();
        Seconds(later - self.origin.saturating_duration_since(t).as_secs_f64())
    }

    /// Records work on the lane that did it: arithmetic on the optimizer's, transfers on the drive's.
    pub(crate) fn span(&mut self, lane: Lane, name: String, start: Instant, end: Instant, bytes: Bytes) {
        let [start, end] = [start, end].map(|t| Seconds(self.since(t).0.max(0.0)));
        self.spans.push(Span { name: name.into(), lane, start, end, bytes, blocked_on: None });
    }
}
