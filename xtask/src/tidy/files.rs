//! The workspace's own text files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Outcome;

/// Every UTF-8 file that git tracks or would track, by its path relative to `root`.
pub(super) fn texts(root: &Path) -> Outcome<BTreeMap<PathBuf, String>> {
    let paths = match listed_by_git(root) {
        Some(paths) => paths,
        None => listed_by_walking(root)?,
    };
    let mut texts = BTreeMap::new();
    for path in paths {
        let whole = root.join(&path);
        // A file deleted but not yet committed is listed too; links and submodules are not ours to read.
        if !fs::symlink_metadata(&whole).is_ok_and(|found| found.is_file()) {
            continue;
        }
        let bytes = fs::read(&whole).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        if let Ok(text) = String::from_utf8(bytes) {
            texts.insert(path, text);
        }
    }
    Ok(texts)
}

fn listed_by_git(root: &Path) -> Option<Vec<PathBuf>> {
    let output = Command::new("git")
        // The checkout may belong to another user, as in a container.
        .args(["-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()
        .ok()?;
    let listed = String::from_utf8(output.stdout).ok()?;
    let paths: Vec<_> = listed.split('\0').filter(|path| !path.is_empty()).map(PathBuf::from).collect();
    (output.status.success() && !paths.is_empty()).then_some(paths)
}

/// For a copy without git: every file below `root` except what the root's `.gitignore` names.
fn listed_by_walking(root: &Path) -> Outcome<Vec<PathBuf>> {
    let ignored = fs::read_to_string(root.join(".gitignore")).unwrap_or_default();
    let skip: Vec<_> = ignored.lines().map(|line| line.trim_matches('/')).chain([".git"]).collect();
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let failed = |error| format!("cannot list {}: {error}", root.join(&folder).display());
        for entry in fs::read_dir(root.join(&folder)).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let path = folder.join(entry.file_name());
            let kind = entry.file_type().map_err(failed)?;
            if skip.iter().any(|name| path == Path::new(name)) {
                continue;
            } else if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file() {
                found.push(path);
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_find_the_sources() {
        let root = crate::cargo::root();
        for paths in [listed_by_git(&root), listed_by_walking(&root).ok()].into_iter().flatten() {
            assert!(paths.contains(&PathBuf::from("xtask/src/tidy/files.rs")));
            assert!(!paths.iter().any(|path| path.starts_with("target") || path.starts_with(".git")));
        }
    }
}
