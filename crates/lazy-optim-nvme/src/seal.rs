//! Sealing slots: their heads are written and their files flushed, several at once, when all that a step writes has been written.
//!
//! A flush while other buckets stream was tried: a drive that has to be told to write back what it holds is then made to wait in
//! the middle of transfers, and the step took longer (docs/performance.md).

use std::panic::resume_unwind;
use std::thread::{Builder, ScopedJoinHandle};

use lazy_store::durable::DurableFile;

use crate::OptimError;
use crate::files::put_bytes;

/// Flushes that run at once: a flush mostly waits for the drive, and drives take several in about the time of one.
const AT_ONCE: usize = 16;

/// The slots to seal.
#[derive(Default)]
pub(crate) struct Sealer {
    slots: Vec<(DurableFile, Vec<u8>)>,
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
    /// Has `head` written at the start of `file`, and the file flushed, in the end.
    pub(crate) fn seal(&mut self, file: &DurableFile, head: Vec<u8>) {
        self.slots.push((file.clone(), head));
    }

    /// Seals them. Returns the first failure, of a flush if there was one, after all that were begun have ended.
    pub(crate) fn finish(self) -> Result<(), Unsealed> {
        for slots in self.slots.chunks(AT_ONCE) {
            let results: Vec<Result<(), Unsealed>> = std::thread::scope(|scope| {
                // Where the system gives no thread, this one does it.
                let begun: Vec<_> = (slots.iter())
                    .map(|(file, head)| {
                        let thread = Builder::new().spawn_scoped(scope, || seal(file, head));
                        thread.map_err(|_| seal(file, head))
                    })
                    .collect();
                let end =
                    |thread: Result<ScopedJoinHandle<'_, _>, _>| match thread.map(ScopedJoinHandle::join) {
                        Ok(Ok(result)) | Err(result) => result,
                        Ok(Err(panic)) => resume_unwind(panic),
                    };
                begun.into_iter().map(end).collect()
            });
            let failed: Vec<Unsealed> = results.into_iter().filter_map(Result::err).collect();
            // A failed flush says the most about what is to be done.
            if let Some(worst) = failed.into_iter().reduce(|a, b| if b.flush && !a.flush { b } else { a }) {
                return Err(worst);
            }
        }
        Ok(())
    }
}
