//! What the `lazy-plan` program leaves to the shell that started it: output, exit status, and nothing else. The field's failure S6.

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::{Random, bare_chain};
use lazy_model::Bytes;
use serde_json::Value;

fn start(folder: &Path, chain: &Path, args: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_lazy-plan"))
        .current_dir(folder)
        .args(["--json", "--chain", chain.to_str().unwrap()])
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn empty_folder(name: &str) -> std::path::PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

/// S6: several solves at once in one folder: each prints its JSON and not a word more, and none leaves a file.
#[test]
fn s6_standard_output_is_json_alone_however_many_solve_at_once() {
    let folder = empty_folder("s6");
    let given = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/given");
    let solves = [("tiny3_hand", 10.00003), ("tiny6_exposed", 198.50004), ("tiny5_hetero", 20.00105)];
    for method in ["auto", "mip"] {
        let started = solves.map(|(name, objective)| {
            let chain = given.join(format!("{name}.json"));
            (start(&folder, &chain, &["--method", method]), objective)
        });
        for (child, objective) in started {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success());
            // A single value, or this is an error.
            let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(plan["status"], "optimal");
            assert!((plan["objective_ms"].as_f64().unwrap() - objective).abs() < 2e-6);
            assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
        }
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
}

/// CBC cannot be stopped: past the limit it may still be running when the process ends.
#[test]
fn a_search_left_behind_does_not_spoil_the_exit() {
    let folder = empty_folder("left-behind");
    let mut r = Random(5);
    let sizes: Vec<Bytes> = (0..201).map(|_| Bytes((1 << 29) + r.below(1 << 28))).collect();
    let total: u64 = sizes.iter().map(|size| size.get()).sum();
    let mut chain = bare_chain(sizes);
    chain.layer_window_ms = (0..200).map(|_| (100 + r.below(100)) as f64 / 10.0).collect();
    chain.layer_recompute_ms = chain.layer_window_ms.iter().map(|ms| ms + 0.37).collect();
    (chain.gpu_budget_bytes, chain.cpu_budget_bytes) = (Bytes(total / 7), Bytes(total / 12));
    chain.nvme_budget_bytes = Bytes(total);
    (chain.max_segment_layers, chain.checkpoint_penalty, chain.nvme_tiebreak) = (4, 1e-5, 1e-3);
    let file = folder.join("chain.json");
    std::fs::write(&file, chain.to_json()).unwrap();
    for limit in ["0.1", "0.2", "0.4"] {
        let child = start(&folder, &file, &["--method", "mip", "--time-limit-s", limit]);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
        // Plans made by hand fit, so there is one.
        assert_eq!(plan["status"], "feasible");
        assert!(plan["placement"].is_string());
    }
}
