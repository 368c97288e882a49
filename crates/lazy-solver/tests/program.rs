//! The `lazy-plan` program, started as a user starts it.

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

fn given(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/given/{name}.json"))
}

fn plan(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lazy-plan")).args(args).output().unwrap()
}

fn plan_chain(name: &str, args: &[&str]) -> Output {
    let chain = given(name);
    plan(&[&["--chain", chain.to_str().unwrap()], args].concat())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn object(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn json_is_the_only_thing_on_standard_output() {
    let output = plan_chain("tiny5_hetero", &["--json"]);
    assert!(output.status.success());
    let plan = object(&output);
    assert_eq!(plan["status"], "optimal");
    assert!((plan["objective_ms"].as_f64().unwrap() - 20.00105).abs() < 2e-6);
    assert_eq!(plan["step_ms"], 20.0);
    assert_eq!(plan["gap"], 0.0);
    assert_eq!(plan["counts"]["recompute"], 1);
    assert_eq!(plan["placement"].as_str().unwrap().len(), 6);
    let boundaries: usize =
        ["hbm", "host", "nvme", "recompute"].iter().map(|k| plan[k].as_array().unwrap().len()).sum();
    assert_eq!(boundaries, 6);
}

#[test]
fn infeasible_has_one_exit_status_and_a_remedy_with_json_and_without() {
    let output = plan_chain("infeasible_budget", &["--json"]);
    assert_eq!(output.status.code(), Some(1));
    let plan = object(&output);
    assert_eq!(plan["status"], "infeasible");
    assert!(plan["placement"].is_null() && plan["objective_ms"].is_null());
    let output = plan_chain("infeasible_budget", &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let message = text(&output.stderr);
    let remedy = "raise the host budget from 4.00 MiB: --host-activation-gib 0.00977 (10485760 bytes)";
    assert!(message.contains(remedy), "{message}");
    assert!(plan["remedies"].as_array().unwrap().iter().any(|r| r["text"] == remedy), "{plan}");
    // And it can be typed as it stands.
    let typed = ["--host-activation-gib", "0.00977"];
    assert!(plan_chain("infeasible_budget", &typed).status.success());
}

#[test]
fn a_pipe_gets_the_map_without_colours() {
    let output = plan_chain("tiny3_hand", &[]);
    let shown = text(&output.stdout);
    assert!(shown.contains("proven optimal") && shown.contains("10.00003 ms"), "{shown}");
    assert!(shown.contains("G hbm") && !shown.contains('\x1b'), "{shown}");
    assert!(shown.lines().all(|line| line == line.trim_end()), "{shown}");
}

#[test]
fn the_schedule_is_written_whole_or_not_at_all() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("schedules");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir(&folder).unwrap();
    let file = folder.join("schedule.json");
    let out = file.to_str().unwrap();
    // No plan, no file: no time to search, and no plan made by hand fits.
    let mut chain: Value = serde_json::from_slice(&std::fs::read(given("tiny3_hand")).unwrap()).unwrap();
    chain["boundary_bytes"] = vec![5, 5, 3, 3].into();
    (chain["gpu_budget_bytes"], chain["cpu_budget_bytes"]) = (8.into(), 8.into());
    (chain["nvme_budget_bytes"], chain["max_segment_layers"]) = (0.into(), 1.into());
    let hard = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hard-chain.json");
    std::fs::write(&hard, chain.to_string()).unwrap();
    let late = ["--method", "mip", "--time-limit-s", "0", "--json", "--out", out];
    let output = plan(&[&["--chain", hard.to_str().unwrap()], &late[..]].concat());
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(object(&output)["status"], "no_incumbent");
    assert!(!plan_chain("infeasible_budget", &["--json", "--out", out]).status.success());
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    assert!(plan_chain("tiny3_hand", &["--out", out]).status.success());
    let schedule = lazy_model::Schedule::from_json(&std::fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!((schedule.layers, schedule.solve.objective_ms), (3, Some(10.00003)));
    // The temporary name is gone.
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
    let output = plan_chain("tiny3_hand", &["--out", folder.join("absent/s.json").to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty() && text(&output.stderr).contains("absent"));
}

#[test]
fn wrong_usage_and_wrong_files_say_what_to_change() {
    assert_eq!(plan(&[]).status.code(), Some(2));
    assert_eq!(plan_chain("tiny3_hand", &["--no-such-flag"]).status.code(), Some(2));
    let output = plan_chain("tiny3_hand", &["--hbm-gib", "3"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty() && text(&output.stderr).contains("a chain brings its own budgets"));
    let output = plan(&["--chain", "no/such/file.json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("no/such/file.json"));
    let output = plan_chain("tiny3_hand", &["--time-limit-s", "-1"]);
    assert_ne!(output.status.code(), Some(0));
}

#[test]
fn a_model_is_planned_whole_with_its_step_time() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("model");
    std::fs::create_dir_all(&folder).unwrap();
    let marked = |value: Value| serde_json::json!({"value": value, "source": "assumed", "by": "this test"});
    let each = |ms: f64| marked(serde_json::json!(vec![ms; 12]));
    let one = |x: f64| marked(serde_json::json!(x));
    let profile = serde_json::json!({
        "version": 1, "name": "test", "tiers": {},
        "links": {"d2h_bytes_per_s": one(2e9), "h2d_bytes_per_s": one(2e9),
                  "nvme_write_bytes_per_s": one(5e8), "nvme_read_bytes_per_s": one(5e8)},
        "times": {"workload": "test", "forward_ms": each(10.0), "saving_forward_ms": each(11.0), "backward_ms": each(20.0),
                  "prologue_ms": one(1.0), "prologue_backward_ms": one(1.0), "epilogue_ms": one(9.0)},
    });
    let profile_file = folder.join("profile.json");
    std::fs::write(&profile_file, profile.to_string()).unwrap();
    let config = folder.join("config.json");
    let text = r#"{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "num_hidden_layers": 12, "vocab_size": 256,
        "tie_word_embeddings": true, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
        "max_position_embeddings": 256, "attention_bias": false}"#;
    std::fs::write(&config, text).unwrap();
    let planned = |hbm: &str| {
        let (config, profile) = (config.to_str().unwrap(), profile_file.to_str().unwrap());
        let workload = ["--model", config, "--profile", profile, "--batch", "2", "--seq", "128"];
        let budgets = ["--host-mib", "1", "--nvme-mib", "1", "--hbm-mib", hbm, "--json"];
        let output = plan(&[&workload[..], &budgets[..]].concat());
        assert!(!output.stdout.is_empty(), "{}", text_of(&output));
        object(&output)
    };
    // Room for everything, internals included: 12 saving forwards and backwards of 31 ms, 11 ms around them.
    let roomy = planned("64");
    assert_eq!(roomy["counts"]["hbm"], 13);
    assert!((roomy["predicted_step_s"].as_f64().unwrap() - 0.383).abs() < 1e-6);
    let cramped = planned("1");
    assert_eq!(cramped["status"], "infeasible");
    assert!(cramped["message"].as_str().unwrap().contains("hbm"), "{cramped}");
}

fn text_of(output: &Output) -> String {
    text(&output.stderr)
}

#[test]
fn a_reader_of_standard_error_that_has_gone_changes_no_exit_status() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_lazy-plan"))
        .args(["--chain", "/no/such/file"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(1));
}
