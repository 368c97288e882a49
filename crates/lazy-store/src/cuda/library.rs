//! Native libraries, loaded when they are first needed and found where CUDA's are usually put.

use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::error::StoreError;

/// Loads the first of `names` (file names, the most specific first) that is found, and keeps it for good: what is loaded
/// under a path is found by its name from then on, by whoever asks.
pub(crate) fn load(what: &'static str, names: &[&str]) -> Result<Library, StoreError> {
    let mut reason = String::new();
    let folders = folders();
    let bare = names.iter().map(PathBuf::from);
    let found = folders.iter().flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    for path in bare.chain(found.filter(|path| path.exists())) {
        // SAFETY: CUDA's libraries may be loaded at any time by any thread; their initialisers ask nothing of the caller.
        match unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
            Ok(library) => {
                // The name stays loaded for those who load it again: a handle that is never closed.
                // SAFETY: as above.
                if let Ok(again) = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
                    let _ = again.into_raw();
                }
                return Ok(library);
            }
            Err(e) if reason.is_empty() || path.is_absolute() => reason = e.to_string(),
            Err(_) => {}
        }
    }
    let names = names.join(", ");
    Err(StoreError::LibraryMissing { what, names, reason })
}

/// Loads one of CUDA's libraries for a caller that uses it through cudarc, which finds it by its name from then on. `what` appears in the
/// message; `names` are file names, the most specific first, looked for where the loader does, in toolkits, and in Python's wheels.
///
/// # Errors
///
/// [`StoreError::LibraryMissing`].
pub fn load_library(what: &'static str, names: &[&str]) -> Result<(), StoreError> {
    load(what, names).map(|_| ())
}

/// Where libraries of CUDA lie when the loader's own search does not find them: toolkits, and the wheels beside a Python.
fn folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(root) = std::env::var_os(variable) {
            toolkit(Path::new(&root), &mut folders);
        }
    }
    toolkit(Path::new("/usr/local/cuda"), &mut folders);
    for python in pythons() {
        wheels(&python, &mut folders);
    }
    folders
}

/// Where headers of CUDA lie: beside its libraries.
pub(crate) fn include_folders() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for folder in folders() {
        let Some(include) = folder.parent().map(|root| root.join("include")) else { continue };
        if include.join("cuda_fp16.h").exists() && !found.contains(&include) {
            found.push(include);
        }
    }
    found
}

fn toolkit(root: &Path, folders: &mut Vec<PathBuf>) {
    folders.push(root.join("lib64"));
    folders.push(root.join("lib"));
    folders.push(root.join("targets/x86_64-linux/lib"));
}

/// Prefixes of the Pythons at hand.
fn pythons() -> Vec<PathBuf> {
    let mut prefixes: Vec<PathBuf> = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from).into_iter().collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    for folder in std::env::split_paths(&path) {
        if folder.join("python3").exists()
            && let Some(prefix) = folder.parent()
        {
            prefixes.push(prefix.to_owned());
        }
    }
    prefixes
}

/// `lib/python3.*/site-packages/nvidia/*/lib` under a prefix.
fn wheels(prefix: &Path, folders: &mut Vec<PathBuf>) {
    let entries = |dir: &Path| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        paths
    };
    for version in entries(&prefix.join("lib")) {
        if version.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3")) {
            let packages = entries(&version.join("site-packages/nvidia"));
            folders.extend(packages.into_iter().map(|package| package.join("lib")));
        }
    }
}
