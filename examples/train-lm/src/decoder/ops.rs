//! Helpers shared by the custom operations: from tensors to slices and back.

use candle_core::{CpuStorage, Device, Layout, Result, Shape, Storage, Tensor, bail};

/// Elements one task of an elementwise operation works on. A multiple of two, for the dropout masks.
pub(crate) const ELEMENTS: usize = 16_384;

/// Rows one task of a row-wise operation works on. Fixed, so that sums over rows do not depend on the threads.
pub(crate) const ROWS: usize = 64;

/// The elements of a contiguous float32 tensor on the CPU.
pub(crate) fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match (layout.contiguous_offsets(), storage) {
        (Some((first, end)), CpuStorage::F32(values)) => Ok(&values[first..end]),
        (None, CpuStorage::F32(_)) => bail!("the decoder's operations want contiguous tensors"),
        _ => bail!("the decoder's operations want float32 tensors"),
    }
}

/// Calls `f` with the elements of a contiguous float32 tensor on the CPU. No copy is made.
///
/// # Errors
///
/// When the tensor is on another device, of another type, or not contiguous.
pub fn with_slice<R>(tensor: &Tensor, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => Ok(f(slice(storage, layout)?)),
        _ => bail!("the decoder runs on the CPU; move the tensor there"),
    }
}

/// A tensor that takes over `values`.
pub(crate) fn tensor(values: Vec<f32>, shape: impl Into<Shape>) -> Result<Tensor> {
    Tensor::from_vec(values, shape.into(), &Device::Cpu)
}

/// What a custom operation's forward returns.
pub(crate) fn stored(values: Vec<f32>, shape: impl Into<Shape>) -> Result<(CpuStorage, Shape)> {
    Ok((CpuStorage::F32(values), shape.into()))
}

/// The last dimension, and the product of the others.
pub(crate) fn rows_of(shape: &Shape) -> Result<(usize, usize)> {
    match shape.dims().last() {
        Some(&width) if width > 0 => Ok((shape.elem_count() / width, width)),
        _ => bail!("the decoder's operations want at least one dimension and no empty one"),
    }
}
