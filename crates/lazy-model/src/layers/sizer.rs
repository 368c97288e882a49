//! Bytes of tensors of one workload.

use super::{AttentionKernel, Workload};
use crate::config::DeltaNet;
use crate::units::Bytes;

/// Bytes of the statistics (reciprocal RMS, log-sum-exp, decay, router scores) that kernels keep in fp32 whatever the
/// activations are.
pub(super) const FP32: u64 = 4;

/// Positions that the delta rule's kernels work on at a time.
pub(super) const CHUNK: usize = 64;

/// Sizes of tensors of one workload.
#[derive(Clone, Copy)]
pub(super) struct Sizer {
    work: Workload,
    pub(super) element: u64,
}

impl Sizer {
    pub(super) fn new(work: &Workload) -> Self {
        Sizer { work: *work, element: work.element_bytes() as u64 }
    }

    /// `width` numbers of `bytes` each a token.
    pub(super) fn numbers(&self, width: usize, bytes: u64) -> Bytes {
        Bytes(self.work.tokens()) * width as u64 * bytes
    }

    /// `width` elements a token.
    pub(super) fn wide(&self, width: usize) -> Bytes {
        self.numbers(width, self.element)
    }

    /// `width` numbers a token in fp32.
    pub(super) fn fp32(&self, width: usize) -> Bytes {
        self.numbers(width, FP32)
    }

    /// Scores of every head and pair of positions, `bytes` each: `batch heads S^2`.
    pub(super) fn scores(&self, heads: usize, bytes: u64) -> Bytes {
        self.numbers(heads, bytes) * self.work.sequence() as u64
    }

    /// The states between the chunks of a delta rule: one for each value head and each of the `batch ceil(S / 64)` chunks.
    pub(super) fn states(&self, net: &DeltaNet) -> Bytes {
        let chunks = self.work.batch() as u64 * self.work.sequence().div_ceil(CHUNK) as u64;
        Bytes(chunks) * (net.value_width() * net.key_dim) as u64 * self.element
    }

    pub(super) fn eager(&self) -> bool {
        self.work.attention() == AttentionKernel::Eager
    }
}
