//! Rows beside the placement of cost chains: chains that keep internals, ranks, simulation, configs.

use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::time::Instant;

use lazy_model::reference::Mandatory;
use lazy_model::timeline::{LinkRates, StepCosts, simulate};
use lazy_model::{
    Bytes, BytesPerSecond, ModelSpec, Placement, ReferenceSettings, Schedule, Seconds, StepPlan, StepProblem,
    Streamed, TierBytes, Workload, Workspaces,
};
use lazy_solver::ranks::solve_ranks;
use lazy_solver::step::StepOptions;
use lazy_solver::{Method, SolveOptions, Status};
use serde_json::Value;

use crate::keep_chains::{CAPS_GB, KINDS, chain};
use crate::{Outcome, row, solved};

/// Seconds within which a keep chain should be proven, and in which eight ranks should be planned; gap allowed to these (%).
const KEEP: f64 = 3.0;
/// Share of keep chains to be proven in that time (%).
const PROVEN_KEEP: f64 = 95.0;
const RANKS: f64 = 10.0;
const RANKS_GAP: f64 = 0.1;
/// Goals for one simulation and for one config (ms).
const SIMULATION: f64 = 1.0;
const CONFIG: f64 = 5.0;
/// Timings of what takes less than a few ms.
const REPEATS: usize = 101;

/// For each cap, how many chains of 64 layers are proven in time; of each kind every `stride`-th seed is run.
pub(crate) fn keep_rows(stride: usize) -> Outcome<Vec<Value>> {
    let mut rows = Vec::new();
    for cap in CAPS_GB {
        let (mut proven, mut count, mut widest) = (0, 0, 0.0);
        let mut times = Vec::new();
        for (kind, name, seeds) in KINDS {
            for seed in (0..seeds).step_by(stride.max(1)) {
                let chain = chain(kind, 64, cap, seed).map_err(|error| error.to_string())?;
                let found = solved(&chain, Method::Auto, Some(KEEP))?;
                count += 1;
                times.push(found.solve.get());
                if matches!(found.status, Status::Optimal | Status::Infeasible) {
                    proven += 1;
                    continue;
                }
                eprintln!(
                    "bench solver: {name}, {cap} GB, seed {seed}: {} {:?}",
                    found.status.name(),
                    found.gap
                );
                widest = f64::max(widest, found.gap.map_or(100.0, |gap| gap * 100.0));
            }
        }
        let share = 100.0 * f64::from(proven) / f64::from(count);
        let name = format!("64 layers with keep, {cap} GB");
        rows.push(row(&format!("{name}: median time of {count}"), median(&mut times), "s", None));
        rows.push(row(
            &format!("{name}: proven within {KEEP} s"),
            share,
            "%",
            Some((PROVEN_KEEP, share >= PROVEN_KEEP)),
        ));
        rows.push(row(&format!("{name}: widest gap of the rest"), widest, "%", None));
    }
    Ok(rows)
}

/// A step of 64 uneven layers, with room for a third of its internals.
fn step() -> StepProblem {
    let factor = |l: usize| 0.7 + (l * 37 % 64) as f64 / 100.0;
    let bytes = |size: f64| Bytes(size as u64 / 4096 * 4096);
    let times = |ms: f64| (0..64).map(|l| Seconds::from_ms(ms * factor(l))).collect::<Vec<_>>();
    let sizes = |size: f64| (0..64).map(|l| bytes(size * factor(l))).collect::<Vec<_>>();
    let pcie = BytesPerSecond::from_gb(24.0);
    let drive = BytesPerSecond::from_gb(5.0);
    StepProblem {
        boundary_bytes: vec![bytes(84e6); 65],
        saved_bytes: sizes(1.4e9),
        workspaces: Workspaces { forward: sizes(4e8), backward: sizes(4e8), loss: bytes(2e9) },
        streamed: Streamed::default(),
        costs: StepCosts {
            prologue: Seconds::ZERO,
            forward: times(8.0),
            saving_forward: times(8.4),
            internals_forward: times(8.4),
            backward: times(16.0),
            epilogue: Seconds::from_ms(20.0),
            prologue_backward: Seconds::ZERO,
            links: LinkRates {
                d2h: pcie,
                h2d: pcie,
                nvme_write: drive,
                nvme_read: drive,
                ..LinkRates::default()
            },
        },
        micro_batches: 1,
        optimizer: Seconds::ZERO,
        fixed: TierBytes::default(),
        budgets: TierBytes { hbm: bytes(34e9), host: bytes(3e9), nvme: Bytes::ZERO },
        beside_backward: None,
        max_segment: 4,
    }
}

/// One simulation of 64 layers with all tiers in use.
pub(crate) fn simulation_row() -> Outcome<Value> {
    let problem = step();
    let mut schedule = Schedule::named("mixed", &problem.boundary_bytes, false);
    for i in 0..64 {
        schedule.placement[i] =
            [Placement::Host, Placement::Hbm, Placement::Nvme, Placement::Recompute][i % 4];
    }
    let plan =
        StepPlan::with_sizes(&schedule, &problem.sizes()).map_err(|error| format!("simulation: {error}"))?;
    let ms = timed(|| {
        black_box(simulate(black_box(&plan), &problem.costs));
    });
    Ok(row("timeline simulation, 64 layers", ms, "ms", Some((SIMULATION, ms <= SIMULATION))))
}

/// The slowest of the configs of published models: read, and its chain made.
pub(crate) fn config_row() -> Outcome<Value> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cli/models");
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", folder.display());
    let (mut worst, mut slowest) = (0.0, String::new());
    for entry in fs::read_dir(&folder).map_err(|error| failed(&error))? {
        let path = entry.map_err(|error| failed(&error))?.path();
        let text = fs::read_to_string(&path).map_err(|error| failed(&error))?;
        let chain = || -> Result<_, String> {
            let model = ModelSpec::from_json(&text).map_err(|error| failed(&error))?;
            let settings =
                ReferenceSettings { mandatory: Mandatory::ExactCount, ..ReferenceSettings::default() };
            let work = Workload::new(1, 2048, 2).map_err(|error| failed(&error))?;
            settings.chain(&model, &work).map_err(|error| failed(&error))
        };
        chain()?;
        let ms = timed(|| {
            let _ = black_box(chain());
        });
        if ms > worst {
            (worst, slowest) = (ms, path.file_stem().unwrap_or_default().to_string_lossy().into_owned());
        }
    }
    let name = format!("parse + chain, slowest config ({slowest})");
    Ok(row(&name, worst, "ms", Some((CONFIG, worst <= CONFIG))))
}

/// Eight ranks that share a host.
pub(crate) fn ranks_rows() -> Outcome<Vec<Value>> {
    let mut host = step();
    host.budgets.host = host.budgets.host * 8;
    let solve = SolveOptions { time_limit: Some(Seconds(RANKS)), ..SolveOptions::default() };
    let started = Instant::now();
    let found = solve_ranks(&host, 8, None, &StepOptions { solve, ..StepOptions::default() })
        .map_err(|error| format!("8 ranks: {error}"))?;
    let (seconds, gap) = (started.elapsed().as_secs_f64(), found.gap * 100.0);
    Ok(vec![
        row("8 ranks x 64 layers", seconds, "s", Some((RANKS, seconds <= RANKS))),
        row("8 ranks x 64 layers: gap", gap, "%", Some((RANKS_GAP, gap <= RANKS_GAP))),
    ])
}

/// Median of several runs (ms).
fn timed(work: impl Fn()) -> f64 {
    let mut times: Vec<f64> = (0..REPEATS)
        .map(|_| {
            let started = Instant::now();
            work();
            started.elapsed().as_secs_f64() * 1e3
        })
        .collect();
    median(&mut times)
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}
