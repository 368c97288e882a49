//! A consolidated file that is read.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use lazy_model::Bytes;
use lazy_store::durable::AlignedBuf;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::export::{BLOB, FORMAT, MOMENTS, SEQUENCE, STEP_COUNTS, VERSION};
use crate::slot::BLOCK;
use crate::source::Stretch;
use crate::{Moments, OptimError, ParamSpec};

/// Longest header that the format allows, in bytes.
const MAX_HEADER: u64 = 100_000_000;

/// A consolidated file: whole parameters with float32 moments.
pub(crate) struct Consolidated {
    path: PathBuf,
    file: File,
    params: Vec<ParamSpec>,
    /// Where in the file each parameter's three sections begin.
    offsets: Vec<[u64; 3]>,
    step_counts: Vec<u64>,
    sequence: u64,
    blob: Vec<u8>,
    block: [AlignedBuf; 3],
}

impl Consolidated {
    pub(crate) fn open(path: &Path) -> Result<Self, OptimError> {
        let damaged = |what: &str| OptimError::Damaged { path: path.to_path_buf(), what: what.into() };
        let file = File::open(path).map_err(OptimError::file("open", path))?;
        let length = file.metadata().map_err(OptimError::file("look at", path))?.len();
        let (data, metadata) = header(&file, length, path)?;
        if data + metadata.data_len() as u64 != length {
            return Err(damaged("its tensors do not fill it"));
        }
        let notes = metadata.metadata().clone().unwrap_or_default();
        let note = |key| notes.get(key).map(String::as_str);
        match (note("format"), note("version")) {
            (Some(FORMAT), Some(VERSION)) => {}
            (Some(FORMAT), Some(other)) => {
                return Err(damaged(&format!(
                    "its format version is {other}, which this build does not read"
                )));
            }
            _ => return Err(damaged("it is no exported optimizer state")),
        }
        let counts: HashMap<String, u64> = note(STEP_COUNTS)
            .and_then(|text| serde_json::from_str(text).ok())
            .ok_or_else(|| damaged("its step counts cannot be read"))?;
        let sequence = note(SEQUENCE)
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| damaged("its step cannot be read"))?;
        let blob = note(BLOB).and_then(unhex).ok_or_else(|| damaged("its blob cannot be read"))?;
        let block = || AlignedBuf::zeroed(Bytes(BLOCK as u64 * 4));
        let block = [block()?, block()?, block()?];
        let (params, offsets, step_counts) = (Vec::new(), Vec::new(), Vec::new());
        let path = path.to_path_buf();
        let mut read = Consolidated { path, file, params, offsets, step_counts, sequence, blob, block };
        let mut names: Vec<_> = counts.into_iter().collect();
        names.sort();
        for (name, count) in names {
            read.add(&metadata, data, name, count)?;
        }
        if read.params.len() * 3 != metadata.tensors().len() {
            return Err(damaged("it has tensors that belong to no parameter"));
        }
        Ok(read)
    }

    fn add(&mut self, metadata: &Metadata, data: u64, name: String, count: u64) -> Result<(), OptimError> {
        let damaged = |what| OptimError::Damaged { path: self.path.clone(), what };
        let mut offsets = [0; 3];
        let mut shape: Option<Vec<usize>> = None;
        for (offset, tensor) in
            offsets.iter_mut().zip(["", MOMENTS[0], MOMENTS[1]].map(|end| format!("{name}{end}")))
        {
            match metadata.info(&tensor) {
                Some(TensorInfo { dtype: Dtype::F32, shape: found, data_offsets })
                    if shape.as_ref().is_none_or(|shape| shape == found) =>
                {
                    *offset = data + data_offsets.0 as u64;
                    shape = Some(found.clone());
                }
                Some(_) => {
                    return Err(damaged(format!("its tensor {tensor} is not float32 of {name}'s shape")));
                }
                None => return Err(damaged(format!("it has no tensor {tensor}"))),
            }
        }
        self.params.push(ParamSpec::new(name, &shape.unwrap_or_default()));
        self.offsets.push(offsets);
        self.step_counts.push(count);
        Ok(())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn params(&self) -> &[ParamSpec] {
        &self.params
    }

    pub(crate) fn step_counts(&self) -> &[u64] {
        &self.step_counts
    }

    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(crate) fn blob(&self) -> &[u8] {
        &self.blob
    }

    pub(crate) fn read(
        &mut self,
        param: usize,
        elements: Range<usize>,
        each: &mut dyn FnMut(Stretch<'_>),
    ) -> Result<(), OptimError> {
        for first in elements.clone().step_by(BLOCK) {
            let count = BLOCK.min(elements.end - first);
            for (buffer, offset) in self.block.iter_mut().zip(self.offsets[param]) {
                let bytes = &mut buffer.as_mut_slice()[..count * 4];
                let read = self.file.read_exact_at(bytes, offset + first as u64 * 4);
                read.map_err(OptimError::file("read", &self.path))?;
            }
            let [main, avg, sq] = &self.block;
            let sections = [main, avg, sq].map(AlignedBuf::as_slice);
            each(Stretch { first, moments: Moments::F32, sections, range: 0..count });
        }
        Ok(())
    }
}

/// The header, and where the data begins.
fn header(file: &File, length: u64, path: &Path) -> Result<(u64, Metadata), OptimError> {
    let damaged = |what: String| OptimError::Damaged { path: path.to_path_buf(), what };
    let mut prefix = [0; 8];
    if length < 8 {
        return Err(damaged("it is too short for a safetensors file".into()));
    }
    file.read_exact_at(&mut prefix, 0).map_err(OptimError::file("read", path))?;
    let header = u64::from_le_bytes(prefix);
    if header > MAX_HEADER.min(length - 8) {
        return Err(damaged("its header does not fit it".into()));
    }
    let mut bytes = vec![0; header as usize];
    file.read_exact_at(&mut bytes, 8).map_err(OptimError::file("read", path))?;
    let metadata =
        serde_json::from_slice(&bytes).map_err(|e| damaged(format!("its header cannot be read: {e}")))?;
    Ok((8 + header, metadata))
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.bytes().map(|b| char::from(b).to_digit(16)).collect::<Option<Vec<_>>>()?;
    let (pairs, rest) = digits.as_chunks::<2>();
    rest.is_empty().then(|| pairs.iter().map(|[high, low]| (high * 16 + low) as u8).collect())
}
