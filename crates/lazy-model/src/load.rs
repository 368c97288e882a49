//! What each link of a cost chain could carry behind its windows, and what a placement has it carry.

use crate::chain::CostChain;
use crate::evaluate::Pool;
use crate::units::{Bytes, BytesPerSecond, Placement, Seconds};

/// One link over a whole step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkLoad {
    /// Which link.
    pub pool: Pool,
    /// Its rate.
    pub rate: BytesPerSecond,
    /// Time of the largest boundary on it; infinite at rate zero.
    pub largest_boundary: Seconds,
    /// What all windows carry: `sum of rate * window * scale * fraction`, rounded down.
    pub windows: Bytes,
    /// What must be carried whatever is placed where.
    pub mandatory: Bytes,
    /// The boundaries a placement moves.
    pub moved: Bytes,
}

impl LinkLoad {
    /// The four links of `chain`, in the order of [`Pool::ALL`]; nothing is `moved` without a placement.
    pub fn of(chain: &CostChain, placement: Option<&[Placement]>) -> [LinkLoad; 4] {
        Pool::ALL.map(|pool| {
            let pcie = matches!(pool, Pool::D2h | Pool::H2d);
            let (rate, mandatory) = match pool {
                Pool::D2h => (chain.d2h_bytes_per_s, &chain.grad_d2h_bytes[..]),
                Pool::H2d => (chain.h2d_bytes_per_s, &chain.param_h2d_bytes[..]),
                Pool::NvmeWrite => (chain.nvme_write_bytes_per_s, &[][..]),
                Pool::NvmeRead => (chain.nvme_read_bytes_per_s, &[][..]),
            };
            let factor = if pcie {
                chain.pcie_window_scale * chain.pcie_capacity_fraction
            } else {
                chain.nvme_window_scale * chain.nvme_capacity_fraction
            };
            let windows_ms: f64 = chain.layer_window_ms.iter().sum();
            let moved = placement.unwrap_or_default().iter().zip(&chain.boundary_bytes);
            let largest = chain.boundary_bytes.iter().copied().max().unwrap_or_default();
            LinkLoad {
                pool,
                rate,
                largest_boundary: rate.time(largest),
                windows: Bytes((rate.get() * windows_ms * factor / 1e3) as u64),
                mandatory: mandatory.iter().copied().sum(),
                moved: moved.filter(|(p, _)| pool.carries(**p)).map(|(_, size)| *size).sum(),
            }
        })
    }
}
