//! Spans: what ran on which lane, from when to when. Measured runs and the simulated time line use the same type, so
//! both are drawn, compared and accounted for by the same code.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Seconds};

/// An ordered queue of work: one of the streams of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Lane {
    /// Layer arithmetic.
    Compute,
    /// Device to host copies.
    D2h,
    /// Host to device copies.
    H2d,
    /// Writes to NVMe.
    NvmeWrite,
    /// Reads from NVMe.
    NvmeRead,
    /// Optimizer work.
    Optimizer,
}

impl Lane {
    /// All lanes, in drawing order.
    pub const ALL: [Lane; 6] =
        [Lane::Compute, Lane::D2h, Lane::H2d, Lane::NvmeWrite, Lane::NvmeRead, Lane::Optimizer];

    /// The name used in JSON and traces.
    pub const fn name(self) -> &'static str {
        match self {
            Lane::Compute => "compute",
            Lane::D2h => "d2h",
            Lane::H2d => "h2d",
            Lane::NvmeWrite => "nvme_write",
            Lane::NvmeRead => "nvme_read",
            Lane::Optimizer => "optimizer",
        }
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One piece of work on one lane.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// What was done, for example `forward 3` or `boundary 7`.
    pub name: Arc<str>,
    /// Where it ran.
    pub lane: Lane,
    /// Start, from the beginning of the step.
    pub start: Seconds,
    /// End, from the beginning of the step.
    pub end: Seconds,
    /// Bytes moved; zero for arithmetic.
    pub bytes: Bytes,
    /// Index, in the same list of spans, of the span this one waited for last before it could start, where it
    /// waited for one on another lane.
    pub blocked_on: Option<usize>,
}

impl Span {
    /// `end - start`.
    pub fn duration(&self) -> Seconds {
        self.end - self.start
    }
}
