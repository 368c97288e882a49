//! The report of a run: its figures are those of `metrics.jsonl`, in the file and in a browser; runs under way and killed ones are drawn too;
//! what a run showed of the machine plans the next one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use lazy_model::{HardwareProfile, Source};
use serde_json::Value;
use train_lm::report::{compare, draw};
use train_lm::settings::TrainArgs;
use train_lm::train::{plan_only, train};

const CONFIG: &str = r#"{
  "model_type": "qwen3", "vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2,
  "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
  "tie_word_embeddings": true
}"#;

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        fs::write(dir.path().join("config.json"), CONFIG).unwrap();
        fs::write(dir.path().join("text.txt"), "to be or not to be, that is the question. ".repeat(50))
            .unwrap();
        Place(dir)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn args(&self, out: &str) -> TrainArgs {
        TrainArgs {
            steps: Some(7),
            model: Some(self.path("config.json")),
            text: vec![self.path("text.txt")],
            batch: Some(2),
            seq: Some(32),
            plan: "auto".into(),
            out: Some(self.path(out)),
            json: true,
            ..TrainArgs::default()
        }
    }

    fn run(&self, out: &str) -> PathBuf {
        train(&self.args(out)).unwrap_or_else(|e| panic!("{e}"));
        self.path(out)
    }
}

fn lines(run: &Path) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The rows of the table of promises: label, and the exact values of its cells.
fn rows(page: &str) -> Vec<(String, Vec<f64>)> {
    let rows = page.split("<tr").skip(1).filter_map(|row| {
        let (_, row) = row.split_once("<td>")?;
        let (label, rest) = row.split_once("</td>")?;
        let cells = rest.split("</tr>").next()?.split("data-value=\"").skip(1);
        let values: Vec<f64> = cells.map(|cell| cell.split('"').next().unwrap().parse().unwrap()).collect();
        (!values.is_empty()).then(|| (label.to_owned(), values))
    });
    rows.collect()
}

/// What the table has to show by `metrics.jsonl`: the mean over all steps but the first; of peaks the largest.
fn expected(run: &Path) -> Vec<(&'static str, f64)> {
    let lines = lines(run);
    let values = |path: &str| -> Vec<f64> {
        let value = |line: &Value| line.pointer(path).unwrap().as_f64().unwrap();
        lines[1..].iter().map(value).collect()
    };
    let mean = |path: &str| values(path).iter().sum::<f64>() / (lines.len() - 1) as f64;
    let most = |path: &str| values(path).into_iter().fold(0.0, f64::max);
    let parts = ["/seconds/clip", "/seconds/optimizer", "/seconds/zero_grad"];
    let link = |name: &str| [format!("/busy_s/{name}"), format!("/exposed_s/{name}")];
    let mut rows = vec![
        ("Step", mean("/seconds/step")),
        ("Forward", mean("/seconds/forward")),
        ("Backward", mean("/seconds/backward")),
        ("of it, forwards run again", mean("/seconds/recompute")),
        ("Optimizer", parts.map(mean).iter().sum()),
    ];
    for (label, name) in [
        ("Copies to host RAM", "d2h"),
        ("Copies from host RAM", "h2d"),
        ("NVMe writes", "nvme_write"),
        ("NVMe reads", "nvme_read"),
    ] {
        let [busy, exposed] = link(name).map(|path| 1e3 * mean(&path));
        rows.extend([(label, busy), ("waited for", exposed)]);
    }
    for (label, tier) in [("HBM at most", "hbm"), ("Host RAM at most", "host"), ("NVMe at most", "nvme")] {
        rows.push((label, most(&format!("/peak_bytes/{tier}"))));
    }
    rows
}

fn assert_figures(page: &str, run: &Path) {
    let (found, expected) = (rows(page), expected(run));
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for ((label, values), (name, value)) in found.iter().zip(expected) {
        assert_eq!(label, name);
        // Promised and measured: of the last hundred steps nothing is told apart, they are all.
        assert_eq!(values.len(), 2, "{label}");
        let measured = values[1];
        assert!((measured - value).abs() <= 1e-9 * value.abs(), "{label}: {measured} shown, {value} meant");
    }
}

/// The page as a browser has it after it was laid out `width` pixels wide, and by how many pixels it is wider than that; nothing where no
/// browser is.
fn browsed(page: &str, width: u32, place: &Place) -> Option<(String, f64)> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let browser = names.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok())?;
    let probe = "<script>document.body.dataset.over = document.documentElement.scrollWidth - innerWidth</script></body>";
    let (file, profile) = (place.path("page.html"), place.path("browser"));
    fs::write(&file, page.replace("</body>", probe)).unwrap();
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .arg(format!("--window-size={width},900"))
        .arg(format!("file://{}", file.display()))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let dom = String::from_utf8(output.stdout).unwrap();
    let over = dom.split("data-over=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap();
    Some((dom, over))
}

#[test]
fn the_figures_are_those_of_the_metrics_in_the_file_and_in_a_browser() {
    let place = Place::new();
    let run = place.run("run");
    let page = fs::read_to_string(run.join("report.html")).unwrap();
    assert_figures(&page, &run);
    for answer in ["Plan", "Time", "Waiting", "Promises", "Next"] {
        assert!(page.contains(&format!("<dt>{answer}</dt>")), "{answer}");
    }
    for width in [1280, 500] {
        let Some((dom, over)) = browsed(&page, width, &place) else { continue };
        assert_figures(&dom, &run);
        assert!(over <= 0.0, "{over} pixels too wide for {width}");
        assert!(dom.contains("</html>"));
    }
    // Drawn again it is the same page.
    fs::remove_file(run.join("report.html")).unwrap();
    assert_eq!(fs::read_to_string(draw(&run).unwrap()).unwrap(), page);
}

#[test]
fn a_run_that_was_killed_is_drawn_without_what_it_did_not_come_to_write() {
    let place = Place::new();
    let run = place.run("run");
    let path = run.join("summary.json");
    let mut record: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    record["measured"] = Value::Null;
    fs::write(&path, record.to_string()).unwrap();
    fs::remove_file(run.join("corrected-profile.json")).unwrap();
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    fs::write(run.join("metrics.jsonl"), &metrics[..metrics.len() - 40]).unwrap();
    let page = fs::read_to_string(draw(&run).unwrap()).unwrap();
    assert!(page.contains("<h1>6 steps of a qwen3 decoder</h1>"));
    assert!(page.contains("What happened") || page.contains("Promised and measured"));
    let refused = draw(&place.path("no such run")).unwrap_err().to_string();
    assert!(refused.contains("give the folder of a run"), "{refused}");
}

#[test]
fn a_long_run_tells_its_last_hundred_steps_apart() {
    let place = Place::new();
    let run = place.run("run");
    let line = lines(&run)[3].clone();
    // Steps 0 to 150; those before the last hundred take a second, the last ones three.
    let long = (0..=150).map(|step| {
        let mut line = line.clone();
        line["step"] = step.into();
        line["seconds"]["step"] = (if step > 50 { 3.0 } else { 1.0 }).into();
        line.to_string() + "\n"
    });
    fs::write(run.join("metrics.jsonl"), long.collect::<String>()).unwrap();
    let page = fs::read_to_string(draw(&run).unwrap()).unwrap();
    let (label, values) = rows(&page).remove(0);
    assert_eq!((label.as_str(), values.len()), ("Step", 3));
    assert!((values[1] - 350.0 / 150.0).abs() < 1e-9 && values[2] == 3.0, "{values:?}");
    assert!(page.contains("means over steps 1 to 150") && page.contains("of late those over the last 100"));
}

#[test]
fn two_runs_stand_beside_each_other() {
    let place = Place::new();
    let a = place.run("first");
    train(&TrainArgs { seed: Some(2), steps: Some(4), plan: "resident".into(), ..place.args("second") })
        .unwrap();
    let out = place.path("both.html");
    compare([&a, &place.path("second")], &out).unwrap();
    let page = fs::read_to_string(&out).unwrap();
    for part in
        ["first beside second", "They differ.", "<td>seed</td><td>1</td><td>2</td>", "Settings that differ"]
    {
        assert!(page.contains(part), "{part}");
    }
    let resident: Vec<&str> = page.matches("GGGGGGG by resident").collect();
    assert_eq!(resident.len(), 1);
}

#[test]
fn the_corrected_profile_is_what_the_run_saw_and_plans_the_next_one() {
    let place = Place::new();
    let run = place.run("run");
    let read = |name: &str| HardwareProfile::from_json(&fs::read_to_string(run.join(name)).unwrap()).unwrap();
    let (before, after) = (read("profile.json"), read("corrected-profile.json"));
    let (old, new) = (before.times.unwrap(), after.times.unwrap());
    assert_eq!((new.backward_ms.by.as_str(), old.backward_ms.by.as_str()), ("steps of a run", "trial steps"));
    assert!(new.backward_ms.source == Source::Measured && new.backward_ms.value.len() == 6);
    // With the times of its own steps a run's promise is what it measured: compared loosely, since nobody keeps the machine quiet.
    let forward =
        lines(&run)[1..].iter().map(|l| l["seconds"]["forward"].as_f64().unwrap()).fold(0.0, f64::max);
    assert!(new.forward_ms.value.iter().sum::<f64>() <= 1e3 * forward);
    let mut args = place.args("again");
    args.budgets.profile = Some(run.join("corrected-profile.json"));
    let again = train(&args).unwrap_or_else(|e| panic!("{e}"));
    assert!(again.predicted_step_s > 0.0);
}

#[test]
fn a_dry_run_says_the_plan_and_leaves_nothing() {
    let place = Place::new();
    let before = fs::read_dir(place.0.path()).unwrap().count();
    let mut args = TrainArgs { dry_run: true, ..place.args("runs/run") };
    let schedule = plan_only(&args).unwrap();
    assert_eq!(schedule.layers, 6);
    assert!(schedule.promise.is_some());
    assert_eq!(fs::read_dir(place.0.path()).unwrap().count(), before, "nothing was left");
    // A plan that cannot be is refused all the same, and leaves nothing either.
    args.budgets.hbm_mib = Some(0.1);
    assert!(plan_only(&args).is_err());
    assert_eq!(fs::read_dir(place.0.path()).unwrap().count(), before);
}
