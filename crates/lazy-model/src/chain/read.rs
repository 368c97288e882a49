//! From a JSON object to a cost chain, every refusal with its key.

use serde_json::{Map, Value};

use super::{ChainError, CostChain, Locks, check_layers, check_number, invalid, state_name};
use crate::json;
use crate::units::{BoundaryIndex, Bytes, BytesPerSecond, LayerIndex, Placement};

/// What every chain says.
pub(super) const REQUIRED: [&str; 20] = [
    "layers",
    "layer_window_ms",
    "layer_recompute_ms",
    "boundary_bytes",
    "param_h2d_bytes",
    "grad_d2h_bytes",
    "gpu_budget_bytes",
    "cpu_budget_bytes",
    "nvme_budget_bytes",
    "d2h_bytes_per_s",
    "h2d_bytes_per_s",
    "nvme_write_bytes_per_s",
    "nvme_read_bytes_per_s",
    "pcie_window_scale",
    "nvme_window_scale",
    "pcie_capacity_fraction",
    "nvme_capacity_fraction",
    "max_segment_layers",
    "checkpoint_penalty",
    "nvme_tiebreak",
];

/// Takes typed values out of an object, naming the key in every refusal.
struct Reader(Map<String, Value>);

impl Reader {
    /// An absent key and `null` are the same.
    fn optional<T>(
        &mut self,
        key: &str,
        read: fn(&str, Value) -> Result<T, ChainError>,
    ) -> Result<Option<T>, ChainError> {
        match self.0.remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => read(key, value).map(Some),
        }
    }

    /// Refuses an object that lacks any of `keys`, naming all it lacks.
    fn all_present(&self, keys: &[&'static str]) -> Result<(), ChainError> {
        let absent = |key: &&str| self.0.get(*key).is_none_or(Value::is_null);
        let missing: Vec<_> = keys.iter().copied().filter(absent).collect();
        if missing.is_empty() { Ok(()) } else { Err(ChainError::Missing(missing)) }
    }

    fn required<T>(
        &mut self,
        key: &'static str,
        read: fn(&str, Value) -> Result<T, ChainError>,
    ) -> Result<T, ChainError> {
        self.optional(key, read)?.ok_or_else(|| ChainError::Missing(vec![key]))
    }
}

fn whole(key: &str, value: Value) -> Result<u64, ChainError> {
    json::whole(&value).ok_or_else(|| invalid(key, format!("{value}; it must be a whole number, 0 or more")))
}

fn count(key: &str, value: Value) -> Result<usize, ChainError> {
    let n = whole(key, value)?;
    usize::try_from(n).map_err(|_| invalid(key, format!("{n} is too large")))
}

fn bytes(key: &str, value: Value) -> Result<Bytes, ChainError> {
    whole(key, value).map(Bytes)
}

fn number(key: &str, value: Value) -> Result<f64, ChainError> {
    let n = value.as_f64().ok_or_else(|| invalid(key, format!("{value}; it must be a number")))?;
    check_number(key, n)?;
    // -0.0 becomes 0.0, so that equal problems hash alike.
    Ok(n + 0.0)
}

fn rate(key: &str, value: Value) -> Result<BytesPerSecond, ChainError> {
    number(key, value).map(BytesPerSecond)
}

fn text(key: &str, value: Value) -> Result<String, ChainError> {
    match value {
        Value::String(s) => Ok(s),
        other => Err(invalid(key, format!("{other}; it must be a string"))),
    }
}

fn flag(key: &str, value: Value) -> Result<bool, ChainError> {
    value.as_bool().ok_or_else(|| invalid(key, format!("{value}; it must be true or false")))
}

fn list<T>(
    key: &str,
    value: Value,
    read: fn(&str, Value) -> Result<T, ChainError>,
) -> Result<Vec<T>, ChainError> {
    let Value::Array(items) = value else { return Err(invalid(key, "it must be a list")) };
    items.into_iter().enumerate().map(|(i, v)| read(&format!("{key}[{i}]"), v)).collect()
}

fn numbers(key: &str, value: Value) -> Result<Vec<f64>, ChainError> {
    list(key, value, number)
}

fn byte_list(key: &str, value: Value) -> Result<Vec<Bytes>, ChainError> {
    list(key, value, bytes)
}

fn boundary(key: &str, value: Value) -> Result<BoundaryIndex, ChainError> {
    count(key, value).map(BoundaryIndex)
}

fn edge(key: &str, value: Value) -> Result<(BoundaryIndex, BoundaryIndex), ChainError> {
    let ends = list(key, value, boundary)?;
    match ends[..] {
        [first, next] => Ok((first, next)),
        _ => Err(invalid(key, "it must be a pair [first boundary, next boundary]")),
    }
}

/// Reads an object whose keys are indices.
fn indexed<T>(
    key: &str,
    value: Value,
    read: fn(&str, Value) -> Result<T, ChainError>,
) -> Result<Vec<(usize, T)>, ChainError> {
    let Value::Object(map) = value else { return Err(invalid(key, "it must be an object")) };
    let entry = |(k, v): (String, Value)| {
        let index = k.parse().map_err(|_| invalid(key, format!("`{k}` is not an index")))?;
        Ok((index, read(&format!("{key}.{k}"), v)?))
    };
    map.into_iter().map(entry).collect()
}

fn state(key: &str, value: Value) -> Result<Placement, ChainError> {
    let all = [Placement::Hbm, Placement::Host, Placement::Nvme, Placement::Recompute];
    let found = all.into_iter().find(|p| value.as_str() == Some(state_name(*p)));
    found.ok_or_else(|| invalid(key, format!("{value}; it must be \"gpu\", \"cpu\", \"nvme\" or \"skip\"")))
}

fn kept(key: &str, value: Value) -> Result<bool, ChainError> {
    match value.as_str() {
        Some("K") => Ok(true),
        Some("-") => Ok(false),
        _ => Err(invalid(key, format!("{value}; it must be \"K\" or \"-\""))),
    }
}

fn locks(key: &str, value: Value) -> Result<Locks, ChainError> {
    let Value::Object(map) = value else { return Err(invalid(key, "it must be an object or null")) };
    let mut r = Reader(map);
    let locks = Locks {
        edges: r.optional("edges", |k, v| list(&format!("locks.{k}"), v, edge))?,
        gpu: r.optional("gpu", |k, v| list(&format!("locks.{k}"), v, boundary))?,
        fixed: r
            .optional("fixed", |k, v| indexed(&format!("locks.{k}"), v, state))?
            .into_iter()
            .flatten()
            .map(|(i, p)| (BoundaryIndex(i), p))
            .collect(),
        keep: r
            .optional("keep", |k, v| indexed(&format!("locks.{k}"), v, kept))?
            .into_iter()
            .flatten()
            .map(|(l, k)| (LayerIndex(l), k))
            .collect(),
    };
    match r.0.into_iter().next() {
        Some((k, _)) => Err(ChainError::Unknown(format!("locks.{k}"))),
        None => Ok(locks),
    }
}

impl TryFrom<Map<String, Value>> for CostChain {
    type Error = ChainError;

    fn try_from(map: Map<String, Value>) -> Result<CostChain, ChainError> {
        let mut r = Reader(map);
        r.0.remove("expected");
        r.0.remove("proof");
        r.all_present(&REQUIRED)?;
        // First, so that a wild count is refused before anything is sized by it.
        let layers = r.required("layers", count)?;
        check_layers(layers)?;
        let chain = CostChain {
            name: r.optional("name", text)?,
            comment: r.optional("comment", text)?,
            layers,
            layer_window_ms: r.required("layer_window_ms", numbers)?,
            layer_recompute_ms: r.required("layer_recompute_ms", numbers)?,
            boundary_bytes: r.required("boundary_bytes", byte_list)?,
            param_h2d_bytes: r.required("param_h2d_bytes", byte_list)?,
            grad_d2h_bytes: r.required("grad_d2h_bytes", byte_list)?,
            gpu_budget_bytes: r.required("gpu_budget_bytes", bytes)?,
            cpu_budget_bytes: r.required("cpu_budget_bytes", bytes)?,
            nvme_budget_bytes: r.required("nvme_budget_bytes", bytes)?,
            d2h_bytes_per_s: r.required("d2h_bytes_per_s", rate)?,
            h2d_bytes_per_s: r.required("h2d_bytes_per_s", rate)?,
            nvme_write_bytes_per_s: r.required("nvme_write_bytes_per_s", rate)?,
            nvme_read_bytes_per_s: r.required("nvme_read_bytes_per_s", rate)?,
            pcie_window_scale: r.required("pcie_window_scale", number)?,
            nvme_window_scale: r.required("nvme_window_scale", number)?,
            pcie_capacity_fraction: r.required("pcie_capacity_fraction", number)?,
            nvme_capacity_fraction: r.required("nvme_capacity_fraction", number)?,
            max_segment_layers: r.required("max_segment_layers", count)?,
            checkpoint_penalty: r.required("checkpoint_penalty", number)?,
            nvme_tiebreak: r.required("nvme_tiebreak", number)?,
            d2h_first_window_offset: r.optional("d2h_first_window_offset", count)?.unwrap_or(0),
            h2d_first_window_offset: r.optional("h2d_first_window_offset", count)?.unwrap_or(1),
            locks: r.optional("locks", locks)?.filter(|l| !l.is_empty()),
            layer_internal_bytes: r.optional("layer_internal_bytes", byte_list)?,
            layer_forward_workspace_bytes: r.optional("layer_forward_workspace_bytes", byte_list)?,
            layer_backward_workspace_bytes: r.optional("layer_backward_workspace_bytes", byte_list)?,
            loss_workspace_bytes: r.optional("loss_workspace_bytes", bytes)?,
            hbm_cap_bytes: r.optional("hbm_cap_bytes", bytes)?,
            hbm_fixed_bytes: r.optional("hbm_fixed_bytes", bytes)?,
            transfer_slack_bytes: r.optional("transfer_slack_bytes", bytes)?,
            layer_backward_window_ms: r.optional("layer_backward_window_ms", numbers)?,
            layer_rerun_ms: r.optional("layer_rerun_ms", numbers)?,
            internals_offload: r.optional("internals_offload", flag)?,
            retain_internals: r.optional("retain_internals", flag)?,
            nvme_staging_bytes: r.optional("nvme_staging_bytes", bytes)?,
        };
        if let Some((key, _)) = r.0.into_iter().next() {
            return Err(ChainError::Unknown(key));
        }
        chain.validate()?;
        Ok(chain)
    }
}
