//! Hugging Face configs: what is read, what is refused, and what follows from them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests may, as tests do")]

mod checkpoint;
mod families;
mod mutated;
mod reading;
mod sizes;

use lazy_model::{Attention, Mixer, ModelSpec};
use serde_json::Value;

/// The configs that come with counts of the built models.
const GIVEN: [&str; 14] = [
    "deepseek-v3",
    "gemma-2-2b",
    "gemma-3-1b",
    "glm-4-9b",
    "llama-3.1-8b",
    "mistral-7b",
    "mixtral-8x7b",
    "phi-3-mini",
    "qwen2.5-7b",
    "qwen3-30b-a3b",
    "qwen3-4b",
    "qwen3-8b",
    "qwen3-next-80b",
    "qwen3.6-27b-text",
];

fn data(name: &str) -> String {
    let path = format!("{}/tests/data/configs/{name}.json", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

fn json_of(name: &str) -> Value {
    serde_json::from_str(&data(name)).unwrap()
}

fn spec(value: &Value) -> ModelSpec {
    ModelSpec::from_json(&value.to_string()).unwrap()
}

fn message(value: &Value) -> String {
    ModelSpec::from_json(&value.to_string()).unwrap_err().to_string()
}

/// `value` with `key` set, or removed where `new` is absent.
fn with(mut value: Value, key: &str, new: Option<Value>) -> Value {
    let map = value.as_object_mut().unwrap();
    match new {
        Some(new) => map.insert(key.into(), new),
        None => map.remove(key),
    };
    value
}

/// The attention of a layer that has softmax attention with grouped queries.
fn attention(spec: &ModelSpec, layer: usize) -> Attention {
    match spec.layer_shapes[layer].mixer {
        Mixer::Attention(attention) => attention,
        other => panic!("layer {layer} has {other:?}"),
    }
}

/// The window of each layer.
fn windows(spec: &ModelSpec) -> Vec<Option<usize>> {
    (0..spec.layers()).map(|l| attention(spec, l).window).collect()
}
