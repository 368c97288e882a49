//! The transfer loop and durable files under faults, on the build's own file system.

use std::path::PathBuf;

use lazy_model::Bytes;

use super::{Fault, Faults, Operation};
use crate::durable::{AlignedBuf, DurableDir, DurableFile, IoOptions, Pending};
use crate::error::StoreError;
use crate::options::{BackendChoice, Checksum, DirectChoice, NvmeOptions, StoreOptions};
use crate::{Lane, Store, Submission, Tier};

const LEN: u64 = 3 << 20;

/// A folder beside the test's own program, which is on a real file system where /tmp may be tmpfs.
fn folder() -> tempfile::TempDir {
    let program = std::env::current_exe().unwrap();
    tempfile::tempdir_in(program.parent().unwrap()).unwrap()
}

fn filled(len: u64, seed: usize) -> AlignedBuf {
    let mut buffer = AlignedBuf::zeroed(Bytes(len)).unwrap();
    buffer.as_mut_slice().iter_mut().enumerate().for_each(|(i, b)| *b = (i * 17 + i / 255 + seed) as u8);
    buffer
}

fn write(file: &DurableFile, seed: usize) -> Result<(), StoreError> {
    file.write_at(0, filled(LEN, seed)).wait().1
}

fn read(file: &DurableFile) -> Result<AlignedBuf, StoreError> {
    let (buffer, result) = file.read_at(0, AlignedBuf::zeroed(Bytes(LEN)).unwrap()).wait();
    result.map(|()| buffer)
}

fn is(buffer: &AlignedBuf, seed: usize) -> bool {
    buffer.as_slice() == filled(LEN, seed).as_slice()
}

/// Runs `check` with a file for each back end and cache mode.
fn with_file(check: impl Fn(&Faults, &DurableFile)) {
    for backend in [BackendChoice::Uring, BackendChoice::Posix] {
        for direct in [DirectChoice::Auto, DirectChoice::Off] {
            let (folder, faults) = (folder(), Faults::new(1));
            let options = IoOptions { backend, direct, depth: 8 };
            let dir = DurableDir::open_with_faults(folder.path(), &options, &faults).unwrap();
            check(&faults, &dir.create_file("a", Bytes(LEN)).unwrap());
        }
    }
}

#[test]
fn t12_short_counts_and_interruptions_are_continued() {
    with_file(|faults, file| {
        let script = [
            Fault::Short(1),
            Fault::Short(511),
            Fault::Short(512),
            Fault::Short((1 << 20) - 1),
            Fault::Interrupted,
        ];
        for (nth, fault) in script.into_iter().chain([Fault::Again]).enumerate() {
            faults.on_write(nth as u64, fault);
            faults.on_read(nth as u64, fault);
        }
        write(file, 1).unwrap();
        assert!(is(&read(file).unwrap(), 1));
        faults.rates(300, 100, 100);
        faults.reorder();
        for seed in 2..4 {
            write(file, seed).unwrap();
            assert!(is(&read(file).unwrap(), seed));
        }
    });
}

#[test]
fn t12_zero_bytes_before_the_end_is_an_error_with_offset_wanted_and_got() {
    with_file(|faults, file| {
        faults.on_read(1, Fault::Short(0));
        let error = read(file).unwrap_err();
        let StoreError::Short { op: "read", offset, wanted, got: 0, .. } = error else { panic!("{error}") };
        assert_eq!((offset, wanted), (1 << 20, 1 << 20));
        // The next transfer is not disturbed by what was in flight.
        write(file, 3).unwrap();
        assert!(is(&read(file).unwrap(), 3));
    });
}

#[test]
fn t12_a_device_without_progress_is_given_up() {
    with_file(|faults, file| {
        faults.rates(0, 0, 1000);
        let error = write(file, 1).unwrap_err();
        assert!(matches!(error, StoreError::Io { op: "write", .. }), "{error}");
    });
}

#[test]
fn t3_a_disk_that_fills_up_fails_the_write() {
    with_file(|faults, file| {
        faults.space((2 << 20) + 4096);
        let error = write(file, 1).unwrap_err();
        // What is left of the transfer, and what the file system says; the latter is a full disk's only in this double.
        let StoreError::NoSpace { needed, free, .. } = &error else { panic!("{error}") };
        assert!(
            *needed >= Bytes(4096) && *needed <= Bytes(LEN - (2 << 20)) && *free > Bytes::ZERO,
            "{error}"
        );
    });
}

#[test]
fn a_device_error_names_the_request() {
    with_file(|faults, file| {
        faults.on_write(2, Fault::Io);
        let error = write(file, 1).unwrap_err();
        assert!(matches!(error, StoreError::Io { op: "write", offset: 2_097_152, .. }), "{error}");
    });
}

#[test]
fn a_flipped_bit_is_one_bit() {
    with_file(|faults, file| {
        write(file, 1).unwrap();
        faults.on_read(1, Fault::FlipBit);
        let flipped = read(file).unwrap();
        let bits: u32 =
            flipped.as_slice().iter().zip(filled(LEN, 1).as_slice()).map(|(a, b)| (a ^ b).count_ones()).sum();
        assert_eq!(bits, 1);
    });
}

#[test]
fn t15_a_failed_flush_is_not_tried_again_and_its_bytes_are_gone() {
    for seed in 0..4 {
        let (folder, faults) = (folder(), Faults::new(seed));
        let dir = DurableDir::open_with_faults(folder.path(), &IoOptions::default(), &faults).unwrap();
        let file = dir.create_file("a", Bytes(LEN)).unwrap();
        dir.sync().unwrap();
        write(&file, 1).unwrap();
        file.sync_data().unwrap();
        write(&file, 2).unwrap();
        faults.on_sync(0);
        assert!(matches!(file.sync_data(), Err(StoreError::File { .. })));
        assert!(matches!(file.sync_data(), Err(StoreError::SyncFailed { .. })));
        // Even a handle that knows nothing of it cannot bring them back.
        let again = dir.open_file("a").unwrap();
        again.sync_data().unwrap();
        drop((file, again, dir));
        faults.restart().unwrap();
        let dir = DurableDir::open(folder.path(), &IoOptions::default()).unwrap();
        assert!(is(&read(&dir.open_file("a").unwrap()).unwrap(), 1));
    }
}

#[test]
fn what_is_flushed_over_lost_bytes_stays() {
    for seed in 0..4 {
        let (folder, faults) = (folder(), Faults::new(seed));
        let dir = DurableDir::open_with_faults(folder.path(), &IoOptions::default(), &faults).unwrap();
        let file = dir.create_file("a", Bytes(LEN)).unwrap();
        dir.sync().unwrap();
        write(&file, 1).unwrap();
        faults.on_sync(0);
        assert!(file.sync_data().is_err());
        let again = dir.open_file("a").unwrap();
        write(&again, 2).unwrap();
        again.sync_data().unwrap();
        drop((file, again, dir));
        faults.restart().unwrap();
        let dir = DurableDir::open(folder.path(), &IoOptions::default()).unwrap();
        assert!(is(&read(&dir.open_file("a").unwrap()).unwrap(), 2));
    }
}

/// Writes generation 2 to a new file, flushes it and puts it in the place of generation 1.
fn replace(dir: &DurableDir) -> Result<(), StoreError> {
    let new = dir.create_file("new", Bytes(LEN))?;
    write(&new, 2)?;
    new.sync_data()?;
    dir.rename("new", "current")?;
    dir.sync()
}

/// State after a power cut at operation `k` of `job`: the folder's names, and which generation `current` holds.
fn after_cut(
    k: u64,
    job: impl Fn(&DurableDir) -> Result<(), StoreError>,
) -> (bool, Vec<String>, Option<usize>) {
    let folder = folder();
    let path: PathBuf = folder.path().to_owned();
    let dir = DurableDir::open(&path, &IoOptions::default()).unwrap();
    write(&dir.create_file("current", Bytes(LEN)).unwrap(), 1).unwrap();
    drop(dir);
    let faults = Faults::new(k);
    faults.cut_at(k);
    let dir = DurableDir::open_with_faults(&path, &IoOptions::default(), &faults).unwrap();
    let finished = job(&dir).is_ok();
    drop(dir);
    assert_eq!(finished, !faults.power_is_off());
    faults.restart().unwrap();
    let dir = DurableDir::open(&path, &IoOptions::default()).unwrap();
    let current = read(&dir.open_file("current").unwrap()).unwrap();
    (finished, dir.list().unwrap(), [1, 2].into_iter().find(|&seed| is(&current, seed)))
}

#[test]
fn a_power_cut_at_every_operation_leaves_the_old_file_or_the_new_one() {
    let mut seen = Vec::new();
    for k in 0.. {
        let (finished, names, current) = after_cut(k, replace);
        assert!(current.is_some(), "cut at {k}: a mix");
        assert!(names.iter().all(|n| n == "current" || n == "new"), "{names:?}");
        seen.push(current);
        if finished {
            assert_eq!((current, names), (Some(2), vec!["current".to_owned()]));
            // Create, three requests of 1 MiB, flush, rename, flush of the folder.
            assert_eq!(k, 7);
            break;
        }
    }
    assert!(seen.contains(&Some(1)));
}

#[test]
fn a_power_cut_shows_a_missing_flush() {
    let careless = |dir: &DurableDir| {
        let new = dir.create_file("new", Bytes(LEN))?;
        write(&new, 2)?;
        dir.rename("new", "current")?;
        dir.sync()
    };
    // Six operations: with the seventh the job has finished, and still its bytes are at the mercy of the cut.
    let mixes = (0..10).map(|seed| {
        let (finished, _, current) = after_cut(1000 + seed, careless);
        assert!(finished);
        current
    });
    assert!(mixes.into_iter().any(|current| current.is_none()));
}

#[test]
fn operations_are_listed_in_order() {
    let (folder, faults) = (folder(), Faults::new(0));
    let dir = DurableDir::open_with_faults(folder.path(), &IoOptions::default(), &faults).unwrap();
    write(&dir.create_file("current", Bytes(LEN)).unwrap(), 1).unwrap();
    replace(&dir).unwrap();
    let operations = faults.operations();
    assert_eq!(operations.len(), 4 + 7);
    assert_eq!(operations[0], Operation::Create { name: "current".into() });
    assert_eq!(operations[8], Operation::SyncData { name: "new".into() });
    assert_eq!(operations[9], Operation::Rename { from: "new".into(), to: "current".into() });
    assert_eq!(operations[10], Operation::SyncDir);
}

/// Files of 16 blocks of one request each, for each back end.
fn with_blocks(check: impl Fn(&Faults, &DurableFile, u64)) {
    for backend in [BackendChoice::Uring, BackendChoice::Posix] {
        let (folder, faults) = (folder(), Faults::new(1));
        let options = IoOptions { backend, depth: 8, ..IoOptions::default() };
        let dir = DurableDir::open_with_faults(folder.path(), &options, &faults).unwrap();
        let block = dir.alignment() as u64;
        check(&faults, &dir.create_file("a", Bytes(16 * block)).unwrap(), block);
    }
}

#[test]
fn transfers_of_one_file_are_under_way_together_in_each_direction() {
    with_blocks(|faults, file, block| {
        let write = |i: u64| file.write_at(i * block, filled(block, i as usize));
        let read = |i: u64| file.read_at(i * block, AlignedBuf::zeroed(Bytes(block)).unwrap());
        for start in [&write as &dyn Fn(u64) -> Pending, &read] {
            faults.reset(1);
            // A worker may be done with each transfer before it is given the next one, but not every time.
            for _ in 0..10_000 {
                let pending: Vec<_> = (0..16).map(start).collect();
                for (i, one) in pending.into_iter().enumerate() {
                    let (buffer, result) = one.wait();
                    result.unwrap();
                    assert!(buffer.as_slice() == filled(block, i).as_slice(), "block {i}");
                }
                if faults.most_in_flight() > 1 {
                    break;
                }
            }
            assert!((2..=8).contains(&faults.most_in_flight()), "{}", faults.most_in_flight());
        }
    });
}

#[test]
fn one_failure_among_transfers_under_way_together_is_its_own() {
    with_blocks(|faults, file, block| {
        faults.reorder();
        for failing in 0..16 {
            faults.on_write(failing, Fault::Io);
            let writes: Vec<_> = (0..16).map(|i| file.write_at(i * block, filled(block, 7))).collect();
            let failed = writes.into_iter().map(|one| one.wait()).filter(|(buffer, result)| {
                assert!(buffer.as_slice() == filled(block, 7).as_slice());
                matches!(result, Err(StoreError::Io { .. }))
            });
            assert_eq!(failed.count(), 1);
        }
    });
}

#[test]
fn t5_t12_transfers_under_way_together_survive_short_late_and_interrupted_requests() {
    with_file(|faults, file| {
        faults.rates(300, 100, 200);
        faults.reorder();
        let len = LEN / 8;
        for round in 0..4 {
            let seed = |i: u64| i as usize * 3 + round;
            let start = |i| file.write_at(i * len, filled(len, seed(i)));
            let writes: Vec<_> = (0..8).map(start).collect();
            // Reads of what lies there, which may be old or new, at the same time.
            let start = |i| file.read_at(i * len, AlignedBuf::zeroed(Bytes(len)).unwrap());
            let reads: Vec<_> = (0..8).map(start).collect();
            reads.into_iter().for_each(|read| read.wait().1.unwrap());
            writes.into_iter().for_each(|write| write.wait().1.unwrap());
            let reads: Vec<_> = (0..8).map(start).collect();
            for (i, read) in (0..).zip(reads) {
                let (buffer, result) = read.wait();
                result.unwrap();
                assert!(buffer.as_slice() == filled(len, seed(i)).as_slice(), "part {i}, round {round}");
            }
        }
    });
}

/// Makes a folder with a link and a file in it under a temporary name and moves it into place; each flush can be left out.
fn publish(dir: &DurableDir, flush: [bool; 3]) -> Result<(), StoreError> {
    let inside = dir.create_dir("new.tmp")?;
    inside.link(&dir.path().join("slot"), "slot")?;
    let marker = inside.create_file("marker", Bytes(4096))?;
    let mut ones = AlignedBuf::zeroed(Bytes(4096))?;
    ones.as_mut_slice().fill(1);
    marker.write_at(0, ones).wait().1?;
    if flush[0] {
        marker.sync_data()?;
    }
    if flush[1] {
        inside.sync()?;
    }
    dir.rename("new.tmp", "new")?;
    if flush[2] { dir.sync() } else { Ok(()) }
}

/// Whether some power cut after `publish` leaves a folder in place that is not whole, or none at all where it said it was done.
fn a_cut_shows(flush: [bool; 3]) -> bool {
    let options = IoOptions { backend: BackendChoice::Posix, direct: DirectChoice::Off, depth: 1 };
    (0..8).any(|k| {
        (0..6).any(|seed| {
            let (folder, faults) = (folder(), Faults::new(seed));
            let dir = DurableDir::open_with_faults(folder.path(), &options, &faults).unwrap();
            dir.create_file("slot", Bytes(4096)).unwrap();
            dir.sync().unwrap();
            faults.cut_at(2 + k);
            let done = publish(&dir, flush).is_ok();
            drop(dir);
            faults.restart().unwrap();
            assert!(folder.path().join("slot").exists());
            let new = folder.path().join("new");
            let whole = new.join("slot").exists()
                && std::fs::read(new.join("marker")).is_ok_and(|marker| marker == [1; 4096]);
            !whole && (done || new.exists())
        })
    })
}

#[test]
fn o3_a_folder_moved_into_place_is_whole_after_any_cut_if_all_was_flushed_before() {
    assert!(!a_cut_shows([true; 3]));
    for left_out in 0..3 {
        let mut flush = [true; 3];
        flush[left_out] = false;
        assert!(a_cut_shows(flush), "nobody would miss flush {left_out}");
    }
}

#[test]
fn removing_a_folder_is_undone_in_part_or_not_at_all() {
    for (k, left) in [(0, 1..2), (1, 1..2), (2, 0..2), (3, 0..1)] {
        for seed in 0..8 {
            let (folder, faults) = (folder(), Faults::new(seed));
            let dir = DurableDir::open_with_faults(folder.path(), &IoOptions::default(), &faults).unwrap();
            let inside = dir.create_dir("old").unwrap();
            inside.create_file("a", Bytes(4096)).unwrap();
            inside.sync().unwrap();
            dir.sync().unwrap();
            faults.cut_at(4 + k);
            let remove = || {
                dir.rename("old", "old.tmp")?;
                inside.remove("a")?;
                dir.remove_dir("old.tmp")
            };
            assert_eq!(remove().is_ok(), k == 3);
            drop((inside, dir));
            faults.restart().unwrap();
            let names = |name: &str| folder.path().join(name).join("a").exists();
            let found = usize::from(names("old")) + usize::from(names("old.tmp"));
            assert!(left.contains(&found), "cut at {k}, seed {seed}");
            assert!(!folder.path().join(".stash").exists());
        }
    }
}

#[test]
fn t3_a_full_disk_takes_no_new_names_and_no_writes_but_removes_and_flushes() {
    let (folder, faults) = (folder(), Faults::new(0));
    let dir = DurableDir::open_with_faults(folder.path(), &IoOptions::default(), &faults).unwrap();
    let file = dir.create_file("a", Bytes(4096)).unwrap();
    faults.full_from(2);
    dir.sync().unwrap();
    assert!(dir.create_file("b", Bytes(4096)).is_err());
    assert!(dir.create_dir("c").is_err());
    assert!(dir.link(&folder.path().join("a"), "d").is_err());
    let written = file.write_at(0, AlignedBuf::zeroed(Bytes(4096)).unwrap()).wait().1;
    assert!(matches!(written, Err(StoreError::NoSpace { .. })));
    file.sync_data().unwrap();
    dir.remove("a").unwrap();
    assert_eq!(dir.list().unwrap(), Vec::<String>::new());
}

/// A store whose spill file goes through `faults`.
fn spilling(dir: &std::path::Path, faults: &Faults) -> Store {
    let nvme = NvmeOptions::new(dir, Bytes::from_mib(16));
    let options = StoreOptions { host: Bytes::from_mib(16), nvme: Some(nvme), ..StoreOptions::default() };
    Store::open_with_faults(options, faults).unwrap()
}

/// [`spilling`], with checksums.
fn checked(dirs: &[&std::path::Path], faults: &Faults) -> Store {
    let dirs = dirs.iter().map(|dir| (*dir).to_owned()).collect();
    let checksum = Checksum::Crc32c;
    let nvme = NvmeOptions { dirs, checksum, ..NvmeOptions::new("", Bytes::from_mib(16)) };
    let options = StoreOptions { host: Bytes::from_mib(16), nvme: Some(nvme), ..StoreOptions::default() };
    Store::open_with_faults(options, faults).unwrap()
}

/// Sends bytes to the spill file and back, and compares them.
fn there_and_back(store: &Store, bytes: u64) -> Result<(), StoreError> {
    let [out, back] = [(); 2].map(|()| store.reserve(Tier::Host, Bytes(bytes)).unwrap());
    let spilled = store.reserve(Tier::Nvme, Bytes(bytes))?;
    store.submit(Submission { writes: &[&out], ..Submission::new(Lane::Compute, "fill") }, |access| {
        access.write(0).iter_mut().enumerate().for_each(|(i, b)| *b = (i * 3 + i / 254) as u8);
        Ok(())
    })?;
    store.copy("boundary 4 out", &out, &spilled, &[])?;
    store.copy("boundary 4 in", &spilled, &back, &[])?;
    let compare = Submission { reads: &[&out, &back], ..Submission::new(Lane::Compute, "compare") };
    store.submit(compare, |access| {
        if access.read(0) == access.read(1) { Ok(()) } else { Err("the bytes differ".into()) }
    })?;
    drop((out, spilled, back));
    store.synchronize()
}

#[test]
fn t5_t12_spilled_bytes_survive_short_late_and_interrupted_requests() {
    for seed in 0..3 {
        let (folder, faults) = (folder(), Faults::new(seed));
        let store = spilling(folder.path(), &faults);
        faults.rates(300, 100, 200);
        faults.reorder();
        for bytes in [5, 4097, 5_000_001] {
            there_and_back(&store, bytes).unwrap();
        }
    }
}

#[test]
fn t1_t3_a_failed_spill_is_an_error_at_the_write_and_the_store_goes_on() {
    let (folder, faults) = (folder(), Faults::new(0));
    let store = spilling(folder.path(), &faults);
    for fault in [Fault::Io, Fault::NoSpace, Fault::Short(0)] {
        faults.on_write(1, fault);
        let error = there_and_back(&store, LEN).unwrap_err();
        let StoreError::Task { task, lane: Lane::NvmeWrite, source } = &error else { panic!("{error}") };
        assert_eq!(task, "boundary 4 out");
        assert!(source.to_string().contains(folder.path().to_str().unwrap()), "{source}");
        assert!(Tier::ALL.iter().all(|&tier| store.live(tier) == Bytes::ZERO));
        there_and_back(&store, LEN).unwrap();
    }
}

#[test]
fn t1_t14_a_flipped_bit_is_found_in_every_piece_and_named() {
    let (folder, other) = (folder(), folder());
    for dirs in [&[folder.path()][..], &[folder.path(), other.path()]] {
        let faults = Faults::new(3);
        let store = checked(dirs, &faults);
        let before = store.reserve(Tier::Nvme, Bytes(4096)).unwrap();
        // Four requests, without padding that a bit could hide in.
        let bytes = LEN + (1 << 19);
        for bit in 0..4 {
            faults.on_read(bit, Fault::FlipBit);
            let error = there_and_back(&store, bytes).unwrap_err();
            let StoreError::Task { source, task, .. } = &error else { panic!("{error}") };
            assert_eq!(task, "boundary 4 in");
            let corrupt = source.downcast_ref::<StoreError>();
            let Some(StoreError::Corrupt { path, extent: 4096, bytes: piece, wanted, got, .. }) = corrupt
            else {
                panic!("{error}")
            };
            assert!(
                dirs.iter().any(|dir| path.starts_with(dir)) && *piece <= Bytes(1 << 20) && wanted != got
            );
            there_and_back(&store, bytes).unwrap();
        }
        drop(before);
        // Without checksums the same bit goes unseen: it is found by the comparison alone.
        let unchecked = spilling(dirs[0], &faults);
        faults.on_read(0, Fault::FlipBit);
        let error = there_and_back(&unchecked, bytes).unwrap_err();
        assert!(error.to_string().contains("the bytes differ"), "{error}");
    }
}

#[test]
fn t12_several_drives_and_staging_survive_short_late_and_interrupted_requests() {
    let (first, second) = (folder(), folder());
    for seed in 0..3 {
        let faults = Faults::new(seed);
        let store = checked(&[first.path(), second.path()], &faults);
        faults.rates(300, 100, 200);
        faults.reorder();
        for bytes in [5, 4097, 5_000_001] {
            there_and_back(&store, bytes).unwrap();
        }
    }
}

#[test]
fn t3_a_failure_among_transfers_under_way_at_once_voids_it_and_what_follows() {
    let (folder, faults) = (folder(), Faults::new(0));
    let store = spilling(folder.path(), &faults);
    let reserve = |tier| store.reserve(tier, Bytes(1 << 16)).unwrap();
    for nth in [0, 3, 7] {
        let host: Vec<_> = (0..8).map(|_| reserve(Tier::Host)).collect();
        let nvme: Vec<_> = (0..8).map(|_| reserve(Tier::Nvme)).collect();
        for extent in &host {
            let fill = Submission { writes: &[extent], ..Submission::new(Lane::Compute, "fill") };
            store
                .submit(fill, |access| {
                    access.write(0).fill(7);
                    Ok(())
                })
                .unwrap();
        }
        store.synchronize().unwrap();
        faults.on_write(nth, Fault::Io);
        for (i, (from, to)) in host.iter().zip(&nvme).enumerate() {
            store.copy(format!("boundary {i} out"), from, to, &[]).unwrap();
        }
        let error = store.synchronize().unwrap_err();
        assert!(error.to_string().starts_with(&format!("task `boundary {nth} out`")), "{error}");
        // What came before is there; what came after counts as never written, whether it was under way or not.
        let written: Vec<bool> = nvme.iter().map(|extent| extent.is_written()).collect();
        assert_eq!(written, (0..8).map(|i| i < nth).collect::<Vec<_>>());
    }
    there_and_back(&store, LEN).unwrap();
}
