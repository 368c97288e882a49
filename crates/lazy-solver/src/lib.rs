//! Exact placement of activations over HBM, host RAM, NVMe and recomputation, solved with CBC.

mod cbc;
mod error;
mod mip;
mod problem;
mod solve;

pub use error::SolverError;
pub use solve::{Method, Solution, SolveOptions, Status, solve};
