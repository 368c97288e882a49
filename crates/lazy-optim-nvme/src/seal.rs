//! Sealing slots beside the stream: as soon as a slot's last chunk is written its head follows and the file is flushed, while
//! the next buckets stream. At the commit only the last flushes are left to wait for.

use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use lazy_store::durable::DurableFile;

use crate::OptimError;
use crate::files::put_bytes;

/// Flushes that run at once: a flush mostly waits for the drive, and drives take several in about the time of one.
const AT_ONCE: usize = 16;

/// The slots being sealed. Dropping it waits for them.
#[derive(Default)]
pub(crate) struct Sealer {
    running: VecDeque<JoinHandle<Result<(), Unsealed>>>,
    failed: Option<Unsealed>,
}

/// A slot that could not be sealed.
pub(crate) struct Unsealed {
    pub(crate) error: OptimError,
    /// It was the flush that failed: what the drive holds of the file is not known any more.
    pub(crate) flush: bool,
}

fn seal(file: &DurableFile, head: &[u8]) -> Result<(), Unsealed> {
    put_bytes(file, 0, head).map_err(|error| Unsealed { error, flush: false })?;
    file.sync_data().map_err(|error| Unsealed { error: error.into(), flush: true })
}

impl Sealer {
    /// Writes `head` at the start of `file` and flushes it, on a thread.
    pub(crate) fn seal(&mut self, file: &DurableFile, head: Vec<u8>) {
        if self.running.len() == AT_ONCE {
            self.wait_for_oldest();
        }
        let (on_thread, head) = (file.clone(), Arc::<[u8]>::from(head));
        let bytes = Arc::clone(&head);
        match Builder::new().name("lazy seal".into()).spawn(move || seal(&on_thread, &bytes)) {
            Ok(thread) => self.running.push_back(thread),
            // Where the system gives no thread, this one does it.
            Err(_) => self.note(seal(file, &head)),
        }
    }

    fn wait_for_oldest(&mut self) {
        match self.running.pop_front().map(JoinHandle::join) {
            Some(Ok(result)) => self.note(result),
            Some(Err(panic)) => resume_unwind(panic),
            None => {}
        }
    }

    fn note(&mut self, result: Result<(), Unsealed>) {
        // A failed flush says the most about what is to be done.
        match (result, &self.failed) {
            (Err(found), Some(first)) if first.flush || !found.flush => drop(found),
            (Err(found), _) => self.failed = Some(found),
            (Ok(()), _) => {}
        }
    }

    /// Waits for all of them; the first failure, of a flush if there was one.
    pub(crate) fn finish(mut self) -> Result<(), Unsealed> {
        while !self.running.is_empty() {
            self.wait_for_oldest();
        }
        self.failed.take().map_or(Ok(()), Err)
    }
}

impl Drop for Sealer {
    fn drop(&mut self) {
        for thread in self.running.drain(..) {
            let _ = thread.join();
        }
    }
}
