//! Building a program in release mode and becoming it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use serde_json::Value;

use crate::{Outcome, cargo, native};

/// The programs of this workspace that xtask starts.
#[derive(Clone, Copy)]
pub(crate) enum Program {
    TrainLm,
    LazyPlan,
}

impl Program {
    /// Builds the program; returns the executable's path.
    pub(crate) fn build(self) -> Outcome<PathBuf> {
        match self {
            Self::TrainLm => build("train-lm", "train-lm", &[]),
            Self::LazyPlan => build("lazy-solver", "lazy-plan", &["cli"]),
        }
    }
}

/// Builds `program` and hands over to it: same folder, same standard streams, its exit status.
pub(crate) fn start(program: Program, subcommand: Option<&str>, args: &[OsString]) -> Outcome<ExitCode> {
    let executable = program.build()?;
    let mut command = Command::new(&executable);
    command.args(subcommand).args(args);
    become_program(command).map_err(|error| format!("cannot start {}: {error}", executable.display()))
}

/// Packages whose programs link the solver.
const WITH_SOLVER: [&str; 3] = ["lazy-solver", "bench-runtime", "train-lm"];

/// Builds binary target `binary` of `package` in release mode, after what it links is there.
pub(crate) fn build(package: &str, binary: &str, features: &[&str]) -> Outcome<PathBuf> {
    build_with(package, binary, features, &[])
}

/// The same with arguments for the compiler, of the program alone: its libraries are those of every other build.
pub(crate) fn build_with(
    package: &str,
    binary: &str,
    features: &[&str],
    compiler: &[OsString],
) -> Outcome<PathBuf> {
    if WITH_SOLVER.contains(&package) {
        native::ensure_cbc()?;
    }
    let mut command = cargo::command(if compiler.is_empty() { "build" } else { "rustc" });
    command.arg("--manifest-path").arg(cargo::root().join("Cargo.toml"));
    command.args(["--release", "--package", package, "--bin", binary]);
    // Diagnostics and progress stay on standard error; the JSON on standard output names the executable.
    command.arg("--message-format=json-render-diagnostics");
    if !features.is_empty() {
        command.arg("--features").arg(features.join(","));
    }
    if !compiler.is_empty() {
        command.arg("--").args(compiler);
    }
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot start cargo ({error}): is Rust installed and on PATH?"))?;
    if !output.status.success() {
        return Err(format!("building `{binary}` failed; see cargo's message above"));
    }
    executable(&String::from_utf8_lossy(&output.stdout), binary)
        .ok_or_else(|| format!("cargo built `{binary}` but named no executable"))
}

/// The executable of target `binary` in cargo's JSON messages.
fn executable(messages: &str, binary: &str) -> Option<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["target"]["name"] == binary)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

/// Replaces this process, so that every signal reaches the program and its exit status is ours.
#[cfg(unix)]
fn become_program(mut command: Command) -> std::io::Result<ExitCode> {
    use std::os::unix::process::CommandExt;
    Err(command.exec())
}

/// Waits for the program and passes its exit status on.
#[cfg(not(unix))]
fn become_program(mut command: Command) -> std::io::Result<ExitCode> {
    let status = command.status()?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_executable_among_cargo_messages() {
        let messages = r#"
{"reason":"compiler-artifact","target":{"name":"lazy-model"},"executable":null}
{"reason":"compiler-artifact","target":{"name":"train-lm"},"executable":null}
{"reason":"compiler-artifact","target":{"name":"train-lm"},"executable":"/t/release/train-lm"}
{"reason":"build-finished","success":true}"#;
        assert_eq!(executable(messages, "train-lm"), Some(PathBuf::from("/t/release/train-lm")));
        assert_eq!(executable(messages, "lazy-plan"), None);
    }
}
