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
