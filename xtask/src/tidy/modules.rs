//! Which source files the workspace's targets reach, and which are dead.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::lexer::{Source, Token};
use super::{Finding, publish};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    /// Compiled for tests or benchmarks only.
    Test,
    Shipped,
}

type Texts = BTreeMap<PathBuf, String>;

/// Every file reached from a target's root through `mod` and `include!`.
pub(super) fn reach(metadata: &Value, root: &Path, files: &Texts) -> BTreeMap<PathBuf, Role> {
    let mut reached = BTreeMap::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        reach_from(package, root, files, &mut reached);
    }
    reached
}

/// Those that one package's targets reach.
fn reach_from(package: &Value, root: &Path, files: &Texts, reached: &mut BTreeMap<PathBuf, Role>) {
    for target in package["targets"].as_array().into_iter().flatten() {
        let Some(path) = target["src_path"].as_str() else { continue };
        // Cargo's metadata lists packages from outside the workspace too: theirs are not below `root`.
        let Ok(path) = Path::new(path).strip_prefix(root) else { continue };
        let kinds = target["kind"].as_array().into_iter().flatten();
        let for_tests = kinds.into_iter().any(|kind| kind == "test" || kind == "bench");
        let role = if for_tests { Role::Test } else { Role::Shipped };
        follow(path, true, role, files, reached);
    }
}

/// A finding for every file that a published crate's targets take from outside its folder, which a package does not hold.
pub(super) fn check_published(metadata: &Value, root: &Path, files: &Texts) -> Vec<Finding> {
    let mut findings = Vec::new();
    for package in publish::published(metadata) {
        let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
        let Some(folder) = manifest.parent().and_then(|folder| folder.strip_prefix(root).ok()) else {
            continue;
        };
        let mut reached = BTreeMap::new();
        reach_from(package, root, files, &mut reached);
        let strangers = reached.into_keys().filter(|file| !file.starts_with(folder));
        findings.extend(strangers.map(|file| {
            let advice =
                format!("`{}` is published and takes this file from outside its folder", folder.display());
            Finding::new(&file, 1, advice)
        }));
    }
    findings
}

/// A finding for every Rust file outside `reached`.
pub(super) fn check(files: &Texts, reached: &BTreeMap<PathBuf, Role>) -> Vec<Finding> {
    files
        .keys()
        .filter(|file| file.extension().is_some_and(|extension| extension == "rs"))
        .filter(|file| !reached.contains_key(*file))
        .map(|file| Finding::new(file, 1, "no target reaches this file: declare it with `mod`, or delete it"))
        .collect()
}

fn follow(file: &Path, is_root: bool, role: Role, files: &Texts, reached: &mut BTreeMap<PathBuf, Role>) {
    let Some(text) = files.get(file) else { return };
    if reached.get(file).is_some_and(|known| *known >= role) {
        return;
    }
    reached.insert(file.to_path_buf(), role);
    let folder = file.parent().unwrap_or(Path::new(""));
    let own_folder = match file.file_stem() {
        Some(stem) if !is_root && stem != "mod" => folder.join(stem),
        _ => folder.to_path_buf(),
    };
    for declared in declarations(text) {
        let role = if declared.test_only { Role::Test } else { role };
        for candidate in declared.candidates(folder, &own_folder) {
            follow(&candidate, declared.included, role, files, reached);
        }
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Declaration {
    name: String,
    /// Inline modules around it, outermost first.
    inside: Vec<String>,
    /// From `#[path = ".."]` or `include!("..")`.
    path: Option<String>,
    /// Through `include!`: the file's own declarations count from its folder.
    included: bool,
    test_only: bool,
}

impl Declaration {
    fn candidates(&self, folder: &Path, own_folder: &Path) -> Vec<PathBuf> {
        let inline: PathBuf = self.inside.iter().collect();
        match &self.path {
            Some(path) if self.included || self.inside.is_empty() => vec![plain(&folder.join(path))],
            Some(path) => vec![plain(&own_folder.join(inline).join(path))],
            None => {
                let base = own_folder.join(inline);
                vec![base.join(format!("{}.rs", self.name)), base.join(&self.name).join("mod.rs")]
            }
        }
    }
}

/// Resolves `..` by name, as the compiler's messages do.
fn plain(path: &Path) -> PathBuf {
    let mut parts = PathBuf::new();
    for part in path.components() {
        if part == std::path::Component::ParentDir {
            parts.pop();
        } else {
            parts.push(part);
        }
    }
    parts
}

fn declarations(text: &str) -> Vec<Declaration> {
    let source = Source::new(text);
    let test_only = source.test_only();
    let word = |at: usize| match source.tokens.get(at) {
        Some((_, Token::Word(word))) => Some((*word).to_owned()),
        _ => None,
    };
    let literal = |at: usize| match source.tokens.get(at) {
        Some((_, Token::Text(text))) => Some((*text).to_owned()),
        _ => None,
    };
    let mut found = Vec::new();
    let mut blocks: Vec<Option<String>> = Vec::new();
    let mut path = None;
    for (at, (_, token)) in source.tokens.iter().enumerate() {
        let inside = || blocks.iter().flatten().cloned().collect();
        match token {
            Token::Punct('{') => {
                let named = at >= 2 && source.matches(at - 2, "mod");
                blocks.push(if named { word(at - 1) } else { None });
            }
            Token::Punct('}') => {
                blocks.pop();
            }
            Token::Word("path") if source.matches(at, "path =") => path = literal(at + 2),
            Token::Word("mod") => {
                if let Some(name) = word(at + 1).filter(|_| source.matches(at + 2, ";")) {
                    let path = path.take();
                    found.push(Declaration {
                        name,
                        inside: inside(),
                        path,
                        included: false,
                        test_only: test_only[at],
                    });
                }
            }
            Token::Word("include") if source.matches(at, "include ! (") => {
                let included = literal(at + 3).map(|path| Declaration {
                    path: Some(path),
                    included: true,
                    test_only: test_only[at],
                    ..Declaration::default()
                });
                found.extend(included);
            }
            _ => {}
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn texts(files: &[(&str, &str)]) -> Texts {
        files.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned())).collect()
    }

    #[test]
    fn follows_every_way_to_name_a_module() {
        let files = texts(&[
            (
                "c/src/lib.rs",
                "mod a; pub mod d; mod i { mod j; } #[path = \"odd/x.rs\"] mod y; include!(\"inc.rs\");",
            ),
            ("c/src/a.rs", "mod b; #[cfg(test)] mod tests;"),
            ("c/src/a/b.rs", ""),
            ("c/src/a/tests.rs", ""),
            ("c/src/d/mod.rs", "mod e;"),
            ("c/src/d/e.rs", "// mod dead;"),
            ("c/src/i/j.rs", ""),
            ("c/src/odd/x.rs", ""),
            ("c/src/inc.rs", ""),
            ("c/src/dead.rs", "mod more;"),
            ("c/tests/it.rs", "mod common;"),
            ("c/tests/common/mod.rs", ""),
        ]);
        let metadata = json!({"packages": [{"targets": [
            {"kind": ["lib"], "src_path": "/r/c/src/lib.rs"},
            {"kind": ["test"], "src_path": "/r/c/tests/it.rs"},
        ]}]});
        let reached = reach(&metadata, Path::new("/r"), &files);
        let dead: Vec<_> = check(&files, &reached).into_iter().map(|finding| finding.file).collect();
        assert_eq!(dead, [PathBuf::from("c/src/dead.rs")]);
        let tests: Vec<_> =
            reached.iter().filter(|(_, role)| **role == Role::Test).map(|(file, _)| file).collect();
        let expected = ["c/src/a/tests.rs", "c/tests/common/mod.rs", "c/tests/it.rs"];
        assert_eq!(tests, expected.map(PathBuf::from).iter().collect::<Vec<_>>());
    }

    #[test]
    fn a_published_crate_takes_nothing_from_outside_its_folder() {
        let files = texts(&[
            ("c/src/lib.rs", "mod own;"),
            ("c/src/own.rs", ""),
            ("c/src/bin/b.rs", "#[path = \"../../../d/src/shared.rs\"] mod shared;"),
            ("d/src/main.rs", "#[path = \"../../c/src/own.rs\"] mod own; mod shared;"),
            ("d/src/shared.rs", ""),
        ]);
        let package = |name: &str, publish: Value, sources: &[&str]| {
            let targets: Vec<Value> = sources
                .iter()
                .map(|path| json!({"kind": ["bin"], "src_path": format!("/r/{path}")}))
                .collect();
            json!({"name": name, "publish": publish, "manifest_path": format!("/r/{name}/Cargo.toml"), "targets": targets})
        };
        let metadata = json!({"packages": [
            package("c", Value::Null, &["c/src/lib.rs", "c/src/bin/b.rs"]),
            package("d", json!([]), &["d/src/main.rs"]),
        ]});
        let findings = check_published(&metadata, Path::new("/r"), &files);
        let named: Vec<_> = findings.iter().map(|finding| finding.file.display().to_string()).collect();
        assert_eq!(named, ["d/src/shared.rs"]);
        assert!(findings[0].advice.starts_with("`c` is published"));
    }
}
