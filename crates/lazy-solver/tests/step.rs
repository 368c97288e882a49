//! Whole steps: what the chain does not count still fits the caps.

#[path = "common/steps.rs"]
mod steps;

use lazy_model::schedule::ExposedSeconds;
use lazy_model::{Bytes, StepProblem};
use lazy_solver::step::{StepOptions, solve_step};
use steps::MIB;

/// Six layers, and nothing but HBM.
fn problem(hbm: Bytes) -> StepProblem {
    let mut problem = steps::step(6, [0; 3], 1.0);
    problem.budgets.hbm = hbm;
    problem
}

#[test]
fn a_cap_a_page_too_small_costs_one_boundary() {
    // All seven boundaries and a gradient need 8 MiB at the turn, or six with two gradients right after it, beside one layer's internals.
    let all = solve_step(&problem(MIB * 18), &StepOptions::default()).unwrap();
    assert_eq!(all.schedule.counts().hbm, 7);
    let cap = Bytes((MIB * 18).get() - 4096);
    let fewer = solve_step(&problem(cap), &StepOptions::default()).unwrap();
    assert_eq!((fewer.schedule.counts().hbm, fewer.schedule.counts().recompute), (6, 1));
    assert!(fewer.verified.promise.peak_bytes.hbm <= cap);
    // One more forward of one layer, and nothing waits.
    let slower = fewer.verified.promise.step_s - all.verified.promise.step_s;
    assert!((slower.as_ms() - 10.0).abs() < 1e-6, "{slower}");
    assert_eq!(fewer.verified.promise.exposed_s, ExposedSeconds::default());
}
