//! State that is read: generations, and consolidated files.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::ahead::{self, Job, ReadAhead, WINDOW, Windows};
use crate::import::Consolidated;
use crate::manifest::Manifest;
use crate::open::check_head;
use crate::slot::{self, BLOCK, BlockSums, Identity, SECTIONS, SlotHead, SlotShape};
use crate::state::bad_block;
use crate::{Moments, OptimError, ParamSpec};

/// What state is read from.
pub(crate) enum Source {
    Generation(Box<Saved>),
    File(Box<Consolidated>),
}

/// A stretch of a parameter's state that is inside one block where it is put.
pub(crate) struct Stretch<'a> {
    /// First element, counted in what the source holds of the parameter.
    pub(crate) first: usize,
    pub(crate) moments: Moments,
    /// The bytes of the block, or of several.
    pub(crate) sections: [&'a [u8]; 3],
    /// Which elements of the block it is.
    pub(crate) range: Range<usize>,
}

impl Source {
    /// Opens a generation's folder, or a consolidated file.
    pub(crate) fn open(path: &Path) -> Result<Self, OptimError> {
        if path.is_file() {
            return Ok(Source::File(Box::new(Consolidated::open(path)?)));
        }
        Ok(Source::Generation(Box::new(Saved::open(path)?)))
    }

    pub(crate) fn path(&self) -> &Path {
        match self {
            Source::Generation(saved) => &saved.path,
            Source::File(file) => file.path(),
        }
    }

    pub(crate) fn params(&self) -> &[ParamSpec] {
        match self {
            Source::Generation(saved) => saved.manifest.layout.params(),
            Source::File(file) => file.params(),
        }
    }

    /// Steps taken, by parameter.
    pub(crate) fn step_counts(&self) -> &[u64] {
        match self {
            Source::Generation(saved) => &saved.manifest.record.step_counts,
            Source::File(file) => file.step_counts(),
        }
    }

    /// Steps committed when it was saved.
    pub(crate) fn sequence(&self) -> u64 {
        match self {
            Source::Generation(saved) => saved.manifest.record.sequence,
            Source::File(file) => file.sequence(),
        }
    }

    pub(crate) fn blob(&self) -> &[u8] {
        match self {
            Source::Generation(saved) => &saved.manifest.record.blob,
            Source::File(file) => file.blob(),
        }
    }

    /// Reads elements of what it holds of a parameter, in order, each once; checked, where there are checksums.
    pub(crate) fn read(
        &mut self,
        param: usize,
        elements: Range<usize>,
        each: &mut dyn FnMut(Stretch<'_>),
    ) -> Result<(), OptimError> {
        match self {
            Source::Generation(saved) => saved.read(param, elements, each),
            Source::File(file) => file.read(param, elements, each),
        }
    }
}

/// A generation, with the heads of its slots found to be the committed ones.
pub(crate) struct Saved {
    pub(crate) path: PathBuf,
    pub(crate) manifest: Manifest,
    slots: Vec<Arc<Slot>>,
    /// Where each parameter starts in the flat element space.
    starts: Vec<usize>,
    window: ReadAhead<Key>,
}

struct Slot {
    path: PathBuf,
    file: File,
    shape: SlotShape,
    identity: Identity,
    table: Vec<BlockSums>,
}

/// A bucket, and the number of a window in it.
type Key = (usize, usize);

impl Saved {
    pub(crate) fn open(folder: &Path) -> Result<Self, OptimError> {
        let manifest = Manifest::read(folder)?;
        let mut slots = Vec::with_capacity(manifest.record.buckets.len());
        for (bucket, committed) in manifest.record.buckets.iter().enumerate() {
            let shape = manifest.layout.slot(bucket);
            let path = folder.join(slot::file_name(bucket, committed.slot));
            let file = File::open(&path).map_err(OptimError::file("open", &path))?;
            let found = file.metadata().map_err(OptimError::file("look at", &path))?.len();
            if found < shape.file_bytes().0 {
                let wanted = shape.file_bytes().0.to_string();
                let (field, found) = ("length", found.to_string());
                return Err(OptimError::WrongFile { path, field, wanted, found });
            }
            let mut head = vec![0; shape.head_bytes().0 as usize];
            file.read_exact_at(&mut head, 0).map_err(OptimError::file("read", &path))?;
            let SlotHead { identity, table, .. } =
                check_head(&path, &manifest.id, bucket, shape, committed, &head)?;
            slots.push(Arc::new(Slot { path, file, shape, identity, table }));
        }
        let (starts, window) = (manifest.layout.starts(), ReadAhead::new()?);
        Ok(Saved { path: folder.to_path_buf(), manifest, slots, starts, window })
    }

    fn read(
        &mut self,
        param: usize,
        elements: Range<usize>,
        each: &mut dyn FnMut(Stretch<'_>),
    ) -> Result<(), OptimError> {
        let start = self.starts[param];
        let mut at = start + elements.start;
        while at < start + elements.end {
            let bucket = self.manifest.layout.bucket_at(at);
            let (range, shape) = (self.manifest.layout.bucket(bucket), self.manifest.layout.slot(bucket));
            let block = (at - range.start) / BLOCK;
            let first = range.start + block * BLOCK;
            let end = (first + BLOCK).min(range.end).min(start + elements.end);
            let window = self.window.look(&self.slots, (bucket, block / WINDOW))?;
            // The last block of a bucket is shorter.
            let (held, in_window) = ((range.end - first).min(BLOCK), block % WINDOW);
            let sections = [0, 1, 2].map(|section| {
                let from = shape.bytes(section, in_window * BLOCK);
                &window[section][from..from + shape.bytes(section, held)]
            });
            let (moments, range) = (shape.moments, at - first..end - first);
            each(Stretch { first: at - start, moments, sections, range });
            at = end;
        }
        Ok(())
    }
}

impl Windows for Vec<Arc<Slot>> {
    type Key = Key;

    fn job(&self, (bucket, window): Key) -> Job {
        let slot = Arc::clone(&self[bucket]);
        Box::new(move |sections| slot.read(window, sections))
    }

    fn next(&self, (bucket, window): Key) -> Option<Key> {
        if (window + 1) * WINDOW * BLOCK < self[bucket].shape.elements {
            return Some((bucket, window + 1));
        }
        (bucket + 1 < self.len()).then_some((bucket + 1, 0))
    }
}

impl Slot {
    /// Reads and checks a window.
    fn read(&self, window: usize, sections: &mut ahead::Sections) -> Result<(), OptimError> {
        let Slot { path, file, shape, identity, table } = self;
        let first = window * WINDOW * BLOCK;
        let elements = (shape.elements - first).min(WINDOW * BLOCK);
        for (section, buffer) in sections.iter_mut().enumerate() {
            let bytes = &mut buffer.as_mut_slice()[..shape.bytes(section, elements)];
            let read = file.read_exact_at(bytes, shape.offset(section, first));
            read.map_err(OptimError::file("read", path))?;
        }
        let mut section = 0;
        let sections = sections.each_ref().map(|buffer| {
            section += 1;
            &buffer.as_slice()[..shape.bytes(section - 1, elements)]
        });
        for (i, blocks) in shape.blocks_of(sections).enumerate() {
            let block = window * WINDOW + i;
            let found = identity.sums(block, blocks);
            if let Some(section) = (0..SECTIONS.len()).find(|s| found[*s] != table[block][*s]) {
                return Err(bad_block(path, *shape, identity.bucket, block, section));
            }
        }
        Ok(())
    }
}
