//! The pipeline: a bounded ring of aligned buffers through which chunks are read, worked on and written.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use lazy_model::{Bytes, Lane, Seconds, Span};

use crate::accelerator::{self, Accelerator, Begun, Needs, Resident};
use crate::home::{Home, Homes, Slots};
use crate::layout::Layout;
use crate::measure;
use crate::slot::{BLOCK, SECTIONS};
use crate::{AdamOptions, Moments, OptimError, UpdateChoice, UpdateOn};
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

/// Of the sections of a chunk, and beside a GPU of its gradients.
pub(crate) type Buffers = Vec<AlignedBuf>;

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
    size: RingSize,
    /// Chunks read ahead of the one being worked on.
    ahead: usize,
    accelerator: Option<Arc<Accelerator>>,
    choice: UpdateChoice,
}

/// What a ring takes.
pub(crate) struct RingSize {
    cut: Cut,
    /// Sets of buffers, while the ring has its memory.
    sets: usize,
    /// Bytes of each buffer of a set.
    lengths: [Bytes; 4],
    /// Of a GPU, where there is one.
    needs: Option<Needs>,
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

    /// Sends every chunk through `pass`. Whatever happens, no transfer is in flight on return.
    pub(crate) fn run<'b, P: Pass<'b>>(
        &mut self,
        layout: &Layout,
        chunks: impl Iterator<Item = Chunk>,
        pass: &mut P,
        log: &mut Log,
    ) -> Result<(), OptimError> {
        let (reading, begun, writing) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        let failures = self.accelerator().map_or(0, Accelerator::failures);
        let mut trip = Trip { ring: self, layout, pass, log, reading, begun, writing, failures };
        let result = trip.drive(chunks);
        let Trip { reading, begun, writing, .. } = trip;
        for begun in begun {
            self.give_back(begun.land());
        }
        for flight in reading.into_iter().chain(writing) {
            self.give_back(flight.land().0);
        }
        let failed = self.accelerator().map_or(Ok(()), |accelerator| accelerator.check(failures));
        result.and(failed)
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

/// One run of the ring.
struct Trip<'a, P> {
    ring: &'a mut Ring,
    layout: &'a Layout,
    pass: &'a mut P,
    log: &'a mut Log,
    reading: VecDeque<Flight>,
    /// On the GPU.
    begun: VecDeque<Begun>,
    writing: VecDeque<Flight>,
    /// Of the GPU, before this.
    failures: u64,
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
                    Home::Host(_) | Home::Hbm(_) | Home::Out(_) => {
                        Flight { chunk, moving: Vec::new(), resting: Vec::new(), bytes: Bytes::ZERO }
                    }
                };
                self.reading.push_back(flight);
            }
            let Some(flight) = self.reading.pop_front() else { break };
            let chunk = flight.chunk;
            match self.pass.enter(chunk.bucket) {
                Ok(Entry::Work) => {}
                Ok(Entry::Leave) => {
                    self.ring.give_back(flight.land().0);
                    continue;
                }
                stopped => {
                    // It has a transfer that is to be waited for.
                    self.reading.push_front(flight);
                    return stopped.map(|_| ());
                }
            }
            let home = self.pass.home(chunk.bucket);
            if P::WRITES > 0 {
                home.wait_saved();
            }
            match home {
                _ if self.pass.is_begun(home) => self.begin(flight, home)?,
                Home::Nvme(slots) => {
                    let buffers = self.land(flight, Lane::NvmeRead)?;
                    self.work_in_ring(chunk, buffers, slots)?;
                }
                Home::Host(memory) => self.work(chunk, memory.part(&mut memory.lock(), chunk))?,
                Home::Hbm(there) => {
                    let mut buffers = self.free_buffers()?;
                    let result = self.work_beside(chunk, there, &mut buffers);
                    self.ring.give_back(buffers);
                    result?;
                }
                Home::Out(_) => return Err(OptimError::Suspended),
            }
        }
        while !self.begun.is_empty() {
            self.finish_oldest()?;
        }
        while let Some(flight) = self.writing.pop_front() {
            let buffers = self.land_write(flight)?;
            self.ring.give_back(buffers);
        }
        Ok(())
    }

    /// Sends a chunk to the GPU. What has come back is finished first, and the oldest one there where there are as many as it holds.
    fn begin(&mut self, flight: Flight, home: &'b Home) -> Result<(), OptimError> {
        let chunk = flight.chunk;
        let buffers = match home {
            Home::Nvme(_) => {
                let mut buffers = self.land(flight, Lane::NvmeRead)?;
                self.trim(chunk, &mut buffers);
                buffers
            }
            Home::Hbm(_) if !self.ring.holds(self.layout, chunk) => Buffers::new(),
            Home::Host(_) | Home::Hbm(_) => self.free_buffers()?,
            Home::Out(_) => return Err(OptimError::Suspended),
        };
        while self.begun.len() >= accelerator::CHUNKS || self.begun.front().is_some_and(Begun::is_done) {
            if let Err(error) = self.finish_oldest() {
                self.ring.give_back(buffers);
                return Err(error);
            }
        }
        match self.pass.begin(chunk, home, buffers) {
            Ok(begun) => self.begun.push_back(begun),
            Err((buffers, error)) => {
                self.ring.give_back(buffers);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Does what is left of the oldest chunk on the GPU, and starts to write it where it is at home on NVMe.
    fn finish_oldest(&mut self) -> Result<(), OptimError> {
        let Some(begun) = self.begun.pop_front() else { return Ok(()) };
        let chunk = begun.chunk;
        let mut buffers = begun.land();
        let failures = self.failures;
        if let Err(error) = self.ring.accelerator().map_or(Ok(()), |gpu| gpu.check(failures)) {
            self.ring.give_back(buffers);
            return Err(error);
        }
        match self.pass.home(chunk.bucket) {
            Home::Nvme(slots) => return self.work_in_ring(chunk, buffers, slots),
            Home::Host(memory) => {
                let result = self.work(chunk, memory.part(&mut memory.lock(), chunk));
                self.ring.give_back(buffers);
                result?;
            }
            Home::Hbm(_) | Home::Out(_) => {
                let bytes = self.layout.slot(chunk.bucket).bytes(0, chunk.len);
                let main = buffers.first_mut().map_or(&mut [][..], |main| &mut main.as_mut_slice()[..bytes]);
                let result = self.work(chunk, [main, &mut [], &mut []]);
                self.ring.give_back(buffers);
                result?;
            }
        }
        Ok(())
    }

    /// Works in the ring's buffers on a chunk that is at home on the GPU.
    fn work_beside(
        &mut self,
        chunk: Chunk,
        there: &Resident,
        buffers: &mut Buffers,
    ) -> Result<(), OptimError> {
        let accelerator = self.ring.shared_accelerator().ok_or(OptimError::Suspended)?;
        if P::READS > 0 {
            accelerator.fetch(there, chunk, &mut buffers[..P::READS])?;
        }
        let shape = self.layout.slot(chunk.bucket);
        if let [main, avg, sq, ..] = buffers.as_mut_slice() {
            let [m, a, q] = [0, 1, 2].map(|section| shape.bytes(section, chunk.len));
            let sections =
                [&mut main.as_mut_slice()[..m], &mut avg.as_mut_slice()[..a], &mut sq.as_mut_slice()[..q]];
            self.work(chunk, sections)?;
        }
        if P::WRITES > 0 {
            accelerator.put(there, chunk, &mut buffers[..P::WRITES])?;
        }
        Ok(())
    }

    /// A free set of buffers, waiting for the oldest write where there is none, or for the oldest chunk on the GPU. The ring holds
    /// one set more than are read ahead, so when none is free one of those is under way.
    fn free_buffers(&mut self) -> Result<Buffers, OptimError> {
        while self.ring.free.is_empty() && self.writing.is_empty() && !self.begun.is_empty() {
            self.finish_oldest()?;
        }
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

    /// Gives the buffers of a chunk's sections its lengths, with zeros behind its bytes.
    fn trim(&self, chunk: Chunk, buffers: &mut Buffers) {
        let shape = self.layout.slot(chunk.bucket);
        for (section, buffer) in buffers.iter_mut().enumerate().take(SECTIONS.len()) {
            buffer.set_len(shape.padded(section, chunk.len).0 as usize);
            buffer.as_mut_slice()[shape.bytes(section, chunk.len)..].fill(0);
        }
    }

    /// Works on a chunk in the ring's buffers, and starts to write it.
    fn work_in_ring(&mut self, chunk: Chunk, mut buffers: Buffers, slots: &Slots) -> Result<(), OptimError> {
        let shape = self.layout.slot(chunk.bucket);
        self.trim(chunk, &mut buffers);
        let result = match buffers.as_mut_slice() {
            [main, avg, sq, ..] => {
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
