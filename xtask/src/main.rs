//! Chores of the workspace: `cargo xtask help`.
//!
//! Links no native library, so that it builds before anything else is installed; the programs it starts
//! are built by cargo on demand. What xtask says itself goes to standard error: standard output belongs to the
//! program it starts.

mod bench;
mod cargo;
mod dist;
mod native;
mod programs;
mod stages;
mod tidy;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use programs::Program;

/// The message tells the user what went wrong and what to do about it.
type Outcome<T> = Result<T, String>;

/// Chores of the lazy workspace.
#[derive(Parser)]
#[command(bin_name = "cargo xtask", version, subcommand_required = true, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Plan, train and report in one go: starts `train-lm train` (`cargo xtask train --help` lists its flags)
    Train(Passed),
    /// Plan without running: starts `lazy-plan` (`cargo xtask plan --help` lists its flags)
    Plan(Passed),
    /// Measure this machine's links into a profile: starts `train-lm probe`
    Probe(Passed),
    /// Draw the report of a run again, or two runs on one page: starts `train-lm report`
    Report(Passed),
    /// Print a model's logits for a row of tokens, to compare them with another program's: starts `train-lm logits`
    Logits(Passed),
    /// Remove the spill folders of dead runs, and nothing else: starts `train-lm clean`
    Clean(Passed),
    /// Measure, and compare with targets and peers
    Bench(bench::Options),
    /// Test the decoder on this machine's GPU: starts `train-lm test-gpu`
    TestGpu(Passed),
    /// Run everything continuous integration runs: fmt, tidy, clippy, tests, documentation
    Test(stages::Options),
    /// Make files that travel into target/dist: programs that need nothing beside glibc, the solver's library linked in
    Dist(dist::Options),
    /// Check the rules no compiler checks: crate arrows, SAFETY notes, dead files, unit suffixes, words
    Tidy,
}

/// Arguments handed to a program unchanged; `--help` included, which is the program's to answer.
#[derive(Args)]
#[command(disable_help_flag = true)]
struct Passed {
    /// Arguments of the program
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGS")]
    args: Vec<OsString>,
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().task {
        Task::Train(passed) => programs::start(Program::TrainLm, Some("train"), &passed.args),
        Task::Plan(passed) => programs::start(Program::LazyPlan, None, &passed.args),
        Task::Probe(passed) => programs::start(Program::TrainLm, Some("probe"), &passed.args),
        Task::Report(passed) => programs::start(Program::TrainLm, Some("report"), &passed.args),
        Task::Logits(passed) => programs::start(Program::TrainLm, Some("logits"), &passed.args),
        Task::Clean(passed) => programs::start(Program::TrainLm, Some("clean"), &passed.args),
        Task::TestGpu(passed) => programs::start(Program::TrainLm, Some("test-gpu"), &passed.args),
        Task::Bench(options) => bench::run(&options).map(|()| ExitCode::SUCCESS),
        Task::Test(options) => stages::run(&options).map(|()| ExitCode::SUCCESS),
        Task::Dist(options) => dist::run(&options).map(|()| ExitCode::SUCCESS),
        Task::Tidy => tidy::run().map(|()| ExitCode::SUCCESS),
    };
    outcome.unwrap_or_else(|message| {
        eprintln!("xtask: {message}");
        ExitCode::FAILURE
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn program_flags_pass_through_unchanged() {
        let given = ["--json", "--steps", "3", "-h", "--help", "--", "x"];
        let line = ["xtask", "train"].iter().chain(&given);
        let Task::Train(passed) = Cli::try_parse_from(line).unwrap().task else { panic!("not train") };
        assert_eq!(passed.args, given);
    }
}
