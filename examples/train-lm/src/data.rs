//! Training data: text or examples as rows of token ids, every batch a function of its place in the run.

mod examples;
mod rows;
mod shuffle;
mod tokens;

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::batch::Batch;
use crate::decoder::{IGNORED, shifted_targets};
use crate::random::Stream;

use rows::{Pairs, Rows};
use shuffle::shuffled;
pub use tokens::Tokens;

/// What is read from folders; files that are named themselves may have any name.
const TEXT_EXTENSIONS: [&str; 14] =
    ["c", "cpp", "cu", "h", "hpp", "htm", "html", "md", "py", "rs", "rst", "sh", "toml", "txt"];
/// Examples: prompts and answers.
const EXAMPLES: &str = "jsonl";

/// What can go wrong with data.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file or folder cannot be read.
    #[error("cannot read {path}: {source}; check the paths given as data")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// There is not a byte of text.
    #[error(
        "no text in {}: name a file that is not empty, or a folder with files such as .txt, .md or .rs, with --jsonl .jsonl \
         (folders named `target` and hidden ones are skipped)", list(.paths)
    )]
    Empty {
        /// What was searched.
        paths: Vec<PathBuf>,
    },
    /// The text does not hold one sequence and a token to predict.
    #[error("the text has {tokens} {unit}, a sequence of {seq} tokens needs {}: give more text or shorter sequences", .seq + 1)]
    Short {
        /// Length of the text.
        tokens: usize,
        /// What that is counted in.
        unit: &'static str,
        /// Tokens in a sequence.
        seq: usize,
    },
    /// No token of the data is to be predicted.
    #[error("nothing in {} is to be predicted: give longer texts, or a --seq that holds more than the prompts", list(.paths))]
    Nothing {
        /// What was read.
        paths: Vec<PathBuf>,
    },
    /// A line of examples is none.
    #[error(
        "{path}, line {line}: {problem}; each line is an object with two texts, \"prompt\" and \"answer\"", path = .path.display()
    )]
    Line {
        /// Which file.
        path: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// What is wrong with it.
        problem: String,
    },
    /// A tokenizer takes text, and text is UTF-8.
    #[error("{path} is not UTF-8 text from byte {offset} on: leave it out, or train without --tokenizer, byte by byte", path = .path.display())]
    NotText {
        /// Which file.
        path: PathBuf,
        /// Bytes of text before.
        offset: usize,
    },
    /// A tokenizer cannot be used.
    #[error("tokenizer, {path}: {problem}", path = .path.display())]
    Tokenizer {
        /// Its file, or the one that it was to read.
        path: PathBuf,
        /// Why.
        problem: String,
    },
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn read_error(path: &Path) -> impl FnOnce(std::io::Error) -> DataError + '_ {
    move |source| DataError::Read { path: path.to_owned(), source }
}

/// A file of data.
struct Document {
    path: PathBuf,
    bytes: Vec<u8>,
    examples: bool,
}

/// Data for training or evaluation, in rows of one length.
pub struct Corpus {
    data: Data,
    /// SHA-256 of the files' bytes, in hex.
    hash: String,
    seq: usize,
}

enum Data {
    /// Bytes as tokens, whose rows start anywhere.
    Bytes(Vec<u8>),
    /// Rows that are shuffled, all of them in each pass over the data.
    Rows(Rows),
}

/// How data is read.
pub struct Reading<'a> {
    /// What makes token ids of it.
    pub tokens: &'a Tokens,
    /// Every file holds examples, whatever its name.
    pub jsonl: bool,
    /// Tokens in a row.
    pub seq: usize,
}

/// Which rows a step has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Seed of the run.
    pub seed: u64,
    /// Optimizer step.
    pub step: u64,
    /// Micro-batches in a step.
    pub accum: usize,
    /// Rows in a micro-batch.
    pub batch: usize,
}

impl Corpus {
    /// Reads training data: files as they are, and from folders, recursively and in the order of their paths, the files that look
    /// like text by their extension. Hidden entries, folders named `target` and symbolic links inside folders are skipped.
    ///
    /// Files named `.jsonl` hold examples, an object with `prompt` and `answer` on each line, of which the answers are learned; with
    /// [`Reading::jsonl`] all files do. Text without a tokenizer is one run of bytes, of which rows are taken anywhere. All else is laid
    /// out in rows that are gone through in an order of their own in every pass: documents one behind the other and cut where a row
    /// ends, examples whole and several in a row.
    ///
    /// # Errors
    ///
    /// When something cannot be read or is not what it should be, and when the data does not fill a row.
    pub fn train(paths: &[PathBuf], reading: &Reading<'_>) -> Result<Self, DataError> {
        let documents = documents(paths, reading.jsonl)?;
        let (hash, seq) = (hash(&documents), reading.seq);
        let plain = matches!(reading.tokens, Tokens::Bytes) && documents.iter().all(|d| !d.examples);
        if !plain {
            let rows = rows(documents, reading, paths)?;
            return Ok(Corpus { data: Data::Rows(rows), hash, seq });
        }
        let bytes: Vec<u8> = documents.into_iter().flat_map(|document| document.bytes).collect();
        if bytes.len() <= seq {
            return Err(DataError::Short { tokens: bytes.len(), unit: "bytes", seq });
        }
        Ok(Corpus { data: Data::Bytes(bytes), hash, seq })
    }

    /// Reads data for evaluation: all of it in rows, also plain text without a tokenizer.
    ///
    /// # Errors
    ///
    /// As [`Corpus::train`], but a row need not be full.
    pub fn evaluation(paths: &[PathBuf], reading: &Reading<'_>) -> Result<Self, DataError> {
        let documents = documents(paths, reading.jsonl)?;
        let hash = hash(&documents);
        Ok(Corpus { data: Data::Rows(rows(documents, reading, paths)?), hash, seq: reading.seq })
    }

    /// SHA-256 of the data's files, one behind the other, in hex.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// What there is of it, for a person.
    pub fn describe(&self) -> String {
        match &self.data {
            Data::Bytes(bytes) => format!("{} bytes of text, each a token", bytes.len()),
            Data::Rows(rows) => {
                let mut text = format!(
                    "{} rows of {} tokens, of which {} are predicted",
                    rows.len(),
                    self.seq,
                    rows.targets().count()
                );
                if rows.cut > 0 {
                    text += &format!("; {} examples are longer than a row and were cut", rows.cut);
                }
                if rows.left_out > 0 {
                    let why = "of which no predicted token is left";
                    text += &format!("; {} examples {why} were left out", rows.left_out);
                }
                text
            }
        }
    }

    /// Rows of an evaluation, or of a pass over the data; none where rows start anywhere.
    pub fn rows(&self) -> Option<usize> {
        match &self.data {
            Data::Bytes(_) => None,
            Data::Rows(rows) => Some(rows.len()),
        }
    }

    /// The largest token id.
    pub fn largest_id(&self) -> Option<u32> {
        match &self.data {
            Data::Bytes(bytes) => bytes.iter().copied().max().map(u32::from),
            Data::Rows(rows) => rows.ids().iter().copied().max(),
        }
    }

    /// Entropy of the distribution of single predicted tokens, in nats: the mean loss of the best prediction that does not look at the
    /// context.
    pub fn unigram_entropy(&self) -> f64 {
        let mut counts = std::collections::BTreeMap::<u32, u64>::new();
        let mut count = |token| *counts.entry(token).or_default() += 1;
        match &self.data {
            Data::Bytes(bytes) => bytes.iter().for_each(|&byte| count(byte.into())),
            Data::Rows(rows) => rows.targets().for_each(count),
        }
        let total = counts.values().sum::<u64>() as f64;
        -counts.values().map(|&count| count as f64 / total).map(|share| share * share.ln()).sum::<f64>()
    }

    /// The micro-batches of a step. They depend on its place alone, so a resumed run continues with the rows that it would have had.
    pub fn step(&self, place: Place) -> Vec<Batch> {
        Batch::step((0..place.accum as u64).map(|micro_batch| match &self.data {
            Data::Bytes(bytes) => anywhere(bytes, place, micro_batch, self.seq),
            Data::Rows(rows) => {
                let first = (place.step * place.accum as u64 + micro_batch) * place.batch as u64;
                let numbers = first..first + place.batch as u64;
                side_by_side(rows, numbers.map(|number| Some(in_pass(rows, place.seed, number))))
            }
        }))
    }

    /// All rows in order, as the micro-batches of as many executions as it takes; rows that are wanting at the end are not predicted.
    pub fn in_order(&self, batch: usize, accum: usize) -> impl Iterator<Item = Vec<Batch>> {
        let rows = match &self.data {
            Data::Bytes(_) => None,
            Data::Rows(rows) => Some(rows),
        };
        let executions = rows.map_or(0, |rows| rows.len().div_ceil(batch * accum));
        let row = |number, rows: &Rows| (number < rows.len()).then_some(number);
        (0..executions).filter_map(move |execution| {
            let rows = rows?;
            Some(Batch::step((0..accum).map(|micro_batch| {
                let first = (execution * accum + micro_batch) * batch;
                side_by_side(rows, (first..first + batch).map(|number| row(number, rows)))
            })))
        })
    }
}

/// Rows of bytes, each a piece of the text that starts anywhere.
fn anywhere(bytes: &[u8], place: Place, micro_batch: u64, seq: usize) -> (Vec<u32>, Vec<u32>) {
    /// Sets the stream apart from others that are keyed by seed, step and micro-batch.
    const PURPOSE: u64 = u64::from_be_bytes(*b"text row");
    let stream = Stream::keyed(&[PURPOSE, place.seed, place.step, micro_batch]);
    let starts = (bytes.len() - seq + 1) as u128;
    let mut ids = Vec::with_capacity(place.batch * seq);
    for row in 0..place.batch as u64 {
        // The high half of the product maps a word evenly to the starts.
        let start = ((u128::from(stream.word(row)) * starts) >> 64) as usize;
        ids.extend(bytes[start..start + seq].iter().map(|&byte| u32::from(byte)));
    }
    let targets = shifted_targets(&ids, seq);
    (ids, targets)
}

/// The row that is number `number` of the run: every pass over the data has an order of its own.
fn in_pass(rows: &Rows, seed: u64, number: u64) -> usize {
    const PURPOSE: u64 = u64::from_be_bytes(*b"row pass");
    let count = rows.len() as u64;
    shuffled(&[PURPOSE, seed, number / count], count, number % count) as usize
}

/// A micro-batch of rows; none stands for one that is not there.
fn side_by_side(rows: &Rows, numbers: impl Iterator<Item = Option<usize>>) -> (Vec<u32>, Vec<u32>) {
    let (mut ids, mut targets) = (Vec::new(), Vec::new());
    let seq = rows.get(0).0.len();
    for number in numbers {
        match number.map(|number| rows.get(number)) {
            Some((row, next)) => {
                ids.extend_from_slice(row);
                targets.extend_from_slice(next);
            }
            None => {
                ids.resize(ids.len() + seq, 0);
                targets.resize(targets.len() + seq, IGNORED);
            }
        }
    }
    (ids, targets)
}

fn rows(documents: Vec<Document>, reading: &Reading<'_>, paths: &[PathBuf]) -> Result<Rows, DataError> {
    let mut rows = Rows::new(reading.seq);
    let (mut texts, mut all) = (Vec::new(), Vec::new());
    for Document { path, bytes, examples } in documents {
        if examples {
            all.extend(examples::examples(&bytes, &path, reading.tokens)?);
        } else {
            let mut ids = reading.tokens.ids(vec![&bytes], &path)?.pop().unwrap_or_default();
            ids.extend(reading.tokens.end());
            texts.push(Pairs::of(ids, 0));
        }
    }
    rows.add_pieces(texts);
    rows.add_packed(all);
    let nothing = rows.targets().next().is_none();
    if nothing { Err(DataError::Nothing { paths: paths.to_owned() }) } else { Ok(rows) }
}

fn documents(paths: &[PathBuf], jsonl: bool) -> Result<Vec<Document>, DataError> {
    let mut documents = Vec::new();
    for path in paths {
        let kind = fs::metadata(path).map_err(read_error(path))?.file_type();
        if !kind.is_dir() && !kind.is_file() {
            // Reading it might never end, and a run that is resumed reads its data again.
            let source = std::io::Error::other("it is a pipe or a device, and no file");
            return Err(read_error(path)(source));
        }
        if kind.is_dir() {
            let wanted: &[&str] = if jsonl { &[EXAMPLES] } else { &TEXT_EXTENSIONS };
            read_folder(path, wanted, &mut documents)?;
        } else {
            let examples = jsonl || extension(path) == EXAMPLES;
            let bytes = fs::read(path).map_err(read_error(path))?;
            documents.push(Document { path: path.clone(), bytes, examples });
        }
    }
    if documents.iter().all(|document| document.bytes.is_empty()) {
        return Err(DataError::Empty { paths: paths.to_owned() });
    }
    Ok(documents)
}

fn hash(documents: &[Document]) -> String {
    let mut hasher = Sha256::new();
    documents.iter().for_each(|document| hasher.update(&document.bytes));
    hasher.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or_default()
}

/// Reads the files with one of the extensions that are wanted.
fn read_folder(folder: &Path, wanted: &[&str], documents: &mut Vec<Document>) -> Result<(), DataError> {
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let mut entries = entries.map_err(read_error(folder))?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        let name = entry.file_name();
        let kind = entry.file_type().map_err(read_error(&path))?;
        if name.as_encoded_bytes().starts_with(b".") {
            continue;
        } else if kind.is_dir() && name != "target" {
            read_folder(&path, wanted, documents)?;
        } else if kind.is_file() && wanted.contains(&extension(&path)) {
            let bytes = fs::read(&path).map_err(read_error(&path))?;
            documents.push(Document { path, bytes, examples: wanted == [EXAMPLES] });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
