//! The cost chain: one placement problem, as data.
//!
//! N layers `0..N` have boundaries `0..=N`; boundary `i` is the input of layer `i`. The JSON keys are the field names of
//! [`CostChain`] and keep their published spelling (`gpu`, `cpu`, `nvme`, `skip` for HBM, host, NVMe and recompute).

mod read;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::json::{kind, parse};
use crate::units::{BoundaryIndex, Bytes, BytesPerSecond, LayerIndex, Placement};

/// More layers than this are refused: the placement problem has a row per layer with an entry per layer.
const MAX_LAYERS: usize = 10_000;
/// Larger numbers (milliseconds, rates, factors) are refused: no machine has them, and the solver's doubles do not survive them.
const MAX_NUMBER: f64 = 1e18;
/// Larger byte counts are refused; the sum of a chain's boundaries must stay below this too.
const MAX_BYTES: u64 = 1 << 62;

/// What is wrong with a cost chain. Every message names the key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChainError {
    /// The text is not JSON, or not an object.
    #[error("the cost chain is not a JSON object: {0}")]
    Syntax(String),
    /// Required keys are absent: all of them.
    #[error("the cost chain lacks {}: add {}", quoted(.0), if .0.len() == 1 { "it" } else { "them" })]
    Missing(Vec<&'static str>),
    /// A key that no chain has.
    #[error("the cost chain has an unknown key `{0}`; remove it or correct its spelling")]
    Unknown(String),
    /// A key holds something it must not.
    #[error("cost chain, `{key}`: {problem}")]
    Invalid {
        /// The key, with an index where one element is at fault.
        key: String,
        /// What it holds and what it should hold.
        problem: String,
    },
}

/// "the key `a`", "the keys `a`, `b`".
fn quoted(keys: &[&str]) -> String {
    let list: Vec<String> = keys.iter().map(|key| format!("`{key}`")).collect();
    format!("the key{} {}", if keys.len() == 1 { "" } else { "s" }, list.join(", "))
}

fn invalid(key: impl Into<String>, problem: impl Into<String>) -> ChainError {
    ChainError::Invalid { key: key.into(), problem: problem.into() }
}

/// Decisions that are made beforehand. An absent field locks nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Locks {
    /// The exact block path, as (first boundary, next boundary) pairs. If the pairs are not the consecutive pairs of a path
    /// from 0 to N with blocks of at most `max_segment_layers`, the chain is infeasible.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub edges: Option<Vec<(BoundaryIndex, BoundaryIndex)>>,
    /// The exact set of boundaries in HBM; all others are not in HBM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Vec<BoundaryIndex>>,
    /// Boundaries whose placement is given.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", serialize_with = "write_fixed")]
    pub fixed: BTreeMap<BoundaryIndex, Placement>,
    /// Layers whose internals are kept (`true`) or not (`false`). Keep extension only.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", serialize_with = "write_keep")]
    pub keep: BTreeMap<LayerIndex, bool>,
}

impl Locks {
    /// Whether nothing is locked.
    pub fn is_empty(&self) -> bool {
        self.edges.is_none() && self.gpu.is_none() && self.fixed.is_empty() && self.keep.is_empty()
    }
}

/// A placement problem: sizes, times, budgets, link rates and weights.
///
/// Window `w` lies over layer `w`; transfers are hidden behind windows. Times are milliseconds and rates bytes a second, as the
/// published JSON has them. Vectors run over layers (`N`) or boundaries (`N + 1`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Map<String, Value>")]
pub struct CostChain {
    /// Free text; no part of the problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Free text; no part of the problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comment: Option<String>,
    /// Number of layers N, at least 1.
    pub layers: usize,
    /// Window length of each layer (ms), N values.
    pub layer_window_ms: Vec<f64>,
    /// Cost of one extra forward of each layer (ms), N values.
    pub layer_recompute_ms: Vec<f64>,
    /// Size of each boundary, N + 1 values.
    pub boundary_bytes: Vec<Bytes>,
    /// Bytes that each window must carry to the GPU whatever is placed where, N values.
    pub param_h2d_bytes: Vec<Bytes>,
    /// Bytes that each window must carry from the GPU whatever is placed where, N values.
    pub grad_d2h_bytes: Vec<Bytes>,
    /// HBM for boundaries.
    pub gpu_budget_bytes: Bytes,
    /// Host RAM for boundaries.
    pub cpu_budget_bytes: Bytes,
    /// NVMe space for boundaries.
    pub nvme_budget_bytes: Bytes,
    /// GPU to host rate. Zero means the link may carry nothing.
    pub d2h_bytes_per_s: BytesPerSecond,
    /// Host to GPU rate. Zero means the link may carry nothing.
    pub h2d_bytes_per_s: BytesPerSecond,
    /// NVMe write rate. Zero means the link may carry nothing.
    pub nvme_write_bytes_per_s: BytesPerSecond,
    /// NVMe read rate. Zero means the link may carry nothing.
    pub nvme_read_bytes_per_s: BytesPerSecond,
    /// Window lengths are multiplied by this for the two PCIe pools.
    pub pcie_window_scale: f64,
    /// Window lengths are multiplied by this for the two NVMe pools.
    pub nvme_window_scale: f64,
    /// Share of the PCIe rate that a window may use.
    pub pcie_capacity_fraction: f64,
    /// Share of the NVMe rate that a window may use.
    pub nvme_capacity_fraction: f64,
    /// Most layers in a block (between two saved boundaries), at least 1.
    pub max_segment_layers: usize,
    /// Objective weight of each saved boundary (ms).
    pub checkpoint_penalty: f64,
    /// Objective weight of each boundary on NVMe (ms).
    pub nvme_tiebreak: f64,
    /// Boundary i may leave the GPU from window i + offset on. Absent in JSON: 0.
    pub d2h_first_window_offset: usize,
    /// Boundary i may come back in windows i + offset and above. Absent in JSON: 1.
    pub h2d_first_window_offset: usize,
    /// Decisions made beforehand.
    pub locks: Option<Locks>,

    /// Keep extension: each layer's internals, without its input boundary, N values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_internal_bytes: Option<Vec<Bytes>>,
    /// Keep extension: most bytes of a forward besides boundaries and internals, N values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_forward_workspace_bytes: Option<Vec<Bytes>>,
    /// Keep extension: most bytes of a backward besides boundaries and internals, N values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_backward_workspace_bytes: Option<Vec<Bytes>>,
    /// Keep extension: workspace of the loss, with boundary N and its gradient.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss_workspace_bytes: Option<Bytes>,
    /// Keep extension: all HBM. Its presence selects the keep model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hbm_cap_bytes: Option<Bytes>,
    /// Keep extension: HBM taken by what is not placed here (weights, gradients).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hbm_fixed_bytes: Option<Bytes>,
    /// Keep extension: constant of the rule for transfers in flight.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer_slack_bytes: Option<Bytes>,
    /// Keep extension: window length (ms) of the two inward pools, N values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_backward_window_ms: Option<Vec<f64>>,
    /// Keep extension: what a layer that keeps no internals takes longer than one that does (ms), N values. Absent: `layer_recompute_ms`,
    /// one forward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer_rerun_ms: Option<Vec<f64>>,
    /// Keep extension: whether internals may go to host RAM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub internals_offload: Option<bool>,
    /// Keep extension: whether a layer that is re-run for its output, because boundary `l + 1` is recomputed, may save its internals
    /// in that run instead of running a third time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retain_internals: Option<bool>,
    /// Keep extension: bytes of boundaries on their way to or from NVMe that wait in host RAM, outside its budget, and not in HBM. Absent:
    /// 0, all of them are counted in HBM, beside what the PCIe pools count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvme_staging_bytes: Option<Bytes>,
}

impl CostChain {
    /// Reads and validates a chain. `expected` and `proof` of published instances are ignored; other unknown keys are refused.
    ///
    /// # Errors
    /// [`ChainError`], naming the key at fault.
    pub fn from_json(text: &str) -> Result<CostChain, ChainError> {
        match parse(text).map_err(|e| ChainError::Syntax(e.to_string()))? {
            Value::Object(map) => CostChain::try_from(map),
            other => Err(ChainError::Syntax(format!("it is {}", kind(&other)))),
        }
    }

    /// The chain as JSON text; [`CostChain::from_json`] reads it back unchanged.
    pub fn to_json(&self) -> String {
        // Serialising plain numbers, strings and string-keyed maps into memory cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// SHA-256 (hex) of the problem: equal for chains that differ only in `name` and `comment`, or in how numbers are spelled.
    pub fn hash(&self) -> String {
        let mut bare = CostChain { name: None, comment: None, ..self.clone() };
        if let Some(locks) = &mut bare.locks {
            if let Some(list) = &mut locks.gpu {
                list.sort_unstable();
                list.dedup();
            }
            if let Some(edges) = &mut locks.edges {
                edges.sort_unstable();
            }
        }
        bare.locks = bare.locks.filter(|locks| !locks.is_empty());
        Sha256::digest(bare.to_json().as_bytes()).iter().map(|b| format!("{b:02x}")).collect()
    }

    /// What each layer that keeps no internals takes longer than one that does (ms).
    pub fn rerun_ms(&self) -> &[f64] {
        self.layer_rerun_ms.as_ref().unwrap_or(&self.layer_recompute_ms)
    }

    /// Number of boundaries, N + 1.
    pub fn boundaries(&self) -> usize {
        self.layers + 1
    }

    /// Checks lengths, ranges and lock indices. [`CostChain::from_json`] has done so already; chains built in code have not been
    /// checked.
    ///
    /// # Errors
    /// The first [`ChainError`] found.
    pub fn validate(&self) -> Result<(), ChainError> {
        check_layers(self.layers)?;
        if self.max_segment_layers == 0 {
            return Err(invalid("max_segment_layers", "0; a block has at least 1 layer"));
        }
        let n = self.layers;
        for (key, values) in [
            ("layer_window_ms", Some(&self.layer_window_ms)),
            ("layer_recompute_ms", Some(&self.layer_recompute_ms)),
            ("layer_backward_window_ms", self.layer_backward_window_ms.as_ref()),
            ("layer_rerun_ms", self.layer_rerun_ms.as_ref()),
        ] {
            let Some(values) = values else { continue };
            check_length(key, values.len(), n)?;
            if let Some(i) = values.iter().position(|v| check_number(key, *v).is_err()) {
                check_number(&format!("{key}[{i}]"), values[i])?;
            }
        }
        for (key, values, length) in [
            ("boundary_bytes", Some(&self.boundary_bytes), n + 1),
            ("param_h2d_bytes", Some(&self.param_h2d_bytes), n),
            ("grad_d2h_bytes", Some(&self.grad_d2h_bytes), n),
            ("layer_internal_bytes", self.layer_internal_bytes.as_ref(), n),
            ("layer_forward_workspace_bytes", self.layer_forward_workspace_bytes.as_ref(), n),
            ("layer_backward_workspace_bytes", self.layer_backward_workspace_bytes.as_ref(), n),
        ] {
            let Some(values) = values else { continue };
            check_length(key, values.len(), length)?;
            check_bytes(key, values)?;
        }
        self.validate_scalars()?;
        if self.hbm_cap_bytes.is_some() {
            self.validate_keep()?;
        }
        self.locks.as_ref().map_or(Ok(()), |locks| check_locks(locks, n))
    }

    /// What a chain that asks for the keep model must bring along.
    fn validate_keep(&self) -> Result<(), ChainError> {
        let needed = [
            ("layer_internal_bytes", self.layer_internal_bytes.is_some()),
            ("layer_forward_workspace_bytes", self.layer_forward_workspace_bytes.is_some()),
            ("layer_backward_workspace_bytes", self.layer_backward_workspace_bytes.is_some()),
            ("loss_workspace_bytes", self.loss_workspace_bytes.is_some()),
            ("hbm_fixed_bytes", self.hbm_fixed_bytes.is_some()),
            ("transfer_slack_bytes", self.transfer_slack_bytes.is_some()),
        ];
        let missing: Vec<_> =
            needed.into_iter().filter(|(_, present)| !present).map(|(key, _)| key).collect();
        if !missing.is_empty() {
            return Err(ChainError::Missing(missing));
        }
        for (key, got, want) in [
            ("d2h_first_window_offset", self.d2h_first_window_offset, 0),
            ("h2d_first_window_offset", self.h2d_first_window_offset, 1),
        ] {
            if got != want {
                return Err(invalid(key, format!("{got}; beside `hbm_cap_bytes` it must be {want}")));
            }
        }
        Ok(())
    }

    fn validate_scalars(&self) -> Result<(), ChainError> {
        for (key, value) in [
            ("gpu_budget_bytes", Some(self.gpu_budget_bytes)),
            ("cpu_budget_bytes", Some(self.cpu_budget_bytes)),
            ("nvme_budget_bytes", Some(self.nvme_budget_bytes)),
            ("loss_workspace_bytes", self.loss_workspace_bytes),
            ("hbm_cap_bytes", self.hbm_cap_bytes),
            ("hbm_fixed_bytes", self.hbm_fixed_bytes),
            ("transfer_slack_bytes", self.transfer_slack_bytes),
            ("nvme_staging_bytes", self.nvme_staging_bytes),
        ] {
            check_bytes(key, &value.into_iter().collect::<Vec<_>>())?;
        }
        for (key, value) in [
            ("d2h_bytes_per_s", self.d2h_bytes_per_s.get()),
            ("h2d_bytes_per_s", self.h2d_bytes_per_s.get()),
            ("nvme_write_bytes_per_s", self.nvme_write_bytes_per_s.get()),
            ("nvme_read_bytes_per_s", self.nvme_read_bytes_per_s.get()),
            ("pcie_window_scale", self.pcie_window_scale),
            ("nvme_window_scale", self.nvme_window_scale),
            ("pcie_capacity_fraction", self.pcie_capacity_fraction),
            ("nvme_capacity_fraction", self.nvme_capacity_fraction),
            ("checkpoint_penalty", self.checkpoint_penalty),
            ("nvme_tiebreak", self.nvme_tiebreak),
        ] {
            check_number(key, value)?;
        }
        Ok(())
    }
}

fn check_layers(layers: usize) -> Result<(), ChainError> {
    if (1..=MAX_LAYERS).contains(&layers) {
        return Ok(());
    }
    Err(invalid("layers", format!("{layers}; it must lie between 1 and {MAX_LAYERS}")))
}

fn check_length(key: &str, got: usize, want: usize) -> Result<(), ChainError> {
    if got == want {
        return Ok(());
    }
    let rule = match key {
        "boundary_bytes" => "one a boundary, layers + 1",
        _ => "one a layer",
    };
    Err(invalid(key, format!("{got} values; there must be {want} ({rule})")))
}

fn check_number(key: &str, value: f64) -> Result<(), ChainError> {
    if (0.0..=MAX_NUMBER).contains(&value) {
        return Ok(());
    }
    Err(invalid(key, format!("{value}; it must be a number between 0 and {MAX_NUMBER:e}")))
}

/// Each value and their sum must stay in range, so that sums of any subset cannot overflow.
fn check_bytes(key: &str, values: &[Bytes]) -> Result<(), ChainError> {
    let mut total: u64 = 0;
    for value in values {
        total = total.saturating_add(value.get());
        if total > MAX_BYTES {
            return Err(invalid(key, format!("{total} bytes or more in all; the most is 2^62")));
        }
    }
    Ok(())
}

fn check_locks(locks: &Locks, layers: usize) -> Result<(), ChainError> {
    let edges = locks.edges.iter().flatten().flat_map(|(s, e)| [*s, *e]);
    let boundaries = edges
        .map(|i| ("locks.edges", i))
        .chain(locks.gpu.iter().flatten().map(|i| ("locks.gpu", *i)))
        .chain(locks.fixed.keys().map(|i| ("locks.fixed", *i)));
    for (key, i) in boundaries {
        if i.get() > layers {
            return Err(invalid(key, format!("boundary {i}; the boundaries are 0 to {layers}")));
        }
    }
    match locks.keep.keys().find(|l| l.get() >= layers) {
        Some(l) => Err(invalid("locks.keep", format!("layer {l}; the layers are 0 to {}", layers - 1))),
        None => Ok(()),
    }
}

const fn state_name(placement: Placement) -> &'static str {
    match placement {
        Placement::Hbm => "gpu",
        Placement::Host => "cpu",
        Placement::Nvme => "nvme",
        Placement::Recompute => "skip",
    }
}

fn write_fixed<S: serde::Serializer>(
    fixed: &BTreeMap<BoundaryIndex, Placement>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(fixed.iter().map(|(i, p)| (i.to_string(), state_name(*p))))
}

fn write_keep<S: serde::Serializer>(
    keep: &BTreeMap<LayerIndex, bool>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_map(keep.iter().map(|(l, k)| (l.to_string(), if *k { "K" } else { "-" })))
}

#[cfg(test)]
mod tests {
    use super::read::REQUIRED;
    use super::*;

    const TINY: &str = r#"{
        "layers": 2, "layer_window_ms": [1.5, 2], "layer_recompute_ms": [1, 2.25], "boundary_bytes": [10, 20, 30],
        "param_h2d_bytes": [0, 0], "grad_d2h_bytes": [0, 0],
        "gpu_budget_bytes": 40, "cpu_budget_bytes": 20, "nvme_budget_bytes": 0,
        "d2h_bytes_per_s": 1e9, "h2d_bytes_per_s": 1e9, "nvme_write_bytes_per_s": 0, "nvme_read_bytes_per_s": 0,
        "pcie_window_scale": 1, "nvme_window_scale": 1, "pcie_capacity_fraction": 1, "nvme_capacity_fraction": 1,
        "max_segment_layers": 2, "checkpoint_penalty": 1e-05, "nvme_tiebreak": 0.001,
        "locks": {"edges": [[0, 1], [1, 2]], "gpu": [2], "fixed": {"0": "cpu"}},
        "name": "tiny", "expected": {"status": "optimal"}, "proof": []
    }"#;

    fn with(key: &str, value: &str) -> Result<CostChain, ChainError> {
        let mut map: Map<String, Value> = serde_json::from_str(TINY).unwrap();
        map.insert(key.into(), serde_json::from_str(value).unwrap());
        CostChain::from_json(&Value::Object(map).to_string())
    }

    #[test]
    fn a_chain_survives_writing_and_reading() {
        let chain = CostChain::from_json(TINY).unwrap();
        assert_eq!((chain.d2h_first_window_offset, chain.h2d_first_window_offset), (0, 1));
        let locks = chain.locks.clone().unwrap();
        assert_eq!(locks.fixed[&BoundaryIndex(0)], Placement::Host);
        assert_eq!(locks.edges.unwrap().len(), 2);
        assert_eq!(CostChain::from_json(&chain.to_json()).unwrap(), chain);
        assert_eq!(serde_json::from_str::<CostChain>(&chain.to_json()).unwrap(), chain);
    }

    #[test]
    fn the_hash_is_of_the_problem() {
        let chain = CostChain::from_json(TINY).unwrap();
        assert_eq!(chain.hash().len(), 64);
        assert_eq!(with("name", "\"other\"").unwrap().hash(), chain.hash());
        assert_eq!(with("layer_window_ms", "[15e-1, 2.0]").unwrap().hash(), chain.hash());
        assert_ne!(with("layer_window_ms", "[1.5, 2.5]").unwrap().hash(), chain.hash());
        assert_ne!(with("locks", "null").unwrap().hash(), chain.hash());
        assert_eq!(with("locks", "null").unwrap().hash(), with("locks", "{}").unwrap().hash());
    }

    #[test]
    fn refusals_name_the_key() {
        for (key, value, named) in [
            ("layers", "0", "`layers`"),
            ("layers", "4000000000", "`layers`"),
            ("layers", "3", "`layer_window_ms`"),
            ("layer_recompute_ms", "[1, -2]", "`layer_recompute_ms[1]`"),
            ("boundary_bytes", "[1, 2]", "`boundary_bytes`"),
            ("boundary_bytes", "[1, 2, 2.5]", "`boundary_bytes[2]`"),
            ("boundary_bytes", "[1, 2, 18446744073709551615]", "`boundary_bytes`"),
            ("gpu_budget_bytes", "-1", "`gpu_budget_bytes`"),
            ("gpu_budget_bytes", "null", "`gpu_budget_bytes`"),
            ("max_segment_layers", "0", "`max_segment_layers`"),
            ("pcie_window_scale", "\"1\"", "`pcie_window_scale`"),
            ("pcie_window_scale", "1e300", "`pcie_window_scale`"),
            ("windows", "1", "`windows`"),
            ("locks", "{\"gpu\": [3]}", "`locks.gpu`"),
            ("locks", "{\"fixed\": {\"0\": \"hbm\"}}", "`locks.fixed.0`"),
            ("locks", "{\"edges\": [[0, 1, 2]]}", "`locks.edges[0]`"),
            ("locks", "{\"path\": []}", "`locks.path`"),
        ] {
            let message = with(key, value).unwrap_err().to_string();
            assert!(message.contains(named), "{key}: {value} gave: {message}");
        }
        let bare = CostChain::from_json(r#"{"layers": 2, "nvme_tiebreak": null}"#).unwrap_err();
        let ChainError::Missing(keys) = &bare else { panic!("{bare}") };
        assert_eq!(keys[..], REQUIRED[1..]);
        assert!(bare.to_string().contains("`layer_window_ms`, ") && bare.to_string().contains("add them"));
        assert_eq!(with("gpu_budget_bytes", "40.0").unwrap().gpu_budget_bytes, Bytes(40));
        assert!(CostChain::from_json("[]").unwrap_err().to_string().contains("object"));
    }
}
