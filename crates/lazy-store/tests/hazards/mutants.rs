//! Every wait is needed: without it, some seed of the sweep fails.

use lazy_store::fault::Faults;
use lazy_store::mutants::{Side, Source, Wait};
use lazy_store::{Lane, QueueOrder, Tier};

use crate::program::{Trouble, run};
use crate::{On, folder, store};

/// Seeds tried before a mutant counts as a survivor.
const SEEDS: u64 = 10_000;

fn all_waits() -> Vec<Wait> {
    let sources = [Source::Write, Source::Reads, Source::Inherited];
    let mut waits = Vec::new();
    for lane in Lane::ALL {
        waits.push(Wait::Read(lane));
        waits.extend(sources.map(|source| Wait::Overwrite(source, lane)));
        waits.extend([Wait::After(lane), Wait::Completion(lane)]);
    }
    for tier in Tier::ALL {
        waits.extend(sources.map(|source| Wait::Release(source, tier)));
        waits.extend([Side::Before, Side::After].map(|side| Wait::Remainder(side, tier)));
    }
    // One lane alone writes the spill file, and in seeded order it runs one task at a time. `overtaking` is about threads.
    waits.retain(|&wait| wait != Wait::Release(Source::Write, Tier::Nvme));
    waits
}

#[test]
fn mutants_without_a_wait_fail_on_some_seed() {
    let (dir, faults) = (folder(), Faults::new(0));
    let mut survivors = Vec::new();
    for wait in all_waits() {
        // A store of its own: a mutant may leave work behind.
        let store = store(dir.path(), On::Host, QueueOrder::Seeded(0), 0, &faults);
        assert!(store.leave_out(Some(wait)));
        let killed =
            (0..SEEDS).find_map(|seed| Some((seed, run(&store, &faults, seed, Trouble::None).err()?)));
        match killed {
            Some((seed, how)) => eprintln!("{:<32} killed by seed {seed:>5}: {how}", format!("{wait:?}")),
            None => {
                eprintln!("{:<32} SURVIVES {SEEDS} seeds", format!("{wait:?}"));
                survivors.push(wait);
            }
        }
    }
    assert_eq!(survivors, [], "the sweep does not notice that these waits are missing");
}

#[test]
fn streams_that_do_not_wait_for_each_other_fail_on_some_seed() {
    let (dir, faults) = (folder(), Faults::new(0));
    let store = store(dir.path(), On::Streams, QueueOrder::Seeded(0), 0, &faults);
    store.leave_out_stream_waits(true);
    let killed = (0..SEEDS).find_map(|seed| Some((seed, run(&store, &faults, seed, Trouble::None).err()?)));
    let (seed, how) = killed.expect("the sweep does not notice that streams do not wait");
    eprintln!("{:<32} killed by seed {seed:>5}: {how}", "waits between streams");
}

#[test]
fn stores_on_threads_take_no_mutants() {
    let dir = folder();
    let store = store(dir.path(), On::Host, QueueOrder::Threads, 0, &Faults::new(0));
    assert!(!store.leave_out(Some(Wait::Read(Lane::Compute))));
}
