//! Loading: a store made from generations.

use std::path::Path;

use lazy_model::Bytes;
use lazy_store::durable::DurableDir;

use crate::files::{LAYOUT_FILE, RECORD_FILE, open_dir, write_bytes};
use crate::home;
use crate::layout::{Layout, layout_file_bytes};
use crate::record::{self, Record, Standing};
use crate::slot::{self, SlotShape};
use crate::source::Source;
use crate::{AdamOptions, Durability, NvmeAdam, OptimError, ParamSpec, save};

/// What loading may do besides what is harmless.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Give up the state that the folder holds: going back to a generation saved in it. Until the load has come to its end
    /// the generation is all there is; if it is cut short, load again.
    pub replace: bool,
}

impl NvmeAdam {
    /// Makes a store in `dir`, and the folder where it is absent, from a generation saved with the same parameters and bucket
    /// size. Its slot files are linked, not copied: `dir` has to lie on the same file system.
    ///
    /// # Errors
    ///
    /// [`OptimError::NoStore`] where there is no generation: a trainer may then start with a fresh state and say so.
    /// [`OptimError::LayoutMismatch`]; [`OptimError::Damaged`] and [`OptimError::WrongFile`] for files that are not those
    /// that were saved; [`OptimError::AlreadyExists`] where `dir` holds a store and [`LoadOptions::replace`] is not set;
    /// [`OptimError::NoSpace`]. What the folder held is still there then.
    pub fn load(
        source: &Path,
        dir: &Path,
        params: &[ParamSpec],
        options: &AdamOptions,
        load: LoadOptions,
    ) -> Result<Self, OptimError> {
        let source = Source::open(source)?;
        Self::load_in(&source, open_dir(dir, options)?, params, options, load)
    }

    pub(crate) fn load_in(
        source: &Source,
        dir: DurableDir,
        params: &[ParamSpec],
        options: &AdamOptions,
        load: LoadOptions,
    ) -> Result<Self, OptimError> {
        home::check(options)?;
        let layout = Layout::new(params, options.bucket_elements)?;
        save::sweep(&dir)?;
        let old = old_files(&dir)?;
        if !load.replace && old.iter().any(|name| name == LAYOUT_FILE || name == RECORD_FILE) {
            return Err(OptimError::AlreadyExists { dir: dir.path().to_path_buf() });
        }
        if let Some(difference) = source.manifest.layout.first_difference(&layout) {
            return Err(OptimError::LayoutMismatch { dir: source.path.clone(), difference });
        }
        let encoded = layout_file_bytes(layout.encode(&source.manifest.id).0.len());
        let other_slots = match options.durability {
            Durability::Step => layout.slots().map(SlotShape::file_bytes).sum(),
            Durability::Checkpoint => Bytes::ZERO,
        };
        let needed = other_slots + encoded + record::page_bytes(&layout) * 2;
        let free = dir.free_space()? + freed(&dir, &old)?;
        if needed > free {
            return Err(OptimError::NoSpace { dir: dir.path().to_path_buf(), needed, free });
        }
        remove_old(&dir, &old)?;
        let mut made = Vec::new();
        if let Err(error) = link(source, &dir, options.durability, &mut made) {
            for name in made {
                // The first error is the one to report; a file left behind is refused by name next time.
                let _ = dir.remove(&name);
            }
            let _ = dir.sync();
            return Err(error);
        }
        Self::open_in(dir, params, options)
    }
}

/// The files of the store that a folder holds.
fn old_files(dir: &DurableDir) -> Result<Vec<String>, OptimError> {
    let mut names = dir.list()?;
    names.retain(|name| name == LAYOUT_FILE || name == RECORD_FILE || slot::is_file_name(name));
    Ok(names)
}

/// What their removal frees: those that a generation holds free nothing.
fn freed(dir: &DurableDir, old: &[String]) -> Result<Bytes, OptimError> {
    let mut freed = Bytes::ZERO;
    for name in old {
        let file = dir.open_file(name)?;
        if file.names()? == 1 {
            freed += file.len();
        }
    }
    Ok(freed)
}

/// The record goes first: without it nothing passes for a store.
fn remove_old(dir: &DurableDir, old: &[String]) -> Result<(), OptimError> {
    if old.iter().any(|name| name == RECORD_FILE) {
        dir.remove(RECORD_FILE)?;
        dir.sync()?;
    }
    for name in old.iter().filter(|name| *name != RECORD_FILE) {
        dir.remove(name)?;
    }
    Ok(())
}

/// Makes a store of the generation's own slot files, without copying them.
fn link(
    source: &Source,
    dir: &DurableDir,
    durability: Durability,
    made: &mut Vec<String>,
) -> Result<(), OptimError> {
    let manifest = &source.manifest;
    let (layout, _) = manifest.layout.encode(&manifest.id);
    let mut make = |name: String, bytes| {
        let file = dir.create_file(&name, bytes)?;
        made.push(name);
        Ok::<_, OptimError>(file)
    };
    let file = make(LAYOUT_FILE.into(), layout_file_bytes(layout.len()))?;
    write_bytes(&file, 0, &layout)?;
    let record = make(RECORD_FILE.into(), record::page_bytes(&manifest.layout) * 2)?;
    let other_slots = if durability == Durability::Step { manifest.layout.bucket_count() } else { 0 };
    for (index, bytes) in manifest.layout.slots().map(SlotShape::file_bytes).enumerate().take(other_slots) {
        let other = slot::file_name(index, 1 - manifest.record.buckets[index].slot);
        make(other, bytes)?;
    }
    for (index, committed) in manifest.record.buckets.iter().enumerate() {
        let name = slot::file_name(index, committed.slot);
        dir.link(&source.path.join(&name), &name)?;
        made.push(name);
    }
    dir.sync()?;
    let standing = Standing::of(durability);
    write_bytes(&record, 0, &Record { standing, ..manifest.record.clone() }.encode())?;
    Ok(())
}
