//! Slots that a generation holds are retired: replaced before a step would write them.

use lazy_model::Bytes;

use crate::home::Home;
use crate::{NvmeAdam, OptimError, slot};

/// What a new slot file is called until it takes a retired one's place.
pub(crate) const NEW: &str = ".new";

/// A slot that a generation holds.
struct Retired {
    bucket: usize,
    name: String,
    bytes: Bytes,
}

impl NvmeAdam {
    /// Gives the `touched` buckets a slot to write that no generation holds. That a slot is held shows in its file having
    /// another name, which a restart does not forget. None is replaced unless there is room for all.
    pub(crate) fn replace_retired(&mut self, touched: &[usize]) -> Result<(), OptimError> {
        let retired = self.retired(touched)?;
        if retired.is_empty() {
            return Ok(());
        }
        self.make_new(&retired).inspect_err(|_| {
            for slot in &retired {
                let _ = self.dir.remove(&slot.fresh());
            }
        })?;
        self.put_in_place(&retired).map_err(|error| self.latched(error, true))
    }

    /// Whether there are slots to be replaced.
    pub(crate) fn has_retired(&self, touched: &[usize]) -> Result<bool, OptimError> {
        Ok(!self.retired(touched)?.is_empty())
    }

    fn retired(&self, touched: &[usize]) -> Result<Vec<Retired>, OptimError> {
        let mut retired = Vec::new();
        for &index in touched {
            let Some(slots) = self.buckets[index].slots() else { continue };
            if slots.target().names()? > 1 {
                let bytes = self.layout.slot(index).file_bytes();
                retired.push(Retired { bucket: index, name: slot::file_name(index, slots.next()), bytes });
            }
        }
        Ok(retired)
    }

    fn make_new(&self, retired: &[Retired]) -> Result<(), OptimError> {
        let needed = retired.iter().map(|slot| slot.bytes).sum();
        let free = self.dir.free_space()?;
        if needed > free {
            return Err(OptimError::NoSpace { dir: self.dir.path().to_path_buf(), needed, free });
        }
        for slot in retired {
            // Left by a step that was cut short.
            if self.dir.exists(&slot.fresh())? {
                self.dir.remove(&slot.fresh())?;
            }
            self.dir.create_file(&slot.fresh(), slot.bytes)?;
        }
        Ok(())
    }

    /// The new names have to be on disk before a record names what is written under them.
    fn put_in_place(&mut self, retired: &[Retired]) -> Result<(), OptimError> {
        for slot in retired {
            self.dir.rename(&slot.fresh(), &slot.name)?;
            let file = self.dir.open_file(&slot.name)?;
            if let Home::Nvme(slots) = &mut self.buckets[slot.bucket].home {
                slots.replace_target(file);
            }
        }
        Ok(self.dir.sync()?)
    }
}

impl Retired {
    fn fresh(&self) -> String {
        format!("{}{NEW}", self.name)
    }
}
