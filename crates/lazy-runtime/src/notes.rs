//! What forwards said of their tensors, so that a recomputation that goes another way is noticed.

use std::sync::{Mutex, PoisonError};

use crate::layer::{Context, LayerError, Phase};

/// What the last forward of each layer said.
pub(crate) struct Notes {
    layers: Vec<Mutex<Layer>>,
    /// Whether checksums of outputs are compared, too.
    pub(crate) checksums: bool,
}

#[derive(Default)]
struct Layer {
    tensors: Vec<Tensor>,
    checksum: Option<u32>,
}

struct Tensor {
    name: &'static str,
    shape: Vec<usize>,
    dtype: &'static str,
    /// Whether the pass under way has said it.
    current: bool,
}

/// A recomputation went another way than the forward it repeats.
#[derive(Debug, thiserror::Error)]
enum Mismatch {
    #[error(
        "layer {layer} was recomputed another way: its {tensor} was {first_shape:?} of {first_dtype}, and is {shape:?} of {dtype} now; \
         a layer may depend on its input, its weights and the context alone (no mode that is switched in between, no cache)"
    )]
    Tensor {
        layer: usize,
        tensor: &'static str,
        first_shape: Vec<usize>,
        first_dtype: &'static str,
        shape: Vec<usize>,
        dtype: &'static str,
    },
    #[error(
        "layer {layer} was recomputed to other values: the checksum of its output was {first:08x}, and is {now:08x} now; \
         a layer may depend on its input, its weights and the context alone (randomness on `cx.dropout_key()`)"
    )]
    Values { layer: usize, first: u32, now: u32 },
}

impl Notes {
    pub(crate) fn new(layers: usize, checksums: bool) -> Notes {
        Notes { layers: (0..layers).map(|_| Mutex::default()).collect(), checksums }
    }

    fn of<'a>(&'a self, cx: &Context<'_>) -> Option<(usize, std::sync::MutexGuard<'a, Layer>)> {
        let layer = cx.layer?.get();
        Some((layer, self.layers.get(layer)?.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// A layer begins to run forward: what its last pass said no longer counts.
    pub(crate) fn begin(&self, cx: &Context<'_>) {
        if cx.phase == Phase::Forward
            && let Some((_, mut layer)) = self.of(cx)
        {
            layer.checksum = None;
            layer.tensors.iter_mut().for_each(|tensor| tensor.current = false);
        }
    }

    pub(crate) fn describe(
        &self,
        cx: &Context<'_>,
        name: &'static str,
        shape: &[usize],
        dtype: &'static str,
    ) -> Result<(), LayerError> {
        if !matches!(cx.phase, Phase::Forward | Phase::Recompute) {
            return Ok(());
        }
        let Some((number, mut layer)) = self.of(cx) else { return Ok(()) };
        let Some(tensor) = layer.tensors.iter_mut().find(|tensor| tensor.name == name) else {
            layer.tensors.push(Tensor { name, shape: shape.to_vec(), dtype, current: true });
            return Ok(());
        };
        if tensor.current && (tensor.shape != shape || tensor.dtype != dtype) {
            return Err(Mismatch::Tensor {
                layer: number,
                tensor: name,
                first_shape: tensor.shape.clone(),
                first_dtype: tensor.dtype,
                shape: shape.to_vec(),
                dtype,
            }
            .into());
        }
        if !tensor.current {
            tensor.shape.clear();
            tensor.shape.extend_from_slice(shape);
            (tensor.dtype, tensor.current) = (dtype, true);
        }
        Ok(())
    }

    /// Remembers the output of a forward, or compares that of a recomputation.
    pub(crate) fn output(&self, cx: &Context<'_>, bytes: &[u8]) -> Result<(), LayerError> {
        let Some((number, mut layer)) = self.of(cx) else { return Ok(()) };
        let now = crc32c::crc32c(bytes);
        match (cx.phase, layer.checksum) {
            (Phase::Forward, _) => layer.checksum = Some(now),
            (Phase::Recompute, Some(first)) if first != now => {
                return Err(Mismatch::Values { layer: number, first, now }.into());
            }
            _ => {}
        }
        Ok(())
    }
}
