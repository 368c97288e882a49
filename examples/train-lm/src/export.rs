//! The trained weights as a folder that other tools load.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fs;

use safetensors::{Dtype, View};

use crate::backend::Trained;
use crate::cuda::Real;
use crate::error::{Result, TrainError};
use crate::run_folder::{RunFolder, replace, write_file};

/// A parameter on its way into a file, read when its turn comes.
struct Weight<'a> {
    trained: &'a Trained,
    index: usize,
    shape: &'a [usize],
    failed: &'a RefCell<Option<TrainError>>,
}

impl View for Weight<'_> {
    fn dtype(&self) -> Dtype {
        match self.trained.format() {
            Real::F32 => Dtype::F32,
            Real::Bf16 => Dtype::BF16,
        }
    }
    fn shape(&self) -> &[usize] {
        self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.trained.read(self.index).unwrap_or_else(|error| {
            self.failed.borrow_mut().get_or_insert(error);
            vec![0; self.data_len()]
        });
        bytes.into()
    }
    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.trained.format().bytes()
    }
}

/// Writes `checkpoint/config.json` and `checkpoint/model.safetensors`, with Hugging Face names, in the type that steps compute with.
///
/// # Errors
/// When the folder cannot be written.
pub(crate) fn checkpoint(trained: &Trained, folder: &RunFolder) -> Result<()> {
    let dir = folder.checkpoint();
    fs::create_dir_all(&dir).map_err(TrainError::io(&dir))?;
    let (parameters, failed) = (trained.spec().parameters(), RefCell::new(None));
    let weights = parameters
        .iter()
        .enumerate()
        .map(|(index, p)| (p.name.as_str(), Weight { trained, index, shape: &p.shape, failed: &failed }));
    let metadata = std::collections::HashMap::from([("format".to_owned(), "pt".to_owned())]);
    replace(&dir.join("model.safetensors"), |partial| {
        safetensors::serialize_to_file(weights, Some(metadata), partial).map_err(std::io::Error::other)
    })
    .and_then(|()| failed.take().map_or(Ok(()), Err))?;
    let config = folder.config();
    let text = fs::read(&config).map_err(TrainError::io(&config))?;
    write_file(&dir.join("config.json"), &text)
}
