//! Cost chains, schedules and their verification for training beyond GPU memory.
//!
//! This crate opens no device and links no solver.

pub mod chain;
pub mod config;
pub mod error;
pub mod evaluate;
pub mod hardware;
mod json;
pub mod layers;
mod layout;
pub mod perfetto;
pub mod problem;
pub mod report;
pub mod schedule;
pub mod span;
pub mod step;
pub mod timeline;
pub mod units;

pub use chain::{ChainError, CostChain, Locks};
pub use config::{Family, LayerKind, ModelSpec};
pub use error::Error;
pub use evaluate::{Evaluation, ExposedMs, Pool, Violation, evaluate};
pub use hardware::{HardwareProfile, Links, Marked, Source, StepTimes, Tiers};
pub use layers::{Parameter, SavedTensor, Workload};
pub use problem::{StepProblem, Verified, VerifyError};
pub use report::RunReport;
pub use schedule::{Counts, Schedule};
pub use span::{Lane, Span};
pub use step::{StepPlan, TierBytes};
pub use units::{BoundaryIndex, Bytes, BytesPerSecond, LayerIndex, Placement, Seconds, Tier};
