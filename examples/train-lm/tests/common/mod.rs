//! What several tests share.
#![allow(clippy::unwrap_used, reason = "tests")]

use candle_core::{Tensor, Var};
use lazy_runtime::candle::backward_from;
use train_lm::decoder::Decoder;

/// The gradients of a layer.
pub(crate) struct LayerGradients {
    pub(crate) dx: Tensor,
    /// By index in [`Decoder::parameters`].
    pub(crate) gradients: Vec<(usize, Tensor)>,
}

/// Backward through the graph that [`Decoder::layer_forward`] made from the variable `x`.
pub(crate) fn layer_backward(
    decoder: &Decoder,
    layer: usize,
    x: &Var,
    y: Tensor,
    dy: &Tensor,
) -> LayerGradients {
    let mut grads = backward_from(y, dy.clone()).unwrap();
    let dx = grads.remove(x).unwrap();
    let mut take = |index: usize| (index, grads.remove(&decoder.parameters()[index].1).unwrap());
    LayerGradients { dx, gradients: decoder.layer_parameters(layer).map(&mut take).collect() }
}
