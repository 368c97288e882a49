//! The store: extents, submissions, and the waits derived from them.

mod open;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use lazy_model::{Bytes, BytesPerSecond, Lane, Span, Tier};

use crate::arena::Arena;
use crate::clock::{Clock, Token};
use crate::cuda::{Cuda, Gpu};
use crate::device::{Device, Pin, Stream};
use crate::drive::{self, Signals, Sleepers, Target};
use crate::error::{BoxError, StoreError};

use crate::io::Op;
use crate::lanes::{Kept, Kind, Lanes, Work};
use crate::memory::{Access, Hbm, Mapping, StreamAccess, View};
use crate::mutants::{Mutant, Source, Wait};
use crate::options::{LinkLimits, NvmeMode};
use crate::random::Random;
use crate::spill::{Spill, Transfer};

/// Extents in memory start at multiples of this many bytes.
pub const MEMORY_ALIGNMENT: u64 = 64;

/// Value of poisoned bytes: a NaN in every float format wider than a byte.
const POISON: u8 = 0xff;

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
    id: u64,
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

/// One task as it is submitted: what it is called, where it runs, and what it reads and writes. The store derives from
/// that what it has to wait for.
#[derive(Clone, Debug)]
pub struct Submission<'a> {
    /// The queue.
    pub lane: Lane,
    /// Names the task in errors and spans.
    pub name: String,
    /// Extents that the task reads. An extent listed here and in `writes` is updated in place.
    pub reads: &'a [&'a Extent],
    /// Extents that the task writes.
    pub writes: &'a [&'a Extent],
    /// Tasks to wait for besides those that the extents imply.
    pub after: &'a [Event],
    /// Bytes moved, for the span and for the link limits; zero for arithmetic.
    pub bytes: Bytes,
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

/// Where a task's extents lie, those on NVMe left out.
pub(crate) struct Views {
    pub(crate) reads: Vec<View>,
    pub(crate) writes: Vec<View>,
    /// Those of `writes` that are to be poisoned first.
    fresh: Vec<usize>,
}

impl Views {
    /// Puts the poisoning on a stream.
    pub(crate) fn poison_on(&self, device: &dyn Device, stream: Stream) -> Result<(), BoxError> {
        for &i in &self.fresh {
            let view = self.writes[i];
            // SAFETY: the waits derived from the hazards hold back this stream until earlier users of these bytes are
            // done; extents that are live at once do not overlap.
            unsafe { device.fill(stream, view.start(), view.len(), POISON) }?;
        }
        Ok(())
    }
}

/// Everything that changes as tasks are submitted and completed.
pub(crate) struct State {
    pub(crate) lanes: Lanes,
    pub(crate) closing: bool,
    pub(crate) sleepers: Sleepers,
    hbm: Arena,
    host: Arena,
    nvme: Option<Arena>,
    extents: HashMap<u64, Hazards>,
    next_extent: u64,
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

impl<'a> Submission<'a> {
    /// A task that reads, writes and waits for nothing and moves no bytes: a start for struct update syntax.
    pub fn new(lane: Lane, name: impl Into<String>) -> Submission<'a> {
        Submission { lane, name: name.into(), reads: &[], writes: &[], after: &[], bytes: Bytes::ZERO }
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

    /// The one place where waits are derived: last writes of what is read, last writes and reads of what is written.
    fn waits(&self, task: &Submission<'_>) -> Result<Clock, StoreError> {
        let mut waits = Clock::default();
        for extent in task.reads {
            match self.extents.get(&extent.id).and_then(|h| h.last_write) {
                Some(write) if self.mutant.keeps(Wait::Read(task.lane)) => waits.add(write),
                Some(_) => {}
                None if extent.bytes == Bytes::ZERO => {}
                None => {
                    let (task, tier, offset, bytes) =
                        (task.name.clone(), extent.tier, extent.offset, extent.bytes);
                    return Err(StoreError::NotWritten { task, tier, offset, bytes });
                }
            }
        }
        for hazards in task.writes.iter().filter_map(|e| self.extents.get(&e.id)) {
            waits.join(&hazards.all(|source| self.mutant.keeps(Wait::Overwrite(source, task.lane))));
        }
        for event in task.after.iter().filter(|_| self.mutant.keeps(Wait::After(task.lane))) {
            waits.add(event.token);
        }
        Ok(waits)
    }

    /// Notes that `token` is now the last to use what it reads and writes.
    fn note(&mut self, task: &Submission<'_>, token: Token) {
        for extent in task.reads {
            if let Some(hazards) = self.extents.get_mut(&extent.id) {
                hazards.reads.add(token);
            }
        }
        for extent in task.writes {
            if let Some(hazards) = self.extents.get_mut(&extent.id) {
                // Whoever waits for this write waits for all that it waited for.
                hazards.inherited = Clock::default();
                hazards.reads = Clock::default();
                hazards.last_write = Some(token);
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
        let id = state.next_extent;
        state.next_extent += 1;
        let hazards = Hazards {
            occupied: range.occupied,
            inherited: range.inherited,
            last_write: None,
            reads: Clock::default(),
        };
        state.extents.insert(id, hazards);
        Ok(Extent { inner: Arc::clone(self.inner()), id, tier, offset: range.offset, bytes })
    }

    /// Gives an extent's range back, as dropping it does. Legal right after submitting tasks that use it.
    pub fn release(&self, extent: Extent) {
        drop(extent);
    }

    /// Queues a task that does its work on the CPU. Returns at once; `run` is called on another thread when the task's turn
    /// has come and everything it has to wait for is done. It must not wait for events or for the store itself.
    ///
    /// If an earlier task failed and [`Store::synchronize`] has not yet reported that, the task completes without
    /// running.
    ///
    /// # Errors
    ///
    /// [`StoreError::NotWritten`] for a read of something never written, [`StoreError::WrittenTwice`],
    /// [`StoreError::NotInMemory`] for an NVMe extent and, beside a GPU, for one in HBM, [`StoreError::Foreign`]. Nothing was
    /// queued then.
    pub fn submit(
        &self,
        task: Submission<'_>,
        run: impl FnOnce(&mut Access<'_>) -> Result<(), BoxError> + Send + 'static,
    ) -> Result<Event, StoreError> {
        let on_device = self.inner().device.is_some();
        refuse(&task, |tier| tier == Tier::Nvme || on_device && tier == Tier::Hbm)?;
        self.enqueue_access(task, run)
    }

    /// Queues a task that puts its work on the device's stream for its lane. Returns at once; `issue` is called on another
    /// thread, often long before what the task waits for has run: the stream waits for that. It must put work on that stream
    /// only, and wait for nothing. The extents stay as they are until that work has run; what `issue` owns is dropped when it
    /// returns.
    ///
    /// # Errors
    ///
    /// [`StoreError::Device`] on the host device, which has no streams, and those of [`Store::submit`].
    pub fn launch(
        &self,
        task: Submission<'_>,
        issue: impl FnOnce(&StreamAccess<'_>) -> Result<(), BoxError> + Send + 'static,
    ) -> Result<Event, StoreError> {
        let Some(device) = self.inner().device.clone() else {
            let (device, what) = ("the host device", "launch work on a stream");
            let instead = "it has none; submit a task that does its work in the call";
            return Err(StoreError::Device { device, what, instead });
        };
        refuse(&task, |tier| tier == Tier::Nvme)?;
        let stream = device.stream(task.lane);
        self.enqueue(task, Kind::Stream, move |views| {
            views.poison_on(&*device, stream)?;
            issue(&StreamAccess { stream, reads: &views.reads, writes: &views.writes })
        })
    }

    /// [`Store::submit`], for tasks that also name NVMe extents. [`Access`] leaves those out. Nothing in the memory of a
    /// device may be among them.
    pub(crate) fn enqueue_access(
        &self,
        task: Submission<'_>,
        run: impl FnOnce(&mut Access<'_>) -> Result<(), BoxError> + Send + 'static,
    ) -> Result<Event, StoreError> {
        self.enqueue(task, Kind::Host, move |views| {
            let Views { reads, writes, fresh } = views;
            // SAFETY: the mappings live as long as `Inner`, and tasks run only from within it. `check` made sure that no
            // write is listed twice and in-place reads are empty. The waits derived from the hazards hold back this task
            // until earlier users of these bytes are done, and later ones until this task is; extents that are live at
            // once do not overlap.
            let mut access = unsafe { Access::new(reads, writes) };
            for i in fresh {
                access.write(i).fill(POISON);
            }
            run(&mut access)
        })
    }

    /// [`Store::enqueue_keeping`], of a task that leaves nothing behind.
    pub(crate) fn enqueue(
        &self,
        task: Submission<'_>,
        kind: Kind,
        run: impl FnOnce(Views) -> Result<(), BoxError> + Send + 'static,
    ) -> Result<Event, StoreError> {
        self.enqueue_keeping(task, kind, |views| run(views).map(|()| None))
    }

    /// Queues a task; what it returns is dropped when it has completed.
    pub(crate) fn enqueue_keeping(
        &self,
        task: Submission<'_>,
        kind: Kind,
        run: impl FnOnce(Views) -> Result<Kept, BoxError> + Send + 'static,
    ) -> Result<Event, StoreError> {
        self.enqueue_any(task, kind, None, run)
    }

    /// Queues a transfer between host memory and the spill files, at `offset` there.
    pub(crate) fn enqueue_transfer(
        &self,
        task: Submission<'_>,
        op: Op,
        offset: u64,
        spill: Arc<Spill>,
    ) -> Result<Event, StoreError> {
        self.enqueue_any(task, Kind::Host, Some((op, offset)), move |views| {
            let Views { reads, writes, fresh } = views;
            // SAFETY: as in `enqueue_access`.
            let mut access = unsafe { Access::new(reads, writes) };
            for i in fresh {
                access.write(i).fill(POISON);
            }
            match op {
                Op::Write => spill.write(offset, access.read(0))?,
                Op::Read => spill.read(offset, access.write(0))?,
            }
            Ok(None)
        })
    }

    /// Queues a task, which may be a transfer that can be carried out together with others. The one place where anything is
    /// queued.
    fn enqueue_any(
        &self,
        task: Submission<'_>,
        kind: Kind,
        transfer: Option<(Op, u64)>,
        run: impl FnOnce(Views) -> Result<Kept, BoxError> + Send + 'static,
    ) -> Result<Event, StoreError> {
        let inner = self.inner();
        self.check(&task)?;
        let reads = task.reads.iter().filter_map(|extent| {
            let view = inner.view(extent)?;
            let in_place = task.writes.iter().any(|w| w.id == extent.id);
            Some(if in_place { view.empty() } else { view })
        });
        let reads: Vec<View> = reads.collect();
        let writes: Vec<View> = task.writes.iter().filter_map(|e| inner.view(e)).collect();

        let transfer = transfer.and_then(|(op, offset)| {
            let view = match op {
                Op::Write => reads.first()?,
                Op::Read => writes.first()?,
            };
            Some(Transfer { op, offset, memory: view.window() })
        });

        let mut state = inner.lock();
        let waits = state.waits(&task)?;
        let fresh: Vec<usize> = (0..if inner.poison { writes.len() } else { 0 })
            .filter(|&i| {
                let mut in_memory = task.writes.iter().filter(|e| e.tier != Tier::Nvme);
                let hazards = in_memory.nth(i).and_then(|e| state.extents.get(&e.id));
                hazards.is_some_and(|h| h.last_write.is_none())
            })
            .collect();
        let work: Work = Box::new(move || run(Views { reads, writes, fresh }));
        let work = state.mutant.delayed(task.lane, work);
        let token = state.lanes.push((task.lane, kind), task.name.clone(), task.bytes, waits, work, transfer);
        state.note(&task, token);
        drive::announce(inner, state);
        Ok(Event { inner: Arc::clone(inner), token })
    }

    fn check(&self, task: &Submission<'_>) -> Result<(), StoreError> {
        let foreign = |what| Err(StoreError::Foreign { task: task.name.clone(), what });
        if task.reads.iter().chain(task.writes).any(|e| !Arc::ptr_eq(&e.inner, self.inner())) {
            return foreign("extent");
        }
        if task.after.iter().any(|e| !Arc::ptr_eq(&e.inner, self.inner())) {
            return foreign("event");
        }
        for (i, extent) in task.writes.iter().enumerate() {
            if task.writes[..i].iter().any(|earlier| earlier.id == extent.id) {
                let (task, tier, offset, bytes) =
                    (task.name.clone(), extent.tier, extent.offset, extent.bytes);
                return Err(StoreError::WrittenTwice { task, tier, offset, bytes });
            }
        }
        Ok(())
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
        for hazards in state.extents.values_mut() {
            hazards.last_write = hazards.last_write.filter(|&token| !voided.contains(token));
        }
        Err(failure)
    }

    /// Begins a step: sets the time origin of spans, drops those not taken, and sets every tier's peak to what is live.
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
                arena.reset_peak();
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

    /// The limit of a tier.
    pub fn budget(&self, tier: Tier) -> Bytes {
        self.inner().lock().arena(tier).map_or(Bytes::ZERO, Arena::budget)
    }

    /// The GPU whose memory the HBM tier is, if it is one's.
    pub fn gpu(&self) -> Option<&Gpu> {
        self.inner().cuda.as_deref().map(Cuda::gpu)
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

/// Refuses a task with extents in some tiers.
fn refuse(task: &Submission<'_>, in_tier: impl Fn(Tier) -> bool) -> Result<(), StoreError> {
    match task.reads.iter().chain(task.writes).find(|extent| in_tier(extent.tier)) {
        Some(extent) => Err(StoreError::NotInMemory { task: task.name.clone(), tier: extent.tier }),
        None => Ok(()),
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
        self.inner.lock().extents.get(&self.id).is_some_and(|h| h.last_write.is_some())
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        let done = *state.lanes.completed();
        if let Some(hazards) = state.extents.remove(&self.id) {
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
