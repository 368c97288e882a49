//! `cargo xtask bench NAME`: starts a benchmark, checks its rows, prints a table.
//!
//! A benchmark is a binary target named `bench-NAME` in any workspace crate. It prints one JSON array of rows on
//! standard output and anything else on standard error. It interleaves the runs of what it compares and
//! gives medians. A row's keys:
//!
//! - `row`, `value`, `unit`: what was measured, the median, its unit;
//! - `against`, `against_value`, `ratio`: the peer, its median in the same unit, `value / against_value`
//!   (all three null where there is no peer);
//! - `ratio_interval`: where ours and the peer took turns, `ratio` is the median of the pairs' ratios, and this the interval
//!   in which that median lies, optional;
//! - `target`, `met`: the stated goal, for the ratio where there is a peer, else for the value, and whether it is
//!   met (both null where no goal is stated); `at_most`: whether less is better, optional;
//! - `spread`, `against_spread`: smallest and largest of the runs, optional.

mod rows;

use std::io::Write;
use std::process::{Command, Stdio};

use clap::Args;
use serde_json::Value;

use crate::{Outcome, cargo, native, programs};

#[derive(Args)]
pub(crate) struct Options {
    /// Which benchmark; without a name, lists them
    name: Option<String>,
    /// Print the rows as a JSON array, and nothing else, on standard output
    #[arg(long)]
    json: bool,
    /// Flags of the benchmark itself, after `--`
    #[arg(last = true, value_name = "FLAGS")]
    flags: Vec<String>,
}

pub(crate) fn run(options: &Options) -> Outcome<()> {
    let others = registered(&cargo::metadata()?);
    if matches!(options.name.as_deref(), Some("store" | "optim")) {
        native::offer("fio", "--version", "fio");
    }
    let rows = match options.name.as_deref() {
        None => return list(&others, options.json),
        Some(name) => match others.iter().find(|bench| bench.name == name) {
            Some(bench) => bench.measure(&options.flags)?,
            None => return Err(format!("no benchmark `{name}`: `cargo xtask bench` lists them")),
        },
    };
    rows::validate(&rows)?;
    print(&if options.json { format!("{rows:#}\n") } else { rows::table(&rows) })
}

fn list(others: &[Bench], json: bool) -> Outcome<()> {
    let names: Vec<_> = others.iter().map(|bench| bench.name.as_str()).collect();
    print(&if json { format!("{}\n", Value::from(names)) } else { format!("{}\n", names.join("\n")) })
}

/// Our own words on standard output, the only ones.
fn print(text: &str) -> Outcome<()> {
    std::io::stdout().write_all(text.as_bytes()).map_err(|error| format!("cannot print: {error}"))
}

/// A binary target that measures.
#[derive(Debug, PartialEq, Eq)]
struct Bench {
    name: String,
    package: String,
    features: Vec<String>,
}

fn registered(metadata: &Value) -> Vec<Bench> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut found = Vec::new();
    for package in list(&metadata["packages"]) {
        // Packages from a registry are not ours.
        if !package["source"].is_null() {
            continue;
        }
        for target in list(&package["targets"]) {
            let name = target["name"].as_str().and_then(|name| name.strip_prefix("bench-"));
            if let Some(name) = name.filter(|_| list(&target["kind"]).iter().any(|kind| kind == "bin")) {
                let features = list(&target["required-features"]);
                found.push(Bench {
                    name: name.to_owned(),
                    package: package["name"].as_str().unwrap_or_default().to_owned(),
                    features: features.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
                });
            }
        }
    }
    found
}

impl Bench {
    fn measure(&self, flags: &[String]) -> Outcome<Value> {
        let binary = format!("bench-{}", self.name);
        let features: Vec<_> = self.features.iter().map(String::as_str).collect();
        let executable = programs::build(&self.package, &binary, &features)?;
        output_json(Command::new(executable).args(flags), &binary)
    }
}

/// Runs a program that prints JSON on standard output.
fn output_json(command: &mut Command, name: &str) -> Outcome<Value> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot start `{name}`: {error}"))?;
    if !output.status.success() {
        return Err(format!("`{name}` ended with {}", output.status));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| format!("`{name}` printed no valid JSON: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn binaries_named_bench_register_themselves() {
        let metadata = json!({"packages": [
            {"name": "lazy-store", "source": null, "targets": [
                {"name": "bench-store", "kind": ["bin"], "required-features": ["bench"]},
                {"name": "bench-lib", "kind": ["lib"]},
            ]},
            {"name": "other", "source": "registry+x", "targets": [{"name": "bench-other", "kind": ["bin"]}]},
        ]});
        let expected =
            Bench { name: "store".into(), package: "lazy-store".into(), features: vec!["bench".into()] };
        assert_eq!(registered(&metadata), [expected]);
    }
}
