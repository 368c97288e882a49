//! Writing: standard output, and files that are whole or absent.

use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

/// Whether standard output wants colours: a terminal, and `NO_COLOR` unset or empty.
pub(crate) fn colours() -> bool {
    io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

pub(crate) fn print(text: &str) -> Result<(), String> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // The reader has seen enough, as `head` does.
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|e| format!("cannot write to standard output: {e}")),
    }
}

/// Refuses what is sure to fail, and files that would take each other's place or that of one that is read.
pub(crate) fn check(files: &[(&str, &Path)], inputs: &[(&str, &Path)]) -> Result<(), String> {
    let mut taken: Vec<(&str, PathBuf)> =
        inputs.iter().filter_map(|(flag, path)| Some((*flag, path.canonicalize().ok()?))).collect();
    for (flag, path) in files {
        let place = place(flag, path)?;
        let name = path.display();
        if place.is_dir() {
            return Err(format!("{flag} {name}: is a folder; name a file"));
        }
        if is_special(&place) {
            continue;
        }
        if let Some((other, _)) = taken.iter().find(|(_, taken)| *taken == place) {
            return Err(format!("{flag} {name}: {other} names this file too; choose another"));
        }
        taken.push((flag, place));
    }
    Ok(())
}

/// Where a path leads to: a link's end, and the real folder of a file that is not there yet.
fn place(flag: &str, path: &Path) -> Result<PathBuf, String> {
    if let Ok(place) = path.canonicalize() {
        return Ok(place);
    }
    let name = path.file_name().ok_or_else(|| format!("{flag} {}: name a file", path.display()))?;
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = folder
        .canonicalize()
        .map_err(|e| format!("cannot write {}: {e}; choose another {flag}", path.display()))?;
    Ok(folder.join(name))
}

/// A device or a pipe: it takes text, and must not be replaced by a file.
fn is_special(place: &Path) -> bool {
    fs::metadata(place).is_ok_and(|m| !m.is_file() && !m.is_dir())
}

/// Writes to a temporary name in the same folder, then renames: nobody sees half a file. What is no plain file is written to as it is.
pub(crate) fn write(flag: &str, path: &Path, text: &str) -> Result<(), String> {
    let place = place(flag, path)?;
    let written = if is_special(&place) {
        OpenOptions::new().write(true).open(&place).and_then(|mut file| file.write_all(text.as_bytes()))
    } else {
        replace(&place, text)
    };
    written.map_err(|e| format!("cannot write {}: {e}; choose another {flag}", path.display()))
}

fn replace(place: &Path, text: &str) -> io::Result<()> {
    let mut temporary = place.as_os_str().to_os_string();
    temporary.push(format!(".{}.tmp", std::process::id()));
    let written = File::create_new(&temporary).and_then(|mut file| {
        // A file that others may not read stays so.
        if let Ok(old) = fs::metadata(place) {
            file.set_permissions(old.permissions())?;
        }
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all())
    });
    written.and_then(|()| fs::rename(&temporary, place)).inspect_err(|_| {
        // Nothing of ours stays behind; that the file was never made is no second error.
        let _ = fs::remove_file(&temporary);
    })
}
