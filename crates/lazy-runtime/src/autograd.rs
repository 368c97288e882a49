//! Layers of frameworks that differentiate by themselves and keep their own weights.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::layer::{Backward, Context, Forward, Layer, LayerError, LayerSizes, Parameter, Saved};
use crate::view::Output;

/// A module that differentiates by itself, from float32 values to as many as its declared output has.
///
/// It keeps its weights, and what backward finds out about them until its optimizer asks: see [`AutogradLayer`].
pub trait Autograd: Send + 'static {
    /// What a forward builds and its backward needs: mostly the framework's tensors of input and output, which hold the graph between them.
    type Graph: Send + 'static;

    /// The output for an input, and the graph that led there.
    ///
    /// # Errors
    /// Whatever the module fails with; the step is abandoned.
    fn forward(&mut self, cx: &Context<'_>, x: &[f32]) -> Result<(Vec<f32>, Self::Graph), LayerError>;

    /// From the gradient of the output to that of the input, and to those of the weights, which it adds to what it has of this step.
    ///
    /// # Errors
    /// Whatever the module fails with; the step is abandoned.
    fn backward(&mut self, cx: &Context<'_>, graph: Self::Graph, dy: &[f32]) -> Result<Vec<f32>, LayerError>;
}

/// An [`Autograd`] module as a layer. It declares one parameter of its own, so that [`crate::Executor::on_final_gradient`] says when all
/// micro-batches have been through it: the time for its optimizer.
///
/// ```
/// use std::sync::Arc;
/// use lazy_model::Bytes;
/// use lazy_runtime::{Autograd, AutogradLayer, Context, LayerError, LayerSizes, Parameter};
///
/// /// y = w x; its graph is x.
/// struct Scale { w: f32, gradient: f32 }
///
/// impl Autograd for Scale {
///     type Graph = Vec<f32>;
///     fn forward(&mut self, _: &Context<'_>, x: &[f32]) -> Result<(Vec<f32>, Vec<f32>), LayerError> {
///         Ok((x.iter().map(|x| self.w * x).collect(), x.to_vec()))
///     }
///     fn backward(&mut self, _: &Context<'_>, x: Vec<f32>, dy: &[f32]) -> Result<Vec<f32>, LayerError> {
///         self.gradient += x.iter().zip(dy).map(|(x, dy)| x * dy).sum::<f32>();
///         Ok(dy.iter().map(|dy| self.w * dy).collect())
///     }
/// }
///
/// let sizes = LayerSizes::graph(Bytes(1024), Bytes(1024));
/// let layer = Arc::new(AutogradLayer::new(Parameter::own(0, "w"), sizes, Scale { w: 1.0, gradient: 0.0 }));
/// // The optimizer, in the hook or after the step:
/// let mut scale = layer.module();
/// scale.w -= 0.1 * scale.gradient;
/// ```
pub struct AutogradLayer<M> {
    parameter: Parameter,
    sizes: LayerSizes,
    module: Mutex<M>,
}

impl<M: Autograd> AutogradLayer<M> {
    /// `sizes` says what the graph of one forward keeps alive and what a call needs besides: see [`LayerSizes::graph`].
    pub fn new(parameter: Parameter, sizes: LayerSizes, module: M) -> AutogradLayer<M> {
        AutogradLayer { parameter, sizes, module: Mutex::new(module) }
    }

    /// The module, while no step uses it: in the hook for its final gradient, and between steps.
    pub fn module(&self) -> MutexGuard<'_, M> {
        // The step in which a module panicked is abandoned, and its caller told.
        self.module.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<M: Autograd> Layer for AutogradLayer<M> {
    fn sizes(&self) -> LayerSizes {
        self.sizes
    }

    fn parameters(&self) -> Vec<Parameter> {
        vec![self.parameter.clone()]
    }

    fn forward(&self, cx: &Context<'_>, call: Forward<'_>) -> Result<Saved, LayerError> {
        let (y, graph) = self.module().forward(cx, call.x.f32()?)?;
        cx.describe("output", &[y.len()], "f32")?;
        call.out.map_or(Ok(()), |out| write("output", &y, out))?;
        Ok(if call.save.is_some() { Saved::new(graph) } else { Saved::none() })
    }

    fn backward(&self, cx: &Context<'_>, call: Backward<'_>) -> Result<(), LayerError> {
        let dx = self.module().backward(cx, call.saved.take()?, call.dy.f32()?)?;
        write("gradient of its input", &dx, call.dx)
    }
}

fn write(what: &str, values: &[f32], out: Output<'_>) -> Result<(), LayerError> {
    let out = out.f32()?;
    if out.len() != values.len() {
        let (got, want) = (values.len(), out.len());
        return Err(format!("the module's {what} has {got} values, its boundary {want}").into());
    }
    out.copy_from_slice(values);
    Ok(())
}
