//! `lazy-plan --max`: held against single plans of the value it finds and of the next one.

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const CONFIG: &str = r#"{"model_type": "qwen3", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "num_hidden_layers": 6, "vocab_size": 256, "tie_word_embeddings": true, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": false}"#;

/// HBM that binds, and little time.
const ROOM: &[&str] = &["--hbm-mib", "9", "--loss-chunk-tokens", "64", "--time-limit-s", "2"];

fn plan(args: &[&str]) -> Output {
    let config = Path::new(env!("CARGO_TARGET_TMPDIR")).join("max-config.json");
    std::fs::write(&config, CONFIG).unwrap();
    let model =
        ["--model", config.to_str().unwrap(), "--machine", "h100", "--host-mib", "1", "--nvme-mib", "0"];
    Command::new(env!("CARGO_BIN_EXE_lazy-plan")).args(model).args(args).output().unwrap()
}

fn object(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_value_found_fits_and_the_next_does_not() {
    // At least what fits with every boundary in HBM and nothing kept.
    for (flag, others, least) in
        [("batch", ["--seq", "100"], 10), ("seq", ["--batch", "3"], 300), ("layers", ["--seq", "1000"], 6)]
    {
        let with = |more: &[&str]| plan(&[&others[..], ROOM, &["--json"], more].concat());
        let found = object(&with(&["--max", flag]));
        let max = &found["max"];
        let value = max["value"].as_u64().unwrap();
        assert!(value >= least && found["placement"].is_string(), "{flag}: {max}");
        assert_eq!(max["flag"], flag);
        let (flag, own, next) = (format!("--{flag}"), value.to_string(), (value + 1).to_string());
        // Alone it has all the time it needs, which is about two seconds for the layers.
        let alone = [&others[..], &ROOM[..4], &[&flag, &own]].concat();
        assert!(plan(&alone).status.success(), "{flag} {value}");
        // On a slow machine time may end the search before.
        if max["next_fits"] == false {
            assert!(max["message"].as_str().unwrap().contains("raise the hbm"), "{flag}: {max}");
            let refused = object(&with(&[&flag, &next]));
            assert!(refused["placement"].is_null() && refused["status"] != "optimal", "{flag} {next}");
        }
    }
}

#[test]
fn a_value_found_in_little_time_has_its_plan() {
    for limit in ["0.1", "0.2", "0.4", "0.7"] {
        let args =
            [&ROOM[..4], &["--seq", "1000", "--max", "layers", "--time-limit-s", limit, "--json"]].concat();
        let found = object(&plan(&args));
        assert!(
            found["max"]["value"].is_null() || found["placement"].is_string(),
            "{limit} s: {}",
            found["max"]
        );
    }
}

/// In twenty seconds a plan of these 40 layers is found and proven.
#[test]
fn little_time_is_no_proof_that_nothing_fits() {
    for limit in ["0.1", "0.3", "0.5", "0.7", "1", "1.5"] {
        let args = ["--hbm-mib", "9", "--loss-chunk-tokens", "64", "--seq", "1000", "--layers", "40"];
        let planned = object(&plan(&[&args[..], &["--time-limit-s", limit, "--json"]].concat()));
        assert_ne!(planned["status"], "infeasible", "{limit} s: {}", planned["message"]);
    }
}

#[test]
fn where_not_even_one_fits_the_message_says_so() {
    let args = ["--seq", "4000", "--hbm-mib", "1", "--max", "batch", "--time-limit-s", "2"];
    let output = plan(&args);
    assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(1), true));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("not even batch 1 fits") && said.contains("--hbm-gib"), "{said}");
    let output = plan(&[&args[..], &["--json"]].concat());
    assert_eq!(output.status.code(), Some(1));
    assert!(object(&output)["max"]["value"].is_null());
}

#[test]
fn text_begins_with_the_value_and_why_there_is_no_larger() {
    let output = plan(&[&["--seq", "100", "--max", "batch"], ROOM].concat());
    let shown = String::from_utf8(output.stdout).unwrap();
    let mut lines = shown.lines();
    assert!(lines.next().unwrap().starts_with("largest batch that fits: "), "{shown}");
    assert!(lines.next().unwrap().starts_with("batch ") || shown.contains("was not found out"), "{shown}");
    assert!(shown.contains("predicted step"), "{shown}");
}

#[test]
fn what_is_looked_for_is_not_given() {
    for (args, code) in [
        (&["--max", "batch", "--batch", "2"][..], 1),
        (&["--max", "layers", "--sweep", "seq=1..3"][..], 2),
        (&["--layers", "0"][..], 1),
    ] {
        let output = plan(&[&["--hbm-mib", "9"], args].concat());
        assert_eq!((output.status.code(), output.stdout.is_empty()), (Some(code), true), "{args:?}");
    }
}
