//! `cargo xtask test`: everything continuous integration runs, stopping at the first failure.

use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;

use crate::{Outcome, cargo, native, tidy};

/// Property tests run this many cases each with `--deep`; proptest's own default is 256.
const DEEP_CASES: &str = "4096";

#[derive(Args)]
pub(crate) struct Options {
    /// Give property tests 16 times as many cases
    #[arg(long)]
    deep: bool,
    /// Only leave each wait that lazy-store derives out in turn, and list the seed at which tests notice
    #[arg(long)]
    mutate_waits: bool,
}

/// The list goes to standard error; the test fails where a wait can be left out unnoticed.
const MUTANTS: &[&str] = &[
    "test",
    "--package",
    "lazy-store",
    "--package",
    "lazy-runtime",
    "--features",
    "lazy-store/test-util",
    "--test",
    "hazards",
    "--test",
    "interleavings",
    "--",
    "mutants",
    "--nocapture",
];

enum Work {
    Check(fn() -> Outcome<()>),
    Cargo(&'static [&'static str]),
}

/// All stages share the default target folder and feature set, so that each reuses what the last one built.
const STAGES: [(&str, Work); 7] = [
    ("native libraries", Work::Check(native::ensure_cbc)),
    ("toolchain", Work::Check(native::ensure_components)),
    ("fmt", Work::Cargo(&["fmt", "--all", "--check"])),
    ("tidy", Work::Check(tidy::run)),
    (
        "clippy",
        Work::Cargo(&["clippy", "--workspace", "--all-targets", "--all-features", "--", "-Dwarnings"]),
    ),
    // Unit, integration and documentation tests.
    ("test", Work::Cargo(&["test", "--workspace", "--all-features"])),
    ("doc", Work::Cargo(&["doc", "--workspace", "--all-features", "--no-deps"])),
];

pub(crate) fn run(options: &Options) -> Outcome<()> {
    if options.mutate_waits {
        return run_cargo(MUTANTS, options.deep);
    }
    let mut times = Vec::new();
    let outcome = STAGES.iter().try_for_each(|(name, work)| {
        eprintln!("xtask: {name}");
        let start = Instant::now();
        let outcome = match work {
            Work::Check(check) => check(),
            Work::Cargo(args) => run_cargo(args, options.deep),
        };
        times.push((*name, start.elapsed()));
        outcome.map_err(|message| format!("stage `{name}` FAILED: {message}"))
    });
    eprint!("{}", summary(&times));
    outcome
}

fn run_cargo(args: &[&str], deep: bool) -> Outcome<()> {
    let mut command: Command = cargo::command(args[0]);
    command.args(&args[1..]).current_dir(cargo::root()).env("RUSTDOCFLAGS", "-Dwarnings");
    if deep {
        command.env("PROPTEST_CASES", DEEP_CASES);
    }
    let status = command.status().map_err(|error| format!("cannot start cargo: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("`cargo {}` ended with {status}", args.join(" "))) }
}

fn summary(times: &[(&str, Duration)]) -> String {
    let mut text = String::from("xtask: wall time per stage\n");
    for (name, time) in times {
        text += &format!("  {name:<18}{:>8.1} s\n", time.as_secs_f64());
    }
    let total: Duration = times.iter().map(|(_, time)| *time).sum();
    text + &format!("  {:<18}{:>8.1} s\n", "total", total.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_lists_stages_and_their_sum() {
        let text = summary(&[("fmt", Duration::from_millis(1500)), ("test", Duration::from_secs(61))]);
        assert_eq!(
            text,
            "xtask: wall time per stage\n  fmt                    1.5 s\n  test                  61.0 s\n  total                 62.5 s\n"
        );
    }
}
