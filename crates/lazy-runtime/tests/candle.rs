//! The candle adapter: gradients of a layer by hand, and what is refused.
#![cfg(feature = "candle")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use candle_core::{Device, Tensor, Var};
use lazy_model::Bytes;
use lazy_runtime::candle::{CandleLayer, Parameter};
use lazy_runtime::{
    Backward, Context, Forward, Gradients, Grads, Input, Layer, LayerError, LayerSizes, Output, Phase, Saved,
    Weights,
};

fn forward(layer: &CandleLayer, x: &[u8], out: Option<&mut [u8]>, save: bool) -> Result<Saved, LayerError> {
    let call = Forward {
        weights: Weights::none(),
        x: Input::of(x),
        out: out.map(Output::of),
        save: save.then(|| Output::of(&mut [])),
        workspace: Output::of(&mut []),
    };
    layer.forward(&Context::new(None, Phase::Forward), call)
}

fn backward(layer: &CandleLayer, x: &[u8], saved: Saved, dy: &[u8], dx: &mut [u8]) -> Result<(), LayerError> {
    let call = Backward {
        weights: Weights::none(),
        x: Input::of(x),
        internals: Input::of(&[]),
        saved,
        dy: Input::of(dy),
        dx: Output::of(dx),
        grads: Grads::none(),
        workspace: Output::of(&mut []),
    };
    layer.backward(&Context::new(None, Phase::Backward), call)
}

fn saved(bytes: u64) -> LayerSizes {
    LayerSizes { saved: Bytes(bytes), ..LayerSizes::default() }
}

fn parameter(number: usize, name: &str, values: &[f32]) -> Parameter {
    let variable = Var::from_slice(values, values.len(), &Device::Cpu).unwrap();
    Parameter { number, name: name.into(), variable }
}

#[test]
fn a_layer_computes_forward_backward_and_its_parameters_gradients() {
    let w = parameter(0, "w", &[2.0, 3.0]);
    let (gradients, v) = (Arc::new(Gradients::new(&[2])), w.variable.clone());
    let function = move |_: &Context<'_>, x: &Tensor| Ok((x * v.as_tensor())?.sqr()?);
    let layer = CandleLayer::new(2, function, vec![w], Arc::clone(&gradients), saved(32));
    let (x, dy) = ([1.0f32, -2.0], [1.0f32, 10.0]);
    let mut y = [0.0f32; 2];
    forward(&layer, bytemuck::cast_slice(&x), Some(bytemuck::cast_slice_mut(&mut y)), false).unwrap();
    assert_eq!(y, [4.0, 36.0]);
    let graph = forward(&layer, bytemuck::cast_slice(&x), None, true).unwrap();
    let mut dx = [0.0f32; 2];
    let (x, dy) = (bytemuck::cast_slice(&x), bytemuck::cast_slice(&dy));
    backward(&layer, x, graph, dy, bytemuck::cast_slice_mut(&mut dx)).unwrap();
    // y = (w x)^2: dy/dx = 2 w^2 x, dy/dw = 2 w x^2.
    assert_eq!(dx, [8.0, -360.0]);
    assert_eq!(*gradients.read()[0], [4.0, 240.0]);
}

#[test]
fn an_absent_gradient_is_an_error_that_names_the_parameter() {
    let (used, unused) = (parameter(0, "used", &[1.0]), parameter(1, "layers.0.unused", &[1.0]));
    let v = used.variable.clone();
    let function = move |_: &Context<'_>, x: &Tensor| Ok((x * v.as_tensor())?);
    let gradients = Arc::new(Gradients::new(&[1, 1]));
    let layer = CandleLayer::new(1, function, vec![used, unused], gradients, saved(8));
    let x = 1.0f32.to_le_bytes();
    let graph = forward(&layer, &x, None, true).unwrap();
    let error = backward(&layer, &x, graph, &x, &mut [0; 4]).unwrap_err().to_string();
    assert!(error.contains("layers.0.unused got no gradient"), "{error}");
}

#[test]
fn a_boundary_of_another_size_is_refused() {
    let function = |_: &Context<'_>, x: &Tensor| Ok(x.clone());
    let layer = CandleLayer::new(2, function, vec![], Arc::new(Gradients::new(&[])), saved(8));
    assert!(forward(&layer, &[0; 12], Some(&mut [0; 12]), false).is_err());
    assert!(forward(&layer, &[0; 8], Some(&mut [0; 12]), false).is_err());
}
