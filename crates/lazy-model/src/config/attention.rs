//! Which mixer each layer has: heads, windows, latent and linear attention.

use serde_json::Value;

use super::shape::{Attention, DeltaNet, LatentAttention, LayerKind, Mixer};
use super::{Family, MAX_WIDTH, MAX_WINDOW, within};
use crate::error::Error;
use crate::json::Object;

/// The mixers of all layers, first to last.
pub(super) fn mixers(
    family: Family,
    config: &Object<'_>,
    hidden: usize,
    layers: usize,
    notes: &mut Vec<String>,
) -> Result<Vec<Mixer>, Error> {
    if family == Family::DeepSeekV3 {
        return Ok(vec![Mixer::Latent(latent(config)?); layers]);
    }
    let (kinds, window) = kinds(family, config, layers, notes)?;
    let uses = |kind| kinds.contains(&kind);
    let full = attention(family, config, hidden, notes)?;
    let sliding = if uses(LayerKind::Sliding) {
        Some(Attention { window, ..windowed(config, full, notes)? })
    } else {
        None
    };
    let linear = if uses(LayerKind::Linear) { Some(delta_net(family, config)?) } else { None };
    let mixer = |kind: &LayerKind| match (kind, sliding, linear) {
        (LayerKind::Sliding, Some(attention), _) => Mixer::Attention(attention),
        (LayerKind::Linear, _, Some(net)) => Mixer::Linear(net),
        _ => Mixer::Attention(full),
    };
    Ok(kinds.iter().map(mixer).collect())
}

fn attention(
    family: Family,
    config: &Object<'_>,
    hidden: usize,
    notes: &mut Vec<String>,
) -> Result<Attention, Error> {
    let heads = config.need("num_attention_heads", MAX_WIDTH)?;
    let kv_heads = kv_heads(family, config, heads)?;
    let bias = bias(family, config, notes)?;
    if family.hybrid() && config.bool("attn_output_gate")? == Some(false) {
        let problem = "is false; this family's full attention has a gated output";
        return Err(config.error("attn_output_gate", problem));
    }
    let without_output = matches!(family, Family::Glm | Family::Glm4 | Family::Glm4Moe);
    let has_setting = !matches!(family, Family::Qwen2 | Family::Mistral | Family::Mixtral | Family::Phi3);
    Ok(Attention {
        heads,
        kv_heads,
        head_dim: head_dim(family, config, hidden, heads)?,
        window: None,
        qkv_bias: family == Family::Qwen2 || (has_setting && bias),
        output_bias: has_setting && !without_output && bias,
        qk_norm: match family {
            Family::Qwen3 | Family::Qwen3Moe | Family::Gemma3 => true,
            Family::Glm4Moe => config.bool("use_qk_norm")?.unwrap_or(false),
            _ => family.hybrid(),
        },
        output_gate: family.hybrid(),
        fused_qkv: family == Family::Phi3,
    })
}

/// The `attention_bias` setting, or the configuration class's value for it.
fn bias(family: Family, config: &Object<'_>, notes: &mut Vec<String>) -> Result<bool, Error> {
    const KEY: &str = "attention_bias";
    match config.bool(KEY)? {
        Some(bias) => Ok(bias),
        None if matches!(family, Family::Glm | Family::Glm4) => {
            notes.push(format!("`{}` is absent: the family's true is used", config.path_of(KEY)));
            Ok(true)
        }
        None => Ok(false),
    }
}

/// Key and value heads: written down, or equal to the query heads where the family says so.
fn kv_heads(family: Family, config: &Object<'_>, heads: usize) -> Result<usize, Error> {
    const KEY: &str = "num_key_value_heads";
    let kv_heads = match config.count(KEY, heads)? {
        Some(count) => count,
        // Every one of these classes turns a written null into plain multi-head attention; only Llama's and Phi-3's
        // also do so for an absent key, the others have a number of their own there.
        None if config.has(KEY) || matches!(family, Family::Llama | Family::Phi3) => heads,
        None => return Err(config.absent(KEY)),
    };
    if !heads.is_multiple_of(kv_heads) {
        return Err(config.error(KEY, format!("is {kv_heads}, which does not divide {heads} query heads")));
    }
    Ok(kv_heads)
}

/// The explicit value is authoritative. The configuration or modelling code of Llama, Mistral, Mixtral, Qwen2, Phi-3, Qwen3-MoE
/// and GLM-4-MoE in transformers takes `hidden / heads` for an absent one. The other classes have a number of their own, and their heads are wider than the quotient in several sizes: there
/// the quotient is no rule, and an absent key is an error.
fn head_dim(family: Family, config: &Object<'_>, hidden: usize, heads: usize) -> Result<usize, Error> {
    const KEY: &str = "head_dim";
    let quotient = matches!(
        family,
        Family::Llama
            | Family::Mistral
            | Family::Mixtral
            | Family::Qwen2
            | Family::Phi3
            | Family::Qwen3Moe
            | Family::Glm4Moe
    );
    let head_dim = match config.count(KEY, MAX_WIDTH)? {
        Some(width) => width,
        None if !quotient => return Err(config.absent(KEY)),
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let problem =
                format!("is absent, and hidden_size {hidden} is not divisible by {heads} heads: add it");
            return Err(config.error(KEY, problem));
        }
    };
    within(config, KEY, &[heads, head_dim])?;
    Ok(head_dim)
}

/// Attention in the layers with a window: that of the others, unless the config gives these layers heads of their own. Two spellings
/// are in use: `swa_num_attention_heads` with its two companions, and an object `attention_other_setting`.
fn windowed(config: &Object<'_>, full: Attention, notes: &mut Vec<String>) -> Result<Attention, Error> {
    const OTHER: &str = "attention_other_setting";
    const FLAT: [&str; 3] = ["swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim"];
    let other = config.object(OTHER)?;
    let (object, [heads_key, kv_heads_key, head_dim_key]) = match &other {
        Some(object) => {
            match object.string("attention_type")? {
                Some(kind) if kind == LayerKind::Sliding.name() => {}
                Some(_) => {
                    let problem = "describes other layers than those with a window, which is not supported";
                    return Err(object.error("attention_type", problem));
                }
                None => return Err(object.absent("attention_type")),
            }
            (object, ["num_attention_heads", "num_attention_groups", "head_dim"])
        }
        None => (config, FLAT),
    };
    let heads = object.count(heads_key, MAX_WIDTH)?.unwrap_or(full.heads);
    let kv_heads = object.count(kv_heads_key, MAX_WIDTH)?.unwrap_or(full.kv_heads);
    let head_dim = object.count(head_dim_key, MAX_WIDTH)?.unwrap_or(full.head_dim);
    within(object, head_dim_key, &[heads, head_dim])?;
    if !heads.is_multiple_of(kv_heads) {
        let problem = format!("gives {kv_heads}, which does not divide {heads} query heads");
        return Err(object.error(kv_heads_key, problem));
    }
    let attention = Attention { heads, kv_heads, head_dim, ..full };
    if attention != full {
        notes.push(format!(
            "layers with a window have {heads} query heads, {kv_heads} key and value heads of width {head_dim}: `{}` says so",
            object.path_of(heads_key)
        ));
    }
    Ok(attention)
}

/// Multi-head latent attention, as `deepseek_v3` names its dimensions. `head_dim` and `num_key_value_heads` say nothing there:
/// the heads share one latent, and `qk_head_dim` is the sum of its two parts.
fn latent(config: &Object<'_>) -> Result<LatentAttention, Error> {
    let need = |key| config.need(key, MAX_WIDTH);
    let heads = need("num_attention_heads")?;
    if !config.has("q_lora_rank") {
        return Err(config.absent("q_lora_rank"));
    }
    let mla = LatentAttention {
        heads,
        q_lora_rank: config.count("q_lora_rank", MAX_WIDTH)?,
        kv_lora_rank: need("kv_lora_rank")?,
        nope_dim: need("qk_nope_head_dim")?,
        rope_dim: need("qk_rope_head_dim")?,
        value_dim: need("v_head_dim")?,
        bias: config.bool("attention_bias")?.unwrap_or(false),
    };
    within(config, "qk_nope_head_dim", &[heads, mla.nope_dim + mla.rope_dim])?;
    within(config, "v_head_dim", &[heads, mla.nope_dim + mla.value_dim])?;
    if let Some(sum) = config.count("qk_head_dim", MAX_WIDTH)?
        && sum != mla.qk_dim()
    {
        let problem = format!("is {sum}, but its two parts are {} and {}", mla.nope_dim, mla.rope_dim);
        return Err(config.error("qk_head_dim", problem));
    }
    Ok(mla)
}

/// The gated delta rule's geometry; every dimension must be written down.
fn delta_net(family: Family, config: &Object<'_>) -> Result<DeltaNet, Error> {
    let need = |key| config.need(key, MAX_WIDTH);
    let net = DeltaNet {
        key_heads: need("linear_num_key_heads")?,
        value_heads: need("linear_num_value_heads")?,
        key_dim: need("linear_key_head_dim")?,
        value_dim: need("linear_value_head_dim")?,
        conv_kernel: config.need("linear_conv_kernel_dim", 1 << 10)?,
        fused_projections: family == Family::Qwen3Next,
    };
    // Queries and keys are repeated for the value heads that share them.
    within(config, "linear_key_head_dim", &[net.value_heads, net.key_dim])?;
    within(config, "linear_key_head_dim", &[net.key_heads, net.key_dim])?;
    within(config, "linear_value_head_dim", &[net.value_heads, net.value_dim])?;
    if !net.value_heads.is_multiple_of(net.key_heads) {
        let problem = format!("is {}, which does not divide {} value heads", net.key_heads, net.value_heads);
        return Err(config.error("linear_num_key_heads", problem));
    }
    Ok(net)
}

/// The window that is really active, if any: Qwen's files carry one that a flag switches off.
fn window(family: Family, config: &Object<'_>, notes: &mut Vec<String>) -> Result<Option<usize>, Error> {
    const KEY: &str = "sliding_window";
    let window = config.count(KEY, MAX_WINDOW)?;
    match family {
        Family::Mistral | Family::Gemma2 | Family::Gemma3 if window.is_none() && !config.has(KEY) => {
            notes.push(format!("`{}` is absent: the family's 4096 is used", config.path_of(KEY)));
            Ok(Some(4096))
        }
        Family::Mistral | Family::Gemma2 | Family::Gemma3 | Family::Mixtral | Family::Phi3 => Ok(window),
        Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => {
            match (config.bool("use_sliding_window")?.unwrap_or(false), window) {
                (false, _) => Ok(None),
                (true, Some(window)) => Ok(Some(window)),
                (true, None) => {
                    Err(config.error(KEY, "is absent, though `use_sliding_window` is true: add it"))
                }
            }
        }
        _ => Ok(None),
    }
}

/// The kind of each layer, and the window of those that have one.
fn kinds(
    family: Family,
    config: &Object<'_>,
    layers: usize,
    notes: &mut Vec<String>,
) -> Result<(Vec<LayerKind>, Option<usize>), Error> {
    const KEY: &str = "layer_types";
    let window = window(family, config, notes)?;
    let Some(types) = config.list(KEY)? else {
        return Ok((kinds_by_rule(family, config, layers, window, notes)?, window));
    };
    if types.len() != layers {
        let problem = format!("lists {} layers, but num_hidden_layers is {layers}", types.len());
        return Err(config.error(KEY, problem));
    }
    let known = if family.hybrid() {
        [LayerKind::Full, LayerKind::Linear]
    } else {
        [LayerKind::Full, LayerKind::Sliding]
    };
    let kind = |(l, found): (usize, &Value)| {
        let kind = known.into_iter().find(|kind| found.as_str() == Some(kind.name()));
        match kind {
            Some(LayerKind::Sliding) if window.is_none() => Err(config
                .error(&format!("{KEY}[{l}]"), "is \"sliding_attention\", but no sliding window is active")),
            Some(kind) => Ok(kind),
            None => Err(config.error(
                &format!("{KEY}[{l}]"),
                format!(
                    "is {}; known kinds: {}",
                    crate::json::kind(found),
                    known.map(LayerKind::name).join(", ")
                ),
            )),
        }
    };
    Ok((types.iter().enumerate().map(kind).collect::<Result<_, _>>()?, window))
}

/// The kinds of layers where `layer_types` does not list them.
fn kinds_by_rule(
    family: Family,
    config: &Object<'_>,
    layers: usize,
    window: Option<usize>,
    notes: &mut Vec<String>,
) -> Result<Vec<LayerKind>, Error> {
    let windowed = if window.is_some() { LayerKind::Sliding } else { LayerKind::Full };
    let every = |n: usize, others: LayerKind| {
        (1..=layers).map(|l| if l % n == 0 { LayerKind::Full } else { others }).collect()
    };
    match family {
        // The first `max_window_layers` layers of these families see everything.
        Family::Qwen2 | Family::Qwen3 if window.is_some() => {
            let first = config.whole("max_window_layers", MAX_WINDOW)?;
            let first = first.ok_or_else(|| config.absent("max_window_layers"))?;
            Ok((0..layers).map(|l| if l >= first { windowed } else { LayerKind::Full }).collect())
        }
        // Every other layer, beginning with a windowed one: fixed by the architecture.
        Family::Gemma2 => Ok(every(2, windowed)),
        Family::Gemma3 => {
            let mut pattern = config.count("sliding_window_pattern", MAX_WINDOW)?;
            if pattern.is_none() {
                pattern = config.count("_sliding_window_pattern", MAX_WINDOW)?;
            }
            let pattern = pattern.unwrap_or_else(|| {
                notes.push(format!(
                    "`{}` and `sliding_window_pattern` are absent: the family's pattern of 6 is used",
                    config.path_of("layer_types")
                ));
                6
            });
            Ok(every(pattern, windowed))
        }
        // Kinds differ in parameters here, so that nothing is assumed.
        _ if family.hybrid() => match config.count("full_attention_interval", MAX_WINDOW)? {
            Some(interval) => Ok(every(interval, LayerKind::Linear)),
            None => Err(config
                .error("layer_types", "is absent, and so is `full_attention_interval`: add one of the two")),
        },
        _ => Ok(vec![windowed; layers]),
    }
}
