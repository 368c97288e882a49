//! `lazy-plan` as a capacity planner uses it: models on machines, defaults, refusals with their remedy, given plans, files.

#![cfg(feature = "cli")]
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// A step that does not fit into HBM whole, but with boundaries elsewhere.
const STEP: &str = "--model qwen3-8b --machine h100 --hbm-gib 40.5 --host-gib 64 --batch 8 --seq 4096";

fn run(words: &str, more: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lazy-plan")).args(words.split_whitespace()).args(more).output().unwrap()
}

fn json(words: &str, more: &[&str]) -> Value {
    let output = run(words, &[more, &["--json"]].concat());
    let value: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {}", text(&output.stderr)));
    let none = ["infeasible", "no_incumbent", "failed"].map(Value::from).contains(&value["status"]);
    assert_eq!(output.status.code(), Some(i32::from(none)), "{words}: {}", text(&output.stderr));
    value
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn given(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/{name}.json"));
    path.to_str().unwrap().to_owned()
}

fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn baseline<'a>(plan: &'a Value, name: &str) -> &'a Value {
    plan["baselines"].as_array().unwrap().iter().find(|b| b["name"] == name).unwrap()
}

/// What the trainer's decoder held on an H200, by the executor's own extents, less its 256 bytes of losses.
#[test]
fn fused_kernels_take_what_was_measured_on_a_gpu() {
    let words =
        "--model qwen3-4b --machine h200 --hbm-gib 139 --host-gib 99 --batch 16 --seq 1024 --kernels fused";
    let (hbm, host) = ("G".repeat(37), format!("{}G", "C".repeat(36)));
    let (all, none) = ("K".repeat(36), "-".repeat(36));
    for (letters, keep, streamed, held) in [
        (&hbm, &all, &[][..], 58_729_232_640u64),
        (&hbm, &none, &[], 21_500_000_512),
        (&host, &none, &[], 18_647_873_792),
        (&hbm, &none, &["--stream-weights"], 14_636_705_024),
    ] {
        let plan = ["--evaluate", letters, "--keep", keep];
        let judged = json(words, &[&plan[..], streamed].concat());
        assert_eq!(judged["peaks"]["hbm"], held - 256, "{letters} {keep} {streamed:?}");
    }
    let refused = text(&run("--model mixtral-8x7b --machine h200 --hbm-gib 139 --kernels fused", &[]).stderr);
    assert!(refused.contains("layer 0 is none that the decoder of fused kernels has"), "{refused}");
}

#[test]
fn a_model_alone_is_sized() {
    let sizes = json("--model deepseek-v3", &[]);
    assert_eq!((&sizes["status"], &sizes["parameters"]), (&"sized".into(), &671_026_404_352u64.into()));
    assert_eq!(sizes["layer_kinds"]["latent_attention"], 3);
    assert_eq!(sizes["layer_kinds"]["latent_attention_moe"], 58);
    let sizes = json("--model qwen3-8b --batch 16 --seq 2048 --dtype-bytes 4", &[]);
    assert_eq!(sizes["boundary_bytes"], 16 * 2048 * 4096 * 4);
    assert!(sizes["internals_bytes"]["full_attention"].as_u64().unwrap() > 0);
    assert_eq!(sizes["flops_per_token"], 6.0 * 8_190_735_360.0);
    assert!(text(&run("--model qwen3-8b", &[]).stdout).contains("8.191e9 parameters"));
}

#[test]
fn models_and_machines_have_names_and_unknown_ones_list_them() {
    let message = text(&run("--model qwen9000 --machine h200", &[]).stderr);
    assert!(message.contains("qwen9000") && message.contains("qwen3.6-27b-text"), "{message}");
    let message = text(&run("--model qwen3-8b --machine laptop", &[]).stderr);
    assert!(message.contains("laptop") && message.contains("h200"), "{message}");
    // A folder with a config.json is a model, and so is a file.
    let folder = folder("named");
    let config = include_str!("../src/cli/models/qwen3-4b.json");
    std::fs::write(folder.join("config.json"), config).unwrap();
    for path in [folder.clone(), folder.join("config.json")] {
        let sizes = json(&format!("--model {}", path.display()), &[]);
        assert_eq!((&sizes["parameters"], &sizes["model"]), (&4_022_468_096u64.into(), &"named".into()));
    }
}

#[test]
fn a_step_is_predicted_with_its_throughput_and_beaten_rivals() {
    let plan = json(STEP, &["--next-change"]);
    assert_eq!(plan["status"], "optimal");
    assert_eq!((&plan["objective"], &plan["tie_break"]), (&"physical".into(), &"lexicographic".into()));
    let step = plan["predicted_step_s"].as_f64().unwrap();
    let tokens = 8.0 * 4096.0;
    assert!((plan["tokens_per_s"].as_f64().unwrap() - tokens / step).abs() < 1e-6 * tokens);
    // Model FLOPs utilisation: 6 N operations a token, of 989 TFLOP/s.
    let mfu = 6.0 * 8_190_735_360.0 * tokens / step / 989e12;
    assert!((plan["mfu"].as_f64().unwrap() - mfu).abs() < 1e-9);
    assert!(plan["peaks"]["hbm"].as_u64() <= plan["budgets"]["hbm"].as_u64());
    // Neither the step without checkpoints nor that with all of them fits; every fourth does, and costs more.
    assert_eq!(baseline(&plan, "do-nothing")["fits"], false);
    assert!(baseline(&plan, "checkpoint-every-layer")["why_not"].as_str().unwrap().contains("hbm"));
    let fourth = baseline(&plan, "checkpoint-every-4-layers")["predicted_step_s"].as_f64().unwrap();
    assert!(fourth > step);
    let changes = plan["next_change"].as_array().unwrap();
    let of = |kind: &str| changes.iter().filter(|c| c["kind"] == kind).count();
    assert_eq!((of("memory"), of("link"), of("device")), (3, 4, 1));
    // No step is shorter than half of one whose arithmetic hides all transfers.
    let device = changes.iter().find(|c| c["kind"] == "device").unwrap()["saves_ms"].as_f64().unwrap();
    assert!(device > 0.0 && device <= step * 1e3, "{device}");
    let shown = text(&run(STEP, &[]).stdout);
    for part in ["predicted step", "tokens a second", "MFU", "limited by:", "next change:", "G hbm"] {
        assert!(shown.contains(part), "{part} is not in:\n{shown}");
    }
}

/// Of eight ranks each has an eighth of host RAM and drives, and all trained tokens count.
#[test]
fn ranks_share_a_host() {
    let words = "--model qwen3-4b --machine h200 --hbm-gib 30 --host-gib 64 --nvme-gib 80 --batch 8 --seq 2048 --time-limit-s 60";
    let plan = json(words, &["--ranks", "8"]);
    let ranks = &plan["ranks"];
    assert_eq!(ranks["count"], 8);
    assert_eq!(ranks["shared"]["host_bytes"], 64u64 << 30);
    assert_eq!(ranks["each"]["host_bytes"], 8u64 << 30);
    assert_eq!(ranks["each"]["nvme_bytes"], 10u64 << 30);
    let rate = |whose: &str| ranks[whose]["nvme_read_bytes_per_s"].as_f64().unwrap();
    assert!((rate("shared") - 8.0 * rate("each")).abs() < 1.0);
    let (step, bound) = (ranks["objective_step_s"].as_f64().unwrap(), ranks["bound_s"].as_f64().unwrap());
    assert!(bound <= step && ((step - bound) / step - ranks["gap"].as_f64().unwrap()).abs() < 1e-9);
    let tokens = 8.0 * 8.0 * 2048.0 / plan["predicted_step_s"].as_f64().unwrap();
    assert!((plan["tokens_per_s"].as_f64().unwrap() - tokens).abs() < 1e-6 * tokens);
    assert!(text(&run(words, &["--ranks", "8"]).stdout).contains("64.000 GiB shared, 8.000 GiB a rank"));
    for (flags, named) in [
        (vec!["--ranks", "0"], "--ranks 0"),
        (vec!["--ranks", "8", "--evaluate", "GG"], "--evaluate"),
        (vec!["--ranks", "8", "--layer-recompute-ms", "20", "--hbm-activation-gib", "3"], "--ranks"),
    ] {
        let refused = run("--model qwen3-4b --machine h200 --batch 8 --seq 2048", &flags);
        assert!(!refused.status.success() && text(&refused.stderr).contains(named), "{flags:?}");
    }
    let chain = given("given/doc_cpu14_free");
    let refused = text(&run(&format!("--chain {chain}"), &["--ranks", "8"]).stderr);
    assert!(refused.contains("--ranks"), "{refused}");
}

#[test]
fn experts_that_no_token_meets_are_no_use_of_the_machine() {
    let words = "--model qwen3-30b-a3b --machine h200 --batch 2 --seq 1024";
    let plan = json(words, &[]);
    assert_eq!(plan["mfu"], Value::Null);
    let exact = plan["mfu_exact"].as_f64().unwrap();
    assert!(exact > 0.0 && exact < 1.0, "{exact}");
    let shown = text(&run(words, &[]).stdout);
    assert!(shown.contains("6N counts every expert"), "{shown}");
}

#[test]
fn a_plan_that_beats_nothing_says_so() {
    let plan = json("--model qwen3-4b --machine h200 --batch 1 --seq 512", &[]);
    assert_eq!(plan["status"], "optimal");
    let fits = baseline(&plan, "do-nothing");
    assert_eq!(fits["fits"], true);
    let (ours, theirs) = (&plan["predicted_step_s"], &fits["predicted_step_s"]);
    assert_eq!(plan["beats_baselines"], ours.as_f64() < theirs.as_f64());
    assert_eq!(plan["beats_baselines"], false);
    let verdict = plan["verdict"].as_str().unwrap();
    assert!(verdict.contains("do-nothing"), "{verdict}");
}

/// Filling HBM with the last layers' internals is what a careful user does; a plan has to be held against that too.
#[test]
fn the_greedy_rival_keeps_internals_where_there_is_room() {
    let plan = json("--model qwen3-8b --machine h200 --batch 16 --seq 2048", &[]);
    let (greedy, checkpoint) = (baseline(&plan, "greedy"), baseline(&plan, "checkpoint-every-layer"));
    let keep = greedy["keep"].as_str().unwrap();
    assert!(keep.ends_with('K') && keep.starts_with('-'), "{keep}");
    assert!(greedy["predicted_step_s"].as_f64() < checkpoint["predicted_step_s"].as_f64());
}

#[test]
fn the_defaults_follow_where_the_problem_comes_from() {
    let how = |plan: &Value| {
        (plan["objective"].as_str().unwrap().to_owned(), plan["tie_break"].as_str().unwrap().to_owned())
    };
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    let chain = format!("--chain {}", given("given/tiny5_hetero"));
    assert_eq!(how(&json(&chain, &[])), pair("reference", "weighted"));
    assert_eq!(how(&json(&chain, &["--tie-break", "lexicographic"])), pair("reference", "lexicographic"));
    let model = "--model qwen3-4b --machine h200 --batch 1 --seq 512";
    assert_eq!(how(&json(model, &[])), pair("physical", "lexicographic"));
    assert_eq!(how(&json(model, &["--tie-break", "weighted"])), pair("physical", "weighted"));
    let reference = "--model qwen3-4b --hbm-activation-gib 1 --layer-recompute-ms 8";
    assert_eq!(how(&json(reference, &[])), pair("reference", "weighted"));
    // Rates alone change the machine.
    let plan = json(model, &["--h2d-gbps", "20"]);
    assert_eq!(how(&plan), pair("physical", "lexicographic"));
    assert_eq!(plan["links"]["h2d"]["bytes_per_s"], 20e9);
    // The machine's rates are the reference objective's too, unless flags say otherwise.
    let plan = json(reference, &["--machine", "h200", "--d2h-gbps", "9"]);
    assert_eq!(
        (&plan["links"]["h2d"]["bytes_per_s"], &plan["links"]["d2h"]["bytes_per_s"]),
        (&51e9.into(), &9e9.into())
    );
}

/// Field failure S6: machine output is one JSON value and nothing else, also with two solves side by side in one folder.
#[test]
fn s6_standard_output_is_only_json_and_parallel_solves_agree() {
    let chain = given("given/doc_cpu14_free");
    let start = || {
        Command::new(env!("CARGO_BIN_EXE_lazy-plan"))
            .args(["--chain", &chain, "--json", "--method", "mip"])
            .current_dir(env!("CARGO_TARGET_TMPDIR"))
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap()
    };
    let plans: Vec<Value> = [start(), start()]
        .into_iter()
        .map(|child| serde_json::from_slice(&child.wait_with_output().unwrap().stdout).unwrap())
        .collect();
    assert_eq!(plans[0]["placement"], plans[1]["placement"]);
    assert!((plans[0]["objective_ms"].as_f64().unwrap() - 182.00352).abs() < 2e-6);
}

/// Field failure S7: what binds is named, with the smallest value that works; and that value does work.
#[test]
fn s7_infeasible_chains_name_what_binds_and_the_least_that_works() {
    // Even with blocks of four layers, 17 boundaries of 720 MiB have to be somewhere.
    let chain = format!("--chain {} --mandatory off", given("given/doc_cpu14_free"));
    let short = ["--hbm-activation-gib", "8", "--host-activation-gib", "1", "--nvme-activation-gib", "0"];
    let plan = json(&chain, &short);
    assert_eq!(plan["status"], "infeasible");
    let remedies = plan["remedies"].as_array().unwrap();
    let hbm = remedies.iter().find(|r| r["tier"] == "hbm").unwrap();
    // One boundary fits host RAM, so sixteen must fit HBM.
    assert_eq!(hbm["smallest_bytes"], 16 * 754_974_720u64);
    assert!(remedies.iter().any(|r| r["tier"] == "host") && remedies.iter().any(|r| r["tier"] == "nvme"));
    let enough =
        ["--hbm-activation-gib", "11.25", "--host-activation-gib", "1", "--nvme-activation-gib", "0"];
    assert_eq!(json(&chain, &enough)["status"], "optimal");
    let message = text(&run(&chain, &short).stderr);
    assert!(
        message
            .contains("raise the hbm budget from 8.000 GiB: --hbm-activation-gib 11.25 (12079595520 bytes)"),
        "{message}"
    );
    // A block of no layers is refused, with the key.
    let message = text(&run(&chain, &["--max-segment", "0"]).stderr);
    assert!(message.contains("max_segment_layers") && message.contains("at least 1"), "{message}");
    // One layer is a chain like any other.
    assert_eq!(json(&format!("--chain {}", given("given/one_layer")), &[])["status"], "optimal");
    // A locked HBM set larger than the budget.
    let locked = format!("--chain {} --hbm-activation-gib 20", given("given/doc_cpu15_locked"));
    let message = text(&run(&locked, &[]).stderr);
    assert!(message.contains("hbm budget") && message.contains("remove the locks"), "{message}");
}

#[test]
fn s7_a_step_without_a_plan_names_the_least_cap_that_gives_one() {
    // A limit that no machine needs: without one, the search for the least cap ends early on a slow machine.
    let plan = json(STEP, &["--sweep", "hbm-gib=34,64", "--time-limit-s", "900"]);
    let [short, roomy] = plan.as_array().unwrap().as_slice() else { unreachable!() };
    assert_eq!((&short["status"], &roomy["status"]), (&"infeasible".into(), &"optimal".into()));
    let message = short["message"].as_str().unwrap();
    assert!(!message.contains("raise the hbm budget"), "{message}");
    let remedy = short["remedies"][0]["text"].as_str().unwrap();
    assert!(remedy.starts_with("raise the hbm budget from 34.000 GiB: --hbm-gib 3"), "{remedy}");
    let least = short["remedies"][0]["smallest_bytes"].as_u64().unwrap();
    let gib = |bytes: u64| format!("hbm-mib={}", bytes as f64 / f64::from(1u32 << 20));
    // Within a thousandth of a boundary of 256 MiB.
    let step = 256 << 20;
    for (bytes, fits) in [(least, true), (least - step / 500, false)] {
        let plan = json(STEP, &["--sweep", &gib(bytes)]);
        assert_eq!(plan[0]["placement"].is_string(), fits, "{bytes}: {}", plan[0]["status"]);
    }
}

#[test]
fn given_plans_are_judged_on_chains_and_steps() {
    // An optimal plan of the keep model, and one with too much kept.
    let chain = format!("--chain {}", given("keep/tiny5"));
    let judged = json(&chain, &["--evaluate", "NCCGGG", "--keep", "K--KK"]);
    assert_eq!((&judged["objective_ms"], &judged["keep"]), (&23.00106.into(), &"K--KK".into()));
    let judged = json(&chain, &["--evaluate", "NCCGGG", "--keep", "KKKKK"]);
    assert_eq!(judged["status"], "infeasible");
    assert!(judged["message"].as_str().unwrap().contains("hbm_cap_bytes"), "{judged}");
    for (plan, keep, wrong) in
        [("NCCGG", "K--KK", "5 boundaries"), ("NCCGGG", "K--K", "4 layers"), ("NCXGGG", "K--KK", "NCXGGG")]
    {
        let output = run(&chain, &["--evaluate", plan, "--keep", keep, "--json"]);
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(said.contains(wrong), "{plan} {keep}: {said}");
    }
    let judged = json(STEP, &["--evaluate", "GGG"]);
    assert!(judged["message"].as_str().unwrap().contains("3 boundaries, the problem 37"), "{judged}");
    // What was found for a step is worth what was promised, from the schedule file and from the JSON.
    let folder = folder("evaluate");
    let (schedule, printed) = (folder.join("schedule.json"), folder.join("plan.json"));
    let found = json(STEP, &["--out", schedule.to_str().unwrap()]);
    std::fs::write(&printed, found.to_string()).unwrap();
    let promised = found["predicted_step_s"].as_f64().unwrap();
    for file in [&schedule, &printed] {
        let judged = json(STEP, &["--evaluate", file.to_str().unwrap()]);
        assert_eq!((&judged["status"], &judged["method"]), (&"feasible".into(), &"given".into()));
        let predicted = judged["predicted_step_s"].as_f64().unwrap();
        assert!((predicted / promised - 1.0).abs() < 1e-3, "{predicted} {promised}");
        assert_eq!((&judged["counts"], &judged["keep"]), (&found["counts"], &found["keep"]));
        let again = |plan: &Value| plan["base_recompute_ms"].as_f64().unwrap();
        assert!((again(&judged) - again(&found)).abs() < 1e-6 * again(&found).max(1.0), "{judged}");
    }
    let all_in_hbm = json(STEP, &["--evaluate", &"G".repeat(37)]);
    assert_eq!(all_in_hbm["status"], "infeasible");
}

#[test]
fn pictures_and_chains_are_written_whole() {
    let folder = folder("pictures");
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let (html, trace, chain) = (path("r.html"), path("t.json"), path("c.json"));
    json(STEP, &["--report", &html, "--trace", &trace, "--chain-out", &chain]);
    let page = std::fs::read_to_string(&html).unwrap();
    for part in ["Plan for qwen3-8b", "<svg", "One simulated step", "Beside plans made by hand", "</html>"] {
        assert!(page.contains(part), "{part}");
    }
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(trace).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 100);
    assert_eq!(json(&format!("--chain {chain}"), &[])["layers"], 36);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 3);
    // A chain has no step to trace.
    let output = run(&format!("--chain {chain}"), &["--trace", &path("none.json")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("--machine") && !folder.join("none.json").exists());
}

#[test]
fn conflicting_flags_say_what_to_change() {
    let chain = format!("--chain {}", given("given/tiny3_hand"));
    for (words, named) in [
        (format!("{chain} --objective physical"), "--model"),
        (format!("{chain} --layer-recompute-ms 20"), "--layer-recompute-ms"),
        (format!("{chain} --stream-weights"), "Training"),
        (format!("{chain} --sweep colour=1,2"), "host-activation-gib"),
        (format!("{chain} --sweep host-activation-gib=1,x"), "x"),
        (format!("{chain} --sweep batch=1,2"), "batch"),
        (format!("{chain} --keep KKK"), "--evaluate"),
        (format!("{chain} --lock-edges"), "--reference-schedule"),
        ("--model qwen3-8b --hbm-gib 40".into(), "--machine"),
        ("--model qwen3-8b --machine h200 --max-segment 0".into(), "--max-segment"),
        ("--model qwen3-8b --machine reference".into(), "compute"),
        ("--model qwen3-8b --machine h200 --batch 0".into(), "batch"),
        ("--model qwen3-8b --sweep batch=1,2".into(), "--machine"),
        (
            "--model qwen3-8b --machine h200 --stream-weights --hbm-activation-gib 3".into(),
            "--stream-weights",
        ),
    ] {
        let output = run(&words, &["--json"]);
        assert_ne!(output.status.code(), Some(0), "{words}");
        let message = text(&output.stderr);
        assert!(output.stdout.is_empty() && message.contains(named), "{words}: {message}");
    }
}

/// Streamed weights keep the link busy, which the chain of this step does not foresee.
#[test]
fn no_plan_is_called_optimal_beside_a_faster_one() {
    let words = "--model qwen3-30b-a3b --machine h200 --batch 8 --seq 4096 --stream-weights --stream-gradients --host-gib 2000";
    let plan = json(words, &[]);
    let ours = plan["predicted_step_s"].as_f64().unwrap();
    let all = plan["baselines"].as_array().unwrap();
    let fastest = all.iter().filter_map(|b| b["predicted_step_s"].as_f64()).fold(f64::INFINITY, f64::min);
    assert!(
        plan["status"] == "feasible" || ours <= fastest + 1e-6,
        "{ours} s beside {fastest} s: {}",
        plan["verdict"]
    );
}
