//! The placement problem as the published reference command states it.
//!
//! That command describes a run by a handful of numbers: a peak, the peak of a measured run with fixed checkpoints, a time for
//! one layer, effective rates. [`ReferenceSettings::chain`] turns them, with a model and a workload, into a [`CostChain`].
//! Capacities are GiB (2^30 bytes) and rates decimal GB/s, which is what reproduces the published figures.

use num_bigint::BigInt;
use num_traits::{Signed, ToPrimitive};

use crate::chain::CostChain;
use crate::config::{LayerKind, ModelSpec};
use crate::error::Error;
use crate::evaluate::exact;
use crate::layers::Workload;
use crate::timeline::LinkRates;
use crate::units::{Bytes, BytesPerSecond, LayerIndex, Seconds};

const DOCUMENT: &str = "reference settings";

/// HBM for boundaries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HbmRoom {
    /// So many bytes.
    Activations(Bytes),
    /// What a cap on the peak leaves, seen from a measured run that saved every `interval`-th boundary in HBM:
    /// `cap - baseline + (ceil(N / interval) + 1) b`, with `b` the bytes of a boundary. The saved boundaries of that run are
    /// part of its peak, so their room is there to be placed anew.
    Peak {
        /// The most that HBM may hold (GiB).
        cap_gib: f64,
        /// What the measured run held at its worst moment (GiB).
        baseline_gib: f64,
        /// Layers between two saved boundaries of the measured run.
        interval: usize,
    },
}

/// Which weights each window must carry to the GPU, and gradients back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mandatory {
    /// None: weights and gradients stay on the GPU.
    Off,
    /// The reference's own approximation of a layer, `2 h² + 2 h k + 3 h m + 2 h` elements (`h` hidden, `k` width of the keys,
    /// `m` intermediate), the same for every layer. It takes the query and output projections for `h x h` and a linear-attention
    /// layer for a full one.
    #[default]
    ReferenceCount,
    /// Every layer's parameters as the model has them.
    ExactCount,
}

/// How a boundary gets from HBM to NVMe.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NvmePath {
    /// Straight from HBM to the drive.
    #[default]
    Direct,
    /// Through pinned buffers in host RAM, each as large as a boundary. They are charged to the host budget whenever there is an
    /// NVMe budget.
    HostStaging {
        /// Buffers in all; two let the copy of one boundary run beside the drive's work on another.
        buffers: u64,
    },
}

/// The reference command's parameters. [`Default`] holds the published settings of all that depends on neither model nor run.
#[derive(Clone, Debug, PartialEq)]
pub struct ReferenceSettings {
    /// HBM for boundaries.
    pub hbm: HbmRoom,
    /// Host RAM for boundaries.
    pub host: Bytes,
    /// NVMe space for boundaries.
    pub nvme: Bytes,
    /// Forward time of a full-attention layer (ms): its window, and the cost of running it once more.
    pub layer_recompute_ms: f64,
    /// Time of a linear-attention layer as a share of that. Published nowhere; 0.7 explains every published figure.
    pub linear_layer_factor: f64,
    /// Most layers in a block.
    pub max_segment: usize,
    /// Window lengths are multiplied by this for PCIe: a step computes longer over a layer than one forward.
    pub window_scale: f64,
    /// Share of the PCIe rates that windows may use.
    pub capacity_fraction: f64,
    /// As `window_scale`, for NVMe.
    pub nvme_window_scale: f64,
    /// As `capacity_fraction`, for NVMe.
    pub nvme_capacity_fraction: f64,
    /// Rates of the links.
    pub links: LinkRates,
    /// Whether transfers hide behind arithmetic at all. Without, no window carries anything: every byte moved is exposed,
    /// mandatory ones included.
    pub overlap: bool,
    /// Weights and gradients in the windows.
    pub mandatory: Mandatory,
    /// The way to NVMe.
    pub nvme_path: NvmePath,
    /// Objective weight of a boundary on NVMe (ms).
    pub nvme_tiebreak_ms: f64,
    /// Objective weight of a saved boundary (ms).
    pub checkpoint_penalty_ms: f64,
}

impl Default for ReferenceSettings {
    fn default() -> Self {
        Self {
            hbm: HbmRoom::Activations(Bytes::ZERO),
            host: Bytes::ZERO,
            nvme: Bytes::ZERO,
            layer_recompute_ms: 0.0,
            linear_layer_factor: 0.7,
            max_segment: 4,
            window_scale: 5.0,
            capacity_fraction: 1.0,
            nvme_window_scale: 5.0,
            nvme_capacity_fraction: 1.0,
            links: LinkRates {
                d2h: BytesPerSecond::from_gb(12.0),
                h2d: BytesPerSecond::from_gb(12.0),
                nvme_write: BytesPerSecond::from_gb(3.35),
                nvme_read: BytesPerSecond::from_gb(2.83),
                ..LinkRates::default()
            },
            overlap: true,
            mandatory: Mandatory::ReferenceCount,
            nvme_path: NvmePath::Direct,
            nvme_tiebreak_ms: 1e-3,
            checkpoint_penalty_ms: 1e-5,
        }
    }
}

impl ReferenceSettings {
    /// The placement problem of `model` at `work` under these settings.
    ///
    /// # Errors
    /// [`Error::Value`] where the peaks leave no room, the interval is zero, or the staging does not fit host RAM; the message
    /// names the setting. Ranges of the other numbers are checked by [`CostChain::validate`].
    pub fn chain(&self, model: &ModelSpec, work: &Workload) -> Result<CostChain, Error> {
        let layers = model.layers();
        let boundary = model.boundary_bytes(work);
        let layer_ms: Vec<f64> = (0..layers).map(|l| self.layer_ms(model, LayerIndex(l))).collect();
        let weights = (0..layers)
            .map(|l| self.mandatory_bytes(model, work, LayerIndex(l)))
            .collect::<Result<Vec<Bytes>, Error>>()?;
        let share = |fraction: f64| if self.overlap { fraction } else { 0.0 };
        Ok(CostChain {
            name: None,
            comment: None,
            layers,
            layer_window_ms: layer_ms.clone(),
            layer_recompute_ms: layer_ms,
            boundary_bytes: vec![boundary; layers + 1],
            param_h2d_bytes: weights.clone(),
            grad_d2h_bytes: weights,
            gpu_budget_bytes: self.hbm.bytes(layers, boundary)?,
            cpu_budget_bytes: self.nvme_path.host_room(self.host, self.nvme, boundary)?,
            nvme_budget_bytes: self.nvme,
            d2h_bytes_per_s: self.links.d2h,
            h2d_bytes_per_s: self.links.h2d,
            nvme_write_bytes_per_s: self.links.nvme_write,
            nvme_read_bytes_per_s: self.links.nvme_read,
            pcie_window_scale: self.window_scale,
            nvme_window_scale: self.nvme_window_scale,
            pcie_capacity_fraction: share(self.capacity_fraction),
            nvme_capacity_fraction: share(self.nvme_capacity_fraction),
            max_segment_layers: self.max_segment,
            checkpoint_penalty: self.checkpoint_penalty_ms,
            nvme_tiebreak: self.nvme_tiebreak_ms,
            d2h_first_window_offset: 0,
            h2d_first_window_offset: 1,
            locks: None,
            layer_internal_bytes: None,
            layer_forward_workspace_bytes: None,
            layer_backward_workspace_bytes: None,
            loss_workspace_bytes: None,
            hbm_cap_bytes: None,
            hbm_fixed_bytes: None,
            transfer_slack_bytes: None,
            layer_backward_window_ms: None,
            layer_rerun_ms: None,
            internals_offload: None,
            retain_internals: None,
            nvme_staging_bytes: None,
        })
    }

    fn layer_ms(&self, model: &ModelSpec, layer: LayerIndex) -> f64 {
        let linear = model.layer_kind(layer) == LayerKind::Linear;
        self.layer_recompute_ms * if linear { self.linear_layer_factor } else { 1.0 }
    }

    fn mandatory_bytes(&self, model: &ModelSpec, work: &Workload, layer: LayerIndex) -> Result<Bytes, Error> {
        let element = work.element_bytes() as u64;
        match self.mandatory {
            Mandatory::Off => Ok(Bytes::ZERO),
            Mandatory::ReferenceCount => model.reference_layer_weight_bytes(element).ok_or_else(|| {
                let problem = "counts the weights of dense layers with grouped-query attention, and this model has none: take the \
                               exact count";
                refused("mandatory", problem.into())
            }),
            Mandatory::ExactCount => Ok(Bytes(model.layer_parameter_count(layer)) * element),
        }
    }
}

impl NvmePath {
    /// What staging leaves of `host` for boundaries, with a budget of `nvme` and boundaries of at most `largest`.
    ///
    /// # Errors
    /// [`Error::Value`] where it leaves less than nothing.
    pub fn host_room(self, host: Bytes, nvme: Bytes, largest: Bytes) -> Result<Bytes, Error> {
        let staging = match self {
            NvmePath::HostStaging { buffers } if nvme > Bytes::ZERO => largest * buffers,
            _ => Bytes::ZERO,
        };
        if staging > host {
            let problem = format!(
                "is {host}, but staging for NVMe takes {staging} of it: raise it, lower the number of staging buffers, or use the \
                 direct path"
            );
            return Err(refused("host_activation_gib", problem));
        }
        Ok(host - staging)
    }
}

impl HbmRoom {
    /// The budget in whole bytes, rounded down.
    fn bytes(&self, layers: usize, boundary: Bytes) -> Result<Bytes, Error> {
        match *self {
            HbmRoom::Activations(bytes) => Ok(bytes),
            HbmRoom::Peak { cap_gib, baseline_gib, interval } => {
                if interval == 0 {
                    return Err(refused("baseline_interval", "is 0; it must be at least 1 layer".into()));
                }
                for (key, value) in [("peak_cap_gib", cap_gib), ("baseline_peak_gib", baseline_gib)] {
                    if !(0.0..1e9).contains(&value) {
                        return Err(refused(key, format!("is {value}; it must be between 0 and 1e9")));
                    }
                }
                // Exact decimals: 70.1 - 60.6 is 9.5 GiB, not a byte less.
                let saved = boundary * (layers.div_ceil(interval) as u64 + 1);
                let room = (exact(cap_gib) - exact(baseline_gib)) * BigInt::from(1u64 << 30)
                    + BigInt::from(saved.get());
                let room = room.floor().to_integer();
                if room.is_negative() {
                    let problem = format!(
                        "is {cap_gib}, but the measured run needed {baseline_gib} GiB with only {saved} of boundaries: no room is \
                         left for any; raise it"
                    );
                    return Err(refused("peak_cap_gib", problem));
                }
                Ok(Bytes(room.to_u64().unwrap_or(u64::MAX)))
            }
        }
    }
}

fn refused(key: &str, problem: String) -> Error {
    Error::Value { document: DOCUMENT, key: key.into(), problem }
}

/// Time of the optimizer step in the reference's terms. The reference publishes the three times and no formula; this one is
/// linear in the share of parameters whose moments are held in 8 bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerTime {
    /// The step with 32-bit moments and plain clipping.
    pub step: Seconds,
    /// What the fast gradient norm saves.
    pub fast_clip_saving: Seconds,
    /// What 8-bit moments for all parameters would add.
    pub full_8bit_extra: Seconds,
    /// Share of the parameters with 8-bit moments, 0 to 1.
    pub fraction_8bit: f64,
}

impl OptimizerTime {
    /// `step - fast_clip_saving + fraction_8bit * full_8bit_extra`, at least zero.
    pub fn total(&self) -> Seconds {
        let linear =
            self.step.get() - self.fast_clip_saving.get() + self.fraction_8bit * self.full_8bit_extra.get();
        Seconds(linear.max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUNDARY: Bytes = Bytes(754_974_720);

    fn room(cap_gib: f64, baseline_gib: f64, interval: usize) -> Result<Bytes, Error> {
        HbmRoom::Peak { cap_gib, baseline_gib, interval }.bytes(64, BOUNDARY)
    }

    #[test]
    fn a_peak_leaves_the_published_room() {
        assert_eq!(room(70.0, 60.4, 4).unwrap(), Bytes(23_142_491_750));
        // Differences of decimals, not of doubles: exactly 9.5 GiB and 17 boundaries.
        assert_eq!(room(70.1, 60.6, 4).unwrap(), Bytes(19 << 29) + BOUNDARY * 17);
        // 64 layers in steps of 5 end at 65: 13 steps, 14 boundaries.
        assert_eq!(room(1.0, 1.0, 5).unwrap(), BOUNDARY * 14);
        for (settings, named) in [
            ((10.0, 60.0, 4), "peak_cap_gib"),
            ((70.0, f64::NAN, 4), "baseline_peak_gib"),
            ((70.0, 60.0, 0), "interval"),
        ] {
            let message = room(settings.0, settings.1, settings.2).unwrap_err().to_string();
            assert!(message.contains(named), "{message}");
        }
    }

    #[test]
    fn staging_is_taken_from_host_ram_only_where_there_is_nvme() {
        let gib = Bytes::from_gib;
        let staged = |host, nvme| NvmePath::HostStaging { buffers: 2 }.host_room(host, nvme, BOUNDARY);
        assert_eq!(staged(gib(14.0), gib(32.0)).unwrap(), gib(14.0) - BOUNDARY * 2);
        assert_eq!(staged(gib(14.0), Bytes::ZERO).unwrap(), gib(14.0));
        assert!(staged(gib(1.0), gib(32.0)).unwrap_err().to_string().contains("host_activation_gib"));
    }

    #[test]
    fn the_optimizer_is_linear_in_its_8_bit_share() {
        let published = OptimizerTime {
            step: Seconds(119.18),
            fast_clip_saving: Seconds(18.0),
            full_8bit_extra: Seconds(123.0),
            fraction_8bit: 0.02,
        };
        assert!((published.total().get() - 103.64).abs() < 1e-9);
        assert_eq!(OptimizerTime { step: Seconds(1.0), ..published }.total(), Seconds::ZERO);
    }
}
