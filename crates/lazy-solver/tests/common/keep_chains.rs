//! Cost chains of the keep model made from a seed, for tests and the bench: layers of a 4 billion parameter model on an accelerator with a 50 GB/s link, the
//! sizes of the published H200 instances, equal or uneven.

use lazy_model::{ChainError, CostChain};
use serde_json::json;

/// How the layers differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layers {
    /// All equal.
    Uniform,
    /// Three sorts in turn, as in models that mix kinds of attention or of experts.
    Classes,
    /// Each size and time between half and one and a half times the usual one.
    Random,
}

/// Seeds of each kind that a bench runs: 32 chains.
pub(crate) const KINDS: [(Layers, &str, u64); 3] = [
    (Layers::Uniform, "keep uniform", 8),
    (Layers::Classes, "keep classes", 12),
    (Layers::Random, "keep random", 12),
];

/// `hbm_cap_bytes` in GB: little more than a running layer, a third, and two thirds of what keeping everything takes.
pub(crate) const CAPS_GB: [u64; 3] = [24, 40, 70];

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

    /// Between 0.5 and 1.5.
    fn about_one(&mut self) -> f64 {
        0.5 + self.below(1 << 30) as f64 / (1u64 << 30) as f64
    }
}

/// The chain of a kind, a number of layers, a cap and a seed. Of four seeds in a row one has a large host budget and an idle link, one
/// little host RAM, one an NVMe drive beside it, and one streams weights and gradients. Odd seeds have sizes to the byte, even ones in
/// steps of 64 KiB.
pub(crate) fn chain(kind: Layers, layers: usize, cap_gb: u64, seed: u64) -> Result<CostChain, ChainError> {
    let mut r = Random(seed << 20 | (layers as u64) << 4 | kind as u64);
    let distinct = match kind {
        Layers::Uniform => 1,
        Layers::Classes => 3,
        Layers::Random => layers,
    };
    let step = if seed % 2 == 1 { 1 } else { 1 << 16 };
    let sizes = |r: &mut Random, usual: f64, count: usize| -> Vec<u64> {
        let sorts: Vec<u64> =
            (0..distinct.min(count)).map(|_| (usual * r.about_one()) as u64 / step * step).collect();
        (0..count).map(|l| sorts[l % sorts.len()]).collect()
    };
    let tenths = |r: &mut Random, usual: f64| -> Vec<f64> {
        let sorts: Vec<f64> = (0..distinct).map(|_| (usual * 10.0 * r.about_one()).round() / 10.0).collect();
        (0..layers).map(|l| sorts[l % sorts.len()]).collect()
    };
    let recompute = tenths(&mut r, 7.9);
    let backward: Vec<f64> = recompute.iter().map(|ms| (ms * 17.7).round() / 10.0).collect();
    let boundaries = sizes(&mut r, 84e6, layers + 1);
    let (host, nvme, moved) = match seed % 4 {
        0 => (64e9, 0.0, 0.0),
        1 => (2e9, 0.0, 0.0),
        2 => (1e9, 16e9, 0.0),
        _ => (64e9, 0.0, 200e6),
    };
    let traffic = sizes(&mut r, moved, layers);
    let value = json!({
        "layers": layers, "layer_window_ms": recompute, "layer_backward_window_ms": backward,
        "layer_recompute_ms": recompute, "boundary_bytes": boundaries,
        "layer_internal_bytes": sizes(&mut r, 2e9, layers),
        "layer_forward_workspace_bytes": sizes(&mut r, 1e9, layers),
        "layer_backward_workspace_bytes": sizes(&mut r, 7e8, layers),
        "loss_workspace_bytes": 2_500_000_000u64, "transfer_slack_bytes": boundaries.iter().max(),
        "hbm_cap_bytes": cap_gb * 1_000_000_000, "hbm_fixed_bytes": 18_000_000_000u64,
        "param_h2d_bytes": traffic, "grad_d2h_bytes": traffic,
        "gpu_budget_bytes": cap_gb * 1_000_000_000, "cpu_budget_bytes": host as u64, "nvme_budget_bytes": nvme as u64,
        "d2h_bytes_per_s": 50e9, "h2d_bytes_per_s": 50e9, "nvme_write_bytes_per_s": 5e9, "nvme_read_bytes_per_s": 6e9,
        "pcie_window_scale": 1.0, "nvme_window_scale": 1.0, "pcie_capacity_fraction": 1.0,
        "nvme_capacity_fraction": 1.0, "max_segment_layers": 4, "checkpoint_penalty": 1e-5, "nvme_tiebreak": 1e-3,
    });
    CostChain::from_json(&value.to_string())
}
