//! Partial sums of the squares of gradients in device memory.

use std::sync::Arc;

use lazy_model::{Bytes, Lane};
use lazy_store::Submission;

use super::copies::{Copy, Place};
#[cfg(test)]
use super::simulated;
use super::{Accelerator, Kernels};
use crate::OptimError;
use crate::device::DeviceSlice;
use crate::norm::{self, NORM_BLOCK, NormPart};

impl Accelerator {
    /// The parts of the norm of gradients in device memory: parameter, gradient, and its first element's number in the parameter.
    pub(crate) fn norm_parts(
        &self,
        grads: Vec<(usize, DeviceSlice, usize)>,
        scale: f64,
    ) -> Result<Vec<NormPart>, OptimError> {
        let blocks = grads.iter().flat_map(|(param, grad, first)| {
            let range = norm::blocks(*first, grad.len());
            range.map(|range| (*param, range.start / NORM_BLOCK))
        });
        let blocks: Vec<(usize, usize)> = blocks.collect();
        let Some(sums) = self.sums.as_ref().filter(|_| !blocks.is_empty()) else { return Ok(Vec::new()) };
        let before = self.failures();
        let task = Submission { writes: &[sums], ..Submission::new(Lane::Optimizer, "gradient norm") };
        match &self.kernels {
            Kernels::Cuda(adam) => {
                let adam = Arc::clone(adam);
                self.store.launch(task, move |cx| {
                    let mut at = cx.write(0).address;
                    for (_, grad, first) in &grads {
                        // SAFETY: the extent has room for all sums; the gradients are as `DeviceSlice` says, and their end is
                        // waited for below.
                        unsafe { adam.sums(cx.stream(), *grad, *first as u64, scale, at) }?;
                        at += 8 * norm::blocks(*first, grad.len()).count() as u64;
                    }
                    Ok(())
                })?
            }
            #[cfg(test)]
            Kernels::Simulated => simulated::sums(&self.store, task, grads, scale)?,
        };
        let (mut scratch, bytes) = (self.scratch(), Bytes(8 * blocks.len() as u64));
        let copies = vec![Copy { from: Place::Read(0, 0), to: Place::Address(scratch.address()), bytes }];
        self.copy_now(Lane::D2h, "partial sums".into(), &[sums], &[], copies)?;
        self.check(before)?;
        let found = scratch.as_slice().as_chunks().0.iter().map(|sum| f64::from_le_bytes(*sum));
        let part = |((param, block), sum)| NormPart { param, block, sum };
        Ok(blocks.into_iter().zip(found).map(part).collect())
    }
}
