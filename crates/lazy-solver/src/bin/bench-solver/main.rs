//! Seconds to the proven optimum, beside the same chains in other solvers; prints the rows that `cargo xtask bench` shows.
//!
//! Without flags a sample that takes about five minutes; `--full` runs 20 chains of each kind and size and all keep chains. `--seeds N`
//! sets the chains of each kind and size, `--rounds N` the timings of each published chain (5), `--peer-limit-s S` the limit of
//! each run of another solver (5, full: 20; 0: none). Peers that are not installed are left out: the program `cbc`, and python3 with
//! `pyscipopt` and `highspy`. They solve the program as one would first write it, on one thread.

mod generate;
#[path = "../../../tests/common/keep_chains.rs"]
mod keep_chains;
mod naive;
mod others;
mod peers;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;

use generate::Kind;
use lazy_model::{CostChain, Seconds};
use lazy_solver::{Method, Solution, SolveOptions, Status, solve};
use peers::Peer;
use serde_json::{Value, json};

type Outcome<T> = Result<T, String>;

/// Objectives agree to this many milliseconds.
const TOLERANCE_MS: f64 = 2e-6;
/// Published chain, method, goal in seconds.
const GOALS: [(&str, Method, f64); 3] = [
    ("doc_cpu14_free", Method::Mip, 0.3),
    ("doc_cpu14_free", Method::Auto, 0.005),
    ("uniform128", Method::Auto, 1.0),
];
/// Layers, seconds within which most generated chains of that size should be proven, and chains of each kind in a sample.
const SIZES: [(usize, f64, u64); 3] = [(64, 1.0, 8), (128, 3.0, 5), (256, 10.0, 3)];
/// Chains of each kind and size in a full run.
const FULL: u64 = 20;
/// Share of seeds to be proven in that time (%); gap allowed to the rest (%), and when it is measured (s).
const PROVEN: f64 = 80.0;
const GAP: f64 = 0.1;
const LATEST: f64 = 30.0;

fn main() -> Outcome<()> {
    let flags = flags()?;
    let flag = |name: &str| flags.get(name).copied();
    let full = flag("--full").is_some();
    let rounds = flag("--rounds").unwrap_or(5.0) as usize;
    let peers = Peer::available(flag("--peer-limit-s").unwrap_or(if full { 20.0 } else { 5.0 }));
    let published = published()?;
    let mut rows = Vec::new();
    for (name, chain, expected) in &published {
        for method in [Method::Auto, Method::Mip] {
            rows.push(published_row(name, chain, expected, method, rounds)?);
        }
    }
    for (name, chain, _) in published.iter().filter(|(name, ..)| GOALS.iter().any(|goal| goal.0 == name)) {
        rows.extend(peer_rows(name, chain, &peers)?);
    }
    rows.push(others::simulation_row()?);
    rows.push(others::config_row()?);
    rows.extend(others::ranks_rows()?);
    rows.extend(others::keep_rows(if full { 1 } else { 4 })?);
    for (layers, seconds, sample) in SIZES {
        let seeds = flag("--seeds").map_or(if full { FULL } else { sample }, |seeds| seeds as u64);
        for kind in Kind::ALL {
            rows.extend(generated_rows(kind, layers, seconds, seeds)?);
        }
    }
    for kind in Kind::ALL.into_iter().filter(|kind| !kind.byte_granular) {
        let chain = generate::chain(kind, 64, 0).map_err(|error| error.to_string())?;
        rows.extend(peer_rows(&format!("{} 64, seed 0", kind.name()), &chain, &peers)?);
    }
    let text = format!("{:#}\n", Value::from(rows));
    std::io::stdout().write_all(text.as_bytes()).map_err(|error| format!("cannot print: {error}"))
}

/// The flags given, and their values.
fn flags() -> Outcome<BTreeMap<String, f64>> {
    let mut flags = BTreeMap::new();
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = match flag.as_str() {
            "--full" => Some(1.0),
            "--seeds" | "--rounds" | "--peer-limit-s" => {
                args.next().and_then(|text| text.parse::<f64>().ok()).filter(|given| *given >= 0.0)
            }
            _ => return Err(format!("no flag `{flag}`: see the page of bench-solver")),
        };
        let value = value.ok_or_else(|| format!("`{flag}` needs a number of 0 or more"))?;
        flags.insert(flag, value);
    }
    Ok(flags)
}

/// The chains with proven optima, and what is proven.
fn published() -> Outcome<Vec<(String, CostChain, Value)>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/given");
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", folder.display());
    let mut chains = Vec::new();
    for entry in fs::read_dir(&folder).map_err(|error| failed(&error))? {
        let path = entry.map_err(|error| failed(&error))?.path();
        let text = fs::read_to_string(&path).map_err(|error| failed(&error))?;
        let given: Value = serde_json::from_str(&text).map_err(|error| failed(&error))?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let chain = CostChain::from_json(&text).map_err(|error| failed(&error))?;
        chains.push((name, chain, given["expected"].clone()));
    }
    chains.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(chains)
}

fn solved(chain: &CostChain, method: Method, limit: Option<f64>) -> Outcome<Solution> {
    let options = SolveOptions { time_limit: limit.map(Seconds), method, ..SolveOptions::default() };
    solve(chain, &options).map_err(|error| error.to_string())
}

fn row(name: &str, value: f64, unit: &str, target: Option<(f64, bool)>) -> Value {
    json!({
        "row": name, "value": value, "unit": unit, "against": null, "against_value": null, "ratio": null,
        "target": target.map(|target| target.0), "met": target.map(|target| target.1),
    })
}

fn published_row(
    name: &str,
    chain: &CostChain,
    expected: &Value,
    method: Method,
    rounds: usize,
) -> Outcome<Value> {
    let mut times = Vec::new();
    let mut used = method;
    for _ in 0..rounds.max(1) {
        let found = solved(chain, method, None)?;
        let agrees = match (found.objective_ms, expected["objective"].as_f64()) {
            (Some(found), Some(expected)) => (found - expected).abs() <= TOLERANCE_MS,
            (None, None) => true,
            _ => false,
        };
        if !agrees || expected["status"] != found.status.name() {
            return Err(format!("{name}: {:?} is not what is proven", found.objective_ms));
        }
        used = found.method;
        times.push(found.solve.get());
    }
    times.sort_by(f64::total_cmp);
    let median = times[times.len() / 2];
    let goal = GOALS.iter().find(|goal| goal.0 == name && goal.1 == method).map(|goal| goal.2);
    let label = format!("{name}, {}", if method == Method::Mip { "--method mip" } else { used.name() });
    let mut row = row(&label, median, "s", goal.map(|goal| (goal, median <= goal)));
    row["spread"] = json!([times[0], times[times.len() - 1]]);
    Ok(row)
}

/// Ours beside each peer's seconds, in the same run.
fn peer_rows(name: &str, chain: &CostChain, peers: &[Peer]) -> Outcome<Vec<Value>> {
    let mut rows = Vec::new();
    for peer in peers {
        eprintln!("bench solver: {name} in {}", peer.name());
        let ours = solved(chain, Method::Auto, Some(LATEST))?;
        let Some(theirs) = peer.solve(chain)? else { continue };
        let (value, other) = (ours.solve.get(), theirs.seconds);
        let against = match theirs.optimal {
            true => format!("{}, naive", peer.name()),
            false => format!("{}, naive: stopped, gap {:.3} %", peer.name(), theirs.gap * 100.0),
        };
        let label = format!("{name}, {} ({})", ours.method.name(), ours.status.name());
        let mut row = row(&label, value, "s", None);
        (row["against"], row["against_value"]) = (json!(against), json!(other));
        row["ratio"] = json!(value / other);
        rows.push(row);
    }
    Ok(rows)
}

/// Two rows: how many seeds are proven in time, and the largest gap of the others.
fn generated_rows(kind: Kind, layers: usize, seconds: f64, seeds: u64) -> Outcome<Vec<Value>> {
    let (mut proven, mut widest) = (0, 0.0);
    let mut times = Vec::new();
    for seed in 0..seeds {
        let chain = generate::chain(kind, layers, seed).map_err(|error| error.to_string())?;
        let mut found = solved(&chain, Method::Auto, Some(seconds))?;
        times.push(found.solve.get());
        if found.status == Status::Optimal {
            proven += 1;
            continue;
        }
        // What is near enough already need not be waited for.
        if found.gap.is_none_or(|gap| gap * 100.0 > GAP) {
            found = solved(&chain, Method::Auto, Some(LATEST))?;
        }
        widest = f64::max(widest, found.gap.map_or(100.0, |gap| gap * 100.0));
        eprintln!(
            "bench solver: {} {layers}, seed {seed}: {} {:?}",
            kind.name(),
            found.status.name(),
            found.gap
        );
    }
    times.sort_by(f64::total_cmp);
    let name = format!("{} {layers}", kind.name());
    let Some(median) = times.get(times.len() / 2) else { return Ok(vec![]) };
    let share = 100.0 * f64::from(proven) / seeds as f64;
    Ok(vec![
        row(&format!("{name}: median time"), *median, "s", None),
        row(&format!("{name}: proven within {seconds} s"), share, "%", Some((PROVEN, share >= PROVEN))),
        row(&format!("{name}: widest gap at {LATEST} s"), widest, "%", Some((GAP, widest <= GAP))),
    ])
}
