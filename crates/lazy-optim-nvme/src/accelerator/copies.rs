//! Copies to and from the GPU.

use std::ops::Range;
use std::sync::mpsc;

use lazy_model::{Bytes, Lane};
use lazy_store::durable::AlignedBuf;
use lazy_store::{Event, Extent, StoreError, Submission};

use super::{Accelerator, GRAD, Resident};
use crate::OptimError;
use crate::device::DeviceSlice;
use crate::ring::Chunk;

/// A copy of a task: from and to addresses, or places in the extents it reads or writes.
pub(super) struct Copy {
    pub(super) from: Place,
    pub(super) to: Place,
    pub(super) bytes: Bytes,
}

#[derive(Clone, Copy)]
pub(super) enum Place {
    Address(u64),
    /// Of the extents that the task reads.
    Read(usize, u64),
    /// Of those that it writes.
    Write(usize, u64),
}

/// What waits for the end of a task.
pub(super) struct InFlight(pub(super) Event);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.wait();
    }
}

impl Accelerator {
    /// Queues copies.
    pub(super) fn copy(
        &self,
        lane: Lane,
        name: String,
        reads: &[&Extent],
        writes: &[&Extent],
        copies: Vec<Copy>,
    ) -> Result<Event, StoreError> {
        let bytes = copies.iter().map(|copy| copy.bytes).sum();
        let task = Submission { reads, writes, bytes, ..Submission::new(lane, name) };
        self.store.launch(task, move |cx| {
            let at = |place| match place {
                Place::Address(address) => address,
                Place::Read(i, at) => cx.read(i).address + at,
                Place::Write(i, at) => cx.write(i).address + at,
            };
            for Copy { from, to, bytes } in &copies {
                // SAFETY: places are in extents of this task, addresses in memory that its beginner keeps, and keeps others from,
                // until it has seen the end.
                unsafe { cx.copy(at(*from), at(*to), *bytes) }?;
            }
            Ok(())
        })
    }

    /// Copies and waits.
    pub(super) fn copy_now(
        &self,
        lane: Lane,
        name: String,
        reads: &[&Extent],
        writes: &[&Extent],
        copies: Vec<Copy>,
    ) -> Result<(), OptimError> {
        let before = self.failures();
        drop(InFlight(self.copy(lane, name, reads, writes, copies)?));
        self.check(before)
    }

    /// Brings sections of a chunk that is at home here into buffers, one each.
    pub(crate) fn fetch(
        &self,
        there: &Resident,
        chunk: Chunk,
        sections: Range<usize>,
        buffers: &mut [AlignedBuf],
    ) -> Result<(), OptimError> {
        let extents: Vec<&Extent> = there.sections[sections.clone()].iter().collect();
        let copy =
            |(i, address, at, bytes)| Copy { from: Place::Read(i, at), to: Place::Address(address), bytes };
        let copies = beside(there, chunk, sections, buffers).map(copy).collect();
        self.copy_now(Lane::D2h, format!("fetch bucket {}", chunk.bucket), &extents, &[], copies)
    }

    /// Puts sections of a chunk where it is at home here, from a buffer each.
    pub(crate) fn put(
        &self,
        there: &Resident,
        chunk: Chunk,
        sections: Range<usize>,
        buffers: &mut [AlignedBuf],
    ) -> Result<(), OptimError> {
        let extents: Vec<&Extent> = there.sections[sections.clone()].iter().collect();
        let copy =
            |(i, address, at, bytes)| Copy { from: Place::Address(address), to: Place::Write(i, at), bytes };
        let copies = beside(there, chunk, sections, buffers).map(copy).collect();
        self.copy_now(Lane::H2d, format!("put bucket {}", chunk.bucket), &[], &extents, copies)
    }

    /// Room of the gradients of two chunks, zeroed, as gradients and as weights in device memory would be: for as long as nothing else
    /// is begun that stages any.
    pub(crate) fn spare(&self) -> Result<Option<[DeviceSlice; 2]>, OptimError> {
        let rooms: Vec<&Extent> = self.staging.iter().filter_map(|staging| staging.grads.as_ref()).collect();
        let [grads, weights, ..] = rooms[..] else { return Ok(None) };
        let mut zeros = self.scratch();
        let bytes = grads.bytes();
        zeros.as_mut_slice()[..bytes.get() as usize].fill(0);
        let (from, before, (told, addresses)) = (zeros.address(), self.failures(), mpsc::channel());
        let task = Submission { writes: &[grads, weights], ..Submission::new(Lane::H2d, "zeros") };
        let zeroed = self.store.launch(task, move |cx| {
            for range in cx.writes() {
                // SAFETY: the buffer is held until the task has completed, and as long as the extents.
                unsafe { cx.copy(from, range.address, bytes) }?;
                told.send(range.address)?;
            }
            Ok(())
        });
        drop(InFlight(zeroed?));
        self.check(before)?;
        let n = bytes.get() as usize / GRAD;
        let (Ok(grads), Ok(weights)) = (addresses.recv(), addresses.recv()) else { return Ok(None) };
        // SAFETY: the extents are of that length and live as long as this; the caller keeps to what is said above.
        Ok(Some(unsafe { [DeviceSlice::f32(grads, n), DeviceSlice::bf16(weights, n)] }))
    }

    /// Brings numbers from the caller's device memory into a buffer, each to its place there.
    pub(crate) fn bring(
        &self,
        numbers: &[(DeviceSlice, usize)],
        to: &mut AlignedBuf,
    ) -> Result<(), OptimError> {
        let base = to.address();
        let copies = numbers.iter().map(|(slice, at)| Copy {
            from: Place::Address(slice.address()),
            to: Place::Address(base + *at as u64),
            bytes: Bytes((slice.len() * slice.size()) as u64),
        });
        self.copy_now(Lane::D2h, "gradients".into(), &[], &[], copies.collect())
    }

    /// Puts bytes at addresses into the caller's device memory.
    pub(crate) fn send(&self, numbers: &[(u64, DeviceSlice)]) -> Result<(), OptimError> {
        let copies = numbers.iter().map(|(from, slice)| Copy {
            from: Place::Address(*from),
            to: Place::Address(slice.address()),
            bytes: Bytes((slice.len() * slice.size()) as u64),
        });
        self.copy_now(Lane::H2d, "weights".into(), &[], &[], copies.collect())
    }
}

/// Of each section: its number among them, its buffer's address, where its part of the chunk begins, and the bytes of that.
fn beside<'a>(
    there: &'a Resident,
    chunk: Chunk,
    sections: Range<usize>,
    buffers: &'a mut [AlignedBuf],
) -> impl Iterator<Item = (usize, u64, u64, Bytes)> + 'a {
    let shape = there.shape;
    sections.zip(buffers).enumerate().map(move |(i, (section, buffer))| {
        let at = shape.bytes(section, chunk.first) as u64;
        (i, buffer.address(), at, Bytes(shape.bytes(section, chunk.len) as u64))
    })
}
