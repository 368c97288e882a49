//! The largest batch, sequence or number of layers that fits.

use clap::ValueEnum;
use lazy_model::{Schedule, Seconds};
use lazy_solver::step::{StepFailure, StepOptions};
use lazy_solver::{SolveOptions, Status, any_plan, solve};

use super::args::Args;
use super::plan::{self, Clock, Planned};
use super::problem::{self, Input, Problem};

/// Nobody waits longer for what would make one more fit.
const EXPLAINING: Seconds = Seconds(10.0);

/// What is made as large as fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum MaxFlag {
    Batch,
    Seq,
    Layers,
}

impl MaxFlag {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            MaxFlag::Batch => "batch",
            MaxFlag::Seq => "seq",
            MaxFlag::Layers => "layers",
        }
    }

    fn set(self, args: &Args, value: usize) -> Args {
        let mut args = args.clone();
        let flag = match self {
            MaxFlag::Batch => &mut args.batch,
            MaxFlag::Seq => &mut args.seq,
            MaxFlag::Layers => &mut args.layers,
        };
        *flag = Some(value);
        args
    }
}

/// What is known of the value after the largest that fits.
pub(crate) enum Next {
    /// It does not fit, and this is why.
    Refused(Box<Planned>),
    /// It may fit: the time limit came first.
    Unknown,
    /// No model or workload of that size is supported.
    Unsupported(String),
}

/// The largest value that fits.
pub(crate) struct Max {
    pub(crate) flag: MaxFlag,
    /// Zero: not even one fits.
    pub(crate) value: usize,
    pub(crate) next: Next,
}

/// Searches, and plans with the value found, or with one where not even that fits.
pub(crate) fn find(args: &Args, flag: MaxFlag, clock: &Clock) -> Result<(Planned, Max), String> {
    if let (MaxFlag::Batch, Some(_), _, _)
    | (MaxFlag::Seq, _, Some(_), _)
    | (MaxFlag::Layers, _, _, Some(_)) = (flag, args.batch, args.seq, args.layers)
    {
        return Err(format!("--max {0} looks for it: leave out --{0}", flag.name()));
    }
    // What is wrong with other flags is wrong with one, too.
    let least = read(&flag.set(args, 1))?;
    let options = args.options();
    let mut unsupported = None;
    // Of the largest value that fits so far.
    let mut known = Vec::new();
    let (value, next) = largest(|value| match read(&flag.set(args, value)) {
        Ok(problem) => fits(&problem, &clock.half(&options), &mut known),
        Err(message) => {
            unsupported = Some((value, message));
            Some(false)
        }
    });
    let problem = if value > 1 { read(&flag.set(args, value))? } else { least };
    let planned = plan::make(problem, &clock.left(&options), clock, &known)?;
    let found = planned.solution.placement.is_some();
    // Where time ended the search for one, planning it may have had enough.
    let value = if found { value.max(1) } else { value };
    let next = match (next, unsupported) {
        (None, _) => Next::Unknown,
        (Some(next), Some((at, message))) if at == next => Next::Unsupported(message),
        (Some(next), _) => {
            let mut options = clock.left(&options);
            options.time_limit =
                options.time_limit.map(|left| if left < EXPLAINING { left } else { EXPLAINING });
            let clock = Clock::start(&options);
            let refused = plan::make(read(&flag.set(args, next))?, &options, &clock, &[])?;
            if refused.solution.status == Status::Infeasible {
                Next::Refused(Box::new(refused))
            } else {
                Next::Unknown
            }
        }
    };
    Ok((planned, Max { flag, value, next }))
}

fn read(args: &Args) -> Result<Problem, String> {
    match problem::read(args)? {
        Input::Problem(problem) => Ok(*problem),
        Input::Sizes(_) => {
            Err("--max needs a machine or budgets to fit into: give --machine or the reference flags".into())
        }
    }
}

/// Whether there is a plan, which is `known` then; `None` where nobody can tell in time.
fn fits(problem: &Problem, options: &SolveOptions, known: &mut Vec<Schedule>) -> Option<bool> {
    match &problem.step {
        Some(step) => match any_plan(step, &StepOptions { solve: *options, ..StepOptions::default() }) {
            Ok(plan) => {
                *known = vec![plan];
                Some(true)
            }
            Err(StepFailure::NoIncumbent | StepFailure::Failed(_)) => None,
            Err(_) => Some(false),
        },
        None => match solve(&problem.chain, options).ok()?.status {
            Status::Optimal | Status::Feasible => Some(true),
            Status::Infeasible => Some(false),
            Status::NoIncumbent | Status::Failed => None,
        },
    }
}

/// The largest whole number that fits, zero where one does not, and the number after it if that is known not to. What does not fit does not
/// fit where there is more of it.
fn largest(mut fits: impl FnMut(usize) -> Option<bool>) -> (usize, Option<usize>) {
    let (mut fit, mut over) = (0usize, 1usize);
    let mut known = loop {
        match fits(over) {
            Some(true) => (fit, over) = (over, over.saturating_mul(2)),
            other => break other.map(|_| over),
        }
    };
    while over - fit > 1 {
        let middle = fit + (over - fit) / 2;
        match fits(middle) {
            Some(true) => fit = middle,
            other => (over, known) = (middle, other.map(|_| middle)),
        }
    }
    (fit, known.filter(|next| *next == fit + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_that_fits_is_found() {
        for most in [0, 1, 2, 3, 7, 8, 100, 12_345] {
            let mut asked = 0;
            let found = largest(|value| {
                asked += 1;
                Some(value <= most)
            });
            assert_eq!(found, (most, Some(most + 1)));
            assert!(asked <= 30, "{asked}");
        }
        // From some size on nobody can tell: the last that is known to fit.
        assert_eq!(largest(|value| (value <= 20).then_some(true)), (20, None));
        assert_eq!(largest(|_| None), (0, None));
    }
}
