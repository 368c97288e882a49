//! A generation that is read.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::OptimError;
use crate::manifest::Manifest;
use crate::open::check_head;
use crate::slot;

/// A generation, with the heads of its slots found to be the committed ones.
pub(crate) struct Source {
    pub(crate) path: PathBuf,
    pub(crate) manifest: Manifest,
}

impl Source {
    pub(crate) fn open(folder: &Path) -> Result<Self, OptimError> {
        let manifest = Manifest::read(folder)?;
        for (index, committed) in manifest.record.buckets.iter().enumerate() {
            let shape = manifest.layout.slot(index);
            let path = folder.join(slot::file_name(index, committed.slot));
            let read = |source| OptimError::Read { path: path.clone(), source };
            let file = File::open(&path).map_err(read)?;
            let found = file.metadata().map_err(read)?.len();
            if found < shape.file_bytes().0 {
                let wanted = shape.file_bytes().0.to_string();
                let (field, found) = ("length", found.to_string());
                return Err(OptimError::WrongFile { path, field, wanted, found });
            }
            let mut head = vec![0; shape.head_bytes().0 as usize];
            file.read_exact_at(&mut head, 0).map_err(read)?;
            check_head(&path, &manifest.id, index, shape, committed, &head)?;
        }
        Ok(Source { path: folder.to_path_buf(), manifest })
    }
}
