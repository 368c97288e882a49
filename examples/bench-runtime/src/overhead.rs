//! What the executor and the store take of a step whose layers take no time.

use std::fs;
use std::path::Path;
use std::time::Duration;

use criterion::Criterion;
use lazy_model::timeline::{LinkRates, StepCosts};
use lazy_model::{Bytes, Seconds};
use lazy_runtime::{Executor, ModelOptions, Program, Step};
use serde_json::{Value, json};

use crate::Outcome;
use crate::layers::{Shape, model};

const LAYERS: usize = 64;
/// A boundary: a page, the least that goes to NVMe.
const BOUNDARY: Bytes = Bytes(4096);
/// Microseconds an operation of the list may take.
const GOAL: f64 = 5.0;

/// A step of many small layers.
struct Case {
    name: &'static str,
    /// Placements, repeated over the boundaries.
    letters: &'static str,
    keep: bool,
    streamed: bool,
}

const CASES: [Case; 5] = [
    Case { name: "resident", letters: "G", keep: true, streamed: false },
    Case { name: "checkpoint", letters: "G", keep: false, streamed: false },
    Case { name: "host", letters: "CG-", keep: false, streamed: false },
    Case { name: "weights from host RAM", letters: "G", keep: false, streamed: true },
    Case { name: "host and NVMe", letters: "CGN-", keep: false, streamed: false },
];

fn costs() -> StepCosts {
    StepCosts {
        prologue: Seconds::ZERO,
        forward: vec![Seconds::ZERO; LAYERS],
        saving_forward: vec![Seconds::ZERO; LAYERS],
        internals_forward: vec![Seconds::ZERO; LAYERS],
        backward: vec![Seconds::ZERO; LAYERS],
        epilogue: Seconds::ZERO,
        prologue_backward: Seconds::ZERO,
        links: LinkRates::default(),
    }
}

fn prepared(case: &Case, dir: &Path) -> Outcome<(Executor, Program)> {
    let costs = costs();
    let shape = Shape {
        boundary: &[BOUNDARY; LAYERS + 1],
        saved: &[BOUNDARY; LAYERS],
        weights: if case.streamed { BOUNDARY } else { Bytes::ZERO },
        costs: &costs,
    };
    let options = ModelOptions {
        stream_weights: case.streamed,
        stream_gradients: case.streamed,
        ..ModelOptions::default()
    };
    let model = model(&shape, options)?;
    let letters: String = case.letters.chars().cycle().take(LAYERS).chain(['G']).collect();
    let mut schedule = model.schedule(&letters)?;
    schedule.keep = vec![case.keep; LAYERS];
    let plan = model.plan(&schedule)?;
    let options = model.store_options(&plan, dir);
    Ok(Executor::open(model, plan, options)?)
}

/// The rows of all cases. What criterion says goes to standard output, which is to be elsewhere meanwhile.
pub(crate) fn rows(dir: &Path, seconds: f64) -> Outcome<Vec<Value>> {
    let results = tempfile::tempdir()?;
    let mut criterion = Criterion::default()
        .without_plots()
        .output_directory(results.path())
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs_f64(seconds));
    let mut rows = Vec::new();
    for case in &CASES {
        let (mut executor, mut program) = prepared(case, dir)?;
        let mut failed = None;
        criterion.bench_function(case.name, |bench| {
            bench.iter(|| {
                let run = executor.run(&mut program, &Step { step: 1, ..Step::default() });
                failed = run.err().or(failed.take());
            });
        });
        if let Some(error) = failed {
            return Err(error.into());
        }
        let folder = case.name.replace(' ', "_");
        let files = [&folder, case.name].map(|name| results.path().join(name).join("new/estimates.json"));
        let text = files.iter().find_map(|file| fs::read_to_string(file).ok());
        let estimates: Value = serde_json::from_str(&text.ok_or("criterion left no estimates")?)?;
        let median = &estimates["median"];
        let bounds = &median["confidence_interval"];
        let micros = |value: &Value, count: usize| value.as_f64().unwrap_or(f64::NAN) / 1e3 / count as f64;
        let (operations, tasks) = (program.plan().ops.len(), program.plan().tasks().count());
        for (what, count, goal) in [("an operation", operations, Some(GOAL)), ("a task", tasks, None)] {
            let value = micros(&median["point_estimate"], count);
            rows.push(json!({
                "row": format!("{}: {what} ({count} a step)", case.name), "value": value, "unit": "us",
                "spread": [micros(&bounds["lower_bound"], count), micros(&bounds["upper_bound"], count)],
                "against": null, "against_value": null, "ratio": null,
                "target": goal, "met": goal.map(|goal| value <= goal), "at_most": goal.map(|_| true),
            }));
        }
    }
    Ok(rows)
}
