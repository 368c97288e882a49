//! The logits of a model in a folder, to be held against those of another program.

use std::path::{Path, PathBuf};

use clap::Args;
use lazy_model::{ModelSpec, Parameter};
use serde::Serialize;

use crate::decoder::{Decoder, DecoderError, with_slice};
use crate::error::{Result, TrainError};
use crate::prepare::read_config;
use crate::weights::{CheckpointWeights, InitialWeights};

/// What `logits` takes.
#[derive(Args)]
pub struct LogitsArgs {
    /// Folder of the model: config.json and weights, such as `checkpoint` in a run's folder
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// A row of tokens, by number
    #[arg(long, value_name = "ID,..", value_delimiter = ',', required = true)]
    ids: Vec<u32>,
}

/// What it prints.
#[derive(Debug, Serialize)]
pub struct Logits {
    /// The tokens.
    pub ids: Vec<u32>,
    /// For each of them a number for each token of the vocabulary: the larger, the likelier it is to follow.
    pub logits: Vec<Vec<f32>>,
}

impl LogitsArgs {
    /// Computes them in float32 on the CPU, whatever type the weights have, without dropout.
    ///
    /// # Errors
    /// When the folder does not hold a model that can be trained, with its weights, and when a token is none of its vocabulary.
    pub fn compute(&self) -> Result<Logits> {
        let decoder = read(&self.model)?;
        let logits = decoder.logits(&self.ids, 1, self.ids.len())?;
        let rows = |all: &[f32]| all.chunks_exact(decoder.spec().vocab).map(<[f32]>::to_vec).collect();
        let logits = with_slice(&logits, rows).map_err(DecoderError::from)?;
        Ok(Logits { ids: self.ids.clone(), logits })
    }
}

/// The decoder whose configuration and weights lie in a folder.
fn read(folder: &Path) -> Result<Decoder> {
    let spec = ModelSpec::from_json(&read_config(folder)?)?;
    if !CheckpointWeights::lie_in(folder) {
        return Err(TrainError::Usage(format!(
            "{} holds no model.safetensors: give a folder with weights, such as `checkpoint` in a run's folder",
            folder.display()
        )));
    }
    let weights = InitialWeights::Checkpoint(CheckpointWeights::open(folder, &spec)?);
    let mut failed = None;
    let decoder = Decoder::new(spec, &mut |name, shape| {
        let parameter = Parameter { name: name.to_owned(), shape: shape.to_vec() };
        let mut values = vec![0.0; shape.iter().product()];
        if let Err(error) = weights.fill(&parameter, 0, &mut values) {
            failed.get_or_insert(error);
        }
        values
    })?;
    failed.map_or(Ok(decoder), Err)
}
