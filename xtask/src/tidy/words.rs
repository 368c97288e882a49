//! Words that have no place in the repository: they name the machine it was written on.

use std::path::Path;

use super::Finding;

/// In two pieces each, so that this file passes its own check.
const PATHS: [(&str, &str); 5] =
    [("/wo", "rk/"), ("/tmp/", "eco"), ("/ho", "me/"), ("/Us", "ers/"), ("/ro", "ot/")];
const WORDS: [(&str, &str); 1] = [("sub", "agent")];

pub(super) fn check(file: &Path, text: &str) -> Vec<Finding> {
    let joined = |(a, b): &(&str, &str)| [*a, *b].concat();
    let paths: Vec<_> = PATHS.iter().map(joined).collect();
    let words: Vec<_> = WORDS.iter().map(joined).collect();
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if let Some(path) = paths.iter().find(|path| names_path(line, path)) {
            let advice = format!("`{path}` is a folder of one machine: use a relative or temporary path");
            found.push(Finding::new(file, index + 1, advice));
        }
        if let Some(word) = words.iter().find(|word| line.to_lowercase().contains(word.as_str())) {
            found.push(Finding::new(file, index + 1, format!("take the word `{word}` out")));
        }
    }
    found
}

/// Whether `line` has the absolute `path`: `src/path/` and `https://host/path/` are others' folders.
fn names_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        before.is_none_or(|c| !c.is_alphanumeric() && !matches!(c, '_' | '-' | '.' | '}'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absolute_paths_of_a_machine_are_found_by_line() {
        let text = ["a\nlet p = \"/ho", "me/me/x\";\ncrates/ho", "me/x\nhttps://x.org/wo", "rk/y"].concat();
        let found = check(Path::new("a.md"), &text);
        assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn words_are_found_in_any_case() {
        let text = ["fine\nA Sub", "agent wrote this"].concat();
        assert_eq!(check(Path::new("a.md"), &text).len(), 1);
    }
}
