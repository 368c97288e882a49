//! What `docs/embedding.md` shows is in the trainers that are compiled and run. All of that is the workspace's, so this file is not in the package.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Lines of a source that are neither blank nor comments, without those of the tests at its end.
fn lines(path: &Path) -> usize {
    let source = std::fs::read_to_string(path).unwrap();
    let code = source.split("#[cfg(test)]\nmod tests {").next().unwrap();
    code.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//")).count()
}

#[test]
fn each_trainer_has_as_many_lines_as_the_page_says_and_fewer_than_sixty() {
    let page = std::fs::read_to_string(root().join("docs/embedding.md")).unwrap();
    for name in ["embed-candle", "embed-burn", "embed-cuda"] {
        let folder = root().join("examples").join(name).join("src");
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let rust = files.filter(|path| path.extension().is_some_and(|e| e == "rs"));
        let own = rust.filter(|path| !path.ends_with("model.rs") && !path.ends_with("tests.rs"));
        let count: usize = own.map(|path| lines(&path)).sum();
        assert!(count < 60, "{name} has {count} lines");
        let row = page.lines().find(|line| line.contains(&format!("[`examples/{name}`]"))).unwrap();
        assert!(row.split('|').nth(3).unwrap().trim().starts_with(&count.to_string()), "{count}: {row}");
    }
}

#[test]
fn what_the_page_shows_is_in_the_trainers() {
    let root = root();
    let page = std::fs::read_to_string(root.join("docs/embedding.md")).unwrap();
    let mut blocks = 0;
    for part in page.split("<!-- examples/").skip(1) {
        let (file, rest) = part.split_once(" -->\n```rust\n").unwrap();
        let code = rest.split_once("```").unwrap().0;
        let source = std::fs::read_to_string(root.join("examples").join(file)).unwrap();
        assert!(source.contains(code), "{file} has no longer:\n{code}");
        blocks += 1;
    }
    assert_eq!(blocks, page.matches("```rust").count(), "every block names its file");
    assert!(blocks >= 6);
}
