//! Flags, and the way from them to a printed plan.

mod input;
mod output;
mod show;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use lazy_model::Seconds;
use lazy_solver::budgets::BudgetArgs;
use lazy_solver::{Method, SolveOptions, Status, explain};

/// Plans where the activation at every layer boundary lives between forward and backward: in HBM, in host RAM, on NVMe, or nowhere
/// (recomputed).
#[derive(Debug, Parser)]
#[command(name = "lazy-plan", version, group(clap::ArgGroup::new("problem").required(true).args(["chain", "model"])))]
pub(crate) struct Args {
    /// Cost chain to solve (JSON). Budgets, rates and weights are the file's own.
    #[arg(long, value_name = "FILE")]
    chain: Option<PathBuf>,
    /// Model to plan for: a Hugging Face style config.json.
    #[arg(long, value_name = "FILE", requires_all = ["batch", "seq"])]
    model: Option<PathBuf>,
    /// Sequences in a batch.
    #[arg(long, value_name = "N", conflicts_with = "chain")]
    batch: Option<usize>,
    /// Tokens in a sequence.
    #[arg(long, value_name = "N", conflicts_with = "chain")]
    seq: Option<usize>,
    /// Bytes of an activation, weight or gradient element.
    #[arg(long, value_name = "N", default_value_t = 4, conflicts_with = "chain")]
    element_bytes: usize,
    /// Most layers between two saved boundaries.
    #[arg(long, value_name = "N", default_value_t = 4, conflicts_with = "chain")]
    max_segment_layers: usize,
    /// Caps and machine; a chain brings its own.
    #[command(flatten)]
    budgets: BudgetArgs,
    /// Stop after this many seconds with the best plan found; without it, search until proven.
    #[arg(long, value_name = "S")]
    time_limit_s: Option<f64>,
    /// Algorithm.
    #[arg(long, value_enum, default_value = "auto")]
    method: MethodFlag,
    /// Write the schedule here.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print one JSON object and nothing else.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum MethodFlag {
    Auto,
    Mip,
}

impl Args {
    fn options(&self) -> SolveOptions {
        let method = match self.method {
            MethodFlag::Auto => Method::Auto,
            MethodFlag::Mip => Method::Mip,
        };
        SolveOptions { time_limit: self.time_limit_s.map(Seconds), method, ..SolveOptions::default() }
    }
}

/// Runs the program.
///
/// With `--json` every verdict of the solver but a failure is a result (exit status 0); without it, only a plan is.
pub(crate) fn run(args: &Args) -> Result<ExitCode, String> {
    let planned = input::plan(args)?;
    // A model's failure is explained where it is found, with everything HBM holds counted.
    let remedies = if planned.solution.status == Status::Infeasible && planned.why.is_none() {
        explain(&planned.chain, &args.options()).map_err(|e| e.to_string())?
    } else {
        vec![]
    };
    if let (Some(path), Some(schedule)) = (&args.out, &planned.schedule) {
        output::write(path, &schedule.to_json().map_err(|e| e.to_string())?)?;
    }
    if args.json {
        output::print(&(show::json(&planned, &remedies).to_string() + "\n"))?;
        let failed = planned.solution.status == Status::Failed;
        return Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS });
    }
    match planned.solution.status {
        Status::Optimal | Status::Feasible => {
            output::print(&show::text(&planned, output::colours()))?;
            Ok(ExitCode::SUCCESS)
        }
        _ => Err(show::refusal(&planned, &remedies)),
    }
}
