//! Threads: links of any rate, and links that are far slower than what a plan expects.

use lazy_model::{BytesPerSecond, Tier};
use lazy_store::{LinkLimits, QueueOrder};

use crate::common::*;

/// Runs on threads over links of random rates.
const RUNS: u64 = 300;

fn rate(transfers: f64) -> Option<BytesPerSecond> {
    Some(BytesPerSecond(transfers * BYTES.get() as f64))
}

#[test]
fn r1_threads_over_links_of_random_rates_give_the_bits_of_a_plain_loop() {
    for seed in 0..RUNS * deep(10) {
        let mut random = Random(seed);
        let (letters, keep, ahead, options) =
            (random.letters(), random.keep(), random.ahead(), random.options());
        // A boundary takes nothing, or up to a fifth of a millisecond.
        let mut link = || match random.below(3) {
            0 => None,
            _ => rate(1e6 / (1.0 + random.below(200) as f64)),
        };
        let limits = LinkLimits { d2h: link(), h2d: link(), nvme_write: link(), nvme_read: link() };
        let dir = folder();
        let running = Running { order: QueueOrder::Threads, dir: dir.path(), limits };
        let (mut executor, mut program) = set_up_ahead(&letters, &keep, ahead, options, &running);
        for number in 0..2 {
            let report = executor.run(&mut program, &step(number, options.micro_batches)).unwrap();
            let (losses, gradients_by_hand) = expected(number, options.micro_batches);
            let told = format!("run {seed}: {letters} {keep} {ahead:?} {options:?}");
            assert_eq!(report.losses, losses, "{told}");
            assert!(bits(&gradients(&executor)) == gradients_by_hand, "{told}");
        }
    }
}

#[test]
fn a_link_a_hundred_times_slower_delays_a_step_and_changes_nothing() {
    let usual = rate(50_000.0);
    let slow = rate(500.0);
    let all = LinkLimits { d2h: usual, h2d: usual, nvme_write: usual, nvme_read: usual };
    let each = [
        LinkLimits { d2h: slow, ..all },
        LinkLimits { h2d: slow, ..all },
        LinkLimits { nvme_write: slow, ..all },
        LinkLimits { nvme_read: slow, ..all },
    ];
    for limits in each {
        for ahead in [Ahead::Prefetch(0), Ahead::Prefetch(2), Ahead::Prefetch(4), Ahead::Planned(9)] {
            for (letters, options) in [("NC-N-CNCG", resident(2)), ("CN-GC-NGG", streamed(true, 1))] {
                let dir = folder();
                // The budgets are the promise: what overflowed them would be refused.
                let running = Running { order: QueueOrder::Threads, dir: dir.path(), limits };
                let (mut executor, mut program) = set_up_ahead(letters, NO_KEEP, ahead, options, &running);
                let report = executor.run(&mut program, &step(3, options.micro_batches)).unwrap();
                let (losses, wanted) = expected(3, options.micro_batches);
                assert_eq!(report.losses, losses);
                assert!(bits(&gradients(&executor)) == wanted, "{letters} {ahead:?} {limits:?}");
                let needs = executor.model().needs(program.plan());
                assert!(Tier::ALL.iter().all(|&tier| report.extents.get(tier) <= needs.get(tier)));
            }
        }
    }
}
