//! A Qwen3-style language-model trainer on the lazy crates.
