//! The store: its tiers, extents and events, and the bookkeeping of who uses which bytes.

mod open;
mod submit;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use lazy_model::{Bytes, BytesPerSecond, Lane, Span, Tier};
use slab::Slab;

use crate::arena::Arena;
use crate::clock::{Clock, Token};
use crate::cuda::{Cuda, Gpu};
use crate::device::{Device, Pin};
use crate::drive::{self, Signals, Sleepers, Target};
use crate::error::StoreError;
use crate::lanes::Lanes;
use crate::memory::{DeviceRange, Hbm, Mapping, View};
use crate::mutants::{Mutant, Source, Wait};
use crate::options::{LinkLimits, NvmeMode};
use crate::random::Random;
use crate::spill::Spill;

pub use self::submit::Submission;

/// Extents in memory start at multiples of this many bytes.
pub const MEMORY_ALIGNMENT: u64 = 64;

/// Three tiers of memory with hard budgets, and the ordered queues of tasks that use them. Cheap to clone; the last clone
/// waits for everything in flight, then removes the spill file.
#[derive(Clone)]
pub struct Store {
    handle: Arc<Handle>,
}

/// A range of one tier. Dropping it gives the range back; tasks submitted before that may still be using it, and the
/// next owner's first write waits for them.
pub struct Extent {
    inner: Arc<Inner>,
    id: usize,
    tier: Tier,
    offset: u64,
    bytes: Bytes,
}

/// The completion of one task.
#[derive(Clone)]
pub struct Event {
    inner: Arc<Inner>,
    token: Token,
}

/// What the store's clones share, and what its end takes.
struct Handle {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
}

/// What extents, events and worker threads share with the store.
pub(crate) struct Inner {
    state: Mutex<State>,
    pub(crate) signals: Signals,
    hbm: Hbm,
    host: Mapping,
    /// Goes before the memory it pins, which is the spill file's.
    _staging_pin: Option<Pin>,
    pub(crate) spill: Option<Arc<Spill>>,
    /// A device with streams; none for the host device.
    pub(crate) device: Option<Arc<dyn Device>>,
    /// The same, where it is CUDA.
    pub(crate) cuda: Option<Arc<Cuda>>,
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) simulated: Option<Arc<crate::simulated::Simulated>>,
    limits: LinkLimits,
    poison: bool,
    /// The generator of the seeded order; whoever holds it runs the tasks.
    pub(crate) seeded: Option<Mutex<Random>>,
}

/// Everything that changes as tasks are submitted and completed.
pub(crate) struct State {
    pub(crate) lanes: Lanes,
    pub(crate) closing: bool,
    pub(crate) sleepers: Sleepers,
    hbm: Arena,
    host: Arena,
    nvme: Option<Arena>,
    extents: Slab<Hazards>,
    mutant: Mutant,
}

/// Who uses an extent.
struct Hazards {
    occupied: u64,
    /// Tasks of earlier owners of the same bytes.
    inherited: Clock,
    last_write: Option<Token>,
    /// Reads since the last write.
    reads: Clock,
}

impl Hazards {
    /// Everything that has to be done before these bytes may be overwritten, as far as a mutant `keeps` it.
    fn all(&self, keeps: impl Fn(Source) -> bool) -> Clock {
        let mut clock = Clock::default();
        if keeps(Source::Inherited) {
            clock.join(&self.inherited);
        }
        if keeps(Source::Reads) {
            clock.join(&self.reads);
        }
        if let Some(write) = self.last_write.filter(|_| keeps(Source::Write)) {
            clock.add(write);
        }
        clock
    }
}

impl Inner {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // No task runs under the lock, so a poisoned lock still guards a consistent state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn limit(&self, lane: Lane) -> Option<BytesPerSecond> {
        match lane {
            Lane::H2d => self.limits.h2d,
            Lane::D2h => self.limits.d2h,
            Lane::NvmeWrite => self.limits.nvme_write,
            Lane::NvmeRead => self.limits.nvme_read,
            Lane::Compute | Lane::Optimizer => None,
        }
    }

    fn view(&self, extent: &Extent) -> Option<View> {
        let (offset, len) = (extent.offset, extent.bytes.get());
        match extent.tier {
            Tier::Hbm => self.hbm.view(offset, len),
            Tier::Host => self.host.view(offset, len),
            Tier::Nvme => None,
        }
    }
}

impl State {
    fn arena(&self, tier: Tier) -> Option<&Arena> {
        match tier {
            Tier::Hbm => Some(&self.hbm),
            Tier::Host => Some(&self.host),
            Tier::Nvme => self.nvme.as_ref(),
        }
    }

    fn arena_mut(&mut self, tier: Tier) -> Option<&mut Arena> {
        match tier {
            Tier::Hbm => Some(&mut self.hbm),
            Tier::Host => Some(&mut self.host),
            Tier::Nvme => self.nvme.as_mut(),
        }
    }

    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn set_mutant(&mut self, mutant: &Mutant) {
        self.mutant = mutant.clone();
        for tier in Tier::ALL {
            if let Some(arena) = self.arena_mut(tier) {
                arena.set_mutant(mutant);
            }
        }
    }
}

impl Store {
    /// Reserves the lowest free range of `tier` that holds `bytes`.
    ///
    /// # Errors
    ///
    /// [`StoreError::OutOfBudget`] where there is none; nothing is moved to make room.
    pub fn reserve(&self, tier: Tier, bytes: Bytes) -> Result<Extent, StoreError> {
        self.reserve_with(tier, bytes, |arena, done| arena.reserve(bytes, done))
    }

    /// Reserves the range of `tier` at `offset`, as a verified schedule lays it out.
    ///
    /// # Errors
    ///
    /// [`StoreError::OutsideBudget`], [`StoreError::Overlap`] with an extent that is still held, or
    /// [`StoreError::Misaligned`].
    pub fn reserve_at(&self, tier: Tier, offset: u64, bytes: Bytes) -> Result<Extent, StoreError> {
        self.reserve_with(tier, bytes, |arena, done| arena.reserve_at(offset, bytes, done))
    }

    /// The host arena knows nothing of the staging that takes the rest of its budget.
    fn beside_staging(&self, mut error: StoreError) -> StoreError {
        if let (StoreError::OutOfBudget { tier: Tier::Host, staging, .. }, Some(spill)) =
            (&mut error, &self.inner().spill)
        {
            *staging = spill.staging();
        }
        error
    }

    fn reserve_with(
        &self,
        tier: Tier,
        bytes: Bytes,
        take: impl FnOnce(&mut Arena, &Clock) -> Result<crate::arena::Reserved, StoreError>,
    ) -> Result<Extent, StoreError> {
        let mut state = self.inner().lock();
        let done = *state.lanes.completed();
        let taken = take(state.arena_mut(tier).ok_or(StoreError::NoNvme)?, &done);
        let range = taken.map_err(|error| self.beside_staging(error))?;
        let hazards = Hazards {
            occupied: range.occupied,
            inherited: range.inherited,
            last_write: None,
            reads: Clock::default(),
        };
        let id = state.extents.insert(hazards);
        Ok(Extent { inner: Arc::clone(self.inner()), id, tier, offset: range.offset, bytes })
    }

    /// Gives an extent's range back, as dropping it does. Legal right after submitting tasks that use it.
    pub fn release(&self, extent: Extent) {
        drop(extent);
    }

    /// Waits until every task submitted so far has completed.
    ///
    /// # Errors
    ///
    /// The first failure since the last call, which this clears. Extents whose last writer failed, or did not run because
    /// of the failure, count as never written; everything else is as it was, and the store can be used on, except after a
    /// kernel's fault: the driver then ends the GPU's context, every later task fails, and only a new process helps.
    pub fn synchronize(&self) -> Result<(), StoreError> {
        let mut state = drive::wait_until(self.inner(), Target::Idle);
        let Some((failure, voided)) = state.lanes.take_failure() else { return Ok(()) };
        for hazards in state.extents.iter_mut().map(|(_, hazards)| hazards) {
            hazards.last_write = hazards.last_write.filter(|&token| !voided.contains(token));
        }
        Err(failure)
    }

    /// Whether a task has failed since [`Store::synchronize`] was called last.
    pub fn has_failed(&self) -> bool {
        self.inner().lock().lanes.has_failed()
    }

    /// Begins a step: sets the time origin of spans, drops those not taken, and measures every tier's
    /// [`peak`](Store::peak) and [`high_water`](Store::high_water) from what is live.
    /// Spans are recorded from the first call on; of those that nobody takes, the last million or so are kept.
    pub fn start_step(&self) {
        if let Some(spill) = &self.inner().spill {
            spill.start_step();
        }
        let inner = self.inner();
        let base = inner.device.as_ref().and_then(|device| {
            // Without a time of the device's the step has no spans of its streams; what ails it comes out elsewhere.
            device.bind().ok()?;
            Arc::clone(device).now().ok()
        });
        let mut state = inner.lock();
        state.lanes.start_step(base);
        for tier in Tier::ALL {
            if let Some(arena) = state.arena_mut(tier) {
                arena.start_step();
            }
        }
    }

    /// Takes the spans of what was submitted since the step began and has completed, in submission order.
    pub fn take_spans(&self) -> Vec<Span> {
        self.inner().lock().lanes.take_spans()
    }

    /// Bytes held by live extents of a tier; on NVMe, with their padding.
    pub fn live(&self, tier: Tier) -> Bytes {
        self.inner().lock().arena(tier).map_or(Bytes::ZERO, Arena::live_bytes)
    }

    /// The largest value of [`Store::live`] since the step began.
    pub fn peak(&self, tier: Tier) -> Bytes {
        self.inner().lock().arena(tier).map_or(Bytes::ZERO, Arena::peak)
    }

    /// The end of the highest range of a tier that was held since the step began: what a budget has to reach, where extents lie at
    /// offsets of the caller's choice.
    pub fn high_water(&self, tier: Tier) -> Bytes {
        self.inner().lock().arena(tier).map_or(Bytes::ZERO, Arena::high_water)
    }

    /// The limit of a tier.
    pub fn budget(&self, tier: Tier) -> Bytes {
        self.inner().lock().arena(tier).map_or(Bytes::ZERO, Arena::budget)
    }

    /// The GPU whose memory the HBM tier is, if it is one's.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.inner().cuda.as_deref().map(Cuda::gpu)
    }

    /// Where an extent in HBM lies in the memory of a GPU; `None` in another tier, of another store, and on the host device. The store
    /// does not order what goes there by this address: let it follow [`Store::synchronize`], and be done before the next task that
    /// uses the extent is submitted.
    pub fn device_range(&self, extent: &Extent) -> Option<DeviceRange> {
        let inner = self.inner();
        let on_device =
            inner.device.is_some() && extent.tier == Tier::Hbm && Arc::ptr_eq(&extent.inner, inner);
        let view = on_device.then(|| inner.view(extent)).flatten()?;
        Some(DeviceRange { address: view.start().addr() as u64, bytes: extent.bytes })
    }

    /// How the spill file is read and written: what was asked for, what was obtained and why.
    pub fn nvme_mode(&self) -> Option<&NvmeMode> {
        self.inner().spill.as_deref().map(Spill::mode)
    }

    /// Offsets in the NVMe tier are multiples of this, and lengths are padded to it.
    pub fn nvme_alignment(&self) -> Option<usize> {
        self.nvme_mode().map(|mode| mode.alignment)
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.handle.inner
    }
}

impl Extent {
    /// The tier it lies in.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Where it begins in its tier, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Its length as asked for, without padding.
    pub fn bytes(&self) -> Bytes {
        self.bytes
    }

    /// Whether a task was submitted that writes it, and none of those failed.
    pub fn is_written(&self) -> bool {
        self.inner.lock().extents.get(self.id).is_some_and(|h| h.last_write.is_some())
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        let done = *state.lanes.completed();
        if let Some(hazards) = state.extents.try_remove(self.id) {
            let users = hazards.all(|source| state.mutant.keeps(Wait::Release(source, self.tier)));
            if let Some(arena) = state.arena_mut(self.tier) {
                arena.release(self.offset, hazards.occupied, users, &done);
            }
        }
    }
}

impl Event {
    /// Its place in the queues, if it is of `store`.
    pub(crate) fn token_in(&self, store: &Store) -> Result<Token, StoreError> {
        if Arc::ptr_eq(&self.inner, store.inner()) {
            return Ok(self.token);
        }
        Err(StoreError::Foreign { task: "a caller's stream".to_owned(), what: "event" })
    }

    /// Waits until the task has completed. Whether it failed is what [`Store::synchronize`] says.
    pub fn wait(&self) {
        drop(drive::wait_until(&self.inner, Target::Done(self.token)));
    }

    /// Whether the task has completed.
    pub fn is_done(&self) -> bool {
        self.inner.lock().lanes.is_done(self.token)
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("nvme_mode", &self.nvme_mode()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}+{}", self.tier, self.offset, self.bytes)
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "task {} of {}", self.token.seq, self.token.lane)
    }
}
