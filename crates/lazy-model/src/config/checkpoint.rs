//! The tensors of a checkpoint beside a config: what its index or header says, compared with what the config says.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;

use serde_json::Value;

use super::{LayerShape, ModelSpec};
use crate::error::Error;
use crate::json::{Object, parse};
use crate::layers::EXPERT;
use crate::text::read_text;
use crate::units::Bytes;

const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
const HEAD: &str = "lm_head.weight";

/// The format's own limit of a header.
const MAX_HEADER: u64 = 100_000_000;

/// Where multi-modal checkpoints keep their language model, and what that is called in a plain one.
const PREFIXES: [(&str, &str); 6] = [
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("thinker.model.", "model."),
    ("thinker.lm_head.", "lm_head."),
    ("model.lm_head.", "lm_head."),
];

/// What lies on disk for a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Bytes of all tensors, as the index or the header says: never computed from the config, never added to what is.
    pub bytes: Bytes,
    /// The number of tensors.
    pub tensors: usize,
    /// It has a tensor for the head.
    pub head: bool,
}

/// Tensors by their name in a plain checkpoint, with their shapes where these are known.
struct Tensors {
    found: HashMap<String, Option<Vec<u64>>>,
    bytes: Bytes,
}

impl Tensors {
    /// How many missing tensors are counted.
    fn patience(&self) -> usize {
        self.found.len() + 4096
    }
}

impl ModelSpec {
    /// Reads `model.safetensors.index.json`, or else the header of `model.safetensors`, in `folder`, where there is one.
    pub(super) fn read_checkpoint(&mut self, folder: &Path) -> Result<(), Error> {
        let index = folder.join(INDEX);
        match read_text(&index) {
            Ok(text) => return self.with_safetensors_index(&text),
            Err(Error::Read { source, .. }) if source.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let single = folder.join(SINGLE);
        match File::open(&single) {
            Ok(file) => {
                let text = header(file, &single)?;
                self.with_safetensors_header(&text)
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(source) => Err(Error::Read { path: single, source }),
        }
    }

    /// Takes bytes and the presence of a head from the text of a `model.safetensors.index.json`; what it says otherwise than the config
    /// becomes a note. [`ModelSpec::from_file`] does so where the file lies beside the config.
    ///
    /// # Errors
    /// Where it is not such an index; the message names the key path.
    pub fn with_safetensors_index(&mut self, text: &str) -> Result<(), Error> {
        const DOCUMENT: &str = "safetensors index";
        let value = parse(text).map_err(|source| Error::Json { document: DOCUMENT, source })?;
        let root = Object::root(DOCUMENT, &value)?;
        let map = root.object("weight_map")?.ok_or_else(|| root.absent("weight_map"))?;
        let metadata = root.object("metadata")?.ok_or_else(|| root.absent("metadata"))?;
        let bytes = metadata.get("total_size").ok_or_else(|| metadata.absent("total_size"))?;
        let bytes =
            bytes.as_u64().ok_or_else(|| metadata.error("total_size", "must be a whole number of bytes"))?;
        let found = map.keys().map(|name| (plain(name), None)).collect();
        self.compare(Tensors { found, bytes: Bytes(bytes) });
        Ok(())
    }

    /// The same from the JSON header of a single `model.safetensors`, which gives shapes too.
    ///
    /// # Errors
    /// Where it is not such a header; the message names the key path.
    pub fn with_safetensors_header(&mut self, text: &str) -> Result<(), Error> {
        const DOCUMENT: &str = "safetensors header";
        let value = parse(text).map_err(|source| Error::Json { document: DOCUMENT, source })?;
        let root = Object::root(DOCUMENT, &value)?;
        let (mut found, mut total) = (HashMap::new(), Bytes::ZERO);
        for name in root.keys().filter(|&name| name != "__metadata__") {
            let tensor = root.object(name)?.ok_or_else(|| root.absent(name))?;
            let numbers = |key| {
                let list = tensor.list(key)?.ok_or_else(|| tensor.absent(key))?;
                let numbers = list.iter().map(Value::as_u64).collect::<Option<Vec<u64>>>();
                numbers.ok_or_else(|| tensor.error(key, "must be a list of whole numbers"))
            };
            let bytes = match numbers("data_offsets")?[..] {
                [start, end] if start <= end => end - start,
                _ => return Err(tensor.error("data_offsets", "must be a start and an end behind it")),
            };
            total += Bytes(bytes);
            found.insert(plain(name), Some(numbers("shape")?));
        }
        self.compare(Tensors { found, bytes: total });
        Ok(())
    }

    /// Bytes of all weights: the checkpoint's where one was read, otherwise parameters at `element_bytes`.
    pub fn weight_bytes(&self, element_bytes: u64) -> Bytes {
        match &self.checkpoint {
            Some(checkpoint) => checkpoint.bytes,
            None => Bytes(self.total_parameters()) * element_bytes,
        }
    }

    fn compare(&mut self, tensors: Tensors) {
        let (bytes, head) = (tensors.bytes, tensors.found.contains_key(HEAD));
        self.compare_head(head);
        if self.compare_names(&tensors) {
            self.compare_bytes(head, bytes);
        }
        self.checkpoint = Some(Checkpoint { bytes, tensors: tensors.found.len(), head });
    }

    /// Compares names and shapes; whether the checkpoint has all the tensors that the config asks for and no other.
    fn compare_names(&mut self, tensors: &Tensors) -> bool {
        let mut check =
            Check { tensors, met: HashSet::new(), missing: Few::default(), shapes: Few::default() };
        let outside = [self.embedding_parameter(), self.final_norm_parameter()];
        outside.iter().for_each(|parameter| check.meet(&parameter.name, &parameter.shape));
        for (layer, shape) in self.layer_shapes.iter().enumerate() {
            check.layer(layer, shape, self.hidden);
        }
        let Check { mut met, missing, shapes, .. } = check;
        met.insert(HEAD.to_owned());
        let mut others: Vec<&String> = tensors.found.keys().filter(|name| !met.contains(*name)).collect();
        others.sort();
        if let Some(first) = &missing.first {
            let count =
                if missing.count > tensors.patience() { "most".into() } else { missing.count.to_string() };
            self.notes.push(format!(
                "the checkpoint lacks {count} of the tensors that the config asks for, `{first}` among them"
            ));
        }
        if let Some(first) = others.first() {
            self.notes.push(format!(
                "the checkpoint holds {} tensors beside the parameters counted, `{first}` among them; its {} bytes include them",
                others.len(),
                tensors.bytes.get()
            ));
        }
        if let Some(first) = &shapes.first {
            self.notes
                .push(format!("{} tensors have another shape than the config gives: {first}", shapes.count));
        }
        missing.count == 0 && others.is_empty()
    }

    /// The tensor decides whether there is a head to read; the flag decides whether training has one or two matrices.
    fn compare_head(&mut self, head: bool) {
        match (self.tied, head) {
            (false, false) => {
                self.tied = true;
                self.notes.push(format!(
                    "`tie_word_embeddings` is false, but the checkpoint has no `{HEAD}`: the embedding is taken for the head, and \
                     no second matrix is counted"
                ));
            }
            (true, true) => self.notes.push(format!(
                "`tie_word_embeddings` is true, but the checkpoint has a `{HEAD}`: parameters count the shared matrix once, and the \
                 checkpoint's bytes are as its index says"
            )),
            (true, false) | (false, true) => {}
        }
    }

    /// All tensors are those counted: then their bytes are parameters times one width.
    fn compare_bytes(&mut self, head: bool, bytes: Bytes) {
        let table = if self.tied && head { self.vocab as u64 * self.hidden as u64 } else { 0 };
        let elements = self.total_parameters() + table;
        let width = self.element_bytes.map(u64::from);
        let fits = match width {
            Some(width) => Bytes(elements) * width == bytes,
            None => [1, 2, 4, 8].iter().any(|&width| Bytes(elements) * width == bytes),
        };
        if !fits {
            let width = width.map_or("1, 2, 4 or 8".to_owned(), |width| width.to_string());
            self.notes.push(format!(
                "the checkpoint has {} bytes, but {elements} elements of {width} bytes were expected: its bytes are used",
                bytes.get()
            ));
        }
    }
}

/// How many there are, and one of them.
#[derive(Default)]
struct Few {
    count: usize,
    first: Option<String>,
}

impl Few {
    fn add(&mut self, text: impl FnOnce() -> String) {
        self.count += 1;
        self.first.get_or_insert_with(text);
    }
}

/// Ticks off the parameters that a checkpoint has.
struct Check<'a> {
    tensors: &'a Tensors,
    met: HashSet<String>,
    missing: Few,
    shapes: Few,
}

impl Check<'_> {
    /// A config asks for as many tensors as it likes: who lacks more than a checkpoint has need not be counted out.
    fn layer(&mut self, layer: usize, shape: &LayerShape, hidden: usize) {
        shape.tensors(hidden, &mut |name, part, dimensions| {
            if !name.contains(EXPERT) {
                self.meet(&format!("model.layers.{layer}.{name}{part}"), dimensions);
                return;
            }
            let fused = fused(name).map(|name| format!("model.layers.{layer}.{name}"));
            if let Some(name) = fused.into_iter().find(|name| self.tensors.found.contains_key(name)) {
                self.met.insert(name);
                return;
            }
            for expert in 0..shape.copies(name) {
                if self.missing.count > self.tensors.patience() {
                    return;
                }
                let name = name.replace(EXPERT, &expert.to_string());
                self.meet(&format!("model.layers.{layer}.{name}{part}"), dimensions);
            }
        });
    }

    fn meet(&mut self, name: &str, wanted: &[usize]) {
        let Some(shape) = self.tensors.found.get(name) else {
            return self.missing.add(|| name.to_owned());
        };
        self.met.insert(name.to_owned());
        if let Some(found) = shape
            && !wanted.iter().map(|&n| n as u64).eq(found.iter().copied())
        {
            self.shapes.add(|| format!("`{name}` is {found:?} in the checkpoint, {wanted:?} by the config"));
        }
    }
}

/// Names of the tensor that holds this projection of all experts of a layer, as newer files have it.
fn fused(name: &str) -> [String; 2] {
    let down = name.ends_with(".down_proj") || name.ends_with(".w2");
    let projection = if down { "down_proj" } else { "gate_up_proj" };
    ["", ".weight"].map(|end| format!("mlp.experts.{projection}{end}"))
}

/// The name that a tensor of the language model has in a plain checkpoint; other names stay.
fn plain(name: &str) -> String {
    for (prefix, replacement) in PREFIXES {
        if let Some(rest) = name.strip_prefix(prefix) {
            return format!("{replacement}{rest}");
        }
    }
    if ["layers.", "embed_tokens.", "norm."].iter().any(|start| name.starts_with(start)) {
        return format!("model.{name}");
    }
    name.to_owned()
}

/// The JSON header of a safetensors file: eight bytes of length, then the text.
fn header(mut file: File, path: &Path) -> Result<String, Error> {
    let read = |source| Error::Read { path: path.into(), source };
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(read)?;
    let length = u64::from_le_bytes(length);
    let there = file.metadata().map_err(read)?.len();
    if length > MAX_HEADER || length.saturating_add(8) > there {
        let problem = format!("a header of {length} bytes in a file of {there}");
        return Err(read(std::io::Error::new(ErrorKind::InvalidData, problem)));
    }
    let mut text = String::new();
    file.take(length).read_to_string(&mut text).map_err(read)?;
    Ok(text)
}
