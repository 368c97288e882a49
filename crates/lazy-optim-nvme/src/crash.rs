//! Power cuts, failed flushes and bad transfers at every point of making a store and of a step.

use std::path::Path;

use lazy_store::durable::{DurableDir, IoOptions};
use lazy_store::fault::{Fault, Faults, Operation};

use crate::common::{State, blob, cut, files, init, params, restore, state, take_awaited_step, take_step};
use crate::{AdamOptions, NvmeAdam, OptimError, ParamSpec};

/// Three buckets, the first two of two chunks.
const SIZES: [usize; 3] = [39_000, 300, 5_000];

fn options() -> AdamOptions {
    cut(20_000, 64, 2)
}

fn faulty(dir: &Path, faults: &Faults) -> DurableDir {
    DurableDir::open_with_faults(dir, &IoOptions::default(), faults).unwrap()
}

fn create(dir: DurableDir) -> Result<NvmeAdam, OptimError> {
    NvmeAdam::create_in(dir, &params(&SIZES), &options(), &mut init)
}

fn open(dir: DurableDir) -> Result<NvmeAdam, OptimError> {
    NvmeAdam::open_in(dir, &params(&SIZES), &options())
}

fn reopen(dir: &Path) -> Result<NvmeAdam, OptimError> {
    NvmeAdam::open(dir, &params(&SIZES), &options())
}

/// A store of two steps in a folder, and the states after steps 0 to 4 of a run that nothing disturbs.
struct Fixture {
    dir: tempfile::TempDir,
    files: std::collections::BTreeMap<String, Vec<u8>>,
    params: Vec<ParamSpec>,
    states: Vec<State>,
}

impl Fixture {
    fn new() -> Self {
        let params = params(&SIZES);
        let dir = tempfile::tempdir().unwrap();
        let mut adam = create(DurableDir::open(dir.path(), &IoOptions::default()).unwrap()).unwrap();
        let mut states = vec![state(&mut adam, &params)];
        let mut two_steps = None;
        for step in 1..=4 {
            take_step(&mut adam, &params, step).unwrap();
            states.push(state(&mut adam, &params));
            if step == 2 {
                two_steps = Some(files(dir.path()));
            }
        }
        drop(adam);
        Fixture { dir, files: two_steps.unwrap(), params, states }
    }

    /// Two steps again, opened through `faults`.
    fn rewind(&self, faults: &Faults) -> NvmeAdam {
        restore(self.dir.path(), &self.files);
        open(faulty(self.dir.path(), faults)).unwrap()
    }

    /// Opens the store as a restarted process does; everything in it has to be of one instant.
    fn check(&self, what: &str) -> NvmeAdam {
        let mut adam = reopen(self.dir.path()).unwrap_or_else(|error| panic!("{what}: {error}"));
        let at = adam.sequence();
        assert!(state(&mut adam, &self.params) == self.states[at as usize], "{what}: a mix at {at}");
        assert_eq!(adam.step_counts(), [at; 3], "{what}");
        let blob = if at == 0 { Vec::new() } else { blob(at as usize) };
        assert!(adam.blob() == blob, "{what}");
        adam
    }
}

#[test]
fn a_power_cut_anywhere_in_making_a_store_leaves_all_of_it_or_none() {
    let params = params(&SIZES);
    let mut initial = None;
    for k in 0.. {
        let dir = tempfile::tempdir().unwrap();
        let faults = Faults::new(k);
        faults.cut_at(k);
        let made = create(faulty(dir.path(), &faults)).is_ok();
        assert_eq!(made, !faults.power_is_off());
        faults.restart().unwrap();
        match reopen(dir.path()) {
            Ok(mut adam) => {
                let found = state(&mut adam, &params);
                assert_eq!(adam.sequence(), 0);
                let wanted = initial.get_or_insert_with(|| {
                    let dir = tempfile::tempdir().unwrap();
                    state(
                        &mut create(DurableDir::open(dir.path(), &IoOptions::default()).unwrap()).unwrap(),
                        &params,
                    )
                });
                assert!(found == *wanted, "cut at {k}");
            }
            Err(error) => {
                assert!(!made, "cut at {k}: {error}");
                let named = matches!(
                    error,
                    OptimError::NoStore { .. } | OptimError::Incomplete { .. } | OptimError::Damaged { .. }
                );
                assert!(named, "cut at {k}: {error}");
            }
        }
        if made {
            return;
        }
    }
}

#[test]
fn a_power_cut_anywhere_in_a_step_leaves_the_state_before_or_after() {
    let fixture = Fixture::new();
    // The record and the names confirmed, 5 chunks of 3 sections, 3 heads, the new record, and a flush for all but the chunks.
    let operations = 3 + 15 + 6 + 2;
    let mut seen = Vec::new();
    // Each once, and many tears of the new record.
    let cuts = (0..=operations).map(|k| (k, k)).chain((0..24).map(|seed| (operations - 1, 100 + seed)));
    let cuts = cuts.flat_map(|(k, seed)| [(k, seed, false), (k, seed, true)]);
    for (k, seed, awaited) in cuts {
        let faults = Faults::new(seed);
        let mut adam = fixture.rewind(&faults);
        faults.cut_at(k);
        // Also where gradients become final while the step runs.
        let step = if awaited { take_awaited_step } else { take_step };
        let done = step(&mut adam, &fixture.params, 3).is_ok();
        drop(adam);
        faults.restart().unwrap();
        let mut adam = fixture.check(&format!("cut at {k}"));
        let at = adam.sequence();
        assert!(if done { at == 3 } else { at == 2 || at == 3 });
        seen.push(at);
        // And training goes on from there as if nothing had been.
        for step in at as usize + 1..=4 {
            take_step(&mut adam, &fixture.params, step).unwrap();
        }
        assert!(state(&mut adam, &fixture.params) == fixture.states[4], "cut at {k}");
        assert_eq!(done, k == operations);
    }
    assert!(seen.contains(&2) && seen.contains(&3));
}

#[test]
fn the_commit_comes_after_every_flush_and_each_slot_is_flushed_once() {
    let fixture = Fixture::new();
    let faults = Faults::new(0);
    let mut adam = fixture.rewind(&faults);
    take_step(&mut adam, &fixture.params, 3).unwrap();
    let before = faults.operations().len();
    take_step(&mut adam, &fixture.params, 4).unwrap();
    let operations = faults.operations().split_off(before);
    let mut flushed: Vec<&str> = operations
        .iter()
        .filter_map(|operation| match operation {
            Operation::SyncData { name } => Some(name.as_str()),
            _ => None,
        })
        .collect();
    // The slots in any order, the record last.
    flushed[..3].sort_unstable();
    let slots = ["bucket-00000.slot-0", "bucket-00001.slot-0", "bucket-00002.slot-0"];
    assert_eq!(flushed, [slots.as_slice(), &["adam.record"]].concat());
    assert!(matches!(
        operations[operations.len() - 2..],
        [Operation::Write { .. }, Operation::SyncData { .. }]
    ));
}

#[test]
fn a_failed_flush_latches_and_what_was_not_flushed_is_never_relied_on() {
    let fixture = Fixture::new();
    // The flushes of a first step after opening: record and names confirmed, three slots, record.
    for nth in 0..6 {
        for k in 0.. {
            let faults = Faults::new(k);
            let mut adam = fixture.rewind(&faults);
            faults.on_sync(nth);
            let failed = take_step(&mut adam, &fixture.params, 3).unwrap_err();
            assert!(matches!(failed, OptimError::Store(_)), "{failed}");
            let refused = take_step(&mut adam, &fixture.params, 3).unwrap_err();
            assert!(matches!(refused, OptimError::Latched { .. }), "{refused}");
            assert!(matches!(adam.read_weights(&mut |_, _, _| {}), Err(OptimError::Latched { .. })));
            drop(adam);
            // The system still shows the bytes that it failed to flush; the same machine opens the store again and goes
            // on, until the power goes.
            let mut adam = open(faulty(fixture.dir.path(), &faults)).unwrap();
            let at = adam.sequence();
            assert!(at == 2 || at == 3);
            assert!(state(&mut adam, &fixture.params) == fixture.states[at as usize]);
            let before = faults.operations().len() as u64;
            faults.cut_at(before + k);
            let done = take_step(&mut adam, &fixture.params, at as usize + 1).is_ok();
            drop(adam);
            faults.restart().unwrap();
            let found = fixture.check(&format!("flush {nth} failed, cut at {k}")).sequence();
            assert!(found >= 2 && (!done || found == at + 1));
            if done {
                break;
            }
        }
    }
}

#[test]
fn a_failed_transfer_abandons_the_step_and_the_weights_can_be_rebuilt() {
    let fixture = Fixture::new();
    for fault in [Fault::Io, Fault::NoSpace] {
        for nth in [1, 7, 15] {
            let faults = Faults::new(nth);
            let mut adam = fixture.rewind(&faults);
            faults.on_write(nth, fault);
            let error = take_step(&mut adam, &fixture.params, 3).unwrap_err();
            assert!(matches!(error, OptimError::Store(_)), "{error}");
            assert!(matches!(take_step(&mut adam, &fixture.params, 3), Err(OptimError::Latched { .. })));
            assert!(state(&mut adam, &fixture.params) == fixture.states[2]);
            // Reading everything cleared the way; the step tried again is the step.
            take_step(&mut adam, &fixture.params, 3).unwrap();
            assert!(state(&mut adam, &fixture.params) == fixture.states[3]);
        }
    }
}

#[test]
fn a_bit_flipped_on_the_way_in_is_an_error_and_not_a_number() {
    let fixture = Fixture::new();
    for nth in 0..15 {
        let faults = Faults::new(nth);
        let mut adam = fixture.rewind(&faults);
        faults.on_read(nth, Fault::FlipBit);
        match take_step(&mut adam, &fixture.params, 3) {
            Err(OptimError::Checksum { .. }) => {
                assert!(state(&mut adam, &fixture.params) == fixture.states[2])
            }
            // The bit was in the padding, which means nothing.
            Ok(()) => assert!(state(&mut adam, &fixture.params) == fixture.states[3]),
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn short_interrupted_and_reordered_requests_change_nothing() {
    let fixture = Fixture::new();
    let faults = Faults::new(5);
    let mut adam = fixture.rewind(&faults);
    faults.rates(200, 100, 100);
    faults.reorder();
    take_step(&mut adam, &fixture.params, 3).unwrap();
    take_step(&mut adam, &fixture.params, 4).unwrap();
    assert!(state(&mut adam, &fixture.params) == fixture.states[4]);
}

#[test]
fn a_disk_that_fills_up_while_a_store_is_made_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::new(0);
    let folder = faulty(dir.path(), &faults);
    faults.space(200_000);
    let error = create(folder).unwrap_err();
    assert!(matches!(error, OptimError::Store(_)), "{error}");
    assert_eq!(files(dir.path()).len(), 0);
}
