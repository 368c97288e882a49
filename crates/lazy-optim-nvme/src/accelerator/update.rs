//! Updates on the GPU: a chunk's state goes there and back, or is there.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lazy_model::{Bytes, Lane};
use lazy_store::durable::AlignedBuf;
use lazy_store::{Event, Extent, StoreError, Submission};

use super::copies::{Copy, InFlight, Place};
#[cfg(test)]
use super::simulated;
use super::{Accelerator, CHUNKS, GRAD, Kernels, Resident, Staging};
use crate::adam::{Gradient, Rule};
use crate::cuda::DeviceSections;
use crate::device::DeviceSlice;
use crate::ring::{Buffers, Chunk};
use crate::slot::{SECTIONS, SlotShape};
use crate::{Moments, OptimError};

/// Where the state of a chunk is that is updated.
pub(crate) enum State<'a> {
    /// In the buffers given.
    Buffers,
    /// In RAM at these addresses, pinned, and used by nobody else until the update is done.
    Ram([u64; 3]),
    /// At home on the GPU.
    Hbm(&'a Resident),
}

/// Elements of one parameter in a chunk, and what is done to them.
pub(crate) struct Part {
    pub(crate) rule: Rule,
    /// Counted in the chunk.
    pub(crate) local: Range<usize>,
    pub(crate) grad: GradAt,
    /// Where the new weights go.
    pub(crate) weights: Option<DeviceSlice>,
}

/// Where the gradient of a part is.
#[derive(Clone, Copy)]
pub(crate) enum GradAt {
    Device(DeviceSlice),
    /// In the buffer of gradients, at four times the number of the element in the chunk.
    Staged {
        bf16: bool,
    },
}

impl GradAt {
    pub(crate) fn of(grad: Gradient<'_>) -> GradAt {
        match grad {
            Gradient::Device(slice) => GradAt::Device(slice),
            Gradient::F32(_) => GradAt::Staged { bf16: false },
            Gradient::Bf16(_) => GradAt::Staged { bf16: true },
        }
    }
}

/// Where in the buffer of gradients an element's is.
pub(crate) fn staged_at(element: usize) -> usize {
    element * GRAD
}

/// An update that is under way. Dropping it waits for its end, before the buffers go.
pub(crate) struct Begun {
    event: InFlight,
    pub(crate) chunk: Chunk,
    buffers: Buffers,
}

impl Begun {
    pub(crate) fn is_done(&self) -> bool {
        self.event.0.is_done()
    }

    /// Waits for its end. Whether it failed is what [`Accelerator::check`] says.
    pub(crate) fn land(self) -> Buffers {
        let Begun { event, buffers, .. } = self;
        drop(event);
        buffers
    }
}

impl Accelerator {
    /// Starts the update of a chunk. Staged gradients are in the last of `buffers`; with `main`, the new weights of what is at home here
    /// come into the first. On an error nothing is under way, and the buffers come back.
    pub(crate) fn begin(
        &self,
        (chunk, shape): (Chunk, SlotShape),
        state: State<'_>,
        mut buffers: Buffers,
        parts: Vec<Part>,
        main: bool,
    ) -> Result<Begun, (Buffers, OptimError)> {
        match self.try_begin((chunk, shape), state, &mut buffers, parts, main) {
            Ok(event) => Ok(Begun { event: InFlight(event), chunk, buffers }),
            Err(error) => {
                // What was queued before the error uses the buffers.
                self.settle();
                Err((buffers, error))
            }
        }
    }

    fn try_begin(
        &self,
        (chunk, shape): (Chunk, SlotShape),
        state: State<'_>,
        buffers: &mut Buffers,
        parts: Vec<Part>,
        main: bool,
    ) -> Result<Event, OptimError> {
        let Staging { sections, grads } = &self.staging[self.turn.fetch_add(1, Ordering::Relaxed) % CHUNKS];
        let missing = || OptimError::Option { what: "the GPU was opened without room for chunks".into() };
        let (in_ram, sections) = match state {
            State::Buffers => {
                let mut addresses = buffers.iter_mut().map(AlignedBuf::address);
                (
                    Some([(); 3].map(|()| addresses.next().unwrap_or(0))),
                    sections.as_ref().ok_or_else(missing)?,
                )
            }
            State::Ram(addresses) => (Some(addresses), sections.as_ref().ok_or_else(missing)?),
            State::Hbm(there) => (None, &there.sections),
        };
        let lengths = [0, 1, 2].map(|section| Bytes(shape.bytes(section, chunk.len) as u64));
        let staged = match staged_range(&parts).zip(buffers.last_mut()) {
            Some((range, buffer)) => Some((range, buffer.address(), grads.as_ref().ok_or_else(missing)?)),
            None => None,
        };

        let (mut up, mut filled) = (Vec::new(), Vec::new());
        let all = in_ram.iter().flatten().zip(lengths).zip(sections);
        let all = all.map(|((address, bytes), extent)| (*address, extent, 0, bytes));
        let grads = staged.iter().map(|(range, address, extent)| {
            let at = range.start as u64;
            (address + at, *extent, at, Bytes(range.len() as u64))
        });
        for (from, extent, at, bytes) in all.chain(grads) {
            up.push(Copy { from: Place::Address(from), to: Place::Write(filled.len(), at), bytes });
            filled.push(extent);
        }
        if !up.is_empty() {
            self.copy(Lane::H2d, format!("state of bucket {}", chunk.bucket), &[], &filled, up)?;
        }

        let writes = &sections.each_ref();
        let reads: Vec<&Extent> = sections.iter().chain(staged.map(|(_, _, grads)| grads)).collect();
        let name = format!("update bucket {} from element {}", chunk.bucket, chunk.first);
        let task = Submission { reads: &reads, writes, ..Submission::new(Lane::Optimizer, name) };
        let first = if in_ram.is_some() { 0 } else { chunk.first };
        let event = self.kernels(task, shape.moments, first, parts)?;

        let down: Vec<Copy> = match (in_ram, buffers.first_mut()) {
            (Some(addresses), _) => {
                let to = addresses.into_iter().zip(lengths).enumerate();
                let copy = |(i, (to, bytes))| Copy { from: Place::Read(i, 0), to: Place::Address(to), bytes };
                to.map(copy).collect()
            }
            (None, Some(buffer)) if main => {
                let from = Place::Read(0, shape.bytes(0, chunk.first) as u64);
                vec![Copy { from, to: Place::Address(buffer.address()), bytes: lengths[0] }]
            }
            _ => return Ok(event),
        };
        let name = format!("state of bucket {} back", chunk.bucket);
        Ok(self.copy(Lane::D2h, name, writes, &[], down)?)
    }

    /// Queues the updates of the parts of a chunk whose first element is number `first` of the sections that the task writes. What is
    /// read after the sections is the staged gradients.
    fn kernels(
        &self,
        task: Submission<'_>,
        moments: Moments,
        first: usize,
        parts: Vec<Part>,
    ) -> Result<Event, StoreError> {
        match &self.kernels {
            Kernels::Cuda(adam) => {
                let adam = Arc::clone(adam);
                self.store.launch(task, move |cx| {
                    let [main, avg, sq] = [0, 1, 2].map(|i| cx.write(i).address);
                    let sections = DeviceSections { moments, main, avg, sq };
                    let staged = cx.reads().nth(SECTIONS.len()).map_or(0, |grads| grads.address);
                    for Part { rule, local, grad, weights } in &parts {
                        let grad = match *grad {
                            GradAt::Device(slice) => slice,
                            GradAt::Staged { bf16 } => {
                                let address = staged + staged_at(local.start) as u64;
                                // SAFETY: the task reads the extent, which has room for the gradients of a chunk.
                                unsafe { DeviceSlice::staged(address, local.len(), bf16) }
                            }
                        };
                        let at = (first + local.start) as u64;
                        // SAFETY: the extents have all elements of the chunk, in whole blocks; the caller's memory is as
                        // `DeviceSlice` says, and whoever began this waits for its end before the call returns.
                        unsafe { adam.update(cx.stream(), rule, sections, at, grad, *weights) }?;
                    }
                    Ok(())
                })
            }
            #[cfg(test)]
            Kernels::Simulated => simulated::update(&self.store, task, moments, first, parts),
        }
    }
}

/// Bytes of the buffer of gradients in which those of the parts are.
fn staged_range(parts: &[Part]) -> Option<Range<usize>> {
    let staged = || parts.iter().filter(|part| matches!(part.grad, GradAt::Staged { .. }));
    let start = staged().map(|part| part.local.start).min()?;
    let end = staged().map(|part| part.local.end).max()?;
    Some(staged_at(start)..staged_at(end))
}
