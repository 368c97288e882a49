//! Steps of equal layers, to be varied.

use lazy_model::timeline::{LinkRates, StepCosts};
use lazy_model::{Bytes, BytesPerSecond, Seconds, StepProblem, Streamed, TierBytes, Workspaces};

/// Two micro-batches of layers of 10 ms forward, 12 where they keep their internals, 11 for those alone, 20 backward, a loss of 5 and an optimizer of 7, boundaries of `boundary` and ten times
/// that in internals, links of 1 GB/s, no budgets.
pub(crate) fn step(layers: usize, boundary: Bytes) -> StepProblem {
    let rate = BytesPerSecond::from_gb(1.0);
    let times = |ms: f64| vec![Seconds::from_ms(ms); layers];
    StepProblem {
        boundary_bytes: vec![boundary; layers + 1],
        saved_bytes: vec![boundary * 10; layers],
        workspaces: Workspaces::default(),
        streamed: Streamed::default(),
        costs: StepCosts {
            prologue: Seconds::ZERO,
            forward: times(10.0),
            saving_forward: times(12.0),
            internals_forward: times(11.0),
            backward: times(20.0),
            epilogue: Seconds::from_ms(5.0),
            prologue_backward: Seconds::ZERO,
            links: LinkRates {
                d2h: rate,
                h2d: rate,
                nvme_write: rate,
                nvme_read: rate,
                ..LinkRates::default()
            },
        },
        micro_batches: 2,
        optimizer: Seconds::from_ms(7.0),
        fixed: TierBytes::default(),
        budgets: TierBytes::default(),
        beside_backward: None,
        max_segment: 4,
    }
}
