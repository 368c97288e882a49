//! The sweep over seeds, and real threads.

use std::ops::Range;

use lazy_store::QueueOrder;
use lazy_store::fault::Faults;

use crate::program::{Outcome, Trouble, run};
use crate::{BLOCK, On, deep, folder, store};

/// Seeds of the sweep.
const SEEDS: u64 = 10_000;
/// Runs on real threads.
const THREAD_RUNS: u64 = 300;

/// Names a seed to be run alone.
const REPLAY: &str = "LAZY_STORE_SEED";

/// Every other seed runs with faults.
fn trouble(seed: u64) -> Trouble {
    if seed.is_multiple_of(2) { Trouble::Faults } else { Trouble::None }
}

/// Runs the seeds on as few stores as possible.
fn run_all(seeds: Range<u64>, on: On, order: QueueOrder, trouble: impl Fn(u64) -> Trouble) -> Outcome {
    let (dir, faults) = (folder(), Faults::new(0));
    let mut sum = Outcome::default();
    let mut open = None;
    for seed in seeds {
        if seed.is_multiple_of(BLOCK) {
            open = None;
        }
        let store = open.get_or_insert_with(|| store(dir.path(), on, order, seed, &faults));
        match run(store, &faults, seed, trouble(seed)) {
            Ok(done) => {
                sum.tasks += done.tasks;
                sum.failures += done.failures;
            }
            Err(wrong) => panic!(
                "seed {seed}: {wrong}\nrun it again with: {REPLAY}={seed} cargo test -p lazy-store --features test-util \
                 --test hazards sweep"
            ),
        }
    }
    drop(open);
    for drive in std::fs::read_dir(dir.path()).unwrap() {
        assert_eq!(
            std::fs::read_dir(drive.unwrap().path()).unwrap().count(),
            0,
            "the spill files are removed"
        );
    }
    sum
}

#[test]
fn sweep_every_read_of_ten_thousand_interleavings_returns_what_was_written() {
    if let Some(seed) = std::env::var(REPLAY).ok().and_then(|seed| seed.parse::<u64>().ok()) {
        for on in [On::Host, On::Streams] {
            run_all(seed..seed + 1, on, QueueOrder::Seeded(seed), trouble);
        }
        return;
    }
    let all = SEEDS * deep(10);
    // Two halves side by side, each thread with a store of its own: one on the host device, one beside streams.
    let half = (all / 2).next_multiple_of(BLOCK);
    let outcomes = std::thread::scope(|scope| {
        let halves = [(0..half, On::Host), (half..all, On::Streams)]
            .map(|(seeds, on)| scope.spawn(move || run_all(seeds, on, QueueOrder::Seeded(0), trouble)));
        halves.map(|half| half.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let [tasks, failures] =
        [|o: &Outcome| o.tasks, |o: &Outcome| o.failures].map(|f| outcomes.iter().map(f).sum::<u64>());
    eprintln!("{all} interleavings, {tasks} tasks, {failures} failures reported");
    // The faults are felt: at least one failure in ten runs that have them.
    assert!(tasks > 20 * all && failures > all / 20, "{tasks} tasks, {failures} failures");
}

#[test]
fn threads_with_random_delays_read_what_was_written() {
    let trouble = |seed: u64| if seed.is_multiple_of(3) { Trouble::Faults } else { Trouble::Delays };
    run_all(0..THREAD_RUNS * deep(10), On::Host, QueueOrder::Threads, trouble);
}
