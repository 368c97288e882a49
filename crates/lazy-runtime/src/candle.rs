//! Layers written with candle, on the CPU in float32.
//!
//! A [`CandleLayer`] wraps a function from tensor to tensor and the variables it uses ([`CandleLayer::new`]), or one that is given its weights by
//! the runtime, which can then stream them ([`CandleLayer::with_weights`]). Its internals are the autograd graph candle builds, so they live on the
//! heap, hold a copy of the input and of such weights, and are declared by the caller as a number of bytes.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Shape, Storage, Tensor, Var};
use lazy_model::Bytes;

use crate::gradients::Gradients;
use crate::layer::{Backward, Context, Forward, Layer, LayerError, LayerSizes, Saved};
use crate::view::Weights;

type Function = dyn Fn(&Context<'_>, &[Tensor], &Tensor) -> Result<Tensor, LayerError> + Send + Sync;

/// A parameter of a [`CandleLayer`] that is a variable of its own.
#[derive(Clone)]
pub struct Parameter {
    /// Its number among the buffers of [`Gradients`].
    pub number: usize,
    /// Its name, for messages.
    pub name: String,
    /// The variable.
    pub variable: Var,
}

/// A parameter of a [`CandleLayer`] that the runtime keeps, in float32.
#[derive(Clone, Debug)]
pub struct Weight {
    /// Its id: layers that name the same one share it.
    pub id: usize,
    /// Its name, for messages.
    pub name: String,
    /// Its shape.
    pub shape: Shape,
}

/// A layer given by a candle function. Input and output have the same shape.
pub struct CandleLayer {
    shape: Shape,
    forward: Box<Function>,
    parameters: Parameters,
    sizes: LayerSizes,
}

/// Who keeps a layer's weights and gradients.
enum Parameters {
    Layer(Vec<Parameter>, Arc<Gradients>),
    Runtime(Vec<Weight>),
}

/// The autograd graph of one forward.
struct Graph {
    input: Var,
    /// Weights that the runtime keeps, as this graph knows them.
    weights: Vec<Var>,
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
        let forward = move |cx: &Context<'_>, _: &[Tensor], x: &Tensor| forward(cx, x);
        Self::of(shape.into(), Box::new(forward), Parameters::Layer(parameters, gradients), sizes)
    }

    /// `forward` computes the layer from `weights`, as tensors in this order, and from its input of shape `shape`. The runtime keeps the weights
    /// and their gradients, so both can be streamed, and [`crate::Executor::set_weights`] sets them. Every call makes tensors of the weights'
    /// bytes: `sizes` counts that copy among what a graph keeps alive and in both workspaces, and is otherwise as for [`CandleLayer::new`].
    pub fn with_weights(
        shape: impl Into<Shape>,
        forward: impl Fn(&Context<'_>, &[Tensor], &Tensor) -> Result<Tensor, LayerError> + Send + Sync + 'static,
        weights: Vec<Weight>,
        sizes: LayerSizes,
    ) -> Self {
        Self::of(shape.into(), Box::new(forward), Parameters::Runtime(weights), sizes)
    }

    fn of(shape: Shape, forward: Box<Function>, parameters: Parameters, sizes: LayerSizes) -> Self {
        let sizes = LayerSizes { output: Bytes(4 * shape.elem_count() as u64), ..sizes };
        CandleLayer { shape, forward, parameters, sizes }
    }

    /// The weights that the runtime keeps, each made a tensor.
    fn weights<T>(
        &self,
        call: &Weights<'_>,
        make: impl Fn(&[u8], &Shape) -> Result<T, LayerError>,
    ) -> Result<Vec<T>, LayerError> {
        let Parameters::Runtime(weights) = &self.parameters else { return Ok(Vec::new()) };
        weights.iter().enumerate().map(|(i, weight)| make(call.get(i).bytes()?, &weight.shape)).collect()
    }
}

impl Layer for CandleLayer {
    fn sizes(&self) -> LayerSizes {
        self.sizes
    }

    fn parameters(&self) -> Vec<crate::layer::Parameter> {
        let own = |p: &Parameter| crate::layer::Parameter::own(p.number, p.name.as_str());
        let kept = |w: &Weight| crate::layer::Parameter::f32(w.id, w.name.as_str(), w.shape.elem_count());
        match &self.parameters {
            Parameters::Layer(parameters, _) => parameters.iter().map(own).collect(),
            Parameters::Runtime(weights) => weights.iter().map(kept).collect(),
        }
    }

    fn forward(&self, cx: &Context<'_>, call: Forward<'_>) -> Result<Saved, LayerError> {
        let x = call.x.bytes()?;
        // Boundary and weights must be variables where gradients are wanted: candle computes none for a plain tensor, and says nothing.
        let (output, graph) = if call.save.is_some() {
            let (input, weights) = (variable(x, &self.shape)?, self.weights(&call.weights, variable)?);
            let tensors: Vec<Tensor> = weights.iter().map(|w| w.as_tensor().clone()).collect();
            let output = (self.forward)(cx, &tensors, input.as_tensor())?;
            (output.clone(), Saved::new(Graph { input, weights, output }))
        } else {
            let weights = self.weights(&call.weights, tensor)?;
            ((self.forward)(cx, &weights, &tensor(x, &self.shape)?)?, Saved::none())
        };
        cx.describe("output", output.dims(), output.dtype().as_str())?;
        if let Some(out) = call.out {
            write(&output, out.bytes()?)?;
        }
        Ok(graph)
    }

    fn backward(&self, _cx: &Context<'_>, mut call: Backward<'_>) -> Result<(), LayerError> {
        let Graph { input, weights, output } = call.saved.take()?;
        let mut grads = backward_from(output, tensor(call.dy.bytes()?, &self.shape)?)?;
        let missing =
            |what: &str| format!("{what} got no gradient: an operation on its way has no backward in candle");
        match &self.parameters {
            Parameters::Layer(parameters, gradients) => {
                for Parameter { number, name, variable } in parameters {
                    let gradient = grads.remove(variable).ok_or_else(|| missing(name))?;
                    read(&gradient, |values| gradients.add(*number, values))??;
                }
            }
            Parameters::Runtime(declared) => {
                for (i, (Weight { name, .. }, variable)) in declared.iter().zip(&weights).enumerate() {
                    let gradient = grads.remove(variable).ok_or_else(|| missing(name))?;
                    read(&gradient, |values| call.grads.add(i, values))??;
                }
            }
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

/// A tensor with a copy of the bytes of a float32 boundary or weight.
///
/// # Errors
/// When the number of bytes does not fit the shape.
pub fn tensor(bytes: &[u8], shape: &Shape) -> Result<Tensor, LayerError> {
    Ok(Tensor::from_slice(floats(bytes)?, shape.clone(), &Device::Cpu)?)
}

/// As [`tensor`], and candle computes a gradient for it.
fn variable(bytes: &[u8], shape: &Shape) -> Result<Var, LayerError> {
    Ok(Var::from_slice(floats(bytes)?, shape.clone(), &Device::Cpu)?)
}

fn floats(bytes: &[u8]) -> Result<&[f32], LayerError> {
    let cast = bytemuck::try_cast_slice(bytes);
    cast.map_err(|e| format!("{} bytes of a boundary or weight are no float32: {e}", bytes.len()).into())
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
