//! Seconds to the proven optimum on the twelve given chains, as `lazy-plan` reports them.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::output_json;
use crate::programs::Program;
use crate::{Outcome, cargo};

const CHAINS: &str = "crates/lazy-solver/tests/data/given";
/// Runs of each chain. Rounds go through all chains, so that a slow minute of the machine spreads over all.
const ROUNDS: usize = 5;
/// Stated goals, in seconds.
const TARGETS: [(&str, f64); 2] = [("doc_cpu14_free", 0.3), ("uniform128", 1.0)];
/// Objectives agree to this many milliseconds.
const TOLERANCE_MS: f64 = 2e-6;

pub(super) fn measure() -> Outcome<Value> {
    let plan = Program::LazyPlan.build()?;
    let chains = chains(&cargo::root().join(CHAINS))?;
    let mut times = vec![Vec::new(); chains.len()];
    for round in 1..=ROUNDS {
        eprintln!("bench solver: round {round} of {ROUNDS}");
        for (chain, times) in chains.iter().zip(&mut times) {
            times.push(solve(&plan, chain)?);
        }
    }
    let rows = chains.iter().zip(times).map(|(chain, times)| row(&name(chain), times));
    Ok(rows.collect())
}

fn chains(folder: &Path) -> Outcome<Vec<PathBuf>> {
    let failed = |error| format!("cannot list the chains in {}: {error}", folder.display());
    let entries = std::fs::read_dir(folder).map_err(failed)?;
    let paths: Result<Vec<_>, _> = entries.map(|entry| entry.map(|entry| entry.path())).collect();
    let mut paths = paths.map_err(failed)?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    Ok(paths)
}

fn name(chain: &Path) -> String {
    chain.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// Solves once, in a process of its own; returns its seconds if the verdict is the proven one.
fn solve(plan: &Path, chain: &Path) -> Outcome<f64> {
    let text = std::fs::read(chain).map_err(|error| format!("cannot read {}: {error}", chain.display()))?;
    let given: Value =
        serde_json::from_slice(&text).map_err(|error| format!("{} is not JSON: {error}", chain.display()))?;
    let found = output_json(Command::new(plan).arg("--chain").arg(chain).arg("--json"), "lazy-plan")?;
    if !agrees(&found, &given["expected"]) {
        return Err(format!(
            "{}: status {}, objective {} ms, but proven are {} and {}: times of a wrong answer mean nothing",
            name(chain),
            found["status"],
            found["objective_ms"],
            given["expected"]["status"],
            given["expected"]["objective"],
        ));
    }
    found["solve_s"].as_f64().ok_or_else(|| "lazy-plan printed no `solve_s`".to_owned())
}

fn agrees(found: &Value, expected: &Value) -> bool {
    let objectives = match (found["objective_ms"].as_f64(), expected["objective"].as_f64()) {
        (Some(found), Some(expected)) => (found - expected).abs() <= TOLERANCE_MS,
        (None, None) => true,
        _ => false,
    };
    found["status"] == expected["status"] && objectives
}

fn row(name: &str, mut times: Vec<f64>) -> Value {
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    let target = TARGETS.iter().find(|(chain, _)| *chain == name).map(|(_, seconds)| *seconds);
    json!({
        "row": name, "value": median, "unit": "s", "spread": [times[0], times[times.len() - 1]],
        "against": null, "against_value": null, "ratio": null,
        "target": target, "met": target.map(|target| median <= target),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_hold_median_spread_and_target() {
        let row = row("uniform128", vec![0.9, 0.2, 1.4, 0.3, 1.2]);
        assert_eq!(row["value"], 0.9);
        assert_eq!(row["spread"], json!([0.2, 1.4]));
        assert_eq!((&row["target"], &row["met"]), (&json!(1.0), &json!(true)));
        assert_eq!(super::super::rows::validate(&json!([row])), Ok(()));
    }

    #[test]
    fn a_wrong_verdict_is_no_result() {
        let expected = json!({"status": "optimal", "objective": 182.00352});
        assert!(agrees(&json!({"status": "optimal", "objective_ms": 182.003_521}), &expected));
        assert!(!agrees(&json!({"status": "optimal", "objective_ms": 182.0036}), &expected));
        assert!(!agrees(&json!({"status": "feasible", "objective_ms": 182.00352}), &expected));
        assert!(agrees(
            &json!({"status": "infeasible", "objective_ms": null}),
            &json!({"status": "infeasible"})
        ));
    }
}
