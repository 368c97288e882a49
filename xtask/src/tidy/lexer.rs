//! Rust source as words, punctuation and comments: just enough to check rules without a parser.

/// Literals lose their delimiters; a lifetime is an apostrophe followed by a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token<'a> {
    /// Identifier, keyword or number.
    Word(&'a str),
    Punct(char),
    /// The raw content of a string literal; empty for a character literal.
    Text(&'a str),
}

/// A comment with its marks, doc comments included. Adjoining line comments are one comment.
#[derive(Debug)]
pub(super) struct Comment {
    /// Lines from 1, both included.
    pub(super) first: usize,
    pub(super) last: usize,
    pub(super) text: String,
}

#[derive(Debug, Default)]
pub(super) struct Source<'a> {
    /// Each with its line, from 1.
    pub(super) tokens: Vec<(usize, Token<'a>)>,
    pub(super) comments: Vec<Comment>,
}

impl<'a> Source<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        let mut source = Self::default();
        let (mut rest, mut line) = (text, 1);
        while let Some(next) = rest.chars().next() {
            let length = source.step(rest, next, line);
            let (passed, remaining) = rest.split_at(length);
            line += passed.matches('\n').count();
            rest = remaining;
        }
        source
    }

    /// Records what `rest` starts with; returns its length in bytes.
    fn step(&mut self, rest: &'a str, next: char, line: usize) -> usize {
        if rest.starts_with("//") {
            let length = rest.find('\n').unwrap_or(rest.len());
            self.comment(&rest[..length], line);
            return length;
        }
        if rest.starts_with("/*") {
            let length = block_comment(rest);
            self.comment(&rest[..length], line);
            return length;
        }
        let (token, length) = if let Some((content, length)) = raw_string(rest) {
            (Token::Text(content), length)
        } else if next == '"' {
            let length = quoted(rest, '"');
            (Token::Text(rest[1..length].strip_suffix('"').unwrap_or_default()), length)
        } else if next == '\'' && is_char_literal(rest) {
            (Token::Text(""), quoted(rest, '\''))
        } else if is_word(next) {
            let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
            (Token::Word(&rest[..length]), length)
        } else if next.is_whitespace() {
            return next.len_utf8();
        } else {
            (Token::Punct(next), next.len_utf8())
        };
        self.tokens.push((line, token));
        length
    }

    fn comment(&mut self, text: &str, line: usize) {
        let last = line + text.matches('\n').count();
        match self.comments.last_mut() {
            Some(before) if before.last + 1 == line => {
                before.last = last;
                before.text += "\n";
                before.text += text;
            }
            _ => self.comments.push(Comment { first: line, last, text: text.to_owned() }),
        }
    }

    /// Whether the tokens from `at` on are exactly `pattern`, written as words and punctuation apart by spaces.
    pub(super) fn matches(&self, at: usize, pattern: &str) -> bool {
        pattern.split(' ').enumerate().all(|(offset, part)| match self.tokens.get(at + offset) {
            Some((_, Token::Word(word))) => *word == part,
            Some((_, Token::Punct(mark))) => part.chars().eq([*mark]),
            _ => false,
        })
    }

    /// The index after the bracket that closes the one at `open`.
    pub(super) fn closing(&self, open: usize) -> usize {
        let mut depth = 0_usize;
        for (index, (_, token)) in self.tokens.iter().enumerate().skip(open) {
            match token {
                Token::Punct('(' | '[' | '{') => depth += 1,
                Token::Punct(')' | ']' | '}') => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth == 0 {
                return index + 1;
            }
        }
        self.tokens.len()
    }

    /// For each token, whether it belongs to an item that only tests compile.
    pub(super) fn test_only(&self) -> Vec<bool> {
        let mut marks = vec![false; self.tokens.len()];
        if self.matches(0, "# ! [ cfg ( test ) ]") {
            marks.fill(true);
        }
        for at in 0..self.tokens.len() {
            if self.matches(at, "# [ test ]") || self.is_cfg_test(at) {
                let end = self.item_end(at);
                marks[at..end].fill(true);
            }
        }
        marks
    }

    fn is_cfg_test(&self, at: usize) -> bool {
        let words = |index: usize| match self.tokens[index].1 {
            Token::Word(word) => Some(word),
            _ => None,
        };
        self.matches(at, "# [ cfg (") && {
            let inside = at + 3..self.closing(at + 3);
            inside.clone().filter_map(words).any(|word| word == "test")
                && !inside.filter_map(words).any(|word| word == "not")
        }
    }

    /// The index after the item whose first attribute starts at `at`.
    fn item_end(&self, mut at: usize) -> usize {
        while self.matches(at, "# [") {
            at = self.closing(at + 1);
        }
        while let Some((_, token)) = self.tokens.get(at) {
            match token {
                Token::Punct(';') => return at + 1,
                Token::Punct('{') => return self.closing(at),
                Token::Punct('(' | '[') => at = self.closing(at),
                _ => at += 1,
            }
        }
        self.tokens.len()
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn block_comment(rest: &str) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                break;
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    at
}

/// Content and whole length of `r"..."`, `br#"..."#` and the like.
fn raw_string(rest: &str) -> Option<(&str, usize)> {
    let after = ["r", "br", "cr"].iter().find_map(|prefix| rest.strip_prefix(prefix))?;
    let hashes = after.len() - after.trim_start_matches('#').len();
    let content = after[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let length = content.find(&end)?;
    let start = rest.len() - content.len();
    Some((&content[..length], start + length + end.len()))
}

/// Length of a literal that starts and ends with `quote`.
fn quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// `'a'` and `'\n'`, but not the lifetime `'a`.
fn is_char_literal(rest: &str) -> bool {
    let mut after = rest.chars().skip(1);
    match after.next() {
        Some('\\') => true,
        Some(_) => after.next() == Some('\''),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::Token::{Punct, Text, Word};
    use super::*;

    fn tokens(text: &str) -> Vec<Token<'_>> {
        Source::new(text).tokens.into_iter().map(|(_, token)| token).collect()
    }

    #[test]
    fn literals_hide_their_content_from_words() {
        assert_eq!(tokens(r#"f("unsafe \" {", b"x")"#).len(), 7);
        assert_eq!(tokens("r#\"mod a; \"b\" \"#;"), [Text("mod a; \"b\" "), Punct(';')]);
        assert_eq!(tokens(r"'{' '\'' '\u{7d}'"), [Text(""), Text(""), Text("")]);
        assert_eq!(tokens("&'a str"), [Punct('&'), Punct('\''), Word("a"), Word("str")]);
        assert_eq!(tokens("r#type"), [Word("r"), Punct('#'), Word("type")]);
    }

    #[test]
    fn comments_are_apart_and_adjoining_ones_are_one() {
        let source = Source::new("// one\n// two\nlet x = 1; /* a /* b */ c */\n\n// three");
        let spans: Vec<_> = source.comments.iter().map(|comment| (comment.first, comment.last)).collect();
        assert_eq!(spans, [(1, 3), (5, 5)]);
        assert_eq!(source.tokens.first(), Some(&(3, Word("let"))));
        assert_eq!(source.tokens.len(), 5);
    }

    #[test]
    fn test_items_end_where_they_end() {
        let text = "fn a() {}\n#[cfg(test)]\n#[allow(x)]\nmod t { fn b() {} }\n#[cfg(not(test))] fn c() {}";
        let source = Source::new(text);
        let marks = source.test_only();
        let marked: Vec<_> = source
            .tokens
            .iter()
            .zip(marks)
            .filter(|((_, token), mark)| *mark && matches!(token, Word("a" | "b" | "c")))
            .map(|((_, token), _)| *token)
            .collect();
        assert_eq!(marked, [Word("b")]);
    }
}
