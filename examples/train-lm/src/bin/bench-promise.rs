//! Promised and measured: a profile is measured by one process, and steps are planned with it and run by another, at set rates of the
//! host device's links and under several caps. `cargo xtask bench promise`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "prints rows for cargo xtask bench")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use clap::Parser;
use lazy_model::Schedule;
use serde_json::{Value, json};
use train_lm::metrics::StepMetrics;
use train_lm::probe::median;
use train_lm::report::Record;
use train_lm::run_folder::read_metrics;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A step may take this share more or less than promised.
const STEP: f64 = 0.05;
/// Exposed time may be off by this share of the time that transfers take.
const EXPOSED: f64 = 0.1;

/// Promised and measured steps of the trainer, a row each
#[derive(Parser)]
struct Cli {
    /// Steps of each run; the first two do not count
    #[arg(long, value_name = "N", default_value_t = 12)]
    steps: u64,
    /// Profiles and runs of each case; the median of their ratios counts
    #[arg(long, value_name = "N", default_value_t = 5)]
    repeat: usize,
    /// Only cases whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Folder for runs and spill files, on a drive; default: the current one
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
    /// Be `train-lm` itself
    #[command(subcommand)]
    program: Option<train_lm::cli::Command>,
}

/// What is set, for both processes.
struct Case {
    name: &'static str,
    throttle: &'static str,
    flags: &'static [&'static str],
}

const CASES: [Case; 8] = [
    case("links of 2 GB/s", "h2d=2,d2h=2,nvme_read=2,nvme_write=2", &[]),
    case("links of 0.2 GB/s", "h2d=0.2,d2h=0.2,nvme_read=0.2,nvme_write=0.2", &[]),
    case("NVMe of 0.05 GB/s", "h2d=0.5,d2h=0.5,nvme_read=0.05,nvme_write=0.05", &[]),
    case("out slower than in", "h2d=0.5,d2h=0.05,nvme_read=0.5,nvme_write=0.05", &[]),
    case(
        "little HBM",
        "h2d=0.2,d2h=0.2,nvme_read=0.1,nvme_write=0.1",
        &["--hbm-mib", "58", "--host-mib", "30"],
    ),
    case(
        "much HBM",
        "h2d=0.2,d2h=0.2,nvme_read=0.1,nvme_write=0.1",
        &["--hbm-mib", "96", "--host-mib", "25"],
    ),
    case(
        "too slow to hide",
        "h2d=0.02,d2h=0.02,nvme_read=0.02,nvme_write=0.02",
        &["--hbm-mib", "58", "--host-mib", "40"],
    ),
    case("two micro-batches", "h2d=0.2,d2h=0.2,nvme_read=0.1,nvme_write=0.1", &["--accum", "2"]),
];

const fn case(name: &'static str, throttle: &'static str, flags: &'static [&'static str]) -> Case {
    Case { name, throttle, flags }
}

/// One profile and one run.
struct Sample {
    promised: f64,
    measured: f64,
    /// Exposed time, promised and measured, and what the transfers took, of the median step; seconds.
    exposed: [f64; 2],
    transfers: f64,
    letters: String,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Some(program) = cli.program {
        return program.run();
    }
    match rows(&cli) {
        Ok(rows) => {
            println!("{}", Value::from(rows));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("bench-promise: {error}");
            ExitCode::FAILURE
        }
    }
}

fn rows(cli: &Cli) -> Outcome<Vec<Value>> {
    let work = cli.dir.join(format!("bench-promise-{}", std::process::id()));
    fs::create_dir_all(&work)?;
    let measured = measure(cli, &work);
    // What went wrong in a run is told first.
    let removed = fs::remove_dir_all(&work);
    let mut rows = Vec::new();
    for (case, samples) in measured? {
        rows.extend(of_case(case, &samples));
    }
    removed?;
    Ok(rows)
}

/// All cases in turn, as often as was asked for: what disturbs one disturbs the others too.
fn measure(cli: &Cli, work: &Path) -> Outcome<Vec<(&'static Case, Vec<Sample>)>> {
    let wanted = CASES.iter().filter(|case| case.name.contains(&cli.only));
    let mut all: Vec<(&Case, Vec<Sample>)> = wanted.map(|case| (case, Vec::new())).collect();
    for _ in 0..cli.repeat {
        for (case, samples) in &mut all {
            let sample = sample(case, cli.steps, work)?;
            eprintln!(
                "{}: {} promised {:.1} ms, measured {:.1} ms; exposed {:.1} and {:.1} ms of {:.1} ms moved",
                case.name,
                sample.letters,
                1e3 * sample.promised,
                1e3 * sample.measured,
                1e3 * sample.exposed[0],
                1e3 * sample.exposed[1],
                1e3 * sample.transfers
            );
            samples.push(sample);
        }
    }
    Ok(all)
}

fn sample(case: &Case, steps: u64, work: &Path) -> Outcome<Sample> {
    let (profile, run) = (work.join("profile.json"), work.join("run"));
    let text = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
    let path = |path: &Path| path.to_string_lossy().into_owned();
    let shared = |subcommand: &str| {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(subcommand).args(["--throttle", case.throttle]).args(["--text", text]);
        command.arg("--nvme-dir").arg(work.join("spill"));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Ok::<_, std::io::Error>(command)
    };
    finish(shared("probe")?.args(case.flags).arg("--write").arg(&profile))?;
    let steps = steps.to_string();
    finish(shared("train")?.args(case.flags).args([
        "--profile",
        &path(&profile),
        "--out",
        &path(&run),
        "--steps",
        &steps,
        "--trace-steps",
        "0",
    ]))?;
    let sample = read(&run);
    fs::remove_dir_all(&run)?;
    sample
}

fn finish(command: &mut Command) -> Outcome<()> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr)).into())
}

fn read(run: &Path) -> Outcome<Sample> {
    let metrics = read_metrics(run, u64::MAX)?;
    let schedule = Schedule::from_json(&fs::read_to_string(run.join("schedule.json"))?)?;
    let promise = schedule.promise.ok_or("the schedule promises nothing")?;
    let busy = Record::read(run)?.promised.busy_s;
    let middle =
        |of: fn(&StepMetrics) -> f64| median(metrics.iter().filter(|m| m.step >= 2).map(of).collect());
    Ok(Sample {
        promised: promise.step_s.get(),
        measured: middle(|m| m.seconds.step.get()),
        exposed: [promise.exposed_s.total().get(), middle(|m| m.exposed_s.total().get())],
        transfers: (busy.d2h + busy.h2d + busy.nvme_write + busy.nvme_read).get(),
        letters: schedule.placement_letters(),
    })
}

/// The step, and what is exposed.
fn of_case(case: &Case, samples: &[Sample]) -> [Value; 2] {
    let middle = |of: &dyn Fn(&Sample) -> f64| median(samples.iter().map(of).collect());
    let ratios: Vec<f64> = samples.iter().map(|s| s.measured / s.promised).collect();
    let ratio = median(ratios.clone());
    let (least, most) = ratios.iter().fold((f64::MAX, 0.0f64), |(a, b), r| (a.min(*r), b.max(*r)));
    let off = middle(&|s| 100.0 * (s.exposed[1] - s.exposed[0]).abs() / s.transfers.max(1e-9));
    let letters = samples.first().map_or("", |sample| &sample.letters);
    [
        json!({
            "row": format!("{} {letters}: step", case.name),
            "value": 1e3 * middle(&|s| s.measured), "unit": "ms", "against": "promised",
            "against_value": 1e3 * middle(&|s| s.promised), "ratio": ratio,
            "ratio_interval": [least, most], "target": 1.0 + STEP,
            "met": (ratio - 1.0).abs() <= STEP, "at_most": true,
        }),
        json!({
            "row": format!(
                "{}: exposed {:.2} ms, promised {:.2} ms; off by, of {:.1} ms moved", case.name,
                1e3 * middle(&|s| s.exposed[1]), 1e3 * middle(&|s| s.exposed[0]), 1e3 * middle(&|s| s.transfers)
            ),
            "value": off, "unit": "%", "against": null, "against_value": null, "ratio": null,
            "target": 100.0 * EXPOSED, "met": off <= 100.0 * EXPOSED, "at_most": true,
        }),
    ]
}
