//! Generations of the optimizer's state that a run saves while it goes on.

use std::path::{Path, PathBuf};

use lazy_optim_nvme::{NvmeAdam, Saving, generations};

use crate::error::Result;
use crate::phase::{self, Phase};

/// Saves, and keeps the newest.
pub(crate) struct Saves {
    dir: PathBuf,
    keep: usize,
    /// One that is being written while steps are taken.
    under_way: Option<Saving>,
}

impl Saves {
    /// In the folder of the state.
    pub(crate) fn new(dir: &Path, keep: usize) -> Saves {
        Saves { dir: dir.to_owned(), keep, under_way: None }
    }

    /// Begins to save the state after so many steps, unless it is saved already.
    ///
    /// # Errors
    /// When the last save or this one fails.
    pub(crate) fn begin(&mut self, optimizer: &mut NvmeAdam, done: u64) -> Result<()> {
        self.finish(optimizer)?;
        let name = format!("step-{done}");
        if generations(&self.dir)?.iter().all(|known| known.name != name) {
            phase::enter(Phase::Save);
            self.under_way = Some(optimizer.save(&name)?);
        }
        Ok(())
    }

    /// Looks after a save under way, between steps: once it is whole, older ones go.
    ///
    /// # Errors
    /// When it has failed.
    pub(crate) fn look_after(&mut self, optimizer: &mut NvmeAdam) -> Result<()> {
        match &self.under_way {
            Some(saving) if saving.is_finished() => self.finish(optimizer),
            _ => Ok(()),
        }
    }

    /// Waits for a save under way. Older ones than are kept go only now that it is whole.
    ///
    /// # Errors
    /// When it has failed.
    pub(crate) fn finish(&mut self, optimizer: &mut NvmeAdam) -> Result<()> {
        if let Some(saving) = self.under_way.take() {
            saving.wait()?;
            phase::enter(Phase::Saved);
        }
        let found = generations(&self.dir)?;
        for old in &found[..found.len().saturating_sub(self.keep)] {
            optimizer.remove_generation(&old.name)?;
        }
        Ok(())
    }
}
