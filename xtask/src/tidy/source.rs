//! Rules inside one Rust file: SAFETY notes, nothing left undone, units in the names of flags.

use std::path::Path;

use super::Finding;
use super::lexer::{Source, Token};

/// A SAFETY note may end this many lines above what it justifies.
const NOTE_REACH_LINES: usize = 5;

/// A numeric flag whose name has one of these holds a capacity, a time or a speed ...
const QUANTITIES: [&str; 6] = ["hbm", "host", "nvme", "limit", "time", "bandwidth"];
/// ... and ends in its unit.
const UNITS: [&str; 11] =
    ["bytes", "mib", "gib", "ms", "us", "s", "seconds", "gbps", "percent", "scale", "fraction"];

pub(super) fn check(file: &Path, text: &str, in_tests: bool) -> Vec<Finding> {
    let source = Source::new(text);
    let mut found: Vec<(usize, String)> = undone(&source);
    if !in_tests {
        found.extend(unjustified(&source));
    }
    found.extend(flags_without_unit(&source));
    found.into_iter().map(|(line, advice)| Finding::new(file, line, advice)).collect()
}

/// `unsafe` blocks and impls outside tests without a SAFETY note close above.
fn unjustified(source: &Source) -> Vec<(usize, String)> {
    let test_only = source.test_only();
    let noted = |line: usize| {
        source.comments.iter().any(|comment| {
            comment.text.contains("SAFETY:")
                && comment.first <= line
                && comment.last + NOTE_REACH_LINES >= line
        })
    };
    (0..source.tokens.len())
        .filter(|at| source.matches(*at, "unsafe {") || source.matches(*at, "unsafe impl"))
        .filter(|at| !test_only[*at])
        .map(|at| source.tokens[at].0)
        .filter(|line| !noted(*line))
        .map(|line| (line, "say in a `// SAFETY:` comment right above why this is sound".to_owned()))
        .collect()
}

/// Tests that never run and work that was put off.
fn undone(source: &Source) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for at in 0..source.tokens.len() {
        let line = source.tokens[at].0;
        if ["todo !", "unimplemented !"].iter().any(|pattern| source.matches(at, pattern)) {
            found.push((line, "finish this, or return a typed error".to_owned()));
        }
        let conditional = source.matches(at, "# [ cfg_attr (")
            && (at + 3..source.closing(at + 3)).any(|inner| source.matches(inner, ", ignore"));
        if source.matches(at, "# [ ignore") || conditional {
            found.push((line, "make this test run everywhere, or delete it".to_owned()));
        }
    }
    for comment in &source.comments {
        for (offset, text) in comment.text.lines().enumerate() {
            if text.split(|c: char| !c.is_alphanumeric()).any(|word| matches!(word, "FIXME" | "TODO" | "XXX"))
            {
                found.push((comment.first + offset, "do it now, or take the note out".to_owned()));
            }
            if text
                .split_once("```")
                .is_some_and(|(_, tags)| tags.split(',').any(|tag| tag.trim() == "ignore"))
            {
                found
                    .push((comment.first + offset, "make this example run (or `no_run`, `text`)".to_owned()));
            }
        }
    }
    found
}

/// Fields of clap's argument structs that hold a quantity and do not name its unit.
fn flags_without_unit(source: &Source) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut is_args = false;
    for at in 0..source.tokens.len() {
        if source.matches(at, "# [ derive (") {
            let inside = at + 3..source.closing(at + 3);
            is_args = inside
                .into_iter()
                .any(|inner| matches!(source.tokens[inner].1, Token::Word("Args" | "Parser")));
        } else if source.matches(at, "struct") {
            let body = (at..source.tokens.len())
                .find(|inner| matches!(source.tokens[*inner].1, Token::Punct('{' | ';')));
            if let Some(open) = body.filter(|open| is_args && source.matches(*open, "{")) {
                found.extend(fields(source, open).into_iter().filter(lacks_unit).map(|field| {
                    (field.line, format!("flag `{}` holds a quantity: end its name in its unit", field.name))
                }));
            }
            is_args = false;
        }
    }
    found
}

struct Field<'a> {
    line: usize,
    name: &'a str,
    /// The words of its type.
    of: Vec<&'a str>,
}

fn lacks_unit(field: &Field) -> bool {
    let is_number = field.of.iter().any(|word| matches!(*word, "f64" | "u64"));
    let is_quantity = QUANTITIES.iter().any(|quantity| field.name.contains(quantity));
    let has_unit = field.name.rsplit('_').next().is_some_and(|last| UNITS.contains(&last));
    is_number && is_quantity && !has_unit
}

/// The fields of the struct whose body opens at `open`.
fn fields<'a>(source: &Source<'a>, open: usize) -> Vec<Field<'a>> {
    let mut found: Vec<Field> = Vec::new();
    let (mut at, end) = (open + 1, source.closing(open));
    let mut in_type = false;
    while at < end {
        if source.matches(at, "# [") {
            at = source.closing(at + 1);
            continue;
        }
        match source.tokens[at] {
            (line, Token::Word(name)) if !in_type && source.matches(at + 1, ":") => {
                found.push(Field { line, name, of: Vec::new() });
                in_type = true;
            }
            (_, Token::Word(word)) if in_type => {
                found.last_mut().into_iter().for_each(|field| field.of.push(word))
            }
            // A comma inside a generic type ends it early: harmless, for the words seen decide.
            (_, Token::Punct(',')) => in_type = false,
            _ => {}
        }
        at += 1;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_lines(text: &str, expected: &[usize]) {
        let found = check(Path::new("a.rs"), text, false);
        assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), expected, "{found:?}");
    }

    #[test]
    fn unsafe_needs_a_note_close_above() {
        check_lines("fn f() { unsafe { g() } }", &[1]);
        check_lines("unsafe impl Send for A {}", &[1]);
        check_lines("// SAFETY: g has no contract.\nlet x = unsafe { g() };", &[]);
        check_lines("// SAFETY: a\n// b\n// c\n// d\n// e\n// f\n// g\nunsafe { g() }", &[]);
        check_lines("// SAFETY: too far\n\n\n\n\n\nunsafe { g() }", &[7]);
        check_lines("unsafe fn f() {}\n#[unsafe(no_mangle)]\nfn g() {}\nlet s = \"unsafe {\";", &[]);
        check_lines("#[cfg(test)]\nmod tests { fn f() { unsafe { g() } } }", &[]);
        assert_eq!(check(Path::new("t.rs"), "fn f() { unsafe { g() } }", true), []);
    }

    #[test]
    fn nothing_is_left_undone() {
        check_lines("fn f() {\n    todo!()\n}", &[2]);
        check_lines(&["let a = 1;\n// FIX", "ME later"].concat(), &[2]);
        check_lines("#[test]\n#[ignore = \"slow\"]\nfn f() {}", &[2]);
        check_lines("#[cfg_attr(not(unix), ignore)]\nfn f() {}", &[1]);
        check_lines("/// ```ignore\n/// x\n/// ```\nfn f() {}", &[1]);
        check_lines("/// ```no_run\n/// x\n/// ```\nfn todo_list() {}\nlet todo = 1;", &[]);
    }

    #[test]
    fn quantities_in_flags_name_their_unit() {
        let text = |field: &str| format!("#[derive(Args)]\nstruct A {{\n    #[arg(long)]\n    {field},\n}}");
        check_lines(&text("pub hbm: Option<f64>"), &[4]);
        check_lines(&text("time_limit: f64"), &[4]);
        check_lines(&text("hbm_gib: Option<f64>"), &[]);
        check_lines(&text("time_limit_s: f64"), &[]);
        check_lines(&text("nvme_dir: Option<PathBuf>"), &[]);
        check_lines(&text("steps: u64"), &[]);
        check_lines("#[derive(Debug)]\nstruct A { hbm: u64 }", &[]);
    }
}
