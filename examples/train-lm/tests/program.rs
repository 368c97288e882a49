//! The `train-lm` program, started and stopped as a user does it.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const CONFIG: &str = r#"{
  "model_type": "qwen3", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
  "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
  "tie_word_embeddings": true
}"#;

fn place() -> tempfile::TempDir {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    fs::write(dir.path().join("config.json"), CONFIG).unwrap();
    fs::write(dir.path().join("text.txt"), "to be or not to be, that is the question. ".repeat(50)).unwrap();
    dir
}

fn program(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_train-lm"));
    command.current_dir(dir).args(["train", "--json"]).args(args);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

fn new_run<'a>(out: &'a str, steps: &'a str) -> Vec<&'a str> {
    let fixed =
        ["--model", "config.json", "--text", "text.txt", "--batch", "2", "--seq", "16", "--dropout", "0.1"];
    [&fixed[..], &["--out", out, "--steps", steps]].concat()
}

fn summary(command: &mut Command, status: i32) -> Value {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(status));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn lines(path: &Path) -> usize {
    fs::read_to_string(path).map_or(0, |text| text.lines().count())
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}

#[test]
fn a_run_that_is_asked_to_stop_commits_cleans_up_and_continues_bit_for_bit() {
    for (number, out, status) in [(Signal::INT, "int", 130), (Signal::TERM, "term", 143)] {
        let dir = place();
        let child = program(dir.path(), &new_run(out, "1000000")).spawn().unwrap();
        while lines(&dir.path().join(out).join("metrics.jsonl")) < 2 {
            std::thread::sleep(Duration::from_millis(5));
        }
        signal(&child, number);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(status));
        let stopped: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(stopped["interrupted"], true);
        assert_eq!(fs::read_dir(dir.path().join("spill")).unwrap().count(), 0);

        let steps = (stopped["steps"].as_u64().unwrap() + 2).to_string();
        let resumed = summary(&mut program(dir.path(), &["--resume", out, "--steps", &steps]), 0);
        let straight = summary(&mut program(dir.path(), &new_run("straight", &steps)), 0);
        assert_eq!(resumed["weights_digest"], straight["weights_digest"]);
        assert_eq!(resumed["interrupted"], false);
    }
}

#[test]
fn stopping_before_the_first_step_leaves_nothing() {
    let dir = place();
    // Large enough to be measured for a while.
    let mut args = new_run("run", "5");
    args[5] = "64";
    args[7] = "512";
    let child = program(dir.path(), &args).spawn().unwrap();
    while fs::read_dir(dir.path().join("spill")).map_or(0, Iterator::count) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    signal(&child, Signal::INT);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert_eq!(fs::read_dir(dir.path().join("spill")).unwrap().count(), 0);
}

/// A shell's own limit is none that may not be raised; that of the system is named.
#[test]
fn a_limit_on_open_files_is_raised_or_named() {
    for (limit, status) in [("-S -n 24", 0), ("-n 24", 1)] {
        let dir = place();
        let mut shell = Command::new("sh");
        shell.current_dir(dir.path()).stdin(Stdio::null());
        shell.args([
            "-c",
            &format!("ulimit {limit}; exec \"$@\""),
            "sh",
            env!("CARGO_BIN_EXE_train-lm"),
            "train",
        ]);
        let output = shell.args(new_run("run", "1")).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{said}");
        assert_eq!(said.contains("raise the limit on open files (ulimit -n)"), status == 1, "{said}");
    }
}

/// M2 and M5: tied and untied heads, attention wider than the hidden size. Expected values are transformers' own, in float32.
#[test]
fn m2_m5_logits_of_a_model_in_a_folder_are_those_of_transformers() {
    let logits = |folder: &Path, ids: &[i32]| {
        let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
        let mut command = Command::new(env!("CARGO_BIN_EXE_train-lm"));
        command.arg("logits").arg("--model").arg(folder).args(["--ids", &ids.join(",")]).output().unwrap()
    };
    for case in ["qwen3-tied", "qwen3-untied"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/decoder").join(case);
        let golden = fs::read(folder.join("golden.safetensors")).unwrap();
        let golden = safetensors::SafeTensors::deserialize(&golden).unwrap();
        let ids: Vec<i32> = golden
            .tensor("input_ids")
            .unwrap()
            .data()
            .as_chunks()
            .0
            .iter()
            .map(|b| i32::from_le_bytes(*b))
            .collect();
        let expected = golden.tensor("logits").unwrap();
        let (shape, expected) = (expected.shape(), expected.data().as_chunks().0);
        assert_eq!(shape, [2, 24, 128]);
        for (ids, expected) in ids.chunks(24).zip(expected.chunks(24 * 128)) {
            let output = logits(&folder, ids);
            assert!(output.status.success(), "{case}");
            let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(printed["ids"], serde_json::json!(ids));
            let rows: Vec<Vec<f64>> = serde_json::from_value(printed["logits"].clone()).unwrap();
            assert_eq!(rows.iter().map(Vec::len).collect::<Vec<_>>(), [128; 24]);
            for (at, (got, bytes)) in rows.concat().iter().zip(expected).enumerate() {
                let wanted = f64::from(f32::from_le_bytes(*bytes));
                assert!((got - wanted).abs() < 1e-5, "{case}, element {at}: {got} for {wanted}");
            }
        }
    }
    let dir = place();
    let says = |ids: &[i32]| String::from_utf8(logits(dir.path(), ids).stderr).unwrap();
    assert!(says(&[1]).contains("holds no model.safetensors"), "{}", says(&[1]));
    let tied = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/decoder/qwen3-tied");
    for file in ["config.json", "model.safetensors"] {
        fs::copy(tied.join(file), dir.path().join(file)).unwrap();
    }
    assert!(says(&[128]).contains("id 128, but the vocabulary's last is 127"), "{}", says(&[128]));
}

#[test]
fn readers_that_have_gone_do_not_end_a_run() {
    let dir = place();
    let mut child = program(dir.path(), &new_run("run", "2")).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stderr.take());
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
    assert_eq!(lines(&dir.path().join("run/metrics.jsonl")), 2);
}

#[test]
fn t8_clean_removes_what_a_killed_run_left_and_nothing_of_one_that_goes_on() {
    let dir = place();
    let clean = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_train-lm"));
        let output = command.current_dir(dir.path()).args(["clean", "--nvme-dir", "spill"]).output().unwrap();
        assert!(output.status.success() && output.stdout.is_empty());
        String::from_utf8(output.stderr).unwrap()
    };
    let mut children = ["killed", "goes-on"].map(|out| {
        let child = program(dir.path(), &new_run(out, "1000000")).spawn().unwrap();
        while lines(&dir.path().join(out).join("metrics.jsonl")) < 2 {
            std::thread::sleep(Duration::from_millis(5));
        }
        child
    });
    assert!(clean().ends_with("0 removed, 2 in use, 0 left alone\n"));
    children[0].kill().unwrap();
    children[0].wait().unwrap();
    let said = clean();
    assert!(said.ends_with("1 removed, 1 in use, 0 left alone\n"), "{said}");
    // The other one did not notice.
    let before = lines(&dir.path().join("goes-on/metrics.jsonl"));
    while lines(&dir.path().join("goes-on/metrics.jsonl")) < before + 2 {
        assert!(children[1].try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(5));
    }
    signal(&children[1], Signal::INT);
    children[1].wait().unwrap();
    assert!(clean().ends_with("0 removed, 0 in use, 0 left alone\n"));
    // And the killed one goes on where it was.
    let done = lines(&dir.path().join("killed/metrics.jsonl"));
    let resumed = summary(&mut program(dir.path(), &["--resume", "killed", "--steps", &done.to_string()]), 0);
    assert!(resumed["steps"].as_u64().unwrap() >= done as u64);
}
