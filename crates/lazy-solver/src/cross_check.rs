//! The whole program solved by microlp instead of CBC. Slow, and for small chains only: tests hold CBC against it.

use lazy_model::CostChain;
use microlp::{ComparisonOp, Error, LinearExpr, OptimizationDirection, Problem, Variable};

use crate::cbc::Outcome;
use crate::error::SolverError;
use crate::mip::{Mip, Row};
use crate::problem::Goal;
use crate::search::search_with;
use crate::solve::{Method, Solution, answer, check};

/// The placement with the least objective by the chain's own weights, found by microlp. `solve` of the answer is zero.
///
/// # Errors
/// [`SolverError`] for an invalid chain.
pub fn cross_check(chain: &CostChain) -> Result<Solution, SolverError> {
    check(chain)?;
    Ok(answer(search_with(chain, Goal::Cost, None, microlp), Method::Mip))
}

fn microlp(mip: &Mip) -> Outcome {
    let mut problem = Problem::new(OptimizationDirection::Minimize);
    let columns: Vec<Variable> = mip
        .costs
        .iter()
        .zip(&mip.binary)
        .map(|(cost, range)| match range {
            Some((lower, upper)) => problem.add_integer_var(*cost, (*lower as i32, *upper as i32)),
            None => problem.add_var(*cost, (0.0, f64::INFINITY)),
        })
        .collect();
    for Row { terms, lower, upper } in &mip.rows {
        let mut add = |comparison, side| {
            let mut sum = LinearExpr::empty();
            for (column, weight) in terms.iter().filter(|term| term.1 != 0.0) {
                sum.add(columns[*column], *weight);
            }
            problem.add_constraint(sum, comparison, side);
        };
        if upper.is_finite() {
            add(ComparisonOp::Le, *upper);
        }
        if lower.is_finite() {
            add(ComparisonOp::Ge, *lower);
        }
    }
    match problem.solve() {
        Ok(outcome) => match outcome.into_solution() {
            Ok(solution) => Outcome::Finished {
                values: columns.iter().map(|column| solution.var_value(*column)).collect(),
                bound: solution.objective() + mip.constant,
            },
            Err(_) => Outcome::OutOfTime { values: vec![], bound: None },
        },
        Err(Error::Infeasible) => Outcome::Infeasible,
        Err(other) => Outcome::Failed(other.to_string()),
    }
}
