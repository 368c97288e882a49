//! The published instances: verdicts, optima and judged placements come from three other solvers and a separate judge.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};

use lazy_model::{CostChain, Placement, evaluate};
use lazy_solver::{SolveOptions, Status, solve};
use serde_json::Value;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn placement(text: &str) -> Vec<Placement> {
    text.chars().map(|c| Placement::from_letter(c).unwrap()).collect()
}

#[test]
fn every_published_instance_reaches_its_proven_verdict() {
    let mut files: Vec<_> = fs::read_dir(data("given")).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    assert_eq!(files.len(), 12);
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let expected = &serde_json::from_str::<Value>(&text).unwrap()["expected"];
        let chain = CostChain::from_json(&text).unwrap();
        let solution = solve(&chain, &SolveOptions::default()).unwrap();
        match expected["objective"].as_f64() {
            None => assert_eq!(solution.status, Status::Infeasible, "{}", file.display()),
            Some(objective) => {
                assert_eq!(solution.status, Status::Optimal, "{}", file.display());
                let got = solution.objective_ms.unwrap();
                assert!((got - objective).abs() < 2e-6, "{}: {got} instead of {objective}", file.display());
                let again = evaluate(&chain, &solution.placement.unwrap()).unwrap();
                assert_eq!(again.objective_ms, got);
            }
        }
    }
}

#[test]
fn placements_are_judged_as_the_reference_judges_them() {
    let cases: Vec<Value> = serde_json::from_str(&fs::read_to_string(data("judged.json")).unwrap()).unwrap();
    assert!(cases.len() > 100);
    for case in cases {
        let name = format!("given/{}.json", case["chain"].as_str().unwrap());
        let chain = CostChain::from_json(&fs::read_to_string(data(&name)).unwrap()).unwrap();
        let got = evaluate(&chain, &placement(case["placement"].as_str().unwrap()));
        let Some(objective) = case["objective"].as_str() else {
            assert!(got.is_err(), "{case}");
            continue;
        };
        let got = got.unwrap_or_else(|v| panic!("{v}: {case}"));
        assert_eq!(got.objective.to_string(), objective, "{case}");
        assert_eq!(got.recompute_ms, case["recompute_ms"].as_f64().unwrap(), "{case}");
        let e = got.exposed_ms;
        let exposed: Vec<f64> = serde_json::from_value(case["exposed_ms"].clone()).unwrap();
        assert_eq!([e.d2h, e.h2d, e.nvme_write, e.nvme_read], exposed[..], "{case}");
        let counts: Vec<usize> = serde_json::from_value(case["counts"].clone()).unwrap();
        assert_eq!([got.counts.hbm, got.counts.host, got.counts.nvme], counts[..], "{case}");
    }
}
