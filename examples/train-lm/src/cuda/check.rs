//! Tests of the decoder on a GPU, in the program itself, so that they run where there is nothing else.

mod plans;
mod runs;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use lazy_model::{ModelSpec, Schedule};
use lazy_runtime::ModelOptions;
use lazy_store::cuda::Gpu;
use lazy_store::{BoxError, StoreError};

use super::trial::{Trial, bytes_of, values_of};
use super::{CudaOptions, Real};
use crate::decoder::{Decoder, IGNORED, StepContext, shifted_targets, with_slice};
use crate::model::Shape;
use crate::random::{Stream, initial_values};

type Outcome = Result<String, BoxError>;
type Named = Vec<(String, Vec<f32>)>;
type Test = fn(&Bench<'_>) -> Outcome;

/// What tests run on.
struct Bench<'a> {
    gpu: &'a Gpu,
    dir: &'a Path,
}

/// Every test by name.
const ALL: &[(&str, Test)] = &[
    ("float32, tied: loss and gradients of transformers", |b| golden(b, &TIED)),
    ("float32, untied: loss and gradients of transformers", |b| golden(b, &UNTIED)),
    ("float32, one head of keys, sequence of 33, vocabulary of 200", |b| as_on_cpu(b, ODD, 3, 33)),
    ("float32, heads of 96 and 5 queries a key", |b| as_on_cpu(b, WIDE, 2, 70)),
    ("bfloat16 beside float32, heads of 128", |b| rounded(b, BF16, 4, 300)),
    ("bfloat16 beside float32, heads of 64, sequence of 65", |b| rounded(b, BF16_64, 3, 65)),
    ("bfloat16 without tensor cores beside float32, heads of 24", |b| rounded(b, BF16_24, 2, 40)),
    ("every plan gives the same bits after 20 steps", plans::same_bits),
    ("1000 steps with boundaries coming from RAM four ahead, as they come and held up", plans::long_run),
    ("runs: wherever state, update and activations are, the same weights", runs::same_weights),
    ("runs: resumed, the same weights", runs::resumed),
    ("runs: weights at home in RAM, the same weights", runs::streamed),
    ("runs: spilled by every means, the same weights", runs::drives),
    ("runs: float32 beside the host device", runs::beside_the_host_device),
    ("runs: what goes wrong is named", runs::refusals),
];

/// Which tests to run, and where.
#[derive(clap::Args)]
pub struct CheckArgs {
    /// Run the tests whose name contains this alone
    #[arg(default_value = "")]
    only: String,
    /// Folder for spill files
    #[arg(long, value_name = "DIR", default_value = ".")]
    nvme_dir: PathBuf,
}

/// Runs tests on the first GPU; a line for each, and their count, go to `say`. Whether all passed, and there were any.
///
/// # Errors
/// When there is no GPU to test.
pub fn check(args: &CheckArgs, say: &mut dyn FnMut(&str)) -> Result<bool, StoreError> {
    let gpu = Gpu::open(0)?;
    say(&format!("{gpu:?}, compute capability {:?}", gpu.capability()));
    let bench = Bench { gpu: &gpu, dir: &args.nvme_dir };
    let (mut ran, mut failed) = (0, 0);
    for (name, test) in ALL.iter().filter(|(name, _)| name.contains(&args.only)) {
        ran += 1;
        match test(&bench) {
            Ok(what) => say(&format!("ok      {name}: {what}")),
            Err(error) => {
                failed += 1;
                say(&format!("FAILED  {name}: {error}"));
            }
        }
    }
    say(&format!("{ran} tests, {failed} failed"));
    Ok(failed == 0 && ran > 0)
}

/// A case computed by transformers: see `tests/golden.rs`.
struct Golden {
    config: &'static str,
    expected: &'static str,
    weights: &'static [u8],
    tensors: &'static [u8],
}

macro_rules! golden {
    ($name:literal) => {
        Golden {
            config: include_str!(concat!("../../tests/data/decoder/", $name, "/config.json")),
            expected: include_str!(concat!("../../tests/data/decoder/", $name, "/golden.json")),
            weights: include_bytes!(concat!("../../tests/data/decoder/", $name, "/model.safetensors")),
            tensors: include_bytes!(concat!("../../tests/data/decoder/", $name, "/golden.safetensors")),
        }
    };
}

const TIED: Golden = golden!("qwen3-tied");
const UNTIED: Golden = golden!("qwen3-untied");

fn options(shape: Shape, real: Real) -> CudaOptions {
    CudaOptions {
        shape,
        real,
        gradients: Real::F32,
        dropout: 0.0,
        model: ModelOptions::default(),
        poison: true,
    }
}

/// The norm of the difference by that of what is expected.
fn error_of(expected: &[f32], got: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x).powi(2);
    let error: f64 = expected.iter().zip(got).map(|(e, g)| square(e - g)).sum();
    (error / expected.iter().map(|e| square(*e)).sum::<f64>()).sqrt()
}

/// Compares gradients by name; the largest error.
fn compare(
    expected: &BTreeMap<String, Vec<f32>>,
    got: &[(String, Vec<f32>)],
    most: f64,
) -> Result<f64, BoxError> {
    let mut worst = 0.0_f64;
    let mut off = String::new();
    for (name, values) in got {
        let wanted = expected.get(name).ok_or_else(|| format!("no gradient of {name} to compare with"))?;
        let error = error_of(wanted, values);
        // Not a number is no success.
        if error.is_nan() || error > most {
            off += &format!(" {name} {error:.1e}");
        }
        worst = worst.max(error);
    }
    if off.is_empty() { Ok(worst) } else { Err(format!("gradients are off:{off}").into()) }
}

/// Compares losses; how far off.
fn near(loss: f32, wanted: f64, most: f64) -> Result<f64, BoxError> {
    let off = (f64::from(loss) - wanted).abs();
    if off <= most { Ok(off) } else { Err(format!("the loss is {loss}, wanted {wanted}").into()) }
}

fn golden(bench: &Bench<'_>, case: &Golden) -> Outcome {
    let load = |bytes| -> Result<BTreeMap<String, Tensor>, BoxError> {
        Ok(candle_core::safetensors::load_buffer(bytes, &Device::Cpu)?.into_iter().collect())
    };
    let (weights, tensors) = (load(case.weights)?, load(case.tensors)?);
    let expected: serde_json::Value = serde_json::from_str(case.expected)?;
    let spec = ModelSpec::from_json(case.config)?;
    let ids = tensors.get("input_ids").ok_or("no ids in the case")?.to_dtype(DType::U32)?;
    let (batch, seq) = ids.dims2()?;
    let values = |tensor: &Tensor| with_slice(tensor, <[f32]>::to_vec);
    let mut trial = Trial::open(
        bench.gpu,
        &spec,
        options(Shape { batch, seq }, Real::F32),
        bench.dir,
        |model| Ok(Schedule::named("resident", &model.sizes().boundary, true)),
        |name, _| {
            weights
                .get(name)
                .and_then(|w| values(w).ok())
                .map(|w| bytes_of(Real::F32, &w))
                .unwrap_or_default()
        },
    )?;
    let report = trial.step(0, &[ids.flatten_all()?.to_vec1()?])?;
    let off = near(report.losses[0], expected["loss"].as_f64().ok_or("no loss in the case")?, 1e-5)?;
    let gradients = tensors.iter().filter_map(|(name, tensor)| {
        let name = name.strip_prefix("grad.")?;
        Some(values(tensor).map(|values| (name.to_owned(), values)))
    });
    let gradients = gradients.collect::<Result<BTreeMap<_, _>, _>>()?;
    let worst = compare(&gradients, &trial.gradients()?, 1e-4)?;
    Ok(format!("loss off by {off:.1e}, gradients by {worst:.1e}"))
}

/// A model for a test: hidden, layers, intermediate, heads, heads of keys, head_dim, vocabulary.
type Dims = [usize; 7];

const ODD: Dims = [48, 3, 72, 3, 1, 16, 200];
const WIDE: Dims = [160, 2, 320, 10, 2, 96, 513];
const BF16: Dims = [512, 4, 1536, 8, 2, 128, 1024];
const BF16_64: Dims = [256, 3, 768, 6, 3, 64, 520];
const BF16_24: Dims = [128, 2, 256, 4, 2, 24, 200];

fn spec(
    [hidden, layers, intermediate, heads, kv_heads, head_dim, vocab]: Dims,
) -> Result<ModelSpec, BoxError> {
    let config = serde_json::json!({
        "model_type": "qwen3", "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": true, "attention_bias": false,
        "max_position_embeddings": 4096, "hidden_act": "silu",
    });
    Ok(ModelSpec::from_json(&config.to_string())?)
}

/// First weights as a trainer draws them, but for norms, whose weights would all be one.
fn weights(name: &str, shape: &[usize]) -> Vec<f32> {
    let mut values = initial_values(11, name, shape);
    if shape.len() == 1 {
        let stream = Stream::keyed(&[name.len() as u64, shape[0] as u64]);
        values.iter_mut().zip(0..).for_each(|(v, i)| *v += 0.4 * (stream.uniform(i) as f32 - 0.5));
    }
    values
}

/// The same, rounded to bfloat16.
fn rounded_weights(name: &str, shape: &[usize]) -> Vec<f32> {
    values_of(Real::Bf16, &bytes_of(Real::Bf16, &weights(name, shape)))
}

fn ids(shape: Shape, vocab: usize) -> Vec<u32> {
    let stream = Stream::keyed(&[shape.batch as u64, shape.seq as u64]);
    (0..shape.tokens() as u64).map(|i| (stream.uniform(i) * vocab as f64) as u32).collect()
}

/// Loss and gradients of the decoder on the CPU.
fn on_cpu(
    spec: &ModelSpec,
    shape: Shape,
    ids: &[u32],
) -> Result<(f32, BTreeMap<String, Vec<f32>>), BoxError> {
    let decoder = Decoder::new(spec.clone(), &mut |name, shape| weights(name, shape))?;
    let cx = StepContext::default();
    let mut gradients: Vec<Vec<f32>> =
        decoder.parameters().iter().map(|(_, v)| vec![0.0; v.elem_count()]).collect();
    let add = |to: &mut Vec<f32>, tensor: &Tensor| {
        with_slice(tensor, |from| to.iter_mut().zip(from).for_each(|(to, from)| *to += from))
    };
    let mut boundaries = vec![decoder.embed(ids, shape.batch, shape.seq)?];
    for layer in 0..spec.layers() {
        let next = decoder.layer_forward(layer, &boundaries[layer], &cx)?;
        boundaries.push(next);
    }
    let targets = shifted_targets(ids, shape.seq);
    let counted = targets.iter().filter(|&&t| t != IGNORED).count();
    let result = decoder.loss(&boundaries[spec.layers()], &targets, counted)?;
    for (number, gradient) in &result.gradients {
        add(&mut gradients[*number], gradient)?;
    }
    let mut dy = result.dh;
    for layer in (0..spec.layers()).rev() {
        let x = candle_core::Var::from_tensor(&boundaries[layer])?;
        let y = decoder.layer_forward(layer, x.as_tensor(), &cx)?;
        let store = (y * dy)?.sum_all()?.backward()?;
        dy = store.get(x.as_tensor()).ok_or("no gradient of a boundary")?.clone();
        for number in decoder.layer_parameters(layer) {
            let gradient =
                store.get(decoder.parameters()[number].1.as_tensor()).ok_or("no gradient of a weight")?;
            add(&mut gradients[number], gradient)?;
        }
    }
    add(&mut gradients[0], &decoder.embed_backward(ids, &dy)?)?;
    let named = decoder.parameters().iter().map(|(name, _)| name.clone()).zip(gradients).collect();
    Ok((result.loss, named))
}

fn resident(
    bench: &Bench<'_>,
    spec: &ModelSpec,
    shape: Shape,
    real: Real,
    ids: &[u32],
    init: fn(&str, &[usize]) -> Vec<f32>,
) -> Result<(f32, Named), BoxError> {
    let choose = |model: &lazy_runtime::Model| Ok(Schedule::named("resident", &model.sizes().boundary, true));
    let mut trial = Trial::open(bench.gpu, spec, options(shape, real), bench.dir, choose, |name, shape| {
        bytes_of(real, &init(name, shape))
    })?;
    let report = trial.step(0, &[ids.to_vec()])?;
    Ok((report.losses[0], trial.gradients()?))
}

fn as_on_cpu(bench: &Bench<'_>, dims: Dims, batch: usize, seq: usize) -> Outcome {
    let (spec, shape) = (spec(dims)?, Shape { batch, seq });
    let ids = ids(shape, spec.vocab);
    let (loss, gradients) = resident(bench, &spec, shape, Real::F32, &ids, weights)?;
    let (wanted, expected) = on_cpu(&spec, shape, &ids)?;
    let off = near(loss, wanted.into(), 1e-5)?;
    let worst = compare(&expected, &gradients, 1e-4)?;
    Ok(format!("loss off by {off:.1e}, gradients by {worst:.1e}"))
}

fn rounded(bench: &Bench<'_>, dims: Dims, batch: usize, seq: usize) -> Outcome {
    let (spec, shape) = (spec(dims)?, Shape { batch, seq });
    let ids = ids(shape, spec.vocab);
    let (loss, gradients) = resident(bench, &spec, shape, Real::Bf16, &ids, rounded_weights)?;
    let (wanted, expected) = resident(bench, &spec, shape, Real::F32, &ids, rounded_weights)?;
    let off = near(loss, wanted.into(), 1e-2 * f64::from(wanted))?;
    let worst = compare(&expected.into_iter().collect(), &gradients, 2e-2)?;
    Ok(format!("loss off by {off:.1e}, gradients by {worst:.1e}"))
}
