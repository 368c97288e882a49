//! Durable files on the build's own file system.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use lazy_store::durable::{AlignedBuf, DurableDir, IoOptions};
use lazy_store::{BackendChoice, Bytes, DirectChoice, StoreError};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn filled(len: u64, byte: impl Fn(usize) -> u8) -> AlignedBuf {
    let mut buffer = AlignedBuf::zeroed(Bytes(len)).unwrap();
    buffer.as_mut_slice().iter_mut().enumerate().for_each(|(i, b)| *b = byte(i));
    buffer
}

#[test]
fn what_is_written_is_read_back_by_every_back_end_and_cache_mode() {
    for backend in [BackendChoice::Uring, BackendChoice::Posix] {
        for direct in [DirectChoice::Auto, DirectChoice::Off] {
            let folder = folder();
            let options = IoOptions { backend, direct, ..IoOptions::default() };
            let dir = DurableDir::open(folder.path(), &options).unwrap();
            let len = (3 << 20) + 2 * dir.alignment() as u64;
            let file = dir.create_file("slot", Bytes(2 * len)).unwrap();
            let pattern = |i: usize| (i * 13 + i / 251) as u8;
            // Both halves, and then both reads, are in flight at once.
            let writes = [file.write_at(0, filled(len, pattern)), file.write_at(len, filled(len, |_| 7))];
            for write in writes {
                write.wait().1.unwrap();
            }
            file.sync_data().unwrap();
            drop(file);
            let file = dir.open_file("slot").unwrap();
            assert_eq!(file.len(), Bytes(2 * len));
            let reads = [len, 0].map(|offset| file.read_at(offset, AlignedBuf::zeroed(Bytes(len)).unwrap()));
            let [second, first] = reads.map(|read| read.wait());
            first.1.unwrap();
            second.1.unwrap();
            assert!(first.0.as_slice() == filled(len, pattern).as_slice(), "{}", dir.mode());
            assert!(second.0.as_slice().iter().all(|&b| b == 7), "{}", dir.mode());
        }
    }
}

#[test]
fn t3_a_file_larger_than_the_disk_leaves_nothing_behind() {
    let folder = folder();
    let dir = DurableDir::open(folder.path(), &IoOptions::default()).unwrap();
    let error = dir.create_file("slot", Bytes(1 << 60)).unwrap_err();
    let StoreError::NoSpace { needed, free, .. } = &error else { panic!("{error}") };
    assert_eq!(*needed, Bytes(1 << 60));
    assert!(*free <= Bytes(1 << 60));
    assert_eq!(dir.list().unwrap(), Vec::<String>::new());
}

#[test]
fn names_are_made_linked_renamed_and_removed_and_never_overwritten() {
    let folder = folder();
    let dir = DurableDir::open(&folder.path().join("new"), &IoOptions::default()).unwrap();
    let len = Bytes(dir.alignment() as u64);
    dir.create_file("a", len).unwrap();
    assert!(matches!(dir.create_file("a", len), Err(StoreError::Exists { .. })));
    let a = dir.path().join("a");
    dir.link(&a, "b").unwrap();
    assert!(matches!(dir.link(&a, "b"), Err(StoreError::Exists { .. })));
    dir.rename("b", "c").unwrap();
    dir.remove("a").unwrap();
    dir.sync().unwrap();
    assert_eq!(dir.list().unwrap(), ["c"]);
    assert!(dir.exists("c").unwrap() && !dir.exists("a").unwrap());
    assert!(dir.open_file("a").is_err());
    for name in ["", ".", "..", "x/y", "../a"] {
        assert!(matches!(dir.create_file(name, len), Err(StoreError::BadName { .. })), "{name}");
    }
    std::os::unix::fs::symlink("c", dir.path().join("trap")).unwrap();
    assert!(dir.open_file("trap").is_err());
    let mode = std::fs::metadata(dir.path()).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777, 0o700);
}

#[test]
fn folders_inside_hold_links_and_files_and_are_renamed_whole() {
    let folder = folder();
    let dir = DurableDir::open(folder.path(), &IoOptions::default()).unwrap();
    dir.lock().unwrap();
    let len = Bytes(dir.alignment() as u64);
    let slot = dir.create_file("slot", len).unwrap();
    assert_eq!(slot.names().unwrap(), 1);
    let inside = dir.create_dir("new.tmp").unwrap();
    assert!(matches!(dir.create_dir("new.tmp"), Err(StoreError::Exists { .. })));
    inside.link(&dir.path().join("slot"), "slot").unwrap();
    inside.create_file("manifest", len).unwrap().write_at(0, filled(len.get(), |_| 3)).wait().1.unwrap();
    inside.sync().unwrap();
    assert_eq!(slot.names().unwrap(), 2);
    dir.rename("new.tmp", "new").unwrap();
    dir.sync().unwrap();
    assert_eq!(dir.list_dirs().unwrap(), ["new"]);
    assert_eq!(dir.list().unwrap(), ["slot"]);
    // The folder's claim lasts as long as anything inside it is open.
    drop((dir, slot, inside));
    let dir = DurableDir::open(folder.path(), &IoOptions::default()).unwrap();
    dir.lock().unwrap();
    let inside = dir.open_dir("new").unwrap();
    let file = inside.open_file("manifest").unwrap();
    drop((dir, inside));
    let again = DurableDir::open(folder.path(), &IoOptions::default()).unwrap();
    assert!(matches!(again.lock(), Err(StoreError::InUse { .. })));
    let (buffer, result) = file.read_at(0, AlignedBuf::zeroed(len).unwrap()).wait();
    result.unwrap();
    assert!(buffer.as_slice().iter().all(|&b| b == 3));
    drop(file);
    again.lock().unwrap();
    let inside = again.open_dir("new").unwrap();
    assert!(again.remove_dir("new").is_err(), "it is not empty");
    inside.remove("manifest").unwrap();
    inside.remove("slot").unwrap();
    again.remove_dir("new").unwrap();
    assert_eq!(again.open_file("slot").unwrap().names().unwrap(), 1);
    std::os::unix::fs::symlink(".", again.path().join("trap")).unwrap();
    assert!(again.open_dir("trap").is_err());
}

#[test]
fn t1_ranges_that_do_not_suit_are_refused_and_give_the_buffer_back() {
    let folder = folder();
    let dir = DurableDir::open(folder.path(), &IoOptions::default()).unwrap();
    let block = dir.alignment() as u64;
    assert!(matches!(dir.create_file("x", Bytes(block + 1)), Err(StoreError::BadRange { .. })));
    let file = dir.create_file("a", Bytes(2 * block)).unwrap();
    for (offset, len) in [(1, block), (0, block - 1), (block, 2 * block), (2 * block, block)] {
        let (buffer, result) = file.write_at(offset, filled(len, |_| 5)).wait();
        assert!(matches!(result, Err(StoreError::BadRange { .. })), "{offset}+{len}");
        assert_eq!(buffer.len() as u64, len);
    }
    drop(file);
    std::fs::OpenOptions::new().write(true).open(dir.path().join("a")).unwrap().set_len(block).unwrap();
    assert_eq!(dir.open_file("a").unwrap().len(), Bytes(block));
}

#[test]
fn t12_a_file_cut_short_behind_our_back_is_an_error_with_the_counts() {
    for backend in [BackendChoice::Uring, BackendChoice::Posix] {
        let folder = folder();
        let dir = DurableDir::open(folder.path(), &IoOptions { backend, ..IoOptions::default() }).unwrap();
        let block = dir.alignment() as u64;
        let file = dir.create_file("a", Bytes(4 * block)).unwrap();
        std::fs::OpenOptions::new().write(true).open(file.path()).unwrap().set_len(block).unwrap();
        let (_, result) = file.read_at(0, AlignedBuf::zeroed(Bytes(4 * block)).unwrap()).wait();
        let error = result.unwrap_err();
        let StoreError::Short { offset: 0, wanted, got, path, .. } = &error else { panic!("{error}") };
        assert_eq!((*wanted, *got), (4 * block, block));
        assert_eq!(path, file.path());
    }
}

#[test]
fn t5_dropping_a_transfer_waits_for_it() {
    let folder = folder();
    let dir = DurableDir::open(folder.path(), &IoOptions { depth: 4, ..IoOptions::default() }).unwrap();
    let block = dir.alignment() as u64;
    let file = dir.create_file("a", Bytes(16 * block)).unwrap();
    for i in 0..2000u64 {
        drop(file.write_at(i % 16 * block, filled(block, |_| i as u8)));
    }
    for i in 0..16u64 {
        let (buffer, result) = file.read_at(i * block, AlignedBuf::zeroed(Bytes(block)).unwrap()).wait();
        result.unwrap();
        assert!(buffer.as_slice().iter().all(|&b| b == (1984 + i) as u8));
    }
}

#[test]
fn of_writes_to_the_same_bytes_the_last_one_started_stays() {
    const BLOCKS: u64 = 64;
    for backend in [BackendChoice::Uring, BackendChoice::Posix] {
        let folder = folder();
        let dir = DurableDir::open(folder.path(), &IoOptions { backend, ..IoOptions::default() }).unwrap();
        let block = dir.alignment() as u64;
        let file = dir.create_file("a", Bytes(BLOCKS * block)).unwrap();
        // The same file by another handle.
        let again = dir.open_file("a").unwrap();
        let mut wanted = vec![0; BLOCKS as usize];
        let mut random = 1_u64;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for round in 0..20 {
            let mut writes = Vec::new();
            for i in 0..50 {
                let first = draw(BLOCKS);
                let count = 1 + draw((BLOCKS - first).min(9));
                let byte = (round * 50 + i) as u8;
                let handle = if draw(2) == 0 { &file } else { &again };
                writes.push(handle.write_at(first * block, filled(count * block, |_| byte)));
                wanted[first as usize..(first + count) as usize].fill(byte);
            }
            writes.into_iter().for_each(|write| write.wait().1.unwrap());
            let (buffer, result) = file.read_at(0, AlignedBuf::zeroed(Bytes(BLOCKS * block)).unwrap()).wait();
            result.unwrap();
            for (i, bytes) in buffer.as_slice().chunks_exact(block as usize).enumerate() {
                assert!(bytes.iter().all(|&b| b == wanted[i]), "block {i}, round {round}, {}", dir.mode());
            }
        }
    }
}

/// T7: more operations than any queue holds.
#[test]
fn t7_hundreds_of_operations_in_flight_wait_for_room_in_the_queue_and_none_is_lost() {
    const OPERATIONS: u64 = 256;
    for backend in [BackendChoice::Uring, BackendChoice::Posix] {
        let folder = folder();
        let dir = DurableDir::open(folder.path(), &IoOptions { backend, ..IoOptions::default() }).unwrap();
        let len = dir.alignment() as u64;
        let file = dir.create_file("a", Bytes(OPERATIONS * len)).unwrap();
        for round in 0..4 {
            let byte = |i: u64| (i * 3 + round) as u8;
            let write = |i| file.write_at(i * len, filled(len, |_| byte(i)));
            let writes: Vec<_> = (0..OPERATIONS).map(write).collect();
            writes.into_iter().for_each(|write| write.wait().1.unwrap());
            let read = |i| file.read_at(i * len, AlignedBuf::zeroed(Bytes(len)).unwrap());
            let reads: Vec<_> = (0..OPERATIONS).map(read).collect();
            for (i, read) in (0..).zip(reads) {
                let (buffer, result) = read.wait();
                result.unwrap();
                assert!(buffer.as_slice().iter().all(|&b| b == byte(i)), "{i}");
            }
        }
    }
}

/// T8: one folder of state, one owner.
#[test]
fn t8_a_claimed_folder_is_refused_until_its_owner_is_gone() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let first = DurableDir::open(dir.path(), &IoOptions::default()).unwrap();
    first.lock().unwrap();
    let second = DurableDir::open(dir.path(), &IoOptions::default()).unwrap();
    let message = second.lock().unwrap_err().to_string();
    assert!(message.contains("in use by another store"), "{message}");
    drop(first);
    second.lock().unwrap();
}
