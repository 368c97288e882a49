//! What can go wrong, and what to do about it.

/// Every failure of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// Under construction.
    #[error("not written yet")]
    Unwritten,
}
