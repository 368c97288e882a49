//! Models by name, and files by path.

use std::path::Path;

use lazy_model::{Error, ModelSpec};

/// Configurations that ship with the program. Only what decides sizes and work is kept of the published files.
const MODELS: [(&str, &str); 14] = [
    ("deepseek-v3", include_str!("models/deepseek-v3.json")),
    ("gemma-2-2b", include_str!("models/gemma-2-2b.json")),
    ("gemma-3-1b", include_str!("models/gemma-3-1b.json")),
    ("glm-4-9b", include_str!("models/glm-4-9b.json")),
    ("llama-3.1-8b", include_str!("models/llama-3.1-8b.json")),
    ("mistral-7b", include_str!("models/mistral-7b.json")),
    ("mixtral-8x7b", include_str!("models/mixtral-8x7b.json")),
    ("phi-3-mini", include_str!("models/phi-3-mini.json")),
    ("qwen2.5-7b", include_str!("models/qwen2.5-7b.json")),
    ("qwen3-30b-a3b", include_str!("models/qwen3-30b-a3b.json")),
    ("qwen3-4b", include_str!("models/qwen3-4b.json")),
    ("qwen3-8b", include_str!("models/qwen3-8b.json")),
    ("qwen3-next-80b", include_str!("models/qwen3-next-80b.json")),
    ("qwen3.6-27b-text", include_str!("models/qwen3.6-27b-text.json")),
];

/// The model's name for people, and its shape. A file or folder of that name comes before a shipped configuration.
pub(crate) fn find(model: &Path) -> Result<(String, ModelSpec), String> {
    let given = model.to_string_lossy();
    if model.exists() {
        let file = if model.is_dir() { model.join("config.json") } else { model.to_path_buf() };
        let spec = ModelSpec::from_file(&file).map_err(|e| match e {
            // Of the config or of the checkpoint beside it: it names the one.
            Error::Read { .. } => e.to_string(),
            e => format!("{}: {e}", file.display()),
        })?;
        return Ok((name_of(model), spec));
    }
    match MODELS.iter().find(|(name, _)| name.eq_ignore_ascii_case(&given)) {
        Some((name, text)) => {
            let spec = ModelSpec::from_json(text).map_err(|e| format!("the shipped `{name}`: {e}"))?;
            Ok(((*name).to_owned(), spec))
        }
        None => {
            let known: Vec<&str> = MODELS.iter().map(|(name, _)| *name).collect();
            Err(format!(
                "--model {given}: there is no such file or folder, nor a model of that name; the names are {}",
                known.join(", ")
            ))
        }
    }
}

/// `qwen3-8b` for `qwen3-8b.json`, and the folder's name for a plain `config.json`.
fn name_of(path: &Path) -> String {
    let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let folder = path.parent().and_then(Path::file_name).map(|f| f.to_string_lossy().into_owned());
    if path.is_dir() {
        path.file_name().map(|f| f.to_string_lossy().into_owned()).unwrap_or(stem)
    } else if stem == "config" {
        folder.unwrap_or(stem)
    } else {
        stem
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The counts are those of the same models built in transformers.
    #[test]
    fn shipped_models_have_their_published_size() {
        let totals: [(&str, u64); 14] = [
            ("deepseek-v3", 671_026_404_352),
            ("gemma-2-2b", 2_614_341_888),
            ("gemma-3-1b", 999_885_952),
            ("glm-4-9b", 9_400_279_040),
            ("llama-3.1-8b", 8_030_261_248),
            ("mistral-7b", 7_241_732_096),
            ("mixtral-8x7b", 46_702_792_704),
            ("phi-3-mini", 3_821_079_552),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen3-30b-a3b", 30_532_122_624),
            ("qwen3-4b", 4_022_468_096),
            ("qwen3-8b", 8_190_735_360),
            ("qwen3-next-80b", 79_674_391_296),
            ("qwen3.6-27b-text", 26_895_998_464),
        ];
        assert_eq!(totals.len(), MODELS.len());
        for (name, total) in totals {
            let (found, spec) = find(Path::new(name)).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!((found.as_str(), spec.total_parameters()), (name, total));
        }
    }
}
