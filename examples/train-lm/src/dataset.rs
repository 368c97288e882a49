//! The data of a run, read and checked before anything is written.

use std::path::{Path, PathBuf};

use lazy_model::ModelSpec;
use sha2::{Digest, Sha256};

use crate::console::Console;
use crate::data::{Corpus, Reading, Tokens};
use crate::error::{Result, TrainError};
use crate::habits::Habits;
use crate::run_folder::RunFolder;
use crate::settings::{Settings, TrainArgs};

/// The name of a tokenizer's file, in a model's folder and in a run's.
pub(crate) const TOKENIZER: &str = "tokenizer.json";

/// What a run reads.
pub(crate) struct DataSet {
    pub(crate) tokens: Tokens,
    pub(crate) train: Corpus,
    pub(crate) evaluation: Option<Corpus>,
}

impl DataSet {
    /// Reads it as flags and settings say, and notes in the settings what the bits of the run depend on.
    ///
    /// # Errors
    /// When something cannot be read or does not fit the model, and when it is not what the run that is resumed began with.
    pub(crate) fn read(
        args: &TrainArgs,
        settings: &mut Settings,
        habits: &Habits,
        (spec, config): (&ModelSpec, &str),
        resumed: Option<&RunFolder>,
        console: &Console,
    ) -> Result<DataSet> {
        let file = match resumed {
            Some(folder) => settings.tokenizer.as_ref().map(|_| folder.tokenizer()),
            None => tokenizer_file(args),
        };
        let tokens = match &file {
            Some(path) => Tokens::read(path, config, spec.vocab)?,
            None => Tokens::Bytes,
        };
        let tokenizer = tokens.json().map(hex);
        if settings.text.is_empty() {
            settings.text = default_text()?;
        }
        let reading = Reading { tokens: &tokens, jsonl: settings.jsonl, seq: settings.seq };
        let train = Corpus::train(&settings.text, &reading)?;
        let changed = |what: &str| {
            Err(TrainError::Usage(format!(
                "{what} has changed since the run began, so it cannot be continued exactly: restore it, or start a new run"
            )))
        };
        match resumed {
            Some(_) if train.hash() != settings.text_hash => return changed("the training text"),
            Some(_) if tokenizer != settings.tokenizer => return changed("the run's tokenizer.json"),
            _ => {}
        }
        let evaluation = match habits.eval_text.as_slice() {
            [] => None,
            paths => Some(Corpus::evaluation(paths, &reading)?),
        };
        let largest = train.largest_id().max(evaluation.as_ref().and_then(Corpus::largest_id));
        if let Some(largest) = largest.filter(|&id| id as usize >= spec.vocab) {
            return Err(TrainError::Usage(format!(
                "the text has the byte {largest}, and the model's vocab_size is {}: name the model's tokenizer with --tokenizer",
                spec.vocab
            )));
        }
        settings.text_hash = train.hash().to_owned();
        settings.tokenizer = tokenizer;
        console.say(&format!("data: {}", train.describe()));
        if let Some(evaluation) = &evaluation {
            console.say(&format!("evaluation: {}", evaluation.describe()));
        }
        Ok(DataSet { tokens, train, evaluation })
    }
}

/// The tokenizer that was named, or the one in the model's folder.
fn tokenizer_file(args: &TrainArgs) -> Option<PathBuf> {
    let in_folder = |path: &Path| path.join(TOKENIZER);
    match &args.tokenizer {
        Some(path) if path.is_dir() => Some(in_folder(path)),
        Some(path) => Some(path.clone()),
        None => {
            let folder = args.model.as_ref().filter(|path| path.is_dir())?;
            Some(in_folder(folder)).filter(|path| path.exists())
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// The workspace's documents and sources, where it was built.
fn default_text() -> Result<Vec<PathBuf>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let paths: Vec<PathBuf> = ["README.md", "CHANGELOG.md", "docs", "crates", "examples", "xtask"]
        .into_iter()
        .map(|name| root.join(name))
        .filter(|path| path.exists())
        .collect();
    if paths.is_empty() {
        return Err(TrainError::Usage(
            "the workspace's own text is not here: name training text with --text".into(),
        ));
    }
    Ok(paths)
}
