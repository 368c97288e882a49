//! A Qwen3-style language-model trainer on the lazy crates: the downstream program that uses all of them.

pub mod backend;
pub mod batch;
mod boundaries;
pub mod console;
pub mod cuda;
pub mod data;
mod dataset;
pub mod decoder;
pub mod dropout;
pub mod error;
pub mod evaluation;
pub mod export;
pub mod habits;
pub mod metrics;
pub mod model;
pub mod phase;
pub mod planning;
pub mod prepare;
pub mod probe;
pub mod random;
pub mod report;
pub mod run_folder;
mod saves;
pub mod settings;
pub mod stop;
pub mod train;
pub mod weights;
