//! Which MLP each layer has: dense, or routed and shared experts.

use super::shape::{DenseMlp, Mlp, MoeMlp, MoeNaming};
use super::{Family, MAX_LAYERS, MAX_WIDTH, within};
use crate::error::Error;
use crate::json::Object;

const MAX_EXPERTS: usize = 1 << 16;

/// The MLPs of all layers, first to last.
pub(super) fn mlps(
    family: Family,
    config: &Object<'_>,
    hidden: usize,
    layers: usize,
) -> Result<Vec<Mlp>, Error> {
    let sparse = sparse_layers(family, config, layers)?;
    let moe = if sparse.contains(&true) { Some(Mlp::Moe(moe(family, config, hidden)?)) } else { None };
    let dense = if sparse.contains(&false) { Some(Mlp::Dense(dense(family, config)?)) } else { None };
    Ok(sparse.iter().filter_map(|&sparse| if sparse { moe } else { dense }).collect())
}

/// Which layers have experts.
fn sparse_layers(family: Family, config: &Object<'_>, layers: usize) -> Result<Vec<bool>, Error> {
    match family {
        Family::Mixtral | Family::Qwen3_5Moe => Ok(vec![true; layers]),
        // Dense first, then experts everywhere.
        Family::DeepSeekV3 | Family::Glm4Moe => {
            const KEY: &str = "first_k_dense_replace";
            let first = config.whole(KEY, MAX_LAYERS)?.ok_or_else(|| config.absent(KEY))?;
            if let Some(freq) = config.count("moe_layer_freq", MAX_LAYERS)?
                && freq != 1
            {
                return Err(config.error("moe_layer_freq", format!("is {freq}; only 1 is supported")));
            }
            Ok((0..layers).map(|l| l >= first).collect())
        }
        Family::Qwen3Moe | Family::Qwen3Next => {
            let step = config.count("decoder_sparse_step", MAX_LAYERS)?.unwrap_or(1);
            let mut sparse: Vec<bool> = (1..=layers).map(|l| l % step == 0).collect();
            let dense = config.list("mlp_only_layers")?.unwrap_or_default();
            for (i, layer) in dense.iter().enumerate() {
                let layer = layer.as_u64().and_then(|l| usize::try_from(l).ok());
                let entry = layer.and_then(|l| sparse.get_mut(l)).ok_or_else(|| {
                    let problem = format!("must be a layer below num_hidden_layers {layers}");
                    config.error(&format!("mlp_only_layers[{i}]"), problem)
                })?;
                *entry = false;
            }
            if experts(family, config)? == 0 {
                sparse.fill(false);
            }
            Ok(sparse)
        }
        _ => Ok(vec![false; layers]),
    }
}

fn dense(family: Family, config: &Object<'_>) -> Result<DenseMlp, Error> {
    Ok(DenseMlp {
        intermediate: config.need("intermediate_size", MAX_WIDTH)?,
        bias: family == Family::Llama && config.bool("mlp_bias")?.unwrap_or(false),
        fused_gate_up: matches!(family, Family::Phi3 | Family::Glm | Family::Glm4),
    })
}

fn moe(family: Family, config: &Object<'_>, hidden: usize) -> Result<MoeMlp, Error> {
    let experts = experts(family, config)?;
    let top_k = config.need("num_experts_per_tok", MAX_EXPERTS)?;
    if top_k > experts {
        let problem = format!("is {top_k}, but there are {experts} experts");
        return Err(config.error("num_experts_per_tok", problem));
    }
    // Mixtral has no other MLP, so its experts take the plain name.
    let key = if family == Family::Mixtral { "intermediate_size" } else { "moe_intermediate_size" };
    let intermediate = config.need(key, MAX_WIDTH)?;
    within(config, key, &[top_k, intermediate])?;
    within(config, "num_experts_per_tok", &[top_k, hidden])?;
    let (shared, naming) = match family {
        Family::Mixtral => (0, MoeNaming::BlockSparse),
        Family::DeepSeekV3 | Family::Glm4Moe => {
            const KEY: &str = "n_shared_experts";
            let count = config.whole(KEY, MAX_EXPERTS)?.ok_or_else(|| config.absent(KEY))?;
            within(config, KEY, &[count, intermediate])?;
            (count * intermediate, MoeNaming::SharedExperts)
        }
        _ if family.hybrid() => {
            const KEY: &str = "shared_expert_intermediate_size";
            let shared = config.whole(KEY, MAX_WIDTH)?.ok_or_else(|| config.absent(KEY))?;
            (shared, MoeNaming::SharedExpertGate)
        }
        _ => (0, MoeNaming::SharedExperts),
    };
    Ok(MoeMlp { experts, top_k, intermediate, shared, naming })
}

/// Routed experts of a layer. The families call them differently, and newer configuration classes accept each other's names.
fn experts(family: Family, config: &Object<'_>) -> Result<usize, Error> {
    const KEYS: [&str; 3] = ["num_experts", "num_local_experts", "n_routed_experts"];
    let own = match family {
        Family::Mixtral => "num_local_experts",
        Family::DeepSeekV3 | Family::Glm4Moe => "n_routed_experts",
        _ => "num_experts",
    };
    let mut found: Option<(&str, usize)> = None;
    for key in KEYS {
        let Some(count) = config.whole(key, MAX_EXPERTS)? else { continue };
        match found {
            Some((other, number)) if number != count => {
                return Err(config.error(key, format!("is {count}, but `{other}` is {number}")));
            }
            _ => found = Some((key, count)),
        }
    }
    match found {
        Some((key, 0)) if !matches!(family, Family::Qwen3Moe | Family::Qwen3Next) => {
            Err(config.error(key, "is 0, but this family's layers need experts"))
        }
        Some((_, count)) => Ok(count),
        None => Err(config.absent(own)),
    }
}
