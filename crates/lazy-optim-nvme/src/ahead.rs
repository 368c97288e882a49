//! Reading ahead in files that are mostly read in order: a window of three sections at a time, the next ones by threads of their own.

use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::thread::{Builder, JoinHandle};

use lazy_model::Bytes;
use lazy_store::durable::AlignedBuf;

use crate::OptimError;
use crate::slot::BLOCK;

/// Blocks of a window: whole pages of every section in every format.
pub(crate) const WINDOW: usize = 16;

/// Windows read ahead at most: one is on its way while another is checked. More took more of the system's time and no less in all.
const MOST: usize = 2;

/// The sections of a window.
pub(crate) type Sections = [AlignedBuf; 3];

/// Fills the sections of a window, and checks them.
pub(crate) type Job = Box<dyn FnOnce(&mut Sections) -> Result<(), OptimError> + Send>;

/// Sections, and whether they hold what was to be read.
type Filled = (Sections, Result<(), OptimError>);

/// Where windows come from.
pub(crate) trait Windows {
    /// Names a window.
    type Key: Copy + PartialEq;

    /// What fills one.
    fn job(&self, key: Self::Key) -> Job;
    /// The one that is read after it, as a rule.
    fn next(&self, key: Self::Key) -> Option<Self::Key>;
}

/// The window read last, and those that are read ahead.
pub(crate) struct ReadAhead<K> {
    at: Option<K>,
    sections: Sections,
    /// Their names, and who reads them.
    ahead: VecDeque<(K, JoinHandle<Filled>)>,
    spare: Option<Sections>,
    /// How many are read ahead: none while windows are asked for out of order, then more and more.
    depth: usize,
}

fn sections() -> Result<Sections, OptimError> {
    let section = || AlignedBuf::zeroed(Bytes((WINDOW * BLOCK * 4) as u64));
    Ok([section()?, section()?, section()?])
}

impl<K: Copy + PartialEq> ReadAhead<K> {
    pub(crate) fn new() -> Result<Self, OptimError> {
        Ok(ReadAhead { at: None, sections: sections()?, ahead: VecDeque::new(), spare: None, depth: 0 })
    }

    /// The bytes of a window, read now unless they are there.
    pub(crate) fn look(&mut self, windows: &impl Windows<Key = K>, key: K) -> Result<[&[u8]; 3], OptimError> {
        if self.at != Some(key) {
            let in_order = self.at.take().and_then(|last| windows.next(last)) == Some(key);
            self.depth = if in_order { (2 * self.depth).clamp(1, MOST) } else { 0 };
            self.read(windows, key)?;
            self.at = Some(key);
            self.begin(windows, key);
        }
        Ok(self.sections.each_ref().map(AlignedBuf::as_slice))
    }

    fn read(&mut self, windows: &impl Windows<Key = K>, key: K) -> Result<(), OptimError> {
        match self.ahead.pop_front() {
            Some((found, thread)) if found == key => {
                let (sections, result) = thread.join().unwrap_or_else(|panic| resume_unwind(panic));
                self.spare = Some(std::mem::replace(&mut self.sections, sections));
                result
            }
            _ => {
                // Whoever reads what was dropped ends by itself.
                self.ahead.clear();
                windows.job(key)(&mut self.sections)
            }
        }
    }

    /// Begins to read what comes after `key`. Where there is no memory or no thread for that, it is read when it is asked for.
    fn begin(&mut self, windows: &impl Windows<Key = K>, key: K) {
        while self.ahead.len() < self.depth {
            let last = self.ahead.back().map_or(key, |(last, _)| *last);
            let Some(next) = windows.next(last) else { return };
            let Some(mut room) = self.spare.take().or_else(|| sections().ok()) else { return };
            let job = windows.job(next);
            let thread = Builder::new().name("read ahead".into()).spawn(move || {
                let result = job(&mut room);
                (room, result)
            });
            let Ok(thread) = thread else { return };
            self.ahead.push_back((next, thread));
        }
    }
}
