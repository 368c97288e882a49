//! Submissions: how tasks are queued, and the one place where what they have to wait for is derived.

use std::sync::Arc;

use lazy_model::{Bytes, Lane, Tier};

use super::{Event, Extent, State, Store};
use crate::clock::{Clock, Token};
use crate::drive;
use crate::error::{BoxError, StoreError};
use crate::lanes::Kind;
use crate::memory::{Access, StreamAccess};
use crate::mutants::Wait;
use crate::work::{Job, Kept, Places, Routine, Views, Work};

/// One task as it is submitted: what it is called, where it runs, and what it reads and writes. The store derives from
/// that what it has to wait for.
#[derive(Clone, Debug)]
pub struct Submission<'a> {
    /// The queue.
    pub lane: Lane,
    /// Names the task in errors and spans. One made once is cloned for nothing.
    pub name: Arc<str>,
    /// Extents that the task reads. An extent listed here and in `writes` is updated in place.
    pub reads: &'a [&'a Extent],
    /// Extents that the task writes.
    pub writes: &'a [&'a Extent],
    /// Tasks to wait for besides those that the extents imply.
    pub after: &'a [Event],
    /// Bytes moved, for the span and for the link limits; zero for arithmetic.
    pub bytes: Bytes,
}

impl<'a> Submission<'a> {
    /// A task that reads, writes and waits for nothing and moves no bytes: a start for struct update syntax.
    pub fn new(lane: Lane, name: impl Into<Arc<str>>) -> Submission<'a> {
        Submission { lane, name: name.into(), reads: &[], writes: &[], after: &[], bytes: Bytes::ZERO }
    }
}

impl State {
    /// The one place where waits are derived: last writes of what is read, last writes and reads of what is written.
    fn waits(&self, task: &Submission<'_>) -> Result<Clock, StoreError> {
        let mut waits = Clock::default();
        for extent in task.reads {
            match self.extents.get(extent.id).and_then(|h| h.last_write) {
                Some(write) if self.mutant.keeps(Wait::Read(task.lane)) => waits.add(write),
                Some(_) => {}
                None if extent.bytes == Bytes::ZERO => {}
                None => {
                    let (task, tier, offset, bytes) =
                        (task.name.to_string(), extent.tier, extent.offset, extent.bytes);
                    return Err(StoreError::NotWritten { task, tier, offset, bytes });
                }
            }
        }
        for hazards in task.writes.iter().filter_map(|e| self.extents.get(e.id)) {
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
            if let Some(hazards) = self.extents.get_mut(extent.id) {
                hazards.reads.add(token);
            }
        }
        for extent in task.writes {
            if let Some(hazards) = self.extents.get_mut(extent.id) {
                // Whoever waits for this write waits for all that it waited for.
                hazards.inherited = Clock::default();
                hazards.reads = Clock::default();
                hazards.last_write = Some(token);
            }
        }
    }
}

impl Store {
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
        let issue = move |views: &Views| {
            issue(&views.on_stream(&*device, stream)?)?;
            Ok(Kept::Nothing)
        };
        self.enqueue(task, Kind::Stream, Work::once(issue))
    }

    /// Queues one item of work that is submitted again and again: on the host device as [`Store::submit`] does, on a device
    /// with streams as [`Store::launch`] does. Takes no memory once the queues have grown to what is submitted ahead, for up
    /// to eight extents read and eight written.
    ///
    /// # Errors
    ///
    /// Those of [`Store::submit`].
    pub fn submit_routine(
        &self,
        task: Submission<'_>,
        routine: &Arc<dyn Routine>,
        item: usize,
    ) -> Result<Event, StoreError> {
        let kind = if self.inner().device.is_some() { Kind::Stream } else { Kind::Host };
        refuse(&task, |tier| tier == Tier::Nvme)?;
        self.enqueue(task, kind, Work::Routine { routine: Arc::clone(routine), item })
    }

    /// [`Store::submit`], for tasks that also name NVMe extents. [`Access`] leaves those out. Nothing in the memory of a
    /// device may be among them.
    pub(crate) fn enqueue_access(
        &self,
        task: Submission<'_>,
        run: impl FnOnce(&mut Access<'_>) -> Result<(), BoxError> + Send + 'static,
    ) -> Result<Event, StoreError> {
        let run = move |views: &Views| {
            // SAFETY: this is the task's turn, and the mappings are `Inner`'s, from within which tasks run.
            run(&mut unsafe { views.access() })?;
            Ok(Kept::Nothing)
        };
        self.enqueue(task, Kind::Host, Work::once(run))
    }

    /// Queues a task. The one place where anything is queued.
    pub(crate) fn enqueue(&self, task: Submission<'_>, kind: Kind, work: Work) -> Result<Event, StoreError> {
        let inner = self.inner();
        self.check(&task)?;
        let reads = task.reads.iter().filter_map(|extent| {
            let view = inner.view(extent)?;
            let in_place = task.writes.iter().any(|w| w.id == extent.id);
            Some(if in_place { view.empty() } else { view })
        });
        let reads: Places = reads.collect();
        let writes: Places = task.writes.iter().filter_map(|e| inner.view(e)).collect();

        let mut state = inner.lock();
        let waits = state.waits(&task)?;
        let fresh: Vec<usize> = (0..if inner.poison { writes.len() } else { 0 })
            .filter(|&i| {
                let mut in_memory = task.writes.iter().filter(|e| e.tier != Tier::Nvme);
                let hazards = in_memory.nth(i).and_then(|e| state.extents.get(e.id));
                hazards.is_some_and(|h| h.last_write.is_none())
            })
            .collect();
        let job = state.mutant.delayed(task.lane, Job { views: Views { reads, writes, fresh }, work });
        let token = state.lanes.push((task.lane, kind), Arc::clone(&task.name), task.bytes, waits, job);
        state.note(&task, token);
        drive::announce(inner, state);
        Ok(Event { inner: Arc::clone(inner), token })
    }

    fn check(&self, task: &Submission<'_>) -> Result<(), StoreError> {
        let foreign = |what| Err(StoreError::Foreign { task: task.name.to_string(), what });
        if task.reads.iter().chain(task.writes).any(|e| !Arc::ptr_eq(&e.inner, self.inner())) {
            return foreign("extent");
        }
        if task.after.iter().any(|e| !Arc::ptr_eq(&e.inner, self.inner())) {
            return foreign("event");
        }
        for (i, extent) in task.writes.iter().enumerate() {
            if task.writes[..i].iter().any(|earlier| earlier.id == extent.id) {
                let (task, tier, offset, bytes) =
                    (task.name.to_string(), extent.tier, extent.offset, extent.bytes);
                return Err(StoreError::WrittenTwice { task, tier, offset, bytes });
            }
        }
        Ok(())
    }
}

/// Refuses a task with extents in some tiers.
fn refuse(task: &Submission<'_>, in_tier: impl Fn(Tier) -> bool) -> Result<(), StoreError> {
    match task.reads.iter().chain(task.writes).find(|extent| in_tier(extent.tier)) {
        Some(extent) => Err(StoreError::NotInMemory { task: task.name.to_string(), tier: extent.tier }),
        None => Ok(()),
    }
}
