//! A GPU beside the ring: chunks go there to be updated and come back, gradients and weights lie there, and buckets live there.
//!
//! A store of its own holds the memory and derives what waits for what: uploads, kernels and downloads are tasks on three of its
//! lanes, so that those of successive chunks run side by side.
//!
//! One of the few places with `unsafe`, in the modules below: copies and kernels take addresses.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use lazy_model::{Bytes, Seconds, Span, Tier};
use lazy_store::durable::AlignedBuf;
use lazy_store::{DeviceChoice, Extent, Store, StoreError, StoreOptions, Stream};

use crate::cuda::CudaAdam;
use crate::home::Gate;
use crate::layout::{Layout, PAGE};
use crate::norm;
use crate::slot::SlotShape;
use crate::{AdamOptions, OptimError, UpdateOn};

mod copies;
#[cfg(test)]
pub(crate) mod simulated;
mod sums;
mod update;

pub(crate) use update::{Begun, GradAt, Part, State, staged_at};

/// Chunks on the GPU at once: one on its way there, one being updated, one on its way back.
pub(crate) const CHUNKS: usize = 3;

/// How long times are counted from one zero.
const CLOCK: Duration = Duration::from_secs(10);

/// Bytes that a gradient's element takes at most.
const GRAD: usize = 4;

/// What a GPU's memory is taken for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    device: DeviceChoice,
    /// Of the sections of a chunk on the GPU; none where updates stay on the processor.
    sections: [Bytes; 3],
    /// Of the gradients of a chunk.
    grads: Bytes,
    /// Of the longest section of a chunk.
    longest: Bytes,
    /// Of the partial sums of all gradients.
    sums: Bytes,
    /// Of the buckets at home there.
    homes: Bytes,
}

impl Needs {
    /// `lengths` are those of the sections of a chunk; `None` without a GPU.
    pub(crate) fn new(
        layout: &Layout,
        options: &AdamOptions,
        lengths: [Bytes; 3],
        homes: Bytes,
    ) -> Option<Self> {
        if options.device == DeviceChoice::Host {
            return None;
        }
        let blocks = (0..layout.params().len())
            .map(|param| norm::blocks(layout.first(param), layout.elements(param)).count() as u64);
        let sections = if options.update == UpdateOn::Cpu { [Bytes::ZERO; 3] } else { lengths };
        let sums = Bytes(blocks.sum::<u64>() * 8).align_up(PAGE);
        let longest = lengths.into_iter().fold(Bytes::ZERO, Bytes::max);
        Some(Needs { device: options.device, sections, grads: lengths[0], longest, sums, homes })
    }

    /// Bytes of the GPU's memory.
    pub(crate) fn device_bytes(&self) -> Bytes {
        (self.sections.into_iter().sum::<Bytes>() + self.grads) * CHUNKS as u64 + self.sums + self.homes
    }

    /// Bytes of RAM besides the ring.
    pub(crate) fn scratch_bytes(&self) -> Bytes {
        self.longest.max(self.sums)
    }
}

/// A GPU, and the memory taken of it.
pub(crate) struct Accelerator {
    store: Store,
    kernels: Kernels,
    staging: Vec<Staging>,
    /// Counts the chunks: they take the staging in turn.
    turn: AtomicUsize,
    sums: Option<Extent>,
    /// Pinned.
    scratch: Mutex<AlignedBuf>,
    /// How many there were, and the last one: a save and a step may be at work at once, and both are told.
    failures: Mutex<(u64, String)>,
    /// Of the times of what runs.
    zero: Mutex<Option<Instant>>,
}

/// Room for a chunk.
struct Staging {
    /// Where updates of other homes are made here.
    sections: Option<[Extent; 3]>,
    grads: Option<Extent>,
}

/// Who does the arithmetic.
enum Kernels {
    Cuda(Arc<CudaAdam>),
    #[cfg(test)]
    Simulated,
}

/// The sections of a bucket in the GPU's memory.
pub(crate) struct Resident {
    pub(crate) shape: SlotShape,
    pub(crate) gate: Gate,
    sections: [Extent; 3],
}

impl Accelerator {
    /// Opens the GPU and takes its memory.
    pub(crate) fn open(needs: &Needs) -> Result<Self, OptimError> {
        let options =
            StoreOptions { device: needs.device, hbm: needs.device_bytes(), ..StoreOptions::default() };
        let (store, kernels) = open(options)?;
        let room = |bytes: Bytes| (bytes > Bytes::ZERO).then(|| store.reserve(Tier::Hbm, bytes)).transpose();
        let mut staging = Vec::with_capacity(CHUNKS);
        for _ in 0..CHUNKS {
            let [main, avg, sq] = needs.sections.map(&room);
            let sections = match (main?, avg?, sq?) {
                (Some(main), Some(avg), Some(sq)) => Some([main, avg, sq]),
                _ => None,
            };
            staging.push(Staging { sections, grads: room(needs.grads)? });
        }
        let sums = room(needs.sums)?;
        let mut scratch = AlignedBuf::zeroed(needs.scratch_bytes())?;
        scratch.pin(&store)?;
        let (turn, scratch) = (AtomicUsize::new(0), Mutex::new(scratch));
        let (failures, zero) = (Mutex::default(), Mutex::default());
        Ok(Accelerator { store, kernels, staging, turn, sums, scratch, failures, zero })
    }

    /// Whether chunks of other homes can be updated here.
    pub(crate) fn takes_chunks(&self) -> bool {
        self.staging.iter().all(|staging| staging.sections.is_some())
    }

    /// Bytes of the GPU's memory that are taken.
    #[cfg(test)]
    pub(crate) fn live(&self) -> Bytes {
        self.store.live(Tier::Hbm)
    }

    /// Pins a buffer for copies.
    pub(crate) fn pin(&self, buffer: &mut AlignedBuf) -> Result<(), OptimError> {
        Ok(buffer.pin(&self.store)?)
    }

    /// Pinned memory for whoever copies and waits.
    pub(crate) fn scratch(&self) -> MutexGuard<'_, AlignedBuf> {
        // Nobody leaves anything in it.
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for what is on a caller's stream.
    pub(crate) fn wait_for(&self, stream: Stream) -> Result<(), OptimError> {
        Ok(self.store.wait_for(stream)?)
    }

    /// Begins an account of what runs when; the zero of its times, which may be that of an earlier one: telling the GPU's time takes
    /// some, and its clock is good for a while.
    pub(crate) fn start(&self) -> Instant {
        let mut zero = self.zero.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(zero) = zero.filter(|zero| zero.elapsed() < CLOCK) {
            self.store.take_spans();
            return zero;
        }
        self.store.start_step();
        *zero.insert(Instant::now())
    }

    /// What ran since then, its times later by `offset`, which may be negative.
    pub(crate) fn spans(&self, offset: Seconds) -> impl Iterator<Item = Span> {
        self.store.take_spans().into_iter().map(move |span| Span {
            start: span.start + offset,
            end: span.end + offset,
            ..span
        })
    }

    /// Failures so far, for [`check`](Accelerator::check).
    pub(crate) fn failures(&self) -> u64 {
        self.lock_failures().0
    }

    /// Tells a failure since there were `before`, whosoever work failed: what was queued behind it did not run. Waits for all tasks
    /// then.
    pub(crate) fn check(&self, before: u64) -> Result<(), OptimError> {
        if self.store.has_failed() {
            self.settle();
        }
        let failures = self.lock_failures();
        if failures.0 == before {
            return Ok(());
        }
        Err(OptimError::Device { reason: failures.1.clone() })
    }

    /// Waits for all tasks, and counts a failure.
    fn settle(&self) {
        let mut failures = self.lock_failures();
        if let Err(error) = self.store.synchronize() {
            *failures = (failures.0 + 1, error.to_string());
        }
    }

    fn lock_failures(&self) -> MutexGuard<'_, (u64, String)> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room for a bucket that is at home here.
    pub(crate) fn resident(&self, shape: SlotShape) -> Result<Resident, OptimError> {
        let room = |section| self.store.reserve(Tier::Hbm, shape.padded(section, shape.elements));
        let sections = [room(0)?, room(1)?, room(2)?];
        Ok(Resident { shape, gate: Gate::default(), sections })
    }
}

fn open(options: StoreOptions) -> Result<(Store, Kernels), OptimError> {
    #[cfg(test)]
    if let Some(store) = simulated::open(&options)? {
        return Ok((store, Kernels::Simulated));
    }
    let store = Store::open(options)?;
    let gpu = store.gpu().ok_or(StoreError::Device {
        device: "the host device",
        what: "update state",
        instead: "name a GPU",
    })?;
    let adam = Arc::new(CudaAdam::new(gpu)?);
    Ok((store, Kernels::Cuda(adam)))
}
