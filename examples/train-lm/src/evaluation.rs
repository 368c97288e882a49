//! How well the model does on data that it is not trained on.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::time::Instant;

use lazy_model::Seconds;
use lazy_runtime::{Executor, Program, Step};
use serde::{Deserialize, Serialize};

use crate::batch::Batch;
use crate::data::Corpus;
use crate::error::{Result, TrainError};
use crate::metrics::null_as_nan;
use crate::phase::{self, Phase};
use crate::run_folder::{RunFolder, write_file};
use crate::settings::Settings;
use crate::stop;

/// A line of `evaluations.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Steps the weights have taken: 0 for the first weights.
    pub step: u64,
    /// Mean loss over all predicted tokens, in nats; null where it is not finite.
    #[serde(deserialize_with = "null_as_nan")]
    pub loss: f64,
    /// The exponential of the loss; null where it is not finite.
    #[serde(deserialize_with = "null_as_nan")]
    pub perplexity: f64,
    /// Predicted tokens.
    pub tokens: u64,
    /// Time it took.
    pub seconds: Seconds,
    /// SHA-256 of the data, in hex: losses on other data do not compare.
    #[serde(default)]
    pub data: String,
}

/// The evaluations of a file's text on one set of data: that of `hash`, or that of the last line.
pub(crate) fn comparable(text: &str, hash: Option<&str>) -> Vec<Evaluation> {
    let mut lines = parsed(text);
    let Some(hash) = hash.map(str::to_owned).or_else(|| lines.last().map(|line| line.data.clone())) else {
        return lines;
    };
    lines.retain(|line| line.data == hash);
    lines
}

/// What can be read of a file's text: a kill may have cut the last line short.
fn parsed(text: &str) -> Vec<Evaluation> {
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Evaluates, and writes down what comes out.
pub(crate) struct Evaluator {
    corpus: Corpus,
    program: Program,
    every: u64,
    file: File,
    path: PathBuf,
    /// On this data, of earlier processes and of this one.
    lines: Vec<Evaluation>,
}

impl Evaluator {
    /// For a run that has done so many steps. Lines for later ones, which a killed process did not commit, are dropped.
    ///
    /// # Errors
    /// When the file cannot be read or written, and when the store has no room.
    pub(crate) fn open(
        corpus: Corpus,
        every: u64,
        executor: &Executor,
        folder: &RunFolder,
        done: u64,
    ) -> Result<Evaluator> {
        let path = folder.evaluations();
        let text = match fs::read_to_string(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => String::new(),
            read => read.map_err(TrainError::io(&path))?,
        };
        let mut kept = Vec::new();
        for line in parsed(&text).iter().filter(|line| line.step <= done) {
            serde_json::to_writer(&mut kept, line).map_err(TrainError::json(&path))?;
            kept.push(b'\n');
        }
        write_file(&path, &kept)?;
        let lines = comparable(&String::from_utf8_lossy(&kept), Some(corpus.hash()));
        let file = OpenOptions::new().append(true).open(&path).map_err(TrainError::io(&path))?;
        Ok(Evaluator { corpus, program: executor.prepare_evaluation()?, every, file, path, lines })
    }

    /// Whether the weights after so many steps are to be evaluated, which they are once; where there is nothing to compare later ones with,
    /// at once.
    pub(crate) fn is_due(&self, done: u64, last: bool) -> bool {
        let due = last || self.lines.is_empty() || done.is_multiple_of(self.every);
        due && self.lines.iter().all(|line| line.step != done)
    }

    pub(crate) fn lines(&self) -> &[Evaluation] {
        &self.lines
    }

    /// Runs all the data forward; `inputs` makes a step of the micro-batches of each execution. Nothing comes of it where somebody
    /// asks for the run to stop meanwhile.
    ///
    /// # Errors
    /// When the executor fails or the line cannot be written.
    pub(crate) fn run(
        &mut self,
        executor: &mut Executor,
        done: u64,
        settings: &Settings,
        inputs: impl Fn(Vec<Batch>) -> Result<Step>,
    ) -> Result<Option<Evaluation>> {
        let start = Instant::now();
        phase::enter(Phase::Evaluation);
        let (mut sum, mut tokens) = (0.0, 0);
        for batches in self.corpus.in_order(settings.batch, settings.accum) {
            if stop::asked() {
                return Ok(None);
            }
            let counted: usize = batches.iter().map(Batch::counted).sum();
            let report = executor.run(&mut self.program, &inputs(batches)?)?;
            // Their sum is the mean over the tokens that count in this execution.
            let mean: f32 = report.losses.iter().sum();
            sum += f64::from(mean) * counted as f64;
            tokens += counted as u64;
        }
        phase::enter(Phase::Between);
        let loss = sum / tokens as f64;
        let seconds = Seconds(start.elapsed().as_secs_f64());
        let data = self.corpus.hash().to_owned();
        let line = Evaluation { step: done, loss, perplexity: loss.exp(), tokens, seconds, data };
        let mut text = serde_json::to_vec(&line).map_err(TrainError::json(&self.path))?;
        text.push(b'\n');
        self.file.write_all(&text).map_err(TrainError::io(&self.path))?;
        self.lines.push(line.clone());
        Ok(Some(line))
    }
}
