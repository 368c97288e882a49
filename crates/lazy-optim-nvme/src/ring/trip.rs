//! One run of the ring: chunks on their way in, on the GPU, and on their way out.

use std::collections::VecDeque;
use std::time::Instant;

use lazy_model::{Bytes, Lane};
use lazy_store::StoreError;
use lazy_store::durable::{AlignedBuf, Pending};

use super::{Buffers, Chunk, Entry, Log, Pass, Ring, Sections};
use crate::OptimError;
use crate::accelerator::{self, Accelerator, Begun, Resident};
use crate::home::{Home, Slots};
use crate::layout::Layout;
use crate::slot::SECTIONS;

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

impl Ring {
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
            accelerator.fetch(there, chunk, 0..P::READS, buffers)?;
        }
        let shape = self.layout.slot(chunk.bucket);
        if let [main, avg, sq, ..] = buffers.as_mut_slice() {
            let [m, a, q] = [0, 1, 2].map(|section| shape.bytes(section, chunk.len));
            let sections =
                [&mut main.as_mut_slice()[..m], &mut avg.as_mut_slice()[..a], &mut sq.as_mut_slice()[..q]];
            self.work(chunk, sections)?;
        }
        if P::WRITES > 0 {
            accelerator.put(there, chunk, 0..P::WRITES, buffers)?;
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
