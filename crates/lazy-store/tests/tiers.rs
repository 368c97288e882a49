//! Three tiers as one store: what is written is what is read, budgets are hard, waits are derived.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::path::Path;
use std::sync::mpsc;

use lazy_store::{
    BackendChoice, Bytes, Extent, Lane, NvmeOptions, QueueOrder, Store, StoreError, StoreOptions, Submission,
    Tier,
};

/// A folder on the file system of the build, which is a real one where /tmp may be tmpfs.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn options(dir: &Path, backend: BackendChoice) -> StoreOptions {
    let nvme = NvmeOptions { backend, ..NvmeOptions::new(dir, Bytes::from_mib(32)) };
    StoreOptions {
        hbm: Bytes::from_mib(64),
        host: Bytes::from_mib(64),
        nvme: Some(nvme),
        poison: true,
        ..StoreOptions::default()
    }
}

fn task<'a>(lane: Lane, name: &str, reads: &'a [&'a Extent], writes: &'a [&'a Extent]) -> Submission<'a> {
    Submission { reads, writes, ..Submission::new(lane, name) }
}

fn put(store: &Store, extent: &Extent, byte: impl Fn(usize) -> u8 + Send + 'static) {
    store
        .submit(task(Lane::Compute, "put", &[], &[extent]), move |access| {
            access.write(0).iter_mut().enumerate().for_each(|(i, b)| *b = byte(i));
            Ok(())
        })
        .unwrap();
}

fn get(store: &Store, extent: &Extent) -> Vec<u8> {
    let (sender, receiver) = mpsc::channel();
    let event = store
        .submit(task(Lane::Compute, "get", &[extent], &[]), move |access| {
            sender.send(access.read(0).to_vec())?;
            Ok(())
        })
        .unwrap();
    event.wait();
    receiver.recv().unwrap()
}

fn round_trip(backend: BackendChoice, bytes: u64) {
    let dir = folder();
    let store = Store::open(options(dir.path(), backend)).unwrap();
    let bytes = Bytes(bytes);
    let pattern = |i: usize| (i * 31 + i / 253) as u8;
    let [hbm, host, nvme] = Tier::ALL.map(|tier| store.reserve(tier, bytes).unwrap());
    let [hbm2, host2] = [Tier::Hbm, Tier::Host].map(|tier| store.reserve(tier, bytes).unwrap());
    put(&store, &hbm, pattern);
    store.copy("down", &hbm, &host, &[]).unwrap();
    store.release(hbm);
    store.copy("spill", &host, &nvme, &[]).unwrap();
    store.release(host);
    store.copy("fetch", &nvme, &host2, &[]).unwrap();
    store.release(nvme);
    store.copy("up", &host2, &hbm2, &[]).unwrap();
    store.release(host2);
    let expected: Vec<u8> = (0..bytes.get() as usize).map(pattern).collect();
    assert!(get(&store, &hbm2) == expected, "{bytes} through {:?}", store.nvme_mode());
    drop(hbm2);
    store.synchronize().unwrap();
    for tier in Tier::ALL {
        assert_eq!(store.live(tier), Bytes::ZERO);
    }
    drop(store);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the spill file is removed");
}

#[test]
fn t1_odd_lengths_come_back_whole() {
    for bytes in [1, 5, 511, 512, 513, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1, 7_203_257] {
        round_trip(BackendChoice::Uring, bytes);
        round_trip(BackendChoice::Posix, bytes);
    }
    round_trip(BackendChoice::Auto, 28_824_000);
}

#[test]
fn t3_a_spill_file_larger_than_the_disk_is_refused_at_open() {
    let dir = folder();
    let mut options = options(dir.path(), BackendChoice::Auto);
    options.nvme.as_mut().unwrap().bytes = Bytes(1 << 60);
    let error = Store::open(options).unwrap_err();
    assert!(
        matches!(&error, StoreError::NoSpace { needed: Bytes(n), free, .. } if *n == 1 << 60 && free.0 > 0)
    );
    assert!(error.to_string().contains("free"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn a_budget_is_a_hard_limit() {
    let store = Store::open(StoreOptions { hbm: Bytes(1000), ..StoreOptions::default() }).unwrap();
    let a = store.reserve(Tier::Hbm, Bytes(600)).unwrap();
    let refused = store.reserve(Tier::Hbm, Bytes(361)).unwrap_err();
    // 600 is padded to the next multiple of 64, 640; 360 remain.
    assert!(matches!(refused, StoreError::OutOfBudget { longest: Bytes(360), live: Bytes(600), .. }));
    assert!(store.reserve(Tier::Hbm, Bytes(360)).is_ok());
    assert!(matches!(store.reserve_at(Tier::Hbm, 512, Bytes(1)), Err(StoreError::Overlap { .. })));
    assert!(matches!(store.reserve_at(Tier::Hbm, 960, Bytes(41)), Err(StoreError::OutsideBudget { .. })));
    assert!(matches!(store.reserve_at(Tier::Hbm, 650, Bytes(1)), Err(StoreError::Misaligned { .. })));
    assert!(matches!(store.reserve(Tier::Nvme, Bytes(1)), Err(StoreError::NoNvme)));
    assert!(matches!(store.reserve(Tier::Host, Bytes(1)), Err(StoreError::OutOfBudget { .. })));
    assert_eq!(store.live(Tier::Hbm), Bytes(600));
    assert_eq!(store.peak(Tier::Hbm), Bytes(960));
    drop(a);
    assert_eq!(store.live(Tier::Hbm), Bytes::ZERO);
}

#[test]
fn r2_reading_what_nothing_wrote_names_the_task() {
    let store = Store::open(StoreOptions { hbm: Bytes(4096), ..StoreOptions::default() }).unwrap();
    let extent = store.reserve(Tier::Hbm, Bytes(64)).unwrap();
    let error = store.submit(task(Lane::Compute, "forward 3", &[&extent], &[]), |_| Ok(())).unwrap_err();
    assert!(error.to_string().contains("forward 3"), "{error}");
}

#[test]
fn a_failure_is_reported_once_and_the_store_goes_on() {
    for order in [QueueOrder::Threads, QueueOrder::Seeded(5)] {
        let options = StoreOptions { hbm: Bytes(4096), host: Bytes(4096), order, ..StoreOptions::default() };
        let store = Store::open(options).unwrap();
        let extent = store.reserve(Tier::Hbm, Bytes(64)).unwrap();
        let kept = store.reserve(Tier::Hbm, Bytes(64)).unwrap();
        let host = store.reserve(Tier::Host, Bytes(64)).unwrap();
        put(&store, &kept, |_| 9);
        store.submit(task(Lane::Compute, "bad layer", &[], &[&extent]), |_| panic!("overflow")).unwrap();
        let later = store.copy("down", &extent, &host, &[]).unwrap();
        later.wait();
        assert!(later.is_done());
        let error = store.synchronize().unwrap_err();
        assert_eq!(error.to_string(), "task `bad layer` on lane compute panicked: overflow");
        assert!(store.synchronize().is_ok());
        // What the failed task and its followers should have written is not there to be read.
        assert!(!extent.is_written() && !host.is_written() && kept.is_written());
        assert_eq!(get(&store, &kept), [9; 64]);
        assert_eq!(store.live(Tier::Hbm), Bytes(128));
        put(&store, &extent, |_| 3);
        assert_eq!(get(&store, &extent), [3; 64]);
    }
}

#[test]
fn an_in_place_update_sees_what_it_updates() {
    let store =
        Store::open(StoreOptions { hbm: Bytes(4096), poison: true, ..StoreOptions::default() }).unwrap();
    let sum = store.reserve(Tier::Hbm, Bytes(8)).unwrap();
    let term = store.reserve(Tier::Hbm, Bytes(8)).unwrap();
    put(&store, &sum, |_| 1);
    put(&store, &term, |_| 2);
    for _ in 0..3 {
        store
            .submit(task(Lane::Compute, "add", &[&term, &sum], &[&sum]), |access| {
                let (mut reads, mut writes) = access.split();
                assert_eq!((reads.len(), writes.len()), (2, 1));
                let (t, s) = (reads.next().unwrap(), writes.next().unwrap());
                assert!(reads.next().unwrap().is_empty());
                s.iter_mut().zip(t).for_each(|(s, t)| *s += t);
                Ok(())
            })
            .unwrap();
    }
    assert_eq!(get(&store, &sum), [7; 8]);
    let twice = store.submit(task(Lane::Compute, "twice", &[], &[&sum, &sum]), |_| Ok(())).unwrap_err();
    assert!(matches!(twice, StoreError::WrittenTwice { .. }));
}

#[test]
fn an_extent_is_overwritten_and_filled_and_says_what_does_not_fit() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (hbm, host) = (Bytes(4096), Bytes(4096));
    let nvme = Some(NvmeOptions::new(dir.path(), Bytes(8192)));
    let store = Store::open(StoreOptions { hbm, host, nvme, ..StoreOptions::default() }).unwrap();
    for tier in Tier::ALL {
        let extent = store.put("first", tier, vec![1; 100]).unwrap();
        store.overwrite("second", &extent, vec![2; 100]).unwrap();
        assert_eq!(store.get(&extent).unwrap(), [2; 100]);
        assert!(matches!(store.overwrite("long", &extent, vec![3; 101]), Err(StoreError::CopyLength { .. })));
        match tier {
            Tier::Nvme => assert!(store.fill("zero", Lane::Compute, &extent, 0).is_err()),
            _ => {
                store.fill("seven", Lane::Compute, &extent, 7).unwrap();
                assert_eq!(store.get(&extent).unwrap(), [7; 100]);
            }
        }
    }
}
