//! Text as training data: bytes are tokens, and every batch is a function of its place in the run.

use std::fs;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::random::Stream;

/// What is read from folders; files that are named themselves may have any name.
const TEXT_EXTENSIONS: [&str; 14] =
    ["c", "cpp", "cu", "h", "hpp", "htm", "html", "md", "py", "rs", "rst", "sh", "toml", "txt"];

/// What can go wrong with training text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file or folder cannot be read.
    #[error("cannot read {path}: {source}; check the paths given as training text")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// There is not a byte of text.
    #[error(
        "no text in {}: name a file that is not empty, or a folder with files such as .txt, .md or .rs (folders \
         named `target` and hidden ones are skipped)", list(.paths)
    )]
    Empty {
        /// What was searched.
        paths: Vec<PathBuf>,
    },
    /// The text does not hold one sequence and a token to predict.
    #[error("the text has {bytes} bytes, a sequence of {seq} tokens needs {}: give more text or shorter sequences", .seq + 1)]
    Short {
        /// Length of the text.
        bytes: usize,
        /// Tokens in a sequence.
        seq: usize,
    },
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn read_error(path: &Path) -> impl FnOnce(std::io::Error) -> DataError + '_ {
    move |source| DataError::Read { path: path.to_owned(), source }
}

/// The training text.
#[derive(Clone, Debug)]
pub struct Corpus {
    bytes: Vec<u8>,
}

impl Corpus {
    /// Reads files as they are, and from folders, recursively and in the order of their paths, the files that look
    /// like text by their extension. Hidden entries, folders named `target` and symbolic links inside folders are
    /// skipped.
    ///
    /// # Errors
    ///
    /// When a path cannot be read, or all of them together hold no text.
    pub fn load(paths: &[PathBuf]) -> Result<Self, DataError> {
        let mut bytes = Vec::new();
        for path in paths {
            if fs::metadata(path).map_err(read_error(path))?.is_dir() {
                read_folder(path, &mut bytes)?;
            } else {
                read_file(path, &mut bytes)?;
            }
        }
        if bytes.is_empty() {
            return Err(DataError::Empty { paths: paths.to_owned() });
        }
        Ok(Corpus { bytes })
    }

    /// Number of bytes, which is the number of tokens.
    #[expect(clippy::len_without_is_empty, reason = "a corpus holds at least one byte")]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// SHA-256 of the text, in hex.
    pub fn hash(&self) -> String {
        Sha256::digest(&self.bytes).iter().map(|b| format!("{b:02x}")).collect()
    }

    /// Entropy of the distribution of single bytes, in nats: the mean loss of the best prediction that does not look
    /// at the context.
    pub fn unigram_entropy(&self) -> f64 {
        let mut counts = [0u64; 256];
        for &byte in &self.bytes {
            counts[usize::from(byte)] += 1;
        }
        let total = self.bytes.len() as f64;
        let share = |count: u64| count as f64 / total;
        -counts.iter().filter(|&&count| count > 0).map(|&count| share(count) * share(count).ln()).sum::<f64>()
    }

    /// The token ids of one micro-batch, `batch` rows of `seq`, each row a piece of the text that starts anywhere.
    /// They depend on the arguments alone, so a resumed run continues with the rows that it would have had.
    ///
    /// # Errors
    ///
    /// When the text has fewer than `seq + 1` bytes.
    pub fn batch(
        &self,
        seed: u64,
        step: u64,
        micro_batch: u64,
        batch: usize,
        seq: usize,
    ) -> Result<Vec<u32>, DataError> {
        /// Sets the stream apart from others that are keyed by seed, step and micro-batch.
        const PURPOSE: u64 = u64::from_be_bytes(*b"text row");
        if self.bytes.len() <= seq {
            return Err(DataError::Short { bytes: self.bytes.len(), seq });
        }
        let stream = Stream::keyed(&[PURPOSE, seed, step, micro_batch]);
        let starts = (self.bytes.len() - seq + 1) as u128;
        let mut ids = Vec::with_capacity(batch * seq);
        for row in 0..batch as u64 {
            // The high half of the product maps a word evenly to the starts.
            let start = ((u128::from(stream.word(row)) * starts) >> 64) as usize;
            ids.extend(self.bytes[start..start + seq].iter().map(|&byte| u32::from(byte)));
        }
        Ok(ids)
    }
}

fn read_file(path: &Path, bytes: &mut Vec<u8>) -> Result<(), DataError> {
    bytes.extend(fs::read(path).map_err(read_error(path))?);
    Ok(())
}

fn read_folder(folder: &Path, bytes: &mut Vec<u8>) -> Result<(), DataError> {
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let mut entries = entries.map_err(read_error(folder))?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let path = entry.path();
        let name = entry.file_name();
        let kind = entry.file_type().map_err(read_error(&path))?;
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        if name.as_encoded_bytes().starts_with(b".") {
            continue;
        } else if kind.is_dir() && name != "target" {
            read_folder(&path, bytes)?;
        } else if kind.is_file() && TEXT_EXTENSIONS.contains(&extension) {
            read_file(&path, bytes)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corpus(text: &[u8]) -> Corpus {
        Corpus { bytes: text.to_vec() }
    }

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        folder
    }

    #[test]
    fn folders_are_read_in_order_and_only_their_text() {
        let files = [
            ("b.md", "2"),
            ("a/z.rs", "1"),
            ("c.txt", "3"),
            (".git/config.txt", "no"),
            ("target/debug/x.rs", "no"),
            ("picture.png", "no"),
            (".hidden.md", "no"),
        ];
        let folder = folder(&files);
        #[cfg(unix)]
        std::os::unix::fs::symlink(folder.path(), folder.path().join("loop")).unwrap();
        assert_eq!(Corpus::load(&[folder.path().to_owned()]).unwrap().bytes, b"123");
    }

    #[test]
    fn named_files_are_read_in_the_order_given_whatever_their_name() {
        let folder = folder(&[("one.dat", "1"), ("two", "2")]);
        let paths = [folder.path().join("two"), folder.path().join("one.dat")];
        assert_eq!(Corpus::load(&paths).unwrap().bytes, b"21");
    }

    #[test]
    fn a_missing_path_is_named() {
        let error = Corpus::load(&["no/such/place".into()]).unwrap_err();
        assert!(error.to_string().starts_with("cannot read no/such/place: "), "{error}");
    }

    #[test]
    fn no_text_is_an_error_that_says_where_was_searched() {
        let folder = folder(&[("picture.png", "x"), ("empty.txt", "")]);
        for path in [folder.path().to_owned(), folder.path().join("empty.txt")] {
            let error = Corpus::load(std::slice::from_ref(&path)).unwrap_err();
            assert!(matches!(error, DataError::Empty { .. }));
            assert!(error.to_string().contains(&path.display().to_string()), "{error}");
        }
    }

    #[test]
    fn a_short_text_is_an_error_with_both_lengths() {
        let text = corpus(b"12345678");
        assert_eq!(text.batch(0, 0, 0, 3, 7).unwrap().len(), 21);
        let error = text.batch(0, 0, 0, 1, 8).unwrap_err().to_string();
        assert!(error.contains("8 bytes") && error.contains("needs 9"), "{error}");
    }

    #[test]
    fn batches_depend_on_their_place_alone() {
        let text: Vec<u8> = (0..10_000).map(|i| (i * i % 251) as u8).collect();
        let text = corpus(&text);
        let first = text.batch(1, 2, 3, 4, 50).unwrap();
        assert_eq!(first, text.batch(1, 2, 3, 4, 50).unwrap());
        assert_eq!(first[..100], text.batch(1, 2, 3, 2, 50).unwrap());
        for (seed, step, micro_batch) in [(9, 2, 3), (1, 9, 3), (1, 2, 9)] {
            assert_ne!(first, text.batch(seed, step, micro_batch, 4, 50).unwrap());
        }
    }

    #[test]
    fn rows_start_everywhere_and_are_pieces_of_the_text() {
        let text = corpus(b"0123456789");
        let ids = text.batch(0, 0, 0, 1000, 3).unwrap();
        let mut seen = [0; 8];
        for row in ids.chunks(3) {
            assert!(row[1] == row[0] + 1 && row[2] == row[0] + 2);
            seen[(row[0] - u32::from(b'0')) as usize] += 1;
        }
        // 125 expected of each, with a standard error of 10.5.
        assert!(seen.iter().all(|&count| (72..178).contains(&count)), "{seen:?}");
    }

    #[test]
    fn entropy_is_that_of_the_bytes() {
        assert_eq!(corpus(b"aaaa").unigram_entropy(), 0.0);
        assert!((corpus(b"abcdabcd").unigram_entropy() - 4f64.ln()).abs() < 1e-12);
        // 3/4 and 1/4: 0.5623351446 nats.
        assert!((corpus(b"aaab").unigram_entropy() - 0.562_335_144_6).abs() < 1e-9);
    }
}
