//! What the runtime takes of a step, and how near a step comes to its plan; prints the rows that `cargo xtask bench runtime` shows.
//!
//! Steps of 64 layers that take no time are timed by criterion: microseconds an operation of the plan's list. Then random chains are planned
//! by the solver and carried out on the host device at set bandwidths, with layers that sleep for a set time.
//!
//! `--dir FOLDER` is where spill files go (the system's temporary folder; one in RAM shows no drive), `--chains N` the chains of the table (32),
//! `--distances N` those shown with read-ahead distances (4), `--steps N` the steps timed of each plan (3), `--first N` the first chain's
//! number, `--seconds S` criterion's time for each of its figures (3; 0: leaves them out).

mod layers;
mod overhead;
mod problem;
mod promises;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use promises::Amount;
use serde_json::Value;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    // Standard output is for the rows. What else is printed there goes to standard error.
    let mut output = File::from(rustix::io::dup(std::io::stdout())?);
    rustix::stdio::dup2_stdout(std::io::stderr())?;
    let (dir, numbers) = flags()?;
    let number = |flag: &str, default: f64| numbers.get(flag).copied().unwrap_or(default);
    let amount = Amount {
        chains: number("--chains", 32.0) as usize,
        distances: number("--distances", 4.0) as usize,
        steps: (number("--steps", 3.0) as usize).max(1),
        first: number("--first", 0.0) as u64,
    };
    let seconds = number("--seconds", 3.0);
    let mut rows = Vec::new();
    if seconds > 0.0 {
        rows.extend(overhead::rows(&dir, seconds)?);
    }
    rows.extend(promises::rows(&dir, &amount)?);
    let text = format!("{:#}\n", Value::from(rows));
    Ok(output.write_all(text.as_bytes())?)
}

/// The folder, and the flags with numbers.
fn flags() -> Outcome<(PathBuf, BTreeMap<String, f64>)> {
    let mut numbers = BTreeMap::new();
    let mut dir = std::env::temp_dir();
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or_else(|| format!("`{flag}` needs a value"))?;
        match flag.as_str() {
            "--dir" => dir = PathBuf::from(value),
            "--chains" | "--distances" | "--steps" | "--first" | "--seconds" => {
                let number = value.parse::<f64>().ok().filter(|given| *given >= 0.0);
                let number = number.ok_or_else(|| format!("`{flag}` needs a number of 0 or more"))?;
                numbers.insert(flag, number);
            }
            _ => return Err(format!("no flag `{flag}`: see the page of bench-runtime").into()),
        }
    }
    Ok((dir, numbers))
}
