//! What several test programs share.

#![allow(dead_code, clippy::unwrap_used)]

use std::fs;
use std::path::Path;

use lazy_model::{Bytes, CostChain};

/// How many cases a test runs: `usual`, or 16 times as many in a deep run, which asks property tests for 4096 cases instead of 256.
pub(crate) fn cases(usual: usize) -> usize {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    usual * (asked.unwrap_or(256) / 256).max(1)
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    pub(crate) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// One of the published instances.
pub(crate) fn given(name: &str) -> CostChain {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/data/given/{name}.json"));
    CostChain::from_json(&fs::read_to_string(path).unwrap()).unwrap()
}

/// A chain of these boundaries: no time, no traffic, no budgets, 1 GB/s everywhere, blocks of one layer.
pub(crate) fn bare_chain(boundary_bytes: Vec<Bytes>) -> CostChain {
    let n = boundary_bytes.len() - 1;
    let chain = serde_json::json!({
        "layers": n, "layer_window_ms": vec![0; n], "layer_recompute_ms": vec![0; n],
        "boundary_bytes": boundary_bytes, "param_h2d_bytes": vec![0; n], "grad_d2h_bytes": vec![0; n],
        "gpu_budget_bytes": 0, "cpu_budget_bytes": 0, "nvme_budget_bytes": 0,
        "d2h_bytes_per_s": 1e9, "h2d_bytes_per_s": 1e9,
        "nvme_write_bytes_per_s": 1e9, "nvme_read_bytes_per_s": 1e9,
        "pcie_window_scale": 1, "nvme_window_scale": 1,
        "pcie_capacity_fraction": 1, "nvme_capacity_fraction": 1, "max_segment_layers": 1,
        "checkpoint_penalty": 0, "nvme_tiebreak": 0, "d2h_first_window_offset": 0,
    });
    CostChain::from_json(&chain.to_string()).unwrap()
}
