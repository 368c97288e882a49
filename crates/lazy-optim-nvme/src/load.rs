//! Loading: a store made from generations, or from a consolidated file.

use std::io::ErrorKind;
use std::path::Path;

use lazy_model::Bytes;
use lazy_store::StoreError;
use lazy_store::durable::DurableDir;

use crate::create::{Seed, make};
use crate::files::{LAYOUT_FILE, RECORD_FILE, open_dir, write_bytes};
use crate::gather::Gather;
use crate::layout::{Layout, layout_file_bytes};
use crate::record::{self, Record, Standing};
use crate::slot::{self, SlotShape};
use crate::source::{Saved, Source};
use crate::{AdamOptions, Durability, NvmeAdam, OptimError, ParamSpec, home, save, state};

/// What loading may do besides what is harmless.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Accept what rounds moments: another [`Moments`](crate::Moments) format than they were saved in, and shards of 8-bit
    /// moments that are cut, then or now, inside a block of 256 elements of the whole parameter. Main weights are exact always.
    pub lossy: bool,
    /// Give up the state that the folder holds: going back to a generation saved in it. Until the load has come to its end
    /// the generation is all there is; if it is cut short, load again.
    pub replace: bool,
}

impl NvmeAdam {
    /// Makes a store in `dir`, and the folder where it is absent, from what was saved: one generation, those of several ranks
    /// that together hold the parameters, or a file of [`export`](crate::export).
    ///
    /// Parameters are found by name, and their elements by where they lie in the whole parameter. So bucket size, order,
    /// groups and the number and kind of shards are free to change; the state has the same bits. Parameters that are not asked
    /// for are left out. Where nothing of that differs from a generation on the same file system, its slot files are linked
    /// and no data is read but what is at home in RAM; otherwise everything is streamed and checked, in memory of the
    /// [ring](NvmeAdam::memory_bytes) and 12 MiB a source. Step counts are carried over; the [blob](NvmeAdam::blob) is that
    /// of the first source.
    ///
    /// # Errors
    ///
    /// [`OptimError::NoStore`] where there is no generation: a trainer may then start with a fresh state and say so.
    /// [`OptimError::Mismatch`] names the first difference: a parameter that is absent, of another shape, not there in full
    /// or there twice, sources of different steps. [`OptimError::Lossy`]; [`OptimError::Damaged`],
    /// [`OptimError::WrongFile`] and [`OptimError::Checksum`] for files that are not those that were saved;
    /// [`OptimError::AlreadyExists`] where `dir` holds a store and [`LoadOptions::replace`] is not set;
    /// [`OptimError::NoSpace`]. What the folder held is still there then, but for a checksum found wrong while replacing.
    pub fn load<P: AsRef<Path>>(
        sources: &[P],
        dir: &Path,
        params: &[ParamSpec],
        options: &AdamOptions,
        load: LoadOptions,
    ) -> Result<Self, OptimError> {
        let sources = open_sources(sources)?;
        // Before the folder is made.
        Layout::new(params, options.bucket_elements)?;
        Self::load_in(sources, open_dir(dir, options)?, params, options, load)
    }

    pub(crate) fn load_in(
        mut sources: Vec<Source>,
        dir: DurableDir,
        params: &[ParamSpec],
        options: &AdamOptions,
        load: LoadOptions,
    ) -> Result<Self, OptimError> {
        home::check(options)?;
        let layout = Layout::new(params, options.bucket_elements)?;
        save::sweep(&dir)?;
        let mut old = old_files(&dir)?;
        if !load.replace && old.iter().any(|name| name == LAYOUT_FILE || name == RECORD_FILE) {
            return Err(OptimError::AlreadyExists { dir: dir.path().to_path_buf() });
        }
        if let [Source::Generation(saved)] = sources.as_mut_slice()
            && saved.manifest.layout == layout
        {
            check_room(&dir, &old, beside_links(&layout, options.durability))?;
            remove_old(&dir, &old)?;
            match link(saved, &dir, options.durability) {
                Ok(()) => return Self::open_in(dir, params, options),
                Err(error) if cannot_link(&error) => old = old_files(&dir)?,
                Err(error) => return Err(error),
            }
        }
        let mut gather = Gather::new(sources, params, load.lossy)?;
        check_room(&dir, &old, state::bytes_on_disk(&layout, options))?;
        remove_old(&dir, &old)?;
        let (sequence, step_counts) = (gather.sequence(), gather.step_counts());
        let seed = Seed { sequence, step_counts, blob: gather.blob().to_vec() };
        make(dir, layout, options, &mut gather, seed)
    }
}

pub(crate) fn open_sources<P: AsRef<Path>>(sources: &[P]) -> Result<Vec<Source>, OptimError> {
    if sources.is_empty() {
        let what = "no generation to load was given; name its folder".into();
        return Err(OptimError::Option { what });
    }
    sources.iter().map(|path| Source::open(path.as_ref())).collect()
}

/// The files of the store that a folder holds.
fn old_files(dir: &DurableDir) -> Result<Vec<String>, OptimError> {
    let mut names = dir.list()?;
    names.retain(|name| name == LAYOUT_FILE || name == RECORD_FILE || slot::is_file_name(name));
    Ok(names)
}

/// Counts what the removal of the old files frees: those that a generation holds free nothing.
fn check_room(dir: &DurableDir, old: &[String], needed: Bytes) -> Result<(), OptimError> {
    let mut free = dir.free_space()?;
    for name in old {
        let file = dir.open_file(name)?;
        if file.names()? == 1 {
            free += file.len();
        }
    }
    if needed > free {
        return Err(OptimError::NoSpace { dir: dir.path().to_path_buf(), needed, free });
    }
    Ok(())
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

/// Makes a store of the generation's own slot files, without copying them. Leaves nothing behind where that fails.
fn link(saved: &Saved, dir: &DurableDir, durability: Durability) -> Result<(), OptimError> {
    link_all(saved, dir, durability).inspect_err(|_| {
        // The first error is the one to report; a file left behind is refused by name next time.
        let old = old_files(dir).unwrap_or_default();
        old.iter().for_each(|name| drop(dir.remove(name)));
        let _ = dir.sync();
    })
}

fn link_all(saved: &Saved, dir: &DurableDir, durability: Durability) -> Result<(), OptimError> {
    let manifest = &saved.manifest;
    for (index, committed) in manifest.record.buckets.iter().enumerate() {
        let name = slot::file_name(index, committed.slot);
        dir.link(&saved.path.join(&name), &name)?;
    }
    let others = if durability == Durability::Step { manifest.layout.bucket_count() } else { 0 };
    for (index, shape) in manifest.layout.slots().enumerate().take(others) {
        let other = slot::file_name(index, 1 - manifest.record.buckets[index].slot);
        dir.create_file(&other, shape.file_bytes())?;
    }
    let (layout, _) = manifest.layout.encode(&manifest.id);
    write_bytes(&dir.create_file(LAYOUT_FILE, layout_file_bytes(layout.len()))?, 0, &layout)?;
    let record = dir.create_file(RECORD_FILE, record::page_bytes(&manifest.layout) * 2)?;
    dir.sync()?;
    let standing = Standing::of(durability);
    write_bytes(&record, 0, &Record { standing, ..manifest.record.clone() }.encode())?;
    Ok(())
}

/// What a store takes besides the slots that are linked.
fn beside_links(layout: &Layout, durability: Durability) -> Bytes {
    let slots: Bytes = match durability {
        Durability::Step => layout.slots().map(SlotShape::file_bytes).sum(),
        Durability::Checkpoint => Bytes::ZERO,
    };
    slots + layout_file_bytes(layout.encode(&[0; 16]).0.len()) + record::page_bytes(layout) * 2
}

/// Whether a link was refused because the file lies on another file system, or on one without links.
fn cannot_link(error: &OptimError) -> bool {
    let OptimError::Store(StoreError::File { op: "link", source, .. }) = error else { return false };
    matches!(source.kind(), ErrorKind::CrossesDevices | ErrorKind::Unsupported | ErrorKind::PermissionDenied)
}
