//! A consolidated file that is read.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::ahead::{Job, ReadAhead, Sections, Windows};
use crate::export::{
    self, BLOB, CHECKED, CHECKSUM, CHECKSUMS, FORMAT, SEQUENCE, STEP_COUNTS, UNCHECKED, VERSION,
};
use crate::slot::SECTIONS;
use crate::source::Stretch;
use crate::{MAX_BLOB_BYTES, Moments, OptimError, ParamSpec};

/// Longest header that the format allows, in bytes.
const MAX_HEADER: u64 = 100_000_000;

/// More steps than anybody takes; from here on a count is no count.
const MAX_STEPS: u64 = 1 << 53;

/// A consolidated file: whole parameters with float32 moments.
pub(crate) struct Consolidated {
    params: Vec<ParamSpec>,
    step_counts: Vec<u64>,
    sequence: u64,
    blob: Vec<u8>,
    tensors: Tensors,
    window: ReadAhead<Key>,
}

/// A parameter, and the number of a window in it.
type Key = (usize, usize);

/// Where the values are.
struct Tensors {
    path: Arc<Path>,
    file: Arc<File>,
    /// By parameter.
    all: Vec<Arc<Tensor>>,
}

/// The three sections of a parameter.
struct Tensor {
    name: String,
    elements: usize,
    /// Where in the file each begins.
    offsets: [u64; 3],
    /// CRC32C of each window of each of them; none in a file without.
    sums: Option<[Vec<u32>; 3]>,
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
        let is_checked = match (note("format"), note("version")) {
            (Some(FORMAT), Some(VERSION)) => true,
            (Some(FORMAT), Some(UNCHECKED)) => false,
            (Some(FORMAT), Some(other)) => {
                return Err(damaged(&format!(
                    "its format version is {other}, which this build does not read"
                )));
            }
            _ => return Err(damaged("it is no exported optimizer state")),
        };
        let counts: HashMap<String, u64> = note(STEP_COUNTS)
            .and_then(|text| serde_json::from_str(text).ok())
            .filter(|counts: &HashMap<String, u64>| counts.values().all(|count| *count < MAX_STEPS))
            .ok_or_else(|| damaged("its step counts cannot be read"))?;
        let sequence = note(SEQUENCE)
            .and_then(|text| text.parse().ok())
            .filter(|sequence| *sequence < MAX_STEPS)
            .ok_or_else(|| damaged("its step cannot be read"))?;
        let blob = note(BLOB)
            .and_then(unhex)
            .filter(|blob| blob.len() <= MAX_BLOB_BYTES)
            .ok_or_else(|| damaged("its blob cannot be read"))?;
        let sums: Option<HashMap<String, String>> = is_checked
            .then(|| note(CHECKSUMS).and_then(|text| serde_json::from_str(text).ok()))
            .map(|sums| sums.ok_or_else(|| damaged("its checksums cannot be read")))
            .transpose()?;
        let mut names: Vec<_> = counts.into_iter().collect();
        names.sort();
        let (mut params, mut all, mut step_counts) = (Vec::new(), Vec::new(), Vec::new());
        for (name, count) in names {
            let (shape, tensor) =
                tensor(&metadata, data, name, sums.as_ref()).map_err(|what| damaged(&what))?;
            params.push(ParamSpec::new(&tensor.name, &shape));
            all.push(Arc::new(tensor));
            step_counts.push(count);
        }
        if params.len() * SECTIONS.len() != metadata.tensors().len() {
            return Err(damaged("it has tensors that belong to no parameter"));
        }
        if is_checked {
            let notes = [STEP_COUNTS, SEQUENCE, BLOB, CHECKSUMS].map(|key| note(key).unwrap_or_default());
            if note(CHECKSUM) != Some(format!("{:08x}", export::header_sum(notes, &params)).as_str()) {
                return Err(damaged("its header does not match its checksum"));
            }
        }
        let tensors = Tensors { path: path.into(), file: Arc::new(file), all };
        Ok(Consolidated { params, step_counts, sequence, blob, tensors, window: ReadAhead::new()? })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.tensors.path
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
        let mut first = elements.start;
        while first < elements.end {
            let (window, start) = (first / CHECKED, first % CHECKED);
            let end = elements.end.min((window + 1) * CHECKED);
            let sections = self.window.look(&self.tensors, (param, window))?;
            let range = start..start + end - first;
            each(Stretch { first, moments: Moments::F32, sections, range });
            first = end;
        }
        Ok(())
    }
}

/// A parameter's shape and where its sections are.
fn tensor(
    metadata: &Metadata,
    data: u64,
    name: String,
    sums: Option<&HashMap<String, String>>,
) -> Result<(Vec<usize>, Tensor), String> {
    let mut offsets = [0; 3];
    let mut shape: Option<Vec<usize>> = None;
    for (offset, tensor) in offsets.iter_mut().zip(export::tensors(&name)) {
        match metadata.info(&tensor) {
            Some(TensorInfo { dtype: Dtype::F32, shape: found, data_offsets })
                if shape.as_ref().is_none_or(|shape| shape == found) =>
            {
                *offset = data + data_offsets.0 as u64;
                shape = Some(found.clone());
            }
            Some(_) => return Err(format!("its tensor {tensor} is not float32 of {name}'s shape")),
            None => return Err(format!("it has no tensor {tensor}")),
        }
    }
    let shape = shape.unwrap_or_default();
    let elements = crate::layout::elements(&shape).ok_or_else(|| format!("the shape of {name} overflows"))?;
    let windows = elements.div_ceil(CHECKED);
    let read = |sums: &HashMap<String, String>| {
        let sums = unhex(sums.get(&name)?)?;
        let sums: Vec<u32> = sums.as_chunks().0.iter().map(|sum| u32::from_be_bytes(*sum)).collect();
        let section = |i| Some(sums.get(i * windows..(i + 1) * windows)?.to_vec());
        (sums.len() == 3 * windows).then_some([section(0)?, section(1)?, section(2)?])
    };
    let sums = sums.map(|sums| read(sums).ok_or_else(|| format!("the checksums of {name} cannot be read")));
    let sums = sums.transpose()?;
    Ok((shape, Tensor { name, elements, offsets, sums }))
}

impl Windows for Tensors {
    type Key = Key;

    fn job(&self, (param, window): Key) -> Job {
        let (path, file, tensor) =
            (Arc::clone(&self.path), Arc::clone(&self.file), Arc::clone(&self.all[param]));
        Box::new(move |sections| tensor.read(&path, &file, window, sections))
    }

    fn next(&self, (param, window): Key) -> Option<Key> {
        if (window + 1) * CHECKED < self.all[param].elements {
            return Some((param, window + 1));
        }
        (param + 1 < self.all.len() && self.all[param + 1].elements > 0).then_some((param + 1, 0))
    }
}

impl Tensor {
    /// Reads and checks a window.
    fn read(
        &self,
        path: &Path,
        file: &File,
        window: usize,
        sections: &mut Sections,
    ) -> Result<(), OptimError> {
        let first = window * CHECKED;
        let count = CHECKED.min(self.elements - first);
        for (section, buffer) in sections.iter_mut().enumerate() {
            let bytes = &mut buffer.as_mut_slice()[..count * 4];
            let read = file.read_exact_at(bytes, self.offsets[section] + 4 * first as u64);
            read.map_err(OptimError::file("read", path))?;
            if self.sums.as_ref().is_some_and(|sums| sums[section][window] != crc32c::crc32c(bytes)) {
                let (tensor, end) = (&export::tensors(&self.name)[section], first + count);
                let what = format!("elements {first}..{end} of {tensor} do not match their checksum");
                return Err(OptimError::Damaged { path: path.to_path_buf(), what });
            }
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
