//! Carries out a schedule: forward, recomputation, read-ahead and backward over a tiered store.
//!
//! | concept | what it is |
//! | --- | --- |
//! | [`Layer`] | one layer of a model: forward, backward, and what it saves in between |
//! | [`Prologue`], [`Epilogue`] | what makes boundary 0 (an embedding), what turns boundary N into a loss and its gradient; functions will do ([`Source`]) |
//! | [`AutogradLayer`] | a module of a framework that differentiates by itself, as a layer |
//! | [`Parameter`] | weights and a gradient that the runtime keeps for its owners, in HBM or streamed |
//! | [`Model`] | these together: their sizes, for a planner, and where parameters lie |
//! | [`Program`] | a plan that was checked to be a step of the model |
//! | [`Executor`] | submits a program's operations to a [`lazy_store::Store`], and nothing else |
//! | [`StepReport`] | what ran when, measured, in the planner's own terms |
//!
//! The executor derives no order of its own: the plan lists every reservation, task and release, and the store derives every
//! wait from what a task reads and writes. So a layer sees the same bytes whatever the tiers, the read-ahead and the timing,
//! and a training step gives the same bits for every schedule.
//!
//! One step of three layers, boundary 1 in host RAM and boundary 2 recomputed; `|` is a wait that the store derives:
//!
//! ```text
//! compute    prologue  fwd 0   fwd 1   fwd 2  loss  rec 1  rec 2+ bwd 2  rec 1+ bwd 1  rec 0+ bwd 0  prologue'
//! d2h                         | b1 ------>
//! h2d                                        | b1 ------> |
//! optimizer                                                            | update 2    | update 1     | update 0
//! ```
//!
//! ```
#![doc = include_str!("../examples/scale.rs")]
//! ```

mod autograd;
mod between;
mod calls;
#[cfg(feature = "candle")]
pub mod candle;
mod error;
mod executor;
mod functions;
mod gradients;
mod hook;
mod layer;
mod model;
mod notes;
mod program;
mod report;
mod view;

pub use autograd::{Autograd, AutogradLayer};
pub use error::RuntimeError;
pub use executor::{Executor, ExecutorOptions, Step};
pub use functions::Source;
pub use gradients::Gradients;
pub use hook::FinalGradient;
pub use layer::{
    Backward, Context, Epilogue, Forward, Layer, LayerError, LayerSizes, Loss, Parameter, ParameterId, Phase,
    Prologue, Saved,
};
pub use model::{Model, ModelOptions, ModelSizes, Owner};
pub use program::Program;
pub use report::{Compared, Comparison, StepReport, Wait};
pub use view::{Grads, Input, Output, Weights};
