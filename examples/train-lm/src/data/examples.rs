//! Prompts and their answers, a JSON object on each line.

use std::path::Path;

use serde::Deserialize;

use super::DataError;
use super::rows::Pairs;
use super::tokens::Tokens;

/// A line. Other keys are passed over.
#[derive(Deserialize)]
struct Example {
    prompt: String,
    answer: String,
}

/// The examples in the text of a file, in its order; of each the answer and the token that ends it are predicted.
pub(super) fn examples(text: &[u8], path: &Path, tokens: &Tokens) -> Result<Vec<Pairs>, DataError> {
    let wrong = |line: usize, problem: String| DataError::Line { path: path.to_owned(), line, problem };
    let mut read = Vec::new();
    for (number, line) in text.split(|&byte| byte == b'\n').enumerate() {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let example: Example = serde_json::from_slice(line).map_err(|e| wrong(number + 1, e.to_string()))?;
        if example.answer.is_empty() {
            return Err(wrong(number + 1, "its answer is empty, so there is nothing to learn".into()));
        }
        read.push(example);
    }
    let texts = read.iter().flat_map(|e| [e.prompt.as_bytes(), e.answer.as_bytes()]).collect();
    let ids = tokens.ids(texts, path)?;
    let pairs = ids.as_chunks().0.iter().map(|[prompt, answer]| {
        let all = prompt.iter().chain(answer).copied().chain(tokens.end()).collect();
        Pairs::of(all, prompt.len())
    });
    Ok(pairs.collect())
}
