//! The decoder against transformers' Qwen3, and against itself.
//!
//! `tests/data/decoder` holds two tiny models with their loss and every gradient, made by transformers 5.24 on PyTorch
//! 2.15 (CPU, float32).
#![allow(clippy::unwrap_used, clippy::panic)] // Helpers of tests may unwrap, as tests do.

mod common;

use std::collections::BTreeMap;
use std::path::PathBuf;

use candle_core::{Device, Tensor, Var};
use common::layer_backward;
use lazy_model::ModelSpec;
use train_lm::decoder::{Decoder, DecoderError, IGNORED, StepContext, shifted_targets, with_slice};
use train_lm::dropout::DropoutKey;
use train_lm::random::initial_values;

const BATCH: usize = 2;
const SEQ: usize = 24;

struct Golden {
    decoder: Decoder,
    ids: Vec<u32>,
    tensors: BTreeMap<String, Vec<f32>>,
    loss: f32,
    grad_norm: f64,
}

fn path(case: &str, file: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/decoder").join(case).join(file)
}

fn load(case: &str, file: &str) -> BTreeMap<String, Tensor> {
    candle_core::safetensors::load(path(case, file), &Device::Cpu).unwrap().into_iter().collect()
}

fn golden(case: &str) -> Golden {
    let spec = ModelSpec::from_file(&path(case, "config.json")).unwrap();
    let weights = load(case, "model.safetensors");
    let decoder = Decoder::new(spec, &mut |name, shape| {
        assert_eq!(weights[name].dims(), shape, "{name}");
        values(&weights[name])
    });
    let mut tensors = load(case, "golden.safetensors");
    let ids = tensors.remove("input_ids").unwrap().flatten_all().unwrap().to_vec1::<i32>().unwrap();
    let json = std::fs::read_to_string(path(case, "golden.json")).unwrap();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    Golden {
        decoder: decoder.unwrap(),
        ids: ids.into_iter().map(|id| id as u32).collect(),
        tensors: tensors.iter().map(|(name, tensor)| (name.clone(), values(tensor))).collect(),
        loss: json["loss"].as_f64().unwrap() as f32,
        grad_norm: json["grad_norm"].as_f64().unwrap(),
    }
}

fn values(tensor: &Tensor) -> Vec<f32> {
    with_slice(tensor, <[f32]>::to_vec).unwrap()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    values(tensor).iter().map(|x| x.to_bits()).collect()
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    norm(&a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<_>>())
}

/// A variable as an executor makes one from the bytes that it kept.
fn boundary(tensor: &Tensor) -> Var {
    Var::from_vec(values(tensor), tensor.dims(), &Device::Cpu).unwrap()
}

/// One step, boundary by boundary: a forward that keeps no internals, then each layer again before its backward.
fn step(decoder: &Decoder, ids: &[u32], cx: &StepContext) -> (f32, Vec<Vec<f32>>) {
    let layers = decoder.spec().layers();
    let mut boundaries = vec![decoder.embed(ids, BATCH, SEQ).unwrap()];
    for layer in 0..layers {
        boundaries.push(decoder.layer_forward(layer, &boundaries[layer], cx).unwrap());
    }
    let tokens = BATCH * (SEQ - 1);
    let loss = decoder.loss(&boundaries[layers], &shifted_targets(ids, SEQ), tokens).unwrap();
    let mut sums: Vec<Vec<f32>> =
        decoder.parameters().iter().map(|(_, var)| vec![0.0; var.elem_count()]).collect();
    let mut add = |index: usize, gradient: &Tensor| {
        assert_eq!(gradient.dims(), decoder.parameters()[index].1.dims());
        sums[index].iter_mut().zip(values(gradient)).for_each(|(sum, part)| *sum += part);
    };
    for (index, gradient) in &loss.gradients {
        add(*index, gradient);
    }
    let mut dy = loss.dh;
    for layer in (0..layers).rev() {
        let x = boundary(&boundaries[layer]);
        let y = decoder.layer_forward(layer, &x, cx).unwrap();
        assert_eq!(bits(&y), bits(&boundaries[layer + 1]), "recompute of layer {layer}");
        let back = layer_backward(decoder, layer, &x, y, &dy);
        for (index, gradient) in &back.gradients {
            add(*index, gradient);
        }
        dy = back.dx;
    }
    add(0, &decoder.embed_backward(ids, &dy).unwrap());
    (loss.loss, sums)
}

fn check(case: &str, rows: usize) {
    let golden = golden(case);
    let decoder = golden.decoder.with_loss_rows(rows);
    let (loss, gradients) = step(&decoder, &golden.ids, &StepContext::default());
    assert!((loss - golden.loss).abs() < 1e-5, "loss {loss}, transformers {}", golden.loss);
    for ((name, _), gradient) in decoder.parameters().iter().zip(&gradients) {
        let wanted = &golden.tensors[&format!("grad.{name}")];
        let error = distance(gradient, wanted) / norm(wanted);
        assert!(error < 1e-4, "the gradient of {name} is off by {error:e}");
    }
    let all = gradients.concat();
    assert!((norm(&all) / golden.grad_norm - 1.0).abs() < 1e-5);
    // Every gradient of the reference was compared.
    let wanted = golden.tensors.keys().filter(|name| name.starts_with("grad.")).count();
    assert_eq!(wanted, decoder.parameters().len());
}

#[test]
fn tied_model_agrees_with_transformers() {
    check("qwen3-tied", 128);
}

#[test]
fn untied_model_agrees_with_transformers() {
    check("qwen3-untied", 128);
}

#[test]
fn loss_in_groups_of_rows_agrees_too() {
    check("qwen3-tied", 7);
    check("qwen3-untied", 1);
}

#[test]
fn evaluation_gives_the_loss() {
    let Golden { decoder, ids, loss, .. } = golden("qwen3-tied");
    let cx = StepContext::default();
    let mut h = decoder.embed(&ids, BATCH, SEQ).unwrap();
    for layer in 0..decoder.spec().layers() {
        h = decoder.layer_forward(layer, &h, &cx).unwrap();
    }
    let targets = shifted_targets(&ids, SEQ);
    let got = decoder.evaluate(&h, &targets, BATCH * (SEQ - 1)).unwrap();
    assert!((got - loss).abs() < 1e-5);
    assert_eq!(got, decoder.loss(&h, &targets, BATCH * (SEQ - 1)).unwrap().loss);
}

#[test]
fn a_step_with_dropout_repeats_bit_for_bit() {
    let Golden { decoder, ids, .. } = golden("qwen3-tied");
    let key = DropoutKey { seed: 3, step: 5, micro_batch: 1 };
    let cx = StepContext { dropout: 0.1, key };
    let (loss, gradients) = step(&decoder, &ids, &cx);
    assert_eq!((loss, &gradients), (step(&decoder, &ids, &cx).0, &step(&decoder, &ids, &cx).1));
    let other = StepContext { dropout: 0.1, key: DropoutKey { step: 6, ..key } };
    assert_ne!(loss, step(&decoder, &ids, &other).0);
    assert_ne!(loss, step(&decoder, &ids, &StepContext::default()).0);
}

/// `sum(y * dy)` of one layer, in double precision.
fn scalar(decoder: &Decoder, x: &Tensor, dy: &[f32], cx: &StepContext) -> f64 {
    let y = values(&decoder.layer_forward(1, x, cx).unwrap());
    y.iter().zip(dy).map(|(&y, &dy)| f64::from(y) * f64::from(dy)).sum()
}

/// The goldens have no dropout and are shorter than one block of queries: here both are checked by differences.
#[test]
fn gradients_with_dropout_over_several_blocks_agree_with_differences() {
    let Golden { decoder, .. } = golden("qwen3-tied");
    let (batch, seq, hidden) = (2, 150, decoder.spec().hidden);
    let cx = StepContext { dropout: 0.2, key: DropoutKey { seed: 1, step: 1, micro_batch: 1 } };
    let noise = |name: &str, scale: f32| -> Vec<f32> {
        let values = initial_values(4, name, &[batch * seq, hidden]);
        values.into_iter().map(|v| v * scale).collect()
    };
    let (at, dy, along) = (noise("x", 50.0), noise("dy", 50.0), noise("direction", 50.0));
    let tensor = |values: Vec<f32>| Tensor::from_vec(values, (batch, seq, hidden), &Device::Cpu).unwrap();
    let x = boundary(&tensor(at.clone()));
    let y = decoder.layer_forward(1, &x, &cx).unwrap();
    let back = layer_backward(&decoder, 1, &x, y, &tensor(dy.clone()));

    // A hundredth of the magnitude of what is moved: single precision leaves about 1e-3 of noise in a slope.
    let step = 1e-2;
    let agree = |what: &str, gradient: &Tensor, direction: &[f32], difference: f64| {
        let slope: f64 =
            values(gradient).iter().zip(direction).map(|(&g, &d)| f64::from(g) * f64::from(d)).sum();
        let scale = norm(&values(gradient)) * norm(direction) / (direction.len() as f64).sqrt();
        assert!((slope - difference).abs() < 2e-2 * scale, "{what}: {slope} by backward, {difference}");
    };
    let moved = |sign: f32| tensor(at.iter().zip(&along).map(|(x, d)| x + sign * step * d).collect());
    let difference = scalar(&decoder, &moved(1.0), &dy, &cx) - scalar(&decoder, &moved(-1.0), &dy, &cx);
    agree("input", &back.dx, &along, difference / (2.0 * f64::from(step)));

    for (index, gradient) in &back.gradients {
        let name = decoder.parameters()[*index].0.clone();
        let weight = decoder.read_parameter(*index, <[f32]>::to_vec).unwrap();
        let magnitude = (norm(&weight) / (weight.len() as f64).sqrt()) as f32;
        let along = initial_values(5, &name, &[weight.len(), 1]);
        let along: Vec<f32> = along.iter().map(|v| v * 50.0 * magnitude).collect();
        let at = |sign: f32| {
            let moved: Vec<f32> = weight.iter().zip(&along).map(|(w, d)| w + sign * step * d).collect();
            decoder.write_parameter(*index, 0, &moved).unwrap();
            scalar(&decoder, x.as_tensor(), &dy, &cx)
        };
        let difference = (at(1.0) - at(-1.0)) / (2.0 * f64::from(step));
        decoder.write_parameter(*index, 0, &weight).unwrap();
        agree(&name, gradient, &along, difference);
    }
}

#[test]
fn a_long_sequence_does_not_see_the_future() {
    let Golden { decoder, .. } = golden("qwen3-untied");
    let cx = StepContext::default();
    let run = |ids: &[u32]| {
        let x = decoder.embed(ids, 1, ids.len()).unwrap();
        values(&decoder.layer_forward(0, &x, &cx).unwrap())
    };
    let ids: Vec<u32> = (0..200).map(|i| i * 37 % 128).collect();
    let mut changed = ids.clone();
    changed[130] += 1;
    let (a, b) = (run(&ids), run(&changed));
    let hidden = decoder.spec().hidden;
    assert_eq!(a[..130 * hidden], b[..130 * hidden]);
    assert_ne!(a[199 * hidden..], b[199 * hidden..]);
    // A shorter sequence uses the same positions.
    assert!(distance(&run(&ids[..100]), &a[..100 * hidden]) < 1e-4);
}

#[test]
fn parameters_are_written_in_place_and_only_inside() {
    let Golden { decoder, .. } = golden("qwen3-tied");
    let address = |index| decoder.read_parameter(index, |w| w.as_ptr()).unwrap();
    let (before, at) = (decoder.read_parameter(3, <[f32]>::to_vec).unwrap(), address(3));
    decoder.write_parameter(3, 5, &[1.5, 2.5]).unwrap();
    let after = decoder.read_parameter(3, <[f32]>::to_vec).unwrap();
    assert_eq!((&after[5..7], &after[..5], &after[7..]), (&[1.5, 2.5][..], &before[..5], &before[7..]));
    assert_eq!(at, address(3));
    let error = decoder.write_parameter(3, before.len() - 1, &[0.0, 0.0]).unwrap_err();
    assert!(error.to_string().contains("self_attn.k_proj.weight has 4096 elements"), "{error}");
    assert!(decoder.write_parameter(999, 0, &[]).is_err());
    assert_eq!(decoder.read_parameter(3, <[f32]>::to_vec).unwrap(), after);
}

#[test]
fn calls_that_do_not_fit_the_model_are_refused() {
    let Golden { decoder, ids, .. } = golden("qwen3-tied");
    let x = decoder.embed(&ids, BATCH, SEQ).unwrap();
    let cx = StepContext::default();
    let refused = |result: Result<(), DecoderError>, part: &str| {
        let message = result.unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    };
    refused(decoder.embed(&[1, 128], 1, 2).map(drop), "token 1 has id 128");
    refused(decoder.embed(&[1, 2], 2, 2).map(drop), "2 token ids were given for 4 tokens");
    refused(decoder.layer_forward(4, &x, &cx).map(drop), "no layer 4");
    refused(decoder.layer_forward(0, &x.narrow(2, 0, 8).unwrap(), &cx).map(drop), "[batch, seq, 64]");
    refused(decoder.layer_forward(0, &x, &StepContext { dropout: 1.0, ..cx }).map(drop), "below 1");
    refused(decoder.loss(&x, &[IGNORED; 48], 0).map(drop), "no token");
    refused(decoder.loss(&x, &[0; 47], 1).map(drop), "47 targets");
    refused(decoder.loss(&x, &[128; 48], 1).map(drop), "outside the vocabulary");
    let spec = decoder.spec().clone();
    refused(Decoder::new(spec, &mut |_, _| vec![0.0; 3]).map(drop), "model.embed_tokens.weight has 8192");
}
