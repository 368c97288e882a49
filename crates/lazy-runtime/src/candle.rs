//! Layers written with candle, on the CPU in float32.
//!
//! A [`CandleLayer`] wraps a function from tensor to tensor and the variables it uses. Its internals are the autograd graph candle
//! builds, so they live on the heap, hold a copy of the input, and are declared by the caller as a number of bytes.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Shape, Storage, Tensor, Var};
use lazy_model::Bytes;

use crate::gradients::Gradients;
use crate::layer::{Backward, Context, Forward, Layer, LayerError, LayerSizes, Saved};

type Function = dyn Fn(&Context<'_>, &Tensor) -> Result<Tensor, LayerError> + Send + Sync;

/// A parameter of a [`CandleLayer`].
#[derive(Clone)]
pub struct Parameter {
    /// Its number among the buffers of [`Gradients`].
    pub number: usize,
    /// Its name, for messages.
    pub name: String,
    /// The variable.
    pub variable: Var,
}

/// A layer given by a candle function. Input and output have the same shape.
pub struct CandleLayer {
    shape: Shape,
    forward: Box<Function>,
    parameters: Vec<Parameter>,
    gradients: Arc<Gradients>,
    sizes: LayerSizes,
}

/// The autograd graph of one forward.
struct Graph {
    input: Var,
    output: Tensor,
}

impl CandleLayer {
    /// `forward` computes the layer from its input of shape `shape`; the gradient of each of `parameters` is added to `gradients`.
    /// `sizes` says what the graph of one forward keeps alive, its copy of the input included, and what forward and backward need besides; the
    /// output's size is that of `shape`.
    ///
    /// The input is a variable when gradients are wanted and a plain tensor when not.
    pub fn new(
        shape: impl Into<Shape>,
        forward: impl Fn(&Context<'_>, &Tensor) -> Result<Tensor, LayerError> + Send + Sync + 'static,
        parameters: Vec<Parameter>,
        gradients: Arc<Gradients>,
        sizes: LayerSizes,
    ) -> Self {
        let shape = shape.into();
        let sizes = LayerSizes { output: Bytes(4 * shape.elem_count() as u64), ..sizes };
        CandleLayer { shape, forward: Box::new(forward), parameters, gradients, sizes }
    }
}

impl Layer for CandleLayer {
    fn sizes(&self) -> LayerSizes {
        self.sizes
    }

    fn parameters(&self) -> Vec<crate::layer::Parameter> {
        let own = |p: &Parameter| crate::layer::Parameter::own(p.number, p.name.as_str());
        self.parameters.iter().map(own).collect()
    }

    fn forward(&self, cx: &Context<'_>, call: Forward<'_>) -> Result<Saved, LayerError> {
        let x = tensor(call.x.bytes()?, &self.shape)?;
        // The boundary must be a variable where gradients are wanted: candle computes none for a plain tensor, and says nothing.
        let input = if call.save.is_some() { Some(Var::from_tensor(&x)?) } else { None };
        let output = match &input {
            Some(input) => {
                drop(x);
                (self.forward)(cx, input.as_tensor())?
            }
            None => (self.forward)(cx, &x)?,
        };
        cx.describe("output", output.dims(), output.dtype().as_str())?;
        if let Some(out) = call.out {
            write(&output, out.bytes()?)?;
        }
        Ok(input.map_or(Saved::none(), |input| Saved::new(Graph { input, output })))
    }

    fn backward(&self, _cx: &Context<'_>, call: Backward<'_>) -> Result<(), LayerError> {
        let Graph { input, output } = call.saved.take()?;
        let mut grads = backward_from(output, tensor(call.dy.bytes()?, &self.shape)?)?;
        let missing =
            |what: &str| format!("{what} got no gradient: an operation on its way has no backward in candle");
        for Parameter { number, name, variable } in &self.parameters {
            let gradient = grads.remove(variable).ok_or_else(|| missing(name))?;
            read(&gradient, |values| self.gradients.add(*number, values))??;
        }
        write(&grads.remove(&input).ok_or_else(|| missing("the layer's input"))?, call.dx.bytes()?)
    }
}

/// Candle's backward, from the gradient `dy` of `output`, whose graph it consumes.
///
/// # Errors
/// What candle's backward fails with.
pub fn backward_from(output: Tensor, dy: Tensor) -> candle_core::Result<GradStore> {
    let root = output.apply_op1(Seed { dy })?;
    drop(output);
    root.backward()
}

/// Starts candle's backward from a given gradient: the scalar `sum(y * dy)` as far as gradients can tell, without computing it.
struct Seed {
    dy: Tensor,
}

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.dy.clone()))
    }
}

/// A tensor with a copy of the bytes of a float32 boundary.
///
/// # Errors
/// When the number of bytes does not fit the shape.
pub fn tensor(bytes: &[u8], shape: &Shape) -> Result<Tensor, LayerError> {
    let values: &[f32] = bytemuck::try_cast_slice(bytes)
        .map_err(|e| format!("a boundary of {} bytes is not float32: {e}", bytes.len()))?;
    Ok(Tensor::from_slice(values, shape.clone(), &Device::Cpu)?)
}

/// Copies the values of a tensor into a float32 boundary.
///
/// # Errors
/// When the number of elements differs or the tensor is not float32 on the CPU.
pub fn write(tensor: &Tensor, out: &mut [u8]) -> Result<(), LayerError> {
    read(tensor, |values| {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if bytes.len() != out.len() {
            return Err(format!("a boundary of {} bytes was to hold {} bytes", out.len(), bytes.len()));
        }
        out.copy_from_slice(bytes);
        Ok(())
    })??;
    Ok(())
}

/// Calls `then` with the values of a float32 tensor on the CPU, in row-major order.
///
/// # Errors
/// When the tensor is not float32 on the CPU.
pub fn read<R>(tensor: &Tensor, then: impl FnOnce(&[f32]) -> R) -> Result<R, LayerError> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { return Err("the tensor is not on the CPU".into()) };
    let values = storage.as_slice::<f32>()?;
    let start = layout.start_offset();
    Ok(then(&values[start..start + layout.shape().elem_count()]))
}
