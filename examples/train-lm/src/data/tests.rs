use super::*;

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    folder
}

const BYTES: Reading<'static> = Reading { tokens: &Tokens::Bytes, jsonl: false, seq: 2 };

fn corpus(text: &[u8], seq: usize) -> Result<Corpus, DataError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("text");
    fs::write(&path, text).unwrap();
    Corpus::train(&[path], &Reading { seq, ..BYTES })
}

fn bytes(corpus: &Corpus) -> &[u8] {
    match &corpus.data {
        Data::Bytes(bytes) => bytes,
        Data::Rows(_) => &[],
    }
}

fn place(seed: u64, step: u64, batch: usize) -> Place {
    Place { seed, step, accum: 1, batch }
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
        ("answers.jsonl", "no"),
        (".hidden.md", "no"),
    ];
    let folder = folder(&files);
    #[cfg(unix)]
    std::os::unix::fs::symlink(folder.path(), folder.path().join("loop")).unwrap();
    assert_eq!(bytes(&Corpus::train(&[folder.path().to_owned()], &BYTES).unwrap()), b"123");
}

#[test]
fn named_files_are_read_in_the_order_given_whatever_their_name() {
    let folder = folder(&[("one.dat", "1"), ("two", "23")]);
    let paths = [folder.path().join("two"), folder.path().join("one.dat")];
    let corpus = Corpus::train(&paths, &BYTES).unwrap();
    assert_eq!(bytes(&corpus), b"231");
    // SHA-256 of "231", by sha256sum.
    assert_eq!(corpus.hash(), "138d9e809e386a7b800791d1f664f56d1c55f3d1ba411b950862729bc486c5ce");
}

#[test]
fn a_missing_path_is_named() {
    let error = Corpus::train(&["no/such/place".into()], &BYTES).err().unwrap();
    assert!(error.to_string().starts_with("cannot read no/such/place: "), "{error}");
}

#[test]
fn no_text_is_an_error_that_says_where_was_searched() {
    let folder = folder(&[("picture.png", "x"), ("empty.txt", "")]);
    for path in [folder.path().to_owned(), folder.path().join("empty.txt")] {
        let error = Corpus::train(std::slice::from_ref(&path), &BYTES).err().unwrap();
        assert!(matches!(error, DataError::Empty { .. }));
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
}

#[test]
fn a_short_text_is_an_error_with_both_lengths() {
    assert_eq!(corpus(b"12345678", 7).unwrap().step(place(0, 0, 3))[0].ids.len(), 21);
    let error = corpus(b"12345678", 8).err().unwrap().to_string();
    assert!(error.contains("8 bytes") && error.contains("needs 9"), "{error}");
}

#[test]
fn batches_depend_on_their_place_alone() {
    let text: Vec<u8> = (0..10_000).map(|i| (i * i % 251) as u8).collect();
    let text = corpus(&text, 50).unwrap();
    let place = Place { seed: 1, step: 2, accum: 4, batch: 4 };
    let step = text.step(place);
    assert_eq!(step, text.step(place));
    assert_eq!(step[0].ids[..100], text.step(Place { batch: 2, ..place })[0].ids);
    // The last of a row is not predicted.
    assert!(step.iter().all(|batch| batch.tokens == 4 * 4 * 49));
    let all: std::collections::BTreeSet<_> = step.iter().map(|batch| &batch.ids).collect();
    assert_eq!(all.len(), 4);
    assert_ne!(step, text.step(Place { seed: 9, ..place }));
    assert_ne!(step, text.step(Place { step: 9, ..place }));
}

#[test]
fn rows_start_everywhere_and_are_pieces_of_the_text() {
    let text = corpus(b"0123456789", 3).unwrap();
    let mut seen = [0; 8];
    for row in text.step(place(0, 0, 1000))[0].ids.chunks(3) {
        assert!(row[1] == row[0] + 1 && row[2] == row[0] + 2);
        seen[(row[0] - u32::from(b'0')) as usize] += 1;
    }
    // 125 expected of each, with a standard error of 10.5.
    assert!(seen.iter().all(|&count| (72..178).contains(&count)), "{seen:?}");
}

#[test]
fn entropy_is_that_of_the_tokens() {
    assert_eq!(corpus(b"aaaa", 2).unwrap().unigram_entropy(), 0.0);
    assert!((corpus(b"abcdabcd", 2).unwrap().unigram_entropy() - 4f64.ln()).abs() < 1e-12);
    // 3/4 and 1/4: 0.5623351446 nats.
    assert!((corpus(b"aaab", 2).unwrap().unigram_entropy() - 0.562_335_144_6).abs() < 1e-9);
}

const LINES: &str = r#"{"prompt": "ab", "answer": "cd"}

{"answer": "z", "prompt": "", "id": 7}
{"prompt": "1", "answer": "23"}
"#;

#[test]
fn of_examples_the_answers_are_predicted() {
    let folder = folder(&[("lines.jsonl", LINES), ("lines.txt", LINES)]);
    let read = |name: &str, jsonl| {
        Corpus::train(&[folder.path().join(name)], &Reading { jsonl, seq: 6, ..BYTES }).unwrap()
    };
    let corpus = read("lines.jsonl", false);
    // The example whose answer is one byte behind nothing has nothing to be predicted from.
    let batch = &corpus.step(place(1, 0, 2))[0];
    let text = |tokens: &[u32]| -> String {
        tokens.iter().map(|&t| if t == IGNORED { '-' } else { t as u8 as char }).collect()
    };
    let rows: std::collections::BTreeSet<_> =
        batch.ids.chunks(6).zip(batch.targets.chunks(6)).map(|(i, t)| (text(i), text(t))).collect();
    let expected = [("123\0\0\0", "23----"), ("abcd\0\0", "-cd---")];
    assert_eq!(rows, expected.map(|(i, t)| (i.to_owned(), t.to_owned())).into());
    assert_eq!(batch.tokens, 4);
    assert_eq!(
        corpus.describe(),
        "2 rows of 6 tokens, of which 4 are predicted; 1 examples of which no predicted token is left were left out"
    );
    assert_eq!(read("lines.txt", true).step(place(1, 0, 2)), corpus.step(place(1, 0, 2)));
    assert_eq!(
        Corpus::train(&[folder.path().to_owned()], &Reading { jsonl: true, seq: 6, ..BYTES }).unwrap().rows(),
        Some(2)
    );
}

#[test]
fn every_pass_has_all_rows_in_an_order_of_its_own() {
    let line = |i: u8| {
        serde_json::json!({ "prompt": char::from(b'A' + i).to_string(), "answer": "xyz" }).to_string() + "\n"
    };
    let lines: String = (0..50).map(line).collect();
    let folder = folder(&[("lines.jsonl", &lines)]);
    let corpus = Corpus::train(&[folder.path().join("lines.jsonl")], &Reading { seq: 4, ..BYTES }).unwrap();
    // Five steps of 2 micro-batches of 5 rows are a pass.
    let place = |step| Place { seed: 3, step, accum: 2, batch: 5 };
    let pass = |first: u64| -> Vec<u32> {
        let steps = (first..first + 5).flat_map(|step| corpus.step(place(step)));
        steps.flat_map(|b| b.ids.chunks(4).map(|row| row[0]).collect::<Vec<_>>()).collect()
    };
    let (first, second) = (pass(0), pass(5));
    assert_ne!(first, second);
    for mut order in [first, second] {
        order.sort_unstable();
        assert_eq!(order, (0..50).map(|i| u32::from(b'A') + i).collect::<Vec<_>>());
    }
}

#[test]
fn an_evaluation_has_every_row_once_and_what_is_wanting_is_not_predicted() {
    let folder = folder(&[("a.txt", "abcdefg"), ("b.txt", "hij")]);
    let corpus = Corpus::evaluation(&[folder.path().to_owned()], &Reading { seq: 4, ..BYTES }).unwrap();
    assert_eq!(corpus.rows(), Some(3));
    let steps: Vec<_> = corpus.in_order(2, 1).collect();
    assert_eq!(steps.len(), 2);
    assert_eq!(steps[0][0].ids, b"abcdefgh".map(u32::from));
    // The g ends its text.
    let targets: Vec<u32> = b"bcdefg-i".iter().map(|&b| if b == b'-' { IGNORED } else { b.into() }).collect();
    assert_eq!(steps[0][0].targets, targets);
    assert_eq!((steps[0][0].tokens, steps[1][0].tokens, steps[1][0].ids.len()), (7, 1, 8));
    assert_eq!(corpus.in_order(1, 2).map(|step| step.len()).collect::<Vec<_>>(), [2, 2]);
}

#[test]
fn bad_examples_are_refused_by_line() {
    for (line, words) in [
        ("{\"prompt\": \"a\"}", "missing field `answer`"),
        ("{\"prompt\": \"a\", \"answer\": 1}", "expected a string"),
        ("[]", "line 2: "),
        ("{\"prompt\": \"a\", \"answer\": \"\"}", "its answer is empty"),
        ("no json", "each line is an object with two texts"),
    ] {
        let good = "{\"prompt\": \"a\", \"answer\": \"b\"}";
        let folder = folder(&[("lines.jsonl", &format!("{good}\n{line}\n"))]);
        let error = Corpus::train(&[folder.path().join("lines.jsonl")], &BYTES).err().unwrap().to_string();
        assert!(error.contains("lines.jsonl, line 2: ") && error.contains(words), "{error}");
    }
    let folder = folder(&[("lines.jsonl", "{\"prompt\": \"abcdef\", \"answer\": \"g\"}")]);
    let error = Corpus::train(&[folder.path().join("lines.jsonl")], &BYTES).err().unwrap().to_string();
    assert!(error.contains("a --seq that holds more than the prompts"), "{error}");
}

/// Words that are tokens; everything else is `[UNK]`.
const TOKENIZER: &str = r#"{
  "version": "1.0", "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}, "padding": null,
  "added_tokens": [
    {"id": 6, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}
  ],
  "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
  "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5}, "unk_token": "[UNK]"}
}"#;

fn tokenizer(config: &str, vocab: usize) -> Result<Tokens, DataError> {
    let folder = folder(&[("tokenizer.json", TOKENIZER)]);
    Tokens::read(&folder.path().join("tokenizer.json"), config, vocab)
}

#[test]
fn a_tokenizer_makes_the_tokens_and_texts_end_with_its_end() {
    let tokens = tokenizer("{}", 7).unwrap();
    assert_eq!(tokens.json(), Some(TOKENIZER.as_bytes()));
    let folder = folder(&[
        ("a.txt", "one two three one"),
        ("b.txt", "four six\n"),
        ("c.jsonl", "{\"prompt\": \"one two\", \"answer\": \"five\"}"),
        ("bad.txt", "x"),
    ]);
    let paths = ["a.txt", "b.txt", "c.jsonl"].map(|name| folder.path().join(name));
    let corpus = Corpus::evaluation(&paths, &Reading { tokens: &tokens, jsonl: false, seq: 4 }).unwrap();
    let batches: Vec<_> = corpus.in_order(1, 1).flatten().map(|b| (b.ids, b.targets)).collect();
    const X: u32 = IGNORED;
    let expected = [
        (vec![1, 2, 3, 1], vec![2, 3, 1, 6]),
        (vec![6, 4, 0, 6], vec![X, 0, 6, X]),
        (vec![1, 2, 5, 6], vec![X, 5, 6, X]),
    ];
    assert_eq!(batches, expected);
    // Predicted: 2 3 1 6 0 6 5 6, so 6 three times in eight.
    let entropy = -(5.0 * (1f64 / 8.0) * (1f64 / 8.0).ln() + 3.0 / 8.0 * (3f64 / 8.0).ln());
    assert!((corpus.unigram_entropy() - entropy).abs() < 1e-12);
    fs::write(folder.path().join("bad.txt"), b"ok \xff").unwrap();
    let paths = [folder.path().join("bad.txt")];
    let error = Corpus::train(&paths, &Reading { tokens: &tokens, jsonl: false, seq: 4 }).err().unwrap();
    assert!(error.to_string().contains("bad.txt is not UTF-8 text from byte 3 on"), "{error}");
}

#[test]
fn the_models_end_of_text_comes_first_and_its_vocabulary_has_to_hold_the_tokenizer() {
    assert_eq!(tokenizer("{\"eos_token_id\": 3}", 7).unwrap().end(), Some(3));
    assert_eq!(tokenizer("{\"eos_token_id\": [4, 3]}", 7).unwrap().end(), Some(4));
    // An id that is no token is none.
    assert_eq!(tokenizer("{\"eos_token_id\": 99}", 7).unwrap().end(), Some(6));
    let error = tokenizer("{}", 6).err().unwrap().to_string();
    assert!(
        error.contains("\"<|endoftext|>\" has id 6") && error.contains("vocab_size 7 or more"),
        "{error}"
    );
    let folder = folder(&[("tokenizer.json", "{}")]);
    let error = Tokens::read(&folder.path().join("tokenizer.json"), "{}", 7).err().unwrap().to_string();
    assert!(error.starts_with("tokenizer, ") && error.contains("tokenizer.json"), "{error}");
}
