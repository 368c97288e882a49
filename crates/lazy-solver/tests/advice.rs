//! What `lazy-plan` says beside a plan: what would help, what was assumed, and why there is none.

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lazy_model::HardwareProfile;
use serde_json::Value;

fn run(words: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lazy-plan")).args(words.split_whitespace()).output().unwrap()
}

fn json(words: &str) -> Value {
    let output = run(&format!("{words} --json"));
    assert!(output.status.success(), "{words}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What a refused command says.
fn refusal(words: &str) -> String {
    let output = run(words);
    assert!(!output.status.success() && output.stdout.is_empty(), "{words}");
    text(&output.stderr)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn write(name: &str, text: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("advice");
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join(name);
    std::fs::write(&file, text).unwrap();
    file
}

fn notes(plan: &Value) -> String {
    plan["notes"].to_string()
}

/// The saving of each faster link is the difference to a plan made with that rate.
#[test]
fn faster_links_save_what_they_are_said_to() {
    let chain = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/given/tiny6_exposed.json");
    let words = format!("--chain {}", chain.display());
    let plan = json(&format!("{words} --next-change"));
    let links: Vec<&Value> =
        plan["next_change"].as_array().unwrap().iter().filter(|c| c["kind"] == "link").collect();
    assert_eq!(links.len(), 4);
    for change in &links {
        let link = change["link"].as_str().unwrap();
        let rate = plan["links"][link]["bytes_per_s"].as_f64().unwrap() * 2.0 / 1e9;
        let faster = json(&format!("{words} --{}-gbps {rate}", link.replace('_', "-")));
        let saved = plan["step_ms"].as_f64().unwrap() - faster["step_ms"].as_f64().unwrap();
        assert!((change["saves_ms"].as_f64().unwrap() - saved).abs() < 1e-3, "{change}: {saved}");
    }
    let best =
        links.iter().max_by(|a, b| a["saves_ms"].as_f64().partial_cmp(&b["saves_ms"].as_f64()).unwrap());
    let best = best.unwrap();
    assert!(best["saves_ms"].as_f64().unwrap() > 1.0, "{best}");
    // One line a category.
    let shown = text(&run(&words).stdout);
    assert!(shown.contains(best["text"].as_str().unwrap()), "{shown}");
    assert_eq!(shown.matches("twice the").count(), 1, "{shown}");
}

#[test]
fn rates_beside_a_machine_say_which_objective_they_select() {
    let model = "--model qwen3-4b --machine h200 --batch 1 --seq 512";
    let refused = refusal(&format!("{model} --h2d-gbps 20"));
    assert!(refused.contains("--objective physical"), "{refused}");
    // Both directions at once slow the link down as they did: 44 of 51 GB/s.
    let plan = json(&format!("{model} --h2d-gbps 20 --objective physical"));
    let link = &plan["links"]["h2d"];
    assert_eq!(link["bytes_per_s"], 20e9);
    assert!((link["both_bytes_per_s"].as_f64().unwrap() - 20e9 * 44.0 / 51.0).abs() < 1.0, "{link}");
    assert_eq!(plan["links"]["d2h"]["both_bytes_per_s"], 44e9);
    let shown = text(&run(model).stdout);
    assert!(shown.contains("both ways") && shown.contains("51.00 GB/s   44.00 GB/s"), "{shown}");
    let reference = format!("{model} --hbm-activation-gib 1 --layer-recompute-ms 8");
    let plan = json(&reference);
    assert!(plan["objective"] == "reference" && notes(&plan).contains("--objective physical"), "{plan}");
    assert!(!notes(&json(&format!("{reference} --objective reference"))).contains("--objective physical"));
}

#[test]
fn a_row_of_a_sweep_without_a_plan_has_a_status_and_a_reason() {
    let words = "--model qwen3-4b --machine h200 --batch 1 --seq 512 --sweep hbm-gib=1,100 --time-limit-s 2";
    let rows = json(words);
    assert_eq!((&rows[0]["status"], &rows[1]["status"]), (&"infeasible".into(), &"optimal".into()));
    assert!(rows[0]["message"].as_str().unwrap().contains("hbm") && rows[0]["counts"].is_null());
    assert!(rows[1]["message"].is_null());
    let shown = text(&run(words).stdout);
    let cells: Vec<&str> = shown.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(cells, ["1", "infeasible", "-", "-", "-", "-", "-", "-", "-", "-"]);
    assert!(shown.contains("\nhbm-gib=1: the hbm budget is 1.000 GiB"), "{shown}");
}

#[test]
fn a_machine_without_sizes_says_which_are_missing() {
    let mut profile: Value =
        serde_json::from_str(&HardwareProfile::preset("h200").unwrap().to_json()).unwrap();
    profile["tiers"] = serde_json::json!({});
    let file = write("no-sizes.json", &profile.to_string());
    let words = format!("--model qwen3-4b --machine {} --batch 1 --seq 512", file.display());
    let refused = refusal(&words);
    assert!(refused.contains("--hbm-gib") && refused.contains("tiers.hbm_bytes"), "{refused}");
    let plan = json(&format!("{words} --hbm-gib 100 --nvme-gib 0"));
    assert!(notes(&plan).contains("--host-gib") && !notes(&plan).contains("--nvme-gib"), "{plan}");
}

#[test]
fn a_sequence_the_model_was_not_made_for_is_noted() {
    let long = notes(&json("--model qwen3-4b --seq 40961"));
    assert!(long.contains("40961") && long.contains("max_position_embeddings of 40960"), "{long}");
    assert!(!notes(&json("--model qwen3-4b --seq 40960")).contains("max_position_embeddings"));
}

#[test]
fn absurd_values_get_short_answers() {
    let chain = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/given/tiny3_hand.json");
    for (words, said) in [
        (format!("--chain {} --time-limit-s 1e300", chain.display()), "--time-limit-s 1e300: give seconds"),
        (format!("--chain {} --time-limit-s NaN", chain.display()), "--time-limit-s NaN: give seconds"),
        ("--model qwen3-4b --machine h200 --hbm-gib 1e300".into(), "--hbm-gib 1e300: give a size"),
        (format!("--chain {} --sweep h2d-gbps=1e300", chain.display()), "--sweep h2d-gbps=1e300: "),
        (
            format!("--model {}", write("empty.json", "").display()),
            "empty.json: model config is not valid JSON",
        ),
    ] {
        let refused = refusal(&words);
        assert!(refused.contains(said) && refused.len() < 300, "{words}: {refused}");
    }
    let rows = text(&run(&format!("--chain {} --sweep h2d-gbps=1e-300,0", chain.display())).stdout);
    assert!(rows.lines().all(|line| line.len() < 200), "{rows}");
}

/// With room in HBM for one layer and little else, a plan made by hand still keeps the boundary there that the loss reads.
#[test]
fn greedy_keeps_the_last_boundary_in_hbm() {
    let words = "--model qwen3-8b --machine h100 --hbm-gib 37.47 --batch 8 --seq 4096 --evaluate";
    let plan = json(&format!("{words} {}", "G".repeat(37)));
    let greedy = plan["baselines"].as_array().unwrap().iter().find(|b| b["name"] == "greedy").unwrap();
    assert!(greedy["placement"].as_str().unwrap().ends_with('G'), "{greedy}");
}
