//! What a checkpoint beside a config changes.

use std::fs;
use std::path::PathBuf;

use lazy_model::{Bytes, ModelSpec};
use serde_json::{Map, Value, json};

use super::{json_of, spec, with};

/// A small decoder, tied or not.
fn config(tied: bool) -> Value {
    json!({
        "model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
        "tie_word_embeddings": tied,
    })
}

const TABLE: u64 = 64 * 32;

/// The index of a checkpoint with the tensors of `spec`, and with or without a head.
fn index(spec: &ModelSpec, head: bool) -> String {
    let mut names: Vec<String> = spec.parameters().into_iter().map(|p| p.name).collect();
    names.retain(|name| name != "lm_head.weight");
    let mut elements = spec.total_parameters() - if spec.tied { 0 } else { TABLE };
    if head {
        names.push("lm_head.weight".into());
        elements += TABLE;
    }
    let map: Map<String, Value> =
        names.into_iter().map(|name| (name, "model-00001-of-00001.safetensors".into())).collect();
    json!({"metadata": {"total_size": 2 * elements}, "weight_map": map}).to_string()
}

#[test]
fn m5_four_combinations_of_flag_and_tensor() {
    let tied_total = spec(&config(true)).total_parameters();
    for (flag, head, total, noted) in [
        (true, false, tied_total, false),
        (false, true, tied_total + TABLE, false),
        (false, false, tied_total, true),
        (true, true, tied_total, true),
    ] {
        let mut model = spec(&config(flag));
        let before = model.notes.len();
        let text = index(&model, head);
        model.with_safetensors_index(&text).unwrap();
        let case = format!("flag {flag}, tensor {head}: {:?}", model.notes);
        assert_eq!(model.total_parameters(), total, "{case}");
        // Bytes are the index's own, whatever the flag says.
        let bytes = 2 * (tied_total + if head { TABLE } else { 0 });
        assert_eq!(model.weight_bytes(4), Bytes(bytes), "{case}");
        assert_eq!(model.notes.len() - before, usize::from(noted), "{case}");
        assert!(!noted || model.notes[before].contains("lm_head.weight"), "{case}");
    }
}

#[test]
fn m5_without_an_index_bytes_follow_parameters() {
    let model = spec(&config(true));
    assert_eq!(model.weight_bytes(2), Bytes(2 * model.total_parameters()));
    assert_eq!(model.element_bytes, Some(2));
}

#[test]
fn an_index_of_another_model_is_reported() {
    let mut model = spec(&config(false));
    let text = index(&spec(&with(config(false), "num_hidden_layers", Some(json!(3)))), true);
    model.with_safetensors_index(&text).unwrap();
    assert!(model.notes.iter().any(|n| n.contains("11 tensors beside")), "{:?}", model.notes);
    let mut model = spec(&config(false));
    let text = index(&spec(&with(config(false), "num_hidden_layers", Some(json!(1)))), true);
    model.with_safetensors_index(&text).unwrap();
    assert!(model.notes.iter().any(|n| n.contains("lacks 11 of the tensors")), "{:?}", model.notes);
    // The same tensors in another type than the config names.
    let mut model = spec(&with(config(false), "torch_dtype", Some(json!("float32"))));
    let text = index(&model, true);
    model.with_safetensors_index(&text).unwrap();
    assert!(model.notes.iter().any(|n| n.contains("elements of 4 bytes were expected")), "{:?}", model.notes);
}

#[test]
fn parts_of_a_wrapper_and_fused_experts_are_recognised() {
    let mut model = spec(&json_of("qwen3-30b-a3b"));
    let mut map = Map::new();
    for parameter in model.parameters() {
        let name = parameter.name.replacen("model.", "model.language_model.", 1);
        let name = match name.split_once(".experts.") {
            Some((layer, rest)) if rest.contains("down_proj") => format!("{layer}.experts.down_proj"),
            Some((layer, _)) => format!("{layer}.experts.gate_up_proj"),
            None => name,
        };
        map.insert(name, "a".into());
    }
    let size = 2 * model.total_parameters();
    let before = model.notes.len();
    let text = json!({"metadata": {"total_size": size}, "weight_map": map}).to_string();
    model.with_safetensors_index(&text).unwrap();
    assert_eq!(model.notes.len(), before, "{:?}", model.notes);
    map.insert("model.visual.patch_embed.weight".into(), "a".into());
    let text = json!({"metadata": {"total_size": size}, "weight_map": map}).to_string();
    model.with_safetensors_index(&text).unwrap();
    assert!(model.notes.iter().any(|n| n.contains("model.visual.patch_embed.weight")));
}

#[test]
fn a_config_that_asks_for_absurdly_many_tensors_is_not_counted_out() {
    let others = json!({"num_experts": 1 << 16, "num_experts_per_tok": 1, "moe_intermediate_size": 1});
    let mut wide = with(json_of("qwen3-30b-a3b"), "hidden_size", Some(json!(1)));
    wide.as_object_mut().unwrap().extend(others.as_object().unwrap().clone());
    let mut model = spec(&wide);
    model.with_safetensors_index(&index(&spec(&config(false)), true)).unwrap();
    assert!(model.notes.iter().any(|n| n.contains("lacks most of the tensors")), "{:?}", model.notes);
}

#[test]
fn malformed_indexes_and_headers_are_refused_by_name() {
    let mut model = spec(&config(true));
    for (text, key) in [
        ("{", "not valid JSON"),
        ("{}", "`weight_map`"),
        (r#"{"weight_map": {}}"#, "`metadata`"),
        (r#"{"weight_map": {}, "metadata": {}}"#, "`metadata.total_size`"),
        (r#"{"weight_map": {}, "metadata": {"total_size": -1}}"#, "`metadata.total_size`"),
    ] {
        let found = model.with_safetensors_index(text).unwrap_err().to_string();
        assert!(found.contains(key), "{found}");
    }
    for (text, key) in [
        (r#"{"a": 3}"#, "`a`"),
        (r#"{"a": {"shape": [1], "data_offsets": [4, 0]}}"#, "`a.data_offsets`"),
        (r#"{"a": {"shape": ["1"], "data_offsets": [0, 4]}}"#, "`a.shape`"),
    ] {
        let found = model.with_safetensors_header(text).unwrap_err().to_string();
        assert!(found.contains(key), "{found}");
    }
    assert_eq!(model.checkpoint, None);
}

/// A folder that goes away with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("lazy-model-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn files_beside_the_config_are_read() {
    let folder = Folder::new("beside");
    let path = folder.0.join("config.json");
    fs::write(&path, config(false).to_string()).unwrap();
    assert_eq!(ModelSpec::from_file(&path).unwrap().checkpoint, None);

    // A single file: the header gives shapes, the head is missing, and one shape is another one.
    let model = spec(&config(false));
    let (mut header, mut offset) = (Map::new(), 0);
    for parameter in model.parameters().iter().filter(|p| p.name != "lm_head.weight") {
        let end = offset + 2 * parameter.elements();
        let mut shape = parameter.shape.clone();
        if parameter.name.ends_with("layers.0.self_attn.o_proj.weight") {
            shape.reverse();
            shape.push(1);
        }
        let tensor = json!({"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]});
        header.insert(parameter.name.clone(), tensor);
        offset = end;
    }
    let text = Value::Object(header).to_string();
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    fs::write(folder.0.join("model.safetensors"), &bytes).unwrap();
    let read = ModelSpec::from_file(&path).unwrap();
    assert_eq!(read.weight_bytes(4), Bytes(offset));
    assert!(read.tied && read.notes.iter().any(|n| n.contains("no `lm_head.weight`")), "{:?}", read.notes);
    assert!(read.notes.iter().any(|n| n.contains("o_proj.weight` is [32, 32, 1]")), "{:?}", read.notes);

    // A length that the file does not have is refused before anything is reserved.
    fs::write(folder.0.join("model.safetensors"), u64::MAX.to_le_bytes()).unwrap();
    let found = ModelSpec::from_file(&path).unwrap_err().to_string();
    assert!(found.contains("model.safetensors") && found.contains("header"), "{found}");

    // An index is preferred.
    fs::write(folder.0.join("model.safetensors.index.json"), index(&model, true)).unwrap();
    let read = ModelSpec::from_file(&path).unwrap();
    assert_eq!(read.weight_bytes(4), Bytes(2 * model.total_parameters()));
}
