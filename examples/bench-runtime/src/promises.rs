//! Plans of random chains, carried out at set bandwidths: promised and measured step time, and time exposed by links that the plan says
//! expose none.

use std::path::Path;

use lazy_model::schedule::ExposedSeconds;
use lazy_model::timeline::Timeline;
use lazy_model::{Bytes, Lane, Seconds, Span, TierBytes, Verified};
use lazy_runtime::{Executor, Program, Step, StepReport};
use lazy_solver::SolveOptions;
use lazy_solver::step::{StepOptions, solve_step};
use lazy_store::{LinkLimits, StoreOptions};
use serde_json::{Value, json};

use crate::Outcome;
use crate::problem::{Drawn, problem};

/// A step may take this share more or less than promised.
const STEP: f64 = 0.05;
/// Share of a link's transfer time that may be exposed where the plan says that none is.
const EXPOSED: f64 = 0.1;
/// Read-ahead distances that are shown beside the planned one.
const DISTANCES: [usize; 4] = [0, 1, 2, 4];
/// Plans that take turns.
const TOGETHER: usize = 5;
/// Most time for a chain's plan.
const SOLVING: Seconds = Seconds(2.0);
/// A budget that nothing here exceeds.
const ENOUGH: Bytes = Bytes::from_mib(4096);
/// Exposed time that is none, in seconds: the rounding of sums.
const NOTHING: f64 = 1e-6;
const LINKS: [Lane; 4] = [Lane::D2h, Lane::H2d, Lane::NvmeWrite, Lane::NvmeRead];

/// How much is measured.
pub(crate) struct Amount {
    /// Chains of the table.
    pub(crate) chains: usize,
    /// Chains that are shown with read-ahead distances, too.
    pub(crate) distances: usize,
    /// Steps of each plan, after one that touches the memory.
    pub(crate) steps: usize,
    /// First number of a chain.
    pub(crate) first: u64,
}

/// A plan and how it is told from others.
struct Case {
    name: String,
    drawn: Drawn,
    verified: Verified,
}

/// A plan being carried out.
struct Running<'a> {
    case: &'a Case,
    executor: Executor,
    program: Program,
    reports: Vec<StepReport>,
}

/// The rows of all chains: the table, then the read-ahead distances.
pub(crate) fn rows(dir: &Path, amount: &Amount) -> Outcome<Vec<Value>> {
    let planned = cases(amount.first, amount.chains, &[])?;
    let mut rows = table(dir, amount, &planned)?;
    for group in cases(amount.first, amount.distances, &DISTANCES)?.chunks(DISTANCES.len() + 1) {
        for run in measure(dir, amount.steps, group)? {
            rows.extend(run.rows());
        }
    }
    Ok(rows)
}

/// The rows of solved plans, then what they come to.
fn table(dir: &Path, amount: &Amount, planned: &[Case]) -> Outcome<Vec<Value>> {
    let mut rows = Vec::new();
    if planned.is_empty() {
        return Ok(rows);
    }
    let (mut steps, mut shares) = (Vec::new(), Vec::new());
    for group in planned.chunks(TOGETHER) {
        for run in measure(dir, amount.steps, group)? {
            rows.extend(run.rows());
            steps.push(run.ratio());
            shares.extend(run.exposed_share());
        }
    }
    let far = |ratio: f64| (ratio - 1.0).abs();
    let worst_step = steps.iter().copied().max_by(|a, b| far(*a).total_cmp(&far(*b))).unwrap_or(1.0);
    let worst_share = shares.iter().copied().fold(0.0, f64::max);
    let within = steps.iter().filter(|ratio| far(**ratio) <= STEP).count();
    let hidden = shares.iter().filter(|share| **share <= EXPOSED).count();
    let of = |what: &str, good: usize, all: usize| {
        number(what, good as f64, "chains", Some((all as f64, good == all)))
    };
    rows.push(of("step within 5 % of the promise", within, steps.len()));
    rows.push(number("step, ratio farthest from 1", worst_step, "x", None));
    rows.push(of("at most 10 % exposed where the plan says 0", hidden, shares.len()));
    rows.push(number("largest share exposed where the plan says 0", 100.0 * worst_share, "%", None));
    let busiest = sorted(planned.iter().map(Case::busiest));
    let mut row =
        number("busiest link's share of a planned step, median", 100.0 * median(&busiest), "%", None);
    row["spread"] = json!([busiest.first(), busiest.last()].map(|share| share.map(|share| 100.0 * share)));
    rows.push(row);
    Ok(rows)
}

/// A row without a peer.
fn number(name: &str, value: f64, unit: &str, goal: Option<(f64, bool)>) -> Value {
    json!({
        "row": name, "value": value, "unit": unit, "against": null, "against_value": null, "ratio": null,
        "target": goal.map(|goal| goal.0), "met": goal.map(|goal| goal.1),
    })
}

/// Plans of the first `count` chains from number `first` on that move anything: as they were solved, or with `distances` each followed by the
/// same placement at read-ahead distances, whatever HBM that takes.
fn cases(first: u64, count: usize, distances: &[usize]) -> Outcome<Vec<Case>> {
    let mut cases = Vec::new();
    let mut chains = 0;
    for seed in first.. {
        if chains == count {
            break;
        }
        let drawn = problem(seed)?;
        let solve = SolveOptions { time_limit: Some(SOLVING), ..SolveOptions::default() };
        // A budget under which nothing fits is no case.
        let Ok(found) = solve_step(&drawn.problem, &StepOptions { solve, ..StepOptions::default() }) else {
            continue;
        };
        let counts = found.schedule.counts();
        if counts.host + counts.nvme < if distances.is_empty() { 1 } else { 2 } {
            continue;
        }
        chains += 1;
        let keep: String = found.schedule.keep.iter().map(|&k| if k { 'K' } else { '.' }).collect();
        let name = format!("chain {seed} {} {keep}", found.schedule.placement_letters());
        for &distance in distances {
            let mut schedule = found.schedule.clone();
            (schedule.transfers, schedule.execution.prefetch) = (None, distance);
            let mut roomy = drawn.problem.clone();
            roomy.budgets = TierBytes { hbm: ENOUGH, host: ENOUGH, nvme: ENOUGH };
            let verified = roomy.verify(&schedule)?;
            let name = format!("{name}, read-ahead {distance}");
            cases.push(Case { name, drawn: drawn.clone(), verified });
        }
        cases.push(Case { name, drawn, verified: found.verified });
    }
    Ok(cases)
}

/// Carries plans out in turns: one step of each that touches all memory, then `steps` that count.
fn measure<'a>(dir: &Path, steps: usize, cases: &'a [Case]) -> Outcome<Vec<Running<'a>>> {
    let mut running = cases.iter().map(|case| Running::new(dir, case)).collect::<Outcome<Vec<_>>>()?;
    for step in 0..=steps as u64 {
        for run in &mut running {
            let report = run.executor.run(&mut run.program, &Step { step, ..Step::default() })?;
            if step > 0 {
                run.reports.push(report);
            }
        }
    }
    Ok(running)
}

impl Case {
    /// Share of the planned time in which the busiest link moves something.
    fn busiest(&self) -> f64 {
        let timeline = &self.verified.timeline;
        let busy = LINKS.map(|lane| busy(timeline, lane).get());
        busy.into_iter().fold(0.0, f64::max) / timeline.total().get()
    }
}

impl<'a> Running<'a> {
    fn new(dir: &Path, case: &'a Case) -> Outcome<Running<'a>> {
        let model = case.drawn.model()?;
        let plan = case.verified.plan.clone();
        let links = case.drawn.problem.costs.links;
        let limits = LinkLimits {
            h2d: Some(links.h2d),
            d2h: Some(links.d2h),
            nvme_write: Some(links.nvme_write),
            nvme_read: Some(links.nvme_read),
        };
        let options = StoreOptions { limits, ..model.store_options(&plan, dir) };
        let (executor, program) = Executor::open(model, plan, options)?;
        Ok(Running { case, executor, program, reports: Vec::new() })
    }

    fn promised(&self) -> f64 {
        self.case.verified.promise.step_s.as_ms()
    }

    fn steps(&self) -> Vec<f64> {
        sorted(self.reports.iter().map(|report| report.total().as_ms()))
    }

    fn ratio(&self) -> f64 {
        median(&self.steps()) / self.promised()
    }

    /// Time exposed by all links, in milliseconds.
    fn exposed(&self) -> f64 {
        median(&sorted(self.reports.iter().map(|report| report.exposed.total().as_ms())))
    }

    /// Time exposed by links that the plan says expose nothing, relative to the time they are busy; nothing where there are none.
    fn exposed_share(&self) -> Option<f64> {
        let promised = &self.case.verified.promise.exposed_s;
        let silent = LINKS.into_iter().filter(|&lane| of(promised, lane).get() < NOTHING);
        let silent: Vec<Lane> = silent.collect();
        let shares = self.reports.iter().map(|report| {
            let exposed: Seconds = silent.iter().map(|&lane| of(&report.exposed, lane)).sum();
            let busy: Seconds = silent.iter().map(|&lane| busy(&report.timeline, lane)).sum();
            exposed.get() / busy.get()
        });
        let shares = sorted(shares.filter(|share| share.is_finite()));
        (!shares.is_empty()).then(|| median(&shares))
    }

    fn rows(&self) -> Vec<Value> {
        let (steps, promised, ratio) = (self.steps(), self.promised(), self.ratio());
        let hbm = self.case.verified.promise.peak_bytes.hbm;
        let mut rows = vec![json!({
            "row": format!("{}: step, {:.1} MiB of HBM", self.case.name, hbm.as_mib()), "value": median(&steps), "unit": "ms",
            "spread": [steps.first(), steps.last()], "against": "promised", "against_value": promised,
            "ratio": ratio, "target": 1.0 + STEP, "met": (ratio - 1.0).abs() <= STEP, "at_most": true,
        })];
        let (exposed, promised) = (self.exposed(), self.case.verified.promise.exposed_s.total().as_ms());
        if promised > NOTHING {
            rows.push(json!({
                "row": format!("{}: all that is exposed", self.case.name), "value": exposed, "unit": "ms",
                "against": "promised", "against_value": promised, "ratio": exposed / promised,
                "target": null, "met": null,
            }));
        }
        if let Some(share) = self.exposed_share() {
            let goal = Some((100.0 * EXPOSED, share <= EXPOSED));
            rows.push(number(
                &format!("{}: exposed where the plan says 0", self.case.name),
                100.0 * share,
                "%",
                goal,
            ));
        }
        if std::env::var_os("X").is_some()
            || (ratio - 1.0).abs() > STEP
            || self.exposed_share().is_some_and(|share| share > EXPOSED)
        {
            self.explain();
        }
        rows
    }

    /// What the median step of a row that misses spent where, on standard error.
    fn explain(&self) {
        let Some(report) = self.reports.iter().min_by(|a, b| a.total().get().total_cmp(&b.total().get()))
        else {
            return;
        };
        let resident = self.executor.model().resident();
        let comparison = report.compare(&self.case.verified, resident);
        eprintln!("{}\n{comparison}", self.case.name);
        for wait in report.waits.iter().take(5) {
            eprintln!("    waited {:.3} ms for {} on {}", wait.time.as_ms(), wait.name, wait.lane);
        }
    }
}

/// Time in which a link moves something.
fn busy(timeline: &Timeline, lane: Lane) -> Seconds {
    timeline.spans.iter().filter(|span| span.lane == lane).map(Span::duration).sum()
}

fn of(exposed: &ExposedSeconds, lane: Lane) -> Seconds {
    match lane {
        Lane::D2h => exposed.d2h,
        Lane::H2d => exposed.h2d,
        Lane::NvmeWrite => exposed.nvme_write,
        Lane::NvmeRead => exposed.nvme_read,
        Lane::Compute | Lane::Optimizer => Seconds::ZERO,
    }
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The middle one, of an odd number.
fn median(sorted: &[f64]) -> f64 {
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}
