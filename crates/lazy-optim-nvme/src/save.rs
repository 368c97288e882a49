//! Saving: the committed slots linked into a folder, which is moved into place once all in it is flushed.

use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread::{Builder, JoinHandle};

use lazy_model::Bytes;
use lazy_store::StoreError;
use lazy_store::durable::{DurableDir, DurableFile};

use crate::files::write_bytes;
use crate::home::{Held, Home};
use crate::layout::{Layout, PAGE, StoreId};
use crate::manifest::{self, MANIFEST_FILE, Manifest};
use crate::record::{Committed, Record, Standing};
use crate::slot::{Identity, SlotHead, SlotShape};
use crate::{Durability, NvmeAdam, OptimError, retire, slot};

/// What the folder of a generation is called while it is made or removed.
const TEMPORARY: &str = ".tmp";

/// A state that was saved and can be given to [`NvmeAdam::load`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Generation {
    /// Its folder.
    pub path: PathBuf,
    /// The name it was saved under.
    pub name: String,
    /// Steps committed when it was saved.
    pub sequence: u64,
    /// The blob of the last of them.
    pub blob: Vec<u8>,
}

/// A save under way. The state saved is settled; dropping this waits for the end without telling how it went.
#[must_use = "whether the generation is on disk is known only after `wait`"]
#[derive(Debug)]
pub struct Saving {
    thread: Option<JoinHandle<Result<(), OptimError>>>,
}

impl Saving {
    /// Waits until the generation is on disk: from then on it survives a power cut. On an error there is none of that name.
    pub fn wait(mut self) -> Result<(), OptimError> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(panic)) => resume_unwind(panic),
            // It is there until it is waited for.
            None => Ok(()),
        }
    }

    /// Whether [`wait`](Saving::wait) returns at once.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl NvmeAdam {
    /// Saves the committed state as a generation: the folder `name` in the store's folder, with the committed slot files
    /// under a second name each and a manifest. No data of them is copied; what is at home in memory is written. What takes time, that and
    /// the flushing, happens on a thread; steps may be taken meanwhile, and never change what was saved: a step waits for a bucket in
    /// memory until it is written.
    ///
    /// A slot that a generation holds is not written again: the step that would write it replaces it by a new file, so
    /// from then on the generation takes the space of one copy of the state. Until [`Saving::wait`] has returned, a crash
    /// leaves the generations before, and no folder called `name`.
    ///
    /// # Errors
    ///
    /// [`OptimError::GenerationExists`]; [`OptimError::Option`] for a name that cannot be a folder's or is the store's own;
    /// [`OptimError::Latched`] after a failed flush, when only the disk knows which state is the last.
    pub fn save(&mut self, name: &str) -> Result<Saving, OptimError> {
        self.check_latch(|latch| latch.reopen)?;
        check_name(name)?;
        if self.dir.exists(name)? {
            return Err(OptimError::GenerationExists { path: self.dir.path().join(name) });
        }
        if self.durability == Durability::Checkpoint {
            self.settle()?;
        }
        let (needed, free) = (self.new_bytes(), self.dir.free_space()?);
        if needed > free {
            return Err(OptimError::NoSpace { dir: self.dir.path().to_path_buf(), needed, free });
        }
        let temporary = name.to_owned() + TEMPORARY;
        let folder = self.dir.create_dir(&temporary)?;
        let saving = self.fill(&folder).and_then(|filled| self.finish(folder, name, filled));
        saving.inspect_err(|_| {
            // The first error is the one to report; what is left is swept when the store is opened.
            let _ = discard(&self.dir, &temporary);
        })
    }

    /// What a generation takes that is not linked: its manifest, and the slots of what is at home in memory.
    fn new_bytes(&self) -> Bytes {
        let manifest = manifest::encode(&self.id, &self.layout, &self.record).len();
        let homes = self.buckets.iter().zip(self.layout.slots());
        let written =
            homes.filter(|(bucket, _)| bucket.slots().is_none()).map(|(_, shape)| shape.file_bytes());
        Bytes(manifest as u64).align_up(PAGE) + written.sum::<Bytes>()
    }

    /// Links the slots into the folder of a generation, and makes files for what is at home in memory, which stays as it is until it is
    /// written.
    fn fill(&self, folder: &DurableDir) -> Result<Filled, OptimError> {
        let mut record = Record { standing: Standing::Committed, ..self.record.clone() };
        let mut unwritten = Vec::new();
        for (index, bucket) in self.buckets.iter().enumerate() {
            if let Home::Nvme(slots) = &bucket.home {
                let name = slot::file_name(index, slots.number);
                folder.link(&self.dir.path().join(&name), &name)?;
            }
            let Some(memory) = bucket.home.in_memory(&self.ring) else { continue };
            let (slot, shape, generation) = (0, self.layout.slot(index), record.sequence);
            let file = folder.create_file(&slot::file_name(index, slot), shape.file_bytes())?;
            record.buckets[index] = Committed { slot, generation, head_crc: 0 };
            let identity = Identity { id: self.id, bucket: index, generation };
            unwritten.push(Unwritten { memory: Held::new(memory), file, identity, shape });
        }
        Ok(Filled { id: self.id, layout: self.layout.clone(), record, unwritten })
    }

    /// Writes what a filled folder lacks, seals it and moves it into place, on a thread.
    fn finish(&self, folder: DurableDir, name: &str, filled: Filled) -> Result<Saving, OptimError> {
        let (dir, name) = (self.dir.clone(), name.to_owned());
        let finish = move || {
            let temporary = name.clone() + TEMPORARY;
            let sealed = filled.write().and_then(|manifest| seal(&dir, folder, &temporary, &name, &manifest));
            sealed.inspect_err(|_| {
                // One that could not be flushed in its place is none.
                let _ = dir.rename(&name, &temporary);
                let _ = discard(&dir, &temporary);
            })
        };
        let thread = Builder::new().name("lazy save".into()).spawn(finish);
        let refused =
            |e: std::io::Error| StoreError::Worker { name: "lazy save".into(), reason: e.to_string() };
        Ok(Saving { thread: Some(thread.map_err(refused)?) })
    }

    /// Removes a generation that was saved in this store's folder, and with it what only it holds.
    pub fn remove_generation(&mut self, name: &str) -> Result<(), OptimError> {
        check_name(name)?;
        Manifest::read(&self.dir.path().join(name))?;
        let temporary = name.to_owned() + TEMPORARY;
        self.dir.rename(name, &temporary)?;
        // Its slots may be written again once they have lost their names here. A power cut must not bring back a
        // generation of which that is so.
        self.dir.sync()?;
        discard(&self.dir, &temporary)
    }
}

/// A folder whose files are all there.
struct Filled {
    id: StoreId,
    layout: Layout,
    record: Record,
    unwritten: Vec<Unwritten>,
}

/// A slot whose contents are in memory.
struct Unwritten {
    memory: Held,
    file: DurableFile,
    identity: Identity,
    shape: SlotShape,
}

impl Filled {
    /// Writes what is in memory, bucket by bucket, each of which may change from then on. The manifest.
    fn write(mut self) -> Result<Vec<u8>, OptimError> {
        for Unwritten { memory, file, identity, shape } in self.unwritten {
            let committed = &mut self.record.buckets[identity.bucket];
            let (slot, table) = (committed.slot, memory.memory().write(&file, identity)?);
            drop(memory);
            let (head, head_crc) = SlotHead { identity, slot, shape, table }.encode();
            write_bytes(&file, 0, &head)?;
            committed.head_crc = head_crc;
        }
        Ok(manifest::encode(&self.id, &self.layout, &self.record))
    }
}

/// The generations in a store's folder, oldest first: those whose save came to its end. Folders of other content are left out.
pub fn generations(dir: &Path) -> Result<Vec<Generation>, OptimError> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(OptimError::file("list", dir))? {
        let entry = entry.map_err(OptimError::file("list", dir))?;
        let (path, Ok(name)) = (entry.path(), entry.file_name().into_string()) else { continue };
        if let (Ok(()), Ok(Manifest { record, .. })) = (check_name(&name), Manifest::read(&path)) {
            found.push(Generation { path, name, sequence: record.sequence, blob: record.blob });
        }
    }
    found.sort_by(|a, b| (a.sequence, &a.name).cmp(&(b.sequence, &b.name)));
    Ok(found)
}

/// Removes what saves, removals and steps that were cut short have left. Nobody else makes any while the folder is claimed.
pub(crate) fn sweep(dir: &DurableDir) -> Result<(), OptimError> {
    for name in dir.list_dirs()?.iter().filter(|name| name.ends_with(TEMPORARY)) {
        let files = dir.open_dir(name)?.list()?;
        if files.iter().all(|file| file == MANIFEST_FILE || slot::is_file_name(file)) {
            discard(dir, name)?;
        }
    }
    for name in dir.list()? {
        if name.strip_suffix(retire::NEW).is_some_and(slot::is_file_name) {
            dir.remove(&name)?;
        }
    }
    Ok(())
}

/// The marker comes last: the folder gets its name when all in it is on disk.
fn seal(
    dir: &DurableDir,
    folder: DurableDir,
    temporary: &str,
    name: &str,
    manifest: &[u8],
) -> Result<(), OptimError> {
    let file = folder.create_file(MANIFEST_FILE, Bytes(manifest.len() as u64).align_up(PAGE))?;
    write_bytes(&file, 0, manifest)?;
    folder.sync()?;
    dir.rename(temporary, name)?;
    dir.sync()?;
    Ok(())
}

fn discard(dir: &DurableDir, name: &str) -> Result<(), OptimError> {
    let folder = dir.open_dir(name)?;
    for file in folder.list()? {
        folder.remove(&file)?;
    }
    Ok(dir.remove_dir(name)?)
}

fn check_name(name: &str) -> Result<(), OptimError> {
    let own = name.starts_with("adam.") || name.starts_with("bucket-") || name.ends_with(TEMPORARY);
    if name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) || own {
        let what = format!(
            "a generation cannot be called `{name}`; give a plain name such as step-100 that does not begin with \
             `.`, `adam.` or `bucket-` nor end with `{TEMPORARY}`"
        );
        return Err(OptimError::Option { what });
    }
    Ok(())
}
