//! Flags, and the way from them to a printed plan.

mod args;
mod given;
mod max;
mod models;
mod next;
mod output;
mod plan;
mod problem;
mod reference;
mod show;
mod sweep;

use std::process::ExitCode;

use lazy_model::Seconds;
use lazy_model::perfetto::TraceWriter;
use lazy_solver::Status;

pub(crate) use args::Args;
use args::TrainingArgs;
use given::GivenPlan;
use max::Max;
use next::Change;
use plan::{Clock, Planned};
use problem::{Input, ModelFacts, Problem};
use sweep::Sweep;

/// Runs the program.
///
/// The exit status is 0 for a plan, for sizes and for a sweep, and 1 where there is no plan or an input is refused, with `--json` or
/// without. With it, a problem that has no plan prints its verdict all the same.
pub(crate) fn run(args: &Args) -> Result<ExitCode, String> {
    args.check()?;
    if let Some(sweep) = &args.search.sweep {
        return run_sweep(args, sweep);
    }
    let clock = Clock::start(&args.options());
    if let Some(flag) = args.search.max {
        let (planned, max) = max::find(args, flag, &clock)?;
        return answer(args, &planned, &clock, Some(&max));
    }
    match problem::read(args)? {
        Input::Sizes(facts) => sizes(args, &facts),
        Input::Problem(problem) => answer(args, &planned(args, *problem, &clock)?, &clock, None),
    }
}

/// Writes files and prints what was found.
fn answer(args: &Args, planned: &Planned, clock: &Clock, max: Option<&Max>) -> Result<ExitCode, String> {
    let wanted = !args.output.json || args.output.next_change || args.output.report.is_some();
    let changes = if wanted { next::changes(planned, &args.options(), clock) } else { vec![] };
    write_files(args, planned, &changes)?;
    let found = matches!(planned.solution.status, Status::Optimal | Status::Feasible);
    if args.output.json {
        let shown = args.output.next_change.then_some(&changes[..]);
        let mut object = show::json::plan(planned, shown);
        if let Some(max) = max {
            object["max"] = show::json::max(max);
        }
        output::print(&(object.to_string() + "\n"))?;
    } else if found {
        let head = max.map(show::text::max).unwrap_or_default();
        output::print(&(head + &show::text::plan(planned, &changes, output::colours())))?;
    } else {
        let head = max.map(|max| format!("--max {0}: not even {0} 1 fits: ", max.flag.name()));
        return Err(head.unwrap_or_default() + &show::refusal(planned));
    }
    Ok(if found { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn planned(args: &Args, problem: Problem, clock: &Clock) -> Result<Planned, String> {
    match &args.search.evaluate {
        Some(given) => plan::judge(problem, GivenPlan::read(given, args.search.keep.as_deref())?),
        None => plan::make(problem, &args.options(), clock, &[]),
    }
}

/// Whatever was asked for, once there is a plan; texts are made before the first file is written.
fn write_files(args: &Args, planned: &Planned, changes: &[Change]) -> Result<(), String> {
    let mut files = Vec::new();
    if let Some(path) = &args.output.chain_out {
        files.push(("--chain-out", path, planned.problem.chain.to_json() + "\n"));
    }
    if let (Some(path), Some(schedule)) = (&args.output.out, &planned.schedule) {
        files.push(("--out", path, schedule.to_json().map_err(|e| e.to_string())?));
    }
    if let Some(path) = &args.output.trace {
        if planned.problem.step.is_none() {
            return Err("--trace: only the physical objective simulates a step: give --model and --machine without reference flags".into());
        }
        if let Some(verified) = &planned.verified {
            let spans = &verified.timeline.spans;
            let bytes = TraceWriter::new(Vec::new(), &planned.problem.name)
                .and_then(|mut trace| trace.step(0, Seconds::ZERO, spans).and_then(|()| trace.finish()))
                .map_err(|e| e.to_string())?;
            files.push(("--trace", path, String::from_utf8_lossy(&bytes).into_owned()));
        }
    }
    if let (Some(path), Some(_)) = (&args.output.report, &planned.solution.placement) {
        files.push(("--report", path, show::html::page(planned, changes)));
    }
    files.into_iter().try_for_each(|(flag, path, text)| output::write(flag, path, &text))
}

fn sizes(args: &Args, facts: &ModelFacts) -> Result<ExitCode, String> {
    if args.search.evaluate.is_some() {
        return Err("--evaluate needs a machine or budgets: give --machine, or --hbm-activation-gib and --layer-recompute-ms".into());
    }
    if let Some((flag, _)) = args.output.files().first() {
        return Err(format!(
            "{flag}: a model alone is sized, and there is no plan to write; give --machine too"
        ));
    }
    if args.training != TrainingArgs::default() {
        return Err(
            "--micro-batches and the other flags under Training need a machine: give --machine too".into()
        );
    }
    let text =
        if args.output.json { show::json::sizes(facts).to_string() + "\n" } else { show::text::sizes(facts) };
    output::print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// One plan a value, each with the whole time limit. Rows of the table are printed in the order given, as soon as they are known.
fn run_sweep(args: &Args, sweep: &Sweep) -> Result<ExitCode, String> {
    let problems = sweep_problems(args, sweep)?;
    let json = args.output.json;
    if !json {
        output::print(&show::text::sweep_head(sweep.flag, &problems))?;
    }
    let (mut objects, mut refusals, mut failed) = (Vec::new(), String::new(), false);
    let mut row = |value: f64, planned: &Planned| -> Result<(), String> {
        failed |= planned.solution.status == Status::Failed;
        if json {
            objects.push(show::json::of_sweep(sweep.flag, value, planned));
            return Ok(());
        }
        output::print(&show::text::sweep_row(value, planned))?;
        if planned.solution.evaluation.is_none() {
            let value = show::number(value);
            refusals += &format!("\n{}={value}: {}\n", sweep.flag, show::refusal(planned));
        }
        Ok(())
    };
    // From the smallest value up: a plan for less is allowed where there is more, so no row is worse than one of a smaller value.
    let (values, mut waiting): (Vec<f64>, Vec<Option<Problem>>) =
        problems.into_iter().map(|(value, problem)| (value, Some(problem))).unzip();
    let mut upwards: Vec<usize> = (0..values.len()).collect();
    upwards.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut done: Vec<Option<Planned>> = values.iter().map(|_| None).collect();
    let (mut known, mut shown) = (Vec::new(), 0);
    for at in upwards {
        let Some(problem) = waiting[at].take() else { continue };
        let clock = Clock::start(&args.options());
        let planned = plan::make(problem, &args.options(), &clock, &known)
            .map_err(|e| at_value(sweep, values[at], &e))?;
        if let Some(schedule) = &planned.schedule {
            known = vec![schedule.clone()];
        }
        done[at] = Some(planned);
        while let Some(planned) = done.get_mut(shown).and_then(Option::take) {
            row(values[shown], &planned)?;
            shown += 1;
        }
    }
    output::print(&if json { serde_json::Value::from(objects).to_string() + "\n" } else { refusals })?;
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// The problem of each value; one that cannot be read is refused before the first is planned.
fn sweep_problems(args: &Args, sweep: &Sweep) -> Result<Vec<(f64, Problem)>, String> {
    let read = |(value, args): (f64, Args)| match problem::read(&args) {
        Ok(Input::Problem(problem)) => Ok((value, *problem)),
        Ok(Input::Sizes(_)) => {
            Err("--sweep needs a machine or budgets to plan for: give --machine or the reference flags"
                .into())
        }
        Err(e) => Err(at_value(sweep, value, &e)),
    };
    sweep.each(args)?.into_iter().map(read).collect()
}

fn at_value(sweep: &Sweep, value: f64, error: &str) -> String {
    format!("--sweep {}={}: {error}", sweep.flag, show::number(value))
}
