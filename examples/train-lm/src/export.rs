//! The trained weights as a folder that other tools load.

use std::borrow::Cow;
use std::cell::RefCell;
use std::fs;

use lazy_runtime::Executor;
use safetensors::{Dtype, View};
use serde_json::Value;

use crate::backend::Trained;
use crate::cuda::Real;
use crate::dataset::TOKENIZER;
use crate::error::{Result, TrainError};
use crate::run_folder::{RunFolder, replace, write_file};

/// A parameter on its way into a file, read when its turn comes.
struct Weight<'a> {
    trained: &'a Trained,
    executor: &'a Executor,
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
        let bytes = self.trained.read(self.executor, self.index).unwrap_or_else(|error| {
            self.failed.borrow_mut().get_or_insert(error);
            vec![0; self.data_len()]
        });
        bytes.into()
    }
    fn data_len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.trained.format().bytes()
    }
}

/// Writes `checkpoint/config.json` and `checkpoint/model.safetensors`, with Hugging Face names, in the type that steps compute with, and
/// the tokenizer where there is one.
///
/// # Errors
/// When the folder cannot be written.
pub(crate) fn checkpoint(trained: &Trained, executor: &Executor, folder: &RunFolder) -> Result<()> {
    let dir = folder.checkpoint();
    fs::create_dir_all(&dir).map_err(TrainError::io(&dir))?;
    let (parameters, failed) = (trained.spec().parameters(), RefCell::new(None));
    let weights = parameters.iter().enumerate().map(|(index, p)| {
        (p.name.as_str(), Weight { trained, executor, index, shape: &p.shape, failed: &failed })
    });
    let metadata = std::collections::HashMap::from([("format".to_owned(), "pt".to_owned())]);
    replace(&dir.join("model.safetensors"), |partial| {
        safetensors::serialize_to_file(weights, Some(metadata), partial).map_err(std::io::Error::other)
    })
    .and_then(|()| failed.take().map_or(Ok(()), Err))?;
    if folder.tokenizer().exists() {
        let text = fs::read(folder.tokenizer()).map_err(TrainError::io(&folder.tokenizer()))?;
        write_file(&dir.join(TOKENIZER), &text)?;
    }
    let config = folder.config();
    let text = fs::read(&config).map_err(TrainError::io(&config))?;
    let dtype = match trained.format() {
        Real::F32 => "float32",
        Real::Bf16 => "bfloat16",
    };
    write_file(&dir.join("config.json"), &with_dtype(text, dtype))
}

/// The configuration with the type of the weights that are written in place of that of the weights the run began with.
fn with_dtype(config: Vec<u8>, dtype: &str) -> Vec<u8> {
    let Ok(Value::Object(mut all)) = serde_json::from_slice(&config) else { return config };
    let mut changed = false;
    for key in ["dtype", "torch_dtype"] {
        if let Some(value) = all.get_mut(key).filter(|value| *value != dtype) {
            *value = dtype.into();
            changed = true;
        }
    }
    if changed { Value::Object(all).to_string().into_bytes() } else { config }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_names_the_type_of_the_weights() {
        let of = |text: &str| String::from_utf8(with_dtype(text.into(), "float32")).unwrap();
        assert_eq!(
            of(r#"{"dtype": "bfloat16", "hidden_size": 8}"#),
            r#"{"dtype":"float32","hidden_size":8}"#
        );
        for same in [r#"{ "torch_dtype" : "float32" }"#, r#"{ "hidden_size" : 8 }"#, "no json"] {
            assert_eq!(of(same), same);
        }
    }
}
