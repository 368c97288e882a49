//! The candle adapter: gradients of a layer by hand, the same bits whoever keeps the weights, and what is refused.
#![cfg(feature = "candle")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use candle_core::{Device, Shape, Tensor, Var};
use lazy_model::Bytes;
use lazy_runtime::candle::{CandleLayer, Parameter, Weight, read, tensor, write};
use lazy_runtime::{
    Backward, Context, Epilogue, Executor, Forward, Gradients, Grads, Input, Layer, LayerError, LayerSizes,
    Loss, Model, ModelOptions, Output, ParameterId, Phase, Program, Prologue, Saved, Step, Weights,
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

const LAYERS: usize = 4;
const SHAPE: (usize, usize) = (3, 8);
const RATE: f32 = 0.1;

fn first(number: usize) -> Vec<f32> {
    let count = if number.is_multiple_of(2) { 64 } else { 8 };
    (0..count).map(|i| ((i * 7 + number * 13) as f32).sin() * 0.3).collect()
}

/// `x + silu(x w + b)`.
fn block(w: &Tensor, b: &Tensor, x: &Tensor) -> Result<Tensor, LayerError> {
    Ok((x + x.matmul(w)?.broadcast_add(b)?.silu()?)?)
}

/// Starts with waves that depend on step and micro-batch, and ends with half the sum of squares.
struct Ends;

impl Prologue for Ends {
    fn output_bytes(&self) -> Bytes {
        Bytes(96)
    }
    fn forward(&self, cx: &Context<'_>, _: Weights<'_>, out: Output<'_>) -> Result<(), LayerError> {
        let seed = cx.step as usize * 5 + cx.micro_batch;
        out.f32()?.iter_mut().enumerate().for_each(|(i, x)| *x = ((i + 31 * seed) as f32).cos());
        Ok(())
    }
}

impl Epilogue for Ends {
    fn run(&self, _: &Context<'_>, call: Loss<'_>) -> Result<(), LayerError> {
        let x = tensor(call.x.bytes()?, &SHAPE.into())?;
        call.loss.f32()?[0] = (x.sqr()?.sum_all()? * 0.5)?.to_scalar()?;
        call.dx.map_or(Ok(()), |dx| write(&x, dx.bytes()?))
    }
}

/// Under a plan that uses every place a boundary can be in.
fn set_up(layers: Vec<Arc<dyn Layer>>, options: ModelOptions, dir: &std::path::Path) -> (Executor, Program) {
    let model = Model::new(Arc::new(Ends), layers, Arc::new(Ends), options).unwrap();
    let plan = model.plan(&model.schedule("CN--G").unwrap()).unwrap();
    let options = model.store_options(&plan, dir);
    Executor::open(model, plan, options).unwrap()
}

fn descend(weights: &mut [f32], gradient: &[f32]) {
    weights.iter_mut().zip(gradient).for_each(|(w, g)| *w -= RATE * g);
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Losses and last weights of three steps, with variables of the layers' own.
fn with_variables(micro_batches: usize, dir: &std::path::Path) -> (Vec<u32>, Vec<u32>) {
    let values: Vec<Vec<f32>> = (0..2 * LAYERS).map(first).collect();
    let variables: Vec<Parameter> = values
        .iter()
        .enumerate()
        .map(|(number, values)| {
            let matrix = Var::from_slice(values, values.len(), &Device::Cpu).unwrap();
            let shaped = matrix.reshape(if values.len() == 64 { vec![8, 8] } else { vec![8] }).unwrap();
            let variable = Var::from_tensor(&shaped).unwrap();
            Parameter { number, name: format!("p{number}"), variable }
        })
        .collect();
    let gradients = Arc::new(Gradients::new(&values.iter().map(Vec::len).collect::<Vec<_>>()));
    let layer = |l: usize| {
        let own = variables[2 * l..2 * l + 2].to_vec();
        let (w, b) = (own[0].variable.clone(), own[1].variable.clone());
        let function = move |_: &Context<'_>, x: &Tensor| block(&w, &b, x);
        Arc::new(CandleLayer::new(SHAPE, function, own, Arc::clone(&gradients), saved(1000))) as _
    };
    let options = ModelOptions { micro_batches, ..ModelOptions::default() };
    let (mut executor, mut program) = set_up((0..LAYERS).map(layer).collect(), options, dir);
    let mut losses = Vec::new();
    for step in 0..3 {
        losses.extend(executor.run(&mut program, &Step { step, ..Step::default() }).unwrap().losses);
        for (Parameter { variable, .. }, gradient) in variables.iter().zip(gradients.read()) {
            let mut values = read(variable, <[f32]>::to_vec).unwrap();
            descend(&mut values, &gradient);
            variable.set(&Tensor::from_vec(values, variable.dims(), &Device::Cpu).unwrap()).unwrap();
        }
        gradients.zero();
    }
    let weights: Vec<f32> =
        variables.iter().flat_map(|p| read(&p.variable, <[f32]>::to_vec).unwrap()).collect();
    (bits(&losses), bits(&weights))
}

/// The same with weights that the runtime keeps.
fn with_weights(options: ModelOptions, dir: &std::path::Path) -> (Vec<u32>, Vec<u32>) {
    let layer = |l: usize| {
        let weight = |id: usize, shape: Shape| Weight { id, name: format!("p{id}"), shape };
        let weights = vec![weight(2 * l, (8, 8).into()), weight(2 * l + 1, 8.into())];
        let function = |_: &Context<'_>, w: &[Tensor], x: &Tensor| block(&w[0], &w[1], x);
        Arc::new(CandleLayer::with_weights(SHAPE, function, weights, saved(1300))) as _
    };
    let (mut executor, mut program) = set_up((0..LAYERS).map(layer).collect(), options, dir);
    let mut values: Vec<Vec<f32>> = (0..2 * LAYERS).map(first).collect();
    let mut losses = Vec::new();
    for step in 0..3 {
        let set: Vec<(ParameterId, &[u8])> =
            values.iter().enumerate().map(|(id, v)| (ParameterId(id), bytemuck::cast_slice(v))).collect();
        executor.set_weights(&set).unwrap();
        losses.extend(executor.run(&mut program, &Step { step, ..Step::default() }).unwrap().losses);
        for (id, weights) in values.iter_mut().enumerate() {
            let gradient = executor.gradient(ParameterId(id)).unwrap();
            let (values, _) = gradient.as_chunks::<4>();
            descend(weights, &values.iter().map(|v| f32::from_le_bytes(*v)).collect::<Vec<_>>());
        }
    }
    (bits(&losses), bits(&values.concat()))
}

#[test]
fn weights_that_the_runtime_keeps_give_the_bits_of_variables_of_the_layers_own() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for micro_batches in [1, 3] {
        let expected = with_variables(micro_batches, dir.path());
        let all = |stream, on_nvme| ModelOptions {
            micro_batches,
            stream_weights: stream,
            stream_gradients: stream,
            on_nvme,
        };
        for options in [all(false, false), all(true, false), all(true, true)] {
            assert!(with_weights(options, dir.path()) == expected, "{options:?}");
        }
    }
}

#[test]
fn a_weight_without_a_gradient_is_named() {
    let weights = vec![Weight { id: 0, name: "layers.0.unused".into(), shape: 8.into() }];
    let function = |_: &Context<'_>, _: &[Tensor], x: &Tensor| Ok(x.sqr()?);
    let layer = Arc::new(CandleLayer::with_weights(SHAPE, function, weights, saved(300))) as Arc<dyn Layer>;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let layers = (0..LAYERS).map(|_| Arc::clone(&layer)).collect();
    let (mut executor, mut program) = set_up(layers, ModelOptions::default(), dir.path());
    let error = executor.run(&mut program, &Step::default()).unwrap_err().to_string();
    assert!(error.contains("layers.0.unused got no gradient"), "{error}");
}

#[test]
fn an_output_of_another_dtype_when_it_is_recomputed_is_named() {
    let function = |cx: &Context<'_>, x: &Tensor| {
        let other = cx.phase == Phase::Recompute;
        Ok(if other { x.to_dtype(candle_core::DType::F16)? } else { x.clone() })
    };
    let gradients = Arc::new(Gradients::new(&[]));
    let layer = Arc::new(CandleLayer::new(SHAPE, function, vec![], gradients, saved(300))) as Arc<dyn Layer>;
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let layers = (0..LAYERS).map(|_| Arc::clone(&layer)).collect();
    let (mut executor, mut program) = set_up(layers, ModelOptions::default(), dir.path());
    let error = executor.run(&mut program, &Step::default()).unwrap_err().to_string();
    assert!(error.contains("its output was [3, 8] of f32, and is [3, 8] of f16 now"), "{error}");
}
