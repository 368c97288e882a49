//! Cost chains made from a seed: uneven layers on the machine of the published instances.

use lazy_model::CostChain;
use serde_json::json;

const GIB: f64 = 1_073_741_824.0;
const RATE: f64 = 12e9;
const WINDOW_SCALE: f64 = 5.0;

/// How the layers of a chain differ, and how tight its budgets are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    /// HBM 14 %, host 8 % of all bytes and PCIe room 6 %, so that something is exposed; else 47 %, 30 % and plenty.
    pub(crate) tight: bool,
    /// Sizes to the byte; else in steps of 64 KiB.
    pub(crate) byte_granular: bool,
}

impl Kind {
    pub(crate) const ALL: [Kind; 4] = [
        Kind { tight: false, byte_granular: false },
        Kind { tight: false, byte_granular: true },
        Kind { tight: true, byte_granular: false },
        Kind { tight: true, byte_granular: true },
    ];

    pub(crate) fn name(self) -> String {
        let tight = if self.tight { "het-tight" } else { "het" };
        format!("{tight}{}", if self.byte_granular { " to the byte" } else { "" })
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn unit(&mut self) -> f64 {
        self.below(1 << 53) as f64 / (1u64 << 53) as f64
    }
}

/// The chain of a kind, a number of layers and a seed: random sizes, costs and mandatory traffic.
pub(crate) fn chain(kind: Kind, layers: usize, seed: u64) -> Result<CostChain, lazy_model::ChainError> {
    let mut r = Random(seed << 20 | (layers as u64) << 4 | u64::from(kind.tight) << 1);
    let recompute: Vec<f64> = (0..layers).map(|_| (80 + r.below(161)) as f64 / 10.0).collect();
    let window: Vec<f64> =
        recompute.iter().map(|ms| (ms * [8.0, 10.0, 11.0][r.below(3) as usize]).round() / 10.0).collect();
    let step = if kind.byte_granular { 1 } else { 65536 };
    let sizes: Vec<u64> = (0..=layers).map(|_| ((0.3 + 0.8 * r.unit()) * GIB) as u64 / step * step).collect();
    let total = sizes.iter().sum::<u64>() as f64;
    let mandatory: Vec<u64> = if kind.tight {
        let shares: Vec<f64> = (0..layers).map(|_| 0.2 + r.unit()).collect();
        let unit = 0.06 * total / shares.iter().sum::<f64>();
        let room = shares.iter().map(|share| share * unit);
        window.iter().zip(room).map(|(ms, room)| (RATE * ms * WINDOW_SCALE / 1e3 - room) as u64).collect()
    } else {
        let share = |r: &mut Random| 0.55 + 0.15 * r.unit();
        window.iter().map(|ms| (RATE * ms * WINDOW_SCALE / 1e3 * share(&mut r)) as u64).collect()
    };
    let (gpu, cpu) = if kind.tight { (0.14, 0.08) } else { (0.47, 0.3) };
    let budget = |share: f64| (total * share) as u64;
    let chain = json!({
        "layers": layers, "layer_window_ms": window, "layer_recompute_ms": recompute,
        "boundary_bytes": sizes, "param_h2d_bytes": mandatory, "grad_d2h_bytes": mandatory,
        "gpu_budget_bytes": budget(gpu), "cpu_budget_bytes": budget(cpu), "nvme_budget_bytes": budget(0.6),
        "d2h_bytes_per_s": RATE, "h2d_bytes_per_s": RATE,
        "nvme_write_bytes_per_s": 3.35e9, "nvme_read_bytes_per_s": 2.83e9,
        "pcie_window_scale": WINDOW_SCALE, "nvme_window_scale": 5.0,
        "pcie_capacity_fraction": 1.0, "nvme_capacity_fraction": 1.0,
        "max_segment_layers": 4, "checkpoint_penalty": 1e-5, "nvme_tiebreak": 1e-3,
    });
    CostChain::from_json(&chain.to_string())
}
