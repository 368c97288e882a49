//! A thread that looks at bytes for the transfer loop: with a fast drive, moving them and making their checksums is more than
//! one thread's work.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::Window;
use super::note::{Note, Watch};

/// With fewer processors there is no helper: checksums made between requests were seen to take a little less of the CPU than a
/// second thread that has to be woken for each, and the drive was no slower for it.
/// Tests have it wherever there are two.
const PROCESSORS: usize = if cfg!(any(test, feature = "test-util")) { 2 } else { 4 };

/// Looks at pieces in the order in which they come. Ends when it is dropped.
pub(crate) struct Helper {
    errands: Option<Sender<(Window, Watch)>>,
    notes: Receiver<Note>,
    thread: Option<JoinHandle<()>>,
}

impl Helper {
    /// `None` where there are too few processors for it, or no thread.
    pub(crate) fn start() -> Option<Self> {
        if std::thread::available_parallelism().map_or(1, usize::from) < PROCESSORS {
            return None;
        }
        let (errands, received) = channel::<(Window, Watch)>();
        let (send, notes) = channel();
        let run = move || {
            for (window, watch) in received {
                // SAFETY: whoever sent it waits for the note before anybody changes the bytes.
                let note = watch.note(unsafe { window.bytes() });
                if send.send(note).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("lazy checksums".to_owned()).spawn(run).ok()?;
        Some(Helper { errands: Some(errands), notes, thread: Some(thread) })
    }

    /// Hands a piece over; `false` where the helper is gone.
    ///
    /// # Safety
    ///
    /// The memory is mapped, initialised and changed by nobody until its note was taken, or `note` said that there is none.
    pub(crate) unsafe fn look(&self, window: Window, watch: &Watch) -> bool {
        let watch = Watch { wanted: None, ..watch.clone() };
        self.errands.as_ref().is_some_and(|errands| errands.send((window, watch)).is_ok())
    }

    /// The note of the oldest piece that has none yet, if it is there. An error says that none will ever come, and that the
    /// helper looks at nothing any more.
    pub(crate) fn note(&self, wait: bool) -> Result<Option<Note>, ()> {
        if wait {
            return self.notes.recv().map(Some).map_err(|_| ());
        }
        match self.notes.try_recv() {
            Ok(note) => Ok(Some(note)),
            Err(std::sync::mpsc::TryRecvError::Empty) => Ok(None),
            Err(std::sync::mpsc::TryRecvError::Disconnected) => Err(()),
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.errands = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
