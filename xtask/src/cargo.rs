//! Calling cargo: the same one that started xtask, on this workspace, from the caller's folder.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::Outcome;

/// The workspace's root folder.
pub(crate) fn root() -> PathBuf {
    // Set by `cargo run`; the compiled-in value would be stale in a moved checkout.
    let own = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&own).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// A cargo command that reads nothing from standard input.
pub(crate) fn command(subcommand: &str) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.arg(subcommand).stdin(Stdio::null());
    command
}

/// `cargo metadata` of the workspace, with all features, for the machine this runs on.
///
/// Other platforms' packages are left out: they need not be downloaded to build here.
pub(crate) fn metadata() -> Outcome<Value> {
    let mut command = command("metadata");
    command.args(["--format-version=1", "--all-features"]).current_dir(root());
    if let Some(host) = host_triple() {
        command.args(["--filter-platform", &host]);
    }
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot start cargo ({error}): is Rust installed and on PATH?"))?;
    if !output.status.success() {
        return Err("`cargo metadata` failed: repair the manifest named above".into());
    }
    serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("`cargo metadata` printed no valid JSON: {error}"))
}

fn host_triple() -> Option<String> {
    let output = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .arg("-vV")
        .current_dir(root())
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.lines().find_map(|line| line.strip_prefix("host: ")).map(str::to_owned)
}
