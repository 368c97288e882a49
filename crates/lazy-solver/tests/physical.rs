//! Steps planned by their own time: by hand, against all plans of small steps, and what more memory does.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;
#[path = "common/steps.rs"]
mod steps;

use common::cases;
use lazy_model::timeline::Contention;
use lazy_model::{
    Bytes, BytesPerSecond, Placement, Schedule, Seconds, StepProblem, Tier, TierBytes, Windows,
};
use lazy_solver::ranks::{explain_ranks, solve_ranks};
use lazy_solver::step::{Objective, StepFailure, StepOptions, carry_out, solve_step, step_bound};
use lazy_solver::{Raise, Remedy, SolveOptions, Status, explain_step, solve, step_baselines};
use steps::{MIB, step as problem};

fn step_ms(problem: &StepProblem) -> Option<f64> {
    match solve_step(problem, &StepOptions::default()) {
        Ok(found) => {
            let promise = found.verified.promise;
            for tier in Tier::ALL {
                assert!(promise.peak_bytes.get(tier) <= problem.budgets.get(tier), "{tier}");
                let timeline = &found.verified.timeline;
                let live = timeline.occupancy(&found.verified.plan, tier).iter().map(|s| s.1).max().unwrap();
                assert!(problem.fixed.get(tier) + live <= promise.peak_bytes.get(tier), "{tier}");
            }
            Some(promise.step_s.as_ms())
        }
        Err(StepFailure::Infeasible { .. } | StepFailure::Fixed { .. } | StepFailure::Verify(_)) => None,
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn internals_are_kept_as_far_as_hbm_reaches() {
    // The turn: five boundaries, one gradient, and 10 MiB for every kept layer. A layer costs 30 ms kept and 40 plain; the loss 5.
    for (hbm, kept) in [(26, 2), (25, 1), (16, 1), (36, 3), (46, 4), (100, 4)] {
        let time = step_ms(&problem(4, [hbm, 0, 0], 1.0)).unwrap();
        let wanted = 5.0 + 4.0 * 40.0 - 10.0 * f64::from(kept);
        assert!((time - wanted).abs() < 1e-6, "{hbm} MiB: {time} ms, not {wanted}");
    }
}

#[test]
fn boundaries_leave_so_that_internals_can_stay() {
    // One MiB less than two kept layers need beside all boundaries: one boundary leaves, 3 ms each way, and nothing waits.
    let time = step_ms(&problem(4, [25, 1, 0], 3.0)).unwrap();
    assert!((time - (5.0 + 4.0 * 40.0 - 20.0)).abs() < 1e-6, "{time}");
}

/// A layer takes 12 ms forward where it keeps its internals, 10 where not, 7 for them before its backward, 20 backward: 32 kept and 37
/// plain. Where keeping takes 18 ms, it is not worth it, whatever HBM there is.
#[test]
fn internals_are_kept_where_that_saves_time() {
    for (hbm, kept) in [(26, 2), (25, 1), (16, 1), (36, 3), (46, 4), (100, 4)] {
        let mut problem = problem(4, [hbm, 0, 0], 1.0);
        let times = |ms: f64| vec![Seconds::from_ms(ms); 4];
        (problem.costs.saving_forward, problem.costs.internals_forward) = (times(12.0), times(7.0));
        let found = solve_step(&problem, &StepOptions::default()).unwrap();
        let (time, wanted) =
            (found.verified.promise.step_s.as_ms(), 5.0 + 4.0 * 37.0 - 5.0 * f64::from(kept));
        assert!((time - wanted).abs() < 1e-6, "{hbm} MiB: {time} ms, not {wanted}");
        assert_eq!(found.solution.status, Status::Optimal);
        let prediction = found.schedule.solve.prediction.unwrap();
        assert!((prediction.step_s.as_ms() - wanted).abs() < 1e-6, "{prediction:?}");
        let bound = step_bound(&problem, &SolveOptions::default()).unwrap().unwrap().as_ms();
        assert!(bound <= wanted + 1e-9 && bound > wanted - 1e-3, "{bound} of {wanted}");
        problem.costs.saving_forward = times(18.0);
        let found = solve_step(&problem, &StepOptions::default()).unwrap();
        assert!((found.verified.promise.step_s.as_ms() - (5.0 + 4.0 * 37.0)).abs() < 1e-6);
        assert!(!found.schedule.keep.contains(&true));
    }
}

/// Every placement and keep of a step, each carried out as well as `carry_out` can.
fn best_of_all(problem: &StepProblem) -> Option<f64> {
    let n = problem.saved_bytes.len();
    let mut best = None;
    for code in 0..4usize.pow(n as u32) {
        let placement: Vec<Placement> = (0..n)
            .map(|i| ['G', 'C', 'N', '-'][code / 4usize.pow(i as u32) % 4])
            .chain(['G'])
            .filter_map(Placement::from_letter)
            .collect();
        if placement[0] == Placement::Recompute {
            continue;
        }
        for keep in 0..1usize << n {
            let mut schedule = Schedule::named("all", &problem.boundary_bytes, false);
            schedule.placement = placement.clone();
            schedule.keep = (0..n).map(|l| keep >> l & 1 == 1).collect();
            if let Ok((_, verified)) = carry_out(problem, &schedule, None) {
                let time = verified.promise.step_s.as_ms();
                best = Some(best.map_or(time, |b: f64| b.min(time)));
            }
        }
    }
    best
}

#[test]
fn no_plan_of_a_small_step_is_much_faster() {
    let mut planned = 0;
    let count = cases(6);
    for case in 0..count as u64 {
        let draw = |salt: u64, below: u64| (case * 7919 + salt * 104_729) % 1_000_003 % below;
        let hbm = 14 + draw(1, 27);
        let mut problem = problem(3, [hbm, draw(2, 4), draw(3, 3)], [1.0, 6.0, 25.0][draw(4, 3) as usize]);
        problem.workspaces.loss = MIB * draw(5, 6);
        problem.saved_bytes[1] = MIB * (4 + draw(6, 12));
        problem.costs.forward[1] = Seconds::from_ms(4.0 + draw(7, 12) as f64);
        if draw(8, 3) > 0 {
            // Keeping costs more than a run for internals alone, and of some layers more than both runs.
            for (l, salt) in (9..12).enumerate() {
                problem.costs.internals_forward[l] = Seconds::from_ms(3.0 + draw(salt, 9) as f64);
                problem.costs.saving_forward[l] = Seconds::from_ms(10.0 + draw(salt + 3, 14) as f64);
            }
        }
        let (found, best) = (step_ms(&problem), best_of_all(&problem));
        match (found, best) {
            (Some(found), Some(best)) => {
                planned += 1;
                assert!(found >= best - 1e-6, "case {case}: {found} ms, but no plan is faster than {best}");
                assert!(
                    found <= best * 1.01 + 1e-6,
                    "case {case}: {found} ms, but there is a plan of {best}"
                );
                let bound = step_bound(&problem, &SolveOptions::default()).unwrap().unwrap().as_ms();
                assert!(bound <= best + 1e-6, "case {case}: no less than {bound} ms, but a plan of {best}");
            }
            (None, None) => {}
            other => panic!("case {case}: {other:?}"),
        }
    }
    assert!(planned * 4 >= count * 3, "{planned}");
}

/// Whatever was searched for, a plan that anybody can make by hand, or that the reference's chain finds, is no faster; and no plan is
/// faster than the bound says.
#[test]
fn no_plan_made_otherwise_is_faster() {
    for (hbm, host, nvme, link_ms) in [(16, 2, 3, 6.0), (24, 1, 2, 25.0), (33, 3, 0, 12.0), (15, 0, 6, 4.0)] {
        let problem = problem(5, [hbm, host, nvme], link_ms);
        let Ok(found) = solve_step(&problem, &StepOptions::default()) else { continue };
        let step = found.verified.promise.step_s.as_ms();
        let most = step * (1.0 + 1e-4);
        let reference = StepOptions { objective: Objective::Reference, ..StepOptions::default() };
        if let Ok(other) = solve_step(&problem, &reference) {
            assert!(other.verified.promise.step_s.as_ms() * (1.0 + 1e-4) >= step, "{hbm} MiB: {step} ms");
        }
        for rival in step_baselines(&problem, &found.chain) {
            if let Ok(verified) = rival.outcome {
                let theirs = verified.promise.step_s.as_ms();
                assert!(theirs * (1.0 + 1e-4) >= step, "{hbm} MiB: {step} ms, {} {theirs} ms", rival.name);
            }
        }
        let bound = step_bound(&problem, &SolveOptions::default()).unwrap().unwrap().as_ms();
        assert!(bound <= most && bound >= 5.0 + 5.0 * 30.0, "{hbm} MiB: {bound} of {step} ms");
        let prediction = found.schedule.solve.prediction.unwrap();
        assert!(prediction.gap.abs() <= 0.03, "{hbm} MiB: {prediction:?}");
    }
}

/// Whatever the step and however little time there is, no plan made by hand that fits is faster than the one returned.
#[test]
fn no_plan_made_by_hand_is_faster_on_random_steps() {
    let mut compared = 0;
    let count = cases(12);
    for case in 0..count as u64 {
        let draw = |salt: u64, below: u64| (case * 7919 + salt * 104_729) % 1_000_003 % below;
        let layers = 3 + draw(1, 4) as usize;
        let budgets = [13 + draw(2, 40), draw(3, 5), draw(4, 4)];
        let mut problem = problem(layers, budgets, [1.0, 6.0, 25.0][draw(5, 3) as usize]);
        problem.workspaces.loss = MIB * draw(6, 6);
        problem.costs.internals_forward[1] = Seconds::from_ms(4.0 + draw(9, 8) as f64);
        if draw(7, 2) == 1 {
            problem.streamed.weights = vec![MIB * 2; layers];
            problem.budgets.host += MIB * 2 * layers as u64;
        }
        let contention = &mut problem.costs.links.contention;
        contention.shared = (draw(8, 3) == 0).then_some(BytesPerSecond(2e8));
        let limit = [None, Some(Seconds(0.0)), Some(Seconds(0.5))][case as usize % 3];
        let options = StepOptions {
            solve: SolveOptions { time_limit: limit, ..SolveOptions::default() },
            ..StepOptions::default()
        };
        let Ok(found) = solve_step(&problem, &options) else { continue };
        let step = found.verified.promise.step_s.as_ms();
        for rival in step_baselines(&problem, &found.chain) {
            if let Ok(verified) = rival.outcome {
                compared += 1;
                let theirs = verified.promise.step_s.as_ms();
                assert!(theirs >= step * (1.0 - 1e-8), "case {case}: {step} ms, {} {theirs} ms", rival.name);
            }
        }
    }
    assert!(compared * 6 >= count * 5, "{compared}");
}

/// A boundary on its way to or from NVMe waits in host RAM: a chain that knows of the buffers there needs less HBM, and the operations do.
#[test]
fn boundaries_in_staging_take_no_hbm() {
    let mut problem = problem(4, [0, 2, 4], 1.0);
    problem.max_segment = 1;
    let least = |staging: u64| {
        (12..20).find(|&hbm| {
            let room = TierBytes { hbm: MIB * hbm, host: Bytes::ZERO, nvme: MIB * 4 };
            let windows = Windows { staging: MIB * staging, ..problem.windows() };
            let solution = solve(&problem.keep_chain(&room, &windows), &SolveOptions::default()).unwrap();
            solution.status == Status::Optimal
        })
    };
    let (counted, staged) = (least(0).unwrap(), least(2).unwrap());
    assert!(staged < counted, "{staged} {counted}");
    problem.budgets.hbm = MIB * staged;
    let found = solve_step(&problem, &StepOptions::default()).unwrap();
    assert!(found.schedule.counts().nvme > 0 && found.verified.promise.peak_bytes.hbm <= MIB * staged);
}

#[test]
fn more_hbm_is_never_slower() {
    for link_ms in [12.0, 2.0, 40.0].into_iter().take(cases(1)) {
        let mut last = f64::INFINITY;
        for hbm in (14..70).step_by(8 / cases(1).min(4)) {
            let Some(time) = step_ms(&problem(6, [hbm, 3, 2], link_ms)) else { continue };
            assert!(time <= last + 1e-6, "{link_ms} ms a boundary, {hbm} MiB: {time} after {last}");
            last = time;
        }
        assert!((last - (5.0 + 6.0 * 30.0)).abs() < 10.0 * 6.0);
    }
}

#[test]
fn prediction_and_simulation_are_near() {
    for link_ms in [9.0, 1.0, 30.0].into_iter().take(cases(1)) {
        for hbm in [15, 18, 27, 41] {
            let mut problem = problem(8, [hbm, 6, 4], link_ms);
            problem.costs.links.contention = Contention {
                d2h_both: Some(BytesPerSecond(MIB.get() as f64 * 500.0 / link_ms)),
                ..Contention::default()
            };
            let Ok(found) = solve_step(&problem, &StepOptions::default()) else { continue };
            if let Some(prediction) = found.schedule.solve.prediction {
                assert!(prediction.gap.abs() <= 0.03, "{link_ms} ms, {hbm} MiB: {prediction:?}");
                assert!(prediction.refinements <= 5);
            }
        }
    }
}

/// All ways to divide whole boundaries of host RAM among two ranks: the slower of the two is never faster than the even split, and the bound
/// is below it.
#[test]
fn ranks_share_a_host_evenly() {
    for (hbm, host) in [(16, 3), (15, 2), (25, 4), (17, 5)].into_iter().take(cases(1)) {
        let host_problem = problem(4, [hbm, host, 0], 4.0);
        let Ok(even) = solve_ranks(&host_problem, 2, None, &StepOptions::default()) else { continue };
        let of = |mib: u64| {
            let mut one = host_problem.clone();
            one.budgets.host = MIB * mib;
            step_ms(&one).unwrap_or(f64::INFINITY)
        };
        let best = (0..=host).map(|first| of(first).max(of(host - first))).fold(f64::INFINITY, f64::min);
        let step = even.each.verified.promise.step_s.as_ms();
        assert!((step - best).abs() < 1e-6, "{hbm} MiB, {host} shared: {step} ms, divided at will {best}");
        assert!(even.bound.as_ms() <= best + 1e-6);
        assert!(even.gap <= 0.001, "{}", even.gap);
    }
}

/// The same step with weights and gradients that live in host RAM and pass through HBM.
fn streamed(layers: usize, budgets: [u64; 3], link_ms: f64) -> StepProblem {
    let mut problem = problem(layers, budgets, link_ms);
    problem.streamed.weights = vec![MIB * 2; layers];
    problem.streamed.gradients = vec![MIB * 2; layers];
    problem
}

/// Whatever is raised, from too little for any plan to enough for the best one: a plan appears once and gets no slower.
#[test]
fn more_of_a_tight_budget_is_never_slower() {
    type Make = fn(u64) -> StepProblem;
    let sweeps: [(&str, Vec<u64>, Make); 4] = [
        ("quarters of a MiB of HBM", (54..72).step_by(6 / cases(1).min(3)).collect(), |n| {
            let mut problem = problem(6, [0, 2, 4], 12.0);
            problem.budgets.hbm = Bytes(MIB.get() / 4 * n);
            problem
        }),
        ("HBM beside streamed weights", (21..34).step_by(8 / cases(1).min(4)).collect(), |n| {
            streamed(6, [n, 27, 3], 3.0)
        }),
        ("host RAM beside streamed weights", (24..31).step_by(3 / cases(1).min(3)).collect(), |n| {
            streamed(6, [22, n, 6], 3.0)
        }),
        ("NVMe", (0..7).step_by(3 / cases(1).min(3)).collect(), |n| streamed(6, [22, 26, n], 3.0)),
    ];
    for (name, sizes, make) in sweeps {
        let mut last: Option<f64> = None;
        for n in sizes {
            let time = step_ms(&make(n));
            assert!(time.is_some() || last.is_none(), "{name}: no plan with {n}, but with less");
            if let (Some(time), Some(last)) = (time, last) {
                assert!(time <= last + 1e-6, "{name} {n}: {time} after {last}");
            }
            last = time.or(last);
        }
        assert!(last.is_some(), "{name}");
    }
}

/// HBM for one layer and not a boundary more: every boundary but the last two leaves and comes back while arithmetic waits for it, and for
/// nothing else, though drives write a boundary in twice the time of a layer and host RAM holds few. A boundary of HBM more, and the waits
/// end.
#[test]
fn in_the_least_hbm_arithmetic_waits_for_copies_alone() {
    let mut tight = problem(8, [0, 4, 64], 1.0);
    tight.costs.links.nvme_write = BytesPerSecond(MIB.get() as f64 / 19e-3);
    tight.costs.links.nvme_read = BytesPerSecond(MIB.get() as f64 / 15e-3);
    tight.workspaces.loss = MIB * 2;
    let least = tight.sizes().least_hbm();
    for (quarters, waits) in [(0, 7.0), (3, 7.0), (4, 0.0)] {
        tight.budgets.hbm = least + Bytes(MIB.get() / 4 * quarters);
        let time = step_ms(&tight).unwrap();
        let wanted = 5.0 + 8.0 * 40.0 + waits;
        assert!((time - wanted).abs() < 1e-6, "{quarters} quarters: {time}, not {wanted}");
        let bound = step_bound(&tight, &SolveOptions::default()).unwrap().unwrap().as_ms();
        // Kept internals are in the bound's chain as soon as there is a boundary more.
        let apart = wanted - bound;
        assert!(
            apart >= -1e-6 && (apart < 1e-6 || waits == 0.0),
            "{quarters} quarters: no less than {bound}"
        );
    }
}

/// Gradients of 20 ms each way, whose sums come in in all micro-batches but the first and leave beside the next: the objective foresees what
/// the simulation promises.
#[test]
fn sums_of_gradients_are_foreseen_where_they_come_in() {
    for micro_batches in [1, 2, 5] {
        let mut problem = problem(6, [40, 14, 0], 10.0);
        problem.streamed.gradients = vec![MIB * 2; 6];
        problem.micro_batches = micro_batches;
        let found = solve_step(&problem, &StepOptions::default()).unwrap();
        let prediction = found.schedule.solve.prediction.unwrap();
        assert!(prediction.gap.abs() <= 0.03, "{micro_batches}: {prediction:?}");
        // Six layers of 30 ms, the loss, and no more than one transfer a layer that is waited for.
        let of_each = found.verified.promise.step_s.as_ms() / micro_batches as f64;
        assert!((185.0..=185.0 + 6.0 * 20.0).contains(&of_each), "{micro_batches}: {of_each} ms");
    }
}

/// A plan for less is a plan for more, whichever tier is raised and however little time there is for a search.
#[test]
fn with_the_plan_for_less_more_is_never_slower() {
    let count = cases(3);
    let mut compared = 0;
    for case in 0..count as u64 {
        let draw = |salt: u64, below: u64| (case * 7919 + salt * 104_729) % 1_000_003 % below;
        let layers = 4 + draw(1, 5) as usize;
        let link_ms = [2.0, 7.0, 18.0][draw(2, 3) as usize];
        let budgets = [14 + draw(3, 12), 1 + draw(4, 3), draw(5, 3)];
        let mut last: Option<(f64, Schedule)> = None;
        for raised in 0..4u64 {
            let mut problem = problem(layers, budgets, link_ms);
            problem.costs.forward[1] = Seconds::from_ms(4.0 + draw(6, 12) as f64);
            problem.saved_bytes[0] = MIB * (6 + draw(7, 9));
            *problem.budgets.get_mut(Tier::ALL[draw(8, 3) as usize]) += Bytes(MIB.get() * raised / 2);
            let known: Vec<Schedule> = last.iter().map(|(_, schedule)| schedule.clone()).collect();
            // Next to no time for a search: then above all the plan that is known must stand.
            let time_limit = if raised == 3 { Some(Seconds(0.0)) } else { None };
            let solve = SolveOptions { time_limit, ..SolveOptions::default() };
            let options = StepOptions { known: &known, solve, ..StepOptions::default() };
            let Ok(found) = solve_step(&problem, &options) else {
                assert!(last.is_none(), "case {case}, {raised}: no plan where there was one");
                continue;
            };
            let step = found.verified.promise.step_s.as_ms();
            if let Some((before, _)) = &last {
                compared += 1;
                assert!(step <= before * (1.0 + 1e-8), "case {case}, {raised}: {step} ms after {before}");
            }
            last = Some((step, found.schedule));
        }
    }
    assert!(compared >= 2 * count, "{compared}");
}

/// A known plan is looked at only where it is one of this step: of these layers, with blocks as long as allowed.
#[test]
fn plans_of_other_steps_are_not_taken_over() {
    // With every boundary in HBM 18 MiB are needed, with three of one block recomputed 16.
    let mut tight = problem(6, [17, 0, 0], 1.0);
    let mut long = Schedule::named("given", &tight.boundary_bytes, false);
    long.placement[1..4].fill(Placement::Recompute);
    let known = [Schedule::named("given", &[MIB; 4], true), long];
    let options = StepOptions { known: &known, ..StepOptions::default() };
    for (max_segment, possible) in [(1, false), (3, true), (4, true)] {
        tight.max_segment = max_segment;
        assert_eq!(solve_step(&tight, &options).is_ok(), possible, "blocks of {max_segment}");
    }
}

/// Six layers' weights and gradients fill 24 MiB of host RAM before any boundary is placed: the search does not count on them, spills
/// to NVMe what does not fit beside them, and is no slower than the same step with as much host RAM for boundaries alone.
#[test]
fn streamed_weights_leave_the_host_ram_they_leave() {
    let problem = streamed(6, [22, 27, 6], 3.0);
    assert_eq!(problem.always().host, MIB * 24);
    let found = solve_step(&problem, &StepOptions::default()).unwrap();
    assert_eq!(
        found.chain.cpu_budget_bytes.get() / MIB.get() * MIB.get(),
        found.chain.cpu_budget_bytes.get()
    );
    assert!(found.chain.cpu_budget_bytes <= MIB * 3, "{}", found.chain.cpu_budget_bytes);
    assert!(found.verified.promise.peak_bytes.host > MIB * 24);
}

#[test]
fn the_least_host_ram_beside_streamed_weights_is_the_least() {
    for budgets in [[24, 8, 0], [23, 8, 6]] {
        let short = streamed(6, budgets, 3.0);
        let why = solve_step(&short, &StepOptions::default()).unwrap_err().to_string();
        assert!(why.contains("host budget") && why.contains("24.00 MiB"), "{why}");
        let remedies = explain_step(&short, &StepOptions::default());
        let [Remedy::Budget(Raise { tier: Tier::Host, smallest, .. })] = remedies.as_slice() else {
            panic!("{budgets:?}: {remedies:?}")
        };
        let with = |host: Bytes| {
            let mut raised = short.clone();
            raised.budgets.host = host;
            step_ms(&raised)
        };
        assert!(with(*smallest).is_some(), "{budgets:?}: {smallest}");
        let less = Bytes(smallest.get() - MIB.get() / 500);
        assert!(*smallest == MIB * 24 || with(less).is_none(), "{budgets:?}: {smallest}");
    }
}

/// The caps of `raises` in place of the problem's.
fn raised(problem: &StepProblem, raises: &[Raise]) -> StepProblem {
    let mut raised = problem.clone();
    for raise in raises {
        *raised.budgets.get_mut(raise.tier) = raise.smallest;
    }
    raised
}

/// By hand: HBM must hold three boundaries, the internals, two layers' weights and two layers' gradients, 21 MiB, for layers 1 to 4. Nothing
/// is left for a boundary of the layer below, so that none is recomputed; layer 5 leaves room for boundaries 4 and 5, as there is no layer
/// above whose gradients are on their way out. The four others are in host RAM beside the homes of 24 MiB.
#[test]
fn where_no_cap_alone_helps_two_are_named_together() {
    let short = streamed(6, [17, 20, 0], 3.0);
    let remedies = explain_step(&short, &StepOptions::default());
    let [Remedy::Budgets(raises)] = remedies.as_slice() else { panic!("{remedies:?}") };
    let [hbm, host] = raises.as_slice() else { panic!("{remedies:?}") };
    assert_eq!((hbm.tier, hbm.budget, hbm.smallest), (Tier::Hbm, MIB * 17, MIB * 21));
    assert_eq!((host.tier, host.budget), (Tier::Host, MIB * 20));
    let off = host.smallest.get().abs_diff((MIB * 28).get());
    assert!(off <= MIB.get() / 1000, "{} MiB", host.smallest.get() as f64 / MIB.get() as f64);
    assert!(step_ms(&raised(&short, raises)).is_some());
}

/// Of all plans of a small step none fits where either cap is less than a thousandth of a boundary below what is named, however large the
/// other were for HBM.
#[test]
fn two_caps_named_together_are_the_least_of_all_plans() {
    for (layers, hbm, host, link_ms) in
        [(2, 17, 7, 3.0), (3, 12, 3, 3.0), (3, 20, 0, 12.0)].into_iter().take(cases(1))
    {
        let short = streamed(layers, [hbm, host, 0], link_ms);
        let remedies = explain_step(&short, &StepOptions::default());
        let [Remedy::Budgets(raises)] = remedies.as_slice() else { panic!("{remedies:?}") };
        assert_eq!(raises.iter().map(|r| r.tier).collect::<Vec<_>>(), [Tier::Hbm, Tier::Host]);
        assert!(best_of_all(&raised(&short, raises)).is_some(), "{remedies:?}");
        let less = |raise: &Raise| Raise { smallest: raise.smallest - Bytes(MIB.get() / 500), ..*raise };
        let roomy = Raise { smallest: MIB * 1000, ..raises[1] };
        assert!(best_of_all(&raised(&short, &[less(&raises[0]), roomy])).is_none(), "{remedies:?}");
        assert!(best_of_all(&raised(&short, &[raises[0], less(&raises[1])])).is_none(), "{remedies:?}");
    }
}

/// Homes on NVMe, no host RAM for what is on its way there, and too little HBM.
#[test]
fn where_no_two_caps_help_all_three_are_named() {
    let mut short = streamed(2, [12, 0, 4], 3.0);
    short.streamed.on_nvme = true;
    let remedies = explain_step(&short, &StepOptions::default());
    let [Remedy::Budgets(raises)] = remedies.as_slice() else { panic!("{remedies:?}") };
    assert_eq!(raises.iter().map(|r| r.tier).collect::<Vec<_>>(), Tier::ALL);
    assert!(step_ms(&raised(&short, raises)).is_some(), "{remedies:?}");
    for raise in raises {
        let less = Raise { smallest: raise.smallest - Bytes(MIB.get() / 500), ..*raise };
        let others: Vec<Raise> = raises.iter().map(|r| if r.tier == less.tier { less } else { *r }).collect();
        assert!(
            step_ms(&raised(&short, &others)).is_none(),
            "{remedies:?} without the last of {}",
            raise.tier
        );
    }
    let told = remedies[0].to_string();
    assert!(told.contains("hbm budget from 12.00 MiB") && told.contains(" and the nvme budget"), "{told}");
}

/// What a solve says speaks of the step, not of a schedule that somebody might have, and its remedy is the only size in it that is asked for.
#[test]
fn a_refused_step_names_one_size_that_works() {
    let short = streamed(6, [17, 64, 0], 3.0);
    let why = solve_step(&short, &StepOptions::default()).unwrap_err().to_string();
    assert!(!why.contains("schedule") && !why.contains("at least"), "{why}");
    let remedies = explain_step(&short, &StepOptions::default());
    let Some(Remedy::Budget(Raise { tier: Tier::Hbm, smallest, .. })) = remedies.first() else {
        panic!("{remedies:?}")
    };
    let raised = TierBytes { hbm: *smallest, ..short.budgets };
    assert!(step_ms(&StepProblem { budgets: raised, ..short }).is_some());
}

/// Host RAM is the whole host's in what is refused and in what would help; HBM is each rank's.
#[test]
fn ranks_are_told_what_the_whole_host_needs() {
    let host = streamed(6, [24, 64, 0], 3.0);
    let why = solve_ranks(&host, 4, None, &StepOptions::default()).unwrap_err().to_string();
    assert!(why.contains("64.00 MiB") && why.contains("96.00 MiB"), "{why}");
    let remedies = explain_ranks(&host, 4, &StepOptions::default());
    let [Remedy::Budget(Raise { tier: Tier::Host, budget, smallest, .. })] = remedies.as_slice() else {
        panic!("{remedies:?}")
    };
    assert_eq!(*budget, MIB * 64);
    let enough = StepProblem { budgets: TierBytes { host: *smallest, ..host.budgets }, ..host };
    assert!(solve_ranks(&enough, 4, None, &StepOptions::default()).is_ok());
}

#[test]
fn ranks_short_of_hbm_and_host_ram_are_told_of_both() {
    let host = streamed(6, [17, 80, 0], 3.0);
    let remedies = explain_ranks(&host, 4, &StepOptions::default());
    let [Remedy::Budgets(raises)] = remedies.as_slice() else { panic!("{remedies:?}") };
    assert_eq!([raises[0].budget, raises[1].budget], [MIB * 17, MIB * 80]);
    assert!(solve_ranks(&raised(&host, raises), 4, None, &StepOptions::default()).is_ok(), "{remedies:?}");
}
