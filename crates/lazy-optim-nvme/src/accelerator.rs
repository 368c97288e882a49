//! A GPU beside the ring: chunks go there to be updated and come back, gradients and weights lie there, and buckets live there.
//!
//! A store of its own holds the memory and derives what waits for what: uploads, kernels and downloads are tasks on three of its
//! lanes, so that those of successive chunks run side by side.
//!
//! One of the few modules with `unsafe`: copies and kernels take addresses.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use lazy_model::{Bytes, Lane, Seconds, Span, Tier};
use lazy_store::durable::AlignedBuf;
use lazy_store::{DeviceChoice, Event, Extent, Store, StoreError, StoreOptions, Stream, Submission};

use crate::adam::{Gradient, Rule};
use crate::cuda::{CudaAdam, DeviceSections};
use crate::device::DeviceSlice;
use crate::home::Gate;
use crate::layout::{Layout, PAGE};
use crate::norm::{self, NORM_BLOCK, NormPart};
use crate::ring::{Buffers, Chunk};
use crate::slot::{SECTIONS, SlotShape};
use crate::{AdamOptions, Moments, OptimError, UpdateOn};

#[cfg(test)]
pub(crate) mod simulated;

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

struct InFlight(Event);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.wait();
    }
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

/// A copy of a task: from and to addresses, or places in the extents it reads or writes.
struct Copy {
    from: Place,
    to: Place,
    bytes: Bytes,
}

#[derive(Clone, Copy)]
enum Place {
    Address(u64),
    /// Of the extents that the task reads.
    Read(usize, u64),
    /// Of those that it writes.
    Write(usize, u64),
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
        let lengths = [0, 1, 2].map(|section| shape.bytes(section, chunk.len) as u64);
        let in_ram = match state {
            State::Buffers => {
                let mut addresses = buffers.iter_mut().map(AlignedBuf::address);
                Some([(); 3].map(|()| addresses.next().unwrap_or(0)))
            }
            State::Ram(addresses) => Some(addresses),
            State::Hbm(_) => None,
        };
        let sections = match state {
            State::Hbm(there) => &there.sections,
            _ => sections.as_ref().ok_or_else(missing)?,
        };
        let staged = staged_range(&parts);
        let [main_there, avg_there, sq_there] = sections;
        let mut up: Vec<Copy> = Vec::new();
        let mut filled: Vec<&Extent> = Vec::new();
        let mut copy_up = |from: u64, extent, at: u64, bytes: u64| {
            up.push(Copy {
                from: Place::Address(from),
                to: Place::Write(filled.len(), at),
                bytes: Bytes(bytes),
            });
            filled.push(extent);
        };
        for ((address, bytes), extent) in in_ram.iter().flatten().zip(lengths).zip(sections) {
            copy_up(*address, extent, 0, bytes);
        }
        if let (Some(range), Some(buffer)) = (&staged, buffers.last_mut()) {
            let (at, bytes) = (range.start as u64, range.len() as u64);
            copy_up(buffer.address() + at, grads.as_ref().ok_or_else(missing)?, at, bytes);
        }
        if !up.is_empty() {
            self.copy(Lane::H2d, format!("state of bucket {}", chunk.bucket), &[], &filled, up)?;
        }
        let mut reads = vec![main_there, avg_there, sq_there];
        reads.extend(staged.as_ref().and(grads.as_ref()));
        let first = if in_ram.is_some() { 0 } else { chunk.first };
        let name = format!("update bucket {} from element {}", chunk.bucket, chunk.first);
        let task = Submission {
            reads: &reads,
            writes: &[main_there, avg_there, sq_there],
            ..Submission::new(Lane::Optimizer, name)
        };
        let mut event = self.kernels(task, shape.moments, first, parts)?;
        let down: Vec<Copy> = match (in_ram, buffers.first_mut()) {
            (Some(addresses), _) => {
                let to = addresses.into_iter().zip(lengths).enumerate();
                let copy = |(i, (to, bytes))| Copy {
                    from: Place::Read(i, 0),
                    to: Place::Address(to),
                    bytes: Bytes(bytes),
                };
                to.map(copy).collect()
            }
            (None, Some(buffer)) if main => {
                let from = Place::Read(0, shape.bytes(0, chunk.first) as u64);
                vec![Copy { from, to: Place::Address(buffer.address()), bytes: Bytes(lengths[0]) }]
            }
            _ => Vec::new(),
        };
        if !down.is_empty() {
            let name = format!("state of bucket {} back", chunk.bucket);
            event = self.copy(Lane::D2h, name, &[main_there, avg_there, sq_there], &[], down)?;
        }
        Ok(event)
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

    /// Queues copies.
    fn copy(
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
    fn copy_now(
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

    /// Brings sections of a chunk that is at home here into buffers.
    pub(crate) fn fetch(
        &self,
        there: &Resident,
        chunk: Chunk,
        buffers: &mut [AlignedBuf],
    ) -> Result<(), OptimError> {
        let sections = &there.sections;
        let copies = buffers.iter_mut().enumerate().map(|(section, buffer)| Copy {
            from: Place::Read(section, there.shape.bytes(section, chunk.first) as u64),
            to: Place::Address(buffer.address()),
            bytes: Bytes(there.shape.bytes(section, chunk.len) as u64),
        });
        let copies = copies.collect();
        self.copy_now(Lane::D2h, format!("fetch bucket {}", chunk.bucket), &sections.each_ref(), &[], copies)
    }

    /// Puts sections of a chunk where it is at home here.
    pub(crate) fn put(
        &self,
        there: &Resident,
        chunk: Chunk,
        buffers: &mut [AlignedBuf],
    ) -> Result<(), OptimError> {
        let sections = &there.sections;
        let copies = buffers.iter_mut().enumerate().map(|(section, buffer)| Copy {
            from: Place::Address(buffer.address()),
            to: Place::Write(section, there.shape.bytes(section, chunk.first) as u64),
            bytes: Bytes(there.shape.bytes(section, chunk.len) as u64),
        });
        let copies = copies.collect();
        self.copy_now(Lane::H2d, format!("put bucket {}", chunk.bucket), &[], &sections.each_ref(), copies)
    }

    /// Brings the first bytes of one section of a chunk that is at home here into a buffer, or puts them there.
    pub(crate) fn move_section(
        &self,
        there: &Resident,
        chunk: Chunk,
        section: usize,
        buffer: &mut AlignedBuf,
        put: bool,
    ) -> Result<(), OptimError> {
        let extents = [&there.sections[section]];
        let at = there.shape.bytes(section, chunk.first) as u64;
        let (address, bytes) =
            (Place::Address(buffer.address()), Bytes(there.shape.bytes(section, chunk.len) as u64));
        let name = format!("{} of bucket {}", SECTIONS[section], chunk.bucket);
        if put {
            let copies = vec![Copy { from: address, to: Place::Write(0, at), bytes }];
            self.copy_now(Lane::H2d, name, &[], &extents, copies)
        } else {
            let copies = vec![Copy { from: Place::Read(0, at), to: address, bytes }];
            self.copy_now(Lane::D2h, name, &extents, &[], copies)
        }
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

    /// The parts of the norm of gradients in device memory: parameter, gradient, and its first element's number in the parameter.
    pub(crate) fn norm_parts(
        &self,
        grads: Vec<(usize, DeviceSlice, usize)>,
        scale: f64,
    ) -> Result<Vec<NormPart>, OptimError> {
        let blocks = grads.iter().flat_map(|(param, grad, first)| {
            let range = norm::blocks(*first, grad.len());
            range.map(|range| (*param, range.start / NORM_BLOCK))
        });
        let blocks: Vec<(usize, usize)> = blocks.collect();
        let Some(sums) = self.sums.as_ref().filter(|_| !blocks.is_empty()) else { return Ok(Vec::new()) };
        let before = self.failures();
        let task = Submission { writes: &[sums], ..Submission::new(Lane::Optimizer, "gradient norm") };
        match &self.kernels {
            Kernels::Cuda(adam) => {
                let adam = Arc::clone(adam);
                self.store.launch(task, move |cx| {
                    let mut at = cx.write(0).address;
                    for (_, grad, first) in &grads {
                        // SAFETY: the extent has room for all sums; the gradients are as `DeviceSlice` says, and their end is
                        // waited for below.
                        unsafe { adam.sums(cx.stream(), *grad, *first as u64, scale, at) }?;
                        at += 8 * norm::blocks(*first, grad.len()).count() as u64;
                    }
                    Ok(())
                })?
            }
            #[cfg(test)]
            Kernels::Simulated => simulated::sums(&self.store, task, grads, scale)?,
        };
        let (mut scratch, bytes) = (self.scratch(), Bytes(8 * blocks.len() as u64));
        let copies = vec![Copy { from: Place::Read(0, 0), to: Place::Address(scratch.address()), bytes }];
        self.copy_now(Lane::D2h, "partial sums".into(), &[sums], &[], copies)?;
        self.check(before)?;
        let found = scratch.as_slice().as_chunks().0.iter().map(|sum| f64::from_le_bytes(*sum));
        let part = |((param, block), sum)| NormPart { param, block, sum };
        Ok(blocks.into_iter().zip(found).map(part).collect())
    }
}

/// Bytes of the buffer of gradients in which those of the parts are.
fn staged_range(parts: &[Part]) -> Option<Range<usize>> {
    let staged = || parts.iter().filter(|part| matches!(part.grad, GradAt::Staged { .. }));
    let start = staged().map(|part| part.local.start).min()?;
    let end = staged().map(|part| part.local.end).max()?;
    Some(staged_at(start)..staged_at(end))
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
