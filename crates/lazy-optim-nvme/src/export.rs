//! Export of saved state into one file that other programs read.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::ahead::WINDOW;
use crate::gather::Gather;
use crate::load::open_sources;
use crate::runs::global_shape;
use crate::slot::BLOCK;
use crate::source::Source;
use crate::{Moments, OptimError, ParamSpec};

/// What a file says of itself in its metadata.
pub(crate) const FORMAT: &str = "lazy-optim-nvme";
pub(crate) const VERSION: &str = "2";
/// The version without checksums.
pub(crate) const UNCHECKED: &str = "1";
pub(crate) const STEP_COUNTS: &str = "step_counts";
pub(crate) const SEQUENCE: &str = "sequence";
pub(crate) const BLOB: &str = "blob";
pub(crate) const CHECKSUMS: &str = "checksums";
pub(crate) const CHECKSUM: &str = "checksum";

/// What the names of a parameter's moments end with.
const MOMENTS: [&str; 2] = [".exp_avg", ".exp_avg_sq"];

/// Elements of a tensor under one checksum.
pub(crate) const CHECKED: usize = WINDOW * BLOCK;

/// The tensors of a parameter.
pub(crate) fn tensors(name: &str) -> [String; 3] {
    ["", MOMENTS[0], MOMENTS[1]].map(|end| format!("{name}{end}"))
}

/// CRC32C of what the header says of the state: step counts, sequence, blob and checksums as they are written, and names and shapes of
/// the parameters. Where their tensors lie shows in those checksums.
pub(crate) fn header_sum(notes: [&str; 4], params: &[ParamSpec]) -> u32 {
    let sum =
        notes.into_iter().fold(0, |sum, note| crc32c::crc32c_append(sum, format!("{note}\n").as_bytes()));
    params.iter().fold(sum, |sum, param| {
        crc32c::crc32c_append(sum, format!("{}\n{:?}\n", param.name, param.shape).as_bytes())
    })
}

/// Writes what was saved, one generation or those of several ranks that together hold the parameters, into one safetensors
/// file: of every parameter `NAME`, `NAME.exp_avg` and `NAME.exp_avg_sq`, whole and as float32, and in `__metadata__` the
/// step counts and checksums, so that [`NvmeAdam::load`](crate::NvmeAdam::load) reads it back. Streamed, in the memory of a few blocks.
///
/// The file is written beside `file` under a name with `.tmp`, flushed and renamed; one that is there already is replaced.
///
/// # Errors
///
/// Those of loading, but for [`OptimError::Lossy`]: 8-bit and bfloat16 moments are written as the values they stand for.
/// [`OptimError::File`] where the file cannot be written.
pub fn export<P: AsRef<Path>>(sources: &[P], file: &Path) -> Result<(), OptimError> {
    let sources = open_sources(sources)?;
    let params = whole_params(&sources)?;
    // To float32 nothing is rounded.
    let mut gather = Gather::new(sources, &params, true)?;
    let mut temporary = OsString::from(file);
    temporary.push(".tmp");
    let temporary = PathBuf::from(temporary);
    let written = write(&temporary, &params, &mut gather)
        .and_then(|()| std::fs::rename(&temporary, file).map_err(OptimError::file("rename", &temporary)));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
        return written;
    }
    let named = |parent: &&Path| !parent.as_os_str().is_empty();
    let parent = file.parent().filter(named).unwrap_or(Path::new("."));
    let flushed = File::open(parent).and_then(|folder| folder.sync_all());
    flushed.map_err(OptimError::file("flush", parent))
}

/// Every parameter of the sources, whole, by name.
fn whole_params(sources: &[Source]) -> Result<Vec<ParamSpec>, OptimError> {
    let mut whole = BTreeMap::new();
    for param in sources.iter().flat_map(Source::params) {
        whole.entry(param.name.clone()).or_insert_with(|| ParamSpec::new(&param.name, global_shape(param)));
    }
    for name in whole.keys() {
        if let Some(end) = MOMENTS.iter().find(|end| whole.contains_key(&format!("{name}{end}"))) {
            let what = format!(
                "a parameter is called {name}{end}, as the moment of {name} would be; rename one of them"
            );
            return Err(OptimError::Option { what });
        }
    }
    Ok(whole.into_values().collect())
}

/// The checksums of a parameter's tensors, window by window.
type Sums = [Vec<u32>; 3];

/// Length and header, padded so that the data is aligned. A parameter's three tensors follow each other. As long for all checksums.
fn header(params: &[ParamSpec], gather: &Gather, sums: &[Sums]) -> Result<Vec<u8>, OptimError> {
    let encode =
        |e: serde_json::Error| OptimError::Option { what: format!("the header cannot be written: {e}") };
    let names = || params.iter().map(|param| &param.name);
    let counts: BTreeMap<_, _> = names().zip(gather.step_counts()).collect();
    let counts = serde_json::to_string(&counts).map_err(encode)?;
    let sequence = gather.sequence().to_string();
    let blob: String = gather.blob().iter().map(|byte| format!("{byte:02x}")).collect();
    let hex = |sums: &Sums| sums.iter().flatten().map(|sum| format!("{sum:08x}")).collect::<String>();
    let sums: BTreeMap<_, _> = names().zip(sums.iter().map(hex)).collect();
    let sums = serde_json::to_string(&sums).map_err(encode)?;
    let sum = format!("{:08x}", header_sum([&counts, &sequence, &blob, &sums], params));
    let mut entries = serde_json::Map::new();
    let notes = serde_json::json!({
        "format": FORMAT, "version": VERSION, STEP_COUNTS: counts, SEQUENCE: sequence, BLOB: blob, CHECKSUMS: sums,
        CHECKSUM: sum,
    });
    entries.insert("__metadata__".into(), notes);
    let mut at = 0;
    for param in params {
        let bytes = 4 * param.shape.iter().product::<usize>();
        for name in tensors(&param.name) {
            let tensor =
                serde_json::json!({ "dtype": "F32", "shape": param.shape, "data_offsets": [at, at + bytes] });
            entries.insert(name, tensor);
            at += bytes;
        }
    }
    let mut text = serde_json::to_vec(&entries).map_err(encode)?;
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok([(text.len() as u64).to_le_bytes().as_slice(), &text].concat())
}

/// The values first: the header has their checksums.
fn write(path: &Path, params: &[ParamSpec], gather: &mut Gather) -> Result<(), OptimError> {
    let file = File::create(path).map_err(OptimError::file("create", path))?;
    let elements = |param: &ParamSpec| param.shape.iter().product::<usize>();
    let mut sums: Vec<Sums> =
        params.iter().map(|param| [(); 3].map(|()| vec![0; elements(param).div_ceil(CHECKED)])).collect();
    let length = header(params, gather, &sums)?.len() as u64;
    let mut block = [(); 3].map(|()| vec![0f32; BLOCK]);
    let mut at = length;
    for (index, param) in params.iter().enumerate() {
        let elements = elements(param);
        for first in (0..elements).step_by(BLOCK) {
            let count = BLOCK.min(elements - first);
            let mut sections = block.each_mut().map(|values| bytemuck::cast_slice_mut(values));
            gather.fill(index, first, Moments::F32, &mut sections, 0..count)?;
            for (section, values) in block.iter().enumerate() {
                let offset = at + 4 * (section * elements + first) as u64;
                let bytes = bytemuck::cast_slice(&values[..count]);
                file.write_all_at(bytes, offset).map_err(OptimError::file("write", path))?;
                let sum = &mut sums[index][section][first / CHECKED];
                *sum = crc32c::crc32c_append(*sum, bytes);
            }
        }
        at += 12 * elements as u64;
    }
    let header = header(params, gather, &sums)?;
    file.write_all_at(&header, 0).map_err(OptimError::file("write", path))?;
    file.sync_all().map_err(OptimError::file("flush", path))
}
