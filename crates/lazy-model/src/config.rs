//! Hugging Face `config.json` to [`ModelSpec`], strictly.
//!
//! A dimension is read, or derived by the rule its family documents, or it is an error that names the key path; there
//! is no default dimension. Settings that are not dimensions (rotary base, tied embeddings, window) fall back to the
//! default of the family's configuration class, and every such fallback leaves a note in [`ModelSpec::notes`].

use std::path::Path;

use serde_json::Value;

use crate::error::Error;
use crate::json::Object;

const DOCUMENT: &str = "model config";

/// Keys under which multi-modal wrappers keep the language model's configuration.
const NESTED: [&str; 4] = ["text_config", "language_config", "llm_config", "thinker_config"];

// Limits that keep every later product of dimensions inside 64 bits; far above any published model.
const MAX_WIDTH: usize = 1 << 20;
const MAX_LAYERS: usize = 1 << 12;
const MAX_VOCAB: usize = 1 << 24;
const MAX_WINDOW: usize = 1 << 30;

/// The model families this crate can size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// `qwen3`: per-head RMS norm on queries and keys.
    Qwen3,
    /// `qwen2` (Qwen2 and Qwen2.5): biases on the query, key and value projections.
    Qwen2,
    /// `llama`.
    Llama,
    /// `mistral`.
    Mistral,
}

impl Family {
    /// All supported families.
    pub const ALL: [Family; 4] = [Family::Qwen3, Family::Qwen2, Family::Llama, Family::Mistral];

    /// The value of `model_type`.
    pub const fn model_type(self) -> &'static str {
        match self {
            Family::Qwen3 => "qwen3",
            Family::Qwen2 => "qwen2",
            Family::Llama => "llama",
            Family::Mistral => "mistral",
        }
    }

    fn from_model_type(name: &str) -> Option<Family> {
        Family::ALL.into_iter().find(|family| family.model_type() == name)
    }
}

/// How a layer attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerKind {
    /// Causal attention over all earlier positions.
    Full,
    /// Causal attention over the last `window` positions, the own one included.
    Sliding {
        /// Positions a query sees at most.
        window: usize,
    },
}

impl LayerKind {
    /// The name used in `layer_types` and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            LayerKind::Full => "full_attention",
            LayerKind::Sliding { .. } => "sliding_attention",
        }
    }
}

/// A decoder's shape: all that its parameters, sizes and work follow from.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// The model's family.
    pub family: Family,
    /// Width of the residual stream, and so of every boundary.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of one head. Not always `hidden / heads`.
    pub head_dim: usize,
    /// Width between the up and the down projection.
    pub intermediate: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// The head shares the embedding's weight.
    pub tied: bool,
    /// Epsilon of the RMS norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// Kind of rotary scaling (`llama3`, `yarn`, ..) where it is not the plain embedding. It changes neither sizes nor
    /// work; who trains the model has to apply it or refuse.
    pub rope_scaling: Option<String>,
    /// The longest sequence the config declares, where it does.
    pub max_positions: Option<usize>,
    /// Query, key and value projections have biases.
    pub qkv_bias: bool,
    /// The attention's output projection has a bias.
    pub output_bias: bool,
    /// The gate, up and down projections have biases.
    pub mlp_bias: bool,
    /// Queries and keys pass a per-head RMS norm before the rotary embedding.
    pub qk_norm: bool,
    /// The kind of each layer; its length is the number of layers.
    pub layer_kinds: Vec<LayerKind>,
    /// What was assumed, and which contradictions were resolved how, in sentences for the user.
    pub notes: Vec<String>,
}

impl ModelSpec {
    /// Reads a `config.json` file.
    ///
    /// # Errors
    /// As [`ModelSpec::from_json`], and where the file cannot be read.
    pub fn from_file(path: &Path) -> Result<Self, Error> {
        let text =
            std::fs::read_to_string(path).map_err(|source| Error::Read { path: path.into(), source })?;
        Self::from_json(&text)
    }

    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// Where the text is not JSON, the model type is not supported, or a key is absent, of the wrong kind, or
    /// contradicts another; the message names the key path.
    pub fn from_json(text: &str) -> Result<Self, Error> {
        let value: Value =
            serde_json::from_str(text).map_err(|source| Error::Json { document: DOCUMENT, source })?;
        let root = Object::root(DOCUMENT, &value)?;
        let mut notes = Vec::new();
        let (levels, config) = descend(root)?;
        let family = family(&levels, &config)?;
        note_contradictions(&levels, &config, &mut notes);
        refuse_unsupported(&config)?;

        let need = |key: &str, limit| config.count(key, limit)?.ok_or_else(|| config.absent(key));
        let hidden = need("hidden_size", MAX_WIDTH)?;
        let layers = need("num_hidden_layers", MAX_LAYERS)?;
        let intermediate = need("intermediate_size", MAX_WIDTH)?;
        let vocab = need("vocab_size", MAX_VOCAB)?;
        let heads = need("num_attention_heads", MAX_WIDTH)?;
        let kv_heads = kv_heads(family, &config, heads)?;
        let head_dim = head_dim(family, &config, hidden, heads)?;
        let (rope_theta, rope_scaling) = rope(&config, &mut notes)?;
        let flag = |key| Ok::<_, Error>(config.bool(key)?.unwrap_or(false));
        let attention_bias = flag("attention_bias")?;
        Ok(ModelSpec {
            family,
            hidden,
            heads,
            kv_heads,
            head_dim,
            intermediate,
            vocab,
            tied: tied(&levels, &config, &mut notes)?,
            rms_norm_eps: positive(&config, "rms_norm_eps")?.ok_or_else(|| config.absent("rms_norm_eps"))?,
            rope_theta,
            rope_scaling,
            max_positions: config.count("max_position_embeddings", MAX_WINDOW)?,
            qkv_bias: match family {
                Family::Qwen2 => true,
                Family::Llama | Family::Qwen3 => attention_bias,
                Family::Mistral => false,
            },
            output_bias: matches!(family, Family::Llama | Family::Qwen3) && attention_bias,
            mlp_bias: family == Family::Llama && flag("mlp_bias")?,
            qk_norm: family == Family::Qwen3,
            layer_kinds: layer_kinds(family, &config, layers, &mut notes)?,
            notes,
        })
    }

    /// The number of layers.
    pub fn layers(&self) -> usize {
        self.layer_kinds.len()
    }
}

/// Follows the nesting down to the language model: the levels above it, outermost first, and its own object.
fn descend(root: Object<'_>) -> Result<(Vec<Object<'_>>, Object<'_>), Error> {
    let (mut above, mut here) = (Vec::new(), root);
    loop {
        let mut inner = None;
        for key in NESTED {
            if let Some(object) = here.object(key)? {
                inner = Some(object);
                break;
            }
        }
        match inner {
            Some(object) => above.push(std::mem::replace(&mut here, object)),
            None => return Ok((above, here)),
        }
    }
}

/// The family named nearest to the dimensions. An outer level counts only where it names a family itself: the type of
/// a wrapper says nothing about its language model.
fn family(above: &[Object<'_>], config: &Object<'_>) -> Result<Family, Error> {
    let unsupported = |key: String, found: &str| Error::UnsupportedModel {
        key,
        found: found.chars().take(60).collect(),
        supported: Family::ALL.map(Family::model_type).join(", "),
    };
    if let Some(name) = config.string("model_type")? {
        return Family::from_model_type(name).ok_or_else(|| unsupported(config.path_of("model_type"), name));
    }
    for level in above.iter().rev() {
        if let Some(name) = level.string("model_type")? {
            return Family::from_model_type(name)
                .ok_or_else(|| unsupported(level.path_of("model_type"), name));
        }
    }
    Err(config.absent("model_type"))
}

/// Wrappers repeat dimensions of their parts at the top, not always those of the language model.
fn note_contradictions(above: &[Object<'_>], config: &Object<'_>, notes: &mut Vec<String>) {
    for level in above {
        for key in config.keys() {
            let described = !NESTED.contains(&key) && key != "model_type" && key != "architectures";
            if let (true, Some(outer), Some(inner)) = (described, level.get(key), config.get(key))
                && (outer.is_number() || outer.is_boolean())
                && outer != inner
            {
                notes.push(format!(
                    "`{}` is {outer}, but `{}` is {inner}: the nested value is used",
                    level.path_of(key),
                    config.path_of(key)
                ));
            }
        }
    }
}

/// Settings that would change the arithmetic in ways the sizes below do not describe.
fn refuse_unsupported(config: &Object<'_>) -> Result<(), Error> {
    if let Some(act) = config.string("hidden_act")?
        && act != "silu"
    {
        return Err(config.error("hidden_act", format!("is {act:?}; only \"silu\" is supported")));
    }
    if let Some(factor) = config.number("partial_rotary_factor")?
        && factor != 1.0
    {
        return Err(config.error("partial_rotary_factor", format!("is {factor}; only 1 is supported")));
    }
    Ok(())
}

/// Key and value heads: written down, or equal to the query heads where the family says so.
fn kv_heads(family: Family, config: &Object<'_>, heads: usize) -> Result<usize, Error> {
    const KEY: &str = "num_key_value_heads";
    let kv_heads = match config.count(KEY, heads)? {
        Some(count) => count,
        // Every one of these classes turns a written null into plain multi-head attention; only Llama's also does
        // so for an absent key, the others have a number of their own there.
        None if config.has(KEY) || family == Family::Llama => heads,
        None => return Err(config.absent(KEY)),
    };
    if !heads.is_multiple_of(kv_heads) {
        return Err(config.error(KEY, format!("is {kv_heads}, which does not divide {heads} query heads")));
    }
    Ok(kv_heads)
}

/// The explicit value is authoritative. Qwen3's heads are wider than `hidden / heads` in several sizes, so there the
/// quotient is no rule and an absent key is an error.
fn head_dim(family: Family, config: &Object<'_>, hidden: usize, heads: usize) -> Result<usize, Error> {
    const KEY: &str = "head_dim";
    let head_dim = match config.count(KEY, MAX_WIDTH)? {
        Some(width) => width,
        None if family == Family::Qwen3 => return Err(config.absent(KEY)),
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            let problem =
                format!("is absent, and hidden_size {hidden} is not divisible by {heads} heads: add it");
            return Err(config.error(KEY, problem));
        }
    };
    if heads.saturating_mul(head_dim) > MAX_WIDTH {
        return Err(config.error(KEY, format!("is {head_dim}: {heads} heads of it exceed {MAX_WIDTH}")));
    }
    Ok(head_dim)
}

fn positive(config: &Object<'_>, key: &str) -> Result<Option<f64>, Error> {
    let value = config.number(key)?;
    match value {
        Some(v) if v <= 0.0 => Err(config.error(key, format!("is {v}; it must be positive"))),
        other => Ok(other),
    }
}

/// Base and scaling kind of the rotary embedding, from `rope_parameters` (newer files) or the top level (older ones).
fn rope(config: &Object<'_>, notes: &mut Vec<String>) -> Result<(f64, Option<String>), Error> {
    let newer = config.object("rope_parameters")?;
    let flat = positive(config, "rope_theta")?;
    let inner = newer.as_ref().map(|object| positive(object, "rope_theta")).transpose()?.flatten();
    if let (Some(a), Some(b)) = (flat, inner)
        && a != b
    {
        notes.push(format!(
            "`rope_theta` is {a}, but `rope_parameters.rope_theta` is {b}: the latter is used"
        ));
    }
    let theta = inner.or(flat).unwrap_or_else(|| {
        notes.push("`rope_theta` is absent: the family's 10000 is used".into());
        10_000.0
    });
    let mut scaling = None;
    for object in [newer, config.object("rope_scaling")?].into_iter().flatten() {
        let kind = match object.string("rope_type")? {
            Some(kind) => Some(kind),
            None => object.string("type")?,
        };
        scaling = scaling.or(kind.filter(|&kind| kind != "default"));
    }
    Ok((theta, scaling.map(str::to_owned)))
}

/// All four families leave the head untied unless the file says otherwise.
fn tied(above: &[Object<'_>], config: &Object<'_>, notes: &mut Vec<String>) -> Result<bool, Error> {
    const KEY: &str = "tie_word_embeddings";
    if let Some(tied) = config.bool(KEY)? {
        return Ok(tied);
    }
    for level in above.iter().rev() {
        if let Some(tied) = level.bool(KEY)? {
            notes.push(format!("`{}` is absent: `{}` is used", config.path_of(KEY), level.path_of(KEY)));
            return Ok(tied);
        }
    }
    notes.push(format!("`{}` is absent: the family's false is used", config.path_of(KEY)));
    Ok(false)
}

/// The window that is really active, if any: Qwen's files carry one that a flag switches off.
fn window(family: Family, config: &Object<'_>, notes: &mut Vec<String>) -> Result<Option<usize>, Error> {
    const KEY: &str = "sliding_window";
    let window = config.count(KEY, MAX_WINDOW)?;
    match family {
        Family::Llama => Ok(None),
        Family::Mistral if window.is_none() && !config.has(KEY) => {
            notes.push("`sliding_window` is absent: the family's 4096 is used".into());
            Ok(Some(4096))
        }
        Family::Mistral => Ok(window),
        Family::Qwen2 | Family::Qwen3 => {
            match (config.bool("use_sliding_window")?.unwrap_or(false), window) {
                (false, _) => Ok(None),
                (true, Some(window)) => Ok(Some(window)),
                (true, None) => {
                    Err(config.error(KEY, "is absent, though `use_sliding_window` is true: add it"))
                }
            }
        }
    }
}

fn layer_kinds(
    family: Family,
    config: &Object<'_>,
    layers: usize,
    notes: &mut Vec<String>,
) -> Result<Vec<LayerKind>, Error> {
    const KEY: &str = "layer_types";
    let window = window(family, config, notes)?;
    let sliding =
        |window: Option<usize>| window.map_or(LayerKind::Full, |window| LayerKind::Sliding { window });
    let Some(types) = config.list(KEY)? else {
        return match family {
            // The first `max_window_layers` layers of these families see everything.
            Family::Qwen2 | Family::Qwen3 if window.is_some() => {
                let first = config.get("max_window_layers").and_then(Value::as_u64);
                let first = first.ok_or_else(|| config.absent("max_window_layers"))?;
                Ok((0..layers)
                    .map(|l| if l as u64 >= first { sliding(window) } else { LayerKind::Full })
                    .collect())
            }
            _ => Ok(vec![sliding(window); layers]),
        };
    };
    if types.len() != layers {
        let problem = format!("lists {} layers, but num_hidden_layers is {layers}", types.len());
        return Err(config.error(KEY, problem));
    }
    let kind =
        |(l, name): (usize, &Value)| match (name.as_str(), window) {
            (Some("full_attention"), _) => Ok(LayerKind::Full),
            (Some("sliding_attention"), Some(window)) => Ok(LayerKind::Sliding { window }),
            (Some("sliding_attention"), None) => Err(config
                .error(&format!("{KEY}[{l}]"), "is \"sliding_attention\", but no sliding window is active")),
            _ => Err(config.error(
                &format!("{KEY}[{l}]"),
                format!("is {name}; known kinds: full_attention, sliding_attention"),
            )),
        };
    types.iter().enumerate().map(kind).collect()
}
