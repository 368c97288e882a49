//! The flags given.

use std::path::PathBuf;

use lazy_store::BoxError;

/// The tables.
const TABLES: [&str; 4] = ["cpu", "steps", "overlap", "memory"];

/// The least number of pairs: fewer leave no interval worth the name.
const PAIRS: usize = 7;

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Flags {
    pub(crate) pairs: usize,
    pub(crate) python: Option<PathBuf>,
    pub(crate) dir: PathBuf,
    /// One of the tables.
    pub(crate) only: Option<String>,
}

impl Flags {
    pub(crate) fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Flags, BoxError> {
        let mut flags = Flags { pairs: PAIRS, python: None, dir: PathBuf::from("."), only: None };
        let mut arguments = arguments.into_iter();
        while let Some(flag) = arguments.next() {
            let mut value = |what: &str| arguments.next().ok_or_else(|| format!("`{flag}` needs {what}"));
            match flag.as_str() {
                "--pairs" => {
                    let pairs =
                        value("a number")?.parse().ok().filter(|pairs| (PAIRS..=1000).contains(pairs));
                    flags.pairs =
                        pairs.ok_or_else(|| format!("`--pairs` needs a number from {PAIRS} to 1000"))?;
                }
                "--python" => flags.python = Some(value("a path")?.into()),
                "--only" => {
                    let table = value("a table")?;
                    if !TABLES.contains(&table.as_str()) {
                        return Err(format!("`--only` needs one of {}", TABLES.join(", ")).into());
                    }
                    flags.only = Some(table);
                }
                "--dir" => flags.dir = value("a folder")?.into(),
                _ => {
                    return Err(format!(
                        "no flag `{flag}`: --pairs N, --python PYTHON, --dir FOLDER, --only TABLE"
                    )
                    .into());
                }
            }
        }
        Ok(flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_taken_and_wrong_ones_are_named() {
        let parse = |line: &str| Flags::parse(line.split_whitespace().map(str::to_owned));
        let flags = parse("--pairs 9 --python p").unwrap();
        assert_eq!(flags, Flags { pairs: 9, python: Some("p".into()), dir: ".".into(), only: None });
        assert_eq!(parse("").unwrap().pairs, 7);
        for (line, word) in
            [("--pairs 3", "from 7"), ("--python", "a path"), ("--fast", "`--fast`"), ("--only x", "overlap")]
        {
            assert!(parse(line).unwrap_err().to_string().contains(word), "{line}");
        }
    }
}
