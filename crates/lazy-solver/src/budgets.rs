//! The flags that programs share for caps and machine.

use std::path::PathBuf;

use clap::Args;
use lazy_model::{Bytes, HardwareProfile, Tier};

/// Caps of the tiers, in MiB or GiB, and the machine's profile.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Budgets and machine")]
pub struct BudgetArgs {
    /// HBM for everything: weights, gradients, activations, workspace
    #[arg(long, value_name = "MIB")]
    pub hbm_mib: Option<f64>,
    /// The same in GiB
    #[arg(long, value_name = "GIB", conflicts_with = "hbm_mib")]
    pub hbm_gib: Option<f64>,
    /// Pinned host RAM: boundaries, staging, the optimizer's ring, and what else of the training is at home there
    #[arg(long, value_name = "MIB")]
    pub host_mib: Option<f64>,
    /// The same in GiB
    #[arg(long, value_name = "GIB", conflicts_with = "host_mib")]
    pub host_gib: Option<f64>,
    /// NVMe space for boundaries (the optimizer's state is counted apart)
    #[arg(long, value_name = "MIB")]
    pub nvme_mib: Option<f64>,
    /// The same in GiB
    #[arg(long, value_name = "GIB", conflicts_with = "nvme_mib")]
    pub nvme_gib: Option<f64>,
    /// Machine: a hardware profile (JSON) that `probe` wrote; `lazy-plan` also knows reference, h200, h100 and rtx4090 by
    /// name, and its --h2d-gbps, --d2h-gbps, --nvme-read-gbps and --nvme-write-gbps replace the machine's rates
    #[arg(long, value_name = "FILE", visible_alias = "machine")]
    pub profile: Option<PathBuf>,
}

impl BudgetArgs {
    /// The cap of a tier, if one was given.
    ///
    /// # Errors
    /// A message that names the flag, when its value is no size.
    pub fn cap(&self, tier: Tier) -> Result<Option<Bytes>, String> {
        let (mib, gib) = match tier {
            Tier::Hbm => (self.hbm_mib, self.hbm_gib),
            Tier::Host => (self.host_mib, self.host_gib),
            Tier::Nvme => (self.nvme_mib, self.nvme_gib),
        };
        let (unit, value, gib) = match (mib, gib) {
            (Some(mib), _) => ("mib", mib, mib / 1024.0),
            (None, Some(gib)) => ("gib", gib, gib),
            (None, None) => return Ok(None),
        };
        if (0.0..1e9).contains(&gib) {
            return Ok(Some(Bytes::from_gib(gib)));
        }
        Err(format!("--{tier}-{unit} {value:?}: give a size of 0 or more, below 1e9 GiB"))
    }

    /// The machine that was named: a file of that name, else a preset.
    ///
    /// # Errors
    /// A message that names the flag, when it is neither, or the file is no profile.
    pub fn hardware(&self) -> Result<Option<HardwareProfile>, String> {
        let Some(path) = &self.profile else { return Ok(None) };
        let name = path.to_string_lossy();
        if !path.exists() {
            return HardwareProfile::preset(&name).map(Some).ok_or_else(|| {
                format!(
                    "--machine {name}: there is no such file, nor a preset of that name; the presets are {}",
                    HardwareProfile::PRESETS.join(", ")
                )
            });
        }
        let text = lazy_model::read_text(path).map_err(|e| e.to_string())?;
        HardwareProfile::from_json(&text).map(Some).map_err(|e| format!("{name}: {e}"))
    }

    /// Whether nothing was given.
    pub fn is_empty(&self) -> bool {
        !self.has_sizes() && self.profile.is_none()
    }

    /// Whether any tier was capped.
    pub fn has_sizes(&self) -> bool {
        let sizes = [self.hbm_mib, self.hbm_gib, self.host_mib, self.host_gib, self.nvme_mib, self.nvme_gib];
        sizes.iter().any(Option::is_some)
    }

    /// Whether HBM was capped, and nothing else given.
    pub fn only_hbm(&self) -> bool {
        let others = [self.host_mib, self.host_gib, self.nvme_mib, self.nvme_gib];
        self.has_sizes() && others.iter().all(Option::is_none) && self.profile.is_none()
    }
}
