//! Numbers in the memory of a GPU.
//!
//! One of the few modules with `unsafe`: such memory is named by its address.

use std::ops::Range;

/// Numbers in the memory of the GPU that a store was opened with ([`AdamOptions::device`](crate::AdamOptions::device)), by
/// address: a gradient that is read there, or room for new weights that are written there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlice {
    address: u64,
    elements: usize,
    bf16: bool,
}

impl DeviceSlice {
    /// `elements` float32 numbers from `address` on (a `CUdeviceptr`), a multiple of 4; one of 16 is faster.
    ///
    /// # Safety
    ///
    /// The memory is that GPU's, and stays allocated until the call that it is given to has returned. Until then nobody else
    /// writes it, nor reads it where it is room for weights. What was put on [`StepInput::stream`](crate::StepInput::stream)
    /// before the call needs no care: the call waits for that. When the call returns, all that it put on the GPU is done.
    pub unsafe fn f32(address: u64, elements: usize) -> Self {
        DeviceSlice { address, elements, bf16: false }
    }

    /// `elements` bfloat16 numbers from `address` on, a multiple of 2; one of 8 is faster.
    ///
    /// # Safety
    ///
    /// As for [`DeviceSlice::f32`].
    pub unsafe fn bf16(address: u64, elements: usize) -> Self {
        DeviceSlice { address, elements, bf16: true }
    }

    /// Of either format.
    ///
    /// # Safety
    ///
    /// As for [`DeviceSlice::f32`].
    pub(crate) unsafe fn staged(address: u64, elements: usize, bf16: bool) -> Self {
        DeviceSlice { address, elements, bf16 }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.elements
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.elements == 0
    }

    pub(crate) fn address(self) -> u64 {
        self.address
    }

    pub(crate) fn is_bf16(self) -> bool {
        self.bf16
    }

    /// Bytes of a number.
    pub(crate) fn size(self) -> usize {
        if self.bf16 { 2 } else { 4 }
    }

    /// Takes the first `n` elements away; gives them.
    pub(crate) fn split_off(&mut self, n: usize) -> Self {
        let front = self.slice(0..n);
        *self = self.slice(n..self.elements);
        front
    }

    /// A part of them.
    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        let elements = range.len();
        debug_assert!(range.end <= self.elements, "a part lies in the whole");
        DeviceSlice { address: self.address + (range.start * self.size()) as u64, elements, ..self }
    }
}
