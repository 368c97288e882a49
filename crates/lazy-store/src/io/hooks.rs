//! Where the fault double sees changes of durable files. Empty in ordinary builds.

use std::fs::File;
use std::path::Path;

use super::Queue;
use super::stripes::OpenFile;
use crate::error::StoreError;

/// A change of a folder of durable files, or a flush.
#[derive(Clone, Copy)]
#[cfg_attr(not(any(test, feature = "test-util")), allow(dead_code, reason = "read by the fault double"))]
pub(crate) enum Change<'a> {
    Create { name: &'a str },
    CreateDir { name: &'a str },
    Link { name: &'a str },
    Rename { from: &'a str, to: &'a str },
    Remove { name: &'a str },
    RemoveDir { name: &'a str },
    SyncDir,
    SyncData { file: &'a OpenFile },
}

/// Where a change is made.
#[derive(Clone, Copy)]
#[cfg_attr(not(any(test, feature = "test-util")), allow(dead_code, reason = "read by the fault double"))]
pub(crate) struct At<'a> {
    pub(crate) folder: &'a File,
    /// The folder's path when it was opened.
    pub(crate) path: &'a Path,
    /// The path of the outermost folder of durable files that it lies in.
    pub(crate) root: &'a Path,
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
        at: At<'_>,
        change: Change<'_>,
        act: impl FnOnce() -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        #[cfg(any(test, feature = "test-util"))]
        if let Some(faults) = &self.faults {
            return faults.carry_out(at, change, act);
        }
        let _ = (at, change);
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
