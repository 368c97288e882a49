//! What a run is doing, for whoever watches it: tests that end it there.

use std::sync::OnceLock;

/// A part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Between steps, and whatever is not named here.
    Between,
    /// Forward and backward, and the norm of the gradients.
    Passes,
    /// From the first updated weights to the commit: state is read, updated and written back.
    WriteBack,
    /// A save begins; steps go on while it is written.
    Save,
    /// The last save is whole.
    Saved,
    /// An evaluation.
    Evaluation,
}

type Watch = Box<dyn Fn(Phase) + Send + Sync>;

/// Runs are watched as signals are heard: by the process.
static WATCH: OnceLock<Watch> = OnceLock::new();

/// Calls `watch` whenever a run of this process enters a phase, until the process ends. The first watch stays.
pub fn watch(watch: impl Fn(Phase) + Send + Sync + 'static) {
    let _ = WATCH.set(Box::new(watch));
}

pub(crate) fn enter(phase: Phase) {
    if let Some(watch) = WATCH.get() {
        watch(phase);
    }
}
