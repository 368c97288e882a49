//! The trained weights as a folder that other tools load.

use std::collections::BTreeMap;
use std::fs;

use safetensors::{Dtype, View};

use crate::decoder::Decoder;
use crate::error::{Result, TrainError};
use crate::run_folder::{RunFolder, write_file};

/// A float32 parameter on its way into a file.
struct Weight {
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl View for &Weight {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> std::borrow::Cow<'_, [u8]> {
        self.bytes.as_slice().into()
    }
    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Writes `checkpoint/config.json` and `checkpoint/model.safetensors`, with Hugging Face names.
///
/// # Errors
/// When the folder cannot be written.
pub fn checkpoint(decoder: &Decoder, folder: &RunFolder) -> Result<()> {
    let dir = folder.checkpoint();
    fs::create_dir_all(&dir).map_err(TrainError::io(&dir))?;
    let mut weights = BTreeMap::new();
    for (index, (name, var)) in decoder.parameters().iter().enumerate() {
        let bytes = decoder.read_parameter(index, |v| v.iter().flat_map(|x| x.to_le_bytes()).collect())?;
        weights.insert(name.as_str(), Weight { shape: var.dims().to_vec(), bytes });
    }
    let path = dir.join("model.safetensors");
    let metadata = std::collections::HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let bytes = safetensors::serialize(weights.iter().map(|(n, w)| (*n, w)), Some(metadata))
        .map_err(|e| TrainError::Io { path: path.clone(), source: std::io::Error::other(e.to_string()) })?;
    write_file(&path, &bytes)?;
    let config = folder.config();
    let text = fs::read(&config).map_err(TrainError::io(&config))?;
    write_file(&dir.join("config.json"), &text)
}
