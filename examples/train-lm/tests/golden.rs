//! Loss and gradients of transformers' Qwen3, through the executor: boundaries spilled to host and NVMe, layers recomputed.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "common/plan.rs"]
mod plan;

use std::collections::BTreeMap;
use std::path::PathBuf;

use candle_core::{DType, Device, Tensor};
use lazy_model::{Bytes, ModelSpec, Tier};
use lazy_runtime::Executor;
use plan::{on, planned};
use train_lm::decoder::{Decoder, with_slice};
use train_lm::model::{HostModel, Shape};

fn load(case: &str, file: &str) -> BTreeMap<String, Tensor> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/decoder").join(case).join(file);
    candle_core::safetensors::load(path, &Device::Cpu).unwrap().into_iter().collect()
}

/// What the store holds between steps.
fn held(executor: &Executor) -> [Bytes; 3] {
    Tier::ALL.map(|tier| executor.store().live(tier))
}

fn check(case: &str, letters: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/decoder").join(case);
    let weights = load(case, "model.safetensors");
    let golden = load(case, "golden.safetensors");
    let json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path.join("golden.json")).unwrap()).unwrap();
    let spec = ModelSpec::from_file(&path.join("config.json")).unwrap();
    let decoder =
        Decoder::new(spec, &mut |name, _| with_slice(&weights[name], <[f32]>::to_vec).unwrap()).unwrap();
    let ids = golden["input_ids"].to_dtype(DType::U32).unwrap().flatten_all().unwrap().to_vec1().unwrap();

    let model = HostModel::new(decoder, Shape { batch: 2, seq: 24 }, 1, 0.0);
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (mut program, mut executor) = planned(&model, letters, dir.path(), true);
    let expected = json["loss"].as_f64().unwrap();
    // An evaluation gives the same loss, and leaves the store as it was.
    let before = held(&executor);
    let mut evaluation = executor.prepare_evaluation().unwrap();
    for _ in 0..2 {
        let ids: &Vec<u32> = &ids;
        let loss = executor.run(&mut evaluation, &on(ids.clone(), 24, 0)).unwrap().losses[0];
        assert!((f64::from(loss) - expected).abs() < 1e-5, "{case}: evaluated {loss} for {expected}");
        assert_eq!(held(&executor), before);
    }
    assert!(model.gradients.read().iter().all(|gradient| gradient.iter().all(|&v| v == 0.0)));
    let loss = executor.run(&mut program, &on(ids, 24, 0)).unwrap().losses[0];
    assert!((f64::from(loss) - expected).abs() < 1e-5, "{case}: loss {loss} for {expected}");
    let gradients = model.gradients.read();
    for ((name, _), gradient) in model.decoder.parameters().iter().zip(&gradients) {
        let want = with_slice(&golden[&format!("grad.{name}")], <[f32]>::to_vec).unwrap();
        assert_eq!(want.len(), gradient.len());
        let square = |x: f32| f64::from(x).powi(2);
        let error: f64 = want.iter().zip(gradient.iter()).map(|(w, g)| square(w - g)).sum();
        let size: f64 = want.iter().map(|w| square(*w)).sum();
        assert!(
            error.sqrt() <= 1e-4 * size.sqrt(),
            "{case}: gradient of {name} off by {}",
            (error / size).sqrt()
        );
    }
}

#[test]
fn tied_model_with_all_three_tiers_and_recomputation() {
    check("qwen3-tied", "NC-GG");
    check("qwen3-tied", "C---G");
}

#[test]
fn untied_model_with_all_three_tiers_and_recomputation() {
    check("qwen3-untied", "N-CG");
}
