//! Steps of equal layers, to be varied.

use lazy_model::timeline::{LinkRates, StepCosts};
use lazy_model::{Bytes, BytesPerSecond, Seconds, StepProblem, Streamed, TierBytes, Workspaces};

pub(crate) const MIB: Bytes = Bytes::from_mib(1);

/// Boundaries of 1 MiB, internals of 10, layers of 10 ms forward and 20 backward, a loss of 5 ms, links that move a boundary in `link_ms`,
/// budgets in MiB, and blocks of up to four layers.
pub(crate) fn step(layers: usize, budgets: [u64; 3], link_ms: f64) -> StepProblem {
    let times = |ms: f64| vec![Seconds::from_ms(ms); layers];
    let [hbm, host, nvme] = budgets.map(|n| MIB * n);
    StepProblem {
        boundary_bytes: vec![MIB; layers + 1],
        saved_bytes: vec![MIB * 10; layers],
        workspaces: Workspaces::default(),
        streamed: Streamed::default(),
        costs: StepCosts {
            prologue: Seconds::ZERO,
            forward: times(10.0),
            saving_forward: times(10.0),
            internals_forward: times(10.0),
            backward: times(20.0),
            epilogue: Seconds::from_ms(5.0),
            prologue_backward: Seconds::ZERO,
            links: links(BytesPerSecond(MIB.get() as f64 / (link_ms / 1e3))),
        },
        micro_batches: 1,
        optimizer: Seconds::ZERO,
        fixed: TierBytes::default(),
        budgets: TierBytes { hbm, host, nvme },
        beside_backward: None,
        max_segment: 4,
    }
}

fn links(rate: BytesPerSecond) -> LinkRates {
    LinkRates { d2h: rate, h2d: rate, nvme_write: rate, nvme_read: rate, ..LinkRates::default() }
}
