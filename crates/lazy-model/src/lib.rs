//! Cost chains, schedules and their verification for training beyond GPU memory.
//!
//! This crate opens no device and links no solver.

pub mod chain;
pub mod evaluate;
mod layout;
pub mod problem;
pub mod schedule;
pub mod span;
pub mod step;
pub mod timeline;
pub mod units;

pub use chain::{ChainError, CostChain, Locks};
pub use evaluate::{Evaluation, ExposedMs, Pool, Violation, evaluate};
pub use problem::{StepProblem, Verified, VerifyError};
pub use schedule::{Counts, Schedule};
pub use span::{Lane, Span};
pub use step::{StepPlan, TierBytes};
pub use units::{BoundaryIndex, Bytes, BytesPerSecond, LayerIndex, Placement, Seconds, Tier};
