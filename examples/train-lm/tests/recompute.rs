//! The trainer's layers, one of which is recomputed another way than it ran at first.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use lazy_model::ModelSpec;
use lazy_runtime::candle::{CandleLayer, Parameter};
use lazy_runtime::{Context, Executor, ExecutorOptions, LayerError, Model, ModelOptions, Phase, Step};
use lazy_store::Store;
use train_lm::batch::Batch;
use train_lm::decoder::{Decoder, StepContext, with_slice};
use train_lm::dropout::DropoutKey;
use train_lm::model::{HostModel, Shape};

const SHAPE: Shape = Shape { batch: 2, seq: 24 };
/// The layer that is disturbed.
const LAYER: usize = 2;

fn host_model() -> HostModel {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/decoder/qwen3-tied");
    let weights = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu).unwrap();
    let spec = ModelSpec::from_file(&folder.join("config.json")).unwrap();
    let decoder =
        Decoder::new(spec, &mut |name, _| with_slice(&weights[name], <[f32]>::to_vec).unwrap()).unwrap();
    HostModel::new(decoder, SHAPE, 1, 0.1)
}

/// What a step under `letters` fails with, if it does, where `disturb` has [`LAYER`]'s output pass through it.
fn failure(
    letters: &str,
    dir: &Path,
    disturb: impl Fn(&Context<'_>, &Decoder, Tensor) -> Result<Tensor, LayerError> + Send + Sync + 'static,
) -> Option<String> {
    let host = host_model();
    let mut layers = host.layers();
    let named = host.decoder.parameters();
    let parameters = host.decoder.layer_parameters(LAYER).map(|number| Parameter {
        number,
        name: named[number].0.clone(),
        variable: named[number].1.clone(),
    });
    let decoder = Arc::clone(&host.decoder);
    let forward = move |cx: &Context<'_>, x: &Tensor| {
        let key = DropoutKey { seed: cx.seed, step: cx.step, micro_batch: cx.micro_batch as u64 };
        let y = decoder.layer_forward(LAYER, x, &StepContext { dropout: 0.1, key })?;
        disturb(cx, &decoder, y)
    };
    let dims = (SHAPE.batch, SHAPE.seq, host.decoder.spec().hidden);
    let gradients = Arc::clone(&host.gradients);
    layers[LAYER] =
        Arc::new(CandleLayer::new(dims, forward, parameters.collect(), gradients, layers[LAYER].sizes()));
    let model = Model::new(host.prologue(), layers, host.epilogue(), ModelOptions::default()).unwrap();
    let plan = model.plan(&model.schedule(letters).unwrap()).unwrap();
    let store = Store::open(model.store_options(&plan, dir)).unwrap();
    let mut executor = Executor::new(store, model, ExecutorOptions { check_recompute: true }).unwrap();
    let mut program = executor.prepare(plan).unwrap();
    let ids: Vec<u32> = (0..SHAPE.tokens() as u32).map(|i| i * 37 % 128).collect();
    let step = Step::with_inputs(0, Batch::next_token([ids], SHAPE.seq));
    let error = executor.run(&mut program, &step).err()?;
    Some(error.source().map_or_else(|| error.to_string(), ToString::to_string))
}

/// R4: weights that are written too early, and arithmetic that is switched to another type.
#[test]
fn r4_a_layer_that_is_recomputed_another_way_is_named_with_its_tensor() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for letters in ["GGGGG", "N---G"] {
        assert_eq!(failure(letters, dir.path(), |_, _, y| Ok(y)), None);
        let written = failure(letters, dir.path(), |cx, decoder, y| {
            if cx.phase == Phase::Forward {
                // As an optimizer would that does not wait for the layer's backward.
                decoder.write_parameter(decoder.layer_parameters(LAYER).start, 0, &[9.0])?;
            }
            Ok(y)
        });
        let words = "layer 2 was recomputed to other values: the checksum of its output was";
        assert!(written.as_ref().is_some_and(|e| e.contains(words)), "{letters}: {written:?}");
        let cast = failure(letters, dir.path(), |cx, _, y| {
            Ok(if cx.phase == Phase::Recompute { y.to_dtype(DType::BF16)? } else { y })
        });
        let words = "layer 2 was recomputed another way: its output was [2, 24, 64] of f32, and is [2, 24, 64] of bf16";
        assert!(cast.as_ref().is_some_and(|e| e.contains(words)), "{letters}: {cast:?}");
    }
}
