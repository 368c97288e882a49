//! What `lazy-plan` says beside a plan: what would help, what was assumed, and why there is none.

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lazy_model::HardwareProfile;
use serde_json::Value;

fn run(words: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lazy-plan")).args(words.split_whitespace()).output().unwrap()
}

fn json(words: &str) -> Value {
    let output = run(&format!("{words} --json"));
    let value: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&output.stderr)));
    assert_eq!(output.status.success(), value["status"] != "infeasible", "{words}");
    value
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

/// A step as short as its bound still waits where HBM has no room to copy ahead: there each boundary that comes back is waited for in full,
/// and twice the rate of the link saves half of that.
#[test]
fn a_faster_link_saves_half_of_what_is_waited_for_without_room_to_copy_ahead() {
    let words = "--model qwen3-8b --layers 4 --machine h100 --host-gib 64 --batch 82 --seq 4096";
    let plan = json(&format!("{words} --next-change"));
    // Three boundaries of 82 x 4096 tokens, 4096 elements of 2 bytes each, at 50 GB/s.
    let waited_ms = 3.0 * (82_u64 * 4096 * 4096 * 2) as f64 / 50e9 * 1e3;
    let h2d = plan["next_change"].as_array().unwrap().iter().find(|c| c["link"] == "h2d").unwrap();
    assert!((h2d["saves_ms"].as_f64().unwrap() - waited_ms / 2.0).abs() < 0.1, "{h2d}: {waited_ms}");
}

#[test]
fn rates_beside_a_machine_say_which_objective_they_select() {
    let model = "--model qwen3-4b --machine h200 --batch 1 --seq 512";
    // Both directions at once slow the link down as they did: 44 of 51 GB/s.
    let plan = json(&format!("{model} --h2d-gbps 20"));
    assert_eq!(plan["objective"], "physical");
    assert!(notes(&plan).contains("--h2d-gbps 20 in the place of the rates of h200"), "{plan}");
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
    let row = |nth: usize| -> Vec<String> {
        let mut rows = shown.lines().filter(|line| !line.starts_with("note: "));
        rows.nth(nth).unwrap().split_whitespace().map(str::to_owned).collect()
    };
    assert_eq!(row(1)[..2], ["1", "infeasible"]);
    assert!(row(1)[2..].iter().all(|cell| cell == "-"), "{shown}");
    // Steps, tokens a second, how far from the best, what HBM holds at most.
    let tokens = format!("{:.1}", rows[1]["tokens_per_s"].as_f64().unwrap());
    let hbm = format!("{:.3}", rows[1]["peaks"]["hbm"].as_f64().unwrap() / f64::from(1u32 << 30));
    assert_eq!(row(2)[10..15], [&tokens, "0.000", "%", &hbm, "GiB"]);
    assert!(shown.contains("\nhbm-gib=1: the hbm budget is 1.000 GiB"), "{shown}");
}

/// Planned from the least up, shown in the order given, and no row is worse than one with less.
#[test]
fn rows_of_a_sweep_come_as_given_and_more_is_never_worse() {
    let words = "--model qwen3-4b --machine rtx4090 --batch 4 --seq 512 --host-gib 2 --nvme-gib 0 --sweep hbm-gib=17.5,16.9";
    let rows = json(words);
    let of = |row: &Value| [&row["sweep"]["value"], &row["predicted_step_s"]].map(|v| v.as_f64().unwrap());
    let [[more, faster], [less, slower]] = [0, 1].map(|row| of(&rows[row]));
    assert_eq!((more, less), (17.5, 16.9));
    assert!(faster < slower, "{faster} s with more HBM, {slower} with less");
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

/// The h200 preset with a part of its JSON replaced.
fn profile(name: &str, change: impl FnOnce(&mut Value)) -> String {
    let mut profile: Value =
        serde_json::from_str(&HardwareProfile::preset("h200").unwrap().to_json()).unwrap();
    change(&mut profile);
    write(name, &profile.to_string()).display().to_string()
}

fn assumed(value: impl Into<Value>) -> Value {
    serde_json::json!({"value": value.into(), "source": "assumed", "by": "this test"})
}

#[test]
fn times_of_a_profile_say_what_they_are_of_and_when_they_are_not_used() {
    let machine = |layers: usize| {
        profile(&format!("times-{layers}.json"), |profile| {
            let each = || assumed(vec![10.0; layers]);
            profile["times"] = serde_json::json!({
                "workload": "me", "forward_ms": each(), "saving_forward_ms": each(), "backward_ms": each(),
                "prologue_ms": assumed(1.0), "prologue_backward_ms": assumed(1.0), "epilogue_ms": assumed(1.0),
            });
        })
    };
    let model = "--model qwen3-4b --seq 512 --time-limit-s 20";
    let used = json(&format!("{model} --machine {}", machine(36)));
    assert!(notes(&used).contains("of the workload `me`, whatever the batch and sequence"), "{used}");
    let unused = json(&format!("{model} --machine {}", machine(26)));
    assert!(notes(&unused).contains("they are of 26 layers, the model has 36"), "{unused}");
    let plain = json(&format!("{model} --machine h200"));
    assert_eq!(plain["predicted_step_s"], unused["predicted_step_s"]);
    assert!(!notes(&plain).contains("times"), "{plain}");
    // In a sweep too, where the same times come out for every batch: said once, above the rows.
    let shown = text(&run(&format!("{model} --machine {} --sweep batch=1..3", machine(36))).stdout);
    assert_eq!(shown.matches("whatever the batch").count(), 1, "{shown}");
    let values: Vec<&str> = shown.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(values[values.len() - 3..], ["1", "2", "3"], "{shown}");
    assert!(refusal(&format!("{model} --machine h200 --sweep batch=3..1")).contains("no range"));
}

/// An optimizer that takes most of the step is what limits it, and half of it is what twice its rate saves.
#[test]
fn an_optimizer_that_takes_most_of_the_step_is_named() {
    let machine = profile("optimizer.json", |profile| profile["optimizer_elements_per_s"] = assumed(1e9));
    let plan = json(&format!("--model qwen3-4b --batch 1 --seq 512 --machine {machine} --next-change"));
    let limit = plan["limited_by"][0].as_str().unwrap();
    assert!(limit.starts_with("the optimizer (4.022 s of 4."), "{limit}");
    let first = &plan["next_change"][0];
    assert_eq!(first["kind"], "optimizer");
    assert!((first["saves_ms"].as_f64().unwrap() - 4022.468096 / 2.0).abs() < 1e-6, "{first}");
    assert!(first["text"].as_str().unwrap().contains("--micro-batches"), "{first}");
}

#[test]
fn budgets_that_a_machine_does_not_have_and_tiers_out_of_reach_are_noted() {
    let model = "--model qwen3-4b --machine h100 --batch 1 --seq 512";
    let plan = json(&format!("{model} --hbm-gib 200 --host-gib 0"));
    assert!(notes(&plan).contains("h100 has 79.000 GiB of hbm, and the budget is 200.000 GiB"), "{plan}");
    assert!(notes(&plan).contains("nothing goes to NVMe") && notes(&plan).contains("--host-gib"), "{plan}");
    let plain = notes(&json(model));
    assert!(!plain.contains("the budget is") && !plain.contains("nothing goes to NVMe"), "{plain}");
}

/// More of either tier makes room for what is short of it: then the cheaper one is named first.
#[test]
fn tiers_that_save_as_much_are_named_together_the_cheaper_first() {
    let chain = serde_json::json!({
        "layers": 2, "layer_window_ms": [1000, 1000], "layer_recompute_ms": [10, 10],
        "boundary_bytes": [1024, 1024, 1024], "param_h2d_bytes": [0, 0], "grad_d2h_bytes": [0, 0],
        "gpu_budget_bytes": 1024, "cpu_budget_bytes": 1024, "nvme_budget_bytes": 0,
        "d2h_bytes_per_s": 1e9, "h2d_bytes_per_s": 1e9, "nvme_write_bytes_per_s": 0, "nvme_read_bytes_per_s": 0,
        "pcie_window_scale": 1, "nvme_window_scale": 1, "pcie_capacity_fraction": 1, "nvme_capacity_fraction": 1,
        "max_segment_layers": 2, "checkpoint_penalty": 0, "nvme_tiebreak": 0,
    });
    let words = format!("--chain {}", write("tied.json", &chain.to_string()).display());
    let shown = text(&run(&words).stdout);
    let said = "4.0 KiB more host RAM (--host-activation-gib 0.00000477) or HBM (--hbm-activation-gib 0.00000477) saves 10.00 ms";
    assert!(shown.contains(said), "{shown}");
    let first = &json(&format!("{words} --next-change"))["next_change"][0];
    assert_eq!(first["tier"], "host");
}

#[test]
fn a_chain_that_lacks_everything_is_told_what() {
    let bare = refusal(&format!("--chain {}", write("bare.json", "{\"layers\": 1}").display()));
    assert!(bare.contains("`layer_window_ms`") && bare.contains("`nvme_tiebreak`"), "{bare}");
}

/// A step that is short of HBM and of host RAM is told of both, with flags that work as they stand.
#[test]
fn two_budgets_that_only_help_together_are_named_together() {
    let model = write(
        "four-layers.json",
        r#"{"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 32000, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": true, "hidden_act": "silu", "max_position_embeddings": 4096}"#,
    );
    let words = format!(
        "--model {} --machine rtx4090 --batch 4 --seq 1024 --stream-weights --stream-gradients --nvme-gib 0",
        model.display()
    );
    let short = json(&format!("{words} --hbm-gib 0.5 --host-gib 0.1"));
    let [remedy] = short["remedies"].as_array().unwrap().as_slice() else { panic!("{short}") };
    let budgets = remedy["budgets"].as_array().unwrap();
    let part = |i: usize, key: &str| budgets[i][key].clone();
    assert_eq!((part(0, "tier"), part(1, "tier"), budgets.len()), ("hbm".into(), "host".into(), 2));
    assert!(part(0, "smallest_bytes").as_u64() > part(0, "budget_bytes").as_u64());
    let said = remedy["text"].as_str().unwrap();
    assert!(
        said.starts_with("raise the hbm budget from 512.00 MiB and the host budget from 102.40 MiB"),
        "{said}"
    );
    assert!(refusal(&format!("{words} --hbm-gib 0.5 --host-gib 0.1")).contains(said));
    // The flags, to be typed as they stand.
    let flags = said.split_once(": ").unwrap().1.split_once(" (").unwrap().0;
    assert!(flags.starts_with("--hbm-gib ") && flags.contains(" --host-gib "), "{flags}");
    assert_eq!(json(&format!("{words} {flags}"))["placement"].as_str().map(str::len), Some(5));
}
