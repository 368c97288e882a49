//! What one pool may carry: its rate, its windows, and the room in them.

use lazy_model::{Bytes, CostChain, Pool};

/// The link constants of one pool.
pub(crate) struct Link<'a> {
    /// Bytes a second; zero: may carry nothing.
    pub(crate) rate: f64,
    /// Whether boundaries on NVMe alone load it, not all that are offloaded.
    pub(crate) nvme: bool,
    pub(crate) mandatory: &'a [Bytes],
    offset: usize,
    window_factor: f64,
}

/// Room that windows leave beside mandatory traffic (ms).
pub(crate) struct Rooms {
    /// In the windows from `w` on, `w` in `0..=N`. The last has none: what is left for it is exposed.
    pub(crate) from: Vec<f64>,
    /// Mandatory traffic above the windows' capacity, exposed whatever is placed where.
    pub(crate) overflow: f64,
}

const NO_BYTES: &[Bytes] = &[];

impl Link<'_> {
    pub(crate) fn of(chain: &CostChain, pool: Pool) -> Link<'_> {
        let pcie = chain.pcie_window_scale * chain.pcie_capacity_fraction;
        let drive = chain.nvme_window_scale * chain.nvme_capacity_fraction;
        let (out, back) = (chain.d2h_first_window_offset, chain.h2d_first_window_offset);
        let (rate, offset, window_factor, mandatory) = match pool {
            Pool::D2h => (chain.d2h_bytes_per_s, out, pcie, &chain.grad_d2h_bytes[..]),
            Pool::H2d => (chain.h2d_bytes_per_s, back, pcie, &chain.param_h2d_bytes[..]),
            Pool::NvmeWrite => (chain.nvme_write_bytes_per_s, out, drive, NO_BYTES),
            Pool::NvmeRead => (chain.nvme_read_bytes_per_s, back, drive, NO_BYTES),
        };
        let nvme = matches!(pool, Pool::NvmeWrite | Pool::NvmeRead);
        Link { rate: rate.get(), nvme, mandatory, offset, window_factor }
    }

    /// Time that `bytes` take; the rate is not zero.
    pub(crate) fn ms(&self, bytes: u64) -> f64 {
        bytes as f64 * 1000.0 / self.rate
    }

    /// The first window that boundary `i` of `n` layers may use; `n` is the tail window.
    pub(crate) fn first(&self, i: usize, n: usize) -> usize {
        i.saturating_add(self.offset).min(n)
    }

    /// The rate is not zero.
    pub(crate) fn rooms(&self, chain: &CostChain) -> Rooms {
        let mut rooms = Rooms { from: vec![0.0; chain.layers + 1], overflow: 0.0 };
        for (w, window) in chain.layer_window_ms.iter().enumerate().rev() {
            let mandatory = self.mandatory.get(w).map_or(0, |m| m.get());
            let spare = window * self.window_factor - self.ms(mandatory);
            rooms.overflow += (-spare).max(0.0);
            rooms.from[w] = rooms.from[w + 1] + spare.max(0.0);
        }
        rooms
    }
}
