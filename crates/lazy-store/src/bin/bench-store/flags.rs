//! The flags given.

use std::path::PathBuf;

use crate::Outcome;
use crate::peer::Peer;

/// The least number of pairs: fewer leave no interval worth the name.
const PAIRS: usize = 7;

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Flags {
    pub(crate) quick: bool,
    pub(crate) dir: PathBuf,
    pub(crate) pairs: usize,
    pub(crate) peer: Option<Peer>,
}

impl Flags {
    pub(crate) fn parse(arguments: impl IntoIterator<Item = String>) -> Outcome<Flags> {
        let mut flags = Flags { quick: false, dir: PathBuf::from("."), pairs: PAIRS, peer: None };
        let mut arguments = arguments.into_iter();
        while let Some(flag) = arguments.next() {
            let mut value = |what: &str| arguments.next().ok_or_else(|| format!("`{flag}` needs {what}"));
            match flag.as_str() {
                "--quick" => flags.quick = true,
                "--dir" => flags.dir = value("a folder")?.into(),
                "--pairs" => {
                    let pairs = value("a number")?;
                    let pairs = pairs.parse().ok().filter(|pairs| (PAIRS..=1000).contains(pairs));
                    flags.pairs =
                        pairs.ok_or_else(|| format!("`--pairs` needs a number from {PAIRS} to 1000"))?;
                }
                "--peer" => {
                    flags.peer = Some(match value("`fio` or `raw`")?.as_str() {
                        "fio" => Peer::Fio,
                        "raw" => Peer::Raw,
                        other => return Err(format!("`--peer` is `fio` or `raw`, not `{other}`")),
                    });
                }
                _ => return Err(format!("no flag `{flag}`: --quick, --dir PATH, --pairs N, --peer fio|raw")),
            }
        }
        Ok(flags)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Outcome<Flags> {
        Flags::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn flags_are_taken_and_wrong_ones_are_named() {
        let flags = parse("--quick --dir d --pairs 9 --peer raw").unwrap();
        assert_eq!(flags, Flags { quick: true, dir: "d".into(), pairs: 9, peer: Some(Peer::Raw) });
        assert_eq!(parse("").unwrap().pairs, 7);
        for (line, word) in
            [("--pairs 3", "from 7"), ("--dir", "a folder"), ("--peer dd", "`dd`"), ("--fast", "`--fast`")]
        {
            assert!(parse(line).unwrap_err().contains(word), "{line}");
        }
    }
}
