//! Hands a program to CBC through good_lp and says truthfully what came back.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use good_lp::solvers::coin_cbc::coin_cbc;
use good_lp::{
    Expression, ProblemVariables, ResolutionError, Solution, SolutionStatus, SolverModel, Variable, variable,
};

use crate::mip::{Mip, Row};

/// CBC keeps global state: one solve at a time in a process. Held over building as well, so that waiting for another thread's
/// solve is charged to the time limit and not to CBC's own clock.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// What CBC said about a program.
#[derive(Clone, Debug)]
pub(crate) enum Outcome {
    /// The search ended. The values are claimed optimal.
    Finished { values: Vec<f64>, bound: f64 },
    /// The time limit came first. The values may be a relaxation's: whether they mean anything is for the caller to check.
    OutOfTime { values: Vec<f64>, bound: Option<f64> },
    /// No values satisfy the rows.
    Infeasible,
    /// CBC gave up.
    Failed(String),
}

/// Time for doubting a verdict of infeasibility.
const SECOND_LOOK: Duration = Duration::from_secs(10);

/// How long after its limit CBC may still answer: it looks at the clock between nodes and cut rounds only.
const GRACE: Duration = Duration::from_millis(250);
/// What a main thread has; a new one gets less.
const STACK_BYTES: usize = 8 << 20;

/// Solves `mip` to gap 0, or until `deadline`.
///
/// CBC's cuts can remove every solution of a program with badly spread coefficients, so an infeasible program is looked at once
/// more without cuts.
pub(crate) fn solve(mip: &Mip, deadline: Option<Instant>) -> Outcome {
    let first = run_until(mip, deadline, true);
    if !matches!(first, Outcome::Infeasible) {
        return first;
    }
    let soon = Instant::now() + SECOND_LOOK;
    match run_until(mip, Some(deadline.map_or(soon, |d| d.min(soon))), false) {
        Outcome::Finished { values, bound } => Outcome::Finished { values, bound },
        _ => first,
    }
}

/// Runs CBC, on a thread of its own where there is a deadline: CBC cannot be told to stop, so a run that does not look at the clock
/// in time is left behind. It ends when it next does look, and holds the lock until then.
fn run_until(mip: &Mip, deadline: Option<Instant>, cuts: bool) -> Outcome {
    let Some(deadline) = deadline else { return run(mip, None, cuts) };
    let (answer, answered) = mpsc::sync_channel(1);
    let mip = mip.clone();
    let work = move || {
        // Nobody listens any more when the answer comes too late.
        let _ = answer.send(run(&mip, Some(deadline), cuts));
    };
    if let Err(error) = thread::Builder::new().name("cbc".into()).stack_size(STACK_BYTES).spawn(work) {
        return Outcome::Failed(format!("cannot start a thread for CBC: {error}"));
    }
    let patience = deadline.saturating_duration_since(Instant::now()) + GRACE;
    match answered.recv_timeout(patience) {
        Ok(outcome) => outcome,
        Err(RecvTimeoutError::Timeout) => Outcome::OutOfTime { values: vec![], bound: None },
        Err(RecvTimeoutError::Disconnected) => Outcome::Failed("CBC's thread ended without an answer".into()),
    }
}

fn run(mip: &Mip, deadline: Option<Instant>, cuts: bool) -> Outcome {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let mut variables = ProblemVariables::new();
    let columns: Vec<Variable> = mip
        .binary
        .iter()
        .map(|binary| {
            variables.add(match binary {
                Some((lower, upper)) => variable().integer().min(*lower).max(*upper),
                None => variable().min(0.0),
            })
        })
        .collect();
    let objective = weighted(&columns, mip.costs.iter().copied().enumerate());
    let mut model = variables.minimise(objective).using(coin_cbc);
    for Row { terms, lower, upper } in &mip.rows {
        let sum = || weighted(&columns, terms.iter().copied());
        if lower == upper {
            model.add_constraint(sum().eq(*upper));
            continue;
        }
        if upper.is_finite() {
            model.add_constraint(sum().leq(*upper));
        }
        if lower.is_finite() {
            model.add_constraint(sum().geq(*lower));
        }
    }
    for (key, value) in [
        // Exact: the chain's weights reach down to 1e-5 ms beside objectives of 1e3 ms.
        ("ratioGap", "0"),
        ("allowableGap", "0"),
        ("increment", "1e-7"),
        ("primalTolerance", "1e-8"),
        // Its preprocessing substitutes binaries wrongly on some chains and then reports a dear plan as optimal.
        ("preprocess", "off"),
    ] {
        model.set_parameter(key, value);
    }
    if !cuts {
        model.set_parameter("cutsOnOff", "off");
    }
    if let Some(deadline) = deadline {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Outcome::OutOfTime { values: vec![], bound: None };
        }
        // Wall clock: CBC counts processor seconds unless told otherwise.
        model.set_parameter("timeMode", "elapsed");
        model.set_parameter("sec", &left.as_secs_f64().to_string());
    }
    match model.solve() {
        Ok(solution) => {
            let values = columns.iter().map(|c| solution.value(*c)).collect();
            let raw = solution.model();
            match solution.status() {
                SolutionStatus::Optimal => {
                    Outcome::Finished { values, bound: raw.obj_value() + mip.constant }
                }
                _ => {
                    let bound = raw.best_possible_value();
                    // CBC's infinity is 1e50 and the like.
                    let bound = (bound.abs() < 1e30).then_some(bound + mip.constant);
                    Outcome::OutOfTime { values, bound }
                }
            }
        }
        Err(ResolutionError::Infeasible) => Outcome::Infeasible,
        Err(other) => Outcome::Failed(other.to_string()),
    }
}

fn weighted(columns: &[Variable], terms: impl Iterator<Item = (usize, f64)>) -> Expression {
    let mut sum = Expression::default();
    for (column, weight) in terms.filter(|(_, w)| *w != 0.0) {
        sum.add_mul(weight, columns[column]);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Five equations over 40 binaries, weights below 100, right sides half the sums: no solution, and no quick way to see it.
    fn market_split() -> Mip {
        let mut mip = Mip::default();
        let columns: Vec<usize> = (0..40).map(|_| mip.binary(0.0, true)).collect();
        let mut state = 7u64;
        for _ in 0..5 {
            let terms: Vec<(usize, f64)> = columns
                .iter()
                .map(|column| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (*column, ((state >> 33) % 100) as f64)
                })
                .collect();
            let half = (terms.iter().map(|term| term.1).sum::<f64>() / 2.0).floor();
            mip.row(terms, half, half);
        }
        mip
    }

    /// S1: a stop without an incumbent is neither infeasible nor a solution.
    #[test]
    fn s1_a_stop_without_an_incumbent_is_told_from_a_solution() {
        let mip = market_split();
        for seconds in [0.0, 1.0] {
            let started = Instant::now();
            let outcome = solve(&mip, Some(started + Duration::from_secs_f64(seconds)));
            let Outcome::OutOfTime { values, .. } = outcome else { panic!("{outcome:?}") };
            let holds = |row: &Row| {
                let sum: f64 = row.terms.iter().map(|(column, weight)| weight * values[*column]).sum();
                (row.lower - 1e-6..=row.upper + 1e-6).contains(&sum)
            };
            let whole = values.iter().all(|value| (value - value.round()).abs() < 1e-6);
            assert!(values.is_empty() || !(whole && mip.rows.iter().all(holds)));
        }
    }

    /// S2: no values come back for a program without any.
    #[test]
    fn s2_an_infeasible_program_has_no_values() {
        let mut mip = Mip::default();
        let (x, y) = (mip.binary(0.0, true), mip.binary(0.0, true));
        mip.row(vec![(x, 1.0), (y, 1.0)], 3.0, f64::INFINITY);
        assert!(matches!(solve(&mip, None), Outcome::Infeasible));
    }
}
