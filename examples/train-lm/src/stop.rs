//! Stopping early: the first signal asks, the second insists.
//!
//! Once asked, the probe gives up and a run ends after the step it is in, committed. The state on disk is whole at every
//! moment, so a second signal may end the program on the spot; the spill folder it leaves is what `clean` is for.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use signal_hook::consts::{SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;

use crate::error::{Result, TrainError};

/// Added to a signal's number for the exit status, as shells do.
const BY_SIGNAL: u8 = 128;

struct Asked {
    asked: Arc<AtomicBool>,
    signal: Arc<AtomicUsize>,
}

/// Signals are the process's, not a run's: several runs in one process share this.
fn state() -> &'static Asked {
    static ASKED: OnceLock<Asked> = OnceLock::new();
    ASKED.get_or_init(|| Asked { asked: Arc::default(), signal: Arc::default() })
}

/// From here on an interrupt (Ctrl-C) or a termination request is noted instead of ending the process, and a file that grows over the
/// limit of `ulimit -f` is an error of the write, as a full disk is.
///
/// # Errors
/// When the system refuses to register a handler.
pub fn listen() -> Result<()> {
    static LISTENING: OnceLock<()> = OnceLock::new();
    if LISTENING.set(()).is_err() {
        return Ok(());
    }
    let Asked { asked, signal } = state();
    for number in [SIGINT, SIGTERM] {
        // In this order: the second signal finds the flag that the first one raised.
        flag::register_conditional_shutdown(number, i32::from(BY_SIGNAL) + number, Arc::clone(asked))
            .and_then(|_| flag::register_usize(number, Arc::clone(signal), number as usize))
            .and_then(|_| flag::register(number, Arc::clone(asked)))
            .map_err(|e| refused(number, e))?;
    }
    flag::register(SIGXFSZ, Arc::default()).map_err(|e| refused(SIGXFSZ, e))?;
    Ok(())
}

fn refused(number: i32, error: std::io::Error) -> TrainError {
    TrainError::Usage(format!("cannot listen for signal {number}: {error}"))
}

/// Whether somebody wants the run to stop.
pub fn asked() -> bool {
    state().asked.load(Ordering::SeqCst)
}

/// For work before the first step, which is simply given up.
///
/// # Errors
/// [`TrainError::Interrupted`] once asked to stop.
pub fn check() -> Result<()> {
    if asked() { Err(TrainError::Interrupted) } else { Ok(()) }
}

/// What a program that was stopped exits with.
pub fn exit_status() -> u8 {
    BY_SIGNAL + state().signal.load(Ordering::SeqCst) as u8
}
