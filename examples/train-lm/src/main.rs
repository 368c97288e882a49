//! The `train-lm` program.
fn main() {}
