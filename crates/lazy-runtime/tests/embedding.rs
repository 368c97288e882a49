//! What `docs/embedding.md` shows is in the trainers that are compiled and run.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;

#[test]
fn what_the_page_shows_is_in_the_trainers() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
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
