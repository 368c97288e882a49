//! What a package registry and its readers want to know of the crates that are published.

use std::path::Path;

use serde_json::Value;

use super::Finding;

/// Files beside each manifest, which travel with the crate.
const FILES: [&str; 3] = ["README.md", "LICENSE-MIT", "LICENSE-APACHE"];

pub(super) fn check(metadata: &Value, root: &Path) -> Vec<Finding> {
    published(metadata).flat_map(|package| check_package(package, root)).collect()
}

/// The workspace's packages that are published.
pub(super) fn published(metadata: &Value) -> impl Iterator<Item = &Value> {
    let packages = metadata["packages"].as_array().map(Vec::as_slice).unwrap_or_default();
    // Packages of registries have a source.
    packages.iter().filter(|package| package["source"].is_null() && is_published(package))
}

/// `publish = false` is an empty list of registries.
fn is_published(package: &Value) -> bool {
    package["publish"].as_array().is_none_or(|registries| !registries.is_empty())
}

fn check_package(package: &Value, root: &Path) -> Vec<Finding> {
    let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
    let short = manifest.strip_prefix(root).unwrap_or(manifest);
    let mut advice = Vec::new();
    for key in ["description", "license", "documentation", "readme", "rust_version"] {
        if package[key].as_str().is_none_or(str::is_empty) {
            advice.push(format!("say `{}`", key.replace('_', "-")));
        }
    }
    for key in ["keywords", "categories"] {
        if !package[key].as_array().is_some_and(|list| (1..=5).contains(&list.len())) {
            advice.push(format!("list one to five `{key}`"));
        }
    }
    for dependency in package["dependencies"].as_array().into_iter().flatten() {
        let has_version = dependency["req"].as_str().is_some_and(|version| version != "*");
        if !dependency["path"].is_null() && !has_version && dependency["kind"] != "dev" {
            advice.push(format!(
                "give `{}` a version beside its path",
                dependency["name"].as_str().unwrap_or("?")
            ));
        }
    }
    let folder = manifest.parent().unwrap_or(manifest);
    for file in FILES.into_iter().filter(|file| !folder.join(file).is_file()) {
        advice.push(format!("put {file} beside it"));
    }
    advice
        .into_iter()
        .map(|advice| Finding::new(short, 1, format!("the crate is published: {advice}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_missing_is_named_and_what_stays_here_is_not_asked() {
        let metadata = json!({"packages": [
            {"name": "here", "source": null, "publish": [], "manifest_path": "/w/here/Cargo.toml"},
            {"name": "theirs", "source": "registry+x", "publish": null, "manifest_path": "/r/Cargo.toml"},
            {"name": "ours", "source": null, "publish": null, "manifest_path": "/w/ours/Cargo.toml", "description": "d", "license": "MIT",
             "documentation": "https://docs.rs/ours", "readme": null, "rust_version": "1.95", "keywords": ["a"],
             "categories": [], "dependencies": [
                {"name": "bare", "path": "/w/bare", "req": "*", "kind": null},
                {"name": "tool", "path": "/w/tool", "req": "*", "kind": "dev"},
                {"name": "good", "path": "/w/good", "req": "^0.1.0", "kind": null}]},
        ]});
        let findings = check(&metadata, Path::new("/w"));
        let text: Vec<String> = findings.iter().map(ToString::to_string).collect();
        let named = ["`readme`", "`categories`", "`bare`", "README.md", "LICENSE-MIT", "LICENSE-APACHE"];
        assert_eq!(text.len(), named.len(), "{text:?}");
        assert!(text.iter().all(|line| line.starts_with("ours/Cargo.toml:1: ")), "{text:?}");
        assert!(named.iter().all(|name| text.iter().any(|line| line.contains(name))), "{text:?}");
    }
}
