//! Where the fault double sees changes of durable files. Empty in ordinary builds.

use std::path::Path;

use super::Queue;
use super::stripes::OpenFile;
use crate::error::StoreError;

/// A change of a folder of durable files, or a flush.
#[derive(Clone, Copy)]
#[cfg_attr(not(any(test, feature = "test-util")), allow(dead_code, reason = "read by the fault double"))]
pub(crate) enum Change<'a> {
    Create { name: &'a str },
    Link { from: &'a str, to: &'a str },
    Rename { from: &'a str, to: &'a str },
    Remove { name: &'a str },
    SyncDir,
    SyncData { file: &'a OpenFile },
}

/// What stands between durable files and the system: nothing, or the fault double.
#[derive(Clone, Default)]
pub(crate) struct Hooks {
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) faults: Option<super::fault::Faults>,
}

impl Hooks {
    /// Makes a change through `act`.
    pub(crate) fn carry_out<T>(
        &self,
        folder: &Path,
        change: Change<'_>,
        act: impl FnOnce() -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        #[cfg(any(test, feature = "test-util"))]
        if let Some(faults) = &self.faults {
            return faults.carry_out(folder, change, act);
        }
        let _ = (folder, change);
        act()
    }

    /// The queue that requests of durable files go through.
    pub(crate) fn wrap(&self, queue: Box<dyn Queue>) -> Box<dyn Queue> {
        #[cfg(any(test, feature = "test-util"))]
        if let Some(faults) = &self.faults {
            return faults.wrap(queue, true);
        }
        queue
    }
}
