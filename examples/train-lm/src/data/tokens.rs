//! Text as token ids: by a tokenizer of Hugging Face's kind, or byte by byte.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::Tokenizer;

use super::DataError;

/// Names that tokenizers give to the token that ends a text, the most telling first.
const ENDS: [&str; 6] =
    ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|end▁of▁sentence|>"];

/// What makes ids of text.
pub enum Tokens {
    /// Every byte is one.
    Bytes,
    /// A `tokenizer.json`.
    Tokenizer(Box<Loaded>),
}

/// A tokenizer that has been read.
pub struct Loaded {
    tokenizer: Tokenizer,
    /// The file as it was read.
    json: Vec<u8>,
    end: Option<u32>,
}

impl Tokens {
    /// Reads a `tokenizer.json` for a model of `vocab` tokens. The token that ends a text is the one that the model's `config` names
    /// as `eos_token_id`, or one of a usual name.
    ///
    /// # Errors
    /// When the file cannot be read, is no tokenizer, or has ids that the model has no row for.
    pub fn read(path: &Path, config: &str, vocab: usize) -> Result<Tokens, DataError> {
        let json = std::fs::read(path).map_err(super::read_error(path))?;
        let wrong = |problem: String| DataError::Tokenizer { path: path.to_owned(), problem };
        let mut tokenizer = Tokenizer::from_bytes(&json).map_err(|e| wrong(e.to_string()))?;
        // What is cut and filled up here follows the rows.
        tokenizer.with_padding(None).with_truncation(None).map_err(|e| wrong(e.to_string()))?;
        let largest = tokenizer.get_vocab(true).into_iter().max_by_key(|(_, id)| *id);
        let Some((token, id)) = largest else { return Err(wrong("it has no tokens".into())) };
        if id as usize >= vocab {
            return Err(wrong(format!(
                "its token {token:?} has id {id}, and the model's vocab_size is {vocab}: take the tokenizer of this model, or a model \
                 with vocab_size {} or more",
                id as usize + 1
            )));
        }
        let end = end_of_text(&tokenizer, config);
        Ok(Tokens::Tokenizer(Box::new(Loaded { tokenizer, json, end })))
    }

    /// The file, where there is one.
    pub fn json(&self) -> Option<&[u8]> {
        match self {
            Tokens::Bytes => None,
            Tokens::Tokenizer(loaded) => Some(&loaded.json),
        }
    }

    /// The token that ends a text.
    pub fn end(&self) -> Option<u32> {
        match self {
            Tokens::Bytes => None,
            Tokens::Tokenizer(loaded) => loaded.end,
        }
    }

    /// The ids of texts. None are added that the text does not have.
    pub(super) fn ids(&self, texts: Vec<&[u8]>, path: &Path) -> Result<Vec<Vec<u32>>, DataError> {
        let loaded = match self {
            Tokens::Bytes => {
                let each = texts.into_iter().map(|text| text.iter().map(|&byte| byte.into()).collect());
                return Ok(each.collect());
            }
            Tokens::Tokenizer(loaded) => loaded,
        };
        let texts = texts.into_iter().map(|text| {
            std::str::from_utf8(text)
                .map_err(|e| DataError::NotText { path: path.to_owned(), offset: e.valid_up_to() })
        });
        let texts = texts.collect::<Result<Vec<&str>, _>>()?;
        let encoded = loaded.tokenizer.encode_batch_fast(texts, false);
        let encoded = encoded
            .map_err(|e| DataError::Tokenizer { path: PathBuf::from(path), problem: e.to_string() })?;
        Ok(encoded.into_iter().map(|encoding| encoding.get_ids().to_vec()).collect())
    }
}

fn end_of_text(tokenizer: &Tokenizer, config: &str) -> Option<u32> {
    let config: Value = serde_json::from_str(config).unwrap_or_default();
    let named = match &config["eos_token_id"] {
        Value::Array(several) => several.first().and_then(Value::as_u64),
        one => one.as_u64(),
    };
    let named = named.and_then(|id| u32::try_from(id).ok()).filter(|&id| tokenizer.id_to_token(id).is_some());
    named.or_else(|| ENDS.iter().find_map(|name| tokenizer.token_to_id(name)))
}
