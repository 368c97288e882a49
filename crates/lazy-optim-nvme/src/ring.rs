//! The pipeline: a bounded ring of aligned buffers through which chunks are read, worked on and written.

use std::collections::VecDeque;
use std::time::Instant;

use lazy_model::{Bytes, Lane, Seconds, Span};

use crate::home::{Home, Slots};
use crate::layout::Layout;
use crate::slot::{BLOCK, SECTIONS};
use crate::{AdamOptions, Moments, OptimError};
use lazy_store::StoreError;
use lazy_store::durable::{AlignedBuf, Pending};

/// Longest single read or write, well under the 0x7fff_f000 bytes that Linux moves at most in one call.
const MAX_TRANSFER: u64 = 1 << 30;
const _: () = assert!(MAX_TRANSFER < 0x7fff_f000);

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
    /// Works on a chunk's three sections, the bytes of `chunk.len` elements each; sections not read hold anything.
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

    /// Records work on the lane that did it: arithmetic on the optimizer's, transfers on the drive's.
    pub(crate) fn span(&mut self, lane: Lane, name: String, start: Instant, end: Instant, bytes: Bytes) {
        let since = |t: Instant| Seconds(t.saturating_duration_since(self.origin).as_secs_f64());
        let (start, end) = (since(start), since(end));
        self.spans.push(Span { name: name.into(), lane, start, end, bytes, blocked_on: None });
    }
}

type Buffers = Vec<AlignedBuf>;

/// A chunk on its way in or out, buffers included.
struct Flight {
    chunk: Chunk,
    moving: Vec<Pending>,
    resting: Buffers,
    bytes: Bytes,
}

impl Flight {
    /// Waits for every transfer, whatever the first says: a buffer is its transfer's until then. Gives the buffers, and
    /// when the first transfer began and the last ended, where there was any.
    fn land(self) -> (Buffers, Result<Option<(Instant, Instant)>, StoreError>) {
        let mut result = Ok(());
        let mut times: Option<(Instant, Instant)> = None;
        let mut buffers = Vec::with_capacity(SECTIONS.len());
        for pending in self.moving {
            let (buffer, outcome, start, end) = pending.wait_timed();
            buffers.push(buffer);
            result = result.and(outcome);
            times = Some(times.map_or((start, end), |(s, e)| (s.min(start), e.max(end))));
        }
        buffers.extend(self.resting);
        (buffers, result.map(|()| times))
    }
}

/// The buffers, reused by every trip.
pub(crate) struct Ring {
    free: Vec<Buffers>,
    /// Sets of buffers, while the ring has its memory.
    depth: usize,
    /// Bytes of each buffer of a set.
    lengths: [usize; 3],
    cut: Cut,
    /// Chunks read ahead of the one being worked on.
    ahead: usize,
}

/// How buckets are cut into chunks.
#[derive(Clone, Copy)]
struct Cut {
    /// Whole checksum blocks, no more than a bucket needs.
    elements: usize,
}

impl Cut {
    fn new(options: &AdamOptions) -> Self {
        let asked = usize::try_from(options.chunk_bytes.0 / 4).unwrap_or(usize::MAX);
        Cut { elements: asked.min(options.bucket_elements).div_ceil(BLOCK).max(1) * BLOCK }
    }

    /// Elements of the chunks of a bucket.
    fn chunk(self, moments: Moments) -> usize {
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

impl Ring {
    pub(crate) fn new(layout: &Layout, options: &AdamOptions) -> Result<Self, OptimError> {
        if options.depth == 0 {
            return Err(OptimError::Option { what: "depth is 0; give at least 1".into() });
        }
        if options.chunk_bytes.0 > MAX_TRANSFER {
            let (asked, most) = (options.chunk_bytes, Bytes(MAX_TRANSFER));
            return Err(OptimError::Option { what: format!("chunk_bytes is {asked}; give at most {most}") });
        }
        let cut = Cut::new(options);
        let lengths = cut.buffers(layout).map(|bytes| bytes.0 as usize);
        // Half of what the chunk under work leaves goes to reads, the rest to writes.
        let (depth, ahead) = (options.depth, options.depth / 2);
        let mut ring = Ring { free: Vec::new(), depth, lengths, cut, ahead };
        ring.take_again()?;
        Ok(ring)
    }

    /// Takes the memory of the buffers.
    pub(crate) fn take_again(&mut self) -> Result<(), OptimError> {
        while self.free.len() < self.depth {
            let set = self.lengths.map(|bytes| AlignedBuf::zeroed(Bytes(bytes as u64)));
            self.free.push(set.into_iter().collect::<Result<_, _>>()?);
        }
        Ok(())
    }

    /// Gives the memory of the buffers back.
    pub(crate) fn give_up(&mut self) {
        self.free = Vec::new();
    }

    /// Whether there is no memory to work in.
    pub(crate) fn is_given_up(&self) -> bool {
        self.free.is_empty()
    }

    /// The chunks of the given buckets, in order.
    pub(crate) fn chunks<'a>(
        &self,
        layout: &'a Layout,
        buckets: &'a [usize],
    ) -> impl Iterator<Item = Chunk> + use<'a> {
        let cut = self.cut;
        buckets.iter().flat_map(move |&bucket| {
            let slot = layout.slot(bucket);
            let step = cut.chunk(slot.moments);
            (0..slot.elements).step_by(step).map(move |first| Chunk {
                bucket,
                first,
                len: step.min(slot.elements - first),
            })
        })
    }

    /// Sends every chunk through `pass`. Whatever happens, no transfer is in flight on return.
    pub(crate) fn run<'b, P: Pass<'b>>(
        &mut self,
        layout: &Layout,
        chunks: impl Iterator<Item = Chunk>,
        pass: &mut P,
        log: &mut Log,
    ) -> Result<(), OptimError> {
        let mut trip =
            Trip { ring: self, layout, pass, log, reading: VecDeque::new(), writing: VecDeque::new() };
        let result = trip.drive(chunks);
        let Trip { reading, writing, .. } = trip;
        for flight in reading.into_iter().chain(writing) {
            self.give_back(flight.land().0);
        }
        result
    }

    /// Takes buffers back, unless their transfer lost one.
    fn give_back(&mut self, mut buffers: Buffers) {
        let lengths = self.lengths;
        buffers.iter_mut().zip(lengths).for_each(|(buffer, length)| buffer.set_len(length));
        if buffers.iter().zip(lengths).all(|(buffer, length)| buffer.len() == length) {
            self.free.push(buffers);
        }
    }
}

/// One run of the ring.
struct Trip<'a, P> {
    ring: &'a mut Ring,
    layout: &'a Layout,
    pass: &'a mut P,
    log: &'a mut Log,
    reading: VecDeque<Flight>,
    writing: VecDeque<Flight>,
}

impl<'b, P: Pass<'b>> Trip<'_, P> {
    fn drive(&mut self, mut chunks: impl Iterator<Item = Chunk>) -> Result<(), OptimError> {
        loop {
            while self.reading.len() <= self.ring.ahead {
                let Some(chunk) = chunks.next() else { break };
                let flight = match self.pass.home(chunk.bucket) {
                    Home::Nvme(slots) => {
                        let buffers = self.free_buffers()?;
                        let file = slots.source();
                        self.launch(chunk, buffers, P::READS, |offset, buffer| file.read_at(offset, buffer))
                    }
                    Home::Host(_) => {
                        Flight { chunk, moving: Vec::new(), resting: Vec::new(), bytes: Bytes::ZERO }
                    }
                };
                self.reading.push_back(flight);
            }
            let Some(flight) = self.reading.pop_front() else { break };
            let chunk = flight.chunk;
            let slots = match self.pass.home(chunk.bucket) {
                Home::Nvme(slots) => slots,
                Home::Host(memory) => {
                    self.work(chunk, memory.part(&mut memory.lock(), chunk))?;
                    continue;
                }
            };
            let buffers = self.land(flight, Lane::NvmeRead)?;
            self.work_in_ring(chunk, buffers, slots)?;
        }
        while let Some(flight) = self.writing.pop_front() {
            let buffers = self.land_write(flight)?;
            self.ring.give_back(buffers);
        }
        Ok(())
    }

    /// A free set of buffers, waiting for the oldest write where there is none. The ring holds one set more than are
    /// read ahead, so when none is free a write is under way.
    fn free_buffers(&mut self) -> Result<Buffers, OptimError> {
        if let Some(buffers) = self.ring.free.pop() {
            return Ok(buffers);
        }
        match self.writing.pop_front() {
            Some(flight) => self.land_write(flight),
            None => Err(OptimError::Option {
                what: "the chunk ring lost its buffers; open the store again".into(),
            }),
        }
    }

    fn launch(
        &self,
        chunk: Chunk,
        mut buffers: Buffers,
        sections: usize,
        start: impl Fn(u64, AlignedBuf) -> Pending,
    ) -> Flight {
        let shape = self.layout.slot(chunk.bucket);
        let resting = buffers.split_off(sections);
        let mut bytes = Bytes::ZERO;
        let moving = buffers.into_iter().enumerate().map(|(section, mut buffer)| {
            let length = shape.padded(section, chunk.len);
            bytes += length;
            buffer.set_len(length.0 as usize);
            start(shape.offset(section, chunk.first), buffer)
        });
        Flight { chunk, moving: moving.collect(), resting, bytes }
    }

    /// Lands the oldest write.
    fn land_write(&mut self, flight: Flight) -> Result<Buffers, OptimError> {
        let Chunk { bucket, first, len } = flight.chunk;
        let buffers = self.land(flight, Lane::NvmeWrite)?;
        if first + len == self.layout.slot(bucket).elements {
            self.pass.written(bucket);
        }
        Ok(buffers)
    }

    fn land(&mut self, flight: Flight, lane: Lane) -> Result<Buffers, OptimError> {
        let (chunk, bytes) = (flight.chunk, flight.bytes);
        let (buffers, result) = flight.land();
        match result {
            Ok(Some((start, end))) => {
                let (what, total) = match lane {
                    Lane::NvmeRead => ("read", &mut self.log.read),
                    _ => ("write", &mut self.log.written),
                };
                *total += bytes;
                let name = format!("{what} bucket {} from element {}", chunk.bucket, chunk.first);
                self.log.span(lane, name, start, end, bytes);
                Ok(buffers)
            }
            Ok(None) => Ok(buffers),
            Err(error) => {
                self.ring.give_back(buffers);
                Err(error.into())
            }
        }
    }

    /// Works on a chunk in the ring's buffers, and starts to write it.
    fn work_in_ring(&mut self, chunk: Chunk, mut buffers: Buffers, slots: &Slots) -> Result<(), OptimError> {
        let shape = self.layout.slot(chunk.bucket);
        for (section, buffer) in buffers.iter_mut().enumerate() {
            buffer.set_len(shape.padded(section, chunk.len).0 as usize);
            buffer.as_mut_slice()[shape.bytes(section, chunk.len)..].fill(0);
        }
        let result = match buffers.as_mut_slice() {
            [main, avg, sq] => {
                let [m, a, q] = [0, 1, 2].map(|section| shape.bytes(section, chunk.len));
                let sections = [
                    &mut main.as_mut_slice()[..m],
                    &mut avg.as_mut_slice()[..a],
                    &mut sq.as_mut_slice()[..q],
                ];
                self.work(chunk, sections)
            }
            _ => Ok(()),
        };
        if result.is_err() || P::WRITES == 0 {
            self.ring.give_back(buffers);
            return result;
        }
        let file = slots.target();
        let flight = self.launch(chunk, buffers, P::WRITES, |offset, buffer| file.write_at(offset, buffer));
        self.writing.push_back(flight);
        Ok(())
    }

    fn work(&mut self, chunk: Chunk, sections: Sections<'_>) -> Result<(), OptimError> {
        let started = Instant::now();
        self.pass.work(chunk, sections)?;
        let name = format!("{} bucket {} from element {}", P::NAME, chunk.bucket, chunk.first);
        self.log.span(Lane::Optimizer, name, started, Instant::now(), Bytes::ZERO);
        Ok(())
    }
}

/// Memory of the ring that these options ask for.
pub(crate) fn ring_bytes(layout: &Layout, options: &AdamOptions) -> Bytes {
    Cut::new(options).buffers(layout).into_iter().sum::<Bytes>() * options.depth as u64
}
