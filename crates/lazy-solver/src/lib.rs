//! Exact placement of activations over HBM, host RAM, NVMe and recomputation, solved with CBC.
//!
//! A [`CostChain`](lazy_model::CostChain) says how large each layer boundary is, what recomputing each layer costs, how fast the
//! links are and what each tier may hold. [`solve()`] finds, for every boundary, the place that makes the step shortest, and proves it.
//! Every placement returned has been judged by [`evaluate`](lazy_model::evaluate()) in exact arithmetic.
//!
//! ```
//! use lazy_model::CostChain;
//! use lazy_solver::{SolveOptions, Status, solve};
//!
//! // Three layers of 10, 20 and 30 ms, boundaries of 1 MiB: two fit in HBM, one in host RAM.
//! let chain = CostChain::from_json(
//!     r#"{"layers": 3, "layer_window_ms": [10, 20, 30], "layer_recompute_ms": [10, 20, 30],
//!         "boundary_bytes": [1048576, 1048576, 1048576, 1048576],
//!         "param_h2d_bytes": [0, 0, 0], "grad_d2h_bytes": [0, 0, 0],
//!         "gpu_budget_bytes": 2097152, "cpu_budget_bytes": 1048576, "nvme_budget_bytes": 0,
//!         "d2h_bytes_per_s": 1e9, "h2d_bytes_per_s": 1e9,
//!         "nvme_write_bytes_per_s": 0, "nvme_read_bytes_per_s": 0,
//!         "pcie_window_scale": 1, "nvme_window_scale": 1,
//!         "pcie_capacity_fraction": 1, "nvme_capacity_fraction": 1,
//!         "max_segment_layers": 2, "checkpoint_penalty": 1e-5, "nvme_tiebreak": 1e-3}"#,
//! )?;
//! let solution = solve(&chain, &SolveOptions::default())?;
//! assert_eq!(solution.status, Status::Optimal);
//! // Boundary 1 is recomputed: one more forward of layer 0.
//! assert_eq!(solution.evaluation.map(|e| e.step_ms()), Some(10.0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! For a model on a machine, [`step::solve_step`] plans the whole step, layer internals included, and simulates what it promises; the
//! page of [`step`] has an example. [`ranks`] plans several ranks that share a host.
//!
//! An infeasible chain, a time limit that came too early and a solver that gave up are results, told apart by [`Status`];
//! [`explain()`] says which single change makes an infeasible chain feasible, and [`baselines()`] are the plans people make by hand, to
//! hold a solved one against. `docs/model.md` derives the program.

mod baselines;
#[cfg(feature = "cli")]
pub mod budgets;
mod by_hand;
mod carry;
mod cbc;
mod count_dp;
#[cfg(feature = "cross-check")]
mod cross_check;
mod error;
mod exchange;
mod explain;
mod fewest;
#[cfg(test)]
mod filler_tests;
mod fit;
mod hidden;
mod keep;
mod lexicographic;
mod link;
mod mip;
mod physical;
mod place;
mod polish;
mod problem;
pub mod ranks;
mod search;
mod solve;
mod spill;
pub mod step;
#[cfg(test)]
#[path = "../tests/common/steps.rs"]
mod steps;
mod surrogate;
mod weighted;

pub use baselines::{Baseline, StepBaseline, baselines, step_baselines};
#[cfg(feature = "cross-check")]
pub use cross_check::cross_check;
pub use error::SolverError;
pub use explain::{Raise, Remedy, any_plan, explain, explain_step};
pub use solve::{Method, Solution, SolveOptions, Status, TieBreak, solve};
