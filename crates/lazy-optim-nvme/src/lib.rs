//! Adam and AdamW whose fp32 state lives on NVMe.

mod error;
pub mod io;
mod options;
mod state;

pub use error::OptimError;
pub use options::{AdamOptions, GroupOptions, ParamSpec, StepInput, StepOutcome, StepSeconds};
pub use state::NvmeAdam;

/// Largest blob a step may commit, in bytes.
pub const MAX_BLOB_BYTES: usize = 1 << 20;
