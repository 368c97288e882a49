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
fn infeasible_is_a_result_with_json_and_an_error_with_a_remedy_without() {
    let output = plan_chain("infeasible_budget", &["--json"]);
    assert!(output.status.success());
    let plan = object(&output);
    assert_eq!(plan["status"], "infeasible");
    assert!(plan["placement"].is_null() && plan["objective_ms"].is_null());
    let output = plan_chain("infeasible_budget", &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let message = text(&output.stderr);
    assert!(message.contains("raise the host budget from 4194304 to at least 10485760 bytes"), "{message}");
}

#[test]
fn a_pipe_gets_the_map_without_colours() {
    let output = plan_chain("tiny3_hand", &[]);
    let shown = text(&output.stdout);
    assert!(shown.contains("proven optimal") && shown.contains("10.00003 ms"), "{shown}");
    assert!(shown.contains("G hbm") && !shown.contains('\x1b'), "{shown}");
}

#[test]
fn the_schedule_is_written_whole_or_not_at_all() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("schedules");
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir(&folder).unwrap();
    let file = folder.join("schedule.json");
    let out = file.to_str().unwrap();
    // No plan, no file.
    assert!(plan_chain("doc_cpu14_free", &["--time-limit-s", "0", "--json", "--out", out]).status.success());
    assert!(plan_chain("infeasible_budget", &["--json", "--out", out]).status.success());
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
    assert_eq!(plan_chain("tiny3_hand", &["--hbm-gib", "3"]).status.code(), Some(2));
    let output = plan(&["--chain", "no/such/file.json"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("no/such/file.json"));
    let output = plan_chain("tiny3_hand", &["--time-limit-s", "-1"]);
    assert_ne!(output.status.code(), Some(0));
}
