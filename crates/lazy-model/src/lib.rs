//! Cost chains, schedules and their verification for training beyond GPU memory.
//!
//! This crate opens no device and links no solver.

pub mod chain;
pub mod span;
pub mod units;

pub use chain::{ChainError, CostChain, Locks};
pub use span::{Lane, Span};
pub use units::{BoundaryIndex, Bytes, BytesPerSecond, LayerIndex, Placement, Seconds, Tier};
