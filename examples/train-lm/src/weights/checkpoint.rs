//! Weights in a folder as Hugging Face lays them out, read where they lie.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Component, Path, PathBuf};

use half::{bf16, f16};
use lazy_model::{ModelSpec, Parameter};
use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use crate::error::{Result, TrainError};

/// All weights in one file.
const SINGLE: &str = "model.safetensors";
/// Which of several files holds which weight.
const INDEX: &str = "model.safetensors.index.json";
/// The head, which is the embedding where the two are tied.
const HEAD: &str = "lm_head.weight";
/// Tables that old checkpoints hold and that are computed here.
const COMPUTED: &str = "rotary_emb.inv_freq";

/// The weights of a model in mapped files: float32, bfloat16 or float16.
pub struct CheckpointWeights {
    files: Vec<Mmap>,
    tensors: BTreeMap<String, Stored>,
}

/// Where a tensor lies.
struct Stored {
    file: usize,
    dtype: Dtype,
    start: usize,
    end: usize,
    shape: Vec<usize>,
}

impl CheckpointWeights {
    /// Whether there are weights in a folder.
    pub fn lie_in(folder: &Path) -> bool {
        folder.join(SINGLE).exists() || folder.join(INDEX).exists()
    }

    /// Maps the weights in a folder, from one file or from those that an index names, and compares them with the model. A second
    /// head in a model whose head is its embedding has to be that embedding.
    ///
    /// # Errors
    /// When a file cannot be read, and when a tensor is missing, is none of the model's, or has another shape or type: by name.
    pub fn open(folder: &Path, spec: &ModelSpec) -> Result<CheckpointWeights> {
        let mut weights = CheckpointWeights { files: Vec::new(), tensors: BTreeMap::new() };
        if folder.join(SINGLE).exists() {
            weights.add(&folder.join(SINGLE))?;
        } else {
            weights.add_indexed(folder)?;
        }
        weights.compare(folder, spec)?;
        Ok(weights)
    }

    fn add_indexed(&mut self, folder: &Path) -> Result<()> {
        #[derive(serde::Deserialize)]
        struct Index {
            weight_map: BTreeMap<String, String>,
        }
        let path = folder.join(INDEX);
        let text = std::fs::read_to_string(&path).map_err(TrainError::io(&path))?;
        let index: Index = serde_json::from_str(&text).map_err(|e| refused(&path, &e.to_string()))?;
        for file in index.weight_map.values().collect::<BTreeSet<_>>() {
            let mut parts = Path::new(file).components();
            if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
                return Err(refused(&path, &format!("{file:?} is no name of a file in the same folder")));
            }
            let file = folder.join(file);
            if !file.exists() {
                return Err(refused(&path, &format!("{} is named there and is missing", file.display())));
            }
            self.add(&file)?;
        }
        match index.weight_map.keys().find(|name| !self.tensors.contains_key(*name)) {
            Some(name) => Err(refused(&path, &format!("{name} is not in the file that it names"))),
            None => Ok(()),
        }
    }

    fn add(&mut self, path: &Path) -> Result<()> {
        let file = File::open(path).map_err(TrainError::io(path))?;
        // SAFETY: the bytes are only ever read, as numbers of which any bits are one; as with every mapped file, nobody may cut it
        // short meanwhile.
        let map = unsafe { Mmap::map(&file) }.map_err(TrainError::io(path))?;
        let (header, metadata) = SafeTensors::read_metadata(&map)
            .map_err(|e| refused(path, &format!("{e}, so it is not whole or no safetensors file")))?;
        let data = size_of::<u64>() + header;
        for (name, info) in metadata.tensors() {
            let (start, end) = info.data_offsets;
            let stored = Stored {
                file: self.files.len(),
                dtype: info.dtype,
                start: data + start,
                end: data + end,
                shape: info.shape.clone(),
            };
            if self.tensors.insert(name.clone(), stored).is_some() {
                return Err(refused(path, &format!("{name} is in another file too")));
            }
        }
        self.files.push(map);
        Ok(())
    }

    /// Every parameter has its tensor, and every tensor its parameter.
    fn compare(&self, folder: &Path, spec: &ModelSpec) -> Result<()> {
        let refuse = |problem: String| Err(refused(folder, &problem));
        let parameters = spec.parameters();
        let names: BTreeSet<&str> = parameters.iter().map(|p| p.name.as_str()).collect();
        let missing: Vec<&str> =
            names.iter().copied().filter(|name| !self.tensors.contains_key(*name)).collect();
        if missing == [HEAD] {
            return refuse(format!(
                "it has no {HEAD}, and config.json has \"tie_word_embeddings\": false; set it to true if the head is the embedding"
            ));
        }
        if let Some(first) = missing.first() {
            return refuse(format!(
                "it lacks {} of the model's {} tensors, {first} among them; config.json and weights are of two models",
                missing.len(),
                names.len()
            ));
        }
        for Parameter { name, shape } in &parameters {
            let Stored { shape: found, dtype, .. } = &self.tensors[name];
            if found != shape {
                return refuse(format!("{name} has shape {found:?}, and config.json makes it {shape:?}"));
            }
            if !matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::F16) {
                return refuse(format!("{name} is of type {dtype:?}; give weights in F32, BF16 or F16"));
            }
        }
        let known = |name: &str| names.contains(name) || name == HEAD || name.ends_with(COMPUTED);
        let others: Vec<&String> = self.tensors.keys().filter(|name| !known(name)).collect();
        if let Some(first) = others.first() {
            return refuse(format!(
                "it holds {} tensors that are none of this model's, {first} among them; config.json and weights are of two models",
                others.len()
            ));
        }
        match (parameters.first(), self.tensors.get(HEAD)) {
            (Some(embedding), Some(head))
                if spec.tied && !self.same(&self.tensors[&embedding.name], head) =>
            {
                refuse(format!(
                    "its {HEAD} is not its embedding, and config.json has \"tie_word_embeddings\": true; set it to false to train both"
                ))
            }
            _ => Ok(()),
        }
    }

    fn bytes(&self, tensor: &Stored) -> &[u8] {
        &self.files[tensor.file][tensor.start..tensor.end]
    }

    fn same(&self, a: &Stored, b: &Stored) -> bool {
        (a.dtype, &a.shape) == (b.dtype, &b.shape) && self.bytes(a) == self.bytes(b)
    }

    /// The elements of a parameter from `first` on.
    ///
    /// # Errors
    /// When there are no such elements, or one of them is NaN or infinite: no step could be taken from it.
    pub(super) fn fill(&self, name: &str, first: usize, values: &mut [f32]) -> Result<()> {
        fn convert<const N: usize>(from: &[u8], to: &mut [f32], value: impl Fn([u8; N]) -> f32) {
            to.iter_mut().zip(from.as_chunks().0).for_each(|(to, from)| *to = value(*from));
        }
        let outside = || TrainError::Usage(format!("the weights have no elements from {first} on of {name}"));
        let tensor = self.tensors.get(name).ok_or_else(outside)?;
        let width = tensor.dtype.bitsize() / 8;
        let range = first * width..(first + values.len()) * width;
        let from = self.bytes(tensor).get(range).ok_or_else(outside)?;
        match tensor.dtype {
            Dtype::BF16 => convert(from, values, |b| bf16::from_le_bytes(b).to_f32()),
            Dtype::F16 => convert(from, values, |b| f16::from_le_bytes(b).to_f32()),
            _ => convert(from, values, f32::from_le_bytes),
        }
        match values.iter().position(|value| !value.is_finite()) {
            Some(at) => Err(TrainError::Usage(format!(
                "element {} of {name} is {} in the weights: the file is damaged, or of training that failed",
                first + at,
                values[at]
            ))),
            None => Ok(()),
        }
    }
}

fn refused(path: &Path, problem: &str) -> TrainError {
    TrainError::Usage(format!("cannot read the weights in {}: {problem}", PathBuf::from(path).display()))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use safetensors::tensor::TensorView;

    use super::*;

    const CONFIG: &str = r#"{
      "model_type": "qwen3", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1,
      "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 3, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
      "tie_word_embeddings": TIED
    }"#;

    fn spec(tied: bool) -> ModelSpec {
        ModelSpec::from_json(&CONFIG.replace("TIED", &tied.to_string())).unwrap()
    }

    type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

    /// Element `i` of parameter `n` is `n + i / 8`, which all three types hold.
    fn tensors(spec: &ModelSpec, dtype: Dtype) -> Tensors {
        let named = spec.parameters().into_iter().enumerate();
        named
            .map(|(n, Parameter { name, shape })| {
                let values = (0..shape.iter().product()).map(|i: usize| n as f32 + i as f32 / 8.0);
                let bytes = values.flat_map(|v| match dtype {
                    Dtype::BF16 => bf16::from_f32(v).to_le_bytes().to_vec(),
                    Dtype::F16 => f16::from_f32(v).to_le_bytes().to_vec(),
                    _ => v.to_le_bytes().to_vec(),
                });
                (name, (dtype, shape, bytes.collect()))
            })
            .collect()
    }

    fn write(path: &Path, tensors: &Tensors) {
        let views = tensors.iter().map(|(name, (dtype, shape, data))| {
            (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
        });
        fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
    }

    fn check_values(folder: &Path, spec: &ModelSpec) {
        let weights = CheckpointWeights::open(folder, spec).unwrap();
        for (n, Parameter { name, shape }) in spec.parameters().iter().enumerate() {
            let count: usize = shape.iter().product();
            for first in [0, count / 2] {
                let mut values = vec![f32::NAN; count - first];
                weights.fill(name, first, &mut values).unwrap();
                let expected: Vec<f32> = (first..count).map(|i| n as f32 + i as f32 / 8.0).collect();
                assert_eq!(values, expected, "{name} from {first}");
            }
            assert!(weights.fill(name, count, &mut [0.0]).is_err());
        }
    }

    #[test]
    fn values_of_all_types_are_read_from_one_file_and_from_shards() {
        for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
            let (dir, spec) = (tempfile::tempdir().unwrap(), spec(false));
            let all = tensors(&spec, dtype);
            assert!(!CheckpointWeights::lie_in(dir.path()));
            let mut map = BTreeMap::new();
            for (shard, part) in all.iter().collect::<Vec<_>>().chunks(5).enumerate() {
                let file = format!("model-{shard}.safetensors");
                let part: Tensors = part.iter().map(|(n, t)| ((*n).clone(), (*t).clone())).collect();
                write(&dir.path().join(&file), &part);
                map.extend(part.into_keys().map(|name| (name, file.clone())));
            }
            let index = serde_json::json!({ "metadata": { "total_size": 1 }, "weight_map": map });
            fs::write(dir.path().join(INDEX), index.to_string()).unwrap();
            assert!(CheckpointWeights::lie_in(dir.path()));
            check_values(dir.path(), &spec);
            fs::remove_file(dir.path().join(INDEX)).unwrap();
            write(&dir.path().join(SINGLE), &all);
            check_values(dir.path(), &spec);
        }
    }

    #[test]
    fn an_element_that_is_no_finite_number_is_refused_by_name_and_place() {
        let (dir, spec) = (tempfile::tempdir().unwrap(), spec(true));
        let mut all = tensors(&spec, Dtype::F32);
        // The sixth element, little-endian.
        all.get_mut("model.layers.0.mlp.gate_proj.weight").unwrap().2[20..24]
            .copy_from_slice(&[0, 0, 0xc0, 0x7f]);
        write(&dir.path().join(SINGLE), &all);
        let weights = CheckpointWeights::open(dir.path(), &spec).unwrap();
        let message =
            weights.fill("model.layers.0.mlp.gate_proj.weight", 1, &mut [0.0; 5]).unwrap_err().to_string();
        assert!(message.contains("element 5 of model.layers.0.mlp.gate_proj.weight is NaN"), "{message}");
        weights.fill("model.layers.0.mlp.gate_proj.weight", 0, &mut [0.0; 5]).unwrap();
    }

    fn refusal(spec: &ModelSpec, change: impl FnOnce(&mut Tensors)) -> String {
        let dir = tempfile::tempdir().unwrap();
        let mut all = tensors(spec, Dtype::F32);
        change(&mut all);
        write(&dir.path().join(SINGLE), &all);
        match CheckpointWeights::open(dir.path(), spec) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let (q, gate) = ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate_proj.weight");
        let message = refusal(&spec(true), |all| drop(all.remove(q)));
        assert!(message.contains("lacks 1 of") && message.contains(q), "{message}");
        let message = refusal(&spec(true), |all| {
            let tensor = all[q].clone();
            all.insert("model.layers.1.self_attn.q_proj.weight".into(), tensor);
        });
        assert!(message.contains("none of this model's, model.layers.1."), "{message}");
        let message = refusal(&spec(true), |all| all.get_mut(gate).unwrap().1.reverse());
        assert!(
            message.contains("gate_proj.weight has shape [4, 3], and config.json makes it [3, 4]"),
            "{message}"
        );
        let message = refusal(&spec(true), |all| all.get_mut(gate).unwrap().0 = Dtype::I32);
        assert!(message.contains("type I32"), "{message}");
        let inverse = (Dtype::F32, vec![1], vec![0; 4]);
        let message =
            refusal(&spec(true), |all| drop(all.insert("model.rotary_emb.inv_freq".into(), inverse)));
        assert_eq!(message, "");
    }

    #[test]
    fn m5_a_head_beside_a_tied_embedding_and_one_that_is_missing_are_told_from_right_ones() {
        let embedding = "model.embed_tokens.weight";
        let same = refusal(&spec(true), |all| drop(all.insert(HEAD.into(), all[embedding].clone())));
        assert_eq!(same, "", "a copy of the embedding is one");
        let other = refusal(&spec(true), |all| {
            let mut head = all[embedding].clone();
            head.2[5] ^= 1;
            all.insert(HEAD.into(), head);
        });
        assert!(other.contains("is not its embedding") && other.contains("tie_word_embeddings"), "{other}");
        let missing = refusal(&spec(false), |all| drop(all.remove(HEAD)));
        assert!(missing.contains("no lm_head.weight") && missing.contains("set it to true"), "{missing}");
        assert_eq!(refusal(&spec(false), |_| ()), "");
    }

    #[test]
    fn files_that_are_not_whole_and_indices_that_lie_are_refused() {
        let (dir, spec) = (tempfile::tempdir().unwrap(), spec(true));
        let all = tensors(&spec, Dtype::F32);
        let open = || match CheckpointWeights::open(dir.path(), &spec) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        };
        for (name, file, words) in [
            ("model.norm.weight", "../model.safetensors", "no name of a file in the same folder"),
            ("model.norm.weight", "absent.safetensors", "absent.safetensors is named there and is missing"),
            ("model.other.weight", "part.safetensors", "model.other.weight is not in the file"),
        ] {
            write(&dir.path().join("part.safetensors"), &all);
            let index = serde_json::json!({ "weight_map": { name: file } });
            fs::write(dir.path().join(INDEX), index.to_string()).unwrap();
            assert!(open().contains(words), "{}", open());
        }
        write(&dir.path().join(SINGLE), &all);
        assert_eq!(open(), "");
        let bytes = fs::read(dir.path().join(SINGLE)).unwrap();
        for cut in [0, 5, 100, bytes.len() - 1] {
            fs::write(dir.path().join(SINGLE), &bytes[..cut]).unwrap();
            assert!(open().contains("cannot read the weights"), "{cut}: {}", open());
        }
    }
}
