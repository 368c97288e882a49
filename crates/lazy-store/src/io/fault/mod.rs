//! A double of the system that fails on purpose, for crash tests (feature `test-util`).
//!
//! [`Faults`] stands between the transfer loop and a real back end on a real file system, and between durable files and
//! their folder. It counts operations that change something (write requests, flushes, and changes of the folder), so
//! that a test can let the power go at each of them in turn; [`Faults::restart`] then leaves in the folder what a power
//! cut may leave: all that was flushed, and of the rest what the seed says.
//!
//! ```no_run
//! # use lazy_store::{durable::{DurableDir, IoOptions}, fault::Faults, StoreError};
//! # fn job(dir: &DurableDir) -> Result<(), StoreError> { Ok(()) }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let path = std::path::Path::new("folder");
//! for k in 0.. {
//!     let faults = Faults::new(k);
//!     faults.cut_at(k);
//!     let finished = DurableDir::open_with_faults(path, &IoOptions::default(), &faults).and_then(|dir| job(&dir));
//!     let cut = faults.power_is_off();
//!     faults.restart()?;
//!     // ... open the folder again and check that it is old or new ...
//!     if !cut {
//!         finished?;
//!         break;
//!     }
//! }
//! # Ok(()) }
//! ```

mod journal;
mod queue;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::hooks::{At, Change};
use super::{Op, Queue};
use crate::error::StoreError;
use crate::random::Random;
use journal::Journal;

/// What goes wrong, in which order: shared by everything that it was given to. Cheap to clone.
#[derive(Clone)]
pub struct Faults {
    state: Arc<Mutex<State>>,
}

/// What happens to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// It reports at most this many bytes.
    Short(usize),
    /// `EINTR`.
    Interrupted,
    /// `EAGAIN`.
    Again,
    /// `EIO`.
    Io,
    /// `ENOSPC`.
    NoSpace,
    /// One bit of the bytes read is wrong.
    FlipBit,
}

/// An operation that changes something.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// A write request: a transfer is cut into requests of at most 1 MiB.
    Write {
        /// Where.
        offset: u64,
        /// How much.
        bytes: u64,
    },
    /// A flush of a file's data.
    SyncData {
        /// The name that it was opened by.
        name: String,
    },
    /// A new file.
    Create {
        /// Its name.
        name: String,
    },
    /// A new folder.
    CreateDir {
        /// Its name.
        name: String,
    },
    /// A further name of a file.
    Link {
        /// The new name.
        name: String,
    },
    /// A rename.
    Rename {
        /// The old name.
        from: String,
        /// The new one.
        to: String,
    },
    /// A name removed.
    Remove {
        /// The name.
        name: String,
    },
    /// A folder removed.
    RemoveDir {
        /// Its name.
        name: String,
    },
    /// A flush of the folder.
    SyncDir,
}

pub(crate) struct State {
    random: Random,
    operations: Vec<Operation>,
    cut_at: Option<u64>,
    power_off: bool,
    counts: Counts,
    scripted: HashMap<(Kind, u64), Fault>,
    /// Chances in a thousand that a request is short, interrupted, or told to try again.
    rates: [u64; 3],
    space: Option<u64>,
    full_from: Option<u64>,
    reorder: bool,
    most_in_flight: usize,
    journal: Journal,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Read,
    Write,
    Sync,
}

#[derive(Default)]
struct Counts {
    reads: u64,
    writes: u64,
    syncs: u64,
}

impl Faults {
    /// A double that does nothing yet. The same seed and the same operations give the same faults.
    pub fn new(seed: u64) -> Self {
        Faults { state: Arc::new(Mutex::new(State::new(seed))) }
    }

    /// Forgets all counts, scripts and rates, as if this were new with another seed. Unflushed writes stay noted.
    pub fn reset(&self, seed: u64) {
        let mut state = self.lock();
        let journal = std::mem::take(&mut state.journal);
        *state = State { journal, ..State::new(seed) };
    }

    /// Lets the power go at operation `k`, counted from 0: it and everything after it fail.
    pub fn cut_at(&self, k: u64) {
        self.lock().cut_at = Some(k);
    }

    /// Whether the power is off.
    pub fn power_is_off(&self) -> bool {
        self.lock().power_off
    }

    /// The operations so far.
    pub fn operations(&self) -> Vec<Operation> {
        self.lock().operations.clone()
    }

    /// What happens to the `nth` read request from now on, counted from 0.
    pub fn on_read(&self, nth: u64, fault: Fault) {
        let mut state = self.lock();
        let at = state.counts.reads + nth;
        state.scripted.insert((Kind::Read, at), fault);
    }

    /// What happens to the `nth` write request from now on, counted from 0.
    pub fn on_write(&self, nth: u64, fault: Fault) {
        let mut state = self.lock();
        let at = state.counts.writes + nth;
        state.scripted.insert((Kind::Write, at), fault);
    }

    /// Lets the `nth` flush from now on, of a file's data or of the folder, fail with `EIO`. What it should have flushed
    /// is lost at the next power cut, whatever flush succeeds after it.
    pub fn on_sync(&self, nth: u64) {
        let mut state = self.lock();
        let at = state.counts.syncs + nth;
        state.scripted.insert((Kind::Sync, at), Fault::Io);
    }

    /// Lets the disk be full after that many more bytes were written.
    pub fn space(&self, bytes: u64) {
        self.lock().space = Some(bytes);
    }

    /// Lets the disk be full from operation `k` on, counted from 0: writes and new names of files and folders fail from there
    /// on, while what takes no space goes on.
    pub fn full_from(&self, k: u64) {
        self.lock().full_from = Some(k);
    }

    /// Chances in a thousand that a request comes back short, with `EINTR`, or with `EAGAIN`.
    pub fn rates(&self, short: u32, interrupted: u32, again: u32) {
        self.lock().rates = [short.into(), interrupted.into(), again.into()];
    }

    /// Reports completions late and in another order, where several requests are in flight.
    pub fn reorder(&self) {
        self.lock().reorder = true;
    }

    /// The most requests that were in flight at once in one direction.
    pub fn most_in_flight(&self) -> usize {
        self.lock().most_in_flight
    }

    /// Leaves in the folders what a power cut at this point may leave, and switches the power on again: unflushed writes
    /// are kept, dropped or torn at 512 bytes; of unflushed changes of a folder, a first part is kept, of each folder by
    /// itself. All handles of the folders have to be dropped before.
    ///
    /// # Errors
    ///
    /// What the file system refuses.
    pub fn restart(&self) -> io::Result<()> {
        let mut state = self.lock();
        let State { journal, random, .. } = &mut *state;
        std::mem::take(journal).settle(random)?;
        state.power_off = false;
        state.cut_at = None;
        Ok(())
    }

    pub(crate) fn wrap(&self, queue: Box<dyn Queue>, journaled: bool) -> Box<dyn Queue> {
        Box::new(queue::FaultQueue::new(queue, self.clone(), journaled))
    }

    /// Makes a change of a folder, or a flush, unless the power is off or goes.
    pub(crate) fn carry_out<T>(
        &self,
        at: At<'_>,
        change: Change<'_>,
        act: impl FnOnce() -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let mut state = self.lock();
        let (verb, operation) = describe(&change);
        let refused = |e: io::Error| StoreError::file(verb, at.path, e);
        state.count(operation).map_err(refused)?;
        if matches!(change, Change::Create { .. } | Change::CreateDir { .. } | Change::Link { .. })
            && state.full()
        {
            return Err(refused(Errno::NOSPC.into()));
        }
        if matches!(change, Change::SyncData { .. } | Change::SyncDir) && state.sync_fails() {
            if let Change::SyncData { file } = change {
                state.journal.lose(file).map_err(refused)?;
            }
            return Err(refused(Errno::IO.into()));
        }
        let undo = state.journal.prepare(at, change).map_err(refused)?;
        let done = act()?;
        state.journal.made(at, change, undo).map_err(refused)?;
        Ok(done)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn new(seed: u64) -> Self {
        State {
            random: Random::new(seed),
            operations: Vec::new(),
            cut_at: None,
            power_off: false,
            counts: Counts::default(),
            scripted: HashMap::new(),
            rates: [0; 3],
            space: None,
            full_from: None,
            reorder: false,
            most_in_flight: 0,
            journal: Journal::default(),
        }
    }

    /// Counts an operation; an error where the power is off, or goes with it.
    pub(crate) fn count(&mut self, operation: Operation) -> io::Result<()> {
        self.power()?;
        if self.cut_at == Some(self.operations.len() as u64) {
            self.power_off = true;
        }
        self.power()?;
        self.operations.push(operation);
        Ok(())
    }

    fn power(&self) -> io::Result<()> {
        if self.power_off { Err(io::Error::other("the power is off")) } else { Ok(()) }
    }

    /// Whether the operation counted last finds the disk full.
    fn full(&self) -> bool {
        self.full_from.is_some_and(|k| self.operations.len() as u64 > k)
    }

    fn sync_fails(&mut self) -> bool {
        let nth = self.counts.syncs;
        self.counts.syncs += 1;
        self.scripted.contains_key(&(Kind::Sync, nth))
    }

    /// What happens to a request that starts now.
    pub(crate) fn decide(&mut self, op: Op, offset: u64, len: usize) -> io::Result<Option<Fault>> {
        let (kind, nth) = match op {
            Op::Read => {
                self.power()?;
                (Kind::Read, &mut self.counts.reads)
            }
            Op::Write => {
                self.count(Operation::Write { offset, bytes: len as u64 })?;
                (Kind::Write, &mut self.counts.writes)
            }
        };
        let key = (kind, *nth);
        *nth += 1;
        if let Some(&fault) = self.scripted.get(&key) {
            return Ok(Some(fault));
        }
        if op == Op::Write && self.full() {
            return Ok(Some(Fault::NoSpace));
        }
        if let (Op::Write, Some(space)) = (op, &mut self.space) {
            let fits = (*space).min(len as u64);
            *space -= fits;
            match fits as usize {
                0 => return Ok(Some(Fault::NoSpace)),
                fits if fits < len => return Ok(Some(Fault::Short(fits))),
                _ => {}
            }
        }
        let kinds =
            [Fault::Short(1 + self.random.below(len as u64) as usize), Fault::Interrupted, Fault::Again];
        let drawn = self.random.below(1000);
        let mut sum = 0;
        for (fault, rate) in kinds.into_iter().zip(self.rates) {
            sum += rate;
            if drawn < sum {
                return Ok(Some(fault));
            }
        }
        Ok(None)
    }
}

fn describe(change: &Change<'_>) -> (&'static str, Operation) {
    match *change {
        Change::Create { name } => ("create a file in", Operation::Create { name: name.into() }),
        Change::CreateDir { name } => ("make a folder in", Operation::CreateDir { name: name.into() }),
        Change::Link { name } => ("link in", Operation::Link { name: name.into() }),
        Change::Rename { from, to } => ("rename in", Operation::Rename { from: from.into(), to: to.into() }),
        Change::Remove { name } => ("remove in", Operation::Remove { name: name.into() }),
        Change::RemoveDir { name } => ("remove a folder in", Operation::RemoveDir { name: name.into() }),
        Change::SyncDir => ("flush", Operation::SyncDir),
        Change::SyncData { file } => {
            let name = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            ("flush a file in", Operation::SyncData { name })
        }
    }
}
