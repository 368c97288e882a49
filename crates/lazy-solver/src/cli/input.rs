//! From files and flags to a solved plan.

use std::fs;
use std::path::Path;

use lazy_model::problem::StepProblem;
use lazy_model::schedule::Promise;
use lazy_model::step::TierBytes;
use lazy_model::{
    CostChain, HardwareProfile, ModelSpec, Schedule, Seconds, Tier, Training, VerifyError, Workload,
};
use lazy_solver::step::{StepFailure, StepOptions, solve_step};
use lazy_solver::{Method, Solution, Status, solve};

use super::Args;

/// A solved chain and what belongs to it.
pub(crate) struct Planned {
    pub(crate) chain: CostChain,
    pub(crate) solution: Solution,
    /// Present with a placement.
    pub(crate) schedule: Option<Schedule>,
    /// Present where the layers' times are known and the plan keeps every budget.
    pub(crate) promise: Option<Promise>,
    /// What each tier may hold.
    pub(crate) budgets: TierBytes,
    /// Why a model has no plan, where it has none.
    pub(crate) why: Option<String>,
}

impl Planned {
    /// What the byte column of the table means.
    pub(crate) fn peak_title(&self) -> &'static str {
        if self.promise.is_some() { "peak" } else { "bytes" }
    }
}

pub(crate) fn plan(args: &Args) -> Result<Planned, String> {
    match (&args.chain, &args.model) {
        (Some(path), _) => plan_chain(args, path),
        (None, Some(path)) => plan_model(args, path),
        (None, None) => Err("give --chain FILE or --model FILE".into()),
    }
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))
}

fn plan_chain(args: &Args, path: &Path) -> Result<Planned, String> {
    if !args.budgets.is_empty() {
        return Err("a chain brings its own budgets and rates: leave out --profile and the size flags, or change the file".into());
    }
    let chain = CostChain::from_json(&read(path)?).map_err(|e| format!("{}: {e}", path.display()))?;
    let solution = solve(&chain, &args.options()).map_err(|e| e.to_string())?;
    let schedule = solution.schedule(&chain);
    let budgets = TierBytes {
        hbm: chain.gpu_budget_bytes,
        host: chain.cpu_budget_bytes,
        nvme: chain.nvme_budget_bytes,
    };
    Ok(Planned { chain, solution, schedule, promise: None, budgets, why: None })
}

fn plan_model(args: &Args, path: &Path) -> Result<Planned, String> {
    let problem = step_problem(args, path)?;
    let options = StepOptions { solve: args.options(), prefetch: None };
    let (status, message) = match solve_step(&problem, &options) {
        Ok(found) => {
            return Ok(Planned {
                chain: found.chain,
                solution: found.solution,
                promise: found.schedule.promise,
                schedule: Some(found.schedule),
                budgets: problem.budgets,
                why: None,
            });
        }
        Err(StepFailure::NoIncumbent) => (Status::NoIncumbent, None),
        Err(StepFailure::Failed(reason)) => (Status::Failed, Some(reason)),
        Err(
            e @ (StepFailure::Fixed { .. }
            | StepFailure::Infeasible { .. }
            | StepFailure::Verify(VerifyError::OverBudget { .. })),
        ) => (Status::Infeasible, Some(e.to_string())),
        Err(e) => return Err(e.to_string()),
    };
    Ok(Planned {
        chain: problem.chain(problem.budgets),
        solution: Solution {
            status,
            placement: None,
            keep: None,
            evaluation: None,
            objective_ms: None,
            bound_ms: None,
            gap: None,
            solve: Seconds::ZERO,
            method: Method::Mip,
            message: message.clone(),
        },
        schedule: None,
        promise: None,
        budgets: problem.budgets,
        why: message,
    })
}

fn step_problem(args: &Args, path: &Path) -> Result<StepProblem, String> {
    let (Some(batch), Some(seq), Some(profile_path)) = (args.batch, args.seq, &args.budgets.profile) else {
        return Err("--model needs --batch, --seq and --profile".into());
    };
    let model = ModelSpec::from_file(path).map_err(|e| e.to_string())?;
    let work = Workload::new(batch, seq, args.element_bytes).map_err(|e| e.to_string())?;
    let profile = HardwareProfile::from_json(&read(profile_path)?)
        .map_err(|e| format!("{}: {e}", profile_path.display()))?;
    let budget = |tier| {
        args.budgets
            .cap(tier)?
            .or(profile.tiers.get(tier))
            .ok_or_else(|| format!("give --{tier}-mib or --{tier}-gib: the profile has no {tier} capacity"))
    };
    let budgets = TierBytes { hbm: budget(Tier::Hbm)?, host: budget(Tier::Host)?, nvme: budget(Tier::Nvme)? };
    let training = Training { max_segment: args.max_segment_layers, ..Training::default() };
    StepProblem::for_model(&model, &work, &profile, budgets, &training).map_err(|e| e.to_string())
}
