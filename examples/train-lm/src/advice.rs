//! What would make the next steps shorter: the same plan made on what was measured, more of a tier, a faster link or optimizer.

use std::fmt;

use lazy_model::timeline::LinkRates;
use lazy_model::{Bytes, BytesPerSecond, Schedule, Seconds, StepProblem, Tier};
use lazy_solver::SolveOptions;
use lazy_solver::step::{StepOptions, solve_step};

/// Most time for one change: whoever waits for a run to end does not wait for long.
const PATIENCE: Seconds = Seconds(2.0);
/// Boundaries that more of a tier holds at least.
const BOUNDARIES: u64 = 4;
/// A change that saves less than this share of a step is none.
const WORTH: f64 = 0.005;
/// How much faster a link or the optimizer is thought to be.
const FASTER: f64 = 2.0;

/// One change, and what a step takes with it.
struct Change {
    what: What,
    step: Seconds,
}

enum What {
    /// The plan made again.
    Plan,
    More(Tier, Bytes),
    Link(&'static str),
    Optimizer,
}

/// Sentences, what saves most first. `problem` has the costs that were measured, and the caps that the run was given; `schedule` is what it ran.
pub fn advice(problem: &StepProblem, schedule: &Schedule) -> Vec<String> {
    let Ok(now) = problem.verify(schedule) else { return Vec::new() };
    let now = now.promise.step_s;
    let mut changes = Vec::new();
    // What the plan made again saves is no merit of more memory.
    let best = solved(problem).filter(|again| *again < now).unwrap_or(now);
    if best < now {
        changes.push(Change { what: What::Plan, step: best });
    }
    let more = notch(problem);
    for tier in Tier::ALL {
        let mut larger = problem.clone();
        *larger.budgets.get_mut(tier) += more;
        let step = solved(&larger).map(|step| Seconds(step.get() + (now - best).get()));
        changes.extend(step.map(|step| Change { what: What::More(tier, more), step }));
    }
    for (name, speed_up) in LINKS {
        let mut faster = problem.clone();
        speed_up(&mut faster.costs.links);
        // The plan as it is: a faster link alone moves no boundary.
        let step = faster.verify(schedule).map(|verified| verified.promise.step_s);
        changes.extend(step.ok().map(|step| Change { what: What::Link(name), step }));
    }
    let mut faster = problem.clone();
    faster.optimizer = Seconds(problem.optimizer.get() / FASTER);
    if let Some(beside) = &mut faster.beside_backward {
        beside.commit = Seconds(beside.commit.get() / FASTER);
    }
    let step = faster.verify(schedule).map(|verified| verified.promise.step_s);
    changes.extend(step.ok().map(|step| Change { what: What::Optimizer, step }));

    let saves = |change: &Change| (now - change.step).get();
    changes.retain(|change| saves(change) > WORTH * now.get());
    changes.sort_by(|a, b| saves(b).total_cmp(&saves(a)));
    if changes.is_empty() {
        return vec![format!(
            "Arithmetic is what is left: neither {more} more of a tier nor a link or an optimizer twice as fast saves {} % of a step.",
            100.0 * WORTH
        )];
    }
    changes.iter().map(|c| format!("{} saves {} a step.", c.what, Seconds(saves(c)))).collect()
}

fn solved(problem: &StepProblem) -> Option<Seconds> {
    let solve = SolveOptions { time_limit: Some(PATIENCE), ..SolveOptions::default() };
    let found = solve_step(problem, &StepOptions { solve, ..StepOptions::default() }).ok()?;
    Some(found.verified.promise.step_s)
}

/// A round size that holds a few boundaries, or the internals of a layer.
fn notch(problem: &StepProblem) -> Bytes {
    let largest = |sizes: &[Bytes]| sizes.iter().copied().max().unwrap_or_default();
    let least = (largest(&problem.boundary_bytes) * BOUNDARIES).max(largest(&problem.saved_bytes));
    Bytes(least.get().checked_next_power_of_two().unwrap_or(u64::MAX / 4))
}

type SpeedUp = fn(&mut LinkRates);

const LINKS: [(&str, SpeedUp); 4] = [
    ("the rate of copies to host RAM", |links| {
        links.d2h = twice(links.d2h);
        links.contention.d2h_both = links.contention.d2h_both.map(twice);
    }),
    ("the rate of copies from host RAM", |links| {
        links.h2d = twice(links.h2d);
        links.contention.h2d_both = links.contention.h2d_both.map(twice);
    }),
    ("the rate of NVMe writes", |links| links.nvme_write = twice(links.nvme_write)),
    ("the rate of NVMe reads", |links| links.nvme_read = twice(links.nvme_read)),
];

fn twice(rate: BytesPerSecond) -> BytesPerSecond {
    BytesPerSecond(rate.get() * FASTER)
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::Plan => f.write_str("Planning again with the corrected profile (--profile)"),
            What::More(Tier::Hbm, more) => write!(f, "{more} more HBM"),
            What::More(Tier::Host, more) => write!(f, "{more} more host RAM"),
            What::More(Tier::Nvme, more) => write!(f, "{more} more on NVMe"),
            What::Link(link) => write!(f, "Twice {link}"),
            What::Optimizer => f.write_str("Twice the optimizer's rate"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lazy_model::timeline::StepCosts;
    use lazy_model::{Streamed, TierBytes, Workspaces};

    const MIB: Bytes = Bytes::from_mib(1);

    /// Eight layers of 10 ms forward, 20 ms backward; boundaries of 1 MiB; internals that never fit.
    fn problem(hbm: u64, host: u64, rate: f64) -> StepProblem {
        let (rate, ms) = (BytesPerSecond(rate), Seconds::from_ms);
        StepProblem {
            boundary_bytes: vec![MIB; 9],
            saved_bytes: vec![MIB * 4; 8],
            workspaces: Workspaces::default(),
            streamed: Streamed::default(),
            costs: StepCosts {
                prologue: ms(0.0),
                forward: vec![ms(10.0); 8],
                saving_forward: vec![ms(10.0); 8],
                internals_forward: vec![ms(10.0); 8],
                backward: vec![ms(20.0); 8],
                epilogue: ms(1.0),
                prologue_backward: ms(0.0),
                links: LinkRates {
                    d2h: rate,
                    h2d: rate,
                    nvme_write: rate,
                    nvme_read: rate,
                    ..LinkRates::default()
                },
            },
            micro_batches: 1,
            optimizer: ms(40.0),
            fixed: TierBytes::default(),
            budgets: TierBytes { hbm: MIB * hbm, host: MIB * host, nvme: Bytes::ZERO },
            beside_backward: None,
            max_segment: 4,
        }
    }

    #[test]
    fn what_is_short_is_named_with_what_more_of_it_saves() {
        // Room for a few boundaries, fast links, and hardly any host RAM: others are recomputed at 10 ms each.
        let problem = problem(12, 0, 1e10);
        let found = solve_step(&problem, &StepOptions::default()).unwrap();
        let said = advice(&problem, &found.schedule);
        assert!(
            said.iter()
                .any(|s| s.starts_with("4.000 MiB more host RAM saves") || s.contains("more HBM saves")),
            "{said:?}"
        );
        assert!(said.iter().any(|s| s == "Twice the optimizer's rate saves 20.00 ms a step."), "{said:?}");
        assert!(!said.iter().any(|s| s.contains("Planning again")), "the plan is the best already: {said:?}");
    }

    #[test]
    fn where_all_fits_only_arithmetic_is_left() {
        let mut problem = problem(64, 64, 1e10);
        problem.optimizer = Seconds::ZERO;
        let found = solve_step(&problem, &StepOptions::default()).unwrap();
        let said = advice(&problem, &found.schedule);
        assert!(said.len() == 1 && said[0].starts_with("Arithmetic is what is left"), "{said:?}");
    }

    #[test]
    fn a_plan_made_on_a_wrong_profile_is_made_again() {
        let mut believed = problem(9, 64, 1e10);
        let found = solve_step(&believed, &StepOptions::default()).unwrap();
        // The links are ten thousand times slower than thought: to recompute is better.
        believed.costs.links = problem(9, 64, 1e6).costs.links;
        let said = advice(&believed, &found.schedule);
        assert!(said.iter().any(|s| s.starts_with("Planning again with the corrected profile")), "{said:?}");
    }
}
