//! What can go wrong when descriptions of models, machines and plans are read.

use std::path::PathBuf;

/// An error of this crate. Messages name the document and the key path and say what to change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A document is not JSON.
    #[error("{document} is not valid JSON: {source}")]
    Json {
        /// Which document, for example `model config`.
        document: &'static str,
        /// Where and why parsing stopped.
        source: serde_json::Error,
    },
    /// A value is absent, of the wrong kind, or contradicts another one.
    #[error("{document}: `{key}` {problem}")]
    Value {
        /// Which document, for example `model config`.
        document: &'static str,
        /// The key path, for example `text_config.hidden_size`.
        key: String,
        /// What is wrong with it and what to do.
        problem: String,
    },
    /// The model's family is not one this version can size.
    #[error("model config: `{key}` is \"{found}\"; supported model types: {supported}")]
    UnsupportedModel {
        /// The key path of the model type.
        key: String,
        /// The type that was found.
        found: String,
        /// The supported ones, separated by commas.
        supported: String,
    },
    /// A workload that no model can be sized for.
    #[error("workload: {problem}")]
    Workload {
        /// What is wrong and what to do.
        problem: String,
    },
}
