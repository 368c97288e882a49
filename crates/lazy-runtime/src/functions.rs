//! Parts of a model that are no more than a function, and parts behind a pointer.

use std::sync::Arc;

use lazy_model::Bytes;

use crate::layer::{
    Backward, Context, Epilogue, Forward, Layer, LayerError, LayerSizes, Loss, Parameter, Prologue, Saved,
};
use crate::view::{Grads, Input, Output, Weights};

/// A [`Prologue`] without parameters: a function that writes boundary 0.
///
/// ```
/// use lazy_model::Bytes;
/// use lazy_runtime::{Context, Output, Prologue, Source};
///
/// let ones = Source::new(Bytes(16), |_: &Context<'_>, out: Output<'_>| Ok(out.f32()?.fill(1.0)));
/// assert_eq!(ones.output_bytes(), Bytes(16));
/// ```
pub struct Source<F> {
    output: Bytes,
    write: F,
}

impl<F> Source<F>
where
    F: Fn(&Context<'_>, Output<'_>) -> Result<(), LayerError> + Send + Sync,
{
    /// `write` writes the `output` bytes of boundary 0 for the micro-batch that its context names.
    pub fn new(output: Bytes, write: F) -> Source<F> {
        Source { output, write }
    }
}

impl<F> Prologue for Source<F>
where
    F: Fn(&Context<'_>, Output<'_>) -> Result<(), LayerError> + Send + Sync,
{
    fn output_bytes(&self) -> Bytes {
        self.output
    }

    fn forward(&self, cx: &Context<'_>, _: Weights<'_>, out: Output<'_>) -> Result<(), LayerError> {
        (self.write)(cx, out)
    }
}

/// A loss without parameters and workspace is a function: it writes [`Loss::loss`], and [`Loss::dx`] where that is there.
impl<F> Epilogue for F
where
    F: Fn(&Context<'_>, Loss<'_>) -> Result<(), LayerError> + Send + Sync,
{
    fn run(&self, cx: &Context<'_>, call: Loss<'_>) -> Result<(), LayerError> {
        self(cx, call)
    }
}

impl<L: Layer + ?Sized> Layer for Arc<L> {
    fn sizes(&self) -> LayerSizes {
        (**self).sizes()
    }

    fn parameters(&self) -> Vec<Parameter> {
        (**self).parameters()
    }

    fn forward(&self, cx: &Context<'_>, call: Forward<'_>) -> Result<Saved, LayerError> {
        (**self).forward(cx, call)
    }

    fn backward(&self, cx: &Context<'_>, call: Backward<'_>) -> Result<(), LayerError> {
        (**self).backward(cx, call)
    }
}

impl<P: Prologue + ?Sized> Prologue for Arc<P> {
    fn output_bytes(&self) -> Bytes {
        (**self).output_bytes()
    }

    fn parameters(&self) -> Vec<Parameter> {
        (**self).parameters()
    }

    fn forward(&self, cx: &Context<'_>, weights: Weights<'_>, out: Output<'_>) -> Result<(), LayerError> {
        (**self).forward(cx, weights, out)
    }

    fn backward(
        &self,
        cx: &Context<'_>,
        weights: Weights<'_>,
        dy: Input<'_>,
        grads: Grads<'_>,
    ) -> Result<(), LayerError> {
        (**self).backward(cx, weights, dy, grads)
    }
}

impl<E: Epilogue + ?Sized> Epilogue for Arc<E> {
    fn workspace(&self) -> Bytes {
        (**self).workspace()
    }

    fn parameters(&self) -> Vec<Parameter> {
        (**self).parameters()
    }

    fn run(&self, cx: &Context<'_>, call: Loss<'_>) -> Result<(), LayerError> {
        (**self).run(cx, call)
    }
}
