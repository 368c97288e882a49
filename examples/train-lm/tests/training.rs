//! Whole runs of a small model: the same bits whatever the plan, the run folder, resuming, and refusals.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "common/machine.rs"]
mod machine;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use lazy_solver::budgets::BudgetArgs;
use serde_json::Value;
use sha2::{Digest, Sha256};
use train_lm::homes::WeightsHome;
use train_lm::settings::{DeviceChoice, DurabilityChoice, MomentFormat, Prefetch, StateHome, TrainArgs};
use train_lm::train::{Summary, train};

/// Eight small layers.
const CONFIG: &str = r#"{
  "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": false,
  "vocab_size": 256, "hidden_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2,
  "head_dim": 16, "intermediate_size": 96, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 128,
  "tie_word_embeddings": true
}"#;

/// A folder with a model, a text and a profile, on a real file system.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        fs::write(dir.path().join("config.json"), CONFIG).unwrap();
        fs::write(dir.path().join("profile.json"), machine::profile(8, [5.0, 10.0])).unwrap();
        let text: String =
            (0..400).map(|i| format!("{} times {} is {}. ", i % 13, i % 7, (i % 13) * (i % 7))).collect();
        fs::write(dir.path().join("text.txt"), text).unwrap();
        Place { dir }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn args(&self, out: &str) -> TrainArgs {
        TrainArgs {
            device: DeviceChoice::Host,
            steps: Some(4),
            model: Some(self.path("config.json")),
            text: vec![self.path("text.txt")],
            batch: Some(2),
            seq: Some(32),
            dropout: Some(0.1),
            plan: "auto".into(),
            out: Some(self.path(out)),
            json: true,
            trace_steps: 200,
            budgets: BudgetArgs { profile: Some(self.path("profile.json")), ..BudgetArgs::default() },
            ..TrainArgs::default()
        }
    }
}

fn run(args: &TrainArgs) -> Summary {
    train(args).unwrap_or_else(|e| panic!("{e}"))
}

fn refusal(args: &TrainArgs) -> String {
    match train(args) {
        Ok(_) => panic!("was not refused"),
        Err(error) => error.to_string(),
    }
}

fn lines_of(run: &Path) -> Vec<Value> {
    lines(&run.join("metrics.jsonl"))
}

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

/// A profile by which a layer is always slower than a copy, so that every tier is worth its while on any machine.
fn slow_layers(place: &Place) -> String {
    let measured = train_lm::prepare::probe_only(&place.args("probed")).unwrap().to_json();
    let mut profile: Value = serde_json::from_str(&measured).unwrap();
    for link in profile["links"].as_object_mut().unwrap().values_mut().filter(|link| !link.is_null()) {
        link["value"] = 1e9.into();
    }
    for time in ["forward_ms", "saving_forward_ms", "backward_ms"] {
        profile["times"][time]["value"] = vec![20.0; 8].into();
    }
    profile.to_string()
}

/// With dropout: what is recomputed drops what its first forward dropped.
#[test]
fn r2_r3_weights_are_the_same_for_every_plan_prefetch_and_caps() {
    let place = Place::new();
    let profile = place.path("profile.json");
    fs::write(&profile, slow_layers(&place)).unwrap();
    for accum in [1, 3] {
        let mut base = TrainArgs { accum: Some(accum), ..place.args(&format!("resident {accum}")) };
        base.budgets.profile = Some(profile.clone());
        let expected = run(&TrainArgs { plan: "resident".into(), ..base.clone() });
        let out = |name: String| Some(place.path(&name));
        let checkpoint =
            TrainArgs { plan: "checkpoint".into(), out: out(format!("ck {accum}")), ..base.clone() };
        assert_eq!(run(&checkpoint).weights_digest, expected.weights_digest, "checkpoint, accum {accum}");
        for prefetch in [Prefetch::Auto, Prefetch::Blocks(0), Prefetch::Blocks(2), Prefetch::Blocks(4)] {
            let out = out(format!("auto {accum} {prefetch:?}"));
            let auto = run(&TrainArgs { prefetch, out, ..base.clone() });
            assert_eq!(auto.weights_digest, expected.weights_digest, "auto, {prefetch:?}, accum {accum}");
            // A longer read-ahead is given more room.
            let c = auto.counts;
            assert!(
                prefetch != Prefetch::Auto || (c.hbm > 1 && c.host > 0 && c.nvme > 0 && c.recompute > 0),
                "all tiers are at work: {c:?}"
            );
        }
        let mut other = TrainArgs { seed: Some(2), ..base };
        other.out = out(format!("seed {accum}"));
        assert_ne!(run(&other).weights_digest, expected.weights_digest);
    }
}

/// Every range is NaN until its owner has written it, and a copy takes 2.5 ms where a layer takes less: whoever read or wrote memory before
/// its turn would be seen in the values, in the checksums of what is recomputed, or in the weights.
#[test]
fn r1_poisoned_memory_and_slow_copies_end_in_the_weights_of_a_resident_run() {
    let place = Place::new();
    fs::write(place.path("profile.json"), slow_layers(&place)).unwrap();
    let args = |name: &str| TrainArgs { accum: Some(2), clip: Some(0.0), ..place.args(name) };
    let expected = run(&TrainArgs { plan: "resident".into(), ..args("resident") });
    let rate = Some(lazy_model::BytesPerSecond(5e6));
    let slow = lazy_store::LinkLimits { h2d: rate, d2h: rate, nvme_read: rate, nvme_write: rate };
    for (prefetch, weights) in [
        (Prefetch::Auto, WeightsHome::Hbm),
        (Prefetch::Blocks(0), WeightsHome::Hbm),
        (Prefetch::Blocks(2), WeightsHome::Hbm),
        (Prefetch::Auto, WeightsHome::Host),
    ] {
        let name = format!("slow {prefetch:?} {weights:?}");
        let slowed =
            TrainArgs { prefetch, weights, throttle: Some(slow), debug_boundaries: true, ..args(&name) };
        let watched = run(&slowed);
        assert_eq!(watched.weights_digest, expected.weights_digest, "{name}");
        let records = lines(&place.path(&name).join("boundaries.jsonl"));
        // Four steps of two micro-batches; what goes to the drive comes back.
        assert_eq!(records.len(), watched.counts.nvme * 4 * 2 * 2);
        let solved_in_hbm = (prefetch, weights) == (Prefetch::Auto, WeightsHome::Hbm);
        assert!(!solved_in_hbm || watched.counts.nvme * watched.counts.recompute > 0);
        let key = |r: &Value| {
            let task = r["task"].as_str().unwrap().replace("nvme_write", "nvme_read");
            (r["step"].as_u64(), r["micro_batch"].as_u64(), task)
        };
        let mut pairs: BTreeMap<_, Vec<&Value>> = BTreeMap::new();
        for record in &records {
            assert_eq!(record["finite"], record["count"], "{record}");
            pairs.entry(key(record)).or_default().push(&record["crc32c"]);
        }
        assert!(pairs.values().all(|pair| pair.len() == 2 && pair[0] == pair[1]));
    }
}

/// A tiny model with its weights, made by transformers.
fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/decoder").join(name)
}

/// As the trainer computes it, of the weights in a file.
fn digest_of(weights: &Path) -> String {
    let bytes = fs::read(weights).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut names = tensors.names();
    names.sort_unstable();
    let mut hasher = Sha256::new();
    names.iter().for_each(|name| hasher.update(tensors.tensor(name).unwrap().data()));
    hasher.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn training_starts_from_the_weights_in_the_models_folder_unless_it_is_told_not_to() {
    let place = Place::new();
    let from = |name: &str, model: PathBuf, steps| TrainArgs {
        model: Some(model),
        steps: Some(steps),
        // The profile is for another number of layers.
        budgets: BudgetArgs::default(),
        ..place.args(name)
    };
    for name in ["qwen3-tied", "qwen3-untied"] {
        let folder = golden(name);
        let weights = digest_of(&folder.join("model.safetensors"));
        assert_eq!(run(&from(name, folder.clone(), 0)).weights_digest, weights);
        let random = TrainArgs { random_weights: true, ..from(&format!("{name} random"), folder.clone(), 0) };
        let config = from(&format!("{name} config"), folder.join("config.json"), 0);
        let random = run(&random).weights_digest;
        assert!(random != weights && run(&config).weights_digest == random);
        // A run goes on without the folder it began with, from its own state; and its result is a folder to start from.
        let copy = place.path(&format!("{name} copy"));
        fs::create_dir(&copy).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(folder.join(file), copy.join(file)).unwrap();
        }
        let out = format!("{name} trained");
        run(&from(&out, copy.clone(), 2));
        fs::remove_dir_all(&copy).unwrap();
        let resume = TrainArgs {
            steps: Some(3),
            resume: Some(place.path(&out)),
            plan: "auto".into(),
            json: true,
            ..TrainArgs::default()
        };
        let trained = run(&resume).weights_digest;
        assert_eq!(digest_of(&place.path(&out).join("checkpoint/model.safetensors")), trained);
        let next = run(&from(&format!("{name} next"), place.path(&out).join("checkpoint"), 0));
        assert_eq!(next.weights_digest, trained);
    }
    // Weights of another model.
    let mixed = place.path("mixed");
    fs::create_dir(&mixed).unwrap();
    fs::write(mixed.join("config.json"), CONFIG).unwrap();
    fs::copy(golden("qwen3-tied").join("model.safetensors"), mixed.join("model.safetensors")).unwrap();
    let message = refusal(&from("mixed run", mixed, 0));
    assert!(message.contains("cannot read the weights in"), "{message}");
    assert!(message.ends_with("--random-weights starts from none"), "{message}");
    assert!(!place.path("mixed run").exists());
}

/// Words that are tokens of their own.
const TOKENIZER: &str = r#"{
  "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
  "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
  "model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {
    "[UNK]": 0, "</s>": 1, "plus": 2, "is": 3, "0": 4, "1": 5, "2": 6, "3": 7, "4": 8, "5": 9, "6": 10, "7": 11, "8": 12, "9": 13}}
}"#;

#[test]
fn answers_to_prompts_are_learned_and_a_resumed_run_has_the_rows_that_it_would_have_had() {
    let place = Place::new();
    fs::write(place.path("tokenizer.json"), TOKENIZER).unwrap();
    let lines = (0..50).map(|i| (i % 5, i / 10)).map(|(a, b)| {
        serde_json::json!({ "prompt": format!("{a} plus {b} is"), "answer": (a + b).to_string() }).to_string()
    });
    fs::write(place.path("sums.jsonl"), lines.collect::<Vec<_>>().join("\n")).unwrap();
    let args = |name: &str, steps| TrainArgs {
        text: vec![place.path("sums.jsonl")],
        tokenizer: Some(place.path("tokenizer.json")),
        // Five examples of six tokens in a row: a pass takes two and a half steps.
        seq: Some(30),
        accum: Some(2),
        steps: Some(steps),
        ..place.args(name)
    };
    let straight = run(&args("straight", 9));
    run(&args("cut", 4));
    fs::remove_file(place.path("tokenizer.json")).unwrap();
    let resume = |steps| TrainArgs {
        steps: Some(steps),
        resume: Some(place.path("cut")),
        plan: "auto".into(),
        json: true,
        ..TrainArgs::default()
    };
    let resumed = run(&resume(9));
    assert_eq!(resumed.weights_digest, straight.weights_digest);
    let losses = |name: &str| -> Vec<Value> {
        lines_of(&place.path(name)).iter().map(|line| line["loss"].clone()).collect()
    };
    assert_eq!(losses("cut"), losses("straight"));
    // Sums from 0 to 8, the middle ones more often, and behind each the end of text: 1.7325489549 nats.
    assert!((straight.unigram_entropy - 1.732_548_954_9).abs() < 1e-9, "{}", straight.unigram_entropy);
    let checkpoint = place.path("cut/checkpoint/tokenizer.json");
    assert_eq!(fs::read_to_string(checkpoint).unwrap(), TOKENIZER);
    let message = refusal(&TrainArgs { tokenizer: Some(place.path("other.json")), ..resume(10) });
    assert!(message.contains("--tokenizer cannot be changed"), "{message}");
    fs::write(place.path("cut/tokenizer.json"), TOKENIZER.replace("plus", "minus")).unwrap();
    let message = refusal(&resume(10));
    assert!(message.contains("tokenizer.json has changed"), "{message}");
    fs::write(place.path("tokenizer.json"), TOKENIZER).unwrap();
    let learned = run(&TrainArgs { dropout: None, lr: Some(1e-2), ..args("learned", 80) });
    assert!(learned.loss_last_20.unwrap() < 0.6 * learned.unigram_entropy, "{:?}", learned.loss_last_20);
}

#[test]
fn evaluations_are_written_down_and_change_no_bit() {
    let place = Place::new();
    fs::write(place.path("held-out.txt"), "7 times 3 is 21. 12 times 6 is 72. ".repeat(9)).unwrap();
    let plain = run(&TrainArgs { steps: Some(5), accum: Some(2), ..place.args("plain") });
    assert!(!place.path("plain/evaluations.jsonl").exists() && plain.evaluation_first.is_none());
    let evaluated = |name: &str, steps| {
        let mut args = TrainArgs { steps: Some(steps), accum: Some(2), ..place.args(name) };
        args.habits.eval_text = vec![place.path("held-out.txt")];
        args.habits.eval_every = Some(2);
        args
    };
    let straight = run(&evaluated("straight", 5));
    assert_eq!(straight.weights_digest, plain.weights_digest);
    assert!(straight.hbm_peak_bytes <= straight.hbm_budget_bytes);
    let column = |name: &str, key: &str| -> Vec<Value> {
        lines(&place.path(name).join("evaluations.jsonl")).iter().map(|line| line[key].clone()).collect()
    };
    // Before the first step, every second one, and at the end.
    assert_eq!(column("straight", "step"), [0, 2, 4, 5]);
    // 315 bytes in ten rows; each but the last of a text is followed by one that is predicted.
    assert!(column("straight", "tokens").iter().all(|tokens| *tokens == 314));
    let first = straight.evaluation_first.unwrap();
    // Random weights know nothing of 256 bytes, and dropout plays no part.
    assert!((first.loss - 256f64.ln()).abs() < 0.1, "{first:?}");
    assert!((first.perplexity / first.loss.exp() - 1.0).abs() < 1e-12);
    let early = column("straight", "loss");
    assert!(early[2].as_f64() < early[0].as_f64(), "{early:?}");
    // A resumed run goes on evaluating, whatever else was done before: also with another interval.
    run(&evaluated("cut", 3));
    let mut resume = TrainArgs {
        steps: Some(5),
        resume: Some(place.path("cut")),
        plan: "auto".into(),
        json: true,
        ..TrainArgs::default()
    };
    resume.habits.eval_every = Some(1);
    run(&resume);
    assert_eq!(column("cut", "step"), [0, 2, 3, 4, 5]);
    let (cut, losses) = (column("cut", "loss"), column("straight", "loss"));
    assert_eq!([&cut[..2], &cut[3..]].concat(), losses);
    assert!(fs::read_to_string(place.path("cut/report.html")).unwrap().contains("perplexity"));
    // Losses on other data are compared with none of before: those weights are evaluated at once.
    fs::write(place.path("other.txt"), "to be or not to be. ".repeat(9)).unwrap();
    resume.habits.eval_text = vec![place.path("other.txt")];
    resume.steps = Some(6);
    let other = run(&resume);
    assert_eq!(column("cut", "step"), [0, 2, 3, 4, 5, 5, 6]);
    assert_eq!(other.evaluation_first.unwrap().step, 5);
    resume.habits.eval_text = vec![place.path("held-out.txt")];
    resume.steps = Some(7);
    let back = run(&resume);
    assert_eq!(back.evaluation_first.unwrap().loss, first.loss);
    assert_eq!(back.evaluation_last.unwrap().step, 7);
    let mut without = place.args("without");
    without.habits.eval_every = Some(1);
    let message = refusal(&without);
    assert!(message.contains("--eval-text"), "{message}");
}

#[test]
fn a_run_saves_as_often_as_it_is_told_and_keeps_as_many() {
    let place = Place::new();
    for (name, durability) in [("step", DurabilityChoice::Step), ("checkpoint", DurabilityChoice::Checkpoint)]
    {
        let mut args = TrainArgs { steps: Some(7), durability: Some(durability), ..place.args(name) };
        args.habits.save_every = Some(2);
        args.habits.keep = Some(2);
        run(&args);
        let saved = |name: &str| -> Vec<String> {
            let found = lazy_optim_nvme::generations(&place.path(name).join("state")).unwrap();
            found.into_iter().map(|generation| generation.name).collect()
        };
        let last =
            if durability == DurabilityChoice::Step { ["step-4", "step-6"] } else { ["step-6", "step-7"] };
        assert_eq!(saved(name), last);
        // Nothing at all, not even where steps leave nothing.
        args.out = Some(place.path(&format!("{name} none")));
        args.habits = train_lm::habits::HabitArgs { no_save: true, ..Default::default() };
        run(&args);
        assert!(saved(&format!("{name} none")).is_empty());
        assert!(!place.path(&format!("{name} none/checkpoint")).exists());
    }
}

#[test]
fn o2_a_state_of_another_model_or_with_a_bit_flipped_is_refused_by_name() {
    let place = Place::new();
    run(&place.args("run"));
    let resume = TrainArgs {
        steps: Some(6),
        resume: Some(place.path("run")),
        plan: "auto".into(),
        ..TrainArgs::default()
    };
    let config = place.path("run/config.json");
    let good = fs::read_to_string(&config).unwrap();
    fs::write(&config, good.replace("\"intermediate_size\": 96", "\"intermediate_size\": 112")).unwrap();
    let message = refusal(&resume);
    assert!(message.contains("mlp"), "the first parameter that differs is named: {message}");
    fs::write(&config, good).unwrap();
    let slots = || {
        let state = fs::read_dir(place.path("run/state")).unwrap().map(|entry| entry.unwrap().path());
        let mut slots: Vec<PathBuf> = state.filter(|path| path.metadata().unwrap().len() > 8192).collect();
        slots.sort();
        slots
    };
    let before: Vec<Vec<u8>> = slots().iter().map(|path| fs::read(path).unwrap()).collect();
    // In one slot file or the other of the first bucket: one of the two is the state that would be read.
    for path in &slots()[..2] {
        let mut bytes = fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 4;
        fs::write(path, bytes).unwrap();
    }
    let message = refusal(&resume);
    assert!(message.contains("state"), "{message}");
    for (path, bytes) in slots().iter().zip(before) {
        fs::write(path, bytes).unwrap();
    }
    assert_eq!(run(&resume).steps, 6);
    fs::remove_file(place.path("run/state/adam.record")).unwrap();
    let message = refusal(&resume);
    let checkpoint = format!(
        "start a new one from the weights it wrote last, --model {}",
        place.path("run/checkpoint").display()
    );
    assert!(message.ends_with(&checkpoint), "{message}");
}

#[test]
fn m1_a_model_behind_a_wrapper_is_the_model_itself() {
    let place = Place::new();
    let nested = format!(r#"{{"model_type": "wrapped", "num_hidden_layers": 3, "text_config": {CONFIG}}}"#);
    fs::write(place.path("nested.json"), nested).unwrap();
    let wrapped =
        TrainArgs { model: Some(place.path("nested.json")), steps: Some(1), ..place.args("wrapped") };
    let plain = TrainArgs { steps: Some(1), ..place.args("plain") };
    assert_eq!(run(&wrapped).weights_digest, run(&plain).weights_digest);
}

#[test]
fn m7_caps_are_what_their_flags_say_to_the_byte() {
    let place = Place::new();
    let mut args = TrainArgs { steps: Some(0), ..place.args("run") };
    args.budgets.hbm_gib = Some(0.25);
    let summary = run(&args);
    assert_eq!(summary.hbm_budget_bytes.get(), 268_435_456);
}

#[test]
fn a_schedule_file_runs_again_and_is_refused_for_another_workload() {
    let place = Place::new();
    let first = run(&place.args("first"));
    let schedule = place.path("first/schedule.json").to_str().unwrap().to_owned();
    let again = run(&TrainArgs { plan: schedule.clone(), ..place.args("again") });
    assert_eq!(again.weights_digest, first.weights_digest);
    assert_eq!(again.counts, first.counts);
    let message = refusal(&TrainArgs { plan: schedule, seq: Some(16), ..place.args("other") });
    assert!(message.contains("another model or workload"), "{message}");
    assert!(!place.path("other").exists());
}

#[test]
fn budgets_hold_and_what_moved_is_written_down() {
    let place = Place::new();
    let summary = run(&place.args("run"));
    let metrics = lines(&place.path("run/metrics.jsonl"));
    assert_eq!(metrics.len(), 4);
    let trace: Value =
        serde_json::from_str(&fs::read_to_string(place.path("run/trace.json")).unwrap()).unwrap();
    let mut lanes: BTreeMap<String, u64> = BTreeMap::new();
    for event in trace["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X") {
        *lanes.entry(event["cat"].as_str().unwrap().into()).or_default() +=
            event["args"]["bytes"].as_u64().unwrap();
    }
    for lane in ["d2h", "h2d", "nvme_write", "nvme_read"] {
        let sum: u64 = metrics.iter().map(|m| m["bytes"][lane].as_u64().unwrap()).sum();
        assert!(sum > 0 && lanes[lane] == sum, "{lane}: {sum} in the metrics, {} in the trace", lanes[lane]);
    }
    // Boundaries of 2 x 32 x 48 floats: each that leaves HBM crosses the link once each way.
    let boundary = 2 * 32 * 48 * 4;
    let away = (summary.counts.host + summary.counts.nvme) as u64;
    assert_eq!(metrics[3]["bytes"]["d2h"], boundary * away);
    assert_eq!(metrics[3]["bytes"]["h2d"], boundary * away);
    assert!(summary.hbm_peak_bytes <= summary.hbm_budget_bytes);
    let schedule: Value =
        serde_json::from_str(&fs::read_to_string(place.path("run/schedule.json")).unwrap()).unwrap();
    for tier in ["hbm", "host", "nvme"] {
        let promised = schedule["promise"]["peak_bytes"][tier].as_u64().unwrap();
        assert!(metrics.iter().all(|m| m["peak_bytes"][tier].as_u64().unwrap() <= promised), "{tier}");
    }
    for file in ["report.html", "checkpoint/model.safetensors", "checkpoint/config.json", "run.json"] {
        assert!(place.path("run").join(file).metadata().unwrap().len() > 0, "{file}");
    }
    let spill = fs::read_dir(place.path("spill")).unwrap().count();
    assert_eq!(spill, 0, "the run left nothing in its spill folder");
}

#[test]
fn boundaries_on_their_way_to_the_drive_and_back_are_written_down_where_that_is_asked_for() {
    let place = Place::new();
    let plain = run(&TrainArgs { accum: Some(2), ..place.args("plain") });
    assert!(!place.path("plain/boundaries.jsonl").exists());
    let args = TrainArgs { accum: Some(2), debug_boundaries: true, ..place.args("run") };
    let summary = run(&args);
    assert_eq!(summary.weights_digest, plain.weights_digest);

    let records = lines(&place.path("run/boundaries.jsonl"));
    let schedule: Value =
        serde_json::from_str(&fs::read_to_string(place.path("run/schedule.json")).unwrap()).unwrap();
    let placement = schedule["placement"].as_array().unwrap();
    let spilled: Vec<usize> = (0..placement.len()).filter(|&i| placement[i] == "nvme").collect();
    assert!(!spilled.is_empty());
    // Each spilled boundary goes and comes back once in each of two micro-batches of four steps.
    assert_eq!(records.len(), spilled.len() * 2 * 4 * 2);
    for (step, micro_batch, boundary) in
        (0..4).flat_map(|s| (0..2).flat_map(move |m| (0..9).map(move |b| (s, m, b))))
    {
        let of = |lane: &str| {
            let task = format!("boundary {boundary} {lane}");
            let is = |r: &&Value| r["step"] == step && r["micro_batch"] == micro_batch && r["task"] == *task;
            records.iter().find(is)
        };
        let pair = [of("nvme_write"), of("nvme_read")];
        assert_eq!(pair.map(|r| r.is_some()), [spilled.contains(&boundary); 2], "boundary {boundary}");
        let [Some(before), Some(after)] = pair else { continue };
        assert_eq!((&before["side"], &after["side"]), (&"before_write".into(), &"after_read".into()));
        // What is read back is what was written: 2 x 32 x 48 float32 values.
        for key in ["offset", "bytes", "crc32c", "count", "finite", "abs_max", "abs_mean"] {
            assert_eq!(before[key], after[key], "{key} of boundary {boundary}");
        }
        assert_eq!((&before["count"], &before["finite"]), (&3072.into(), &3072.into()));
        assert_eq!(before["bytes"], 4 * 3072);
        let [most, mean] = ["abs_max", "abs_mean"].map(|key| before[key].as_f64().unwrap());
        assert!(0.0 < mean && mean < most, "{mean} and {most}");
    }
    // A resumed process begins the file anew.
    run(&TrainArgs {
        resume: args.out,
        steps: Some(5),
        plan: "auto".into(),
        json: true,
        debug_boundaries: true,
        ..TrainArgs::default()
    });
    assert!(lines(&place.path("run/boundaries.jsonl")).iter().all(|r| r["step"] == 4));
}

#[test]
fn o2_a_resumed_run_continues_bit_for_bit() {
    let place = Place::new();
    let straight = run(&TrainArgs { steps: Some(7), ..place.args("straight") });
    run(&TrainArgs { steps: Some(3), ..place.args("cut") });
    let resume = TrainArgs {
        steps: Some(7),
        resume: Some(place.path("cut")),
        plan: "checkpoint".into(),
        json: true,
        ..TrainArgs::default()
    };
    let resumed = run(&resume);
    assert_eq!(resumed.weights_digest, straight.weights_digest);
    assert_eq!(resumed.loss_first, straight.loss_first);
    assert_eq!(resumed.loss_last, straight.loss_last);
    assert_eq!(lines(&place.path("cut/metrics.jsonl")).len(), 7);
    let message = refusal(&TrainArgs { lr: Some(0.5), ..resume.clone() });
    assert!(message.contains("--lr cannot be changed"), "{message}");
    fs::write(place.path("text.txt"), "something else entirely, and long enough for a row of thirty-two")
        .unwrap();
    let message = refusal(&resume);
    assert!(message.contains("text has changed"), "{message}");
}

#[test]
fn where_and_how_the_state_is_kept_changes_no_bit_and_a_run_can_be_continued_from_what_was_saved() {
    let place = Place::new();
    let straight = run(&TrainArgs { steps: Some(5), ..place.args("straight") });
    for (name, state) in [("nvme", StateHome::Nvme), ("host", StateHome::Host)] {
        let kept = TrainArgs {
            state: Some(state),
            durability: Some(DurabilityChoice::Checkpoint),
            steps: Some(3),
            ..place.args(name)
        };
        run(&kept);
        let resume = |steps| TrainArgs {
            steps: Some(steps),
            resume: Some(place.path(name)),
            plan: "auto".into(),
            json: true,
            ..TrainArgs::default()
        };
        assert_eq!(run(&resume(5)).weights_digest, straight.weights_digest, "{name}");
        // One save is kept.
        let saved = lazy_optim_nvme::generations(&place.path(name).join("state")).unwrap();
        assert_eq!(saved.iter().map(|s| s.name.as_str()).collect::<Vec<_>>(), ["step-5"]);
        let message = refusal(&TrainArgs { durability: Some(DurabilityChoice::Step), ..resume(6) });
        assert!(message.contains("--durability cannot be changed"), "{message}");
        // Stopped hard after a save: as if steps had been taken since.
        fs::remove_file(place.path(name).join("state/adam.record")).unwrap();
        let message = refusal(&resume(6));
        assert!(message.contains("state"), "{message}");
    }
}

#[test]
fn an_optimizer_that_runs_beside_backward_trains_to_the_same_weights() {
    let place = Place::new();
    for accum in [1, 3] {
        // Without clipping it runs beside backward, unless no step could be taken back.
        let base =
            TrainArgs { clip: Some(0.0), accum: Some(accum), ..place.args(&format!("beside {accum}")) };
        let beside = run(&base);
        let after = run(&TrainArgs {
            durability: Some(DurabilityChoice::Checkpoint),
            out: Some(place.path(&format!("after {accum}"))),
            ..base.clone()
        });
        assert_eq!(beside.weights_digest, after.weights_digest, "accum {accum}");
        assert_eq!((beside.loss_first, beside.loss_last), (after.loss_first, after.loss_last));
        let norms = |name: &str| -> Vec<Value> {
            let path = place.path(&format!("{name} {accum}/metrics.jsonl"));
            lines(&path).iter().map(|line| line["grad_norm"].clone()).collect()
        };
        assert_eq!(norms("beside"), norms("after"));
    }
    let clipped = run(&place.args("clipped"));
    assert_ne!(
        clipped.weights_digest,
        run(&TrainArgs { clip: Some(0.0), ..place.args("not") }).weights_digest
    );
}

#[test]
fn a_run_goes_on_with_its_weights_alone_where_that_is_asked_for() {
    let place = Place::new();
    for durability in [DurabilityChoice::Step, DurabilityChoice::Checkpoint] {
        let straight =
            TrainArgs { durability: Some(durability), ..place.args(&format!("all {durability:?}")) };
        let name = format!("cut {durability:?}");
        let cut = TrainArgs { steps: Some(2), out: Some(place.path(&name)), ..straight.clone() };
        let begun = run(&cut);
        let resume = |steps| TrainArgs {
            steps: Some(steps),
            resume: Some(place.path(&name)),
            plan: "auto".into(),
            json: true,
            no_load_optim: true,
            ..TrainArgs::default()
        };
        // With nothing left to do, its weights are those it had.
        assert_eq!(run(&resume(2)).weights_digest, begun.weights_digest);
        let summary = run(&resume(4));
        assert_eq!(summary.steps, 4);
        assert_ne!(summary.weights_digest, run(&straight).weights_digest);
    }
}

#[test]
fn moments_in_fewer_bits_train_nearly_as_well_in_less_space() {
    let place = Place::new();
    let with = |name, moments, fraction| {
        let args = TrainArgs {
            steps: Some(12),
            moments: Some(moments),
            max_8bit_fraction: fraction,
            ..place.args(name)
        };
        let loss = run(&args).loss_last.unwrap();
        let state = fs::read_dir(place.path(name).join("state")).unwrap();
        let bytes: u64 = state.map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
        (loss, bytes)
    };
    let (exact, most) = with("f32", MomentFormat::F32, None);
    let (half, fewer) = with("bf16", MomentFormat::Bf16, None);
    let (hybrid, mixed) = with("hybrid", MomentFormat::F32, Some(0.5));
    let (least, fewest) = with("int8", MomentFormat::Int8, None);
    for loss in [half, hybrid, least] {
        assert!((loss / exact - 1.0).abs() < 0.05, "{loss} in place of {exact}");
    }
    // In a model this small, blocks of 8-bit moments are mostly room for more.
    assert!(fewer < most && mixed != most && fewest != most);
}

#[test]
fn a_resumed_run_goes_on_to_the_number_of_steps_it_was_told() {
    let place = Place::new();
    run(&TrainArgs { steps: Some(3), ..place.args("run") });
    // As if it had been told more and was stopped after three.
    let file = place.path("run/run.json");
    let told = fs::read_to_string(&file).unwrap().replace("\"steps\": 3", "\"steps\": 5");
    fs::write(&file, told).unwrap();
    let moved = place.path("moved");
    fs::rename(place.path("run"), &moved).unwrap();
    // The loss of a step need not be a number; a line torn by a kill is dropped and its step done again only if not committed.
    let metrics = fs::read_to_string(moved.join("metrics.jsonl")).unwrap();
    let mut lines: Vec<Value> = metrics.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    lines[1]["loss"] = Value::Null;
    let text: String = lines.iter().map(|l| format!("{l}\n")).collect();
    fs::write(moved.join("metrics.jsonl"), text + "{\"step\": 3, \"lo").unwrap();
    let resume = TrainArgs {
        steps: None,
        plan: "auto".into(),
        resume: Some(moved.clone()),
        json: true,
        ..TrainArgs::default()
    };
    let resumed = run(&resume);
    assert_eq!(resumed.steps, 5);
    let straight = run(&TrainArgs { steps: Some(5), ..place.args("straight") });
    assert_eq!(resumed.weights_digest, straight.weights_digest);
    let steps: Vec<u64> =
        self::lines(&moved.join("metrics.jsonl")).iter().map(|m| m["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [0, 1, 2, 3, 4]);
    // Nothing to do, and it says how far the run is.
    assert_eq!(run(&TrainArgs { steps: Some(2), ..resume.clone() }).steps, 5);

    let told = fs::read_to_string(moved.join("run.json")).unwrap();
    fs::write(moved.join("run.json"), told.replace("\"accum\": 1", "\"accum\": 0")).unwrap();
    let message = refusal(&resume);
    assert!(message.contains("run.json") && message.contains("--accum"), "{message}");
    fs::write(moved.join("run.json"), told).unwrap();

    fs::remove_dir_all(moved.join("state")).unwrap();
    fs::remove_file(moved.join("metrics.jsonl")).unwrap();
    let message = refusal(&resume);
    assert!(message.contains("nothing to continue"), "{message}");
}

#[test]
fn t8_a_folder_has_one_run_at_a_time() {
    let place = Place::new();
    run(&place.args("run"));
    let held = fs::File::open(place.path("run")).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let resume = TrainArgs { plan: "auto".into(), resume: Some(place.path("run")), ..TrainArgs::default() };
    let message = refusal(&resume);
    assert!(message.contains("another process is running"), "{message}");
    fs::create_dir(place.path("empty")).unwrap();
    let held = fs::File::open(place.path("empty")).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let message = refusal(&place.args("empty"));
    assert!(message.contains("another process is running"), "{message}");
    assert!(place.path("empty").exists(), "it is the other's");
}

#[test]
fn the_caps_that_messages_name_work() {
    let place = Place::new();
    let mut args = TrainArgs { steps: Some(0), ..place.args("run") };
    args.budgets.hbm_mib = Some(0.0);
    let mut messages = Vec::new();
    for round in 0..8 {
        args.out = Some(place.path(&format!("run {round}")));
        match train(&args) {
            Ok(summary) => {
                assert!(summary.hbm_peak_bytes <= summary.hbm_budget_bytes);
                return;
            }
            Err(error) => messages.push(error.to_string()),
        }
        let last = messages.last().unwrap();
        let before = args.budgets.hbm_mib.unwrap();
        let named = match last.split_once("above ").or_else(|| last.split_once("to at least ")) {
            Some((_, after)) => after.split_once(" MiB").unwrap().0.parse::<f64>().unwrap(),
            None => {
                assert!(last.contains("--hbm-mib"), "{last}");
                // One boundary more.
                before + f64::from(2 * 32 * 48 * 4) / f64::from(1 << 20)
            }
        };
        assert!(named > before, "the next message asks for more: {messages:#?}");
        args.budgets.hbm_mib = Some(named);
    }
    panic!("no cap worked: {messages:#?}");
}

#[test]
fn it_learns_more_than_byte_frequencies() {
    let place = Place::new();
    let args =
        TrainArgs { steps: Some(80), dropout: None, lr: Some(1e-2), seq: Some(48), ..place.args("run") };
    let summary = run(&args);
    assert!(
        summary.loss_last_20.unwrap() < 0.9 * summary.unigram_entropy,
        "loss {:?}, unigram entropy {}",
        summary.loss_last_20,
        summary.unigram_entropy
    );
}

#[test]
fn m2_m4_heads_that_do_not_divide_and_kinds_of_layers_that_are_not_trained_are_refused() {
    let place = Place::new();
    let kinds = |kinds: &[&str]| {
        let quoted: Vec<String> = kinds.iter().map(|kind| format!("\"{kind}\"")).collect();
        CONFIG.replacen('{', &format!("{{ \"layer_types\": [{}],", quoted.join(", ")), 1)
    };
    let undivided =
        CONFIG.replace("\"head_dim\": 16, ", "").replace("\"hidden_size\": 48", "\"hidden_size\": 50");
    let windowed = kinds(&[&["full_attention"; 7][..], &["sliding_attention"]].concat());
    let windowed = windowed.replacen('{', "{ \"use_sliding_window\": true, \"sliding_window\": 16,", 1);
    for (config, words) in [
        (undivided, "head_dim"),
        (kinds(&["full_attention"]), "layer_types"),
        (kinds(&["mamba2"; 8]), "mamba2"),
        (windowed, "set use_sliding_window to false"),
    ] {
        assert!(config != CONFIG);
        fs::write(place.path("config.json"), config).unwrap();
        let message = refusal(&place.args("run"));
        assert!(message.contains(words), "wanted {words:?} in: {message}");
        assert!(!place.path("run").exists(), "{message}");
    }
}

#[test]
fn bad_input_is_refused_with_what_to_change_and_leaves_nothing() {
    let place = Place::new();
    let base = place.args("run");
    fs::write(place.path("bad.json"), "{ \"model_type\": \"qwen3\", ").unwrap();
    fs::write(place.path("gpt.json"), CONFIG.replace("\"qwen3\"", "\"gpt2\"")).unwrap();
    fs::write(place.path("hole.json"), CONFIG.replace("\"hidden_size\": 48, ", "")).unwrap();
    fs::write(
        place.path("vast.json"),
        CONFIG
            .replace("\"intermediate_size\": 96", "\"intermediate_size\": 1048576")
            .replace("\"hidden_size\": 48", "\"hidden_size\": 65536"),
    )
    .unwrap();
    fs::write(place.path("empty.txt"), "").unwrap();
    fs::write(place.path("wide.txt"), "é".repeat(100)).unwrap();
    fs::write(place.path("narrow.json"), CONFIG.replace("256", "128")).unwrap();
    fs::write(place.path("not-a-schedule.json"), "[]").unwrap();
    fs::create_dir(place.path("full")).unwrap();
    fs::write(place.path("full/file"), "x").unwrap();
    let model = |name: &str| TrainArgs { model: Some(place.path(name)), ..base.clone() };
    let text = |name: &str| TrainArgs { text: vec![place.path(name)], ..base.clone() };
    let budget = |edit: fn(&mut TrainArgs)| {
        let mut args = base.clone();
        edit(&mut args);
        args
    };
    let file = place.path("not-a-schedule.json").to_str().unwrap().to_owned();
    let cases = [
        (model("absent.json"), "absent.json"),
        (model("bad.json"), "it was read from"),
        (model("bad.json"), "not valid JSON"),
        (model("gpt.json"), "gpt2"),
        (model("hole.json"), "hidden_size"),
        (text("empty.txt"), "no text"),
        (text("absent.txt"), "absent.txt"),
        (TrainArgs { text: vec!["/dev/null".into()], ..base.clone() }, "a pipe or a device, and no file"),
        (TrainArgs { tokenizer: Some(place.path("absent.json")), ..base.clone() }, "absent.json"),
        (TrainArgs { tokenizer: Some(place.path("bad.json")), ..base.clone() }, "tokenizer, "),
        (TrainArgs { jsonl: true, ..base.clone() }, "text.txt, line 1: "),
        (TrainArgs { text: vec![place.path("wide.txt")], ..model("narrow.json") }, "with --tokenizer"),
        (TrainArgs { seq: Some(100_000), ..base.clone() }, "give more text or shorter sequences"),
        (TrainArgs { plan: file, ..base.clone() }, "make a new one with `lazy-plan --out FILE`"),
        (TrainArgs { plan: "no-such-plan".into(), ..base.clone() }, "`auto`, `resident`, `checkpoint`"),
        (budget(|a| a.budgets.hbm_mib = Some(1.0)), "hbm budget is 1.00 MiB"),
        (budget(|a| a.budgets.host_mib = Some(0.0)), "host budget is 0 B"),
        (budget(|a| a.budgets.hbm_gib = Some(f64::NAN)), "--hbm-gib"),
        (TrainArgs { batch: Some(1 << 20), ..base.clone() }, "smaller"),
        (TrainArgs { batch: Some(1 << 20), seq: Some(1 << 20), ..base.clone() }, "at most 2^30 tokens"),
        (model("vast.json"), "take a smaller model"),
        (TrainArgs { state_dir: Some(place.path("text.txt")), ..base.clone() }, "--state-dir"),
        (TrainArgs { out: Some(place.path("full")), ..base.clone() }, "is not empty"),
        (TrainArgs { nvme_dir: Some(place.path("text.txt")), ..base.clone() }, "text.txt"),
        (
            TrainArgs { out: None, resume: Some(place.path("full")), ..base.clone() },
            "give the folder of a run",
        ),
        (TrainArgs { device: DeviceChoice::Cuda, ..base.clone() }, "--device host"),
    ];
    let no_gpu = lazy_store::cuda::device_count().is_err();
    let cases = cases.into_iter().filter(|(args, _)| args.device != DeviceChoice::Cuda || no_gpu);
    for (args, words) in cases {
        let message = refusal(&args);
        assert!(message.contains(words), "wanted {words:?} in: {message}");
        assert!(!place.path("run").exists(), "{message}");
    }
}
