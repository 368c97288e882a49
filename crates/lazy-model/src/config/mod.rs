//! Hugging Face `config.json` to [`ModelSpec`], strictly.
//!
//! A dimension is read, or derived by the rule its family documents, or it is an error that names the key path; there
//! is no default dimension. Settings that are not dimensions (rotary base, tied embeddings, window) fall back to the
//! default of the family's configuration class, and every such fallback leaves a note in [`ModelSpec::notes`].
//!
//! Only the language model is read, and only what transformers builds of it: vision towers and layers for multi-token
//! prediction are not counted.

mod attention;
mod checkpoint;
mod family;
mod mlp;
mod shape;

use std::path::Path;

use serde_json::Value;

pub use self::checkpoint::Checkpoint;
pub use self::family::Family;
pub use self::shape::{
    Attention, DeltaNet, DenseMlp, LatentAttention, LayerKind, LayerShape, Mixer, Mlp, MoeMlp, MoeNaming,
    Norms,
};
use crate::error::Error;
use crate::json::{Object, parse};
use crate::text::read_text;
use crate::units::LayerIndex;

const DOCUMENT: &str = "model config";

/// Keys under which multi-modal wrappers keep the language model's configuration.
const NESTED: [&str; 4] = ["text_config", "language_config", "llm_config", "thinker_config"];

// Limits that keep every later product of dimensions inside 64 bits; far above any published model.
const MAX_WIDTH: usize = 1 << 20;
const MAX_LAYERS: usize = 1 << 12;
const MAX_VOCAB: usize = 1 << 24;
const MAX_WINDOW: usize = 1 << 30;
const MAX_PARAMETERS: u128 = 1 << 50;

/// A decoder's shape: all that its parameters, sizes and work follow from.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// The model's family.
    pub family: Family,
    /// Width of the residual stream, and so of every boundary.
    pub hidden: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// The head shares the embedding's weight.
    pub tied: bool,
    /// Epsilon of the RMS norms.
    pub rms_norm_eps: f64,
    /// Base of the rotary embedding; that of full attention where kinds differ.
    pub rope_theta: f64,
    /// Kind of rotary scaling (`llama3`, `yarn`, ..) where it is not the plain embedding. It changes neither sizes nor
    /// work; who trains the model has to apply it or refuse.
    pub rope_scaling: Option<String>,
    /// The longest sequence the config declares, where it does.
    pub max_positions: Option<usize>,
    /// Bytes of an element in the checkpoint that the config belongs to, where it names its type.
    pub element_bytes: Option<u8>,
    /// The checkpoint beside the config, where there is one.
    pub checkpoint: Option<Checkpoint>,
    /// The shape of each layer, first to last.
    pub layer_shapes: Vec<LayerShape>,
    /// What was assumed, and which contradictions were resolved how, in sentences for the user.
    pub notes: Vec<String>,
}

impl ModelSpec {
    /// Reads a `config.json` file, and the index or header of the checkpoint beside it, where there is one.
    ///
    /// # Errors
    /// As [`ModelSpec::from_json`], and where a file cannot be read.
    pub fn from_file(path: &Path) -> Result<Self, Error> {
        let text = read_text(path)?;
        let mut spec = Self::from_json(&text)?;
        if let Some(folder) = path.parent() {
            spec.read_checkpoint(folder)?;
        }
        Ok(spec)
    }

    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// Where the text is not JSON, the model type is not supported, or a key is absent, of the wrong kind, or
    /// contradicts another; the message names the key path.
    pub fn from_json(text: &str) -> Result<Self, Error> {
        let value = parse(text).map_err(|source| Error::Json { document: DOCUMENT, source })?;
        let root = Object::root(DOCUMENT, &value)?;
        let mut notes = Vec::new();
        let (levels, config) = descend(root)?;
        let family = family(&levels, &config)?;
        note_contradictions(&levels, &config, &mut notes);
        note_uncounted(&levels, &config, &mut notes);
        refuse_unsupported(family, &config)?;
        refuse_unknown_geometry(&config)?;

        let hidden = config.need("hidden_size", MAX_WIDTH)?;
        let layers = config.need("num_hidden_layers", MAX_LAYERS)?;
        let (rope_theta, rope_scaling) = rope(family, &config, &mut notes)?;
        let norms = match family {
            Family::Gemma2 | Family::Gemma3 => Norms::AroundGemma,
            Family::Glm4 => Norms::AroundGlm,
            _ => Norms::Before,
        };
        let mixers = attention::mixers(family, &config, hidden, layers, &mut notes)?;
        let mlps = mlp::mlps(family, &config, hidden, layers)?;
        let shapes = mixers.into_iter().zip(mlps).map(|(mixer, mlp)| LayerShape { mixer, mlp, norms });
        let spec = ModelSpec {
            family,
            hidden,
            vocab: config.need("vocab_size", MAX_VOCAB)?,
            tied: tied(family, &levels, &config, &mut notes)?,
            rms_norm_eps: positive(&config, "rms_norm_eps")?.ok_or_else(|| config.absent("rms_norm_eps"))?,
            rope_theta,
            rope_scaling,
            max_positions: config.count("max_position_embeddings", MAX_WINDOW)?,
            element_bytes: element_bytes(&levels, &config)?,
            checkpoint: None,
            layer_shapes: shapes.collect(),
            notes,
        };
        match spec.too_many_parameters() {
            Some(problem) => Err(config.error("num_hidden_layers", problem)),
            None => Ok(spec),
        }
    }

    /// The same model with another number of layers: the first so many, or after the last the first again. What is beside the config is not
    /// of that model any more.
    ///
    /// # Errors
    /// Where there is none, or more than any supported model has.
    pub fn with_layers(&self, layers: usize) -> Result<Self, Error> {
        let refuse = |problem: String| Err(Error::Workload { problem });
        if !(1..=MAX_LAYERS).contains(&layers) {
            return refuse(format!("{layers} layers; a model has 1 to {MAX_LAYERS}"));
        }
        let layer_shapes = self.layer_shapes.iter().copied().cycle().take(layers).collect();
        let spec = ModelSpec { layer_shapes, checkpoint: None, ..self.clone() };
        match spec.too_many_parameters() {
            Some(problem) => refuse(format!("{layers} layers {problem}")),
            None => Ok(spec),
        }
    }

    fn too_many_parameters(&self) -> Option<String> {
        let total: u128 = self.layer_shapes.iter().map(|l| u128::from(l.parameter_count(self.hidden))).sum();
        (total > MAX_PARAMETERS).then(|| {
            format!("and the widths give {total} parameters; at most {MAX_PARAMETERS} are supported")
        })
    }

    /// The number of layers.
    pub fn layers(&self) -> usize {
        self.layer_shapes.len()
    }

    /// The shape of one layer.
    ///
    /// # Panics
    /// Where the model has no such layer.
    pub fn layer(&self, layer: LayerIndex) -> &LayerShape {
        &self.layer_shapes[layer.get()]
    }

    /// How positions meet in one layer.
    ///
    /// # Panics
    /// Where the model has no such layer.
    pub fn layer_kind(&self, layer: LayerIndex) -> LayerKind {
        self.layer(layer).kind()
    }
}

/// Refuses widths whose product is beyond what any model has; `key` is the one to blame.
fn within(config: &Object<'_>, key: &str, factors: &[usize]) -> Result<(), Error> {
    let product = factors.iter().try_fold(1usize, |product, &n| product.checked_mul(n));
    match product {
        Some(product) if product <= MAX_WIDTH => Ok(()),
        _ => {
            let text = factors.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
            Err(config.error(key, format!("makes a width of {text}, which exceeds {MAX_WIDTH}")))
        }
    }
}

/// Follows the nesting down to the language model: the levels above it, outermost first, and its own object.
fn descend(root: Object<'_>) -> Result<(Vec<Object<'_>>, Object<'_>), Error> {
    let (mut above, mut here) = (Vec::new(), root);
    loop {
        let mut inner = None;
        for key in NESTED {
            let Some(object) = here.object(key)? else { continue };
            match inner {
                Some((_, other)) if here.get(key) != here.get(other) => {
                    let problem = format!("describes another language model than `{other}`: leave one out");
                    return Err(here.error(key, problem));
                }
                Some(_) => {}
                None => inner = Some((object, key)),
            }
        }
        match inner {
            Some((object, _)) => above.push(std::mem::replace(&mut here, object)),
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

/// Parts that a checkpoint may hold beside what is counted.
fn note_uncounted(above: &[Object<'_>], config: &Object<'_>, notes: &mut Vec<String>) {
    for key in ["num_nextn_predict_layers", "mtp_num_hidden_layers"] {
        if let Some(count) = config.get(key).and_then(Value::as_u64).filter(|&n| n > 0) {
            notes.push(format!(
                "`{}` is {count}: layers for multi-token prediction are not counted",
                config.path_of(key)
            ));
        }
    }
    for level in above.iter().chain([config]) {
        for key in level.keys().filter(|key| key.ends_with("_config") && !NESTED.contains(key)) {
            if !level.get(key).is_some_and(Value::is_object) {
                continue;
            }
            if key == "quantization_config" {
                notes.push(format!(
                    "`{}` says that the checkpoint is quantised: parameters and bytes are those of the model before that",
                    level.path_of(key)
                ));
            } else {
                notes.push(format!("`{}` describes a part that is not counted", level.path_of(key)));
            }
        }
    }
}

/// Keys whose names say that they set a number of heads or a width, which this crate does not know: passing over one would size
/// layers wrongly without a word.
fn refuse_unknown_geometry(config: &Object<'_>) -> Result<(), Error> {
    const WORDS: [&str; 4] = ["attention_heads", "key_value_heads", "head_dim", "intermediate_size"];
    const KNOWN: [&str; 17] = [
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "swa_num_attention_heads",
        "swa_num_key_value_heads",
        "swa_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "qk_head_dim",
        "v_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "intermediate_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ];
    let unknown = |key: &&str| WORDS.iter().any(|word| key.contains(word)) && !KNOWN.contains(key);
    match config.keys().filter(|key| config.get(key).is_some()).find(unknown) {
        Some(key) => Err(config
            .error(key, "sets a dimension in a way that is not known here: remove it if it has no effect")),
        None => Ok(()),
    }
}

/// Settings that would change the arithmetic in ways the sizes do not describe.
fn refuse_unsupported(family: Family, config: &Object<'_>) -> Result<(), Error> {
    let supported: &[&str] = if family.gemma() { &["gelu_pytorch_tanh", "gelu"] } else { &["silu", "swish"] };
    // Gemma's files carry an outdated `hidden_act` beside the `hidden_activation` that counts.
    let keys: &[&str] = if family.gemma() { &["hidden_activation"] } else { &["hidden_act"] };
    for key in keys {
        if let Some(act) = config.string(key)?
            && !supported.contains(&act)
        {
            let found = act.chars().take(60).collect::<String>();
            return Err(config.error(key, format!("is {found:?}; supported: {}", supported.join(", "))));
        }
    }
    const ROTARY: &str = "partial_rotary_factor";
    for object in [Some(config.clone()), config.object("rope_parameters")?].into_iter().flatten() {
        if let Some(factor) = object.number(ROTARY)?
            && factor != 1.0
            && !family.partial_rotary()
        {
            return Err(object.error(ROTARY, format!("is {factor}; only 1 is supported")));
        }
    }
    Ok(())
}

/// The width of `dtype` (newer files) or `torch_dtype`, at the nearest level that has one; none for types of other widths.
fn element_bytes(above: &[Object<'_>], config: &Object<'_>) -> Result<Option<u8>, Error> {
    for level in std::iter::once(config).chain(above.iter().rev()) {
        for key in ["dtype", "torch_dtype"] {
            if let Some(name) = level.string(key)? {
                return Ok(match name.trim_start_matches("torch.") {
                    "float32" => Some(4),
                    "bfloat16" | "float16" => Some(2),
                    _ => None,
                });
            }
        }
    }
    Ok(None)
}

fn positive(config: &Object<'_>, key: &str) -> Result<Option<f64>, Error> {
    let value = config.number(key)?;
    match value {
        Some(v) if v <= 0.0 => Err(config.error(key, format!("is {v}; it must be positive"))),
        other => Ok(other),
    }
}

/// Base and scaling kind of the rotary embedding, from `rope_parameters` (newer files; by kind of layer where kinds differ) or
/// the top level (older ones).
fn rope(
    family: Family,
    config: &Object<'_>,
    notes: &mut Vec<String>,
) -> Result<(f64, Option<String>), Error> {
    let mut newer = config.object("rope_parameters")?;
    if let Some(object) = &newer
        && let Some(full) = object.object(LayerKind::Full.name())?
    {
        newer = Some(full);
    }
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
        let theta = family.rope_theta_by_default();
        notes.push(format!("`rope_theta` is absent: the family's {theta} is used"));
        theta
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

/// The flag nearest to the dimensions, or the family's default.
fn tied(
    family: Family,
    above: &[Object<'_>],
    config: &Object<'_>,
    notes: &mut Vec<String>,
) -> Result<bool, Error> {
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
    let tied = family.tied_by_default();
    notes.push(format!("`{}` is absent: the family's {tied} is used", config.path_of(KEY)));
    Ok(tied)
}
