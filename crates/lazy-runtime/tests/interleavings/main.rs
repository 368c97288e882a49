//! R2: the same step under thousands of orders of execution, each drawn from a seed, and on threads over slow links.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;
mod mutants;
mod own;
mod padded;
mod slow;

use common::*;
use lazy_runtime::{Executor, ModelOptions, Program};
use lazy_store::QueueOrder;

/// Small, so that a seed takes milliseconds.
const WIDTH: usize = 16;

/// Steps run under many orders, and how many seeds in the ordinary run.
struct Case {
    name: &'static str,
    letters: &'static str,
    keep: &'static str,
    ahead: Ahead,
    options: ModelOptions,
    /// Whether weights are updated beside the backward pass.
    updates: bool,
    /// Whether boundaries are of different sizes.
    padded: bool,
    seeds: u64,
}

/// Together 5,000 seeds; those that write to NVMe throughout take the longest, and are fewer.
const CASES: [Case; 11] = [
    Case {
        name: "host, recomputation",
        letters: "C-CC-CC-G",
        keep: NO_KEEP,
        ahead: Ahead::Prefetch(4),
        options: options(3, [false; 3]),
        updates: false,
        padded: false,
        seeds: 1000,
    },
    Case {
        name: "host, NVMe and kept internals",
        letters: "N-C-G-NCG",
        keep: "K--K-K--",
        ahead: Ahead::Prefetch(2),
        options: options(2, [false; 3]),
        updates: false,
        padded: false,
        seeds: 400,
    },
    Case {
        name: "NVMe as planned",
        letters: "NNCN-NCNG",
        keep: NO_KEEP,
        ahead: Ahead::Planned(3),
        options: options(1, [false; 3]),
        updates: false,
        padded: false,
        seeds: 400,
    },
    Case {
        name: "updates of resident weights",
        letters: "CCGC-C-GG",
        keep: "------KK",
        ahead: Ahead::Prefetch(1),
        options: options(2, [false; 3]),
        updates: true,
        padded: false,
        seeds: 1000,
    },
    Case {
        name: "updates of streamed weights",
        letters: "C-CCGC-CG",
        keep: "---K----",
        ahead: Ahead::Planned(6),
        options: options(3, [true, true, false]),
        updates: true,
        padded: false,
        seeds: 1000,
    },
    Case {
        name: "streamed weights, resident gradients",
        letters: "CC-C-GCCG",
        keep: NO_KEEP,
        ahead: Ahead::Prefetch(0),
        options: options(1, [true, false, false]),
        updates: true,
        padded: false,
        seeds: 500,
    },
    Case {
        name: "weights and gradients on NVMe",
        letters: "NC-N-CG-G",
        keep: "-K------",
        ahead: Ahead::Prefetch(4),
        options: options(3, [true, true, true]),
        updates: false,
        padded: false,
        seeds: 150,
    },
    Case {
        name: "gradients on NVMe",
        letters: "CN--C-NCG",
        keep: NO_KEEP,
        ahead: Ahead::Planned(1),
        options: options(2, [false, true, true]),
        updates: false,
        padded: false,
        seeds: 150,
    },
    Case {
        name: "several sizes, soon off the drive",
        letters: "GGGNGNNNG",
        keep: NO_KEEP,
        ahead: Ahead::Early(LAYERS),
        options: options(1, [false; 3]),
        updates: false,
        padded: true,
        seeds: 200,
    },
    Case {
        name: "several sizes, soon back, weights on NVMe",
        letters: "CNNNCNNCG",
        keep: "-K-KK---",
        ahead: Ahead::Early(1),
        options: options(2, [true, false, true]),
        updates: false,
        padded: true,
        seeds: 150,
    },
    Case {
        name: "several sizes, gradients on NVMe",
        letters: "CNCGGNCCG",
        keep: "----K---",
        ahead: Ahead::Planned(1),
        options: options(3, [false, true, true]),
        updates: false,
        padded: true,
        seeds: 50,
    },
];

const fn options(micro_batches: usize, streams: [bool; 3]) -> ModelOptions {
    let [stream_weights, stream_gradients, on_nvme] = streams;
    ModelOptions { micro_batches, stream_weights, stream_gradients, on_nvme }
}

/// A case under way: one executor, whose store is given a new seed for each step.
struct Sweep<'a> {
    case: &'a Case,
    executor: Executor,
    program: Program,
    /// Of the plain loop, which takes the same steps.
    weights: Vec<Vec<f32>>,
    _dir: tempfile::TempDir,
}

impl<'a> Sweep<'a> {
    fn new(case: &'a Case) -> Sweep<'a> {
        let dir = folder();
        let running = running(QueueOrder::Seeded(0), dir.path());
        let squares = squares();
        let model = match case.padded {
            true => padded::model(&squares, case.options),
            false => model(&squares, case.options),
        };
        let plan = model.plan(&scheduled(&model, case.letters, case.keep, case.ahead)).unwrap();
        let (mut executor, program) = prepared(model, plan, &running);
        if case.updates {
            update_in_backward(&mut executor);
        }
        let weights = (0..=LAYERS).map(first_weights).collect();
        Sweep { case, executor, program, weights, _dir: dir }
    }

    /// Takes a step in the order that the seed gives, and compares every bit with the plain loop.
    fn step(&mut self, seed: u64) -> Result<(), String> {
        let micro_batches = self.case.options.micro_batches;
        self.executor.store().reseed(seed);
        let report = self.executor.run(&mut self.program, &step(seed, micro_batches));
        let losses = report.map_err(|error| chain(&error))?.losses;
        let (wanted, gradients) = by_hand(&self.weights, seed, micro_batches);
        if losses != wanted {
            return Err(format!("losses {losses:?} instead of {wanted:?}"));
        }
        let ours = common::gradients(&self.executor);
        match (0..=LAYERS).find(|&p| bits(&ours[p..=p]) != bits(&gradients[p..=p])) {
            Some(p) => return Err(format!("another gradient of parameter {p}")),
            None if !self.case.updates => return Ok(()),
            None => self.weights.iter_mut().zip(&gradients).for_each(|(w, g)| descend(w, g)),
        }
        let ours = common::weights(&self.executor);
        match (0..=LAYERS).find(|&p| bits(&ours[p..=p]) != bits(&self.weights[p..=p])) {
            Some(p) => Err(format!("other weights of parameter {p}")),
            None => Ok(()),
        }
    }
}

/// An error and what caused it.
fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {}", chain(source)),
        None => error.to_string(),
    }
}

/// Fresh and released memory is poisoned with NaNs, so a read too early or too late shows in the bits.
fn sweep(cases: std::ops::Range<usize>) {
    for case in &CASES[cases] {
        let mut sweep = Sweep::new(case);
        for seed in 0..case.seeds * deep(10) {
            if let Err(wrong) = sweep.step(seed) {
                panic!("{}, seed {seed}: {wrong}", case.name);
            }
        }
    }
}

#[test]
fn r2_five_thousand_orders_give_the_bits_of_a_plain_loop_in_memory() {
    sweep(3..6);
}

#[test]
fn r2_five_thousand_orders_give_the_bits_of_a_plain_loop_with_nvme() {
    sweep(0..3);
    sweep(6..11);
    assert_eq!(CASES.iter().map(|case| case.seeds).sum::<u64>(), 5000);
}
