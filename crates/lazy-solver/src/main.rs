//! The `lazy-plan` program: where each boundary of a model or cost chain should live.

mod cli;

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match cli::run(&cli::Args::parse()) {
        Ok(code) => code,
        Err(message) => {
            // Whoever read standard error may have gone; the exit status still tells.
            let _ = writeln!(std::io::stderr(), "error: {message}");
            ExitCode::FAILURE
        }
    }
}
