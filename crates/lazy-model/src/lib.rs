//! Cost chains, schedules and their verification for training beyond GPU memory.
//!
//! This crate is data and arithmetic: it opens no device and links no solver, so a planner, a trainer and a report can agree on what
//! a plan means without pulling each other in.
//!
//! | concept | what it is |
//! | --- | --- |
//! | boundary | the activation between two layers; layer `l` reads boundary `l` and writes boundary `l + 1` |
//! | [`ModelSpec`] | a Hugging Face `config.json`, read strictly: parameters, sizes and work follow from it |
//! | [`HardwareProfile`] | what a machine moves and computes, each value measured or assumed; [`HardwareProfile::preset`] has some by name |
//! | [`CostChain`] | the placement problem as data; [`evaluate()`] judges a placement in exact arithmetic |
//! | [`ReferenceSettings`] | the published planning command's parameters, from which a chain follows |
//! | [`Schedule`] | a decision for every boundary and layer, with what was promised |
//! | [`StepPlan`] | the operations that carry a schedule out, with offsets and waits |
//! | [`timeline::simulate`] | what those operations take on given costs, and which link arithmetic waits for |
//! | [`StepProblem`] | sizes, costs and caps of a step, [`StepProblem::for_model`] of a model on a machine; [`StepProblem::verify`] refuses a schedule that breaks one |
//! | [`RunReport`], [`perfetto`] | pictures of plans and runs |
//!
//! # Example
//!
//! What does it cost to recompute one boundary of three, and how much HBM does that save?
//!
//! ```
//! use lazy_model::schedule::Schedule;
//! use lazy_model::timeline::{LinkRates, StepCosts, simulate};
//! use lazy_model::{Bytes, BytesPerSecond, Placement, Seconds, StepPlan};
//!
//! let sizes = [Bytes::from_mib(64); 4];
//! let mut schedule = Schedule::named("by hand", &sizes, false);
//! let all = StepPlan::new(&schedule, &sizes)?;
//! schedule.placement[1] = Placement::Recompute;
//! let fewer = StepPlan::new(&schedule, &sizes)?;
//! assert_eq!(all.extents.hbm - fewer.extents.hbm, Bytes::from_mib(64));
//!
//! let rate = BytesPerSecond::from_gb(12.0);
//! let costs = StepCosts {
//!     prologue: Seconds::ZERO,
//!     forward: vec![Seconds::from_ms(10.0); 3],
//!     saving_forward: vec![Seconds::from_ms(10.0); 3],
//!     internals_forward: vec![Seconds::from_ms(10.0); 3],
//!     backward: vec![Seconds::from_ms(20.0); 3],
//!     epilogue: Seconds::ZERO,
//!     prologue_backward: Seconds::ZERO,
//!     links: LinkRates { d2h: rate, h2d: rate, nvme_write: rate, nvme_read: rate, ..LinkRates::default() },
//! };
//! let slower = simulate(&fewer, &costs).total() - simulate(&all, &costs).total();
//! assert!((slower.as_ms() - 10.0).abs() < 1e-9);
//! # Ok::<(), lazy_model::step::StepError>(())
//! ```

//!
//! What does one layer of a model keep for its backward, kind by kind?
//!
//! ```
//! use lazy_model::{LayerIndex, LayerKind, ModelSpec, Workload};
//!
//! let spec = ModelSpec::from_json(
//!     r#"{"model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64, "full_attention_interval": 4,
//!         "vocab_size": 248320, "intermediate_size": 17408, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
//!         "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
//!         "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": false}"#,
//! )?;
//! assert_eq!(spec.total_parameters(), 26_895_998_464);
//! let work = Workload::new(72, 1024, 2)?;
//! let (linear, full) = (LayerIndex(0), LayerIndex(3));
//! assert_eq!((spec.layer_kind(linear), spec.layer_kind(full)), (LayerKind::Linear, LayerKind::Full));
//! for layer in [linear, full] {
//!     let kind = spec.layer_kind(layer).name();
//!     println!("{kind}: {} kept beside a boundary of {}", spec.internals_bytes(layer, &work), spec.boundary_bytes(&work));
//! }
//! # Ok::<(), lazy_model::Error>(())
//! ```

// What unit tests share with programs of tests names the crate as these do.
#[cfg(test)]
extern crate self as lazy_model;

pub mod chain;
pub mod config;
pub mod error;
pub mod evaluate;
pub mod hardware;
mod json;
pub mod keep;
pub mod layers;
mod layout;
mod load;
pub mod observe;
pub mod perfetto;
mod presets;
pub mod problem;
pub mod reference;
pub mod report;
pub mod schedule;
mod sizing;
pub mod span;
pub mod step;
#[cfg(test)]
#[path = "../tests/common/steps.rs"]
mod steps;
mod text;
pub mod timeline;
pub mod units;

pub use chain::{ChainError, CostChain, Locks};
pub use config::{
    Attention, Checkpoint, DeltaNet, DenseMlp, Family, LatentAttention, LayerKind, LayerShape, Mixer, Mlp,
    ModelSpec, MoeMlp,
};
pub use error::Error;
pub use evaluate::{Evaluation, ExposedMs, Pool, Violation, evaluate};
pub use hardware::{Compute, Drive, Drives, HardwareProfile, Links, Marked, Source, StepTimes, Tiers};
pub use keep::{HbmPeak, Keep, Position, evaluate_keep};
pub use layers::{
    AttentionKernel, FusedBytes, FusedKernels, LayerWorkspace, LossBytes, MomentFormat, Parameter,
    SavedTensor, Saving, Sharding, StateBytes, StateFormat, Workload,
};
pub use load::LinkLoad;
pub use observe::Observations;
pub use problem::{BesideBackward, StepProblem, Verified, VerifyError, Windows};
pub use reference::ReferenceSettings;
pub use report::RunReport;
pub use schedule::{Counts, Schedule};
pub use sizing::Training;
pub use span::{Lane, Span};
pub use step::{StepPlan, Streamed, TierBytes, Workspaces};
pub use text::read_text;
pub use units::{BoundaryIndex, Bytes, BytesPerSecond, LayerIndex, Placement, Seconds, Tier};
