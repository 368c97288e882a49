//! The published reference command, given to `lazy-plan` flag by flag: its printed numbers come out.

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lazy_model::CostChain;
use serde_json::Value;

/// The published command of the 27B run with 14 GiB of host RAM.
const PUBLISHED: &str = "--batch 72 --seq 1024 --dtype-bytes 2 --peak-cap-gib 70 --baseline-peak-gib 60.4 --baseline-interval 4 \
     --max-segment 4 --host-activation-gib 14 --nvme-activation-gib 32 --layer-recompute-ms 20 --linear-layer-factor 0.7 \
     --window-scale 5 --capacity-fraction 1 --nvme-window-scale 5 --nvme-capacity-fraction 1 --h2d-gbps 12 --d2h-gbps 12 \
     --nvme-read-gbps 2.83 --nvme-write-gbps 3.35 --overlap on --mandatory on --nvme-path direct --nvme-tiebreak-ms 0.001 \
     --checkpoint-penalty 1e-5 --optimizer-step-s 119.18 --fast-clip-saving-s 18 --full-8bit-extra-s 123 --max-8bit-fraction 0.02 \
     --time-limit-s 60";

fn run(words: &str, more: &[&str]) -> Output {
    let words = words.split_whitespace();
    Command::new(env!("CARGO_BIN_EXE_lazy-plan")).args(words).args(more).output().unwrap()
}

fn json(words: &str, more: &[&str]) -> Value {
    let output = run(words, &[more, &["--json"]].concat());
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.success(), value["status"] != "infeasible", "{value}");
    value
}

fn published(more: &[&str]) -> Value {
    json(&format!("--model qwen3.6-27b-text {PUBLISHED}"), more)
}

fn close(value: &Value, expected: f64, tolerance: f64) {
    let got = value.as_f64().unwrap();
    assert!((got - expected).abs() < tolerance, "{got} instead of {expected}");
}

fn counts(plan: &Value) -> [u64; 4] {
    ["hbm", "host", "nvme", "recompute"].map(|tier| plan["counts"][tier].as_u64().unwrap())
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn given(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/given/{name}.json"));
    path.to_str().unwrap().to_owned()
}

#[test]
fn the_published_table_comes_out() {
    let gib = f64::from(1u32 << 30);
    let chain_file = folder("published").join("chain.json");
    let plan = published(&["--chain-out", chain_file.to_str().unwrap()]);
    assert_eq!(plan["status"], "optimal");
    close(&plan["objective_ms"], 182.00352, 2e-6);
    assert_eq!(counts(&plan), [30, 19, 3, 13]);
    assert_eq!(plan["boundary_bytes"], 754_974_720);
    assert_eq!(plan["parameters"], 26_895_998_464u64);
    assert_eq!(plan["flops_per_token"], 6.0 * 26_895_998_464.0);
    assert_eq!(plan["budgets"]["hbm"], 23_142_491_750u64);
    // 21.553 GiB, 55.43 GiB of windows and 39.376 GiB of mandatory traffic a direction; 62.9, 225.4 and 266.8 ms a boundary.
    close(&plan["budgets"]["hbm"], 21.553 * gib, 5e-4 * gib);
    for direction in ["d2h", "h2d"] {
        close(&plan["links"][direction]["window_bytes"], 55.43 * gib, 5e-3 * gib);
        close(&plan["links"][direction]["mandatory_bytes"], 39.376 * gib, 5e-4 * gib);
        close(&plan["links"][direction]["boundary_ms"], 62.9, 0.05);
        assert_eq!(plan["exposed_ms"][direction], 0.0);
    }
    close(&plan["links"]["nvme_write"]["boundary_ms"], 225.4, 0.05);
    close(&plan["links"]["nvme_read"]["boundary_ms"], 266.8, 0.05);
    // 119.18 - 18 + 0.02 x 123.
    close(&plan["optimizer_s"], 103.64, 1e-9);
    assert_eq!((&plan["objective"], &plan["tie_break"]), (&"reference".into(), &"weighted".into()));
    // The chain itself is the published instance, number for number; linear layers 14 ms, full ones 20 ms.
    let built = CostChain::from_json(&std::fs::read_to_string(chain_file).unwrap()).unwrap();
    let expected = CostChain::from_json(&std::fs::read_to_string(given("doc_cpu14_free")).unwrap()).unwrap();
    assert_eq!(CostChain { name: None, comment: None, ..expected }, built);
    assert_eq!(&built.layer_recompute_ms[..4], [14.0, 14.0, 14.0, 20.0]);
}

/// Field failure M7: 14 GiB hold 19 boundaries of 0.703125 GiB, 14 decimal GB hold 18. The unit is in the flag's name, and the plain
/// bytes are printed.
#[test]
fn m7_capacities_are_gib_rates_decimal_and_bytes_are_printed() {
    assert_eq!(published(&[])["counts"]["host"], 19);
    let decimal = PUBLISHED.replace("--host-activation-gib 14", "--host-activation-gib 13.0385");
    assert_eq!(json(&format!("--model qwen3.6-27b-text {decimal}"), &[])["counts"]["host"], 18);
    let output = run(&format!("--model qwen3.6-27b-text {PUBLISHED}"), &[]);
    let text = String::from_utf8(output.stdout).unwrap();
    for printed in ["23142491750", "15032385536", "754974720 bytes", "12.00 GB/s", "21.553 GiB"] {
        assert!(text.contains(printed), "{printed} is not in:\n{text}");
    }
}

#[test]
fn the_published_sweep_comes_out_with_and_without_its_tie_break() {
    let sweep = ["--sweep", "host-activation-gib=8,10,12,14,15"];
    let expected = [
        (182.01152, [30, 11, 11, 13]),
        (182.00852, [30, 14, 8, 13]),
        (182.00552, [30, 17, 5, 13]),
        (182.00352, [30, 19, 3, 13]),
        (182.00152, [30, 21, 1, 13]),
    ];
    let rows = published(&sweep);
    let rows = rows.as_array().unwrap();
    assert_eq!(rows.len(), 5);
    for ((row, (objective, boundaries)), gib) in rows.iter().zip(expected).zip([8.0, 10.0, 12.0, 14.0, 15.0])
    {
        close(&row["objective_ms"], objective, 2e-6);
        assert_eq!(counts(row), boundaries);
        assert_eq!(row["sweep"], serde_json::json!({"flag": "host-activation-gib", "value": gib}));
    }
    let untied = PUBLISHED.replace("--nvme-tiebreak-ms 0.001", "--nvme-tiebreak-ms 0");
    for row in json(&format!("--model qwen3.6-27b-text {untied}"), &sweep).as_array().unwrap() {
        close(&row["objective_ms"], 182.00052, 2e-6);
    }
    // The same from a chain file, whose own budget gives way.
    let rows = json(&format!("--chain {}", given("doc_cpu14_free")), &sweep);
    for (row, (objective, _)) in rows.as_array().unwrap().iter().zip(expected) {
        close(&row["objective_ms"], objective, 2e-6);
    }
    let table = run(&format!("--model qwen3.6-27b-text {PUBLISHED}"), &sweep);
    let table = String::from_utf8(table.stdout).unwrap();
    assert!(
        table.contains("182.01152")
            && table.contains("182.00152")
            && table.lines().filter(|line| !line.starts_with("note: ")).count() == 6,
        "{table}"
    );
}

/// The plan the report prints, boundary by boundary, is worth what it says; another host budget forbids it.
#[test]
fn the_printed_plan_is_worth_its_printed_objective() {
    let hbm = [
        0, 18, 19, 20, 23, 25, 26, 30, 31, 32, 34, 35, 37, 40, 41, 44, 45, 48, 49, 50, 51, 52, 56, 57, 58,
        59, 60, 62, 63, 64,
    ];
    let host = [1, 2, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 21, 24, 27, 28, 33, 36];
    let letter = |i: usize| match i {
        i if hbm.contains(&i) => 'G',
        i if host.contains(&i) => 'C',
        3 | 4 | 16 => 'N',
        _ => '-',
    };
    let printed: String = (0..=64).map(letter).collect();
    let judged = published(&["--evaluate", &printed]);
    assert_eq!((judged["status"].as_str(), judged["method"].as_str()), (Some("feasible"), Some("given")));
    assert_eq!(judged["objective_ms"], 182.00352);
    let small = PUBLISHED.replace("--host-activation-gib 14", "--host-activation-gib 13");
    let judged = json(&format!("--model qwen3.6-27b-text {small}"), &["--evaluate", &printed]);
    assert_eq!(judged["status"], "infeasible");
    assert!(
        judged["message"].as_str().unwrap().contains("host holds 13.359 GiB (14344519680 bytes)"),
        "{judged}"
    );
    // Locks from it: the same blocks and the same HBM set, NVMe chosen anew.
    let locked = published(&["--reference-schedule", &printed, "--lock-edges", "--lock-hbm"]);
    close(&locked["objective_ms"], 182.00352, 2e-6);
    assert_eq!(locked["hbm"], serde_json::json!(hbm));
    let saved = |plan: &str| plan.chars().map(|c| c != '-').collect::<Vec<_>>();
    assert_eq!(saved(locked["placement"].as_str().unwrap()), saved(&printed));
}

#[test]
fn locks_come_from_any_form_of_a_plan() {
    let folder = folder("locks");
    let chain = given("doc_cpu15_locked");
    let schedule = folder.join("schedule.json");
    let solved = json(&format!("--chain {chain} --out {}", schedule.display()), &[]);
    close(&solved["objective_ms"], 182.00152, 2e-6);
    let as_json = folder.join("plan.json");
    std::fs::write(&as_json, solved.to_string()).unwrap();
    let locks: Value = serde_json::from_str(&std::fs::read_to_string(&chain).unwrap()).unwrap();
    let minimal = folder.join("locks.json");
    std::fs::write(&minimal, locks["locks"].to_string()).unwrap();
    let free = format!("--chain {}", given("doc_cpu14_free"));
    for file in [&schedule, &as_json, &minimal] {
        let flags = ["--reference-schedule", file.to_str().unwrap(), "--lock-edges", "--lock-hbm"];
        let plan = json(&free, &[&flags[..], &["--host-activation-gib", "15"]].concat());
        close(&plan["objective_ms"], 182.00152, 2e-6);
        assert_eq!(plan["hbm"], locks["locks"]["gpu"]);
    }
    let nonsense = run(&free, &["--reference-schedule", "nowhere.json", "--lock-edges"]);
    assert_eq!(nonsense.status.code(), Some(1));
}

#[test]
fn the_other_parameters_do_what_they_say() {
    // Two staging buffers of a boundary each leave 17 of 19 in host RAM.
    let staged = PUBLISHED.replace("--nvme-path direct", "--nvme-path host-staging");
    let staged = json(&format!("--model qwen3.6-27b-text {staged}"), &[]);
    assert_eq!(counts(&staged), [30, 17, 5, 13]);
    // The exact count of a layer's weights is another one, and total.
    let exact = published(&["--mandatory-count", "exact"]);
    let layers = 26_895_998_464u64 - 2 * 248_320 * 5120 - 5120;
    assert_eq!(exact["links"]["h2d"]["mandatory_bytes"], 2 * layers);
    let off = PUBLISHED.replace("--mandatory on", "--mandatory off");
    let off = json(&format!("--model qwen3.6-27b-text {off}"), &[]);
    assert_eq!(off["links"]["h2d"]["mandatory_bytes"], 0);
    // Without overlap every byte is exposed, so nothing is moved that could be recomputed.
    let alone =
        PUBLISHED.replace("--overlap on", "--overlap off").replace("--mandatory on", "--mandatory off");
    let alone = json(&format!("--model qwen3.6-27b-text {alone}"), &[]);
    assert_eq!((&alone["links"]["h2d"]["window_bytes"], &alone["counts"]["host"]), (&0.into(), &0.into()));
    // A direct budget is another way to say the peak.
    let room = PUBLISHED.replace(
        "--peak-cap-gib 70 --baseline-peak-gib 60.4 --baseline-interval 4",
        "--hbm-activation-gib 21.553125",
    );
    close(&json(&format!("--model qwen3.6-27b-text {room}"), &[])["objective_ms"], 182.00352, 2e-6);
}

#[test]
fn a_reference_command_without_its_measurements_says_which_are_missing() {
    for (flags, named) in [
        ("--host-activation-gib 14 --layer-recompute-ms 20", "--hbm-activation-gib"),
        ("--hbm-activation-gib 21", "--layer-recompute-ms"),
        ("--hbm-activation-gib 21 --layer-recompute-ms 20 --hbm-gib 70", "--host-activation-gib"),
        ("--hbm-activation-gib 21 --layer-recompute-ms -2", "--layer-recompute-ms"),
        ("--hbm-activation-gib 21 --layer-recompute-ms 20 --objective physical", "--objective physical"),
    ] {
        let output = run(&format!("--model qwen3-8b {flags}"), &["--json"]);
        assert_ne!(output.status.code(), Some(0), "{flags}");
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(output.stdout.is_empty() && message.contains(named), "{flags}: {message}");
    }
}
