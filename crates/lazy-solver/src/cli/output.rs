//! Writing: standard output, and schedule files that are whole or absent.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::Path;

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

/// Writes to a temporary name in the same folder, then renames: nobody sees half a file.
pub(crate) fn write(flag: &str, path: &Path, text: &str) -> Result<(), String> {
    let name = path.file_name().ok_or_else(|| format!("{flag} {}: name a file", path.display()))?;
    let mut temporary = name.to_os_string();
    temporary.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(temporary);
    let written = File::create_new(&temporary)
        .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
        .and_then(|()| fs::rename(&temporary, path));
    written.map_err(|e| {
        // Nothing of ours stays behind; that the file was never made is no second error.
        let _ = fs::remove_file(&temporary);
        format!("cannot write {}: {e}; choose another {flag}", path.display())
    })
}
