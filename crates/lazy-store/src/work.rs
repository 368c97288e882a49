//! What a task does when its turn has come, and where the bytes that it works on lie.
//!
//! One of the few modules with `unsafe`: here places in the arenas become the bytes of one task.

use std::sync::Arc;

use lazy_model::Lane;
use smallvec::SmallVec;

use crate::device::{Device, DeviceCopy, Stream};
use crate::error::{BoxError, StoreError};
use crate::io::Op;
use crate::memory::{Access, StreamAccess, View};
use crate::spill::{HostCopy, Spill, Transfer};
use crate::store::Inner;

/// Value of poisoned bytes: a NaN in every float format wider than a byte.
const POISON: u8 = 0xff;

/// Extents of one kind whose places a task holds in itself; a task with more of them takes memory for the list.
const PLACES: usize = 8;

/// Work that is submitted again and again, each time for another item of it: shared, so that submitting it
/// ([`Store::submit_routine`](crate::Store::submit_routine)) takes no memory.
pub trait Routine: Send + Sync {
    /// Does the work of `item` on the CPU: what the closure of [`Store::submit`](crate::Store::submit) does.
    ///
    /// # Errors
    ///
    /// Whatever keeps it from being done: the task has failed then.
    fn run(&self, item: usize, access: &mut Access<'_>) -> Result<(), BoxError>;

    /// Puts the work of `item` on the stream of its lane, beside a device that has streams: what the closure of
    /// [`Store::launch`](crate::Store::launch) does. The routine, and what it owns, stays until the work has run.
    ///
    /// # Errors
    ///
    /// Whatever keeps it from being put there; [`StoreError::Device`] for a routine that has no such work.
    fn issue(&self, item: usize, access: &StreamAccess<'_>) -> Result<(), BoxError> {
        let _ = (item, access);
        let (device, what) = ("a device with streams", "issue a routine that runs on the CPU only");
        let instead =
            "submit it to a store on the host device, or have the routine put its work on the stream";
        Err(StoreError::Device { device, what, instead }.into())
    }
}

/// What a stream task leaves behind to be dropped when it completes.
#[derive(Default)]
pub(crate) enum Kept {
    #[default]
    Nothing,
    Owned(#[expect(dead_code, reason = "held, not used")] Box<dyn Send>),
    Routine(#[expect(dead_code, reason = "held, not used")] Arc<dyn Routine>),
}

/// Places of extents, in the order in which a submission lists them.
pub(crate) type Places = SmallVec<[View; PLACES]>;

type Once = Box<dyn FnOnce(&Inner, &Views) -> Result<Kept, BoxError> + Send>;

/// Where a task's extents lie, those on NVMe left out.
#[derive(Default)]
pub(crate) struct Views {
    pub(crate) reads: Places,
    pub(crate) writes: Places,
    /// Those of `writes` that are to be poisoned first.
    pub(crate) fresh: Vec<usize>,
}

impl Views {
    /// The bytes, for a task on the CPU. What it writes first is poisoned.
    ///
    /// # Safety
    ///
    /// This is the task's turn, and the store's arenas outlive what is returned: the waits derived from the hazards have
    /// held it back until earlier users of these bytes were done, and hold later ones back until it is.
    pub(crate) unsafe fn access(&self) -> Access<'_> {
        // SAFETY: by the contract of this function; `Store::check` made sure that no write is listed twice, in-place reads
        // are empty, and extents that are live at once do not overlap.
        let mut access = unsafe { Access::new(&self.reads, &self.writes) };
        for &i in &self.fresh {
            access.write(i).fill(POISON);
        }
        access
    }

    /// The places, for a task that puts work on a stream, behind the poisoning of what it writes first.
    pub(crate) fn on_stream<'a>(
        &'a self,
        device: &'a dyn Device,
        stream: Stream,
    ) -> Result<StreamAccess<'a>, BoxError> {
        for &i in &self.fresh {
            let view = self.writes[i];
            // SAFETY: the waits derived from the hazards hold back this stream until earlier users of these bytes are
            // done; extents that are live at once do not overlap.
            unsafe { device.fill(stream, view.start(), view.len(), POISON) }?;
        }
        Ok(StreamAccess { device, stream, reads: &self.reads, writes: &self.writes })
    }
}

/// How bytes move between an extent in memory and the spill files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// From and to host memory, where it lies.
    Host,
    /// From and to HBM, through the staging ring.
    Staged,
    /// From and to the memory of a device, where it lies; where it is `sealed`, the device makes checksums, extent by extent.
    Device { sealed: bool },
}

/// What a task does.
pub(crate) enum Work {
    /// What somebody thought of for this task alone.
    Once(Once),
    /// One item of work that is submitted again and again.
    Routine { routine: Arc<dyn Routine>, item: usize },
    /// Copies what is read to what is written, both in memory.
    Copy,
    /// Sets every byte of what is written, in memory; that of a device on its stream.
    Fill { value: u8, on_stream: bool },
    /// Moves bytes between memory and the spill files, at `offset` there.
    Spill { op: Op, offset: u64, way: Way },
}

impl Work {
    /// A closure. What it returns is dropped when the task has completed.
    pub(crate) fn once(run: impl FnOnce(&Views) -> Result<Kept, BoxError> + Send + 'static) -> Work {
        Work::Once(Box::new(move |_, views| run(views)))
    }
}

/// A task's work, and what it works on.
pub(crate) struct Job {
    pub(crate) views: Views,
    pub(crate) work: Work,
}

impl Job {
    /// The same as a transfer that can be carried out together with others, where it is one.
    pub(crate) fn transfer(&self) -> Option<Transfer> {
        let Work::Spill { op, offset, way } = self.work else { return None };
        let device = match way {
            Way::Host => false,
            Way::Device { sealed: false } => true,
            Way::Staged | Way::Device { sealed: true } => return None,
        };
        let view = match op {
            Op::Write => self.views.reads.first()?,
            Op::Read => self.views.writes.first()?,
        };
        Some(Transfer { op, offset, memory: view.window(), device })
    }

    /// Does the work, or puts it on the stream of `lane`. To be called by whoever runs the queues, in the task's turn.
    pub(crate) fn run(self, inner: &Inner, lane: Lane) -> Result<Kept, BoxError> {
        let Job { views, work } = self;
        match (work, &inner.device) {
            (Work::Once(run), _) => return run(inner, &views),
            (Work::Routine { routine, item }, None) => {
                // SAFETY: this is the task's turn, and the arenas are `Inner`'s.
                routine.run(item, &mut unsafe { views.access() })?;
            }
            (Work::Routine { routine, item }, Some(device)) => {
                routine.issue(item, &views.on_stream(&**device, device.stream(lane))?)?;
                return Ok(Kept::Routine(routine));
            }
            (Work::Copy, None) => {
                // SAFETY: as above.
                let mut access = unsafe { views.access() };
                let (reads, writes) = access.split();
                reads.zip(writes).for_each(|(from, to)| to.copy_from_slice(from));
            }
            (Work::Copy, Some(device)) => {
                for (from, to) in views.reads.iter().zip(&views.writes) {
                    // SAFETY: both lie in the store's pinned arenas, and the waits derived from the hazards order the
                    // streams.
                    unsafe { device.copy(device.stream(lane), from.start(), to.start(), to.len()) }?;
                }
            }
            (Work::Fill { value, on_stream: true }, Some(device)) => {
                for view in &views.writes {
                    // SAFETY: as above.
                    unsafe { device.fill(device.stream(lane), view.start(), view.len(), value) }?;
                }
            }
            (Work::Fill { value, .. }, _) => {
                // SAFETY: as above.
                let mut access = unsafe { views.access() };
                access.split().1.for_each(|bytes| bytes.fill(value));
            }
            (Work::Spill { op, offset, way }, device) => {
                let spill = inner.spill.as_ref().ok_or(StoreError::NoNvme)?;
                match (way, device) {
                    (Way::Staged, Some(device)) => {
                        let copy =
                            |view, out| DeviceCopy::new(Arc::clone(device), device.stream(lane), view, out);
                        staged_on_device(&views, spill, op, offset, copy)?;
                    }
                    (Way::Device { .. }, _) => in_device(&views, spill, op, offset)?,
                    (Way::Host | Way::Staged, _) => {
                        // SAFETY: as above.
                        on_host(&mut unsafe { views.access() }, spill, op, offset, way)?;
                    }
                }
            }
        }
        Ok(Kept::Nothing)
    }
}

/// Moves bytes between memory of the host and the spill files.
fn on_host(access: &mut Access<'_>, spill: &Spill, op: Op, offset: u64, way: Way) -> Result<(), StoreError> {
    match (op, way) {
        (Op::Write, Way::Staged) => {
            let from = access.read(0);
            spill.write_staged(offset, from.len() as u64, &mut HostCopy::Out(from))
        }
        (Op::Read, Way::Staged) => {
            let to = access.write(0);
            spill.read_staged(offset, to.len() as u64, &mut HostCopy::In(to))
        }
        (Op::Write, _) => spill.write(offset, access.read(0)),
        (Op::Read, _) => spill.read(offset, access.write(0)),
    }
}

/// Moves bytes between memory of a device and the spill files through the staging ring.
fn staged_on_device(
    views: &Views,
    spill: &Spill,
    op: Op,
    offset: u64,
    copy: impl FnOnce(View, bool) -> DeviceCopy,
) -> Result<(), StoreError> {
    match op {
        Op::Write => {
            let from = views.reads[0];
            spill.write_staged(offset, from.len() as u64, &mut copy(from, true))
        }
        Op::Read => {
            let to = views.writes[0];
            spill.read_staged(offset, to.len() as u64, &mut copy(to, false))
        }
    }
}

/// Moves bytes between memory of a device, where it lies, and the spill files.
fn in_device(views: &Views, spill: &Spill, op: Op, offset: u64) -> Result<(), StoreError> {
    match op {
        // SAFETY: the extent is held by this task, and what it waited for has completed.
        Op::Write => unsafe { spill.write_device(offset, views.reads[0].window()) },
        // SAFETY: as above.
        Op::Read => unsafe { spill.read_device(offset, views.writes[0].window()) },
    }
}
