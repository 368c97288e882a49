//! How near the objective's step time comes to the simulated one, over random machines, models and caps.
//!
//!     cargo run --release -p lazy-solver --example promises -- 100
//!
//! With `ranks` in the place of the number, how eight ranks that share a host are planned.

#![allow(clippy::print_stdout, reason = "its output is the measurement")]

use std::error::Error;
use std::time::Instant;

use lazy_model::timeline::{Contention, LinkRates, StepCosts, simulate};
use lazy_model::{
    Bytes, BytesPerSecond, Placement, Schedule, Seconds, StepPlan, StepProblem, Streamed, TierBytes,
    Workspaces,
};
use lazy_solver::SolveOptions;
use lazy_solver::ranks::solve_ranks;
use lazy_solver::step::{Objective, StepOptions, solve_step};

/// A small generator, so that a number names a problem.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low * (high / low).powf(self.next())
    }
}

fn problem(seed: u64) -> StepProblem {
    let mut random = Random(seed);
    let layers = [8, 16, 24, 36, 48, 64][(random.next() * 6.0) as usize];
    let uniform = random.next() < 0.5;
    let boundary = random.between(20e6, 700e6);
    let forward = random.between(2.0, 60.0);
    let ratio = random.between(6.0, 30.0);
    let mut vary = || if uniform { 1.0 } else { random.between(0.6, 1.7) };
    let factors: Vec<f64> = (0..layers).map(|_| vary()).collect();
    let size = |factor: f64| Bytes((boundary * factor) as u64 / 4096 * 4096);
    let saved: Vec<Bytes> = factors.iter().map(|f| size(f * ratio)).collect();
    let times = |factor: f64| factors.iter().map(|f| Seconds::from_ms(forward * f * factor)).collect();
    let gb = |value: f64| BytesPerSecond::from_gb(value);
    let pcie = random.between(1.5, 60.0);
    let links = LinkRates {
        d2h: gb(pcie),
        h2d: gb(pcie * random.between(0.8, 1.1)),
        nvme_write: gb(random.between(0.8, 8.0)),
        nvme_read: gb(random.between(0.8, 8.0)),
        contention: Contention {
            d2h_both: (random.next() < 0.3).then(|| gb(pcie * 0.8)),
            h2d_both: (random.next() < 0.3).then(|| gb(pcie * 0.7)),
            shared: (random.next() < 0.2).then(|| gb(pcie * 1.2)),
        },
    };
    let loss = size(random.between(0.5, 30.0));
    let all: Bytes = saved.iter().copied().sum();
    let workspaces = Workspaces {
        forward: saved.iter().map(|s| Bytes(s.get() / 3)).collect(),
        backward: saved.iter().map(|s| Bytes(s.get() / 4)).collect(),
        loss,
    };
    let mut problem = StepProblem {
        boundary_bytes: vec![size(1.0); layers + 1],
        saved_bytes: saved,
        workspaces,
        streamed: Streamed::default(),
        costs: StepCosts {
            prologue: Seconds::from_ms(0.5),
            forward: times(1.0),
            saving_forward: times(1.05),
            internals_forward: times(0.8),
            backward: times(2.0),
            epilogue: Seconds::from_ms(random.between(2.0, 100.0)),
            prologue_backward: Seconds::from_ms(0.5),
            links,
        },
        micro_batches: 1,
        optimizer: Seconds::ZERO,
        fixed: TierBytes { hbm: Bytes::from_gib(8.0), ..TierBytes::default() },
        budgets: TierBytes::default(),
        beside_backward: None,
        max_segment: 4,
    };
    let boundaries = boundary * layers as f64;
    let least = problem.sizes().least_hbm().get() as f64 + 3.0 * boundary;
    let extra = random.between(0.005, 0.9) * (all.get() as f64 + boundaries);
    problem.budgets = TierBytes {
        hbm: problem.fixed.hbm + Bytes((least + extra) as u64),
        host: Bytes((random.between(0.05, 1.5) * boundaries) as u64),
        nvme: Bytes(if random.next() < 0.5 { 0.0 } else { random.between(0.1, 1.0) * boundaries } as u64),
    };
    problem
}

/// Eight ranks of 64 layers whose host holds eight times what one rank's problem says.
fn ranks() -> Result<(), Box<dyn Error>> {
    for seed in (0..).filter(|&seed| problem(seed).saved_bytes.len() == 64).take(12) {
        let mut host = problem(seed);
        host.budgets.host = host.budgets.host * 8;
        host.budgets.nvme = host.budgets.nvme * 8;
        let links = &mut host.costs.links;
        links.nvme_write.0 *= 8.0;
        links.nvme_read.0 *= 8.0;
        links.contention.shared = links.contention.shared.map(|rate| BytesPerSecond(rate.get() * 8.0));
        let solve = SolveOptions { time_limit: Some(Seconds(10.0)), ..SolveOptions::default() };
        let started = Instant::now();
        match solve_ranks(&host, 8, None, &StepOptions { solve, ..StepOptions::default() }) {
            Ok(found) => println!(
                "{seed:4}  {:?}  step {:.1} ms  bound {:.1} ms  gap {:.4} %  {:.2} s",
                found.each.schedule.counts(),
                found.step.as_ms(),
                found.bound.as_ms(),
                100.0 * found.gap,
                started.elapsed().as_secs_f64()
            ),
            Err(error) => println!("{seed:4}  {error}"),
        }
    }
    Ok(())
}

/// How long the operations and the time line of one plan of 64 layers take.
fn clock_simulation() -> Result<(), Box<dyn Error>> {
    let problem = (0..).map(problem).find(|p| p.saved_bytes.len() == 64).ok_or("no such problem")?;
    let mut schedule = Schedule::named("mixed", &problem.boundary_bytes, false);
    for i in 0..64 {
        let letter = ['C', 'G', 'N', '-'][i % 4];
        schedule.placement[i] = Placement::from_letter(letter).ok_or("no such letter")?;
    }
    let plan = StepPlan::with_sizes(&schedule, &problem.sizes())?;
    let time = |work: &dyn Fn()| {
        let started = Instant::now();
        (0..100).for_each(|_| work());
        started.elapsed().as_secs_f64() * 10.0
    };
    let simulated = time(&|| {
        std::hint::black_box(simulate(&plan, &problem.costs));
    });
    let derived = time(&|| {
        let _ = std::hint::black_box(StepPlan::with_sizes(&schedule, &problem.sizes()));
    });
    println!(
        "64 layers, {} tasks: simulated in {simulated:.3} ms, derived in {derived:.3} ms",
        plan.tasks().count()
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    clock_simulation()?;
    if std::env::args().nth(1).as_deref() == Some("ranks") {
        return ranks();
    }
    let count: u64 = std::env::args().nth(1).map_or(Ok(40), |n| n.parse())?;
    let first: u64 = std::env::args().nth(2).map_or(Ok(0), |n| n.parse())?;
    let (mut far, mut none, mut planned) = (0, 0, 0);
    let mut rounds = [0usize; 8];
    for seed in first..first + count {
        let problem = problem(seed);
        let solve = SolveOptions { time_limit: Some(Seconds(2.0)), ..SolveOptions::default() };
        let started = Instant::now();
        let found = solve_step(&problem, &StepOptions { solve, ..StepOptions::default() });
        let took = started.elapsed().as_secs_f64();
        let reference = solve_step(
            &problem,
            &StepOptions { solve, objective: Objective::Reference, ..StepOptions::default() },
        );
        let other = reference.map_or(f64::NAN, |r| r.verified.promise.step_s.as_ms());
        match found {
            Err(error) => {
                none += 1;
                println!("{seed:4}  no plan ({took:.2} s): {error} [reference {other:.1} ms]");
            }
            Ok(found) => {
                planned += 1;
                let counts = found.schedule.counts();
                let promise = &found.verified.promise;
                let (gap, refinements) =
                    found.schedule.solve.prediction.map_or((f64::NAN, 7), |p| (p.gap, p.refinements));
                rounds[refinements.min(7)] += 1;
                far += usize::from(gap.is_nan() || gap.abs() > 0.03);
                println!(
                    "{seed:4}  N {:2}  G{:2} C{:2} N{:2} -{:2} K{:2}  step {:8.1} ms  exposed {:7.1}  gap {:6.2}%  refinements {refinements}  \
                     hbm {:.3} of {:.3} GiB  {took:.2} s  reference {other:.1}",
                    problem.saved_bytes.len(),
                    counts.hbm,
                    counts.host,
                    counts.nvme,
                    counts.recompute,
                    counts.kept,
                    promise.step_s.as_ms(),
                    promise.exposed_s.total().as_ms(),
                    100.0 * gap,
                    promise.peak_bytes.hbm.as_gib(),
                    problem.budgets.hbm.as_gib(),
                );
            }
        }
    }
    println!(
        "{planned} planned, {none} without a plan, {far} beyond 3 %; by refinements (7: not the physical objective): {rounds:?}"
    );
    Ok(())
}
