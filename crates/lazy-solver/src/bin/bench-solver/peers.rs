//! Other solvers on the naive program: the program `cbc`, and Python's SCIP and HiGHS where they import.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use lazy_model::CostChain;
use serde_json::Value;

use crate::Outcome;
use crate::naive;

const SCRIPT: &str = include_str!("peers.py");

#[derive(Clone, Copy)]
enum Solver {
    Cbc,
    Highs,
    Scip,
}

/// A solver that is installed, and its time limit in seconds.
pub(crate) struct Peer {
    solver: Solver,
    limit: f64,
}

/// How far a peer came.
pub(crate) struct Theirs {
    pub(crate) seconds: f64,
    pub(crate) optimal: bool,
    /// Relative; infinite where there is no incumbent.
    pub(crate) gap: f64,
}

impl Peer {
    /// The peers found, none for a limit of zero.
    pub(crate) fn available(limit: f64) -> Vec<Peer> {
        let found = [
            (Solver::Cbc, runs(Command::new("cbc").arg("quit"))),
            (Solver::Highs, runs(Command::new("python3").args(["-c", "import highspy"]))),
            (Solver::Scip, runs(Command::new("python3").args(["-c", "import pyscipopt"]))),
        ];
        let peers = found.into_iter().filter(|(_, there)| *there && limit > 0.0);
        peers.map(|(solver, _)| Peer { solver, limit }).collect()
    }

    pub(crate) fn name(&self) -> &'static str {
        match self.solver {
            Solver::Cbc => "CBC",
            Solver::Highs => "HiGHS",
            Solver::Scip => "SCIP",
        }
    }

    /// Solves the naive program of `chain`; `None` where there is none.
    pub(crate) fn solve(&self, chain: &CostChain) -> Outcome<Option<Theirs>> {
        let Some(program) = naive::lp(chain) else { return Ok(None) };
        let folder = std::env::temp_dir().join(format!("lazy-bench-solver-{}", std::process::id()));
        fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let answer = self.solve_in(&folder, &program);
        // Only our own files are in it.
        let _ = fs::remove_dir_all(&folder);
        answer.map(Some)
    }

    fn solve_in(&self, folder: &Path, program: &str) -> Outcome<Theirs> {
        let file = folder.join("chain.lp");
        fs::write(&file, program).map_err(|error| format!("{}: {error}", file.display()))?;
        match self.solver {
            Solver::Cbc => self.cbc(&file, &folder.join("solution.txt")),
            Solver::Highs => self.python("highs", &file),
            Solver::Scip => self.python("scip", &file),
        }
    }

    fn cbc(&self, file: &PathBuf, solution: &PathBuf) -> Outcome<Theirs> {
        let mut command = Command::new("cbc");
        command.arg(file).args(["-timeMode", "elapsed", "-sec", &self.limit.to_string()]);
        command.args(["-ratioGap", "0", "-allowableGap", "0", "-solve", "-solution"]).arg(solution);
        let start = Instant::now();
        let log = output(&mut command)?;
        let seconds = start.elapsed().as_secs_f64();
        let number = |label: &str| {
            let line = log.lines().rfind(|line| line.contains(label))?;
            line.split(':').next_back()?.trim().parse::<f64>().ok()
        };
        let first = fs::read_to_string(solution).unwrap_or_default();
        let gap = match (number("Objective value"), number("Lower bound")) {
            (Some(value), Some(bound)) => (value - bound) / value.abs().max(1e-9),
            _ => f64::INFINITY,
        };
        Ok(Theirs { seconds, optimal: first.starts_with("Optimal"), gap })
    }

    fn python(&self, solver: &str, file: &Path) -> Outcome<Theirs> {
        let mut command = Command::new("python3");
        command.args(["-c", SCRIPT, solver]).arg(file).arg(self.limit.to_string());
        let answer = output(&mut command)?;
        let answer: Value =
            serde_json::from_str(answer.lines().rfind(|line| line.starts_with('{')).unwrap_or_default())
                .map_err(|error| format!("{} printed no JSON: {error}", self.name()))?;
        Ok(Theirs {
            seconds: answer["seconds"].as_f64().unwrap_or(self.limit),
            optimal: answer["optimal"] == true,
            gap: answer["gap"].as_f64().unwrap_or(f64::INFINITY),
        })
    }
}

fn runs(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

fn output(command: &mut Command) -> Outcome<String> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot start {command:?}: {error}"))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
