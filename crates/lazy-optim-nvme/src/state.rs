//! The optimizer.

use std::path::Path;

use lazy_model::Bytes;

use crate::io::NvmeMode;
use crate::{AdamOptions, OptimError, ParamSpec, StepInput, StepOutcome};

/// Adam with its state in slot files.
#[derive(Debug)]
pub struct NvmeAdam {
    mode: NvmeMode,
}

impl NvmeAdam {
    /// Makes a store in `dir` and seals the initial state to disk, chunk by chunk.
    pub fn create(
        _dir: &Path,
        _params: &[ParamSpec],
        _options: &AdamOptions,
        _init: impl FnMut(usize, usize, &mut [f32]),
    ) -> Result<Self, OptimError> {
        Err(OptimError::Unwritten)
    }

    /// Opens the last committed state.
    pub fn open(_dir: &Path, _params: &[ParamSpec], _options: &AdamOptions) -> Result<Self, OptimError> {
        Err(OptimError::Unwritten)
    }

    /// One optimizer step. `None` in `grads` means no gradient this step.
    pub fn step(
        &mut self,
        _grads: &[Option<&[f32]>],
        _input: &StepInput<'_>,
        _weights: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<StepOutcome, OptimError> {
        Err(OptimError::Unwritten)
    }

    /// Streams the committed main weights.
    pub fn read_weights(&mut self, _weights: &mut dyn FnMut(usize, usize, &[f32])) -> Result<(), OptimError> {
        Err(OptimError::Unwritten)
    }

    /// The blob of the last committed step.
    pub fn blob(&self) -> &[u8] {
        &[]
    }

    /// Steps taken, by parameter.
    pub fn step_counts(&self) -> &[u64] {
        &[]
    }

    /// Committed steps since creation.
    pub fn sequence(&self) -> u64 {
        0
    }

    /// Number of buckets.
    pub fn bucket_count(&self) -> usize {
        0
    }

    /// How the files are read and written, as obtained.
    pub fn mode(&self) -> &NvmeMode {
        &self.mode
    }

    /// Size of all files of a store.
    pub fn bytes_on_disk(_params: &[ParamSpec], _options: &AdamOptions) -> Bytes {
        Bytes::ZERO
    }

    /// Memory of the chunk ring.
    pub fn ring_bytes(_options: &AdamOptions) -> Bytes {
        Bytes::ZERO
    }
}
