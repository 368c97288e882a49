//! Two runs on one page.

use std::path::{Path, PathBuf};

use lazy_model::report::{Curve, Fact, RunReport, StepParts, Table};
use lazy_model::{Bytes, Seconds};
use serde_json::Value;

use super::{Files, LAST, fact, mean, write_page};
use crate::error::{Result, TrainError};
use crate::metrics::StepMetrics;

/// Draws both runs on one page at `out`.
///
/// # Errors
/// As [`draw`](super::draw), for either.
pub fn compare(runs: [&Path; 2], out: &Path) -> Result<PathBuf> {
    let files = [Files::read(runs[0])?, Files::read(runs[1])?];
    let names = names(runs);
    let settings = files.each_ref().map(|f| serde_json::to_value(&f.settings));
    let [a, b] = settings.map(|value| value.map_err(TrainError::json(out)));
    write_page(out, &report(&files, &names, &differing(&a?, &b?)))?;
    Ok(out.to_owned())
}

/// The folders' own names, or where they are the same the paths.
fn names(runs: [&Path; 2]) -> [String; 2] {
    let last = runs.map(|run| run.file_name().map(|name| name.to_string_lossy().into_owned()));
    match last {
        [Some(a), Some(b)] if a != b => [a, b],
        _ => runs.map(|run| run.display().to_string()),
    }
}

fn report(files: &[Files; 2], names: &[String; 2], settings: &[Vec<String>]) -> RunReport {
    let [a, b] = files;
    let parts = files.iter().zip(names).filter_map(|(files, name)| {
        let measured = files.parts().into_iter().nth(1)?;
        Some(StepParts { label: name.clone(), ..measured })
    });
    let head = |first: &str| vec![first.to_owned(), names[0].clone(), names[1].clone()];
    let mut tables = vec![Table {
        title: "Run beside run".into(),
        intro: format!("{}: {} {}: {}", names[0], a.compared_over(), names[1], b.compared_over()),
        head: [head("Quantity"), vec!["Second over first".into()]].concat(),
        rows: rows(a, b),
    }];
    if !settings.is_empty() {
        tables.push(Table {
            title: "Settings that differ".into(),
            intro: String::new(),
            head: head("Setting"),
            rows: settings.to_vec(),
        });
    }
    RunReport {
        title: format!("{} beside {}", names[0], names[1]),
        answers: answers(files, names),
        parts: parts.collect(),
        loss: a.losses(),
        curves: vec![Curve { label: names[1].clone(), points: b.losses() }],
        loss_label: names[0].clone(),
        tables,
        ..RunReport::default()
    }
}

fn answers(files: &[Files; 2], names: &[String; 2]) -> Vec<Fact> {
    let [a, b] = files;
    let step = |f: &Files| mean(&f.late(), |m| m.seconds.step.get());
    let mut answers = Vec::new();
    if let Some((x, y)) = step(a).zip(step(b)) {
        let (fast, slow, quick, long) =
            if y < x { (&names[1], &names[0], y, x) } else { (&names[0], &names[1], x, y) };
        answers.push(fact(
            "Time",
            format!(
                "{fast} takes {} a step, {slow} {}: {:.1} % more.",
                Seconds(quick),
                Seconds(long),
                100.0 * (long / quick - 1.0)
            ),
        ));
    }
    let weights = files.each_ref().map(|f| f.record.measured.as_ref().map(|m| &m.summary.weights_digest));
    if let [Some(x), Some(y)] = weights {
        let same = if x == y { "The same, bit for bit." } else { "They differ." };
        answers.push(fact("Weights", same));
    }
    for (files, name) in files.iter().zip(names) {
        let letters = files.schedule.placement_letters();
        answers.push(fact(name, format!("{letters} by {}", files.schedule.solve.method)));
    }
    answers
}

/// The quantities of both runs, and the loss.
fn rows(a: &Files, b: &Files) -> Vec<Vec<String>> {
    let show = |value: f64, unit: &str| match unit {
        "bytes" => Bytes(value as u64).to_string(),
        "ms" => Seconds::from_ms(value).to_string(),
        "s" => Seconds(value).to_string(),
        _ => format!("{value:.4}"),
    };
    let row = |label: &str, unit: &str, values: [Option<f64>; 2]| {
        let ratio = values[0].zip(values[1]).map(|(a, b)| b / a).filter(|ratio| ratio.is_finite());
        let mut row = vec![label.to_owned()];
        row.extend(values.map(|value| value.map_or("–".into(), |value| show(value, unit))));
        row.push(ratio.map_or("–".into(), |ratio| format!("{ratio:.3}")));
        row
    };
    let last = |f: &Files| {
        let last: Vec<&StepMetrics> = f.metrics.iter().rev().take(LAST).collect();
        mean(&last, |m| f64::from(m.loss))
    };
    let mut rows = vec![
        row(&format!("Loss, last {LAST} steps"), "", [last(a), last(b)]),
        row("Tokens a second", "", [a, b].map(|f| f.tokens_per_s(&f.late()))),
    ];
    let (of_a, of_b) = (a.quantities(), b.quantities());
    for (x, y) in of_a.iter().zip(&of_b) {
        rows.push(row(x.label, x.unit, [x.over(&a.settled()), y.over(&b.settled())]));
    }
    rows
}

fn differing(a: &Value, b: &Value) -> Vec<Vec<String>> {
    let (Value::Object(a), Value::Object(b)) = (a, b) else { return Vec::new() };
    let text = |value: Option<&Value>| value.map_or("–".to_owned(), ToString::to_string);
    let keys = a.keys().chain(b.keys().filter(|key| !a.contains_key(*key)));
    keys.filter(|key| a.get(*key) != b.get(*key))
        .map(|key| vec![key.clone(), text(a.get(key)), text(b.get(key))])
        .collect()
}
