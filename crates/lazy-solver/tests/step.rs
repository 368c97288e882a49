//! Whole steps: what the chain does not count still fits the caps.

use lazy_model::schedule::ExposedSeconds;
use lazy_model::timeline::{LinkRates, StepCosts};
use lazy_model::{Bytes, BytesPerSecond, Seconds, StepProblem, Streamed, TierBytes, Workspaces};
use lazy_solver::step::{StepOptions, solve_step};

const MIB: Bytes = Bytes::from_mib(1);

/// Six layers of 10 ms with boundaries of 1 MiB, and nothing but HBM.
fn problem(hbm: Bytes) -> StepProblem {
    let times = vec![Seconds::from_ms(10.0); 6];
    let rate = BytesPerSecond::from_gb(1.0);
    StepProblem {
        boundary_bytes: vec![MIB; 7],
        saved_bytes: vec![MIB * 10; 6],
        workspaces: Workspaces::default(),
        streamed: Streamed::default(),
        costs: StepCosts {
            prologue: Seconds::ZERO,
            forward: times.clone(),
            saving_forward: times.clone(),
            backward: times,
            epilogue: Seconds::ZERO,
            prologue_backward: Seconds::ZERO,
            links: LinkRates {
                d2h: rate,
                h2d: rate,
                nvme_write: rate,
                nvme_read: rate,
                ..LinkRates::default()
            },
        },
        micro_batches: 1,
        optimizer: Seconds::ZERO,
        fixed: TierBytes::default(),
        budgets: TierBytes { hbm, ..TierBytes::default() },
        max_segment: 4,
    }
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
