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

/// CBC keeps global state (where it is in its commands, a random number, pointers to what it preprocesses), and is built without the
/// switch that leaves them out: one solve at a time in a process. Held over building as well, so that waiting for another thread's
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

/// How near to a whole number a value counts as one.
pub(crate) const WHOLE: f64 = 1e-5;

/// Time for doubting a verdict of infeasibility.
const SECOND_LOOK: Duration = Duration::from_secs(10);

/// How long after its limit CBC may still answer: it looks at the clock between nodes and cut rounds only.
const GRACE: Duration = Duration::from_millis(250);
/// What a main thread has; a new one gets less.
const STACK_BYTES: usize = 8 << 20;

/// How CBC is set up.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Setup {
    Usual,
    /// Without cutting planes.
    NoCuts,
    /// Without scaling rows and columns.
    Unscaled,
}

/// Solves `mip` to gap 0, or until `deadline`.
///
/// CBC's cuts can remove every solution of a program with badly spread coefficients, so an infeasible program is looked at once
/// more without cuts.
///
/// The values that come with a finished search are not always those it found: a last solve of the relaxation, with integers fixed,
/// writes over them. The search itself is right then (value and bound), so it is repeated in another setup, and if that does not help, in
/// two halves.
pub(crate) fn solve(mip: &Mip, deadline: Option<Instant>) -> Outcome {
    let soon = || {
        let soon = Instant::now() + SECOND_LOOK;
        Some(deadline.map_or(soon, |d| d.min(soon)))
    };
    match run_until(mip, deadline, Setup::Usual) {
        Outcome::Infeasible => match run_until(mip, soon(), Setup::NoCuts) {
            Outcome::Finished { values, bound } if are_worth(mip, &values, bound) => {
                Outcome::Finished { values, bound }
            }
            Outcome::Finished { values, .. } => in_halves(mip, &values, deadline),
            _ => Outcome::Infeasible,
        },
        Outcome::Finished { values, bound } if !are_worth(mip, &values, bound) => {
            match run_until(mip, deadline, Setup::Unscaled) {
                Outcome::Finished { values, bound } if are_worth(mip, &values, bound) => {
                    Outcome::Finished { values, bound }
                }
                Outcome::OutOfTime { .. } => Outcome::OutOfTime { values: vec![], bound: Some(bound) },
                _ => in_halves(mip, &values, deadline),
            }
        }
        other => other,
    }
}

/// Whether `values` are whole where they must be and worth what CBC says the best solution is.
fn are_worth(mip: &Mip, values: &[f64], value: f64) -> bool {
    let whole = |v: &f64| (v - v.round()).abs() < WHOLE;
    let sum: f64 = mip.costs.iter().zip(values).map(|(cost, v)| cost * v).sum();
    mip.binary.iter().zip(values).all(|(range, v)| range.is_none() || whole(v))
        && (sum + mip.constant - value).abs() <= 1e-6 * (1.0 + value.abs())
}

/// The better of two programs, between which a column that `values` leave undecided is decided. Each has fewer open columns, so this ends.
fn in_halves(mip: &Mip, values: &[f64], deadline: Option<Instant>) -> Outcome {
    let open = |column: &usize| mip.binary[*column].is_some_and(|(lower, upper)| lower < upper);
    let fraction = |column: &usize| values.get(*column).map_or(0.0, |v| (v - v.round()).abs());
    let undecided =
        (0..mip.costs.len()).filter(open).max_by(|a, b| fraction(a).total_cmp(&fraction(b)).then(b.cmp(a)));
    let Some((column, (lower, upper))) = undecided.and_then(|c| Some((c, mip.binary[c]?))) else {
        return Outcome::Failed("CBC's values are not those of its best solution".into());
    };
    let below = values.get(column).map_or(lower, |v| v.floor()).clamp(lower, upper - 1.0);
    let half = |range: (f64, f64)| {
        let mut half = mip.clone();
        half.binary[column] = Some(range);
        solve(&half, deadline)
    };
    better(half((lower, below)), half((below + 1.0, upper)))
}

/// What is known about a program of which these are the two halves.
fn better(a: Outcome, b: Outcome) -> Outcome {
    match (a, b) {
        (Outcome::Infeasible, other) | (other, Outcome::Infeasible) => other,
        (Outcome::Failed(message), _) | (_, Outcome::Failed(message)) => Outcome::Failed(message),
        (Outcome::Finished { values, bound }, Outcome::Finished { bound: other, .. }) if bound <= other => {
            Outcome::Finished { values, bound }
        }
        (Outcome::Finished { .. }, finished @ Outcome::Finished { .. }) => finished,
        (Outcome::OutOfTime { bound: a, .. }, Outcome::OutOfTime { bound: b, .. }) => {
            Outcome::OutOfTime { values: vec![], bound: a.zip(b).map(|(a, b)| a.min(b)) }
        }
        // The finished half's solution is one of the whole.
        (Outcome::Finished { values, bound: a }, Outcome::OutOfTime { bound: b, .. })
        | (Outcome::OutOfTime { bound: b, .. }, Outcome::Finished { values, bound: a }) => {
            Outcome::OutOfTime { values, bound: b.map(|b| a.min(b)) }
        }
    }
}

/// Runs CBC, on a thread of its own where there is a deadline: CBC cannot be told to stop, so a run that does not look at the clock
/// in time is left behind. It has the deadline as its own limit, ends when it next looks at the clock, between two linear programs, and holds
/// the lock until then.
fn run_until(mip: &Mip, deadline: Option<Instant>, setup: Setup) -> Outcome {
    let Some(deadline) = deadline else { return run(mip, None, setup) };
    let (answer, answered) = mpsc::sync_channel(1);
    let mip = mip.clone();
    let work = move || {
        // Nobody listens any more when the answer comes too late.
        let _ = answer.send(run(&mip, Some(deadline), setup));
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

fn run(mip: &Mip, deadline: Option<Instant>, setup: Setup) -> Outcome {
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
        // Probing says that nothing is left to find by crossing a column's bounds. Where that ends the search at its root, CBC still runs
        // CLP's primal simplex over them, and a CLP built with assertions, as Debian's is, then aborts the process.
        ("probing", "off"),
    ] {
        model.set_parameter(key, value);
    }
    match setup {
        Setup::Usual => {}
        Setup::NoCuts => model.set_parameter("cutsOnOff", "off"),
        Setup::Unscaled => model.set_parameter("scaling", "off"),
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

    /// A knapsack with one real column, dearest when overfull.
    fn knapsack() -> Mip {
        let mut mip = Mip { constant: 3.0, ..Mip::default() };
        let items: Vec<usize> = [5.0, 7.0, 4.0, 3.0].iter().map(|worth| mip.binary(-worth, true)).collect();
        let excess = mip.real(2.0);
        let weights = [3.0, 4.0, 2.0, 2.0];
        let load = items.iter().copied().zip(weights).chain([(excess, -1.0)]).collect();
        mip.at_most(load, 6.0);
        mip
    }

    #[test]
    fn two_halves_have_the_optimum_of_the_whole() {
        let mip = knapsack();
        let Outcome::Finished { bound: whole, .. } = solve(&mip, None) else { panic!() };
        // By hand: 7 and 4 just fit and are worth 11; what weighs more comes to 10 at most, its excess paid.
        assert!((whole - (3.0 - 11.0)).abs() < 1e-9, "{whole}");
        for values in [vec![], vec![0.3, 0.5, 0.0, 1.0, 0.0]] {
            let Outcome::Finished { values, bound } = in_halves(&mip, &values, None) else { panic!() };
            assert!((bound - whole).abs() < 1e-9);
            assert!(are_worth(&mip, &values, bound));
        }
        let mut none = knapsack();
        none.row(vec![(0, 1.0), (1, 1.0)], 3.0, f64::INFINITY);
        assert!(matches!(in_halves(&none, &[], None), Outcome::Infeasible));
    }

    #[test]
    fn values_that_are_not_the_best_solutions_are_told_from_it() {
        let mip = knapsack();
        assert!(are_worth(&mip, &[0.0, 1.0, 1.0, 0.0, 0.0], -8.0));
        // A solution, but a dearer one; and a cheap fraction of one.
        assert!(!are_worth(&mip, &[1.0, 0.0, 1.0, 0.0, 0.0], -8.0));
        assert!(!are_worth(&mip, &[0.8, 1.0, 0.0, 0.0, 0.0], -8.0));
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
