//! `cargo xtask tidy`: rules of the workspace that no compiler checks.

mod arrows;
mod files;
mod lexer;
mod modules;
mod publish;
mod source;
mod words;

use std::fmt;
use std::path::{Path, PathBuf};

use crate::{Outcome, cargo};

/// One broken rule: where, and what to do.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    /// Relative to the workspace's root.
    file: PathBuf,
    /// From 1.
    line: usize,
    advice: String,
}

impl Finding {
    fn new(file: &Path, line: usize, advice: impl Into<String>) -> Self {
        Self { file: file.to_path_buf(), line, advice: advice.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file.display(), self.line, self.advice)
    }
}

/// Prints every finding to standard error; an error if there is one.
pub(crate) fn run() -> Outcome<()> {
    let root = cargo::root();
    let metadata = cargo::metadata()?;
    let files = files::texts(&root)?;
    let mut findings = arrows::check(&metadata, &root);
    findings.extend(publish::check(&metadata, &root));
    let reached = modules::reach(&metadata, &root, &files);
    findings.extend(modules::check(&files, &reached));
    findings.extend(modules::check_published(&metadata, &root, &files));
    for (file, text) in &files {
        findings.extend(words::check(file, text));
        if file.extension().is_some_and(|extension| extension == "rs") {
            let in_tests = reached.get(file) == Some(&modules::Role::Test);
            findings.extend(source::check(file, text, in_tests));
        }
    }
    findings.sort();
    findings.iter().for_each(|finding| eprintln!("{finding}"));
    match findings.len() {
        0 => Ok(()),
        count => Err(format!("tidy: {count} finding(s) above")),
    }
}
