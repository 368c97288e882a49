//! Errors of the solver.

use lazy_model::ChainError;

/// Why a problem was not given to the solver at all. What the solver found out is a [`Status`](crate::Status), not an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SolverError {
    /// The chain is not valid.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// The time limit is not a time.
    #[error("the time limit is {0} s; it must be a number of seconds, 0 or more")]
    TimeLimit(String),
}
