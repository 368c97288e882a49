//! A Qwen3-style language-model trainer on the lazy crates.

pub mod data;
pub mod decoder;
pub mod dropout;
pub mod random;
