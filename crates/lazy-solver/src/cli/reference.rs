//! The flags of the published reference command.

use clap::{Args, ValueEnum};
use lazy_model::reference::{HbmRoom, Mandatory, NvmePath, OptimizerTime, ReferenceSettings};
use lazy_model::timeline::LinkRates;
use lazy_model::{Bytes, BytesPerSecond, CostChain, Seconds};

use super::args::OnOff;

/// Parameters of the published command. Any of them selects its objective and weighted ties, but for rates beside --machine. Beside --chain, budgets, rates, windows,
/// weights and locks replace the file's own.
#[derive(Args, Clone, Debug, Default, PartialEq)]
#[command(next_help_heading = "Reference command")]
pub(crate) struct ReferenceArgs {
    /// HBM for boundaries; or give --peak-cap-gib and --baseline-peak-gib
    #[arg(long, value_name = "GIB", conflicts_with_all = ["peak_cap_gib", "baseline_peak_gib", "baseline_interval"])]
    pub(crate) hbm_activation_gib: Option<f64>,
    /// Most HBM a step may hold; boundaries get this less --baseline-peak-gib plus the boundaries of that run
    #[arg(long, value_name = "GIB", requires = "baseline_peak_gib")]
    pub(crate) peak_cap_gib: Option<f64>,
    /// Peak of a measured run that saved every --baseline-interval'th boundary in HBM
    #[arg(long, value_name = "GIB", requires = "peak_cap_gib")]
    baseline_peak_gib: Option<f64>,
    /// Layers between two saved boundaries of that run, which saved ceil(layers / interval) + 1 of them [default: 4]
    #[arg(long, value_name = "N", requires = "peak_cap_gib")]
    baseline_interval: Option<usize>,
    /// Host RAM for boundaries [default: 0]
    #[arg(long, value_name = "GIB")]
    pub(crate) host_activation_gib: Option<f64>,
    /// NVMe space for boundaries [default: 0]
    #[arg(long, value_name = "GIB")]
    pub(crate) nvme_activation_gib: Option<f64>,
    /// Time of a full-attention layer: its window, and the cost of running it once more
    #[arg(long, value_name = "MS")]
    layer_recompute_ms: Option<f64>,
    /// A linear-attention layer takes this share of that [default: 0.7]
    #[arg(long, value_name = "SHARE")]
    linear_layer_factor: Option<f64>,
    /// PCIe windows are this many times the layer's time [default: 5]
    #[arg(long, value_name = "FACTOR")]
    pub(crate) window_scale: Option<f64>,
    /// Share of the PCIe rates that windows may use [default: 1]
    #[arg(long, value_name = "SHARE")]
    capacity_fraction: Option<f64>,
    /// NVMe windows are this many times the layer's time [default: 5]
    #[arg(long, value_name = "FACTOR")]
    nvme_window_scale: Option<f64>,
    /// Share of the NVMe rates that windows may use [default: 1]
    #[arg(long, value_name = "SHARE")]
    nvme_capacity_fraction: Option<f64>,
    /// Host to GPU rate, in 10^9 bytes a second [default: the machine's, else 12]
    #[arg(long, value_name = "GB/S")]
    pub(crate) h2d_gbps: Option<f64>,
    /// GPU to host rate [default: the machine's, else 12]
    #[arg(long, value_name = "GB/S")]
    pub(crate) d2h_gbps: Option<f64>,
    /// NVMe read rate [default: the machine's, else 2.83]
    #[arg(long, value_name = "GB/S")]
    pub(crate) nvme_read_gbps: Option<f64>,
    /// NVMe write rate [default: the machine's, else 3.35]
    #[arg(long, value_name = "GB/S")]
    pub(crate) nvme_write_gbps: Option<f64>,
    /// Whether transfers hide behind arithmetic; off exposes every byte moved [default: on]
    #[arg(long, value_enum)]
    overlap: Option<OnOff>,
    /// Whether weights to the GPU and gradients back take part of the windows [default: on]
    #[arg(long, value_enum)]
    mandatory: Option<OnOff>,
    /// Weights of a layer: the reference's approximation of every layer by one dense one, or each layer's own [default: reference]
    #[arg(long, value_enum)]
    mandatory_count: Option<CountFlag>,
    /// GPU to drive directly, or through --staging-buffers boundaries of host RAM, which are taken from the host budget [default:
    /// direct]
    #[arg(long, value_enum)]
    nvme_path: Option<PathFlag>,
    /// Buffers of host staging, each as large as a boundary [default: 2]
    #[arg(long, value_name = "N")]
    staging_buffers: Option<u64>,
    /// Weight of a boundary on NVMe in the objective [default: 0.001]
    #[arg(long, value_name = "MS")]
    nvme_tiebreak_ms: Option<f64>,
    /// Weight of a saved boundary in the objective, in ms [default: 1e-5]
    #[arg(long, value_name = "MS")]
    checkpoint_penalty: Option<f64>,
    /// A plan to hold the new one against and to take locks from: a schedule file, a plan's --json output, placement letters, or
    /// {"edges": [[0, 4], ..], "hbm": [0, ..]}
    #[arg(long, value_name = "SCHEDULE", allow_hyphen_values = true)]
    pub(crate) reference_schedule: Option<String>,
    /// Keep the reference schedule's saved boundaries, and so its blocks
    #[arg(long, requires = "reference_schedule")]
    pub(crate) lock_edges: bool,
    /// Keep the reference schedule's set of boundaries in HBM
    #[arg(long, requires = "reference_schedule")]
    pub(crate) lock_hbm: bool,
    /// Optimizer step with 32-bit moments. The reference gives no formula; here it takes step - fast-clip-saving +
    /// max-8bit-fraction x full-8bit-extra, whatever is placed where
    #[arg(long, value_name = "S")]
    optimizer_step_s: Option<f64>,
    /// What the fast gradient norm saves of it [default: 0]
    #[arg(long, value_name = "S", requires = "optimizer_step_s")]
    fast_clip_saving_s: Option<f64>,
    /// What 8-bit moments for every parameter would add [default: 0]
    #[arg(long, value_name = "S", requires = "optimizer_step_s")]
    full_8bit_extra_s: Option<f64>,
    /// Share of the parameters with 8-bit moments [default: 0]
    #[arg(long, value_name = "SHARE", requires = "optimizer_step_s")]
    max_8bit_fraction: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CountFlag {
    Reference,
    Exact,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PathFlag {
    Direct,
    HostStaging,
}

/// What a flag of the reference command may hold.
fn checked(flag: &str, value: Option<f64>, most: f64, what: &str) -> Result<Option<f64>, String> {
    match value {
        Some(v) if !(0.0..=most).contains(&v) => {
            Err(format!("--{flag} {v:?}: give {what} between 0 and {most:e}"))
        }
        other => Ok(other),
    }
}

impl ReferenceArgs {
    /// Refuses flags that another one leaves without effect.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.staging_buffers.is_some() && self.nvme_path != Some(PathFlag::HostStaging) {
            return Err("--staging-buffers: only --nvme-path host-staging has them".into());
        }
        if self.staging_buffers == Some(0) {
            return Err("--staging-buffers 0: staging needs at least 1; --nvme-path direct needs none".into());
        }
        if self.mandatory == Some(OnOff::Off) && self.mandatory_count.is_some() {
            return Err("--mandatory-count: with --mandatory off nothing is counted; leave one out".into());
        }
        Ok(())
    }

    /// Whether no flag was given.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The rates that were given, as they were typed.
    pub(crate) fn rates_given(&self) -> Vec<String> {
        [
            ("h2d", self.h2d_gbps),
            ("d2h", self.d2h_gbps),
            ("nvme-read", self.nvme_read_gbps),
            ("nvme-write", self.nvme_write_gbps),
        ]
        .into_iter()
        .filter_map(|(link, rate)| Some(format!("--{link}-gbps {}", rate?)))
        .collect()
    }

    /// Whether nothing but rates of links was given.
    pub(crate) fn only_rates(&self) -> bool {
        let rates = [self.h2d_gbps, self.d2h_gbps, self.nvme_read_gbps, self.nvme_write_gbps];
        let [h2d_gbps, d2h_gbps, nvme_read_gbps, nvme_write_gbps] = rates;
        *self == Self { h2d_gbps, d2h_gbps, nvme_read_gbps, nvme_write_gbps, ..Self::default() }
    }

    /// `links` with the rates that were given.
    pub(crate) fn rates(&self, links: LinkRates) -> Result<LinkRates, String> {
        let rate = |flag, value, default| {
            Ok::<_, String>(
                checked(flag, value, 1e6, "a rate in GB/s")?.map_or(default, BytesPerSecond::from_gb),
            )
        };
        Ok(LinkRates {
            d2h: rate("d2h-gbps", self.d2h_gbps, links.d2h)?,
            h2d: rate("h2d-gbps", self.h2d_gbps, links.h2d)?,
            nvme_write: rate("nvme-write-gbps", self.nvme_write_gbps, links.nvme_write)?,
            nvme_read: rate("nvme-read-gbps", self.nvme_read_gbps, links.nvme_read)?,
            ..links
        })
    }

    /// The settings for a model; `links` are the machine's, where one was named.
    pub(crate) fn settings(
        &self,
        links: Option<LinkRates>,
        max_segment: Option<usize>,
    ) -> Result<ReferenceSettings, String> {
        let published = ReferenceSettings::default();
        let layer_recompute_ms =
            checked("layer-recompute-ms", self.layer_recompute_ms, 1e9, "a time in ms")?.ok_or(
                "the reference objective needs the time of a layer: give --layer-recompute-ms (the published run has 20), or leave out \
                 the reference flags and give --machine",
            )?;
        let mut settings = ReferenceSettings {
            hbm: self.hbm_room()?,
            layer_recompute_ms,
            max_segment: max_segment.unwrap_or(published.max_segment),
            links: self.rates(links.unwrap_or(published.links))?,
            ..published
        };
        let factor = |flag, value, default: f64| {
            Ok::<_, String>(checked(flag, value, 1e6, "a factor")?.unwrap_or(default))
        };
        settings.host = gib("host-activation-gib", self.host_activation_gib)?.unwrap_or(settings.host);
        settings.nvme = gib("nvme-activation-gib", self.nvme_activation_gib)?.unwrap_or(settings.nvme);
        settings.linear_layer_factor =
            factor("linear-layer-factor", self.linear_layer_factor, settings.linear_layer_factor)?;
        settings.window_scale = factor("window-scale", self.window_scale, settings.window_scale)?;
        settings.capacity_fraction =
            factor("capacity-fraction", self.capacity_fraction, settings.capacity_fraction)?;
        settings.nvme_window_scale =
            factor("nvme-window-scale", self.nvme_window_scale, settings.nvme_window_scale)?;
        settings.nvme_capacity_fraction =
            factor("nvme-capacity-fraction", self.nvme_capacity_fraction, settings.nvme_capacity_fraction)?;
        settings.nvme_tiebreak_ms =
            factor("nvme-tiebreak-ms", self.nvme_tiebreak_ms, settings.nvme_tiebreak_ms)?;
        settings.checkpoint_penalty_ms =
            factor("checkpoint-penalty", self.checkpoint_penalty, settings.checkpoint_penalty_ms)?;
        settings.overlap = self.overlap != Some(OnOff::Off);
        settings.mandatory = match (self.mandatory, self.mandatory_count) {
            (Some(OnOff::Off), _) => Mandatory::Off,
            (_, Some(CountFlag::Exact)) => Mandatory::ExactCount,
            _ => Mandatory::ReferenceCount,
        };
        settings.nvme_path = self.path();
        Ok(settings)
    }

    fn path(&self) -> NvmePath {
        match self.nvme_path {
            Some(PathFlag::HostStaging) => {
                NvmePath::HostStaging { buffers: self.staging_buffers.unwrap_or(2) }
            }
            _ => NvmePath::Direct,
        }
    }

    fn hbm_room(&self) -> Result<HbmRoom, String> {
        if let Some(bytes) = gib("hbm-activation-gib", self.hbm_activation_gib)? {
            return Ok(HbmRoom::Activations(bytes));
        }
        match (self.peak_cap_gib, self.baseline_peak_gib) {
            (Some(cap_gib), Some(baseline_gib)) => Ok(HbmRoom::Peak {
                cap_gib,
                baseline_gib,
                interval: self.baseline_interval.unwrap_or(4),
            }),
            _ => Err("the reference objective needs the HBM for boundaries: give --hbm-activation-gib, or --peak-cap-gib with \
                      --baseline-peak-gib"
                .into()),
        }
    }

    /// Puts budgets, rates, windows and weights that were given in the place of the chain's.
    pub(crate) fn change(&self, chain: &mut CostChain) -> Result<(), String> {
        let of_a_model = [
            ("peak-cap-gib", self.peak_cap_gib.is_some()),
            ("layer-recompute-ms", self.layer_recompute_ms.is_some()),
            ("linear-layer-factor", self.linear_layer_factor.is_some()),
            ("mandatory-count", self.mandatory_count.is_some()),
        ];
        if let Some((flag, _)) = of_a_model.iter().find(|(_, given)| *given) {
            return Err(format!(
                "--{flag} describes a model's run, but a chain already holds what follows from it: leave it out, or give --model"
            ));
        }
        let links = self.rates(LinkRates {
            d2h: chain.d2h_bytes_per_s,
            h2d: chain.h2d_bytes_per_s,
            nvme_write: chain.nvme_write_bytes_per_s,
            nvme_read: chain.nvme_read_bytes_per_s,
            ..LinkRates::default()
        })?;
        (chain.d2h_bytes_per_s, chain.h2d_bytes_per_s) = (links.d2h, links.h2d);
        (chain.nvme_write_bytes_per_s, chain.nvme_read_bytes_per_s) = (links.nvme_write, links.nvme_read);
        for (flag, value, budget) in [
            ("hbm-activation-gib", self.hbm_activation_gib, &mut chain.gpu_budget_bytes),
            ("host-activation-gib", self.host_activation_gib, &mut chain.cpu_budget_bytes),
            ("nvme-activation-gib", self.nvme_activation_gib, &mut chain.nvme_budget_bytes),
        ] {
            *budget = gib(flag, value)?.unwrap_or(*budget);
        }
        for (flag, value, number) in [
            ("window-scale", self.window_scale, &mut chain.pcie_window_scale),
            ("capacity-fraction", self.capacity_fraction, &mut chain.pcie_capacity_fraction),
            ("nvme-window-scale", self.nvme_window_scale, &mut chain.nvme_window_scale),
            ("nvme-capacity-fraction", self.nvme_capacity_fraction, &mut chain.nvme_capacity_fraction),
            ("nvme-tiebreak-ms", self.nvme_tiebreak_ms, &mut chain.nvme_tiebreak),
            ("checkpoint-penalty", self.checkpoint_penalty, &mut chain.checkpoint_penalty),
        ] {
            *number = checked(flag, value, 1e6, "a number")?.unwrap_or(*number);
        }
        if self.overlap == Some(OnOff::Off) {
            (chain.pcie_capacity_fraction, chain.nvme_capacity_fraction) = (0.0, 0.0);
        }
        if self.mandatory == Some(OnOff::Off) {
            chain.param_h2d_bytes.fill(Bytes::ZERO);
            chain.grad_d2h_bytes.fill(Bytes::ZERO);
        }
        let largest = chain.boundary_bytes.iter().copied().max().unwrap_or_default();
        chain.cpu_budget_bytes = self
            .path()
            .host_room(chain.cpu_budget_bytes, chain.nvme_budget_bytes, largest)
            .map_err(|e| e.to_string())?;
        Ok(())
    }

    /// The optimizer's time, where one was given.
    pub(crate) fn optimizer(&self) -> Result<Option<OptimizerTime>, String> {
        let seconds =
            |flag, value| Ok::<_, String>(Seconds(checked(flag, value, 1e9, "a time in s")?.unwrap_or(0.0)));
        if self.optimizer_step_s.is_none() {
            return Ok(None);
        }
        let fraction = checked("max-8bit-fraction", self.max_8bit_fraction, 1.0, "a share")?;
        Ok(Some(OptimizerTime {
            step: seconds("optimizer-step-s", self.optimizer_step_s)?,
            fast_clip_saving: seconds("fast-clip-saving-s", self.fast_clip_saving_s)?,
            full_8bit_extra: seconds("full-8bit-extra-s", self.full_8bit_extra_s)?,
            fraction_8bit: fraction.unwrap_or(0.0),
        }))
    }
}

/// A size in GiB.
pub(crate) fn gib(flag: &str, value: Option<f64>) -> Result<Option<Bytes>, String> {
    Ok(checked(flag, value, 1e9, "a size in GiB")?.map(Bytes::from_gib))
}
