//! Cost chains, schedules and their verification for training beyond GPU memory.
//!
//! This crate opens no device and links no solver.

pub mod chain;
pub mod evaluate;
pub mod span;
pub mod units;

pub use chain::{ChainError, CostChain, Locks};
pub use evaluate::{Counts, Evaluation, ExposedMs, Pool, TierBytes, Violation, evaluate};
pub use span::{Lane, Span};
pub use units::{BoundaryIndex, Bytes, BytesPerSecond, LayerIndex, Placement, Seconds, Tier};
