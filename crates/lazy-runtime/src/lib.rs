//! Carries out a schedule: forward, recomputation, read-ahead and backward over a tiered store.
//!
//! | concept | what it is |
//! | --- | --- |
//! | [`Layer`] | one layer of a model: forward, backward, and what it saves in between |
//! | [`Prologue`], [`Epilogue`] | what makes boundary 0 (an embedding), what turns boundary N into a loss and its gradient |
//! | [`Executor`] | submits the operations of a [`lazy_model::StepPlan`] to a [`lazy_store::Store`] and nothing else |
//! | [`Gradients`] | accumulation buffers, one a parameter |
//! | [`PassReport`] | what ran when, measured, in the planner's own terms |
//!
//! The executor derives no order of its own: the plan lists every reservation, task and release, and the store derives every
//! wait from what a task reads and writes. So a layer sees the same bytes whatever the tiers, the read-ahead and the timing,
//! and a training step gives the same bits for every schedule.
//!
//! ```
#![doc = include_str!("../examples/scale.rs")]
//! ```

#[cfg(feature = "candle")]
pub mod candle;
mod error;
mod executor;
mod gradients;
mod layer;

pub use error::RuntimeError;
pub use executor::{Executor, PassReport};
pub use gradients::Gradients;
pub use layer::{Context, Epilogue, Layer, LayerError, Phase, Prologue, Saved};
